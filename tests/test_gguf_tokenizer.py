"""Tokenizers rebuilt from GGUF metadata and from SentencePiece models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from octavo.text.pretokenizers import KINDS
from octavo.text.sentencepiece import read_model
from octavo.text.tokenizer import _BYTES, load_tokenizer
from octavo.weights.spec import CheckpointError
from tests.test_tokenizer import DATA, cases

BYTE_CHARACTERS = [char for char, _ in sorted(_BYTES.items(), key=lambda item: item[1])]
MERGED = ["12", "123", "1234", "'S", "Ġ1"]
SPECIAL = ["<bos>", "<|eot_id|>", "<end>", "<user>"]
BOS, EOT, END, USER = range(261, 265)


def write_vocabulary(path: Path, pre: str, change: Callable[[gguf.GGUFWriter], None] = lambda w: None) -> Path:
    """A byte-level vocabulary: token i is byte i, then a few merges, then special tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*BYTE_CHARACTERS, *MERGED, *SPECIAL])
    writer.add_token_types([1] * (256 + len(MERGED)) + [3, 3, 3, 4])
    writer.add_token_merges(["1 2", "12 3", "123 4", "' S", "Ġ 1"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("gpt-2", "a'S 1", ["a", "'", "S", "Ġ1"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("smollm", " 1", ["Ġ", "1"]),
        ("llama-bpe", "1234", ["<bos>", "123", "4"]),
        ("llama-bpe", "a'S 1", ["<bos>", "a", "'S", "Ġ", "1"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "a'S<user>", ["a", "'S", "<user>"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed first
        ("gpt-2", "e\u0301", ["e", "Ì", "ģ"]),
        ("tekken", "1234", ["<bos>", "1", "2", "3", "4"]),
        ("deepseek-v3", "1234", ["123", "4"]),
        ("deepseek-llm", "1234", ["1", "2", "3", "4"]),
        ("falcon", "1234", ["123", "4"]),
        ("falcon", " 1", ["Ġ", "1"]),
        ("default", "1234", ["123", "4"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", pre))
    assert [tokenizer.id_to_token(token) for token in tokenizer.encode(text)] == pieces


def test_gguf_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", "llama-bpe"))
    assert tokenizer.eos_ids == {EOT, END}  # the end of turn is known by its name
    assert tokenizer.special_ids == {BOS, EOT, END}
    assert tokenizer.decode([BOS, USER, END]) == "<user>"
    assert tokenizer.special_token_names == {"bos_token": "<bos>", "eos_token": "<end>"}

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(False)
        writer.add_eot_token_id(USER)
        writer.add_chat_template("{{ bos_token }}")

    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "b.gguf", "llama-bpe", change))
    assert tokenizer.eos_ids == {END, USER} and tokenizer.encode("a") == [ord("a")]
    assert tokenizer.chat_template == "{{ bos_token }}"


@pytest.mark.parametrize("key", ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"])
def test_flags_are_true_or_false(tmp_path: Path, key: str) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", "llama-bpe", lambda writer: writer.add_string(key, "no"))
    with pytest.raises(CheckpointError, match=f"metadata '{key}' must be true or false; found 'no'"):
        load_tokenizer(path)


PLAIN = 256 + len(MERGED)


@pytest.mark.parametrize(("rows", "refused"), [(PLAIN - 1, True), (PLAIN, False), (500, False)])
def test_tokens_that_the_model_has_not(tmp_path: Path, rows: int, refused: bool) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("token_embd.weight", np.zeros((rows, 32), np.float32))

    path = write_vocabulary(tmp_path / "v.gguf", "gpt-2", change)
    if refused:
        with pytest.raises(CheckpointError, match=f"with id {rows}, and the model's vocab_size is {rows}"):
            load_tokenizer(path)
    else:
        assert bool(load_tokenizer(path).notices) == (rows < 500)


def change_to_t5(writer: gguf.GGUFWriter) -> None:
    add(writer, "tokenizer.ggml.model", "t5")
    writer.add_token_scores([0.0] * (END + 2))


def add_no_end(writer: gguf.GGUFWriter) -> None:
    for values in writer.kv_data:
        values.pop("tokenizer.ggml.eos_token_id", None)
    writer.add_add_eos_token(True)


GGUF_FAULTS: dict[str, tuple[str, Callable[[gguf.GGUFWriter], None], str]] = {
    "pre-tokenizer": (
        "superbpe",
        lambda w: None,
        "pre-tokenizer 'superbpe' .* is not supported; supported: gpt-2, .*falcon",
    ),
    "model": (
        "gpt-2",
        lambda w: add(w, "tokenizer.ggml.model", "rwkv"),
        "tokenizer model 'rwkv' is not supported; supported: gpt2, ",
    ),
    "types": ("gpt-2", lambda w: add(w, "tokenizer.ggml.token_type", [1, 2]), "265 tokens but 2 token types"),
    "type": ("gpt-2", lambda w: add(w, "tokenizer.ggml.token_type", 5), "token_type must be a list; found 5"),
    "pre-tokenizers": (
        "gpt-2",
        lambda w: add(w, "tokenizer.ggml.pre", [1]),
        r"pre-tokenizer \[1\] .* is not supported",
    ),
    "merges": ("gpt-2", lambda w: add(w, "tokenizer.ggml.merges", ["nope nope"]), "merges do not fit"),
    "no merges": ("gpt-2", lambda w: add(w, "tokenizer.ggml.merges", 5), "merges' is missing or no list of strings"),
    "no unknown": ("gpt-2", lambda w: add(w, "tokenizer.ggml.model", "bert"), "unknown_token_id is missing"),
    "no unknown piece": ("gpt-2", change_to_t5, "a unigram vocabulary needs an unknown token"),
    "end": ("gpt-2", add_no_end, "asks for a EOS token but names none"),
    "no scores": ("gpt-2", lambda w: add(w, "tokenizer.ggml.model", "llama"), "scores is missing"),
    "eos": ("gpt-2", lambda w: add(w, "tokenizer.ggml.eos_token_id", 999), "eos_token_id 999 is outside of the 265"),
}


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Set a value, also over one that was set before."""
    for values in writer.kv_data:
        values.pop(key, None)
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


@pytest.mark.parametrize("fault", sorted(GGUF_FAULTS))
def test_gguf_tokenizers_that_are_refused(tmp_path: Path, fault: str) -> None:
    pre, change, message = GGUF_FAULTS[fault]
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(write_vocabulary(tmp_path / "v.gguf", pre, change))
    assert str(tmp_path / "v.gguf") in str(caught.value) and "\n" not in str(caught.value)


ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = {
    "llama-bpe": [ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "qwen2": [ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + ENDINGS + "?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + ENDINGS + "?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        r"[\p{Han}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+" + ENDINGS + "?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*" + ENDINGS + "?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "bloom": [r" ?[^(\s|[.,!?…。，、।۔،])]+"],
}  # fmt: skip
"""Regexes of the pre-tokenizer in each family's own tokenizer.json (Kimi: tokenization_kimi.py)."""

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS = {**BYTES, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


PIPELINES = {name: [*map(split, regexes), BYTES] for name, regexes in PUBLISHED.items()} | {
    "gpt-2": [WORDS],
    "starcoder": [DIGITS, WORDS],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        WORDS,
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ],
    "deepseek-coder": [
        split("[\r\n]"),
        split(r"\s?\p{L}+"),
        split(r"\s?\p{P}+"),
        split("[一-龥ࠀ-一가-퟿]+"),
        DIGITS,
        BYTES,
    ],
}
MORE_TEXTS = [
    "HTTPServer's parseURL()/x",
    "1234567 12,345.6 ½ ²",
    "a\r\n\r\n  b \t c  ",
    "你好2024年ABCdef かな ไทย",
    "$100+50=<150>`x`",
]


@pytest.mark.parametrize("pre", sorted(PIPELINES))
def test_texts_are_cut_as_the_published_tokenizers_cut_them(pre: str) -> None:
    state = {"type": "Sequence", "pretokenizers": PIPELINES[pre]}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    published = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None, "pre_tokenizer": state, "model": model})).pre_tokenizer  # fmt: skip
    ours = tokenizers.pre_tokenizers.Sequence([step() for step in KINDS[pre].steps])
    for text in [*MORE_TEXTS, *(case["text"] for case in cases(DATA / "smollm2"))]:
        assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text), (pre, text)


@pytest.mark.parametrize("pre", sorted(KINDS))
def test_every_pre_tokenizer_keeps_the_text(tmp_path: Path, pre: str) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", pre))
    for text in MORE_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- other models than byte-level BPE


def write_pieces(
    path: Path, model: str, texts: list[str], types: list[int], scores: list[float] | None = None
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model(model)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if scores:
        writer.add_token_scores(scores)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_word_piece_from_gguf(tmp_path: Path) -> None:
    """GGUF marks the pieces that begin a word, tokenizer.json those that go on with one."""
    folder = DATA / "tiny-wordpiece"
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    special = [token["content"] for token in state["added_tokens"]]
    types = [3 if text in special else 1 for text in vocab]
    spelled = [t if k == 3 else t[2:] if t.startswith("##") else f"▁{t}" for t, k in zip(vocab, types, strict=True)]
    writer = write_pieces(tmp_path / "v.gguf", "bert", spelled, types)
    for role, text in {"unknown": "[UNK]", "cls": "[CLS]", "seperator": "[SEP]", "padding": "[PAD]"}.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", vocab.index(text))
    finish(writer)
    tokenizer, published = load_tokenizer(tmp_path / "v.gguf"), load_tokenizer(folder)
    for case in cases(folder):
        ids = tokenizer.encode(case["text"])
        assert ids == case["ids"]
        assert tokenizer.decode(ids) == published.decode(ids)
    assert tokenizer.encode_pairs([("hello", "the world")]) == published.encode_pairs([("hello", "the world")])


def test_unigram_from_gguf(fixtures: Path, tmp_path: Path) -> None:
    folder = fixtures / "tokenizers/tiny-unigram"
    pieces, _ = read_model(folder / "tokenizer.model")
    writer = write_pieces(tmp_path / "v.gguf", "t5", pieces.texts, pieces.types, pieces.scores)
    writer.add_precompiled_charsmap(pieces.charsmap)
    writer.add_remove_extra_whitespaces(True)
    writer.add_eos_token_id(1)
    finish(writer)
    tokenizer = load_tokenizer(tmp_path / "v.gguf")
    for case in cases(folder):
        assert tokenizer.encode(case["text"], parse_special=False) == [*case["ids"], 1]


def test_end_token_where_the_file_asks_for_it(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", "qwen2", lambda w: w.add_add_eos_token(True))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("ab") == [97, 98, END] == tokenizer.encode("ab<end>")
    assert tokenizer.encode("ab", add_special_tokens=False) == [97, 98] and tokenizer.encode("") == [END]


# ---- tokenizer.model


@pytest.mark.parametrize("name", ["tiny-spm", "tiny-unigram"])
def test_folder_with_only_a_sentencepiece_model(fixtures: Path, tmp_path: Path, name: str) -> None:
    folder = fixtures / "tokenizers" / name
    shutil.copy(folder / "tokenizer.model", tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == {2}
    for case in cases(folder):
        ids = tokenizer.encode(case["text"], add_special_tokens=False, parse_special=False)
        assert ids == case["ids"]
        if name == "tiny-spm":
            assert tokenizer.encode(case["text"], parse_special=False) == case["ids_with_bos"]
            assert tokenizer.decode(ids) == case["decoded"]


def test_added_tokens_beside_a_sentencepiece_model(fixtures: Path, tmp_path: Path) -> None:
    shutil.copy(fixtures / "tokenizers/tiny-spm/tokenizer.model", tmp_path)
    size = load_tokenizer(tmp_path).vocab_size
    decoder = {str(size + 1): {"content": "<end>", "special": True}, str(size): {"content": "<tool>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "add_bos_token": False})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<tool><end>") == [size, size + 1]
    assert tokenizer.special_ids >= {size + 1} and size not in tokenizer.special_ids
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<far>": size + 9}))
    with pytest.raises(CheckpointError, match=f"added token '<far>' has id {size + 9}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\x08\x01", b"IQ== 0\nIg== 1\n", b"\x0a\xff\xff\xff\xff\x0f"])
def test_other_files_of_that_name_are_refused(tmp_path: Path, data: bytes) -> None:
    """Llama 3's original folders hold a list of base64 under this name."""
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path)

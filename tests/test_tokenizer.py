"""Tokenizers from tokenizer.json and from GGUF metadata, and text of a growing sequence of tokens."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import _BYTES, Tokenizer, load_tokenizer
from octavo.weights.spec import CheckpointError

DATA = Path(__file__).parent / "data" / "tokenizers"
SMOLLM2 = "smollm2/vocab-only.gguf"

MISSING_BYTES = {4, 6, 19, 20, 22, 29, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
"""Bytes without a token in smollm2's vocabulary; C0, C1 and F5 onwards occur in no UTF-8."""

load = functools.lru_cache(load_tokenizer)


def cases(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text())["cases"]
    assert len(found) > 20
    return found


def check_smollm2(tokenizer: Tokenizer, folder: Path) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, frozenset({2}), False)
    assert tokenizer.vocab_size == 49152 and len(tokenizer.special_ids) == 17
    for case in cases(folder):
        ids = tokenizer.encode(case["text"])
        assert ids == case["ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded"]
        assert tokenizer.decode(ids) == case["decoded_skip_special"]
        stream = Detokenizer(tokenizer, skip_special_tokens=False)
        assert [stream.push([token]) for token in ids] == case["stream"]


def test_smollm2_from_gguf() -> None:
    check_smollm2(load(DATA / SMOLLM2), DATA / "smollm2")


def test_smollm2_from_json(fixtures: Path) -> None:
    check_smollm2(load(fixtures / "tokenizers/smollm2"), fixtures / "tokenizers/smollm2")


def check_json(folder: Path, add_special_tokens: bool) -> None:
    tokenizer = load(folder)
    for case in cases(folder):
        ids = tokenizer.encode(case["text"], add_special_tokens=add_special_tokens)
        assert ids == case.get("tokenizer_json_ids", case["ids"])
        check_decode(tokenizer, ids)


def check_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    """The same text as the library's decoder gives for what is valid UTF-8."""
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_from_json() -> None:
    check_json(DATA / "tiny-spm", add_special_tokens=False)


def test_wordpiece_from_json() -> None:
    check_json(DATA / "tiny-wordpiece", add_special_tokens=True)


def test_unigram_from_json(fixtures: Path) -> None:
    check_json(fixtures / "tokenizers/tiny-unigram", add_special_tokens=False)


def test_sentencepiece_from_gguf() -> None:
    tokenizer = load(DATA / "tiny-spm/vocab-only.gguf")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, frozenset({2}), True)
    for case in cases(DATA / "tiny-spm"):
        text = case["text"]
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == case["ids"]  # sentencepiece's own
        assert tokenizer.encode(text, parse_special=False) == case["ids_with_bos"]
        assert tokenizer.decode(ids) == case["decoded"]
    assert tokenizer.encode("<s> </s> <unk>", add_special_tokens=False)[0] == 1


def test_special_tokens_in_text() -> None:
    tokenizer = load(DATA / SMOLLM2)
    assert tokenizer.encode("a<|im_end|>") == [81, 2]
    literal = tokenizer.encode("a<|im_end|>", parse_special=False)
    assert not tokenizer.special_ids & set(literal)
    assert tokenizer.decode(literal) == "a<|im_end|>"
    assert tokenizer.encode("a<|im_end|>") == [81, 2]


def test_special_tokens_of_a_vocabulary_that_finds_them_in_the_text(fixtures: Path) -> None:
    """A unigram model's own pieces are special tokens, too; its post-processor still adds </s>."""
    tokenizer = load(fixtures / "tokenizers/tiny-unigram")
    assert tokenizer.encode("</s>", add_special_tokens=False) == [1]
    for text in ("</s>", "<pad></s>x", "a </s>"):
        assert not {0, 1} & set(tokenizer.encode(text, add_special_tokens=False, parse_special=False))
    assert tokenizer.encode("the", parse_special=False) == tokenizer.encode("the")


def test_end_token_of_a_folder(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tiny-spm", tmp_path / "model")
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({**config, "add_eos_token": True}))
    plain = load(DATA / "tiny-spm").encode("Hello")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.encode("Hello") == [*plain, 2] == tokenizer.encode("Hello</s>")


def test_pairs_of_texts() -> None:
    tokenizer = load(DATA / "tiny-wordpiece")
    cls, sep = (tokenizer.token_to_id(text) for text in ("[CLS]", "[SEP]"))
    one, two = (tokenizer.encode(text, add_special_tokens=False) for text in ("hello", "the world"))
    (pair,) = tokenizer.encode_pairs([("hello", "the world")])
    start = len(one) + 2
    assert pair == ([cls, *one, sep, *two, sep], start, range(start, start + len(two)))
    assert pair.cut(100) == pair
    assert pair.cut(len(pair.ids) - 1) == ([cls, *one, sep, *two[:-1], sep], start, range(start, start + len(two) - 1))
    assert pair.cut(1).ids == [cls, *one, sep, sep]
    (pair,) = load(DATA / "tiny-spm").encode_pairs([("Hello", "<s>")])
    assert pair.ids.count(1) == 2  # of the template, none of the text


@pytest.mark.parametrize("path", [SMOLLM2, "tiny-spm", "tiny-wordpiece"])
def test_guarded_special_tokens_are_text_among_others_that_are_none(path: str) -> None:
    tokenizer = load(DATA / path)
    names = [tokenizer.id_to_token(i) or "" for i in sorted(tokenizer.special_ids)][:3]
    one, two = names[1], names[2]
    spelt = f"\ufdd1{tokenizer.token_to_id(two)}\ufdd1"
    for text in (
        f"so {one} it{two}is",
        f"{one}{one}",
        f" {two}",
        "so\ufdd0 it",
        f"{one} {spelt}it",
        f"\ufdd0 {spelt}it",
    ):
        guarded = tokenizer.guarded(text)
        ids = tokenizer.encode(guarded, add_special_tokens=False)
        assert ids == tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        unknown = tokenizer.special_token_names.get("unk_token")
        assert not {i for i in tokenizer.special_ids & set(ids) if tokenizer.id_to_token(i) != unknown}
        assert tokenizer.encode(guarded) == tokenizer.encode(text, parse_special=False)
        # Beside such that are meant, the text is cut as between any two tokens.
        between = tokenizer.encode(f"{one}{guarded}{two} so", add_special_tokens=False)
        plain = tokenizer.encode(f"{one}xyz{two} so", add_special_tokens=False)
        assert between[0] == plain[0] == tokenizer.token_to_id(one)
        end = len(plain) - plain.index(tokenizer.token_to_id(two))
        assert between[-end:] == plain[-end:]
    assert tokenizer.encode(tokenizer.guarded("so it is")) == tokenizer.encode("so it is")


def test_bos_is_added_at_most_once() -> None:
    for path in (DATA / "tiny-spm", DATA / "tiny-spm/vocab-only.gguf"):
        tokenizer = load(path)
        plain = tokenizer.encode("Hello", add_special_tokens=False)
        assert plain[0] != 1
        assert tokenizer.encode("Hello") == [1, *plain]
        assert tokenizer.encode("<s>").count(1) == 1
        assert tokenizer.encode("<s>Hello").count(1) == 1
        assert tokenizer.encode("<s><s>Hello").count(1) == 2  # only the tokenizer's own is spared


@pytest.mark.parametrize("add_bos", [True, False])
def test_tokenizer_config_decides_about_bos(tmp_path: Path, add_bos: bool) -> None:
    shutil.copytree(DATA / "tiny-spm", tmp_path / "model")
    file = tmp_path / "model/tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_bos_token": add_bos}))
    ids = load_tokenizer(tmp_path / "model").encode("Hello")
    assert (ids[0] == 1) is add_bos


def test_eos_is_a_set(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tiny-spm", tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(tmp_path / "model").eos_ids == {2, 9}  # eos_token of the tokenizer, and the config's
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_tokenizer(tmp_path / "model").eos_ids == {2, 7, 8, 9}


def test_encode_batch_equals_encode() -> None:
    tokenizer = load(DATA / SMOLLM2)
    texts = [case["text"] for case in cases(DATA / "smollm2")]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_lone_surrogate_is_named() -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        load(DATA / SMOLLM2).encode("ab\ud800")


def test_ids_outside_of_the_vocabulary_are_no_text() -> None:
    tokenizer = load(DATA / SMOLLM2)
    assert tokenizer.decode([81, 10**6, -1, 82]) == "ab"
    assert tokenizer.id_to_bytes(10**6) == b"" and tokenizer.id_to_token(10**6) is None


def test_bytes_of_a_token() -> None:
    tokenizer = load(DATA / SMOLLM2)
    ids = tokenizer.encode("naïve 你好 🦉")
    assert b"".join(map(tokenizer.id_to_bytes, ids)) == "naïve 你好 🦉".encode()
    spm = load(DATA / "tiny-spm")
    assert spm.id_to_bytes(355) == b" "
    ids = spm.encode("🦉", add_special_tokens=False)
    assert b"".join(map(spm.id_to_bytes, ids)) == " 🦉".encode()


def test_text_that_continues_other_text_keeps_its_space() -> None:
    spm = load(DATA / "tiny-spm")
    ids = spm.encode("Hello", add_special_tokens=False)
    assert spm.decode(ids) == "Hello" and spm.decode(ids, continues=True) == " Hello"
    stream = Detokenizer(spm, continues=True)
    assert "".join(stream.push([token]) for token in ids) == " Hello"


@pytest.mark.parametrize("path", [SMOLLM2, "tiny-spm", "tiny-wordpiece"])
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_joined_stream_equals_decode(path: str, data: st.DataObject) -> None:
    """Any tokens, so also bytes that are no UTF-8, cut anywhere."""
    tokenizer = load(DATA / path)
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size, 700) + 3), max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    for skip in (True, False):
        stream = Detokenizer(tokenizer, skip)
        pieces = [stream.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids, skip)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    text=st.text(st.characters(codec="utf-8", min_codepoint=32, max_codepoint=0x3FFFF), max_size=40)
)  # MISSING_BYTES apart
def test_byte_level_text_survives_the_round_trip(text: str) -> None:
    tokenizer = load(DATA / SMOLLM2)
    assert {byte for char, byte in _BYTES.items() if tokenizer.token_to_id(char) is None} == MISSING_BYTES
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    check_decode(tokenizer, ids)


def test_unfinished_character_is_held_back() -> None:
    tokenizer = load(DATA / SMOLLM2)
    owl = tokenizer.encode("🦉")
    assert len(owl) > 1
    stream = Detokenizer(tokenizer)
    assert stream.push(owl[:-1]) == ""
    assert stream.push(owl[-1:]) == "🦉"
    stream = Detokenizer(tokenizer)
    assert stream.push(owl[:-1]) + stream.finish() == tokenizer.decode(owl[:-1]) == "\ufffd"


def test_directories_that_hold_no_tokenizer(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "no tokenizer.json or tokenizer.model"),
        (tmp_path / "x", "no such file or directory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


TOKENIZER_CONFIGS = ['{"chat_template": [{}]}', '{"chat_template": [5]}', '{"chat_template": [{"name": [], "template": 5}]}',
                     '{"bos_token": "\\ud800"}', '{"add_bos_token": "no"}', '{"add_eos_token": []}']  # fmt: skip


@pytest.mark.parametrize("text", TOKENIZER_CONFIGS)
def test_tokenizer_config_of_another_kind_is_refused(data: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(data / "arch/llama", tmp_path / "model")
    (tmp_path / "model/tokenizer_config.json").write_text(text)
    _refused(tmp_path / "model")


def test_tokenizer_files_of_another_kind_are_refused(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "arch/llama", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_bytes(b"\xff")
    _refused(tmp_path / "model/chat_template.jinja")
    (tmp_path / "model/chat_template.jinja").unlink()
    state = json.loads((tmp_path / "model/tokenizer.json").read_text())
    state["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}  # the library panics
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(state))
    _refused(tmp_path / "model")


def with_rows(data: Path, tmp_path: Path, rows: Any, inside: bool = False, **change: Any) -> Path:
    """A model of so many rows, by config.json; `change` is made to tokenizer.json."""
    folder = tmp_path / "model"
    shutil.copytree(data / "arch/llama", folder)
    config = {"text_config": {"vocab_size": rows}, "vocab_size": 1} if inside else {"vocab_size": rows}
    (folder / "config.json").write_text(json.dumps(config))
    state = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**state, **change}))
    return folder


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("missing", "more"), [(1, ""), (3, " and 2 more")])
def test_a_token_that_the_model_has_not_is_refused(
    data: Path, tmp_path: Path, inside: bool, missing: int, more: str
) -> None:
    last = max(load_tokenizer(data / "arch/llama")._backend.get_vocab(with_added_tokens=False).values())
    rows = last + 1 - missing
    with pytest.raises(CheckpointError, match=rf"with id {rows}{more}, and the model's vocab_size is {rows}: "):
        load_tokenizer(with_rows(data, tmp_path, rows, inside))


@pytest.mark.parametrize("rows", [None, "x", 0.5, 10**6])
def test_models_of_more_rows_than_tokens(data: Path, tmp_path: Path, rows: Any) -> None:
    assert load_tokenizer(with_rows(data, tmp_path, rows)).notices == []


@pytest.mark.parametrize("special", [False, True])
def test_an_added_token_that_the_model_has_not_is_told(data: Path, tmp_path: Path, special: bool) -> None:
    size = load_tokenizer(data / "arch/llama").vocab_size
    state = json.loads((data / "arch/llama/tokenizer.json").read_text())
    token = {"id": size, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": special}  # fmt: skip
    folder = with_rows(data, tmp_path, size, added_tokens=[*state["added_tokens"], token])
    tokenizer = load_tokenizer(folder)
    (line,) = tokenizer.notices
    assert f"added token '<image>' with id {size} is none of the model's {size}" in line
    assert size in tokenizer.encode("<image>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<image>", "add_bos_token": True}))
    with pytest.raises(CheckpointError, match=rf"'<image>' with id {size}, and the model's vocab_size"):
        load_tokenizer(folder)  # all texts would begin with it


def _refused(path: Path) -> None:
    """path: the model, or the file of it that is named."""
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path if path.is_dir() else path.parent)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_ids_may_come_from_numpy(data: Path) -> None:
    tokenizer = load(data / "tokenizers" / SMOLLM2)
    ids = tokenizer.encode("Hello world")
    assert tokenizer.decode(np.array(ids)) == Detokenizer(tokenizer).push(np.array(ids)) == "Hello world"


def test_the_first_that_spells_a_special_token_is_known(data: Path) -> None:
    tokenizer = load_tokenizer(data / "arch/llama")
    spelled = next(text for i in sorted(tokenizer.special_ids) if (text := tokenizer.id_to_token(i)))
    assert not tokenizer.copies_for(b'{"prompt": "a"}')
    assert tokenizer.copies_for(spelled.encode()) and tokenizer.copies_for(rb"\u003c")
    tokenizer.encode(tokenizer.guarded(spelled))
    tokenizer.encode(spelled, parse_special=False)
    assert not tokenizer.copies_for(spelled.encode())


def test_texts_that_spell_no_special_token_need_no_copy(data: Path) -> None:
    tokenizer = load_tokenizer(data / "arch/llama")
    plain = tokenizer.encode("Hello there")
    assert tokenizer.encode("Hello there", parse_special=False) == plain
    pairs = tokenizer.encode_pairs([("Hello", "there")])
    assert tokenizer._literal is None
    tokenizer.encode("<s>", parse_special=False)
    assert tokenizer._literal is not None
    tokenizer._backend = tokenizer._literal
    assert (tokenizer.encode("Hello there"), tokenizer.encode_pairs([("Hello", "there")])) == (plain, pairs)

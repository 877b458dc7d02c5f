"""A tokenizer rebuilt from GGUF metadata (tokenizer.ggml.*)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.text.tokenizer import SpecialTokens
from octavo.weights.end_tokens import end_tokens_of_gguf, gguf_token_id
from octavo.weights.gguf_file import GgufFile, read_gguf
from octavo.weights.spec import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # token types

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_KINDS = {  # tokenizer.ggml.pre: how text is cut before merging
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "smaug-bpe": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}


def load_gguf_tokenizer(path: Path) -> tuple[Tokenizer, SpecialTokens]:
    gguf = read_gguf(path)
    tokens = gguf.strings("tokenizer.ggml.tokens")
    types = gguf.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list):
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type must be a list; found {types!r}")
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(types)} token types")
    model = gguf.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend = _byte_level_bpe(gguf, tokens)
        add_bos = _pre_kind(gguf) == "llama3"
    elif model == "llama":
        backend = _sentencepiece_bpe(gguf, tokens, types)
        add_bos = True
    else:
        raise CheckpointError(f"{path}: tokenizer model {model!r} is not supported; supported: gpt2, llama")
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL
    ]
    backend.add_special_tokens(special)
    if model == "llama":
        unknown = [t for t, k in zip(tokens, types, strict=True) if k == _UNKNOWN]
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in unknown])
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    return backend, _special_tokens(gguf, tokens, add_bos)


def _byte_level_bpe(gguf: GgufFile, tokens: list[str]) -> Tokenizer:
    merges = [(a, b) for a, _, b in (merge.partition(" ") for merge in gguf.strings("tokenizer.ggml.merges"))]
    kind = _pre_kind(gguf)
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == "llama3"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{gguf.file.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "gpt2":
        backend.pre_tokenizer = whole
    elif kind == "digits":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    else:
        cut = pre_tokenizers.Split(Regex(_LLAMA3 if kind == "llama3" else _QWEN2), "isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(gguf: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's BPE: any two neighbours whose join is a token may merge, the highest score first."""
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{gguf.file.path}: tokenizer.ggml.scores is missing or not as long as the tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [(-scores[i], vocab[a], vocab[b], (a, b)) for a, b in pairs if a in vocab and b in vocab]
    merges.sort()
    unknown = next((t for t, k in zip(tokens, types, strict=True) if k == _UNKNOWN), None)
    model = models.BPE(vocab, [m[3] for m in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    prefix = gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _pre_kind(gguf: GgufFile) -> str:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _PRE_KINDS:
        raise CheckpointError(
            f"{gguf.file.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(_PRE_KINDS)}"
        )
    return _PRE_KINDS[name]


def _special_tokens(gguf: GgufFile, tokens: list[str], add_bos: bool) -> SpecialTokens:
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: gguf_token_id(gguf, role) for name, role in roles.items()}
    templates = {"default": gguf.metadata.get("tokenizer.chat_template")}
    for key, value in gguf.metadata.items():
        if key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return SpecialTokens(
        bos_id=ids["bos_token"],
        eos_ids=end_tokens_of_gguf(gguf),
        add_bos=gguf.metadata.get("tokenizer.ggml.add_bos_token", add_bos and ids["bos_token"] is not None),
        names={name: tokens[i] for name, i in ids.items() if i is not None},
        chat_templates={name: template for name, template in templates.items() if isinstance(template, str)},
    )

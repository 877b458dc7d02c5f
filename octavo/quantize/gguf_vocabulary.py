"""The tokenizer of a model directory as GGUF metadata (tokenizer.ggml.*): the inverse of text.gguf_tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from octavo.text import sentencepiece as sp
from octavo.text.pretokenizers import KINDS, PreTokenizerKind
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.spec import CheckpointError

PROBES = (
    "Hello, world! It's 3.14159 or 2,718 and they're  fine.\n\n\tdef f(x):\r\n    return x**2  # naïve\n",
    "日本語のテキスト と 한국어, Ελληνικά, русский; e\u0301 \u200d👩‍🚀 İstanbul ﬁn 12345678 camelCaseWORDS don't WON'T",
    "   leading and trailing   ",
)  # fmt: skip
"""Texts on which tokenizers differ."""

_UNK_SCORE = -1e4


def write_vocabulary(writer: GGUFWriter, folder: Path, size: int) -> None:
    """size: rows of the embedding; ids behind the vocabulary are filled up. Raises CheckpointError."""
    tokenizer = load_tokenizer(folder)
    file = folder / "tokenizer.json"
    backend = Backend.from_file(str(file)) if file.is_file() else sp.load(folder)
    state = json.loads(backend.to_str())
    tokens = _tokens(backend, size, folder)
    types = _types(state, tokens, backend)
    model = state["model"]
    if model["type"] != "BPE":
        raise CheckpointError(f"{folder}: a tokenizer of type {model['type']} is not written as GGUF; BPE is")
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(tokens, merges))
        types = [
            sp.UNKNOWN if token == model.get("unk_token") else kind for token, kind in zip(tokens, types, strict=True)
        ]
        writer.add_add_space_prefix(_adds_prefix(state))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(backend, state, folder))
        writer.add_token_merges([merge.replace("  ", " ") for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _write_special(writer, tokenizer)


def check_vocabulary(file: Path, folder: Path) -> None:
    """CheckpointError where a tokenizer read back gives other tokens than that of the directory."""
    written, wanted = load_tokenizer(file), load_tokenizer(folder)
    for probe in PROBES:
        if written.encode(probe) != wanted.encode(probe):
            raise CheckpointError(f"{folder}: a GGUF file cannot say how this tokenizer cuts {probe!r:.60}")


def _tokens(backend: Backend, size: int, folder: Path) -> list[str]:
    vocab = backend.get_vocab(with_added_tokens=True)
    if max(vocab.values()) >= size:
        raise CheckpointError(f"{folder}: the tokenizer has token {max(vocab.values())}, the embedding {size} rows")
    tokens = [f"[PAD{i}]" for i in range(size)]
    for token, i in vocab.items():
        tokens[i] = token
    return tokens


def _types(state: dict[str, Any], tokens: list[str], backend: Backend) -> list[int]:
    known = set(backend.get_vocab(with_added_tokens=True))
    types = [sp.NORMAL if token in known else sp.UNUSED for token in tokens]
    if state["model"].get("byte_fallback"):
        types = [
            sp.BYTE if token.startswith("<0x") and token.endswith(">") and len(token) == 6 else kind
            for token, kind in zip(tokens, types, strict=True)
        ]
    for added in state["added_tokens"]:
        types[added["id"]] = sp.CONTROL if added["special"] else sp.USER_DEFINED
    return types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """The earlier a merge, the higher the score of what it makes."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _adds_prefix(state: dict[str, Any]) -> bool:
    text = json.dumps([state["normalizer"], state["pre_tokenizer"]])
    return '"Prepend"' in text or '"prepend_scheme": "always"' in text or '"prepend_scheme": "first"' in text


def _pre_tokenizer(backend: Backend, state: dict[str, Any], folder: Path) -> str:
    """The name of the kind that cuts the probes in the same way."""

    def cuts(own: Any) -> list[Any]:
        return [own.pre_tokenize_str(probe) for probe in PROBES]

    def same(kind: PreTokenizerKind) -> bool:
        if kind.whole_words != bool(state["model"].get("ignore_merges")) or kind.nfc != _composes(state):
            return False
        return cuts(pre_tokenizers.Sequence([step() for step in kind.steps])) == wanted

    if backend.pre_tokenizer is None:
        raise CheckpointError(f"{folder}: a tokenizer that does not cut texts into words is not written as GGUF")
    wanted = cuts(backend.pre_tokenizer)
    found = next((name for name, kind in KINDS.items() if same(kind)), None)
    if found is None:
        raise CheckpointError(f"{folder}: GGUF has no name for the way in which this tokenizer cuts texts into words")
    return found


def _composes(state: dict[str, Any]) -> bool:
    return '"NFC"' in json.dumps(state["normalizer"])


def _write_special(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    names = tokenizer.special_token_names
    eos = tokenizer.token_to_id(names.get("eos_token", ""))
    for role, add in (
        ("bos", writer.add_bos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token_id = tokenizer.token_to_id(names.get(f"{role}_token", ""))
        if token_id is not None:
            add(token_id)
    ends = sorted(tokenizer.eos_ids - {eos})
    if eos is not None:
        writer.add_eos_token_id(eos)
        ends = ends or [eos]  # where none is named, readers guess an end of turn by its text
    for token_id, end in zip(ends, (writer.add_eot_token_id, writer.add_eom_token_id), strict=False):
        end(token_id)
    writer.add_add_bos_token(tokenizer.adds_bos)
    templates = dict(tokenizer.chat_templates)
    if set(templates) == {"default"}:
        writer.add_chat_template(templates["default"])
    elif templates:
        writer.add_chat_template([{"name": name, "template": template} for name, template in templates.items()])

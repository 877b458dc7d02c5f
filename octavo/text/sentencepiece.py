"""SentencePiece vocabularies (Kudo & Richardson 2018) as tokenizers: from a tokenizer.model, or from GGUF metadata."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.weights.hf_config import read_json_if_present
from octavo.weights.spec import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of a piece; GGUF's token types are the same."""


class Pieces(NamedTuple):
    """A vocabulary: piece i has token id i."""

    file: Path
    texts: list[str]
    scores: list[float]
    types: list[int]
    add_prefix: bool = True  # text begins with a space
    remove_extra_spaces: bool = True
    charsmap: bytes = b""  # how characters are normalised, in SentencePiece's own form; empty: they are not

    @property
    def unknown(self) -> int | None:
        return self.types.index(UNKNOWN) if UNKNOWN in self.types else None


def bpe(pieces: Pieces) -> Tokenizer:
    """Any two neighbours whose join is a token may merge, the highest score first."""
    vocab = {text: i for i, text in enumerate(pieces.texts)}
    merges = []
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True):
        if kind in (UNKNOWN, CONTROL, BYTE):
            continue
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [(-score, vocab[a], vocab[b], (a, b)) for a, b in pairs if a in vocab and b in vocab]
    merges.sort()
    unknown = None if pieces.unknown is None else pieces.texts[pieces.unknown]
    model = models.BPE(vocab, [m[3] for m in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    steps: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    steps += [normalizers.Prepend("▁"), replace] if pieces.add_prefix else [replace]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = _decoder(pieces)
    return backend


def unigram(pieces: Pieces) -> Tokenizer:
    """The likeliest cut of a text into pieces (Kudo 2018)."""
    if pieces.unknown is None:
        raise CheckpointError(f"{pieces.file}: a unigram vocabulary needs an unknown token, and this has none")
    fallback = BYTE in pieces.types
    vocab = list(zip(pieces.texts, pieces.scores, strict=True))
    backend = Tokenizer(models.Unigram(vocab, pieces.unknown, byte_fallback=fallback))
    steps: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.remove_extra_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if pieces.add_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    backend.decoder = _decoder(pieces)
    return backend


def _decoder(pieces: Pieces) -> decoders.Decoder:
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if pieces.add_prefix else steps)


# ---- tokenizer.model

_UNIGRAM, _BPE = 1, 2  # algorithms

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Special tokens by role, where no file beside a tokenizer.model says (LlamaTokenizer)."""


def load(path: Path) -> Tokenizer:
    """The tokenizer.model of a directory, with the tokens that tokenizer_config.json or added_tokens.json add."""
    file = path / "tokenizer.model"
    pieces, algorithm = read_model(file)
    if algorithm not in (_UNIGRAM, _BPE):
        raise CheckpointError(f"{file}: SentencePiece model of type {algorithm}; supported: unigram (1), bpe (2)")
    if len(set(pieces.texts)) < len(pieces.texts):
        raise CheckpointError(f"{file}: a piece occurs twice")
    backend = bpe(pieces) if algorithm == _BPE else unigram(pieces)
    add_pieces(backend, pieces.texts, pieces.types)
    bos = NAMES["bos_token"]
    if algorithm == _BPE and bos in pieces.texts:  # as LlamaTokenizer, where add_bos_token does not say
        ids = [(bos, pieces.texts.index(bos))]
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos}:1 $B:1", ids)
    config = read_json_if_present(path / "tokenizer_config.json")
    listed = [(text, i, False) for text, i in read_json_if_present(path / "added_tokens.json").items()]
    decoder = config.get("added_tokens_decoder") or {}
    listed += [(token["content"], int(i), bool(token.get("special"))) for i, token in decoder.items()]
    for text, token_id, special in sorted(listed, key=lambda added: added[1]):
        token = AddedToken(text, special=special, normalized=False)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
        if backend.token_to_id(text) != token_id:
            raise CheckpointError(f"{file}: added token {text!r} has id {token_id}, behind {backend.get_vocab_size()}")
    return backend


def add_pieces(backend: Tokenizer, texts: list[str], types: list[int]) -> None:
    """Tells the tokenizer which tokens are whole in any text: special ones, and the user's."""
    for kind in (CONTROL, UNKNOWN):
        backend.add_special_tokens(_added(texts, types, kind))
    backend.add_tokens(_added(texts, types, USER_DEFINED))


def _added(texts: list[str], types: list[int], kind: int) -> list[AddedToken]:
    special = kind != USER_DEFINED
    return [
        AddedToken(text, special=special, normalized=False) for text, k in zip(texts, types, strict=True) if k == kind
    ]


def read_model(path: Path) -> tuple[Pieces, int]:
    """Pieces and algorithm of the ModelProto in a file (sentencepiece_model.proto: 1 pieces, 2 trainer, 3 normalizer)."""
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for key, value in fields if key == 1]
        trainer, normalizer = (dict(_fields(next((v for k, v in fields if k == key), b""))) for key in (2, 3))
        found = Pieces(
            path,
            texts=[str(piece[1], "utf-8") for piece in pieces],
            scores=[struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces],
            types=[piece.get(3, NORMAL) for piece in pieces],
            add_prefix=bool(normalizer.get(3, True)),
            remove_extra_spaces=bool(normalizer.get(4, True)),
            charsmap=normalizer.get(2, b""),
        )
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"{path}: not a SentencePiece model ({error}): make a tokenizer.json of it with Hugging Face transformers"
        ) from error
    if not found.texts:
        raise CheckpointError(f"{path}: not a SentencePiece model: it holds no pieces")
    return found, trainer.get(3, _UNIGRAM)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message (Protocol Buffers, "Encoding"): an int, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value: Any
            value, position = _varint(data, position)
        else:
            size, position = _varint(data, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
            if position + size > len(data):
                raise ValueError("a field passes the end of its message")
            value, position = data[position : position + size], position + size
        yield key >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position

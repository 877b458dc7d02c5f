"""Text to token ids and back, over the tokenizers library. What the model files say is honoured; nothing is guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers

from octavo.text.literal import GUARD, Guarded, literal
from octavo.weights.end_tokens import end_tokens_of_directory
from octavo.weights.hf_config import read_json_if_present
from octavo.weights.spec import CheckpointError, reading


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """What the files around a tokenizer say about it."""

    bos_id: int | None = None
    eos_id: int | None = None  # the one that may end a text; `eos_ids` end an answer
    eos_ids: frozenset[int] = frozenset()
    add_bos: bool | None = None  # None: as the tokenizer's own post-processor does
    add_eos: bool | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...: for chat templates
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name; most models have only "default"
    rows: int | None = None  # of the model's embedding, where it is known


class Pair(NamedTuple):
    """Two texts in one."""

    ids: list[int]
    num_first: int  # tokens before the token types change; all, where they do not
    second: range  # the tokens of the second text

    def cut(self, num_tokens: int) -> Pair:
        """So many tokens at most: the second text loses its end, as far as it has tokens to lose."""
        excess = min(max(0, len(self.ids) - num_tokens), len(self.second))
        start, stop = self.second.start, self.second.stop - excess
        ids = self.ids[:stop] + self.ids[self.second.stop :]
        return Pair(ids, min(self.num_first, len(ids)), range(start, stop))


class Tokenizer:
    """Thread-safe. `decode` is defined by the bytes of each token, so that streamed text equals decoded text."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._literal: tokenizers.Tokenizer | None = None  # parses no special tokens; made when first needed, as is
        self._guarded: Guarded | None = None
        self.bos_id = special.bos_id
        self.eos_ids = special.eos_ids
        self.special_token_names = special.names
        self.chat_templates = special.chat_templates
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces = _Pieces(backend, frozenset(added), first=False)
        self._first_pieces = _Pieces(backend, frozenset(added), first=True)
        empty = backend.encode("").ids
        self._begins = _End("BOS", special.bos_id, special.add_bos, empty[:1])
        self._ends = _End("EOS", special.eos_id, special.add_eos, empty[-1:])
        self.adds_bos = self._begins.wanted
        self.notices = [] if special.rows is None else self._check_rows(special.rows, frozenset(added))
        mask = backend.encode("a").special_tokens_mask
        trailing = next((i for i, special in enumerate(reversed(mask)) if not special), 0)
        self.num_ending = max(trailing - (self._ends.added and not self._ends.wanted), int(self._ends.wanted))

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        `add_special_tokens`: add what the tokenizer asks for, BOS and EOS at most once. `parse_special`: special
        tokens written in the text become those tokens; otherwise they are ordinary text. ValueError on lone surrogates.
        """
        return self.encode_batch([text], add_special_tokens, parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        if parse_special and any(GUARD in text for text in texts):
            return [self._encode_guarded(text, add_special_tokens) for text in texts]

        def encode(backend: tokenizers.Tokenizer) -> list[tokenizers.Encoding]:
            encodings: list[tokenizers.Encoding] = backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return encodings

        try:
            encodings = encode(self._backend) if parse_special else self._literally(encode)
        except TypeError:
            _check_unicode(texts)
            raise
        return [self._fix_ends(encoding.ids) if add_special_tokens else encoding.ids for encoding in encodings]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        """Two texts each in one, as the tokenizer joins them. Special tokens in the texts are ordinary text."""
        try:
            encodings = self._literally(lambda backend: backend.encode_batch(list(pairs)))
        except TypeError:
            _check_unicode([text for pair in pairs for text in pair])
            raise
        return [_pair(encoding) for encoding in encodings]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True, continues: bool = False) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD, ids outside of the vocabulary nothing.

        `continues`: the text follows other text, so that a leading space is kept where a tokenizer drops it.
        """
        data = bytearray()
        first = not continues
        for token_id in token_ids:
            if skip_special_tokens and token_id in self.special_ids:
                continue
            piece = self.piece(token_id, first)
            if piece is not None:
                data += piece
                first = False
        return data.decode("utf-8", "replace")

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """Bytes that a token adds to the text, `first` or after another; None outside of the vocabulary."""
        return self._first_pieces[token_id] if first else self._pieces[token_id]

    def id_to_bytes(self, token_id: int) -> bytes:
        """Bytes of a token within text; empty outside of the vocabulary."""
        return self.piece(token_id, False) or b""

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def guarded(self, text: str) -> str:
        """The text, such that `encode` reads the special tokens in it as ordinary text wherever it is put."""
        return self._guards.guard(text)

    def copies_for(self, body: bytes) -> bool:
        """Whether a request of these bytes may be the first to spell a special token: the vocabulary is then copied once,
        which takes half a second for 50,000 tokens."""
        made = self._guards.made and self._literal is not None
        return not made and (b"\\u" in body or self._guards.spelled(body))

    @property
    def _guards(self) -> Guarded:
        if self._guarded is None:
            self._guarded = Guarded(self._backend, self.special_ids)
        return self._guarded

    def _encode_guarded(self, text: str, add_special_tokens: bool) -> list[int]:
        _check_unicode([text])
        ids = self._guards.encode(text, add_special_tokens)
        return self._fix_ends(ids) if add_special_tokens else ids

    def _fix_ends(self, ids: list[int]) -> list[int]:
        """Post-processors add what they add whatever the text holds, and some add what the files do not want."""
        return self._ends.fix(self._begins.fix(ids)[::-1])[::-1]

    def _literally(
        self, encode: Callable[[tokenizers.Tokenizer], list[tokenizers.Encoding]]
    ) -> list[tokenizers.Encoding]:
        """Encodings in which special tokens of the texts are ordinary text. Where none was found it makes no difference,
        and no copy is needed."""
        found = encode(self._backend)
        if not any(self._holds_special(encoding) for encoding in found):
            return found
        if self._literal is None:
            self._literal = literal(self._backend, self.special_ids)
        return encode(self._literal)

    def _check_rows(self, rows: int, added: frozenset[int]) -> list[str]:
        """Lines for whoever starts the model. CheckpointError where any text may give a token that the embedding of `rows`
        rows has not.

        Added tokens are another matter: only a text that spells one gives it, and of published models some have such a
        token without a row, as the language model of Gemma 3 has that of images.
        """
        full = self.vocab_size > rows or self.id_to_token(rows) is not None  # else no need to list them all
        vocabulary = self._backend.get_vocab(with_added_tokens=False).values() if full else ()
        ends = self._fix_ends(self._backend.encode("").ids)
        beyond = sorted({i for i in vocabulary if i >= rows} - added | {i for i in ends if i >= rows})
        if beyond:
            raise CheckpointError(
                f"the tokenizer has token {self.id_to_token(beyond[0])!r} with id {beyond[0]}{_more(beyond)}, "
                f"and the model's vocab_size is {rows}: the tokenizer is another model's, or vocab_size is wrong"
            )
        lone = sorted(i for i in added if i >= rows)
        if not lone:
            return []
        return [
            f"the tokenizer's added token {self.id_to_token(lone[0])!r} with id {lone[0]}{_more(lone)} is none of the model's "
            f"{rows} (vocab_size): a prompt that spells it is refused"
        ]

    def _holds_special(self, encoding: tokenizers.Encoding) -> bool:
        """Beside those that the post-processor added."""
        return any(
            token in self.special_ids and not added
            for token, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        )


def _more(ids: Sequence[int]) -> str:
    return f" and {len(ids) - 1} more" if len(ids) > 1 else ""


def _pair(encoding: tokenizers.Encoding) -> Pair:
    ids, types, texts = encoding.ids, encoding.type_ids, encoding.sequence_ids
    second = [i for i, text in enumerate(texts) if text == 1]
    where = range(second[0], second[-1] + 1) if second else range(len(ids), len(ids))
    return Pair(ids, types.index(1) if 1 in types else len(ids), where)


class _End:
    """The token that a text begins with; of reversed ids, the one that it ends with."""

    def __init__(self, name: str, token_id: int | None, wanted: bool | None, added: list[int]) -> None:
        """wanted: None, as the post-processor, which makes `added` of no text."""
        self._ids = [] if token_id is None else [token_id]
        self.added = bool(added) and added == self._ids
        self.wanted = self.added if wanted is None else wanted
        if self.wanted and token_id is None:
            raise CheckpointError(f"the tokenizer asks for a {name} token but names none")

    def fix(self, ids: list[int]) -> list[int]:
        if not self.wanted:
            return ids[1:] if self.added else ids
        if ids[:1] != self._ids:
            return [*self._ids, *ids]
        return ids[1:] if ids[1:2] == self._ids and self.added else ids


class _Pieces(dict[int, bytes | None]):
    """Bytes of each token, first in a text or not, taken from the decoder when first needed.

    Byte-level decoders are undone here, because a token may be part of a character. For the others the library decodes
    the token behind an anchor token whose text is cut off again: their decoders look at one token at a time, and treat
    only the first of a text differently.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added: frozenset[int], *, first: bool) -> None:
        super().__init__()
        self._first = first
        self._backend = backend
        self._added = added
        kinds = _decoder_kinds(backend)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._anchor = backend.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = backend.decode(self._anchor, skip_special_tokens=False)

    def __missing__(self, token_id: int) -> bytes | None:
        piece = self[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return None
        if self._byte_level:
            if token_id in self._added or any(char not in _BYTES for char in token):
                return bytes(token, "utf-8")
            return bytes(_BYTES[char] for char in token)
        if self._byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if self._first:
            return bytes(self._backend.decode([token_id], skip_special_tokens=False), "utf-8")
        text = self._backend.decode([*self._anchor, token_id], skip_special_tokens=False)
        return bytes(text[len(self._anchor_text) :], "utf-8")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory (tokenizer.json and the files around it) or of a .gguf file.

    Raises CheckpointError naming file and cause.
    """
    path = Path(path)
    with reading(path):
        try:
            return Tokenizer(*_load(path))
        except CheckpointError as error:
            raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from error


def _load(path: Path) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    if path.suffix == ".gguf" and path.is_file():
        from octavo.text.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
        return backend, _read_special_tokens(path, backend)
    if (path / "tokenizer.model").is_file():
        from octavo.text import sentencepiece

        backend = sentencepiece.load(path)
        return backend, _read_special_tokens(path, backend, sentencepiece.NAMES)
    cause = "no tokenizer.json or tokenizer.model in this directory" if path.is_dir() else "no such file or directory"
    raise CheckpointError(f"{path}: {cause}")


def _read_special_tokens(
    path: Path, backend: tokenizers.Tokenizer, defaults: Mapping[str, str] = MappingProxyType({})
) -> SpecialTokens:
    """defaults: tokens of roles that no file gives."""
    config = read_json_if_present(path / "tokenizer_config.json")
    roles = {**defaults, **read_json_if_present(path / "special_tokens_map.json"), **config}
    names = {}
    for role, token in roles.items():
        text = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(text, str):
            names[role] = text
    return SpecialTokens(
        bos_id=backend.token_to_id(names.get("bos_token", "")),
        eos_id=backend.token_to_id(names.get("eos_token", "")),
        eos_ids=end_tokens_of_directory(path),
        add_bos=_flag(config, "add_bos_token", path),
        add_eos=_flag(config, "add_eos_token", path),
        names=names,
        chat_templates=_read_chat_templates(path, config),
        rows=_rows(path),
    )


def _rows(path: Path) -> int | None:
    """What config.json says; that the embedding has so many is checked with the model."""
    config = read_json_if_present(path / "config.json")
    inner = config.get("text_config")
    found = (inner if isinstance(inner, dict) else config).get("vocab_size", config.get("vocab_size"))
    return found if type(found) is int else None


def _flag(config: dict[str, Any], key: str, path: Path) -> bool | None:
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise CheckpointError(f"{path / 'tokenizer_config.json'}: {key} must be true or false; found {value!r:.100}")


def _read_chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """chat_template of tokenizer_config.json is one template or a list of named ones; files of their own have precedence.

    Models that take images, too, have it in chat_template.json.
    """
    value = config.get("chat_template") or read_json_if_present(path / "chat_template.json").get("chat_template")
    templates = {"default": value} if isinstance(value, str) else {}
    for entry in value if isinstance(value, list) else []:
        name, template = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: chat_template must be a text or a list of named ones"
            )
        templates[name] = template
    if (path / "chat_template.jinja").is_file():
        with reading(path / "chat_template.jinja"):
            templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _check_unicode(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: lone surrogate at character {error.start}") from error


def _byte_characters() -> dict[str, int]:
    """The byte of each character of GPT-2's printable spelling of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()

"""A tokenizer rebuilt from GGUF metadata (tokenizer.ggml.*)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.text import sentencepiece as sp
from octavo.text.pretokenizers import KINDS, PreTokenizerKind
from octavo.text.tokenizer import SpecialTokens
from octavo.weights.end_tokens import end_tokens_of_gguf, gguf_token_id
from octavo.weights.gguf_file import GgufFile
from octavo.weights.gguf_parts import read_model
from octavo.weights.spec import CheckpointError

_MODELS = ("gpt2", "llama", "t5", "bert")


def load_gguf_tokenizer(path: Path) -> tuple[Tokenizer, SpecialTokens]:
    gguf = read_model(path)
    tokens = gguf.strings("tokenizer.ggml.tokens")
    types = gguf.metadata.get("tokenizer.ggml.token_type") or [sp.NORMAL] * len(tokens)
    if not isinstance(types, list):
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type must be a list; found {types!r}")
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(types)} token types")
    model = gguf.metadata.get("tokenizer.ggml.model")
    add_bos, add_eos = False, False
    if model == "gpt2":
        kind = _pre_tokenizer(gguf)
        backend, add_bos = _byte_level_bpe(gguf, tokens, kind), kind.add_bos
    elif model == "llama":
        backend, add_bos = sp.bpe(_pieces(gguf, tokens, types)), True
    elif model == "t5":
        backend, add_eos = sp.unigram(_pieces(gguf, tokens, types)), True
    elif model == "bert":
        tokens = _word_pieces(tokens, types)
        backend, add_bos, add_eos = _word_piece(gguf, tokens), True, True
    else:
        raise CheckpointError(f"{path}: tokenizer model {model!r} is not supported; supported: {', '.join(_MODELS)}")
    sp.add_pieces(backend, tokens, types)
    special = _special_tokens(gguf, tokens, add_bos, add_eos)
    if model in ("t5", "bert"):
        backend.post_processor = _template(tokens, special, twice=model == "t5")
    return backend, special


def _byte_level_bpe(gguf: GgufFile, tokens: list[str], kind: PreTokenizerKind) -> Tokenizer:
    merges = [_merge(text) for text in gguf.strings("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind.whole_words))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{gguf.file.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence([step() for step in kind.steps])
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge(text: str) -> tuple[str, str]:
    """ "left right"; where a token begins with a space, so does its half."""
    left, _, right = text[1:].partition(" ")
    return text[:1] + left, right


def _pre_tokenizer(gguf: GgufFile) -> PreTokenizerKind:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in KINDS:
        raise CheckpointError(
            f"{gguf.file.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(KINDS)}"
        )
    return KINDS[name]


def _pieces(gguf: GgufFile, tokens: list[str], types: list[int]) -> sp.Pieces:
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{gguf.file.path}: tokenizer.ggml.scores is missing or not as long as the tokens")
    return sp.Pieces(
        Path(gguf.file.path),
        tokens,
        scores,
        types,
        add_prefix=gguf.metadata.get("tokenizer.ggml.add_space_prefix", True),
        remove_extra_spaces=gguf.metadata.get("tokenizer.ggml.remove_extra_whitespaces", False),
        charsmap=bytes(value & 255 for value in gguf.metadata.get("tokenizer.ggml.precompiled_charsmap", [])),
    )


# ---- WordPiece


def _word_pieces(tokens: list[str], types: list[int]) -> list[str]:
    """Hugging Face's spelling: GGUF marks the pieces that begin a word, not those that go on with one."""
    spelled = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (sp.CONTROL, sp.UNKNOWN) or (token.startswith("[") and token.endswith("]") and len(token) > 2):
            spelled.append(token)
        else:
            spelled.append(token[1:] if token.startswith("▁") else f"##{token}")
    return spelled


def _word_piece(gguf: GgufFile, tokens: list[str]) -> Tokenizer:
    """As BERT (Devlin et al. 2019): words at spaces and punctuation, each the longest pieces from the left."""
    unknown = gguf_token_id(gguf, "unknown")
    if unknown is None:
        raise CheckpointError(f"{gguf.file.path}: unknown_token_id is missing; a tokenizer of model bert needs it")
    lowercase = gguf.metadata.get("tokenizer.ggml.normalizer.lowercase", True)
    strip = gguf.metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase)
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token=tokens[unknown]))
    backend.normalizer = normalizers.BertNormalizer(strip_accents=strip, lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


# ---- special tokens


def _special_tokens(gguf: GgufFile, tokens: list[str], add_bos: bool, add_eos: bool) -> SpecialTokens:
    """add_bos, add_eos: where the file does not say. BERT's beginning is its class token, its end the separator."""
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
             "cls_token": "cls", "sep_token": "seperator", "mask_token": "mask"}  # fmt: skip
    ids = {name: gguf_token_id(gguf, role) for name, role in roles.items()}
    first = ids["cls_token"] if ids["bos_token"] is None else ids["bos_token"]
    last = ids["sep_token"] if ids["eos_token"] is None else ids["eos_token"]
    templates = {"default": gguf.metadata.get("tokenizer.chat_template")}
    for key, value in gguf.metadata.items():
        if key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return SpecialTokens(
        bos_id=first,
        eos_ids=end_tokens_of_gguf(gguf),
        eos_id=last,
        add_bos=_flag(gguf, "tokenizer.ggml.add_bos_token", default=add_bos and first is not None),
        add_eos=_flag(gguf, "tokenizer.ggml.add_eos_token", default=add_eos and last is not None),
        names={name: tokens[i] for name, i in ids.items() if i is not None},
        chat_templates={name: template for name, template in templates.items() if isinstance(template, str)},
        rows=embedding.shape[0] if (embedding := gguf.tensors.get("token_embd.weight")) else None,
    )


def _flag(gguf: GgufFile, key: str, default: bool) -> bool:
    value = gguf.metadata.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{gguf.file.path}: metadata {key!r} must be true or false; found {value!r:.100}")
    return value


def _template(tokens: list[str], special: SpecialTokens, twice: bool) -> processors.TemplateProcessing:
    """What goes before, after and between texts: BERT's [CLS] A [SEP] B [SEP], or RoBERTa's <s> A </s></s> B </s>.

    Without a beginning there is one token between the texts (T5).
    """
    first = special.bos_id if special.add_bos else None
    last = special.eos_id if special.add_eos else None
    start, end = ([] if i is None else [tokens[i]] for i in (first, last))
    between = end * 2 if twice and start else end
    return processors.TemplateProcessing(
        single=[*start, "$A", *end],
        pair=[*start, "$A", *between, "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=[(tokens[i], i) for i in {first, last} if i is not None],
    )

"""How text is cut before byte-level BPE merges it, by the names that GGUF's tokenizer.ggml.pre gives.

Facts from the pre_tokenizer of each family's published tokenizer.json; names and aliases are those of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Split

Step = Callable[[], PreTokenizer]


class PreTokenizerKind(NamedTuple):
    """Each step cuts the pieces of the one before; one of them spells bytes as characters."""

    steps: tuple[Step, ...]
    nfc: bool = False  # Unicode is composed first
    whole_words: bool = False  # a piece that is a token is taken whole, whatever the merges
    add_bos: bool = False  # where the file does not say


_GPT2 = partial(ByteLevel, add_prefix_space=False, use_regex=True)
_SPELL = partial(ByteLevel, add_prefix_space=False, use_regex=False)
_DIGIT = partial(Digits, individual_digits=True)


def _cut(pattern: str) -> Step:
    return lambda: Split(Regex(pattern), "isolated")


def _cuts(*patterns: str) -> tuple[Step, ...]:
    return (*map(_cut, patterns), _SPELL)


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _SIGNS + _SPACES
_QWEN2 = _WORDS + r"|\p{N}" + _SIGNS + _SPACES
_QWEN35 = (
    _ENDINGS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _SPACES
)  # fmt: skip
_SEED = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    _ENDINGS
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _cased(ending: str, digits: str, signs: str = r"[\r\n/]*", upper: str = "", lower: str = "") -> str:
    """Words change where capitals follow small letters; `upper`, `lower`: what these sets leave out."""
    capital = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + upper + "]"
    small = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + lower + "]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{capital}*{small}+{ending}|{before}{capital}+{small}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{signs}{_SPACES}"


_GPT4O = _cased(_ENDINGS + "?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = r"[\p{Han}]+|" + _cased(_ENDINGS + "?", r"\p{N}{1,3}", r"[\r\n]*", _NOT_HAN, _NOT_HAN)

_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴ"
    "ᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    _cut(r"[\r\n]"),
    _cut(rf"\s?[{_CASED_LETTERS}]+"),
    _cut(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    _cut(r"\s+$"),
    _cut(_CJK),
    _DIGIT,
    _SPELL,
)
_DEEPSEEK_CODER = (_cut(r"[\r\n]"), _cut(r"\s?\p{L}+"), _cut(r"\s?\p{P}+"), _cut(_CJK), _DIGIT, _SPELL)
_DEEPSEEK_V3 = _cuts(
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _SPACES,
)
_FALCON = (
    partial(Punctuation, behavior="contiguous"),
    _GPT2,
    partial(Digits, individual_digits=False),
    _cut("[0-9][0-9][0-9]"),
)

_KINDS: dict[PreTokenizerKind, str] = {
    PreTokenizerKind((_GPT2,)): "gpt-2 phi-2 jais trillion granite-docling exaone4 modern-bert roberta-bpe gigachat "
    "mellum a.x-4.0 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
    PreTokenizerKind((_GPT2,), nfc=True): "mpt olmo",
    PreTokenizerKind((_DIGIT, _GPT2)): "smollm starcoder refact codeshell exaone minerva-7b mellum2",
    PreTokenizerKind((_DIGIT, _GPT2), nfc=True): "command-r",
    PreTokenizerKind(_cuts(_LLAMA3), whole_words=True, add_bos=True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 "
    "pixtral midm-2.0 lfm2 jina-v5-nano",
    PreTokenizerKind(_cuts(_LLAMA3)): "smaug-bpe dbrx glm4 chatglm-bpe",
    PreTokenizerKind(_cuts(_QWEN2), nfc=True): "qwen2 deepseek-r1-qwen stablelm2 megrez kormo f2llmv2",
    PreTokenizerKind(_cuts(_QWEN2)): "hunyuan solar-open grok-2",
    PreTokenizerKind(_cuts(_QWEN35), nfc=True): "qwen35",
    PreTokenizerKind(_cuts(_SEED)): "seed-coder",
    PreTokenizerKind(_cuts(_BAILING)): "bailingmoe bailingmoe2 llada-moe",
    PreTokenizerKind(_cuts(_EXAONE_MOE)): "exaone-moe",
    PreTokenizerKind(_cuts(_GPT4O)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizerKind(_cuts(_TEKKEN), whole_words=True, add_bos=True): "tekken",
    PreTokenizerKind(_cuts(_KIMI)): "kimi-k2",
    PreTokenizerKind(_cuts(_BLOOM)): "bloom poro-chat gpt3-finnish",
    PreTokenizerKind((_cut(_BLOOM), _DIGIT, _SPELL)): "viking",
    PreTokenizerKind(_DEEPSEEK_LLM): "deepseek-llm",
    PreTokenizerKind(_DEEPSEEK_CODER): "deepseek-coder",
    PreTokenizerKind(_DEEPSEEK_V3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizerKind(_FALCON): "falcon",
    PreTokenizerKind(_cuts(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    )): "default",
}  # fmt: skip

KINDS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""By name. "default" is what llama.cpp does where a file names nothing."""

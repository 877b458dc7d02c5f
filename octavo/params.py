"""SamplingParams and what it is made of: how to continue a prompt, its limits, and how a value is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Integral, Real
from typing import Any, Literal

import msgspec

MAX_LOGPROBS = 32
"""Most alternatives per position a request may ask for: the width of the native result table."""

MAX_STRUCTURED = 2**20
"""Characters of a schema or grammar."""

MAX_STOPS = 64
MAX_N = 128
DRY_BREAKERS = ("\n", ":", '"', "*")


class ParameterError(ValueError):
    """A request field is out of its bounds. `param` names the field, the message names the limit (HTTP 400)."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How a choice thinks before it answers, in tokens: see `sched.thinking`."""

    start: int | None  # an answer that begins with this token thinks; None: the prompt has begun to
    end: int  # the token that ends it
    budget: int | None = None  # tokens between the two, after which `end` is forced; None: as many as it wants


class Structured(msgspec.Struct, frozen=True):
    """What the text of an output must be: a schema or grammar, compiled by llguidance (`octavo.grammar`)."""

    kind: Literal["json_schema", "regex", "choice", "lark", "gbnf"]
    text: str  # choice: a JSON list of texts
    field: str = "structured"  # the request's field that it came from, for errors

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "choice", "lark", "gbnf"):
            raise ParameterError(self.field, f"structured has no kind {self.kind!r:.40}")
        if not isinstance(self.text, str) or not self.text.strip():
            raise ParameterError(self.field, f"the {self.kind} is empty")
        if len(self.text) > MAX_STRUCTURED:
            raise ParameterError(
                self.field, f"the {self.kind} has {len(self.text)} characters; at most {MAX_STRUCTURED} are read"
            )

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool, field: str = "structured") -> Structured:
        """JSON that a schema (draft 2020-12) validates. Properties come in the order of the schema."""
        return Structured("json_schema", json.dumps(schema, ensure_ascii=False), field)

    @staticmethod
    def choice(choices: Sequence[str], field: str = "structured") -> Structured:
        """One of these texts."""
        return Structured("choice", json.dumps(list(choices), ensure_ascii=False), field)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to continue a prompt. Names and defaults follow vLLM's offline API; `temperature` 0 is greedy.

    Order of application: logit bias (and the `min_tokens` mask) -> repetition, presence, frequency penalties ->
    temperature -> top-k -> min-p -> top-p -> one Gumbel-max draw. `logprobs` are of the model's own distribution.
    """

    n: int = 1
    best_of: int | None = None  # candidates, of which the n best are the answer; None: n
    use_beam_search: bool = False
    length_penalty: float = 1.0  # beam search: hypotheses compare by logprob / length ** length_penalty
    early_stopping: bool | Literal["never"] = False  # beam search, see sched.beam
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: the rest of the context
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None  # nothing else is drawn
    bad_words: list[str] = []  # texts that the output must not have
    bad_word_ids: list[list[int]] = []  # the same as sequences of tokens; `text.words.resolve` makes them of bad_words
    repeat_last_n: int = -1  # tokens that the three penalties look back; -1: all, 0: none
    typical_p: float = 1.0
    top_n_sigma: float = -1.0  # keeps logits within so many standard deviations of the greatest; <= 0: all
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0  # temperature - range for sure draws to temperature + range for open ones
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0  # 0: no DRY
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # tokens that DRY looks back; -1: all
    dry_sequence_breakers: list[str] | None = None  # texts over which no repetition reaches; None: DRY_BREAKERS
    dry_breaker_ids: list[list[int]] = []  # the same as sequences of tokens; made by `text.words.resolve`
    samplers: list[str] | None = None  # those that apply, in their order; None: the usual order
    structured: Structured | None = None  # what the text must be; behind the reasoning, where there is any
    reasoning: Reasoning | None = None  # what the chat template says; set by the server and by LLM.chat

    def __post_init__(self) -> None:
        self._check_types()
        for name, _, low, high in _BOUNDS:
            value: Any = getattr(self, name)
            if value is None:
                continue
            if not (low <= value <= high):  # also false for NaN
                raise ParameterError(name, f"{name} must be between {low} and {high}, got {value}")
        for name in ("top_p", "typical_p"):
            if getattr(self, name) <= 0:
                raise ParameterError(name, f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        for name, most in _MOST_ITEMS.items():
            if len(getattr(self, name) or ()) > most:
                raise ParameterError(name, f"{name} has {len(getattr(self, name))} items; at most {most} are allowed")
        if any(not s for s in self.stop):
            raise ParameterError("stop", "a stop string must not be empty")
        if any(not word.strip() for word in self.bad_words):
            raise ParameterError("bad_words", "bad_words must not be empty texts")
        if any(not text for text in self.dry_sequence_breakers or ()):
            raise ParameterError("dry_sequence_breakers", "dry_sequence_breakers must not be empty texts")
        if self.allowed_token_ids == []:
            raise ParameterError("allowed_token_ids", "allowed_token_ids is empty: at least one token must be allowed")
        self._check_samplers()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        for token, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise ParameterError(
                    "logit_bias", f"logit_bias of token {token} must be between -100 and 100, got {bias}"
                )
        if self.best_of is not None and self.best_of < self.n:
            raise ParameterError("best_of", f"best_of {self.best_of} is less than n {self.n}")
        self._check_search()

    @property
    def num_candidates(self) -> int:
        """Choices that are generated; with beam search the beam width."""
        return self.n if self.best_of is None else self.best_of

    def candidates(self) -> SamplingParams:
        """What the engine is asked for: each candidate as a choice, scored where they compete. Beams are its own."""
        if self.best_of is None or self.use_beam_search:
            return self
        logprobs = 0 if self.logprobs is None and self.best_of > self.n else self.logprobs
        return msgspec.structs.replace(self, n=self.best_of, best_of=None, logprobs=logprobs)

    def _check_search(self) -> None:
        """Raise ParameterError where a field asks for what beam search is not, or only beam search is."""
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ParameterError(
                "early_stopping", f'early_stopping must be true, false or "never", got {self.early_stopping!r:.80}'
            )
        neutral = _DEFAULTS
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != neutral[name]:
                    raise ParameterError(name, f"{name} needs use_beam_search")
            return
        for name, default in neutral.items():
            given: Any = getattr(self, name)
            if name not in _OF_SEARCH and given not in (default, None, [], {}) and (name, given) != ("top_k", -1):
                field = given.field if isinstance(given, Structured) else name
                raise ParameterError(field, f"{field} cannot be honoured with use_beam_search")
        if self.temperature not in (0, 1):
            raise ParameterError("temperature", "temperature must be 0 or 1 with use_beam_search: nothing is drawn")
        if self.max_tokens == 0:
            raise ParameterError("max_tokens", "max_tokens must be at least 1 with use_beam_search")

    def _check_samplers(self) -> None:
        """Raise ParameterError for unknown names, and where a sampler with a value of its own is left out."""
        if self.samplers is None:
            return
        for i, name in enumerate(self.samplers):
            if name not in _SAMPLERS:
                raise ParameterError("samplers", f"samplers has {name[:40]!r}; the names are {', '.join(_SAMPLERS)}")
            if name in self.samplers[:i]:
                raise ParameterError("samplers", f"samplers has {name} twice")
        for sampler, names in _SAMPLERS.items():
            for name in names:
                given, neutral = getattr(self, name), _DEFAULTS[name]
                if sampler not in self.samplers and given != neutral and (name, given) != ("top_k", -1):
                    raise ParameterError(name, f"{name} is {given}, but samplers does not name {sampler}")

    def _check_types(self) -> None:
        """Raise ParameterError for a value of another kind than its field. What is as good becomes what the field says."""
        given: Any
        for name, kind, article in _LISTS:
            given = getattr(self, name)
            if given is None and name in _OPTIONAL:
                continue
            if name == "stop" and isinstance(given, str):  # what users of every other engine write
                given = [given]
            if not isinstance(given, list | tuple | None) or not all(_is(kind, item) for item in given or ()):
                raise ParameterError(name, f"{name} must be a list of {article}, got {given!r:.80}")
            msgspec.structs.force_setattr(self, name, [int(item) if kind is Integral else item for item in given or ()])
        for name in ("bad_word_ids", "dry_breaker_ids"):
            given = getattr(self, name)
            if not isinstance(given, list) or not all(
                isinstance(s, list) and s and all(_is(int, t) for t in s) for s in given
            ):
                raise ParameterError(name, f"{name} must be a list of lists of token ids, got {given!r:.80}")
        if not isinstance(self.structured, Structured | None):
            raise ParameterError("structured", f"structured must be a Structured, got {self.structured!r:.80}")
        given = self.logit_bias
        if given is not None and not (
            isinstance(given, dict) and all(_is(Integral, token) and _is(Real, bias) for token, bias in given.items())
        ):
            raise ParameterError("logit_bias", f"logit_bias must map token ids to numbers, got {given!r:.80}")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"{name} must be true or false, got {getattr(self, name)!r:.80}")
        for name, number, _, _ in _BOUNDS:
            given = getattr(self, name)
            if given is None and name in _OPTIONAL:
                continue
            if not _is(Integral if number is int else Real, given):
                what = "a whole number" if number is int else "a number"
                raise ParameterError(name, f"{name} must be {what}, got {given!r:.80}")
            if not isinstance(given, int | float):  # numpy's
                msgspec.structs.force_setattr(self, name, number(given))

    def check_vocabulary(self, vocab_size: int, eos_ids: frozenset[int] = frozenset()) -> None:
        """Raise ParameterError where a token id is outside of the vocabulary, more alternatives than it has are asked, or
        what is allowed and what is banned leave no token to draw.
        """
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_word_ids", chain.from_iterable(self.bad_word_ids)),
            ("dry_breaker_ids", chain.from_iterable(self.dry_breaker_ids)),
        )
        for param, ids in named:
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ParameterError(
                        param, f"{param} names token {token}; the vocabulary has ids 0 to {vocab_size - 1}"
                    )
        for param, wanted in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if wanted is not None and wanted > vocab_size:
                raise ParameterError(param, f"{param} is {wanted}; the vocabulary has {vocab_size} tokens")
        banned = {sequence[-1] for sequence in self.bad_word_ids}
        if not self._leaves(banned, vocab_size):
            raise ParameterError("bad_words", "bad_words and allowed_token_ids leave no token to draw")
        ends = set(self.stop_token_ids) | (set() if self.ignore_eos else eos_ids)
        if self.min_tokens and not self._leaves(banned | ends, vocab_size):
            raise ParameterError("min_tokens", "min_tokens holds back the end tokens, and nothing else is allowed")

    def _leaves(self, banned: set[int], vocab_size: int) -> bool:
        """Whether a token is left that may be drawn."""
        allowed = self.allowed_token_ids
        return len(banned) < vocab_size if allowed is None else not banned.issuperset(allowed)


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


_LISTS: tuple[tuple[str, type[Any], str], ...] = (
    ("stop", str, "texts"),
    ("stop_token_ids", Integral, "token ids"),
    ("allowed_token_ids", Integral, "token ids"),
    ("bad_words", str, "texts"),
    ("dry_sequence_breakers", str, "texts"),
    ("samplers", str, "names"),
)
_MOST_ITEMS = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOPS,
    "bad_words": MAX_STOPS,
    "dry_sequence_breakers": MAX_STOPS,
}
_SAMPLERS: dict[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability",),
    "temperature": ("temperature", "dynatemp_range"),
}
"""llama.cpp's names of the samplers, and the fields that each takes."""

_OPTIONAL = (
    "allowed_token_ids",
    "samplers",
    "dry_sequence_breakers",
    "best_of",
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
)  # null has a meaning

_OF_SEARCH = frozenset({
    "n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "temperature", "seed", "stop_token_ids",
    "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens",
    "include_stop_str_in_output",
})  # fmt: skip
"""Fields that have a meaning, or have none to lose, with beam search: it takes the model's own distribution."""

_BOUNDS: tuple[tuple[str, type[int] | type[float], float, float], ...] = (
    ("n", int, 1, MAX_N),
    ("best_of", int, 1, MAX_N),
    ("length_penalty", float, -10, 10),
    ("temperature", float, 0, 100),
    ("top_p", float, 0, 1),
    ("top_k", int, -1, 2**31 - 1),
    ("min_p", float, 0, 1),
    ("presence_penalty", float, -2, 2),
    ("frequency_penalty", float, -2, 2),
    ("repetition_penalty", float, 0.01, 100),
    ("seed", int, -(2**63), 2**64 - 1),
    ("repeat_last_n", int, -1, 2**31 - 1),
    ("typical_p", float, 0, 1),
    ("top_n_sigma", float, -1, 1000),
    ("xtc_probability", float, 0, 1),
    ("xtc_threshold", float, 0, 1),
    ("dynatemp_range", float, 0, 100),
    ("dynatemp_exponent", float, 0, 100),
    ("dry_multiplier", float, 0, 100),
    ("dry_base", float, 0, 100),
    ("dry_allowed_length", int, 0, 2**31 - 1),
    ("dry_penalty_last_n", int, -1, 2**31 - 1),
    ("max_tokens", int, 0, 2**31 - 1),
    ("min_tokens", int, 0, 2**31 - 1),
    ("logprobs", int, 0, MAX_LOGPROBS),
    ("prompt_logprobs", int, 0, MAX_LOGPROBS),
)


LIMITS = {name: (low, high) for name, _, low, high in _BOUNDS}
"""Least and greatest value of the fields that are numbers."""

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}

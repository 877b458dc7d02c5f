"""What each field of completions and chat changes: a value, and what an answer shows with it and not without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from octavo.server.routes import COMPLETIONS
from tests.serving import Server
from tests.thinker import START

TEXT = "Hello there, what do you know of rivers?"
"""Of more than a block, so that its second request finds it in the cache."""

HELLO = [{"role": "user", "content": TEXT}]
TEMPLATE = (
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}{% for d in documents or [] %}{{ d.text }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}{# </think> #}"
)
"""Of a model that may think, and that takes documents and an effort."""


class Told:
    """An answer, with what else the request would get."""

    def __init__(self, server: Server, path: str, body: dict[str, Any], name: str = "") -> None:
        """name: the field whose effect is looked for; "": of none."""
        self.server, self._path, self._body, self._name = server, path, body, name
        response = server.post(path, body)
        self.status, self.headers, self.raw = response.status_code, response.headers, response.text

    @cached_property
    def answer(self) -> dict[str, Any]:
        assert self.status == 200, self.raw
        answer: dict[str, Any] = json.loads(self.raw)
        return answer

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.answer["choices"][0]
        return choice

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = self.choice["message"]
        return message

    @property
    def text(self) -> str:
        return str(self.choice["text"] if self._path == COMPLETIONS else self.message["content"])

    @property
    def ids(self) -> list[int]:
        return list(self.choice["token_ids"])

    @property
    def prompt_tokens(self) -> int:
        return int(self.answer["usage"]["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int(self.answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Those of a stream; else none."""
        lines = [line for line in self.raw.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def but(self, **fields: Any) -> Told:
        """The same with other fields, too."""
        return self._asked(self._body | fields)

    @property
    def base(self) -> Told:
        """The same without the field; itself where there is none."""
        return self._asked({key: self._body[key] for key in self._body if key != self._name}) if self._name else self

    def _asked(self, body: dict[str, Any]) -> Told:
        """Once for all who ask."""
        key = (self.server.url, self._path, json.dumps(body))
        if key not in _ASKED:
            _ASKED[key] = Told(self.server, self._path, body)
        return _ASKED[key]


_ASKED: dict[tuple[str, str, str], Told] = {}


class Effect(NamedTuple):
    value: Any
    seen: Callable[[Told], object]  # true with the field, false without it
    beside: dict[str, Any] = {}  # what both requests have


def is_greedy(told: Told) -> bool:
    return told.ids == told.but(temperature=0, seed=99).ids


def differs(told: Told) -> bool:
    mine, others = ([choice["token_ids"] for choice in each.answer["choices"]] for each in (told, told.base))
    return bool(mine != others)


def is_one_letter(told: Told) -> bool:
    return set(told.ids) == {LETTER}


def is_shorter(told: Told) -> bool:
    return told.prompt_tokens < told.base.prompt_tokens


def is_longer(told: Told) -> bool:
    return told.prompt_tokens > told.base.prompt_tokens


def is_left_or_right(told: Told) -> bool:
    return told.text in ("left", "right")


def is_object(told: Told) -> bool:
    return list(json.loads(told.text)) == ["size"] if told.text.startswith("{") else False


def of_calls(told: Told) -> list[Any]:
    return list(told.message.get("tool_calls") or [])


LETTER = 37
"""The token of "A"."""

LETTERS: dict[str, Any] = {"logit_bias": {str(LETTER): 60}, "temperature": 0, "max_tokens": 24}
"""Nothing but this letter is written, unless something forbids it."""

LIKELY: dict[str, Any] = {"logit_bias": {str(LETTER): 30}, "temperature": 0, "max_tokens": 24}
SPEAKS: dict[str, Any] = {"logit_bias": {str(START): -100}}
"""The model does not begin to think."""

ENDS: dict[str, Any] = {"logit_bias": {"2": 100}}
BEAMS: dict[str, Any] = {
    "use_beam_search": True,
    "n": 3,
    "temperature": 0,
    "stop_token_ids": list(range(40, 66)),
    "max_tokens": 12,
}
DRY = {**LETTERS, "dry_multiplier": 5.0}
GRAMMAR = 'start: "left" | "right"'
SCHEMA = {
    "type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALLS: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120, **SPEAKS}
THINKS: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}, "max_tokens": 40, "top_k": 50}
SHORT: dict[str, Any] = {"max_tokens": 40, **SPEAKS}

COMMON: dict[str, Effect] = {
    "add_special_tokens": Effect(False, lambda told: abs(told.prompt_tokens - told.base.prompt_tokens) == 1),
    "allowed_token_ids": Effect([LETTER, 38], lambda told: set(told.ids) <= {LETTER, 38}),
    "bad_words": Effect(["A"], lambda told: "A" not in told.text, LETTERS),
    "best_of": Effect(8, differs, {"seed": 4}),
    "cache_salt": Effect("a", lambda told: told.cached_tokens <= 1, {"seed": 7}),
    "dry_allowed_length": Effect(1000, is_one_letter, DRY),
    "dry_base": Effect(1.0, is_one_letter, DRY),
    "dry_multiplier": Effect(5.0, lambda told: not is_one_letter(told), LETTERS),
    "dry_penalty_last_n": Effect(4, is_one_letter, DRY),
    "dry_sequence_breakers": Effect(["A"], is_one_letter, DRY),
    "dynatemp_exponent": Effect(5.0, differs, {"dynatemp_range": 1.0}),
    "dynatemp_range": Effect(4.0, differs),
    "early_stopping": Effect(True, differs, BEAMS),
    "explain": Effect(True, lambda told: "match_ends" in told.raw),
    "frequency_penalty": Effect(2.0, lambda told: not is_one_letter(told), LIKELY),
    "grammar": Effect(GRAMMAR, is_left_or_right, SHORT),
    "guided_choice": Effect(["left", "right"], is_left_or_right, SHORT),
    "guided_grammar": Effect(GRAMMAR, is_left_or_right, SHORT),
    "guided_json": Effect(SCHEMA, is_object, SHORT),
    "guided_regex": Effect("left|right", is_left_or_right, SHORT),
    "guided_whitespace_pattern": Effect("[~]{2}", lambda told: "~~" in told.text, {"guided_json": SCHEMA, **SHORT}),
    "ignore_eos": Effect(True, lambda told: len(told.ids) == 8, ENDS),
    "include_stop_str_in_output": Effect(True, lambda told: told.text == "A", {**LETTERS, "stop": "A"}),
    "json_schema": Effect(SCHEMA, is_object, SHORT),
    "length_penalty": Effect(-10.0, differs, BEAMS),
    "logit_bias": Effect({str(LETTER): 100}, is_one_letter),
    "max_tokens": Effect(3, lambda told: len(told.ids) == 3),
    "min_p": Effect(1.0, is_greedy),
    "min_tokens": Effect(3, lambda told: len(told.ids) >= 3, ENDS),
    "model": Effect("nobody", lambda told: told.status == 404),
    "n": Effect(2, lambda told: len(told.answer["choices"]) == 2),
    "n_predict": Effect(3, lambda told: len(told.ids) == 3),
    "presence_penalty": Effect(2.0, differs, {"temperature": 0, "max_tokens": 24}),
    "prompt_logprobs": Effect(1, lambda told: '"prompt_logprobs":[' in told.raw),
    "repeat_last_n": Effect(0, is_one_letter, {**LIKELY, "frequency_penalty": 2.0}),
    "repetition_penalty": Effect(100.0, lambda told: not is_one_letter(told), LIKELY),
    "request_id": Effect("r1", lambda told: told.answer["id"].endswith("-r1")),
    "response_format": Effect({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, is_object, SHORT),
    "resumable": Effect(
        True, lambda told: told.server.http.get(f"/v1/streams/{told.chunks[0]['id']}").status_code == 200, {"stream": True}
    ),
    "return_progress": Effect(True, lambda told: any("prompt_progress" in c for c in told.chunks), {"stream": True, "cache_salt": "p"}),
    "return_sampling_params": Effect(True, lambda told: '"sampling_params":{' in told.raw),
    "return_token_ids": Effect(True, lambda told: '"token_ids":[' in told.raw),
    "return_tokens_as_token_ids": Effect(True, lambda told: "token_id:37" in told.raw, LETTERS | {"logprobs": 1}),
    "samplers": Effect(["min_p", "temperature"], differs, {"min_p": 0.8, "temperature": 5.0}),
    "seed": Effect(5, lambda told: told.ids == told.but(seed=5).ids),
    "skip_special_tokens": Effect(False, lambda told: "<s>" in told.text, {"logit_bias": {"1": 100}}),
    "stop": Effect("A", lambda told: (told.text, told.choice["finish_reason"]) == ("", "stop"), LETTERS),
    "stop_token_ids": Effect([LETTER], lambda told: (told.choice["finish_reason"], len(told.ids)) == ("stop", 1), LETTERS),
    "stream": Effect(True, lambda told: told.headers["content-type"].startswith("text/event-stream") and told.chunks),
    "stream_options": Effect({"include_usage": True}, lambda told: told.chunks[-1].get("usage"), {"stream": True}),
    "structured_outputs": Effect({"choice": ["left", "right"]}, is_left_or_right, SHORT),
    "temperature": Effect(0, is_greedy),
    "timeout": Effect(1e-6, lambda told: told.status == 408),
    "top_k": Effect(1, is_greedy),
    "top_n_sigma": Effect(1e-6, is_greedy),
    "top_p": Effect(1e-9, is_greedy),
    "truncate_prompt_tokens": Effect(3, lambda told: told.prompt_tokens == 3),
    "ttft_timeout": Effect(1e-6, lambda told: told.status == 408),
    "typical_p": Effect(0.01, differs),
    "use_beam_search": Effect(True, lambda told: len({str(c["token_ids"]) for c in told.answer["choices"]}) == 2,
                              {"n": 2, "temperature": 0}),
    "xtc_probability": Effect(1.0, differs, {"xtc_threshold": 1e-6}),
    "xtc_threshold": Effect(1e-6, differs, {"xtc_probability": 1.0}),
}  # fmt: skip

OF_COMPLETIONS: dict[str, Effect] = {
    "echo": Effect(True, lambda told: told.text.startswith(TEXT)),
    "logprobs": Effect(2, lambda told: told.choice["logprobs"] and len(told.choice["logprobs"]["top_logprobs"]) == 8),
    "suffix": Effect("x", lambda told: told.status == 400 and "tokens for infilling" in told.raw),
}  # fmt: skip

OF_CHAT: dict[str, Effect] = {
    "add_generation_prompt": Effect(False, is_shorter),
    "chat_template_kwargs": Effect({"thinking": True}, is_longer),
    "continue_final_message": Effect(
        True, is_shorter,
        {"messages": [*HELLO, {"role": "assistant", "content": "So"}], "add_generation_prompt": False},
    ),
    "documents": Effect([{"text": "Rivers run."}], is_longer),
    "include_reasoning": Effect(False, lambda told: "reasoning_content" not in told.message, THINKS),
    "logprobs": Effect(True, lambda told: told.choice["logprobs"]),
    "max_completion_tokens": Effect(3, lambda told: len(told.ids) == 3),
    "parallel_tool_calls": Effect(False, lambda told: len(of_calls(told)) == 1, CALLS | {"logit_bias": {str(START): -100, "2": -100}}),
    "reasoning_effort": Effect("high", is_longer),
    "return_tokens_as_token_ids": Effect(True, lambda told: "token_id:37" in told.raw, LETTERS | {"logprobs": True}),
    "thinking_token_budget": Effect(5, lambda told: len(told.message["reasoning_content"]) < len(told.base.message["reasoning_content"]), THINKS),
    "tool_choice": Effect("required", lambda told: told.choice["finish_reason"] == "tool_calls" or of_calls(told), CALLS),
    "tools": Effect([TOOL], is_longer),
    "top_logprobs": Effect(2, lambda told: len(told.choice["logprobs"]["content"][0]["top_logprobs"]) == 2, {"logprobs": True}),
}  # fmt: skip

WITHOUT_EFFECT: dict[str, Any] = {
    "guided_decoding_backend": "auto", "mirostat_eta": 0.1, "mirostat_tau": 5.0, "prompt_cache_key": "k",
    "safety_identifier": "s",
}  # fmt: skip
"""Known, and documented to do nothing."""

OF_TERMS: dict[str, Any] = {
    "priority": -1, "user": "me", "retention": {"seconds": 300, "priority": 1}, "prompt_cache_retention": "24h",
}  # fmt: skip
"""What scheduler and cache are told: no answer shows it."""

ASKS_FOR_LENGTH = ("max_tokens", "max_completion_tokens", "n_predict")


def effects(path: str) -> dict[str, Effect]:
    return COMMON | (OF_COMPLETIONS if path == COMPLETIONS else OF_CHAT)


def beside(path: str, name: str) -> dict[str, Any]:
    """The body in which a field is tried, without it."""
    prompt = {"prompt": TEXT} if path == COMPLETIONS else {"messages": HELLO}
    body: dict[str, Any] = {**prompt, "seed": 1, "max_tokens": 8, "return_token_ids": True}
    effect = effects(path).get(name)
    body |= effect.beside if effect else {}
    return {
        key: value
        for key, value in body.items()
        if key != name and not (name in ASKS_FOR_LENGTH and key == "max_tokens")
    }


def samples(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field in a body that is honoured."""
    for name, effect in effects(path).items():
        yield name, beside(path, name) | {name: effect.value}
    for name, value in (WITHOUT_EFFECT | OF_TERMS).items():
        yield name, beside(path, name) | {name: value}

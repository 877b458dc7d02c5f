"""LLM has what the server has, field by field."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, ParameterError, Retention, SamplingParams, Structured, Terms
from octavo.server.chat_fields import ChatRequest
from octavo.server.completion_fields import CompletionRequest
from octavo.server.structured import StructuredFields

OFFLINE = {
    "model": "LLM(model)",
    "prompt": "LLM.generate(prompts)",
    "messages": "LLM.chat(messages)",
    "priority": "Terms.priority, where higher is earlier",
    "cache_salt": "Terms.cache_salt",
    "timeout": "Terms.total_seconds",
    "ttft_timeout": "Terms.ttft_seconds",
    "retention": "Terms.retention",
    "prompt_cache_retention": "Terms.retention",
    "user": "Terms.tenant",
    "explain": "RequestOutput.explanations, always there",
    "n_predict": "SamplingParams.max_tokens",
    "max_completion_tokens": "SamplingParams.max_tokens",
    "top_logprobs": "SamplingParams.logprobs",
    "include_reasoning": "CompletionOutput.message.reasoning, always there",
    "return_token_ids": "CompletionOutput.token_ids, always there",
    "return_tokens_as_token_ids": "CompletionOutput.logprobs, by token id",
    "echo": "RequestOutput.prompt and prompt_logprobs",
    "add_special_tokens": "prompts as token ids, of get_tokenizer().encode",
    "suffix": "prompts with the model's tokens for infilling",
    "truncate_prompt_tokens": "prompts as token ids",
    **dict.fromkeys(StructuredFields.__struct_fields__, "SamplingParams.structured"),
}
"""Fields by another name."""

OF_HTTP = {
    "stream", "stream_options", "resumable", "request_id", "return_progress", "return_sampling_params",
    "prompt_cache_key", "safety_identifier", "mirostat_eta", "mirostat_tau",
}  # fmt: skip
"""Matters of a connection, or labels without effect."""


def test_every_field_can_be_had_offline() -> None:
    own = set(SamplingParams.__struct_fields__)
    own |= set(inspect.signature(LLM.chat).parameters) | set(inspect.signature(LLM.generate).parameters)
    fields = set(ChatRequest.__struct_fields__) | set(CompletionRequest.__struct_fields__)
    assert fields - own - set(OFFLINE) - OF_HTTP == set()
    assert (set(OFFLINE) | OF_HTTP) - fields == set()  # the tables have nothing that is no field
    for how in OFFLINE.values():
        kind, _, rest = how.partition(".")
        if kind in ("Terms", "SamplingParams"):
            assert rest.split(",")[0] in {"Terms": Terms, "SamplingParams": SamplingParams}[kind].__struct_fields__


@pytest.fixture(scope="module")
def llm(data: Path) -> Iterator[LLM]:
    with LLM(str(data / "arch" / "llama"), kv_cache_memory="4MiB", max_num_seqs=1, seed=1) as model:
        yield model


def test_terms_are_honoured(llm: LLM) -> None:
    prompt = "A prompt that is longer than one block of the cache, so that something is found there."
    params = SamplingParams(temperature=0, max_tokens=2)

    def cached(terms: Terms) -> int:
        return llm.generate(prompt, params, terms=terms)[0].num_cached_tokens

    llm.reset_prefix_cache()
    assert cached(Terms(cache_salt="a")) == 0
    assert cached(Terms(cache_salt="b", retention=Retention(seconds=60))) == 0
    assert cached(Terms(cache_salt="a")) > 0
    assert llm.reset_prefix_cache() > 0
    assert cached(Terms(cache_salt="a")) == 0
    late, early = llm.generate(["Hello"] * 2, params, terms=[Terms(), Terms(priority=5)])
    waited = [sum(out.explanations[0].wait_seconds.values()) for out in (late, early)]
    assert waited[0] > waited[1]  # one at a time: the second went first
    spoken = llm.chat([{"role": "user", "content": "Hello"}], params, terms=Terms(total_seconds=1e-9))
    assert spoken[0].outputs[0].finish_reason not in ("stop", "length")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"terms": [Terms()]}, "2 prompts and 1 terms"),
        ({"terms": {"priority": 1}}, "terms must be of Terms"),
        ({"terms": Terms(priority="high")}, "terms: Expected `int`"),  # type: ignore[arg-type]
        ({"sampling_params": [SamplingParams()]}, "2 prompts and 1 sampling_params"),
        ({"sampling_params": {"n": 2}}, "sampling_params must be of SamplingParams"),
    ],
)
def test_what_is_no_terms_is_refused(llm: LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError) as error:
        llm.generate(["Hello", "Hi"], **options)
    assert says in str(error.value)


def test_formats_and_schema_beside_n(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    schema = Structured.json_schema({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
    params = SamplingParams(n=3, max_tokens=120, structured=schema, logprobs=1)
    (out,) = llm.chat(hello, params, tool_format="hermes", reasoning_format="none")
    for choice in out.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        if choice.finish_reason == "stop":
            assert json.loads(choice.text)["a"] in (1, 2)
    with pytest.raises(ParameterError, match="tool_format must be one of auto, hermes"):
        llm.chat(hello, params, tool_format="latin")  # type: ignore[arg-type]

"""LLM, the offline class; and greedy continuations against stored expected values and against the reference backend."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo import LLM, ParameterError, RequestOutput, SamplingParams
from octavo.backends.base import StepBatch, StepHandle
from octavo.config import ConfigError
from octavo.weights.spec import CheckpointError
from tests.small_fixtures import SERVED

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)

MARGINS = {"f32": 0.01, "auto": 0.5}
"""Smallest difference of the best two logits at which the argmax must agree with float32 (table in the fixtures'
README): float32 throughout; int8 or bf16 activations against float32."""


def expected_of(model: Path) -> Any:
    return np.load(model / "expected.npz" if model.is_dir() else model.with_suffix(".expected.npz"))


@pytest.fixture(scope="module")
def tiny(data: Path) -> LLM:
    return LLM(str(data / "gguf" / "tiny-llama-q4_1.gguf"), num_threads=1)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", SERVED)
def test_greedy_in_float32(data: Path, name: str, backend: str) -> None:
    expected = expected_of(data / name)
    llm = LLM(str(data / name), activations="f32", backend=backend, max_num_batched_tokens=64, max_num_seqs=8)
    prompts = [{"prompt_token_ids": expected[f"ids_{i}"].tolist()} for i in range(3)]
    num_equal = 0
    for i, output in enumerate(llm.generate(prompts, GREEDY)):
        steps = zip(
            output.outputs[0].token_ids,
            output.outputs[0].logprobs or [],
            expected[f"gen_{i}"].tolist(),
            expected[f"gen_margin_{i}"].tolist(),
            expected[f"gen_logprob_{i}"].tolist(),
            strict=True,
        )
        for token, scores, want, margin, want_logprob in steps:
            if token != want:
                assert margin < MARGINS["f32"]
                break
            assert scores[token].logprob == pytest.approx(want_logprob, abs=4e-3)  # two logits, each within 2e-3
            num_equal += 1
    assert num_equal >= 48  # of 72


def check_against(oracle: LLM, outputs: list[RequestOutput], margin: float) -> int:
    """The oracle scores prompt and output in one pass: each greedy token is its best too, unless its best two are
    closer than `margin`. Returns the number of tokens that were clear."""
    prompts = [{"prompt_token_ids": o.prompt_token_ids + o.outputs[0].token_ids} for o in outputs]
    scored = oracle.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=2))
    num_clear = 0
    for output, score in zip(outputs, scored, strict=True):
        assert score.prompt_logprobs is not None
        tokens = output.outputs[0].token_ids
        for token, entry in zip(tokens, score.prompt_logprobs[-len(tokens) :], strict=True):
            assert entry is not None
            best, second = sorted((s for s in entry.values() if s.rank <= 2), key=lambda s: s.rank)
            if best.logprob - second.logprob < margin:
                continue
            num_clear += 1
            assert entry[token].rank == 1
    return num_clear


@pytest.mark.parametrize("name", SERVED)
def test_greedy_in_the_own_format_equals_the_oracle(data: Path, name: str) -> None:
    expected = expected_of(data / name)
    prompts = [{"prompt_token_ids": expected[f"ids_{i}"].tolist()} for i in range(3)]
    outputs = LLM(str(data / name)).generate(prompts, GREEDY)
    oracle = LLM(str(data / name), backend="reference")
    assert check_against(oracle, outputs, MARGINS["auto"]) >= 40  # of 72


def test_demo_equals_the_oracle(demo: Path) -> None:
    questions = ["What is the capital of France?", "Name three colours.", "What is 2 + 3?"]
    with LLM(str(demo), max_model_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.chat([[{"role": "user", "content": q}] for q in questions], params)
    oracle = LLM(str(demo), backend="reference", max_model_len=512)
    assert check_against(oracle, outputs, MARGINS["auto"]) >= 20  # of 48


def test_prompts_in_every_form(tiny: LLM) -> None:
    tokenizer = tiny.get_tokenizer()
    ids = tokenizer.encode("the end")
    params = SamplingParams(temperature=0, max_tokens=4)
    forms: list[Any] = ["the end", {"prompt": "the end"}, {"prompt_token_ids": ids}]
    outputs = tiny.generate(forms, params)
    assert [o.prompt_token_ids for o in outputs] == [ids] * 3
    assert [o.prompt for o in outputs] == ["the end", "the end", None]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    single = tiny.generate("the end", params)
    assert [o.outputs[0].token_ids for o in single] == [outputs[0].outputs[0].token_ids]
    assert tiny.generate([], params) == []
    bad: Any
    for bad in (["a", 3], [[1, 2]], [{"text": "a"}]):
        with pytest.raises(ParameterError, match="a prompt is text or"):
            tiny.generate(bad, params)


def test_defaults_and_one_params_each(tiny: LLM) -> None:
    unset = SamplingParams(ignore_eos=True, stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert len(tiny.generate("the", unset)[0].outputs[0].token_ids) == 16
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 5)]
    assert [len(o.outputs[0].token_ids) for o in tiny.generate(["a", "b"], params)] == [3, 5]
    for bad_ids in ([1.5], "ab", ["a"]):
        with pytest.raises(ParameterError, match="prompt_token_ids must be whole numbers"):
            tiny.generate({"prompt_token_ids": bad_ids})  # type: ignore[dict-item]
    with pytest.raises(ParameterError, match="2 prompts and 1 sampling_params"):
        tiny.generate(["a", "b"], params[:1])


def test_logprobs_have_vllms_shape(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2, seed=1, ignore_eos=True)
    output = tiny.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)[0]
    prompt_scores, answer = output.prompt_logprobs, output.outputs[0]
    assert prompt_scores is not None and prompt_scores[0] is None and len(prompt_scores) == 4
    for token, entry in zip([6, 7, 8], prompt_scores[1:], strict=True):
        assert entry is not None and token in entry and len(entry) in (2, 3)
    assert answer.logprobs is not None and len(answer.logprobs) == 5
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in entry and len(entry) in (3, 4)
        ranked = sorted(entry.values(), key=lambda s: s.rank)
        assert [s.rank for s in ranked[:3]] == [1, 2, 3]
        assert ranked[0].logprob >= ranked[1].logprob >= ranked[2].logprob
        assert entry[token].decoded_token == tiny.get_tokenizer().decode([token], skip_special_tokens=False)
    total = sum(entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)
    plain = tiny.generate({"prompt_token_ids": [5, 6, 7, 8]}, SamplingParams(max_tokens=5, seed=1, ignore_eos=True))[0]
    assert plain.outputs[0].token_ids == answer.token_ids
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None


def test_stop_string_ends_the_choice_and_frees_its_blocks(tiny: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    text = tiny.generate("the end", free)[0].outputs[0].text
    stop = text[10:13]
    cut = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=stop)  # type: ignore[arg-type]
    output = tiny.generate("the end", cut)[0].outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 60
    assert tiny.engine.stats().kv_blocks_held == 0


def test_seeds(data: Path) -> None:
    def texts(seed: int | None, params: SamplingParams) -> list[list[int]]:
        llm = LLM(str(data / "gguf" / "tiny-llama-q4_1.gguf"), num_threads=1, seed=seed)
        return [o.outputs[0].token_ids for o in llm.generate(["the", "the"], params)]

    drawn = SamplingParams(max_tokens=12, ignore_eos=True)
    assert texts(3, drawn) == texts(3, drawn) != texts(4, drawn)
    assert texts(None, drawn) != texts(None, drawn)
    first, second = texts(3, drawn)
    assert first != second
    named = SamplingParams(max_tokens=12, ignore_eos=True, seed=11)
    assert texts(3, named) == texts(None, named)
    assert len({tuple(t) for t in texts(3, named)}) == 1


def test_a_prefix_is_reused(tiny: LLM) -> None:
    ids = list(range(319, 239, -1))  # begins as no other prompt here
    params = SamplingParams(temperature=0, max_tokens=1)
    first = tiny.generate({"prompt_token_ids": ids}, params)[0]
    again = tiny.generate({"prompt_token_ids": ids}, params)[0]
    longer = tiny.generate({"prompt_token_ids": [*ids, 1, 2, 3]}, params)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens) == (0, 79, 80)


def test_chat_uses_the_template(tiny: LLM) -> None:
    message = {"role": "user", "content": "hi"}
    outputs = tiny.chat([[message], [message]], SamplingParams(temperature=0, max_tokens=3))
    assert len(outputs) == 2 and outputs[0].prompt is not None and "user\nhi" in outputs[0].prompt
    single = tiny.chat([message], SamplingParams(temperature=0, max_tokens=3))
    assert single[0].prompt_token_ids == outputs[0].prompt_token_ids


def test_chat_with_tools(data: Path) -> None:
    """Whatever the model is: what it must call is called, and told apart from content."""
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "switch", "parameters": schema}}
    message = [{"role": "user", "content": "hi"}]
    params = [SamplingParams(max_tokens=60, seed=seed) for seed in range(3)]
    with LLM(str(data / "arch" / "llama"), num_threads=1, max_model_len=1024) as llm:
        outputs = llm.chat([message] * 3, params, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        for output in outputs:
            out = output.outputs[0]
            assert out.finish_reason == "tool_calls" and out.message is not None and out.message.content == ""
            (call,) = out.message.tool_calls
            assert call.name == "switch" and isinstance(json.loads(call.arguments)["on"], bool)
        plain = llm.chat(message, SamplingParams(max_tokens=5, seed=1))[0].outputs[0]
        assert plain.message is not None and plain.message.content == plain.text
        prefill = [*message, {"role": "assistant", "content": "Well"}]
        continued = llm.chat(prefill, SamplingParams(max_tokens=1), continue_final_message=True)[0]
        assert continued.prompt is not None and continued.prompt.endswith("Well")
        with pytest.raises(ParameterError, match="tool_choice needs tools"):
            llm.chat(message, tool_choice="required")


def test_a_refused_request_leaves_nothing_behind(tiny: LLM) -> None:
    with pytest.raises(ParameterError, match="vocabulary"):
        tiny.generate([{"prompt_token_ids": [1]}, {"prompt_token_ids": [1000]}])
    assert not tiny.engine.has_work
    assert len(tiny.generate("the", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


def test_an_interrupt_waits_for_the_end_of_the_step(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while native code runs; whoever goes on gets a whole engine without old requests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background is born without it
    run = tiny.engine._program.run
    calls = []

    def interrupted(batch: StepBatch) -> StepHandle:
        calls.append(batch)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return run(batch)

    prompt, params = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine, "_program", SimpleNamespace(run=interrupted))
        with pytest.raises(KeyboardInterrupt):
            tiny.generate([prompt] * 2, params)
    assert len(calls) == 3
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    again = tiny.generate(prompt, params)[0].outputs[0]
    assert len(again.token_ids) == 50
    stats = tiny.engine.stats()
    assert stats.num_running == stats.num_waiting == stats.kv_blocks_held == 0


def test_wrong_options(data: Path) -> None:
    model = str(data / "gguf" / "tiny-llama-q4_1.gguf")
    with pytest.raises(TypeError, match="nonsense"):
        LLM(model, nonsense=1)
    with pytest.raises(ConfigError, match="kv_cache_memory must be bytes or a size"):
        LLM(model, kv_cache_memory="much")
    with pytest.raises(ConfigError, match="seed must be a whole number between -9223372036854775808"):
        LLM(model, seed=2**64)
    with pytest.raises(ConfigError, match="max_num_seqs must be a whole number of at least 1; got None"):
        LLM(model, max_num_seqs=None)
    with pytest.raises(CheckpointError, match="no-such-model"):
        LLM(str(data / "no-such-model"))


def test_longer_than_the_model_was_made_for_is_said(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = data / "arch" / "llama"
    made_for = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    LLM(str(model), max_model_len=made_for)
    assert capsys.readouterr().err == ""
    llm = LLM(str(model), max_model_len=made_for + 1)
    assert f"made for {made_for} positions" in capsys.readouterr().err
    assert llm.engine.bounds.max_model_len == made_for + 1

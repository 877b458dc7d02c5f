"""Structured output with a model: what comes out validates, and nothing else about a request changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from octavo import LLM, ParameterError, SamplingParams
from octavo.bench import structured
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Add, Progress
from octavo.outputs import CompletionOutput
from octavo.request import Structured
from tests.schemas import SCHEMAS, Schema
from tests.short_answer import after_a_short_answer

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def answers(llm: LLM, schemas: list[Schema], max_tokens: int) -> list[CompletionOutput]:
    asked = [
        [{"role": "user", "content": f"Give an example of a JSON value for this schema: {json.dumps(s)[:600]}"}]
        for s in schemas
    ]
    params = [SamplingParams(max_tokens=max_tokens, seed=0, structured=Structured.json_schema(s)) for s in schemas]
    return [output.outputs[0] for output in llm.chat(asked, params)]


def fault(schema: Schema, answer: CompletionOutput) -> str | None:
    """Why an answer is none; for the report."""
    if answer.finish_reason != "stop":
        return f"{answer.finish_reason}: {answer.error or answer.text[-80:]!r}"
    try:
        jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(answer.text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"stop: {str(error).splitlines()[0]}: {answer.text!r:.200}"
    return None


def report(llm: LLM, schemas: list[Schema], max_tokens: int) -> int:
    """How many validate; the others are printed with their finish reason."""
    num_valid = 0
    for schema, answer in zip(schemas, answers(llm, schemas, max_tokens), strict=True):
        why = fault(schema, answer)
        num_valid += why is None
        if why is not None:
            print(f"{json.dumps(schema)[:200]}\n    {why}")
        assert why is None or answer.finish_reason == "length", why
    print(f"{num_valid} of {len(schemas)} answers validate")
    return num_valid


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[LLM]:
    with LLM(str(demo), max_model_len=2048) as llm:
        yield llm


def test_a_sample_of_schemas(llm: LLM) -> None:
    sample = SCHEMAS[10::20]
    assert report(llm, sample, 160) >= len(sample) - 2


@pytest.mark.long
def test_95_percent_of_200_schemas_validate(llm: LLM) -> None:
    assert report(llm, SCHEMAS, 512) >= 0.95 * len(SCHEMAS)


# The same bits


def test_same_bits_with_grammars(data: Path) -> None:
    """Alone or in a crowd that is preempted, with forced tokens appended at once or drawn one by one."""
    path = data / "arch" / "llama"
    schemas = [s for s in SCHEMAS if "format" not in json.dumps(s)][::9]
    asked = [
        Add(
            f"r{i}",
            list(range(5, 20 + i)),
            SamplingParams(
                temperature=1.5 if i % 2 else 0.0,
                max_tokens=80,
                logprobs=0 if i % 4 >= 2 else None,
                presence_penalty=0.5 if i % 3 == 0 else 0.0,
                min_tokens=20 if i % 5 == 0 else 0,
                ignore_eos=i % 6 == 0,
                structured=Structured.json_schema(schema),
            ),
            seed=i,
        )
        for i, schema in enumerate(schemas)
    ]
    plain = SamplingParams(max_tokens=200, ignore_eos=True)
    asked += [Add(f"plain{i}", list(range(9 + i)), plain, seed=i) for i in range(6)]  # they fill the cache
    alone = Engine(EngineConfig(model=str(path), prefix_caching=False))
    want: dict[str, list[Progress]] = {}
    for add in asked:
        want |= computed(alone, [add])
    block_bytes = alone.loaded.kv.block_bytes
    crowd = Engine(
        EngineConfig(
            model=str(path), kv_cache_memory=34 * block_bytes, max_num_seqs=16, max_num_batched_tokens=48, num_threads=2
        )
    )
    got = computed(after_a_short_answer(crowd), asked)
    for id, steps in want.items():
        assert joined(got[id]) == joined(steps), id
    assert crowd.stats().preemptions > 0
    assert any(len(p.token_ids) > 2 for steps in got.values() for p in steps), "tokens were forced"

    scored = [Add(a.id, a.prompt_ids, msgspec.structs.replace(a.params, logprobs=0), a.seed) for a in asked]
    for id, steps in computed(alone, scored).items():
        assert all(len(p.token_ids) <= 1 for p in steps)
        assert joined(steps)[0] == joined(want[id])[0], id
    for engine in (alone, crowd):
        engine.loaded.scheduler.check()


def computed(engine: Engine, adds: list[Add]) -> dict[str, list[Progress]]:
    steps: dict[str, list[Progress]] = {add.id: [] for add in adds}
    for add in adds:
        engine.add(add)
    while engine.has_work:
        output = engine.step()
        if output is None:
            engine.wait(1)
            continue
        for progress in output.progress:
            assert progress.error is None
            steps[progress.id].append(progress)
    return steps


def joined(steps: list[Progress]) -> tuple[list[int], list[Any], Any]:
    return (
        [token for p in steps for token in p.token_ids],
        [score for p in steps for score in p.logprobs],
        steps[-1].finish_reason,
    )


def test_scores_are_of_the_models_own_distribution(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, structured=Structured.choice(["zebra", "quartz"]))
    out = llm.generate("The capital of France is", params)[0].outputs[0]
    assert out.text in ("zebra", "quartz") and out.finish_reason == "stop"
    assert out.logprobs is not None
    first = out.logprobs[0]
    chosen = first[out.token_ids[0]]
    assert chosen.rank > 1 and chosen.logprob < -1
    assert [entry.rank for token, entry in first.items() if token != out.token_ids[0]] == [1]


# Together with other fields


def one(llm: LLM, structured: Structured, **fields: Any) -> CompletionOutput:
    params = SamplingParams(**{"max_tokens": 40, "seed": 1, **fields}, structured=structured)
    return llm.generate("Tell me:", params)[0].outputs[0]


A_TO_AAAA = Structured("regex", "a{1,40}")


def test_each_choice_has_its_own_place_in_the_grammar(llm: LLM) -> None:
    params = SamplingParams(
        n=4, seed=3, max_tokens=60, structured=Structured("regex", "(red|blue|green)(, [a-z]{3,9}){2}")
    )
    outputs = llm.generate("Colours:", params)[0].outputs
    assert len({out.text for out in outputs}) > 1
    for out in outputs:
        assert re.fullmatch("(red|blue|green)(, [a-z]{3,9}){2}", out.text), out


def test_min_tokens_and_ignore_eos_hold_the_end_back_while_anything_else_is_left(llm: LLM) -> None:
    assert len(one(llm, Structured("regex", "a*"), min_tokens=6, logit_bias={2: 100}).token_ids) == 6 + 1
    complete = one(llm, Structured.choice(["yes", "no"]), min_tokens=30)
    assert complete.text in ("yes", "no") and complete.finish_reason == "stop" and len(complete.token_ids) < 30
    ignoring = one(llm, A_TO_AAAA, ignore_eos=True, logit_bias={2: 100})
    assert ignoring.text == 40 * "a" and ignoring.finish_reason == "stop"


def test_stops_and_max_tokens_cut_where_they_cut(llm: LLM) -> None:
    assert one(llm, Structured("regex", "abc-def-ghi"), stop=["f-"]).text == "abc-de"
    cut = one(llm, Structured("regex", "[a-z]{200}"), max_tokens=5)
    assert cut.finish_reason == "length" and len(cut.token_ids) == 5
    for most in range(1, 6):
        out = one(llm, Structured("regex", "one two three four five six seven"), max_tokens=most)
        assert len(out.token_ids) == most and out.finish_reason == "length"


def test_penalties_and_bias_act_within_the_grammar(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (yes,), (no,) = (tokenizer.encode(text, add_special_tokens=False) for text in ("yes", "no"))
    choice = Structured.choice(["yes", "no"])
    for wanted, other in ((yes, no), (no, yes)):
        bias = {wanted: 100.0, other: -100.0} | {i: -100.0 for t in "yn" for i in tokenizer.encode(t, False)}
        assert one(llm, choice, logit_bias=bias).token_ids == [wanted]
    (ab,) = tokenizer.encode("ab", add_special_tokens=False)
    assert ab in one(llm, Structured("regex", "[ab]{8}"), logit_bias={ab: 100.0}).token_ids
    banned = one(llm, Structured("regex", "[ab]{8}"), logit_bias={ab: 100.0}, bad_words=["ab"])
    assert ab not in banned.token_ids and re.fullmatch("[ab]{8}", banned.text)
    loose = one(llm, Structured("regex", "([a-z]+ ){20}"), temperature=0, max_tokens=30)
    spread = one(llm, Structured("regex", "([a-z]+ ){20}"), temperature=0, max_tokens=30, repetition_penalty=5.0)
    assert len(set(spread.token_ids)) > len(set(loose.token_ids))


def test_a_dead_end_ends_that_request_only(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    digits = [tokenizer.encode(d, add_special_tokens=False)[0] for d in "0123456789"]
    fine = SamplingParams(max_tokens=8, seed=5)
    params = [
        fine,
        SamplingParams(max_tokens=8, structured=Structured.choice(["yes"]), allowed_token_ids=digits),
        SamplingParams(max_tokens=8, structured=Structured("regex", "[0-9]{4}"), allowed_token_ids=digits),
        SamplingParams(max_tokens=8, structured=Structured("json_schema", '{"if": {}}')),
        fine,
    ]
    first, dead, digit, refused, last = [o.outputs[0] for o in llm.generate(["Hi"] * 5, params)]
    assert dead.finish_reason == "error" and "allowed_token_ids" in str(dead.error)
    assert digit.text.isdigit() and len(digit.text) == 4
    assert refused.finish_reason == "error" and '"if"' in str(refused.error)
    assert first.text == last.text == llm.generate("Hi", fine)[0].outputs[0].text


def test_a_grammar_that_is_too_hard_on_its_way_ends_with_the_reason(llm: LLM) -> None:
    """Its first mask is within the limits, a later one is not."""
    wide = Structured.json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}})
    (opening,) = llm.get_tokenizer().encode('{"', add_special_tokens=False)
    out = one(llm, wide, logit_bias={opening: 100.0})
    assert out.token_ids == [opening] and out.finish_reason == "error"
    assert "the grammar" in str(out.error) and "max is 2000" in str(out.error)


@pytest.mark.parametrize("fields", [{"use_beam_search": True, "n": 2}], ids=str)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(structured=Structured.choice(["a"]), **fields)
    assert caught.value.param == "structured"


def test_benchmark(data: Path) -> None:
    """A small run of `octavo bench structured`; the figures are in docs/DECISIONS.md."""
    config = EngineConfig(model=str(data / "arch" / "llama"), num_threads=1)
    cost = structured.cost(config, num_prompts=4, input_len=8, output_len=24, repeat=1)
    assert cost.median == cost.runs[0] > 0 and "forced" in cost.details
    slow = structured.slow_grammars(config, output_len=18, repeat=1)
    assert slow.median == slow.runs[0] > 0

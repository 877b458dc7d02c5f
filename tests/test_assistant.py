"""Messages from tokens: marks that are special tokens or text, stop strings, characters over token borders, cut anywhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.engine.messages import Progress
from octavo.request import FinishReason, SamplingParams
from octavo.text.assistant import MessageOutput
from octavo.text.chat import ChatPrompt
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.message import AssistantMessage
from octavo.text.output import ChoiceOutput
from octavo.text.reasoning import FORMATS
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import FAMILIES
from tests import tool_outputs
from tests.tool_outputs import SCHEMAS

THINK = FORMATS[0]
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm, 🎈?<|end|><|start|>assistant"


@pytest.fixture(scope="module", params=["marks are text", "marks are tokens"])
def tokenizer(request: pytest.FixtureRequest, data: Path) -> Tokenizer:
    backend, special = load_gguf_tokenizer(data / "tokenizers" / "smollm2" / "vocab-only.gguf")
    if request.param == "marks are tokens":
        backend.add_special_tokens(
            [mark for parser, _ in FAMILIES.values() for mark in (*parser.markers, *THINK.markers)]
        )
    return Tokenizer(backend, special)


def prompt_of(family: str, tokenizer: Tokenizer) -> ChatPrompt:
    parser = FAMILIES[family][0]
    form = None if family == "harmony" else THINK
    marks = {*parser.markers, *THINK.markers}
    keep = frozenset(i for i in tokenizer.special_ids if tokenizer.id_to_token(i) in marks)
    return ChatPrompt("", False, None, None, False, keep, parser, form, False, SCHEMAS)


def read(
    tokenizer: Tokenizer, family: str, groups: list[list[int]], params: SamplingParams
) -> tuple[str, str, list[tuple[str, str]], int, int]:
    """Content, reasoning, calls, tokens and reasoning tokens of an answer that arrives in these groups of tokens."""
    prompt = prompt_of(family, tokenizer)
    output = ChoiceOutput(tokenizer, params, keep=prompt.keep)
    reader = MessageOutput(tokenizer, prompt)
    message = AssistantMessage()
    for i, ids in enumerate(groups):
        finish = FinishReason.LENGTH if i == len(groups) - 1 else None
        delta = output.push(Progress("x", 0, 0, ids, [], 0, finish))
        message.add(reader.push(delta))
        if delta.finish_reason is not None:
            break
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.content, message.reasoning, calls, output.num_tokens, reader.num_reasoning_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_do_not_depend_on_how_tokens_arrive(family: str, tokenizer: Tokenizer) -> None:
    draw = random.Random(family)
    for answer in tool_outputs.answers(family):
        thought = HARMONY_THOUGHT if family == "harmony" else "<think>\nHm, 🎈?\n</think>\n"
        ids = tokenizer.encode(thought + answer.raw, add_special_tokens=False)
        start = draw.randrange(len(answer.raw)) if answer.raw else 0
        for stop in ([], [answer.raw[start : start + 3] or "?"], ["🎈"]):
            params = SamplingParams(stop=stop)
            whole = read(tokenizer, family, [ids], params)
            if not stop:
                content = answer.content if family == "harmony" else answer.content.lstrip()
                assert whole[:2] == (content, "Hm, 🎈?")
                assert [name for name, _ in whole[2]] == [name for name, _ in answer.calls]
                assert 3 <= whole[4] <= len(tokenizer.encode(thought, add_special_tokens=False)) + 1
            assert read(tokenizer, family, [[token] for token in ids], params) == whole
            cuts = sorted(draw.sample(range(len(ids)), min(4, len(ids))))
            groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
            assert read(tokenizer, family, groups, params) == whole

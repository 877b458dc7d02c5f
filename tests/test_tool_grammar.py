"""Grammars of tool calls: whatever a model draws under them is calls that its family's parser reads, and schemas allow."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from octavo.grammar.matcher import Matcher
from octavo.grammar.source import Refused, compiled, grammar_of
from octavo.grammar.vocabulary import load_vocabulary
from octavo.request import ParameterError, Structured
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.message import AssistantMessage
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.tools import FAMILIES
from octavo.text.tools.grammar import answer_grammar
from octavo.text.tools.offer import Offer, read_offer

END = 2
WORD = {"type": "string", "maxLength": 6}
NUMBER = {"type": "integer", "minimum": -9, "maximum": 99}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "required": ["city"],
        "properties": {"city": WORD, "unit": {"type": "string", "enum": ["C", "F"]}},
    },
    {
        "name": "search",
        "required": ["tags", "n"],
        "properties": {
            "tags": {"type": "array", "items": WORD, "maxItems": 2},
            "n": NUMBER,
            "deep": {"$ref": "#/$defs/d"},
        },
        "$defs": {"d": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False}},
    },
    {"name": "now", "properties": {}},
]


def offered(*choice: Any) -> Offer:
    def tool(given: dict[str, Any]) -> dict[str, Any]:
        schema = {"type": "object", "additionalProperties": False, **{k: v for k, v in given.items() if k != "name"}}
        return {"type": "function", "function": {"name": given["name"], "parameters": schema}}

    return read_offer([tool(given) for given in TOOLS], *choice)


class Model:
    """A vocabulary, in which the families' marks are special tokens or ordinary text, and random draws from it."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(path)
        self.size = self.tokenizer.vocab_size
        self._vocabulary: LLTokenizer = load_vocabulary(path, self.size, [END])

    def matcher(self, structured: Structured) -> Matcher:
        grammar = compiled(structured, grammar_of(structured), self._vocabulary)
        return Matcher(grammar, self._vocabulary, self.size)

    def draw(self, structured: Structured, seed: str) -> str:
        """An answer of tokens that the masks allow, which ends as soon as it may."""
        random_ = random.Random(seed)
        walk = self.matcher(structured)
        ids: list[int] = []
        while not walk.complete:
            allowed = np.flatnonzero(np.unpackbits(walk.words().view(np.uint8), bitorder="little"))
            assert len(allowed), self.text(ids)
            if END in allowed and random_.random() < 0.7:
                break
            marks = [i for i in allowed.tolist() if i in self.tokenizer.special_ids and i != END]
            ids.append(random_.choice(marks if marks else allowed[allowed != END].tolist()))
            walk.accept(ids[-1])
            assert walk.error is None and len(ids) < 400, self.text(ids)
        return self.text(ids)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def accepts(self, structured: Structured, text: str) -> bool:
        walk = self.matcher(structured)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if walk.complete:
                return False
            walk.accept(token)
            if walk.error is not None:
                return False
        return walk.complete or bool(walk.words()[0] >> END & 1)


@pytest.fixture(scope="module")
def marks_are_text(data: Path) -> Model:
    return Model(data / "tokenizers" / "smollm2" / "vocab-only.gguf")


@pytest.fixture(scope="module")
def marks_are_tokens(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    backend, _ = load_gguf_tokenizer(data / "tokenizers" / "smollm2" / "vocab-only.gguf")
    folder = tmp_path_factory.mktemp("marked")
    backend.add_special_tokens(sorted({mark for parser, _ in FAMILIES.values() for mark in parser.markers}))
    backend.save(str(folder / "tokenizer.json"))
    return Model(folder)


@pytest.fixture(params=["marks_are_text", "marks_are_tokens"])
def model(request: pytest.FixtureRequest) -> Model:
    found: Model = request.getfixturevalue(request.param)
    return found


def read(family: str, text: str) -> AssistantMessage:
    parser = FAMILIES[family][0](None, {tool["name"]: tool for tool in TOOLS})
    message = AssistantMessage()
    for delta in (parser.feed(text), parser.finish()):
        message.add(delta)
    return message


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "harmony"])
def test_what_is_drawn_are_valid_calls(family: str, model: Model) -> None:
    check_drawn(family, model)


def check_drawn(family: str, model: Model) -> None:
    schemas = {tool.name: tool.schema for tool in offered().tools}
    for i, offer in enumerate(
        [offered("required"), offered("required", False), offered("required"), offered("required")]
    ):
        text = model.draw(answer_grammar(FAMILIES[family][1], offer, model.tokenizer), f"{family} {i}")
        message = read(family, text)
        assert message.content == "", text
        assert message.tool_calls, text
        assert offer.parallel or len(message.tool_calls) == 1, text
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "harmony"])
def test_what_the_model_chooses_freely(family: str, model: Model) -> None:
    shape = FAMILIES[family][1]
    grammar = partial(answer_grammar, shape, tokenizer=model.tokenizer)
    call = model.draw(grammar(offer=offered("required", False)), family)
    auto, one = grammar(offer=offered("auto")), grammar(offer=offered("auto", False))
    named = grammar(offer=offered({"type": "function", "function": {"name": "now"}}))
    assert model.accepts(auto, call) and model.accepts(one, call)
    assert model.accepts(auto, "Hello, {there}.") and not model.accepts(named, "Hello")
    assert model.accepts(auto, "Let me see. " + call) == model.accepts(one, "Let me see. " + call)
    if shape.trigger:
        assert model.accepts(auto, "Let me see. " + call)
        assert not model.accepts(auto, "Let me see. " + shape.trigger + "!")
        assert not model.accepts(one, call + shape.between + call)
    schema = Structured.json_schema({"type": "object", "properties": {"name": {"type": "string"}, "a": NUMBER}})
    either = grammar(offer=offered("auto"), structured=schema)
    for text in (call, '{"a": 5}', '{"name": "now"}', '{"name": "new", "a": 5}'):
        assert model.accepts(either, text), text
    assert not model.accepts(either, "Hello")
    assert "now" in {c.name for c in read(family, model.draw(named, family)).tool_calls}


def test_channels(marks_are_tokens: Model) -> None:
    """They are tokens, always."""
    model = marks_are_tokens
    check_drawn("harmony", model)
    grammar = partial(answer_grammar, FAMILIES["harmony"][1], tokenizer=model.tokenizer)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    said = "<|channel|>final<|message|>"
    for before in ("", thought):
        assert model.accepts(grammar(offer=offered("required")), before + call)
        assert not model.accepts(grammar(offer=offered("required")), before + said + "Hello")
        assert model.accepts(grammar(offer=offered("auto", False)), before + said + "Hello")
        only = grammar(offer=read_offer(None), structured=Structured.choice(["yes", "no"]))
        assert model.accepts(only, before + said + "yes")
        assert not model.accepts(only, before + said + "Hello") and not model.accepts(only, before + call)


def test_schemas_that_cannot_be_kept_are_refused(marks_are_text: Model) -> None:
    def grammar(family: str, **parameters: Any) -> Structured:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}
        return answer_grammar(FAMILIES[family][1], read_offer([tool], "required"), marks_are_text.tokenizer)

    with pytest.raises(ParameterError, match="the parameters of f use a: pattern"):
        grammar("glm", properties={"a": {"type": "string", "pattern": "x+"}})
    with pytest.raises(ParameterError, match="the parameters of f use anyOf"):
        grammar("qwen-xml", anyOf=[{}])
    for wrong in (
        {"enum": 5},
        {"enum": []},
        {"enum": [1]},
        {"minLength": "x"},
        {"maxLength": -1},
        {"maxLength": 2**17},
    ):
        with pytest.raises(ParameterError, match="the parameters of f use a: "):
            grammar("glm", properties={"a": {"type": "string", **wrong}})
    for required in ([1], [{}], ["b"], 5):
        with pytest.raises(ParameterError, match="the parameters of f use properties"):
            grammar("qwen-xml", required=required)
    for family, key in [("glm", "a\n"), ("qwen-xml", "a>"), ("glm", ""), ("pythonic", "class")]:
        with pytest.raises(ParameterError, match="the parameters of f use the property"):
            grammar(family, properties={key: {}})
    with pytest.raises(ParameterError, match="the property not-a-name"):
        grammar("pythonic", properties={"not-a-name": {}})
    with pytest.raises(Refused, match="uniqueItems"):
        marks_are_text.matcher(grammar("hermes", properties={"a": {"type": "array", "uniqueItems": True}}))
    assert grammar("hermes").field == "tools"

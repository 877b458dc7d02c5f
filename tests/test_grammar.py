"""Grammars without a model: what they allow, what they refuse, and what compiling them may cost."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest
from llguidance import LLTokenizer

from octavo.grammar.compiler import NUM_THREADS, Compilation, Compiler
from octavo.grammar.matcher import Matcher
from octavo.grammar.source import MAX_NESTING, Refused, compiled, grammar_of
from octavo.grammar.vocabulary import load_vocabulary
from octavo.request import MAX_STRUCTURED, GateError, ParameterError, Structured
from octavo.server.structured import StructuredFields
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.schemas import SCHEMAS
from tests.waiting import SECONDS, until

VOCAB_SIZE = 49152
END = 2


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    return data / "tokenizers" / "smollm2" / "vocab-only.gguf"


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> LLTokenizer:
    return load_vocabulary(model, VOCAB_SIZE, [END])


@pytest.fixture
def compiler(model: Path) -> Iterator[Compiler]:
    compiler = Compiler(str(model), VOCAB_SIZE, [END], lambda: None)
    yield compiler
    compiler.close()


def matcher(structured: Structured, vocabulary: LLTokenizer) -> Matcher:
    return Matcher(compiled(structured, grammar_of(structured), vocabulary), vocabulary, VOCAB_SIZE)


def allowed(matcher: Matcher) -> list[int]:
    ids: list[int] = np.flatnonzero(np.unpackbits(matcher.words().view(np.uint8), bitorder="little")).tolist()
    return ids


def refusal(compilation: Compilation) -> str:
    with pytest.raises(ParameterError) as caught:
        until(compilation.is_open)
    assert caught.value.param == compilation.structured.field
    return str(caught.value)


def failed(compilation: Compilation) -> str:
    with pytest.raises(GateError) as caught:
        until(compilation.is_open)
    return str(caught.value)


# What is allowed


def test_whatever_is_drawn_under_the_masks_validates(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    """Random walks through all 200 schemas; every second draw closes a text, a list or an object if it can."""
    rng = random.Random(0)
    closing = {i for i in range(VOCAB_SIZE) if tokenizer.id_to_bytes(i)[-1:] in (b'"', b"}", b"]")}
    validated = 0
    for schema in SCHEMAS:
        walk = matcher(Structured.json_schema(schema), vocabulary)
        ids: list[int] = []
        while not walk.complete and len(ids) < 300:
            choices = allowed(walk)
            assert choices, walk.error
            if rng.random() < 0.5:
                choices = sorted(closing.intersection(choices)) or choices
            if (token := rng.choice(choices)) == END:
                break
            walk.accept(token)
            ids.append(token)
        else:
            if not walk.complete:
                continue
        text = tokenizer.decode(ids).replace(":60", ":59")  # RFC 3339 has leap seconds, the validator has not
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
        validated += 1
    assert validated >= 190


@pytest.mark.parametrize(
    ("structured", "right", "wrong"),
    [
        (Structured.choice(["yes", "no", "maybe so"]), ["yes", "no", "maybe so"], ["ye", "yess", "Yes"]),
        (Structured("regex", r"^\d{2}-\w+$"), ["12-ab", "00-_"], ["1-ab", "١٢-ab", "12-é"]),
        (Structured("regex", r"a\$"), ["a$"], ["a", r"a\$"]),
        (Structured("lark", 'start: "[" (ITEM ("," ITEM)*)? "]"\nITEM: /[0-9]+/'), ["[]", "[1,22]"], ["[1,]", "[,1]"]),
        (Structured("gbnf", 'root ::= "a" rest\nrest ::= ("b" | "c")+'), ["ab", "acb"], ["a", "ba"]),
        (Structured("json_schema", "true"), ["1", '{"a": [null]}'], ["", "{'a': 1}"]),
        (Structured.json_schema({"type": "object"}), ["{}", '{"a": {"b": 2.5e3}}', '{\n    "a": 1\n}'], ["[]", "{}  "]),
    ],
    ids=lambda value: value.kind if isinstance(value, Structured) else "",
)
def test_kinds(
    structured: Structured, right: list[str], wrong: list[str], vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    for text in right + wrong:
        walk = matcher(structured, vocabulary)
        for byte_or_token in _spelt(text, tokenizer, walk):
            walk.accept(byte_or_token)
        fits = walk.error is None and (walk.complete or END in allowed(walk))
        assert fits == (text in right), text


def _spelt(text: str, tokenizer: Tokenizer, walk: Matcher) -> Iterator[int]:
    """The longest tokens that the grammar allows here and the text begins with, until it allows none."""
    rest = text.encode()
    while rest:
        fitting = [i for i in allowed(walk) if (b := tokenizer.id_to_bytes(i)) and rest.startswith(b) and i != END]
        if not fitting:
            yield tokenizer.encode(rest.decode(errors="replace"), add_special_tokens=False)[0]
            return
        token = max(fitting, key=lambda i: len(tokenizer.id_to_bytes(i)))
        yield token
        rest = rest[len(tokenizer.id_to_bytes(token)) :]


def test_special_tokens_are_no_text(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    any_text = matcher(Structured("regex", r"(.|\n)*"), vocabulary)
    assert tokenizer.special_ids.intersection(allowed(any_text)) == {END}
    for name in ("<[1]>", "<|im_start|>"):
        assert allowed(matcher(Structured("lark", f'start: {name} "a"'), vocabulary)) == [1]


def test_a_trigger_obliges_to_its_tag(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    tags = [{"begin": f"<call={name}>", "schema": {"const": name}, "end": "</call>"} for name in ("f", "g")]
    format = {"type": "structural_tag", "structures": tags, "triggers": ["<call="]}
    structured = msgspec.convert({"response_format": format}, StructuredFields).structured()
    assert structured is not None
    for text in ("any text", 'a <call=f>"f"</call> b', '<call=g>"g"</call><call=f>"f"</call>', "<cal"):
        walk = matcher(structured, vocabulary)
        for token in tokenizer.encode(text, add_special_tokens=False):
            walk.accept(token)
        assert walk.error is None and END in allowed(walk), text
    for text in ("<call=h>", '<call=f>"g"', '<call=f>"f"</tool>'):
        walk = matcher(structured, vocabulary)
        for token in tokenizer.encode(text, add_special_tokens=False):
            walk.accept(token)
        assert walk.error is not None, text


def test_blanks_are_bounded(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    """Between two parts of JSON is a space, or a new line with its indent: nothing that could go on for ever."""
    walk = matcher(Structured.json_schema({"type": "object", "properties": {"a": {}}, "required": ["a"]}), vocabulary)
    for token in tokenizer.encode("{", add_special_tokens=False):
        walk.accept(token)
    count = 0
    while blanks := [i for i in allowed(walk) if tokenizer.id_to_bytes(i).isspace()]:
        walk.accept(min(blanks, key=lambda i: len(tokenizer.id_to_bytes(i))))
        count += 1
    assert 1 <= count <= 34


def test_without_an_end_token(model: Path, tokenizer: Tokenizer) -> None:
    vocabulary = load_vocabulary(model, VOCAB_SIZE, [])
    walk = matcher(Structured("regex", "ab*"), vocabulary)
    walk.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert not walk.complete
    assert all(tokenizer.id_to_bytes(i).strip(b"b") == b"" for i in allowed(walk))
    done = matcher(Structured("regex", "a"), vocabulary)
    done.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert done.complete


def test_replay_gives_the_same_masks(vocabulary: LLTokenizer) -> None:
    """After a restart the tokens come at once."""
    rng = random.Random(1)
    for schema in SCHEMAS[::20]:
        live = matcher(Structured.json_schema(schema), vocabulary)
        ids: list[int] = []
        while not live.complete and len(ids) < 40:
            token = rng.choice(allowed(live))
            if token == END:
                break
            live.accept(token)
            ids.append(token)
        again = matcher(Structured.json_schema(schema), vocabulary)
        for token in ids:
            again.accept(token)
        assert allowed(again) == allowed(live)


# What is refused


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "if": {}, "properties": {"a": {"not": {}}, "b": {"uniqueItems": True}}},
         ['"if"', '"not"', '"uniqueItems"']),
        ({"type": "object", "dependentRequired": {"a": ["b"]}, "propertyNames": {"pattern": "x"}},
         ['"dependentRequired"', '"propertyNames"']),
        ({"type": "string", "format": "iri"}, ["iri"]),
        ({"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}, ["oneOf"]),
        ({"x-guidance": {"lenient": True}, "type": "array", "contains": {}}, ['"contains"']),
        ({"type": "string", "pattern": "^(?=a)b"}, ["look-around"]),
        ({"$ref": "https://example.com/schema.json"}, ["https://example.com/schema.json"]),
        ({"type": "objct"}, ["objct"]),
        ({"type": "integer", "minimum": 5, "maximum": 2}, ["minimum"]),
        ({"$ref": "#"}, ["no token can begin"]),
        (False, ['"not"']),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_honoured_is_listed(schema: object, named: list[str], vocabulary: LLTokenizer) -> None:
    structured = Structured("json_schema", json.dumps(schema))
    with pytest.raises(Refused) as caught:
        matcher(structured, vocabulary)
    for name in named:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "structured",
    [
        Structured("json_schema", "{"),
        Structured("json_schema", "[]"),
        Structured("json_schema", '{"items":' * (MAX_NESTING + 1) + "{}" + "}" * (MAX_NESTING + 1)),
        Structured("json_schema", "[" * 100_000),
        Structured("choice", "[]"),
        Structured("choice", '["a", ""]'),
        Structured("choice", '{"a": 1}'),
        Structured("regex", "a("),
        Structured("regex", r"\bword"),
        Structured("regex", "(" * 20_000 + ")" * 20_000),
        Structured("lark", "start: nowhere"),
        Structured("lark", "rule: "),
        Structured("lark", "start: start"),
        Structured("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        Structured("lark", 'start: <|nowhere|> "a"'),
        Structured("gbnf", "root ::= ("),
        Structured("gbnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ],
    ids=lambda s: f"{s.kind} {s.text[:20]}",
)
def test_what_is_wrong_is_refused(structured: Structured, vocabulary: LLTokenizer) -> None:
    with pytest.raises(Refused) as caught:
        matcher(structured, vocabulary)
    assert len(str(caught.value)) < 1000


def test_limits_are_named_before_anything_is_compiled() -> None:
    with pytest.raises(ParameterError, match=str(MAX_STRUCTURED)) as caught:
        Structured("regex", "a" * (MAX_STRUCTURED + 1), "guided_regex")
    assert caught.value.param == "guided_regex"
    with pytest.raises(ParameterError, match="empty"):
        Structured("lark", " ")


# What compiling may cost


def test_compiling_is_bounded_and_harms_nobody(compiler: Compiler) -> None:
    """One schema takes minutes, one gigabytes; those beside them are not held up, and the same process goes on."""
    bombs = [
        Structured.json_schema({"type": "integer", "multipleOf": 100_000_007}),
        Structured.json_schema({"allOf": [{"multipleOf": 10_007, "type": "integer"}, {"multipleOf": 10_009}]}),
    ]
    caught = [compiler.compile(bomb) for bomb in bombs]
    good = compiler.compile(Structured.json_schema({"type": "object"}))
    until(good.is_open)
    for compilation in caught:
        assert "4 seconds of processor time or the 96 MB of memory" in refusal(compilation)
    until(compiler.compile(Structured.choice(["after"])).is_open)
    with pytest.raises(ParameterError):  # remembered
        compiler.compile(bombs[0]).is_open()


def test_equal_grammars_are_compiled_once_and_the_oldest_are_forgotten(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.grammar.compiler.CACHE_ENTRIES", 3)
    first = compiler.compile(Structured.choice(["a", "b"]))
    assert compiler.compile(Structured.choice(["a", "b"])) is first
    until(first.is_open)
    assert compiler.num_compiled == 1
    for i in range(3):
        until(compiler.compile(Structured.choice([str(i)])).is_open)
    assert compiler.compile(Structured.choice(["a", "b"])) is first  # for it is in use
    del first
    gc.collect()
    until(compiler.compile(Structured.choice(["a", "b"])).is_open)
    assert compiler.num_compiled == 5


def test_what_nobody_waits_for_any_more_is_not_compiled(compiler: Compiler) -> None:
    """A client that asks for much and leaves keeps nobody waiting."""
    busy = threading.Event()
    for _ in range(NUM_THREADS):
        compiler._threads.submit(busy.wait, SECONDS)
    first = compiler.compile(Structured.choice(["first"]))
    for i in range(200):
        compiler.compile(Structured.choice(["left", str(i)]))
    last = compiler.compile(Structured.choice(["last"]))
    busy.set()
    for compilation in (first, last):
        until(compilation.is_open)
    assert compiler.num_compiled == 2


def test_a_trial_process_that_was_killed_is_replaced(compiler: Compiler) -> None:
    until(compiler.compile(Structured.choice(["a"])).is_open)
    assert compiler._trials is not None
    os.kill(compiler._trials._process.pid, signal.SIGKILL)
    compiler._trials._process.wait()
    until(compiler.compile(Structured.choice(["b"])).is_open)


def test_a_failure_is_not_the_grammars_fault_and_is_not_kept(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the process for trials: it does not answer in time, or is killed meanwhile."""
    grammar = Structured.choice(["a", "b"])
    monkeypatch.setattr("octavo.grammar.compiler.WALL_SECONDS", 1e-6)
    late = compiler.compile(grammar)
    failed(late)
    monkeypatch.undo()
    again = compiler.compile(grammar)
    assert again is not late
    until(again.is_open)
    assert compiler.num_refused == 0
    trials = compiler._trials
    assert trials is not None
    os.kill(trials._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        verdict = threads.submit(trials.run, grammar)
        os.kill(trials._process.pid, signal.SIGKILL)
        with pytest.raises(OSError, match=r"has ended|pipe|reset"):
            verdict.result()


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    compiler = Compiler(str(tmp_path), VOCAB_SIZE, [END], lambda: None)
    assert "tokenizer" in failed(compiler.compile(Structured.choice(["a"])))
    compiler.close()


def test_who_waits_is_woken(model: Path) -> None:
    woken = threading.Event()
    compiler = Compiler(str(model), VOCAB_SIZE, [END], woken.set)
    compilation = compiler.compile(Structured.choice(["a"]))
    assert woken.wait(SECONDS)
    assert compilation.is_open()
    compiler.close()

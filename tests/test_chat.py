"""Chat templates."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.request import ParameterError
from octavo.text.chat import ChatFormat, ChatOptions
from octavo.text.template import ChatTemplateError
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.tools.offer import read_offer

DATA = Path(__file__).parent / "data"
HI = [{"role": "user", "content": "Hi"}]

load = functools.lru_cache(load_tokenizer)


def render(tokenizer: Tokenizer, messages: Any, tools: Any = (), template: str | None = None, **options: Any) -> str:
    return ChatFormat(tokenizer, template).prompt(messages, ChatOptions(offer=read_offer(tools), **options)).text


def encode_chat(tokenizer: Tokenizer, messages: Any, **options: Any) -> list[int]:
    return ChatFormat(tokenizer).encode(render(tokenizer, messages, **options))


def check_cases(tokenizer: Tokenizer, folder: Path) -> None:
    cases = json.loads((folder / "chat_cases.json").read_text())["cases"]
    assert len(cases) > 5
    for case in cases:
        generates = case["add_generation_prompt"]
        assert render(tokenizer, case["messages"], add_generation_prompt=generates) == case["rendered"]
        assert encode_chat(tokenizer, case["messages"], add_generation_prompt=generates) == case["ids"]


def test_smollm2_from_gguf() -> None:
    check_cases(load(DATA / "tokenizers/smollm2/vocab-only.gguf"), DATA / "tokenizers/smollm2")


def test_smollm2_from_json(fixtures: Path) -> None:
    check_cases(load(fixtures / "tokenizers/smollm2"), fixtures / "tokenizers/smollm2")


def test_template_in_a_file_of_its_own() -> None:
    assert render(load(DATA / "arch/llama"), HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A function that makes a tokenizer with the given chat_template."""

    def make(template: Any) -> Tokenizer:
        shutil.copytree(DATA / "tokenizers/tiny-spm", tmp_path / "model", dirs_exist_ok=True)
        file = tmp_path / "model/tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
        return load_tokenizer(tmp_path / "model")

    return make


def test_named_templates(model: Any) -> None:
    tokenizer = model([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }} <tool_call>"}])
    assert tokenizer.chat_template == "plain"
    assert render(tokenizer, HI) == "plain"
    assert render(tokenizer, HI, tools=[{"type": "function", "function": {"name": "hammer"}}]) == "hammer <tool_call>"


def test_bos_is_written_once(model: Any) -> None:
    written = encode_chat(model("{{ bos_token }}{{ messages[0]['content'] }}"), HI)
    added = encode_chat(model("{{ messages[0]['content'] }}"), HI)
    assert written[0] == added[0] == 1
    assert written.count(1) == added.count(1) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),  # trim and lstrip blocks
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),  # no HTML escapes
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ messages | length }}{% endgeneration %}b", "a1b"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ bos_token + eos_token }}{{ add_generation_prompt }}{{ tools is none }}", "<s></s>TrueTrue"),
        ("{{ thinking }}", "on"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
    ],
)
def test_dialect(model: Any, template: str, expected: str) -> None:
    assert render(model(template), HI, variables={"thinking": "on"}) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "^Roles must alternate!$"),
        ("{{ messages[0]['content'] + 1 }}", "refused the messages: can only concatenate"),
        ("{% if %}", "refused the messages"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages.append(1) }}", "refused the messages"),  # the sandbox changes nothing
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
    ],
)
def test_errors_carry_the_cause(model: Any, template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(model(template), HI)


def test_text_parts_are_joined(model: Any) -> None:
    tokenizer = model("{{ messages[0]['content'] }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    assert render(tokenizer, messages) == "a\nb"
    assert messages[0]["content"] is parts
    with pytest.raises(ChatTemplateError, match="of type text; got 'image_url'"):
        render(tokenizer, [{"role": "user", "content": [{"type": "image_url"}]}])
    words: Any = "Hello"
    with pytest.raises(ChatTemplateError, match=r"a message is .* got 'H'"):
        render(tokenizer, words)


def test_no_template_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        render(load(DATA / "tokenizers/tiny-wordpiece"), HI)

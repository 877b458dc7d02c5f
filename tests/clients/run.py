"""Clients of others against a real server: run by scripts/clients, in an environment that has them and not Octavo.

A tool round trip is: the model calls a function, the client runs it and sends the result, the model answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv/bin/python"
TINY = ROOT / "tests/data/arch/llama"

CITIES = {"Paris": "18 degrees, cloudy"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": sorted(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIPTION = "The weather of a city."
TOOL = {"type": "function", "function": {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}}
QUESTION = "What is the weather in Paris?"
_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
SHOWN = (
    "".join(f"Q: What is the weather in {city}?\nA: {_CALL % city}\n" for city in ("Rome", "Oslo"))
    + f"Q: {QUESTION}\nA:"
)
"""The same with the form of a call, for clients that cannot demand one: the small model decides by itself to call."""


@contextmanager
def server(model: str, *options: str) -> Iterator[str]:
    """The URL of an `octavo serve`."""
    command = [PYTHON, "-m", "octavo.cli.main", "serve", model, "--port", "0", "--request-log", "off", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line.split()[-1] for line in process.stdout if line.startswith("listening on "))
        finally:
            process.terminate()


def langchain(url: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model="", temperature=0, max_completion_tokens=64)
    chat.model_name = model_name(url)
    bound = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    streamed = None
    for chunk in bound.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
    result = CITIES[call["args"]["city"]]
    messages += [answer, ToolMessage(result, tool_call_id=call["id"])]
    final = chat.invoke(messages)
    assert final.content and final.usage_metadata["output_tokens"] > 0
    return str(final.content)


def litellm(url: str) -> str:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks a server of its own for prices
    import litellm

    def ask(messages: list[Any], **fields: Any) -> Any:
        name = "openai/" + model_name(url)
        return litellm.completion(
            name,
            messages,
            api_base=url + "/v1",
            api_key="none",
            temperature=0,
            max_tokens=64,
            tools=[TOOL],
            parallel_tool_calls=False,
            **fields,
        )

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = ask(messages, tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    chunks = list(ask(messages, tool_choice="required", stream=True))
    joined = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    assert joined.tool_calls[0].function.arguments == call.function.arguments
    result = CITIES[json.loads(call.function.arguments)["city"]]
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    content = ask(messages, tool_choice="none").choices[0].message.content
    assert content
    return str(content)


def llm(url: str) -> str:
    """`llm` has no tool_choice: the model itself must decide to call, so the question shows it how."""
    with tempfile.TemporaryDirectory() as home:
        return _chain_of_llm(url, Path(home))


def _chain_of_llm(url: str, home: Path) -> str:
    os.environ["LLM_USER_PATH"] = str(home)
    entry = {"model_id": "octavo", "model_name": model_name(url), "api_base": url + "/v1", "supports_tools": True}
    (home / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    import llm

    called: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return CITIES.get(city, "unknown")

    options = {"temperature": 0, "max_tokens": 64, "stop": "\nQ:"}
    model = llm.get_model("octavo")
    chain = model.chain(SHOWN, tools=[get_weather], key="none", options=options)
    answers = list(chain.responses())
    assert called == ["Paris"], [answer.text() for answer in answers]
    content = answers[-1].text()
    assert len(answers) > 1 and content
    return str(content)


def lm_eval(url: str) -> str:
    """Loglikelihoods of choices, through local-completions and through `octavo.LLM`: the same numbers."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model_name(url), "base_url": url + "/v1/completions", "tokenizer": str(TINY),
            "tokenizer_backend": "huggingface", "num_concurrent": 1, "max_length": 512,
        },
        tasks=["octavo_local"],
        task_manager=TaskManager(include_path=str(HERE), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )  # fmt: skip
    samples = sorted(found["samples"]["octavo_local"], key=lambda sample: sample["doc_id"])
    scored = [[float(score[0]) for score in sample["filtered_resps"]] for sample in samples]
    direct = subprocess.run([PYTHON, HERE / "direct.py", TINY], cwd=ROOT, check=True, capture_output=True, text=True)
    expected = json.loads(direct.stdout)
    assert scored == expected["logprobs"], (scored, expected["logprobs"])
    accuracy = found["results"]["octavo_local"]["acc,none"]
    assert accuracy == expected["accuracy"]
    count = sum(map(len, scored))
    return f"accuracy {accuracy:.3f}; {count} loglikelihoods equal bit for bit"


def model_name(url: str) -> str:
    from urllib.request import urlopen

    with urlopen(url + "/v1/models") as response:
        return str(json.load(response)["data"][0]["id"])


CLIENTS: dict[str, tuple[str, str, Callable[[str], str]]] = {
    "langchain": ("langchain-openai", "demo", langchain),
    "litellm": ("litellm", "demo", litellm),
    "llm": ("llm", "demo", llm),
    "lm-eval": ("lm_eval", str(TINY), lm_eval),
}


def main(wanted: list[str]) -> int:
    failed = 0
    for name in wanted or CLIENTS:
        package, model, client = CLIENTS[name]
        with server(model, "--max-model-len", "512") as url:
            try:
                told = "passed: " + client(url)
            except Exception as error:
                failed += 1
                told = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name} {version(package)} {' '.join(told.split())}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

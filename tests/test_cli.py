"""The command line, as its user meets it: each command in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import LLM, SamplingParams
from octavo.cli.options import make_config, read_config
from octavo.config import ConfigError, EngineConfig, ServerConfig
from tests.waiting import SECONDS

ROOT = Path(__file__).parents[1]


def run(*arguments: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, input=stdin.encode(), capture_output=True, timeout=SECONDS)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_help_names_commands_and_every_option() -> None:
    top = run("--help").stdout
    for command in ("serve", "generate", "chat", "show", "diff", "bench", "pull"):
        assert f"\n  {command}" in top
    serve = run("serve", "--help").stdout
    for field in dataclasses.fields(ServerConfig):
        if field.name != "model":
            assert f"--{field.name.replace('_', '-')} " in serve
    assert "Example: " in serve
    assert run("--version").stdout == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serve", "no/such/model.gguf"], 1, "no/such/model.gguf: no such file"),
        (["serve", "tests"], 1, "tests: not a model"),
        (["generate", "README.md", "Hello"], 1, "README.md: not a model"),
        (["generate", "MODEL", "Hello", "--max-model-len", "0"], 2, "max_model_len"),
        (["generate", "MODEL", "Hello", "--kv-cache-memory", "lots"], 2, "2GiB"),
        (["generate", "MODEL", "Hello", "--kv-cache-memory", "1KiB"], 1, "KV"),
        (["generate", "MODEL", "Hello", "--temperature", "-1"], 2, "temperature"),
        (["generate", "MODEL", "Hello", "--max-tokens", "9999"], 2, "512"),
        (["generate", "MODEL", "Hello", "--isa", "sse"], 2, "generic, avx2, avx512, amx"),
        (["show", "MODEL", "--config", "no.toml"], 2, "no.toml: No such file"),
        (["serve", "MODEL", "--served-model-name", "a", "--lora", "a=b"], 2, "the name of the model itself"),
        (["bench", "speed"], 2, "there is no workload 'speed'; there are throughput, latency, prefill, decode"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_errors_are_one_line(data: Path, arguments: list[str], code: int, says: str) -> None:
    done = run(*[str(data / "arch" / "llama") if a == "MODEL" else a for a in arguments])
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert says in lines[0]


def test_generate_equals_the_offline_class(data: Path) -> None:
    model = data / "arch" / "llama"
    with LLM(str(model), kv_cache_memory="4MiB") as llm:
        expected = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    assert run("generate", model, "Hello", "--max-tokens", 20).stdout == expected + "\n"
    assert run("generate", model, "--max-tokens", 20, stdin="Hello").stdout == expected + "\n"


def test_generate_reads_files_and_writes_text_or_jsonl(data: Path, tmp_path: Path) -> None:
    model, flags = data / "arch" / "llama", ["--max-tokens", 8]
    prompts = ["Hello", "two\nlines", "Good day"]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 4, "n": 2, "seed": 5}
    with LLM(str(model), kv_cache_memory="4MiB") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8)
        expected = [output.outputs[0].text for output in llm.generate(prompts, greedy)]
        params = SamplingParams(temperature=0, max_tokens=4, n=2, seed=5)
        talked = [choice.text for choice in llm.chat(chat["messages"], params)[0].outputs]
    whole, lines, jsonl, out = (tmp_path / name for name in ("whole.txt", "lines.txt", "in.jsonl", "out.jsonl"))
    whole.write_text(prompts[1])
    assert run("generate", model, "--file", whole, *flags).stdout == expected[1] + "\n"
    lines.write_text(f"{prompts[0]}\n\n{prompts[2]}\r\n")
    done = run("generate", model, "-f", lines, "--format", "lines", *flags)
    assert done.stdout == f"{expected[0]}\n{expected[2]}\n", done.stderr
    jsonl.write_text("\n".join(map(json.dumps, [prompts[1], chat, {"prompt": prompts[0], "logprobs": 1}])))
    assert run("generate", model, "-f", jsonl, "-o", out, "--json", *flags).stdout == ""
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert answers[0]["choices"][0]["text"] == expected[1]
    assert [choice["message"]["content"] for choice in answers[1]["choices"]] == talked
    assert len(answers[2]["choices"][0]["logprobs"]["token_logprobs"]) == answers[2]["usage"]["completion_tokens"] == 8
    piped = run("generate", model, "-f", "-", "--format", "jsonl", *flags, stdin=jsonl.read_text()).stdout
    assert piped == "".join(f"{text}\n" for text in [expected[1], *talked, expected[0]])


@pytest.mark.parametrize(
    ("stdin", "flags", "says"),
    [
        ('"a"\n{"prompt": "b", "colour": 1}', ["--format", "jsonl"], "prompt 2: unknown field: colour"),
        ('"a"\n{"prompt": ', ["--format", "jsonl"], "line 2 is neither"),
        ('{"prompt": "b", "stream": true}', ["--format", "jsonl"], "stream"),
        ("\n\n", ["--format", "lines"], "no prompts"),
        ("a", ["--format", "csv"], "text, lines, jsonl"),
        ("a", ["--file", "nowhere.txt"], "nowhere.txt"),
        ("a", ["Hello", "--file", "nowhere.txt"], "not both"),
    ],
)
def test_generate_names_what_it_cannot_read(data: Path, stdin: str, flags: list[str], says: str) -> None:
    done = run("generate", data / "arch" / "llama", *flags, stdin=stdin)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def test_streams_that_are_closed(data: Path) -> None:
    octavo, model = f"{sys.executable} -m octavo.cli.main", data / "arch" / "llama"
    for command, code in (
        (f"{octavo} generate {model} Hello <&-", 0),
        (f"{octavo} generate {model} <&- >&- 2>&-", 2),
        (f"(echo Hello; echo again) | {octavo} chat {model} | true; exit ${{PIPESTATUS[1]}}", 1),
    ):
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, timeout=SECONDS)
        assert (done.returncode, done.stderr) == (code, b""), (command, done.stderr)


def test_shell_completion_can_be_had() -> None:
    assert "--install-completion" in run("--help").stdout
    words = {"_OCTAVO_COMPLETE": "complete_bash", "COMP_WORDS": "octavo ge", "COMP_CWORD": "1"}
    code = "from octavo.cli.app import make_app; make_app()(prog_name='octavo')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == ["generate"]


def test_chat_answers_each_line(data: Path) -> None:
    options = ["--max-tokens", 8, "--seed", 1]
    done = run("chat", data / "arch" / "llama", *options, stdin="Hello\n/clear\nHello\nAnd again\n")
    assert done.returncode == 0, done.stderr
    with LLM(str(data / "arch" / "llama"), kv_cache_memory="4MiB") as llm:
        params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=8, seed=1)
        first = llm.chat([{"role": "user", "content": "Hello"}], params)[0].outputs[0].text
    assert done.stdout.startswith(f"{first}\n{first}\n")


def test_show_and_diff(data: Path) -> None:
    shown = run("show", data / "arch" / "llama").stdout
    assert "linear" in shown
    assert "arena" in shown
    assert "add(" in run("show", data / "arch" / "llama", "--no-fuse").stdout
    compared = run("diff", data / "gguf" / "tiny-llama-q4_1.gguf")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert compared.stdout.endswith("all within tolerance\n")
    for command, flag in (("show", "--num-threads"), ("diff", "--seed")):  # would make no difference
        assert "No such option" in run(command, flag, 1).stderr


def test_bench_prints_its_workload(data: Path) -> None:
    small = ["--repeat", 1, "--num-prompts", 4, "--input-len", 16, "--output-len", 4]
    (result,) = json.loads(run("bench", "throughput", data / "arch" / "llama", *small, "--json").stdout)["results"]
    assert result["median"] == result["runs"][0] > 0
    assert "4 distinct random prompts" in result["workload"]
    assert "16 tokens in and 4 out" in result["workload"]
    table = run("bench", "latency", data / "arch" / "llama", *small).stdout
    assert "one stream" in table
    assert "tokens/s" in table
    done = run("bench", "startup", data / "arch" / "llama", "--repeat", 1, "--json")
    (start,) = json.loads(done.stdout)["results"]
    assert start["median"] > 0
    assert done.stderr == ""
    refused = run("bench", "startup", data / "arch" / "llama", "--kv-cache-memory", "1KiB", "--no-fuse")
    assert "kv_cache_memory is 1.00 KiB" in refused.stderr  # the server was given the options


def test_pull_prints_where(data: Path) -> None:
    assert run("pull", data / "arch" / "llama").stdout == f"{data / 'arch' / 'llama'}\n"


def test_config_files(tmp_path: Path, data: Path) -> None:
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text('model = "x"\nkv-cache-memory = "2GiB"\nprefix_caching = false\n')
    yaml.write_text("model: x\nkv_cache_memory: 2GiB\nprefix-caching: false\n")
    for file in (toml, yaml):
        config = make_config(EngineConfig, read_config(file, EngineConfig))
        assert (config.model, config.kv_cache_memory, config.prefix_caching) == ("x", 2 * 2**30, False)
    toml.write_text("max_model_len = 100\nmax_num_seqs = 3\n")
    done = run("generate", data / "arch" / "llama", "Hello", "--max-tokens", 200, "--config", toml)
    assert "at most 100" in done.stderr
    done = run("generate", data / "arch" / "llama", "Hi", "--max-tokens", 200, "--config", toml, "--max-model-len", 300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "max_model_length = 5", "max_model_length"),
        ("a.toml", "max_model_len = 'five'", "max_model_len: Expected int"),
        ("a.toml", "= 5", "a.toml"),
        ("a.yaml", "- a\n- b", "name: value"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.json", "{}", ".toml, .yaml or .yml"),
    ],
)
def test_bad_config_files(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        make_config(EngineConfig, read_config(file, EngineConfig))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_config_rejects_what_it_cannot_do() -> None:
    for values, says in [
        ({"port": 70000}, "65535"),
        ({"drain_seconds": -1}, "drain_seconds"),
        ({"served_model_name": ""}, "served_model_name must not be empty"),
        ({"otlp_endpoint": "collector:4318"}, "otlp_endpoint must be an address"),
        ({"max_num_seqs": 1000}, "max_num_batched_tokens"),
        ({"fuse": "yes"}, "fuse"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory"),
    ]:
        with pytest.raises(ConfigError, match=says):
            make_config(ServerConfig, values)

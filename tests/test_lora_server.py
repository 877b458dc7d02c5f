"""Adapters over HTTP: chosen by name on every protocol, loaded and unloaded while others are served, by OpenAI's client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.graph.adapt import targets
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint
from tests.random_adapter import random_adapter
from tests.serving import Server

MODEL = "arch/llama"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def adapters(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found, path = targets(build_graph(open_checkpoint(data / MODEL))), tmp_path_factory.mktemp("adapters")
    return {
        "pirate": random_adapter(path / "one", found, seed=1, rank=4, only=("q_proj", "v_proj"), stored="BF16"),
        "poet": random_adapter(path / "two", found, seed=2, rank=8, only=("down_proj", "o_proj"), stored="F16"),
        "wrong": random_adapter(
            path / "three", {"model.layers.0.self_attn.q_proj": (64, 50)}, seed=3, rank=4, layers_to_transform=[0]
        ),
    }


@pytest.fixture(scope="module")
def server(data: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    options = ("--max-loras", "3", "--max-lora-rank", "8", "--served-model-name", "base")
    with Server(data / MODEL, "--lora", f"pirate={adapters['pirate']}", *options) as server:
        yield server


def text(server: Server, model: str, **fields: Any) -> str:
    answer = server.complete(model=model, **BODY, **fields)
    assert answer["model"] == model
    choice: str = answer["choices"][0]["text"]
    return choice


def test_every_protocol_knows_adapters_by_name(server: Server, adapters: dict[str, Path]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == {"base", "pirate"}
    assert cards["pirate"].parent == "base" and cards["pirate"].root == str(adapters["pirate"])  # type: ignore[attr-defined]
    assert client.models.retrieve("pirate").digest == cards["pirate"].digest  # type: ignore[attr-defined]
    answers = {}
    for model in ("base", "pirate"):
        chat = client.chat.completions.create(model=model, messages=CHAT, max_tokens=8, temperature=0)  # type: ignore[call-overload]
        assert chat.model == model
        response = client.responses.create(model=model, input="Hello", max_output_tokens=16, temperature=0)
        assert response.model == model
        message = server.post(
            "/v1/messages", {"model": model, "messages": CHAT, "max_tokens": 8, "temperature": 0}
        ).json()
        assert message["model"] == model
        ollama = {
            "model": f"{model}:latest",
            "messages": CHAT,
            "stream": False,
            "options": {"temperature": 0, "num_predict": 8},
        }
        spoken = server.post("/api/chat", ollama).json()["message"]["content"]
        vector = client.embeddings.create(model=model, input="Hello").data[0].embedding
        content = chat.choices[0].message.content
        assert content == message["content"][0]["text"]
        assert response.output_text.startswith(content)
        answers[model] = (text(server, model), content, spoken, tuple(vector))
    assert all(a != b for a, b in zip(*answers.values(), strict=True))
    names = {entry["name"] for entry in server.http.get("/api/tags").json()["models"]}
    assert names == {"base", "pirate"}
    missing = server.post("/v1/completions", {**BODY, "model": "parrot"})
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "there is no model 'parrot' here; this server has 'base', 'pirate'"


def test_load_use_and_unload_beside_a_stream(server: Server, adapters: dict[str, Path]) -> None:
    """What streams meanwhile has the text that it has alone."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    def stream(model: str) -> str:
        chunks = client.completions.create(
            model=model, prompt="The sea", max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    alone = {model: stream(model) for model in ("base", "pirate")}
    beside: dict[str, str] = {}
    threads = [threading.Thread(target=lambda m=m: beside.setdefault(m, stream(m))) for m in alone]
    for thread in threads:
        thread.start()
    loaded = server.post(LOAD, {"lora_name": "poet", "lora_path": str(adapters["poet"])})
    assert loaded.status_code == 200 and loaded.json()["id"] == "poet" and loaded.json()["parent"] == "base"
    poem = text(server, "poet")
    assert poem not in (text(server, "base"), text(server, "pirate"))
    again = server.complete(model="poet", explain=True, **BODY)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["octavo"]["choices"][0]["adapter"] == loaded.json()["digest"]
    assert server.metric(f'octavo_adapter_choices{{digest="{loaded.json()["digest"]}"}}') == 0
    assert server.post(UNLOAD, {"lora_name": "poet"}).json() == {"id": "poet", "object": "model", "deleted": True}
    assert server.post("/v1/completions", {**BODY, "model": "poet"}).status_code == 404
    for thread in threads:
        thread.join()
    assert beside == alone


def test_choices_beams_and_grammars(server: Server) -> None:
    ways: list[dict[str, Any]] = [
        {"n": 3, "temperature": 1, "seed": 5}, {"n": 2, "use_beam_search": True},
        {"guided_regex": "[a-z]{3,8}", "ignore_eos": False},
    ]  # fmt: skip
    for fields in ways:
        bodies = {model: server.complete(**BODY | {"model": model} | fields) for model in ("base", "pirate")}
        texts = [[choice["text"] for choice in body["choices"]] for body in bodies.values()]
        assert texts[0] != texts[1] and len(texts[1]) == fields.get("n", 1)
        repeated = server.complete(**BODY | {"model": "pirate"} | fields)
        assert [choice["text"] for choice in repeated["choices"]] == texts[1]


def test_a_name_can_get_another_adapter(server: Server, adapters: dict[str, Path]) -> None:
    before = text(server, "pirate")
    body = {"lora_name": "ghost", "lora_path": str(adapters["pirate"])}
    assert server.post(LOAD, body).status_code == 200
    assert text(server, "ghost") == before  # the same content
    replaced = {**body, "lora_path": str(adapters["poet"])}
    refused = server.post(LOAD, replaced)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "lora_name"
    assert server.post(LOAD, {**replaced, "load_inplace": True}).status_code == 200
    assert text(server, "ghost") != before and text(server, "pirate") == before
    assert server.post(UNLOAD, {"lora_name": "ghost"}).status_code == 200


def test_what_is_wrong_is_a_400_that_names_it(server: Server, adapters: dict[str, Path], tmp_path: Path) -> None:
    for body, param, message in (
        ({"lora_name": "x", "lora_path": str(adapters["wrong"])}, "lora_path", "lora_A.weight has shape (4, 50), model and config ask for (4, 64)"),
        ({"lora_name": "x", "lora_path": str(tmp_path)}, "lora_path", "adapter_config.json is missing"),
        ({"lora_name": "pirate", "lora_path": str(tmp_path)}, "lora_name", "is loaded; load_inplace replaces it"),
        ({"lora_name": "base", "lora_path": str(tmp_path)}, "lora_name", "is the name of the model itself"),
        ({"lora_name": "x"}, "lora_path", "lora_path is required"),
        ({"lora_name": "x", "lora_path": "y", "is_3d_lora_weight": True}, "is_3d_lora_weight", "is not supported"),
    ):  # fmt: skip
        response = server.post(LOAD, body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param) and message in error["message"]
    missing = server.post(UNLOAD, {"lora_name": "x"})
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "lora_name"


def test_only_admin_keys_may_load(data: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "a"\nkey = "user"\n[[key]]\nname = "b"\nkey = "root"\nadmin = true\n')
    with Server(data / MODEL, "--api-key-file", str(keys)) as server:
        for key, status in (("user", 403), ("root", 400)):
            response = server.http.post(
                LOAD,
                json={"lora_name": "x", "lora_path": str(adapters["poet"])},
                headers={"authorization": f"Bearer {key}"},
            )
            assert response.status_code == status
        assert "max_loras is 0" in response.json()["error"]["message"]

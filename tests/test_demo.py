"""The demo model as a newcomer meets it: served with nothing but defaults, asked by OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from octavo import _native
from tests.serving import Server

QUESTION = "What is the capital of Japan?"
MODES = [(isa, "auto") for isa in ("auto", *_native.isa_levels())] + [("auto", "bf16"), ("auto", "f32")]


@pytest.fixture(scope="module", params=MODES, ids="-".join)
def server(request: pytest.FixtureRequest, demo: Path) -> Iterator[Server]:
    isa, activations = request.param
    with Server(demo, "--isa", isa, "--activations", activations, "--max-model-len", "512") as server:
        yield server


def test_streams_an_answer(server: Server) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of Japan is Tokyo."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (37, 8)

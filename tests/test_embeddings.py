"""Pooled states: against the oracle, and by every way to ask for them."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from octavo import LLM
from octavo.backends.reference import ReferenceBackend, forward
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import pooled
from octavo.models import build_graph
from octavo.pooled import embedding, similarities
from octavo.pooling import Pooling
from octavo.request import ParameterError, SamplingParams
from octavo.server.embeddings import EMBEDDINGS, EmbeddingRequest
from octavo.server.pooled import PooledRequest
from octavo.server.rerank import RERANK, SCORE, RerankRequest, ScoreRequest
from octavo.weights.checkpoint import open_checkpoint
from tests.serving import Server

POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")
TEXTS = ["Hello there", "Hello there, how are you?", "so"]
SCHEMAS: dict[str, type[PooledRequest]] = {EMBEDDINGS: EmbeddingRequest, SCORE: ScoreRequest, RERANK: RerankRequest}
BASES: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"input": "Hello"},
    SCORE: {"text_1": "Hello", "text_2": ["there"]},
    RERANK: {"query": "Hello", "documents": ["there", {"text": "so"}]},
}
SAMPLES: dict[str, Any] = {
    "add_special_tokens": False, "cache_salt": "a", "documents": ["a"], "encoding_format": "base64", "input": [[5, 6], [7]],
    "model": "tiny", "normalize": False, "pooling": "mean", "priority": 1, "query": "a", "return_documents": False,
    "text_1": ["a"], "text_2": "b", "top_n": 1, "truncate_prompt_tokens": 2, "user": "me",
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(data: Path) -> Iterator[LLM]:
    with LLM(str(data / "arch" / "llama"), num_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with Server(data / "arch" / "llama", "--served-model-name", "tiny", "--num-threads", "1") as running:
        yield running


def pooled_by_oracle(path: Path, ids: list[int], pooling: Pooling, activations: str = "auto") -> NDArray[np.float32]:
    """Recomputed from nothing, without a cache."""
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint, activations)
    hidden = forward(graph, ReferenceBackend().pack(graph, checkpoint), ids, "hidden").astype(np.float64)
    return embedding({"last": hidden[-1], "mean": hidden.mean(axis=0), "cls": hidden[0]}[pooling])


@pytest.mark.parametrize("name", ["arch/llama", "gguf/tiny-llama-q8_0.gguf"])
@pytest.mark.parametrize(("activations", "tolerance"), [("auto", 5e-3), ("f32", 2e-5)])
def test_vectors_are_those_of_the_oracle(data: Path, name: str, activations: str, tolerance: float) -> None:
    """With rounded activations, a sum in another order may round to the next number."""
    ids = [(7 * i) % 200 + 3 for i in range(150)]
    with LLM(str(data / name), num_threads=1, activations=activations) as llm:
        for pooling in POOLINGS:
            (out,) = llm.embed({"prompt_token_ids": ids}, pooling=pooling)
            assert out.embedding.dtype == np.float32 and abs(np.linalg.norm(out.embedding) - 1) < 1e-6
            expected = pooled_by_oracle(data / name, ids, pooling, activations)
            np.testing.assert_allclose(out.embedding, expected, atol=tolerance)


def test_a_vector_of_the_demo_model(demo: Path) -> None:
    with LLM("demo", num_threads=1, max_num_seqs=4, max_model_len=512) as llm:
        text = "The capital of France is"
        (out,) = llm.embed(text)
        ids = out.prompt_token_ids
        near, far = llm.score(text, ["The capital of France is called", "def f(x):\n    return x + 1"], pooling="mean")
    assert similarities([out.embedding], [pooled_by_oracle(demo, ids, "last")])[0] > 0.999
    assert near > far


def test_bits_do_not_depend_on_chunks_and_neighbours(data: Path) -> None:
    """Alone, in chunks beside others, from the cache."""
    prompts = [{"prompt_token_ids": [(k * i) % 200 + 3 for i in range(90)]} for k in (7, 11, 13)]
    path = str(data / "gguf" / "tiny-llama-q8_0.gguf")
    for pooling in POOLINGS:
        alone = []
        for prompt in prompts:
            with LLM(path, num_threads=1) as llm:
                alone += llm.embed(prompt, pooling=pooling)
        with LLM(path, num_threads=2, max_num_batched_tokens=32, max_num_seqs=4) as llm:
            chunked = llm.embed(prompts, pooling=pooling)
            again = llm.embed(prompts, pooling=pooling)
        assert [out.num_cached_tokens for out in again] == [89 if pooling == "last" else 0] * 3
        for one, two, three in zip(alone, chunked, again, strict=True):
            assert one.embedding.tobytes() == two.embedding.tobytes() == three.embedding.tobytes()


def test_generations_reuse_what_was_pooled(llm: LLM) -> None:
    ids = [(5 * i) % 200 + 3 for i in range(64)]
    llm.embed({"prompt_token_ids": ids}, pooling="mean")
    (out,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1))
    assert out.num_cached_tokens == 63


def test_offline_refusals(llm: LLM) -> None:
    for prompt, options, field in (("a", {"pooling": "max"}, "pooling"), ("", {}, "prompt")):
        with pytest.raises(ParameterError) as refusal:
            llm.embed(prompt, **options)  # type: ignore[arg-type]
        assert refusal.value.param == field
    with pytest.raises(ParameterError, match="one for each"):
        llm.score(["a", "b"], ["c"])
    assert llm.embed([]) == []


def test_a_pool_outlives_a_preemption(data: Path) -> None:
    """What it has taken is not computed again, though the request gave up its blocks."""
    ids = [(7 * i) % 200 + 3 for i in range(100)]
    ends = []
    for preempted in (False, True):
        engine = Engine(
            EngineConfig(model=str(data / "arch" / "llama"), num_threads=1, max_num_batched_tokens=16, max_num_seqs=2)
        )
        engine.add(pooled("a", ids, "mean"))
        for _ in range(3):
            assert (step := engine.step()) is None or not step.progress
        if preempted:
            scheduler = engine.loaded.scheduler
            scheduler._preempt(scheduler._live["a"][0], time.monotonic())
        while not (step := engine.step()) or not step.progress:
            pass
        ends += step.progress
        assert engine.stats().preemptions == preempted and engine.stats().recomputed_tokens == 0
    assert ends[0].pooled and ends[0].pooled == ends[1].pooled


# ---- the server


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_sdk_of_openai(server: Server, llm: LLM) -> None:
    """It asks for base64 by itself, and decodes it."""
    expected = llm.embed(TEXTS)
    with client(server) as sdk:
        default = sdk.embeddings.create(model="tiny", input=TEXTS)
        floats = sdk.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        ids = sdk.embeddings.create(model="tiny", input=[out.prompt_token_ids for out in expected], user="me")
        single = sdk.embeddings.create(model="tiny", input=expected[0].prompt_token_ids)

    async def later() -> openai.types.CreateEmbeddingResponse:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:
            return await sdk.embeddings.create(model="tiny", input=TEXTS)

    for answer in (default, floats, ids, asyncio.run(later())):
        assert [data.index for data in answer.data] == [0, 1, 2] and answer.object == "list"
        for data, out in zip(answer.data, expected, strict=True):
            assert np.array_equal(np.float32(data.embedding), out.embedding)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(o.prompt_token_ids) for o in expected)
    assert single.data[0].embedding == floats.data[0].embedding


def test_poolings_and_lengths(server: Server, llm: LLM) -> None:
    for pooling in POOLINGS:
        body = {"input": TEXTS, "pooling": pooling, "normalize": False, "encoding_format": "base64"}
        answer = server.post(EMBEDDINGS, body).json()
        for data, out in zip(answer["data"], llm.embed(TEXTS, pooling=pooling, normalize=False), strict=True):
            assert base64.b64decode(data["embedding"]) == out.embedding.astype("<f4").tobytes()
    cut = server.post(EMBEDDINGS, {"input": [5, 6, 7, 8], "truncate_prompt_tokens": 2}).json()
    assert cut["data"][0] == server.post(EMBEDDINGS, {"input": [7, 8]}).json()["data"][0]
    assert cut["usage"]["prompt_tokens"] == 2


def test_many_inputs_beside_a_stream(server: Server) -> None:
    """As many as one request may have."""
    answer = server.post(EMBEDDINGS, {"input": [[i % 200 + 3, 5] for i in range(2048)], "encoding_format": "base64"})
    data = answer.json()["data"]
    assert len(data) == 2048 and data[7]["embedding"] == data[207]["embedding"] != data[8]["embedding"]
    server.wait_for("octavo_http_requests_open", 0)


def test_scores_are_cosines(server: Server, llm: LLM) -> None:
    vectors = [out.embedding for out in llm.embed(TEXTS)]
    expected = similarities(vectors[:1], vectors)
    answer = server.post(SCORE, {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert [data["score"] for data in answer["data"]] == pytest.approx(expected, abs=1e-6)
    assert answer["data"][0]["score"] == pytest.approx(1) and answer["octavo"]["scoring"] == "cosine of embeddings"
    assert [data["score"] for data in answer["data"]] == llm.score(TEXTS[0], TEXTS)
    paired = server.post(SCORE, {"queries": TEXTS, "documents": TEXTS}).json()
    assert [data["score"] for data in paired["data"]] == pytest.approx([1, 1, 1])

    documents = [TEXTS[2], {"text": TEXTS[1]}, TEXTS[0]]
    ranked = server.post(RERANK, {"query": TEXTS[0], "documents": documents}).json()
    order = sorted(range(3), key=lambda i: -expected[2 - i])
    assert [result["index"] for result in ranked["results"]] == order and order[0] == 2
    assert ranked["results"][0]["document"] == {"text": TEXTS[0]}
    short = server.post(RERANK, {"query": TEXTS[0], "documents": documents, "top_n": 1, "return_documents": False})
    titled = server.post(RERANK, {"query": "a", "documents": ["b", {"text": "c", "title": "C"}]})
    assert titled.headers["x-octavo-ignored"] == "documents[1].title"
    assert [set(result) for result in short.json()["results"]] == [{"index", "relevance_score"}]


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_field_is_honoured_or_refused(server: Server, path: str) -> None:
    for name in SCHEMAS[path].__struct_fields__:
        if name == "use_activation":  # of classifiers: test_encoders.py
            assert "these are cosines" in server.post(path, BASES[path] | {name: True}).text
            continue
        answer = server.post(path, BASES[path] | {name: SAMPLES[name]})
        assert answer.status_code == 200 and "x-octavo-ignored" not in answer.headers, (name, answer.text)
        for wrong in ([[[1.5]]], 1e308, -(2**70), {"\u0000": []}):
            answer = server.post(path, BASES[path] | {name: wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), (name, wrong, answer.text)
    for name in SCHEMAS[path].REFUSED:
        answer = server.post(path, BASES[path] | {name: 2})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert server.post(path, dict.fromkeys(SCHEMAS[path].__struct_fields__) | BASES[path]).status_code == 200


REFUSALS: list[tuple[str, dict[str, Any], str, str]] = [
    (EMBEDDINGS, {}, "input", "required"),
    (EMBEDDINGS, {"input": []}, "input", "empty"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input", "empty"),
    (EMBEDDINGS, {"input": [[]]}, "input", "empty"),
    (EMBEDDINGS, {"input": [5, "a"]}, "input", "mixes"),
    (EMBEDDINGS, {"input": [320]}, "input", "0 to 319"),
    (EMBEDDINGS, {"input": [-1]}, "input", "0 to 319"),
    (EMBEDDINGS, {"input": [5] * 513}, "input", "512"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input", "2048"),
    (EMBEDDINGS, {"input": "x" * 2_000_000}, "input", "characters"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "one for each"),
    (SCORE, {"text_1": "a", "text_2": []}, "text_2", "empty"),
    (SCORE, {"text_1": "a", "text_2": ["b", "word " * 3000]}, "text_2", "512"),
    (RERANK, {"query": "word " * 3000, "documents": ["a"]}, "query", "512"),
    (RERANK, {"query": "a", "documents": []}, "documents", "empty"),
    (RERANK, {"query": "a", "documents": [{"title": "b"}]}, "documents", "text"),
    (RERANK, {"query": "a", "documents": ["b"] * 2048}, "documents", "2048"),
]


@pytest.mark.parametrize(("path", "body", "field", "limit"), REFUSALS)
def test_refusals_name_field_and_limit(server: Server, path: str, body: dict[str, Any], field: str, limit: str) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field) and limit in error["message"], error


def test_another_model_is_a_404(server: Server) -> None:
    for path, body in BASES.items():
        assert server.post(path, body | {"model": "other"}).status_code == 404


def test_a_batch_of_embeddings(server: Server) -> None:
    lines = [
        {"custom_id": f"line {i}", "method": "POST", "url": EMBEDDINGS, "body": {"model": "tiny", "input": text}}
        for i, text in enumerate(TEXTS)
    ]
    with client(server) as sdk:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = sdk.files.create(file=("batch.jsonl", content), purpose="batch")
        batch = sdk.batches.create(input_file_id=file.id, endpoint=EMBEDDINGS, completion_window="24h")
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            batch = sdk.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        results = [json.loads(line) for line in sdk.files.content(batch.output_file_id).text.splitlines()]
    for result in results:
        want = server.post(EMBEDDINGS, lines[int(result["custom_id"][-1])]["body"]).json()["data"]
        assert result["response"]["body"]["data"] == want
    assert len(results) == 3

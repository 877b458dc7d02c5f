"""Encoders: values of transformers on both backends, bits in a crowd, and every way to ask for vectors and scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openai
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from octavo import LLM, _native
from octavo.backends.base import Limits
from octavo.backends.cpu import CpuBackend
from octavo.backends.diff import diff, greedy, make_step
from octavo.backends.reference import ReferenceBackend, forward
from octavo.config import ConfigError
from octavo.graph.ir import Graph
from octavo.models import build_graph
from octavo.pooled import logistic, similarities
from octavo.pooling import Pooling
from octavo.request import ParameterError
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import dequantise
from octavo.weights.sentence_transformers import read_pooling
from octavo.weights.spec import CheckpointError
from tests.serving import Server

NAMES = ("bert", "modernbert", "xlm_roberta", "xlm_roberta_rerank")
POOLINGS: dict[Pooling, str] = {"last": "last", "mean": "mean", "cls": "cls", "pooler": "pooler", "scores": "score"}
"""And the names of their values in the fixtures."""

F32 = NDArray[np.float32]


def changed(source: Path, path: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """A copy with other config keys (None: without the key), and more tensors."""
    shutil.copytree(source, path)
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)
    values = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    if tensors:
        held = safetensors.numpy.load_file(path / "model.safetensors")
        safetensors.numpy.save_file({**held, **tensors}, path / "model.safetensors")
    return path


def outputs(graph: Graph, checkpoint: Any, ids: NDArray[Any], names: list[str]) -> dict[str, F32]:
    """Of every token, natively, in one step."""
    n = len(ids)
    backend = CpuBackend(num_threads=1)
    state = backend.make_state(graph, [n // 16 + 1] * len(graph.groups))
    program = backend.compile(graph, backend.pack(graph, checkpoint), state, Limits(n, n, 1, n))
    batch = make_step([(ids, 0, list(range(n // 16 + 1)))])
    rows = np.arange(n, dtype=np.int32)
    program.run(batch._replace(logit_rows=rows, sampling=greedy(rows)))
    return {name: program.output(name) for name in names}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_values_of_transformers(fixtures: Path, name: str, backend: str) -> None:
    """States of single tokens, then pooled ones through the engine."""
    path = fixtures / "encoders" / name
    expected = np.load(path / "expected.npz")
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint, "f32")
    for i in range(3):
        if backend == "cpu":
            hidden = outputs(graph, checkpoint, expected[f"ids_{i}"], ["hidden"])["hidden"]
        else:
            weights = ReferenceBackend().pack(graph, checkpoint)
            hidden = forward(graph, weights, expected[f"ids_{i}"], "hidden")
        np.testing.assert_allclose(hidden[expected[f"pos_{i}"]], expected[f"hidden_{i}"], atol=1e-4)
    prompts = [{"prompt_token_ids": expected[f"ids_{i}"].tolist()} for i in range(3)]
    with LLM(str(path), backend=backend, activations="f32", num_threads=1) as llm:
        for pooling, key in POOLINGS.items():
            for normalize, end in ((False, ""), (True, "_norm")):
                if f"{key}{end}_0" not in expected:
                    continue
                for i, out in enumerate(llm.embed(prompts, pooling=pooling, normalize=normalize)):
                    np.testing.assert_allclose(out.embedding, expected[f"{key}{end}_{i}"], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_default_activations(fixtures: Path, name: str) -> None:
    """bf16 products where the checkpoint is bf16."""
    path = fixtures / "encoders" / name
    expected = np.load(path / "expected.npz")
    prompts = [{"prompt_token_ids": expected[f"ids_{i}"].tolist()} for i in range(3)]
    with LLM(str(path), num_threads=1) as llm:
        for pooling in ("last", "mean", "cls"):
            for i, out in enumerate(llm.embed(prompts, pooling=pooling)):
                assert similarities([out.embedding], [expected[f"{pooling}_{i}"]])[0] > 0.9995


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_every_operation_on_every_level(fixtures: Path, name: str, isa: str) -> None:
    checkpoint = open_checkpoint(fixtures / "encoders" / name)
    graph = build_graph(checkpoint)
    found = diff(graph, checkpoint, CpuBackend(isa=isa, num_threads=2, fuse=False, reuse=False))
    assert found is None, str(found)


@pytest.mark.parametrize("name", ["modernbert", "xlm_roberta_rerank"])
def test_bits_do_not_depend_on_neighbours(fixtures: Path, name: str) -> None:
    """Alone, in a crowd that outgrows a step and the slots, with other threads, memory and fusions."""
    path = str(fixtures / "encoders" / name)
    rng = np.random.default_rng(3)
    lengths = [1, 2, 15, 16, 17, 40, 100, 129, 300, 511, 512, *rng.integers(1, 200, size=30).tolist()]
    prompts = [{"prompt_token_ids": rng.integers(0, 320, size=n).tolist()} for n in lengths]
    poolings: tuple[Pooling, ...] = ("mean", "cls", "scores") if "rerank" in name else ("mean", "last")
    for pooling in poolings:
        with LLM(path, num_threads=1, max_num_seqs=1) as llm:
            alone = [llm.embed(prompt, pooling=pooling)[0] for prompt in prompts]
        crowds: list[dict[str, Any]] = [
            {"num_threads": 2, "max_num_seqs": 8},
            {"num_threads": 3, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "fuse": False, "poison": True},
        ]
        for options in crowds:
            with LLM(path, **options) as llm:
                crowd = llm.embed(prompts, pooling=pooling)
                llm.engine.check()
                steps = llm.engine.stats()
            assert [out.embedding.tobytes() for out in crowd] == [out.embedding.tobytes() for out in alone]
            assert steps.cached_tokens == 0 and steps.kv_blocks_held == 0 and steps.steps < len(prompts)


def test_what_an_encoder_cannot_do(fixtures: Path, tmp_path: Path) -> None:
    path = str(fixtures / "encoders/bert")
    with LLM(path, num_threads=1) as llm:
        with pytest.raises(ParameterError, match="is an encoder and generates no text: /v1/embeddings"):
            llm.generate("Hello")
        with pytest.raises(ParameterError, match="the text has 513 tokens; this model reads at most 512 at once"):
            llm.embed({"prompt_token_ids": [5] * 513})
        with pytest.raises(ParameterError, match="this model has no scores"):
            llm.embed("Hello", pooling="scores")
    with pytest.raises(ConfigError, match="disk_cache keeps what texts begin with"):
        LLM(path, disk_cache=str(tmp_path))
    with LLM(path, num_threads=1, max_model_len=40) as llm, pytest.raises(ParameterError, match="at most 40 at once"):
        llm.embed({"prompt_token_ids": [5] * 41})


def test_token_types_of_pairs(fixtures: Path, data: Path, tmp_path: Path) -> None:
    """BERT's cross-encoders tell the second text by its type: transformers' BertForSequenceClassification."""
    rng = np.random.default_rng(0)
    head = {
        "classifier.weight": rng.standard_normal((1, 64)).astype(np.float32),
        "classifier.bias": np.ones(1, np.float32),
    }
    path = changed(fixtures / "encoders/bert", tmp_path / "m", head, architectures=["BertForSequenceClassification"], id2label={"0": "x"})  # fmt: skip
    shutil.copy(data / "tokenizers/tiny-wordpiece/tokenizer.json", path)
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint, "f32")
    weights = ReferenceBackend().pack(graph, checkpoint)
    with LLM(str(path), num_threads=1, activations="f32") as llm:
        texts = ["the world", "hello there", "so"]
        scores = llm.score("hello", texts)
        pairs = llm.get_tokenizer().encode_pairs([("hello", text) for text in texts])
        for pair, score in zip(pairs, scores, strict=True):
            types = np.arange(len(pair.ids)) >= pair.num_first
            own = forward(graph, weights, pair.ids, "scores", types)[0, 0]
            plain = forward(graph, weights, pair.ids, "scores")[0, 0]
            assert score == pytest.approx(logistic(float(own)), abs=1e-5)
            assert abs(own - plain) > 1e-3
        assert llm.score(["hello"] * 3, texts) == scores
        cosines = llm.score("hello", texts, pooling="mean")
        assert cosines != scores
        with pytest.raises(ParameterError, match="reads texts, not token ids"):
            llm.score({"prompt_token_ids": [5]}, "a")


def test_the_older_config_of_modernbert(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "encoders/modernbert"
    older: dict[str, Any] = {"layer_types": None, "rope_parameters": None, "global_rope_theta": 160000.0}
    older |= {"local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    newer, old = (build_graph(open_checkpoint(p)) for p in (source, changed(source, tmp_path / "m", **older)))
    assert [node.attrs for node in newer.nodes] == [node.attrs for node in old.nodes]


def test_the_first_release_of_bert(fixtures: Path, tmp_path: Path) -> None:
    """Norms have gamma and beta, all names a prefix; the head that guesses words is not served."""
    source = fixtures / "encoders/bert"
    path = changed(source, tmp_path / "m", architectures=["BertForMaskedLM"])
    held = safetensors.numpy.load_file(path / "model.safetensors")
    older = {f"bert.{n}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v for n, v in held.items()}  # fmt: skip
    safetensors.numpy.save_file(
        {**older, "cls.predictions.bias": np.zeros(320, np.float32)}, path / "model.safetensors"
    )
    expected = np.load(source / "expected.npz")
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint, "f32")
    hidden = forward(graph, ReferenceBackend().pack(graph, checkpoint), expected["ids_0"], "hidden")
    np.testing.assert_allclose(hidden[expected["pos_0"]], expected["hidden_0"], atol=1e-4)


GGUF_NAMES = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
}  # fmt: skip
"""Names of llama.cpp's converter; it leaves the pooler out."""


@pytest.mark.parametrize(("name", "offset"), [("bert", 0), ("xlm_roberta", 2)])
def test_gguf(fixtures: Path, tmp_path: Path, name: str, offset: int) -> None:
    """The converter cuts the rows of positions that RoBERTa never reads."""
    source = open_checkpoint(fixtures / "encoders" / name)
    config = source.config
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    writer.add_vocab_size(config["vocab_size"])
    weights = {n: dequantise(i.source, d.reshape(1, -1) if len(i.shape) == 1 else d, i.shape[-1]) for n in source.names() for i, d in [source.read(n)[:2]]}  # fmt: skip
    for tensor, values in weights.items():
        module, _, kind = tensor.rpartition(".")
        layer = module.split(".")[2] if module.startswith("encoder.") else None
        stem = GGUF_NAMES.get(module if layer is None else module.split(".", 3)[3])
        if stem is not None:
            values = values[offset:] if stem == "position_embd" else values
            flat = values.ravel() if len(source.info(tensor).shape) == 1 else values
            writer.add_tensor(f"blk.{layer}.{stem}.{kind}" if layer else f"{stem}.{kind}", np.ascontiguousarray(flat))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint, expected = open_checkpoint(tmp_path / "m.gguf"), np.load(fixtures / "encoders" / name / "expected.npz")
    assert read_pooling(checkpoint) == "cls"
    hidden = outputs(build_graph(checkpoint, "f32"), checkpoint, expected["ids_2"], ["hidden"])["hidden"]
    np.testing.assert_allclose(hidden[expected["pos_2"]], expected["hidden_2"], atol=1e-4)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    ("bert", {"is_decoder": True}, "is_decoder = True"),
    ("bert", {"num_hidden_layers": 1}, "no place to tensor 'encoder.layer.1."),
    ("bert", {"num_attention_heads": 8}, "num_attention_heads = 8 of hidden_size = 64, which is not supported"),
    ("bert", {"max_position_embeddings": 600}, "position_embeddings.weight has shape"),
    ("bert", {"architectures": ["BertForSequenceClassification"]}, "classifier.weight"),
    ("xlm_roberta_rerank", {"id2label": {"0": "a", "1": "b"}}, "classifier.out_proj.weight has shape"),
    ("modernbert", {"layer_types": ["full_attention"]}, "has 1 layer_types, expected one for each of 4 layers"),
    ("modernbert", {"hidden_activation": "mish"}, "hidden_activation = 'mish'"),
    ("modernbert", {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean"}, "served: cls"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "message"), REFUSED)
def test_configs_that_are_refused(
    fixtures: Path, tmp_path: Path, name: str, config: dict[str, Any], message: str
) -> None:
    path = changed(fixtures / "encoders" / name, tmp_path / "m", **config)
    with pytest.raises(CheckpointError) as caught:
        build_graph(open_checkpoint(path))
    assert message in str(caught.value)


def test_pooling_of_sentence_transformers(fixtures: Path, tmp_path: Path) -> None:
    path = changed(fixtures / "encoders/xlm_roberta", tmp_path / "m")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": where} for kind, where in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2"))]  # fmt: skip
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    for mode, pooling in (("pooling_mode_cls_token", "cls"), ("pooling_mode_lasttoken", "last")):
        (path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 64, mode: True}))
        with LLM(str(path), num_threads=1) as llm:
            assert (
                llm.embed("Hello")[0].embedding.tobytes() == llm.embed("Hello", pooling=pooling)[0].embedding.tobytes()
            )  # type: ignore[arg-type]
    (path / "1_Pooling/config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(CheckpointError, match="pooling_mode_max_tokens are not supported"):
        LLM(str(path))
    (path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]))
    with pytest.raises(CheckpointError, match="module Dense is not supported"):
        LLM(str(path))


# ---- over HTTP


@pytest.fixture(scope="module")
def reranker(fixtures: Path) -> Iterator[Server]:
    path = fixtures / "encoders/xlm_roberta_rerank"
    with Server(path, "--served-model-name", "tiny", "--num-threads", "1") as running:
        yield running


TEXTS = ["Hello there", "Hello there, how are you?", "so"]


def test_the_sdk_of_openai(fixtures: Path, reranker: Server) -> None:
    with LLM(str(fixtures / "encoders/xlm_roberta_rerank"), num_threads=1) as llm:
        expected = llm.embed(TEXTS)
        scores = llm.score(TEXTS[0], TEXTS)
        raw = [out.embedding[0] for out in llm.embed(TEXTS, pooling="scores", normalize=False)]
        cosines = llm.score(TEXTS[0], TEXTS, pooling="mean")
    with openai.OpenAI(base_url=f"{reranker.url}/v1", api_key="none") as sdk:
        answer = sdk.embeddings.create(model="tiny", input=TEXTS)
        (card,) = sdk.models.list().data
    for data, out in zip(answer.data, expected, strict=True):
        assert np.array_equal(np.float32(data.embedding), out.embedding)
    assert card.model_dump()["capabilities"] == ["embedding", "rerank"]

    scored = reranker.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert [data["score"] for data in scored["data"]] == scores and len(set(scores)) == 3
    assert scored["octavo"] == {"scoring": "the logistic function of the model's score", "pooling": "scores"}
    plain = reranker.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS, "use_activation": False}).json()
    assert [logistic(data["score"]) for data in plain["data"]] == scores and raw
    ranked = reranker.post("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS, "top_n": 2}).json()
    order = sorted(range(3), key=lambda i: -scores[i])[:2]
    assert [(r["index"], r["relevance_score"]) for r in ranked["results"]] == [(i, scores[i]) for i in order]
    by_vectors = reranker.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS, "pooling": "mean"}).json()
    assert [data["score"] for data in by_vectors["data"]] == cosines
    assert by_vectors["octavo"]["scoring"] == "cosine of embeddings"


def test_texts_that_are_cut(reranker: Server) -> None:
    """The beginning stays, of a pair the first text."""
    ids = list(range(5, 60))
    cut = reranker.post("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": 20}).json()
    assert cut["data"] == reranker.post("/v1/embeddings", {"input": ids[:20]}).json()["data"]
    long = "so it is " * 300
    body = {"query": "so", "documents": [long], "return_documents": False}
    refused = reranker.post("/v1/rerank", body)
    assert refused.status_code == 400 and "this model reads at most 512 at once" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "documents"
    served = reranker.post("/v1/rerank", body | {"truncate_prompt_tokens": -1}).json()
    assert served["usage"]["prompt_tokens"] == 512


def test_generations_are_refused_by_name(reranker: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", chat | {"max_tokens": 5}),
        ("/api/generate", {"model": "tiny", "prompt": "Hello"}),
    ):
        answer = reranker.post(path, body)
        assert answer.status_code == 400 and "is an encoder and generates no text" in answer.text, (path, answer.text)
    for path, body, param in (
        ("/v1/embeddings", {"input": "a", "pooling": "pooler"}, "pooling"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "pooling": "mean", "use_activation": True}, "use_activation"),
        ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1"),
    ):
        answer = reranker.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text

"""Generations at a given kernel level, as one line of JSON: run by scripts/emulate and by tests/bits.py.

usage: python tests/emulated.py ISA [--brief]. Greedy and seeded, in the packed formats w4, w4f, w8, f16 and bf16, and in
float32; the other packed formats are compared on one machine only (tests/test_format_models.py). --brief: one model, short.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo import LLM, SamplingParams
from octavo.weights.formats import dequantise, f32_to_bf16
from octavo.weights.gguf_file import StringArray, read_gguf

DATA = Path("tests/data/gguf")
RUNS = (("q4_0", "auto"), ("q4_1", "auto"), ("q8_0", "auto"), ("f16_bf16", "auto"), ("q4_0", "bf16"), ("q4_1", "f32"))


def without_q6k(source: Path, path: Path, activations: str) -> Path:
    """The model with its Q6_K tensor decoded, as it was when the golden digests were taken."""
    file = read_gguf(source)
    writer = gguf.GGUFWriter(path, file.metadata["general.architecture"])
    for key, value in file.metadata.items():
        if key in ("general.architecture", "general.quantization_version"):
            continue
        if isinstance(value, (StringArray, list)):
            writer.add_array(key, value.decode() if isinstance(value, StringArray) else value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for name, tensor in file.tensors.items():
        data = file.file.data[tensor.start : tensor.stop].reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
        kind = tensor.source
        if kind == "Q6_K":
            numbers = dequantise(kind, data, tensor.shape[1])
            kind = "F32" if activations == "f32" else "BF16"
            data = (numbers if kind == "F32" else f32_to_bf16(numbers)).view(np.uint8)
        data = data.view(np.float32).reshape(tensor.shape) if kind == "F32" else data
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def generate(isa: str, brief: bool = False) -> dict[str, Any]:
    """{"isa", "machine", "runs": {"q4_0 auto": [[token ids, logprobs] of each prompt], ...}}"""
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in ((5, 20) if brief else (5, 70))]
    tokens = 3 if brief else 8
    params = [SamplingParams(max_tokens=tokens, logprobs=0, **how) for how in ({"temperature": 0}, {"seed": 7})]
    runs = {}
    for model, activations in RUNS[:1] if brief else RUNS:
        options = {"isa": isa, "activations": activations, "num_threads": 2, "kv_cache_memory": "8MiB"}
        with tempfile.TemporaryDirectory() as folder:
            path = without_q6k(DATA / f"tiny-llama-{model}.gguf", Path(folder) / "model.gguf", activations)
            llm = LLM(str(path), **options)
            outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
            llm.close()
        runs[f"{model} {activations}"] = [
            [o.token_ids, [scores[t].logprob for scores, t in zip(o.logprobs, o.token_ids, strict=True)]]
            for o in outputs
        ]
    return {"isa": isa, "machine": platform.machine(), "runs": runs}


if __name__ == "__main__":
    print(json.dumps(generate(sys.argv[1], "--brief" in sys.argv)))

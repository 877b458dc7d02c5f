"""Generations at a given kernel level, as one line of JSON: run by scripts/emulate and by tests/test_emulation.py.

usage: python tests/emulated.py ISA. Greedy and seeded, in each packed format of the small fixtures, and in float32.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

DATA = Path("tests/data/gguf")
RUNS = (("q4_0", "auto"), ("q4_1", "auto"), ("q8_0", "auto"), ("f16_bf16", "auto"), ("q4_0", "bf16"), ("q4_1", "f32"))


def generate(isa: str) -> dict[str, Any]:
    """{"isa", "machine", "runs": {"q4_0 auto": [[token ids, logprobs] of each prompt], ...}}"""
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (5, 70)]
    params = [SamplingParams(temperature=0, max_tokens=8, logprobs=0), SamplingParams(seed=7, max_tokens=8, logprobs=0)]
    runs = {}
    for model, activations in RUNS:
        options = {"isa": isa, "activations": activations, "num_threads": 2, "kv_cache_memory": "8MiB"}
        llm = LLM(str(DATA / f"tiny-llama-{model}.gguf"), **options)
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        llm.close()
        runs[f"{model} {activations}"] = [
            [o.token_ids, [scores[t].logprob for scores, t in zip(o.logprobs, o.token_ids, strict=True)]]
            for o in outputs
        ]
    return {"isa": isa, "machine": platform.machine(), "runs": runs}


if __name__ == "__main__":
    print(json.dumps(generate(sys.argv[1])))

"""One generation at a given kernel level, as one line of JSON: run by scripts/emulate and by tests/test_emulation.py.

usage: python tests/emulated.py ISA. Greedy and seeded, in the model's own 4-bit format and in float32.
"""

import json
import platform
import sys
from pathlib import Path

from octavo import LLM, SamplingParams

MODEL = "tests/data/gguf/tiny-llama-q4_0.gguf"


def generate(isa: str) -> dict[str, object]:
    result: dict[str, object] = {"isa": isa, "machine": platform.machine()}
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (5, 70)]
    params = [SamplingParams(temperature=0, max_tokens=8, logprobs=0), SamplingParams(seed=7, max_tokens=8, logprobs=0)]
    for activations in ("auto", "f32"):
        llm = LLM(MODEL, isa=isa, activations=activations, num_threads=2, kv_cache_memory="8MiB")
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        result[activations] = [[o.token_ids, [d[t].logprob for d, t in zip(o.logprobs, o.token_ids)]] for o in outputs]
        llm.close()
    return result


if __name__ == "__main__":
    assert Path(MODEL).exists(), "run from the repository's root"
    print(json.dumps(generate(sys.argv[1])))

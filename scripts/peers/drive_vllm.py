"""vLLM's build for CPUs.

Settings: bf16 weights, for its quantised formats need other instructions or GPUs; its default chunks; a thread a core
(VLLM_CPU_OMP_THREADS_BIND, set by who starts this), KV space enough for all (VLLM_CPU_KVCACHE_SPACE); the engine in this
process, so that nothing runs while others are measured; torch.compile as it is by default.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from protocol import Run, Workload, main


def _environment(w: Workload) -> None:
    cores = sorted(os.sched_getaffinity(0))[: w.threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_USE_AOT_COMPILE": "0",  # torch 2.13 does not load what was saved so, and minutes of compiling come back
    }


def load(w: Workload) -> tuple[Run, dict[str, Any]]:
    if w.folder is None:
        raise RuntimeError("it has no such weights: bf16 alone is compared")
    _environment(w)
    import vllm

    llm = vllm.LLM(
        w.folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=w.length + 1, max_num_seqs=max(1, w.num_prompts),
        enable_prefix_caching=False,
    )  # fmt: skip

    def run(number: int) -> float:
        prompts = w.prompts(number)
        count = 1 if w.kind == "prefill" else w.output_len
        params = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        if w.kind in ("stream", "decode"):
            if w.kind == "decode":
                prompts = [prompt[: w.input_len - w.output_len // 2] for prompt in prompts]
            moments = _steps(llm, prompts, params)
            return w.num_prompts * (len(moments) - 1) / (moments[-1] - moments[0])
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        if any(len(output.outputs[0].token_ids) != count for output in outputs):
            raise RuntimeError("tokens are missing")
        return w.num_prompts * (w.input_len + (w.output_len if w.kind == "offline" else 0)) / seconds

    return run, {"version": vllm.__version__}


def _steps(llm: Any, prompts: list[list[int]], params: Any) -> list[float]:
    """The moments of the steps in which all streams got a token."""
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    moments = []
    while engine.has_unfinished_requests():
        if len(engine.step()) == len(prompts):
            moments.append(time.perf_counter())
    return moments


def serve(w: Workload, port: int) -> list[str]:
    if w.folder is None:
        raise RuntimeError("it has no such weights: bf16 alone is compared")
    _environment(w)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    command = [str(Path(sys.prefix) / "bin" / "vllm"), "serve", w.folder, "--port", str(port), "--dtype", "bfloat16"]
    return [*command, "--max-model-len", str(w.length + 8), "--max-num-seqs", str(max(1, w.num_prompts))]


if __name__ == "__main__":
    main(load, serve)

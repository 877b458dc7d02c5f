"""OpenVINO GenAI, which reads GGUF files of Llamas itself: Q4_0, Q4_1 and Q8_0 become its own 4- and 8-bit formats. It reads
none in BF16, and on AMX ends with a division by zero on those in F16 (2026.4.1).

Settings: its batched pipeline (a SchedulerConfig); the throughput hint for many prompts and the latency hint for one, as
its documentation advises; as many threads as cores; its default rounding of activations to int8, in groups.
"""

from __future__ import annotations

import time
from typing import Any

from protocol import Run, Workload, main


def load(w: Workload) -> tuple[Run, dict[str, Any]]:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 4, max(1, w.num_prompts)
    scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 512, False
    options = {"INFERENCE_NUM_THREADS": w.threads, "PERFORMANCE_HINT": "THROUGHPUT" if w.num_prompts > 1 else "LATENCY"}
    if w.kv_dtype == "int8":
        options["KV_CACHE_PRECISION"] = "u8"
    pipeline = genai.ContinuousBatchingPipeline(w.model, scheduler, "CPU", options)

    def run(number: int) -> float:
        length = w.input_len - (w.output_len // 2 if w.kind == "decode" else 0)
        prompts = [openvino.Tensor(np.array([prompt[:length]], np.int64)) for prompt in w.prompts(number)]
        count = 1 if w.kind == "prefill" else w.output_len
        config = genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False)
        config.apply_chat_template = False
        moments: list[float] = []

        def streamed(_: Any) -> Any:
            moments.append(time.perf_counter())
            return genai.StreamingStatus.RUNNING

        if w.kind == "decode":
            moments += decoded(pipeline, prompts, config)
            return w.num_prompts * (len(moments) - 1) / (moments[-1] - moments[0])
        began = time.perf_counter()
        follow = [streamed] if w.kind == "stream" else []
        results = pipeline.generate(prompts, [config] * len(prompts), *follow)
        seconds = time.perf_counter() - began
        if any(len(result.m_generation_ids[0]) != count for result in results):
            raise RuntimeError("tokens are missing")
        if w.kind == "stream":
            return (len(moments) - 1) / (moments[-1] - moments[0])
        return w.num_prompts * (w.input_len + (w.output_len if w.kind == "offline" else 0)) / seconds

    return run, {"version": genai.__version__}


def decoded(pipeline: Any, prompts: list[Any], config: Any) -> list[float]:
    """The moments of the steps in which all streams got a token."""
    handles = [pipeline.add_request(number, prompt, config) for number, prompt in enumerate(prompts)]
    moments = []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        if sum(handle.can_read() and bool(handle.read()) for handle in handles) == len(handles):
            moments.append(time.perf_counter())
    return moments


def serve(w: Workload, port: int) -> list[str]:
    raise RuntimeError("the package has no server")


if __name__ == "__main__":
    main(load, serve)

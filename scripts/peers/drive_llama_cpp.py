"""llama.cpp: its library through llama-cpp-python's declarations, its own server.

Sequences are decoded together as its batched-bench does: prompts in logical batches, then a token of each a step.
Settings, by what its kernels do; not yet compared with others on a quiet machine:
* flash attention is on: its CPU kernel reads the keys once, and without it scores of all sequences are stored;
* each sequence has a KV buffer of its own (kv_unified off): in a unified one every token attends over the cells of all
  the others, behind a mask;
* logical batches of 2048 tokens, computed 512 at a time, which is the default;
* weights are repacked for the machine (the default), so that mmap is no help; as many threads as cores.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from protocol import Run, Workload, main

LOGICAL, PHYSICAL = 2048, 512


class Entry(NamedTuple):
    token: int
    position: int
    sequence: int
    wanted: bool  # its logits


class Context:
    def __init__(self, w: Workload) -> None:
        import llama_cpp

        self._ll = ll = llama_cpp
        ll.llama_backend_init()
        model = ll.llama_model_load_from_file(w.model.encode(), ll.llama_model_default_params())
        if not model:
            raise RuntimeError(f"{w.model} cannot be loaded")
        self._vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        params = ll.llama_context_default_params()
        params.n_ctx = w.num_prompts * -(-(w.length + 1) // 256) * 256
        params.n_batch, params.n_ubatch, params.n_seq_max = LOGICAL, PHYSICAL, w.num_prompts
        params.n_threads = params.n_threads_batch = w.threads
        params.flash_attn_type, params.kv_unified = 1, False
        if w.kv_dtype == "int8":
            params.type_k = params.type_v = ll.GGML_TYPE_Q8_0
        self._context = ll.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("no context could be made")
        self._batch = ll.llama_batch_init(LOGICAL, 0, 1)

    def decode(self, entries: list[Entry]) -> list[int]:
        """Greedy tokens of the entries that are wanted."""
        import numpy as np

        batch, found = self._batch, []
        for start in range(0, len(entries), LOGICAL):
            part = entries[start : start + LOGICAL]
            for i, entry in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = entry.token, entry.position, entry.wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, entry.sequence
            batch.n_tokens = len(part)
            if self._ll.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            rows = sum(entry.wanted for entry in part)
            if rows:
                logits = np.ctypeslib.as_array(self._ll.llama_get_logits(self._context), (rows, self._vocab))
                found += logits.argmax(axis=1).tolist()
        return found

    def read(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each sequence; what was before is forgotten."""
        self._ll.llama_memory_clear(self._ll.llama_get_memory(self._context), True)
        entries = [
            Entry(token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        return self.decode(entries)

    def steps(self, tokens: list[int], position: int, count: int) -> list[float]:
        """The moments of so many steps of all sequences."""
        moments = []
        for step in range(count):
            entries = [Entry(token, position + step, sequence, True) for sequence, token in enumerate(tokens)]
            tokens = self.decode(entries)
            moments.append(time.perf_counter())
        return moments


def load(w: Workload) -> tuple[Run, dict[str, Any]]:
    import llama_cpp

    context = Context(w)

    def run(number: int) -> float:
        prompts = w.prompts(number)
        if w.kind == "decode":
            prompts = [prompt[: w.input_len - w.output_len // 2] for prompt in prompts]
        began = time.perf_counter()
        tokens = context.read(prompts)
        read = time.perf_counter()
        if w.kind == "prefill":
            return w.input_len / (read - began)
        count = w.output_len if w.kind == "decode" else w.output_len - 1  # the first came with the prompt
        ended = context.steps(tokens, len(prompts[0]), count)[-1]
        if w.kind == "offline":
            return w.num_prompts * (w.input_len + w.output_len) / (ended - began)
        return w.num_prompts * count / (ended - read)

    return run, {"version": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode()}


def serve(w: Workload, port: int) -> list[str]:
    each = -(-(w.length + 8) // 256) * 256
    command = [str(Path(sys.prefix) / "bin" / "llama-server"), "--model", w.model, "--port", str(port), "--no-webui"]
    command += ["--threads", str(w.threads), "--parallel", str(w.num_prompts), "--ctx-size", str(w.num_prompts * each)]
    command += ["--batch-size", str(LOGICAL), "--ubatch-size", str(PHYSICAL), "--flash-attn", "on"]
    return command + (["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"] if w.kv_dtype == "int8" else [])


if __name__ == "__main__":
    main(load, serve)

"""What is measured: a row a workload, at a size that all engines get through in minutes and at the full one."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    num_prompts: int = 1
    input_len: int = 256  # decode: the context
    output_len: int = 128  # decode: steps
    shared_len: int = 0


class Row(NamedTuple):
    name: str
    kind: str  # as in protocol.Workload
    model: str  # of octavo.bench.models.NAMES, or demo
    peers: tuple[str, ...]  # those that can do it
    quick: Size
    full: Size
    kv_dtype: str = "auto"

    @property
    def unit(self) -> str:
        return "s" if self.is_time else "tokens/s"

    @property
    def is_time(self) -> bool:
        """Less is better."""
        return self.kind in ("prefix", "start")


OCTAVO = "octavo"
PEERS = ("llama.cpp", "openvino", "vllm")
_L, _LO, _LV = ("llama.cpp",), ("llama.cpp", "openvino"), ("llama.cpp", "vllm")

_MANY = Size(16, 128, 64), Size(64, 256, 128)
_ONE = Size(1, 256, 64), Size(1, 256, 128)
_PROMPT = Size(1, 512, 1), Size(1, 512, 1)
_PREFIX = Size(8, 32, 32, 512), Size(32, 64, 64, 1024)
_SERVE = Size(16, 128, 64), Size(64, 256, 128)
_START = Size(1, 4, 2), Size(1, 4, 2)

ROWS = (
    Row("offline, bf16", "offline", "demo-bf16", _LV, *_MANY),
    Row("offline, Q4_1", "offline", "demo", _LO, *_MANY),
    Row("offline, Q4_0", "offline", "demo-q4_0", _LO, *_MANY),
    Row("offline, Q4_1, int8 KV", "offline", "demo", _LO, *_MANY, kv_dtype="int8"),
    Row("offline, Q4_0, int8 KV", "offline", "demo-q4_0", _LO, *_MANY, kv_dtype="int8"),
    Row("one stream, bf16", "stream", "demo-bf16", _LV, *_ONE),
    Row("one stream, Q4_1", "stream", "demo", _LO, *_ONE),
    Row("one stream, Q4_0", "stream", "demo-q4_0", _LO, *_ONE),
    Row("one stream, 1B Q4_0", "stream", "1b-q4_0", _LO, Size(1, 64, 32), _ONE[1]),
    Row("32 streams, 1B Q4_0", "decode", "1b-q4_0", _LO, Size(32, 64, 16), Size(32, 256, 32)),
    Row("streams at 128, Q4_1", "decode", "demo", _LO, Size(32, 128, 32), Size(64, 128, 32)),
    Row("streams at 320, Q4_1", "decode", "demo", _LO, Size(16, 320, 32), Size(64, 320, 32)),
    Row("streams at 320, Q4_1, int8 KV", "decode", "demo", _LO, Size(16, 320, 32), Size(64, 320, 32), kv_dtype="int8"),
    Row("streams at 320, bf16", "decode", "demo-bf16", _LV, Size(16, 320, 32), Size(64, 320, 32)),
    Row("prefill 512, bf16", "prefill", "demo-bf16", _LV, *_PROMPT),
    Row("prefill 512, Q4_1", "prefill", "demo", _LO, *_PROMPT),
    Row("prefill 512, Q4_0", "prefill", "demo-q4_0", _LO, *_PROMPT),
    Row("prefill, 1B bf16", "prefill", "1b-bf16", _LV, Size(1, 256, 1), Size(1, 512, 1)),
    Row("prefill, 1B Q4_0", "prefill", "1b-q4_0", _LO, Size(1, 256, 1), Size(1, 512, 1)),
    Row("one stream at 8k, Q4_1", "decode", "demo", _LO, Size(1, 4000, 32), Size(1, 8000, 32)),
    Row("one stream at 8k, bf16", "decode", "demo-bf16", _LV, Size(1, 4000, 32), Size(1, 8000, 32)),
    Row("256 streams, Q4_1", "offline", "demo", _LO, Size(64, 32, 16), Size(256, 128, 64)),
    Row("256 streams, bf16", "offline", "demo-bf16", _LV, Size(64, 32, 16), Size(256, 128, 64)),
    Row("shared prefix over HTTP, bf16", "prefix", "demo-bf16", _LV, *_PREFIX),
    Row("shared prefix over HTTP, Q4_1", "prefix", "demo", _L, *_PREFIX),
    Row("streams over HTTP, Q4_1", "serve", "demo", _L, *_SERVE),
    Row("streams over HTTP, bf16", "serve", "demo-bf16", _LV, *_SERVE),
    Row("start to first token", "start", "demo", _L, *_START),
    Row("start to first token, bf16", "start", "demo-bf16", _LV, *_START),
)
"""In one order, so that those with the same model follow one another."""

DEFAULT = (
    "offline, bf16", "offline, Q4_1", "offline, Q4_0", "one stream, bf16", "one stream, Q4_1", "one stream, Q4_0",
    "one stream, 1B Q4_0", "32 streams, 1B Q4_0", "streams at 128, Q4_1", "streams at 320, Q4_1", "prefill 512, bf16",
    "prefill 512, Q4_1", "prefill 512, Q4_0", "prefill, 1B Q4_0", "shared prefix over HTTP, bf16", "streams over HTTP, Q4_1",
    "start to first token",
)  # fmt: skip
"""Measured unless rows are named: with llama.cpp alone, about ten minutes on two slow cores."""

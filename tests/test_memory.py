"""Free memory as cgroups allow it, the KV size that follows, and the peak of a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import ConfigError
from octavo.engine.memory import KvNeeds, KvSize, check_weights, format_bytes, free_memory, size_kv
from octavo.weights.formats.codes import NF4
from tests.quant_writers import Raw, Rng, Written, compressed, group
from tests.quantised_model import Write, save_quantised
from tests.random_blocks import write_mixed

GIB = 2**30


def machine(tmp_path: Path, cgroup_lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup_lines)
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroup


def v2(group: str, limit: str, usage: int, files: int) -> dict[str, str]:
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{usage}\n",
        f"{group}/memory.stat": f"anon 1\ninactive_file {files // 2}\nactive_file {files - files // 2}\n",
    }


def v1(group: str, limit: int, usage: int, files: int) -> dict[str, str]:
    return {
        f"memory/{group}/memory.limit_in_bytes": f"{limit}\n",
        f"memory/{group}/memory.usage_in_bytes": f"{usage}\n",
        f"memory/{group}/memory.stat": f"cache 1\ntotal_inactive_file {files // 2}\ntotal_active_file {files - files // 2}\n",
    }


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, "0::/a/b\n", v2("a", "max", 10, 0))
    assert free_memory(proc, cgroup) == 8 * GIB


def test_v2_every_ancestor_counts(tmp_path: Path) -> None:
    files = {**v2("a", str(3 * GIB), 2 * GIB, GIB // 2), **v2("a/b", str(4 * GIB), GIB, 0)}
    proc, cgroup = machine(tmp_path, "0::/a/b\n", files)
    assert free_memory(proc, cgroup) == 3 * GIB // 2  # of a: 3 - 2 + 0.5


def test_v1_and_unlimited_spelling(tmp_path: Path) -> None:
    files = {**v1("x/y", 2 * GIB, GIB, GIB // 4), **v1("x", 2**63 - 4096, 0, 0)}
    proc, cgroup = machine(tmp_path, "9:name=systemd:/\n4:memory:/x/y\n0::/\n", files)
    assert free_memory(proc, cgroup) == 5 * GIB // 4


def test_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, "0::/docker/0123\n", v2(".", str(GIB), GIB // 2, 0))
    assert free_memory(proc, cgroup) == GIB // 2


def test_over_the_limit_is_nothing_free(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, "0::/a\n", v2("a", str(GIB), 2 * GIB, 0))
    assert free_memory(proc, cgroup) == 0


def test_real_machine() -> None:
    assert free_memory() > 2**20


def divide(
    groups: list[KvNeeds],
    wanted: int | None = None,
    free: int = GIB,
    *,
    length: int = 1024,
    seqs: int = 4,
    step: int = 64,
) -> KvSize:
    return size_kv(
        groups, max_model_len=length, max_num_seqs=seqs, max_step_tokens=step, wanted_bytes=wanted, free_bytes=free
    )


def size(wanted: int | None = None, free: int = GIB, *, length: int = 1024, seqs: int = 4, block: int = 16384) -> int:
    kv = divide([KvNeeds(block)], wanted, free, length=length, seqs=seqs)
    assert kv.total_bytes == kv.num_blocks[0] * block
    return kv.num_blocks[0]


def test_default_is_what_could_be_used() -> None:
    assert size() == 4 * 64
    assert size(free=100 * 16384) == 80  # 0.8 of what is free


def test_wanted_bytes_are_kept_to_the_block() -> None:
    assert size(wanted=100 * 16384 + 5) == 100


def test_too_small_names_what_would_work() -> None:
    with pytest.raises(
        ConfigError, match=r"max_model_len=1024 .* max_model_len=80 fits, or kv_cache_memory=1048576 would work"
    ):
        size(wanted=5 * 16384)
    assert size(wanted=1048576) == 64
    assert size(wanted=5 * 16384, length=80) == 5


def test_more_than_is_free_names_what_would_work() -> None:
    with pytest.raises(ConfigError, match=r"1\.00 GiB of memory are free: kv_cache_memory=858993459 would work"):
        size(wanted=2 * GIB)


def test_groups_share_the_budget() -> None:
    kv = divide([KvNeeds(1000), KvNeeds(3000)], 40_000, length=160, seqs=2)
    assert kv.num_blocks == [10, 10]
    assert ", 1 sequences of 160 tokens" in kv.describe(160)


def test_a_window_takes_what_its_sequences_keep() -> None:
    """4 sequences of at most 7 blocks, 4 blocks of a step, and 28 for prefixes that are reused."""
    groups = [KvNeeds(1000), KvNeeds(1000, window=96)]
    kv = divide(groups)
    assert kv.num_blocks == [256, 60]
    assert kv.longest == [64, 7]
    assert kv.describe(1024).endswith(": 256 and 60 blocks of 16 tokens, 4 sequences of 1024 tokens at once")
    assert divide(groups, 40_000, length=128).num_blocks == [20, 20], "short sequences take as much of either"
    assert divide(groups, 80_000).num_blocks == [64, 16], "a long one has to fit"
    assert divide(groups, 75_000).num_blocks == [64, 11]
    with pytest.raises(ConfigError, match=r"max_model_len=1008 fits, or kv_cache_memory=75000 would work"):
        divide(groups, 74_999)


def test_windows_alone_share_the_budget() -> None:
    groups = [KvNeeds(1000, window=32), KvNeeds(1000, window=96)]
    assert divide(groups, 100_000).num_blocks == [50, 50]
    with pytest.raises(ConfigError, match=r"kv_cache_memory=18000 would work"):
        divide(groups, 10_000)
    assert divide(groups, 18_000).num_blocks == [7, 11]


def test_weights_that_do_not_fit_say_so() -> None:
    check_weights(GIB, GIB)
    with pytest.raises(ConfigError, match=r"weights of this model take 2\.00 GiB, but 1\.00 GiB of memory are free"):
        check_weights(2 * GIB, GIB)


def test_units() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**20, 5 * GIB // 2)] == [
        "12 B",
        "2.00 KiB",
        "3.00 MiB",
        "2.50 GiB",
    ]


OVERHEAD = 96 * 2**20
"""Beside packed weights and touched KV, for the demo model. Interpreter and libraries 36 MB, logits of 64 rows 12.6 MB,
the arena of 512 tokens 14 MB, and while packing one source tensor, the largest of 31 MB. The README states it."""

RUN = """
import json, random, sys, time
from pathlib import Path
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.request import SamplingParams

rng = random.Random(0)
engine = Engine(EngineConfig(model=sys.argv[1], weights_cache=sys.argv[2]))
for i in range(6):
    prompt = [rng.randrange(49152) for _ in range(300)]
    engine.add(Add(str(i), prompt, SamplingParams(max_tokens=4, ignore_eos=True, logprobs=5), seed=i))
blocks = 0
while engine.step() is not None:
    stats = engine.stats()
    blocks = max(blocks, stats.kv_blocks_held + stats.kv_blocks_cached)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
loaded = engine.loaded
end = time.monotonic() + 300
while not list(Path(sys.argv[2]).glob("*.weights")):
    assert time.monotonic() < end
    time.sleep(0.01)
print(json.dumps({"peak": int(peak.split()[1]) * 1024, "weights": loaded.weights.num_bytes,
                  "packed": "pack" in loaded.phases, "kv": loaded.state.touched_bytes, "blocks": blocks, "block": loaded.kv.block_bytes}))
"""


def test_peak_memory_of_a_run(demo: Path, tmp_path: Path) -> None:
    """Of the first start, which packs the weights, and of the second, which maps them."""
    for packs in (True, False):
        seen = run(RUN, demo, tmp_path)
        assert seen["packed"] == packs
        check_peak(seen, demo.stat().st_size)


def run(script: str, *arguments: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def check_peak(seen: dict[str, Any], file_bytes: int) -> None:
    assert seen["blocks"] == 6 * 19  # of 303 tokens
    # Touched is counted in pages of 4096 bytes: at most two more per layer, head and run of blocks.
    assert seen["blocks"] * seen["block"] <= seen["kv"] <= seen["blocks"] * seen["block"] + 30 * 3 * 2 * 4096
    assert seen["weights"] < 1.05 * file_bytes
    assert seen["weights"] < seen["peak"] <= seen["weights"] + seen["kv"] + OVERHEAD


PACK = """
import json, os, sys
from octavo.backends.cpu import CpuBackend
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint

def high_water():
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024

for path in sys.argv[1:]:  # each in a process of its own, whose peak begins with what is in memory now
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    before = high_water()
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint)
    weights = CpuBackend(num_threads=1).pack(graph, checkpoint)
    print(json.dumps({"before": before, "peak": high_water(), "weights": weights.num_bytes}), flush=True)
    os._exit(0)
"""

DECODING = 64 * 2**20
"""Beside packed weights and the largest source tensor, while quantised matrices of any size are packed: VALUES_AT_ONCE
at up to 30 bytes a value, and what python allocates but has not touched yet when it starts."""

WIDE = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1, "head_dim": 64, "vocab_size": 64,
        "num_attention_heads": 16, "num_key_value_heads": 4}  # fmt: skip


def words(rng: Rng, *shape: int) -> Raw:
    return Raw("I32", rng.integers(-(2**31), 2**31, shape, np.int32))


def wide_gptq(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """4 bits with act-order, as random words."""
    groups = cols // 128
    order = np.random.default_rng(cols).permutation(np.arange(cols, dtype=np.int32) // 128)
    scales = Raw("F16", np.full((groups, rows), 0.001, np.float16))
    tensors = {".qweight": words(rng, cols // 8, rows), ".qzeros": words(rng, groups, rows // 8), ".scales": scales}
    return Written({**tensors, ".g_idx": Raw("I32", order)}, np.zeros(0))


def wide_compressed(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """4-bit integers, FP8 and int8."""
    kind = module.rpartition(".")[2]
    scales = Raw("BF16", np.full((rows, cols // 128), 0x3A80, np.uint16))
    if kind == "up_proj":
        tiles = Raw("BF16", scales.values[::128])
        return Written({".weight": Raw("F8_E4M3", rng.integers(0, 127, (rows, cols), np.uint8)), ".weight_scale": tiles},
                       np.zeros(0))  # fmt: skip
    if kind == "down_proj":
        one = Raw("BF16", scales.values[:, :1])
        return Written({".weight": Raw("I8", rng.integers(-127, 127, (rows, cols), np.int8)), ".weight_scale": one},
                       np.zeros(0))  # fmt: skip
    shape = Raw("I64", np.array([rows, cols], np.int64))
    return Written({".weight_packed": words(rng, rows, cols // 8), ".weight_scale": scales, ".weight_shape": shape},
                   np.zeros(0))  # fmt: skip


def wide_awq(module: str, rng: Rng, rows: int, cols: int) -> Written:
    scales = Raw("F16", np.full((cols // 128, rows), 0.001, np.float16))
    zeros = words(rng, cols // 128, rows // 8)
    return Written({".qweight": words(rng, cols, rows // 8), ".qzeros": zeros, ".scales": scales}, np.zeros(0))


def wide_nf4(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """What is packed as bf16."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, cols]}
    tensors = {
        ".weight": Raw("U8", rng.integers(0, 256, (rows * cols // 2, 1), np.uint8)),
        ".weight.quant_map": Raw("F32", NF4),
        ".weight.absmax": Raw("F32", np.full(rows * cols // 64, 0.01, np.float32)),
        ".weight.quant_state.bitsandbytes__nf4": Raw("U8", np.frombuffer(json.dumps(state).encode(), np.uint8)),
    }
    return Written(tensors, np.zeros(0))


def wide_fp4(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """MXFP4, and of down_proj NVFP4."""
    packed = Raw("U8", rng.integers(0, 256, (rows, cols // 2), np.uint8))
    if not module.endswith("down_proj"):
        scales = Raw("U8", np.full((rows, cols // 32), 120, np.uint8))
        return Written({".weight_packed": packed, ".weight_scale": scales}, np.zeros(0))
    scales, whole = Raw("F8_E4M3", np.full((rows, cols // 16), 40, np.uint8)), Raw("F32", np.full(1, 1e3, np.float32))
    return Written({".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": whole}, np.zeros(0))


MIXED = compressed(
    group(group_size=128), group("float", 8, "float-quantized", strategy="block", block_structure=[128, 128])
    | {"targets": ["re:.*up_proj"]}, group(bits=8, format="int-quantized", strategy="channel") | {"targets": ["re:.*down_proj"]},
)  # fmt: skip


FP4 = compressed(
    group("float", 4, "mxfp4-pack-quantized", group_size=32),
    group("float", 4, "nvfp4-pack-quantized", group_size=16) | {"targets": ["re:.*down_proj"]},
)
METHODS: dict[str, tuple[dict[str, Any], Write, float]] = {  # and bytes a value of the largest tensor of the file
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, wide_gptq, 0.5),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, wide_awq, 0.5),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, wide_nf4, 0.5),
    "compressed-tensors": (MIXED, wide_compressed, 1),
    "4-bit floats": (FP4, wide_fp4, 0.5),
}
FILE = ("Q8_0", "Q6_K", "Q5_K", "Q4_0", "Q5_1", "IQ4_XS", "Q4_K", "IQ3_S", "Q3_K")
"""Of a GGUF file; those of the last three, gate, up and down, are wide."""


def test_peak_memory_of_packing_does_not_grow_with_a_matrix(tmp_path: Path) -> None:
    """Matrices of 8 million values, 34 MB in float32 and more while they are decoded."""
    paths = [save_quantised(tmp_path / name, said, write, **WIDE) for name, (said, write, _) in METHODS.items()]
    paths.append(write_mixed(tmp_path / "model.gguf", FILE, layers=1, inner=2**15))
    command = [sys.executable, "-c", PACK, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for path, seen, size in zip(paths, lines, [*(size for *_, size in METHODS.values()), 0.6], strict=True):
        assert seen["peak"] <= seen["before"] + seen["weights"] + size * 2**23 + DECODING, path.name

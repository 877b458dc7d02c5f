"""How many threads: on copies of /proc and /sys as containers show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import _native
from octavo.backends.threads import allowed_cores, cpu_quota, default_threads, pinning

FOUR = frozenset(range(4))
V2 = "30 23 0:26 {mounted} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 {mounted} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def siblings(*pairs: str) -> dict[str, str]:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {topology.format(cpu): pair + "\n" for pair in pairs for cpu in pair.split(",")}


def test_one_processor_of_each_physical_core(tmp_path: Path) -> None:
    machine(tmp_path, siblings("0,2", "1,3"))
    assert allowed_cores(tmp_path, FOUR) == [0, 1]
    assert allowed_cores(tmp_path, frozenset({2, 3})) == [2, 3]
    assert allowed_cores(tmp_path, frozenset({1, 3})) == [1]


def test_without_topology_every_processor_counts(tmp_path: Path) -> None:
    assert default_threads(tmp_path, FOUR) == 4
    assert cpu_quota(tmp_path) is None


def test_no_more_threads_than_a_pool_takes(tmp_path: Path) -> None:
    assert default_threads(tmp_path, frozenset(range(384))) == 256
    with pytest.raises(ValueError, match=r"must be in 1\.\.256; got 257"):
        _native.Pool(257, [])


def test_pinned_only_to_all_cores_of_this_process(tmp_path: Path) -> None:
    machine(tmp_path, siblings("0,2", "1,3", "4,6", "5,7"))
    eight = frozenset(range(8))
    assert pinning(4, tmp_path, eight) == [0, 1, 4, 5]
    assert pinning(3, tmp_path, eight) == []  # another process with three would pin to the same
    assert pinning(5, tmp_path, eight) == []
    assert pinning(2, tmp_path, FOUR) == []


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5)])
def test_quota_of_version_2(tmp_path: Path, text: str, quota: float | None) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "proc/self/mountinfo": V2.format(mounted="/"),
        "sys/fs/cgroup/a/b/cpu.max": text + "\n",
    }
    assert cpu_quota(machine(tmp_path, files)) == quota
    assert default_threads(tmp_path, FOUR) == (4 if quota is None else 1)


def test_the_least_quota_of_all_ancestors_holds(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "proc/self/mountinfo": V2.format(mounted="/"),
        "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
    }
    assert cpu_quota(machine(tmp_path, files)) == 2
    assert default_threads(tmp_path, FOUR) == 2


def test_quota_of_version_1_under_a_bind_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/docker/c\n4:cpu,cpuacct:/docker/c\n0::/docker/c\n",
        "proc/self/mountinfo": V1.format(mounted="/docker/c"),
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert cpu_quota(machine(tmp_path, files)) == 3
    (tmp_path / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path) is None


def test_this_machine() -> None:
    assert 1 <= default_threads() <= len(allowed_cores())

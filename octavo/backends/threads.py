"""How many worker threads, and on which processors: affinity, cgroup quota and physical cores decide.

Two threads on one core's siblings gain nothing here, and more threads than the quota allows lose a lot: the kernel
stops all of them for the rest of a period (Linux kernel documentation: cgroup-v2.rst "cpu.max", sched-bwc.rst).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def allowed_cores(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> list[int]:
    """One processor of every physical core that this process may use, ascending."""
    cpus = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    cores: dict[str, int] = {}
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "thread_siblings_list") or str(cpu)
        cores.setdefault(siblings, cpu)
    return list(cores.values())


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time per period, the least of all cgroups above this process; None: no limit."""
    limits = []
    for group, version in _cpu_groups(root):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").partition(" ")
        else:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # "max" and -1: no limit
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


MAX_THREADS = 256
"""The most workers of a native pool (native/pool.cpp)."""


def default_threads(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> int:
    cores = min(MAX_THREADS, len(allowed_cores(root, affinity)))
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def pinning(num_threads: int, root: Path = Path("/"), affinity: frozenset[int] | None = None) -> list[int]:
    """Processors to pin to, one per thread, or none at all.

    Pinned only where the threads take every core that this process may use, and there are more than two. With fewer
    threads (a quota, an option) another process would pin to the same first cores; on two cores the workers share them
    with the API process, and the kernel must be free to move them.
    """
    cores = allowed_cores(root, affinity)
    return cores if 2 < num_threads == len(cores) else []


def _cpu_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Every cgroup directory with a CPU limit that holds for this process, with its version."""
    paths: dict[int, str] = {}  # version -> path of this process
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif "cpu" in controllers.split(","):
            paths[1] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, kind = line.partition(" - ")
        mounted, mount_point = fields.split()[3:5]
        version = 2 if kind.startswith("cgroup2 ") else 1 if kind.startswith("cgroup ") else 0
        if version not in paths or (version == 1 and "cpu" not in kind.split()[-1].split(",")):
            continue
        own = PurePosixPath(paths[version])
        if own.is_relative_to(mounted):
            own = PurePosixPath("/") / own.relative_to(mounted)
        top = root / mount_point.lstrip("/")
        for ancestor in (own, *own.parents):
            yield top / str(ancestor).lstrip("/"), version


def _read(path: Path) -> str:
    """Content without the last line's end; "" where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""How many CPUs this process may really use: the container's quota and the affinity mask, not the machine's count."""

from __future__ import annotations

import os
from pathlib import Path


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _own_cgroups(proc_cgroup: Path) -> dict[str, str]:
    """``{controller: path}`` of this process; the unified hierarchy (v2) is under the empty name."""
    paths = {}
    for line in (_read(proc_cgroup) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _upwards(root: Path, path: str) -> list[Path]:
    """The group's folder and all above it up to ``root``: a limit anywhere on the way holds."""
    folder = root / path.strip("/")
    folders = [folder]
    while folder != root and root in folder.parents:
        folder = folder.parent
        folders.append(folder)
    return folders


_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC_CGROUP = Path("/proc/self/cgroup")


def cgroup_cpu_quota(root: Path = _CGROUP_ROOT, proc_cgroup: Path = _PROC_CGROUP) -> float | None:
    """CPUs granted by the cgroup quota (v2 ``cpu.max``, v1 ``cpu.cfs_*``), the least on the way up; None: no limit."""
    groups = _own_cgroups(proc_cgroup)
    quotas = []
    for folder in _upwards(root, groups.get("", "/")):
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        if quota != "max":
            quotas.append(int(quota) / int(period or 100_000))
    for folder in _upwards(root / "cpu", groups.get("cpu", "/")):
        quota = _read(folder / "cpu.cfs_quota_us") or "-1"
        if int(quota) > 0:
            quotas.append(int(quota) / int(_read(folder / "cpu.cfs_period_us") or 100_000))
    return min(quotas) if quotas else None


def available_cpus() -> int:
    """Whole CPUs this process may use, at least 1: the affinity mask or the cgroup quota, rounded up, if smaller."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    if quota is not None:
        count = min(count, max(1, -int(-quota // 1)))
    return count


def let_idle_threads_sleep() -> None:
    """Make OpenMP's threads sleep while they wait for each other, unless the environment says otherwise.

    By default they spin. Where another process holds a core of this one's, a spinning thread uses up the core that the
    awaited one needs, and each of a step's hundreds of parallel regions may take a scheduler's slice: with two threads
    and a busy neighbour steps took twice as long and more. On an idle machine neither one stream nor a full batch is
    slower for it. Must be called before OpenMP is loaded, that is before torch.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

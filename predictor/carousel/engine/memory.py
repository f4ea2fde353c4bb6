"""How much memory this process may still take, and how many KV blocks that makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from carousel.engine.block_pool import blocks_for
from carousel.engine.errors import InvalidRequest
from carousel_kernels.layout import BLOCK_SIZE

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 2**60


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _cgroup_free(root: Path = _CGROUP) -> int | None:
    """Bytes left under the container's limit (cgroup v2, then v1), or None without a limit."""
    for limit_file, usage_file, stat_file in (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes", root / "memory/memory.stat"),
    ):
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            return max(limit - usage + _reclaimable(stat_file), 0)
    return None


def _reclaimable(stat_file: Path) -> int:
    """Page cache that the kernel gives back under pressure: a model file that was just read is in it."""
    try:
        fields = dict(line.split(" ", 1) for line in stat_file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on ``device``: on the CPU the machine's and the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    container = _cgroup_free()
    if container is not None:
        free.append(container)
    # Not Linux, so nothing is known: assume a small machine.
    return min(free) if free else 2 * 2**30


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The KV pool's size. ``max_model_len`` is what a sequence may really reach, in tokens."""

    num_blocks: int
    bytes_per_token: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    def __str__(self) -> str:
        gib = self.num_tokens * self.bytes_per_token / 2**30
        return (
            f"KV cache: {gib:.2f} GiB, {self.num_tokens:,} tokens, "
            f"{self.num_tokens / self.max_model_len:.1f} full-length sequences of {self.max_model_len:,}"
        )


def plan_kv_cache(
    bytes_per_token: int,
    memory: float,
    free_bytes: int,
    wanted_len: int,
    model_len: int,
    max_sequences: int,
) -> KVBudget:
    """Size the KV pool.

    Args:
        bytes_per_token: K and V of one token over all layers.
        memory: an int is bytes, a float a fraction of ``free_bytes``.
        free_bytes: what the process may still take.
        wanted_len: the longest sequence asked for, in tokens; 0 takes what the model and the memory allow.
        model_len: the model's own context length, in tokens.
        max_sequences: most sequences on the batch: more memory than they can fill is not taken.

    Raises:
        InvalidRequest: the memory is more than is free, or too little for one sequence of ``wanted_len``.
    """
    if isinstance(memory, int) and memory > free_bytes:
        raise InvalidRequest("--kv-cache-memory", f"{memory} bytes", f"at most what is free: {free_bytes} bytes")
    if wanted_len > model_len:
        raise InvalidRequest("--max-model-len", wanted_len, f"at most the model's context length, {model_len}")
    budget = memory if isinstance(memory, int) else int(memory * free_bytes)
    num_blocks = budget // (bytes_per_token * BLOCK_SIZE)
    longest = wanted_len or model_len
    needed = blocks_for(longest)
    if wanted_len and num_blocks < needed:
        raise InvalidRequest(
            "--kv-cache-memory",
            f"{budget} bytes",
            f"at least {needed * BLOCK_SIZE * bytes_per_token} bytes for one sequence of {wanted_len} tokens",
        )
    if num_blocks < 2:
        raise InvalidRequest(
            "--kv-cache-memory", f"{budget} bytes", f"at least {2 * BLOCK_SIZE * bytes_per_token} bytes (two blocks)"
        )
    longest = min(longest, num_blocks * BLOCK_SIZE)
    return KVBudget(min(num_blocks, max_sequences * blocks_for(longest)), bytes_per_token, longest)

"""How kernels are launched on a device: what was measured for it, or a rule where nothing was. Nothing is tuned here.

``tuned.json`` in this package maps a device's name to kernels, those to keys such as "bf16 D128", and those to
configurations; ``python -m carousel_kernels.bench --tune`` writes it on a device. Kernels compile at first use, so
that a configuration costs nothing while serving but a look-up.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

from .common import INTERPRETED
from .registry import TARGETS, Target

__all__ = [
    "CHUNK",
    "AttentionConfig",
    "chunks_of",
    "decode_config",
    "is_fp8_cache",
    "key_of",
    "next_power_of_2",
    "prefill_config",
    "target_of",
    "tuned",
    "uniform_config",
]

CHUNK = 2048
"""Logits per program. It is the same for every batch, so that sums round alike in all of them."""

DETERMINISTIC_SPLIT = 1024
"""Tokens per split of the deterministic mode, a multiple of every tile: 4 MiB of keys and values of 8 heads of 128 in
bfloat16."""

SHORTEST_SPLIT = 128
"""Tokens; shorter splits cost more in combining than they gain."""

_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def chunks_of(vocabulary: int) -> tuple[int, int]:
    """Into chunks of how many logits a row is cut, a power of two, and into how many."""
    block = min(CHUNK, max(16, next_power_of_2(vocabulary)))
    return block, -(-vocabulary // block)


def is_fp8_cache(cache: torch.Tensor) -> bool:
    """Whether keys or values are cached in e4m3.

    Raises ValueError for types that have no kernel.
    """
    if cache.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if cache.dtype == torch.float8_e4m3fn:
        return True
    raise ValueError(f"KV cache: got {cache.dtype}, allowed: float32, bfloat16, float16, float8_e4m3fn")


@functools.cache
def target_of(device: torch.device) -> Target:
    """The device as a compilation target. In the interpreter (CPU tensors): the smallest device, so that batches of a
    few sequences are split as batches of many are on a GPU."""
    if device.type != "cuda":
        return replace(TARGETS[1], name="interpreter", num_units=4)
    properties = torch.cuda.get_device_properties(device)
    name = properties.name
    if torch.version.hip is not None:
        base = TARGETS[-1]
        return replace(base, name=name, arch=properties.gcnArchName.split(":")[0],
                       num_units=properties.multi_processor_count)  # fmt: skip
    capability = properties.major * 10 + properties.minor
    base = TARGETS[1] if capability >= 89 else TARGETS[0]
    return replace(
        base, name=name, arch=capability, num_units=properties.multi_processor_count,
        max_shared=int(getattr(properties, "shared_memory_per_block_optin", base.max_shared)), fp8=capability >= 89,
    )  # fmt: skip


@functools.cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]:
    text = resources.files(__package__ or "").joinpath("tuned.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def tuned(target: Target, kernel: str, key: str) -> Mapping[str, int] | None:
    """What was measured to be best for a kernel on a device; None if nothing was."""
    return _table().get(target.name, {}).get(kernel, {}).get(key)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tokens per tile of keys, query rows per tile, and launch options."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int


def key_of(cache: torch.dtype, dim: int) -> str:
    """The key in ``tuned.json`` of a type of keys and values and a head size."""
    return f"{_TYPE_NAMES.get(cache, str(cache))} D{dim}"


def decode_config(target: Target, cache: torch.dtype, dim: int, group: int) -> AttentionConfig:
    """For ``decode_kernel``. Two programs or more must fit an SM at once, as one waits at its ends for memory.

    cache: type of keys and values; dim: head size; group: query heads per KV head.
    """
    block_m = min(max(next_power_of_2(group), 16), 32)
    measured = tuned(target, "decode", key_of(cache, dim))
    if measured is not None:
        return AttentionConfig(measured["block_n"], block_m, measured["num_warps"], measured["num_stages"])
    if INTERPRETED.value:
        return AttentionConfig(64, block_m, 4, 2)  # a tile costs a time of its own there, whatever its size
    row = next_power_of_2(dim) * cache.itemsize
    # Triton halves the stages between the block table and the keys it leads to: five make two tiles of keys and values
    # in flight. Three such programs are to fit in an SM. FP8 is widened in registers, which more values exhaust.
    budget = target.max_shared // (4 if target.is_amd else 6)
    block_n = (64 if row < 128 else 32) if cache.itemsize == 1 else 128 if row <= 128 else 64
    while block_n > 16 and 2 * block_n * row > budget:
        block_n //= 2
    return AttentionConfig(block_n, block_m, 4, target.stages(5))


def prefill_config(target: Target, cache: torch.dtype, dim: int, group: int) -> AttentionConfig:
    """For ``prefill_kernel``; arguments as of ``decode_config``."""
    measured = tuned(target, "prefill", key_of(cache, dim))
    if measured is not None:
        return AttentionConfig(measured["block_n"], measured["block_m"], measured["num_warps"], measured["num_stages"])
    if INTERPRETED.value:
        return AttentionConfig(64, 64, 4, 2)
    # As large as registers allow without spilling; float32 has no matrix instruction of its precision.
    if cache == torch.float32:
        return AttentionConfig(16, 32, 8, target.stages(2))
    if next_power_of_2(dim) > 128:
        return AttentionConfig(32, 64, 4 if target.is_amd else 8, target.stages(5))
    if target.is_amd:
        return AttentionConfig(64, 64, 4, target.stages(2))
    if cache.itemsize == 1 and not target.fp8:
        return AttentionConfig(64, 64, 8, target.stages(5))  # unpacking takes registers too
    return AttentionConfig(64, 128, 8, target.stages(5))


def uniform_config(target: Target, cache: torch.dtype, dim: int) -> AttentionConfig:
    """For ``uniform_kernel``, which computes decodes and chunks alike: half the rows of ``prefill_config``'s tiles, for
    a decode fills but a group's. Never tuned, so that results stay what they are."""
    if INTERPRETED.value:
        return AttentionConfig(64, 64, 4, 2)
    if cache == torch.float32:
        return AttentionConfig(16, 32, 8, target.stages(2))
    # Two sums are held at once: 8 warps, or on AMD, where more warps have fewer registers each, 4.
    warps, tile = 4 if target.is_amd else 8, 32 if next_power_of_2(dim) > 128 else 64
    rows = tile if target.is_amd or target.fp8 else 32  # more do not fit into the registers of sm_80
    return AttentionConfig(tile, rows, warps, target.stages(5))

"""Tries configurations of the attention kernels on a device and keeps the fastest in ``triton/tuned.json``.

Nothing is tuned while serving: ``triton/config.py`` looks up what stands in that file, and has a rule for the rest.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import carousel_kernels as ck

from .cases import TINY, Sizes, attention_case
from .measure import Timer

if TYPE_CHECKING:
    from carousel_kernels.triton.registry import Target

__all__ = ["tune"]

Entry = dict[str, int]

_CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    # Three stages keep one tile of keys and values in flight, five two: see ``decode_config``.
    "decode": {"block_n": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (3, 5)},
    "prefill": {"block_n": (32, 64, 128), "block_m": (64, 128), "num_warps": (4, 8), "num_stages": (3, 5)},
}
_DIMS = (64, 128, 256)
_NOISE = 1.02
"""How much faster than the rule a configuration must be to be worth an entry of its own."""


def _candidates(kernel: str, tiny: bool, rule: Entry) -> Iterator[Entry]:
    """The rule's own configuration first: what is found is never worse."""
    yield rule
    values = {name: options[:1] if tiny else options for name, options in _CANDIDATES[kernel].items()}
    for chosen in itertools.product(*values.values()):
        entry = dict(zip(values, chosen, strict=True))
        if entry != rule:
            yield entry


def _rule(kernel: str, target: Target, cache: torch.dtype, sizes: Sizes) -> Entry:
    """What the rule of ``triton/config.py`` says where no entry is."""
    from carousel_kernels.triton import config

    config.tuned = functools.partial(_only, None, kernel)
    chosen = config.decode_config if kernel == "decode" else config.prefill_config
    found = asdict(chosen(target, cache, sizes.dim, sizes.heads // sizes.kv_heads))
    return {name: found[name] for name in _CANDIDATES[kernel]}


def _only(entry: Entry | None, wanted: str, target: object, kernel: str, key: str) -> Entry | None:
    """Stands in for ``config.tuned``: one entry for one kernel."""
    return entry if kernel == wanted else None


def tune(device: torch.device, *, seconds: float, tiny: bool, path: Path | None) -> str:
    """Measure every candidate for each kernel, head size and type of cache; returns the table of this device as JSON.

    A candidate that does not compile or does not fit the device is left out. What was found goes into the table at
    ``path``, in place of what stood there for this device, unless that is None.
    """
    from carousel_kernels.triton import config

    timer = Timer(device, seconds)
    target = config.target_of(device)
    found: dict[str, dict[str, Entry]] = {}
    original = config.tuned
    dtypes = (torch.float32,) if tiny else (torch.bfloat16, torch.float8_e4m3fn)
    try:
        for kernel, dim, cache in itertools.product(_CANDIDATES, (16,) if tiny else _DIMS, dtypes):
            sizes = TINY if tiny else Sizes(dim=dim)
            rule = _rule(kernel, target, cache, sizes)
            times: list[tuple[float, Entry]] = []
            for entry in _candidates(kernel, tiny, rule):
                config.tuned = functools.partial(_only, entry, kernel)
                elapsed = _time(timer, sizes, kernel, cache)
                if elapsed is not None:
                    times.append((elapsed if entry == rule else elapsed * _NOISE, entry))
            if times:
                best = min(times, key=lambda time: time[0])[1]
                found.setdefault(kernel, {})[config.key_of(cache, dim)] = best
    finally:
        config.tuned = original
    if path is not None:
        whole = json.loads(path.read_text("utf-8")) | {target.name: found}
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", "utf-8")
        scratch.replace(path)
    return json.dumps({target.name: found}, indent=1)


def _time(timer: Timer, sizes: Sizes, kernel: str, cache: torch.dtype) -> float | None:
    """Seconds of a typical call: 64 sequences of 4096 tokens, or a chunk of 512 after 8192."""
    news, contexts = ([1] * 64, [4096] * 64) if kernel == "decode" else ([512], [8704])
    if sizes is TINY:
        news, contexts = ([1, 1], [40, 40]) if kernel == "decode" else ([5], [25])
    try:
        with ck.use_backend("triton"), torch.inference_mode():
            return timer(attention_case(sizes, news, contexts, timer.device, cache))
    except Exception:  # what a compiler or a driver raises for a configuration that a device has no room for
        return None

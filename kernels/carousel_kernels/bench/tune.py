"""Tries configurations of the attention kernels on a device and keeps the fastest in ``triton/tuned.json``.

Nothing is tuned while serving: ``triton/config.py`` looks up what stands in that file, and has a rule for the rest.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch

import carousel_kernels as ck

from .cases import TINY, Sizes, attention_case
from .measure import Timer

__all__ = ["tune"]

Entry = dict[str, int]

_CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "decode": {"block_n": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
    "prefill": {"block_n": (32, 64, 128), "block_m": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3)},
}
_DIMS = (64, 128, 256)


def _candidates(kernel: str, tiny: bool) -> Iterator[Entry]:
    values = {name: options[:1] if tiny else options for name, options in _CANDIDATES[kernel].items()}
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def _only(entry: Entry, wanted: str, target: object, kernel: str, key: str) -> Entry | None:
    """Stands in for ``config.tuned``: one entry for one kernel."""
    return entry if kernel == wanted else None


def tune(device: torch.device, *, seconds: float, tiny: bool, write: bool) -> str:
    """Measure every candidate for each kernel, head size and type of cache; returns the table of this device as JSON.

    A candidate that does not compile or does not fit the device is left out.
    """
    from carousel_kernels.triton import config

    timer = Timer(device, seconds)
    target = config.target_of(device)
    found: dict[str, dict[str, Entry]] = {}
    original = config.tuned
    dtypes = (torch.float32,) if tiny else (torch.bfloat16, torch.float8_e4m3fn)
    try:
        for kernel, dim, cache in itertools.product(_CANDIDATES, (16,) if tiny else _DIMS, dtypes):
            times: list[tuple[float, Entry]] = []
            for entry in _candidates(kernel, tiny):
                config.tuned = functools.partial(_only, entry, kernel)
                elapsed = _time(timer, TINY if tiny else Sizes(dim=dim), kernel, cache)
                if elapsed is not None:
                    times.append((elapsed, entry))
            if times:
                best = min(times, key=lambda time: time[0])[1]
                found.setdefault(kernel, {})[config.key_of(cache, dim)] = best
    finally:
        config.tuned = original
    if write:
        path = Path(config.__file__).with_name("tuned.json")
        whole = json.loads(path.read_text("utf-8"))
        whole[target.name] = whole.get(target.name, {}) | found
        path.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", "utf-8")
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

"""Linear layers by whichever library kernel is fastest on this CPU.

The same product takes 2.5 times as long in MKL as in oneDNN on recent AMD cores, and the reverse holds on Intel's, so
the choice is measured: for each layer shape and type, on a few numbers of rows; once per process, or, with
``chosen_implementations`` and ``remember``, once per CPU. One implementation is chosen per shape, so that a model keeps
one copy of its weights.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from . import timing
from .native_layer import float_layer
from .timing import Linear

__all__ = ["IMPLEMENTATION_VARIABLE", "Linear", "chosen_implementations", "prepare_linear", "remember"]

IMPLEMENTATION_VARIABLE = "CAROUSEL_LINEAR"
"""Environment variable that forces an implementation (torch, mkl, onednn or native) where it can be had."""

# One stream, a few, a full batch, a prompt chunk: each counts the same.
_ROWS = (1, 8, 32, 128)
_ODD_ROWS = (3, 37, 65)  # no timing, only the check that the result is right

# A layer of more elements is measured by its first rows only: the output layer would take a second.
_MAX_TIMED_ELEMENTS = 2_000_000

# oneDNN compiles a kernel for each shape and number of rows (0.3 ms, 16 KB) and keeps the last 1024. Steps have up to
# some hundred different numbers of rows in five shapes, which that would forget; read when oneDNN is first used.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")

_choices: dict[tuple[int, int, torch.dtype], str] = {}
_lock = threading.Lock()


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    def linear(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return linear


def _mkl(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if weight.dtype != torch.float32:
        raise NotImplementedError("MKL packs float32 only")
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), 64)
    # The operator reads no more than the shape of the original, which therefore need not be kept.
    shape_only = weight.new_empty(1).expand(weight.shape)
    mkl_linear = torch.ops.mkl._mkl_linear.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = mkl_linear(x, packed, shape_only, bias, x.shape[0])
        return result

    return linear


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    linear_pointwise = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = linear_pointwise(x, packed, bias, "none", [], "")
        return result

    return linear


_IMPLEMENTATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], Linear]] = {
    "torch": _plain,
    "mkl": _mkl,
    "onednn": _onednn,
    "native": float_layer,
}


def prepare_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, implementation: str | None = None
) -> Linear:
    """See ``carousel_kernels.prepare_linear``. ``implementation`` overrides the environment, which overrides measuring.

    Raises ValueError for an implementation that is not known, and RuntimeError (or what PyTorch raises) if a forced one
    cannot be had for this weight.
    """
    forced = implementation or os.environ.get(IMPLEMENTATION_VARIABLE) or None
    if forced is not None and forced not in _IMPLEMENTATIONS:
        raise ValueError(f"unknown linear implementation {forced!r}; known: {', '.join(_IMPLEMENTATIONS)}")
    name = forced or _choose(weight)
    return _IMPLEMENTATIONS[name](weight.detach(), None if bias is None else bias.detach())


def chosen_implementations() -> dict[tuple[int, int, torch.dtype], str]:
    """What was measured to be fastest so far, by (N, K, dtype)."""
    return dict(_choices)


def remember(choices: Mapping[tuple[int, int, torch.dtype], str]) -> None:
    """Take these for measured, unless they are already; unknown implementations are left out."""
    for key, name in choices.items():
        if name in _IMPLEMENTATIONS:
            _choices.setdefault(key, name)


def _choose(weight: torch.Tensor) -> str:
    key = (weight.shape[0], weight.shape[1], weight.dtype)
    with _lock:
        if key not in _choices:
            with timing.one_thread():
                _choices[key] = _measure(weight)
        return _choices[key]


def _measure(weight: torch.Tensor) -> str:
    """The implementation with the lowest mean (geometric, over ``_ROWS``) time for this weight."""
    part = weight.detach()[: max(16, _MAX_TIMED_ELEMENTS // weight.shape[1])]
    inputs = [torch.rand(rows, part.shape[1], dtype=part.dtype) - 0.5 for rows in _ROWS]
    checks = inputs + [torch.rand(rows, part.shape[1], dtype=part.dtype) - 0.5 for rows in _ODD_ROWS]
    expected = [F.linear(x, part) for x in checks]
    candidates = timing.working(
        _IMPLEMENTATIONS, lambda name: _IMPLEMENTATIONS[name](part, None), checks, expected, _agree
    )
    return _fastest(candidates, inputs)


def _fastest(candidates: dict[str, Linear], inputs: list[torch.Tensor]) -> str:
    times = timing.race(candidates, inputs)
    return min(times, key=lambda name: statistics.geometric_mean(times[name]))


def _agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.05
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))

"""Linear layers with weights in bfloat16 between activations in float32, by whichever implementation is fastest on this
CPU at each number of rows: this package's own kernel (``native``), oneDNN's prepacked one, or PyTorch's plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from carousel_kernels.blocked import BLOCK_COLUMNS
from carousel_kernels.half_weights import HalfWeight

from . import native, timing
from .native_layer import HALF, native_layer
from .timing import Choice, Choices, Linear

__all__ = ["NAMES", "chosen", "full_rate", "prepare_half_linear", "remember"]

_ROWS = (1, 4, 16, 64, 256)
_ODD_ROWS = (3, 37)  # no timing, only the check that the result is right
_MAX_TIMED_ELEMENTS = 2_000_000

_choices: Choices = {}


def full_rate() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions for it (AVX512-BF16), at twice the rate of float32."""
    library = native.library()
    return library is not None and bool(library.carousel_half_products())


def _native(weight: HalfWeight) -> Linear:
    return native_layer(HALF, weight.columns, weight.inputs, weight.codes, bias=weight.bias)


def _onednn(weight: HalfWeight) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.row_major(), None)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return _rounded(weight, lambda x: multiply(x, packed, None, "none", [], ""))


def _torch(weight: HalfWeight) -> Linear:
    plain = weight.row_major()
    return _rounded(weight, lambda x: F.linear(x, plain))


def _rounded(weight: HalfWeight, product: Linear) -> Linear:
    """Around a library's product of bfloat16, whose result is rounded to bfloat16 as well."""
    bias = None if weight.bias is None else weight.bias[: weight.columns]

    def linear(x: torch.Tensor) -> torch.Tensor:
        out = product(x.bfloat16()).float()
        return out if bias is None else out.add_(bias)

    return linear


_IMPLEMENTATIONS: dict[str, Callable[[HalfWeight], Linear]] = {"native": _native, "onednn": _onednn, "torch": _torch}

NAMES = tuple(_IMPLEMENTATIONS)


def prepare_half_linear(weight: HalfWeight, *, names: Sequence[str] = NAMES) -> Linear:
    """See ``carousel_kernels.prepare_half_linear``; by one of ``names``, or two where that pays.

    Raises:
        RuntimeError: none of them can be had here.
    """
    return timing.by_rows(_choose(weight, names), lambda name: _IMPLEMENTATIONS[name](weight))


def chosen() -> Choices:
    """What was measured to be fastest so far."""
    return dict(_choices)


def remember(choices: Choices) -> None:
    """Take these for measured, unless they are already. What this process does not have is left out."""
    timing.remember(_choices, choices, NAMES)


def _choose(weight: HalfWeight, names: Sequence[str]) -> Choice:
    shape = (weight.columns, weight.inputs)
    return timing.choose(_choices, shape, names, native.available(), lambda found: _measure(weight, found))


def _measure(weight: HalfWeight, names: Sequence[str]) -> Choice:
    """A layer of many elements is measured by its first columns only: the output layer would take a second."""
    columns = max(BLOCK_COLUMNS, _MAX_TIMED_ELEMENTS // max(1, weight.inputs) // BLOCK_COLUMNS * BLOCK_COLUMNS)
    if columns < weight.columns:
        weight = weight.first(columns)
    inputs = [torch.rand(rows, weight.inputs) - 0.5 for rows in _ROWS]
    checks = inputs + [torch.rand(rows, weight.inputs) - 0.5 for rows in _ODD_ROWS]
    exact = weight.row_major().float()
    expected = [F.linear(x.bfloat16().float(), exact) for x in checks]
    candidates = timing.working(
        names, lambda name: _IMPLEMENTATIONS[name](weight), checks, expected, lambda x, y: _agree(weight, x, y)
    )
    if not candidates:
        raise RuntimeError(f"no implementation of a bfloat16 {weight.columns} x {weight.inputs} layer works here")
    return timing.fastest(timing.race(candidates, inputs), _ROWS)


def _agree(weight: HalfWeight, got: torch.Tensor, expected: torch.Tensor) -> bool:
    if weight.bias is not None:
        got = got - weight.bias[: weight.columns]
    return torch.allclose(got, expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))

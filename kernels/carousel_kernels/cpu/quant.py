"""Linear layers with 8-bit weights, by whichever implementation is fastest on this CPU at each number of rows.

``native`` is this package's own kernel (``native/quant.c``): one call quantises the activations and multiplies, for one
row at the speed of memory, for many near what the dot-product instructions give. ``onednn`` is what PyTorch ships for
it, which has AMX; ``torch`` is a product of integer matrices, available everywhere. All add exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from carousel_kernels.blocked import BLOCK_COLUMNS
from carousel_kernels.int8_weights import (
    RESTS,
    QuantizedWeight,
    quantize_rows,
    quantize_rows_wide,
    turn,
    turns,
)

from . import native, timing
from .native_layer import NARROW, WIDE, NativeLinear, native_layer
from .timing import Choice, Choices, Linear

__all__ = ["NAMES", "chosen", "prepare_quantized_linear", "remember"]

_ROWS = (1, 4, 16, 64, 256)
_ODD_ROWS = (3, 37)
_MAX_TIMED_ELEMENTS = 2_000_000

_choices: Choices = {}


def _native(weight: QuantizedWeight, wide: bool, turned: bool = False) -> Linear:
    return native_layer(
        WIDE if wide else NARROW, weight.columns, weight.inputs, weight.codes,
        scales=weight.scales, shifts=weight.shifts, bias=weight.bias, runs=turns(weight.inputs) if turned else 1,
    )  # fmt: skip


def _finish(
    sums: torch.Tensor, row_scales: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out = sums.to(torch.float32) * scales * row_scales.unsqueeze(1)
    return out if bias is None else out.add_(bias)


def _from_product(weight: QuantizedWeight, wide: bool, product: Callable[[torch.Tensor], torch.Tensor]) -> Linear:
    """A layer from a function that multiplies int8 codes [T, K] with the layer's, exactly up to a float32."""
    scales, bias = weight.scales[: weight.columns], None if weight.bias is None else weight.bias[: weight.columns]

    def linear(x: torch.Tensor) -> torch.Tensor:
        if wide:
            codes, rests, row_scales = quantize_rows_wide(x)
            whole, rest = product(torch.cat([codes, rests])).to(torch.float32).chunk(2)
            return _finish(whole + rest / RESTS, row_scales, scales, bias)
        codes, row_scales = quantize_rows(x)
        return _finish(product(codes), row_scales, scales, bias)

    return linear


def _onednn(weight: QuantizedWeight, wide: bool) -> Linear:
    packed = torch.ops.onednn.qlinear_prepack(weight.row_major(), None)
    ones, zeros = torch.ones(weight.columns), torch.zeros(weight.columns, dtype=torch.int32)
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def product(codes: torch.Tensor) -> torch.Tensor:
        # As unsigned bytes, which are the faster of the two in oneDNN; all scales are applied afterwards.
        shifted = codes.view(torch.uint8).bitwise_xor(128)
        sums: torch.Tensor = multiply(
            shifted, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return sums

    return _from_product(weight, wide, product)


def _torch(weight: QuantizedWeight, wide: bool) -> Linear:
    transposed = weight.row_major().t()
    return _from_product(weight, wide, lambda codes: torch._int_mm(codes, transposed))


_IMPLEMENTATIONS: dict[str, Callable[[QuantizedWeight, bool], Linear]] = {
    "native": _native,
    "onednn": _onednn,
    "torch": _torch,
}

NAMES = tuple(_IMPLEMENTATIONS)


def prepare_quantized_linear(
    weight: QuantizedWeight, *, wide: bool = False, turned: bool = False, names: Sequence[str] = NAMES
) -> Linear:
    """See ``carousel_kernels.prepare_quantized_linear``; by one of ``names``, or two where that pays.

    Raises:
        RuntimeError: none of them can be had here.
    """
    choice = _choose(weight, names)

    def prepare(name: str) -> Linear:
        if not turned:
            return _IMPLEMENTATIONS[name](weight, wide)
        if name == "native":
            return _native(weight, wide, turned=True)
        linear = _IMPLEMENTATIONS[name](weight, wide)
        return lambda x: linear(turn(x))

    return _any_dtype(timing.by_rows(choice, prepare))


def _any_dtype(linear: Linear) -> Linear:
    if isinstance(linear, NativeLinear):
        return linear  # takes any itself

    def converted(x: torch.Tensor) -> torch.Tensor:
        return linear(x) if x.dtype is torch.float32 else linear(x.float()).to(x.dtype)

    return converted


def chosen() -> Choices:
    """What was measured to be fastest so far."""
    return dict(_choices)


def remember(choices: Choices) -> None:
    """Take these for measured, unless they are already. What this process does not have is left out."""
    timing.remember(_choices, choices, NAMES)


def _choose(weight: QuantizedWeight, names: Sequence[str]) -> Choice:
    shape = (weight.columns, weight.inputs)
    return timing.choose(_choices, shape, names, native.available(), lambda found: _measure(weight, found))


def _measure(weight: QuantizedWeight, names: Sequence[str]) -> Choice:
    """A layer of many elements is measured by its first columns only: the output layer would take a second."""
    columns = max(BLOCK_COLUMNS, _MAX_TIMED_ELEMENTS // weight.inputs)
    if columns < weight.columns:
        weight = weight.first(columns // BLOCK_COLUMNS * BLOCK_COLUMNS)
    inputs = [torch.rand(rows, weight.inputs) - 0.5 for rows in _ROWS]
    checks = inputs[:-1] + [torch.rand(rows, weight.inputs) - 0.5 for rows in _ODD_ROWS]
    codes = weight.row_major().double()
    expected = [_exact(weight, codes, x) for x in checks]

    def working(names: Sequence[str]) -> dict[str, Linear]:
        def agree(got: torch.Tensor, wanted: torch.Tensor) -> bool:
            return torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)

        return timing.working(names, lambda name: _IMPLEMENTATIONS[name](weight, False), checks, expected, agree)

    # PyTorch's is far behind wherever there is another: not worth the time.
    candidates = working([name for name in names if name != "torch"]) or working(names)
    if not candidates:
        raise RuntimeError(f"no implementation of a quantised {weight.columns} x {weight.inputs} layer works here")
    return timing.fastest(timing.race(candidates, inputs), _ROWS)


def _exact(weight: QuantizedWeight, codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    quantized, row_scales = quantize_rows(x)
    bias = None if weight.bias is None else weight.bias[: weight.columns]
    return _finish(quantized.double() @ codes.t(), row_scales, weight.scales[: weight.columns], bias)

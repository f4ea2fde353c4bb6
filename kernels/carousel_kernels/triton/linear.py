"""Linear layers on the device: cuBLAS for unquantised weights, kernels for quantised ones and for low-rank adapters.

With at most ``MOST_ROWS`` rows a layer's time is that of reading its weight, and the kernels of ``linear_kernels`` read
it packed. With more, a 4-bit or 8-bit weight is widened to the activations' type first and multiplied by cuBLAS: that
costs a few percent of the product.

How low-rank adapters are applied to a batch whose rows have different ones, by gathering per row, is the idea of Punica
(Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import triton

from carousel_kernels.weight_formats import GroupedWeight, Linear, ScaledWeight

from . import linear_kernels as kernels
from .config import next_power_of_2, target_of
from .registry import Spec, Target

__all__ = [
    "MOST_ROWS",
    "add_lora_",
    "prepare_grouped_linear",
    "prepare_linear",
    "prepare_scaled_linear",
    "uniform_layers",
]

MOST_ROWS = 64
"""Rows up to which the kernels beat widening the weight: two tiles of 32, four of 16."""

_BLOCK_N = 64  # output features per program
_BLOCK_K = 128  # input features at once, of 8-bit weights
_BLOCK_K_PLAIN = 64
_UNIFORM_ROWS = 64  # rows of a tile of uniform layers
_MOST_SPLITS = 8
_TILES_PER_SPLIT = 4  # at least: below that a split's start and end outweigh it
_LORA_SPLITS = 4


_uniform = False


@contextmanager
def uniform_layers() -> Iterator[None]:
    """See ``carousel_kernels.uniform_linears``."""
    global _uniform
    before, _uniform = _uniform, True
    try:
        yield
    finally:
        _uniform = before


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """See ``carousel_kernels.prepare_linear``: cuBLAS (or rocBLAS) through PyTorch, unless uniform."""
    weight = weight.detach().contiguous()
    if _uniform:
        layer = _bytes(weight, None, None, bias, kernels.PLAIN, 0, _BLOCK_K_PLAIN)

        def uniform_linear(x: torch.Tensor) -> torch.Tensor:
            return layer(x if x.stride(1) == 1 else x.contiguous(), None, x.dtype)

        return uniform_linear

    def linear(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return linear


def _splits(target: Target, columns: int, tiles: int) -> tuple[int, int]:
    """Into how many splits of how many tiles a layer's input features go: enough to fill the device twice.

    From the layer's shape alone, so that a row's result does not depend on the batch.
    """
    strips = triton.cdiv(columns, _BLOCK_N)
    wanted = max(1, min(2 * target.num_units // strips, _MOST_SPLITS, tiles // _TILES_PER_SPLIT))
    per_split = triton.cdiv(tiles, wanted)
    return triton.cdiv(tiles, per_split), per_split


def _block_m(rows: int) -> int:
    return min(max(16, next_power_of_2(rows)), 64)


def _num_warps(block_m: int) -> int:
    return 4 if block_m < 32 else 8


class _Launch:
    """What the kernels of one layer share: the grid, room for the splits' parts, and adding them."""

    def __init__(self, device: torch.device, columns: int, tiles: int, bias: torch.Tensor | None) -> None:
        self.columns = columns
        self.bias = bias
        self.uniform = _uniform
        self.target = target_of(device)
        self.splits, self.per_split = _splits(self.target, columns, tiles)
        self.num_stages = self.target.stages(4)

    def block_m(self, rows: int) -> int:
        return _UNIFORM_ROWS if self.uniform else _block_m(rows)

    def grid(self, rows: int) -> tuple[int, int, int]:
        return triton.cdiv(self.columns, _BLOCK_N), self.splits, triton.cdiv(rows, self.block_m(rows))

    def room(self, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape, dtype = ((rows, self.columns), dtype) if self.splits == 1 else (
            (self.splits, rows, self.columns), torch.float32)  # fmt: skip
        return torch.empty(shape, dtype=dtype, device=device)

    def finish(self, room: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.splits == 1:
            return room
        out = torch.empty(room.shape[1:], dtype=dtype, device=room.device)
        grid = (triton.cdiv(out.numel(), 1024),)
        kernels.sum_kernel[grid](
            room, self.bias, out, out.numel(), self.columns, self.splits, self.bias is not None, 1024
        )
        return out


def _pack4(q: torch.Tensor, half: int) -> torch.Tensor:
    """uint8 [N, K] of values below 16 -> uint8 [blocks, N, half], see ``int4_kernel``; K padded with zeros."""
    columns, features = q.shape
    blocks = triton.cdiv(features, 2 * half)
    parts = F.pad(q, (0, blocks * 2 * half - features)).view(columns, blocks, 2, half)
    return (parts[:, :, 0] | (parts[:, :, 1] << 4)).transpose(0, 1).contiguous()


def prepare_grouped_linear(weight: GroupedWeight, bias: torch.Tensor | None) -> Linear:
    """A layer of a 4-bit or 8-bit weight with scales and zero points per group; see ``GroupedWeight``."""
    few = _grouped4(weight, bias) if weight.bits == 4 else _grouped8(weight, bias)
    order = weight.order

    def linear(x: torch.Tensor) -> torch.Tensor:
        if order is not None:
            x = x.index_select(1, order)
        return few(x if x.stride(1) == 1 else x.contiguous())

    return linear


def _grouped4(weight: GroupedWeight, bias: torch.Tensor | None) -> Linear:
    columns, features = weight.q.shape
    group, groups = weight.group_size, weight.scales.shape[0]
    half = 64 if group % 64 == 0 else 32
    packed = _pack4(weight.q, half)
    scales, zeros = weight.scales.contiguous(), weight.zeros.contiguous()
    launch = _Launch(packed.device, columns, packed.shape[0], bias)

    def dense(dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty((columns, features), dtype=dtype, device=packed.device)
        grid = (packed.shape[0], triton.cdiv(columns, _BLOCK_N))
        kernels.dequantize_kernel[grid](packed, scales, zeros, out, columns, features, groups, group, half, _BLOCK_N)
        return out

    def linear(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows > MOST_ROWS and not launch.uniform:
            return F.linear(x, dense(x.dtype), None if bias is None else bias.to(x.dtype))
        room = launch.room(rows, x.dtype, x.device)
        kernels.int4_kernel[launch.grid(rows)](
            x, packed, scales, zeros, bias, room, rows, columns, features, x.stride(0), packed.shape[0],
            launch.per_split, groups, group, half, launch.block_m(rows), _BLOCK_N, launch.splits == 1, bias is not None,
            num_warps=_num_warps(launch.block_m(rows)), num_stages=launch.num_stages,
        )  # fmt: skip
        return launch.finish(room, x.dtype)

    return linear


def _block_k(group: int) -> int:
    return 128 if group % 128 == 0 else 64 if group % 64 == 0 else 32


def _grouped8(weight: GroupedWeight, bias: torch.Tensor | None) -> Linear:
    q, scales, zeros = weight.q.contiguous(), weight.scales.contiguous(), weight.zeros.contiguous()
    group, uniform = weight.group_size, _uniform
    layer = _bytes(q, scales, zeros, bias, kernels.UINT8_GROUPED, group, _block_k(group))

    def linear(x: torch.Tensor) -> torch.Tensor:
        if uniform or x.shape[0] <= MOST_ROWS:
            return layer(x, None, x.dtype)
        dense = GroupedWeight(q, scales, zeros, None, group, 8).dense(x.dtype)
        return F.linear(x, dense, None if bias is None else bias.to(x.dtype))

    return linear


def _bytes(
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: int,
    group: int,
    block_k: int,
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]:
    """The launch of ``byte_kernel``, a function of x, its rows' scales or None, and the type of the result."""
    columns, features = weight.shape
    tiles = triton.cdiv(features, block_k)
    launch = _Launch(weight.device, columns, tiles, bias)

    def layer(x: torch.Tensor, row_scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        rows = x.shape[0]
        room = launch.room(rows, dtype, x.device)
        kernels.byte_kernel[launch.grid(rows)](
            x, weight, scales, zeros, row_scales, bias, room, rows, columns, features, x.stride(0), tiles,
            launch.per_split, kind, group, launch.block_m(rows), _BLOCK_N, block_k, launch.splits == 1,
            bias is not None, num_warps=_num_warps(launch.block_m(rows)), num_stages=launch.num_stages,
        )  # fmt: skip
        return launch.finish(room, dtype)

    return layer


def prepare_scaled_linear(weight: ScaledWeight, bias: torch.Tensor | None) -> Linear:
    """A layer of an FP8 or int8 weight with a scale per output feature; see ``ScaledWeight``.

    Raises ValueError where FP8 activations are asked of a device that cannot multiply e4m3.
    """
    target = target_of(weight.q.device)
    fp8 = weight.q.dtype == torch.float8_e4m3fn
    if weight.activations == "quantize":
        if fp8 and not target.fp8:
            raise ValueError(f"activations: got 'quantize' with FP8 weights, allowed on {target.name}: 'keep'")
        layer = _bytes(weight.q, weight.scales, None, bias, kernels.QUANTIZED_ROWS, 0, _BLOCK_K)

        def quantized(x: torch.Tensor) -> torch.Tensor:
            q, scales = quantize_rows(x, weight.q.dtype)
            return layer(q, scales, x.dtype)

        return quantized
    kind = kernels.INT8 if not fp8 else kernels.FP8 if target.fp8 else kernels.FP8_BYTES
    uniform, stored = _uniform, weight.q.view(torch.uint8) if kind == kernels.FP8_BYTES else weight.q
    group = weight.group_size
    layer = _bytes(stored, weight.scales, None, bias, kind, group, _block_k(group) if group else _BLOCK_K)

    def linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MOST_ROWS and not uniform:
            # Scaled before the product: sums of unscaled integers may pass the range of float16.
            scales = weight.scales.to(x.dtype).T.repeat_interleave(group, dim=1) if group else (
                weight.scales.to(x.dtype).unsqueeze(1))  # fmt: skip
            dense = weight.q.to(x.dtype).mul_(scales)
            return F.linear(x, dense, None if bias is None else bias.to(x.dtype))
        x = x if x.stride(1) == 1 else x.contiguous()
        return layer(x, None, x.dtype)

    return linear


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (q [T, K] float8_e4m3fn or int8, scales float32 [T]), each row by its largest magnitude."""
    x = x if x.stride(1) == 1 else x.contiguous()
    integers = dtype == torch.int8
    q = torch.empty(x.shape, dtype=torch.int8 if integers else torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0]:
        block = min(1024, next_power_of_2(x.shape[1]))
        kernels.quantize_rows_kernel[(x.shape[0],)](x, q, scales, x.shape[1], x.stride(0), integers, block)
    return (q if integers else q.view(dtype)), scales


def add_lora_(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: torch.Tensor,
    adapters: torch.Tensor,
) -> None:
    """See ``carousel_kernels.add_lora_``."""
    rows, features = x.shape
    rank, columns = a.shape[1], b.shape[1]
    if not rows:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    block_r, block_k = max(16, next_power_of_2(rank)), 128
    per_split = triton.cdiv(triton.cdiv(features, block_k), _LORA_SPLITS)
    low = torch.empty((rows, _LORA_SPLITS, block_r), dtype=torch.float32, device=x.device)
    kernels.lora_shrink_kernel[(rows, _LORA_SPLITS)](
        x, a, adapters, low, features, x.stride(0), rank, per_split, _LORA_SPLITS, block_r, block_k
    )
    kernels.lora_expand_kernel[(rows, triton.cdiv(columns, 128))](
        low, b, scaling, adapters, out, columns, out.stride(0), rank, _LORA_SPLITS, block_r, 128
    )


_SIZES = {"num_rows": "i32", "num_columns": "i32", "num_features": "i32", "x_stride": "i32"}
_ALIGNED = ("num_columns", "num_features", "x_stride")  # divisible by 16 in every model there is


def aot_specs(target: Target) -> Iterator[Spec]:
    """The shapes of tiles that decode launches, most in bfloat16; the other kernels in one form each."""
    stages = target.stages(4)
    fp8 = (kernels.FP8, "fp8", "*fp8e4nv") if target.fp8 else (kernels.FP8_BYTES, "fp8 bytes", "*u8")
    yield _int4_spec("fp16", 128, 16, stages)
    yield _int4_spec("bf16", 32, 16, stages)
    yield _byte_spec("bf16 x uint8 G128 M16", "*bf16", "*u8", kernels.UINT8_GROUPED, 16, stages, group=128)
    yield _byte_spec(f"bf16 x {fp8[1]} G128 M16", "*bf16", fp8[2], fp8[0], 16, stages, group=128)
    for rows in (16, 32, 64):
        yield _int4_spec("bf16", 128, rows, stages)
        for kind, name, stored in ((kernels.INT8, "int8", "*i8"), fp8):
            yield _byte_spec(f"bf16 x {name} M{rows}", "*bf16", stored, kind, rows, stages)
    for rows in (16, 64):
        yield _byte_spec(f"int8 x int8 M{rows}", "*i8", "*i8", kernels.QUANTIZED_ROWS, rows, stages)
        if target.fp8:
            yield _byte_spec(f"fp8 x fp8 M{rows}", "*fp8e4nv", "*fp8e4nv", kernels.QUANTIZED_ROWS, rows, stages)
    yield _plain_spec(stages)
    dense = {"packed": "*u8", "scales": "*fp16", "zeros": "*i16", "out": "*bf16", "num_columns": "i32",
             "num_features": "i32", "num_groups": "i32"}  # fmt: skip
    yield Spec(kernels.dequantize_kernel, "bf16", dense, {"GROUP": 128, "HALF": 64, "BLOCK_N": _BLOCK_N})
    total = {"parts": "*fp32", "out": "*bf16", "size": "i32", "num_columns": "i32"}
    yield Spec(kernels.sum_kernel, "bf16", total, {"bias": None, "SPLITS": 4, "HAS_BIAS": False, "BLOCK": 1024})
    for integers, stored in ((True, "*i8"), (False, "*u8")):
        rows_signature = {"x": "*bf16", "q": stored, "scales": "*fp32", "num_features": "i32", "x_stride": "i32"}
        constants: dict[str, object] = {"INTEGERS": integers, "BLOCK": 1024}
        yield Spec(kernels.quantize_rows_kernel, f"bf16 to {stored[1:]}", rows_signature, constants)
    yield from _lora_specs()


def _int4_spec(dtype: str, group: int, rows: int, stages: int) -> Spec:
    signature = {"x": f"*{dtype}", "packed": "*u8", "scales": "*fp16", "zeros": "*i16", "out": "*fp32", **_SIZES,
                 "num_blocks": "i32", "blocks_per_split": "i32", "num_groups": "i32"}  # fmt: skip
    constants = {"bias": None, "GROUP": group, "HALF": 64 if group == 128 else 32, "BLOCK_M": rows,
                 "BLOCK_N": _BLOCK_N, "FINAL": False, "HAS_BIAS": False}  # fmt: skip
    label = f"{dtype} G{group} M{rows}"
    aligned = tuple(name for name, of in signature.items() if of.startswith("*")) + _ALIGNED
    return Spec(
        kernels.int4_kernel, label, signature, constants, _num_warps(rows), stages, decode=True, aligned=aligned
    )


def _plain_spec(stages: int) -> Spec:
    """Of a uniform layer."""
    signature = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", **_SIZES, "num_tiles": "i32",
                 "tiles_per_split": "i32"}  # fmt: skip
    constants = {"scales": None, "zeros": None, "row_scales": None, "bias": None, "KIND": kernels.PLAIN, "GROUP": 0,
                 "BLOCK_M": _UNIFORM_ROWS, "BLOCK_N": _BLOCK_N, "BLOCK_K": _BLOCK_K_PLAIN, "FINAL": True,
                 "HAS_BIAS": False}  # fmt: skip
    aligned = ("x", "weight", "out", *_ALIGNED)
    warps = _num_warps(_UNIFORM_ROWS)
    return Spec(kernels.byte_kernel, "bf16 uniform", signature, constants, warps, stages, decode=True, aligned=aligned)


def _byte_spec(label: str, x: str, stored: str, kind: int, rows: int, stages: int, group: int = 0) -> Spec:
    grouped, rows_too = kind == kernels.UINT8_GROUPED, kind == kernels.QUANTIZED_ROWS
    signature = {"x": x, "weight": stored, "scales": "*fp16" if grouped else "*fp32", "out": "*bf16", **_SIZES,
                 "num_tiles": "i32", "tiles_per_split": "i32", "bias": "*bf16"}  # fmt: skip
    constants: dict[str, object] = {"KIND": kind, "GROUP": group, "BLOCK_M": rows, "BLOCK_N": _BLOCK_N,
                                    "BLOCK_K": _BLOCK_K, "FINAL": True, "HAS_BIAS": True}  # fmt: skip
    for name, kind_of, used in (("zeros", "*i16", grouped), ("row_scales", "*fp32", rows_too)):
        if used:
            signature[name] = kind_of
        else:
            constants[name] = None
    aligned = tuple(name for name, of in signature.items() if of.startswith("*")) + _ALIGNED
    return Spec(
        kernels.byte_kernel, label, signature, constants, _num_warps(rows), stages, decode=True, aligned=aligned
    )


def _lora_specs() -> Iterator[Spec]:
    shrink = {"x": "*bf16", "a": "*bf16", "adapters": "*i32", "low": "*fp32", "num_features": "i32", "x_stride": "i32",
              "rank": "i32", "tiles_per_split": "i32"}  # fmt: skip
    expand = {"low": "*fp32", "b": "*bf16", "scaling": "*fp32", "adapters": "*i32", "out": "*bf16",
              "num_columns": "i32", "out_stride": "i32", "rank": "i32"}  # fmt: skip
    for rank in (16, 64):
        sizes = {"SPLITS": _LORA_SPLITS, "BLOCK_R": rank}
        yield Spec(kernels.lora_shrink_kernel, f"bf16 R{rank}", shrink, {**sizes, "BLOCK_K": 128}, decode=True)
        yield Spec(kernels.lora_expand_kernel, f"bf16 R{rank}", expand, {**sizes, "BLOCK_N": 128}, decode=True)

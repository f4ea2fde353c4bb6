"""GGUF's tensor types in vectorised PyTorch: blocks of bytes -> float32.

Several times faster than the ``gguf`` package's numpy code, because it works in cache-sized pieces and writes straight
into the target; types that have no function here go through that package.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# PyTorch runs an operator of up to this size on the calling thread alone. That is wanted: on a busy machine (a node
# that starts pods) operators that split every 200 microseconds of work between threads spend seconds waiting.
_PIECE_ELEMENTS = 1 << 15
_PARALLEL_ELEMENTS = 1 << 22
_MAX_THREADS = 8


def _halves(blocks: torch.Tensor, count: int, start: int = 0) -> torch.Tensor:
    """``count`` float16 numbers of each block, as float32 [n, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """uint8 [..., b] -> out [..., 2 b]: all low halves, then all high halves."""
    size = packed.shape[-1]
    out[..., :size] = packed & 15
    out[..., size:] = packed >> 4


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_halves(blocks, 1))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale, least = _halves(blocks, 2).split(1, dim=1)
    _nibbles(blocks[:, 4:], out)
    out.mul_(scale).add_(least)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4], a bit for each of 32 elements, -> uint8 [n, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(2) >> shifts) & 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_halves(blocks, 1))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale, least = _halves(blocks, 2).split(1, dim=1)
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(scale).add_(least)


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_halves(blocks, 1))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, 12] -> the 6-bit scales and minima of 8 sub-blocks, each float32 [n, 8]."""
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=1)
    return scales.float(), minima.float()


def _k_apply(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale integer values out [n, 8, 32] by their sub-blocks' scales and subtract the minima (Q4_K, Q5_K)."""
    scale, least = _halves(blocks, 2).split(1, dim=1)
    scales, minima = _k_scales(blocks[:, 4:16])
    out.mul_((scales * scale).unsqueeze(2)).sub_((minima * least).unsqueeze(2))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 16:].unflatten(1, (4, 32)), out.view(-1, 4, 64))
    _k_apply(blocks, out.view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 48:].unflatten(1, (4, 32)), out.view(-1, 4, 64))
    values = out.view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    values.add_((blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4)
    _k_apply(blocks, values)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    low = blocks[:, :128].view(-1, 2, 64) if blocks.is_contiguous() else blocks[:, :128].reshape(-1, 2, 64)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    _nibbles(low, out.view(-1, 2, 128))
    out.view(-1, 2, 4, 32).add_(high).sub_(32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 1, 208)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


_PLAIN = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}

# ggml type -> (elements of a block, bytes of a block, function: uint8 [n, bytes], float32 [n, elements])
_BLOCKS: dict[int, tuple[int, int, Callable[[torch.Tensor, torch.Tensor], None]]] = {
    2: (32, 18, _q4_0),
    3: (32, 20, _q4_1),
    6: (32, 22, _q5_0),
    7: (32, 24, _q5_1),
    8: (32, 34, _q8_0),
    12: (256, 144, _q4_k),
    13: (256, 176, _q5_k),
    14: (256, 210, _q6_k),
}


def _through_package(ggml_type: int) -> tuple[int, int, Callable[[torch.Tensor, torch.Tensor], None]]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(ggml_type)
    elements, size = GGML_QUANT_SIZES[kind]

    def convert(blocks: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.from_numpy(dequantize(blocks.numpy(), kind)).view(out.shape))

    return elements, size, convert


def _blocks_of(ggml_type: int) -> tuple[int, int, Callable[[torch.Tensor, torch.Tensor], None]]:
    if ggml_type not in _BLOCKS:
        _BLOCKS[ggml_type] = _through_package(ggml_type)
    return _BLOCKS[ggml_type]


def tensor_bytes(ggml_type: int, elements: int) -> int:
    """Bytes that ``elements`` values take in the file. ValueError for a type that is not known, or no whole
    blocks of it."""
    if ggml_type in _PLAIN:
        return elements * _PLAIN[ggml_type].itemsize
    per_block, size, _ = _blocks_of(ggml_type)
    if elements % per_block:
        raise ValueError(f"{elements} values are no whole blocks of {per_block}")
    return elements // per_block * size


def dequantize_into(
    data: torch.Tensor, ggml_type: int, out: torch.Tensor, scale: float = 1.0, offset: float = 0.0
) -> None:
    """Write values * scale + offset into ``out``.

    Args:
        data: uint8 [bytes], the tensor as it lies in the file, on the CPU.
        ggml_type: the file's number for its type.
        out: [rows, ...] of any float dtype and device, contiguous along each row.
    """
    threads = min(_MAX_THREADS, os.cpu_count() or 1) if out.numel() >= _PARALLEL_ELEMENTS else 1
    if threads == 1:
        _convert_rows(data, ggml_type, out, scale, offset)
        return
    rows = -(-out.shape[0] // threads)
    cuts = range(0, out.shape[0], rows)
    row_bytes = tensor_bytes(ggml_type, out[0].numel())

    def part(start: int) -> None:
        piece = data[start * row_bytes : (start + rows) * row_bytes]
        _convert_rows(piece, ggml_type, out[start : start + rows], scale, offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, cuts))


def _convert_rows(data: torch.Tensor, ggml_type: int, out: torch.Tensor, scale: float, offset: float) -> None:
    direct = out.dtype == torch.float32 and out.device.type == "cpu" and out.is_contiguous()
    per_row = out[0].numel()
    row_bytes = tensor_bytes(ggml_type, per_row)
    rows = max(1, _PIECE_ELEMENTS // per_row)
    for start in range(0, out.shape[0], rows):
        target = out[start : start + rows]
        piece = data[start * row_bytes : (start + rows) * row_bytes]
        if ggml_type in _PLAIN:
            values = piece.view(_PLAIN[ggml_type]).view(target.shape)
            if scale != 1.0 or offset != 0.0:
                values = values.float() * scale + offset
            target.copy_(values)
            continue
        elements, size, convert = _blocks_of(ggml_type)
        values = target if direct else torch.empty(target.shape)
        convert(piece.view(-1, size), values.view(-1, elements))
        if scale != 1.0:
            values.mul_(scale)
        if offset != 0.0:
            values.add_(offset)
        if not direct:
            target.copy_(values)

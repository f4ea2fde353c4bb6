"""All layers of a decoder in one call of the compiled library (``native/layers.c``): what their operators would give
one after another, without the time that Python and the OpenMP runtime take between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from carousel_kernels.layer_parts import LayerParts
from carousel_kernels.layout import BatchLayout

from . import native
from .native_layer import NativeLinear

__all__ = ["FusedLayers", "fuse_layers"]

_pointer = ctypes.c_void_p
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")
_LINEARS = ("qkv", "output", "gate_up", "down")


class _Layer(ctypes.Structure):
    """``struct carousel_layer`` of layers.c."""

    _fields_ = (
        *((name, _pointer) for name in (*_NORMS, *_LINEARS)),
        ("heads", native.Heads),
        ("gelu", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class _Pass(ctypes.Structure):
    """``struct carousel_pass`` of layers.c."""

    _fields_ = (
        *((name, _pointer) for name in ("layers", "cos_sin", "k_caches", "v_caches", "batch", "positions", "slots")),
        *((name, _pointer) for name in ("wanted", "residual", "x", "wanted_residual", "rotary", "memory")),
        ("count", ctypes.c_int64),
        ("wanted_count", ctypes.c_int64),
        ("half", ctypes.c_int32),
    )


def _layer_of(parts: LayerParts) -> _Layer:
    norms = [getattr(parts, name) for name in _NORMS]
    return _Layer(
        *(None if norm is None else norm.data_ptr() for norm in norms),
        *(getattr(parts, name).address for name in _LINEARS),
        native.Heads(
            parts.heads, parts.kv_heads, parts.head_dim, parts.window or 0, parts.scale, parts.softcap or 0.0, 0
        ),
        int(parts.activation == "gelu_tanh"),
        parts.eps,
    )


class FusedLayers:
    """Made by ``fuse_layers``. One pass at a time: its scratch memory is kept for the next one."""

    def __init__(self, parts: Sequence[LayerParts]) -> None:
        self._library = native.library()
        self._parts = tuple(parts)  # whose memory the addresses are of
        self._layers = [_layer_of(one) for one in parts]
        self._addresses = (_pointer * len(parts))(*(ctypes.addressof(layer) for layer in self._layers))
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._tables: Sequence[torch.Tensor | None] = ()
        self._caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._arrays: tuple[Any, ...] = ()

    def __call__(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        tables: Sequence[torch.Tensor | None],
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(what the last layer adds, residual) of all tokens, or of some: each [T or R, hidden].

        Args:
            residual: float32 [T, hidden], the embedding; it may be overwritten.
            positions: int64 [T].
            layout: of the batch.
            caches: each layer's K and V; the caller keeps the same sequence as long as they are the same.
            tables: each layer's cosines and sines [positions, rotary], None for a layer without; likewise.
            rows: int64 [R], those that are wanted; None for all.

        Returns:
            None, and nothing done, for tensors of other types or layouts than a decoder in float32 has.

        Raises:
            MemoryError: no memory for the plan of the attention.
        """
        if not native.dense(residual) or not native.indices(positions, layout.slots):
            return None
        if (tables is not self._tables or caches is not self._caches) and not self._take(tables, caches):
            return None
        tokens, hidden = residual.shape
        plan = native.plan_of(layout)
        cos_sin, rotary, k_caches, v_caches, half = self._arrays
        x, wanted_residual = torch.empty(tokens if rows is None else rows.shape[0], hidden), residual
        if rows is not None:
            rows, wanted_residual = rows.contiguous(), torch.empty_like(x)
        whole = _Pass(
            ctypes.addressof(self._addresses), ctypes.addressof(cos_sin), ctypes.addressof(k_caches),
            ctypes.addressof(v_caches), plan.batch, positions.data_ptr(), layout.slots.data_ptr(),
            None if rows is None else rows.data_ptr(), residual.data_ptr(), x.data_ptr(), wanted_residual.data_ptr(),
            ctypes.addressof(rotary), None, len(self._layers), -1 if rows is None else rows.shape[0], half,
        )  # fmt: skip
        address = ctypes.addressof(whole)
        needed = self._library.carousel_pass_bytes(address)
        if self._memory.shape[0] < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8)
        whole.memory = self._memory.data_ptr()
        if self._library.carousel_layers(address):
            raise MemoryError(f"no memory for the layers of {tokens} tokens")
        return x, wanted_residual

    def _take(self, tables: Sequence[torch.Tensor | None], caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Have the addresses of these; False if they do not fit."""
        count, half = len(self._layers), caches[0][0].dtype is torch.bfloat16
        if not native.dense(*(table for table in tables if table is not None)):
            return False
        if not all(native.is_cache(k, v) and (k.dtype is torch.bfloat16) == half for k, v in caches):
            return False
        pointers, widths = _pointer * count, ctypes.c_int32 * count
        self._arrays = (
            pointers(*(None if table is None else table.data_ptr() for table in tables)),
            widths(*(0 if table is None else table.shape[1] for table in tables)),
            pointers(*(k.data_ptr() for k, _ in caches)),
            pointers(*(v.data_ptr() for _, v in caches)),
            half,
        )
        self._tables, self._caches = tables, caches
        return True


def fuse_layers(parts: Sequence[LayerParts]) -> FusedLayers | None:
    """None where the compiled library lacks something that a layer needs, or the layers differ in their sizes."""
    if native.library() is None or not parts:
        return None
    sizes = set()
    for one in parts:
        linears = [getattr(one, name) for name in _LINEARS]
        norms = [norm for name in _NORMS if (norm := getattr(one, name)) is not None]
        if not all(isinstance(linear, NativeLinear) for linear in linears) or not native.dense(*norms):
            return None
        if not native.fits(one.heads, one.kv_heads, one.head_dim):
            return None
        sizes.add((one.heads, one.kv_heads, one.head_dim, *(linear.form for linear in linears)))
    return FusedLayers(parts) if len(sizes) == 1 else None

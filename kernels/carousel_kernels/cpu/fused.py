"""A whole layer of a decoder in one call of the compiled library: its operators one after another, without the time
that Python takes between them, about 16 microseconds a layer."""

from __future__ import annotations

import ctypes

import torch

from carousel_kernels.layer_parts import LayerParts
from carousel_kernels.layout import BatchLayout

from . import native
from .native_layer import NativeLinear

__all__ = ["FusedLayer", "fuse_layer"]

_pointer = ctypes.c_void_p


class _Layer(ctypes.Structure):
    """``struct carousel_layer`` of carousel_native.c."""

    _fields_ = (
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "qkv", "output", "gate_up", "down")),
        ("heads", native.Heads),
        ("rotary", ctypes.c_int32),
        ("gelu", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class FusedLayer:
    """Made by ``fuse_layer``. Computes what the single operators would, to the last bit."""

    __slots__ = ("_address", "_call", "_floats", "_keep", "_layer", "_parts")

    def __init__(self, parts: LayerParts, linears: tuple[NativeLinear, ...]) -> None:
        library = native.library()
        norms = (parts.attention_norm, parts.mlp_norm)
        heads = native.Heads(
            parts.heads, parts.kv_heads, parts.head_dim, parts.window or 0, parts.scale, parts.softcap or 0.0, 0
        )
        self._layer = _Layer(
            *(norm.data_ptr() for norm in norms), *(linear.address for linear in linears), heads, 0,
            int(parts.activation == "gelu_tanh"), parts.eps,
        )  # fmt: skip
        self._keep = (norms, linears)  # whose memory the addresses are of
        self._parts = parts
        self._address = ctypes.addressof(self._layer)
        self._floats = int(library.carousel_layer_floats(self._address))
        self._call = library.carousel_layer

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> bool:
        """Replace x, what the layer before added to the residual, by what this one adds. False, and nothing done, for
        tensors of other types or layouts than a decoder in float32 has."""
        if (
            not native.dense(x, residual, cos_sin)
            or not native.is_cache(k_cache, v_cache)
            or not native.indices(positions, layout.slots)
        ):
            return False
        layer, parts = self._layer, self._parts
        plan = native.plan_of(layout, parts.heads, parts.head_dim)
        layer.rotary = cos_sin.shape[1]
        layer.heads.half = k_cache.dtype is torch.bfloat16
        status = self._call(
            self._address, plan.batch, x.data_ptr(), residual.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(),
            layout.slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), plan.scratch(x.shape[0] * self._floats),
        )  # fmt: skip
        if status:
            raise MemoryError(f"no memory for a layer of {x.shape[0]} tokens")
        return True


def fuse_layer(parts: LayerParts) -> FusedLayer | None:
    """None where the compiled library lacks something that the layer needs."""
    linears = (parts.qkv, parts.output, parts.gate_up, parts.down)
    if native.library() is None or not native.fits(parts.heads, parts.kv_heads, parts.head_dim):
        return None
    if not all(isinstance(linear, NativeLinear) for linear in linears):
        return None
    if not native.dense(parts.attention_norm, parts.mlp_norm):
        return None
    return FusedLayer(parts, linears)  # type: ignore[arg-type]

"""Linear layers by the compiled kernel (``native/quant.c``): one call encodes the activations and multiplies."""

from __future__ import annotations

import ctypes

import torch

from carousel_kernels.blocked import BLOCK_COLUMNS, blocks_of, padded_bias

from . import native

__all__ = ["FLOAT", "HALF", "NARROW", "WIDE", "NativeLinear", "float_layer", "native_layer"]

NARROW, WIDE, HALF, FLOAT = range(4)
"""Of a layer, as in quant.c: activations of 8 bits, of 16 bits as two codes; bfloat16; float32."""


class _Layer(ctypes.Structure):
    """``struct carousel_quant_layer`` of quant.c."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("shifts", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("runs", ctypes.c_int64),
    )


class NativeLinear:
    """x [T, K] -> [T, N], float32; of another type what float32 gives, in x's. ``address`` is that of the C structure,
    ``form`` what it is like: (format, columns, inputs, runs).

    Raises:
        NotImplementedError: there is no compiled library.
    """

    __slots__ = ("_call", "_columns", "_keep", "address", "form")

    def __init__(
        self, form: int, columns: int, inputs: int, runs: int, tensors: tuple[torch.Tensor | None, ...]
    ) -> None:
        library = native.library()
        if library is None:
            raise NotImplementedError("there is no compiled library")
        layer = _Layer(*(None if one is None else one.data_ptr() for one in tensors), columns, inputs, form, runs)
        self._keep = (layer, tensors)  # whose memory the address is of
        self.address = ctypes.addressof(layer)
        self.form = (form, columns, inputs, runs)
        self._columns = columns
        self._call = library.carousel_quant_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            return self(x.float()).to(x.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self._columns)
        if self._call(self.address, x.data_ptr(), x.stride(0), rows, out.data_ptr(), torch.get_num_threads()):
            raise MemoryError(f"no memory for the activations of {rows} rows")
        return out


def native_layer(
    form: int,
    columns: int,
    inputs: int,
    codes: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    shifts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    runs: int = 1,
) -> NativeLinear:
    """x float32 [T, K] -> float32 [T, N]. Tensors lie as ``QuantizedWeight`` or ``HalfWeight`` has them, or as
    ``float_layer`` puts them.

    Raises:
        NotImplementedError: there is no compiled library.
    """
    return NativeLinear(form, columns, inputs, runs, (codes, scales, shifts, bias))


def float_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear:
    """The layer of a weight float32 [N, K], laid out in blocks of 32 outputs, [N / 32, K, 32].

    Raises:
        NotImplementedError: there is no compiled library, or the weight is of another type.
    """
    if weight.dtype != torch.float32 or not native.available():
        raise NotImplementedError("the compiled library takes float32 only")
    columns, inputs = weight.shape
    blocks, whole = blocks_of(columns), weight
    if columns % BLOCK_COLUMNS:
        whole = weight.new_zeros(blocks * BLOCK_COLUMNS, inputs)
        whole[:columns] = weight
    codes = whole.view(blocks, BLOCK_COLUMNS, inputs).transpose(1, 2).contiguous()
    return native_layer(FLOAT, columns, inputs, codes, bias=padded_bias(bias, columns))

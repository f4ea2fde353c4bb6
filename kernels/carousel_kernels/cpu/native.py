"""The compiled operators (``native/carousel_native.c``): loading them, and calling them with tensors.

They take float32 tensors, and caches of float32 or bfloat16, in the layouts that a decoder has. Each wrapper returns
None (``rope_write_kv`` False) for anything else, and where there is no compiled library. ``CAROUSEL_NATIVE=0`` does
without it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from carousel_kernels.layout import BatchLayout

__all__ = [
    "ABI_VERSION",
    "NATIVE_VARIABLE",
    "Heads",
    "Plan",
    "add_rms_norm",
    "available",
    "dense",
    "dot_products",
    "dot_products_of",
    "dots",
    "fits",
    "gelu_tanh_mul",
    "indices",
    "is_cache",
    "library",
    "limited",
    "paged_attention",
    "plan_of",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
    "vector_bits",
]

NATIVE_VARIABLE = "CAROUSEL_NATIVE"
"""Environment variable; with the value 0 the compiled operators are not used."""

ABI_VERSION = 6
"""Of the library's functions; grows with every change to what they take or compute."""

_MAX_DIM = 256
_MAX_GROUP = 32
_RUNTIMES = ("libgomp", "libiomp5", "libomp")

_pointer, _int, _int64, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "carousel_abi": (_int, []),
    "carousel_init": (_int, [_pointer, _pointer, _int, _int]),
    "carousel_has_dots": (_int, []),
    "carousel_rms_norm": (None, [_pointer, _int64, _int64, _pointer, _pointer, _int64, _int, _float, _int]),
    "carousel_add_rms_norm": (None, [_pointer, _int64, _pointer, _pointer, _pointer, _int64, _int, _float, _int]),
    "carousel_largest": (None, [_pointer, _int64, _pointer, _int64, _int, _int]),
    "carousel_gated": (None, [_pointer, _int64, _pointer, _int64, _int, _int, _int]),
    "carousel_rope_write": (None, [*[_pointer, _int64] * 3, *[_pointer] * 5, _int64, *[_int] * 6]),
    "carousel_attention": (_int, [_pointer, _pointer, _pointer, _int64, _pointer, _pointer, _pointer]),
    "carousel_quant_init": (_int, [_int]),
    "carousel_half_products": (_int, []),
    "carousel_pass_bytes": (_int64, [_pointer]),
    "carousel_layers": (_int, [_pointer]),
    "carousel_quant_linear": (_int, [_pointer, _pointer, _int64, _int64, _pointer, _int]),
}


class _Batch(ctypes.Structure):
    _fields_ = (
        ("query_start", _pointer),
        ("context_lens", _pointer),
        ("block_tables", _pointer),
        ("table_stride", _int64),
        ("sequences", ctypes.c_int32),
        ("decodes", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class Heads(ctypes.Structure):
    """``struct carousel_heads``."""

    _fields_ = (
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", _float),
        ("softcap", _float),
        ("half", ctypes.c_int32),
    )


def _load() -> Any:
    """The library with its functions typed, or None if it was not built, is of another version or does not load."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            library = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError):
            continue  # for another machine, or from another version
        if library.carousel_abi() == ABI_VERSION:
            return library
    return None


def _runtime() -> tuple[int | None, int | None]:
    """The addresses of GOMP_parallel and omp_get_num_threads in the OpenMP runtime that PyTorch uses; LLVM's and
    Intel's have them as well."""
    try:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None, None
    own = str(Path(torch.__file__).parent)  # and torch.libs beside it: other packages may bring a runtime as well
    for name in _RUNTIMES:
        found = [path for path in loaded if Path(path).name.startswith(name)]
        for path in sorted(found, key=lambda path: not path.startswith(own)):
            try:
                runtime = ctypes.CDLL(path)
                functions = runtime.GOMP_parallel, runtime.omp_get_num_threads
            except (OSError, AttributeError):
                continue
            parallel, threads = (ctypes.cast(function, _pointer).value for function in functions)
            return parallel, threads
    return None, None


_library = _load()
_runtime_functions = (None, None) if _library is None else _runtime()
_limits = (0, True)  # no limit to the vectors' width, and dot products of bfloat16 where the CPU has them
_bits = 0 if _library is None else int(_library.carousel_init(*_runtime_functions, *_limits))
_dot_products = 0 if _library is None else int(_library.carousel_quant_init(0))


def available() -> bool:
    """Whether the compiled operators were built for this machine, load, and are not switched off."""
    return _library is not None


def library() -> Any:
    """The loaded library, its functions typed; None without it."""
    return _library


def dot_products() -> int:
    """The kind of instructions that multiplies 8-bit integers: 4 AVX512-VNNI, 3 AVX-VNNI, 2 AVX2, 1 plain C; 0 without
    the compiled operators."""
    return _dot_products if available() else 0


@contextmanager
def dot_products_of(kind: int) -> Iterator[None]:
    """Multiply 8-bit integers with instructions of this kind until the block ends; ValueError if the CPU lacks it."""
    global _dot_products
    if _library is None or not _library.carousel_quant_init(kind):
        raise ValueError(f"this CPU has no dot products of kind {kind}")
    before, _dot_products = _dot_products, kind
    try:
        yield
    finally:
        _dot_products = before
        _library.carousel_quant_init(before)


def vector_bits() -> int:
    """Width of the vectors that the compiled operators compute with; 0 without them."""
    return _bits if available() else 0


@contextmanager
def limited(bits: int, dots: bool = False) -> Iterator[None]:
    """Compute with vectors of at most ``bits`` (128, 256 or 512), as on a lesser CPU, until the block ends; ``dots``:
    with dot products of bfloat16, where the CPU has them beside vectors of 512."""
    global _bits, _limits
    before = _bits, _limits
    _limits = bits, dots
    if _library is not None:
        _bits = _library.carousel_init(*_runtime_functions, *_limits)
    try:
        yield
    finally:
        _bits, _limits = before
        if _library is not None:
            _library.carousel_init(*_runtime_functions, *_limits)


def dots() -> bool:
    """Whether attention over a cache of bfloat16 is by dot products of it (AVX512-BF16), which rounds queries too."""
    return available() and bool(_library.carousel_has_dots())


# A step makes hundreds of calls: what looks at their arguments is written to be quick.
_FLOAT, _HALF, _LONG = torch.float32, torch.bfloat16, torch.int64


def dense(*tensors: torch.Tensor) -> bool:
    for t in tensors:  # noqa: SIM110
        if t.dtype is not _FLOAT or not t.is_contiguous():
            return False
    return True


def indices(*tensors: torch.Tensor) -> bool:
    for t in tensors:  # noqa: SIM110
        if t.dtype is not _LONG or not t.is_contiguous():
            return False
    return True


def is_cache(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these are dense and of one type, float32 or bfloat16."""
    dtype = k.dtype
    return (dtype is _FLOAT or dtype is _HALF) and v.dtype is dtype and k.is_contiguous() and v.is_contiguous()


def _heads_adjacent(x: torch.Tensor) -> bool:
    """Whether x [T, heads, D] is float32 with only tokens apart, as in a view of a fused projection."""
    _, between, within = x.stride()
    return x.dtype is _FLOAT and within == 1 and between == x.shape[2]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    if _library is None or not dense(weight) or x.dtype != torch.float32 or x.stride(-1) != 1:
        return None
    width = x.shape[-1]
    if x.is_contiguous():
        inner, stride = 1, width
    elif x.dim() == 3 and x.stride(1) == width:
        inner, stride = x.shape[1], x.stride(0)
    elif x.dim() == 2:
        inner, stride = 1, x.stride(0)
    else:
        return None
    out = torch.empty(x.shape)
    _library.carousel_rms_norm(
        x.data_ptr(), stride, inner, weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if _library is None or not dense(x, residual, weight):
        return None
    out = torch.empty_like(x)
    width = x.shape[-1]
    _library.carousel_add_rms_norm(
        x.data_ptr(), width, residual.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out, residual


def silu_mul(x: torch.Tensor) -> torch.Tensor | None:
    return _gated(x, 0)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor | None:
    return _gated(x, 1)


def _gated(x: torch.Tensor, gelu: int) -> torch.Tensor | None:
    if _library is None or not dense(x) or x.dim() != 2:
        return None
    rows, doubled = x.shape
    out = torch.empty(rows, doubled // 2)
    _library.carousel_gated(x.data_ptr(), doubled, out.data_ptr(), rows, doubled // 2, gelu, torch.get_num_threads())
    return out


def largest(logits: torch.Tensor) -> torch.Tensor | None:
    """The ids alone; see ``carousel_kernels.largest``."""
    if _library is None or logits.dtype is not _FLOAT or logits.stride(1) != 1:
        return None
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    threads = torch.get_num_threads()
    _library.carousel_largest(logits.data_ptr(), logits.stride(0), tokens.data_ptr(), rows, width, threads)
    return tokens


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> bool:
    """Whether it was done."""
    if (
        _library is None
        or not (_heads_adjacent(q) and _heads_adjacent(k) and _heads_adjacent(v))
        or not (dense(cos_sin) and is_cache(k_cache, v_cache))
        or q.shape[2] > _MAX_DIM
        or not indices(positions, slots)
    ):
        return False
    tokens, heads, dim = q.shape
    _library.carousel_rope_write(
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), cos_sin.data_ptr(),
        positions.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(), tokens, heads, k.shape[1], dim,
        cos_sin.shape[1], k_cache.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return True


class Plan:
    """What the calls of one step share. Holds the tensors whose addresses it has passed on."""

    __slots__ = ("_batch", "_heads", "_keep", "batch")

    def __init__(self, layout: BatchLayout) -> None:
        threads = torch.get_num_threads()
        assert _library is not None
        tables = [
            t.to(torch.int32).contiguous() for t in (layout.query_start, layout.context_lens, layout.block_tables)
        ]
        self._keep = tables
        self._batch = _Batch(
            *(t.data_ptr() for t in tables), tables[2].stride(0), layout.num_sequences, layout.num_decodes, threads
        )
        self.batch = ctypes.addressof(self._batch)
        self._heads: dict[object, Heads] = {}

    def heads(self, *key: Any) -> int:
        """The address of the C form of (Hq, Hkv, D, window, scale, softcap, whether the cache is bfloat16)."""
        made = self._heads.get(key)
        if made is None:
            made = self._heads[key] = Heads(*key)
        return ctypes.addressof(made)


def plan_of(layout: BatchLayout) -> Plan:
    """The plan of a step, made once."""
    plans: dict[object, Any] | None = layout.plan
    if plans is None:
        plans = layout.plan = {}
    plan: Plan | None = plans.get(Plan)
    if plan is None:
        plan = plans[Plan] = Plan(layout)
    return plan


def fits(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the compiled attention takes heads like these."""
    return not (dim % 16 or dim > _MAX_DIM or heads > _MAX_GROUP * kv_heads)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: BatchLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor | None:
    if _library is None or not (_heads_adjacent(q) and is_cache(k_cache, v_cache)):
        return None
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    if not fits(heads, kv_heads, dim):
        return None
    plan = plan_of(layout)
    out = torch.empty(q.shape)
    status = _library.carousel_attention(
        plan.batch,
        plan.heads(heads, kv_heads, dim, window or 0, scale, softcap or 0.0, k_cache.dtype is torch.bfloat16),
        q.data_ptr(), q.stride(0),
        k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    if status:
        raise MemoryError("no memory for the plan of an attention")
    return out

"""Every operator on the device against the reference on the same device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

import carousel_kernels as ck
from carousel_kernels import reference
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

from .model import Session

__all__ = ["kernels"]

Result = torch.Tensor | tuple[torch.Tensor, ...]
Check = tuple[str, Callable[[Any], Result], float]
"""Name, the call on a backend or the reference, and the greatest error in units of the largest expected magnitude."""

_ROUNDING = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-4}


def kernels(session: Session) -> dict[str, Any]:
    """How far each check is from the reference; exact results (tokens, ids) must be equal."""
    rows = []
    with torch.inference_mode():
        for name, call, tolerance in _checks(session):
            try:
                with ck.use_backend("triton"):
                    got = call(ck)
                error = _distance(got, call(reference))
                rows.append({"check": name, "error": error, "tolerance": tolerance, "ok": error <= tolerance})
            except Exception as failure:  # the others are worth knowing all the same
                reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
                rows.append({"check": name, "error": None, "tolerance": tolerance, "ok": False, "reason": reason})
    return {"ok": all(row["ok"] for row in rows), "checks": rows}


def _operator(name: str, *arguments: Any, **options: Any) -> Callable[[Any], Result]:
    """The call of an operator, on what it is given; a layout is planned anew each time."""

    def call(on: Any) -> Result:
        for argument in arguments:
            if isinstance(argument, BatchLayout):
                argument.plan = None
        result: Result = getattr(on, name)(*arguments, **options)
        return result

    return call


def _layer(prepare: str, weight: Any, x: torch.Tensor) -> Callable[[Any], Result]:
    """A layer prepared and applied."""

    def call(on: Any) -> Result:
        result: Result = getattr(_backend(on), prepare)(weight, None)(x)
        return result

    return call


def _distance(got: Result, expected: Result) -> float:
    if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        return _one(got, expected)
    pairs = zip(got, expected, strict=True)
    return max(_one(a, b) for a, b in pairs)


def _one(got: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    wide, exact = got.float(), expected.float()
    if not bool(wide.isfinite().all()):
        return float("inf")
    return float((wide - exact).abs().max() / exact.abs().max().clamp(min=1e-6))


def _layout(sequences: list[tuple[int, int]], device: torch.device) -> BatchLayout:
    """Sequences of (computed before, new) tokens, decodes first, blocks scattered."""
    contexts, news = [before + new for before, new in sequences], [new for _, new in sequences]
    most = max(-(-c // BLOCK_SIZE) for c in contexts)
    tables = torch.randperm(len(sequences) * most).view(len(sequences), most).to(torch.int32)
    slots = [
        int(tables[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
        for s, (before, new) in enumerate(sequences)
        for p in range(before, before + new)
    ]
    return BatchLayout(
        query_start=torch.tensor([0, *news]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slots=torch.tensor(slots, device=device),
        query_lens_host=news,
        context_lens_host=contexts,
        num_decodes=sum(new == 1 for new in news),
    )


def _checks(session: Session) -> Iterator[Check]:
    torch.manual_seed(0)
    device, tiny = session.device, session.tiny
    if tiny:
        yield from _attention(device, torch.float32, 16, [(4, 2)], tiny, features=True)
        yield from _elementwise(device, torch.float32, tiny)
        yield from _linear(device, torch.float32, tiny)
        yield from _uniform(device, torch.float32, 16, tiny)
    else:  # every variant of a kernel is a second of compiling
        for dim in (64, 128, 256):
            yield from _attention(device, torch.bfloat16, dim, [(32, 8)], tiny, features=False)
        yield from _attention(device, torch.bfloat16, 128, [(6, 6), (7, 1)], tiny, features=True)
        yield from _attention(device, torch.float16, 128, [(32, 8)], tiny, features=False)
        yield from _elementwise(device, torch.bfloat16, tiny)
        yield from _linear(device, torch.bfloat16, tiny)
        for dim in (64, 128, 256):
            yield from _uniform(device, torch.bfloat16, dim, tiny)
    yield from _sampling(device, tiny)


def _attention(
    device: torch.device, dtype: torch.dtype, dim: int, shapes: list[tuple[int, int]], tiny: bool, *, features: bool
) -> Iterator[Check]:
    """For these (query heads, KV heads), with caches of ``dtype`` and e4m3; ``features``: window and soft-cap too."""
    batches = {
        "decode": [(7, 1), (30, 1)] if tiny else [(0, 1), (16, 1), (1000, 1), (5000, 1), (12345, 1)],
        "mixed": [(17, 1), (5, 20)] if tiny else [(3000, 1), (100, 1), (0, 500), (1111, 333)],
    }
    options: list[dict[str, Any]] = [{}, {"sliding_window": 100, "softcap": 30.0}]
    for heads, kv_heads in shapes:
        for name, sequences in batches.items():
            layout = _layout(sequences, device)
            shape = (layout.block_tables.numel(), BLOCK_SIZE, kv_heads, dim)
            for cache in (dtype, torch.float8_e4m3fn):
                keys, values = (torch.randn(shape, device=device, dtype=dtype).to(cache) for _ in range(2))
                q = torch.randn(layout.num_tokens, heads, dim, device=device, dtype=dtype)
                for feature in options if features else options[:1]:
                    label = f"attention {name} {dtype} D{dim} {heads}/{kv_heads} cache {cache} {feature or ''}".strip()
                    call = _operator("paged_attention", q, keys, values, layout, scale=dim**-0.5, **feature)
                    yield label, call, _ROUNDING[dtype]


def _uniform(device: torch.device, dtype: torch.dtype, dim: int, tiny: bool) -> Iterator[Check]:
    """The deterministic mode: how many values of a token computed alone differ from those of the same token computed
    with others. In the interpreter some do, since numpy's products depend on the row."""
    tolerance, length = (float("inf"), 40) if tiny else (0.0, 2500)
    layout = _layout([(0, length)], device)
    shape = (layout.block_tables.numel(), BLOCK_SIZE, 2, dim)
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(length, 8, dim, device=device, dtype=dtype)

    def attend(first: int, last: int) -> torch.Tensor:
        part = dataclasses.replace(
            layout, query_start=torch.tensor([0, last - first], dtype=torch.int32, device=device),
            context_lens=torch.tensor([last], dtype=torch.int32, device=device), slots=layout.slots[first:last],
            query_lens_host=[last - first], context_lens_host=[last], num_decodes=int(last - first == 1),
            deterministic=True, plan=None,
        )  # fmt: skip
        return ck.paged_attention(q[first:last], keys, values, part, scale=dim**-0.5)

    def attention() -> int:
        whole = attend(0, length)
        parts = ((length - 1, length), (length // 3, length // 2), (length // 2, length), (0, 1))
        return sum(int((attend(a, b) != whole[a:b]).sum()) for a, b in parts)

    def linear() -> int:
        x = torch.randn(length, 256, device=device, dtype=dtype)
        with ck.uniform_linears():
            layer = ck.prepare_linear(torch.randn(96, 256, device=device, dtype=dtype))
        whole = layer(x)
        return sum(int((layer(x[a:b]) != whole[a:b]).sum()) for a, b in ((0, 1), (5, 22), (7, length)))

    for name, count in (("attention", attention), ("linear", linear)):
        yield f"deterministic {name} {dtype} D{dim}", _counted(count), tolerance


def _counted(count: Callable[[], int]) -> Callable[[Any], Result]:
    return lambda on: torch.tensor(0 if on is reference else count())


def _elementwise(device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[Check]:
    for rows, hidden in ((3, 48),) if tiny else ((1, 4096), (257, 4096), (64, 2560)):
        x = torch.randn(rows, hidden, device=device, dtype=dtype)
        residual, weight = torch.randn_like(x), torch.randn(hidden, device=device, dtype=dtype)
        tolerance, label = _ROUNDING[dtype], f"{dtype} {rows}x{hidden}"
        yield f"rms_norm {label}", _operator("rms_norm", x, weight, 1e-5), tolerance
        yield f"add_rms_norm {label}", _add_rms_norm(x, residual, weight), tolerance
        yield f"silu_mul {label}", _operator("silu_mul", x), tolerance
        yield f"gelu_tanh_mul {label}", _operator("gelu_tanh_mul", x), tolerance
    yield f"rope_write_kv {dtype}", lambda on: _rope(on, device, dtype), _ROUNDING[dtype]


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Callable[[Any], Result]:
    return lambda on: on.add_rms_norm(x, residual.clone(), weight, 1e-5)  # which may reuse the residual's memory


def _rope(on: Any, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    g = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=device, dtype=torch.float32).to(dtype)

    q, k, v = random(40, 8, 64), random(40, 2, 64), random(40, 2, 64)
    table = torch.randn(100, 64, generator=g, device=device)
    positions = torch.arange(60, 100, device=device)
    slots = torch.arange(40, device=device).flip(0) + 5
    caches = torch.zeros(2, 4, BLOCK_SIZE, 2, 64, device=device, dtype=dtype)
    on.rope_write_kv(q, k, v, table, positions, caches[0], caches[1], slots)
    return q, caches


def _linear(device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[Check]:
    from carousel_kernels.weight_formats import GroupedWeight, scaled

    columns, features = (40, 256) if tiny else (4096, 4096)
    for rows in (2,) if tiny else (1, 7, 33, 64, 200):
        x = torch.randn(rows, features, device=device, dtype=dtype)
        label = f"{dtype} M{rows}"
        for bits in (4, 8):
            q = torch.randint(0, 2**bits, (columns, features), dtype=torch.uint8, device=device)
            zeros = torch.randint(1, 2**bits, (features // 128, columns), dtype=torch.int16, device=device)
            scales = torch.rand(features // 128, columns, device=device).mul_(0.01).half()
            grouped = GroupedWeight(q, scales, zeros, None, 128, bits)
            yield f"linear {bits}-bit {label}", _layer("prepare_grouped_linear", grouped, x), _ROUNDING[dtype]
        for stored in (torch.float8_e4m3fn, torch.int8):
            weight = (torch.randn(columns, features, device=device) * 30).clamp(-120, 120).to(stored)
            for activations in ("keep", "quantize"):
                layer = scaled(weight, torch.tensor(0.01, device=device), activations)
                name = f"linear {stored} {activations} {label}"
                yield name, _layer("prepare_scaled_linear", layer, x), _ROUNDING[dtype]


def _backend(on: Any) -> Any:
    """The module with all of a backend's operators."""
    if on is reference:
        return reference
    from carousel_kernels import triton

    return triton


def _sampling(device: torch.device, tiny: bool) -> Iterator[Check]:
    rows, vocabulary = (3, 90) if tiny else (64, 128256)
    logits = torch.randn(rows, vocabulary, device=device) * 3
    seeds = torch.arange(rows, device=device)
    for k, p, floor in (
        (0, 1.0, 0.0),
        (50, 1.0, 0.0),
        (0, 0.9, 0.0),
        (50, 0.9, 0.0),
        (0, 1.0, 0.05),
        (5000, 0.95, 0.01),
    ):
        arguments = (
            logits, torch.ones(rows, device=device), torch.full((rows,), k, device=device),
            torch.full((rows,), p, device=device), torch.full((rows,), floor, device=device), seeds, seeds,
        )  # fmt: skip
        yield f"sample k={k} p={p} min_p={floor}", _operator("sample", *arguments), 0.0
    yield "token_logprobs", _operator("token_logprobs", logits, seeds, min(20, vocabulary)), 1e-5
    yield "gumbel_noise", _operator("gumbel_noise", seeds, seeds, vocabulary), 1e-6

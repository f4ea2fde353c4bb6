"""What is measured: operators at the shapes of Llama 3 8B, with the bytes and operations that they cannot avoid."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import carousel_kernels as ck
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

from . import peers

__all__ = ["TINY", "Case", "Sizes", "attention_case", "cases"]

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's shapes, and the sizes of batches; ``TINY`` runs in Triton's interpreter."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocabulary: int = 128256
    rows: tuple[int, ...] = (1, 16, 64)
    """Rows of linear layers: decode batches."""
    tokens: tuple[int, ...] = (64, 2048)
    """Tokens of elementwise operators: a decode batch, a prompt chunk."""
    decodes: tuple[tuple[int, int], ...] = ((1, 4096), (1, 32768), (17, 4096), (64, 4096), (32, 16384), (256, 1024))
    """(sequences, context)."""
    chunks: tuple[tuple[int, int], ...] = ((2048, 0), (512, 8192))
    """(new tokens, tokens computed before)."""
    samples: tuple[int, ...] = (1, 64)
    group: int = 128


TINY = Sizes(
    hidden=64, inner=96, heads=4, kv_heads=2, dim=16, vocabulary=300, rows=(2,), tokens=(3,),
    decodes=((2, 40),), chunks=((5, 20),), samples=(2,), group=32,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one shape.

    Attributes:
        operator, shape: its name and what distinguishes this case.
        num_bytes, flops: what must be read and written, and computed, at least.
        call: one execution.
        peers: the same by other libraries, as far as they are installed.
        goal: share of the copy bandwidth that is asked for; None where memory is not the limit, or nothing is asked.
    """

    operator: str
    shape: str
    num_bytes: int
    flops: int
    call: Call
    peers: dict[str, Call] = field(default_factory=dict)
    goal: float | None = None


def cases(sizes: Sizes, device: torch.device, dtype: torch.dtype, num_units: int) -> Iterator[Case]:
    """All cases, made one at a time, as their tensors may fill the memory. ``num_units``: the device's SMs."""
    torch.manual_seed(0)
    yield from _decode(sizes, device, dtype, num_units)
    yield from _chunks(sizes, device, dtype)
    yield from _elementwise(sizes, device, dtype)
    yield from _linear(sizes, device, dtype)
    yield from _sampling(sizes, device)


def _layout(news: list[int], contexts: list[int], device: torch.device) -> BatchLayout:
    """Sequences of these new tokens and contexts, whose blocks lie scattered over the cache."""
    most = max(-(-c // BLOCK_SIZE) for c in contexts)
    order = torch.randperm(len(news) * most, device=device).to(torch.int32).view(len(news), most)
    last = [torch.arange(c - n, c, device=device) for n, c in zip(news, contexts, strict=True)]
    slots = [order[s].long()[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in enumerate(last)]
    return BatchLayout(
        query_start=torch.tensor([0, *news], device=device).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=order,
        slots=torch.cat(slots),
        query_lens_host=news,
        context_lens_host=contexts,
        num_decodes=sum(n == 1 for n in news),
    )


def _attention(
    sizes: Sizes, news: list[int], contexts: list[int], device: torch.device, dtype: torch.dtype, cache: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, BatchLayout]:
    layout = _layout(news, contexts, device)
    shape = (layout.block_tables.numel(), BLOCK_SIZE, sizes.kv_heads, sizes.dim)
    keys, values = (torch.randn(shape, device=device, dtype=dtype).to(cache) for _ in range(2))
    q = torch.randn(sum(news), sizes.heads, sizes.dim, device=device, dtype=dtype)
    return q, keys, values, layout


def attention_case(
    sizes: Sizes, news: list[int], contexts: list[int], device: torch.device, cache: torch.dtype
) -> Call:
    """Attention of sequences of these new tokens and contexts over a cache of this type."""
    dtype = torch.bfloat16 if cache == torch.float8_e4m3fn else cache
    q, keys, values, layout = _attention(sizes, news, contexts, device, dtype, cache)
    return functools.partial(ck.paged_attention, q, keys, values, layout, scale=sizes.dim**-0.5)


def _decode(sizes: Sizes, device: torch.device, dtype: torch.dtype, num_units: int) -> Iterator[Case]:
    for cache in (dtype, torch.float8_e4m3fn):
        for count, context in sizes.decodes:
            q, keys, values, layout = _attention(sizes, [1] * count, [context] * count, device, dtype, cache)
            scale = sizes.dim**-0.5
            kv = 2 * count * context * sizes.kv_heads * sizes.dim
            yield Case(
                "paged decode",
                f"{count} x {context}" + (" fp8" if cache != dtype else ""),
                kv * cache.itemsize + 2 * q.nbytes,
                2 * kv * (sizes.heads // sizes.kv_heads),
                functools.partial(ck.paged_attention, q, keys, values, layout, scale=scale),
                peers.decode(q, keys, values, layout, scale) if cache == dtype else {},
                0.9 if context >= 4096 and count * sizes.kv_heads >= num_units else None,
            )


def _chunks(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for new, before in sizes.chunks:
        context = new + before
        q, keys, values, layout = _attention(sizes, [new], [context], device, dtype, dtype)
        scale = sizes.dim**-0.5
        pairs = new * before + new * (new + 1) // 2
        yield Case(
            "prefill",
            f"{new} after {before}",
            2 * context * sizes.kv_heads * sizes.dim * dtype.itemsize + 2 * q.nbytes,
            4 * pairs * sizes.heads * sizes.dim,
            functools.partial(ck.paged_attention, q, keys, values, layout, scale=scale),
            peers.prefill(q, keys, values, layout, scale),
        )


def _elementwise(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    heads = sizes.heads + 2 * sizes.kv_heads
    for count in sizes.tokens:
        # Only many rows are bound by the memory; a few are gone before the launch is over.
        goal = 0.85 if count >= 2048 else None
        x, residual = (torch.randn(count, sizes.hidden, device=device, dtype=dtype) for _ in range(2))
        weight = torch.ones(sizes.hidden, device=device, dtype=dtype)
        yield Case(
            "add_rms_norm", f"{count} x {sizes.hidden}", 4 * x.nbytes + weight.nbytes, 5 * x.numel(),
            functools.partial(ck.add_rms_norm, x, residual, weight, 1e-5), goal=goal,
        )  # fmt: skip
        gates = torch.randn(count, 2 * sizes.inner, device=device, dtype=dtype)
        yield Case(
            "silu_mul", f"{count} x {sizes.inner}", gates.nbytes * 3 // 2, 3 * gates.numel(),
            functools.partial(ck.silu_mul, gates), goal=goal,
        )  # fmt: skip
        _, keys, values, layout = _attention(sizes, [count], [count], device, dtype, dtype)
        fused = torch.randn(count, heads * sizes.dim, device=device, dtype=dtype).view(count, heads, sizes.dim)
        q, k, v = torch.split(fused, [sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
        table = torch.randn(count, sizes.dim, device=device)
        positions = torch.arange(count, device=device)
        yield Case(
            "rope_write_kv", f"{count} x {heads} x {sizes.dim}", 2 * fused.nbytes + table.nbytes, 4 * fused.numel(),
            functools.partial(ck.rope_write_kv, q, k, v, table, positions, keys, values, layout.slots),
            goal=goal,
        )  # fmt: skip


def _gptq(columns: int, features: int, group: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=device).to(torch.int32)

    scales = torch.rand(features // group, columns, device=device).mul_(0.01).half()
    return words(features // 8, columns), words(features // group, columns // 8), scales


def _linear(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    columns, features = 2 * sizes.inner, sizes.hidden
    plain = torch.randn(columns, features, device=device, dtype=dtype) * 0.02
    q = (torch.randn(columns, features, device=device) * 40).clamp(-120, 120)
    scale = torch.full((columns,), 5e-4, device=device)
    kinds = {
        "": (ck.prepare_linear(plain), plain.nbytes),
        "fp8": (ck.prepare_linear_fp8(q.to(torch.float8_e4m3fn), scale), q.numel()),
        "int8": (ck.prepare_linear_int8(q.to(torch.int8), scale), q.numel()),
        "gptq": (
            ck.prepare_linear_gptq(*_gptq(columns, features, sizes.group, device), group_size=sizes.group),
            q.numel() // 2 + q.numel() // sizes.group * 2,
        ),
    }
    for rows in sizes.rows:
        x = torch.randn(rows, features, device=device, dtype=dtype)
        for kind, (layer, num_bytes) in kinds.items():
            yield Case(
                f"linear {kind}".strip(),
                f"{rows} x {features} -> {columns}",
                num_bytes + x.nbytes + rows * columns * dtype.itemsize,
                2 * rows * columns * features,
                functools.partial(layer, x),
                {"torch": functools.partial(F.linear, x, plain)} if kind else {},
            )


def _torch_sample(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1).multinomial(1)


def _torch_logprobs(logits: torch.Tensor) -> object:
    return logits.log_softmax(-1).topk(20)


def _sampling(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    for rows in sizes.samples:
        logits = torch.randn(rows, sizes.vocabulary, device=device) * 3
        seeds = torch.arange(rows, device=device)
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        for name, k, p in (("all", 0, 1.0), ("top-p", 0, 0.9), ("top-k 50", 50, 1.0), ("top-k 50, top-p", 50, 0.9)):
            heat, none = torch.ones(rows, device=device), torch.zeros(rows, device=device)
            top_k, top_p = torch.full((rows,), k, device=device), torch.full((rows,), p, device=device)
            yield Case(
                "sample", f"{rows} x {sizes.vocabulary} {name}", logits.nbytes, 0,
                functools.partial(ck.sample, logits, heat, top_k, top_p, none, seeds, seeds),
                {"torch": functools.partial(_torch_sample, logits)},
            )  # fmt: skip
        yield Case(
            "token_logprobs", f"{rows} x {sizes.vocabulary} top 20", logits.nbytes, 0,
            functools.partial(ck.token_logprobs, logits, ids, 20),
            {"torch": functools.partial(_torch_logprobs, logits)},
        )  # fmt: skip

"""Log-probabilities, ranks and the most likely tokens, read from the logits once and without a softmax in memory.

A row is cut into chunks, whose programs keep a maximum and the sum of exponentials below it (the online softmax of
Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and how many logits beat the token asked
about. One program per row merges them. The N most likely tokens come out of a tournament of the chunks: the best
chunk gives its best, and is read again, 8 KiB of cache, for the next best below that.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .config import CHUNK, chunks_of, next_power_of_2
from .registry import Spec, Target

__all__ = ["token_logprobs"]


@triton.jit
def _finite(peak):
    """What to subtract before exp: the peak, or 0 where it is infinite, as torch.logsumexp does."""
    return tl.where(tl.abs(peak) == float("inf"), 0.0, peak)


@triton.jit
def _reduce_kernel(
    logits, token_ids, peaks, picks, sums, larger, row_stride, vocabulary, num_chunks, BLOCK: tl.constexpr
):
    """Per chunk: its largest logit and the id, sum of exponentials, and number of logits above the token's."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    place = row * num_chunks + chunk
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocabulary, other=float("-inf"))
    chosen = tl.load(logits + row * row_stride + tl.maximum(tl.load(token_ids + row), 0))
    peak, at = tl.max(values, 0, return_indices=True)
    tl.store(peaks + place, peak)
    tl.store(picks + place, chunk * BLOCK + at)
    tl.store(sums + place, tl.sum(tl.exp(values - _finite(peak)), 0))
    tl.store(larger + place, tl.sum((values > chosen).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_top"])
def _merge_kernel(
    logits,
    token_ids,
    peaks,
    picks,
    sums,
    larger,
    logprobs,
    ranks,
    top_ids,
    top_logprobs,
    row_stride,
    vocabulary,
    num_chunks,
    num_top,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Per row: the chunks' sums merged, and the tournament."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    held = lanes < num_chunks
    place = row * num_chunks + lanes
    peak = tl.load(peaks + place, mask=held, other=float("-inf"))
    pick = tl.load(picks + place, mask=held, other=0)
    largest = tl.max(peak, 0)
    share = tl.load(sums + place, mask=held, other=0.0)
    base = _finite(largest)
    total = tl.log(tl.sum(share * tl.exp(_finite(peak) - base), 0)) + base
    chosen = tl.load(logits + row * row_stride + tl.maximum(tl.load(token_ids + row), 0))
    tl.store(logprobs + row, chosen - total)
    tl.store(ranks + row, tl.sum(tl.load(larger + place, mask=held, other=0), 0).to(tl.int64) + 1)
    for n in range(num_top):
        value, chunk = tl.max(peak, 0, return_indices=True)
        token = tl.sum(tl.where(lanes == chunk, pick, 0), 0)
        tl.store(top_ids + row * num_top + n, token.to(tl.int64))
        tl.store(top_logprobs + row * num_top + n, value - total)
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + ids, mask=ids < vocabulary, other=float("-inf"))
        below = (values < value) | ((values == value) & (ids > token))
        following, at = tl.max(tl.where(below, values, float("-inf")), 0, return_indices=True)
        peak = tl.where(lanes == chunk, following, peak)
        pick = tl.where(lanes == chunk, chunk * BLOCK + at, pick)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``carousel_kernels.token_logprobs``. Of equal logits the lower ids are listed, first."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.device
    block, chunks = chunks_of(vocabulary)
    # Each a tensor of its own, which begins at a multiple of 16: others would have the kernels compiled once more.
    peaks, sums = (torch.empty((rows, chunks), dtype=torch.float32, device=device) for _ in range(2))
    picks, larger = (torch.empty((rows, chunks), dtype=torch.int32, device=device) for _ in range(2))
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int64, device=device)
    top_ids = torch.empty((rows, num_top), dtype=torch.int64, device=device)
    top_logprobs = torch.empty((rows, num_top), dtype=torch.float32, device=device)
    if rows:
        chosen, stride = token_ids.contiguous(), logits.stride(0)
        _reduce_kernel[(rows, chunks)](
            logits, chosen, peaks, picks, sums, larger, stride, vocabulary, chunks, block, num_warps=4
        )
        _merge_kernel[(rows,)](
            logits, chosen, peaks, picks, sums, larger, logprobs, ranks, top_ids, top_logprobs,
            stride, vocabulary, chunks, num_top, block, next_power_of_2(chunks), num_warps=4,
        )  # fmt: skip
    return logprobs, ranks, top_ids, top_logprobs


def aot_specs(target: Target) -> Iterator[Spec]:
    """Both kernels, for vocabularies up to 2^17 and 2^18."""
    chunks = {"peaks": "*fp32", "picks": "*i32", "sums": "*fp32", "larger": "*i32"}
    sizes = {"row_stride": "i32", "vocabulary": "i32", "num_chunks": "i32"}
    reads = {"logits": "*fp32", "token_ids": "*i64", **chunks}
    yield Spec(_reduce_kernel, f"chunk {CHUNK}", {**reads, **sizes}, {"BLOCK": CHUNK}, num_warps=4)
    results = {"logprobs": "*fp32", "ranks": "*i64", "top_ids": "*i64", "top_logprobs": "*fp32"}
    for lanes in (64, 128):
        merge = {**reads, **results, **sizes, "num_top": "i32"}
        yield Spec(_merge_kernel, f"lanes {lanes}", merge, {"BLOCK": CHUNK, "LANES": lanes}, num_warps=4)

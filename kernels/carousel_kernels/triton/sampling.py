"""Sampling on the device without sorting: draw first, then check the draw against the filters.

Adding Gumbel noise and taking the argmax draws from the softmax, and the tokens that top-k, top-p and min-p keep are
always the first so many of the ranking. So the argmax over *all* tokens is already the answer if it is one of the kept;
if not, all that ranks below it is out, and the argmax over what ranks above is the next candidate. That each candidate
is one draw makes the search short: with top-p 0.9 the first is kept nine times in ten. The idea of rejecting from the
full distribution instead of sorting it is FlashInfer's ("Sorting-Free GPU Kernels for LLM Sampling", 2025); with noise
that is a function of the token the rejection is exact, and the result the same as that of sorting.

Only with both top-k and top-p is the mass of the k largest needed beforehand: a radix select of eight bits a pass over
the order-preserving integers of the floats (as in GPU top-k since Alabi et al., 2012) finds the k-th logit.

A row is cut into chunks. One program per chunk finds its largest logit, its sum of exponentials and its best noisy
logit; one program per row then looks only into the chunks that hold anything above the candidate.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .config import CHUNK, chunks_of, next_power_of_2
from .registry import Spec, Target

__all__ = ["gumbel_noise", "sample"]

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # splitmix64, as in the reference
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_NOISE_BLOCK = 1024


@triton.jit
def _splitmix(x):
    """The finaliser of splitmix64 on uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _stream(seed, position):
    """The state that a row's noise is derived from; int64 arguments."""
    mixed = _splitmix(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    return _splitmix(mixed + position.to(tl.uint64, bitcast=True) * _GOLDEN)


@triton.jit
def _gumbel(stream, ids):
    """Gumbel noise of token ids. Fast logarithms have an absolute error, which would spoil -log(1 - u) for the small u
    that win; there it is the series of 2 atanh(u / (2 - u))."""
    bits = (_splitmix(stream + (ids + 1).to(tl.uint64) * _GOLDEN) >> 32).to(tl.uint32)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    z = uniform / (2.0 - uniform)
    s = z * z
    series = s * (1.0 / 9 + s * (1.0 / 11 + s * (1.0 / 13 + s * (1.0 / 15))))
    series = 2.0 * z * (1.0 + s * (1.0 / 3 + s * (1.0 / 5 + s * (1.0 / 7 + series))))
    exponential = tl.where(uniform < 0.5, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["count", "ids_stride"])
def _noise_kernel(seeds, positions, token_ids, out, count, ids_stride, ALL_IDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < count
    ids = column.to(tl.int64) if ALL_IDS else tl.load(token_ids + row * ids_stride + column, mask=inside, other=0)
    stream = _stream(tl.load(seeds + row), tl.load(positions + row))
    tl.store(out + row * count + column, _gumbel(stream, ids), mask=inside)


@triton.jit
def _scaled(logits, ids, vocabulary, temperature):
    """Logits over temperature, rounded as PyTorch rounds them; -inf past the end, no negative zero."""
    values = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf"))
    values = tl.div_rn(values, temperature)
    return tl.where(values == 0.0, 0.0, values)


@triton.jit
def _scan_kernel(
    logits,
    temperature,
    seeds,
    positions,
    peaks,
    sums,
    tops,
    picks,
    row_stride,
    vocabulary,
    num_chunks,
    BLOCK: tl.constexpr,
):
    """Per chunk: the largest scaled logit, the sum of exponentials below it, the largest noisy logit and its id (for a
    greedy row the largest logit and its id)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    first = chunk * BLOCK
    ids = first + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    place = row * num_chunks + chunk
    if heat <= 0:
        values = tl.load(logits + row * row_stride + ids, mask=ids < vocabulary, other=float("-inf"))
        peak, at = tl.max(values, 0, return_indices=True)
        tl.store(peaks + place, peak)
        tl.store(picks + place, first + at)
    else:
        values = _scaled(logits + row * row_stride, ids, vocabulary, heat)
        peak = tl.max(values, 0)
        below = tl.where(peak == float("-inf"), 0.0, peak)
        noisy = values + _gumbel(_stream(tl.load(seeds + row), tl.load(positions + row)), ids)
        top, at = tl.max(noisy, 0, return_indices=True)
        tl.store(peaks + place, peak)
        tl.store(sums + place, tl.sum(tl.exp(values - below), 0))
        tl.store(tops + place, top)
        tl.store(picks + place, first + at)


@triton.jit
def _ordered(values):
    """uint32 in the order of the floats."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _unordered(key):
    bits = tl.where((key >> 31) == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _next_chunk(wanted, lanes, after, LANES: tl.constexpr):
    """The first chunk after ``after`` that is wanted; LANES if there is none."""
    return tl.min(tl.where(wanted & (lanes > after), lanes, LANES), 0)


@triton.jit
def _mass_of_largest(logits, vocabulary, heat, k, peak, largest, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The sum of exp(scaled logit - largest) of the k largest: the k-th is found digit by digit, from the top."""
    lanes = tl.arange(0, LANES)
    digits = tl.arange(0, 256)
    peak_keys = _ordered(peak)
    found = tl.full([], 0, tl.uint32)  # the upper digits of the k-th largest, zeros below
    want = k  # which of those that share them, counted from the largest
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros([256], tl.int32)
        wanted = (peak_keys >= found) & (peak > float("-inf"))
        chunk = _next_chunk(wanted, lanes, -1, LANES)
        while chunk < LANES:
            keys = _ordered(_scaled(logits, chunk * BLOCK + tl.arange(0, BLOCK), vocabulary, heat))
            same = keys >= 0
            if shift < 24:
                same = (keys >> (shift + 8)) == (found >> (shift + 8))
            counts += tl.histogram(tl.where(same, (keys >> shift) & 0xFF, 0).to(tl.int32), 256)
            counts -= tl.where(digits == 0, BLOCK - tl.sum(same.to(tl.int32), 0), 0)
            chunk = _next_chunk(wanted, lanes, chunk, LANES)
        at_least = tl.cumsum(counts, 0, reverse=True)
        digit = tl.max(tl.where(at_least >= want, digits, 0), 0)
        want -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        found |= digit.to(tl.uint32) << shift
    smallest = _unordered(found)
    mass = want.to(tl.float32) * tl.exp(smallest - largest)
    wanted = peak > smallest
    chunk = _next_chunk(wanted, lanes, -1, LANES)
    while chunk < LANES:
        values = _scaled(logits, chunk * BLOCK + tl.arange(0, BLOCK), vocabulary, heat)
        mass += tl.sum(tl.where(values > smallest, tl.exp(values - largest), 0.0), 0)
        chunk = _next_chunk(wanted, lanes, chunk, LANES)
    return mass


@triton.jit
def _narrow(
    logits,
    vocabulary,
    heat,
    stream,
    token,
    limit,
    top_p,
    min_p,
    total,
    peak,
    largest,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """From the candidate ``token`` to the one that the filters keep; ``total`` is the mass that top_p refers to."""
    lanes = tl.arange(0, LANES)
    searching = 1
    while searching == 1:
        value = _scaled(logits, token, vocabulary, heat)
        count = 0
        mass = 0.0
        top = float("-inf")
        above_it = token
        wanted = (peak >= value) & (peak > float("-inf"))
        chunk = _next_chunk(wanted, lanes, -1, LANES)
        while chunk < LANES:
            ids = chunk * BLOCK + tl.arange(0, BLOCK)
            values = _scaled(logits, ids, vocabulary, heat)
            above = (values > value) | ((values == value) & (ids < token))
            number = tl.sum(above.to(tl.int32), 0)
            if number > 0:
                count += number
                mass += tl.sum(tl.where(above, tl.exp(values - largest), 0.0), 0)
                noisy = tl.where(above, values + _gumbel(stream, ids), float("-inf"))
                best, at = tl.max(noisy, 0, return_indices=True)
                if best > top:
                    top = best
                    above_it = chunk * BLOCK + at
            chunk = _next_chunk(wanted, lanes, chunk, LANES)
        kept = (count < limit) & ((mass < top_p * total) | (top_p >= 1.0)) & (tl.exp(value - largest) >= min_p)
        if kept | (count == 0):
            searching = 0
        else:
            token = above_it
    return token


@triton.jit
def _choose_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    peaks,
    sums,
    tops,
    picks,
    tokens,
    row_stride,
    vocabulary,
    num_chunks,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Per row: the best of the chunks' picks, narrowed by the filters if there are any."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    held = lanes < num_chunks
    place = row * num_chunks + lanes
    heat = tl.load(temperature + row)
    peak = tl.load(peaks + place, mask=held, other=float("-inf"))
    largest, at = tl.max(peak, 0, return_indices=True)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    if heat <= 0:
        token = tl.load(picks + row * num_chunks + at)
    else:
        _, at = tl.max(tl.load(tops + place, mask=held, other=float("-inf")), 0, return_indices=True)
        token = tl.load(picks + row * num_chunks + at)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        floor = tl.load(min_p + row)
        if (k > 0) | (p < 1.0) | (floor > 0.0):
            limit = tl.where((k > 0) & (k < vocabulary), k, vocabulary).to(tl.int32)
            if (p < 1.0) & (limit < vocabulary):
                total = _mass_of_largest(
                    logits + row * row_stride, vocabulary, heat, limit, peak, largest, BLOCK, LANES
                )
            else:
                share = tl.load(sums + place, mask=held, other=0.0)
                total = tl.sum(share * tl.exp(peak - largest), 0)
            stream = _stream(tl.load(seeds + row), tl.load(positions + row))
            token = _narrow(
                logits + row * row_stride,
                vocabulary,
                heat,
                stream,
                token,
                limit,
                p,
                floor,
                total,
                peak,
                largest,
                BLOCK,
                LANES,
            )
    tl.store(tokens + row, token.to(tl.int64))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | int) -> torch.Tensor:
    """See ``carousel_kernels.gumbel_noise``."""
    everything = isinstance(token_ids, int)
    rows = seeds.shape[0]
    if isinstance(token_ids, int):
        count, ids, stride = token_ids, seeds, 0
    else:
        count, ids = token_ids.shape[1], token_ids if token_ids.stride(1) == 1 else token_ids.contiguous()
        stride = ids.stride(0) if ids.shape[0] > 1 else 0
    out = torch.empty((rows, count), dtype=torch.float32, device=seeds.device)
    if out.numel():
        grid = (rows, triton.cdiv(count, _NOISE_BLOCK))
        _noise_kernel[grid](
            seeds.contiguous(), positions.contiguous(), ids, out, count, stride, everything, _NOISE_BLOCK
        )
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See ``carousel_kernels.sample``. Two launches, whatever the filters; nothing waits for the device."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block, chunks = chunks_of(vocabulary)
    # Each a tensor of its own, which begins at a multiple of 16: others would have the kernels compiled once more.
    peaks, sums, tops = (torch.empty((rows, chunks), dtype=torch.float32, device=logits.device) for _ in range(3))
    picks = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    filters = [t.contiguous() for t in (temperature, top_k, top_p, min_p, seeds, positions)]
    heat, k, p, floor, seed, position = filters
    stride = logits.stride(0)
    _scan_kernel[(rows, chunks)](
        logits, heat, seed, position, peaks, sums, tops, picks, stride, vocabulary, chunks, block, num_warps=4
    )
    _choose_kernel[(rows,)](
        logits, heat, k, p, floor, seed, position, peaks, sums, tops, picks, tokens,
        stride, vocabulary, chunks, block, next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip
    return tokens


def aot_specs(target: Target) -> Iterator[Spec]:
    """The three kernels, for vocabularies up to 2^15, 2^17 and 2^18."""
    filters = {"temperature": "*fp32", "top_k": "*i64", "top_p": "*fp32", "min_p": "*fp32"}
    draws = {"seeds": "*i64", "positions": "*i64"}
    chunks = {"peaks": "*fp32", "sums": "*fp32", "tops": "*fp32", "picks": "*i32"}
    sizes = {"row_stride": "i32", "vocabulary": "i32", "num_chunks": "i32"}
    noise = {**draws, "token_ids": "*i64", "out": "*fp32", "count": "i32", "ids_stride": "i32"}
    yield Spec(_noise_kernel, "ids", noise, {"ALL_IDS": False, "BLOCK": _NOISE_BLOCK}, num_warps=4)
    scan = {"logits": "*fp32", "temperature": "*fp32", **draws, **chunks, **sizes}
    yield Spec(_scan_kernel, f"chunk {CHUNK}", scan, {"BLOCK": CHUNK}, num_warps=4)
    for lanes in (16, 64, 128):
        choose = {"logits": "*fp32", **filters, **draws, **chunks, "tokens": "*i64", **sizes}
        yield Spec(_choose_kernel, f"lanes {lanes}", choose, {"BLOCK": CHUNK, "LANES": lanes}, num_warps=8)

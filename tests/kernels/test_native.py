"""The compiled operators against the reference, with each width of vectors that this CPU has, on one thread and two."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import Batch, make_batch

import carousel_kernels as ck
from carousel_kernels import BatchLayout
from carousel_kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled operators")
BITS = pytest.mark.parametrize("bits", [128, 256, 512])
ONE_OR_TWO = st.sampled_from([1, 2])
SEQUENCES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 400), st.just(1)),
        st.tuples(st.integers(0, 150), st.integers(2, 120)),
        st.tuples(st.sampled_from([14, 15, 16, 47, 48, 63, 64, 65]), st.sampled_from([1, 2, 16, 17, 64])),
    ),
    min_size=1,
    max_size=7,
)
"""(Tokens computed before, new tokens) of each."""
HEADS = st.sampled_from([(1, 1), (9, 3), (2, 2), (5, 1), (8, 4), (14, 2), (32, 1)])
WINDOWS = st.none() | st.integers(1, 200)
SOFTCAPS = st.none() | st.sampled_from([1.5, 50.0])


@contextmanager
def compiled(bits: int, threads: int, dots: bool = False) -> Iterator[None]:
    if native.vector_bits() < bits:
        pytest.skip(f"no vectors of {bits} bits")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with native.limited(bits, dots), torch.inference_mode():
            assert native.vector_bits() == bits
            yield
    finally:
        torch.set_num_threads(before)


def attend(batch: Batch, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    out = native.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.layout, scale, window, softcap)
    assert out is not None
    return out


def reference(batch: Batch, **options: float | None) -> torch.Tensor:
    with ck.use_backend("reference"):
        return ck.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.layout, **options)


@BITS
@settings(max_examples=80, deadline=None)
@given(
    sequences=SEQUENCES,
    heads=HEADS,
    dim=st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 256]),
    window=WINDOWS,
    softcap=SOFTCAPS,
    threads=ONE_OR_TWO,
    seed=st.integers(0, 1000),
)
def test_attention(
    bits: int,
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    window: int | None,
    softcap: float | None,
    threads: int,
    seed: int,
) -> None:
    batch = make_batch(sequences, num_heads=heads[0], num_kv_heads=heads[1], dim=dim, seed=seed)
    expected = reference(batch, scale=dim**-0.5, sliding_window=window, softcap=softcap)
    with compiled(bits, threads):
        got = attend(batch, dim**-0.5, window, softcap)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@BITS
@pytest.mark.parametrize("context", [2000, 4097])
@pytest.mark.parametrize("window", [None, 1000])
def test_one_long_sequence_is_split_over_threads(bits: int, context: int, window: int | None) -> None:
    batch = make_batch([(context - 1, 1), (63, 1), (3, 1)], num_heads=9, num_kv_heads=3, dim=64)
    expected = reference(batch, scale=0.125, sliding_window=window, softcap=None)
    with compiled(bits, 2):
        got = attend(batch, 0.125, window, None)
        again = attend(batch, 0.125, window, None)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(got, again)  # which thread takes which part makes no difference


@BITS
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_scores_of_any_size(bits: int, size: float) -> None:
    """Large scores make a hard maximum, and partial maxima that differ by more than an exponential can hold."""
    batch = make_batch([(700, 1), (0, 200)], num_heads=4, num_kv_heads=2, dim=32)
    batch.q = batch.q * size
    batch.layout.plan = None
    expected = reference(batch, scale=1.0, sliding_window=None, softcap=None)
    with compiled(bits, 2):
        got = attend(batch, 1.0, None, None)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * max(1.0, size / 10))


@BITS
def test_no_sequence_sees_the_trouble_of_another(bits: int) -> None:
    batch = make_batch([(200, 1), (90, 1), (0, 40), (20, 33)], num_heads=4, num_kv_heads=2, dim=32)
    expected = reference(batch, scale=0.2, sliding_window=None, softcap=None)
    batch.k_cache[batch.layout.block_tables[1, 2]] = float("nan")
    with compiled(bits, 2):
        got = attend(batch, 0.2, None, None)
    assert got[1].isnan().all()
    others = [row for row in range(len(got)) if row != 1]
    torch.testing.assert_close(got[others], expected[others], rtol=2e-5, atol=2e-5)


def test_what_does_not_fit_is_declined() -> None:
    def attention(**options: object) -> torch.Tensor | None:
        batch = make_batch([(20, 1)], **options)
        return native.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.layout, 1.0, None, None)

    assert attention(dim=16) is not None
    assert attention(dim=24) is None
    assert attention(dim=272) is None
    assert attention(num_heads=33, num_kv_heads=1) is None
    assert attention(dtype=torch.bfloat16) is None
    assert attention(cache_dtype=torch.bfloat16) is not None
    assert attention(cache_dtype=torch.float16) is None
    x = torch.ones(4, 32)
    assert native.silu_mul(x.bfloat16()) is None
    assert native.silu_mul(x[:, ::2]) is None
    assert native.rms_norm(x, torch.ones(32).bfloat16(), 1e-5) is None
    assert native.add_rms_norm(x, x.bfloat16(), torch.ones(32), 1e-5) is None
    q, cache = torch.ones(2, 3, 4, 16), torch.ones(2, 1, 16, 4, 16)
    slots, cos_sin = torch.arange(3), torch.ones(9, 16)
    assert native.rope_write_kv(q[0], q[1], q[1], cos_sin, slots, *cache, slots)
    assert native.rope_write_kv(q[0], q[1], q[1], cos_sin, slots, *cache.bfloat16(), slots)
    assert not native.rope_write_kv(q[0], q[1], q[1], cos_sin, slots, *cache.half(), slots)
    assert not native.rope_write_kv(q[0], q[1], q[1], cos_sin, slots, cache[0], cache[1].bfloat16(), slots)
    assert not native.rope_write_kv(q[0].mT.contiguous().mT, q[1], q[1], cos_sin, slots, *cache, slots)


@BITS
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), width=st.sampled_from([1, 7, 16, 64, 100, 576]), threads=ONE_OR_TWO)
def test_rows(bits: int, rows: int, width: int, threads: int) -> None:
    torch.manual_seed(rows)
    x, residual, weight = torch.randn(rows, width) * 3, torch.randn(rows, width), torch.randn(width)
    doubled = torch.randn(rows, 2 * width) * 4
    heads = torch.randn(rows, 5 * width)[:, width : 4 * width].view(rows, 3, width)
    expected_sum = x + residual
    with ck.use_backend("reference"):
        norms = [ck.rms_norm(t, weight, 1e-3) for t in (x, heads, expected_sum)]
        gates = [ck.silu_mul(doubled), ck.gelu_tanh_mul(doubled)]
    with compiled(bits, threads):
        pair = native.add_rms_norm(x, residual, weight, 1e-3)
        assert pair is not None
        got = [native.rms_norm(x, weight, 1e-3), native.rms_norm(heads, weight, 1e-3), pair[0]]
        got_gates = [native.silu_mul(doubled), native.gelu_tanh_mul(doubled)]
    assert torch.equal(pair[1], expected_sum)
    for a, b in zip(got + got_gates, norms + gates, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5)


@BITS
def test_gates_far_from_zero(bits: int) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -40.0, 0.0, 40.0, 88.0, 1e15, math.inf, math.nan])
    x = torch.cat([gate, torch.ones(10)]).unsqueeze(0)
    with ck.use_backend("reference"):
        expected = ck.silu_mul(x), ck.gelu_tanh_mul(x)
    with compiled(bits, 1):
        for a, b in zip((native.silu_mul(x), native.gelu_tanh_mul(x)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_fewer_threads_than_asked_for_do_not_wait_for_more() -> None:
    code = (
        "import torch\nfrom carousel_kernels.cpu.native_layer import float_layer\n"
        "torch.set_num_threads(2)\nassert torch.get_num_threads() == 2\n"
        "torch.manual_seed(0)\nw, x = torch.randn(512, 256), torch.randn(70, 256)\n"
        "print(torch.allclose(float_layer(w, None)(x), x @ w.t(), atol=1e-3))"
    )
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "True\n"


def test_another_environment_does_without() -> None:
    code = (
        "import torch, carousel_kernels as ck\nfrom carousel_kernels.cpu import native\n"
        "print(native.available(), native.vector_bits(), ck.silu_mul(torch.tensor([[0.0, 2.0]])).tolist())"
    )
    environment = os.environ | {native.NATIVE_VARIABLE: "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False 0 [[0.0]]\n"


@BITS
@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 60), rotary=st.sampled_from([16, 32]), threads=ONE_OR_TWO)
def test_rope_writes_to_a_cache_of_bfloat16(bits: int, tokens: int, rotary: int, threads: int) -> None:
    torch.manual_seed(tokens)
    angles = torch.rand(90, rotary // 2) * 6
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], dim=-1), torch.randint(0, 90, (tokens,))
    q, k, v = torch.randn(tokens, 4, 32), torch.randn(tokens, 2, 32), torch.randn(tokens, 2, 32)
    slots = torch.randperm(80)[:tokens]
    caches, expected = (torch.full((2, 5, 16, 2, 32), 7.0, dtype=torch.bfloat16) for _ in range(2))
    turned = q.clone()
    with ck.use_backend("reference"):
        ck.rope_write_kv(turned, k.clone(), v, cos_sin, positions, *expected, slots)
    with compiled(bits, threads):
        assert native.rope_write_kv(q, k, v, cos_sin, positions, *caches, slots)
    torch.testing.assert_close(q, turned, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(caches, expected, rtol=0.01, atol=0.001)  # a sum that rounds to the other neighbour
    assert torch.equal(caches[1], expected[1])


@pytest.mark.skipif(not native.dots(), reason="no dot products of bfloat16")
@settings(max_examples=80, deadline=None)
@given(
    sequences=SEQUENCES,
    heads=HEADS,
    dim=st.sampled_from([32, 64, 96, 128, 256, 48]),
    window=WINDOWS,
    softcap=SOFTCAPS,
    threads=ONE_OR_TWO,
    seed=st.integers(0, 1000),
)
def test_attention_by_dot_products_of_bfloat16(
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    window: int | None,
    softcap: float | None,
    threads: int,
    seed: int,
) -> None:
    """Weights are rounded to 8 bits, so each output is off by 2 ** -9 of what it averages at most."""
    batch = make_batch(
        sequences, num_heads=heads[0], num_kv_heads=heads[1], dim=dim, seed=seed, cache_dtype=torch.bfloat16
    )
    scale = dim**-0.5
    batch.q = (batch.q * scale * math.log2(math.e)).bfloat16().float() / (scale * math.log2(math.e))
    expected = reference(batch, scale=scale, sliding_window=window, softcap=softcap)
    with compiled(512, threads, dots=True):
        assert native.dots()
        got = attend(batch, scale, window, softcap)
    limit = 0.006 if softcap is None else 0.02  # queries are rounded after another factor then
    assert (got - expected).abs().max() <= limit * max(1.0, float(batch.v_cache.float().abs().nan_to_num(0).max()))


def sharing(batch: Batch, groups: list[tuple[int, int]]) -> Batch:
    """Of the batch's decodes, group after group: so many that begin with the same blocks, and how many blocks."""
    tables, contexts, first = batch.layout.block_tables, batch.layout.context_lens_host, 0
    for count, blocks in groups:
        for s in range(first + 1, min(first + count, batch.layout.num_decodes)):
            same = min(blocks, (contexts[s] - 1) // 16, (contexts[first] - 1) // 16)
            tables[s, :same] = tables[first, :same]
        first += count
    return batch


KINDS_OF_VECTORS = [(128, False), (256, False), (512, False), (512, True)]


@pytest.mark.parametrize(("bits", "dots"), KINDS_OF_VECTORS)
@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.integers(100, 700), min_size=4, max_size=45),
    groups=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    prompt=st.booleans(),
    heads=st.sampled_from([(9, 3), (4, 4), (8, 1)]),
    window=st.sampled_from([None, None, 200]),
    softcap=st.none() | st.just(30.0),
    half=st.booleans(),
    threads=ONE_OR_TWO,
    seed=st.integers(0, 1000),
)
def test_decodes_that_share_a_prefix(
    bits: int,
    dots: bool,
    contexts: list[int],
    groups: list[tuple[int, int]],
    prompt: bool,
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    half: bool,
    threads: int,
    seed: int,
) -> None:
    if dots and not native.dots():
        pytest.skip("no dot products of bfloat16")
    dtype = torch.bfloat16 if half else torch.float32
    sequences = [(context, 1) for context in contexts] + [(30, 20)] * prompt
    batch = make_batch(sequences, num_heads=heads[0], num_kv_heads=heads[1], dim=32, seed=seed, cache_dtype=dtype)
    sharing(batch, groups)
    expected = reference(batch, scale=0.2, sliding_window=window, softcap=softcap)
    with compiled(bits, threads, dots):
        got = attend(batch, 0.2, window, softcap)
        again = attend(batch, 0.2, window, softcap)
    if dots and half:
        assert (got - expected).abs().max() <= 0.02 * max(1.0, float(batch.v_cache.float().nan_to_num(0).abs().max()))
    else:
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(got, again)


@pytest.mark.skipif(not native.dots(), reason="no dot products of bfloat16")
def test_what_lies_beyond_a_sequence_is_not_read_as_a_number() -> None:
    """Past the last key of a block may be anything, and a pair of values must not bring it in."""
    batch = make_batch([(32, 1), (0, 21), (70, 3)], num_heads=4, num_kv_heads=2, dim=32, cache_dtype=torch.bfloat16)
    with compiled(512, 2, dots=True):
        expected = attend(batch, 0.2, None, None)
    for s, context in enumerate(batch.layout.context_lens_host):
        for position in range(context, -(-context // 16) * 16):
            block = batch.layout.block_tables[s, position // 16]
            batch.v_cache[block, position % 16] = float("nan")
            batch.k_cache[block, position % 16] = float("nan")
    with compiled(512, 2, dots=True):
        assert torch.equal(attend(batch, 0.2, None, None), expected)


@pytest.mark.skipif(not native.dots(), reason="no dot products of bfloat16")
def test_dot_products_do_not_depend_on_the_batch() -> None:
    batch = make_batch([(200, 1), (90, 1), (0, 40)], num_heads=9, num_kv_heads=3, dim=64, cache_dtype=torch.bfloat16)
    alone = make_batch([(200, 1)], num_heads=9, num_kv_heads=3, dim=64, cache_dtype=torch.bfloat16)
    alone.q[0] = batch.q[0]
    for position in range(0, 201, 16):
        there, here = batch.layout.block_tables[0, position // 16], alone.layout.block_tables[0, position // 16]
        alone.k_cache[here], alone.v_cache[here] = batch.k_cache[there], batch.v_cache[there]
    with compiled(512, 1, dots=True):
        assert torch.equal(attend(alone, 0.125, None, None)[0], attend(batch, 0.125, None, None)[0])


@pytest.mark.skipif(not native.dots(), reason="no dot products of bfloat16")
@pytest.mark.parametrize("size", [0.5, 3.0, 20.0])
def test_parts_of_a_sum_are_rounded_as_the_whole(size: float) -> None:
    """Weights are rounded to bfloat16 relative to a power of two, so that what they are relative to, which depends on
    the parts that a sequence is cut into, does not show."""
    batch = make_batch([(999, 1)] * 6, num_heads=9, num_kv_heads=3, dim=64, cache_dtype=torch.bfloat16)
    sharing(batch, [(6, 60)])
    batch.q *= size
    with compiled(512, 2, dots=True):
        together = attend(batch, 0.125, None, None)
    for s in range(6):
        alone = BatchLayout(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=batch.layout.context_lens[s : s + 1],
            block_tables=batch.layout.block_tables[s : s + 1],
            slots=batch.layout.slots[s : s + 1],
            query_lens_host=[1],
            context_lens_host=[1000],
            num_decodes=1,
        )
        with compiled(512, 1, dots=True):
            out = native.paged_attention(batch.q[s : s + 1], batch.k_cache, batch.v_cache, alone, 0.125, None, None)
        assert out is not None
        torch.testing.assert_close(out[0], together[s], rtol=0, atol=5e-5)


@BITS
@given(rows=st.integers(1, 5), width=st.integers(1, 3000), seed=st.integers(0, 100), threads=ONE_OR_TWO)
@settings(max_examples=30, deadline=None)
def test_the_largest(bits: int, rows: int, width: int, seed: int, threads: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, width)
    logits[0, seed % width] = float("nan")
    with compiled(bits, threads):
        tokens = native.largest(logits)
    assert tokens is not None
    assert tokens.tolist() == [-1, *logits[1:].argmax(dim=1).tolist()]

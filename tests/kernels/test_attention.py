"""Reference attention against dense attention of torch; the CPU backend against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import CPU_BACKENDS, Batch, make_batch

import carousel_kernels as ck
from carousel_kernels.cpu import native

CPU = pytest.mark.parametrize("backend", ["cpu", "cpu-torch"])

MIXED = [(40, 1), (0, 1), (15, 1), (0, 37), (16, 16), (3, 70), (100, 1), (31, 2)]


def run(batch: Batch, backend: str, **options: object) -> torch.Tensor:
    with torch.inference_mode(), ck.use_backend(backend):
        return ck.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.layout, **options)


def fresh(batch: Batch) -> Batch:
    """The same batch without what a backend has cached on its layout."""
    batch.layout.plan = None
    return batch


def dense(batch: Batch, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    """Attention without pages: torch's own on the dense keys, or its definition where torch has no soft-cap."""
    outputs = []
    layout = batch.layout
    queries = batch.q.float().split(layout.query_lens_host)
    for q, k, v, new, context in zip(
        queries, batch.keys, batch.values, layout.query_lens_host, layout.context_lens_host, strict=True
    ):
        distance = torch.arange(context - new, context).unsqueeze(1) - torch.arange(context)
        seen = (distance >= 0) & (distance < (context if window is None else window))
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        if softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        else:
            group = q.shape[1] // k.shape[1]
            scores = softcap * torch.tanh(q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale / softcap)
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("backend", ck.available_backends())
@pytest.mark.parametrize("v_scale", [1.0, 0.5])
def test_the_result_goes_where_it_is_wanted(backend: str, v_scale: float) -> None:
    batch = make_batch(MIXED)
    expected = run(batch, backend, scale=0.3, v_scale=v_scale)
    whole = torch.full((len(batch.q) + 1, *batch.q.shape[1:]), 7.0, dtype=batch.q.dtype)
    run(fresh(batch), backend, scale=0.3, v_scale=v_scale, out=whole[: len(batch.q)])
    assert torch.equal(whole[:-1], expected)
    assert bool((whole[-1] == 7.0).all())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 16, 33])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_equals_dense_attention(backend: str, window: int | None, softcap: float | None) -> None:
    batch = make_batch(MIXED)
    got = run(batch, backend, scale=0.3, sliding_window=window, softcap=softcap)
    torch.testing.assert_close(got, dense(batch, 0.3, window, softcap), rtol=1e-4, atol=1e-5)


@CPU
@pytest.mark.parametrize("computed", [0, 1, 14, 15, 16, 17, 31, 32])
@pytest.mark.parametrize("new", [1, 2, 15, 16, 17])
def test_page_borders(backend: str, computed: int, new: int) -> None:
    batch = make_batch([(computed, new)])
    torch.testing.assert_close(run(batch, backend, scale=0.25), dense(batch, 0.25, None, None), rtol=1e-4, atol=1e-5)


sequences = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 200), st.just(1)),
        st.tuples(st.integers(0, 90), st.integers(2, 150)),
    ),
    min_size=1,
    max_size=9,
)


@CPU
@settings(max_examples=120, deadline=None)
@given(
    sequences=sequences,
    heads=st.sampled_from([(1, 1), (9, 3), (2, 2), (5, 1), (8, 4)]),
    dim=st.sampled_from([8, 16, 24, 64, 80]),
    window=st.none() | st.integers(1, 120),
    softcap=st.none() | st.sampled_from([1.5, 30.0]),
    dtypes=st.sampled_from(
        [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
    ),
    seed=st.integers(0, 1000),
)
def test_cpu_equals_reference(
    backend: str,
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    window: int | None,
    softcap: float | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    """Queries and cache of one type, or queries in float32 over a cache in bfloat16. Dot products of bfloat16, which
    round more, have their test in test_native."""
    dtype, cached = dtypes
    batch = make_batch(
        sequences, num_heads=heads[0], num_kv_heads=heads[1], dim=dim, dtype=dtype, cache_dtype=cached, seed=seed
    )
    options = {"scale": dim**-0.5, "sliding_window": window, "softcap": softcap}
    with native.limited(0):
        got, expected = run(batch, backend, **options), run(batch, "reference", **options)
    assert got.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2  # the rounding of the result
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@CPU
def test_a_layout_serves_many_layers(backend: str) -> None:
    """Layers share the layout but neither queries nor cache, and may alternate in window: nothing may leak over."""
    first, second = make_batch(MIXED, seed=1), make_batch(MIXED, seed=1)
    torch.manual_seed(7)
    for tensor in (second.q, second.k_cache, second.v_cache):
        tensor.mul_(torch.randn(()) * 3)
    second.layout = first.layout
    sizes = []
    for window in (None, 20, None):
        for batch in (first, second):
            got = run(batch, backend, scale=0.25, sliding_window=window)
            expected = run(batch, "reference", scale=0.25, sliding_window=window)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        sizes.append(len(first.layout.plan))
    assert sizes[2] == sizes[1] <= sizes[0] + 1  # a plan per window at most, not one per call


@CPU
def test_a_failed_layer_does_not_poison_the_next(backend: str) -> None:
    """Scores are computed in a buffer that later layers reuse; a NaN in one layer must not survive there."""
    batch = make_batch([(40, 1), (7, 1)])
    q = batch.q
    for softcap in (None, 3.0):
        batch.q = torch.full_like(q, float("nan"))
        assert run(batch, backend, scale=0.25, softcap=softcap).isnan().all()
        batch.q = q
        got = run(batch, backend, scale=0.25, softcap=softcap)
        torch.testing.assert_close(got, dense(batch, 0.25, None, softcap), rtol=1e-4, atol=1e-5)


@CPU
def test_queries_of_another_type_than_the_cache(backend: str) -> None:
    batch = make_batch(MIXED)
    expected = dense(batch, 0.25, None, None)
    batch.q = batch.q.bfloat16()
    got = run(batch, backend, scale=0.25)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.03, atol=0.03)


@CPU
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sequences_keep_their_places(backend: str, threads: int) -> None:
    """Decodes are reordered by length and dealt to threads: each sequence's output must be what it is alone."""
    contexts = [5, 130, 17, 64, 3, 99, 200, 16, 31, 77]
    batch = make_batch([(c - 1, 1) for c in contexts])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = run(fresh(batch), backend, scale=0.25)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, dense(batch, 0.25, None, None), rtol=1e-4, atol=1e-5)

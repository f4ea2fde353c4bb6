"""Triton's attention kernels against the reference, in the interpreter or on a GPU (see tests/conftest.py).

Tolerances: sums are in float32, in another order than the reference's: 2e-5 for float32. With 16-bit queries the
result is rounded, and on a GPU the weights before the second product too: 1 %.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import Batch, make_batch
from tests.kernels.devices import products_by_row

import carousel_kernels as ck
from carousel_kernels import BLOCK_SIZE, BatchLayout
from carousel_kernels.triton import config
from carousel_kernels.triton.attention_decode import plan_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FP8),
    (torch.float32, torch.bfloat16),
]


def attend(batch: Batch, **options: object) -> torch.Tensor:
    layout = dataclasses.replace(
        batch.layout, plan=None, query_start=batch.layout.query_start.to(DEVICE),
        context_lens=batch.layout.context_lens.to(DEVICE), block_tables=batch.layout.block_tables.to(DEVICE),
    )  # fmt: skip
    options = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    caches = batch.k_cache.to(DEVICE), batch.v_cache.to(DEVICE)
    with torch.inference_mode(), ck.use_backend("triton"):
        return ck.paged_attention(batch.q.to(DEVICE), *caches, layout, **options).cpu()


def reference(batch: Batch, **options: object) -> torch.Tensor:
    with torch.inference_mode(), ck.use_backend("reference"):
        return ck.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.layout, **options)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    tolerance = 2e-5 if got.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@st.composite
def problems(draw: st.DrawFn, sequences: st.SearchStrategy[list[tuple[int, int]]]) -> tuple[Batch, dict[str, object]]:
    """A batch and the options of the call."""
    heads, kv_heads = draw(st.sampled_from([(1, 1), (9, 3), (5, 1), (8, 4), (2, 2), (20, 1), (35, 1)]))
    dtype, cache_dtype = draw(st.sampled_from(TYPES))
    batch = make_batch(
        draw(sequences), num_heads=heads, num_kv_heads=kv_heads, dim=draw(st.sampled_from([8, 16, 24, 64, 80, 96])),
        dtype=dtype, cache_dtype=cache_dtype, seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    batch.layout.deterministic = draw(st.booleans())
    options: dict[str, object] = {
        "scale": draw(st.sampled_from([0.05, 0.2])),
        "sliding_window": draw(st.none() | st.integers(1, 150)),
        "softcap": draw(st.none() | st.sampled_from([1.5, 30.0])),
        "sinks": torch.randn(heads).to(dtype) if draw(st.booleans()) else None,
    }
    if cache_dtype == FP8:
        options |= {"k_scale": 0.5, "v_scale": 1.75}
    return batch, options


DECODES = st.lists(st.tuples(st.integers(0, 260), st.just(1)), min_size=1, max_size=4)
MIXED = st.lists(
    st.tuples(st.integers(0, 100), st.just(1)) | st.tuples(st.integers(0, 70), st.integers(2, 80)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=20, deadline=None)
@given(problem=problems(DECODES))
def test_decodes(problem: tuple[Batch, dict[str, object]]) -> None:
    batch, options = problem
    assert_close(attend(batch, **options), reference(batch, **options))


@settings(max_examples=20, deadline=None)
@given(problem=problems(MIXED))
def test_mixed_batches(problem: tuple[Batch, dict[str, object]]) -> None:
    batch, options = problem
    assert_close(attend(batch, **options), reference(batch, **options))


@pytest.mark.parametrize(("dim", "deterministic", "window"), [(128, False, None), (256, True, None), (64, True, 700)])
def test_thousands_of_tokens_beside_one(dim: int, deterministic: bool, window: int | None) -> None:
    batch = make_batch([(4095, 1), (0, 1), (1030, 1), (900, 20)], num_heads=2, num_kv_heads=1, dim=dim)
    batch.layout.deterministic = deterministic
    options = {"scale": 0.08, "sliding_window": window}
    assert_close(attend(batch, **options), reference(batch, **options))


@pytest.mark.parametrize("new", [1, 2, 17])
def test_page_borders(new: int) -> None:
    batch = make_batch([(computed, new) for computed in (0, 1, 14, 15, 16, 17, 31, 47, 63, 64, 127, 128)])
    assert_close(attend(batch, scale=0.25), reference(batch, scale=0.25))


def test_fp8_without_the_device_s_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices that know no e4m3: bytes are unpacked in the kernel, to the same result."""
    batch = make_batch([(90, 1), (20, 40)], dim=64, dtype=torch.bfloat16, cache_dtype=FP8)
    options = {"scale": 0.1, "softcap": 20.0, "k_scale": 0.5, "v_scale": 3.0}
    converted = attend(batch, **options)
    target = dataclasses.replace(config.target_of(DEVICE), fp8=False)
    monkeypatch.setattr(config, "target_of", lambda device: target)
    assert torch.equal(attend(batch, **options), converted)
    assert_close(converted, reference(batch, **options))


def test_caches_of_other_types_are_refused() -> None:
    batch = make_batch([(3, 1)])
    batch.k_cache = batch.v_cache = batch.k_cache.to(torch.float64)
    with pytest.raises(ValueError, match=r"KV cache: got torch.float64, allowed: float32, bfloat16"):
        attend(batch, scale=1.0)


def test_keys_and_values_may_share_a_tensor() -> None:
    batch = make_batch([(90, 1), (20, 40)])
    both = torch.stack([batch.k_cache, batch.v_cache], dim=1)
    expected = reference(batch, scale=0.25)
    batch.k_cache, batch.v_cache = both[:, 0], both[:, 1]
    assert_close(attend(batch, scale=0.25), expected)


@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_scores_of_any_size(size: float) -> None:
    batch = make_batch([(700, 1), (0, 100)], num_heads=4, num_kv_heads=2, dim=32)
    batch.q = batch.q * size
    got, expected = attend(batch, scale=1.0), reference(batch, scale=1.0)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * max(1.0, size / 10))


def test_no_sequence_sees_the_trouble_of_another() -> None:
    batch = make_batch([(200, 1), (90, 1), (0, 40), (20, 33)], num_heads=4, num_kv_heads=2, dim=32)
    expected = reference(batch, scale=0.2)
    batch.k_cache[batch.layout.block_tables[1, 2]] = float("nan")
    got = attend(batch, scale=0.2)
    assert got[1].isnan().all()
    others = [row for row in range(len(got)) if row != 1]
    assert_close(got[others], expected[others])


# --- CUDA graphs


def test_lengths_are_read_on_the_device_alone() -> None:
    """A graph is recorded with some lengths and replayed with others: what the host knew then must not matter."""
    batch = make_batch([(200, 1), (9, 1), (700, 1), (0, 33), (70, 2)])
    expected = reference(batch, scale=0.25)
    layout = batch.layout
    wrong = [3] * layout.num_sequences
    batch.layout = dataclasses.replace(layout, query_lens_host=wrong, context_lens_host=wrong, plan=None)
    assert_close(attend(batch, scale=0.25), expected)
    batch.layout = dataclasses.replace(batch.layout, deterministic=True)
    assert_close(attend(batch, scale=0.25), expected)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.zeros(6)])
def test_padding_of_a_bucket_is_zeros(deterministic: bool, sinks: torch.Tensor | None) -> None:
    batch = make_batch([(40, 1), (150, 1), (3, 1)])
    batch.layout.deterministic = deterministic
    expected = reference(batch, scale=0.25, sinks=sinks)
    batch.layout.context_lens = torch.tensor([41, 0, 4], dtype=torch.int32)
    got = attend(batch, scale=0.25, sinks=sinks)
    assert (got[1] == 0).all()
    assert_close(got[[0, 2]], expected[[0, 2]])


def test_an_empty_batch() -> None:
    layout = BatchLayout(
        torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64), [], [], 0,
    )  # fmt: skip
    cache = torch.zeros(1, BLOCK_SIZE, 2, 16)
    assert attend(Batch(torch.zeros(0, 6, 16), cache, cache, layout, [], []), scale=1.0).shape == (0, 6, 16)


# --- Deterministic mode


def subset(batch: Batch, chosen: list[int]) -> Batch:
    """The batch of some decodes of a batch of decodes, in the given order."""
    layout = batch.layout
    contexts = [layout.context_lens_host[s] for s in chosen]
    widest = -(-max(contexts) // BLOCK_SIZE)
    smaller = BatchLayout(
        query_start=torch.arange(len(chosen) + 1, dtype=torch.int32),
        context_lens=layout.context_lens[chosen],
        block_tables=layout.block_tables[chosen, :widest],
        slots=layout.slots[chosen],
        query_lens_host=[1] * len(chosen),
        context_lens_host=contexts,
        num_decodes=len(chosen),
        deterministic=layout.deterministic,
    )
    return dataclasses.replace(batch, q=batch.q[chosen], layout=smaller)


@pytest.fixture
def splits_of_256(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Splits enough of contexts that the interpreter can take."""
    monkeypatch.setattr(config, "DETERMINISTIC_SPLIT", 256)
    with products_by_row():
        yield


@pytest.mark.usefixtures("splits_of_256")
@pytest.mark.parametrize("window", [None, 300])
def test_deterministic_decodes_do_not_depend_on_the_batch(window: int | None) -> None:
    contexts = [640, 1, 256, 257, 33, 500, 64, 300]
    batch = make_batch([(c - 1, 1) for c in contexts], num_heads=4, num_kv_heads=2, dim=32)
    batch.layout.deterministic = True
    options = {"scale": 0.2, "sliding_window": window, "sinks": torch.randn(4)}
    whole = attend(batch, **options)
    order = list(range(len(contexts)))
    for seed in range(2):
        random.Random(seed).shuffle(order)
        chosen = order[: 3 + 3 * seed]
        assert torch.equal(attend(subset(batch, chosen), **options), whole[chosen])
    for s in (0, 3):
        assert torch.equal(attend(subset(batch, [s]), **options), whole[s : s + 1])


def test_without_it_splits_follow_the_batch() -> None:
    """What the deterministic mode is for: alone a sequence is split more, which changes the order of its sums."""
    batch = make_batch([(600, 1)] * 8, num_heads=4, num_kv_heads=2, dim=32)
    alone = attend(subset(batch, [0]), scale=0.2)
    assert not torch.equal(alone, attend(batch, scale=0.2)[:1])


def chunk(whole: Batch, first: int, last: int) -> Batch:
    """The tokens [first, last) of a batch of one sequence, the ones before them in the cache."""
    layout = dataclasses.replace(
        whole.layout,
        query_start=torch.tensor([0, last - first], dtype=torch.int32),
        context_lens=torch.tensor([last], dtype=torch.int32),
        slots=whole.layout.slots[first:last],
        query_lens_host=[last - first],
        context_lens_host=[last],
        num_decodes=int(last - first == 1),
    )
    return dataclasses.replace(whole, q=whole.q[first:last], layout=layout)


@pytest.mark.usefixtures("splits_of_256")
@pytest.mark.parametrize(("cache_dtype", "options"), [
    (torch.float32, {}),
    (torch.float32, {"sliding_window": 50, "sinks": torch.tensor([0.1, 2.0, -1.0, 0.0])}),
    (torch.float32, {"sliding_window": 290, "softcap": 3.0}),
    (FP8, {"k_scale": 0.5, "v_scale": 3.0}),
])  # fmt: skip
def test_deterministic_chunks_and_decodes_are_alike(cache_dtype: torch.dtype, options: dict[str, object]) -> None:
    """The prompt computed at once, in chunks that begin anywhere, and token by token: the same bits."""
    whole = make_batch([(0, 600)], num_heads=4, num_kv_heads=2, dim=32, cache_dtype=cache_dtype)
    whole.layout.deterministic = True
    options = {"scale": 0.2, **options}
    expected = attend(whole, **options)
    assert_close(expected, reference(whole, **options))
    for first, last in ((0, 70), (69, 131), (255, 257), (599, 600), (130, 131), (256, 257), (255, 256), (0, 1)):
        assert torch.equal(attend(chunk(whole, first, last), **options), expected[first:last])


# --- The work list


def plan(contexts: list[int], capacity: int, max_items: int, *, window: int = 0, tile: int = 16,
         shortest: int = 2) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """Items and offsets, of a block of 8 sequences at a time."""
    items = torch.full((max_items, 4), 77, dtype=torch.int32, device=DEVICE)
    offsets = torch.zeros(len(contexts) + 1, dtype=torch.int32, device=DEVICE)
    plan_kernel[(1,)](
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE), items, offsets, len(contexts), capacity, max_items,
        window, SHORTEST=shortest, BLOCK_N=tile, WINDOW=window > 0, BLOCK_S=8,
    )  # fmt: skip
    return items.tolist(), offsets.tolist()


@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 900), min_size=1, max_size=20),
    spare=st.integers(0, 30),
    window=st.sampled_from([0, 1, 16, 100]),
)
def test_plans_cover_every_token_once(contexts: list[int], spare: int, window: int) -> None:
    capacity = len(contexts) + spare
    items, offsets = plan(contexts, capacity, capacity, window=window)
    used = offsets[-1]
    assert used <= capacity
    assert all(item[0] == -1 for item in items[used:])
    for s, context in enumerate(contexts):
        mine = items[offsets[s] : offsets[s + 1]]
        assert all(item[0] == s for item in mine)
        assert all(item[3] == (len(mine) == 1) for item in mine)
        if context == 0:
            assert mine == []
            continue
        needed = max(context - window, 0) if window else 0
        assert mine[0][1] <= needed
        assert mine[0][2] > needed, "a split that sees nothing"
        assert mine[-1][2] == context
        assert all(a[2] == b[1] for a, b in itertools.pairwise(mine))
        assert all(begin % 16 == 0 and begin < end for _, begin, end, _ in mine)
        lengths = [end - begin for _, begin, end, _ in mine]
        if len(mine) > 1:
            assert max(lengths) >= 2 * 16, "shorter splits than worth their while"


def test_plans_split_no_more_than_fills_the_device() -> None:
    full, _ = plan([800] * 8, 8, 8)
    assert [item[3] for item in full] == [1] * 8, "the batch fills the device: no splits"
    lone, offsets = plan([800], 10, 10)
    assert offsets == [0, 10]
    assert [end - begin for _, begin, end, _ in lone] == [80] * 10
    _, offsets = plan([800, 20, 20, 20], 8, 8)
    assert offsets == [0, 5, 6, 7, 8], "the long one takes all the room that is left"

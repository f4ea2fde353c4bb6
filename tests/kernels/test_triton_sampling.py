"""Triton's sampling in the interpreter: token for token the reference's draws, though nothing is sorted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.devices import on_device

from carousel_kernels import reference
from carousel_kernels.triton import config, sampling


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several chunks, without rows of many logits."""
    monkeypatch.setattr(config, "CHUNK", 64)


def arguments(
    logits: torch.Tensor,
    *,
    temperature: list[float] | float = 1.0,
    top_k: list[int] | int = 0,
    top_p: list[float] | float = 1.0,
    min_p: list[float] | float = 0.0,
    seed: int = 0,
) -> list[torch.Tensor]:
    rows = len(logits)

    def column(value: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype).expand(rows).contiguous()

    g = torch.Generator().manual_seed(seed)
    return [
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        torch.randint(-(2**62), 2**62, (rows,), generator=g),
        torch.randint(0, 5000, (rows,), generator=g),
    ]


def random_logits(rows: int, vocabulary: int, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(1, 200),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    filters=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.6, 1.0, 1.7]),
            st.integers(0, 210),
            st.just(1.0) | st.floats(0.02, 0.99),
            st.just(0.0) | st.floats(0.01, 0.9),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_equals_the_reference(
    seed: int, vocabulary: int, spread: float, filters: list[tuple[float, int, float, float]]
) -> None:
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*filters, strict=True))
    logits = random_logits(len(filters), vocabulary, spread, seed)
    case = arguments(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert torch.equal(on_device(sampling.sample, *case), reference.sample(*case))


@pytest.mark.parametrize("top_k", [1, 5, 63, 65, 129])
def test_top_k_with_top_p_among_equal_logits(top_k: int) -> None:
    """Only some of the tokens that share the k-th logit are kept, and top-p goes by the mass of just those.

    The logits are powers of two apart, so that all sums are exact and no comparison is a matter of rounding."""
    steps = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 3.0]) * 0.6931471805599453
    logits = steps[torch.arange(130) % 7].expand(4, -1)
    case = arguments(logits, top_k=top_k, top_p=0.71, seed=top_k)
    assert torch.equal(on_device(sampling.sample, *case), reference.sample(*case))


def test_large_vocabulary_in_full_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: more chunks than one, the last of them short, and a spread at which top-p keeps thousands."""
    monkeypatch.setattr(config, "CHUNK", 2048)
    logits = random_logits(3, 9001, 1.0, 7)
    case = arguments(logits, top_k=[0, 3000, 50], top_p=[0.9, 0.8, 1.0], min_p=[0.0, 0.0, 0.05])
    assert torch.equal(on_device(sampling.sample, *case), reference.sample(*case))


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    case = arguments(torch.zeros(6, 130), top_k=3)
    assert set(on_device(sampling.sample, *case).tolist()) == {0, 1, 2}
    negative_zeros = torch.zeros(6, 130)
    negative_zeros[:, ::2] = -0.0  # no less than zero
    assert set(on_device(sampling.sample, *arguments(negative_zeros, top_k=3, top_p=0.99)).tolist()) == {0, 1, 2}


def test_greedy_rows_take_the_first_of_the_largest() -> None:
    logits = random_logits(4, 300, 1.0, 3)
    logits[1, [70, 200]] = 9.0
    case = arguments(logits, temperature=0.0, top_k=5, top_p=0.5)
    assert torch.equal(on_device(sampling.sample, *case), logits.argmax(-1))


def test_banned_tokens_are_never_drawn_and_hopeless_rows_end() -> None:
    logits = torch.full((8, 200), float("-inf"))
    logits[:, [7, 130]] = 0.0
    for filters in ({"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 150, "top_p": 0.9}):
        assert set(on_device(sampling.sample, *arguments(logits, **filters)).tolist()) <= {7, 130}
    hopeless = arguments(torch.full((1, 100), float("-inf")), top_k=3, top_p=0.5)
    assert 0 <= int(on_device(sampling.sample, *hopeless)) < 100


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = random_logits(5, 190, 2.0, 5)
    case = arguments(
        logits, temperature=[0.0, 0.7, 1.0, 1.6, 1.0], top_k=[0, 3, 0, 40, 0], top_p=[1.0, 1.0, 0.9, 0.8, 1.0]
    )
    together = on_device(sampling.sample, *case)
    assert torch.equal(
        together, torch.cat([on_device(sampling.sample, *(a[i : i + 1] for a in case)) for i in range(5)])
    )
    wide = torch.zeros(5, 400)
    wide[:, :190] = logits
    assert torch.equal(together, on_device(sampling.sample, wide[:, :190], *case[1:]))
    assert on_device(sampling.sample, *(a[:0] for a in case)).shape == (0,)


def test_noise_equals_the_reference() -> None:
    seeds, positions = torch.tensor([0, -7, 2**63 - 1]), torch.tensor([0, 100, 8191])
    subset = torch.tensor([[3, 199, 0], [17, 3, 4], [100, 101, 102]])
    everything = on_device(sampling.gumbel_noise, seeds, positions, 200)
    torch.testing.assert_close(everything, reference.gumbel_noise(seeds, positions, 200), rtol=2e-6, atol=1e-6)
    assert torch.equal(on_device(sampling.gumbel_noise, seeds, positions, subset), everything.gather(1, subset))
    assert torch.equal(on_device(sampling.gumbel_noise, seeds, positions, subset[:1]), everything[:, [3, 199, 0]])

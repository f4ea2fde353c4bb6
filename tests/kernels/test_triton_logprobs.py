"""Log-probabilities of every backend against the reference; Triton's in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.devices import on_device

from carousel_kernels import cpu, reference
from carousel_kernels.triton import config, logprobs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CHUNK", 64)


def check(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    values, ranks, ids, tops = got
    torch.testing.assert_close(values, expected[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(ranks, expected[1])
    assert torch.equal(ids, expected[2])
    torch.testing.assert_close(tops, expected[3], rtol=1e-5, atol=1e-5, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(0, 3),
    vocabulary=st.integers(1, 200),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    most=st.integers(0, 20),
    integers=st.booleans(),
)
def test_equals_the_reference(seed: int, rows: int, vocabulary: int, spread: float, most: int, integers: bool) -> None:
    """Rounded logits have equals, of which the lower ids come first."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=g) * spread
    if integers:
        logits = logits.round()
    ids = torch.randint(-1, vocabulary, (rows,), generator=g)
    number = min(most, vocabulary)
    check(on_device(logprobs.token_logprobs, logits, ids, number), reference.token_logprobs(logits, ids, number))


@pytest.mark.parametrize(("vocabulary", "most"), [(8192, 5), (8192, 60), (333, 20), (8192, 0)])
def test_the_cpu_equals_the_reference(vocabulary: int, most: int) -> None:
    torch.manual_seed(vocabulary + most)
    logits, ids = torch.randn(4, vocabulary) * 3, torch.randint(-1, vocabulary, (4,))
    check(cpu.token_logprobs(logits, ids, most), reference.token_logprobs(logits, ids, most))


def test_nan_stays_in_its_row() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(3, 200), torch.tensor([5, 6, 7])
    expected = on_device(logprobs.token_logprobs, logits, ids, 3)
    logits[1, 150] = float("nan")
    values, ranks, top_ids, _ = on_device(logprobs.token_logprobs, logits, ids, 3)
    assert values[1].isnan()
    for row in (0, 2):
        assert values[row] == expected[0][row]
        assert ranks[row] == expected[1][row]
        assert torch.equal(top_ids[row], expected[2][row])


def test_masked_tokens_and_views() -> None:
    torch.manual_seed(1)
    wide = torch.randn(2, 500)
    logits = wide[:, 100:300]
    logits[:, ::3] = float("-inf")
    ids = torch.tensor([1, 3])  # the second is masked
    check(on_device(logprobs.token_logprobs, logits, ids, 6), reference.token_logprobs(logits, ids, 6))
    assert torch.equal(
        on_device(logprobs.token_logprobs, wide.T[:90].T, ids, 2)[2], reference.token_logprobs(wide[:, :90], ids, 2)[2]
    )


def test_large_vocabulary_in_full_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CHUNK", 2048)
    torch.manual_seed(2)
    logits, ids = torch.randn(2, 9001) * 4, torch.tensor([9000, 17])
    check(on_device(logprobs.token_logprobs, logits, ids, 20), reference.token_logprobs(logits, ids, 20))

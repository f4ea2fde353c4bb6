"""Sampling: the right set, the right distribution, and draws that depend on nothing but seed, position and logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import carousel_kernels as ck
from carousel_kernels import cpu, reference

# Not Triton's: these tests draw hundreds of thousands of times, its interpreter takes milliseconds for each.
BACKENDS = pytest.mark.parametrize("backend", [name for name in ck.available_backends() if name != "triton"])

# Upper 0.1 % points of the chi-square distribution: seeds are fixed, so a test passes or fails for good.
CHI_SQUARE = {9: 27.88, 19: 43.82}


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = logits.shape[0]
    return ck.sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) if seeds is None else seeds,
        torch.zeros(rows, dtype=torch.int64) if positions is None else positions,
    )


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs.double() * len(tokens)
    return float(((torch.bincount(tokens, minlength=len(probs)) - expected) ** 2 / expected).sum())


@BACKENDS
@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(backend: str, vary: str, temperature: float) -> None:
    torch.manual_seed(0)
    logits, count = torch.randn(20), 20_000
    steps, same = torch.arange(count), torch.full((count,), 1234)
    seeds, positions = (steps, same) if vary == "seeds" else (same, steps)
    with ck.use_backend(backend):
        tokens = draw(logits.expand(count, -1), temperature=temperature, seeds=seeds, positions=positions)
    assert chi_square(tokens, (logits / temperature).softmax(0)) < CHI_SQUARE[19]


@BACKENDS
@pytest.mark.parametrize("filters", [{"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.2}])
def test_filtered_draws_follow_the_renormalised_softmax(backend: str, filters: dict[str, float]) -> None:
    torch.manual_seed(3)
    logits = torch.randn(30)
    kept = sorted(kept_tokens(logits, **filters))
    # A set of ten fits the table above; these logits and filters were picked to keep ten.
    threshold = CHI_SQUARE.get(len(kept) - 1, len(kept) + 4.5 * math.sqrt(2 * len(kept)))
    with ck.use_backend(backend):
        tokens = draw(logits.expand(10_000, -1), **filters)
    index = torch.full((30,), -1)
    index[kept] = torch.arange(len(kept))
    assert (index[tokens] >= 0).all()
    assert chi_square(index[tokens], logits[kept].softmax(0)) < threshold


def kept_tokens(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The definition, token by token, in double precision."""
    ranking = sorted(range(len(logits)), key=lambda t: (-float(logits[t]), t))
    if top_k:
        ranking = ranking[:top_k]
    weights = [math.exp(float(logits[t])) for t in ranking]
    total, mass = sum(weights), 0.0
    kept = set()
    for token, weight in zip(ranking, weights, strict=True):
        if mass / total >= top_p and top_p < 1:
            break
        mass += weight
        if weight >= min_p * weights[0]:
            kept.add(token)
    return kept


@BACKENDS
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(1, 12),
    top_k=st.integers(0, 13),
    top_p=st.just(1.0) | st.floats(0.05, 0.99),
    min_p=st.just(0.0) | st.floats(0.05, 0.95),
)
def test_exactly_the_right_tokens_are_kept(
    backend: str, seed: int, vocabulary: int, top_k: int, top_p: float, min_p: float
) -> None:
    """Probabilities within e^2 of each other and 1500 draws: a kept token not drawn has a chance below 1e-8."""
    logits = torch.rand(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    with ck.use_backend(backend):
        tokens = draw(logits.expand(1500, -1), top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(tokens.tolist()) == kept_tokens(logits, top_k=top_k, top_p=top_p, min_p=min_p)


@BACKENDS
@pytest.mark.parametrize("vocabulary", [8, 1000])
def test_of_equal_logits_the_lower_ids_are_kept(backend: str, vocabulary: int) -> None:
    with ck.use_backend(backend):
        assert set(draw(torch.zeros(400, vocabulary), top_k=3).tolist()) == {0, 1, 2}


@BACKENDS
def test_greedy_rows_ignore_everything_else(backend: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 700)
    with ck.use_backend(backend):
        for filters in ({}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.4}):
            assert torch.equal(draw(logits, temperature=0.0, **filters), logits.argmax(-1))
        assert torch.equal(draw(logits, top_k=1), logits.argmax(-1))
        assert torch.equal(draw(logits, top_p=1e-6), logits.argmax(-1))


def random_arguments(rows: int, vocabulary: int, spread: float, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def pick(options: list[float]) -> torch.Tensor:
        return torch.tensor(options)[torch.randint(0, len(options), (rows,), generator=g)]

    return [
        torch.randn(rows, vocabulary, generator=g) * spread,
        pick([0.0, 0.7, 1.0, 1.6]),
        pick([0, 0, 1, 40, 256, 400]).long(),
        pick([1.0, 1.0, 0.5, 0.95]),
        pick([0.0, 0.0, 0.02, 0.3]),
        torch.randint(-(2**62), 2**62, (rows,), generator=g),
        torch.randint(0, 5000, (rows,), generator=g),
    ]


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.sampled_from([3, 255, 256, 257, 3000]))
def test_cpu_equals_reference(spread: float, seed: int, vocabulary: int) -> None:
    """Flat logits make the kept set outgrow the candidates that the CPU backend takes out first."""
    arguments = random_arguments(12, vocabulary, spread, seed)
    assert torch.equal(cpu.sample(*arguments), reference.sample(*arguments))


@BACKENDS
def test_a_row_draws_the_same_in_any_batch(backend: str) -> None:
    arguments = random_arguments(24, 1500, 2.0, 5)
    with ck.use_backend(backend):
        together = ck.sample(*arguments)
        alone = torch.cat([ck.sample(*(a[i : i + 1] for a in arguments)) for i in range(24)])
        shuffled = torch.randperm(24)
        assert torch.equal(together, alone)
        assert torch.equal(together[shuffled], ck.sample(*(a[shuffled] for a in arguments)))


@BACKENDS
def test_banned_tokens_are_never_drawn(backend: str) -> None:
    logits = torch.full((500, 600), float("-inf"))
    logits[:, [7, 300]] = 0.0
    with ck.use_backend(backend):
        for filters in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.01}):
            assert set(draw(logits, **filters).tolist()) == {7, 300}


@BACKENDS
def test_noise_is_gumbel(backend: str) -> None:
    with ck.use_backend(backend):
        noise = ck.gumbel_noise(torch.arange(50), torch.arange(50) * 3, 20_000)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    noise = noise.double()
    assert abs(float(noise.mean()) - 0.577216) < 0.005
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.01
    # The distribution function at a few points, each within five standard errors of a million draws.
    for point in (-1.5, 0.0, 1.0, 3.0, 7.0):
        expected = math.exp(-math.exp(-point))
        assert abs(float((noise <= point).double().mean()) - expected) < 5 * math.sqrt(expected * (1 - expected) / 1e6)


@BACKENDS
def test_noise_of_a_token_depends_on_nothing_else(backend: str) -> None:
    seeds, positions = torch.tensor([5, -5, 2**62]), torch.tensor([0, 9, 123456])
    subset = torch.tensor([[3, 999, 0], [17, 3, 4], [500, 501, 502]])
    with ck.use_backend(backend):
        everything = ck.gumbel_noise(seeds, positions, 1000)
        assert torch.equal(everything.gather(1, subset), ck.gumbel_noise(seeds, positions, subset))
        assert torch.equal(everything[1:2], ck.gumbel_noise(seeds[1:2], positions[1:2], 1000))


@BACKENDS
def test_noise_of_neighbours_is_uncorrelated(backend: str) -> None:
    """Consecutive seeds and positions are what users choose: their streams share nothing, shifted copies included."""
    seeds, positions = torch.tensor([1, 2, 1, 1]), torch.tensor([0, 0, 1, 2])
    with ck.use_backend(backend):
        noise = ck.gumbel_noise(seeds, positions, 20_000).double()
    for other in (1, 2, 3):
        for shift in (0, 1, 2):
            pair = torch.stack([noise[0, shift:], noise[other, : 20_000 - shift]])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(20_000)


def splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@BACKENDS
@pytest.mark.parametrize(("seed", "position", "token"), [(0, 0, 0), (1, 2, 3), (-7, 100, 49151), (2**63 - 1, 8191, 5)])
def test_noise_is_the_documented_hash(backend: str, seed: int, position: int, token: int) -> None:
    """Published seeds must reproduce on every backend and version: the same in plain Python integers."""
    golden = 0x9E3779B97F4A7C15
    stream = splitmix((splitmix((seed + golden) % 2**64) + position * golden) % 2**64)
    bits = splitmix((stream + (token + 1) * golden) % 2**64) >> 32
    expected = -math.log(-math.log1p(-(bits + 0.5) / 2**32))
    with ck.use_backend(backend):
        got = ck.gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([[token]]))
    assert float(got) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("backend", ck.available_backends())
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([1, 7, 31, 64, 100, 1023, 1024, 1025, 3000, 4096, 49152]),
    odd=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 49151), st.sampled_from([math.nan, math.inf, -math.inf, 9.0])),
        max_size=6,
    ),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 1000),
)
def test_the_largest_and_what_is_unusable(
    backend: str, rows: int, width: int, odd: list[tuple[int, int, float]], gap: int, seed: int
) -> None:
    """NaN and infinities anywhere, ties, rows apart from each other, widths that fit no vector."""
    torch.manual_seed(seed)
    logits = torch.randn(rows, width + gap)[:, :width]
    for row, at, value in odd:
        logits[row % rows, at % width] = value
    with ck.use_backend(backend):
        tokens, failed = ck.largest(logits)
    top = logits.masked_fill(logits.isnan(), math.inf).amax(dim=1)
    assert failed.tolist() == [not math.isfinite(value) for value in top.tolist()]
    assert (tokens[failed] == -1).all()
    usable = ~failed
    assert (logits[usable].gather(1, tokens[usable].unsqueeze(1)).squeeze(1) == top[usable]).all()


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_rows_of_nothing_are_unusable(value: float) -> None:
    for backend in ck.available_backends():
        with ck.use_backend(backend):
            tokens, failed = ck.largest(torch.full((2, 100), value))
        assert (tokens.tolist(), failed.tolist()) == ([-1, -1], [True, True])


def test_of_equal_logits_the_compiled_kernel_takes_the_first() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, 4096:] = logits[2, 17] = logits[2, 4999] = 1.0
    with ck.use_backend("cpu"):
        assert ck.largest(logits)[0].tolist() == [0, 4096, 17]

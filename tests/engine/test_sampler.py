"""The batched sampler against plain per-row code, and the promises that it makes about seeds, batches and bad rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.calls import count_calls

import carousel_kernels as ck
from carousel.engine import sampler as module
from carousel.engine.detokenizer import Detokenizer
from carousel.engine.request import GenerationRequest, SamplingParams, Sequence, TokenLogprob
from carousel.engine.sampler import Sampler, SequenceSampler, mix_seed

VOCAB = 24
EOS = frozenset({2, 5})


class Letters:
    """A tokenizer for sequences whose text nobody reads."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


LETTERS = Letters()


def sequence(
    prompt: list[int], output: list[int], *, vocab: int = VOCAB, seed: int = 0, index: int = 0, **params: Any
) -> Sequence:
    sampling = SamplingParams(**params)
    sampling.validate(vocab)
    state = SequenceSampler(sampling, seed=seed, index=index, prompt_ids=prompt, eos_ids=EOS, vocab_size=vocab)
    made = Sequence(
        request=GenerationRequest(prompt=prompt, sampling=sampling),
        index=index,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_total_tokens=10_000,
        order=0,
        detokenizer=Detokenizer(LETTERS),
        sampler=state,
        eos_ids=EOS,
    )
    for token in output:
        grow(made, token)
    return made


def grow(seq: Sequence, token: int) -> None:
    seq.token_ids.append(token)
    seq.sampler.update(token)


def noise(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def tokens_of(logits: torch.Tensor, sequences: list[Sequence], sampler: Sampler | None = None) -> list[int]:
    sampler = sampler or Sampler(logits.shape[1], "cpu")
    return [token.token_id for token in sampler.sample(logits.clone(), sequences)]


def adjusted(row: torch.Tensor, seq: Sequence) -> list[float]:
    """What one row's logits are when the draw begins, spelled out."""
    p = seq.request.sampling
    prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens :]
    counts = Counter(output)
    logits = [float(x) for x in row]
    for token in range(len(logits)):
        logits[token] += p.logit_bias.get(token, 0.0)
        if len(output) < p.min_tokens and (token in p.stop_token_ids or (token in EOS and not p.ignore_eos)):
            logits[token] = -math.inf
        if token in counts or token in prompt:
            scale = p.repetition_penalty
            logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
        logits[token] -= counts[token] * p.frequency_penalty + (counts[token] > 0) * p.presence_penalty
    return logits


token_ids = st.integers(0, VOCAB - 1)
extras = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.7, 0.3, 2.0]),
        "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100), max_size=4),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.frozensets(token_ids, max_size=3),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 20),
    },
)
sequences_like = st.lists(
    st.tuples(
        st.lists(token_ids, min_size=1, max_size=8),
        st.lists(token_ids, max_size=8),
        extras,
        st.sampled_from([0.0, 0.7, 1.5]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=250, deadline=None)
@given(sequences_like, st.integers(0, 2**31))
def test_adjusted_logits_equal_plain_code_row_by_row(shapes: list[Any], seed: int) -> None:
    sequences = [
        sequence(prompt, output, temperature=temperature, **extra) for prompt, output, extra, temperature in shapes
    ]
    logits = noise(len(sequences), seed=seed)
    expected = [adjusted(row, seq) for row, seq in zip(logits, sequences, strict=True)]
    drawn_from: list[list[float]] = []
    real = ck.sample

    def spy(rows: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        drawn_from.extend(rows.tolist())
        return real(rows, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ck, "sample", spy)
        tokens = tokens_of(logits, sequences)
    randoms = [row for row, seq in enumerate(sequences) if seq.request.sampling.temperature]
    assert len(drawn_from) == len(randoms)
    for row, seen in zip(randoms, drawn_from, strict=True):
        assert seen == pytest.approx(expected[row], rel=1e-5, abs=1e-5)
    for row, seq in enumerate(sequences):
        assert expected[row][tokens[row]] > -math.inf
        if not seq.request.sampling.temperature:
            assert expected[row][tokens[row]] == pytest.approx(max(expected[row]), rel=1e-5, abs=1e-5)


# ---- greedy


@pytest.mark.parametrize("vocab", [VOCAB, 1000, 4096 + 32, 16384])
def test_a_plain_batch_is_one_argmax(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a greedy batch must not draw")

    monkeypatch.setattr(ck, "sample", never)
    logits = noise(7, vocab).round(decimals=1)  # with ties
    before = logits.clone()
    sequences = [sequence([1], [], vocab=vocab, temperature=0.0) for _ in range(7)]
    found = Sampler(vocab, "cpu").sample(logits, sequences)
    assert [token.token_id for token in found] == logits.argmax(-1).tolist()
    assert all(token.logprob is None for token in found)
    assert torch.equal(logits, before)


def test_greedy_rows_among_random_ones_are_exactly_the_argmax() -> None:
    logits = noise(40)
    sequences = [sequence([1], [], temperature=0.0 if row % 3 else 2.0, seed=row) for row in range(40)]
    tokens = tokens_of(logits, sequences)
    best = logits.argmax(-1).tolist()
    assert [tokens[row] for row in range(40) if row % 3] == [best[row] for row in range(40) if row % 3]
    assert any(tokens[row] != best[row] for row in range(0, 40, 3))


def test_a_temperature_that_would_overflow_is_greedy() -> None:
    logits = noise(4)
    sequences = [sequence([1], [], temperature=temperature) for temperature in (1e-38, 1e-9, 1e-5, 1e-4)]
    assert tokens_of(logits, sequences) == logits.argmax(-1).tolist()


def test_empty_batch_and_wrong_shapes() -> None:
    sampler = Sampler(VOCAB, "cpu")
    assert sampler.sample(noise(0), []) == []
    with pytest.raises(ValueError, match=r"logits are \(2, 24\), not \(1, 24\)"):
        sampler.sample(noise(2), [sequence([1], [])])
    with pytest.raises(ValueError, match=r"logits are \(1, 20\), not \(1, 24\)"):
        sampler.sample(noise(1, 20), [sequence([1], [])])


# ---- seeds


def model(tokens: list[int], vocab: int = VOCAB) -> torch.Tensor:
    """Logits that depend on all tokens before."""
    return noise(1, vocab, seed=hash(tuple(tokens)) % 2**31)[0] / 3


KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2, "min_tokens": 4},
    {"temperature": 0.9, "top_k": 10, "top_p": 0.9, "min_p": 0.01, "logit_bias": {3: 1.0}},
]


def generate_alone(number: int, length: int) -> list[int]:
    seq = sequence([number % VOCAB, 1], [], seed=number, **KINDS[number % len(KINDS)])
    for _ in range(length):
        grow(seq, tokens_of(model(seq.token_ids).unsqueeze(0), [seq])[0])
    return seq.token_ids


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_same_seed_same_text_alone_and_in_any_batch(rng: random.Random) -> None:
    length = 8
    sequences = [sequence([n % VOCAB, 1], [], seed=n, **KINDS[n % len(KINDS)]) for n in range(12)]
    sampler = Sampler(VOCAB, "cpu")
    live = list(sequences)
    while live:
        # Who is not in the batch of a step is as good as preempted: nothing but its own state comes back with it.
        batch = rng.sample(live, rng.randint(1, len(live)))
        logits = torch.stack([model(seq.token_ids) for seq in batch])
        for seq, token in zip(batch, sampler.sample(logits, batch), strict=True):
            grow(seq, token.token_id)
        live = [seq for seq in live if seq.num_output_tokens < length]
    for number, seq in enumerate(sequences):
        assert seq.token_ids == generate_alone(number, length)


def test_seed_choice_and_position_change_the_draw_and_nothing_else_does() -> None:
    logits = torch.zeros(1, 4096)

    def draw(seed: int = 1, index: int = 0, output: int = 0, row: int = 0) -> int:
        batch = [sequence([1], [7] * output, vocab=4096, seed=seed, index=index) for _ in range(row + 1)]
        return tokens_of(logits.expand(row + 1, -1), batch)[row]

    base = draw()
    assert draw() == draw(row=3) == base
    others = [draw(seed=2), draw(seed=-1), draw(seed=2**64 - 2), draw(index=1), draw(index=2), draw(output=1)]
    assert base not in others
    assert len(set(others)) == len(others)
    assert draw(seed=-1) == draw(seed=2**64 - 1)  # the same 64 bits


def test_mixed_seeds_are_distinct_signed_64_bit_integers() -> None:
    seeds = [mix_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2, 2**64 - 2) for index in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seeds) < 0 < max(seeds)


def test_draws_follow_the_distribution() -> None:
    rows = 6000
    logits = noise(1, 8, seed=3) / 2
    sequences = [sequence([1], [], vocab=8, seed=seed, temperature=1.5, top_k=6) for seed in range(rows)]
    counts = Counter(tokens_of(logits.expand(rows, -1), sequences))
    scaled = logits[0] / 1.5
    scaled[scaled.topk(2, largest=False).indices] = -math.inf
    expected = (scaled.softmax(-1) * rows).tolist()
    assert all(counts[token] == 0 for token in range(8) if expected[token] == 0)
    chi_square = sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected) if e)
    assert chi_square < 20.5  # 5 degrees of freedom: p = 0.001; the seeds are fixed


# ---- guards and biases


def test_min_tokens_keeps_eos_and_stop_tokens_away_until_then() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 9], logits[0, 4] = 30.0, 20.0, 10.0
    stops = frozenset({9})
    for output, ignore_eos, expected in [(0, False, 4), (2, False, 4), (3, False, 2), (0, True, 2), (2, True, 2)]:
        seq = sequence([1], [3] * output, temperature=0.0, min_tokens=3, stop_token_ids=stops, ignore_eos=ignore_eos)
        assert tokens_of(logits, [seq]) == [expected], (output, ignore_eos)
    logits[0, 2] = 0.0  # with ignore_eos the stop tokens are still kept away
    seq = sequence([1], [], temperature=0.0, min_tokens=3, stop_token_ids=stops, ignore_eos=True)
    assert tokens_of(logits, [seq]) == [4]


def test_min_tokens_end_at_different_times_within_one_batch() -> None:
    sampler = Sampler(VOCAB, "cpu")
    sequences = [sequence([1], [], temperature=0.0, min_tokens=n) for n in (1, 4, 2)]
    logits = torch.zeros(3, VOCAB)
    logits[:, 2], logits[:, 8] = 9.0, 5.0
    for step in range(6):
        tokens = tokens_of(logits, sequences, sampler)
        assert tokens == [2 if step >= n else 8 for n in (1, 4, 2)]
        for seq in sequences:
            grow(seq, 8)


def test_logit_bias_forces_and_bans() -> None:
    logits = noise(3)
    best = logits.argmax(-1).tolist()
    sequences = [
        sequence([1], [], temperature=1.0, logit_bias={11: 100.0}),
        sequence([1], [], temperature=0.0, logit_bias={best[1]: -100.0}),
        sequence([1], [], temperature=0.0),
    ]
    tokens = tokens_of(logits, sequences)
    assert tokens[0] == 11
    assert tokens[1] == logits[1].topk(2).indices[1]
    assert tokens[2] == best[2]


def test_penalty_counts_over_a_long_output() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(300)]
    output = [rng.randrange(1000) for _ in range(700)]
    for repetition in (1.0, 1.2):
        seq = sequence(prompt, output, vocab=1000, repetition_penalty=repetition, presence_penalty=1.0)
        ids, counts = seq.sampler.penalty_counts()
        expected = Counter(output) + Counter()
        if repetition != 1.0:
            expected.update(dict.fromkeys(prompt, 0))
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected


def test_prompt_ids_are_read_once_and_not_the_growing_list() -> None:
    tokens = [1, 2]
    sampling = SamplingParams(repetition_penalty=2.0)
    state = SequenceSampler(sampling, seed=0, index=0, prompt_ids=tokens, eos_ids=EOS, vocab_size=VOCAB)
    tokens.append(3)
    assert state.penalty_counts()[0].tolist() == [1, 2]


# ---- log-probabilities


def check_logprob(found: TokenLogprob, row: torch.Tensor, token: int, k: int) -> None:
    logprobs = torch.log_softmax(row.double(), -1)
    assert found.token_id == token
    assert found.logprob == pytest.approx(logprobs[token].item(), abs=1e-4)
    assert found.rank == 1 + int((row > row[token]).sum())
    values, ids = logprobs.topk(k)
    assert [token for token, _ in found.top] == ids.tolist()
    assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("vocab", [VOCAB, 1000, 32768])
def test_logprobs_are_those_of_the_model_for_rows_that_ask(vocab: int) -> None:
    logits = noise(6, vocab)
    wanted = [None, 0, 3, 20, None, 1]
    sequences = [
        sequence(
            [1], [3, 3], vocab=vocab, seed=row, temperature=1.5 * (row % 2), repetition_penalty=1.5, logprobs=k,
            logit_bias={4: 5.0},
        )
        for row, k in enumerate(wanted)
    ]  # fmt: skip
    for rows in ([0, 1, 2, 3, 4, 5], [1, 2, 3, 5], [3]):
        found = Sampler(vocab, "cpu").sample(logits[rows], [sequences[row] for row in rows])
        for row, token in zip(rows, found, strict=True):
            k = wanted[row]
            if k is None:
                assert token.logprob is None
            else:
                assert token.logprob is not None
                check_logprob(token.logprob, logits[row], token.token_id, k)


def test_logprobs_without_adjustments() -> None:
    logits = noise(3)
    sequences = [sequence([1], [], temperature=0.0, logprobs=2) for _ in range(3)]
    for row, token in enumerate(Sampler(VOCAB, "cpu").sample(logits.clone(), sequences)):
        assert token.logprob is not None
        assert token.logprob.rank == 1
        assert token.logprob.top[0][0] == token.token_id
        check_logprob(token.logprob, logits[row], token.token_id, 2)


@pytest.mark.parametrize("slice_size", [1, 60, 1 << 20])
def test_prompt_logprobs(slice_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROMPT_SLICE", slice_size)
    logits = noise(9)
    tokens = [row * 5 % VOCAB for row in range(9)]
    for k in (0, 4):
        found = Sampler(VOCAB, "cpu").prompt_logprobs(logits, tokens, k)
        assert len(found) == 9
        for entry, row, token in zip(found, logits, tokens, strict=True):
            check_logprob(entry, row, token, k)
    assert Sampler(VOCAB, "cpu").prompt_logprobs(logits[:0], [], 3) == []


def test_prompt_logprobs_of_a_nan_row_say_so() -> None:
    logits = noise(3)
    logits[1, 3] = math.nan
    found = Sampler(VOCAB, "cpu").prompt_logprobs(logits, [1, 2, 3], 2)
    assert (found[1].logprob, found[1].rank, found[1].top) == (None, 0, [])
    check_logprob(found[2], logits[2], 3, 2)


# ---- rows that went wrong


@pytest.mark.parametrize("vocab", [VOCAB, 16384])
@pytest.mark.parametrize("bad", ["nan", "all nan", "all -inf", "+inf"])
@pytest.mark.parametrize("kind", ["plain", "random", "mixed"])
def test_a_bad_row_fails_alone(bad: str, kind: str, vocab: int) -> None:
    def batch() -> list[Sequence]:
        kinds = {"plain": [0.0], "random": [1.0], "mixed": [0.0, 1.0]}[kind]
        extra = {} if kind == "plain" else {"logprobs": 1, "presence_penalty": 0.5}
        return [
            sequence([1], [3], vocab=vocab, seed=row, temperature=kinds[row % len(kinds)], top_p=0.9, **extra)
            for row in range(6)
        ]

    logits = noise(6, vocab)
    whole = Sampler(vocab, "cpu").sample(logits.clone(), batch())
    for row in (2, 5):
        if bad == "nan":
            logits[row, 17] = math.nan
        else:
            logits[row, 17 if bad == "+inf" else slice(None)] = float(bad.removeprefix("all "))
    found = Sampler(vocab, "cpu").sample(logits, batch())
    for row in range(6):
        if row in (2, 5):
            assert (found[row].token_id, found[row].logprob) == (-1, None)
        else:
            assert found[row] == whole[row]
            assert 0 <= found[row].token_id < vocab


def test_some_logits_of_minus_infinity_are_no_error() -> None:
    logits = noise(2)
    logits[:, 10:] = -math.inf
    sequences = [sequence([1, 12], [13], temperature=t, repetition_penalty=1.2, logprobs=1) for t in (0.0, 1.0)]
    assert all(0 <= token < 10 for token in tokens_of(logits, sequences))


def test_a_row_whose_every_token_is_out_of_reach_fails() -> None:
    seq = sequence([1], [], temperature=0.0, min_tokens=1, stop_token_ids=frozenset(range(VOCAB)))
    assert tokens_of(noise(1), [seq]) == [-1]


# ---- cost


def test_compositions_that_come_and_go_do_not_confuse_the_cache() -> None:
    sampler = Sampler(VOCAB, "cpu")
    rng = random.Random(0)
    sequences = [sequence([n], [n], seed=n, **KINDS[n % len(KINDS)]) for n in range(8)]
    batches = [rng.sample(sequences, rng.randint(1, 8)) for _ in range(30)]
    for batch in batches * 2:
        logits = noise(len(batch), seed=len(batch))
        assert tokens_of(logits, batch, sampler) == tokens_of(logits, batch)
    assert len(sampler._plans) <= module._PLANS_KEPT


def test_python_costs_little_beside_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ck, "sample", lambda rows, *_: torch.zeros(len(rows), dtype=torch.int64))
    rng = random.Random(0)
    sequences = [
        sequence(
            [rng.randrange(VOCAB) for _ in range(200)],
            [],
            temperature=0.8,
            top_p=0.9,
            repetition_penalty=1.1,
            min_tokens=3,
            seed=row,
        )
        for row in range(64)
    ]
    sampler = Sampler(VOCAB, "cpu")

    def step(rows: int) -> None:
        several = sequences[:rows]
        for seq, token in zip(several, sampler.sample(noise(rows), several), strict=True):
            grow(seq, token.token_id)

    step(64)  # what is made once
    half, whole = (min(count_calls(partial(step, rows)) for _ in range(3)) for rows in (32, 64))
    assert whole - half <= 24 * 32, "calls for 32 rows more"
    assert whole <= 24 * 64

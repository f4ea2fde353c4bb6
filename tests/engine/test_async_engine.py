"""The whole engine a step ahead of its device, on a real tiny model: the same answers as when it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from tests.engine.test_engine import PROMPTS, greedy, prompt, sampled, settled
from tests.engine.test_sampler import noise, sequence
from tests.engine.tiny import EOS, kv_memory, started_engine

from carousel.engine.device import Readback
from carousel.engine.engine import Engine
from carousel.engine.request import FinishReason, GenerationRequest, Output, SamplingParams
from carousel.engine.sampler import Sampler

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}


@pytest.fixture(scope="module")
def ahead() -> Iterator[Engine]:
    engine = started_engine(async_scheduling="on")
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def behind() -> Iterator[Engine]:
    engine = started_engine(async_scheduling="off")
    yield engine
    engine.stop()


def crowd() -> list[GenerationRequest]:
    """Everything that a request may ask of the sampler, and every way to end."""
    requests = [greedy(ids, 24) for ids in PROMPTS]
    requests += [sampled(PROMPTS[i], 24, temperature=0.9, top_p=0.95, seed=i) for i in range(4)]
    requests += [sampled(PROMPTS[i], 32, temperature=0.0, **PENALTIES) for i in range(3)]
    requests += [sampled(PROMPTS[i], 24, temperature=1.1, top_k=40, seed=i, n=3, **PENALTIES) for i in range(2)]
    requests += [
        sampled(PROMPTS[4], 12, temperature=0.0, logprobs=3, prompt_logprobs=2),
        sampled(PROMPTS[5], 12, temperature=0.8, seed=3, logprobs=5, presence_penalty=1.5),
        sampled(PROMPTS[6], 12, temperature=0.7, min_p=0.05, seed=4, logit_bias={3: 4.0, 9: -100.0}),
    ]
    # Half of a byte vocabulary stops it: the row behind the stop is discarded, after a few tokens or many.
    stops = frozenset(range(0, 256, 7))
    for seed in range(4):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=30, stop_token_ids=stops, min_tokens=seed * 3)
        requests.append(GenerationRequest(prompt=PROMPTS[seed], sampling=params))
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=30, logit_bias={EOS: 4.0})
        requests.append(GenerationRequest(prompt=PROMPTS[seed], sampling=params))
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=60, stop=("a", "e", "0"), ignore_eos=True)
        requests.append(GenerationRequest(prompt=PROMPTS[seed], sampling=params))
    return requests


async def outputs(engine: Engine, requests: list[GenerationRequest]) -> list[Output]:
    answers = await asyncio.gather(*map(engine.generate, requests))
    await settled(engine)
    return [output for answer in answers for output in answer]


def check_equal(found: list[Output], wanted: list[Output]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
        for name in ("logprobs", "prompt_logprobs"):
            mine, others = getattr(one, name), getattr(other, name)
            assert (mine is None) == (others is None)
            for a, b in zip(mine or [], others or [], strict=True):
                assert (a.token_id, a.rank) == (b.token_id, b.rank)
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert [token for token, _ in a.top] == [token for token, _ in b.top]


async def test_everything_that_can_be_asked_for_is_answered_equally(ahead: Engine, behind: Engine) -> None:
    found, wanted = await outputs(ahead, crowd()), await outputs(behind, crowd())
    assert {output.finish_reason for output in wanted} >= {FinishReason.LENGTH, FinishReason.STOP, FinishReason.EOS}
    check_equal(found, wanted)
    assert sum(step.num_discarded_tokens for step in ahead.timeline.steps) > 0
    assert sum(step.num_discarded_tokens for step in behind.timeline.steps) == 0


async def test_answers_are_equal_through_preemptions(behind: Engine) -> None:
    engine = started_engine(async_scheduling="on", kv_cache_memory=kv_memory(24), max_batch_tokens=48)
    try:
        requests = [greedy(ids, 60) for ids in PROMPTS]
        requests += [sampled(PROMPTS[i], 60, temperature=1.0, seed=i, **PENALTIES) for i in range(4)]
        found = await outputs(engine, requests)
        assert engine.stats().preemptions > 0
        check_equal(found, await outputs(behind, requests))
    finally:
        engine.stop()


async def test_cancelled_requests_end_with_a_prefix_and_leave_nothing(ahead: Engine, behind: Engine) -> None:
    requests = [greedy(prompt(20, 50 + i), 200) for i in range(6)]
    wanted = await outputs(behind, requests)
    streams = [ahead.submit(greedy(list(request.prompt), 200)) for request in requests]  # type: ignore[arg-type]
    for number, (stream, whole) in enumerate(zip(streams, wanted, strict=True)):
        tokens: list[int] = []
        async for delta in stream:
            tokens += delta.token_ids
            if number % 2 and len(tokens) >= 10 * number:
                ahead.cancel(stream.request_id)
        assert tokens == whole.token_ids[: len(tokens)]
        assert number % 2 or len(tokens) == 200
    await settled(ahead)


async def test_broken_logits_end_one_sequence_and_its_discarded_row_harms_nobody(ahead: Engine, monkeypatch) -> None:
    from carousel.engine.runner import DecoderRunner, StepResult

    wanted = await outputs(ahead, [greedy(ids, 20) for ids in PROMPTS])
    run = DecoderRunner.run

    def poisoned(self: DecoderRunner, step: object) -> StepResult:
        result = run(self, step)  # type: ignore[arg-type]
        for row, bad in enumerate(result.sampled):
            if bad.request.request_id == "poisoned" and bad.num_sampled_tokens == 3:
                with torch.inference_mode():
                    result.logits[row] = float("nan")
        return result

    monkeypatch.setattr(DecoderRunner, "run", poisoned)
    bad = asyncio.create_task(ahead.generate(greedy(PROMPTS[3], request_id="poisoned")))
    check_equal(await outputs(ahead, [greedy(ids, 20) for ids in PROMPTS]), wanted)
    output = (await bad)[0]
    assert output.finish_reason is FinishReason.ERROR
    assert len(output.token_ids) == 3


async def test_a_device_that_fails_between_launch_and_wait_ends_the_engine_with_a_reason(monkeypatch) -> None:
    engine = started_engine(async_scheduling="on")
    try:
        stream = engine.submit(greedy(PROMPTS[0], 400))
        await anext(stream)

        def failing(self: Readback) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure\nadvice for developers")

        monkeypatch.setattr(Readback, "wait", failing)
        *_, last = [delta async for delta in stream]
        why = "the device has failed: CUDA error: unspecified launch failure; only a restart helps"
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == f"the engine has failed: {why}"
        assert engine.failure == why
        for _ in range(200):
            if not engine.alive:
                break
            await asyncio.sleep(0.01)
        assert not engine.alive
        assert engine.stats().live == 0
    finally:
        engine.stop()


@pytest.mark.parametrize("last", [3, 7, 11])
def test_a_pending_token_is_penalised_as_a_known_one(last: int) -> None:
    """7 was in the output before, 11 only in the prompt, 3 nowhere."""
    logits = noise(3)
    batch = [sequence([11, 4], [7, 7, 5], temperature=0.0, logprobs=0, **PENALTIES) for _ in range(3)]
    for one in batch[:2]:
        one.num_pending_tokens = 1
    adjusted = logits.clone()
    sampler = Sampler(logits.shape[1], "cpu")
    sampler.launch(adjusted, batch, torch.tensor([last, 5, 0])).wait()
    known = [
        sequence([11, 4], [7, 7, 5, *more], temperature=0.0, logprobs=0, **PENALTIES) for more in ([last], [5], [])
    ]
    wanted = logits.clone()
    Sampler(logits.shape[1], "cpu").launch(wanted, known).wait()
    assert torch.equal(adjusted, wanted)


def test_a_penalised_pending_token_that_nobody_knows_is_refused() -> None:
    one = sequence([1], [2], temperature=0.0, **PENALTIES)
    one.num_pending_tokens = 1
    with pytest.raises(AssertionError, match="pending"):
        Sampler(24, "cpu").launch(noise(1), [one])

"""The whole engine on a real tiny model: correctness before speed, and what its users see."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from tests.engine.tiny import EOS, MAX_LEN, VOCAB, kv_memory, started_engine, tiny_model

from carousel.engine.engine import Engine
from carousel.engine.errors import SHUT_DOWN, EngineUnavailable, InvalidRequest, QueueFull, RequestTooLong
from carousel.engine.request import FinishReason, GenerationRequest, Output, SamplingParams
from carousel.engine.runner import DecoderRunner, StepResult
from carousel.engine.timeline import EngineStats

LENGTH = 48
"""Tokens per answer: enough for sequences to outgrow a small pool together, so that somebody must be preempted."""


def prompt(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCAB) for _ in range(length)]


def greedy(ids: list[int], max_tokens: int = LENGTH, **fields: object) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(prompt=ids, sampling=params, **fields)  # type: ignore[arg-type]


def sampled(ids: list[int], max_tokens: int = LENGTH, **params: object) -> GenerationRequest:
    return GenerationRequest(prompt=ids, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not true within 30 s")


async def settled(engine: Engine) -> EngineStats:
    """The stats once nothing is live, and no step in flight holds blocks."""
    await until(lambda: engine.stats().live == engine.stats().num_tokens_running == 0)
    stats = engine.stats()
    assert stats.live == 0
    assert stats.admitted == sum(stats.finished.values())
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, "blocks leaked"
    return stats


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = started_engine()
    yield engine
    engine.stop()


@pytest.fixture
async def new_engine() -> AsyncIterator[type[object]]:
    """Makes engines with changed settings and stops them."""
    engines: list[Engine] = []

    def make(**changes: object) -> Engine:
        engines.append(started_engine(**changes))
        return engines[-1]

    yield make  # type: ignore[misc]
    for engine in engines:
        engine.stop()


PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 5, 16, 17, 40, 90, 33, 64, 3, 120))]


async def answers(engine: Engine, requests: list[GenerationRequest]) -> list[list[int]]:
    """Token ids of all requests, submitted at once."""
    return [outputs[0].token_ids for outputs in await asyncio.gather(*map(engine.generate, requests))]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The greedy answer to each of PROMPTS, computed without the engine: one whole forward pass per token."""
    from carousel.engine.block_pool import blocks_for
    from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

    decoder = tiny_model().decoder
    results = []
    for ids in PROMPTS:
        tokens = list(ids)
        cache = decoder.allocate_kv_cache(blocks_for(len(ids) + LENGTH))
        for _ in range(LENGTH):
            length = len(tokens)
            layout = BatchLayout(
                query_start=torch.tensor([0, length], dtype=torch.int32),
                context_lens=torch.tensor([length], dtype=torch.int32),
                block_tables=torch.arange(blocks_for(length), dtype=torch.int32).unsqueeze(0),
                slots=torch.arange(length, dtype=torch.int64),
                query_lens_host=[length],
                context_lens_host=[length],
                num_decodes=1 if length == 1 else 0,
            )
            assert len(cache[0][0]) * BLOCK_SIZE >= length
            with torch.inference_mode():
                logits = decoder.forward(
                    torch.tensor(tokens), torch.arange(length), layout, cache, torch.tensor([length - 1])
                )
            tokens.append(int(logits.argmax()))
        results.append(tokens[len(ids) :])
    return results


async def test_greedy_is_the_same_alone_and_in_any_batch(engine: Engine, alone: list[list[int]]) -> None:
    assert await answers(engine, [greedy(ids) for ids in PROMPTS]) == alone
    for ids, expected in zip(PROMPTS, alone, strict=True):
        assert (await engine.generate(greedy(ids)))[0].token_ids == expected
    stats = await settled(engine)
    assert stats.prefix_cache_hits > 0, "the second round was meant to meet a warm prefix cache"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch_tokens": 8},
        {"max_batch_tokens": 19, "prefix_caching": False},
        {"max_batch_sequences": 1},
        {"batching": "static", "max_batch_sequences": 3},
        {"policy": "fair"},
        {"target_step_ms": 1.0},
    ],
    ids=str,
)
async def test_greedy_is_the_same_however_it_is_scheduled(new_engine, changes, alone: list[list[int]]) -> None:
    engine = new_engine(**changes)
    assert await answers(engine, [greedy(ids) for ids in PROMPTS]) == alone
    await settled(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_greedy_is_the_same_when_preempted(new_engine, prefix_caching: bool, alone: list[list[int]]) -> None:
    engine = new_engine(kv_cache_memory=kv_memory(11), prefix_caching=prefix_caching)
    assert await answers(engine, [greedy(ids) for ids in PROMPTS]) == alone
    stats = await settled(engine)
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0


async def test_an_urgent_request_preempts_and_harms_nobodys_text(new_engine, alone: list[list[int]]) -> None:
    engine = new_engine(policy="priority", max_batch_sequences=2)
    slow = [asyncio.create_task(engine.generate(greedy(ids, priority=9))) for ids in PROMPTS[:4]]
    await asyncio.sleep(0.02)
    urgent = await engine.generate(greedy(PROMPTS[5], priority=0))
    assert urgent[0].token_ids == alone[5]
    assert [(await task)[0].token_ids for task in slow] == alone[:4]
    await settled(engine)


async def test_the_same_seed_gives_the_same_text_alone_and_in_any_batch(new_engine) -> None:
    engine = new_engine()
    requests = [
        sampled(ids, seed=11, temperature=0.8 + i / 10, top_k=[0, 5][i % 2], top_p=[1.0, 0.9, 0.8][i % 3])
        for i, ids in enumerate(PROMPTS)
    ]

    def fresh(request: GenerationRequest) -> GenerationRequest:
        return GenerationRequest(prompt=request.prompt, sampling=request.sampling)

    single = [(await engine.generate(fresh(request)))[0].token_ids for request in requests]
    assert await answers(engine, [fresh(request) for request in requests]) == single
    small = new_engine(kv_cache_memory=kv_memory(11))
    assert await answers(small, [fresh(request) for request in requests]) == single
    assert small.stats().preemptions > 0
    other = await engine.generate(sampled(PROMPTS[0], seed=12, temperature=0.8))
    assert other[0].token_ids != single[0]


async def test_without_a_seed_answers_differ_and_with_a_server_seed_they_repeat(new_engine) -> None:
    engine = new_engine()
    assert len({tuple((await engine.generate(sampled(PROMPTS[1])))[0].token_ids) for _ in range(3)}) == 3
    first, second = new_engine(seed=5), new_engine(seed=5)
    assert await answers(first, [sampled(PROMPTS[1])]) == await answers(second, [sampled(PROMPTS[1])])


async def test_n_choices_differ_and_each_is_whole(engine: Engine) -> None:
    outputs = await engine.generate(sampled(PROMPTS[4], seed=3, n=4))
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    assert all(output.completion_tokens == LENGTH for output in outputs)
    again = await engine.generate(sampled(PROMPTS[4], seed=3, n=4))
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]


async def test_deltas_join_to_the_whole_text_and_are_valid_at_every_step(engine: Engine) -> None:
    # Random bytes: full of characters that never complete. Text may lag, and must end up equal.
    async with engine.submit(sampled(PROMPTS[2], max_tokens=100, seed=1)) as stream:
        deltas = [delta async for delta in stream]
    ids = list(itertools.chain.from_iterable(delta.token_ids for delta in deltas))
    assert len(ids) == 100
    assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(ids)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


async def biased(engine: Engine, text: str, **params: object) -> Output:
    """An answer that spells ``text`` whatever the model thinks: each step allows one token, by a chain of requests."""
    ids = engine.tokenizer.encode(text)
    only = SamplingParams(temperature=0.0, max_tokens=len(ids), logit_bias={}, **params)  # type: ignore[arg-type]
    only.logit_bias = {ids[0]: 100.0}
    return (await engine.generate(GenerationRequest(prompt=[1, 2, 3], sampling=only)))[0]


async def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    letter = await biased(engine, "aaaaaaaa", stop=("aaaaa",))
    assert letter.finish_reason is FinishReason.STOP
    assert letter.stop_reason == "aaaaa"
    assert letter.text == ""
    assert len(letter.token_ids) == 5
    kept = await biased(engine, "aaaaaaaa", stop=("aaa",), include_stop=True)
    assert kept.text == "aaa"
    late = await biased(engine, "aaaaaaaa", stop=("aa",), min_tokens=6)
    assert (late.finish_reason, late.completion_tokens) == (FinishReason.STOP, 7) or late.completion_tokens == 6


async def test_stop_token_ids_and_eos_and_length_are_told_apart(engine: Engine) -> None:
    a = engine.tokenizer.encode("a")[0]
    stopped = await biased(engine, "aaaa", stop_token_ids=frozenset({a}))
    assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == (FinishReason.STOP, a, "")
    ended = (
        await engine.generate(
            GenerationRequest(
                prompt=[5], sampling=SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, max_tokens=5)
            )
        )
    )[0]
    assert (ended.finish_reason, ended.completion_tokens, ended.text) == (FinishReason.EOS, 1, "")
    long = await biased(engine, "aaaa")
    assert (long.finish_reason, long.completion_tokens) == (FinishReason.LENGTH, 4)
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, max_tokens=6, min_tokens=4)
    held = (await engine.generate(GenerationRequest(prompt=[5], sampling=params)))[0]
    assert (held.finish_reason, held.completion_tokens) == (FinishReason.EOS, 5)


async def test_without_max_tokens_the_context_is_the_limit(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    output = (await engine.generate(GenerationRequest(prompt=prompt(480), sampling=params)))[0]
    assert (output.finish_reason, output.completion_tokens) == (FinishReason.LENGTH, MAX_LEN - 480)


async def test_logprobs_are_the_same_alone_batched_chunked_and_preempted(new_engine) -> None:
    params = {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2}
    wide, narrow = new_engine(), new_engine(max_batch_tokens=32, kv_cache_memory=kv_memory(11))
    whole = [(await wide.generate(sampled(ids, **params)))[0] for ids in PROMPTS]
    parts = await asyncio.gather(*(narrow.generate(sampled(ids, **params)) for ids in PROMPTS))
    assert narrow.stats().preemptions > 0
    for ids, one, [other] in zip(PROMPTS, whole, parts, strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert mine is not None
            assert theirs is not None
            assert [entry.token_id for entry in mine] == [entry.token_id for entry in theirs]
            assert [entry.logprob for entry in mine] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)
        assert one.prompt_logprobs is not None
        assert [entry.token_id for entry in one.prompt_logprobs] == ids
        assert one.prompt_logprobs[0].logprob is None
        assert one.logprobs is not None
        assert all(len(entry.top) == 3 and entry.rank == 1 for entry in one.logprobs)


async def test_prompt_logprobs_equal_the_model_s(engine: Engine) -> None:
    ids = PROMPTS[5]
    output = (await engine.generate(sampled(ids, temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0)))[0]
    extended = (await engine.generate(sampled([*ids, *output.token_ids], max_tokens=1, prompt_logprobs=0)))[0]
    assert output.logprobs is not None
    assert extended.prompt_logprobs is not None
    assert extended.prompt_logprobs[-1].logprob == pytest.approx(output.logprobs[0].logprob, abs=1e-4)


async def test_leaving_the_stream_cancels_and_frees(engine: Engine) -> None:
    async with engine.submit(greedy(PROMPTS[0], max_tokens=400)) as stream:
        await anext(stream)
    stats = await settled(engine)
    assert stats.finished[FinishReason.CANCELLED] >= 1
    assert engine.cancel(stream.request_id) is False


async def test_a_cancelled_task_cancels_its_request(engine: Engine) -> None:
    before = engine.stats().finished[FinishReason.CANCELLED]
    task = asyncio.create_task(engine.generate(greedy(PROMPTS[0], max_tokens=400)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await settled(engine)).finished[FinishReason.CANCELLED] == before + 1


async def test_a_slow_reader_stalls_nobody_and_misses_nothing(engine: Engine, alone: list[list[int]]) -> None:
    slow = engine.submit(greedy(PROMPTS[4], max_tokens=200))
    fast = await answers(engine, [greedy(ids) for ids in PROMPTS])
    assert fast == alone
    await settled(engine)
    deltas = [delta async for delta in slow]
    assert len(deltas) == 1, "what was not read is one merged delta"
    assert len(deltas[0].token_ids) == 200
    assert deltas[0].text == engine.tokenizer.decode(deltas[0].token_ids)


async def test_a_timeout_gives_what_there_is(engine: Engine) -> None:
    output = (await engine.generate(greedy(PROMPTS[0], max_tokens=500, timeout_s=0.05)))[0]
    assert output.finish_reason is FinishReason.TIMEOUT
    assert output.completion_tokens == len(output.token_ids) < 500
    await settled(engine)


async def test_a_timeout_reaches_a_waiting_request(new_engine) -> None:
    engine = new_engine(max_batch_sequences=1)
    running = asyncio.create_task(engine.generate(greedy(PROMPTS[0], max_tokens=500)))
    await asyncio.sleep(0.01)
    output = (await engine.generate(greedy(PROMPTS[1], timeout_s=0.02)))[0]
    assert (output.finish_reason, output.token_ids) == (FinishReason.TIMEOUT, [])
    running.cancel()
    await settled(engine)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (greedy([]), "prompt"),
        (greedy([VOCAB]), r"prompt\[0\]"),
        (greedy([True]), r"prompt\[0\]"),
        (sampled([1], temperature=-1.0), "temperature"),
        (sampled([1], temperature=float("nan")), "temperature"),
        (sampled([1], top_p=0.0), "top_p"),
        (sampled([1], top_k=-1), "top_k"),
        (sampled([1], n=0), "n"),
        (sampled([1], logprobs=21), "logprobs"),
        (sampled([1], stop=("",)), "stop"),
        (sampled([1], logit_bias={VOCAB: 1.0}), "logit_bias"),
        (sampled([1], seed="x"), "seed"),
        (sampled([1], max_tokens=0), "max_tokens"),
        (sampled([1], min_tokens=LENGTH + 1), "min_tokens"),
        (greedy([1], timeout_s=-1.0), "timeout_s"),
    ],
)
async def test_bad_requests_are_refused_by_field(engine: Engine, request_: GenerationRequest, field: str) -> None:
    before = engine.stats()
    with pytest.raises(InvalidRequest, match=f"^{field}: got .*allowed: "):
        engine.submit(request_)
    after = engine.stats()
    assert (after.admitted, after.live, after.rejected) == (before.admitted, 0, before.rejected + 1)


async def test_vllm_39734_what_can_never_fit_is_refused_at_the_door(new_engine) -> None:
    engine = new_engine(kv_cache_memory=kv_memory(4))
    assert engine.max_model_len == 64, "the context is cut to what the cache holds"
    with pytest.raises(RequestTooLong, match=r"64 tokens.*max_model_len is 64"):
        engine.submit(greedy(prompt(64)))
    with pytest.raises(RequestTooLong, match="max_tokens: got 40, allowed: at most 34"):
        engine.submit(greedy(prompt(30), max_tokens=40))
    assert (await engine.generate(greedy(prompt(30), max_tokens=34)))[0].completion_tokens == 34


async def test_vllm_18826_the_queue_is_bounded_by_requests(new_engine) -> None:
    engine = new_engine(max_batch_sequences=2, max_queue_requests=3)
    streams = [engine.submit(greedy(PROMPTS[0], max_tokens=400)) for _ in range(5)]
    with pytest.raises(QueueFull, match=r"overloaded: .* requests are waiting") as refused:
        engine.submit(greedy(PROMPTS[0], max_tokens=400))
    assert refused.value.retry_after_s >= 1
    for stream in streams:
        stream.cancel()
    stats = await settled(engine)
    assert stats.rejected == 1
    assert (stats.num_tokens_waiting, stats.oldest_wait_s, stats.queue_seconds) == (0, 0.0, 0.0)


async def test_the_queue_is_bounded_by_tokens_too(new_engine) -> None:
    engine = new_engine(max_batch_sequences=1, max_queue_tokens=600)
    running = engine.submit(greedy(PROMPTS[0], max_tokens=400))
    await anext(running)
    waiting = engine.submit(greedy(prompt(400)))
    with pytest.raises(QueueFull, match="prompt tokens are waiting"):
        engine.submit(greedy(prompt(300)))
    small = engine.submit(greedy(prompt(100)))
    for stream in (running, waiting, small):
        stream.cancel()
    await settled(engine)


async def test_draining_finishes_what_is_live_and_refuses_the_rest(new_engine, alone: list[list[int]]) -> None:
    engine = new_engine()
    tasks = [asyncio.create_task(engine.generate(greedy(ids))) for ids in PROMPTS]
    await asyncio.sleep(0)
    assert await engine.drain(20.0) is True
    assert [(await task)[0].token_ids for task in tasks] == alone
    assert not engine.ready
    with pytest.raises(EngineUnavailable, match="draining"):
        engine.submit(greedy([1]))


async def test_what_a_drain_cannot_finish_ends_with_an_error(new_engine) -> None:
    engine = new_engine()
    task = asyncio.create_task(engine.generate(greedy(PROMPTS[0], max_tokens=500)))
    await asyncio.sleep(0.02)
    assert await engine.drain(0.02) is False
    output = (await task)[0]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "the server shut down before the end"
    assert (await settled(engine)).finished[FinishReason.ERROR] == 1


async def test_a_dead_engine_thread_fails_its_requests_and_is_not_alive(new_engine, monkeypatch) -> None:
    engine = new_engine()
    stream = engine.submit(greedy(PROMPTS[0], max_tokens=500))
    await anext(stream)

    def broken(self: object, step: object) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr("carousel.engine.runner.DecoderRunner.run", broken)
    *_, last = [delta async for delta in stream]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the engine has failed: RuntimeError: the device is on fire"
    for _ in range(200):
        if not engine.alive:
            break
        await asyncio.sleep(0.01)
    assert not engine.alive
    assert not engine.ready
    assert engine.failure == "RuntimeError: the device is on fire"
    with pytest.raises(EngineUnavailable, match="on fire"):
        engine.submit(greedy([1]))
    assert (await settled(engine)).finished[FinishReason.ERROR] == 1


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, a step does not end."""
    event, run = threading.Event(), DecoderRunner.run

    def stuck(self: DecoderRunner, step: object) -> object:
        event.wait(60)
        return run(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(DecoderRunner, "run", stuck)
    event.set()
    yield event
    event.set()


async def test_a_stuck_step_is_not_alive(new_engine, go_on) -> None:
    engine = new_engine(stall_seconds=0.1)
    go_on.clear()
    task = asyncio.create_task(engine.generate(greedy([1], max_tokens=2)))
    await until(lambda: not engine.alive)
    go_on.set()
    await task
    assert engine.alive


async def test_a_stop_beside_a_stuck_step_tells_the_clients_once(new_engine, go_on) -> None:
    """kserve#6259: they hung. The engine thread, should it come back, has nothing to add."""
    engine = new_engine(stall_seconds=0.1)
    stream = engine.submit(sampled([1, 2], max_tokens=MAX_LEN - 2, n=2))
    read = [await anext(stream)]
    go_on.clear()
    waiting = asyncio.create_task(engine.generate(greedy([3], max_tokens=2)))
    await until(lambda: not engine.alive)
    assert not await engine.drain(60)
    await asyncio.to_thread(engine.stop)
    read += [delta async for delta in stream]
    [other] = await waiting
    ends = [delta for delta in read if delta.finish_reason is not None]
    assert sorted(delta.index for delta in ends) == [0, 1]
    assert {(delta.finish_reason, delta.error) for delta in [*ends, other]} == {(FinishReason.ERROR, SHUT_DOWN)}
    stats = engine.stats()
    assert (stats.admitted, stats.finished[FinishReason.ERROR], stats.live) == (2, 2, 0)
    assert not engine.cancel(stream.request_id)
    go_on.set()
    await until(lambda: not engine._thread.is_alive())
    assert engine.stats().finished == stats.finished
    assert stream.finished
    with pytest.raises(EngineUnavailable):
        engine.submit(greedy([1]))


async def test_one_sequence_with_broken_logits_harms_nobody(
    engine: Engine, alone: list[list[int]], monkeypatch
) -> None:
    run = DecoderRunner.run

    def poisoned(self: DecoderRunner, step: object) -> StepResult:
        result = run(self, step)  # type: ignore[arg-type]
        for row, sequence in enumerate(result.sampled):
            if sequence.request.request_id == "poisoned":
                with torch.inference_mode():
                    result.logits[row] = float("nan")
        return result

    monkeypatch.setattr(DecoderRunner, "run", poisoned)
    bad = asyncio.create_task(engine.generate(greedy(PROMPTS[3], request_id="poisoned")))
    assert await answers(engine, [greedy(ids) for ids in PROMPTS]) == alone
    output = (await bad)[0]
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "the model's logits are not finite")
    await settled(engine)


async def test_short_requests_finish_first_and_waiting_ones_take_their_places(new_engine) -> None:
    engine = new_engine(max_batch_sequences=4)
    lengths = [60, 5, 50, 8, 40, 12, 30, 16]
    finished: list[int] = []

    async def client(index: int) -> None:
        await engine.generate(greedy(PROMPTS[0], max_tokens=lengths[index]))
        finished.append(index)

    await asyncio.gather(*(client(index) for index in range(8)))
    assert finished[:2] == [1, 3]
    assert finished.index(5) < finished.index(0)
    occupancy = [step.num_sequences for step in engine.timeline.steps]
    assert max(occupancy) == 4
    # Until nobody waits any more, the batch is full (a step of the change-over may miss one).
    busy = [step.num_sequences for step in engine.timeline.steps if step.num_waiting]
    assert sum(busy) / len(busy) > 3.5


async def test_text_prompts_are_tokenised(engine: Engine) -> None:
    request = GenerationRequest(prompt="héllo", sampling=SamplingParams(temperature=0.0, max_tokens=3))
    output = (await engine.generate(request))[0]
    assert output.prompt_tokens == len("héllo".encode())


async def test_an_id_is_live_once(engine: Engine) -> None:
    first = engine.submit(greedy([1], max_tokens=400, request_id="twice"))
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.submit(greedy([1], request_id="twice"))
    first.cancel()
    await settled(engine)


async def test_an_engine_that_is_not_started_says_so() -> None:
    from tests.engine.tiny import tiny_settings

    engine = Engine(tiny_model(), tiny_settings())
    assert not engine.ready
    with pytest.raises(EngineUnavailable, match="not ready"):
        engine.submit(greedy([1]))


async def test_metrics_count_what_happened(new_engine) -> None:
    engine = new_engine(prefix_caching=False)
    assert engine.stats().steps == 0, "the warm-up is not counted"
    await answers(engine, [greedy(ids, max_tokens=5) for ids in PROMPTS])
    stats = await settled(engine)
    assert stats.admitted == len(PROMPTS)
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert stats.generation_tokens == 5 * len(PROMPTS)
    assert stats.finished[FinishReason.LENGTH] == len(PROMPTS)
    assert stats.num_blocks == stats.num_free_blocks

"""Steps with prompts that are replayed between their attentions: the same logits and tokens as launched ones, in any
bucket, on a device whose recordings are replayed by doing the same work again on the same buffers."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.test_async_engine import PENALTIES, check_equal, crowd, outputs
from tests.engine.test_engine import PROMPTS, greedy, prompt, sampled, settled
from tests.engine.test_graph_runner import RecordingDevice
from tests.engine.tiny import VOCAB, kv_memory, started_engine, tiny_model
from tests.models.harness import SIZES, load, random_model, save
from tests.models.test_families import CASES, SERVED
from tests.models.test_parallel import Threads, among

from carousel.engine.block_pool import blocks_for
from carousel.engine.buckets import NUM_SCRATCH_BLOCKS, NumberTable, bucket_sizes
from carousel.engine.device import Device
from carousel.engine.engine import Engine
from carousel.engine.graph_runner import GraphRunner
from carousel.engine.piecewise import token_buckets
from carousel.engine.ranks import Stop, follow
from carousel.engine.request import GenerationRequest, SamplingParams, Sequence
from carousel.engine.runner import DecoderLike, DecoderRunner
from carousel.engine.sampler import SequenceSampler
from carousel.engine.scheduler import Schedule, ScheduledSequence

LONGEST = 64
SEATS = 4


@pytest.mark.parametrize("most", [1, 15, 16, 17, 64, 100, 256, 512, 1000, 8192])
def test_buckets_of_tokens_are_few_and_waste_little(most: int) -> None:
    sizes = token_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 40
    for tokens in range(1, most + 1):
        size = next(size for size in sizes if size >= tokens)
        assert size - tokens < max(16, min(tokens, 64), tokens // 3)
    assert token_buckets(0) == []
    assert token_buckets(256) == [16, 32, 64, 128, 192, 256]


def test_a_step_s_numbers_stay_while_the_next_one_s_are_on_their_way() -> None:
    table = NumberTable(Device(torch.device("cpu")), torch.device("cpu"), 2, 3)
    table.fill(np.full((2, 3), 1))
    first = table._staging[table._turn]
    table.fill(np.full((2, 3), 2))
    assert bool((first == 1).all())
    assert [section.tolist() for section in table.sections] == [[2, 2, 2], [2, 2, 2]]


# ---- the runner


def sequence_of(ids: list[int], order: int) -> Sequence:
    params = SamplingParams()
    state = SequenceSampler(params, seed=0, index=0, prompt_ids=ids, eos_ids=frozenset(), vocab_size=VOCAB)
    request = GenerationRequest(prompt=ids, sampling=params)
    return Sequence(request, 0, list(ids), len(ids), LONGEST, order, None, state, frozenset())  # type: ignore[arg-type]


@dataclass(eq=False)
class Writer:
    """A sequence, and how many of its tokens have keys and values."""

    sequence: Sequence
    computed: int = 0


class Twins:
    """A runner that launches every operator and one that replays, which are given the same steps."""

    def __init__(self, decoder: DecoderLike, tokens: int, **options: Any) -> None:
        self.blocks = SEATS * blocks_for(LONGEST)
        self.device = RecordingDevice()
        place = decoder, self.blocks, 2 * SEATS, LONGEST
        self.launched = DecoderRunner(*place, device=RecordingDevice())
        self.replayed = GraphRunner(*place, max_rows=SEATS, max_piece_tokens=tokens, device=self.device, **options)
        with torch.inference_mode():
            for runner in (self.launched, self.replayed):
                for pair in runner._executor.kv_cache:
                    for cache in pair:
                        cache.fill_(7.0)
        self.capture = self.replayed.capture()
        self.pieces: list[int] = []  # the buckets of steps in pieces
        self.wholes = self.orders = 0
        self.layers = decoder.num_layers
        self.writers: list[Writer] = []
        self._free = list(range(self.blocks))
        self._last: dict[int, int] = {}  # sequence.order -> what was sampled for it

    def arrive(self, ids: list[int]) -> None:
        if len(self.writers) < SEATS:
            self.writers.append(Writer(sequence_of(ids, self.orders)))
            self.orders += 1

    def leave(self, place: int, preempted: bool) -> None:
        """Its blocks go; if it is preempted, it begins again, with all its tokens, in other blocks."""
        if not self.writers:
            return
        writer = self.writers[place % len(self.writers)]
        sequence = writer.sequence
        self._know(sequence)
        self._free += sequence.block_table
        sequence.block_table = []
        writer.computed = 0
        for runner in (self.launched, self.replayed):
            runner.forget(sequence)
        if not preempted:
            self.writers.remove(writer)

    def _know(self, sequence: Sequence) -> None:
        if sequence.num_pending_tokens:
            sequence.num_pending_tokens = 0
            sequence.token_ids.append(self._last[sequence.order])

    def step(self, chunks: list[int], late: bool) -> None:
        """Compute at most so many tokens of each; ``late``: the host learns what they sample after the next step."""
        entries = []
        for writer, chunk in zip(self.writers, chunks, strict=False):
            sequence = writer.sequence
            if count := min(chunk, sequence.num_tokens - writer.computed, LONGEST - 1 - writer.computed):
                missing = blocks_for(writer.computed + count) - len(sequence.block_table)
                sequence.block_table += [self._free.pop(0) for _ in range(missing)]
                entries.append(ScheduledSequence(sequence, writer.computed, count))
                writer.computed += count
        if entries:
            entries.sort(key=lambda entry: entry.num_new_tokens != 1)
            self._run(Schedule(entries), late)

    def _run(self, schedule: Schedule, late: bool) -> None:
        before = self.device.replayed
        found = self.replayed.run(schedule)
        replayed = self.device.replayed - before
        tokens = sum(entry.num_new_tokens for entry in schedule.entries)
        if replayed > 1:
            self.pieces.append(next(size for size in self.capture.token_buckets if size >= tokens))
        self.wholes += replayed == 1
        wanted = self.launched.run(schedule)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-3, atol=1e-3)
        assert found.sampled == wanted.sampled
        drawn = wanted.logits.argmax(-1)
        for runner in (self.launched, self.replayed):
            runner.feed(wanted.sampled, drawn.clone())
        for entry in schedule.entries:
            if entry.pending:
                self._know(entry.sequence)
        for sequence, token in zip(wanted.sampled, drawn.tolist(), strict=True):
            self._last[sequence.order] = token
            sequence.num_pending_tokens = 1
            if not late:
                self._know(sequence)

    def check_caches(self) -> None:
        """Every slot of every block is what it is for the twin, those included that nobody has written."""
        for one, other in zip(self.replayed._executor.kv_cache, self.launched._executor.kv_cache, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert mine.shape[0] == self.blocks + NUM_SCRATCH_BLOCKS
                torch.testing.assert_close(mine[: self.blocks], theirs, rtol=1e-3, atol=1e-3)


arrivals = st.tuples(st.just("arrive"), st.integers(1, LONGEST - 8), st.integers(0, 99))
departures = st.tuples(st.just("leave"), st.integers(0, SEATS), st.booleans())
steps = st.tuples(
    st.just("step"), st.lists(st.sampled_from([0, 1, 2, 5, 13, 17, 40]), min_size=SEATS, max_size=SEATS), st.booleans()
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(arrivals, steps, steps, departures), min_size=4, max_size=30), st.sampled_from([16, 23, 64]))
def test_any_steps_give_the_same_logits_and_cache(actions: list[tuple[Any, ...]], tokens: int) -> None:
    twins = Twins(tiny_model().decoder, tokens)
    for action, first, second in [("arrive", 20, 1), *actions]:
        if action == "arrive":
            twins.arrive(prompt(first, second))
        elif action == "leave":
            twins.leave(first, second)
        else:
            twins.step(first, second)
    twins.check_caches()


def drive(twins: Twins, vocabulary: int) -> None:
    """Chunks of several prompts beside decodes, in every bucket."""
    for number, length in enumerate((3, 40, 21, 9)):
        twins.arrive([token % vocabulary for token in prompt(length, number)])
        twins.step([3, 17, 13, 5], late=bool(number % 2))
    for chunks in ([1, 17, 1, 1], [1, 30, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1]):
        twins.step(chunks, late=True)
    twins.leave(1, preempted=True)
    for chunks in ([1, 13, 1, 1], [1, 40, 1, 1], [1, 1, 1, 1]):
        twins.step(chunks, late=False)
    twins.check_caches()


@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, tmp_path: Path) -> None:
    """Norms after branches, norms of queries and keys, windows, layers without positions, factors."""
    kind, changes = CASES[case]
    save(random_model(kind(**{**SIZES, **changes})), tmp_path)
    twins = Twins(load(tmp_path, max_model_len=SERVED.get(case)), 64)
    drive(twins, SIZES["vocab_size"])
    assert set(twins.pieces) == {16, 32, 64}
    assert twins.wholes >= 2
    assert twins.capture.token_buckets == (16, 32, 64)
    assert twins.capture.graphs == len(bucket_sizes(SEATS)) + 3 * twins.layers


class Queues:
    """Further ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.queues: list[queue.SimpleQueue[object]] = [queue.SimpleQueue() for _ in range(size)]

    def tell(self, message: object) -> None:
        for one in self.queues[1:]:
            one.put(message)


def test_ranks_replay_the_same_pieces(tmp_path: Path) -> None:
    save(random_model(CASES["qwen3"][0](**{**SIZES, **CASES["qwen3"][1]})), tmp_path)
    followers, devices = Queues(2), [RecordingDevice(), RecordingDevice()]

    def work(ranks: Threads) -> list[torch.Tensor]:
        decoder = load(tmp_path, ranks=ranks)
        if ranks.rank:
            follow(decoder, devices[1], lambda: followers.queues[1].get(timeout=20), lambda _: None)
            return []
        place = decoder, SEATS * 4, SEATS, LONGEST
        runner = GraphRunner(*place, max_rows=2, max_piece_tokens=32, device=devices[0], followers=followers)
        runner.capture()
        found = logits_of(runner)
        followers.tell(Stop())
        return found

    found = among(2, work)[0]
    wanted = logits_of(DecoderRunner(load(tmp_path), SEATS * 4, SEATS, LONGEST, device=RecordingDevice()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert devices[0].recorded == devices[1].recorded == len(bucket_sizes(2)) + 2 * SIZES["num_hidden_layers"]
    assert devices[0].replayed == devices[1].replayed == 2 * SIZES["num_hidden_layers"] + 1


def logits_of(runner: DecoderRunner) -> list[torch.Tensor]:
    """Of a prompt alone, of another one's beside the first one's decode, and of both decodes."""
    sequences = []
    for order, length in enumerate((20, 11)):
        ids = [token % SIZES["vocab_size"] for token in prompt(length, order)]
        made = sequence_of(ids, order)
        made.block_table = list(range(4 * order, 4 * order + 4))
        sequences.append(made)
    first, second = sequences
    found = []
    for entries in (
        [(first, 0, 20)], [(first, 20, 1), (second, 0, 11)], [(first, 21, 1), (second, 11, 1)],
    ):  # fmt: skip
        result = runner.run(Schedule([ScheduledSequence(*entry) for entry in entries]))
        found.append(result.logits.clone())
        for sequence in result.sampled:
            sequence.token_ids.append(5)
    return found


# ---- the engine


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    device = RecordingDevice()
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: device))
    return device


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    engine = started_engine(async_scheduling="off")
    yield engine
    engine.stop()


@pytest.mark.parametrize("tokens", [0, 16, 256])
async def test_everything_that_can_be_asked_for(
    tokens: int, plain: Engine, recording: RecordingDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probabilities of prompts, penalties, stops; with --piecewise-graph-tokens at 0 no piece is recorded."""
    caplog.set_level("INFO", "carousel")
    engine = started_engine(async_scheduling="on", max_batch_sequences=6, piecewise_graph_tokens=tokens)
    try:
        assert engine.graph_capture is not None
        buckets = token_buckets(min(tokens, 64))
        assert engine.graph_capture["token_buckets"] == buckets
        graphs = len(bucket_sizes(6)) + 2 * len(buckets)
        assert recording.recorded == engine.graph_capture["graphs"] == graphs
        said = f"recorded {graphs} graphs in {engine.graph_capture['seconds']:.2f} s: decodes of up to 6 sequences"
        more = f", steps with prompts of up to {buckets[-1]} tokens" if buckets else ""
        assert said + more in caplog.messages
        check_equal(await outputs(engine, crowd()), await outputs(plain, crowd()))
    finally:
        engine.stop()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.sampled_from([16, 40, 64]),
    budget=st.integers(8, 64),
    blocks=st.integers(24, 60),
    scheduling=st.sampled_from(["on", "off"]),
    impatient=st.lists(st.integers(1, 30), min_size=3, max_size=3),
)
def test_tokens_are_the_same_through_preemptions_and_cancels(
    plain: Engine,
    recording: RecordingDevice,
    tokens: int,
    budget: int,
    blocks: int,
    scheduling: str,
    impatient: list[int],
) -> None:
    requests = [greedy(ids, 60) for ids in PROMPTS]
    requests += [sampled(PROMPTS[i], 40, temperature=1.0, seed=i, **PENALTIES) for i in range(3)]
    quitters = [greedy(prompt(20, 50 + i), 200) for i in range(len(impatient))]
    changes = {"piecewise_graph_tokens": tokens, "max_batch_tokens": budget, "kv_cache_memory": kv_memory(blocks)}
    engine = started_engine(async_scheduling=scheduling, **changes)

    async def quit_early(request: GenerationRequest, after: int) -> list[int]:
        stream, seen = engine.submit(request), []
        async for delta in stream:
            seen += delta.token_ids
            if len(seen) >= after:
                engine.cancel(stream.request_id)
        return seen

    async def everybody() -> tuple[list[Any], list[list[int]]]:
        leaving = asyncio.gather(*map(quit_early, quitters, impatient))
        found = await outputs(engine, requests)
        return found, await leaving

    async def wanted() -> tuple[list[Any], list[Any]]:
        fresh = [greedy(list(request.prompt), 200) for request in quitters]  # type: ignore[arg-type]
        return await outputs(plain, requests), await outputs(plain, fresh)

    replayed = recording.replayed
    try:
        found, cut = asyncio.run(everybody())
        asyncio.run(_settled(engine))
    finally:
        engine.stop()
    assert recording.replayed > replayed
    expected, whole = asyncio.run(wanted())
    check_equal(found, expected)
    for short, long in zip(cut, whole, strict=True):
        assert short == long.token_ids[: len(short)]


async def _settled(engine: Engine) -> None:
    await settled(engine)

"""What watchers are told and what a glance shows, held against what the scheduler did."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial

import pytest
from tests.engine.delayed import DelayedDevice, DelayedRunner
from tests.engine.fakes import Bench, expected
from tests.engine.test_scheduler import request
from tests.engine.tiny import kv_memory, started_engine

from carousel.engine.block_pool import BlockPool
from carousel.engine.errors import InvalidRequest
from carousel.engine.events import Event, Reason, What
from carousel.engine.glance import MAX_LISTED, block_ranges, look_at_pool
from carousel.engine.request import FinishReason
from carousel.engine.timeline import StepRecord


class Notebook:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[StepRecord] = []

    def on_events(self, events: list[Event], step: StepRecord | None) -> None:
        self.events += events
        if step is not None:
            self.steps.append(step)

    def of(self, request_id: str, index: int = 0) -> list[Event]:
        return [e for e in self.events if (e.request_id, e.choice) == (request_id, index)]


def watched(**options: object) -> tuple[Bench, Notebook]:
    bench, notebook = Bench(**options), Notebook()  # type: ignore[arg-type]
    bench.core.timeline.watch(notebook)
    return bench, notebook


def test_the_life_of_a_request_is_told_in_order() -> None:
    bench, notebook = watched(max_batch_tokens=16)
    bench.submit(request("a", prompt_len=40, max_tokens=3))
    bench.run()
    told = [(e.what, e.tokens, e.left) for e in notebook.of("a")]
    assert told == [
        (What.ARRIVED, 40, 3),
        (What.ADMITTED, 0, 40),
        (What.CHUNK, 16, 24),
        (What.CHUNK, 16, 8),
        (What.CHUNK, 8, 0),
        (What.FIRST_TOKEN, 0, 0),
        (What.ENDED, 3, 0),
    ]
    assert notebook.of("a")[-1].detail == "length"
    assert [step.index for step in notebook.steps] == list(range(1, len(notebook.steps) + 1))


def test_a_prompt_of_one_token_has_its_chunk_too() -> None:
    bench, notebook = watched()
    bench.submit(request("a", prompt_len=1, max_tokens=2))
    bench.run()
    assert [(e.tokens, e.left) for e in notebook.of("a") if e.what is What.CHUNK] == [(1, 0)]


def test_the_cached_prefix_is_told_at_admission() -> None:
    bench, notebook = watched(max_batch_tokens=64)
    for name in ("first", "second"):
        bench.submit(request(name, prompt_len=40, max_tokens=2, offset=0))
        bench.run()
    admitted = [e for e in notebook.of("second") if e.what is What.ADMITTED]
    assert [(e.tokens, e.left) for e in admitted] == [(32, 8)]


@pytest.mark.parametrize("depth", [0, 1])
def test_chunks_and_losses_account_for_every_token(depth: int) -> None:
    """Random load with preemptions and cancels: cached + computed - lost is what each sequence needed."""
    delayed = partial(DelayedRunner, device=DelayedDevice(lambda: 1)) if depth else None
    bench, notebook = watched(num_blocks=12, max_batch_tokens=32, max_batch_sequences=4, depth=depth, delayed=delayed)
    rng, needed = random.Random(depth), {}
    for number in range(60):
        length = rng.randint(1, 60)
        needed[f"r{number}"] = length
        start = {"offset": rng.randint(0, 3), "arrival": bench.now}
        bench.submit(request(f"r{number}", prompt_len=length, max_tokens=rng.randint(1, 40), **start))
        for _ in range(rng.randint(0, 6)):
            bench.step()
        if rng.random() < 0.1:
            bench.core.end(f"r{number}", FinishReason.CANCELLED)
    bench.run()
    assert any(e.what is What.PREEMPTED for e in notebook.events)
    for name in needed:
        mine = notebook.of(name)
        assert mine[0].what is What.ARRIVED
        assert mine[-1].what is What.ENDED
        assert [e.at for e in mine] == sorted(e.at for e in mine) or depth
        seats = [e.what for e in mine if e.what in (What.ADMITTED, What.PREEMPTED)]
        assert seats == [What.ADMITTED, What.PREEMPTED] * (len(seats) // 2) + [What.ADMITTED] * (len(seats) % 2)
        if mine[-1].detail == "length":
            assert len(seats) % 2 == 1
            runs: dict[int, list[Event]] = defaultdict(list)
            for event in mine:
                if event.what is What.ADMITTED:
                    runs[len(runs)] = [event]
                elif event.what is What.CHUNK:
                    runs[len(runs) - 1].append(event)
            for admitted, *chunks in runs.values():
                if chunks and chunks[-1].left == 0:
                    assert admitted.left == sum(chunk.tokens for chunk in chunks), (admitted, chunks)


def test_nothing_is_collected_while_nobody_watches() -> None:
    bench, notebook = watched()
    bench.core.timeline.unwatch(notebook)
    bench.submit(request("a", max_tokens=3))
    bench.run()
    assert notebook.events == []
    assert bench.core._events == []


def test_a_static_batch_says_which_rows_it_keeps() -> None:
    bench, notebook = watched(max_batch_sequences=2, static=True)
    for name, tokens in (("short", 2), ("long", 6)):
        bench.submit(request(name, max_tokens=tokens))
    while not any(event.held for event in notebook.events):
        bench.step()
    order = notebook.of("short")[0].order
    assert bench.core.glance().idle == [order]
    bench.run()
    assert not notebook.of("long")[-1].held


# ---- why somebody waits


def reasons(bench: Bench) -> dict[str, Reason | None]:
    return {view.request_id: view.reason for view in bench.core.glance().waiting}


def test_waiting_for_a_slot() -> None:
    bench, _ = watched(max_batch_sequences=1)
    for name in "abc":
        bench.submit(request(name))
    assert reasons(bench) == dict.fromkeys("abc", Reason.NEXT)
    bench.step()
    assert reasons(bench) == {"b": Reason.SLOTS, "c": Reason.SLOTS}


def test_waiting_for_blocks_holds_those_behind_by_policy() -> None:
    bench, _ = watched(num_blocks=8, max_batch_tokens=256)
    bench.submit(request("a", prompt_len=64, max_tokens=20))
    bench.step()
    bench.submit(request("large", prompt_len=64, offset=7))
    bench.submit(request("small", prompt_len=4, offset=9))
    bench.step()
    assert reasons(bench) == {"large": Reason.BLOCKS, "small": Reason.POLICY}


def test_waiting_for_the_budget() -> None:
    bench, _ = watched(max_batch_tokens=16)
    bench.submit(request("a", prompt_len=60))
    bench.submit(request("b", prompt_len=60, offset=9))
    bench.step()
    assert reasons(bench) == {"b": Reason.BUDGET}


def test_waiting_for_a_prefix_that_another_computes() -> None:
    bench, _ = watched(max_batch_tokens=16)
    bench.submit(request("a", prompt_len=60, offset=0))
    bench.step()
    bench.submit(request("b", prompt_len=60, offset=0))
    bench.scheduler.limits = bench.scheduler.limits.__class__(64, 4)
    bench.step()
    assert reasons(bench) in ({"b": Reason.PREFIX}, {})


def test_waiting_for_the_group() -> None:
    bench, _ = watched(static=True)
    bench.submit(request("a"))
    bench.step()
    bench.submit(request("b"))
    bench.step()
    assert reasons(bench) == {"b": Reason.GROUP}


# ---- the map


def test_the_map_shows_shared_used_cached_and_free_blocks() -> None:
    pool = BlockPool(10)
    one = pool.allocate(4)
    assert one == [0, 1, 2, 3]
    pool.name(0, b"zero")
    pool.name(3, b"three")
    pool.share([0])
    pool.release([3])
    pool.release([2])
    view = look_at_pool(pool)
    assert (view.cells, view.blocks_per_cell) == ("su.c", 1)
    assert (view.num_used, view.num_shared, view.num_cached, view.num_free) == (2, 1, 1, 7)


def test_the_map_of_a_large_pool_has_cells_of_several_blocks() -> None:
    pool = BlockPool(5000)
    pool.allocate(4000)
    pool.release([0, 1, 2, 3])
    view = look_at_pool(pool)
    assert (view.blocks_per_cell, len(view.cells)) == (4, 1000)
    assert view.cells == "." + "u" * 999


def test_ranges_are_the_table() -> None:
    assert block_ranges([4, 5, 6, 2, 9, 10], 9) == ((4, 3), (2, 1), (9, 2))
    assert block_ranges([4, 6, 8], 2) == ()


def test_a_glance_lists_no_more_than_it_may() -> None:
    bench, _ = watched()
    for number in range(MAX_LISTED + 20):
        bench.submit(request(f"r{number}"))
    glance = bench.core.glance()
    assert (len(glance.waiting), glance.num_waiting) == (MAX_LISTED, MAX_LISTED + 20)
    assert [view.order for view in glance.waiting] == list(range(MAX_LISTED))


# ---- the batch is filled in another way


@pytest.mark.parametrize("depth", [0, 1])
def test_switching_while_it_runs_changes_no_answer(depth: int) -> None:
    """The pool's invariants are checked after every step, and every answer is that of the request alone."""
    delayed = partial(DelayedRunner, device=DelayedDevice(lambda: 1)) if depth else None
    bench = Bench(num_blocks=24, max_batch_tokens=24, max_batch_sequences=4, depth=depth, delayed=delayed)
    rng, wanted, static = random.Random(5), {}, False
    for number in range(80):
        asked = request(f"r{number}", prompt_len=rng.randint(1, 40), max_tokens=rng.randint(1, 20), offset=number % 5)
        wanted[asked.request_id] = asked
        bench.submit(asked)
        for _ in range(rng.randint(0, 5)):
            bench.step()
        if rng.random() < 0.4:
            static = not static
            bench.scheduler.set_static(static)
            bench.check()
    bench.run()
    for name, asked in wanted.items():
        assert bench.outputs[name, 0].token_ids == expected(asked)[0]
    assert bench.pool.num_available == bench.pool.num_blocks


def test_switching_to_continuous_frees_the_rows_of_a_group() -> None:
    bench = Bench(max_batch_sequences=2, static=True)
    for name, tokens in (("short", 2), ("long", 12), ("next", 2)):
        bench.submit(request(name, max_tokens=tokens))
    while not bench.scheduler.idle:
        bench.step()
    bench.scheduler.set_static(False)
    assert not bench.scheduler.idle
    bench.step()
    assert {s.request.request_id for s in bench.scheduler.running} == {"long", "next"}


def test_a_policy_that_preempts_refuses_static_batches() -> None:
    engine = started_engine(policy="priority", kv_cache_memory=kv_memory(16))
    try:
        with pytest.raises(InvalidRequest, match="policy is priority"):
            engine.set_batching(True)
        assert engine.set_batching(False)
    finally:
        engine.stop()

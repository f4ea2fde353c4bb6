"""The host a step ahead of the device: token for token what it is when it waits for every step."""

from __future__ import annotations

import dataclasses
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.delayed import DelayedDevice, DelayedRunner
from tests.engine.fakes import VOCAB, Bench, expected
from tests.engine.test_scheduler import request
from tests.engine.test_schedules import Client, House, clients, houses, make_bench, make_request, play

from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams, Sequence
from carousel.engine.scheduler import Schedule

UNTIMELY = (FinishReason.CANCELLED, FinishReason.TIMEOUT)


def ahead(pace: int = 0, **how: object) -> Bench:
    """A bench whose host runs ahead of its device, which does ``pace`` pieces of work at each launch."""
    return Bench(depth=1, delayed=partial(DelayedRunner, device=DelayedDevice(lambda: pace)), **how)  # type: ignore[arg-type]


stops = st.fixed_dictionaries(
    {
        "stop_token_ids": st.frozensets(st.integers(2, VOCAB - 1), max_size=3),
        "stop": st.sampled_from([(), (), ("5",), ("A", "Q7"), ("n",)]),
        "ignore_eos": st.booleans(),
    }
)


def _stopping(number: int, client: Client, stop: dict[str, object]) -> GenerationRequest:
    made = make_request(number, client)
    return dataclasses.replace(made, sampling=dataclasses.replace(made.sampling, **stop))  # type: ignore[arg-type]


@settings(max_examples=160, deadline=None)
@given(st.lists(st.tuples(clients, stops), min_size=1, max_size=12), houses, st.randoms(use_true_random=False))
def test_any_schedule_gives_the_same_tokens_a_step_ahead(crowd, house: House, chance) -> None:
    people = [client for client, _ in crowd]
    requests = [_stopping(number, client, stop) for number, (client, stop) in enumerate(crowd)]
    device = DelayedDevice(lambda: chance.choice([0, 0, 1, 2, 9]))
    behind = make_bench(requests, house)
    play(behind, people, requests)
    bench = make_bench(requests, house, depth=1, delayed=partial(DelayedRunner, device=device))
    play(bench, people, requests)
    bench.runner.check_reads(bench)
    assert not bench.scheduler.leaving
    for key, output in bench.outputs.items():
        other = behind.outputs[key]
        if output.finish_reason in UNTIMELY or other.finish_reason in UNTIMELY:
            short, long = sorted((output.token_ids, other.token_ids), key=len)
            assert long[: len(short)] == short
        else:
            assert output.token_ids == other.token_ids
            assert (output.text, output.finish_reason, output.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )


def test_decodes_go_on_before_their_tokens_are_known() -> None:
    bench = ahead()
    live = bench.submit(request("one", max_tokens=4))
    for known in (0, 1, 2, 3):
        bench.step()
        assert live.sequences[0].num_output_tokens == known
        assert live.sequences[0].num_sampled_tokens == known + 1
    # All four are on their way: a fifth would be for nothing.
    bench.step()
    assert len(bench.runner.steps) == 4
    assert bench.outputs["one", 0].token_ids == expected(request("one", max_tokens=4))[0]
    assert not bench.step()


def test_a_row_beyond_the_last_token_is_discarded_and_its_blocks_wait_for_it() -> None:
    wanted = request("one", max_tokens=40)
    stop = expected(wanted)[0][6]
    wanted.sampling.stop_token_ids = frozenset({stop})
    bench = ahead()
    live = bench.submit(wanted)
    while not live.sequences[0].finished:
        bench.step()
    assert bench.scheduler.leaving == live.sequences
    assert bench.pool.num_available < bench.pool.num_blocks
    assert bench.step()
    assert bench.pool.num_available == bench.pool.num_blocks
    assert bench.recorder.steps[-1].num_discarded_tokens == 1
    assert bench.recorder.steps[-1].num_sampled_tokens == 0
    assert not bench.step()


def test_a_cancelled_sequences_blocks_wait_for_the_step_in_flight() -> None:
    bench = ahead(max_batch_sequences=2)
    gone = bench.submit(request("gone", max_tokens=40))
    for _ in range(4):
        bench.step()
    bench.core.end("gone", FinishReason.CANCELLED)
    bench.check()
    assert bench.scheduler.leaving == gone.sequences
    bench.submit(request("next", max_tokens=3))
    bench.run()
    assert bench.outputs["next", 0].token_ids == expected(request("next", max_tokens=3))[0]
    assert len(bench.outputs["gone", 0].token_ids) == 3


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    bench = ahead(num_blocks=7, max_batch_tokens=24, max_batch_sequences=4)
    for name in "abcde":
        bench.submit(request(name, prompt_len=20, max_tokens=50))
    preempt = bench.scheduler._preempt

    def checked(victim: Sequence, step: Schedule) -> None:
        assert not victim.num_in_flight
        assert not victim.num_pending_tokens
        preempt(victim, step)

    bench.scheduler._preempt = checked  # type: ignore[method-assign]
    bench.run()
    assert sum(record.num_preemptions for record in bench.recorder.requests) > 0
    for name in "abcde":
        assert bench.outputs[name, 0].token_ids == expected(request(name, 20, 50))[0]


def test_an_urgent_request_gets_its_seat_a_step_ahead_too() -> None:
    bench = ahead(max_batch_sequences=2, policy="priority")
    for name in "ab":
        bench.submit(request(name, max_tokens=40, priority=5))
    for _ in range(3):
        bench.step()
    bench.submit(request("urgent", max_tokens=4, priority=0))
    bench.run()
    assert bench.finish_order[0] == "urgent"
    for name in "ab":
        assert bench.outputs[name, 0].token_ids == expected(request(name, max_tokens=40))[0]


def test_a_prefix_in_flight_is_shared() -> None:
    bench = ahead(num_blocks=64, max_batch_tokens=256, max_batch_sequences=8)
    for i in range(6):
        bench.submit(request(f"r{i}", prompt_len=64, max_tokens=3, offset=0))
    bench.run()
    assert sum(step.num_prefill_tokens for step in bench.runner.steps) == 64 + 5 * 16
    assert all(output.token_ids == expected(request("r0", 64, 3, offset=0))[0] for output in bench.outputs.values())


def test_what_a_discarded_row_wrote_is_not_found_by_who_goes_on_from_there() -> None:
    # The stop is the sixteenth token: with it the block would be full.
    wanted = request("one", prompt_len=8, max_tokens=40, offset=0)
    answer = expected(wanted)[0][:8]
    assert answer[7] not in answer[:7]
    wanted.sampling.stop_token_ids = frozenset({answer[7]})
    bench = ahead()
    bench.submit(wanted)
    bench.run()
    assert bench.outputs["one", 0].token_ids == answer
    assert bench.recorder.steps[-1].num_discarded_tokens == 1
    conversation = [*wanted.prompt, *answer, 5, 6, 7]
    after = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    second = GenerationRequest(prompt=conversation, sampling=after, request_id="two")  # type: ignore[arg-type]
    bench.submit(second)
    bench.run()
    assert bench.outputs["two", 0].cached_tokens == 0
    assert bench.outputs["two", 0].token_ids == expected(second)[0]
    bench.runner.check_reads(bench)


def test_blocks_that_decodes_filled_are_found_by_who_goes_on_from_there() -> None:
    wanted = request("one", prompt_len=8, max_tokens=40, offset=0)
    bench = ahead()
    bench.submit(wanted)
    bench.run()
    conversation = [*wanted.prompt, *bench.outputs["one", 0].token_ids, 5, 6, 7]
    after = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    second = GenerationRequest(prompt=conversation, sampling=after, request_id="two")  # type: ignore[arg-type]
    bench.submit(second)
    bench.run()
    # Of 48 tokens the last was never computed.
    assert bench.outputs["two", 0].cached_tokens == 32
    assert bench.outputs["two", 0].token_ids == expected(second)[0]


def test_a_step_ahead_costs_a_row_per_stop_and_none_per_length() -> None:
    bench = ahead(max_batch_sequences=8)
    for name in "abcd":
        bench.submit(request(name, max_tokens=12))
    bench.run()
    assert sum(step.num_tokens for step in bench.runner.steps) == 4 * (8 + 12 - 1)
    assert sum(step.num_discarded_tokens for step in bench.recorder.steps) == 0

"""What the engine itself knows of tenants: shares of the queue, weights that change, priorities within a tenant."""

from __future__ import annotations

import pytest
from tests.engine.fakes import Bench

from carousel.engine.errors import QueueFull
from carousel.engine.ledger import Ledger
from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams
from carousel.engine.timeline import Refusal


def refusals(ledger: Ledger) -> dict[Refusal, int]:
    found = ledger.snapshot(draining=False, alive=True).refusals
    return {why: count for why, count in found.items() if count}


def test_a_tenant_fills_no_more_than_its_share_of_the_queue() -> None:
    ledger = Ledger(max_queue_requests=10, max_queue_tokens=1000, num_seats=1, clock=lambda: 0.0)
    running = ledger.admit(10, 1, 0.0, "a", 0.3)
    ledger.started(running)
    waiting = [ledger.admit(10, 1, 0.0, "a", 0.3) for _ in range(3)]
    with pytest.raises(QueueFull, match=r"3 requests of tenant a are waiting \(its share of the queue is 3\)"):
        ledger.admit(10, 1, 0.0, "a", 0.3)
    for _ in range(7):
        ledger.admit(10, 1, 0.0, "b")  # the rest is there for others
    with pytest.raises(QueueFull, match=r"10 requests are waiting \(limit 10\)"):
        ledger.admit(10, 1, 0.0, "b")
    assert refusals(ledger) == {Refusal.QUEUE_SHARE: 1, Refusal.QUEUE_FULL: 1}
    ledger.left(waiting[0], FinishReason.CANCELLED)
    ledger.admit(10, 1, 0.0, "a", 0.3)


def test_a_share_of_tokens_lets_one_request_in_whatever_its_size() -> None:
    ledger = Ledger(max_queue_requests=100, max_queue_tokens=1000, num_seats=1, clock=lambda: 0.0)
    ledger.started(ledger.admit(1, 1, 0.0, "x"))
    ledger.admit(400, 1, 0.0, "a", 0.1)
    with pytest.raises(QueueFull, match=r"400 prompt tokens of tenant a are waiting \(its share is 100\)"):
        ledger.admit(1, 1, 0.0, "a", 0.1)
    ledger.admit(1, 1, 0.0, "b", 0.1)


def submit(bench: Bench, name: str, tenant: str, priority: int = 0, tokens: int = 4) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    bench.submit(GenerationRequest(prompt=[3] * 8, sampling=params, request_id=name, tenant=tenant, priority=priority))


def test_a_tenant_s_own_requests_go_by_priority_under_fair() -> None:
    bench = Bench(max_batch_sequences=1, policy="fair")
    for name, tenant, priority in (("a9", "a", 9), ("a5", "a", 5), ("b9", "b", 9), ("a1", "a", 1)):
        submit(bench, name, tenant, priority)
    bench.run()
    # Both tenants get their turns; within one the lowest number goes first.
    assert [name for name in bench.finish_order if name.startswith("a")] == ["a1", "a5", "a9"]
    assert bench.finish_order.index("b9") <= 1


def test_new_weights_count_from_the_next_step_on() -> None:
    def served_of_gold(weight: float) -> int:
        bench = Bench(max_batch_sequences=1, policy="fair", prefix_caching=False)
        bench.scheduler.policy.set_weights({"gold": weight}, 1.0)
        for index in range(12):
            submit(bench, f"gold{index}", "gold")
            submit(bench, f"free{index}", "free")
        bench.run()
        return sum(name.startswith("gold") for name in bench.finish_order[:12])

    assert served_of_gold(1.0) == 6
    assert served_of_gold(3.0) == 9
    assert served_of_gold(0.34) == 3


def test_steps_tell_what_kept_others_out_and_what_was_left() -> None:
    bench = Bench(max_batch_sequences=2, max_batch_tokens=8)
    for index in range(3):
        submit(bench, str(index), "a")
    bench.step()
    bench.step()
    first, second = bench.recorder.steps
    assert (first.obstacle, first.num_left_tokens) == ("budget", 0)
    assert second.obstacle in ("budget", "slots")
    bench.run()
    assert {step.obstacle for step in bench.recorder.steps} >= {"slots", ""}
    long = Bench(max_batch_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    long.submit(GenerationRequest(prompt=[3] * 30, sampling=params))
    long.step()
    assert long.recorder.steps[0].num_left_tokens == 22

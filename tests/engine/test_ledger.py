"""Admission and the books: the identity holds whatever happens, and refusals say how long to wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carousel.engine.errors import EngineUnavailable, InvalidRequest, QueueFull
from carousel.engine.ledger import Account, Counters, Ledger
from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ledger(clock: Clock | None = None, requests: int = 3, tokens: int = 100, seats: int = 1) -> Ledger:
    return Ledger(requests, tokens, seats, clock or Clock())


def stats(books: Ledger) -> EngineStats:
    return books.snapshot(draining=False, alive=True)


@given(st.lists(st.tuples(st.sampled_from(["admit", "start", "preempt", "finish", "cancel"]), st.integers(0, 9))))
def test_admitted_is_finished_plus_live_after_any_history(history: list[tuple[str, int]]) -> None:
    books = ledger(requests=6, tokens=50, seats=2)
    accounts: list[Account] = []
    tried = refused = 0
    for verb, number in history:
        waiting = [a for a in accounts if not a.running and not a.closed]
        running = [a for a in accounts if a.running]
        if verb == "admit":
            tried += 1
            try:
                accounts.append(books.admit(number + 1, 1, 100.0))
            except QueueFull:
                refused += 1
        elif verb == "start" and waiting:
            books.started(waiting[number % len(waiting)])
        elif verb in ("preempt", "finish") and running:
            account = running[number % len(running)]
            books.stopped(account, ended=verb == "finish")
            if verb == "finish":
                books.left(account, FinishReason.EOS)
        elif verb == "cancel" and waiting:
            books.left(waiting[number % len(waiting)], FinishReason.CANCELLED)
        now = stats(books)
        assert now.admitted == sum(now.finished.values()) + now.live == tried - refused
        assert now.rejected == refused
        assert now.num_tokens_waiting == sum(a.num_tokens for a in accounts if not a.running and not a.closed)
        assert now.num_sequences_running == sum(a.running for a in accounts)


def test_a_request_with_several_choices_runs_while_one_of_them_does() -> None:
    books = ledger()
    account = books.admit(10, 2, 100.0)
    books.started(account)
    books.started(account)
    books.stopped(account, ended=False)
    assert (stats(books).num_requests_running, stats(books).num_requests_waiting) == (1, 0)
    books.stopped(account, ended=False)
    assert (stats(books).num_requests_running, stats(books).num_requests_waiting) == (0, 1)
    assert stats(books).num_tokens_waiting == 10


def test_a_single_large_request_is_let_into_an_empty_queue() -> None:
    books = ledger(tokens=100)
    books.admit(5000, 1, 100.0)
    with pytest.raises(QueueFull, match=r"5000 prompt tokens are waiting \(limit 100\)"):
        books.admit(1, 1, 100.0)


def test_the_bound_is_on_what_waits_not_on_what_has_a_seat_coming() -> None:
    books = ledger(requests=2, seats=3)
    for _ in range(5):
        books.admit(1, 1, 100.0)
    with pytest.raises(QueueFull, match="5 requests are waiting"):
        books.admit(1, 1, 100.0)


def test_retry_after_follows_the_measured_drain_rate() -> None:
    clock = Clock()
    books = ledger(clock, requests=10, tokens=1000, seats=1)
    accounts = [books.admit(50, 1, clock.now) for _ in range(10)]
    for account in accounts:  # 50 prompt tokens leave the queue every second
        clock.now += 1.0
        books.started(account)
        books.stopped(account, ended=True)
        books.left(account, FinishReason.EOS)
    for _ in range(2):
        books.admit(500, 1, clock.now)
    with pytest.raises(QueueFull) as refused:
        books.admit(1, 1, clock.now)
    assert refused.value.retry_after_s == pytest.approx(1000 / 50, rel=0.1)
    assert f"try again in {round(refused.value.retry_after_s)} s" in str(refused.value)
    assert stats(books).queue_seconds == pytest.approx(20, rel=0.1)
    clock.now += 3.0
    assert stats(books).oldest_wait_s == 3.0


def test_a_burst_after_a_lull_is_not_measured_by_the_lull() -> None:
    clock = Clock()
    books = ledger(clock, requests=100, tokens=100_000, seats=4)
    for _ in range(5):  # 10 tokens every 5 s, for want of requests
        account = books.admit(10, 1, clock.now)
        clock.now += 0.1
        books.started(account)
        books.stopped(account, ended=True)
        books.left(account, FinishReason.EOS)
        clock.now += 4.9
    burst = [books.admit(100, 1, clock.now) for _ in range(20)]
    for account in burst[:10]:
        clock.now += 0.5
        books.started(account)
    # 1050 tokens in the 5.5 s that there was a queue; 1000 wait.
    assert stats(books).queue_seconds == pytest.approx(1000 * 5.5 / 1050)


def test_a_queue_that_does_not_move_is_not_forgotten() -> None:
    clock = Clock()
    books = ledger(clock, requests=100, tokens=100_000, seats=1)
    books.started(books.admit(10, 1, clock.now))
    books.admit(10, 1, clock.now)
    seen = []
    for _ in range(120):
        clock.now += 1.0
        seen.append(stats(books).queue_seconds)
    assert seen == sorted(seen)
    assert seen[-1] == 120.0


def test_tokens_running_are_what_the_kv_blocks_hold() -> None:
    books = Ledger(10, 1000, 4, Clock(), block_tokens=16)
    books.report(Counters(), 100, 60, 30)
    assert stats(books).num_tokens_running == 160


def test_nobody_is_sent_away_for_long_on_a_rate_measured_over_a_moment() -> None:
    clock = Clock()
    books = ledger(clock, requests=10, tokens=10_000, seats=1)
    books.started(books.admit(1, 1, clock.now))
    books.admit(9_000, 1, clock.now)
    with pytest.raises(QueueFull, match="try again in 60 s") as refused:
        books.admit(9_000, 1, clock.now)
    assert refused.value.retry_after_s == 60.0


def test_llmd_769_gauges_return_to_zero_when_clients_vanish() -> None:
    books = ledger(requests=5)
    accounts = [books.admit(10, 1, 100.0) for _ in range(5)]
    assert stats(books).queue_seconds > 0
    for account in accounts:
        books.left(account, FinishReason.CANCELLED)
    now = stats(books)
    assert (now.num_requests_waiting, now.num_tokens_waiting, now.oldest_wait_s, now.queue_seconds) == (0, 0, 0.0, 0.0)


def test_a_request_leaves_once() -> None:
    books = ledger()
    account = books.admit(1, 1, 100.0)
    books.left(account, FinishReason.EOS)
    books.left(account, FinishReason.ERROR)
    assert sum(stats(books).finished.values()) == 1


def test_closed_books_refuse_with_the_reason() -> None:
    books = ledger()
    books.close("draining")
    with pytest.raises(EngineUnavailable, match="draining"):
        books.admit(1, 1, 100.0)
    books.close(None)
    books.admit(1, 1, 100.0)
    with pytest.raises(RuntimeError, match="live"):
        books.reset()


def test_reports_are_copies() -> None:
    books, counters = ledger(), Counters(generation_tokens=5)
    books.report(counters, 10, 4, 3)
    counters.generation_tokens = 9
    now = stats(books)
    assert now.generation_tokens == 5
    assert now.kv_cache_usage == pytest.approx(0.3)
    assert not books.wait_idle(0.0) or now.live == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**5000, "an integer of 16610 bits"),
        ("x" * 10**6, "'" + "x" * 118 + "…"),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, ...]"),
        (1.5, "1.5"),
        ({"a": 1}, "{'a': 1}"),
    ],
    ids=["huge integer", "long text", "long list", "number", "dict"],
)
def test_errors_show_any_value_briefly(value: object, shown: str) -> None:
    assert str(InvalidRequest("field", value, "less")) == f"field: got {shown}, allowed: less"

"""Quotas on a clock that the test turns: what is refused, when it is taken again, and what clients are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carousel.engine.errors import InvalidRequest
from carousel.engine.request import GenerationRequest, SamplingParams
from carousel.protocols.errors import QuotaExceeded, describe
from carousel.tenancy import quota
from carousel.tenancy.policy import Policies, parse_policies
from carousel.tenancy.quota import Governor, span


class House:
    """A governor, its clock and its policies, which a test may exchange."""

    def __init__(self, text: str = "") -> None:
        self.now = 1000.0
        self.policies: Policies = parse_policies(text)
        self.governor = Governor(lambda: self.policies, lambda: self.now)

    def enter(self, tenant: str = "a", prompts: int = 1, n: int = 1, priority: int = 0) -> quota.Ticket:
        return self.governor.enter(tenant, self.requests(prompts, n, priority))

    @staticmethod
    def requests(prompts: int = 1, n: int = 1, priority: int = 0) -> list[GenerationRequest]:
        params = SamplingParams(n=n)
        return [GenerationRequest(prompt="x", sampling=params, priority=priority) for _ in range(prompts)]

    def refused(self, tenant: str = "a", prompts: int = 1) -> QuotaExceeded:
        with pytest.raises(QuotaExceeded) as caught:
            self.enter(tenant, prompts)
        return caught.value


def test_requests_a_minute_come_back_steadily() -> None:
    house = House("default: {requests_per_minute: 6}")
    refusals: list[tuple[str, str]] = []
    house.governor.on_refusal = lambda *which: refusals.append(which)
    for _ in range(6):
        house.enter().leave()
    error = house.refused()
    assert (error.quota, error.retry_after_s, error.reset_s) == ("requests", 10.0, 60.0)
    assert "tenant a has used its 6 requests a minute" in str(error)
    house.now += 9.9
    house.refused()
    house.now += 0.2
    house.enter().leave()
    house.refused()
    assert refusals == [("a", "requests")] * 3


def test_each_tenant_has_its_own() -> None:
    house = House("default: {requests_per_minute: 1}\ntenants: {gold: {requests_per_minute: null}}")
    house.enter("a").leave()
    house.refused("a")
    house.enter("b").leave()
    house.enter("").leave()  # nobody in particular is one, too
    house.refused("")
    for _ in range(100):
        house.enter("gold").leave()


def test_a_call_with_more_prompts_than_a_minute_has_is_taken_by_a_full_bucket() -> None:
    house = House("default: {requests_per_minute: 6}")
    house.enter(prompts=12).leave()
    house.now += 60.0
    assert house.refused(prompts=6).retry_after_s == pytest.approx(60.0)  # it has paid back its debt just now
    house.now += 60.0
    house.enter(prompts=6).leave()


def test_tokens_are_paid_when_they_are_known() -> None:
    house = House("default: {tokens_per_minute: 600}")
    ticket = house.enter()
    ticket.prompt(400)
    house.governor.spent("a", 500)  # the answer
    ticket.leave()
    error = house.refused()
    assert error.quota == "tokens"
    assert error.retry_after_s == pytest.approx(30.1)  # 301 tokens at 10 a second
    assert error.reset_s == pytest.approx(90.0)
    house.now += 31.0
    house.enter()


def test_concurrent_requests_count_choices_and_come_back_when_calls_leave() -> None:
    house = House("default: {concurrent_requests: 4}")
    first = house.enter(n=3)
    house.enter()
    error = house.refused()
    assert error.quota == "concurrent"
    assert error.retry_after_s >= 1
    first.leave()
    first.leave()  # twice is once
    house.enter(n=3)
    house.refused()
    with pytest.raises(InvalidRequest, match="got 5, allowed: at most 4 at once"):
        house.enter(n=5)


def test_who_left_is_not_forgotten_in_what_others_are_told_to_wait() -> None:
    house = House("default: {concurrent_requests: 1}")
    for _ in range(60):
        ticket = house.enter()
        house.now += 20.0
        ticket.leave()
    house.enter()
    assert 15 < house.refused().retry_after_s <= 20


def test_a_peek_takes_nothing() -> None:
    house = House("default: {requests_per_minute: 1}")
    for _ in range(5):
        house.governor.peek("a")
    house.enter()
    with pytest.raises(QuotaExceeded):
        house.governor.peek("a")


def test_new_limits_hold_at_once() -> None:
    house = House("default: {requests_per_minute: 60, concurrent_requests: 9}")
    house.enter()
    house.policies = parse_policies("default: {requests_per_minute: 2, concurrent_requests: 1}")
    assert house.refused().quota == "concurrent"
    house.policies = parse_policies("default: {requests_per_minute: 2}")
    house.enter()
    house.enter()
    assert house.refused().quota == "requests"
    house.policies = Policies()
    house.enter()


def test_priorities_are_those_of_the_tenant_s_classes() -> None:
    house = House(
        "priority_classes: {fast: -5, normal: 0, slow: 9}\n"
        "tenants: {a: {priority_classes: [slow, fast]}, b: {priority_classes: [normal]}}"
    )

    def priority(tenant: str, asked: int) -> int:
        requests = house.requests(priority=asked)
        house.governor.enter(tenant, requests)
        return requests[0].priority

    assert [priority("a", asked) for asked in (0, 9, -5)] == [9, 9, -5]
    assert priority("b", 0) == 0
    assert priority("whoever", 77) == 77  # no classes are set for it
    with pytest.raises(InvalidRequest, match=r"priority: got -5, allowed: 0 \(normal\) for tenant 'b'"):
        priority("b", -5)


def test_the_share_of_the_queue_is_handed_to_the_engine() -> None:
    house = House("default: {queue_share: 0.25}")
    requests = house.requests(2)
    house.governor.enter("a", requests)
    assert [request.queue_share for request in requests] == [0.25, 0.25]


def test_headers_are_those_of_openai() -> None:
    house = House("default: {requests_per_minute: 60, tokens_per_minute: 6000}")
    house.enter().prompt(50)
    assert house.governor.headers("a") == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5950",
        "x-ratelimit-reset-tokens": "500ms",
    }
    house.policies = Policies()
    assert house.governor.headers("a") == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.12, "120ms"), (1, "1s"), (1.26, "1.3s"), (59.99, "1m0s"), (360, "6m0s")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_tenants_beyond_the_bound_are_forgotten_but_for_those_who_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_TENANTS", 3)
    house = House("default: {requests_per_minute: 1, concurrent_requests: 5}")
    house.enter("here")
    for index in range(50):
        house.enter(f"t{index}").leave()
    assert len(house.governor._accounts) == 3
    house.refused("here")


def test_the_refusal_in_words_of_the_protocols() -> None:
    info = describe(QuotaExceeded("no", "tokens", 12.2, 60.0))
    assert (info.status, info.grpc_code, info.code) == (429, "RESOURCE_EXHAUSTED", "rate_limit_exceeded")
    assert info.headers == {"Retry-After": "13", "RateLimit-Reset": "60"}


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 3)), max_size=60))
def test_in_any_minute_no_more_than_twice_the_limit_goes_through(arrivals: list[tuple[float, int]]) -> None:
    """A full bucket and what flows in meanwhile, which is what a steadily filling bucket promises."""
    house, taken = House("default: {requests_per_minute: 10}"), []
    told: list[QuotaExceeded] = []
    for pause, prompts in arrivals:
        house.now += pause
        try:
            house.enter(prompts=prompts).leave()
            taken.append((house.now, prompts))
        except QuotaExceeded as error:
            told.append(error)
    for start, _ in taken:
        assert sum(prompts for at, prompts in taken if start <= at < start + 60) <= 20
    assert all(0 < error.retry_after_s <= error.reset_s for error in told)

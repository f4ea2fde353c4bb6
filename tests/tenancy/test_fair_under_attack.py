"""'What must hold' 2: a tenant that offers 100 x its share changes others' p99 time to first token by 10 % at most.

On a fake runner whose steps have a price in a time of their own, so the figures are the same on every machine. What
was measured with a real model is in docs/tenants.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.engine.fakes import Bench
from tests.engine.test_meter import Quick

from carousel.engine.request import GenerationRequest, SamplingParams
from carousel.protocols.errors import QuotaExceeded
from carousel.tenancy.policy import parse_policies
from carousel.tenancy.quota import Governor, Ticket

SLOTS, OTHERS = 20, 9
SHARE = 2.0
"""Requests a second of each tenant, of which ten keep the batch busy and not full."""

STEP_S, TOKEN_S = 0.004, 0.0002
POLICY = """
default: {queue_share: 0.2}
tenants: {attacker: {concurrent_requests: 2, requests_per_minute: 120}}
"""


class Arrival(NamedTuple):
    at: float
    tenant: str
    prompt: int
    answer: int


def arrivals(tenant: str, rate: float, seconds: float) -> Iterator[Arrival]:
    """Poisson, by a seed of the tenant's own: what the others ask is the same in every run."""
    draw, at = random.Random(tenant), 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        yield Arrival(at, tenant, draw.randrange(20, 120), draw.randrange(8, 40))


class House(Bench):
    """The engine core behind the governor, on a clock that steps push on by what they computed."""

    def __init__(self, policy: str, text: str) -> None:
        super().__init__(num_blocks=2000, max_batch_tokens=128, max_batch_sequences=SLOTS, policy=policy, delayed=Quick)
        policies = parse_policies(text)
        self.governor = Governor(lambda: policies, lambda: self.now)
        self.tickets: dict[str, Ticket] = {}
        self.refused = 0
        inner = self.core._runner.run

        def run(schedule: Any) -> Any:
            self.now += STEP_S + TOKEN_S * schedule.num_tokens
            return inner(schedule)

        self.core._runner.run = run

    def arrive(self, one: Arrival) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=one.answer, ignore_eos=True)
        request = GenerationRequest(
            prompt=[2 + one.prompt % 60] * one.prompt, sampling=params, tenant=one.tenant, arrival=one.at,
            cache_salt=str(one.at),
        )  # fmt: skip
        try:
            ticket = self.governor.enter(one.tenant, [request])
        except QuotaExceeded:
            self.refused += 1
            return
        ticket.prompt(one.prompt)
        self.tickets[request.request_id] = ticket
        self.submit(request)

    def serve(self, coming: list[Arrival]) -> None:
        seen, queue = 0, iter(sorted(coming))
        following = next(queue, None)
        while following is not None or self.core.has_work:
            while following is not None and following.at <= self.now:
                self.arrive(following)
                following = next(queue, None)
            if not self.core.step() and following is not None:
                self.now = max(self.now, following.at)
            for record in self.recorder.requests[seen:]:
                self.tickets.pop(record.request_id).leave()
            seen = len(self.recorder.requests)

    def p99_of_others(self) -> float:
        times = sorted(
            record.ttft_s
            for record in self.recorder.requests
            if record.tenant != "attacker" and record.ttft_s is not None
        )
        return times[int(0.99 * len(times))]


def served(factor: float, policy: str = "fair", text: str = POLICY, seconds: float = 30.0) -> House:
    house = House(policy, text)
    coming = [one for index in range(OTHERS) for one in arrivals(f"t{index}", SHARE, seconds)]
    house.serve(coming + list(arrivals("attacker", SHARE * factor, seconds)))
    return house


def test_a_hundred_times_its_share_changes_others_p99_by_a_tenth_at_most() -> None:
    calm, attacked = served(1), served(100)
    assert attacked.refused > 50 * SHARE * 30
    before, after = calm.p99_of_others(), attacked.p99_of_others()
    print(f"p99 of the others: {before * 1000:.1f} ms, under attack {after * 1000:.1f} ms: {after / before:.3f}")
    assert after <= 1.1 * before
    others = [record for record in attacked.recorder.requests if record.tenant != "attacker"]
    assert len(others) == sum(len(list(arrivals(f"t{index}", SHARE, 30.0))) for index in range(OTHERS))


def test_without_quotas_and_shares_the_same_attack_is_felt() -> None:
    """That the test above can fail."""
    calm, attacked = served(1, "fcfs", "", 8.0), served(20, "fcfs", "", 8.0)
    assert attacked.p99_of_others() > 5 * calm.p99_of_others()


def test_shares_alone_keep_the_queue_fair() -> None:
    """Weights without quotas: an attacker's queue is its own, whatever its length."""
    weights = "default: {}"
    fcfs, fair = served(20, "fcfs", weights, 8.0), served(20, "fair", weights, 8.0)
    assert fair.p99_of_others() < 0.2 * fcfs.p99_of_others()

"""What requests take of the engine adds up to what the engine spent, whatever happens to them."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.delayed import DelayedDevice, DelayedRunner
from tests.engine.fakes import Bench
from tests.engine.tiny import started_engine, tiny_model

from carousel.engine.block_pool import BlockPool
from carousel.engine.meter import WHOLE_BLOCK, Amounts, RequestUsage, Work, apportion, work_of
from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams
from carousel.engine.runner import StepResult
from carousel.engine.sampler import SampledToken
from carousel.engine.scheduler import Schedule


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
def test_shares_add_up_and_are_fair_to_a_nanosecond(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    whole = sum(weights)
    for share, weight in zip(shares, weights, strict=True):
        exact = total * weight / whole if whole else total / len(weights)
        assert abs(share - exact) <= 1 + exact * 1e-12
        assert share or not weight or exact < 1 or not total


def test_the_largest_remainder_gets_what_is_left() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(100, [1, 2, 3]) == [17, 33, 50]
    assert apportion(7, [0, 0]) == [4, 3]
    assert apportion(5, []) == []


def test_the_work_of_a_model_is_its_multiplications() -> None:
    config = tiny_model().decoder.config
    assert work_of(config) == Work(2 * (32 * (2 * 32 + 2 * 16 + 3 * 64)), 2 * 2 * 32)


def test_a_shared_block_is_held_in_parts() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.held(blocks, WHOLE_BLOCK) == 3 * WHOLE_BLOCK
    before = pool.sharing
    pool.name(blocks[0], b"a")
    pool.share(blocks[:1])
    assert pool.sharing != before
    assert pool.held(blocks, WHOLE_BLOCK) == 2 * WHOLE_BLOCK + WHOLE_BLOCK // 2


class Metered(Bench):
    """The fake model, on steps of odd lengths, with every usage kept."""

    def __init__(self, seed: int, **limits: Any) -> None:
        super().__init__(**limits)
        self.draw = random.Random(seed)
        self.usages: list[RequestUsage] = []
        self.core.timeline.meters.append(self.usages.append)
        self.durations_ns = self.slots_ns = self.blocks_ns = 0

    def step(self) -> bool:
        self.now += self.draw.random() * 1e-3
        ran = self.core._runner.run

        def run(schedule: Any) -> Any:
            result = ran(schedule)
            self.now += self.draw.random() * 0.05  # the step's time
            return result

        self.core._runner.run = run
        worked = self.core.step()
        self.core._runner.run = ran
        self.check()
        return worked

    def total(self) -> Amounts:
        found = Amounts()
        for usage in self.usages:
            found.add(usage.amounts)
        return found

    def expect_exact(self) -> None:
        """Sums over requests are the engine's own counts, which are kept elsewhere and otherwise."""
        total, stats = self.total(), self.ledger.snapshot(draining=False, alive=True)
        assert len(self.usages) == stats.admitted == len(self.recorder.requests)
        assert total.prompt_tokens == stats.prompt_tokens
        assert total.generated_tokens == stats.generation_tokens
        assert total.cached_tokens == stats.prefix_cache_hits
        assert total.recomputed_tokens == stats.recomputed_tokens
        steps_ns = sum(round(step.duration_s * 1e9) for step in self.recorder.steps)
        assert total.device_ns == stats.device_ns == steps_ns
        assert total.slot_ns == stats.slot_ns
        assert total.block_ns == stats.block_ns
        assert not self.core.meter._rows
        assert not self.core.meter._weights


class Quick:
    """A runner and sampler that computes nothing: for books of many requests."""

    def __init__(self, pool: BlockPool) -> None:
        self.tokens: list[SampledToken] = []

    def run(self, schedule: Schedule) -> StepResult:
        sampled = [entry.sequence for entry in schedule.entries if entry.samples]
        self.tokens = [SampledToken(2 + sequence.order % 60, None) for sequence in sampled]
        return StepResult(sampled, torch.empty(0), [])

    def launch(self, logits: object, sequences: object, last_tokens: object = None) -> Quick:
        return self

    def wait(self) -> list[SampledToken]:
        return self.tokens

    def check(self, pool: BlockPool) -> None:
        """Nothing: it reads no block."""


def prompt(draw: random.Random, shared: list[int], longest: int = 60) -> list[int]:
    own = [draw.randrange(64) for _ in range(draw.randrange(1, longest))]
    return (shared + own) if draw.random() < 0.4 else own


def storm(bench: Metered, requests: int, tenants: int, cancels: float, longest: int = 60, answers: int = 60) -> None:
    """Random arrivals of random tenants, of whom some leave again; until all is over."""
    draw = bench.draw
    shared = [draw.randrange(64) for _ in range(40)]
    sent, live = 0, []
    while sent < requests or live:
        while sent < requests and len(live) < 40 and draw.random() < 0.8:
            params = SamplingParams(
                temperature=0.0, n=draw.choice((1, 1, 1, 2)), max_tokens=draw.randrange(1, answers), ignore_eos=True
            )
            request = GenerationRequest(
                prompt=prompt(draw, shared, longest), sampling=params, tenant=f"t{draw.randrange(tenants)}",
                arrival=bench.now, priority=draw.randrange(3),
            )  # fmt: skip
            bench.submit(request, bench.now + 0.2 if draw.random() < 0.05 else None)
            live.append(request.request_id)
            sent += 1
        if live and draw.random() < cancels:
            bench.core.end(draw.choice(live), FinishReason.CANCELLED)
        bench.step()
        live = [one for one in live if one in bench.core._live]
    bench.run()


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 14, "policy": "fair"},
        {"num_blocks": 14, "policy": "priority"},
        {"num_blocks": 14, "policy": "fair", "depth": 1, "delayed": partial(DelayedRunner, device=DelayedDevice())},
        {"num_blocks": 14, "prefix_caching": False},
        {"num_blocks": 60, "static": True},
    ],
    ids=lambda limits: ",".join(f"{name}={value}" for name, value in limits.items() if name != "delayed"),
)
def test_sums_are_the_engine_s_own_counts(limits: dict[str, Any]) -> None:
    bench = Metered(5, max_batch_sequences=6, **{"delayed": Quick, **limits})
    storm(bench, 300, 5, cancels=0.1)
    bench.expect_exact()
    assert {usage.finish_reason for usage in bench.usages} >= {FinishReason.LENGTH, FinishReason.CANCELLED}
    stats = bench.ledger.snapshot(draining=False, alive=True)
    if not limits.get("static"):
        assert stats.preemptions > 2
        assert stats.recomputed_tokens > 10


def test_ten_thousand_requests_of_fifty_tenants() -> None:
    """'What must hold' 1 of the issue: random cancels, preemptions and deadlines; the sums are exact."""
    bench = Metered(11, num_blocks=40, max_batch_sequences=12, max_batch_tokens=96, policy="priority", delayed=Quick)
    bench.check = lambda: None  # the block pool's own proof after each step has tests of its own
    storm(bench, 10_000, 50, cancels=0.15, longest=24, answers=24)
    bench.expect_exact()
    by_tenant: dict[str, Amounts] = {}
    for usage in bench.usages:
        by_tenant.setdefault(usage.tenant, Amounts()).add(usage.amounts)
    assert len(by_tenant) == 50
    ends = Counter(usage.finish_reason for usage in bench.usages)
    assert ends[FinishReason.CANCELLED] > 300
    assert ends[FinishReason.TIMEOUT] > 100
    assert bench.ledger.snapshot(draining=False, alive=True).preemptions > 500


def test_long_prompts_and_long_contexts_pay_for_attention() -> None:
    bench = Metered(1, num_blocks=64, max_batch_tokens=64)
    for name, length in (("short", 4), ("long", 300)):
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        bench.submit(GenerationRequest(prompt=[2] * length, sampling=params, tenant=name, request_id=name))
    bench.run()
    short, long = sorted(bench.usages, key=lambda usage: usage.amounts.prompt_tokens)
    assert short.tenant == "short"
    assert long.amounts.device_ns > 1.2 * short.amounts.device_ns
    assert long.amounts.block_ns > 3 * short.amounts.block_ns
    assert long.amounts.slot_ns == pytest.approx(short.amounts.slot_ns, rel=0.2)


def test_who_never_came_to_the_batch_pays_nothing() -> None:
    bench = Metered(1, max_batch_sequences=1)
    for name in ("first", "second"):
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        bench.submit(GenerationRequest(prompt=[3, 4], sampling=params, request_id=name))
    bench.step()
    bench.core.end("second", FinishReason.CANCELLED)
    [usage] = bench.usages
    assert (usage.request_id, usage.amounts, usage.queue_s) == ("second", Amounts(), None)


async def test_a_whole_engine_keeps_the_same_books() -> None:
    engine = started_engine()
    usages: list[RequestUsage] = []
    engine.timeline.meters.append(usages.append)
    try:
        for index in range(6):
            params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
            await engine.generate(GenerationRequest(prompt=f"hello {index}", sampling=params, tenant=f"t{index % 2}"))
        stats = engine.stats()
        assert sum(usage.amounts.device_ns for usage in usages) == stats.device_ns > 0
        assert sum(usage.amounts.slot_ns for usage in usages) == stats.slot_ns > 0
        assert sum(usage.amounts.block_ns for usage in usages) == stats.block_ns > 0
        assert sum(usage.amounts.generated_tokens for usage in usages) == stats.generation_tokens == 30
    finally:
        engine.stop()

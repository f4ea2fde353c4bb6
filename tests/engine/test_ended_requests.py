"""A request that has ended is not kept: not until its deadline, nor behind those of others."""

from __future__ import annotations

import gc

import pytest
from tests.engine.fakes import Bench

from carousel.engine.loop import LiveRequest
from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams


def request(name: str) -> GenerationRequest:
    return GenerationRequest(prompt=[3, 4, 5], sampling=SamplingParams(temperature=0.0, max_tokens=2), request_id=name)


@pytest.mark.parametrize("cancelled", [False, True])
def test_far_deadlines_keep_nobody(cancelled: bool) -> None:
    bench = Bench()
    long = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    bench.submit(GenerationRequest(prompt=[3], sampling=long, request_id="first"), expires_at=1e8)
    for number in range(200):
        bench.submit(request(f"far{number}"), expires_at=1e9 + number)
        if cancelled:
            bench.core.end(f"far{number}", FinishReason.CANCELLED)
        for _ in range(3):
            bench.step()
    gc.collect()
    kept = [item for item in gc.get_objects() if type(item) is LiveRequest]
    assert sum(live.request.request_id.startswith("far") for live in kept) <= 3


def test_deadlines_still_hold_behind_those_of_ended_requests() -> None:
    bench = Bench()
    for number in range(50):
        bench.submit(request(f"r{number}"), expires_at=1e6 - number)
    slow = GenerationRequest(
        prompt=[3, 4], sampling=SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True), request_id="slow"
    )
    bench.submit(slow, expires_at=200.0)
    bench.run()
    assert bench.outputs["slow", 0].finish_reason is FinishReason.TIMEOUT
    assert bench.now == pytest.approx(201, abs=2)
    assert all(bench.outputs[f"r{number}", 0].finish_reason is not FinishReason.TIMEOUT for number in range(50))
    assert bench.core.next_deadline is None

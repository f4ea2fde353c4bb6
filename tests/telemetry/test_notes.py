"""What a request's line in the log says of the engine's work."""

from __future__ import annotations

import asyncio
import io
import threading

import pytest

from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams
from carousel.engine.timeline import RequestRecord
from carousel.telemetry import logs, notes
from carousel.telemetry.notes import NoteTaker, current_notes, open_notes


def request(name: str, prompt: str | list[int] = "secret") -> GenerationRequest:
    return GenerationRequest(prompt=prompt, sampling=SamplingParams(), request_id=name)


def record(name: str, reason: FinishReason, **more: float) -> RequestRecord:
    return RequestRecord(name, "", reason, 1, 10, 4, 20, 0, 1.5, **more)


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert notes._open == {}
    logs._prompts = False


def test_sums_of_tokens_and_the_longest_times():
    with open_notes() as mine:
        assert current_notes.get() is mine
        for name in ("a", "b"):
            mine.expect(request(name))
        taker = NoteTaker()
        taker.on_finish(record("a", FinishReason.EOS, ttft_s=0.5, queue_s=0.1))
        taker.on_finish(record("b", FinishReason.LENGTH, ttft_s=0.25, queue_s=0.2))
        taker.on_finish(record("nobody's", FinishReason.EOS))
    assert current_notes.get() is None
    assert mine.fields() == {
        "finish_reason": "eos,length", "prompt_tokens": 20, "cached_tokens": 8, "output_tokens": 40, "requests": 2,
        "queue_ms": 200.0, "ttft_ms": 500.0,
    }  # fmt: skip
    assert mine.summary() == "; eos,length, 20 + 40 tokens, first after 500 ms"


def test_a_call_that_was_refused_says_nothing():
    with open_notes() as mine:
        mine.expect(request("a"))
        mine.refused(request("a"))
    assert mine.fields() == {}
    assert mine.summary() == ""


async def test_settle_waits_for_the_engine_thread_and_not_for_ever():
    with open_notes() as mine:
        mine.expect(request("a"))
        timer = threading.Timer(0.05, NoteTaker().on_finish, (record("a", FinishReason.CANCELLED),))
        timer.start()
        await asyncio.wait_for(mine.settle(), 5)
        assert mine.fields()["finish_reason"] == "cancelled"
        timer.join()
        mine.expect(request("stuck"))
        await asyncio.wait_for(mine.settle(0.02), 5)


def test_prompts_only_when_asked_for_and_never_without_end():
    for wanted in (False, True):
        logs.configure_logging("info", "json", io.StringIO(), prompts=wanted)
        with open_notes() as mine:
            mine.expect(request("a", "secret \ud800"))
            mine.expect(request("b", [1, 2]))
            mine.expect(request("c", "x" * 10_000))
        if not wanted:
            assert "prompts" not in mine.fields()
            continue
        first, second, third = mine.fields()["prompts"]
        assert (first, second) == ("secret \\ud800", "[1, 2]")
        assert third.endswith("x… (10000 characters)")
        assert len(third) < 5000

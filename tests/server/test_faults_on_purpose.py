"""The fault that tests in a cluster ask for: off by default, and then what the liveness probe sees."""

from __future__ import annotations

import json
import signal
import threading

import httpx
import pytest
from tests.server.harness import wait_until
from tests.server.overload import tiny_process

from carousel import faults
from carousel.engine.timeline import Timeline

STREAM = "/v2/models/tiny/generate_stream"
BODY = {"text_input": "a", "parameters": {"max_tokens": 400, "temperature": 0, "ignore_eos": True}}


def test_off_unless_asked_for():
    timeline, before = Timeline(), signal.getsignal(signal.SIGUSR1)
    assert faults.install(timeline, {}) is None
    assert faults.install(timeline, {"CAROUSEL_FAULTS": "off"}) is None
    assert timeline.observers == []
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("value", ["yes", "slow", "slow=", "slow=0", "slow=-1", "slow=nan", "slow=61", "slow=inf"])
def test_what_it_does_not_know_is_refused_with_what_is_allowed(value: str):
    timeline = Timeline()
    with pytest.raises(faults.BadSwitch, match=f"CAROUSEL_FAULTS: got '{value}', allowed: on, off, slow=SECONDS"):
        faults.install(timeline, {"CAROUSEL_FAULTS": value})
    assert timeline.observers == []


def test_steps_take_longer_on_request(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    timeline = Timeline()
    faults.install(timeline, {"CAROUSEL_FAULTS": "slow=0.25"})
    timeline.record_step(None, [])
    timeline.record_step(None, [])
    assert slept == [0.25, 0.25]


def test_the_signal_makes_the_next_step_hang():
    timeline, before = Timeline(), signal.getsignal(signal.SIGUSR1)
    try:
        hanging = faults.install(timeline, {"CAROUSEL_FAULTS": "on"})
        assert hanging is not None
        timeline.record_step(None, [])  # returns
        signal.raise_signal(signal.SIGUSR1)
        engine = threading.Thread(target=timeline.record_step, args=(None, []), daemon=True)
        engine.start()
        engine.join(0.2)
        assert engine.is_alive()
        hanging.release.set()
        engine.join(5)
        assert not engine.is_alive()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_hanging_engine_is_not_live_and_says_so():
    """kserve#6259: health stays 200 after the engine died. New requests are told to try elsewhere."""
    with tiny_process(environ={"CAROUSEL_FAULTS": "on"}, stall_seconds=1, drain_seconds=100) as server:
        assert httpx.get(server.url + "/livez").status_code == 200
        server.process.send_signal(signal.SIGUSR1)
        with httpx.stream("POST", server.url + STREAM, json=BODY, timeout=30) as stream:
            wait_until(lambda: httpx.get(server.url + "/livez").status_code == 503)
            said = httpx.get(server.url + "/livez").json()
            assert (said["status"], said["reason"]) == ("dead", "the engine thread does not turn")
            assert httpx.get(server.url + "/readyz").status_code == 503
            refused = httpx.post(server.url + STREAM, json=BODY, timeout=30)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "carousel_" in httpx.get(server.url + "/metrics").text
            # What the kubelet sends next. The drain's time would be for nothing, and the restart late by it.
            server.process.send_signal(signal.SIGTERM)
            events = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
            assert "shut down" in events[-1]["error"]
        assert server.process.wait(30) == 0

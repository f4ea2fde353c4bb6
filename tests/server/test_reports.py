"""Users' reports about servers of the field that have no other test; the index is ``tests/REPORTS.md``."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from tests.server.harness import wait_until

from carousel.engine.errors import QueueFull
from carousel.generation import LONG_TEXT

STREAMS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 200}),
    ("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 200}),
    ("/v1/models/fake:predict", {"instances": ["a"], "stream": True, "parameters": {"max_tokens": 200}}),
]
PATHS = [
    ("/v2/models/fake/generate", {"text_input": "x" * (LONG_TEXT + 1)}),
    ("/v1/completions", {"prompt": "x" * (LONG_TEXT + 1)}),
    ("/tokenize", {"prompt": "x" * (LONG_TEXT + 1)}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_kserve_5019_slow_work_of_one_request_does_not_hold_up_the_others(server, client, monkeypatch, path, body):
    """A synchronous predict blocked the event loop, and with it every stream and probe."""
    monkeypatch.setattr(server.engine, "max_model_len", 20 * LONG_TEXT)
    tokenizer = server.engine.tokenizer
    real, begun, answered = type(tokenizer).encode, threading.Event(), threading.Event()

    def slow(self, given, add_special_tokens=True):
        begun.set()
        answered.wait(60)
        return real(self, given, add_special_tokens)

    monkeypatch.setattr(type(tokenizer), "encode", slow)
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(server.url + path, json=body, timeout=90).status_code)
    )
    asking.start()
    try:
        assert begun.wait(30)
        assert client.get("/livez").status_code == 200
        assert answers == []
    finally:
        answered.set()
        asking.join()
    assert answers == [200]


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_tgi_1896_a_stream_always_ends_with_done_and_refusals_are_no_200(server, client, path, body):
    """Streams ended without [DONE], and errors came inside a 200."""
    whole = client.post(path, json=body)
    assert whole.text.endswith("data: [DONE]\n\n")
    assert '"error"' not in whole.text
    server.engine.delay_s = 0.02
    with client.stream("POST", path, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.engine.failure = "the device fell off"
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert "the device fell off" in json.dumps(json.loads(rest[-2])["error"])
    server.engine.failure, server.engine.refuse = None, QueueFull("the queue is full", 2)
    refused = client.post(path, json=body)
    assert refused.status_code == 429
    assert refused.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_kserve_1037_every_call_returns_even_when_the_engine_dies_under_it(server, client, path, body):
    """A predict never returned. Here the engine fails while the answer, not streamed, is still in the making."""
    server.engine.delay_s = 0.02
    failing = threading.Timer(0.1, lambda: setattr(server.engine, "failure", "the device fell off"))
    failing.start()
    answer = client.post(path, json={**body, "stream": False}, timeout=5)
    failing.join()
    assert answer.status_code in (500, 503)
    assert "the device fell off" in answer.text
    wait_until(lambda: not server.engine.live)

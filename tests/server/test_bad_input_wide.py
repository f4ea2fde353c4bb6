"""Wide but bounded numbers: what is too much is refused early, and what is allowed stops nobody else's stream."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from tests.server.tiny_server import CHAT, INFER, PREDICT, TEXT, Neighbour, TinyServer, lone_answer, tiny_server

from carousel.standalone import spare_what_lives

JSON = {"content-type": "application/json"}
MANY = 100_000
TENSOR = {"name": "text_input", "datatype": "BYTES"}
STOP = {"name": "stop", "datatype": "BYTES"}
USER = {"role": "user", "content": "x"}
TOO_MUCH = {
    "logit_bias": (TEXT, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(MANY)}}),
    "stop strings": (TEXT, {"prompt": "a", "stop": ["x"] * MANY}),
    "stop ids": (TEXT, {"prompt": "a", "stop_token_ids": [1] * MANY}),
    "a prompt of a million ids": (TEXT, {"prompt": [1] * 1_000_000}),
    "a prompt of a megabyte": (TEXT, {"prompt": "word " * 200_000}),
    "prompts": (TEXT, {"prompt": ["a"] * MANY}),
    "choices of many prompts": (TEXT, {"prompt": ["a"] * 2048, "n": 64, "max_tokens": 400}),
    "choices": (TEXT, {"prompt": "a", "n": 65}),
    "max_tokens": (TEXT, {"prompt": "a", "n": 64, "max_tokens": 100_000}),
    "messages": (CHAT, {"messages": [USER] * 10_000}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]}),
    "parts of many messages": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 200}] * 500},
    ),
    "fields": (CHAT, {"messages": [USER], **{f"field{i}": i for i in range(MANY)}}),
    "a tree": (CHAT, {"messages": [USER], "metadata": [[[0] * 10] * 100] * 200}),
    "instances": (PREDICT, {"instances": ["a"] * MANY}),
    "long instances": (PREDICT, {"instances": ["word " * 500] * 1000}),
    "conversations": (PREDICT, {"instances": [{"messages": [USER] * 500}] * 60}),
    "rows": (INFER, {"inputs": [{**TENSOR, "shape": [MANY], "data": ["a"] * MANY}]}),
    "elements": (INFER, {"inputs": [{**TENSOR, "shape": [1], "data": ["a"] * 1_000_000}]}),
    "long rows": (INFER, {"inputs": [{**TENSOR, "shape": [1000], "data": ["word " * 500] * 1000}]}),
    "tensors": (INFER, {"inputs": [{**TENSOR, "shape": [1], "data": ["a"]}] * 20_000}),
    "stop tensor": (
        INFER,
        {"inputs": [{**TENSOR, "shape": [1], "data": ["a"]}, {**STOP, "shape": [MANY], "data": ["x"] * MANY}]},
    ),
}


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    with tiny_server() as running:
        spare_what_lives()  # as a server does when it is ready: the test runner's own objects are many
        yield running
        gc.unfreeze()
        running.expect_clean()


@pytest.fixture(scope="module")
def neighbour(tiny: TinyServer) -> Iterator[Neighbour]:
    alone = lone_answer(tiny)
    with Neighbour(tiny) as beside:
        yield beside
    beside.expect_undisturbed(alone)


@contextmanager
def undisturbed(neighbour: Neighbour) -> Iterator[None]:
    """What runs inside never stops the neighbour's stream for the greater part of its own time.

    The bound is relative, so that a slow machine fails nothing: what is over in a moment may stop the stream for less
    than a second, whatever share of it that is.
    """
    started, seen = time.monotonic(), len(neighbour.gaps)
    yield
    seconds = time.monotonic() - started
    assert max(neighbour.gaps[seen:], default=0.0) < max(1.0, seconds / 2)


@pytest.fixture(scope="module")
def client(tiny: TinyServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_early(client: httpx.Client, neighbour: Neighbour, name: str) -> None:
    path, body = TOO_MUCH[name]
    with undisturbed(neighbour):
        response = client.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code in (400, 422, 429), response.text[:300]
    assert len(response.text) < 1000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "n": 64, "max_tokens": 8, "ignore_eos": True},
        {"prompt": ["word " * 60] * 40, "max_tokens": 2},
        {"prompt": [[1] * 400] * 30, "max_tokens": 2},
        {"prompt": "a", "max_tokens": 4, "logit_bias": {str(i): 1 for i in range(320)}, "stop": ["x" * 512] * 16},
        {"prompt": "a", "max_tokens": 4, "logprobs": 20, "n": 16, "repetition_penalty": 1.1},
    ],
    ids=["n", "texts", "ids", "bias and stops", "logprobs"],
)
def test_what_is_allowed_stops_nobody(client: httpx.Client, neighbour: Neighbour, body: dict[str, object]) -> None:
    with undisturbed(neighbour):
        response = client.post(TEXT, content=json.dumps(body), headers=JSON)
    assert response.status_code == 200, response.text[:300]


def test_many_large_bodies_at_once(client: httpx.Client, neighbour: Neighbour) -> None:
    """Bodies at the size limit are parsed beside the event loop."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 50}] * 4000, "max_tokens": 2}).encode()
    statuses: list[int] = []

    def send() -> None:
        statuses.append(client.post(CHAT, content=body, headers=JSON).status_code)

    threads = [threading.Thread(target=send) for _ in range(6)]
    with undisturbed(neighbour):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert statuses == [400] * 6

"""How long a request waited, told to the client by every protocol, and read there by the load tests and the bench."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from loadtest.figures import Observation
from tests.ports import free_port
from tests.server.conftest import wait_until
from tests.server.grpc_calls import Client, infer_request
from tests.server.tiny_server import CHAT, GENERATE, INFER, PREDICT, STREAM, TEXT, TinyServer, tiny_server

from loadtest import protocols

WAIT_S = 0.1
GREEDY = {"max_tokens": 3, "temperature": 0}
MESSAGES = [{"role": "user", "content": "a"}]
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}


class Gate:
    """An engine observer that holds the engine after a step while it is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def on_step(self, step: Any, token_latencies_s: list[float]) -> None:
        assert self.open.wait(20)

    def on_finish(self, request: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    with tiny_server(grpc=True, grpc_port=free_port(), max_batch_sequences=1, seed=0) as running:
        yield running


@pytest.fixture
async def http(tiny: TinyServer) -> Any:
    async with httpx.AsyncClient(base_url=tiny.url, timeout=20) as client:
        yield client


async def held(tiny: TinyServer, ask: Callable[[], Awaitable[Any]]) -> tuple[Any, float]:
    """The answer to a request that has waited for ``WAIT_S`` at least, and how long the client waited for all of it."""
    gate = Gate()
    tiny.engine.timeline.observers.append(gate)
    gate.open.clear()
    try:
        async with httpx.AsyncClient(base_url=tiny.url, timeout=20) as other:
            first = asyncio.create_task(other.post(TEXT, json={"prompt": "first", "max_tokens": 2, "temperature": 0}))
            await asyncio.to_thread(wait_until, lambda: tiny.engine.stats().num_requests_running == 1)
            began = time.monotonic()
            asked = asyncio.ensure_future(ask())
            await asyncio.to_thread(wait_until, lambda: tiny.engine.stats().num_requests_waiting == 1)
            await asyncio.sleep(WAIT_S)
            gate.open.set()
            answer, _ = await asyncio.gather(asked, first)
            return answer, time.monotonic() - began
    finally:
        gate.open.set()
        tiny.engine.timeline.observers.remove(gate)


def check(queue_s: float | None, took_s: float) -> None:
    assert queue_s is not None
    assert WAIT_S <= queue_s < took_s


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, **GREEDY}),
        (TEXT, {"prompt": "a", **GREEDY}),
        (PREDICT, {"instances": ["a"], "parameters": GREEDY}),
        (INFER, {"inputs": [TENSOR], "parameters": GREEDY}),
        (GENERATE, {"text_input": "a", "parameters": GREEDY}),
    ],
)
async def test_an_answer_in_one_piece_says_it_in_a_header(
    tiny: TinyServer, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer, took_s = await held(tiny, lambda: http.post(path, json=body))
    seen = Observation(0.0, "infer")
    protocols.read_headers(answer.headers, seen)
    check(seen.queue, took_s)


@pytest.mark.parametrize(
    ("path", "body", "find"),
    [
        (CHAT, {"messages": MESSAGES, **GREEDY}, lambda answer: answer["usage"]),
        (TEXT, {"prompt": "a", **GREEDY}, lambda answer: answer["usage"]),
        (PREDICT, {"instances": ["a"], "parameters": GREEDY}, lambda answer: answer["predictions"][0]["usage"]),
        (GENERATE, {"text_input": "a", "parameters": {**GREEDY, "details": True}}, lambda answer: answer["details"]),
    ],
)
async def test_and_in_its_body_where_that_has_a_place(
    tiny: TinyServer, http: httpx.AsyncClient, path: str, body: dict[str, Any], find: Callable[[Any], Any]
) -> None:
    answer, took_s = await held(tiny, lambda: http.post(path, json=body))
    check(find(answer.json())["queue_time"], took_s)


@pytest.mark.parametrize(
    ("protocol", "path", "body"),
    [
        ("chat", CHAT, {"messages": MESSAGES, **GREEDY, "stream": True, "stream_options": {"include_usage": True}}),
        ("completions", TEXT, {"prompt": "a", **GREEDY, "stream": True, "stream_options": {"include_usage": True}}),
        ("generate", STREAM, {"text_input": "a", "parameters": GREEDY}),
        ("generate", STREAM, {"text_input": "a", "parameters": {**GREEDY, "details": True}}),
    ],
)
async def test_a_stream_says_it_in_its_last_event(
    tiny: TinyServer, http: httpx.AsyncClient, protocol: str, path: str, body: dict[str, Any]
) -> None:
    answer, took_s = await held(tiny, lambda: http.post(path, json=body))
    assert "server-timing" not in answer.headers, "headers went before the request had run"
    events = [line[6:].encode() for line in answer.text.splitlines() if line.startswith("data: ")]
    seen = Observation(0.0, protocol)
    before = [event for event in events if b"queue_time" not in event and event != b"[DONE]"]
    for event in before:
        protocols.read_event(protocol, event, 0.0, seen)
    assert seen.queue is None
    for event in events[len(before) :]:
        protocols.read_event(protocol, event, 0.0, seen)
    check(seen.queue, took_s)


async def test_v1_streams_say_it_of_each_instance(tiny: TinyServer, http: httpx.AsyncClient) -> None:
    body = {"instances": ["a"], "parameters": GREEDY, "stream": True}
    answer, took_s = await held(tiny, lambda: http.post(PREDICT, json=body))
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    check(events[-1]["predictions"][0]["usage"]["queue_time"], took_s)


async def test_the_longest_wait_of_several_prompts_counts(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b", "c"], "max_tokens": 20, "temperature": 0}  # one seat: each waits for the one before
    answer = await http.post(TEXT, json=body)
    whole = {**body, "prompt": ["a"]}
    alone = (await http.post(TEXT, json=whole)).json()["usage"]["queue_time"]
    assert answer.json()["usage"]["queue_time"] > alone
    header = float(answer.headers["server-timing"].removeprefix("queue;dur="))
    assert header == pytest.approx(answer.json()["usage"]["queue_time"] * 1000, abs=0.01)


async def test_unary_grpc_says_it_in_trailing_metadata(tiny: TinyServer) -> None:
    async with Client(f"127.0.0.1:{tiny.settings.grpc_port}") as client:

        async def ask() -> Any:
            call = client.infer(infer_request("a", model="tiny", max_tokens=3))
            await call
            return await call.trailing_metadata()

        metadata, took_s = await held(tiny, ask)
    seen = Observation(0.0, "grpc")
    protocols.read_headers(dict(metadata), seen)
    check(seen.queue, took_s)


@pytest.mark.parametrize("empty_final", [False, True])
async def test_streaming_grpc_says_it_in_the_final_response(tiny: TinyServer, empty_final: bool) -> None:
    asked = {"max_tokens": 3, "temperature": "0", "triton_enable_empty_final_response": empty_final}
    async with Client(f"127.0.0.1:{tiny.settings.grpc_port}") as client:
        answers, took_s = await held(tiny, lambda: client.stream(infer_request("a", model="tiny", **asked)))
    assert ["queue_time" in answer.infer_response.parameters for answer in answers[:-1]] == [False] * (len(answers) - 1)
    seen = Observation(0.0, "grpc-stream")
    assert protocols.read_tensors(answers[-1].infer_response, 0.0, seen)
    check(seen.queue, took_s)

"""The proxy that holds requests at zero: nothing is lost, everything is bounded, answers pass as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cluster_fakes import Clock, FakePod, FakePods, pod, until

from carousel.cluster.activator import Activator
from carousel.cluster.demand import Held
from carousel.cluster.outside import Activation
from carousel.cluster.readings import Readings


class Stage:
    """An activator, a pod and a client; the pod is not known until :meth:`ready`."""

    def __init__(self, server: FakePod, **changes: Any) -> None:
        self.server, self.pods, self.activation = server, FakePods(), Activation()
        bounds = {"max_requests": 3, "max_bytes": 10_000, "max_body_bytes": 5_000, "wait_s": 10.0, **changes}
        readings = Readings(server.port, 1.0, 30.0, clock=Clock())
        self.activator = Activator(self.pods, readings, self.activation, pod_port=server.port, **bounds)
        self.pods.on_change = self.activator.pods_changed
        self.proxy = TestServer(self.activator.app())
        self.client = aiohttp.ClientSession(auto_decompress=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    def ready(self) -> None:
        self.pods.set(pod("a"))

    async def post(self, body: bytes = b"{}", path: str = "/v1/completions") -> tuple[int, Any]:
        async with self.client.post(self.url + path, data=body) as response:
            return response.status, await response.json()


@pytest.fixture
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with FakePod() as server:
        found = Stage(server, **getattr(request, "param", {}))
        await found.proxy.start_server()
        yield found
        await found.client.close()
        await found.activator.close()
        await found.proxy.close()
        assert found.activation.held() == Held()
        assert found.activator._bytes == 0
        assert found.activator._busy == {}


async def test_requests_wait_for_the_first_pod_and_count_as_demand(stage: Stage) -> None:
    calls = [asyncio.ensure_future(stage.post(b"x" * 400)) for _ in range(3)]
    await until(lambda: stage.activation.requests == 3)
    assert stage.activation.held() == Held(3, 300)
    stage.ready()
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
    assert stage.activator.counts["forwarded"] == 3
    assert [body for _, _, _, body in stage.server.seen] == [b"x" * 400] * 3


async def test_what_is_held_is_bounded_in_number(stage: Stage) -> None:
    calls = [asyncio.ensure_future(stage.post()) for _ in range(3)]
    await until(lambda: stage.activation.requests == 3)
    async with stage.client.post(stage.url, data=b"{}") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "5"
        assert "3 requests wait for one already" in (await response.json())["error"]
    stage.ready()
    await asyncio.gather(*calls)


async def test_bodies_are_bounded_one_by_one_and_together(stage: Stage) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    assert (await stage.post(b"x" * 5001))[0] == 413
    async with stage.client.post(stage.url, data=endless()) as response:
        assert response.status == 413
    calls = [asyncio.ensure_future(stage.post(b"x" * 4500)) for _ in range(2)]
    await until(lambda: stage.activation.requests == 2)
    status, answer = await stage.post(b"x" * 4500)
    assert status == 503
    assert "10000 bytes" in answer["error"]
    stage.ready()
    await asyncio.gather(*calls)


@pytest.mark.parametrize("stage", [{"wait_s": 0.2}], indirect=True)
async def test_nobody_waits_forever(stage: Stage) -> None:
    status, answer = await stage.post()
    assert status == 503
    assert "no pod was ready within 0.2 s" in answer["error"]
    assert stage.activator.counts["timeout"] == 1


async def test_a_client_that_leaves_is_no_demand_any_more(stage: Stage) -> None:
    call = asyncio.ensure_future(stage.post())
    await until(lambda: stage.activation.requests == 1)
    call.cancel()
    await until(lambda: stage.activation.requests == 0)
    await until(lambda: stage.activator.counts["left"] == 1)


async def test_a_client_that_leaves_cancels_the_pods_work(stage: Stage) -> None:
    gone = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"token ")
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            gone.set()
            raise

    stage.server.answer = slow
    stage.ready()
    async with stage.client.get(stage.url) as response:
        assert await response.content.readexactly(6) == b"token "
    await asyncio.wait_for(gone.wait(), 10)


async def test_streams_pass_as_they_come_with_status_path_and_headers(stage: Stage) -> None:
    step = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=201, headers={"x-request-id": "7", "Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await step.wait()
        await response.write(b"data: two\n\n")
        return response

    stage.server.answer = stream
    stage.ready()
    headers = {"Authorization": "Bearer k", "Connection": "close, x-hop", "x-hop": "1", "Accept-Encoding": "identity"}
    async with stage.client.post(f"{stage.url}/a%2Fb?c=%20d", data=b"{}", headers=headers) as response:
        assert response.status == 201
        assert response.headers["x-request-id"] == "7"
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readexactly(11) == b"data: one\n\n"
        step.set()
        assert await response.content.read() == b"data: two\n\n"
    ((method, path, seen, body),) = stage.server.seen
    assert (method, path, body) == ("POST", "/a%2Fb?c=%20d", b"{}")
    assert seen["Authorization"] == "Bearer k"
    assert seen["X-Forwarded-For"] == "127.0.0.1"
    assert seen["Host"] == f"127.0.0.1:{stage.proxy.port}"
    assert "x-hop" not in seen


async def test_an_answer_that_breaks_off_is_seen_to_be_cut(stage: Stage) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    stage.server.answer = cut
    stage.ready()
    with pytest.raises(aiohttp.ClientError):
        async with stage.client.post(stage.url, data=b"{}") as response:
            await response.read()
    assert stage.activator.counts["broken"] == 1
    assert len(stage.server.seen) == 1, "an answer that has begun is never asked for again"


async def test_a_pod_that_drains_or_is_gone_is_passed_over(stage: Stage) -> None:
    refusals = 0

    async def draining(request: web.Request) -> web.StreamResponse:
        nonlocal refusals
        refusals += 1
        if refusals == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"error": "draining"}, status=503 if refusals < 3 else 200)

    stage.server.answer = draining
    stage.pods.known = [pod("gone", "127.1.2.3"), pod("a")]
    status, _ = await stage.post(b'{"prompt": "x"}')
    assert status == 200
    assert refusals == 3
    assert stage.server.seen[-1][3] == b'{"prompt": "x"}'


async def test_what_the_pods_refuse_for_good_is_passed_on(stage: Stage) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, text=json.dumps({"error": "full"}), headers={"Retry-After": "3"})

    stage.server.answer = refuse
    stage.ready()
    async with stage.client.post(stage.url, data=b"{}") as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "3")
    assert len(stage.server.seen) == 1


async def test_the_pod_with_the_least_to_do_is_asked(stage: Stage) -> None:
    busy, idle = pod("busy", "10.0.0.1"), pod("idle", "10.0.0.2")
    stage.pods.known = [busy, idle]
    stage.activator._busy = {"10.0.0.1": 1}
    assert stage.activator._choose() == idle
    stage.activator._busy = {"10.0.0.1": 1, "10.0.0.2": 2}
    assert stage.activator._choose() == busy
    stage.activator._busy = {}

"""Pods that only tell their load, and as much of Kubernetes' API as lists, watches and patches pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

from carousel.cluster.pods import Pod

BUSY = {
    "requests_running": 8, "requests_waiting": 4, "sequences_running": 8, "sequence_slots": 16, "tokens_running": 1600,
    "tokens_waiting": 400, "queue_seconds": 3.0, "kv_cache_usage": 0.25, "requests_admitted": 40,
}  # fmt: skip
IDLE = {**dict.fromkeys(BUSY, 0), "sequence_slots": 16, "requests_admitted": 40}


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakePod:
    """Serves ``/load`` and, below every other path, an answer that can be scripted."""

    def __init__(self, load: dict[str, Any] | None = None) -> None:
        self.load: Any = dict(IDLE if load is None else load)
        self.status = 200
        self.hang = False
        self.asked = 0
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answer: Callable[[web.Request], Any] | None = None
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/load", self._load)
        app.router.add_route("*", "/{path:.*}", self._any)
        self.server = TestServer(app)

    async def _load(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.hang:
            await asyncio.sleep(30)
        return web.Response(text=self.load if isinstance(self.load, str) else json.dumps(self.load), status=self.status)

    async def _any(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.raw_path, dict(request.headers), await request.read()))
        if self.answer is not None:
            answer: web.StreamResponse = await self.answer(request)
            return answer
        return web.json_response({"from": self.port})

    @property
    def port(self) -> int:
        assert self.server.port is not None
        return self.server.port

    async def __aenter__(self) -> Self:
        await self.server.start_server()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.server.close()


class FakePods:
    """A :class:`PodSource` that is told what it knows."""

    def __init__(self, *pods: Pod) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.known = list(pods)
        self.problem: str | None = None
        self.stale_s = 0.0

    def pods(self) -> list[Pod]:
        return list(self.known)

    def age(self) -> float:
        return self.stale_s

    def set(self, *pods: Pod) -> None:
        self.known = list(pods)
        self.on_change()

    async def run(self) -> None:
        await asyncio.Event().wait()


def pod(name: str = "a", address: str = "127.0.0.1", ready: bool = True) -> Pod:
    return Pod(f"uid-{name}", name, address, ready)


def pod_json(name: str, *, ready: bool = True, address: str = "127.0.0.1", **metadata: Any) -> dict[str, Any]:
    """A pod as the API shows it."""
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"app": "x"}, **metadata},
        "status": {"phase": "Running", "podIP": address, "conditions": [condition]},
    }


class FakeKube:
    """Lists, watches and patches pods of the namespace ``models``."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 10
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.calls: list[str] = []
        self.queries: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.refuse: int | None = None
        self.garbage = False
        self.hang = False
        self.gone_once = False
        self._watchers: set[asyncio.Queue[dict[str, Any] | None]] = set()
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/models/pods", self._list)
        app.router.add_patch("/api/v1/namespaces/models/pods/{name}", self._patch)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def __aenter__(self) -> Self:
        await self.server.start_server()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """As a killed API server: every connection breaks, no new one is taken."""
        self.end_watches()
        await self.server.close()

    async def _refused(self, request: web.Request, verb: str) -> web.Response | None:
        self.calls.append(verb)
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.hang:
            await asyncio.sleep(30)
        if self.garbage:
            return web.Response(text="<html>not Kubernetes</html>")
        if self.refuse is not None:
            body = {"kind": "Status", "code": self.refuse, "message": f"pods is refused ({self.refuse})"}
            return web.json_response(body, status=self.refuse)
        return None

    async def _list(self, request: web.Request) -> web.StreamResponse:
        watching = request.query.get("watch") == "true"
        if (refusal := await self._refused(request, "watch" if watching else "list")) is not None:
            return refusal
        if not watching:
            metadata = {"resourceVersion": str(self.version)}
            return web.json_response({"metadata": metadata, "items": list(self.pods.values())})
        response = web.StreamResponse()
        await response.prepare(request)
        if self.gone_once:
            self.gone_once = False
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            while (event := await queue.get()) is not None:
                line = json.dumps(event).encode() + b"\n"
                await response.write(line[:20])  # an event may come in pieces
                await response.write(line[20:])
        finally:
            self._watchers.discard(queue)
        return response

    async def _patch(self, request: web.Request) -> web.Response:
        if (refusal := await self._refused(request, "patch")) is not None:
            return refusal
        name = request.match_info["name"]
        if name not in self.pods:
            return web.json_response({"code": 404, "message": f'pods "{name}" not found'}, status=404)
        assert request.headers["Content-Type"] == "application/merge-patch+json"
        self.patches.append((name, await request.json()))
        return web.json_response(self.pods[name])

    def put(self, name: str, **changes: Any) -> None:
        """A pod appears or changes."""
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self.version += 1
        self.pods[name] = pod_json(name, resourceVersion=str(self.version), **changes)
        self._say(kind, self.pods[name])

    def remove(self, name: str) -> None:
        """A pod goes."""
        self.version += 1
        self._say("DELETED", self.pods.pop(name))

    def _say(self, kind: str, item: dict[str, Any]) -> None:
        for queue in self._watchers:
            queue.put_nowait({"type": kind, "object": item})

    def end_watches(self) -> None:
        """As the API server does when a watch's time is over."""
        for queue in self._watchers:
            queue.put_nowait(None)

    @property
    def watchers(self) -> int:
        return len(self._watchers)


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it does not come true.
    """
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(*jobs: Any) -> AsyncIterator[None]:
    """Tasks for as long as the context lasts."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        yield
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

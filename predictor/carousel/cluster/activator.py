"""A small HTTP proxy in front of the pods that holds requests while there is none: how a target wakes from zero.

A request goes to the ready pod with the least to do. Without one it waits, bounded in number, bytes and time, and
counts as demand until then. What a pod refuses with 503 (it drains, or is not up yet) or by closing the connection
before it answered goes to another one: generating text twice harms nobody. An answer that has begun is passed on as it
comes and is never repeated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from carousel.addresses import url_host
from carousel.cluster.outside import Activation
from carousel.cluster.pods import Pod, PodSource
from carousel.cluster.readings import Readings, client_tls

logger = logging.getLogger("carousel.scaler")

_HOP_BY_HOP = frozenset(
    {"connection", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
     "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
_AVOID_S = 1.0
_RETRY_AFTER_S = 5
OUTCOMES = ("forwarded", "full", "timeout", "broken", "left")


class Refused(Exception):
    """The activator answers itself: status, outcome for the counters, message."""

    def __init__(self, status: int, outcome: str, message: str) -> None:
        super().__init__(message)
        self.status, self.outcome = status, outcome


class Activator:
    """The proxy's handler.

    Args:
        source: of pods.
        readings: of their loads.
        activation: told what is held.
        pod_port: of the pods.
        ca_file: authorities (PEM) of their certificates; empty: plain HTTP.
        max_requests: that are held at once.
        max_bytes: of the bodies of all requests that no pod has answered yet.
        max_body_bytes: of one body.
        wait_s: that a request is held.
    """

    def __init__(
        self,
        source: PodSource,
        readings: Readings,
        activation: Activation,
        *,
        pod_port: int,
        ca_file: str = "",
        max_requests: int,
        max_bytes: int,
        max_body_bytes: int,
        wait_s: float,
    ) -> None:
        self._source = source
        self._readings = readings
        self._activation = activation
        self._pod_port = pod_port
        self._scheme = "https" if ca_file else "http"
        self._tls = client_tls(ca_file)
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._max_body_bytes = max_body_bytes
        self._wait_s = wait_s
        self._bytes = 0
        self._busy: dict[str, int] = {}  # by address: requests that this proxy has there
        self._avoid: dict[str, float] = {}  # by address: until when
        self._news = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self.counts = dict.fromkeys(OUTCOMES, 0)
        self.held_seconds = 0.0

    def pods_changed(self) -> None:
        """The list of pods is another one: whoever waits shall look again."""
        self._news.set()
        self._news = asyncio.Event()

    def app(self) -> web.Application:
        """The application: every path is the pods'."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Hold where necessary, forward, pass the answer on."""
        size = 0
        deadline = time.monotonic() + self._wait_s
        try:
            body = await self._read(request)
            size = len(body)
            while True:
                pod = await self._pod(deadline, size)
                response = await self._forward(request, pod, body)
                if response is not None:
                    return response
                self._avoid[pod.address] = time.monotonic() + _AVOID_S
                if time.monotonic() > deadline:
                    raise Refused(503, "timeout", f"no pod took the request within {self._wait_s:g} s")
        except Refused as refused:
            self.counts[refused.outcome] += 1
            headers = {"Retry-After": str(_RETRY_AFTER_S)} if refused.status == 503 else {}
            text = json.dumps({"error": str(refused)})
            return web.Response(status=refused.status, text=text, content_type="application/json", headers=headers)
        except asyncio.CancelledError:
            self.counts["left"] += 1
            raise
        finally:
            self._bytes -= size

    async def _read(self, request: web.Request) -> bytes:
        """The whole body, counted. It is kept because another pod may have to be asked."""
        parts: list[bytes] = []
        size = 0
        try:
            announced = request.content_length or 0
            while True:
                if max(size, announced) > self._max_body_bytes:
                    raise Refused(413, "full", f"the body is larger than {self._max_body_bytes} bytes")
                if self._bytes > self._max_bytes or self._bytes - size + announced > self._max_bytes:
                    raise Refused(503, "full", f"bodies of {self._max_bytes} bytes are held already")
                part = await request.content.read(64 * 1024)
                if not part:
                    break
                parts.append(part)
                size += len(part)
                self._bytes += len(part)
        except BaseException:
            self._bytes -= size
            raise
        return b"".join(parts)

    # ---- which pod

    def _choose(self) -> Pod | None:
        now = time.monotonic()
        self._avoid = {address: until for address, until in self._avoid.items() if until > now}
        ready = [pod for pod in self._source.pods() if pod.ready and pod.address not in self._avoid]
        return min(ready, key=self._load, default=None)

    def _load(self, pod: Pod) -> tuple[float, float]:
        known = self._readings.load_of(pod)
        reported = 0.0 if known is None else known.requests_running + known.requests_waiting
        # What this proxy sent since the last look is not in what the pod reported then, or it is: the larger counts.
        own = self._busy.get(pod.address, 0)
        return max(own, reported), own

    async def _pod(self, deadline: float, size: int) -> Pod:
        pod = self._choose()
        if pod is not None:
            return pod
        if self._activation.requests >= self._max_requests:
            raise Refused(503, "full", f"no pod is ready, and {self._max_requests} requests wait for one already")
        began = time.monotonic()
        self._activation.hold(1, size)
        try:
            while pod is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Refused(503, "timeout", f"no pod was ready within {self._wait_s:g} s")
                news = self._news
                with suppress(TimeoutError):
                    # Pods that are avoided come back without news.
                    async with asyncio.timeout(min(left, 0.25 if self._avoid else left)):
                        await news.wait()
                pod = self._choose()
            return pod
        finally:
            self._activation.hold(-1, -size)
            self.held_seconds += time.monotonic() - began

    # ---- forwarding

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls, limit=0, keepalive_timeout=15.0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=3.0),
                auto_decompress=False,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    async def _forward(self, request: web.Request, pod: Pod, body: bytes) -> web.StreamResponse | None:
        """The pod's answer, passed on; None when the pod did not take the request."""
        url = f"{self._scheme}://{url_host(pod.address)}:{self._pod_port}{request.raw_path}"
        headers = end_to_end(request.headers)
        if request.remote:
            headers["X-Forwarded-For"] = ", ".join(filter(None, (headers.get("X-Forwarded-For"), request.remote)))
        self._busy[pod.address] = self._busy.get(pod.address, 0) + 1
        try:
            calling = self._connected().request(
                request.method, URL(url, encoded=True), headers=headers, data=body or None, allow_redirects=False
            )
            try:
                upstream = await calling
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.info("pod %s did not answer (%s): another is asked", pod.name, error or type(error).__name__)
                return None
            async with upstream:
                if upstream.status == 503:
                    return None
                return await self._pass_on(request, upstream, pod)
        finally:
            left = self._busy[pod.address] - 1
            if left:
                self._busy[pod.address] = left
            else:
                del self._busy[pod.address]

    async def _pass_on(self, request: web.Request, upstream: aiohttp.ClientResponse, pod: Pod) -> web.StreamResponse:
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=end_to_end(upstream.headers)
        )
        await response.prepare(request)
        try:
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # The client must see that the answer is cut: no final chunk, the connection goes.
            logger.warning("pod %s broke off an answer: %s", pod.name, error or type(error).__name__)
            self.counts["broken"] += 1
            if request.transport is not None:
                request.transport.abort()
            return response
        self.counts["forwarded"] += 1
        await response.write_eof()
        return response


def end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers without those that concern one connection only."""
    named = {word.strip().lower() for word in headers.get("Connection", "").split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP | named)

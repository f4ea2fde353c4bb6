"""The outermost ASGI layer: who calls, request ids and traces, body limit, the log, and clients that go away.

A client that disconnects cancels the task that serves it. Every handler holds its running requests in
``async with engine.submit(...)``, so the cancellation frees their sequences, whatever the protocol and wherever the
handler happens to wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect

from carousel.auth import TENANT_HEADER, is_open_route
from carousel.engine.errors import CarouselError
from carousel.http_errors import OPENAI_PREFIXES, error_response
from carousel.protocols.errors import BodyTooLarge, BodyTooSlow
from carousel.telemetry import tracing
from carousel.telemetry.logs import current_request_id
from carousel.telemetry.notes import Notes, open_notes
from carousel.tenancy.identity import Door
from carousel.tenancy.quota import Caller, current_caller

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

access_logger = logging.getLogger("carousel.access")
logger = logging.getLogger("carousel.http")

#: Where the scope holds the connection's function that makes the next write its last, if it has one.
LAST_WRITE = "carousel.last_write"
#: Where the scope holds the layer's own ``send``: what streams tokens need not pass the framework's for each of them.
DIRECT_SEND = "carousel.send"
MAX_REQUEST_ID = 128
MAX_PATH_LOGGED = 512
#: Status in the log of a request whose client left; nothing was sent.
CLIENT_LEFT = 499
_PROBES = ("/livez", "/readyz", "/startupz", "/metrics", "/v2/health/", "/health", "/load")
_KEY_HEADERS = (b"authorization", b"x-api-key")
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_TENANT_HEADER = TENANT_HEADER.encode()
_GENERATING = (":predict", "/infer", "/generate", "/generate_stream", "/completions")


def clean_request_id(given: str) -> str:
    """The client's id where it is short, printable and of one word, else a fresh one."""
    if 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable() and " " not in given:
        return given
    return uuid.uuid4().hex


def is_probe(path: str) -> bool:
    """Whether a path is polled by machines, which nobody wants to read about in the log."""
    return path.startswith(_PROBES) or path.endswith("/ready") or path == "/"


class RequestLayer:
    """Wraps the whole application.

    Args:
        app: what serves the requests.
        max_body_bytes: a longer body is answered with 413 and read no further.
        read_seconds: a body that takes longer to arrive is answered with 408.
        draining: while true, responses that begin are their connection's last, so that clients turn to another pod.
        closing: while true, so are responses that began before and did not say so.
        door: says who calls; None asks nobody.
        tracer: begins a span for every request that is no probe; None: there are none.
    """

    def __init__(
        self,
        app: App,
        *,
        max_body_bytes: int,
        read_seconds: float = 60.0,
        draining: Callable[[], bool] = lambda: False,
        closing: Callable[[], bool] = lambda: False,
        door: Door | None = None,
        tracer: tracing.Tracer | None = None,
    ) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.read_seconds = read_seconds
        self.draining = draining
        self.closing = closing
        self.door = door
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _Exchange(self, scope, receive, send).run()


class _Exchange:
    """One request and its response."""

    def __init__(self, layer: RequestLayer, scope: Scope, receive: Receive, send: Send) -> None:
        self.layer, self._receive, self._send = layer, receive, send
        self.started = time.perf_counter()
        self.read_until = asyncio.get_running_loop().time() + layer.read_seconds
        self.status = 0
        self.sent_bytes = 0
        self.body_bytes = 0
        self.body_read = False
        self.answered = False
        self.gone = asyncio.Event()
        self.watcher: asyncio.Task[None] | None = None
        self.task = asyncio.current_task()
        self.shown: dict[str, str] = {}
        self.notes: Notes | None = None
        given, length, headers = "", "0", []
        context: dict[str, str] = {}
        self.caller: Caller | None = None
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given = value.decode("latin-1")
                continue
            if name in _KEY_HEADERS:  # nobody further in has a use for them
                self.shown[name.decode()] = value.decode("latin-1")
                continue
            if name == _TENANT_HEADER:
                self.shown[TENANT_HEADER] = value.decode("latin-1")
            if name == b"content-length":
                length = value.decode("latin-1")
            elif name in _TRACE_HEADERS:
                context[name.decode()] = value.decode("latin-1")
            headers.append((name, value))
        self.call = self._begin(scope, context)
        self.trace = tracing.accept(context.get("traceparent", "")) if self.call is None else self.call.trace
        self.too_large = length.isdigit() and int(length) > layer.max_body_bytes
        self.request_id = clean_request_id(given)
        # Whoever handles the request finds the id that the answer will carry, KServe's own handlers included.
        headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        self.scope = {**scope, "headers": headers, DIRECT_SEND: self.send}

    def _begin(self, scope: Scope, context: dict[str, str]) -> tracing.Call | None:
        """The span of this request, if it is to have one."""
        tracer, method, path = self.layer.tracer, scope["method"], scope["path"]
        if tracer is None or is_probe(path) or path.startswith("/page/"):
            return None
        attributes = {"http.request.method": method, "url.path": path[:MAX_PATH_LOGGED]}
        return tracer.begin(context, f"{method} {path[:MAX_PATH_LOGGED]}", attributes)

    def _end_span(self) -> None:
        if self.call is not None:
            error = str(self.status) if self.status >= 500 else None
            self.call.end({"http.response.status_code": self.status, "carousel.request_id": self.request_id}, error)

    async def run(self) -> None:
        token, span = current_request_id.set(self.request_id), tracing.current_trace.set(self.trace)
        tracing.current_call.set(self.call)
        try:
            with open_notes() as notes:
                self.notes = notes
                try:
                    await self._guarded()
                    if self.status == CLIENT_LEFT:
                        await notes.settle()
                finally:
                    if self.watcher is not None:
                        self.watcher.cancel()
                    self._log(notes)
                    self._end_span()
        finally:
            tracing.current_call.set(None)
            tracing.current_trace.reset(span)
            current_request_id.reset(token)

    async def _admit(self) -> None:
        """Ask who calls, and whether that one has a request left, before anything of the body is read."""
        # Set even when it is None: a task may inherit the context of the connection's request before.
        current_caller.set(None)
        door, path = self.layer.door, self.scope["path"]
        if door is None or is_open_route(self.scope["method"], path):
            return
        self.caller = await door.admit(self.shown)
        current_caller.set(self.caller)
        if path.endswith(_GENERATING):
            self.caller.governor.peek(self.caller.tenant)

    async def _guarded(self) -> None:
        try:
            if self.too_large:
                raise BodyTooLarge(self.layer.max_body_bytes)
            await self._admit()
            await self.layer.app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self.gone.is_set() or self.task is None:
                raise
            self.task.uncancel()
            self.status = CLIENT_LEFT
        except ClientDisconnect:
            self.status = CLIENT_LEFT
        except Exception as error:
            if self.status:  # the response has begun: all that is left is to cut it off
                logger.exception("failed while answering %s", self.scope["path"])
                raise
            if not isinstance(error, CarouselError):
                logger.exception("failed to answer %s", self.scope["path"])
            await error_response(self.scope["path"], error)(self.scope, self.receive, self.send)

    async def receive(self) -> Message:
        if self.body_read:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive_in_time()
        if message["type"] == "http.disconnect":
            self.gone.set()
            return message
        self.body_bytes += len(message.get("body", b""))
        if self.body_bytes > self.layer.max_body_bytes:
            raise BodyTooLarge(self.layer.max_body_bytes)
        if not message.get("more_body", False):
            self.body_read = True
            self.watcher = asyncio.create_task(self._watch())
        return message

    async def _receive_in_time(self) -> Message:
        """The next piece of the body. A body that trickles must not hold its request for ever."""
        try:
            async with asyncio.timeout_at(self.read_until):
                return await self._receive()
        except TimeoutError:
            raise BodyTooSlow(self.layer.read_seconds) from None

    async def _watch(self) -> None:
        """After the body, the only thing a client can say over HTTP/1.1 is that it left."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.answered and self.task is not None:
            self.gone.set()
            self.task.cancel()

    @property
    def _may_end(self) -> bool:
        """Whether the connection may end with this response. Probes and scrapes go on until the server does."""
        return bool(self.scope["method"] != "GET")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self.request_id.encode("latin-1"))]
            timing = self.notes.server_timing() if self.notes is not None else None
            if timing is not None:  # an answer that streams begins before its requests have a record
                headers.append((b"server-timing", timing.encode()))
            if self.trace is not None:
                headers.append((b"traceparent", self.trace.traceparent.encode()))
            if self.caller is not None and self.scope["path"].startswith(OPENAI_PREFIXES):
                left = self.caller.governor.headers(self.caller.tenant)
                headers += [(name.encode(), value.encode()) for name, value in left.items()]
            if self.status in (408, 413) or (self.layer.draining() and self._may_end):
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.sent_bytes += len(message.get("body", b""))
            # Set before sending: uvicorn reports a disconnect as soon as the response is complete, too.
            self.answered = not message.get("more_body", False)
            if self.answered and self.layer.closing() and self._may_end and LAST_WRITE in self.scope:
                self.scope[LAST_WRITE]()
        await self._send(message)

    def _log(self, notes: Notes) -> None:
        path = self.scope["path"][:MAX_PATH_LOGGED]
        level = logging.DEBUG if is_probe(path) else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        took_ms = round((time.perf_counter() - self.started) * 1000, 1)
        client = self.scope.get("client") or ("", 0)
        access_logger.log(
            level,
            "%s %s %d in %.1f ms%s",
            self.scope["method"],
            path,
            self.status,
            took_ms,
            notes.summary(),
            extra={
                "fields": {
                    "method": self.scope["method"],
                    "path": path,
                    "status": self.status,
                    "duration_ms": took_ms,
                    "request_bytes": self.body_bytes,
                    "response_bytes": self.sent_bytes,
                    "client": client[0],
                    **notes.fields(),
                }
            },
        )

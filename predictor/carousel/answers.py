"""What the route modules share: reading a JSON body, answering with JSON, and answering with a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from carousel.engine.request import Output
from carousel.generation import submit_all
from carousel.lifecycle import EngineLike
from carousel.middleware import DIRECT_SEND
from carousel.predictor import CarouselModel, check_json, make_context
from carousel.protocols import sse
from carousel.protocols.common import Call, Context, decode_body, json_bytes

Parsed = TypeVar("Parsed")
Events = Callable[[Any, Sequence[AsyncIterator[Output]]], AsyncIterator[bytes]]


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(body), status, headers, media_type="application/json")


class EventStream(Response):
    """Server-sent events of a call. What the engine refuses is raised before anything is sent."""

    def __init__(self, engine: EngineLike, call: Call, events: Events) -> None:
        super().__init__(status_code=200, headers=sse.HEADERS, media_type=sse.MEDIA_TYPE)
        del self.headers["content-length"]
        self.engine, self.call, self.events = engine, call, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Submitting here and not in the handler leaves no moment in which a cancellation could lose the streams.
        async with AsyncExitStack() as stack:
            streams = await submit_all(stack, self.engine, self.call)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # The wrappers that the framework has put around ``send`` by now only look for that start.
            send = scope.get(DIRECT_SEND, send)
            async for chunk in self.events(self.call, [aiter(stream) for stream in streams]):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


LARGE_BODY = 32 * 2**10
"""Bytes from which a body is parsed on a thread: below, the hand-over costs more than the work."""


async def read_json(request: Request) -> object:
    """The body, decoded.

    Raises:
        CarouselError: it is no JSON, too large, or declared as something else.
    """
    check_json(request.headers)
    raw = await request.body()
    return decode_body(raw) if len(raw) < LARGE_BODY else await asyncio.to_thread(decode_body, raw)


async def parse(request: Request, parser: Callable[..., Parsed], *args: Any, **kwargs: Any) -> Parsed:
    """``parser(*args, **kwargs)``; on a thread for a large body, so that other clients' streams flow on meanwhile."""
    if len(await request.body()) < LARGE_BODY:
        return parser(*args, **kwargs)
    return await asyncio.to_thread(parser, *args, **kwargs)


class Handlers:
    """The handlers of one protocol, around the one model that is served."""

    def __init__(self, model: CarouselModel) -> None:
        self.model = model
        self.lifecycle = model.lifecycle

    def context(self, request: Request) -> tuple[EngineLike, Context]:
        """The engine and what the parsers need of it.

        Raises:
            EngineUnavailable: it is loading, draining or dead.
        """
        engine = self.lifecycle.require()
        return engine, make_context(engine, self.model.name, request.headers)

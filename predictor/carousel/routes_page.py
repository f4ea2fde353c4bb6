"""The live page: its files, its events, and its demonstration. None of it is part of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from carousel.answers import Handlers, json_response, read_json
from carousel.config import Settings
from carousel.engine.errors import InvalidRequest
from carousel.lifecycle import EngineLike
from carousel.middleware import DIRECT_SEND
from carousel.page import assets
from carousel.page.demo import Demo
from carousel.page.hub import Hub
from carousel.predictor import CarouselModel
from carousel.protocols import sse
from carousel.telemetry.metrics import versions
from carousel.tenancy.quota import tied_tenant
from carousel_kernels.layout import BLOCK_SIZE


class _Stream(Response):
    """Server-sent events of one viewer. What stands against it is raised before anything is sent."""

    def __init__(self, hub: Hub, scope: str | None) -> None:
        super().__init__(status_code=200, headers={**sse.HEADERS, **assets.HEADERS}, media_type=sse.MEDIA_TYPE)
        del self.headers["content-length"]
        self.hub, self.tenant = hub, scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):  # the request layer notices who leaves once the body is read
            pass
        viewer = self.hub.enter(self.tenant)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            send = scope.get(DIRECT_SEND, send)
            async for message in viewer.messages():
                await send({"type": "http.response.body", "body": message, "more_body": True})
        finally:
            self.hub.leave(viewer)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class PageRoutes(Handlers):
    """``/`` for browsers, and what is behind it. ``quota_refusals``: how many calls each quota has refused."""

    def __init__(
        self, model: CarouselModel, settings: Settings, quota_refusals: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        super().__init__(model)
        self._quota_refusals = quota_refusals
        self.settings = settings
        self.assets = assets.load()
        self.demo = Demo(settings.batching == "static") if settings.demo else None
        self.hub = Hub(self.lifecycle, self._hello, self._extra)

    def table(self, live: Callable[[], Awaitable[Response]]) -> list[tuple[str, str, Callable[..., Any]]]:
        """(method, path, handler) of each route. ``live`` answers ``/`` to all but browsers: KServe's clients and load
        balancers ask there whether the server is alive."""

        async def index(request: Request) -> Response:
            if "text/html" in request.headers.get("accept", ""):
                return self._file(request, "index.html")
            answer = await live()
            answer.headers["Vary"] = "Accept"
            return answer

        return [
            ("GET", "/", index),
            ("GET", "/page/events", self.events),
            ("POST", "/page/demo", self.act),
            ("GET", "/page/{name}", self.asset),
        ]

    async def asset(self, name: str, request: Request) -> Response:
        return self._file(request, name)

    def _file(self, request: Request, name: str) -> Response:
        asset = self.assets.get(name)
        if asset is None:
            raise HTTPException(404, f"the page has no file {name[:64]!r}")
        headers = {**assets.HEADERS, "ETag": asset.etag}
        if name == "index.html":
            headers["Vary"] = "Accept"
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, 200, headers, media_type=asset.media_type)

    async def events(self) -> Response:
        # A key that belongs to a tenant shows that tenant's requests; the others' are there, without their names.
        return _Stream(self.hub, tied_tenant())

    async def act(self, request: Request) -> Response:
        """A button of the demonstration."""
        if self.demo is None:
            raise HTTPException(403, "the demonstration is switched off; --demo switches it on")
        # Browsers send this type to other sites only after asking them, and nobody here says yes.
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise InvalidRequest("content-type", request.headers.get("content-type", ""), "application/json")
        body = await read_json(request)
        engine: Any = self.lifecycle.require()
        self.demo.act(engine, body.get("do") if isinstance(body, dict) else None)
        return json_response(self.demo.state())

    def _extra(self) -> dict[str, Any]:
        demo = {} if self.demo is None else {"demo": self.demo.state()}
        return {"quotas": dict(self._quota_refusals()), **demo}

    def _hello(self, engine: EngineLike) -> dict[str, Any]:
        settings, stats = self.settings, engine.stats()
        return {
            "model": self.model.name,
            "version": versions()["version"],
            "slots": stats.num_slots,
            "blocks": stats.num_blocks,
            "block_tokens": BLOCK_SIZE,
            "context": engine.max_model_len,
            "target_ms": settings.target_step_ms,
            "batch_tokens": settings.max_batch_tokens,
            "policy": settings.policy,
            "keys": settings.asks_who,
            "demo": self.demo is not None,
        }

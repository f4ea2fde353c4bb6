"""Routes beside and before KServe's own: OpenAI, generate, infer, health, version, and the gated repository.

Each handler parses with ``protocols``, submits to the engine and renders with ``protocols``. What these refuse is an
exception, which ``http_errors`` answers in the form of the path's protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from kserve.errors import ModelNotReady
from kserve.protocol.dataplane import DataPlane
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from carousel import tensors
from carousel.engine.request import Output
from carousel.generation import run_all, submit_all
from carousel.grpc_glue import UNLOAD_REFUSED
from carousel.lifecycle import RETRY_DRAINING_S, RETRY_LOADING_S, EngineLike, State
from carousel.predictor import MODEL_VERSION, CarouselModel, check_json, check_model, make_context
from carousel.protocols import generate, openai, sse
from carousel.protocols.common import Call, Context, decode_body, json_bytes
from carousel.protocols.errors import retry_after
from carousel.telemetry.metrics import versions

Events = Callable[[Any, Sequence[AsyncIterator[Output]]], AsyncIterator[bytes]]

_V2_BODIES = ("application/octet-stream",)


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
            async for chunk in self.events(self.call, [aiter(stream) for stream in streams]):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_json(request: Request) -> object:
    """The body, decoded.

    Raises:
        CarouselError: it is no JSON, too large, or declared as something else.
    """
    check_json(request.headers)
    return decode_body(await request.body())


class Routes:
    """The handlers of one server."""

    def __init__(self, model: CarouselModel, data_plane: DataPlane, allow_unload: bool) -> None:
        self.model = model
        self.lifecycle = model.lifecycle
        self.data_plane = data_plane
        self.allow_unload = allow_unload
        self.created = int(time.time())

    def context(self, request: Request) -> tuple[EngineLike, Context]:
        engine = self.lifecycle.require()
        return engine, make_context(engine, self.model.name, request.headers)

    async def chat(self, request: Request) -> Response:
        body = await read_json(request)
        engine, context = self.context(request)
        call = openai.parse_chat(body, context)
        if call.stream:
            return EventStream(engine, call, openai.stream_chat)
        return json_response(openai.render_chat(call, await run_all(engine, call)))

    async def completion(self, request: Request) -> Response:
        body = await read_json(request)
        engine, context = self.context(request)
        call = openai.parse_completion(body, context)
        if call.stream:
            return EventStream(engine, call, openai.stream_completion)
        return json_response(openai.render_completion(call, await run_all(engine, call)))

    async def openai_models(self, request: Request) -> Response:
        _, context = self.context(request)
        return json_response(openai.models_body(context, self.created))

    async def openai_model(self, model_name: str, request: Request) -> Response:
        check_model(model_name, None, self.model.name)
        _, context = self.context(request)
        return json_response(openai.model_body(context, self.created))

    async def generate(self, model_name: str, request: Request, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        body = await read_json(request)
        engine, context = self.context(request)
        call = generate.parse(body, context)
        return json_response(generate.render(call, await run_all(engine, call)))

    async def generate_stream(self, model_name: str, request: Request, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        body = await read_json(request)
        engine, context = self.context(request)
        return EventStream(engine, generate.parse(body, context, stream=True), generate.stream_events)

    async def infer(self, model_name: str, request: Request, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        check_json(request.headers, _V2_BODIES)
        raw = await request.body()
        infer_request = tensors.request_from_rest(raw, request.headers, model_name, model_version or "")
        headers = dict(request.headers.items())
        response, _ = await self.data_plane.infer(model_name=model_name, request=infer_request, headers=headers)
        body, json_length = response.to_rest()
        if json_length is None:
            return json_response(body)
        split = {"Inference-Header-Content-Length": str(json_length)}
        return Response(body, 200, split, media_type="application/octet-stream")

    async def model_metadata(self, model_name: str, model_version: str) -> Response:
        check_model(model_name, model_version, self.model.name)
        return json_response(await self.data_plane.model_metadata(model_name))

    async def model_ready(self, model_name: str, model_version: str) -> Response:
        check_model(model_name, model_version, self.model.name)
        if not await self.model.healthy():
            raise ModelNotReady(model_name)
        return json_response({"name": model_name, "ready": True})

    async def load(self, model_name: str) -> Response:
        check_model(model_name, None, self.model.name)
        if not self.model.load():
            raise ModelNotReady(model_name)
        return json_response({"name": model_name, "load": True})

    async def unload(self, model_name: str) -> Response:
        check_model(model_name, None, self.model.name)
        if not self.allow_unload:
            raise HTTPException(403, UNLOAD_REFUSED)
        await asyncio.shield(self.lifecycle.unload())
        return json_response({"name": model_name, "unload": True})

    async def livez(self) -> Response:
        state = self.lifecycle.state.value
        if self.lifecycle.live:
            return json_response({"status": "alive", "state": state})
        return json_response({"status": "dead", "state": state, "reason": self.lifecycle.failure}, 503)

    async def readyz(self) -> Response:
        state = self.lifecycle.state
        if self.lifecycle.ready:
            return json_response({"status": "ready", "state": state.value})
        seconds = RETRY_DRAINING_S if state is State.DRAINING else RETRY_LOADING_S
        return json_response({"status": "not ready", "state": state.value}, 503, {"Retry-After": retry_after(seconds)})

    async def version(self) -> Response:
        return json_response({**versions(), "model": self.model.name, "model_version": MODEL_VERSION})


def mount(app: FastAPI, routes: Routes) -> None:
    """Add the routes to ``app``. Call this before KServe adds its own: the first match serves."""
    router = APIRouter()

    def add(method: str, path: str, handler: Callable[..., Any], tag: str, schema: bool = True) -> None:
        router.add_api_route(path, handler, methods=[method], tags=[tag], include_in_schema=schema, response_model=None)

    for prefix in ("/openai/v1", "/v1"):
        add("POST", f"{prefix}/chat/completions", routes.chat, "OpenAI")
        add("POST", f"{prefix}/completions", routes.completion, "OpenAI")
    add("GET", "/openai/v1/models", routes.openai_models, "OpenAI")
    add("GET", "/openai/v1/models/{model_name}", routes.openai_model, "OpenAI")

    for model in ("/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"):
        add("POST", f"{model}/generate", routes.generate, "V2")
        add("POST", f"{model}/generate_stream", routes.generate_stream, "V2")
        add("POST", f"{model}/infer", routes.infer, "V2")
    add("GET", "/v2/models/{model_name}/versions/{model_version}", routes.model_metadata, "V2")
    add("GET", "/v2/models/{model_name}/versions/{model_version}/ready", routes.model_ready, "V2")
    add("POST", "/v2/repository/models/{model_name}/load", routes.load, "V2")
    add("POST", "/v2/repository/models/{model_name}/unload", routes.unload, "V2")

    add("GET", "/livez", routes.livez, "Health")
    add("GET", "/readyz", routes.readyz, "Health")
    add("GET", "/version", routes.version, "Health")
    app.include_router(router)

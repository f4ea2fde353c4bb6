"""KServe's routes: V1, and the Open Inference Protocol (V2) with its generate and model-repository extensions.

They stand before KServe's own of the same paths, which answer some requests with 500 or 501 (see the notes on its
errors) and cannot stream. What they ask the model goes through KServe's data plane, which keeps KServe's metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from kserve.errors import InvalidInput, ModelNotReady, ServerNotReady
from kserve.protocol.dataplane import DataPlane
from starlette.exceptions import HTTPException

from carousel import tensors
from carousel.answers import EventStream, Handlers, json_response, parse, read_json
from carousel.dataplane import CarouselDataPlane
from carousel.engine.errors import InvalidRequest
from carousel.generation import run_all
from carousel.grpc_glue import UNLOAD_REFUSED
from carousel.predictor import MODEL_VERSION, CarouselModel, check_json, check_model
from carousel.protocols import fields, generate, v1
from carousel.protocols.common import decode_body, json_bytes

_V2_BODIES = ("application/octet-stream",)


def _is_cloud_event(headers: Mapping[str, str], body: object) -> bool:
    structured = isinstance(body, dict) and "specversion" in body and "data" in body
    return structured or "ce-specversion" in headers


class KServeRoutes(Handlers):
    """V1 and V2 of one model."""

    def __init__(self, model: CarouselModel, data_plane: CarouselDataPlane, allow_unload: bool) -> None:
        super().__init__(model)
        # KServe's class as a whole has no types; under its own name calls of its methods go unchecked.
        self.data_plane: DataPlane = data_plane
        self.allow_unload = allow_unload

    # V1

    async def predict(self, model_name: str, request: Request) -> Response:
        check_model(model_name, None, self.model.name)
        body = await read_json(request)
        engine, context = self.context(request)
        headers = dict(request.headers.items())
        if _is_cloud_event(request.headers, body):
            return await self._predict_event(body, headers)
        if isinstance(body, dict) and body.get("stream") is True:
            return EventStream(engine, await parse(request, v1.parse, body, context), v1.stream_events)
        response, _ = await self.data_plane.infer(model_name=model_name, request=body, headers=headers)
        return json_response(response)

    async def _predict_event(self, body: object, headers: dict[str, str]) -> Response:
        """A CloudEvent in, binary or structured, and one of the same kind out."""
        if isinstance(body, dict) and "specversion" in body:
            body = {"time": None, **body}  # optional in the standard, but not for KServe
        try:
            payload, attributes = self.data_plane.decode(body=json_bytes(body), headers=headers)
        except (InvalidInput, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest("body", "an event", f"a CloudEvent ({error})") from None
        if isinstance(payload, dict) and payload.get("stream") is True:
            raise InvalidRequest("stream", True, "false in a CloudEvent")
        response, _ = await self.data_plane.infer(model_name=self.model.name, request=payload, headers=headers)
        encoded, extra = self.data_plane.encode(
            model_name=self.model.name, response=response, headers=headers,
            req_attributes={"id": "", "time": "", **attributes},  # KServe deletes both where it merges
        )  # fmt: skip
        content = encoded if isinstance(encoded, bytes | str) else json_bytes(encoded)
        extra.pop("content-length", None)
        return Response(content, 200, extra)

    async def explain(self, model_name: str) -> Response:
        check_model(model_name, None, self.model.name)
        raise HTTPException(501, "a language model has no explainer; :predict generates text")

    # V2: server and model

    async def live(self) -> Response:
        return json_response(await self.data_plane.live())

    async def server_metadata(self) -> Response:
        return json_response(self.data_plane.metadata())

    async def server_live(self) -> Response:
        await self.data_plane.live()
        return json_response({"live": True})

    async def server_ready(self) -> Response:
        if not await self.data_plane.ready():
            raise ServerNotReady
        return json_response({"ready": True})

    async def model_names(self) -> Response:
        return json_response({"models": [self.model.name]})

    async def model_metadata(self, model_name: str, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        return json_response(await self.data_plane.model_metadata(model_name))

    async def model_config(self, model_name: str, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        return json_response(self.data_plane.model_config(model_name))

    async def all_statistics(self) -> Response:
        return json_response(self.data_plane.model_statistics(self.model.name))

    async def model_statistics(self, model_name: str, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        return json_response(self.data_plane.model_statistics(model_name))

    async def model_ready(self, model_name: str, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        if not await self.model.healthy():
            raise ModelNotReady(model_name)
        return json_response({"name": model_name, "ready": True})

    # V2: inference

    async def infer(self, model_name: str, request: Request, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        check_json(request.headers, _V2_BODIES)
        raw = await request.body()
        version = model_version or ""
        infer_request = await parse(request, tensors.request_from_rest, raw, request.headers, model_name, version)
        headers = dict(request.headers.items())
        response, _ = await self.data_plane.infer(model_name=model_name, request=infer_request, headers=headers)
        body, json_length = response.to_rest()
        if json_length is None:
            return json_response(body)
        split = {"Inference-Header-Content-Length": str(json_length)}
        return Response(body, 200, split, media_type="application/octet-stream")

    async def generate(self, model_name: str, request: Request, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        body = await read_json(request)
        engine, context = self.context(request)
        call = await parse(request, generate.parse, body, context)
        return json_response(generate.render(call, await run_all(engine, call)))

    async def generate_stream(self, model_name: str, request: Request, model_version: str | None = None) -> Response:
        check_model(model_name, model_version, self.model.name)
        body = await read_json(request)
        engine, context = self.context(request)
        call = await parse(request, generate.parse, body, context, stream=True)
        return EventStream(engine, call, generate.stream_events)

    # V2: the model repository

    async def index(self, request: Request) -> Response:
        """The models of the repository; with ``{"ready": true}`` only if it is ready."""
        raw = await request.body()
        values = fields.read_object(decode_body(raw) if raw else {}, "", ("ready",))
        only_ready = fields.boolean(*values["ready"]) if "ready" in values else False
        ready = self.lifecycle.ready
        if only_ready and not ready:
            return json_response([])
        return json_response([self._index_entry(ready)])

    def _index_entry(self, ready: bool) -> dict[str, Any]:
        reason = "" if ready else self.lifecycle.failure or self.lifecycle.state.value
        state = self.lifecycle.repository_state
        return {"name": self.model.name, "version": MODEL_VERSION, "state": state, "reason": reason}

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

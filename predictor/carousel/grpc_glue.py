"""V2 over gRPC: KServe's servicer with honest errors, ids, parameters and health, on a server that drains.

A client that cancels, disconnects or passes its deadline cancels the handler's task (grpc.aio does that), and with it
the running requests. A call's deadline is also the timeout of its requests, which therefore end as ``timeout``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from kserve.errors import ModelNotReady
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc import grpc_predict_v2_pb2_grpc as pb_grpc
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension

from carousel.addresses import bind_grpc
from carousel.auth import is_open_method
from carousel.engine.errors import InvalidRequest
from carousel.generation import call_deadline
from carousel.grpc_auth import DoorCheck
from carousel.grpc_health import INFERENCE_SERVICE, Health
from carousel.grpc_messages import (
    ConfigRequest,
    IndexRequest,
    IndexResponse,
    StatisticsRequest,
    StatisticsResponse,
    config_response,
    decode,
)
from carousel.grpc_stream import StreamInfer
from carousel.http_errors import describe_any
from carousel.middleware import access_logger, clean_request_id
from carousel.predictor import MODEL_VERSION, CarouselModel, check_model
from carousel.telemetry import tracing
from carousel.telemetry.logs import current_request_id
from carousel.telemetry.notes import Notes, open_notes
from carousel.tenancy.identity import Door
from carousel.tensors import request_from_grpc

if TYPE_CHECKING:
    from carousel.dataplane import CarouselDataPlane

logger = logging.getLogger("carousel.grpc")

UNLOAD_REFUSED = "unloading over the API is switched off; --allow-unload switches it on"


# The encoding of a deadline rounds up by as much as 1 %, so the client gives up before the server's clock says so.
_DEADLINE_SHARE, _DEADLINE_MARGIN_S = 0.99, 0.005
_LONGEST_DEADLINE_S = 1e8


class Servicer(InferenceServicer):
    """KServe's V2 service for one model, and the methods of Triton's that KServe's lacks.

    Attributes:
        closing: set when the server ends, after the engine; streams that are still open end then.
    """

    def __init__(
        self, data_plane: CarouselDataPlane, repository: ModelRepositoryExtension, model: CarouselModel, unload: bool
    ) -> None:
        super().__init__(data_plane, repository)
        self._plane = data_plane
        self.closing = asyncio.Event()
        self.health = Health(model.lifecycle, model.name, self.closing)
        self._model = model
        self._allow_unload = unload

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._model.lifecycle.live)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._model.lifecycle.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        check_model(request.name, request.version, self._model.name)
        return pb.ModelReadyResponse(ready=await self._model.healthy())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        check_model(request.name, request.version, self._model.name)
        return pb.ModelMetadataResponse(**await self._plane.model_metadata(request.name))

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        check_model(request.model_name, request.model_version, self._model.name)
        infer_request = request_from_grpc(request)
        response, _ = await self._plane.infer(
            model_name=request.model_name, request=infer_request, headers=_headers(context)
        )
        message: pb.ModelInferResponse = response.to_grpc()
        return message

    async def ModelStreamInfer(self, messages: AsyncIterator[bytes], context: Any) -> None:
        await StreamInfer(self._model, _headers(context), context.write, self.closing).run(messages)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        check_model(request.name, request.version, self._model.name)
        return config_response(self._plane.model_config(request.name), decoupled=True)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        name = request.name or self._model.name  # none is all models
        check_model(name, request.version, self._model.name)
        return StatisticsResponse(**self._plane.model_statistics(name))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        if request.repository_name:
            raise InvalidRequest("repository_name", request.repository_name, "nothing: there is one repository")
        lifecycle = self._model.lifecycle
        if request.ready and not lifecycle.ready:
            return IndexResponse()
        entry = {
            "name": self._model.name,
            "version": MODEL_VERSION,
            "state": lifecycle.repository_state,
            "reason": lifecycle.failure or "",
        }
        return IndexResponse(models=[entry])

    def triton_handlers(self) -> grpc.GenericRpcHandler:
        """The methods that KServe's registration does not know."""

        def unary(behaviour: Any, kind: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(behaviour, kind.FromString, _serialize)

        methods = {
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.ModelStreamInfer, None, _serialize),
            "ModelConfig": unary(self.ModelConfig, ConfigRequest),
            "ModelStatistics": unary(self.ModelStatistics, StatisticsRequest),
            "RepositoryIndex": unary(self.RepositoryIndex, IndexRequest),
        }
        return grpc.method_handlers_generic_handler(INFERENCE_SERVICE, methods)

    def _check_repository_name(self, request: Any) -> None:
        # Triton's clients write the name into field 2, which KServe's copy of the protocol does not have.
        check_model(request.model_name or self._model.name, None, self._model.name)

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Any
    ) -> pb.RepositoryModelLoadResponse:
        self._check_repository_name(request)
        if not self._model.load():
            raise ModelNotReady(request.model_name)
        return pb.RepositoryModelLoadResponse(model_name=request.model_name, isLoaded=True)

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Any
    ) -> pb.RepositoryModelUnloadResponse:
        if not self._allow_unload:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, UNLOAD_REFUSED)
        self._check_repository_name(request)
        await self._model.lifecycle.unload()
        return pb.RepositoryModelUnloadResponse(model_name=request.model_name, isUnloaded=True)


def _serialize(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


def _headers(context: Any) -> dict[str, str]:
    """The call's metadata as the protocols read headers, with the request id that the answer carries."""
    headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    headers["x-request-id"] = current_request_id.get()
    return headers


class ErrorsAndLog(aio.ServerInterceptor):
    """Gives every exception its status code and ``retry-after``, every call a request id and a line in the log, and a
    span where there is a ``tracer``."""

    def __init__(self, tracer: tracing.Tracer | None = None) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        coder = handler.response_serializer
        if handler.unary_unary is not None or handler.unary_stream is not None:
            inner, parse = handler.unary_unary or handler.unary_stream, handler.request_deserializer

            async def call(raw: bytes, context: Any) -> Any:
                return await _answer(lambda: inner(_parse(parse, raw), context), method, context, self._tracer)

            # Bytes that are no message must get an answer of ours: gRPC's own would be INTERNAL.
            if handler.unary_unary is not None:
                return grpc.unary_unary_rpc_method_handler(call, None, coder)
            return grpc.unary_stream_rpc_method_handler(call, None, coder)
        if handler.stream_stream is not None:

            async def stream(messages: AsyncIterator[bytes], context: Any) -> None:
                await _answer(lambda: handler.stream_stream(messages, context), method, context, self._tracer)

            return grpc.stream_stream_rpc_method_handler(stream, handler.request_deserializer, coder)
        return handler


def _parse(from_string: Any, raw: bytes) -> Any:
    return raw if from_string is None else decode(from_string.__self__, raw)


def _deadline(context: Any) -> float | None:
    """When the call's requests must end for their answer to be in time, on the monotonic clock; None: never."""
    remaining = context.time_remaining()
    if remaining is None or remaining > _LONGEST_DEADLINE_S:
        return None
    left: float = remaining * _DEADLINE_SHARE - _DEADLINE_MARGIN_S
    return time.monotonic() + left


async def _answer(inner: Callable[[], Awaitable[Any]], method: str, context: Any, tracer: tracing.Tracer | None) -> Any:
    started = time.perf_counter()
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    request_id = clean_request_id(metadata.get("x-request-id", ""))
    span = _begin_span(method, metadata, tracer)
    trace = tracing.accept(metadata.get("traceparent", "")) if span is None else span.trace
    # This task serves one call: nothing has to be put back.
    current_request_id.set(request_id)
    tracing.current_trace.set(trace)
    tracing.current_call.set(span)
    call_deadline.set(_deadline(context))
    initial = [("x-request-id", request_id)]
    if trace is not None:
        initial.append(("traceparent", trace.traceparent))
    await context.send_initial_metadata(tuple(initial))
    code = "CANCELLED"  # what a call that never gets to say anything else was
    with open_notes() as notes:
        try:
            response = await inner()
            code = "OK"
            timing = notes.server_timing()
            if timing is not None:
                context.set_trailing_metadata((("server-timing", timing),))
            return response
        except asyncio.CancelledError:
            await notes.settle()  # the line shall say what became of the requests
            raise
        except aio.AbortError:
            code = getattr(context.code(), "name", str(context.code()))
            raise
        except Exception as error:
            info = describe_any(error)
            code = info.grpc_code
            if code == "INTERNAL":
                logger.exception("%s failed", method)
            trailing = tuple((name.lower(), value) for name, value in info.headers.items())
            await context.abort(grpc.StatusCode[code], info.message, trailing)
        finally:
            _log(method, code, started, notes)
            if span is not None:
                bad = code in ("INTERNAL", "UNAVAILABLE", "UNKNOWN", "DEADLINE_EXCEEDED")
                attributes = {"rpc.response.status_code": code, "carousel.request_id": request_id}
                span.end(attributes, code if bad else None)


def _begin_span(method: str, metadata: dict[str, str], tracer: tracing.Tracer | None) -> tracing.Call | None:
    """The span of a call, unless it is a probe's."""
    if tracer is None or is_open_method(method):
        return None
    name = method.strip("/")
    return tracer.begin(metadata, name, {"rpc.system.name": "grpc", "rpc.method": name})


def _log(method: str, code: str, started: float, notes: Notes) -> None:
    level = logging.DEBUG if code == "OK" and not method.endswith("Infer") else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    took_ms = round((time.perf_counter() - started) * 1000, 1)
    fields = {"method": method, "status": code, "duration_ms": took_ms, **notes.fields()}
    access_logger.log(level, "%s %s in %.1f ms%s", method, code, took_ms, notes.summary(), extra={"fields": fields})


def make_server(
    servicer: Servicer,
    host: str,
    port: int,
    max_message_bytes: int,
    *,
    door: Door,
    credentials: grpc.ServerCredentials | None = None,
    max_age_s: float = 0.0,
    tracer: tracing.Tracer | None = None,
) -> tuple[aio.Server, int]:
    """A gRPC server, bound and not yet started.

    Args:
        servicer: V2.
        host: to listen on.
        port: to listen on.
        max_message_bytes: a longer request is refused.
        door: says who calls.
        credentials: TLS; None serves in the clear.
        max_age_s: after this time a client is asked to open another connection; calls that run go on. So that clients
            leave a server that is about to end, without a call that fails: what a closing server says is too late for
            calls on their way. 0: never.
        tracer: begins a span for every call; None: there are none.

    Returns:
        the server and the port it is bound to (``port`` itself, or what the system chose for 0).

    Raises:
        OSError: when the port cannot be had.
    """
    age = [("grpc.max_connection_age_ms", int(max_age_s * 1000))] if max_age_s else []
    server = aio.server(
        interceptors=(ErrorsAndLog(tracer), DoorCheck(door)),
        options=[
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),  # else a second server on the same port takes half of the calls, silently
            *age,
        ],
    )
    server.add_generic_rpc_handlers((servicer.triton_handlers(),))
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    return server, bind_grpc(server, host, port, credentials)

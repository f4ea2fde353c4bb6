"""V2 over gRPC: KServe's servicer with honest errors, ids, parameters and health, on a server that drains.

A client that cancels, disconnects or passes its deadline cancels the handler's task (grpc.aio does that), and with it
the running requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio
from kserve.errors import ModelNotReady
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc import grpc_predict_v2_pb2_grpc as pb_grpc
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension

from carousel.engine.errors import EngineUnavailable
from carousel.http_errors import describe_any
from carousel.middleware import access_logger, clean_request_id
from carousel.predictor import CarouselModel, check_model
from carousel.telemetry.logs import current_request_id
from carousel.tensors import request_from_grpc

if TYPE_CHECKING:
    from carousel.dataplane import CarouselDataPlane

logger = logging.getLogger("carousel.grpc")

UNLOAD_REFUSED = "unloading over the API is switched off; --allow-unload switches it on"


class Servicer(InferenceServicer):
    """KServe's V2 service for one model."""

    def __init__(
        self, data_plane: CarouselDataPlane, repository: ModelRepositoryExtension, model: CarouselModel, unload: bool
    ) -> None:
        super().__init__(data_plane, repository)
        self._plane: DataPlane = data_plane
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
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        headers["x-request-id"] = current_request_id.get()
        response, _ = await self._plane.infer(model_name=request.model_name, request=infer_request, headers=headers)
        message: pb.ModelInferResponse = response.to_grpc()
        return message

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


class ErrorsAndLog(aio.ServerInterceptor):
    """Gives every exception its status code and ``retry-after``, every call a request id and a line in the log."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        inner, method = handler.unary_unary, handler_call_details.method

        async def call(request: Any, context: Any) -> Any:
            return await _answer(inner, method, request, context)

        return grpc.unary_unary_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


async def _answer(inner: Callable[[Any, Any], Awaitable[Any]], method: str, request: Any, context: Any) -> Any:
    started = time.perf_counter()
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    request_id = clean_request_id(metadata.get("x-request-id", ""))
    token = current_request_id.set(request_id)
    await context.send_initial_metadata((("x-request-id", request_id),))
    code = "CANCELLED"  # what a call that never gets to say anything else was
    try:
        response = await inner(request, context)
        code = "OK"
        return response
    except aio.AbortError:
        code = getattr(context.code(), "name", str(context.code()))
        raise
    except Exception as error:
        info = describe_any(error)
        code = info.grpc_code
        if info.status >= 500 and not isinstance(error, (EngineUnavailable, ModelNotReady)):
            logger.exception("%s failed", method)
        trailing = tuple((name.lower(), value) for name, value in info.headers.items())
        await context.abort(grpc.StatusCode[code], info.message, trailing)
    finally:
        _log(method, code, started, request_id)
        current_request_id.reset(token)


def _log(method: str, code: str, started: float, request_id: str) -> None:
    level = logging.DEBUG if code == "OK" and not method.endswith("Infer") else logging.INFO
    took_ms = round((time.perf_counter() - started) * 1000, 1)
    fields = {"method": method, "status": code, "duration_ms": took_ms}
    access_logger.log(level, "%s %s in %.1f ms", method, code, took_ms, extra={"fields": fields})


def make_server(servicer: Servicer, host: str, port: int, max_message_bytes: int) -> tuple[aio.Server, int]:
    """A gRPC server, bound and not yet started.

    Returns:
        the server and the port it is bound to (``port`` itself, or what the system chose for 0).

    Raises:
        OSError: when the port cannot be had.
    """
    server = aio.server(
        interceptors=(ErrorsAndLog(),),
        options=[
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),  # else a second server on the same port takes half of the calls, silently
        ],
    )
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address} for gRPC: {error}") from None
    if not bound:
        raise OSError(f"cannot listen on {address} for gRPC")
    return server, bound

"""Who calls over gRPC: the same credentials as over HTTP, in the call's metadata."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from carousel.auth import is_open_method
from carousel.tenancy.identity import Door
from carousel.tenancy.quota import current_caller


class DoorCheck(aio.ServerInterceptor):
    """Refuses calls that the door refuses, and those of tenants without a request left, before anything is decoded.

    An interceptor before it gives the exceptions their codes.
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or is_open_method(method):
            return handler
        inner: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def call(request: Any, context: Any) -> Any:
            metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            caller = await self._door.admit(metadata)
            # Set in the call's own task, whose context ends with it.
            current_caller.set(caller)
            if method.endswith("/ModelInfer"):
                caller.governor.peek(caller.tenant)
            return await inner(request, context)  # our streaming handlers write to the context, and yield nothing

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make(call, handler.request_deserializer, handler.response_serializer)

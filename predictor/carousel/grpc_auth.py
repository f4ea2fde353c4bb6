"""API keys over gRPC: the same keys, in the metadata ``authorization`` or ``x-api-key``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from carousel.auth import ApiKeys, current_tenant, is_open_method


class KeyCheck(aio.ServerInterceptor):
    """Refuses calls without a valid key with ``AuthenticationFailed``; an interceptor before it gives that its code.

    Args:
        keys: those in force.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or is_open_method(handler_call_details.method):
            return handler
        inner: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def call(request: Any, context: Any) -> Any:
            metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            # Set in the call's own task, whose context ends with it.
            current_tenant.set(self._keys.check(metadata).tenant)
            return await inner(request, context)  # our streaming handlers write to the context, and yield nothing

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make(call, handler.request_deserializer, handler.response_serializer)

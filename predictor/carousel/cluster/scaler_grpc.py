"""KEDA's external scaler over gRPC: everything is answered from memory, so that KEDA's 3 s are never at risk.

``StreamIsActive`` tells at once and then at every change. KEDA 2.20 acts on true only; it finds idleness by polling.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from carousel.addresses import bind_grpc
from carousel.cluster import scaler_messages as messages
from carousel.cluster.demand import MODES, Targets
from carousel.cluster.watcher import NoReading, Watcher

logger = logging.getLogger("carousel.scaler")

_T = TypeVar("_T")
#: metadata key: field of Targets, largest value
_NUMBERS = {
    "targetWaitSeconds": ("wait_s", 3600.0),
    "targetRequests": ("requests", 1e6),
    "targetTokens": ("tokens", 1e12),
    "targetOccupancy": ("occupancy", 1.0),
}
#: Keys of KEDA itself, which it hands on.
_KEDAS = frozenset(
    {"scalerAddress", "tlsCertFile", "caCert", "tlsClientCert", "tlsClientKey", "unsafeSsl", "enableTLS",
     "triggerIndex", "metricType"}
)  # fmt: skip


class BadMetadata(ValueError):
    """The trigger's metadata is no good. The message names key, value and what is allowed."""


def read_metadata(metadata: Mapping[str, str], defaults: Targets) -> Targets:
    """The targets that a trigger asks for.

    Raises:
        BadMetadata: an unknown key, or a value out of bounds.
    """
    changes: dict[str, Any] = {}
    for key, text in metadata.items():
        if key in _KEDAS:
            continue
        if key == "scaleOn":
            if text not in MODES:
                raise BadMetadata(f"scaleOn: got {text!r}, allowed: {', '.join(MODES)}")
            changes["scale_on"] = text
        elif key in _NUMBERS:
            field, high = _NUMBERS[key]
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not 0 < value <= high:
                raise BadMetadata(f"{key}: got {text!r}, allowed: a number above 0, at most {high:g}")
            changes[field] = value
        else:
            raise BadMetadata(f"{key}: there is no such key, allowed: scaleOn, {', '.join(_NUMBERS)}")
    return replace(defaults, **changes)


class ExternalScaler:
    """The service's methods.

    Args:
        watcher: knows the values.
        defaults: targets where the trigger's metadata say nothing.
    """

    def __init__(self, watcher: Watcher, defaults: Targets) -> None:
        self._watcher = watcher
        self._defaults = defaults
        self.closing = asyncio.Event()
        self._complained: set[str] = set()
        self.calls = 0

    async def is_active(self, request: Any, context: Any) -> Any:
        self.calls += 1
        await self._targets(request, context)
        return messages.IsActiveResponse(result=await self._known(self._watcher.active, context))

    async def stream_is_active(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        await self._targets(request, context)
        try:
            active = self._watcher.active()
        except NoReading:
            active = False  # the stream only wakes; polls are told why nothing is known
        yield messages.IsActiveResponse(result=active)
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            while True:
                change = asyncio.ensure_future(self._watcher.next_change(active))
                try:
                    await asyncio.wait((change, closing), return_when=asyncio.FIRST_COMPLETED)
                    if not change.done():
                        return
                    active = change.result()
                finally:
                    change.cancel()
                yield messages.IsActiveResponse(result=active)
        finally:
            closing.cancel()

    async def get_metric_spec(self, request: Any, context: Any) -> Any:
        self.calls += 1
        targets = await self._targets(request, context)
        size = targets.per_replica
        # KEDA before 2.10 knows whole numbers only.
        spec = messages.MetricSpec(metricName=targets.metric_name, targetSize=max(1, round(size)), targetSizeFloat=size)
        return messages.GetMetricSpecResponse(metricSpecs=[spec])

    async def get_metrics(self, request: Any, context: Any) -> Any:
        self.calls += 1
        targets = await self._targets(request.scaledObjectRef, context)
        value = await self._known(lambda: self._watcher.value(targets), context)
        name = request.metricName or targets.metric_name
        answer = messages.MetricValue(metricName=name, metricValue=math.ceil(value), metricValueFloat=value)
        return messages.GetMetricsResponse(metricValues=[answer])

    async def _targets(self, reference: Any, context: Any) -> Targets:
        try:
            return read_metadata(reference.scalerMetadata, self._defaults)
        except BadMetadata as error:
            where = f"{reference.namespace}/{reference.name}: {error}"
            if where not in self._complained and len(self._complained) < 100:
                self._complained.add(where)
                logger.error("the trigger of ScaledObject %s", where)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise  # abort() has raised already; this is for the reader and the type checker

    async def _known(self, ask: Callable[[], _T], context: Any) -> _T:
        try:
            return ask()
        except NoReading as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise

    def handlers(self) -> grpc.GenericRpcHandler:
        """For a server."""

        def parse(kind: Any) -> Callable[[bytes], Any]:
            def from_bytes(raw: bytes) -> Any:
                try:
                    return kind.FromString(raw)
                except DecodeError as error:
                    raise ValueError(f"not a serialised {kind.DESCRIPTOR.name}") from error

            return from_bytes

        def encode(message: Any) -> bytes:
            raw: bytes = message.SerializeToString()
            return raw

        reference = parse(messages.ScaledObjectRef)
        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "IsActive": unary(self.is_active, reference, encode),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(self.stream_is_active, reference, encode),
            "GetMetricSpec": unary(self.get_metric_spec, reference, encode),
            "GetMetrics": unary(self.get_metrics, parse(messages.GetMetricsRequest), encode),
        }
        return grpc.method_handlers_generic_handler(messages.SERVICE, methods)


class ScalerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc, unused-ignore]
    """``grpc.health.v1`` for probes: SERVING once a value can be given, and until the scaler stops."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", messages.SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        kinds = health_pb2.HealthCheckResponse
        return kinds(status=kinds.SERVING if self._ready() else kinds.NOT_SERVING)


def make_server(scaler: ExternalScaler, health: ScalerHealth, host: str, port: int) -> tuple[aio.Server, int]:
    """A gRPC server, bound and not yet started, and its port.

    Raises:
        OSError: the port cannot be had.
    """
    server = aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 2**20)])
    server.add_generic_rpc_handlers((scaler.handlers(),))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server, bind_grpc(server, host, port)

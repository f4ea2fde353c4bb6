"""``grpc.health.v1``: what Kubernetes' gRPC probes, Envoy and client-side load balancers ask.

=====================================  ==========================================================================
``""``, the model's name and           SERVING while a request that arrives now would be taken: not while the model
``inference.GRPCInferenceService``     loads, the server drains or the engine is dead. For readiness probes.
``liveness``                           SERVING until the engine is dead or stuck. For liveness probes, which must
                                       not end a pod because it loads or drains.
=====================================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from carousel.engine.errors import EngineUnavailable
from carousel.lifecycle import Lifecycle

INFERENCE_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
LIVENESS = "liveness"

#: How soon a watcher hears of a change, in seconds.
WATCH_SECONDS = 0.1

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Answers from the lifecycle, at the moment of the question.

    Args:
        closing: set when the server ends; watchers are sent away then.
    """

    def __init__(self, lifecycle: Lifecycle, model_name: str, closing: asyncio.Event) -> None:
        self._lifecycle = lifecycle
        self._ready_names = ("", model_name, INFERENCE_SERVICE)
        self._closing = closing

    def status(self, service: str) -> int | None:
        """A ``ServingStatus``, None for a service that does not exist."""
        if service in self._ready_names:
            good = self._lifecycle.ready
        elif service == LIVENESS:
            good = self._lifecycle.live
        else:
            return None
        return int(_Response.SERVING if good else _Response.NOT_SERVING)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        status = self.status(request.service)
        if status is None:
            known = ", ".join(repr(name) for name in (*self._ready_names, LIVENESS))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service: got {request.service[:120]!r}, allowed: {known}")
        return _Response(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """The status, and again whenever it changes.

        Raises:
            EngineUnavailable: the server ends.
        """
        last: int | None = None
        while True:
            status = self.status(request.service)
            status = int(_Response.SERVICE_UNKNOWN) if status is None else status
            if status != last:
                await context.write(_Response(status=status))
                last = status
            if self._closing.is_set():
                raise EngineUnavailable("the server is shutting down")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._closing.wait()

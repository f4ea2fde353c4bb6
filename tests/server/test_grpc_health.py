"""``grpc.health.v1`` as Kubernetes' probes and client-side balancers ask it."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
READINESS = ["", "fake", "inference.GRPCInferenceService"]


def ask(address: str, service: str) -> int:
    """As a kubelet does: a new connection, one blocking call, a second's patience."""
    with grpc.insecure_channel(address) as channel:
        answer = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=5, wait_for_ready=True)
        return answer.status


@pytest.mark.parametrize("service", [*READINESS, "liveness"])
def test_a_ready_server_serves(server, service):
    assert ask(server.grpc, service) == SERVING


def test_an_unknown_service_is_not_found(server):
    with pytest.raises(grpc.RpcError) as caught:
        ask(server.grpc, "other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'other'" in caught.value.details()
    assert "'fake'" in caught.value.details()


def test_a_dead_engine_is_neither_ready_nor_live(server):
    """kserve#6259: health stays 200 after the engine died."""
    server.engine.alive = False
    assert [ask(server.grpc, service) for service in (*READINESS, "liveness")] == [NOT_SERVING] * 4


async def test_watch_follows(server):
    async with aio.insecure_channel(server.grpc) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest(service="fake"))
        unknown = HealthStub(channel).Watch(HealthCheckRequest(service="other"))
        assert (await watch.read()).status == SERVING
        assert (await unknown.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
        server.engine.failure = "it broke"
        assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        server.engine.failure = None
        assert (await asyncio.wait_for(watch.read(), 5)).status == SERVING
        watch.cancel()
        unknown.cancel()


async def test_loading_ready_draining_and_the_end(spawn, tmp_path):
    """kserve#3113, #1915: ready exactly when it is. A watcher does not hold the shutdown up."""
    server = spawn(gate=tmp_path / "gate", drain=60, delay=0.05)
    async with aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        health = HealthStub(channel)
        watch = health.Watch(HealthCheckRequest(), wait_for_ready=True)
        assert (await asyncio.wait_for(watch.read(), 20)).status == NOT_SERVING
        for service, status in (("fake", NOT_SERVING), ("liveness", SERVING)):
            assert (await health.Check(HealthCheckRequest(service=service))).status == status
        (tmp_path / "gate").touch()
        assert (await asyncio.wait_for(watch.read(), 20)).status == SERVING
        server.process.send_signal(signal.SIGTERM)
        assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        with pytest.raises(aio.AioRpcError) as caught:
            await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in caught.value.details()
    code, log = await asyncio.to_thread(server.finish)
    assert code == 0, log

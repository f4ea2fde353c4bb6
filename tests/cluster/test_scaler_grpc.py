"""The external scaler as KEDA sees it: a client generated from the protocol, against a whole scaler on real ports."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from cluster_fakes import BUSY, FakeKube, FakePod, until
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from carousel.cluster.scaler import Scaler
from carousel.cluster.scaler_options import ScalerOptions

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """``externalscaler_pb2`` and its gRPC half, made by protoc."""
    from grpc_tools import protoc

    folder = tmp_path_factory.mktemp("stubs")
    words = ["protoc", f"-I{HERE}", f"--python_out={folder}", f"--grpc_python_out={folder}", "externalscaler.proto"]
    assert protoc.main(words) == 0
    sys.path.insert(0, str(folder))
    try:
        import externalscaler_pb2
        import externalscaler_pb2_grpc
    finally:
        sys.path.remove(str(folder))
    return externalscaler_pb2, externalscaler_pb2_grpc


class Stage:
    """A scaler, a fake Kubernetes and a pod, with clients."""

    def __init__(self, scaler: Scaler, api: FakeKube, server: FakePod, stubs: tuple[Any, Any]) -> None:
        self.scaler, self.api, self.server = scaler, api, server
        self.pb, rpc = stubs
        self.channel = aio.insecure_channel(f"127.0.0.1:{scaler.scaler_port}")
        self.keda = rpc.ExternalScalerStub(self.channel)
        self.admin = f"http://127.0.0.1:{scaler.admin_port}"

    def ref(self, **metadata: str) -> Any:
        given = {"scalerAddress": "carousel-scaler.models.svc:9095", **metadata}
        return self.pb.ScaledObjectRef(name="carousel", namespace="models", scalerMetadata=given)

    async def value(self, **metadata: str) -> float:
        request = self.pb.GetMetricsRequest(scaledObjectRef=self.ref(**metadata), metricName="s0-carousel")
        (answer,) = (await self.keda.GetMetrics(request, timeout=5)).metricValues
        assert answer.metricName == "s0-carousel"
        return float(answer.metricValueFloat)

    async def active(self) -> bool:
        return bool((await self.keda.IsActive(self.ref(), timeout=5)).result)


@pytest.fixture
async def stage(
    stubs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Stage]:
    async with FakeKube() as api, FakePod(BUSY) as server:
        api.put("a")
        changes = {
            "pod_selector": "app=x", "pod_namespace": "models", "api_server": api.url, "pod_port": server.port,
            "interval_seconds": 0.1, "stale_seconds": 1.0, "scale_in_seconds": 0.0, "idle_seconds": 0.2,
            "scaler_port": 0, "admin_port": 0, **getattr(request, "param", {}),
        }  # fmt: skip
        scaler, stop, ready = Scaler(ScalerOptions(**changes)), asyncio.Event(), asyncio.Event()
        job = asyncio.ensure_future(scaler.run(stop, lambda _: ready.set()))
        await asyncio.wait_for(ready.wait(), 10)
        found = Stage(scaler, api, server, stubs)
        await until(scaler.admin.ready)
        yield found
        await found.channel.close()
        stop.set()
        await asyncio.wait_for(job, 20)


async def test_the_spec_and_the_value_by_mode(stage: Stage) -> None:
    async def spec(**metadata: str) -> tuple[str, int, float]:
        (found,) = (await stage.keda.GetMetricSpec(stage.ref(**metadata), timeout=5)).metricSpecs
        return found.metricName, found.targetSize, found.targetSizeFloat

    assert await spec() == ("carousel-queue-seconds", 5, 5.0)
    assert await spec(scaleOn="requests", targetRequests="0.4") == ("carousel-requests", 1, 0.4)
    assert await spec(scaleOn="tokens", targetTokens="1000") == ("carousel-tokens", 1000, 1000.0)
    assert await stage.value() == pytest.approx(3.0 + 5.0 * 0.5 / 0.6)
    assert await stage.value(targetWaitSeconds="2", targetOccupancy="1") == pytest.approx(3.0 + 2.0 * 0.5)
    assert await stage.value(scaleOn="requests") == 12
    assert await stage.value(scaleOn="tokens", triggerIndex="0") == 2000
    assert await stage.active()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"scaleOn": "cpu"}, r"scaleOn: got 'cpu', allowed: queue-seconds, requests, tokens"),
        ({"targetRequests": "many"}, r"targetRequests: got 'many', allowed: a number above 0"),
        ({"targetRequests": "0"}, r"targetRequests: got '0'"),
        ({"targetWaitSeconds": "inf"}, r"targetWaitSeconds: got 'inf'.*at most 3600"),
        ({"targetOccupancy": "1.5"}, r"targetOccupancy: got '1.5'.*at most 1"),
        ({"targetRequest": "3"}, r"targetRequest: there is no such key, allowed: scaleOn, targetWaitSeconds"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_bad_metadata_are_refused_by_name(stage: Stage, metadata: dict[str, str], message: str) -> None:
    for call in (stage.keda.IsActive, stage.keda.GetMetricSpec):
        with pytest.raises(aio.AioRpcError, match=message) as refused:
            await call(stage.ref(**metadata), timeout=5)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(aio.AioRpcError, match=message):
        await stage.value(**metadata)


async def test_pods_that_come_and_go_change_the_value(stage: Stage) -> None:
    await until(lambda: stage.api.watchers)
    for name in ("b", "c"):
        stage.api.put(name)
    await until(lambda: stage.scaler.watcher.fleet.ready == 3)
    assert await stage.value(scaleOn="requests") == 36
    stage.api.remove("b")
    stage.api.put("c", ready=False)
    await until(lambda: stage.scaler.watcher.fleet.ready == 1)
    assert await stage.value(scaleOn="requests") == 12


async def test_lost_pods_are_served_from_memory_and_then_an_error_that_says_why(stage: Stage) -> None:
    stage.server.status = 500
    failed = stage.scaler.readings.failures
    await until(lambda: stage.scaler.readings.failures > failed)
    assert await stage.value(scaleOn="requests") == 12
    await until(lambda: stage.scaler.watcher._problem)
    await asyncio.sleep(1.1)
    with pytest.raises(aio.AioRpcError, match="none of 1 ready pods has told its load for 1 s") as refused:
        await stage.value()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    stage.server.status = 200
    await until(lambda: not stage.scaler.watcher._problem)
    assert await stage.value(scaleOn="requests") == 12


async def test_a_killed_api_server_is_an_error_after_a_while_and_not_before(stage: Stage) -> None:
    await until(lambda: stage.api.watchers)
    await stage.api.stop()
    await until(lambda: stage.scaler.source.problem)
    assert await stage.value(scaleOn="requests") == 12
    await until(lambda: stage.scaler.watcher._problem)
    await asyncio.sleep(1.1)
    with pytest.raises(aio.AioRpcError, match=r"list of pods is \d+ s old"):
        await stage.value()
    async with aiohttp.ClientSession() as session, session.get(f"{stage.admin}/metrics") as response:
        assert "carousel_scaler_up 0.0" in await response.text()


async def test_waking_is_pushed(stage: Stage) -> None:
    stage.server.load = {**stage.server.load, "requests_running": 0, "requests_waiting": 0}
    await until(lambda: not stage.scaler.watcher._active and stage.scaler.watcher.fleet.live == 0)
    stream = stage.keda.StreamIsActive(stage.ref())
    assert (await stream.read()).result is False
    assert await stage.active() is False
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{stage.admin}/activate?seconds=soon") as response:
            assert response.status == 400
        async with session.post(f"{stage.admin}/activate?seconds=1") as response:
            assert response.status == 202
    assert (await asyncio.wait_for(stream.read(), 5)).result is True
    assert await stage.active() is True
    assert (await asyncio.wait_for(stream.read(), 10)).result is False
    stream.cancel()


async def test_health_metrics_and_state(stage: Stage) -> None:
    health = health_pb2_grpc.HealthStub(stage.channel)
    check = health_pb2.HealthCheckRequest
    serving = health_pb2.HealthCheckResponse.SERVING
    assert (await health.Check(check(service="externalscaler.ExternalScaler"), timeout=5)).status == serving
    with pytest.raises(aio.AioRpcError, match="no service 'x'"):
        await health.Check(check(service="x"), timeout=5)
    async with aiohttp.ClientSession() as session:
        for path in ("/livez", "/readyz"):
            async with session.get(stage.admin + path) as response:
                assert response.status == 200
        async with session.get(f"{stage.admin}/metrics") as response:
            text = await response.text()
        async with session.get(f"{stage.admin}/state") as response:
            state = await response.json()
    assert 'carousel_scaler_value{scale_on="queue-seconds"}' in text
    for line in ("carousel_scaler_pods_ready 1.0", "carousel_scaler_requests_waiting 4.0", "carousel_scaler_up 1.0"):
        assert line in text
    assert (state["ready_pods"], state["requests_running"], state["active"]) == (1, 8, True)


async def test_bytes_that_are_no_message_are_an_error_and_no_crash(stage: Stage) -> None:
    call = stage.channel.unary_unary("/externalscaler.ExternalScaler/IsActive")
    with pytest.raises(aio.AioRpcError):
        await call(b"\xff\xff\xff", timeout=5)
    assert await stage.active()


async def test_a_forbidden_list_is_never_ready_and_says_why() -> None:
    async with FakeKube() as api:
        api.refuse = 403
        options = ScalerOptions(
            pod_selector="app=x", pod_namespace="models", api_server=api.url, scaler_port=0, admin_port=0,
            interval_seconds=0.1,
        )  # fmt: skip
        scaler, stop, ready = Scaler(options), asyncio.Event(), asyncio.Event()
        job = asyncio.ensure_future(scaler.run(stop, lambda _: ready.set()))
        await asyncio.wait_for(ready.wait(), 10)
        await until(lambda: scaler.source.problem and "403" in scaler.watcher._problem)
        url = f"http://127.0.0.1:{scaler.admin_port}/readyz"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 503
            assert "HTTP 403: pods is refused" in (await response.json())["reason"]
        stop.set()
        await asyncio.wait_for(job, 20)

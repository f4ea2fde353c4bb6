"""``carousel serve --pod-deletion-cost``: a whole server on the real engine beside a fake Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from cluster_fakes import FakeKube, until
from tests.server.harness import Running, serving, tiny_factory

from carousel.cluster.demand import read_load
from carousel.cluster.kube import KubeApi, KubeUnreachable


@asynccontextmanager
async def server(step_s: float = 0.0) -> AsyncIterator[Running]:
    """In a thread, while this loop serves Kubernetes."""
    context = serving(lambda keep: tiny_factory(keep, step_s), pod_deletion_cost=True)
    running = await asyncio.to_thread(context.__enter__)
    try:
        yield running
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


BODY: dict[str, Any] = {"text_input": "hello", "parameters": {"max_tokens": 40, "ignore_eos": True}}


async def test_the_server_keeps_its_cost_and_tells_the_load_that_the_scaler_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POD_NAME", "a")
    monkeypatch.setenv("POD_NAMESPACE", "models")
    async with FakeKube() as api:
        api.put("a")
        monkeypatch.setattr(KubeApi, "in_cluster", lambda namespace: KubeApi(api.url, namespace))
        async with server(step_s=0.05) as running, httpx.AsyncClient(base_url=running.url, timeout=30) as client:
            await until(lambda: api.patches)
            annotations = {"controller.kubernetes.io/pod-deletion-cost": "0"}
            assert api.patches == [("a", {"metadata": {"annotations": annotations}})]
            call = asyncio.ensure_future(client.post(f"/v2/models/{running.settings.model_name}/generate", json=BODY))
            await until(lambda: running.engine.stats().num_tokens_running > 0)
            load = read_load((await client.get("/load")).json())
            assert load.requests_running == 1
            assert load.tokens_running % 16 == 0
            assert load.tokens_running > 0
            assert load.admitted == 1
            assert "carousel_num_tokens_running" in (await client.get("/metrics")).text
            assert (await call).status_code == 200
            await until(lambda: running.engine.stats().num_tokens_running == 0)


async def test_without_kubernetes_it_says_so_once_and_serves(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def nowhere(namespace: str) -> KubeApi:
        raise KubeUnreachable("KUBERNETES_SERVICE_HOST is not set")

    monkeypatch.setattr(KubeApi, "in_cluster", nowhere)
    async with server() as running, httpx.AsyncClient(base_url=running.url, timeout=30) as client:
        answer = await client.post(f"/v2/models/{running.settings.model_name}/generate", json=BODY)
        assert answer.status_code == 200
    assert capfd.readouterr().err.count("KUBERNETES_SERVICE_HOST is not set") == 1

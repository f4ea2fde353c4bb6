"""The pod-deletion cost: what it is, when it is patched, and that nothing that the API does reaches the server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_fakes import Clock, FakeKube, running, until
from hypothesis import given, settings
from hypothesis import strategies as st

from carousel.cluster.deletion_cost import ANNOTATION, LARGEST, CostFilter, DeletionCost, cost_of
from carousel.cluster.kube import KubeApi
from carousel.engine.timeline import EngineStats

POD = {"POD_NAME": "a", "POD_NAMESPACE": "models"}


def test_the_cost_is_the_tokens_that_the_pod_holds() -> None:
    assert cost_of(EngineStats()) == 0
    assert cost_of(EngineStats(num_requests_running=2, num_tokens_running=320, num_tokens_waiting=50)) == 370
    assert cost_of(EngineStats(num_requests_waiting=1)) == 1
    assert cost_of(EngineStats(num_requests_running=1, num_tokens_running=2**40)) == LARGEST


COSTS = st.one_of(st.integers(0, 5), st.integers(0, 100_000))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.1, 15), COSTS), min_size=1, max_size=80))
def test_patches_are_rare_and_what_stands_is_never_far_off(steps: list[tuple[float, int]]) -> None:
    costs, now, patches = CostFilter(10.0), 0.0, []
    samples: list[tuple[float, int]] = []
    for gap, cost in steps:
        now += gap
        samples.append((now, cost))
        due = costs.due(now, cost)
        if due is not None:
            costs.patched(now, due)
            patches.append((now, due))
        peak = max(value for when, value in samples if now - when <= 10.0)
        when, stands = patches[-1]
        if now - when >= 10.0:
            assert (stands == 0) == (peak == 0)
            assert abs(stands - peak) < 0.25 * max(stands, peak, 1)
    times = [when for when, _ in patches]
    assert all(later - earlier >= 10.0 for earlier, later in itertools.pairwise(times))
    assert patches[0][0] == samples[0][0]


def test_a_steady_load_is_patched_once_and_a_flicker_counts_as_busy() -> None:
    costs = CostFilter(10.0)
    patched = []
    for second in range(200):
        due = costs.due(float(second), 100 if second % 3 else 0)
        if due is not None:
            costs.patched(float(second), due)
            patched.append(due)
    assert patched == [0, 100]


def keeper(api: FakeKube, stats: list[EngineStats], clock: Clock, **changes: object) -> DeletionCost:
    return DeletionCost(
        lambda: stats[-1],
        environ=POD,
        connect=lambda namespace: KubeApi(api.url, namespace, timeout_s=0.2),
        clock=clock,
        sample_s=0.002,
        interval_s=0.01,
        **changes,  # type: ignore[arg-type]
    )


def values(api: FakeKube) -> list[str]:
    return [body["metadata"]["annotations"][ANNOTATION] for _, body in api.patches]


async def test_it_follows_the_load_of_its_own_pod() -> None:
    stats, clock = [EngineStats()], Clock()
    async with FakeKube() as api:
        api.put("a")
        async with running(keeper(api, stats, clock).run()):
            await until(lambda: values(api) == ["0"])
            stats.append(EngineStats(num_requests_running=1, num_tokens_running=160))
            clock.now += 1
            await until(lambda: values(api) == ["0", "160"])
            stats.append(EngineStats(num_requests_running=1, num_tokens_running=176))
            clock.now += 1
            await asyncio.sleep(0.05)
            stats.append(EngineStats())
            clock.now += 1
            await until(lambda: values(api) == ["0", "160", "0"])
        assert {name for name, _ in api.patches} == {"a"}
        assert set(api.calls) == {"patch"}


@pytest.mark.parametrize("trouble", [403, 404, 500, "hang", "killed"])
async def test_trouble_is_one_error_and_ends_by_itself(trouble: object, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats, clock = [EngineStats(num_requests_running=3)], Clock()
    async with FakeKube() as api:
        if trouble != 404:
            api.put("a")
        api.refuse = trouble if trouble in (403, 500) else None
        api.hang = trouble == "hang"
        cost = keeper(api, stats, clock)
        if trouble == "killed":
            await api.stop()
        job = asyncio.ensure_future(cost.run())
        await until(lambda: cost.problem is not None)
        await until(lambda: cost._complaint._failures >= 2)
        assert not job.done()
        assert not api.patches
        if trouble != "killed":
            api.refuse, api.hang = None, False
            api.put("a")
            await until(lambda: values(api) == ["3"])
            await until(lambda: cost.problem is None)
        job.cancel()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    hints = {403: "Role with pods: [patch]", 404: "POD_NAME", 500: "HTTP 500", "hang": "in time", "killed": "127.0.0.1"}
    assert hints[trouble] in errors[0]  # type: ignore[index]
    assert "a scale-in may take a busy pod" in errors[0]


async def test_a_pod_that_is_leaving_patches_nothing() -> None:
    async with FakeKube() as api:
        api.put("a")
        stats = [replace(EngineStats(), num_requests_running=1)]
        async with running(keeper(api, stats, Clock(), leaving=lambda: True).run()):
            await asyncio.sleep(0.05)
        assert api.calls == []


async def test_without_a_service_account_it_says_so_and_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    connect = lambda namespace: KubeApi.in_cluster(namespace, account=tmp_path)  # noqa: E731
    await asyncio.wait_for(DeletionCost(EngineStats, environ=POD, connect=connect).run(), 5)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "automountServiceAccountToken: true" in record.getMessage()


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    code = (
        "import sys, carousel.server, carousel.serving;"
        "print(sorted(name for name in sys.modules if name.startswith(('carousel.cluster'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

"""Nothing is lost while pods come and go: rolling updates, scale-in, deletion, eviction, under steady streams."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.cluster.e2e.conftest import demo_service
from tests.cluster.e2e.kube import Kube, name_of, until
from tests.cluster.e2e.streams import streams

pytestmark = pytest.mark.timeout(900)
#: 16 that keep their connections, 8 that do not, 4 gRPC channels: 28 requests at any time.
CLIENTS = {"kept": 16, "fresh": 8, "grpc": 4}
TOKENS = 24


def service(replicas: int, **environment: str):
    return demo_service(
        replicas=replicas, CAROUSEL_SHUTDOWN_DELAY_SECONDS="8", CAROUSEL_DRAIN_SECONDS="120", **environment
    )


@pytest.fixture
def two(kube: Kube) -> Kube:
    kube.apply(service(2))
    kube.wait_pods("smollm2", 2, 300)
    return kube


def test_a_rolling_update_loses_nothing(two: Kube, report: Callable[..., None]) -> None:
    before = {name_of(pod) for pod in two.pods("smollm2")}
    with streams(two, "smollm2", CLIENTS, TOKENS) as load:
        began = time.monotonic()
        two.apply(service(2, CAROUSEL_LOG_LEVEL="warning"))
        until(lambda: {name_of(pod) for pod in two.pods("smollm2")}.isdisjoint(before), 600, "all pods are new")
        two.wait_pods("smollm2", 2, 400)
        took = time.monotonic() - began
    report(roll_s=round(took, 1), **load.results)
    assert load.failures == []
    assert all(ended == {"whole": ended["whole"]} for ended in load.ended.values())
    assert sum(ended["whole"] for ended in load.ended.values()) >= sum(CLIENTS.values())


def test_scale_in_and_deletion_lose_nothing(two: Kube, report: Callable[..., None]) -> None:
    with streams(two, "smollm2", CLIENTS, TOKENS) as load:
        two.apply(service(1))
        two.wait_pods("smollm2", 1, 400)
        two.apply(service(2))
        first, _ = two.wait_pods("smollm2", 2, 400)
        two.run("delete", "pod", name_of(first), "--wait=true", seconds=300)
        two.wait_pods("smollm2", 2, 400)
    report(**load.results)
    assert load.failures == []
    assert all(ended == {"whole": ended["whole"]} for ended in load.ended.values())

"""Processes that die, freeze or hang: the probes restart them, and other replicas go on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.cluster.e2e.conftest import container_of, demo_service
from tests.cluster.e2e.kube import Kube, Object, is_ready, name_of, restarts, until
from tests.cluster.e2e.streams import streams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def service() -> Object:
    """Two replicas that can be killed from within: process 1 of a container cannot, so it is another number here."""
    made = demo_service(
        replicas=2, CAROUSEL_FAULTS="on", CAROUSEL_STALL_SECONDS="5", CAROUSEL_SHUTDOWN_DELAY_SECONDS="5"
    )
    made["spec"]["predictor"]["shareProcessNamespace"] = True
    container_of(made)["livenessProbe"] |= {"periodSeconds": 2, "failureThreshold": 2}
    return made


KILL = (
    "import os, pathlib, signal, sys\n"
    "processes = pathlib.Path('/proc').glob('[0-9]*')\n"
    "found = [path for path in processes if b'/carousel\\0serve' in (path / 'cmdline').read_bytes()]\n"
    "os.kill(int(found[0].name), getattr(signal, sys.argv[1]))"
)


def strike(kube: Kube, pod: str, name: str) -> None:
    """Send the server in a pod a signal."""
    kube.exec(pod, "python", "-c", KILL, name)


def restarted(kube: Kube, pod: str, times: int) -> bool:
    found = kube.get("pod", pod)
    return restarts(found) >= times and is_ready(found)


def test_killed_frozen_and_hanging_servers_come_back(kube: Kube, report: Callable[..., None]) -> None:
    """SIGKILL, SIGSTOP and a hanging engine thread, one after the other; the other replica serves all the while."""
    kube.apply(service())
    victim, witness = (name_of(pod) for pod in kube.wait_pods("smollm2", 2, 300))
    took: dict[str, float] = {}
    with streams(kube, "smollm2", {"fresh": 4}, 8) as load:
        for times, name in enumerate(("SIGKILL", "SIGSTOP", "SIGUSR1"), 1):
            began = time.monotonic()
            strike(kube, victim, name)
            until(lambda times=times: restarted(kube, victim, times), 200, f"{victim} is back after {name}")
            took[name] = round(time.monotonic() - began, 1)
    report(back_s=took, **load.results)
    assert restarts(kube.get("pod", witness)) == 0
    # Streams of the victim break; nothing else does, and requests that come meanwhile are served by the other one.
    ended = load.ended["fresh"]
    assert ended["whole"] > 3 * sum(count for kind, count in ended.items() if kind != "whole")


def test_out_of_memory_is_a_restart_with_its_reason(kube: Kube) -> None:
    made = demo_service()
    container_of(made)["resources"] |= {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"cpu": "2", "memory": "256Mi"},
    }
    kube.apply(made)

    def reason() -> str | None:
        for pod in kube.pods("smollm2"):
            for status in pod["status"].get("containerStatuses", []):
                for state in (status["state"], status.get("lastState", {})):
                    if "terminated" in state:
                        return str(state["terminated"]["reason"])
        return None

    assert until(reason, 120, f"an end\n{kube.story('smollm2')}") in ("OOMKilled", "Error")

"""Processes that die, freeze or hang: the probes restart them, and other replicas go on."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from tests.cluster.e2e.conftest import container_of, demo_service, set_variables
from tests.cluster.e2e.kube import Kube, Object, is_ready, name_of, restarts, until
from tests.cluster.e2e.streams import streams

pytestmark = pytest.mark.timeout(600)


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

HOG = "import time\nheld = []\nwhile True:\n    held.append(bytearray(8 << 20))\n    time.sleep(0.02)"


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
            if name == "SIGUSR1":
                refusal = refused_by(kube, victim)
            until(lambda times=times: restarted(kube, victim, times), 200, f"{victim} is back after {name}")
            took[name] = round(time.monotonic() - began, 1)
    report(back_s=took, refused_by_the_hanging_one=refusal, **load.results)
    assert restarts(kube.get("pod", witness)) == 0
    unaffected(load.ended["fresh"])


def unaffected(ended: dict[str, int]) -> None:
    """Streams of the victim break; nothing else does, and requests that come meanwhile are served by the other one."""
    assert set(ended) <= {"whole", "cut", "connection", "status 503"}
    assert ended["whole"] > 3 * sum(count for kind, count in ended.items() if kind != "whole")


def refused_by(kube: Kube, pod: str) -> str:
    """What a server whose engine hangs says to a new request: try again later, and why."""
    body = {"text_input": "a", "parameters": {"max_tokens": 2}}
    with kube.forward(f"pod/{pod}", 8080) as port:

        def refusal() -> httpx.Response | None:
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/v2/models/smollm2/generate", json=body, timeout=2)
            except httpx.TransportError:  # the request hangs with the engine, until it is known to
                return None
            return answer if answer.status_code == 503 else None

        answer = until(refusal, 60, f"503 of {pod}")
    assert int(answer.headers["retry-after"]) >= 1
    return answer.text


def test_out_of_memory_while_serving(kube: Kube, report: Callable[..., None]) -> None:
    """The kernel kills the server of one replica; it comes back with its reason, and the other one serves."""
    made = service()
    container_of(made)["resources"]["limits"]["memory"] = "1200Mi"
    set_variables(made, CAROUSEL_KV_CACHE_MEMORY="128MiB", CAROUSEL_SHUTDOWN_DELAY_SECONDS="5")
    kube.apply(made)
    victim, witness = (name_of(pod) for pod in kube.wait_pods("smollm2", 2, 300))
    with streams(kube, "smollm2", {"fresh": 4}, 8) as load:
        began = time.monotonic()
        # Grows slowly: the larger process, the server, is the one that the kernel takes when there is no more.
        kube.exec(victim, "python", "-c", HOG, check=False)
        until(lambda: restarted(kube, victim, 1), 200, lambda: f"{victim} is back\n{kube.story('smollm2')}")
        took = round(time.monotonic() - began, 1)
    (status,) = kube.get("pod", victim)["status"]["containerStatuses"]
    report(back_s=took, ended_by=status["lastState"]["terminated"]["reason"], **load.results)
    assert (status["lastState"]["terminated"]["reason"], status["lastState"]["terminated"]["exitCode"]) == (
        "OOMKilled",
        137,
    )
    assert restarts(kube.get("pod", witness)) == 0
    unaffected(load.ended["fresh"])


def test_a_memory_limit_that_is_too_low_is_told(kube: Kube) -> None:
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

    assert until(reason, 120, lambda: f"an end\n{kube.story('smollm2')}") in ("OOMKilled", "Error")

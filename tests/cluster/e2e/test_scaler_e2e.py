"""``carousel scaler`` under a real KEDA: from zero by a held request, out on load, in and to zero when idle.

The scaler runs here and not in a pod, because the kit's KEDA does too; its pods only tell a load that the test sets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.cluster.e2e.conftest import IMAGE
from tests.cluster.e2e.kube import Kube, Object, until
from tests.ports import free_port

pytestmark = pytest.mark.timeout(600)

POD = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    load = admitted = 0
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        Handler.admitted += 1
        if "load=" in self.path:
            Handler.load = int(self.path.partition("load=")[2])
        self.do_GET()
    def do_GET(self):
        body = json.dumps({"requests_running": Handler.load, "requests_admitted": Handler.admitted}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""


def deployment() -> Object:
    container = {
        "name": "pod",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-u", "-c", POD],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    context = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "securityContext": context, "terminationGracePeriodSeconds": 1}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "target"},
        "spec": {
            "selector": {"matchLabels": {"app": "target"}},
            "template": {"metadata": {"labels": {"app": "target"}}, "spec": spec},
        },
    }


def scaled_object(port: int) -> Object:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 5}}
    metadata = {"scalerAddress": f"127.0.0.1:{port}", "scaleOn": "requests", "targetRequests": "10"}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "target"},
        "spec": {
            "scaleTargetRef": {"name": "target"},
            "pollingInterval": 5,
            "cooldownPeriod": 10,
            "minReplicaCount": 0,
            "maxReplicaCount": 4,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [{"type": "external-push", "metadata": metadata}],
        },
    }


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    # The scaler refuses variables of its prefix that it does not know, and these tests have some.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CAROUSEL_")}
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(30)


def post(url: str, seconds: float = 60) -> int:
    request = urllib.request.Request(url, data=b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return int(response.status)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture
def keda(kube: Kube) -> None:
    """Skips where there is no KEDA that reaches this process."""
    if "scaledobjects" not in kube.run("api-resources", "--api-group=keda.sh", "-o", "name", check=False):
        pytest.skip("this cluster has no KEDA: cluster/addons/keda-up starts the kit's")


def test_zero_to_one_to_three_and_back(kube: Kube, keda: None, report: Callable[..., None]) -> None:
    api, grpc, admin, activator = (free_port() for _ in range(4))
    scaler = [
        sys.executable, "-m", "carousel.cli", "scaler", "--pod-selector", "app=target",
        "--pod-namespace", kube.namespace, "--api-server", f"http://127.0.0.1:{api}", "--scaler-port", str(grpc),
        "--admin-port", str(admin), "--activator-port", str(activator), "--interval-seconds", "1",
        "--stale-seconds", "10", "--scale-in-seconds", "10", "--idle-seconds", "5",
    ]  # fmt: skip

    def replicas() -> tuple[int, int]:
        found = kube.get("deployment", "target")
        return found["spec"]["replicas"], found.get("status", {}).get("readyReplicas", 0)

    def reached(wanted: int, seconds: float) -> float:
        began = time.monotonic()
        until(lambda: replicas() == (wanted, wanted), seconds, f"{wanted} replicas")
        return round(time.monotonic() - began, 1)

    def addresses() -> list[str]:
        return [pod["status"]["podIP"] for pod in kube.items("pods", "app=target")]

    figures: dict[str, Any] = {}
    with process("kubectl", "proxy", f"--port={api}"), process(*scaler) as running:
        until(lambda: answers(f"http://127.0.0.1:{admin}/readyz"), 60, "the scaler is ready")
        kube.apply(deployment(), scaled_object(grpc))
        reached(0, 60)
        time.sleep(6)  # a poll of KEDA's, with which it opens its stream
        began = time.monotonic()
        assert post(f"http://127.0.0.1:{activator}/v1/completions") == 200
        figures["held_s"] = round(time.monotonic() - began, 1)
        assert replicas()[0] >= 1
        assert post(f"http://127.0.0.1:{activator}/?load=25") == 200
        figures["one_to_three_s"] = reached(3, 90)
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/state", timeout=5) as response:
            assert json.load(response)["requests_running"] == 25
        for address in addresses():
            post(f"http://{address}:8080/?load=0", 5)
        figures["to_zero_s"] = reached(0, 120)
        assert running.poll() is None
    assert running.returncode == 0
    report(**figures)

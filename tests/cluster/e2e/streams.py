"""Steady streams from pods within the cluster, around load.py: port-forward would pin them all to one pod."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.e2e.conftest import IMAGE
from tests.cluster.e2e.kube import Kube, Object, until

SCRIPT = Path(__file__).with_name("load.py")
NAME = "load"
#: After this all connections are made, and streams are at all stages.
SETTLE_S = 3.0


def load_pod(name: str, words: list[str]) -> Object:
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "load",
        "image": IMAGE,
        "command": ["python", "/load/load.py", *words],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": security,
        "volumeMounts": [{"name": "load", "mountPath": "/load"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": "load", "configMap": {"name": NAME}}, {"name": "tmp", "emptyDir": {}}],
        },
    }


@dataclass
class Streams:
    """Pods that ask; ``results`` has each mode's figures after the context has ended."""

    kube: Kube
    modes: list[str]
    results: dict[str, Any]

    @property
    def ended(self) -> dict[str, dict[str, int]]:
        return {mode: result["ended"] for mode, result in self.results.items()}

    @property
    def failures(self) -> list[str]:
        return [f"{mode}: {text}" for mode, result in self.results.items() for text in result["failures"]]


@contextmanager
def streams(kube: Kube, service: str, clients: dict[str, int], tokens: int) -> Iterator[Streams]:
    """Keep ``clients`` (mode -> how many) at the predictor's Service until the context ends."""
    script = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": NAME},
        "data": {"load.py": SCRIPT.read_text()},
    }
    host = f"{service}-predictor.{kube.namespace}.svc"
    pods = [
        load_pod(f"load-{mode}", [f"http://{host}", f"{host}:8081", str(count), str(tokens), mode])
        for mode, count in clients.items()
    ]
    kube.apply(script, *pods)
    running = Streams(kube, list(clients), {})
    for mode in clients:
        until(lambda mode=mode: "clients" in kube.run("logs", f"load-{mode}", check=False), 120, f"load-{mode} asks")
    time.sleep(SETTLE_S)
    yield running
    for mode in clients:
        kube.exec(f"load-{mode}", "touch", "/tmp/stop", container="load")
    for mode in clients:
        log = until(lambda mode=mode: finished(kube, f"load-{mode}"), 200, f"load-{mode} has ended")
        running.results[mode] = json.loads(log.splitlines()[-1])
    for mode in clients:
        kube.run("delete", "pod", f"load-{mode}", "--wait=true")


def finished(kube: Kube, pod: str) -> str | None:
    phase = kube.get("pod", pod)["status"]["phase"]
    if phase not in ("Succeeded", "Failed"):
        return None
    log = kube.logs(pod)
    assert phase == "Succeeded", log
    return log

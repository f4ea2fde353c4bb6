"""kubectl, in one namespace, for the end-to-end tests."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
Object = dict[str, Any]

MISSING = (
    "the end-to-end tests need a cluster: make e2e starts the kit where it lies beside the project; for another one "
    "set KUBECONFIG, have kubectl in PATH, and put the image of `docker build --target demo` on its nodes"
)


def reason_to_skip() -> str | None:
    """Why there is no cluster to test with, and what to do; None if there is one."""
    if not os.environ.get("KUBECONFIG") or shutil.which("kubectl") is None:
        return MISSING
    done = subprocess.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{MISSING}; this one does not answer: {done.stderr.strip()[-300:]}"


class KubectlError(AssertionError):
    """kubectl failed; its message."""


def until(condition: Callable[[], T | None], seconds: float, what: str | Callable[[], str], period: float = 0.25) -> T:
    """The first true result of ``condition``; fails the test after ``seconds``.

    Args:
        condition: asked every ``period`` seconds.
        what: that did not come about; a function is called then, and can tell how things stand then.
    """
    end = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= end:
            raise AssertionError(f"not within {seconds:g} s: {what() if callable(what) else what}")
        time.sleep(period)


class Kube:
    """kubectl in a namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def run(self, *words: str, given: str | None = None, seconds: float = 120, check: bool = True) -> str:
        """kubectl's output.

        Raises:
            KubectlError: it failed, and ``check`` is true.
        """
        command = ["kubectl", "--namespace", self.namespace, *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode != 0 and check:
            raise KubectlError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout if done.returncode == 0 else done.stderr

    def apply(self, *objects: Object, words: tuple[str, ...] = ()) -> None:
        self.run("apply", *words, "-f", "-", given=yaml.safe_dump_all(objects))

    def get(self, kind: str, name: str) -> Object:
        found: Object = json.loads(self.run("get", kind, name, "-o", "json"))
        return found

    def items(self, kind: str, selector: str = "") -> list[Object]:
        found: list[Object] = json.loads(self.run("get", kind, "-l", selector, "-o", "json"))["items"]
        return found

    def pods(self, service: str) -> list[Object]:
        """The pods of an InferenceService that are not on their way out."""
        found = self.items("pods", f"serving.kserve.io/inferenceservice={service}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def condition(self, kind: str, name: str, condition: str = "Ready") -> Object:
        """A condition of an object's status; empty if it has none of that name."""
        status = self.get(kind, name).get("status", {})
        return next((item for item in status.get("conditions", []) if item["type"] == condition), {})

    def wait_ready(self, service: str, seconds: float = 180) -> None:
        """Until the InferenceService is ready; what its pods say, if it never is."""
        try:
            until(
                lambda: self.condition("inferenceservice", service).get("status") == "True", seconds, f"{service} ready"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story(service)}") from None

    def wait_pods(self, service: str, count: int, seconds: float = 180) -> list[Object]:
        """Until exactly ``count`` pods exist and all are ready."""

        def settled() -> list[Object] | None:
            found = self.items("pods", f"serving.kserve.io/inferenceservice={service}")
            return found if len(found) == count and all(is_ready(pod) for pod in found) else None

        try:
            return until(settled, seconds, f"{count} ready pods of {service}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story(service)}") from None

    def wait_scaled(self, name: str, seconds: float = 120) -> None:
        """Until KEDA scales by a ScaledObject.

        While a scaler is not reachable KEDA tries again after pauses that double, so that it may take as long again as
        the scaler took to start; a change of the spec makes it try at once (docs/autoscaling.md).
        """
        intervals = itertools.cycle((4, 5))

        def ready() -> bool:
            if self.condition("scaledobject", name).get("status") == "True":
                return True
            change = json.dumps({"spec": {"pollingInterval": next(intervals)}})
            self.run("patch", "scaledobject", name, "--type=merge", f"--patch={change}")
            return False

        until(ready, seconds, lambda: self.run("describe", "scaledobject", name), period=2)

    def story(self, service: str) -> str:
        """What one wants to see when something did not come about."""
        selector = f"serving.kserve.io/inferenceservice={service}"
        parts = [
            self.run("get", "inferenceservice,deployment,pod", "-o", "wide", check=False),
            self.run("logs", "-l", selector, "--tail=15", "--prefix", check=False),
            self.run("get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:],
        ]
        return "\n".join(parts)

    def logs(self, pod: str, *words: str) -> str:
        return self.run("logs", pod, *words)

    def exec(self, pod: str, *command: str, check: bool = True, container: str = "kserve-container") -> str:
        return self.run("exec", pod, "-c", container, "--", *command, check=check)

    @contextmanager
    def forward(self, target: str, port: int) -> Iterator[int]:
        """A local port that leads to ``port`` of a pod or Service while the context lasts."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            local = free.getsockname()[1]
        words = ["kubectl", "-n", self.namespace, "port-forward", "--address=127.0.0.1", target, f"{local}:{port}"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("Forwarding from"), f"{' '.join(words)}: {first}{process.stdout.read()}"
            yield local
        finally:
            process.terminate()
            process.wait(10)

    def proxied(self, pod: str, path: str, port: int = 8080) -> str:
        """What a GET of a pod's path says, by way of the API server."""
        return self.run("get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{port}/proxy{path}")


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


def restarts(pod: Object) -> int:
    return sum(item["restartCount"] for item in pod["status"].get("containerStatuses", []))

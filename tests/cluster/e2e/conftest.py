"""A namespace with restricted Pod Security for each test, and the demo InferenceService in it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.e2e.kube import Kube, Object, reason_to_skip

ROOT = Path(__file__).resolve().parents[3]
IMAGE = os.environ.get("CAROUSEL_E2E_IMAGE", "carousel:demo")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are end-to-end tests; none can be forgotten."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session", autouse=True)
def cluster() -> None:
    """Skips everything where there is no cluster."""
    if reason := reason_to_skip():
        pytest.skip(reason)


@pytest.fixture
def kube(cluster: None, request: pytest.FixtureRequest) -> Iterator[Kube]:
    """A fresh namespace; it goes at the end, with all that is in it."""
    name = f"e2e-{int(time.time()) % 10_000_000}-{os.getpid()}"
    subprocess.run(["kubectl", "create", "namespace", name], check=True, capture_output=True)
    labels = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]
    subprocess.run(["kubectl", "label", "namespace", name, *labels], check=True, capture_output=True)
    try:
        yield Kube(name)
    finally:
        gone = ["kubectl", "delete", "namespace", name, "--timeout=120s"]
        hurry = ["kubectl", "-n", name, "delete", "inferenceservice,deployment,pod", "--all", "--grace-period=1"]
        subprocess.run(hurry, check=False, capture_output=True)
        subprocess.run(gone, check=False, capture_output=True)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Prints figures and, if CAROUSEL_E2E_REPORT names a file, adds them to it, a JSON line a call."""

    def note(**figures: Any) -> None:
        line = json.dumps({"test": request.node.name, **figures})
        print(line)
        if path := os.environ.get("CAROUSEL_E2E_REPORT"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    return note


def documents(path: str) -> list[Object]:
    """The objects of a manifest, by its path below the project."""
    return [item for item in yaml.safe_load_all((ROOT / path).read_text("utf-8")) if item]


def demo_service(name: str = "smollm2", replicas: int = 1, **environment: str) -> Object:
    """manifests/example.yaml with the image under test, small requests, and further environment variables."""
    (service,) = copy.deepcopy(documents("manifests/example.yaml"))
    service["metadata"]["name"] = name
    predictor = service["spec"]["predictor"]
    predictor["minReplicas"] = replicas
    (container,) = predictor["containers"]
    container["image"] = IMAGE
    container["resources"]["requests"]["cpu"] = "100m"
    set_variables(service, **environment)
    return service


def container_of(service: Object) -> Object:
    container: Object = service["spec"]["predictor"]["containers"][0]
    return container


def set_variables(service: Object, **environment: str) -> None:
    """Add or replace variables; the grace period follows the times of the shutdown, as in the manifests."""
    variables = container_of(service)["env"]
    for name, value in environment.items():
        variables[:] = [item for item in variables if item["name"] != name] + [{"name": name, "value": value}]
    values = {item["name"]: item["value"] for item in variables if "value" in item}
    seconds = float(values["CAROUSEL_SHUTDOWN_DELAY_SECONDS"]) + float(values["CAROUSEL_DRAIN_SECONDS"])
    service["spec"]["predictor"]["terminationGracePeriodSeconds"] = int(seconds) + 15

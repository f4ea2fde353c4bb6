"""The scalers of manifests/ on real servers: out from one to three when a queue grows, still while the load is the
same, and back to one when it goes. By KEDA in three ways, and by an HPA on an external metric.

The model is the tests' tiny one and every step of the engine sleeps (``CAROUSEL_FAULTS=slow=...``), so that queues
grow though the machine has no power to spare, and requests take as long on a busy machine as on an idle one. The load
is such that three replicas is what the signal asks for with none of them at a limit: 24 streams need 1.5 batches of 16,
which at a target of 0.6 is 2.5 replicas; on a single one 8 wait besides.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.e2e.conftest import IMAGE, container_of, set_variables
from tests.cluster.e2e.kube import Kube, KubectlError, Object, until
from tests.cluster.e2e.streams import SETTLE_S, streams
from tests.manifests.kustomized import MANIFESTS, build
from tests.models.hostile_files import write_directory

pytestmark = pytest.mark.timeout(1200)

WAYS = ("keda-prometheus", "keda-metrics-api", "keda-external", "hpa")
STREAMS, SEATS, TOKENS, STEP_S = 24, 16, 40, 0.2
#: How long the load stays the same.
CONSTANT_S = float(os.environ.get("CAROUSEL_E2E_CONSTANT_SECONDS", "300"))
#: For the way back, instead of the manifests' 180 s, so that it is seen in time.
WINDOW_S = 15
#: A metric of KEDA's that nobody scales on but the HPA of manifests/: KEDA is the adapter of external.metrics.k8s.io.
METER = "meter"
TINY = "tiny-model"


def objects(way: str, namespace: str) -> list[Object]:
    """The overlay's objects, in this namespace, small, with the image and model under test and one replica at least."""
    text = json.dumps(build(MANIFESTS / "overlays" / way))
    text = text.replace(".default.svc", f".{namespace}.svc").replace('\\"default\\"', f'\\"{namespace}\\"')
    kept = ("InferenceService", "ScaledObject", "HorizontalPodAutoscaler", "Deployment", "Service", "ServiceAccount")
    found = [item for item in json.loads(text) if item["kind"] in (*kept, "Role", "RoleBinding")]
    for item in found:
        adapt(item)
    return found + (meter(namespace) if way == "hpa" else [])


def adapt(item: Object) -> None:
    spec = item.get("spec", {})
    if item["kind"] == "InferenceService":
        container = container_of(item)
        container["image"] = IMAGE
        container["resources"] = {
            "requests": {"cpu": "50m", "memory": "256Mi"},
            "limits": {"cpu": "2", "memory": "1Gi"},
        }
        container["volumeMounts"].append({"name": TINY, "mountPath": "/mnt/models"})
        spec["predictor"]["volumes"].append({"name": TINY, "configMap": {"name": TINY}})
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container[probe]["timeoutSeconds"] = 10  # a busy machine is not what is tested
        set_variables(
            item,
            CAROUSEL_MODEL="/mnt/models",
            CAROUSEL_MODEL_NAME="smollm2",
            CAROUSEL_MAX_BATCH_SEQUENCES=str(SEATS),
            CAROUSEL_DRAIN_SECONDS="30",
            CAROUSEL_SHUTDOWN_DELAY_SECONDS="5",
            CAROUSEL_FAULTS=f"slow={STEP_S}",
        )
    elif item["kind"] == "Deployment":
        (container,) = spec["template"]["spec"]["containers"]
        container["image"] = IMAGE
    elif item["kind"] == "ScaledObject":
        spec["minReplicaCount"] = 1
        if "fallback" in spec:
            spec["fallback"]["replicas"] = 1  # Prometheus has no series yet while the first pod starts
    elif item["kind"] == "HorizontalPodAutoscaler":
        spec["minReplicas"] = 1
        metric = {"name": "s0-prometheus", "selector": {"matchLabels": {"scaledobject.keda.sh/name": METER}}}
        spec["metrics"][0]["external"]["metric"] = metric


def tiny_model(folder: Path) -> Object:
    """The tests' tiny model as a ConfigMap."""
    files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in write_directory(folder).iterdir()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": TINY}, "binaryData": files}


def shorten(kube: Kube, way: str) -> None:
    """From now on the HPA scales in after ``WINDOW_S``."""
    change: Object = {"behavior": {"scaleDown": {"stabilizationWindowSeconds": WINDOW_S}}}
    kind = "hpa"
    if way != "hpa":
        kind, change = "scaledobject", {"advanced": {"horizontalPodAutoscalerConfig": change}}
    kube.run("patch", kind, "carousel", "--type=merge", f"--patch={json.dumps({'spec': change})}")


def meter(namespace: str) -> list[Object]:
    """KEDA's metric for the HPA: the query of keda-prometheus, on a target that it never wakes."""
    (scaled,) = [item for item in objects("keda-prometheus", namespace) if item["kind"] == "ScaledObject"]
    scaled["metadata"]["name"] = METER
    scaled["spec"]["scaleTargetRef"]["name"] = METER
    scaled["spec"]["minReplicaCount"] = 0
    del scaled["spec"]["fallback"]
    scaled["spec"]["triggers"][0]["metadata"]["activationThreshold"] = "1000000"
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "containers": [{"name": METER, "image": IMAGE, "securityContext": security}],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    template = {"metadata": {"labels": {"app": METER}}, "spec": pod}
    spec = {"replicas": 0, "selector": {"matchLabels": {"app": METER}}, "template": template}
    return [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": METER}, "spec": spec}, scaled]


@dataclass
class Replicas:
    """What became of the number of replicas: ``(time, wanted, ready)`` whenever it changed."""

    kube: Kube
    seen: list[tuple[float, int, int]] = field(default_factory=list)

    def look(self) -> None:
        found = self.kube.get("deployment", "carousel-predictor")
        wanted, ready = found["spec"].get("replicas", 1), found.get("status", {}).get("readyReplicas", 0)
        if not self.seen or self.seen[-1][1:] != (wanted, ready):
            self.seen.append((time.monotonic(), wanted, ready))

    @property
    def now(self) -> tuple[int, int]:
        return self.seen[-1][1:]

    def changes(self, begin: float, end: float) -> list[tuple[float, int]]:
        """Each new number of wanted replicas, and when it came in seconds after ``begin``."""
        wanted = [(when, number) for when, number, _ in self.seen]
        return [
            (round(when - begin, 1), number)
            for (_, before), (when, number) in itertools.pairwise(wanted)
            if number != before and begin <= when <= end
        ]


@contextmanager
def watched(kube: Kube) -> Iterator[Replicas]:
    """Looks at the Deployment twice a second while the context lasts."""
    replicas, stop = Replicas(kube), threading.Event()
    replicas.look()

    def look() -> None:
        while not stop.wait(0.5):
            try:
                replicas.look()
            except KubectlError as error:
                print(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield replicas
    finally:
        stop.set()
        thread.join()


def need(kube: Kube, way: str) -> None:
    """Skips where the cluster lacks what this way needs."""
    groups = kube.run("api-versions")
    if "keda.sh/v1alpha1" not in groups:
        pytest.skip("this cluster has no KEDA: cluster/addons/keda-up starts the kit's")
    asked = ("get", "service", "prometheus", "--namespace=monitoring", "--ignore-not-found")
    if way in ("keda-prometheus", "hpa") and not kube.run(*asked):
        pytest.skip("this cluster has no Prometheus: cluster/addons/prometheus-up starts the kit's")


def story(kube: Kube, replicas: Replicas) -> str:
    about = kube.run("describe", "scaledobject,hpa", check=False)
    return f"replicas seen: {replicas.seen}\n{about}\n{kube.story('carousel')}"


def settled(kube: Kube, replicas: Replicas, number: int, seconds: float) -> None:
    """Until so many are wanted and ready."""
    until(lambda: replicas.now == (number, number), seconds, lambda: f"{number} replicas, {story(kube, replicas)}")


@pytest.mark.parametrize("way", WAYS)
def test_out_on_a_queue_still_at_a_constant_load_and_back(
    kube: Kube, way: str, tmp_path: Path, report: Callable[..., None]
) -> None:
    need(kube, way)
    kube.apply(tiny_model(tmp_path / "tiny"), *objects(way, kube.namespace))
    until(lambda: kube.run("get", "deployment", "carousel-predictor", "--ignore-not-found"), 60, "KServe's Deployment")
    figures: dict[str, Any] = {"way": way}
    with watched(kube) as replicas:
        settled(kube, replicas, 1, 240)
        kube.wait_scaled(METER if way == "hpa" else "carousel")
        idle = time.monotonic()
        assert replicas.now[0] == 1
        with streams(kube, "carousel", {"fresh": STREAMS}, TOKENS) as load:
            began = time.monotonic() - SETTLE_S
            until(lambda: replicas.now[1] >= 3, 240, lambda: story(kube, replicas))
            figures["three_ready_s"] = round(time.monotonic() - began, 1)
            time.sleep(max(0.0, began + CONSTANT_S - time.monotonic()))
            ended = time.monotonic()
            changes = replicas.changes(began, ended)
            wanted, ready = replicas.now
        shorten(kube, way)
        settled(kube, replicas, 1, 400)
        figures["one_again_s"] = round(time.monotonic() - ended, 1)
        figures |= {"changes": changes, "changes_back": replicas.changes(ended, time.monotonic())}
    report(**figures, **load.results)
    assert replicas.changes(idle, began) == []
    assert (wanted, ready) == (3, 3)
    assert len(changes) <= 2, f"it flaps: {changes}"
    assert load.failures == []

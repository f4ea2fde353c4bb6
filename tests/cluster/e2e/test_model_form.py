"""``model:`` with a ClusterServingRuntime and a claim: the manifests of manifests/runtimes, run and asked."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.e2e.conftest import IMAGE, documents
from tests.cluster.e2e.kube import Kube, Object, name_of, until
from tests.cluster.e2e.test_smoke import all_protocols_answer, start_of

pytestmark = pytest.mark.timeout(600)
CLAIM, FOLDER = "models", "smollm2"  # as manifests/runtimes/pvc says
COPY = (
    "import pathlib, shutil\n"
    "(model,) = pathlib.Path('/var/cache/carousel').rglob('*.gguf')\n"
    f"there = pathlib.Path('/models/{FOLDER}')\n"
    "there.mkdir(exist_ok=True)\n"
    "shutil.copy(model, there)\n"
    "print('copied', model)"
)


def has_default_class(kube: Kube) -> bool:
    """Whether the cluster makes volumes by itself."""
    key = "storageclass.kubernetes.io/is-default-class"
    classes = json.loads(kube.run("get", "storageclass", "-o", "json"))["items"]
    return any(item["metadata"].get("annotations", {}).get(key) == "true" for item in classes)


@pytest.fixture
def claim(kube: Kube) -> Iterator[None]:
    """The claim ``models``: of the cluster's own storage, or a folder of this machine where that is the node."""
    made = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    if has_default_class(kube):
        kube.apply(made)
        yield
        return
    with tempfile.TemporaryDirectory(prefix="carousel-claim-") as folder:
        Path(folder).chmod(0o777)  # the pods' user is another one, and fsGroup does not count for a hostPath
        made["spec"]["storageClassName"] = kube.namespace
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": kube.namespace},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "1Gi"},
                "storageClassName": kube.namespace,
                "hostPath": {"path": folder},
            },
        }
        kube.apply(volume, made)
        try:
            yield
        finally:
            kube.run("delete", "inferenceservice,pod", "--all", "--grace-period=1", check=False)
            kube.run("delete", "pvc", CLAIM, "--timeout=60s", check=False)
            kube.run("delete", "pv", kube.namespace, "--timeout=60s", check=False)


@pytest.fixture
def runtime(kube: Kube) -> Iterator[str]:
    """manifests/runtimes under a name of this test's, with the image under test; its name."""
    (made,) = documents("manifests/runtimes/clusterservingruntime.yaml")
    made["metadata"]["name"] = kube.namespace
    (container,) = made["spec"]["containers"]
    container["image"] = IMAGE
    container["resources"]["requests"] = {"cpu": "100m", "memory": "1Gi"}
    kube.apply(made)
    yield kube.namespace
    kube.run("delete", "clusterservingruntime", kube.namespace, check=False)


def filler() -> Object:
    """A pod that puts the demo image's model into the claim."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "fill",
        "image": IMAGE,
        "command": ["python", "-c", COPY],
        "securityContext": security,
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    user = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": user,
        "containers": [container],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": CLAIM}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "fill"}, "spec": spec}


def test_a_model_from_a_claim_answers(kube: Kube, claim: None, runtime: str, report: Callable[..., None]) -> None:
    kube.apply(filler())
    until(
        lambda: kube.get("pod", "fill")["status"]["phase"] == "Succeeded",
        120,
        lambda: kube.run("describe", "pod", "fill") + kube.logs("fill"),
    )
    (service,) = documents("manifests/runtimes/pvc/inferenceservice.yaml")
    service["metadata"]["name"] = "smollm2"
    model = service["spec"]["predictor"]["model"]
    assert model["storageUri"] == f"pvc://{CLAIM}/{FOLDER}"
    model["runtime"] = runtime
    kube.apply(service)
    kube.wait_ready("smollm2", 300)
    (pod,) = kube.wait_pods("smollm2", 1)
    created, started = start_of(pod)
    report(ready_after_creation_s=created, ready_after_container_start_s=started)
    all_protocols_answer(kube, "service/smollm2-predictor")
    # Mounted from the claim, read-only, and nothing was fetched.
    assert kube.exec(name_of(pod), "ls", "/mnt/models").strip().endswith(".gguf")
    assert "Read-only file system" in kube.exec(name_of(pod), "touch", "/mnt/models/x", check=False)
    assert "No such file" in kube.exec(name_of(pod), "ls", "/var/run/secrets/kubernetes.io", check=False)

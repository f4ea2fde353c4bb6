"""The chart on a cluster: install, ask, upgrade, roll back, uninstall, and nothing is left of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.e2e.conftest import IMAGE
from tests.cluster.e2e.kube import Kube, is_ready, until
from tests.cluster.e2e.test_smoke import all_protocols_answer
from tests.helm.chart_tools import CHART, Doc, merged, pod_templates, render, run_helm
from tests.helm.matrix import MATRIX

pytestmark = pytest.mark.timeout(600)

#: The demo image, small, and quick to leave.
SMALL: Doc = {
    "image": {"repository": IMAGE.rpartition(":")[0], "tag": IMAGE.rpartition(":")[2]},
    "cache": {"kind": "none"},
    "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
    "settings": {"drain_seconds": 5, "shutdown_delay_seconds": 1},
    "fullnameOverride": "chat",
    "test": {"timeoutSeconds": 240},
}
PODS = "app.kubernetes.io/component=predictor"
SCALERS = "app.kubernetes.io/component=scaler"
PEM = {"tls.crt": "tls.crt", "tls.key": "tls.key", "ca.crt": "tls.crt"}
KEY = "0123456789abcdef"


def helm(kube: Kube, *words: str, values: Doc | None = None) -> str:
    """What helm says. Fails the test with its error, and with the state of the namespace."""
    given = ("--values", "-") if values is not None else ()
    done = run_helm("--namespace", kube.namespace, *words, *given, values=json.dumps(values), seconds=400)
    assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}\n{story(kube)}"
    return done.stdout


def story(kube: Kube) -> str:
    """What one wants to see when something did not come about."""
    parts = [kube.run("get", "all", "-o", "wide", check=False), kube.run("logs", "-l", PODS, "--tail=15", check=False)]
    parts += [kube.run("logs", "-l", SCALERS, "--tail=30", "--prefix", check=False)]
    parts += [kube.run("describe", "scaledobject,hpa", check=False)]
    return "\n".join([*parts, kube.run("get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:]])


def everything(kube: Kube) -> set[str]:
    """Every object of the namespace, of whatever kind, but for the record of what happened."""
    listed = subprocess.run(
        ["kubectl", "api-resources", "--verbs=list", "--namespaced", "-o", "name"],
        capture_output=True,
        text=True,
        check=True,
    )
    kinds = [kind for kind in listed.stdout.split() if not kind.startswith("events") and "metrics.k8s.io" not in kind]
    return set(kube.run("get", ",".join(kinds), "-o", "name", "--ignore-not-found").split())


def wait_pods(kube: Kube, count: int) -> list[Doc]:
    """Until exactly so many pods of the server exist, and all are ready."""

    def settled() -> list[Doc] | None:
        found = kube.items("pods", PODS)
        return found if len(found) == count and all(is_ready(pod) for pod in found) else None

    try:
        return until(settled, 240, f"{count} ready pods", period=0.5)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story(kube)}") from None


def answer(port: int, key: str = "") -> httpx.Response:
    body = {"text_input": "The capital of France is", "parameters": {"max_tokens": 4, "temperature": 0}}
    headers = {"x-api-key": key} if key else {}
    return httpx.post(f"http://127.0.0.1:{port}/v2/models/smollm2/generate", json=body, headers=headers, timeout=60)


def environment(pod: Doc) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}


def test_install_upgrade_rollback_uninstall_leave_nothing(kube: Kube, report: Callable[..., None]) -> None:
    before = everything(kube)
    # With all that has objects of its own and needs no further controller.
    first = merged(
        SMALL,
        {
            "apiKeys": {"keys": [f"{KEY}=gold"]},
            "settings": {"pod_deletion_cost": True},
            "networkPolicy": {"enabled": True},
            "dashboard": {"enabled": True},
        },
    )
    said = helm(kube, "install", "chat", str(CHART), "--wait", "--timeout=300s", values=first)
    assert "curl -s http://127.0.0.1:8080/v2/models/smollm2/generate" in said
    assert {name.partition("/")[0] for name in everything(kube) - before} >= {
        "deployment.apps", "service", "secret", "role.rbac.authorization.k8s.io", "poddisruptionbudget.policy",
        "networkpolicy.networking.k8s.io", "configmap", "serviceaccount",
    }  # fmt: skip
    (pod,) = wait_pods(kube, 1)
    assert pod["spec"]["terminationGracePeriodSeconds"] == 21
    with kube.forward("service/chat", 80) as port:
        assert answer(port).status_code == 401
        assert "Paris" in answer(port, KEY).json()["text_output"]

    tested = helm(kube, "test", "chat", "--timeout=300s")
    assert "Phase:          Succeeded" in tested
    assert "pod/chat-test" not in everything(kube)

    helm(
        kube, "upgrade", "chat", str(CHART), "--wait", "--timeout=300s",
        values=merged(SMALL, {"replicas": 2, "settings": {"max_batch_sequences": 7}}),
    )  # fmt: skip
    pods = wait_pods(kube, 2)
    assert {environment(pod)["CAROUSEL_MAX_BATCH_SEQUENCES"] for pod in pods} == {"7"}
    gone = {"secret/chat-api-keys", "networkpolicy.networking.k8s.io/chat", "configmap/chat-dashboard"}
    assert not gone & everything(kube)
    assert {pod["spec"]["automountServiceAccountToken"] for pod in pods} == {False}
    all_protocols_answer(kube, "service/chat")

    helm(kube, "rollback", "chat", "1", "--wait", "--timeout=300s")
    (pod,) = wait_pods(kube, 1)
    assert "CAROUSEL_MAX_BATCH_SEQUENCES" not in environment(pod)
    with kube.forward("service/chat", 80) as port:
        assert (answer(port).status_code, answer(port, KEY).status_code) == (401, 200)

    helm(kube, "uninstall", "chat", "--wait", "--timeout=120s")
    until(lambda: everything(kube) == before, 90, f"nothing left but {everything(kube) - before}", period=1)
    report(objects_of_the_release=len(render(first)))


def test_as_inferenceservice(kube: Kube) -> None:
    before = everything(kube)
    values = merged(SMALL, {"mode": "inferenceservice"})
    said = helm(kube, "install", "chat", str(CHART), "--wait", values=values)
    assert "service/chat-predictor 8080:80" in said
    kube.wait_ready("chat", 300)
    (pod,) = wait_pods(kube, 1)
    assert pod["metadata"]["labels"]["serving.kserve.io/inferenceservice"] == "chat"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 21
    all_protocols_answer(kube, "service/chat-predictor")
    assert "Phase:          Succeeded" in helm(kube, "test", "chat", "--timeout=300s")
    # The budget and alerts select KServe's pods by the chart's labels.
    budget = until(
        lambda: kube.get("poddisruptionbudget", "chat")["status"].get("expectedPods"), 30, "the budget's pods"
    )
    assert budget == 1

    helm(kube, "upgrade", "chat", str(CHART), values=merged(values, {"settings": {"max_batch_sequences": 9}}))
    until(
        lambda: [environment(pod).get("CAROUSEL_MAX_BATCH_SEQUENCES") for pod in kube.items("pods", PODS)] == ["9"],
        240, "the new pod alone", period=1,
    )  # fmt: skip
    wait_pods(kube, 1)
    helm(kube, "uninstall", "chat", "--wait", "--timeout=120s")
    until(lambda: everything(kube) == before, 120, f"nothing left but {everything(kube) - before}", period=1)


@pytest.fixture
def keda(kube: Kube) -> None:
    """Skips where there is no KEDA."""
    if "scaledobjects" not in kube.run("api-resources", "--api-group=keda.sh", "-o", "name", check=False):
        pytest.skip("this cluster has no KEDA: cluster/addons/keda-up starts the kit's")


@pytest.mark.parametrize("discovery", ["api", "dns"])
def test_from_zero_by_the_scaler_of_the_chart(
    kube: Kube, keda: None, discovery: str, report: Callable[..., None]
) -> None:
    before = everything(kube)
    values = merged(
        SMALL,
        {
            "autoscaling": {"type": "keda", "minReplicas": 0, "maxReplicas": 2, "keda": {"cooldownPeriod": 10}},
            "scaler": {
                "discovery": discovery,
                "activator": {"enabled": True},
                "settings": {"shutdown_delay_seconds": 1, "scale_in_seconds": 5, "idle_seconds": 2},
            },
        },
    )
    helm(kube, "install", "chat", str(CHART), "--wait", "--timeout=300s", values=values)

    def pods() -> int:
        return len(kube.items("pods", PODS))

    kube.wait_scaled("chat")
    until(lambda: pods() == 0, 180, lambda: f"no pod without work\n{story(kube)}", period=1)
    assert {pod["spec"]["automountServiceAccountToken"] for pod in kube.items("pods", SCALERS)} == {discovery == "api"}
    with kube.forward("service/chat-activator", 80) as port:
        began = time.monotonic()
        body = {"text_input": "The capital of France is", "parameters": {"max_tokens": 4, "temperature": 0}}
        held = httpx.post(f"http://127.0.0.1:{port}/v2/models/smollm2/generate", json=body, timeout=240)
        assert "Paris" in held.json()["text_output"], held.text
        report(discovery=discovery, first_answer_from_zero_s=round(time.monotonic() - began, 1))
    assert pods() >= 1
    until(lambda: pods() == 0, 180, lambda: f"back to no pod\n{story(kube)}", period=1)
    helm(kube, "uninstall", "chat", "--wait", "--timeout=120s")
    until(lambda: everything(kube) == before, 120, f"nothing left but {everything(kube) - before}", period=1)


def test_with_client_certificates(kube: Kube, tmp_path: Path) -> None:
    """Probes, which kubelet could not make, and `helm test` show a certificate; who has none is turned away."""
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", "tls.key", "-subj", "/CN=chat"]
    words = ["openssl", "req", "-x509", *key, "-out", "tls.crt", "-days", "1", "-addext", "subjectAltName=DNS:chat"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    files = [f"--from-file={name}={tmp_path / file}" for name, file in PEM.items()]
    kube.run("create", "secret", "generic", "cert", *files)
    tls = {"secretName": "cert", "clientCertificates": True, "clientSecretName": "cert"}
    helm(kube, "install", "chat", str(CHART), "--wait", "--timeout=300s", values=merged(SMALL, {"tls": tls}))
    wait_pods(kube, 1)
    with kube.forward("service/chat", 80) as port, pytest.raises(httpx.TransportError):
        httpx.get(f"https://127.0.0.1:{port}/readyz", verify=False)
    assert "Phase:          Succeeded" in helm(kube, "test", "chat", "--timeout=300s")
    helm(kube, "uninstall", "chat", "--wait")


def test_what_the_schema_cannot_know_the_pod_says_first(kube: Kube) -> None:
    values = merged(SMALL, {"settings": {"max_batch_sequences": 64, "max_batch_tokens": 8}})
    helm(kube, "install", "chat", str(CHART), values=values)

    def last_words() -> str | None:
        for pod in kube.items("pods", PODS):
            for status in pod["status"].get("containerStatuses", []):
                ended = status["lastState"].get("terminated") or status["state"].get("terminated") or {}
                if ended.get("message"):
                    return str(ended["message"])
        return None

    said = until(last_words, 120, lambda: f"a termination message\n{story(kube)}", period=0.5)
    assert "--max-batch-sequences (64) must not exceed --max-batch-tokens (8)" in said
    helm(kube, "uninstall", "chat", "--wait")


def test_wrong_values_install_nothing(kube: Kube) -> None:
    before = everything(kube)
    for wrong, named in (
        ({"settings": {"max_batch_tokens": 0}}, "/settings/max_batch_tokens"),
        ({"replcas": 2}, "replcas"),
        ({"tls": {"clientCertificates": True}}, "tls.clientCertificates"),
    ):
        done = run_helm("-n", kube.namespace, "install", "chat", str(CHART), "-f", "-", values=json.dumps(wrong))
        assert done.returncode != 0
        assert named in done.stderr
    assert everything(kube) == before


def test_the_api_server_takes_every_set_of_values(kube: Kube) -> None:
    """Against the real schemas and the restricted standard, of those kinds that the cluster has."""
    listed = subprocess.run(["kubectl", "api-resources", "--no-headers"], capture_output=True, text=True, check=True)
    known = {line.split()[-1] for line in listed.stdout.splitlines()}
    for name, values in MATRIX.items():
        documents = [one for one in render(values) if one["kind"] in known]
        assert any(True for _ in pod_templates(documents)), name
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
        said = kube.run("apply", "--dry-run=server", "--validate=strict", "-f", "-", given=given)
        assert said.count("server dry run") == len(documents), (name, said)
        assert "violate" not in said, (name, said)

"""What users of KServe reported of its manifests and controller, held against ours; the index is tests/REPORTS.md."""

from __future__ import annotations

from typing import Any

import pytest
from tests.manifests.kustomized import Object, containers
from tests.manifests.test_manifests import BUILT, SERVERS, WORKLOADS, is_knative, variables

from carousel.config import load_settings

CLASS = "serving.kserve.io/autoscalerClass"
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")


def scalers(items: list[Object]) -> list[Object]:
    return [item for item in items if item["kind"] in SCALERS]


SCALED = [name for name, items in BUILT.items() if scalers(items)]


def scraped(item: Object) -> dict[str, str]:
    """The Prometheus annotations that the workload's pods get."""
    template: dict[str, Any] = item["spec"].get("template", item)
    annotations = {**item["metadata"].get("annotations", {}), **template["metadata"].get("annotations", {})}
    return {key: value for key, value in annotations.items() if key.startswith("prometheus.io/")}


SCRAPED = [param for param in WORKLOADS if scraped(param.values[1])]
ROLLED = [
    param for param in SERVERS if param.values[1]["kind"] != "ClusterServingRuntime" and not is_knative(param.values[1])
]


@pytest.mark.parametrize(("name", "item"), SCRAPED)
def test_kserve_4168_the_metrics_port_is_the_one_that_serves(name: str, item: Object) -> None:
    annotations = scraped(item)
    ports = [port["containerPort"] for container in containers(item) for port in container.get("ports", [])]
    assert int(annotations["prometheus.io/port"]) in ports
    assert annotations["prometheus.io/path"] == "/metrics"


@pytest.mark.parametrize(("name", "item"), [param for param in SCRAPED if param in SERVERS])
def test_kserve_6227_the_scraped_port_is_the_settings_http_port(name: str, item: Object) -> None:
    settings = load_settings([], {key: value for key, value in variables(item).items() if key.startswith("CAROUSEL_")})
    assert int(scraped(item)["prometheus.io/port"]) == settings.http_port


@pytest.mark.parametrize("name", BUILT)
def test_kserve_2521_replicas_have_one_owner(name: str) -> None:
    """KServe's reconciler resets what it thinks is its own: class none if nobody scales, external if somebody does."""
    services = [item for item in BUILT[name] if item["kind"] == "InferenceService" and not is_knative(item)]
    wanted = "external" if scalers(BUILT[name]) else "none"
    for service in services:
        assert service["metadata"]["annotations"][CLASS] == wanted
        # Class none holds the replicas at minReplicas; class external must not have any.
        assert ("minReplicas" in service["spec"]["predictor"]) == (wanted == "none")
    assert services or not any(item["kind"] == "InferenceService" for item in BUILT[name]) or "knative" in name


@pytest.mark.parametrize("name", SCALED)
def test_kserve_5527_our_scaler_aims_at_the_deployment_that_kserve_makes(name: str) -> None:
    (service,) = [item for item in BUILT[name] if item["kind"] == "InferenceService"]
    for scaler in scalers(BUILT[name]):
        target = scaler["spec"]["scaleTargetRef"]
        assert target["kind"] == "Deployment"
        assert target["name"] == f"{service['metadata']['name']}-predictor"


def test_kserve_5646_keda_needs_nothing_beside_keda() -> None:
    """Two of the three ways ask neither Prometheus nor an add-on of KEDA's: the pods, or our own scaler."""
    ways = {
        trigger["type"]: trigger["metadata"]
        for name in SCALED
        for scaler in scalers(BUILT[name])
        for trigger in scaler["spec"].get("triggers", [])
    }
    assert set(ways) == {"prometheus", "metrics-api", "external-push"}
    assert ways["metrics-api"]["url"].endswith(":8080/metrics")
    (built,) = [items for name, items in BUILT.items() if name.endswith("overlays/keda-external")]
    services = {item["metadata"]["name"] for item in built if item["kind"] == "Service"}
    assert ways["external-push"]["scalerAddress"].partition(".")[0] in services


@pytest.mark.parametrize(("name", "item"), ROLLED)
def test_kserve_3768_a_rollout_takes_no_pod_away_before_its_successor_is_ready(name: str, item: Object) -> None:
    spec = item["spec"].get("predictor", item["spec"])
    replicas = spec.get("minReplicas", spec.get("replicas", 1))
    strategy = spec.get("deploymentStrategy", spec.get("strategy", {}))
    gone = strategy.get("rollingUpdate", {}).get("maxUnavailable", replicas // 4)  # Kubernetes' own is a quarter
    if any("gpu" in resource or "mig" in resource for c in containers(item) for resource in limits(c)):
        assert gone == 1  # a successor would wait for the device that the old pod holds
    else:
        assert gone == 0


def limits(container: Object) -> dict[str, str]:
    found: dict[str, str] = container.get("resources", {}).get("limits", {})
    return found

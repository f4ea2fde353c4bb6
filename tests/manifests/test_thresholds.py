"""The scalers of manifests/ scale at the chart's thresholds, and those are the simulator's.

The chart's own are compared with the simulator here, and the scaler's flags in tests/cluster/test_autoscaling_docs.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from tests.helm.chart_tools import CHART, NAMESPACE, merged, render, the
from tests.manifests.kustomized import MANIFESTS, ROOT, Object, build

from carousel.cluster.scaler_grpc import read_metadata
from carousel.cluster.scaler_options import ScalerOptions
from carousel.cluster.simulate_command import SimulateOptions

PROMETHEUS = "http://prometheus.monitoring.svc:9090"
AS_IN_MANIFESTS = {"mode": "inferenceservice", "fullnameOverride": "carousel"}
TRIGGERS = {"keda-prometheus": "prometheus", "keda-metrics-api": "metrics-api", "keda-external": "external-push"}


def manifest(way: str, kind: str) -> Object:
    return the(build(MANIFESTS / "overlays" / way), kind)


def chart(**autoscaling: Any) -> list[Object]:
    return render(merged(AS_IN_MANIFESTS, {"autoscaling": autoscaling}))


def behavior(scaled: Object) -> Any:
    return scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


def same_text(value: Any) -> Any:
    """Without what differs on purpose: the namespace, and where a query breaks its lines."""
    if isinstance(value, str):
        text = re.sub(rf"\b{NAMESPACE}\b", "default", value)
        return re.sub(r"\s*([()+*/>{},=~]|\bor\b)\s*", r"\1", text)
    return value


@pytest.mark.parametrize("way", TRIGGERS)
def test_keda_s_triggers_and_pace_are_the_chart_s(way: str) -> None:
    ours = manifest(way, "ScaledObject")
    theirs = the(
        chart(type="keda", keda={"trigger": TRIGGERS[way], "prometheus": {"serverAddress": PROMETHEUS}}), "ScaledObject"
    )
    assert behavior(ours) == behavior(theirs)
    found, wanted = ours["spec"]["triggers"], theirs["spec"]["triggers"]
    assert [trigger["type"] for trigger in found] == [trigger["type"] for trigger in wanted]
    if way == "keda-external":
        # The chart says it in the scaler's flags, which test_autoscaling_docs compares; here nothing is added to them.
        targets = ScalerOptions().targets
        assert read_metadata(found[0]["metadata"], targets) == targets
        return
    for one, other in zip(found, wanted, strict=True):
        assert {key: same_text(value) for key, value in one["metadata"].items()} == {
            key: same_text(value) for key, value in other["metadata"].items()
        }


def test_the_hpa_compares_the_query_of_prometheus_with_the_same_target() -> None:
    ours = manifest("hpa", "HorizontalPodAutoscaler")["spec"]
    theirs = the(chart(type="hpa"), "HorizontalPodAutoscaler")["spec"]
    assert ours["behavior"] == theirs["behavior"]
    (metric,) = ours["metrics"]
    assert metric["type"] == "External"
    target = metric["external"]["target"]
    (trigger,) = manifest("keda-prometheus", "ScaledObject")["spec"]["triggers"]
    assert target == {"type": "AverageValue", "averageValue": trigger["metadata"]["threshold"]}
    # The rule for the adapter asks for what KEDA asks for.
    text = (ROOT / "docs/autoscaling.md").read_text("utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (rule,) = (yaml.safe_load(block) for block in blocks if "externalRules" in block)
    (external,) = rule["externalRules"]
    assert external["name"]["as"] == metric["external"]["metric"]["name"]
    query = re.sub(r"\{namespace=.*?\}\"\}", "{<<.LabelMatchers>>}", trigger["metadata"]["query"])
    assert same_text(external["metricsQuery"]) == same_text(query)


def test_the_chart_s_defaults_are_what_was_simulated() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))["autoscaling"]
    simulated = SimulateOptions()
    target = values["target"]
    assert target["scaleOn"] == "queue-seconds"
    assert (target["waitSeconds"], target["occupancy"]) == (simulated.target_wait_seconds, simulated.target_occupancy)
    assert (target["requests"], target["tokens"]) == (simulated.target_requests, simulated.target_tokens)
    assert values["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == simulated.hpa_window_seconds
    # As carousel.cluster.simulate has it: at most the larger of 4 pods and 100 % per 15 s.
    policies = {(one["type"], one["value"], one["periodSeconds"]) for one in values["behavior"]["scaleUp"]["policies"]}
    assert policies == {("Percent", 100, 15), ("Pods", 4, 15)}
    assert values["behavior"]["scaleUp"]["selectPolicy"] == "Max"

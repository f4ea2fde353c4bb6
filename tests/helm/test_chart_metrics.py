"""Alerts, dashboard and scaling ask for series that the server really has; promtool plays the alerts."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scripts import helm_dashboard
from tests.helm.chart_tools import CHART, NAMESPACE, RELEASE, Doc, merged, nested, promtool, render, the

from carousel.engine.meter import Amounts, RequestUsage
from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats
from carousel.telemetry.metrics import TTFT_BUCKETS, EngineMetrics
from carousel.telemetry.tenant_metrics import TenantMetrics
from carousel.telemetry.usage import Price
from carousel.tenancy.policy import PolicyFile

ALERTS: Doc = {"alerts": {"enabled": True}}
POD = "chat-carousel-7d9f8c6b5d-x2x4z"
#: Labels that scraping adds.
TARGET_LABELS = {"namespace", "pod"}
_MATCHERS = re.compile(r"([A-Za-z_:][\w:]*)\s*\{([^}]*)\}")
_GROUPS = re.compile(r"\bby \(([^)]*)\)")


@functools.cache
def exposed() -> dict[str, set[str]]:
    """Series -> label names, as `/metrics` of a server shows them."""
    registry = CollectorRegistry()
    EngineMetrics("m", EngineStats).register(registry)
    tenants = TenantMetrics("m", Price(), 3, PolicyFile(None))
    tenants(RequestUsage("r", "a", FinishReason.EOS, 1, 0, 0.0, 0.0, 0.0, Amounts()))
    tenants.refused("a", "requests")
    tenants.register(registry)
    ProcessCollector(registry=registry)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def problems(expression: str) -> list[str]:
    """What an expression asks for that no server shows."""
    asked = _MATCHERS.findall(expression)
    known = exposed()
    bad = [f"{name}: no such series" for name, _ in asked if name not in known]
    words = set(re.findall(r"\b(?:carousel|process)_\w+", expression)) - {name for name, _ in asked}
    bad += [f"{name}: asked for without the release's matchers" for name in words]
    labels = {label for name, _ in asked for label in known.get(name, ())} | TARGET_LABELS
    for name, matchers in asked:
        used = set(re.findall(r"(\w+)\s*=", matchers))
        bad += [f"{name}: no label {label}" for label in used - known.get(name, set()) - TARGET_LABELS]
    for group in _GROUPS.findall(expression):
        bad += [f"by ({label}): no such label" for label in re.split(r",\s*", group) if label not in labels]
    return bad if asked else ["no series at all"]


def rules(values: Doc | None = None) -> list[Doc]:
    found: list[Doc] = the(render(merged(ALERTS, values or {})), "PrometheusRule")["spec"]["groups"][0]["rules"]
    return found


def test_the_check_of_expressions_finds_wrong_ones() -> None:
    assert problems('sum by (pod) (carousel_ready{namespace="a"})') == []
    assert problems("carousel_no_such{a=b}") == ["carousel_no_such: no such series", "carousel_no_such: no label a"]
    assert problems('sum by (nobody) (carousel_ready{reason="x"})') == [
        "carousel_ready: no label reason",
        "by (nobody): no such label",
    ]
    assert "without the release's matchers" in problems("carousel_ready + carousel_draining{}")[0]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    text = the(render({"dashboard": {"enabled": True}}), "ConfigMap")["data"]["carousel.json"]
    for panel in json.loads(text)["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_every_query_of_the_dashboard_has_series() -> None:
    found = dict.fromkeys(title for title, _ in dashboard_queries())
    assert len(found) > 30
    assert {title: bad for title, query in dashboard_queries() if (bad := problems(query))} == {}


def test_every_series_of_the_engine_is_on_the_dashboard() -> None:
    text = " ".join(query for _, query in dashboard_queries())
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed() if name.startswith("carousel_")}
    # What others show: slots are running plus free ones, each count below is part of the ends or refusals, and the
    # blocks of the cache have series of their own.
    elsewhere = {"carousel_batch_slots", "carousel_requests_finished_total", "carousel_cache_config_info"}
    assert {name for name in families - elsewhere if name not in text} == set()


def test_the_dashboard_is_drawn_without_overlaps() -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in helm_dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, (panel["title"], cells[x, y])
                cells[x, y] = panel["title"]
    numbers = [panel["id"] for panel in helm_dashboard.dashboard()["panels"]]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("mode", ["deployment", "inferenceservice"])
def test_every_alert_has_series(mode: str) -> None:
    assert {rule["alert"]: bad for rule in rules({"mode": mode}) if (bad := problems(rule["expr"]))} == {}


@pytest.mark.parametrize("scale_on", ["queue-seconds", "requests", "tokens"])
def test_every_scaling_metric_exists(scale_on: str) -> None:
    target = nested("autoscaling.target.scaleOn", scale_on)
    keda = {"type": "keda", "keda": {"trigger": "prometheus", "prometheus": {"serverAddress": "http://p"}}}
    [trigger] = the(render(merged(target, {"autoscaling": keda})), "ScaledObject")["spec"]["triggers"]
    assert problems(trigger["metadata"]["query"]) == []
    pods = the(render(merged(target, {"autoscaling": {"type": "hpa"}})), "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert {one["pods"]["metric"]["name"] for one in pods} <= set(exposed())


def test_every_series_named_in_words_exists() -> None:
    names = set(exposed()) | {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed()}
    texts = [json.dumps([rule["annotations"] for rule in rules()])]
    texts += [path.read_text("utf-8") for path in (CHART / "README.md", CHART / "templates" / "NOTES.txt")]
    for name in re.findall(r"\bcarousel_[a-z0-9_]+", " ".join(texts)):
        assert name in names, name


def test_the_slo_s_bounds_are_bounds_of_the_histogram() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    offered = schema["properties"]["alerts"]["properties"]["slo"]["properties"]["ttftSeconds"]["enum"]
    assert set(map(float, offered)) <= set(TTFT_BUCKETS)
    registry = CollectorRegistry()
    EngineMetrics("m", EngineStats).register(registry)
    text = generate_latest(registry).decode()
    for bound in offered:
        expressions = " ".join(rule["expr"] for rule in rules(nested("alerts.slo.ttftSeconds", bound)))
        [le] = set(re.findall(r'le="([^"]+)"', expressions))
        assert re.search(rf'time_to_first_token_seconds_bucket\{{[^}}]*le="{re.escape(le)}"', text), bound


def test_alerts_select_the_pods_of_the_release_alone() -> None:
    def pattern(mode: str) -> str:
        return re.findall(r'pod=~"([^"]+)"', rules({"mode": mode})[0]["expr"])[0]

    assert re.fullmatch(pattern("deployment"), POD)
    assert not re.fullmatch(pattern("deployment"), "chat-carousel-scaler-7d9f8c6b5d-x2x4z")
    assert not re.fullmatch(pattern("deployment"), "chat-carousel-test")
    assert re.fullmatch(pattern("inferenceservice"), "chat-carousel-predictor-7d9f8c6b5d-x2x4z")


def test_no_alert_about_no_pods_where_none_are_wanted() -> None:
    assert "CarouselNotReady" in {rule["alert"] for rule in rules()}
    zero = {"autoscaling": {"type": "keda", "minReplicas": 0}}
    assert "CarouselNotReady" not in {rule["alert"] for rule in rules(zero)}
    assert "CarouselNotReady" not in {rule["alert"] for rule in rules({"replicas": 0})}


def test_alerts_carry_labels_and_runbooks() -> None:
    for rule in rules({"alerts": {"labels": {"team": "a"}, "runbookURL": "https://example.com/r"}}):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["labels"]["team"] == "a"
        assert rule["annotations"]["runbook_url"] == f"https://example.com/r#{rule['alert'].lower()}"


# --- promtool


def series(name: str, values: str, pod: str = POD, **labels: str) -> Doc:
    shown = {"namespace": NAMESPACE, "pod": pod, "model_name": "m", **labels}
    return {"series": name + "{" + ",".join(f'{key}="{one}"' for key, one in shown.items()) + "}", "values": values}


def alerts_at(eval_time: str, name: str, *severities: str, pod: bool = True) -> Doc:
    """That these alerts, and no others of the name, fire then."""
    own = {"release": RELEASE, "namespace": NAMESPACE, **({"pod": POD} if pod else {})}
    return {
        "eval_time": eval_time,
        "alertname": name,
        "exp_alerts": [{"exp_labels": {**own, "severity": severity}} for severity in severities],
    }


READY = series("carousel_ready", "1x9999")
SECONDLY = "0+60x120"  # a counter that grows by one a second

#: What happens, minute by minute, and what then fires.
SCENES: dict[str, tuple[list[Doc], list[Doc]]] = {
    "old queue": (
        [series("carousel_oldest_wait_seconds", "0x5 31x10 0x10")],
        [
            alerts_at("5m", "CarouselQueueOld"),
            alerts_at("10m", "CarouselQueueOld", "warning"),
            alerts_at("20m", "CarouselQueueOld"),
        ],
    ),
    "another release's queue": (
        [series("carousel_oldest_wait_seconds", "99x30", pod="other-carousel-7d9f8c6b5d-x2x4z")],
        [alerts_at("10m", "CarouselQueueOld")],
    ),
    "no progress": (
        [series("carousel_requests_live", "3x30"), series("carousel_steps_total", "0+10x5 50x20 60+10x10"),
         series("carousel_engine_alive", "1x40")],
        [
            alerts_at("5m", "CarouselNoProgress"),
            alerts_at("12m", "CarouselNoProgress", "critical"),
            alerts_at("30m", "CarouselNoProgress"),
        ],
    ),
    "idle is no lack of progress": (
        [series("carousel_requests_live", "0x30"), series("carousel_steps_total", "50x30"),
         series("carousel_engine_alive", "1x30")],
        [alerts_at("20m", "CarouselNoProgress")],
    ),
    "dead engine": (
        [series("carousel_engine_alive", "1x5 0x20")],
        [alerts_at("5m", "CarouselNoProgress"), alerts_at("8m", "CarouselNoProgress", "critical")],
    ),
    "restarts": (
        [series("process_start_time_seconds", "100x5 400x5 700x60")],
        [
            alerts_at("8m", "CarouselRestarts"),
            alerts_at("15m", "CarouselRestarts", "warning"),
            alerts_at("60m", "CarouselRestarts"),
        ],
    ),
    "KV pressure": (
        [series("carousel_kv_cache_usage_perc", "0.99x60"), series("carousel_num_preemptions_total", "0x20 0+1x40")],
        [alerts_at("20m", "CarouselKVPressure"), alerts_at("40m", "CarouselKVPressure", "warning")],
    ),
    "no pod": (
        [series("carousel_ready", "1x5 0x5 _x20")],
        [alerts_at("8m", "CarouselNotReady"), alerts_at("14m", "CarouselNotReady", "critical", pod=False)],
    ),
    "a tenant that asks for too much": (
        [series("carousel_tenant_refusals_total", "0+60x40 2400x40", tenant="a", quota="requests"),
         series("carousel_tenant_requests_total", "0+30x80", tenant="a"),
         series("carousel_tenant_refusals_total", "0+3x80", tenant="b", quota="tokens"),
         series("carousel_tenant_requests_total", "0+30x80", tenant="b")],
        [
            alerts_at("10m", "CarouselQuotaRefusals"),
            {**alerts_at("30m", "CarouselQuotaRefusals"), "exp_alerts": [{"exp_labels": {
                "release": RELEASE, "namespace": NAMESPACE, "tenant": "a", "severity": "warning"}}]},
            alerts_at("70m", "CarouselQuotaRefusals"),
        ],
    ),
    "a policy that cannot be taken": (
        [series("carousel_tenant_policy_valid", "1x5 0x10 1x10")],
        [
            alerts_at("8m", "CarouselTenantPolicyInvalid"),
            alerts_at("12m", "CarouselTenantPolicyInvalid", "warning"),
            alerts_at("20m", "CarouselTenantPolicyInvalid"),
        ],
    ),
    "a usage log without a disk": (
        [series("carousel_usage_log_failures_total", "0x5 0+60x15 900x30"),
         series("carousel_usage_log_lost_total", "0x50")],
        [
            alerts_at("5m", "CarouselUsageLogFails"),
            alerts_at("15m", "CarouselUsageLogFails", "critical"),
            alerts_at("40m", "CarouselUsageLogFails"),
        ],
    ),
    "all is well": (
        [READY, series("carousel_requests_admitted_total", SECONDLY),
         series("carousel_requests_failed_total", "0x120"),
         series("carousel_request_refusals_total", "0x120", reason="queue_full"),
         series("carousel_time_to_first_token_seconds_count", SECONDLY),
         series("carousel_time_to_first_token_seconds_bucket", SECONDLY, le="2.5")],
        [alerts_at("100m", "CarouselErrorBudgetBurn"), alerts_at("100m", "CarouselFirstTokenBudgetBurn"),
         alerts_at("100m", "CarouselNotReady")],
    ),
    "2 % refused for overload": (
        [READY, series("carousel_requests_admitted_total", SECONDLY),
         series("carousel_requests_failed_total", "0x120"),
         series("carousel_request_refusals_total", "0+1.2x120", reason="queue_full")],
        [alerts_at("100m", "CarouselErrorBudgetBurn", "critical", "warning", pod=False)],
    ),
    "1 % failed": (
        [READY, series("carousel_requests_admitted_total", SECONDLY),
         series("carousel_requests_failed_total", "0+0.6x120"),
         series("carousel_request_refusals_total", "0x120", reason="queue_full")],
        [alerts_at("100m", "CarouselErrorBudgetBurn", "warning", pod=False)],
    ),
    "wrong requests are no burn": (
        [READY, series("carousel_requests_admitted_total", SECONDLY),
         series("carousel_requests_failed_total", "0x120"),
         series("carousel_request_refusals_total", "0+60x120", reason="invalid"),
         series("carousel_request_refusals_total", "0x120", reason="queue_full")],
        [alerts_at("100m", "CarouselErrorBudgetBurn")],
    ),
    "a fifth too slow": (
        [READY, series("carousel_time_to_first_token_seconds_count", SECONDLY),
         series("carousel_time_to_first_token_seconds_bucket", "0+48x120", le="2.5")],
        [alerts_at("100m", "CarouselFirstTokenBudgetBurn", "critical", "warning", pod=False)],
    ),
    "a burn that has ended": (
        [READY, series("carousel_time_to_first_token_seconds_count", SECONDLY),
         series("carousel_time_to_first_token_seconds_bucket", "0+48x60 2880+60x60", le="2.5")],
        [alerts_at("60m", "CarouselFirstTokenBudgetBurn", "critical", "warning", pod=False),
         alerts_at("100m", "CarouselFirstTokenBudgetBurn")],
    ),
}  # fmt: skip


def without_words(rule: Doc) -> Doc:
    """promtool compares annotations too; what they say is not what is tested here."""
    return {key: value for key, value in rule.items() if key != "annotations"}


def run_promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [promtool(), *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def write(path: Path, content: Any) -> None:
    path.write_text(yaml.safe_dump(content), "utf-8")


def test_rules_are_rules_to_prometheus(tmp_path: Path) -> None:
    for number, values in enumerate(({}, {"mode": "inferenceservice"}, {"alerts": {"runbookURL": "http://r"}})):
        write(tmp_path / f"{number}.yml", {"groups": [{"name": "g", "rules": rules(values)}]})
        done = run_promtool(tmp_path, "check", "rules", f"{number}.yml")
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_recorded_is_the_sum_over_the_pods_of_the_release(tmp_path: Path) -> None:
    groups = the(render(ALERTS), "PrometheusRule")["spec"]["groups"]
    write(tmp_path / "rules.yml", {"groups": groups[1:]})
    labels = {"tenant": "a"}
    pods = [POD, POD.replace("x2x4z", "abcde")]
    told = [series("carousel_tenant_cost_total", "0+60x30", pod, **labels) for pod in pods]
    told += [series("carousel_tenant_tokens_total", "0+120x30", POD, kind="prompt", **labels)]
    told += [series("carousel_tenant_cost_total", "0+600x30", "other-carousel-7d9f8c6b5d-x2x4z", **labels)]
    shown = f'model_name="m", namespace="{NAMESPACE}", tenant="a"'
    queries = {
        "tenant:carousel_tenant_cost:rate5m": (f"{{{shown}}}", 2),
        "tenant_kind:carousel_tenant_tokens:rate5m": (f'{{kind="prompt", {shown}}}', 2),
    }
    tests = [
        {
            "expr": name, "eval_time": "20m",
            "exp_samples": [{"labels": name + of, "value": value}],
        }
        for name, (of, value) in queries.items()
    ]  # fmt: skip
    scene = {"interval": "1m", "input_series": told, "promql_expr_test": tests}
    write(tmp_path / "tests.yml", {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [scene]})
    done = run_promtool(tmp_path, "test", "rules", "tests.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_record_has_series() -> None:
    groups = the(render(ALERTS), "PrometheusRule")["spec"]["groups"]
    recorded = [rule for group in groups[1:] for rule in group["rules"]]
    assert len(recorded) == 7
    assert {rule["record"]: bad for rule in recorded if (bad := problems(rule["expr"]))} == {}


def test_queries_of_dashboard_and_scaler_are_promql(tmp_path: Path) -> None:
    queries = [query.replace("$__rate_interval", "1m") for _, query in dashboard_queries()]
    for scale_on in ("queue-seconds", "requests", "tokens"):
        keda = {"type": "keda", "keda": {"trigger": "prometheus", "prometheus": {"serverAddress": "http://p"}}}
        values = merged({"autoscaling": keda}, nested("autoscaling.target.scaleOn", scale_on))
        queries += [one["metadata"]["query"] for one in the(render(values), "ScaledObject")["spec"]["triggers"]]
    recorded = [{"record": f"a:{index}", "expr": query} for index, query in enumerate(queries)]
    write(tmp_path / "rules.yml", {"groups": [{"name": "g", "rules": recorded}]})
    done = run_promtool(tmp_path, "check", "rules", "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    write(tmp_path / "rules.yml", {"groups": [{"name": "g", "rules": [without_words(rule) for rule in rules()]}]})
    scenes = [
        {"interval": "1m", "name": name, "input_series": inputs, "alert_rule_test": expected}
        for name, (inputs, expected) in SCENES.items()
    ]
    write(tmp_path / "test.yml", {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": scenes})
    done = run_promtool(tmp_path, "test", "rules", "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_scene_in_which_it_fires() -> None:
    fires = {one["alertname"] for _, expected in SCENES.values() for one in expected if one["exp_alerts"]}
    assert fires == {rule["alert"] for rule in rules()}


def test_the_scaler_s_signal_in_promql(tmp_path: Path) -> None:
    """Two pods: one with 10 s of queue and a full batch, one idle but for half of its KV memory."""
    keda = {"type": "keda", "keda": {"trigger": "prometheus", "prometheus": {"serverAddress": "http://p"}}}
    [trigger] = the(render({"autoscaling": keda}), "ScaledObject")["spec"]["triggers"]
    from carousel.cluster.demand import PodLoad, Targets, demand, total

    loads = [PodLoad(queue_seconds=10, occupancy=1), PodLoad(queue_seconds=0, occupancy=0.5)]
    other = POD.replace("x2x4z", "y2y4z")
    inputs = [
        series("carousel_estimated_queue_seconds", "10x5"), series("carousel_estimated_queue_seconds", "0x5", other),
        series("carousel_batch_occupancy_ratio", "1x5"), series("carousel_batch_occupancy_ratio", "0.25x5", other),
        series("carousel_kv_cache_usage_perc", "0.75x5"), series("carousel_kv_cache_usage_perc", "0.5x5", other),
    ]  # fmt: skip
    asked = {
        "expr": trigger["metadata"]["query"],
        "eval_time": "3m",
        "exp_samples": [{"value": demand(Targets(), total(loads))}],
    }
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": [asked]}
    write(tmp_path / "test.yml", {"evaluation_interval": "1m", "tests": [test]})
    done = run_promtool(tmp_path, "test", "rules", "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr

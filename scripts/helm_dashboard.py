"""The chart's Grafana dashboard, from a list of panels: what is asked and how it is shown, nothing about pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Matchers of every query; the variables stand on top of the dashboard.
PODS = '{namespace=~"$namespace",model_name=~"$model",pod=~"$pod"}'
#: Of series that the client library makes, which have no model.
PROCESS = '{namespace=~"$namespace",pod=~"$pod"}'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """A chart, or with ``stat`` one number. ``queries``: PromQL -> legend."""

    title: str
    help: str
    unit: str
    queries: dict[str, str]
    width: int = 8
    stat: bool = False
    top: float | None = None
    stacked: bool = False


def _rate(counter: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate(carousel_{counter}{PODS}[$__rate_interval]))"


def _quantile(share: float, histogram: str) -> str:
    buckets = f"sum by (le) (rate(carousel_{histogram}_bucket{PODS}[$__rate_interval]))"
    return f"histogram_quantile({share}, {buckets})"


def _quantiles(histogram: str) -> dict[str, str]:
    return {_quantile(share, histogram): f"p{share * 100:g}" for share in (0.5, 0.9, 0.99)}


def _mean(histogram: str) -> str:
    return f"{_rate(f'{histogram}_sum')} / {_rate(f'{histogram}_count')}"


OVERVIEW = (
    Panel("Pods that take requests", "Ready pods.", "none", {f"sum(carousel_ready{PODS})": ""}, 4, stat=True),
    Panel("Running", "In the batches.", "none", {f"sum(carousel_num_requests_running{PODS})": ""}, 4, stat=True),
    Panel("Waiting", "In the queues.", "none", {f"sum(carousel_num_requests_waiting{PODS})": ""}, 4, stat=True),
    Panel(
        "Longest queue", "What a request that arrives now would wait, on the worst pod.", "s",
        {f"max(carousel_estimated_queue_seconds{PODS})": ""}, 4, stat=True,
    ),
    Panel("Output", "Tokens generated a second.", "none", {_rate("generation_tokens_total"): ""}, 4, stat=True),
    Panel(
        "Refused or failed", "Share of requests that the door or the engine turned away.", "percentunit",
        {
            f"({_rate('requests_rejected_total')} + {_rate('requests_failed_total')}) / "
            f"({_rate('requests_rejected_total')} + {_rate('requests_admitted_total')})": ""
        },
        4, stat=True,
    ),
    Panel(
        "Ends", "Requests that ended, by reason.", "reqps",
        {_rate("request_success_total", "finished_reason"): "{{finished_reason}}"}, stacked=True,
    ),
    Panel(
        "Refusals", "At the door. queue_full: add pods. unavailable: a pod was starting, draining or dead.",
        "reqps", {_rate("request_refusals_total", "reason"): "{{reason}}"}, stacked=True,
    ),
    Panel(
        "Tokens", "Tokens a second: read, written, and computed a second time after a preemption.", "none",
        {
            _rate("prompt_tokens_total"): "prompt",
            _rate("generation_tokens_total"): "generated",
            _rate("recomputed_tokens_total"): "computed again",
        },
    ),
    Panel(
        "State", "Pods that drain, and pods whose engine does not turn.", "none",
        {
            f"sum(carousel_draining{PODS})": "draining",
            f"count(carousel_engine_alive{PODS}) - sum(carousel_engine_alive{PODS})": "engine dead",
        },
    ),
    Panel(
        "Restarts", "Starts of the process in the last hour, beyond the first.", "none",
        {f"sum by (pod) (changes(process_start_time_seconds{PROCESS}[1h]))": "{{pod}}"},
    ),
    Panel(
        "Versions", "Pods by version; two at once during a roll.", "none",
        {f"count by (version, torch) (carousel_build_info{PODS})": "{{version}}, torch {{torch}}"}, stacked=True,
    ),
)  # fmt: skip

QUEUE = (
    Panel("Waiting requests", "By pod.", "none", {f"carousel_num_requests_waiting{PODS}": "{{pod}}"}, stacked=True),
    Panel("Waiting tokens", "Tokens that waiting requests still have to compute.", "none",
          {f"carousel_num_tokens_waiting{PODS}": "{{pod}}"}, stacked=True),
    Panel("Oldest wait", "How long the oldest waiting request has waited.", "s",
          {f"carousel_oldest_wait_seconds{PODS}": "{{pod}}"}),
    Panel("Estimated queue", "What scaling on queue-seconds looks at.", "s",
          {f"carousel_estimated_queue_seconds{PODS}": "{{pod}}"}),
    Panel("Live requests", "Running and waiting.", "none", {f"carousel_requests_live{PODS}": "{{pod}}"}, stacked=True),
    Panel("Admitted", "Requests that entered an engine.", "reqps", {_rate("requests_admitted_total", "pod"): "{{pod}}"},
          stacked=True),
)  # fmt: skip

LATENCY = (
    Panel("Time to first token", "Arrival to first token.", "s", _quantiles("time_to_first_token_seconds")),
    Panel("Between tokens", "Seconds between a sequence's tokens.", "s", _quantiles("inter_token_latency_seconds")),
    Panel("Time per output token", "Mean of a request after its first token.", "s",
          _quantiles("request_time_per_output_token_seconds")),
    Panel("End to end", "Arrival to the end.", "s", _quantiles("e2e_request_latency_seconds")),
    Panel("In the queue", "Arrival to first scheduled.", "s", _quantiles("request_queue_time_seconds")),
    Panel(
        "Where the time goes", "Means.", "s",
        {
            _mean("request_queue_time_seconds"): "queue",
            _mean("request_prefill_time_seconds"): "prefill",
            _mean("request_decode_time_seconds"): "decode",
        },
        stacked=True,
    ),
)  # fmt: skip

BATCH = (
    Panel("Occupancy", "Share of the batch's slots in use.", "percentunit",
          {f"carousel_batch_occupancy_ratio{PODS}": "{{pod}}"}, top=1),
    Panel(
        "Sequences", "On the batches, and room for more.", "none",
        {
            f"sum(carousel_num_sequences_running{PODS})": "running",
            f"sum(carousel_batch_slots_free{PODS})": "free",
        },
        stacked=True,
    ),
    Panel("Steps", "Iterations of the engine a second.", "none", {_rate("steps_total", "pod"): "{{pod}}"}),
    Panel(
        "Step time", "p99 of one iteration, by what it computes.", "s",
        {
            f"histogram_quantile(0.99, sum by (le, kind) (rate(carousel_step_seconds_bucket{PODS}[$__rate_interval])))":
                "{{kind}}"
        },
    ),
    Panel("Tokens in a step", "Computed per iteration.", "none", _quantiles("iteration_tokens_total")),
    Panel("Sequences in a step", "Computed per iteration.", "none", _quantiles("iteration_sequences")),
    Panel("Prompts", "Tokens of a request's prompt.", "none", _quantiles("request_prompt_tokens")),
    Panel("Answers", "Tokens of a request's answer.", "none", _quantiles("request_generation_tokens")),
    Panel("Memory of the process", "Resident set.", "bytes",
          {f"process_resident_memory_bytes{PROCESS}": "{{pod}}"}),
)  # fmt: skip

KV = (
    Panel("Use", "Share of KV blocks held by live sequences.", "percentunit",
          {f"carousel_kv_cache_usage_perc{PODS}": "{{pod}}"}, top=1),
    Panel(
        "Blocks", "All KV blocks: held, kept for later prompts, empty.", "none",
        {
            f"sum(carousel_kv_blocks{PODS} - carousel_kv_blocks_free{PODS} - carousel_kv_blocks_cached{PODS})": "held",
            f"sum(carousel_kv_blocks_cached{PODS})": "cached",
            f"sum(carousel_kv_blocks_free{PODS})": "free",
        },
        stacked=True,
    ),
    Panel("Tokens held", "Tokens that the batches hold in KV blocks.", "none",
          {f"carousel_num_tokens_running{PODS}": "{{pod}}"}, stacked=True),
    Panel("Prefix cache", "Share of looked-up prompt tokens that were found.", "percentunit",
          {f"{_rate('prefix_cache_hits_total')} / {_rate('prefix_cache_queries_total')}": "hits"}, top=1),
    Panel("Preemptions", "Sequences put back for want of KV blocks.", "ops",
          {_rate("num_preemptions_total", "pod"): "{{pod}}"}),
    Panel("Cancelled", "Requests whose client left.", "reqps", {_rate("requests_cancelled_total", "pod"): "{{pod}}"}),
)  # fmt: skip


def _by_tenant(name: str, *more: str) -> str:
    return _rate(f"tenant_{name}_total", ", ".join(("tenant", *more)))


def _tenants(name: str) -> dict[str, str]:
    return {_by_tenant(name): "{{tenant}}"}


TENANTS = (
    Panel("Device", "Seconds of the device a second, by tenant: of a whole device, 1.", "none",
          _tenants("device_seconds"), stacked=True),
    Panel("Money", "An hour at the present pace, by the price of a node.", "none",
          {f"{_by_tenant('cost')} * 3600": "{{tenant}}"}, stacked=True),
    Panel("Requests", "Ended, by tenant.", "reqps", _tenants("requests"), stacked=True),
    Panel("Tokens by tenant", "A second, by kind.", "none", {_by_tenant("tokens", "kind"): "{{tenant}} {{kind}}"}),
    Panel("Slots", "Of the batch, by tenant.", "none", _tenants("slot_seconds"), stacked=True),
    Panel("KV blocks", "Held, by tenant; of one that several share each pays a part.", "none",
          _tenants("kv_block_seconds"), stacked=True),
    Panel("Mean wait", "In the queue, by tenant.", "s",
          {f"{_by_tenant('queue_seconds')} / {_by_tenant('requests')}": "{{tenant}}"}),
    Panel("Refused by quotas", "Calls a second.", "reqps",
          {_by_tenant("refusals", "quota"): "{{tenant}} {{quota}}"}, stacked=True),
    Panel(
        "Use of the node", "Share of the time in steps, of slots and of KV blocks in use.", "percentunit",
        {
            f"{_rate('device_seconds_total')} / count(carousel_ready{PODS})": "device",
            f"{_rate('slot_seconds_total')} / sum(carousel_batch_slots{PODS})": "slots",
            f"{_rate('kv_block_seconds_total')} / sum(carousel_kv_blocks{PODS})": "KV blocks",
        },
        top=1,
    ),
    Panel(
        "Tenants' policy", "Pods whose file is wrong, and changes that could not be taken in the last hour.", "none",
        {
            f"count(carousel_tenant_policy_valid{PODS}) - sum(carousel_tenant_policy_valid{PODS})": "wrong",
            f"sum(increase(carousel_tenant_policy_reload_failures_total{PODS}[1h]))": "refused changes",
        },
    ),
    Panel("Age of the policy", "Since it was read.", "s",
          {f"time() - max(carousel_tenant_policy_loaded_timestamp_seconds{PODS})": ""}),
    Panel(
        "Usage log", "Lines a second, lines that wait, failures a second, lines lost a second.", "none",
        {
            _rate("usage_log_lines_total"): "written",
            f"sum(carousel_usage_log_pending{PODS})": "waiting",
            _rate("usage_log_failures_total"): "failures",
            _rate("usage_log_lost_total"): "lost",
        },
    ),
)  # fmt: skip

ROWS = {
    "Overview": OVERVIEW,
    "Queue": QUEUE,
    "Latency": LATENCY,
    "Batch": BATCH,
    "KV memory": KV,
    "Tenants and cost": TENANTS,
}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 1, "multi": True,
        "includeAll": True, "allValue": ".*", "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "query": {"query": query, "refId": name}, "definition": query,
    }  # fmt: skip


def _drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.stacked else 5, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    drawn: dict[str, Any] = {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": 4 if panel.stat else 8},
        "fieldConfig": {"defaults": defaults if panel.stat else {**defaults, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries.items())
        ],
    }
    if panel.stat:
        drawn["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    else:
        drawn["options"] = {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}}
    return drawn


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )  # fmt: skip
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            drawn = _drawn(panel, len(panels) + 1, x, y)
            panels.append(drawn)
            x, height = x + panel.width, drawn["gridPos"]["h"]
        y += height
    build = "carousel_build_info"
    return {
        "uid": "carousel-serving",
        "title": "Carousel",
        "description": "Serving of large language models with Carousel",
        "tags": ["carousel", "llm"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("namespace", "Namespace", f"label_values({build}, namespace)"),
                _variable("model", "Model", f'label_values({build}{{namespace=~"$namespace"}}, model_name)'),
                _variable("pod", "Pod", f'label_values({build}{{namespace=~"$namespace",model_name=~"$model"}}, pod)'),
            ]
        },
        "panels": panels,
    }

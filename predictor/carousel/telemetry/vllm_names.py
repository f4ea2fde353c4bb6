"""The same series under vLLM's names, for dashboards and scalers that know those.

Only what means the same there is shown. The colon keeps them behind a flag: some collectors refuse it in a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

_OURS, _THEIRS = "carousel_", "vllm:"

#: Family names without prefix, as in vLLM.
NAMES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "iteration_tokens_total",
    }
)

# vLLM knows fewer ends than we do.
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort", "timeout": "abort"}


def renamed(families: Iterable[Metric]) -> Iterator[Metric]:
    """vLLM's families, of the same samples; label ``engine`` is the index of vLLM's engine, here always 0."""
    for family in families:
        name = family.name.removeprefix(_OURS)
        if name not in NAMES:
            continue
        theirs = Metric(_THEIRS + name, family.documentation, family.type)
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            labels = {**sample.labels, "engine": "0"}
            if reason := labels.get("finished_reason"):
                labels["finished_reason"] = _REASONS.get(reason, reason)
            key = sample.name.replace(_OURS, _THEIRS, 1), tuple(sorted(labels.items()))
            values[key] = values.get(key, 0.0) + sample.value
        theirs.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
        yield theirs

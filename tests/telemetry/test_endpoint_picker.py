"""/metrics as an endpoint picker of the Gateway API inference extension reads it, and docs/multi-node.md says it.

The picker parses the text format, takes a family by its name, wants it to be a gauge, and reads the value, or labels as
whole numbers, of the one series that there is.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from carousel.engine.timeline import EngineStats
from carousel.telemetry.metrics import EngineMetrics
from carousel_kernels.layout import BLOCK_SIZE

STATS = EngineStats(
    num_requests_running=3, num_requests_waiting=4, num_blocks=40, num_free_blocks=10, num_cached_blocks=10
)
DOCS = (Path(__file__).resolve().parents[2] / "docs" / "multi-node.md").read_text("utf-8")
ROWS = re.findall(r"^\| (\w+) \| ([^|]+) \| `(\w+)` \| `([\w:]+)` \|$", DOCS, re.MULTILINE)
#: What the protocol names, and its value here.
WANTED = {
    "TotalQueuedRequests": 4,
    "TotalRunningRequests": 3,
    "KVCacheUtilization": 0.5,
    "BlockSize": BLOCK_SIZE,
    "NumGPUBlocks": 40,
}


@pytest.fixture(scope="module")
def families() -> dict[str, Metric]:
    registry = CollectorRegistry()
    EngineMetrics("m", lambda: STATS, vllm_names=True).register(registry)
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_docs_name_all_of_them() -> None:
    assert {name for name, *_ in ROWS} == set(WANTED)


@pytest.mark.parametrize(("name", "kind", "ours", "theirs"), ROWS, ids=[row[0] for row in ROWS])
def test_a_picker_finds_them(families: dict[str, Metric], name: str, kind: str, ours: str, theirs: str) -> None:
    for family in (families[ours], families[theirs]):
        assert family.type == "gauge"
        (sample,) = family.samples
        assert sample.name == family.name
        assert sample.labels["model_name"] == "m"
        label = re.search(r"label `(\w+)`", kind)
        value = int(sample.labels[label[1]]) if label else sample.value
        assert value == WANTED[name]
    assert "gauge" in kind

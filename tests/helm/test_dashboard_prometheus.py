"""Every panel of the dashboard shows something of a server that works: its queries, asked of a real Prometheus."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.helm.chart_tools import prometheus, promtool, render, the
from tests.helm.test_chart_metrics import dashboard_queries
from tests.ports import free_port
from tests.server.harness import Running, serving, wait_until

GENERATE, STREAM = "/v2/models/tiny/generate", "/v2/models/tiny/generate_stream"
POLICY = "tenants: {busy: {requests_per_minute: 30, weight: 2}}"
WINDOW = "10s"
CLIENT = httpx.Client()


def load(running: Running, ended: threading.Event) -> None:
    """Requests of three tenants, of whom one is refused now and then, and clients that leave."""

    def one(number: int) -> None:
        with httpx.Client(base_url=running.url, timeout=20) as client:
            for index in range(10_000):
                if ended.wait(0.2):
                    return
                tenant = ("busy", "calm", "third")[(number + index) % 3]
                body = {"text_input": f"{'the same beginning ' * 3}{index}",
                        "parameters": {"max_tokens": 6, "ignore_eos": True}}  # fmt: skip
                client.post(GENERATE, json=body, headers={"x-carousel-tenant": tenant})
                if index % 5 == 0:
                    body["parameters"]["max_tokens"] = 300  # type: ignore[index]
                    with client.stream("POST", STREAM, json=body) as stream:
                        lines = stream.iter_lines()
                        next(lines)
                client.post(GENERATE, json={"text_input": ""})  # refused as wrong

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(3)))


@contextmanager
def scraping(folder: Path, target: str, rules: list[dict[str, Any]]) -> Iterator[str]:
    """A Prometheus that reads ``target`` every second. Yields its URL."""
    port = free_port()
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": rules}))
    labels = {"namespace": "models", "pod": "chat-carousel-7d9f8c6b5d-x2x4z"}
    job = {"job_name": "carousel", "static_configs": [{"targets": [target], "labels": labels}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [
        prometheus(), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(words, cwd=folder)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _ready(url))
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def asked(url: str, query: str) -> list[float]:
    answer = CLIENT.get(f"{url}/api/v1/query", params={"query": query}, timeout=10).json()
    assert answer["status"] == "success", (query, answer)
    return [float(one["value"][1]) for one in answer["data"]["result"]]


def shown(query: str) -> str:
    """The query as Grafana would ask it, with everything chosen."""
    for name in ("$namespace", "$model", "$pod"):
        query = query.replace(name, ".*")
    return query.replace("$__rate_interval", WINDOW)


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    promtool()  # where there is none, there is no Prometheus either
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "policy.yaml").write_text(POLICY)
    settings = {
        "tenant_policy": str(folder / "policy.yaml"), "trust_tenant_header": True, "price_per_node_hour": 1.0,
        "usage_log": str(folder / "usage"), "policy": "fair", "model_name": "tiny",
    }  # fmt: skip
    groups = the(render({"alerts": {"enabled": True}}), "PrometheusRule")["spec"]["groups"]
    for group in groups:
        group["interval"] = "1s"
    with serving(**settings) as running:
        target = running.url.removeprefix("http://")
        with scraping(folder, target, groups) as url, ThreadPoolExecutor(1) as pool:
            ended = threading.Event()
            loading = pool.submit(load, running, ended)
            try:
                told = 'increase(carousel_tenant_requests_total{tenant="third"}[10s])'  # the last to come
                wait_until(lambda: any(count > 0 for count in asked(url, told)), 30)
                yield url
            finally:
                ended.set()
            loading.result(30)


def test_no_panel_is_empty(asking: str) -> None:
    left = list(dashboard_queries())
    assert len({title for title, _ in left}) > 45

    def something(query: str) -> bool:
        return any(not math.isnan(one) for one in asked(asking, shown(query)))

    end = time.monotonic() + 30  # a rate wants two scrapes since there was something to count
    while left and time.monotonic() < end:
        left = [(title, query) for title, query in left if not something(query)]
        time.sleep(0.2)
    assert [title for title, _ in left] == []


def test_what_is_recorded_is_there(asking: str) -> None:
    for name in ("tenant:carousel_tenant_cost:rate5m", "tenant_kind:carousel_tenant_tokens:rate5m"):
        wait_until(lambda name=name: asked(asking, f'{name}{{tenant="calm"}}'))  # type: ignore[misc]
    assert json.loads(httpx.get(f"{asking}/api/v1/rules", timeout=10).text)["status"] == "success"
    health = [
        rule["health"]
        for group in httpx.get(f"{asking}/api/v1/rules", timeout=10).json()["data"]["groups"]
        for rule in group["rules"]
    ]
    assert set(health) == {"ok"}

"""admitted = finished + cancelled + failed + live, in every scrape, whatever clients do to the real engine."""

from __future__ import annotations

import random
import re
import threading
import time

import grpc
import httpx
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tests.engine.tiny import kv_memory
from tests.server.harness import Running, serving, tiny_factory, wait_until
from tests.server.test_life import CHAT, STREAM, calls, counts, infer_request

LIMIT_S = 90.0
"""A busy machine takes longer to see enough."""


def enough(scrapes: int, seen: dict[str, float]) -> bool:
    """Whether the clients have done each thing a few times."""
    wanted = {"requests_cancelled_total": 5, "requests_finished_total": 20, "requests_rejected_total": 5}
    return scrapes > 20 and all(seen[name] > least for name, least in wanted.items())


def bother(running: Running, seed: int, stop: threading.Event, problems: list[str]) -> None:
    """One client: whole answers, streams that are left, deadlines, nonsense, calls over gRPC that are cancelled."""
    draw = random.Random(seed)
    with httpx.Client(base_url=running.url, timeout=20) as client, grpc.insecure_channel(running.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        while not stop.is_set():
            prompt = "x" * draw.randint(1, 60)
            path, body = draw.choice(list(calls(draw.randint(1, 60), prompt).items()))
            kind = draw.choice(["whole", "leave", "deadline", "nonsense", "many", "grpc"])
            if kind == "leave":
                path = draw.choice([STREAM, CHAT])
                with client.stream("POST", path, json=calls(300, prompt)[path]) as stream:
                    if stream.status_code == 200:
                        next(stream.iter_lines())
                continue
            if kind == "grpc":
                call = stub.ModelInfer.future(infer_request(200), timeout=20)
                time.sleep(draw.random() * 0.05)
                call.cancel()
                continue
            if kind == "many":
                path, body = "/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 5}
            elif kind == "nonsense":
                body = calls(5, prompt, top_p=7)[path]
            headers = {"x-request-timeout": "0.02"} if kind == "deadline" else {}
            status = client.post(path, json=body, headers=headers).status_code
            allowed = {"deadline": (200, 429, 504), "nonsense": (400, 422)}.get(kind, (200, 429))
            if status not in allowed:
                problems.append(f"{kind} {path}: {status}")


def test_every_scrape_adds_up_under_random_load():
    """vllm#8115, #31503: aborted requests vanished from the counts. The pool is small, so preemptions are in it too."""
    small = {"max_batch_sequences": 4, "max_queue_requests": 4, "kv_cache_memory": kv_memory(48)}
    with serving(lambda keep: tiny_factory(keep, 0.002), **small) as running:
        problems: list[str] = []
        stop, end = threading.Event(), time.monotonic() + LIMIT_S
        clients = [
            threading.Thread(target=bother, args=(running, seed, stop, problems), daemon=True) for seed in range(10)
        ]
        for client in clients:
            client.start()
        scrapes, last = 0, counts(running.url)
        while any(client.is_alive() for client in clients):
            now = counts(running.url)  # asserts the identity
            for name, value in now.items():
                if name.endswith("_total"):
                    assert value >= last.get(name, 0), name
            scrapes, last = scrapes + 1, now
            if enough(scrapes, now) or time.monotonic() > end:
                stop.set()
        assert problems == []
        wait_until(lambda: counts(running.url)["requests_live"] == 0)
        last = counts(running.url)
        assert enough(scrapes, last)
        assert last["requests_failed_total"] == 0
        stats = running.engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert (stats.num_sequences_running, stats.num_tokens_waiting, stats.oldest_wait_s) == (0, 0, 0)
        by_reason = re.findall(
            r'^carousel_request_refusals_total\{.*reason="(\w+)"\} (\S+)',
            httpx.get(running.url + "/metrics").text,
            re.MULTILINE,
        )
        assert {reason for reason, _ in by_reason} == {
            "invalid",
            "too_long",
            "queue_full",
            "queue_share",
            "unavailable",
        }
        assert sum(float(value) for _, value in by_reason) == last["requests_rejected_total"]


def test_labels_are_bounded_whatever_clients_call_themselves():
    """A tenant, a model name or a path in a label would let any client fill Prometheus."""
    with (
        serving(vllm_metrics=True, trust_tenant_header=True, tenant_labels=1) as running,
        httpx.Client(base_url=running.url, timeout=10) as client,
    ):

        def series() -> set[str]:
            lines = client.get("/metrics").text.splitlines()
            return {
                re.sub(r'tenant="[^"]*"', 'tenant="one"', line.rpartition(" ")[0])
                if 'tenant="other"' not in line
                else ""
                for line in lines
                if line.startswith(("carousel_", "vllm:"))
            }

        # One tenant has labels of its own, all the others are one.
        for name in ("one", "two"):
            client.post("/v2/models/tiny/generate", json={"text_input": "a"}, headers={"x-carousel-tenant": name})
        before = series()
        for i in range(5):
            headers = {"x-carousel-tenant": f"tenant-{i}", "x-request-id": f"id-{i}"}
            for path, body in calls(1, f"p{i}").items():
                assert client.post(path, json=body, headers=headers).status_code == 200
            client.post(f"/v2/models/other-{i}/generate", json={"text_input": "a"})
            client.get(f"/no/such/path-{i}")
        assert series() == before
        assert any(line.startswith("vllm:num_requests_waiting") for line in before)

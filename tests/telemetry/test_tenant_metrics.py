"""Sums by tenant, and series by tenant that are bounded and only grow."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from carousel.engine.meter import Amounts, RequestUsage
from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats
from carousel.telemetry import usage as usage_module
from carousel.telemetry.tenant_metrics import TenantMetrics, TopTenants
from carousel.telemetry.usage import Price, UsageBook
from carousel.tenancy.policy import PolicyFile

PRICE = Price(7.2, "EUR")


def usage(tenant: str, device_ns: int = 10**9, **amounts: int) -> RequestUsage:
    return RequestUsage("r", tenant, FinishReason.EOS, 1, 0, 0.5, 0.5, 1.0, Amounts(device_ns=device_ns, **amounts))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(metrics: TenantMetrics) -> dict[str, dict[str, float]]:
    """Series without the model: name -> labels' values -> value."""
    registry = CollectorRegistry()
    registry.register(metrics)
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def metrics(size: int = 3) -> TenantMetrics:
    return TenantMetrics("m", PRICE, size, PolicyFile(None))


def test_what_a_tenant_took_is_told_in_tokens_seconds_and_money() -> None:
    all_of = metrics()
    all_of(
        usage("a", 2 * 10**9, prompt_tokens=7, cached_tokens=4, generated_tokens=3, slot_ns=10**9, block_ns=5 * 10**9)
    )
    all_of(usage(""))
    all_of.refused("a", "tokens")
    found = shown(all_of)
    assert found["carousel_tenant_tokens_total"] == {
        "prompt,a": 7,
        "cached,a": 4,
        "generated,a": 3,
        "recomputed,a": 0,
        "prompt,-": 0,
        "cached,-": 0,
        "generated,-": 0,
        "recomputed,-": 0,
    }
    assert found["carousel_tenant_device_seconds_total"] == {"a": 2.0, "-": 1.0}
    assert found["carousel_tenant_slot_seconds_total"]["a"] == 1.0
    assert found["carousel_tenant_kv_block_seconds_total"]["a"] == 5.0
    assert found["carousel_tenant_cost_total"]["a"] == 0.004
    assert found["carousel_tenant_queue_seconds_total"]["a"] == 0.5
    assert found["carousel_tenant_refusals_total"] == {"tokens,a": 1}


def test_labels_are_bounded_whatever_tenants_there_are() -> None:
    all_of = metrics(3)
    for index in range(500):
        all_of(usage(f"t{index}"))
        all_of.refused(f"r{index}", "requests")
    requests = shown(all_of)["carousel_tenant_requests_total"]
    assert len(requests) == 4
    assert sum(requests.values()) == 500
    assert requests["other"] == 497
    # The first of them had a name until somebody came who was busier: its series is gone.
    assert shown(all_of)["carousel_tenant_refusals_total"] == {"requests,other": 499}


def test_the_busiest_of_late_have_names_and_series_only_grow() -> None:
    clock, draw, dropped = Clock(), random.Random(3), 0
    all_of = metrics(3)
    all_of._top._clock = clock
    before: dict[str, float] = {}
    for phase in range(6):
        heavy = [f"heavy-{phase}-{index}" for index in range(3)]
        for _ in range(75):
            clock.now += 20
            all_of(usage(draw.choice(heavy), 10**9))
            all_of(usage(f"small-{draw.randrange(50)}", 10**7))
            now = shown(all_of)["carousel_tenant_device_seconds_total"]
            for tenant, value in now.items():
                assert value >= before.get(tenant, 0.0) or tenant not in before
            dropped += len(before.keys() - now.keys())
            before = now
        assert set(heavy) <= set(before), phase
    assert 12 <= dropped <= 30  # the names of each phase went, and did not flap


def test_a_tenant_must_be_twice_as_busy_to_take_a_name() -> None:
    gone: list[str] = []
    top = TopTenants(1, gone.append, Clock())
    assert top.label("a", 100.0) == "a"
    assert top.label("b", 199.0) == "other"
    assert gone == []
    assert top.label("b", 2.0) == "b"
    assert gone == ["a"]
    assert top.label("a", 0.0) == "other"


def test_the_state_of_the_policy_file_is_told(tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "policy").write_text("default: {weight: 1}")
    policies = PolicyFile(tmp_path / "policy", clock=clock)
    all_of = TenantMetrics("m", PRICE, 3, policies)
    assert shown(all_of)["carousel_tenant_policy_valid"] == {"": 1}
    (tmp_path / "policy").write_text("default: {weight: none}")
    for _ in range(2):
        clock.now += 2
        policies.refresh()
    found = shown(all_of)
    assert found["carousel_tenant_policy_valid"] == {"": 0}
    assert found["carousel_tenant_policy_reload_failures_total"] == {"": 1}


def test_the_book_s_summary_is_whole_or_one_tenant_s() -> None:
    clock = Clock()
    book = UsageBook("m", PRICE, clock)
    clock.now = 100.0
    book.begin()
    for tenant, share in (("a", 1), ("b", 3), ("", 5)):
        book(usage(tenant, share * 10**9, prompt_tokens=share))
    clock.now = 120.0
    stats = EngineStats(device_ns=9 * 10**9, num_requests_running=2)
    found = book.summary(stats)
    assert [row["tenant"] for row in found["tenants"]] == ["-", "a", "b"]
    assert found["total"]["device_ns"] == stats.device_ns == found["engine"]["device_ns"]
    assert found["total"]["cost"] == 7.2 * 9 / 3600
    assert found["engine"]["idle_seconds"] == 11.0
    assert found["engine"]["requests_live"] == 2
    assert found["engine"]["cost"] == pytest.approx(found["total"]["cost"] + found["engine"]["idle_cost"])
    assert (found["since"], found["until"]) == ("1970-01-01T00:01:40.000Z", "1970-01-01T00:02:00.000Z")
    own = book.summary(stats, "b")
    assert [row["tenant"] for row in own["tenants"]] == ["b"]
    assert own["total"]["device_ns"] == 3 * 10**9
    assert "engine" not in own


def test_tenants_beyond_the_bound_are_counted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "MAX_TENANTS", 2)
    book = UsageBook("m", PRICE)
    for index in range(5):
        book(usage(f"t{index}"))
    rows = book.summary(EngineStats())["tenants"]
    assert {row["tenant"]: row["requests"] for row in rows} == {"t0": 1, "t1": 1, "other": 3}

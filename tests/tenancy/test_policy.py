"""The tenants' policy: what a file may say, what is said of a wrong one, and that a reload is whole or not at all."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carousel.tenancy.policy import Policies, PolicyFile, PolicyUnreadable, TenantPolicy, parse_policies

WHOLE = """
priority_classes: {interactive: -10, normal: 0, batch: 10}
default:
  requests_per_minute: 60
  queue_share: 0.25
  priority_classes: [normal, batch]
tenants:
  gold:
    weight: 4
    requests_per_minute: null
    priority_classes: [interactive]
    service_accounts: ["team-a/chat", "team-b/*"]
  free: {}
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_tenant_has_what_the_default_says_but_for_its_own() -> None:
    policies = parse_policies(WHOLE)
    gold = policies.of("gold")
    assert (gold.weight, gold.requests_per_minute, gold.queue_share) == (4.0, None, 0.25)
    assert gold.priority_classes == ("interactive",)
    assert policies.of("free") == policies.of("never heard of") == policies.default
    assert policies.default.requests_per_minute == 60
    assert policies.weights == {"gold": 4.0, "free": 1.0}


def test_json_says_the_same() -> None:
    assert parse_policies(json.dumps({"default": {"weight": 2}}, indent="\t")).default == TenantPolicy(weight=2.0)
    assert parse_policies("") == Policies()


def test_accounts_named_whole_count_more_than_a_namespace() -> None:
    policies = parse_policies('tenants: {a: {service_accounts: ["ns/*"]}, b: {service_accounts: [ns/chat]}}')
    assert policies.tenant_of_account("ns", "chat") == "b"
    assert policies.tenant_of_account("ns", "other") == "a"
    assert policies.tenant_of_account("elsewhere", "chat") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenant: {}", ["the file", "'tenant'", "priority_classes, default, tenants"]),
        ("default: {weight: 0}", ["default.weight", "got 0", "0.001 to 1000"]),
        ("default: {weight: .nan}", ["default.weight"]),
        ("default: {queue_share: 1.5}", ["default.queue_share", "1.5", "0 to 1"]),
        ("tenants: {a: {tokens_per_minute: 0}}", ["tenants.a.tokens_per_minute", "got 0", "null for no limit"]),
        ("tenants: {a: {requests_per_minute: true}}", ["tenants.a.requests_per_minute", "True"]),
        ("tenants: {a: {limit: 1}}", ["tenants.a", "'limit'", "tokens_per_minute"]),
        ("tenants: {'a b': {}}", ["'a b'", "letters"]),
        ("tenants: [a]", ["tenants", "a mapping"]),
        ("tenants: {a: {priority_classes: [fast]}}", ["tenants.a.priority_classes", "'fast'", "none is declared"]),
        ("priority_classes: {a: 1, b: 1}", ["priority_classes.b", "no other class"]),
        ("priority_classes: {A: 1}", ["'A'", "lower-case"]),
        ("tenants: {a: {service_accounts: [x]}}", ["tenants.a.service_accounts", "NAMESPACE/NAME"]),
        ("tenants: {a: {service_accounts: [n/x]}, b: {service_accounts: [n/x]}}", ["tenants.b.service_accounts"]),
        ("default: {service_accounts: [n/x]}", ["default", "'service_accounts'"]),
        ("tenants: {a: {}, a: {}}", ["a: it is there twice"]),
        ('{"default": {}, "default": {}}', ["default: it is there twice"]),
        ("default: [", ["line 1"]),
        ('{"default": }', ["line 1", "JSON"]),
        ("? [a]\n: b", ["plain text"]),
        ("!!python/object/apply:os.system ['true']", ["python"]),
        ("7", ["the file", "a mapping"]),
    ],
)
def test_what_is_wrong_is_named_with_field_value_and_allowed(text: str, words: list[str]) -> None:
    with pytest.raises(PolicyUnreadable) as caught:
        parse_policies(text)
    for word in words:
        assert word in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(PolicyUnreadable) as caught:
        parse_policies("default: {weight: x}\ntenants: {a: {weight: y}}")
    assert "default.weight" in str(caught.value)
    assert "tenants.a.weight" in str(caught.value)


@given(st.text(max_size=60))
def test_any_text_is_a_policy_or_a_clear_refusal(text: str) -> None:
    said = ""
    try:
        found: Policies | None = parse_policies(text)
    except PolicyUnreadable as error:
        found, said = None, str(error)
    assert isinstance(found, Policies) or said


def test_a_file_that_is_not_there_is_no_text_or_huge(tmp_path: Path) -> None:
    file = tmp_path / "policy"
    with pytest.raises(PolicyUnreadable, match="No such file"):
        PolicyFile(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyUnreadable, match="UTF-8"):
        PolicyFile(file)
    file.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(PolicyUnreadable, match="larger"):
        PolicyFile(file)


class Reloads:
    """A policy file and a clock that the test turns."""

    def __init__(self, folder: Path) -> None:
        self.file, self.clock = folder / "policy.yaml", Clock()
        self.file.write_text("default: {weight: 1}")
        self.told: list[Policies] = []
        self.policies = PolicyFile(self.file, self.told.append, self.clock)

    def look(self, times: int = 2) -> float:
        for _ in range(times):
            self.clock.now += 1.5
            self.policies.refresh()
        return self.policies.current.default.weight


def test_a_change_is_taken_once_the_file_stands_still(tmp_path: Path) -> None:
    reloads = Reloads(tmp_path)
    reloads.file.write_text("default: {weight: 22}")
    assert reloads.look(1) == 1.0  # somebody may still be writing
    reloads.file.write_text("default: {weight: 333}")
    assert reloads.look(1) == 1.0
    assert reloads.look(1) == 333.0
    assert [one.default.weight for one in reloads.told] == [333.0]
    reloads.policies.refresh()
    assert len(reloads.told) == 1


def test_a_wrong_file_changes_nothing_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reloads = Reloads(tmp_path)
    reloads.file.write_text("default: {weight: 2}\ntenants: {a: {weight: none}}")
    with caplog.at_level(logging.ERROR):
        assert reloads.look() == 1.0
    assert reloads.policies.failures == 1
    assert "tenants.a.weight" in (reloads.policies.problem or "")
    assert "tenants.a.weight" in caplog.text
    reloads.file.unlink()
    assert reloads.look() == 1.0
    assert reloads.policies.failures == 2
    reloads.file.write_text("default: {weight: 5}")
    assert reloads.look() == 5.0
    assert reloads.policies.problem is None


def test_a_mounted_config_map_is_swapped_as_kubernetes_does_it(tmp_path: Path) -> None:
    for name, weight in (("..v1", 1), ("..v2", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.yaml").write_text(f"default: {{weight: {weight}}}")
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    clock = Clock()
    policies = PolicyFile(tmp_path / "policy.yaml", clock=clock)
    (tmp_path / "..new").symlink_to("..v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    for _ in range(2):
        clock.now += 1.5
        policies.refresh()
    assert policies.current.default.weight == 2.0

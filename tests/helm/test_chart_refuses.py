"""Wrong values: each is refused before anything is installed, and what is said names it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helm.chart_tools import CHART, Doc, merged, nested, refusal, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))

KEDA: Doc = {"autoscaling": {"type": "keda"}}
ISVC: Doc = {"mode": "inferenceservice"}

#: Values that contradict each other, and what must be named.
CONTRADICTIONS: list[tuple[Doc, tuple[str, ...]]] = [
    (merged(KEDA, {"replicas": 3}), ("replicas (3)", "autoscaling.type")),
    ({"autoscaling": {"minReplicas": 5, "maxReplicas": 4}}, ("minReplicas (5)", "autoscaling.maxReplicas (4)")),
    ({"autoscaling": {"type": "hpa", "minReplicas": 0}}, ("autoscaling.minReplicas", "HPA")),
    (
        {"autoscaling": {"type": "keda", "minReplicas": 0, "keda": {"trigger": "metrics-api"}}},
        ("autoscaling.minReplicas", "autoscaling.keda.trigger metrics-api"),
    ),
    (
        merged(KEDA, {"autoscaling": {"keda": {"cooldownPeriod": 5, "pollingInterval": 30}}}),
        ("autoscaling.keda.cooldownPeriod (5)", "autoscaling.keda.pollingInterval (30)"),
    ),
    (
        merged(KEDA, {"autoscaling": {"keda": {"trigger": "prometheus"}}}),
        ("autoscaling.keda.prometheus.serverAddress",),
    ),
    (
        merged(KEDA, {"tls": {"secretName": "a", "clientCertificates": True, "clientSecretName": "b"}}),
        ("autoscaling.keda.trigger external-push", "tls.clientCertificates"),
    ),
    (
        {
            "tls": {"secretName": "a", "clientCertificates": True, "clientSecretName": "b"},
            "autoscaling": {"type": "keda", "keda": {"trigger": "metrics-api"}},
        },
        ("autoscaling.keda.trigger metrics-api", "tls.clientCertificates"),
    ),
    ({"scaler": {"activator": {"enabled": True}}}, ("scaler.activator.enabled", "autoscaling.type")),
    (merged(KEDA, {"scaler": {"activator": {"enabled": True, "port": 9096}}}), ("scaler.activator.port 9096",)),
    ({"gpu": {"enabled": True}, "settings": {"device": "cpu"}}, ("settings.device", "gpu.enabled")),
    (
        {"gpu": {"enabled": True, "resource": "nvidia.com/mig-1g.10gb"}, "settings": {"tensor_parallel_size": 2}},
        ("settings.tensor_parallel_size", "gpu.resource"),
    ),
    ({"settings": {"device": "cuda"}}, ("settings.device", "gpu.enabled")),
    ({"runtimeClassName": "nvidia"}, ("runtimeClassName", "gpu.enabled")),
    ({"tls": {"secretName": "a"}, "settings": {"tls_key": "/k"}}, ("settings.tls_key", "tls.secretName")),
    ({"settings": {"tls_certificate": "/c", "tls_key": "/k"}}, ("settings.tls_certificate", "tls.secretName")),
    ({"tls": {"clientCertificates": True}}, ("tls.clientCertificates", "tls.secretName")),
    ({"tls": {"secretName": "a", "clientCertificates": True}}, ("tls.clientSecretName",)),
    ({"apiKeys": {"existingSecret": "a"}, "settings": {"api_keys": "/k"}}, ("settings.api_keys", "apiKeys")),
    ({"apiKeys": {"existingSecret": "a", "keys": ["0123456789"]}}, ("apiKeys.existingSecret", "apiKeys.keys")),
    ({"tenants": {"existingConfigMap": "a", "policy": {"default": {}}}}, ("tenants.existingConfigMap", "tenants.pol")),
    ({"tenants": {"existingConfigMap": "a"}, "settings": {"tenant_policy": "/p"}}, ("settings.tenant_policy",)),
    ({"usageLog": {"kind": "emptyDir"}, "settings": {"usage_log": "/p"}}, ("settings.usage_log", "usageLog")),
    ({"usageLog": {"kind": "existingClaim"}}, ("usageLog.existingClaim", "usageLog.kind (existingClaim)")),
    ({"huggingFace": {"existingSecret": "a", "token": "b"}}, ("huggingFace.existingSecret", "huggingFace.token")),
    (
        {"s3": {"existingSecret": "a", "accessKeyId": "b", "secretAccessKey": "c"}},
        ("s3.existingSecret", "s3.accessKeyId"),
    ),
    ({"s3": {"accessKeyId": "b"}}, ("s3.accessKeyId", "s3.secretAccessKey")),
    ({"cache": {"kind": "existingClaim"}}, ("cache.existingClaim", "cache.kind")),
    ({"cache": {"readOnly": True}}, ("cache.readOnly", "cache.kind emptyDir")),
    ({"cache": {"existingClaim": "mine"}}, ("cache.existingClaim", "cache.kind")),
    ({"cache": {"kind": "claim", "claim": {"accessMode": "ReadWriteOncePod"}}}, ("cache.claim.accessMode", "maxSurge")),
    (
        {"updateStrategy": {"maxSurge": 0, "maxUnavailable": "0%"}},
        ("updateStrategy.maxSurge", "updateStrategy.maxUnavailable"),
    ),
    ({"settings": {"http_port": 80}}, ("settings.http_port", "80")),
    (
        {"loadTest": {"enabled": True}, "apiKeys": {"existingSecret": "keys"}},
        ("loadTest.apiKeySecret.name", "loadTest.enabled"),
    ),
    (
        {
            "loadTest": {"enabled": True},
            "tls": {"secretName": "a", "clientCertificates": True, "clientSecretName": "b"},
        },
        ("loadTest.enabled", "tls.clientCertificates"),
    ),
    ({"settings": {"http_port": 8081}}, ("settings.http_port", "settings.grpc_port")),
    (merged(ISVC, {"service": {"type": "NodePort"}}), ("service.type NodePort", "inferenceservice")),
    ({"inferenceService": {"annotations": {"a": "b"}}}, ("inferenceService.annotations", "podAnnotations")),
    (merged(ISVC, {"resources": {"limits": {"cpu": None}}}), ("resources.limits.cpu",)),
    ({"extraEnv": [{"name": "CAROUSEL_MAX_BATCH_TOKENS", "value": "1"}]}, ("extraEnv", "settings.max_batch_tokens")),
    (merged(ISVC, {"extraEnv": [{"name": "PYTHONPATH", "value": "/x"}]}), ("extraEnv", "PYTHONPATH")),
]  # fmt: skip


@pytest.mark.parametrize(("values", "named"), CONTRADICTIONS, ids=[named[0] for _, named in CONTRADICTIONS])
def test_contradictions_are_named(values: Doc, named: tuple[str, ...]) -> None:
    said = refusal(values)
    assert "these values cannot be" in said
    assert all(one in said for one in named), said


def test_all_contradictions_are_told_at_once() -> None:
    said = refusal({"s3": {"accessKeyId": "b"}, "settings": {"device": "cuda", "http_port": 80}})
    assert [one in said for one in ("s3.accessKeyId", "settings.device", "settings.http_port")] == [True] * 3


def leaves(schema: Doc, path: tuple[str, ...] = ()) -> dict[str, Doc]:
    """Dotted path -> schema of everything that can be set."""
    if "properties" not in schema:
        return {".".join(path): schema}
    found = {}
    for name, child in schema["properties"].items():
        found |= leaves(child, (*path, name))
    return found


LEAVES = {path: schema for path, schema in leaves(SCHEMA).items() if path != "global"}


def wrong_for(schema: Doc) -> Any:
    """A value that a schema does not take: out of bounds where there are bounds, else of another type."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "enum" in schema:
        return "nonsense"
    if "maximum" in schema and {"integer", "number"} & set(kinds) and "anyOf" not in schema:
        return schema["maximum"] * 2 + 1
    if "object" in kinds:
        return "text"
    return {"an": "object"}


def location(path: str) -> str:
    """How Helm names the place of a value."""
    return f"at '/{path.replace('.', '/')}'"


def test_every_value_of_a_wrong_kind_or_out_of_bounds_is_named() -> None:
    # All at once, because the schema reports all: one run of helm and not 150.
    said = refusal(merged(*(nested(path, wrong_for(schema)) for path, schema in LEAVES.items())))
    assert [path for path in LEAVES if location(path) not in said] == []


def test_every_misspelt_value_is_named() -> None:
    branches = {""} | {path.rpartition(".")[0] for path in LEAVES}
    wrong = merged(*(nested(f"{branch}.mispelt".lstrip("."), 1) for branch in branches))
    said = refusal(wrong)
    missing = [
        branch
        for branch in branches
        if f"{location(branch) if branch else 'at ' + chr(39) * 2}: additional properties 'mispelt' not allowed"
        not in said
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("settings.max_batch_token", 512),
        ("settings.max_batch_tokens", 0),
        ("settings.max_batch_tokens", "many"),
        ("settings.max_model_len", 8),
        ("settings.kv_cache_memory", 0.99),
        ("settings.kv_cache_memory", 4096),
        ("settings.kv_cache_memory", "half"),
        ("settings.max_request_bytes", "lots"),
        ("settings.policy", "lifo"),
        ("settings.model_name", "a b"),
        ("settings.tenant_weights", {"gold": 0}),
        ("settings.grpc", "yes"),
        ("scaler.settings.pod_selector", "a=b"),
        ("scaler.settings.interval_seconds", 0),
        ("image.repository", "carousel:cpu"),
        ("gpu.resource", "gpu"),
        ("alerts.slo.ttftSeconds", 3),
        ("extraVolumes", [{"name": "x", "hostPath": {"path": "/"}}]),
        ("resources.gpu", 1),
        ("cache.sizeLimit", "a lot"),
    ],
)
def test_wrong_values_are_named(path: str, value: Any) -> None:
    said = refusal(nested(path, value))
    assert path.split(".")[-1] in said, said
    place = path.rpartition(".")[0] if "additional properties" in said else path
    assert location(place).rstrip("'") in said, said  # or a place below it


def test_secrets_that_are_refused_are_not_shown() -> None:
    said = refusal({"apiKeys": {"keys": ["secret1"]}})
    assert "/apiKeys/keys/0" in said
    assert "secret1" not in said


def test_null_is_the_default() -> None:
    assert render({"settings": {"drain_seconds": None}}) != render()
    assert render({"cache": {"sizeLimit": "20Gi"}, "nameOverride": ""}) == render()

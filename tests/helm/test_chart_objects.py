"""What every set of objects of the chart must be, whatever the values: sound, restricted, found by its selectors."""

from __future__ import annotations

import functools
import re
from typing import Any

import jsonschema
import kubernetes.client.models as models
import pytest
from kubernetes import client
from tests.helm.chart_tools import (
    CHART,
    KUBE_VERSION,
    NAMESPACE,
    Doc,
    kit_crd,
    pod_templates,
    render,
    run_helm,
)
from tests.helm.matrix import MATRIX

everything = pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())

BUILT_IN = {
    "Deployment": client.V1Deployment,
    "Service": client.V1Service,
    "ServiceAccount": client.V1ServiceAccount,
    "Role": client.V1Role,
    "RoleBinding": client.V1RoleBinding,
    "ClusterRoleBinding": client.V1ClusterRoleBinding,
    "Secret": client.V1Secret,
    "ConfigMap": client.V1ConfigMap,
    "PersistentVolumeClaim": client.V1PersistentVolumeClaim,
    "PodDisruptionBudget": client.V1PodDisruptionBudget,
    "NetworkPolicy": client.V1NetworkPolicy,
    "HorizontalPodAutoscaler": client.V2HorizontalPodAutoscaler,
    "Pod": client.V1Pod,
    "Job": client.V1Job,
}
#: Of the Prometheus operator's API, what the chart may use.
_SECRET_KEY = {"type": "object", "additionalProperties": False, "properties": {"name": {}, "key": {}}}
OPERATOR = {
    "PodMonitor": {
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"matchLabels": {"type": "object"}},
        },
        "podMetricsEndpoints": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "port": {"type": "string"},
                    "path": {"type": "string"},
                    "interval": {"type": "string", "pattern": r"^\d+(ms|s|m)$"},
                    "scheme": {"enum": ["http", "https"]},
                    "tlsConfig": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "insecureSkipVerify": {"type": "boolean"},
                            "cert": {"properties": {"secret": _SECRET_KEY}, "additionalProperties": False},
                            "keySecret": _SECRET_KEY,
                        },
                    },
                },
            },
        },
    },
    "PrometheusRule": {
        "groups": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "interval": {"type": "string", "pattern": r"^\d+(ms|s|m)$"},
                    "rules": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "oneOf": [
                                {"required": ["alert", "expr", "for", "labels", "annotations"]},
                                {"required": ["record", "expr"]},
                            ],
                            "additionalProperties": False,
                            "properties": {
                                "alert": {"pattern": "^Carousel[A-Za-z]+$"},
                                "record": {"pattern": "^[a-z_]+:carousel_[a-z_]+:rate5m$"},
                                "expr": {"type": "string"},
                                "for": {"pattern": r"^\d+[smh]$"},
                                "labels": {"additionalProperties": {"type": "string"}},
                                "annotations": {"additionalProperties": {"type": "string"}},
                            },
                        },
                    },
                },
            },
        }
    },
}


def unknown_fields(value: Any, kind: str, where: str) -> list[str]:
    """Fields of a built-in object that Kubernetes' API does not have, and values of another type than its own."""
    if value is None:
        return [f"{where}: null"]
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [bad for index, one in enumerate(value) for bad in unknown_fields(one, match[1], f"{where}[{index}]")]
    if match := re.fullmatch(r"[Dd]ict[(\[]str, (.+)[)\]]", kind):
        if not isinstance(value, dict):
            return [f"{where}: no map"]
        return [bad for key, one in value.items() for bad in unknown_fields(one, match[1], f"{where}.{key}")]
    if kind in ("object", "datetime"):
        return []
    plain = {"str": str, "int": int, "bool": bool, "float": (int, float)}
    if kind in plain:
        right = isinstance(value, plain[kind]) and not (kind == "int" and isinstance(value, bool))
        return [] if right else [f"{where}: {value!r} is no {kind}"]
    model = getattr(models, kind)
    if not isinstance(value, dict):
        return [f"{where}: no {kind}"]
    names = {spelled: name for name, spelled in model.attribute_map.items()}
    bad = [f"{where}.{key}: no such field" for key in value if key not in names]
    for key in set(value) & set(names):
        bad += unknown_fields(value[key], model.openapi_types[names[key]], f"{where}.{key}")
    return bad


def strict(schema: Any) -> Any:
    """A CRD's structural schema, where what it does not name is an error and not dropped."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items() if key != "format"}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return result


@functools.cache
def validator(kind: str) -> jsonschema.Draft7Validator:
    if kind in OPERATOR:
        spec = {"type": "object", "additionalProperties": False, "properties": OPERATOR[kind]}
        return jsonschema.Draft7Validator({"properties": {"spec": spec}})
    parts = {
        "InferenceService": ("kserve", "crds", "serving.kserve.io_inferenceservices.yaml"),
        "ScaledObject": ("addons", "keda", "crds", "keda.sh_scaledobjects.yaml"),
    }[kind]
    schema = strict(kit_crd(*parts))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


@everything
def test_every_field_is_one_that_the_api_has(values: Doc) -> None:
    for document in render(values):
        kind, name = document["kind"], document["metadata"]["name"]
        if kind in BUILT_IN:
            assert unknown_fields(document, BUILT_IN[kind].__name__, name) == []
        else:
            errors = [f"{error.json_path}: {error.message[:300]}" for error in validator(kind).iter_errors(document)]
            assert errors == [], f"{kind} {name}"


def test_the_check_of_fields_finds_wrong_ones() -> None:
    deployment = next(one for one in render() if one["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    deployment["spec"]["replicas"] = "1"
    found = unknown_fields(deployment, "V1Deployment", "d")
    assert {re.sub(r".*\.", "", one) for one in found} == {"readinessprobe: no such field", "replicas: '1' is no int"}


def test_the_check_against_crds_finds_wrong_fields() -> None:
    service = next(one for one in render({"mode": "inferenceservice"}) if one["kind"] == "InferenceService")
    service["spec"]["predictor"]["replicas"] = 1
    assert "replicas" in next(iter(validator("InferenceService").iter_errors(service))).message


@everything
def test_pods_meet_the_restricted_standard(values: Doc) -> None:
    for name, _, spec in pod_templates(render(values)):
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod.get("runAsUser", 1000) != 0, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        allowed = {"emptyDir", "secret", "configMap", "persistentVolumeClaim", "projected", "downwardAPI"}
        assert all(set(volume) - {"name"} <= allowed for volume in spec["volumes"]), name
        assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume), name
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["readOnlyRootFilesystem"] is True, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, name
            assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}, (
                name
            )


@everything
def test_a_token_is_mounted_only_where_the_api_is_asked(values: Doc) -> None:
    documents = render(values)
    bound = {
        subject["name"]: role["rules"]
        for binding in documents
        if binding["kind"] == "RoleBinding"
        for subject in binding["subjects"]
        for role in documents
        if role["kind"] == "Role" and role["metadata"]["name"] == binding["roleRef"]["name"]
    }
    reviews = {
        subject["name"]: binding["roleRef"]["name"]
        for binding in documents
        if binding["kind"] == "ClusterRoleBinding"
        for subject in binding["subjects"]
    }
    assert set(reviews.values()) <= {"system:auth-delegator"}
    for name, labels, spec in pod_templates(documents):
        account = spec.get("serviceAccountName", "")
        rights = bound.get(account, [])
        assert spec["automountServiceAccountToken"] is (bool(rights) or account in reviews), name
        component = labels["app.kubernetes.io/component"]
        verbs = {"predictor": ["patch"], "scaler": ["list", "watch"]}.get(component)
        assert rights in ([], [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}]), name
        assert spec["enableServiceLinks"] is False, name
    for account in (one for one in documents if one["kind"] == "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def selectors(document: Doc) -> list[Doc]:
    """Every label selector in an object that is to find pods of this release."""
    spec = document.get("spec", {})
    kind = document["kind"]
    if kind == "Service":
        return [spec["selector"]]
    if kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        found = [spec["selector"]["matchLabels"]]
        pod = spec.get("template", {}).get("spec", {})
        return found + [one["labelSelector"]["matchLabels"] for one in pod.get("topologySpreadConstraints", [])]
    return [spec["podSelector"]["matchLabels"]] if kind == "NetworkPolicy" else []


@everything
def test_selectors_find_the_pods_of_one_component_each(values: Doc) -> None:
    documents = render(values)
    pods = [(name, labels) for name, labels, _ in pod_templates(documents)]
    for document in documents:
        for selector in selectors(document):
            found = [name for name, labels in pods if selector.items() <= labels.items()]
            assert len(found) == 1, (document["kind"], document["metadata"]["name"], selector, found)


@everything
def test_ports_probes_and_services_agree(values: Doc) -> None:
    documents = render(values)
    for name, labels, spec in pod_templates(documents):
        container = spec["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(probe, {}).get("httpGet", {}).get("port")
            assert asked is None or asked in ports or asked in ports.values(), (name, probe)
        for service in documents:
            if service["kind"] == "Service" and service["spec"]["selector"].items() <= labels.items():
                targets = {port["targetPort"] for port in service["spec"]["ports"]}
                assert targets <= set(ports) | set(ports.values()), (name, service["metadata"]["name"])


@everything
def test_names_and_namespaces(values: Doc) -> None:
    seen = set()
    for document in render(values):
        key = (document["kind"], document["metadata"]["name"])
        assert key not in seen
        seen.add(key)
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", key[1]), key
        assert "namespace" not in document["metadata"], key
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "chat", key


def test_long_names_leave_room_for_suffixes() -> None:
    values = {"autoscaling": {"type": "keda", "minReplicas": 0}, "scaler": {"activator": {"enabled": True}}}
    for document in render(values, release="a" * 53):
        assert len(document["metadata"]["name"]) <= 53, document["metadata"]["name"]


def test_lint_is_strict_and_silent() -> None:
    done = run_helm("lint", "--strict", "--quiet", "--kube-version", KUBE_VERSION, "--namespace", NAMESPACE, str(CHART))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_but_the_chart_is_packed(tmp_path: Any) -> None:
    import tarfile

    done = run_helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        "Chart.yaml",
        "README.md",
        ".helmignore",
        "values.yaml",
        "values.schema.json",
        "files/check.py",
        "files/wait.py",
    }
    assert {name for name in names if not name.startswith("templates/")} == expected | {"dashboards/carousel.json"}

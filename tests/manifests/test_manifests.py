"""The manifests as built: what each pod must have, and that what belongs together says the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.manifests.kustomized import MANIFESTS, ROOT, Object, build, containers, folders, pod_spec, read

from carousel.cluster.scaler_grpc import read_metadata
from carousel.cluster.scaler_options import load_options
from carousel.config import load_settings

FOLDERS = folders()
BUILT = {**{name: build(MANIFESTS / name) for name in FOLDERS}, "example": read(MANIFESTS / "example.yaml")}
WORKLOADS = [
    pytest.param(name, item, id=f"{name}-{item['kind']}-{item['metadata']['name']}")
    for name, items in BUILT.items()
    for item in items
    if pod_spec(item) is not None
]
SERVERS = [param for param in WORKLOADS if param.values[1]["metadata"]["name"] != "carousel-scaler"]
MARGIN = 15
"""Seconds that the end takes at worst: engine 3 + 5, answers on their way 5, and 2 to spare."""
RUNTIME = read(MANIFESTS / "runtimes/clusterservingruntime.yaml")[0]


def variables(item: Object) -> dict[str, str]:
    (container,) = containers(item) or containers(RUNTIME)  # with `model:` they are the runtime's
    return {entry["name"]: entry["value"] for entry in container.get("env", []) if "value" in entry}


def is_knative(item: Object) -> bool:
    annotations = item["metadata"].get("annotations", {})
    return annotations.get("serving.kserve.io/deploymentMode") == "Knative"


def test_there_is_a_manifest_for_each_way() -> None:
    ways = {"cpu", "gpu", "mig", "knative", "hpa", "keda-prometheus", "keda-metrics-api", "keda-external"}
    assert {f"overlays/{way}" for way in ways} <= set(FOLDERS)
    assert {"base", "kubernetes", "runtimes", "runtimes/pvc", "runtimes/hf", "runtimes/s3"} <= set(FOLDERS)


def test_every_file_is_used() -> None:
    named = {MANIFESTS / "example.yaml"}
    for path in MANIFESTS.rglob("kustomization.yaml"):
        spec = yaml.safe_load(path.read_text("utf-8"))
        entries = spec.get("resources", []) + spec.get("components", [])
        entries += [patch["path"] for patch in spec.get("patches", []) if "path" in patch]
        named |= {path, *((path.parent / entry).resolve() for entry in entries)}
    files = set(MANIFESTS.rglob("*.yaml"))
    assert files <= named
    components = {path.parent for path in files if path.parent.parent.name == "components"}
    assert components <= named, "a component that no overlay uses is tested by nobody"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl in PATH")
@pytest.mark.parametrize("name", FOLDERS)
def test_kustomize_says_the_same(name: str) -> None:
    done = subprocess.run(["kubectl", "kustomize", MANIFESTS / name], capture_output=True, text=True, check=True)
    theirs = [item for item in yaml.safe_load_all(done.stdout) if item]
    assert sorted(theirs, key=repr_of) == sorted(BUILT[name], key=repr_of)


def repr_of(item: Object) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


@pytest.mark.parametrize(("name", "item"), SERVERS)
def test_grace_is_delay_and_drain_and_margin(name: str, item: Object) -> None:
    settings = load_settings([], {key: value for key, value in variables(item).items() if key.startswith("CAROUSEL_")})
    spec = pod_spec(item)
    assert spec is not None
    if item["kind"] == "ClusterServingRuntime":
        assert "terminationGracePeriodSeconds" not in spec  # the API refuses it there
        return
    longest = settings.shutdown_delay_seconds + settings.drain_seconds
    if is_knative(item):
        assert spec["timeout"] >= longest + MARGIN
        assert "terminationGracePeriodSeconds" not in spec
        return
    assert settings.shutdown_delay_seconds >= 5
    assert spec["terminationGracePeriodSeconds"] == longest + MARGIN
    assert not any("lifecycle" in container for container in containers(item))  # the delay does more than a preStop


@pytest.mark.parametrize(("name", "item"), WORKLOADS)
def test_pods_pass_restricted_pod_security(name: str, item: Object) -> None:
    spec = pod_spec(item)
    assert spec is not None
    pod = spec.get("securityContext", {})
    if item["kind"] != "ClusterServingRuntime" and not is_knative(item):
        assert pod["runAsNonRoot"] is True
        assert (pod["runAsUser"], pod["runAsGroup"]) == (1000, 1000)
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(item):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        if is_knative(item):
            assert own["runAsNonRoot"] is True
            assert own["seccompProfile"] == {"type": "RuntimeDefault"}
    kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)


@pytest.mark.parametrize(("name", "item"), WORKLOADS)
def test_a_token_is_mounted_only_for_who_talks_to_the_api(name: str, item: Object) -> None:
    spec = pod_spec(item)
    assert spec is not None
    talks = item["metadata"]["name"] == "carousel-scaler" or "CAROUSEL_POD_DELETION_COST" in variables(item)
    if not is_knative(item) and item["kind"] != "ClusterServingRuntime":
        assert spec.get("automountServiceAccountToken", True) is talks


@pytest.mark.parametrize(("name", "item"), WORKLOADS)
def test_containers_have_image_resources_probes_and_a_place_to_write(name: str, item: Object) -> None:
    spec = pod_spec(item)
    assert spec is not None
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for container in containers(item):
        assert re.fullmatch(r"carousel:(cpu|cuda|demo)", container["image"])
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][kind]), "KServe fills in what is missing"
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"] or (
            name in ("example", "overlays/keda-external")
        )
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert "emptyDir" in volumes[mounts["/tmp"]]
        assert set(mounts.values()) <= set(volumes)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            port = container[probe]["httpGet"]["port"]
            assert ports.get(port, port) in ports.values()


@pytest.mark.parametrize(("name", "item"), SERVERS)
def test_probes_ask_what_they_are_for(name: str, item: Object) -> None:
    for container in containers(item):
        asked = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
        assert asked == {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}
        ports = container["ports"]
        assert ports[0]["containerPort"] == 8080, "KServe's Service leads to the first port"
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 120


@pytest.mark.parametrize(("name", "item"), SERVERS)
def test_variables_are_settings(name: str, item: Object) -> None:
    load_settings([], {key: value for key, value in variables(item).items() if key.startswith("CAROUSEL_")})


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("overlays/")])
def test_selectors_find_the_pods(name: str) -> None:
    """KServe labels pods with the InferenceService's name; its Deployment is NAME-predictor."""
    (service,) = [item for item in BUILT[name] if item["kind"] == "InferenceService"]
    own = {"serving.kserve.io/inferenceservice": service["metadata"]["name"]}
    for item in BUILT[name]:
        spec = item.get("spec", {})
        if item["kind"] in ("PodDisruptionBudget", "PodMonitor", "ServiceMonitor"):
            assert spec["selector"]["matchLabels"] == own
        if item["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"] == own
        if item["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = spec["scaleTargetRef"]
            assert (target["kind"], target["name"]) == ("Deployment", f"{service['metadata']['name']}-predictor")
            assert service["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"] == "external"
            assert "minReplicas" not in service["spec"]["predictor"]


def test_scalers_read_metrics_that_there_are() -> None:
    text = (ROOT / "predictor/carousel/telemetry/metrics.py").read_text("utf-8")
    for path in MANIFESTS.rglob("components/**/*.yaml"):
        # An External metric is named by its adapter's rule: test_thresholds.py.
        for metric in set(re.findall(r"\bcarousel_(\w+)", path.read_text("utf-8"))) - {"demand_seconds"}:
            assert f'"{metric}"' in text, f"{path}: there is no metric carousel_{metric}"


def test_the_external_scaler_understands_its_trigger_and_flags() -> None:
    built = BUILT["overlays/keda-external"]
    (scaled,) = [item for item in built if item["kind"] == "ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    (deployment,) = [item for item in built if item["kind"] == "Deployment"]
    (container,) = containers(deployment)
    options, _ = load_options(container["args"], variables(deployment))
    read_metadata(trigger["metadata"], options.targets)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert trigger["metadata"]["scalerAddress"].endswith(f":{options.scaler_port}")
    assert ports == {"grpc": options.scaler_port, "http": options.admin_port}
    (role,) = [item for item in built if item["kind"] == "Role"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]


def test_deletion_cost_may_patch_pods_and_no_more() -> None:
    (role,) = [item for item in BUILT["overlays/deletion-cost"] if item["kind"] == "Role"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]


def test_the_runtime_leaves_to_predictors_what_a_runtime_cannot_say() -> None:
    """KServe takes of a runtime's pod only some fields, and refuses others."""
    spec = RUNTIME["spec"]
    assert not {"securityContext", "serviceAccountName", "terminationGracePeriodSeconds"} & set(spec)
    assert {"v2"} <= set(spec["protocolVersions"])
    for name in ("pvc", "hf", "s3"):
        (service,) = BUILT[f"runtimes/{name}"]
        model = service["spec"]["predictor"]["model"]
        assert model["runtime"] == RUNTIME["metadata"]["name"]
        assert model["protocolVersion"] == "v2"
        assert model["storageUri"].startswith(f"{name}://")
        assert model["modelFormat"]["name"] in {known["name"] for known in spec["supportedModelFormats"]}


def test_readme_applies_the_example() -> None:
    assert "kubectl apply -f manifests/example.yaml" in (ROOT / "README.md").read_text("utf-8")
    (service,) = BUILT["example"]
    assert containers(service)[0]["image"] == "carousel:demo"


def test_paths_in_the_manifests_readme_exist() -> None:
    text = (MANIFESTS / "README.md").read_text("utf-8")
    for path in re.findall(r"`((?:base|overlays|components|runtimes|kubernetes|example)[\w./-]*)`", text):
        assert Path(MANIFESTS / path).exists(), path
    assert {name for name in FOLDERS if name.startswith("overlays/")} <= set(re.findall(r"`(overlays/[\w-]+)`", text))

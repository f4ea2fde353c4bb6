"""Helm and promtool for the tests of the chart, and what every rendered chart must be.

A program is looked for in $HELM / $PROMTOOL, in PATH, in the bin folder of a running kit ($CLUSTER_HOME) and, for helm,
in the kit's own archive (shared/cluster beside the repository, or $CAROUSEL_KIT), which is unpacked into build/.
"""

from __future__ import annotations

import functools
import json
import lzma
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "carousel"
KIT = Path(os.environ.get("CAROUSEL_KIT", ROOT.parent / "shared" / "cluster"))
KUBE_VERSION = "1.34.0"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times as fast
RELEASE, NAMESPACE = "chat", "models"

Doc = dict[str, Any]


def _found(name: str) -> str | None:
    home = Path(os.environ.get("CLUSTER_HOME", Path("/tmp") / "carousel-cluster"))
    for candidate in (os.environ.get(name.upper()), shutil.which(name), str(home / "bin" / name)):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


@functools.cache
def helm() -> str:
    """The path of helm; skips the test when there is none."""
    found = _found("helm")
    archive, unpacked = KIT / "bin" / "helm.xz", ROOT / "build" / "kit" / "helm"
    if found is None and not unpacked.exists() and archive.exists():
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        partial = unpacked.with_suffix(f".{os.getpid()}.tmp")
        with lzma.open(archive) as packed, partial.open("wb") as out:
            shutil.copyfileobj(packed, out, 2**20)
        partial.chmod(0o755)
        partial.replace(unpacked)
    if found is None and unpacked.exists():
        found = str(unpacked)
    if found is None:
        pytest.skip("no helm: put helm 3.14 or newer into PATH or $HELM, or $CAROUSEL_KIT to where the cluster kit is")
    return found


@functools.cache
def promtool() -> str:
    """The path of promtool; skips the test when there is none."""
    found = _found("promtool")
    if found is None:
        pytest.skip("no promtool: put it into PATH or $PROMTOOL, or run addons/prometheus-up of the cluster kit")
    return found


def prometheus() -> str:
    """The path of Prometheus; skips the test when there is none."""
    found = _found("prometheus")
    if found is None:
        pytest.skip("no prometheus: put it into PATH or $PROMETHEUS, or run addons/prometheus-up of the cluster kit")
    return found


def kit_crd(*parts: str) -> Doc:
    """The structural schema of a CRD of the kit; skips the test when the kit is not there."""
    path = KIT.joinpath(*parts)
    if not path.exists():
        pytest.skip("no cluster kit: $CAROUSEL_KIT says where it is")
    versions = yaml.load(path.read_text("utf-8"), LOADER)["spec"]["versions"]
    schema: Doc = next(version for version in versions if version["storage"])["schema"]["openAPIV3Schema"]
    return schema


def run_helm(*arguments: str, values: str = "", seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helm(), *arguments], input=values, capture_output=True, text=True, check=False, timeout=seconds
    )


@functools.cache
def _template(release: str, values: str) -> subprocess.CompletedProcess[str]:
    arguments = ("--namespace", NAMESPACE, "--kube-version", KUBE_VERSION, "--values", "-")
    return run_helm("template", release, str(CHART), *arguments, values=values)


@functools.cache
def _rendered(release: str, values: str) -> bytes:
    done = _template(release, values)
    assert done.returncode == 0, done.stderr
    return pickle.dumps([document for document in yaml.load_all(done.stdout, LOADER) if document])


def render(values: Doc | None = None, release: str = RELEASE) -> list[Doc]:
    """The objects that these values give."""
    # Copies: a test may change what it gets.
    documents: list[Doc] = pickle.loads(_rendered(release, json.dumps(values or {})))  # noqa: S301  (our own, see below)
    return documents


def refusal(values: Doc) -> str:
    """What is said against these values, which must be refused."""
    done = _template(RELEASE, json.dumps(values))
    assert done.returncode != 0, f"accepted: {values}"
    return done.stderr


def nested(path: str, value: Any) -> Doc:
    """``("a.b", 1) -> {"a": {"b": 1}}``"""
    for part in reversed(path.split(".")):
        value = {part: value}
    result: Doc = value
    return result


def merged(*values: Doc) -> Doc:
    """Deep; later ones win."""
    result: Doc = {}
    for one in values:
        for key, value in one.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def the(documents: list[Doc], kind: str, name: str = "") -> Doc:
    """The one object of a kind (and name)."""
    found = [one for one in documents if one["kind"] == kind and (not name or one["metadata"]["name"] == name)]
    names = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(found) == 1, f"{len(found)} of {kind} {name} in {names}"
    return found[0]


def kinds(documents: list[Doc]) -> set[str]:
    return {one["kind"] for one in documents}


def pod_templates(documents: list[Doc]) -> Iterator[tuple[str, Doc, Doc]]:
    """(name, labels, pod spec) of everything that becomes pods."""
    for one in documents:
        name, spec = f"{one['kind']}/{one['metadata']['name']}", one.get("spec", {})
        if one["kind"] in ("Deployment", "Job"):
            yield name, spec["template"]["metadata"]["labels"], spec["template"]["spec"]
        elif one["kind"] == "Pod":
            yield name, one["metadata"]["labels"], spec
        elif one["kind"] == "InferenceService":
            yield name, one["metadata"]["labels"], spec["predictor"]


def predictor(documents: list[Doc]) -> Doc:
    """The pod spec of the server."""
    found = [
        spec for _, labels, spec in pod_templates(documents) if labels["app.kubernetes.io/component"] == "predictor"
    ]
    assert len(found) == 1
    return found[0]


def env_of(container: Doc) -> dict[str, Any]:
    """Name -> value, or the reference that gives it."""
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names)), f"twice: {names}"
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def args_of(documents: list[Doc]) -> list[str]:
    """The flags of the scaler."""
    spec = the(documents, "Deployment", f"{RELEASE}-carousel-scaler")["spec"]["template"]["spec"]
    arguments: list[str] = spec["containers"][0]["args"]
    return arguments

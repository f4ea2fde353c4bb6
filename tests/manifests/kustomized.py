"""As much of kustomize as manifests/ uses, so that its checks need no binary; where kubectl is, both must agree."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
_KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "images", "labels"}


def folders() -> list[str]:
    """Every folder of manifests/ that is built by itself: those with a Kustomization."""
    paths = sorted(MANIFESTS.rglob("kustomization.yaml"))
    alone = [path for path in paths if yaml.safe_load(path.read_text("utf-8"))["kind"] == "Kustomization"]
    return [str(path.parent.relative_to(MANIFESTS)) for path in alone]


def build(folder: Path) -> list[Object]:
    """The objects of a Kustomization.

    Raises:
        ValueError: for a field that this does not know, or a patch that fits nothing.
    """
    return _with(folder, [])


def _with(folder: Path, objects: list[Object]) -> list[Object]:
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    if unknown := set(spec) - _KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} is not known here")
    for name in spec.get("resources", []):
        path = folder / name
        objects = objects + (build(path) if path.is_dir() else read(path))
    for name in spec.get("components", []):
        objects = _with(folder / name, objects)
    for patch in spec.get("patches", []):
        text = patch.get("patch") or (folder / patch["path"]).read_text("utf-8")
        fitting = [item for item in objects if item["kind"] == patch["target"]["kind"]]
        if not fitting:
            raise ValueError(f"{folder}: a patch of {patch['target']} fits nothing")
        for item in fitting:
            for operation in yaml.safe_load(text):
                apply(item, operation)
    for image in spec.get("images", []):
        for container in (container for item in objects for container in containers(item)):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    for label in spec.get("labels", []):
        for item in objects:
            item["metadata"].setdefault("labels", {}).update(label["pairs"])
    return objects


def read(path: Path) -> list[Object]:
    return [item for item in yaml.safe_load_all(path.read_text("utf-8")) if item]


def apply(item: Object, operation: dict[str, Any]) -> None:
    """One operation of a JSON patch."""
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].strip("/").split("/")]
    place: Any = item
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    value, kind = copy.deepcopy(operation.get("value")), operation["op"]
    if isinstance(place, list):
        if kind == "add":
            place.insert(len(place) if last == "-" else int(last), value)
        elif kind == "replace":
            place[int(last)] = value
        else:
            del place[int(last)]
        return
    if kind in ("replace", "remove") and last not in place:
        raise ValueError(f"{operation['op']} {operation['path']}: there is no such field")
    if kind == "remove":
        del place[last]
    else:
        place[last] = value


def pod_spec(item: Object) -> Object | None:
    """The pod spec in a workload, an InferenceService or a runtime; None for other kinds."""
    spec = item.get("spec", {})
    found = {
        "Deployment": lambda: spec["template"]["spec"],
        "InferenceService": lambda: spec["predictor"],
        "ClusterServingRuntime": lambda: spec,
    }.get(item["kind"])
    return found() if found else None


def containers(item: Object) -> list[Object]:
    return list((pod_spec(item) or {}).get("containers", []))

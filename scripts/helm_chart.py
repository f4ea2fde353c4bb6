"""Write what follows from helm/carousel/values.yaml and the code: the chart's schema, README table and dashboard.

`--check` only compares. In values.yaml, `# --` above a key begins its description; `# @schema` adds to the JSON schema
that its default implies: a flow mapping of keywords, or one of the words `settings`, `scaler` (every setting of
`carousel serve` and of `carousel scaler`) and `quantity` (of Kubernetes).
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carousel.options import Option

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "carousel"
BEGIN = "<!-- values: make chart writes this table -->"
END = "<!-- /values -->"

_QUANTITY = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|[MGTPE]i?|Ki)?$"}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
#: Helm reads numbers as floats: whole ones above this arrive as others.
_EXACT = 2**53
#: Of `carousel scaler`, what the chart says itself.
_SCALER_FIXED = frozenset(
    {
        "pod_selector", "pod_dns", "pod_namespace", "pod_port", "pod_tls_ca", "scale_on", "target_wait_seconds",
        "target_occupancy", "target_requests", "target_tokens", "activator_port", "peers_dns", "host", "scaler_port",
        "admin_port",
    }
)  # fmt: skip


class BadValues(ValueError):
    """values.yaml lacks something; the message names the key."""


@dataclass(frozen=True)
class Value:
    """One key of values.yaml. ``schema`` is complete but for what stands below it."""

    path: tuple[str, ...]
    default: Any
    description: str
    schema: dict[str, Any]

    @property
    def key(self) -> str:
        return ".".join(self.path)


def _comment(lines: list[str], row: int) -> tuple[str, str]:
    """Description and schema text out of the comment lines right above a row."""
    block: list[str] = []
    while row > 0 and lines[row - 1].strip().startswith("#"):
        row -= 1
        block.insert(0, lines[row].strip().removeprefix("#").strip())
    starts = [index for index, line in enumerate(block) if line.startswith("--")]
    if not starts:
        return "", ""
    block = block[starts[-1] :]
    schema = [line.removeprefix("@schema").strip() for line in block if line.startswith("@schema")]
    text = [line for line in block if not line.startswith("@schema")]
    return " ".join(text).removeprefix("--").strip(), " ".join(schema)


def read_values(text: str) -> list[Value]:
    """Every key with a description, parents before children.

    Raises:
        BadValues: a leaf has no description, or an empty map no schema.
    """
    import yaml

    lines = text.splitlines()
    found: list[Value] = []

    def walk(node: yaml.MappingNode, path: tuple[str, ...], defaults: dict[str, Any]) -> None:
        for key, child in node.value:
            here, default = (*path, key.value), defaults[key.value]
            description, schema_text = _comment(lines, key.start_mark.line)
            schema = _declared(schema_text, default, ".".join(here))
            branch = isinstance(default, dict) and default and not schema_text
            if not branch and not description:
                raise BadValues(f"values.yaml: {'.'.join(here)} has no description (# -- ...)")
            found.append(Value(here, default, description, schema))
            if branch:
                walk(child, here, default)

    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise BadValues("values.yaml holds no map")
    walk(root, (), yaml.safe_load(text))
    return found


def _declared(text: str, default: Any, key: str) -> dict[str, Any]:
    import yaml

    if text == "settings":
        from carousel.config import declared_settings

        return settings_schema(declared_settings())
    if text == "scaler":
        from carousel.cluster.scaler_options import ScalerOptions
        from carousel.options import options_of

        return settings_schema([item for item in options_of(ScalerOptions) if item.name not in _SCALER_FIXED])
    added = dict(_QUANTITY) if text == "quantity" else yaml.safe_load(text) if text else {}
    if default in ({}, []) and not added:
        raise BadValues(f"values.yaml: {key} is empty, so its # @schema must say what may be in it")
    implied: dict[str, Any] = {} if {"type", "enum"} & set(added) else {"type": _TYPES[type(default)]}
    if implied.get("type") == "object":
        implied["additionalProperties"] = False
    return {**implied, **added}


def settings_schema(options: list[Option]) -> dict[str, Any]:
    """An object with one property for each option, and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {item.name: option_schema(item) for item in options},
    }


def option_schema(item: Option) -> dict[str, Any]:
    """What YAML may say for an option; what is null is left at its default."""
    from carousel.options import with_unit

    described = {"description": f"{item.help} Allowed: {with_unit(item)}. Default: {item.shown_default}."}
    bounds: dict[str, Any] = {
        name: bound for name, bound in (("minimum", item.low), ("maximum", item.high)) if bound is not None
    }
    if item.zero and item.low:
        bounds = {"minimum": 0, "maximum": item.high, "if": {"not": {"const": 0}}, "then": {"minimum": item.low}}
    kind = item.kind.name
    if item.choices:
        return {**described, "enum": list(item.choices)}
    if kind == "switch":
        return {**described, "type": "boolean"}
    if kind in ("integer", "number"):
        if bounds.get("maximum", 0) > _EXACT:
            bounds["maximum"] = _EXACT
        return {**described, "type": kind, **bounds}
    if kind == "size":
        return {
            **described,
            "type": ["integer", "string"],
            **bounds,
            "pattern": r"^\d+(\.\d+)?\s*([kKmMgGtT]i?)?[bB]?$",
        }
    if kind == "size or fraction":
        fraction, size = {"maximum": 0.95}, {"minimum": 2**20, "multipleOf": 1}
        text = r"^(0?\.\d+|\d+(\.\d+)?\s*([kKmMgGtT]i?)?[bB]?)$"
        return {
            **described, "type": ["number", "string"], "exclusiveMinimum": 0, "pattern": text,
            "anyOf": [{"type": "string"}, fraction, size],
        }  # fmt: skip
    if kind == "weights":
        return {**described, "type": "object", "additionalProperties": {"type": "number", **bounds}}
    if kind != "text":
        raise BadValues(f"{item.name}: no schema is known for kind {kind!r}")
    empty = "|" if item.empty else ""
    return {**described, "type": "string", **({"pattern": f"^({empty}{item.pattern})$"} if item.pattern else {})}


def schema_of(values: list[Value]) -> dict[str, Any]:
    """The JSON schema (draft 7, as Helm takes it) of all values."""
    root: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Carousel chart",
        "type": "object",
        "additionalProperties": False,
        "properties": {"global": {"description": "Of a parent chart; not read.", "type": "object"}},
    }
    for value in values:
        parent = root
        for part in value.path[:-1]:
            parent = parent["properties"][part]
        node = {**({"description": value.description} if value.description else {}), **value.schema}
        if value.default not in (None, {}, []) and not isinstance(value.default, dict):
            node["default"] = value.default
        parent.setdefault("properties", {})[value.path[-1]] = node
    return root


def _allowed(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    text = " or ".join(kind for kind in kinds if kind != "null")
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None:
        text += f" above {low:g}" if "exclusiveMinimum" in schema else f" from {low:g}"
    if high is not None:
        text += f" below {high:g}" if "exclusiveMaximum" in schema else f" to {high:g}"
    return text


def _shown(default: Any) -> str:
    text = json.dumps(default)
    return "see values.yaml" if len(text) > 60 else f"`{text}`" if default not in (None, "") else "–"


def table_of(values: list[Value]) -> str:
    """A markdown table of all leaves."""
    rows = ["| value | allowed | default | meaning |", "|---|---|---|---|"]
    for value in values:
        if value.description:
            cells = (f"`{value.key}`", _allowed(value.schema), _shown(value.default), value.description)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def with_table(text: str, table: str) -> str:
    """The README's text with this table between the markers.

    Raises:
        BadValues: the markers are not there, once each and in order.
    """
    match = re.fullmatch(f"(.*{re.escape(BEGIN)}\n).*(\n{re.escape(END)}.*)", text, re.DOTALL)
    if match is None or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BadValues(f"helm/carousel/README.md must hold {BEGIN} and, behind it, {END}, once each")
    return f"{match[1]}\n{table}\n{match[2]}"


def wanted() -> dict[Path, str]:
    """Path -> text of every file that is made here."""
    if (here := str(Path(__file__).parent)) not in sys.path:
        sys.path.append(here)  # when this is imported, and not run
    import helm_dashboard

    values = read_values((CHART / "values.yaml").read_text("utf-8"))
    readme = CHART / "README.md"
    return {
        CHART / "values.schema.json": json.dumps(schema_of(values), indent=1, ensure_ascii=False) + "\n",
        readme: with_table(readme.read_text("utf-8"), table_of(values)),
        CHART / "dashboards" / "carousel.json": json.dumps(helm_dashboard.dashboard(), indent=1) + "\n",
    }


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    code = 0
    for path, text in wanted().items():
        if path.exists() and path.read_text("utf-8") == text:
            continue
        shown = path.relative_to(ROOT)
        if "--check" in argv:
            print(f"{shown}: not what values.yaml and the code say: make chart", file=sys.stderr)
            code = 1
        else:
            path.write_text(text, "utf-8")
            print(f"{shown}: refreshed")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``/docs``: the OpenAPI document as one page of plain HTML. It loads nothing, so that it works inside a cluster."""

from __future__ import annotations

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
nav a { margin-right: 1rem } h2 { border-bottom: 1px solid #ccc; margin-top: 2.5rem }
details { border: 1px solid #ddd; border-radius: 4px; margin: .4rem 0; padding: .3rem .8rem }
summary { cursor: pointer } code, pre { font: 14px/1.4 ui-monospace, monospace }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; white-space: pre-wrap }
.method { display: inline-block; width: 3.5rem; font-weight: bold } .GET { color: #06643c } .POST { color: #0b4f9e }
table { border-collapse: collapse } td, th { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top }
"""


def _schema_text(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A schema in a few words: its type and bounds."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#schema-{escape(name)}">{escape(name)}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema and "type" not in schema:
            return " or ".join(_schema_text(item, schemas) for item in schema[key])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = schema.get("type", "anything")
    kinds = [kind] if isinstance(kind, str) else list(kind)
    words = " or ".join(kinds)
    if "items" in schema:
        words += f" of {_schema_text(schema['items'], schemas)}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        words += f", {'' if low is None else low} to {'' if high is None else high}"
    return words


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    rows = []
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        mark = " (required)" if name in required else ""
        says = escape(field.get("description", ""))
        rows.append(
            f"<tr><td><code>{escape(name)}</code>{mark}</td><td>{_schema_text(field, schemas)}</td><td>{says}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>" if rows else f"<p>{_schema_text(schema, schemas)}</p>"


def _call(method: str, path: str, operation: dict[str, Any]) -> str:
    """The operation as a curl command."""
    for parameter in operation.get("parameters", ()):
        path = path.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
    command = f"curl -s http://127.0.0.1:8080{path}"
    if method == "GET":
        return command
    media = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if media is None:
        return f"{command} -X POST"
    body = json.dumps(media.get("example", {}), indent=2)
    return f"{command} -H 'content-type: application/json' -d '{body}'"


def _payload(schema: dict[str, Any]) -> dict[str, Any]:
    """What an answer of this schema holds: for server-sent events, what their data is."""
    data: dict[str, Any] = schema.get("properties", {}).get("data", {})
    for part in (data, *data.get("anyOf", ())):
        if "contentSchema" in part:
            content: dict[str, Any] = part["contentSchema"]
            return content
    return schema


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [f"<pre>{escape(_call(method, path, operation))}</pre>"]
    media = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if media is not None:
        parts.append(f"<p>Body: {_schema_text(media['schema'], schemas)}</p>")
    rows = []
    for status, answer in operation["responses"].items():
        kinds = [
            f"{escape(kind)}: {_schema_text(_payload(content['schema']), schemas)}"
            for kind, content in answer.get("content", {}).items()
        ]
        rows.append(f"<tr><td>{status}</td><td>{escape(answer['description'])}</td><td>{'<br>'.join(kinds)}</td></tr>")
    parts.append(f"<table>{''.join(rows)}</table>")
    title = f'<span class="method {method}">{method}</span> <code>{escape(path)}</code> {escape(operation["summary"])}'
    return f"<details><summary>{title}</summary>{''.join(parts)}</details>"


def render(document: dict[str, Any]) -> str:
    """The page."""
    schemas = document["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = operation["tags"][0]
            groups.setdefault(tag, []).append(_operation(method.upper(), path, operation, schemas))
    links = "".join(f'<a href="#{escape(tag)}">{escape(tag)}</a>' for tag in [*groups, "Schemas"])
    sections = "".join(f'<h2 id="{escape(tag)}">{escape(tag)}</h2>{"".join(items)}' for tag, items in groups.items())
    bodies = "".join(
        f'<h3 id="schema-{escape(name)}">{escape(name)}</h3>{_fields(schema, schemas)}'
        for name, schema in schemas.items()
    )
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} "
        'The same as JSON: <a href="/openapi.json">/openapi.json</a>.</p>'
        f'<nav>{links}</nav>{sections}<h2 id="Schemas">Schemas</h2>{bodies}</body></html>'
    )

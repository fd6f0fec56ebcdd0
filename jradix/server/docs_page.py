"""/docs: the schema of the routes as a page of plain HTML. It loads nothing, so that it works on machines offline."""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_HEAD = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>jradix</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark }
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere }
h2 { margin-top: 2em } table { margin-bottom: 1em } code { font-size: 95% }
td { padding-right: 1.5em; vertical-align: top } td:first-child { white-space: nowrap }
</style></head><body><h1>jradix</h1>
<p>What programs read: <a href="openapi.json">openapi.json</a>.</p>
"""


def docs_page(schema: Mapping[str, Any]) -> str:
    """A page with each operation of an OpenAPI schema: its body's fields and its answers."""
    parts = [_HEAD]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts += _body(schema, operation)
            parts += _table([(status, answer["description"]) for status, answer in operation["responses"].items()])
    return "".join([*parts, "</body></html>"])


def _body(schema: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[str]:
    if "requestBody" not in operation:
        return
    body = _resolved(schema, operation["requestBody"]["content"]["application/json"]["schema"])
    yield f"<p>{_text(body.get('description', ''))}</p>"
    yield from _table([(name, _kind(schema, field)) for name, field in body["properties"].items()])


def _table(rows: list[tuple[str, str]]) -> Iterator[str]:
    yield "<table>"
    for name, meaning in rows:
        yield f"<tr><td><code>{escape(name)}</code></td><td>{_text(meaning)}</td></tr>"
    yield "</table>"


def _text(text: str) -> str:
    """As HTML, with what stands in backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _kind(schema: Mapping[str, Any], field: Mapping[str, Any]) -> str:
    """A field's type in words."""
    field = _resolved(schema, field)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(schema, choice) for choice in field["anyOf"]))
    if "enum" in field:
        return " or ".join(repr(value) for value in field["enum"])
    if field.get("type") == "array":
        return f"list of ({_kind(schema, field.get('items', {}))})"
    if field.get("properties"):
        return f"object of {', '.join(field['properties'])}"
    return field.get("type", "anything")


def _resolved(schema: Mapping[str, Any], field: Mapping[str, Any]) -> Mapping[str, Any]:
    name = field.get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else field

"""`/docs`: the OpenAPI document as one page of HTML. No script, and nothing from elsewhere."""

from functools import cache
from html import escape
from re import sub
from typing import Any

from diptych_gateway.doors.openapi import described

HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1e21; background: #fff }
code, pre { font: 14px/1.45 ui-monospace, monospace } h2 { margin-top: 2.5rem }
details { border: 1px solid #d8dce1; border-radius: 6px; margin: .5rem 0; padding: .5rem .8rem }
summary { cursor: pointer } summary b { display: inline-block; min-width: 4.5rem; color: #0b5cad }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td { border-top: 1px solid #e6e9ec; padding: .25rem .5rem; vertical-align: top }
@media (prefers-color-scheme: dark) { body { color: #e3e6ea; background: #16181b }
  details, td { border-color: #33383f } a, summary b { color: #7db7f5 } }
"""


@cache
def page() -> bytes:
    """The page."""
    spec = described()
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(spec['info']['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(spec['info']['title'])}</h1>{_prose(spec['info']['description'])}",
        "<p>This page as data: <a href='/openapi.json'><code>/openapi.json</code></a>.</p>",
    ]
    for tag in spec["tags"]:
        parts.append(f"<h2>{escape(tag['name'])}</h2>{_prose(tag['description'])}")
        parts += [
            _operation(method, path, operation, spec)
            for path, methods in spec["paths"].items()
            for method, operation in methods.items()
            if tag["name"] in operation["tags"]
        ]
    parts.append("<h2>Objects</h2>")
    schemas = spec["components"]["schemas"]
    parts += [_object(name, schema) for name, schema in schemas.items()]
    return "".join(parts).encode()


def _prose(text: str) -> str:
    html = sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    html = sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", html)
    return "".join(f"<p>{part}</p>" for part in html.split("\n\n"))


def _operation(method: str, path: str, operation: Any, spec: Any) -> str:
    rows = [
        (parameter["name"], _shape(parameter["schema"]), escape(parameter.get("description", "")))
        for parameter in operation.get("parameters", ())
    ]
    if "requestBody" in operation:
        rows.append(("body", _contents(operation["requestBody"]), ""))
    for status, response in operation["responses"].items():
        name = response.get("$ref", "").rpartition("/")[2]
        found = spec["components"]["responses"][name] if name else response
        rows.append((status, _contents(found), _prose(found["description"])))
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> "
        f"{escape(operation['summary'])}</summary>{_prose(operation['description'])}"
        f"{_table(rows)}</details>"
    )


def _contents(holder: Any) -> str:
    return "<br>".join(
        f"{escape(kind)} {_shape(content['schema'])}" for kind, content in holder["content"].items()
    )


def _object(name: str, schema: Any) -> str:
    needed = schema.get("required", ())
    rows = [
        (field, _shape(shape), "required" if field in needed else "")
        for field, shape in schema.get("properties", {}).items()
    ]
    return f"<details id='{escape(name)}'><summary>{escape(name)}</summary>{_table(rows)}</details>"


def _table(rows: list[tuple[str, str, str]]) -> str:
    cells = (
        f"<tr><td><code>{escape(name)}</code><td>{shape}<td>{says}" for name, shape, says in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _shape(schema: Any) -> str:
    """What a schema allows, in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_shape(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_shape(schema['items'])}"
    return escape(str(schema.get("type", "any")))

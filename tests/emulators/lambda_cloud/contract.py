"""Requests and answers held against Lambda's OpenAPI document, where that lies beside the checkout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SPEC = Path(__file__).parents[3].parent / "shared" / "providers" / "specs" / "lambda-v1.openapi.json"
ABSENT = "Lambda's OpenAPI document does not lie beside this checkout"


def request_errors(method: str, path: str, query: set[str], body: Any) -> list[str]:
    """What a request has that the document does not allow, names that it does not know among that."""
    operation = _operation(method, path)
    if operation is None:
        return []
    known = {told["name"] for told in operation.get("parameters", []) if told["in"] == "query"}
    errors = [f"{method} {path}: unknown query {name}" for name in sorted(query - known)]
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return errors + ([f"{method} {path}: takes no body"] if body is not None else [])
    schema = content["application/json"]["schema"]
    strange = sorted(set(body) - set(schema["properties"])) if isinstance(body, dict) else []
    errors += [f"{method} {path}: unknown property {name}" for name in strange]
    return errors + _differences(schema, body)


def answer_errors(method: str, path: str, status: int, body: Any) -> list[str]:
    """How an answer differs from the document's; one of a status that the document does not have is not judged."""
    operation = _operation(method, path)
    told = operation["responses"].get(str(status)) if operation else None
    if told is None:
        return []
    return [f"{method} {path} {status}: {error}" for error in _differences(_schema(told), body)]


def _schema(response: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = response["content"]["application/json"]["schema"]
    return schema


@cache
def _document() -> dict[str, Any] | None:
    return json.loads(SPEC.read_text()) if SPEC.is_file() else None


def _operation(method: str, path: str) -> dict[str, Any] | None:
    document = _document()
    return document["paths"].get(f"/api/v1{path}", {}).get(method.lower()) if document else None


def _differences(schema: dict[str, Any], value: Any) -> list[str]:
    from jsonschema import Draft202012Validator

    document = _document()
    assert document is not None
    whole = {**schema, "components": document["components"]}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(whole).iter_errors(value)]

"""Checks of requests and answers against Lambda's OpenAPI document, if it is beside the checkout."""

from __future__ import annotations

from typing import Any

from tests.emulators.specs import differences, document

SPEC = "lambda-v1.openapi.json"


def request_errors(method: str, path: str, query: set[str], body: Any) -> list[str]:
    """Return what the document does not allow in a request, including unknown names."""
    operation = _operation(method, path)
    if operation is None:
        return []
    known = {parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "query"}
    errors = [f"{method} {path}: unknown query {name}" for name in sorted(query - known)]
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return errors + ([f"{method} {path}: takes no body"] if body is not None else [])
    schema = content["application/json"]["schema"]
    strange = sorted(set(body) - set(schema["properties"])) if isinstance(body, dict) else []
    errors += [f"{method} {path}: unknown property {name}" for name in strange]
    return errors + differences(SPEC, schema, body)


def answer_errors(method: str, path: str, status: int, body: Any) -> list[str]:
    """Return where an answer breaks the document; nothing if the document lacks the answer's status."""
    operation = _operation(method, path)
    response = operation["responses"].get(str(status)) if operation else None
    if response is None:
        return []
    return [f"{method} {path} {status}: {error}" for error in differences(SPEC, _schema(response), body)]


def _schema(response: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = response["content"]["application/json"]["schema"]
    return schema


def _operation(method: str, path: str) -> dict[str, Any] | None:
    whole = document(SPEC)
    return whole["paths"].get(f"/api/v1{path}", {}).get(method.lower()) if whole else None

"""The providers' OpenAPI documents, where they lie beside the checkout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2].parent / "shared" / "providers" / "specs"
ABSENT = "the provider's OpenAPI document does not lie beside this checkout"


@cache
def document(name: str) -> dict[str, Any] | None:
    """Return a document by its file's name; None where it is not there."""
    path = FOLDER / name
    return json.loads(path.read_text()) if path.is_file() else None


def differences(name: str, schema: dict[str, Any], value: Any) -> list[str]:
    """Return how a value differs from a schema that may refer to the document's components; nothing without it."""
    if document(name) is None:
        return []
    errors = _validator(name, json.dumps(schema)).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in errors]


@cache
def _validator(name: str, schema: str) -> Any:
    from jsonschema import Draft202012Validator

    spec = document(name) or {}
    return Draft202012Validator({**json.loads(schema), "components": spec["components"]})

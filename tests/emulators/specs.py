"""The providers' OpenAPI documents, which may be in a folder beside the checkout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2].parent / "shared" / "providers" / "specs"
ABSENT = "the provider's OpenAPI document does not lie beside this checkout"


@cache
def document(name: str) -> dict[str, Any] | None:
    """Return the document in the file `name`; None if there is no such file."""
    path = FOLDER / name
    return json.loads(path.read_text()) if path.is_file() else None


def differences(name: str, schema: dict[str, Any], value: Any) -> list[str]:
    """Return where a value breaks a schema, which may refer to components of the document.

    The list is empty if the document is missing.
    """
    if document(name) is None:
        return []
    errors = _validator(name, json.dumps(schema)).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in errors]


@cache
def _validator(name: str, schema: str) -> Any:
    from jsonschema import Draft202012Validator

    spec = document(name) or {}
    return Draft202012Validator({**json.loads(schema), "components": spec["components"]})

"""Requests and answers held against RunPod's OpenAPI document, where that lies beside the checkout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SPEC = Path(__file__).parents[3].parent / "shared" / "providers" / "specs" / "runpod-v2.openapi.json"

BODY_FIELDS = frozenset(
    (
        "name", "image", "args", "entrypoint", "cmd", "gpu", "cpu", "cloud", "dataCenterIds", "disk", "ports", "env",
        "mounts", "startSsh", "startJupyter", "templateId", "registry", "globalNetworking",
    )
)  # fmt: skip
GPU_FIELDS = frozenset(("id", "count", "allowedCudaVersions", "minCudaVersion", "minRamPerGpu", "minVcpuCountPerGpu"))
NEWER_FIELDS = ("entrypoint", "cmd")  # On RunPod's page of creating a pod, not yet in the document.


@cache
def _document() -> dict[str, Any] | None:
    return json.loads(SPEC.read_text()) if SPEC.is_file() else None


@cache
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator

    document = _document()
    assert document is not None
    return Draft202012Validator({"$ref": f"#/components/schemas/{schema}", "components": document["components"]})


def against(schema: str, value: Any) -> list[str]:
    """How a value differs from a schema of the document; nothing where there is no document."""
    if _document() is None:
        return []
    return [f"{error.json_path}: {error.message}" for error in _validator(schema).iter_errors(value)]


def unknown_query(method: str, path: str, names: set[str]) -> list[str]:
    """Names in a query that the document does not have for this path."""
    document = _document()
    if document is None:
        return []
    entry = document["paths"][path]
    known = set()
    for parameter in [*entry.get("parameters", []), *entry[method.lower()].get("parameters", [])]:
        told = parameter
        if "$ref" in parameter:
            told = document["components"]["parameters"][parameter["$ref"].rsplit("/", 1)[1]]
        known.add(told["name"])
    return [f"{method} {path}: unknown query {name}" for name in sorted(names - known)]


def body_errors(body: Any, refused: frozenset[str]) -> list[str]:
    """Why a body of a create is refused, in the words of the real validator."""
    if not isinstance(body, dict):
        return ["$: got something else than an object"]
    extra = sorted((set(body) - BODY_FIELDS) | (set(body) & refused))
    errors = [f"$: additional properties {', '.join(map(repr, extra))} not allowed"] if extra else []
    if not body.get("name"):
        errors.append("$: missing property 'name'")
    gpu = body.get("gpu", {})
    strange = sorted(set(gpu) - GPU_FIELDS)
    errors += [f"$.gpu: additional properties {', '.join(map(repr, strange))} not allowed"] if strange else []
    older = {name: value for name, value in body.items() if name not in NEWER_FIELDS}
    for name in NEWER_FIELDS:
        if name in body and not (isinstance(body[name], list) and all(isinstance(one, str) for one in body[name])):
            errors.append(f"$.{name}: must be an array of strings")
    return errors or against("CreatePodRequest", older)

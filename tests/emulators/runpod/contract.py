"""Checks of requests and answers against RunPod's OpenAPI document, if it is beside the checkout."""

from __future__ import annotations

from typing import Any

from tests.emulators.specs import differences, document

SPEC = "runpod-v2.openapi.json"

BODY_FIELDS = frozenset(
    (
        "name", "image", "args", "entrypoint", "cmd", "gpu", "cpu", "cloud", "dataCenterIds", "disk", "ports", "env",
        "mounts", "startSsh", "startJupyter", "templateId", "registry", "globalNetworking",
    )
)  # fmt: skip
GPU_FIELDS = frozenset(("id", "count", "allowedCudaVersions", "minCudaVersion", "minRamPerGpu", "minVcpuCountPerGpu"))
NEWER_FIELDS = ("entrypoint", "cmd")  # RunPod's page on creating a pod has them; the document does not have them yet.


def against(schema: str, value: Any) -> list[str]:
    """Return where a value breaks a schema of the document; nothing without the document."""
    return differences(SPEC, {"$ref": f"#/components/schemas/{schema}"}, value)


def unknown_query(method: str, path: str, names: set[str]) -> list[str]:
    """Return an error for each name in a query that the document does not have for this path."""
    whole = document(SPEC)
    if whole is None:
        return []
    entry = whole["paths"][path]
    known = set()
    for parameter in [*entry.get("parameters", []), *entry[method.lower()].get("parameters", [])]:
        resolved = parameter
        if "$ref" in parameter:
            resolved = whole["components"]["parameters"][parameter["$ref"].rsplit("/", 1)[1]]
        known.add(resolved["name"])
    return [f"{method} {path}: unknown query {name}" for name in sorted(names - known)]


def body_errors(body: Any, refused: frozenset[str]) -> list[str]:
    """Return why the body of a create is refused, in the words of the real validator.

    `refused` are fields that this version of the service does not know.
    """
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
        if name in body and not (isinstance(body[name], list) and all(isinstance(item, str) for item in body[name])):
            errors.append(f"$.{name}: must be an array of strings")
    return errors or against("CreatePodRequest", older)

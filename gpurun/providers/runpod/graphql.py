"""Sends queries that only RunPod's GraphQL can answer, through RunPod's SDK in a child process.

The SDK has no time limit, takes a second to import and reads its address from the environment. The child is killed at
the time limit, so it cannot send a request after gpurun gave up. It gets the key through a pipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import getproxies

from gpurun.core.crashpoint import crashpoint
from gpurun.core.errors import SetupError
from gpurun.core.installed_files import install_line
from gpurun.core.secrets import Secret, child_environment
from gpurun.providers.base import Unknown
from gpurun.providers.runpod.parse import plain

LIMIT_S = 60
_ANSWER_LIMIT_BYTES = 4_000_000


class GraphqlRefused(Exception):
    """GraphQL answered with an error. The message is RunPod's."""


def is_installed() -> bool:
    """Return whether RunPod's SDK is installed. It is an optional extra."""
    return find_spec("runpod") is not None


def require_sdk() -> None:
    """Raise a SetupError if the SDK is not installed."""
    if not is_installed():
        raise SetupError(
            "runpod.no_sdk",
            "Spot pods and the balance need RunPod's own package, which is not installed.",
            hint=install_line("runpod"),
        )


def ask(document: str, key: Secret, base_url: str, *, limit_s: int = LIMIT_S) -> dict[str, Any]:
    """Send one GraphQL document and return the `data` of the answer.

    Raises GraphqlRefused for an error from RunPod, SetupError for a refused key or a missing package, and Unknown if
    there is no complete answer within the limit. After Unknown, RunPod may have carried out a mutation.
    """
    require_sdk()
    crashpoint("before runpod graphql")
    request = json.dumps({"key": key.reveal(), "document": document, "limit_s": limit_s}).encode()
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "gpurun.providers.runpod.sdk"],
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_build_environment(base_url),
            timeout=limit_s + 1,
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unknown(f"RunPod's GraphQL gave no answer: {type(error).__name__}") from None
    crashpoint("after runpod graphql")
    return _parse_data(child.stdout)


def quote_text(value: str) -> str:
    """Return a value as a GraphQL string literal, which has the same escapes as JSON."""
    return json.dumps(value)


def _parse_data(answer: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(answer[:_ANSWER_LIMIT_BYTES], parse_float=Decimal)
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        raise Unknown("RunPod's GraphQL gave no complete answer")
    words = plain(str(payload.get("words") or ""))
    match payload.get("refused"):
        case "key":
            hint = "Give a key with full access: gpurun auth set runpod."
            raise SetupError("auth.refused", "RunPod's GraphQL refuses the key.", hint=hint)
        case "query":
            raise GraphqlRefused(words)
        case "unclear":
            raise Unknown(f"RunPod's GraphQL gave no complete answer: {words}")
    if not isinstance(payload.get("data"), dict):
        raise Unknown("RunPod's GraphQL gave an answer without data")
    return dict(payload["data"])


def _build_environment(base_url: str) -> dict[str, str]:
    """Return the SDK's environment: the address, the proxies, and no .netrc, because that could replace the key."""
    proxies = {f"{scheme.upper()}_PROXY": url for scheme, url in getproxies().items() if scheme in ("https", "no")}
    here = {"RUNPOD_API_BASE_URL": base_url, "NETRC": os.devnull, "PYTHONPATH": str(Path(__file__).parents[3])}
    return child_environment({**proxies, **here})

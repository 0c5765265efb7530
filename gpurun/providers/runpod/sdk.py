"""Runs in a child process: sends one request through RunPod's SDK, and always ends within its time limit.

python -m gpurun.providers.runpod.sdk < {"key", "document", "limit_s"} > {"data"} or {"refused", "words"}
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Write the answer to the original standard output. Whatever the SDK prints goes to standard error."""
    request = json.load(sys.stdin)
    signal.alarm(request["limit_s"])  # The kernel kills this process even if its parent is gone.
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(out, "wb") as answer:
        answer.write(json.dumps(_send(request["document"], request["key"])).encode())


def _send(document: str, key: str) -> dict[str, Any]:
    from runpod.api.graphql import run_graphql_query  # type: ignore[import-untyped]
    from runpod.error import AuthenticationError, QueryError  # type: ignore[import-untyped]

    try:
        return {"data": run_graphql_query(document, api_key=key).get("data")}
    except AuthenticationError:
        return {"refused": "key"}
    except QueryError as error:
        return {"refused": "query", "words": str(error).replace(key, "•••")}
    except Exception as error:  # noqa: BLE001 - whatever the SDK and its HTTP library raise, the outcome is not known.
        return {"refused": "unclear", "words": type(error).__name__}


if __name__ == "__main__":
    main()

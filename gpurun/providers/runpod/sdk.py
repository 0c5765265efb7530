"""The child that sends one question to RunPod's SDK, and ends within its limit whatever happens.

python -m gpurun.providers.runpod.sdk < {"key", "document", "limit_s"} > {"data"} or {"refused", "words"}
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Answer on the original standard output; the SDK's own output goes to the standard error."""
    question = json.load(sys.stdin)
    signal.alarm(question["limit_s"])  # The kernel ends this process even if its parent is gone.
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(out, "wb") as answer:
        answer.write(json.dumps(_ask(question["document"], question["key"])).encode())


def _ask(document: str, key: str) -> dict[str, Any]:
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

"""The agent's entry point: reads one verb, prints one JSON line and optional raw bytes."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from gpurun.remote.agent.job_state import note_call
from gpurun.remote.agent.system import Refusal, path_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

    from gpurun.remote.agent.system import Answer, Json

# The module of each verb. Only the requested module is imported, so that a poll is fast.
VERBS = {
    "hello": "probe",
    "imports": "probe",
    "begin": "receive",
    "pull": "s3_pull",
    "receive": "receive",
    "settle": "finish_upload",
    "setup": "setup_process",
    "attend": "setup_process",
    "secrets": "job_secrets",
    "start": "job_control",
    "keep": "watchdog",
    "poll": "job_status",
    "manifest": "job_status",
    "get": "job_status",
    "gather": "job_status",
    "unsaved": "job_status",
    "doors": "job_status",
    "stop": "job_control",
    "shorten": "job_control",
    "end": "end_early",
    "farewell": "teardown",
}


def do(verb: str, root: str, options: Json) -> Answer:
    """Run one verb. Raise KeyError if it does not exist."""
    answer: Answer = getattr(import_module("gpurun.remote.agent." + VERBS[verb]), verb)(root, options)
    return answer


def main(words: List[str]) -> int:
    """Run the verb in `words`, print its reply, and return the exit code."""
    import errno

    options: Json = {}
    root = ""
    try:
        rest = iter(words[1:])
        for word in rest:
            options[word.lstrip("-")] = True if word == "--now" else next(rest)
        root = os.path.realpath(options["root"])
        for folder in ("agent", "out"):
            os.makedirs(path_in(root, folder), exist_ok=True)
        if words[0] != "keep":  # `keep` is the only verb that no client sends.
            note_call(root)
        answer, content = do(words[0], root, options)
    except Refusal as refusal:
        answer, content = {"error": refusal.error}, b""
    except (KeyError, IndexError, StopIteration, TypeError, ValueError, AttributeError) as error:
        answer, content = {"error": {"code": "usage", "message": "%s: %s" % (type(error).__name__, error)}}, b""
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        answer = {"error": {"code": "disk_full" if full else "os_error", "message": str(error)}}
        content = b""
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    for block in [content] if isinstance(content, bytes) else content:
        sys.stdout.buffer.write(block)
        if root:  # This is repeated for each part, so that a client that reads a long reply counts as present.
            note_call(root)
    sys.stdout.buffer.flush()
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

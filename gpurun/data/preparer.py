"""The trainer's programs that make shards of text on this machine, and what they answer.

gpurun shares files with the trainer, not code: these are programs of their own; docs/FORMATS.md has the formats.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.secrets import child_environment

_PROGRESS = "progress "
_ENDS_WITH_US = {"PREPARE_ENDS_WITH_STDIN": "1"}
"""Its standard input is a pipe of ours that says nothing: however this process ends, it hears the end of that."""
_LETTING_GO_S = 5.0


def run_preparer(
    module: str,
    arguments: Sequence[str],
    *,
    root: Path,
    say: Callable[[str], None],
    progress: Callable[[dict[str, int]], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
    if_killed: str = "The text, the memory or the disk may be the reason; try less of it with --set data.limit_mb=2.",
) -> dict[str, Any]:
    """Run one of the trainer's programs that prepare; its talk is passed on, its refusals become ours.

    `if_killed` is the hint where it ends without a word.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=child_environment({"PYTHONPATH": str(root), **_ENDS_WITH_US, **(environment or {})}),
        cwd=root,  # Not the person's folder: a `trainer` that lies there would be run instead of ours.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert child.stderr is not None
    assert child.stdout is not None
    talk = []
    with ThreadPoolExecutor(max_workers=1) as beside:
        # An answer that its pipe cannot hold would wait for us, as we for the end of the talk.
        heard = beside.submit(child.stdout.read)
        try:
            for line in child.stderr:
                if line.startswith(_PROGRESS):
                    progress(json.loads(line.removeprefix(_PROGRESS)))
                    continue
                talk.append(line.rstrip())
                say(talk[-1])
            answer: dict[str, Any] = json.loads(heard.result() or "{}")
            child.wait()
        finally:
            _end(child)
    if child.returncode == 0:
        return answer
    raise _refused(answer) or SetupError(
        "data.prepare_failed",
        f"Tokenising ended with exit code {child.returncode}: {' '.join(talk[-3:])}",
        hint=if_killed,
    )


def _refused(answer: Mapping[str, Any]) -> UsageError | SetupError | None:
    """The program's refusal as one of ours; None where it did not come to say one."""
    if "error" not in answer:
        return None
    told = answer["error"]
    kind = SetupError if told["code"].startswith("disk.") else UsageError
    return kind(told["code"], told["message"], hint=told["hint"])


def _end(child: subprocess.Popen[str]) -> None:
    """See to it that it is gone, whatever it waits for (a download of hours): what is finished of its work lasts."""
    child.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LETTING_GO_S)
    finally:  # Also when Ctrl-C comes a second time.
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()

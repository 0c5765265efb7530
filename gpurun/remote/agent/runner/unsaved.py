"""Finds what the end of a dev box would destroy: files elsewhere, large ignored files, commits that were not pushed.

    python -m gpurun.remote.agent.runner.unsaved machine|folder     (in bundle/; prints a line of JSON)

With `folder`, only the run's folder is removed with the box, so files elsewhere are not lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress

from gpurun.remote.agent.runner.cloned import git_environment
from gpurun.remote.agent.runner.elsewhere import MOST_NAMED, find_results
from gpurun.remote.agent.runner.matching import Walk, count_new_files
from gpurun.remote.agent.runner.published import readable_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

LARGE_BYTES, LOOK_S, GIT_S = 10_000_000, 10.0, 10.0


def unsaved(root: str, order: Dict[str, Any], is_whole: bool) -> Dict[str, Any]:
    """Return the number of files, their total bytes, the largest files, and the number of commits not pushed."""
    work, since_wall = os.path.join(root, "bundle", "work"), read_start_wall(root)
    walk = Walk(work, root, list(order["outputs"]), str(order["checkpoints"]), has_git_rules=True)
    left = {}
    for paths in walk.find(0).left.values():
        for child, path in paths:
            _, size = count_new_files(path, since_wall)
            if size >= LARGE_BYTES:
                left[readable_name(child.partition("/")[2])] = size
    found = find_results(since_wall, [root], LOOK_S if is_whole else 0.0)
    first = [{"name": name, "bytes": size} for name, size in sorted(left.items(), key=lambda item: -item[1])]
    return {
        "files": len(left) + found["files"],
        "bytes": sum(left.values()) + found["bytes"],
        "first": (first + found["first"])[:MOST_NAMED],
        "commits": commits(work),
    }


def read_start_wall(root: str) -> float:
    """Return when users could begin to work on the box. Files that are older are not theirs."""
    with open(os.path.join(root, "out", "events.jsonl"), "rb") as events:
        for line in events:
            with suppress(ValueError):
                event = json.loads(line)
                if event.get("kind") == "start":
                    return float(event["wall"])
    return 0.0


def commits(work: str) -> int:
    """Return how many commits of the folder's own repository are on no known remote."""
    if not os.path.isdir(os.path.join(work, ".git")):
        return 0
    silent = subprocess.DEVNULL
    line = ["git", "-c", "safe.directory=*", "-C", work, "log", "--branches", "--not", "--remotes", "--format=%h"]
    try:
        done = subprocess.run(
            line, env=git_environment(), stdin=silent, stdout=subprocess.PIPE, stderr=silent, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(done.stdout.split())


if __name__ == "__main__":
    with open("command.json") as file:
        print(json.dumps(unsaved(os.path.dirname(os.getcwd()), json.load(file), sys.argv[1] == "machine")))

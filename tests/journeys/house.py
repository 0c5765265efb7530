"""Count what a reader meets in gpurun/, from its sources and from traces: `make house` prints the table."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.journeys.journeys import BUDGETS, files_of
from tests.journeys.trace import ROOT

AGENT = "gpurun/remote/agent/"
"""Left out of `sources`: it uses only the standard library, so it has its own lock and its own reader of files."""


def sources() -> dict[str, ast.Module]:
    """Return every module of gpurun outside the agent, by its path."""
    paths = [path for path in sorted((ROOT / "gpurun").rglob("*.py")) if AGENT not in str(path)]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def twice() -> list[str]:
    """Return file names that occur twice outside the providers and the verbs of the command line."""
    apart = re.compile(r"gpurun/(providers|cli/commands)/|/__\w+__\.py$")
    names = [str(path.relative_to(ROOT)) for path in (ROOT / "gpurun").rglob("*.py")]
    counted = Counter(Path(name).name for name in names if not apart.search(name))
    return sorted(name for name, times in counted.items() if times > 1)


def calling(*functions: str) -> list[str]:
    """Return the modules that call one of these functions, given by their dotted names."""
    return sorted(
        path
        for path, tree in sources().items()
        if any(isinstance(node, ast.Call) and ast.unparse(node.func) in functions for node in ast.walk(tree))
    )


def retry_loops() -> list[str]:
    """Return the loops that catch an exception, sleep and try again."""
    return sorted({f"{path}:{loop.lineno}" for path, tree in sources().items() for loop in _loops(tree)})


def _loops(tree: ast.Module) -> Iterator[ast.For | ast.While]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While):
            inside = [*ast.walk(node)]
            catches = any(isinstance(part, ast.Try) and part.handlers for part in inside)
            sleeps = any(isinstance(part, ast.Call) and ast.unparse(part.func).endswith(".sleep") for part in inside)
            if catches and sleeps:
                yield node


def event_readers() -> list[str]:
    """Return the modules that read a trainer's event by a key's name instead of by a field."""
    keys = re.compile(r"""(\.get\(|\[)["'](kind|val_loss|tokens_per_s|micro_batch)["']""")
    return sorted(path for path, tree in sources().items() if keys.search(ast.unparse(tree)))


def lines() -> int:
    """Return the number of lines of Python in the repository."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return sum(len((ROOT / name).read_bytes().splitlines()) for name in tracked.stdout.split())


COUNTED: dict[str, Callable[[], int]] = {
    "base names that stand twice": lambda: len(twice()),
    "modules that look into an event by a key": lambda: len(event_readers()),
    "loops that catch, sleep and try again": lambda: len(retry_loops()),
    "modules that take a file lock": lambda: len(calling("fcntl.flock")),
    "modules of gpurun (reported)": lambda: len([*(ROOT / "gpurun").rglob("*.py")]),
    "lines of Python (reported)": lines,
}

if __name__ == "__main__":
    print("| what | now | budget |\n| --- | --- | --- |")
    for name, most in BUDGETS.items():
        print(f"| files entered by `{name}` | {len(files_of(name))} | {most} |")
    for what, count in COUNTED.items():
        print(f"| {what} | {count()} | |")

"""Takes away one safeguard at a time, in a copy, and runs the fast tests: a safeguard that nobody misses has no test.

    python -m tests.simulation.mutants             every mutant (minutes); survivors are printed, and make it exit 1
    python -m tests.simulation.mutants fsync       those whose name has this in it

Safeguards are found by their form in the source (each fsync, each lock, each digest that is compared and refused), and
a few by their words: looking before asking again, reading back, counting reads.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BOOKS = (
    "tests/unit/test_journal.py", "tests/unit/test_journal_lock.py", "tests/unit/test_receipt.py",
    "tests/unit/test_signing.py", "tests/unit/test_audit.py", "tests/simulation/test_syncs.py",
    "tests/lifecycle/test_faults.py",
)  # fmt: skip
TESTS: dict[str, tuple[str, ...]] = {
    "core": _BOOKS,
    "ledger": _BOOKS,
    "lifecycle": (
        "tests/simulation/test_syncs.py", "tests/lifecycle/test_state.py", "tests/lifecycle/test_faults.py",
        "tests/simulation/test_found.py", "tests/unit/test_prepare.py",
        "tests/unit/test_shards.py", "tests/simulation/test_scenarios.py", "tests/simulation/test_crash_sweep.py",
    ),
    "machine": ("tests/unit/machine",),
}  # fmt: skip
LIMIT_S = 400
_SYNCS = ("os.fsync", "fsync_folder", "fcntl.flock")
WORDS = (
    ("gpurun/lifecycle/destroy.py", "and not self.listed", ""),
    ("gpurun/lifecycle/destroy.py", "len(readings) >= traits.death_reads and ", ""),
    ("gpurun/lifecycle/destroy.py", "readings, asked_s = [], float(\"-inf\")", "pass"),
    ("gpurun/lifecycle/provision.py", ">= traits.settle_s:", ">= 0:"),
    ("gpurun/lifecycle/provision.py", "if instance.token != order.token:", "if False:"),
    ("gpurun/lifecycle/provision.py", "context.provider.destroy(extra.id)", "pass"),
    ("gpurun/lifecycle/bargain.py", "if rate is not None and costs_more(instance, plan):", "if False:"),
    ("gpurun/lifecycle/bargain.py", "if is_another(instance, plan):", "if False:"),
    ("gpurun/lifecycle/driver.py", "if not self._state().may_be_billing:", "if True:"),
    ("gpurun/lifecycle/driver.py", "and self._at(state).seconds_left(state) <= 0:", "and False:"),
    ("gpurun/lifecycle/context.py", "return min(by_wall, ", "return max(by_wall, "),
    ("gpurun/lifecycle/duplicates.py", "one.token == token and ", ""),
    ("gpurun/ledger/rental.py", "times(total(", "(lambda a, b: a)(total("),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One file with one safeguard less."""

    name: str
    path: str
    text: str


def mutants() -> Iterator[Mutant]:
    """Every mutant; words that are not found any more are an error, since then nothing would be tested."""
    for room in TESTS:
        for path in sorted((ROOT / "gpurun" / room).rglob("*.py")):
            yield from _by_form(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    for place, before, after in WORDS:
        text = (ROOT / place).read_text(encoding="utf-8")
        if before not in text:
            raise SystemExit(f"{place} has no {before!r} any more: mend the list of mutants")
        yield Mutant(f"words: {place}: {before!r}", place, text.replace(before, after, 1))


def _by_form(place: str, text: str) -> Iterator[Mutant]:
    """A mutant for each call that syncs or locks, and each comparison of digests that ends in a refusal."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in _SYNCS:
            yield _without(place, lines, node, f"{ast.unparse(node.value.func)}", "None")
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) and "sha256" in ast.unparse(node.test):
            yield _without(place, lines, node.test, "digest", "False")


def _without(place: str, lines: list[str], node: ast.expr | ast.stmt, kind: str, instead: str) -> Mutant:
    """The file with `instead` in the place of a node."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    head = lines[first].encode()[: node.col_offset].decode()
    tail = lines[last].encode()[node.end_col_offset :].decode()
    text = "".join([*lines[:first], head + instead + tail, *lines[last + 1 :]])
    return Mutant(f"{kind}: {place}:{node.lineno}", place, text)


def survives(mutant: Mutant, copy: Path) -> bool:
    """Whether all the fast tests pass without the safeguard."""
    target = copy / mutant.path
    original = target.read_text(encoding="utf-8")
    target.write_text(mutant.text, encoding="utf-8")
    try:
        tests = TESTS[mutant.path.split("/")[1]]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=copy, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False  # It waits for ever: somebody would notice.
    finally:
        target.write_text(original, encoding="utf-8")


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors, count = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("gpurun", "trainer", "recipes", "tests", "docs", "pyproject.toml", "README.md"):
            source = ROOT / name
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=skip) if source.is_dir() else shutil.copy(source, copy / name)
        for room in TESTS:
            place = f"gpurun/{room}/__init__.py"
            if not survives(Mutant("nothing", place, (ROOT / place).read_text(encoding="utf-8")), copy):
                print(f"the tests of {room} fail without any mutant: mend them first")
                return 2
        for mutant in mutants():
            if wanted not in mutant.name:
                continue
            count += 1
            lives = survives(mutant, copy)
            survivors += [mutant.name] if lives else []
            print(f"{'SURVIVES' if lives else 'killed':8} {mutant.name}", flush=True)
    print(f"{count} mutants, {len(survivors)} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

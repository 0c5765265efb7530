"""Measures what commands that read all runs cost in a home of many runs: `python tests/bench/bench_home.py`.

Makes the home with tests/many_runs.py (closed runs with receipts in one chain, and three open runs). Runs each command
in a process of its own and measures its processor seconds and its peak resident memory, in this home and in an empty
one. `--home` takes a home that was made before. Prints figures for docs/dev/BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.many_runs import many_runs

ROOT = Path(__file__).parents[2]
VERBS = ("ps", "doctor", "plan mini-gpt", "reap --provider local --look", "ps --all", "audit")
# The meter imports little, because memory resident before the fork would count as the command's.
METER = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(code, used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


def cost_of(verb: str, home: Path) -> tuple[float, float]:
    """Return (processor seconds, peak resident MB) of one command."""
    command = [sys.executable, "-m", "gpurun", *verb.split(), "--home", str(home)]
    metered = [sys.executable, "-c", METER, *command]
    code, seconds, most = subprocess.run(metered, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split()
    assert code in ("0", "4", "9"), f"{verb}: exit {code}"
    return float(seconds), int(most) * (1 if sys.platform == "darwin" else 1024) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--home", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        full = given.home or many_runs(Path(folder) / "full", given.runs, 3).root
        homes = {"empty": many_runs(Path(folder) / "empty", 0, 0).root, "full": full}
        print(f"{given.repeats} runs each, {datetime.now(UTC):%Y-%m-%d}")
        for verb in VERBS:
            for name, home in homes.items():
                seconds, memory = zip(*(cost_of(verb, home) for _ in range(given.repeats)), strict=True)
                spread = f"{min(seconds):.2f} to {max(seconds):.2f} s, {min(memory):.0f} to {max(memory):.0f} MB"
                print(f"{verb}, {name}: {spread}", flush=True)


if __name__ == "__main__":
    main()

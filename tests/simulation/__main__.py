"""The soak: play many seeds, and print the history of the first seed that breaks a promise.

python -m tests.simulation --runs 10000 --seed 1        the seeds from 1 on, on all cores
python -m tests.simulation --runs 1 --seed 4711         one seed again
python -m tests.simulation --voyages --runs 3000        runs that continue on other machines, with a summary
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.simulation.soak import Verdict, judge_seed, judge_voyage, shrunk, summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--voyages", action="store_true")
    options = parser.parse_args()
    begun, ends, voyages = time.monotonic(), Counter[str](), list[Verdict]()
    with multiprocessing.Pool(options.jobs) as pool:
        seeds = range(options.seed, options.seed + options.runs)
        for count, verdict in enumerate(
            pool.imap(judge_voyage if options.voyages else judge_seed, seeds, chunksize=8), start=1
        ):
            ends.update(verdict.ends)
            voyages += [verdict] if options.voyages else []
            if verdict.breaches:
                pool.terminate()
                small = shrunk(verdict)
                print(f"\nseed {verdict.scenario.seed} breaks a promise:", *small.breaches, sep="\n  ")
                print(f"\nsmallest scenario that still breaks it: {small.scenario}\n\n{small.story}")
                return 1
            if count % 500 == 0 or count == options.runs:
                rate = 60 * count / (time.monotonic() - begun)
                print(f"{count:,} runs, {rate:,.0f} a minute, no promise broken", file=sys.stderr)
    print("ends:", ", ".join(f"{words} {count:,}" for words, count in ends.most_common()))
    if options.voyages:
        print(summary(voyages))
    return 0


if __name__ == "__main__":
    sys.exit(main())

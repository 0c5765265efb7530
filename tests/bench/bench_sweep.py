"""Compares the cost of a sweep with that of a rental for each trial, by an emulated cloud's meter: `make bench-sweep`.

Four trials of 30 s on RunPod with real containers: in one rental with one, two and four at a time, then in four
rentals.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpurun.core.money import Micros, format_exact_usd
from tests.clouds.rented import CLOUDS, User, somebody

SCRIPT = """\
import sys, time
for step in range(1, 11):
    print(f"step {step}/10 | loss {float(sys.argv[1]) + 1 / step:.4f}", flush=True)
    time.sleep(3)
open("weights.bin", "w").write(sys.argv[1])
"""


def billed(user: User, *words: str) -> Micros:
    """Return what one command cost by the cloud's own meter."""
    before = user.cloud.meter.total_micros()
    done = user.types(*words, timeout_s=600)
    assert done.returncode == 0, done.stderr
    return Micros(user.cloud.meter.total_micros() - before)


def main() -> None:
    """Run the sweeps and the single rentals, and print what each way costs."""
    folder = Path(tempfile.mkdtemp())
    with CLOUDS["runpod"](folder / "cloud") as cloud, somebody(cloud, folder / "home") as user:
        (lab := folder / "lab").mkdir()
        (lab / "train.py").write_text(SCRIPT)
        asks = ("--provider", "runpod", "--max-cost", "5", "--yes", "--json", *cloud.asks, "--upload", str(lab))
        for at_once in (1, 2, 4):
            words = ("--at-once", str(at_once), "--set", "lr=1,2,3,4", "--", "python", "train.py", "{lr}")
            print(f"{at_once} at once: {format_exact_usd(billed(user, 'sweep', *asks, *words))}", flush=True)
        each = [billed(user, "run", *asks, "--", "python", "train.py", str(number)) for number in range(1, 5)]
        print(f"four rentals: {format_exact_usd(Micros(sum(each)))}")


if __name__ == "__main__":
    sys.exit(main())

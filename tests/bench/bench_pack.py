"""Ships 1 GB of token shards with gpurun and with `tar -czf` plus `tar -xzf`, in turn on the same files.

    python tests/bench/bench_pack.py [--megabytes 1000] [--rounds 2] [--codec zstd]

Our side is the whole way: survey, digests, compression, a pipe, and the real agent in a process of its own, which
verifies every digest and fsyncs every file; tar does neither. The bar is a third of tar's time and 200 MB of memory on
either side. Needs three times the size in the temporary folder, and cleans up. Prints one row for
docs/dev/BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from array import array
from collections import Counter
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.memory import own_peak_bytes

SHARD_TOKENS = 50_000_000


def tokens_of_real_text() -> list[array[int]]:
    """Return the standard library's source files as 16-bit token ids: words and signs, numbered by how often they
    occur, so that a token has the entropy of real text."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))[:1500]
    split = re.compile(r" ?\w+|\s+| ?[^\w\s]+")
    documents = [split.findall(path.read_text("utf-8", "replace")) for path in files]
    ranks = [word for word, _ in Counter(word for document in documents for word in document).most_common(65_535)]
    number = {word: rank for rank, word in enumerate(ranks)}
    return [array("H", (number.get(word, 65_535) for word in document)) for document in documents]


def write_shards(folder: Path, size_bytes: int) -> None:
    """Write `size_bytes` of shards from the documents, which are shuffled again each time all have been written."""
    documents, dice, left, shard = tokens_of_real_text(), random.Random(42), size_bytes, 0
    while left > 0:
        shard += 1
        room = min(left, 2 * SHARD_TOKENS)
        left -= room
        with open(folder / f"train_{shard:06d}.bin", "wb") as out:
            while room > 0:
                dice.shuffle(documents)
                for document in documents:
                    room -= out.write(document.tobytes()[:room])


def ship_once(source: Path, machine: Path, codec: str) -> None:
    """Ship the folder in this process, and print the seconds and both sides' peak memory as JSON."""
    from gpurun.remote.archive import Pack, survey
    from gpurun.remote.client import FarSide
    from gpurun.remote.local_machine import LocalMachine

    far = FarSide(LocalMachine(machine, "gr-bench"), python=sys.executable)
    far.install_agent()
    started = time.perf_counter()
    far.unpack(Pack(survey({"data": source})), "gzip" if codec == "gzip" else "zstd")
    seconds = time.perf_counter() - started
    peaks = [own_peak_bytes(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]
    print(json.dumps({"seconds": seconds, "pack_bytes": peaks[0], "unpack_bytes": peaks[1]}))


def ours(source: Path, work: Path, codec: str) -> dict[str, float]:
    machine = work / "machine"
    machine.mkdir()
    command = [sys.executable, __file__, "--ship", str(source), str(machine), "--codec", codec]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    shutil.rmtree(machine)
    return dict(measured)


def tar(source: Path, work: Path) -> float:
    (work / "out").mkdir()
    started = time.perf_counter()
    subprocess.run(["tar", "-czf", work / "pack.tar.gz", "-C", source, "."], check=True)
    subprocess.run(["tar", "-xzf", work / "pack.tar.gz", "-C", work / "out"], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(work / "out")
    (work / "pack.tar.gz").unlink()
    return seconds


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--codec", choices=("zstd", "gzip"), default="zstd")
    parser.add_argument("--ship", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ship:
        ship_once(*options.ship, options.codec)
        return
    with tempfile.TemporaryDirectory(prefix="gpurun-bench-") as name:
        work, source = Path(name), Path(name) / "source"
        source.mkdir()
        # In a process of its own, because a child's peak memory includes what its parent held at the fork.
        maker = get_context("spawn").Process(target=write_shards, args=(source, options.megabytes * 1_000_000))
        maker.start()
        maker.join()
        our_runs, tar_runs = [], []
        for _ in range(options.rounds):
            for measure in (
                lambda: our_runs.append(ours(source, work, options.codec)),
                lambda: tar_runs.append(tar(source, work)),
            ):
                os.sync()
                measure()
    best, best_tar = min(run["seconds"] for run in our_runs), min(tar_runs)
    peaks = [max(run[side] for run in our_runs) / 1e6 for side in ("pack_bytes", "unpack_bytes")]
    command = f"`python tests/bench/bench_pack.py --megabytes {options.megabytes} --rounds {options.rounds}`"
    print("| date | machine | shards | ours | tar -czf + -xzf | ratio | memory, pack / unpack | command |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {datetime.now(UTC):%Y-%m-%d} | {cpu()}, {os.cpu_count()} cores | {options.megabytes} MB | {best:.1f} s"
        f" | {best_tar:.1f} s | {best_tar / best:.1f}x | {peaks[0]:.0f} / {peaks[1]:.0f} MB | {command} |"
    )


if __name__ == "__main__":
    main()

"""Ships and downloads files over a real sshd, compared with the plain tools on the same files: `make bench-transfer`.

    python tests/bench/bench_transfer.py [--full] [--rounds 2] [--rows shards,home,cuts,memory]

A proxy on loopback adds a round-trip time of 100 ms. Each round runs ours and the others one after the other, and the
best time of each counts (without the delay, of twice as many rounds). Prints ratios as rows for docs/dev/BENCHMARKS.md.
Ours reads, hashes, compresses, sends, unpacks and verifies every digest, and syncs the downloaded files to the disk;
the others do less. `--full` takes the real sizes and ten minutes; the default sizes take one minute, show that it
works, and consist mostly of the login.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpurun.remote.key_pairs import make_keys
from tests.bench.bench_pack import cpu, write_shards
from tests.emulators.sshd import Sshd

ROOT = Path(__file__).parents[2]
ROUND_TRIP_S = 0.1
CUT_EVERY_S = 5.0


@dataclass(frozen=True)
class Sizes:
    shards_mb: int
    home_mb: int
    cuts_mb: int
    memory_mb: int


SMALL = Sizes(shards_mb=100, home_mb=100, cuts_mb=200, memory_mb=1000)
FULL = Sizes(shards_mb=1000, home_mb=1500, cuts_mb=1000, memory_mb=10_000)


class Bench:
    """One sshd, proxies with a delay in front of it, and the tools that are compared."""

    def __init__(self, work: Path, rounds: int) -> None:
        self.work, self.rounds = work, rounds
        self.keys = make_keys(work / "keys")
        self.client = work / "keys" / "client"
        self.sshd = Sshd(work / "sshd", host_keys=[work / "keys" / "host"], authorized_keys=[self.keys.client_public],
                         options=["LogLevel QUIET", "Subsystem sftp internal-sftp", f"SetEnv HOME={work}"])  # fmt: skip
        self.there = work / "there"
        self.carried_bytes = 0

    @contextmanager
    def way(self, round_trip_s: float, cut_every_s: float = 0.0) -> Iterator[int]:
        """Yield a port that leads to sshd with this delay; then `carried_bytes` holds what the proxy has carried.

        Without a delay and cuts the port is sshd's own, without a proxy.
        """
        if not round_trip_s and not cut_every_s:
            yield self.sshd.port
            return
        command = [sys.executable, "-m", "tests.emulators.proxy", str(self.sshd.port), "--round-trip",
                   str(round_trip_s), "--cut-every", str(cut_every_s)]  # fmt: skip
        proxy = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert proxy.stdout is not None
        try:
            yield int(proxy.stdout.readline())
            self.carried_bytes = int(proxy.communicate()[0])
        finally:
            proxy.kill()
            proxy.wait()

    def best(self, *runs: Callable[[], float], rounds: int = 0) -> list[float]:
        """Return the best time of each of the runs, which take turns."""
        seen: list[list[float]] = [[] for _ in runs]
        for _ in range(rounds or self.rounds):
            for times, run in zip(seen, runs, strict=True):
                self.set_aside()
                times.append(run())
        return [min(times) for times in seen]

    def set_aside(self) -> None:
        """Rename the copied files instead of deleting them: after a large deletion ext4 creates files more slowly."""
        if self.there.exists():
            self.there.rename(self.work / f"there-{time.monotonic_ns()}")
        os.sync()

    def ours(self, what: str, source: Path, port: int, size_bytes: int = 0) -> dict[str, Any]:
        """Transfer with gpurun in a process of its own; return its seconds, peak memory and tries."""
        words = [what, str(source), str(port), str(self.work), str(size_bytes)]
        command = [sys.executable, "-m", "tests.bench.transfer_ours", *words]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
        return dict(json.loads(done.stdout))

    def options(self, port: int) -> list[str]:
        known = self.work / "known_hosts"
        known.write_text(f"[127.0.0.1]:{port} {self.keys.host_public}\n")
        return ["-F", "none", "-i", str(self.client), "-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes"]

    def run(self, *command: object) -> None:
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)

    def tar_scp_tar(self, source: Path, port: int) -> float:
        self.there.mkdir()
        pack, started = self.work / "pack.tar.gz", time.perf_counter()
        self.run("tar", "-czf", pack, "-C", source, ".")
        self.run("scp", "-q", "-C", *self.options(port), "-P", port, pack, f"127.0.0.1:{self.there}/pack.tar.gz")
        self.run("ssh", *self.options(port), "-p", port, "127.0.0.1", f"cd {self.there} && tar -xzf pack.tar.gz")
        pack.unlink()
        return time.perf_counter() - started

    def rsync(self, source: Path, port: int) -> float:
        self.there.mkdir()
        started = time.perf_counter()
        shell = " ".join(["ssh", *self.options(port), "-p", str(port)])
        self.run("rsync", "-az", "-e", shell, f"{source}/", f"127.0.0.1:{self.there}/")
        return time.perf_counter() - started

    def scp_home(self, source: Path, port: int) -> float:
        started, home = time.perf_counter(), self.work / "home.bin"
        self.run("scp", "-q", *self.options(port), "-P", port, f"127.0.0.1:{source}", home)
        home.unlink()
        return time.perf_counter() - started


def tell(what: str, ours_s: float, theirs: str, theirs_s: float, bar: float, more: str = "") -> None:
    ratio = theirs_s / ours_s
    verdict = "yes" if ratio >= bar else "NO"
    print(f"| {what} | {ours_s:.1f} s | {theirs} {theirs_s:.1f} s | {ratio:.2f}x | >= {bar}x | {verdict} | {more} |",
          flush=True)  # fmt: skip


def shards(bench: Bench, sizes: Sizes) -> None:
    source, peaks = bench.work / "shards", [0]
    source.mkdir()
    # In a process of its own, because a child's peak memory includes what its parent held at the fork.
    maker = get_context("spawn").Process(target=write_shards, args=(source, sizes.shards_mb * 1_000_000))
    maker.start()
    maker.join()
    with bench.way(ROUND_TRIP_S) as port:

        def ours() -> float:
            measured = bench.ours("ship", source, port)
            peaks.append(measured["memory_bytes"])
            return float(measured["seconds"])

        ours_s, tar_s, rsync_s = bench.best(
            ours, lambda: bench.tar_scp_tar(source, port), lambda: bench.rsync(source, port)
        )
    what = f"{sizes.shards_mb} MB of shards, 100 ms"
    tell(what, ours_s, "tar -czf + scp -C + tar -xzf", tar_s, 5.0, f"memory {max(peaks) / 1e6:.0f} MB")
    tell(what, ours_s, "rsync -az", rsync_s, 2.0)
    shutil.rmtree(source)


def home(bench: Bench, sizes: Sizes) -> None:
    source = checkpoint(bench, sizes.home_mb)
    for round_trip_s, bar in ((0.0, 0.9), (ROUND_TRIP_S, 4.0)):
        with bench.way(round_trip_s) as port:
            ours_s, scp_s = bench.best(
                lambda port=port: float(bench.ours("home", source, port, source.stat().st_size)["seconds"]),
                lambda port=port: bench.scp_home(source, port),
                rounds=bench.rounds if round_trip_s else 2 * bench.rounds,  # Mostly the disk's time, which varies.
            )
        tell(f"{sizes.home_mb} MB checkpoint home, {1000 * round_trip_s:.0f} ms", ours_s, "scp", scp_s, bar)


def cuts(bench: Bench, sizes: Sizes) -> None:
    """Print how many bytes, both directions together, a transfer takes on a line that is cut every 5 s."""
    source = bench.work / "cut"
    source.mkdir()
    size_bytes = sizes.cuts_mb * 1_000_000
    weights = checkpoint(bench, sizes.cuts_mb)
    os.link(weights, source / "weights.bin")
    for what, content in (("shipped", source), ("brought home", weights)):
        with bench.way(ROUND_TRIP_S, CUT_EVERY_S) as port:
            measured = bench.ours("ship" if content is source else "home", content, port, size_bytes)
        ratio = bench.carried_bytes / size_bytes
        print(f"| {sizes.cuts_mb} MB {what}, cut every 5 s | {measured['seconds']:.1f} s, {measured['tries']} tries "
              f"| {ratio:.2f}x its size went over the line | | <= 1.3x | {'yes' if ratio <= 1.3 else 'NO'} | |",
              flush=True)  # fmt: skip
        bench.set_aside()  # A connection that a cut left behind may still write there.


def memory(bench: Bench, sizes: Sizes) -> None:
    """Print the peak memory of the sending process while it ships ten files (hard links to one file)."""
    source, tenth = bench.work / "much", checkpoint(bench, sizes.memory_mb // 10)
    source.mkdir()
    for number in range(10):
        os.link(tenth, source / f"train_{number:06d}.bin")
    measured = bench.ours("ship", source, bench.sshd.port)
    peak_mb = measured["memory_bytes"] / 1e6
    print(f"| memory while {sizes.memory_mb / 1000:.0f} GB are shipped | {peak_mb:.0f} MB | "
          f"{measured['seconds']:.0f} s | | <= 200 MB | {'yes' if peak_mb <= 200 else 'NO'} | |")  # fmt: skip


def checkpoint(bench: Bench, megabytes: int) -> Path:
    """Write a file that does not compress, as weights do not, and its digest beside it; return its path."""
    import hashlib

    path, digest, dice = bench.work / f"weights-{megabytes}.bin", hashlib.sha256(), random.Random(4)
    with path.open("wb") as out:
        for _ in range(megabytes):
            block = dice.randbytes(1_000_000)
            digest.update(block)
            out.write(block)
    path.with_suffix(".sha256").write_text(digest.hexdigest())
    return path


ROWS = {row.__name__: row for row in (shards, home, cuts, memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", default=",".join(ROWS))
    options = parser.parse_args()
    print(f"{cpu()}, {os.cpu_count()} cores; best of {options.rounds}")
    print("| what | ours | theirs | ratio | bar | held | |\n| --- | --- | --- | --- | --- | --- | --- |")
    for name in options.rows.split(","):
        with tempfile.TemporaryDirectory(prefix="gpurun-bench-") as work:
            bench = Bench(Path(work), options.rounds)
            ROWS[name](bench, FULL if options.full else SMALL)
            bench.sshd.close()


if __name__ == "__main__":
    main()

"""Compares preparing a corpus with its tokenizer alone and with the script that most people use. `make bench-prepare`.

Rates are ratios of CPU time (user and system, children included) over interleaved rounds, so that other work on the
machine slows both sides alike; wall time is printed beside them. The row of the usual script needs `pip install
datasets` and is left out without it. `--rows core,usual,memory` selects rows; `memory` is the memory of two processes
that read large pages of Parquet and very long lines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import tiktoken

from gpurun.data.documents import Document
from gpurun.data.split import bound_for
from gpurun.data.tasks import write_task
from tests.memory import tree_bytes, tree_cpu_s
from trainer.tokenizer import Gpt2Tokenizer, shipped_gpt2_tokens

ROOT = Path(__file__).parents[2]
VAL_FRACTION = 0.005
_TWO_PROCESSES = """
import pathlib, sys
from gpurun.data.prepare import PrepareOrder, prepare
few = {"least_train_tokens": 0, "least_val_tokens": 0}
prepare(PrepareOrder(sys.argv[1], "gpt2", pathlib.Path(sys.argv[2]), **few), print, workers=2)
"""


def gather(most_bytes: int) -> list[str]:
    """Return about `most_bytes` of Python source on this machine: the standard library, then installed packages."""
    paths = sysconfig.get_paths()
    texts, size = [], 0
    for root in (paths["stdlib"], paths["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            texts.append(text)
            size += len(text)
            if size >= most_bytes:
                return texts
    return texts


def cpu_s(act: Callable[[], object]) -> tuple[float, float]:
    """Return (CPU seconds of this process and its ended children, wall seconds) of `act`."""

    def used() -> float:
        kinds = (resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in kinds)

    before, began = used(), time.perf_counter()
    act()
    return used() - before, time.perf_counter() - began


def per_core(texts: list[str], folder: Path, rounds: int) -> None:
    """Print the rate from text to finished shards in one process, and the rate of tiktoken in one thread."""

    tokens = shipped_gpt2_tokens()
    ours = Gpt2Tokenizer(tokens, threads=1)
    raw: tiktoken.Encoding = ours._encoding
    size, bound = sum(len(text.encode()) for text in texts), bound_for(VAL_FRACTION)
    ratios, rates = [], []
    for number in range(rounds):
        documents = [Document(str(place), text) for place, text in enumerate(texts)]
        theirs_s, _ = cpu_s(lambda: raw.encode_ordinary_batch(texts, num_threads=1))
        ours_s, _ = cpu_s(lambda n=number, d=documents: write_task(d, ours, folder, n, bound=bound, identity=""))
        ratios.append(theirs_s / ours_s)
        rates.append((size / ours_s / 1e6, size / theirs_s / 1e6))
    mine, other = (statistics.median(column) for column in zip(*rates, strict=True))
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"per core: {mine:.1f} MB of text a second, tiktoken alone {other:.1f}")
    print(f"  = {statistics.median(ratios):.2f}x of tiktoken.encode_ordinary_batch ({spread}, {rounds} rounds)")


def usual_script(source: Path, out: Path, processes: int) -> None:
    """Do what most people do: datasets.map with tiktoken in `processes` processes, then one memory map of uint16."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out / "cache"))
    parts = rows.train_test_split(test_size=VAL_FRACTION, seed=1, shuffle=True)
    made = parts.map(_tokenised, remove_columns=["text"], num_proc=processes)
    for name, part in made.items():
        total = int(np.sum(part["length"], dtype=np.uint64))
        row = np.memmap(out / f"{name}.bin", dtype=np.uint16, mode="w+", shape=(total,))
        place, batches = 0, min(1024, len(part))
        for number in range(batches):
            piece = part.shard(num_shards=batches, index=number, contiguous=True).with_format("numpy")
            ids = np.concatenate(piece["ids"])
            row[place : place + len(ids)] = ids
            place += len(ids)
        row.flush()


def _tokenised(example: dict[str, str]) -> dict[str, object]:
    ids = [*_encoding().encode_ordinary(example["text"]), 50256]
    return {"ids": ids, "length": len(ids)}


@cache
def _encoding() -> tiktoken.Encoding:
    return Gpt2Tokenizer(shipped_gpt2_tokens(), threads=1)._encoding


def against_datasets(source: Path, folder: Path, processes: int, rounds: int) -> None:
    """Print the CPU and wall time of the usual script divided by those of the whole command."""
    ratios, walls, peaks = [], [], []
    for number in range(rounds):
        theirs, ours = folder / f"theirs-{number}", folder / f"ours-{number}"
        theirs.mkdir()
        usual = [sys.executable, __file__, "--usual", str(source), str(theirs), "--processes", str(processes)]
        command = [sys.executable, "-m", "gpurun", "data", "prepare", "gpt2-124m", "--source", str(source)]
        command += ["--out", str(ours), "--workers", str(processes), "--home", str(folder / "home")]
        their_cpu, their_wall, _ = _run(usual)
        our_cpu, our_wall, (peak, _) = _run(command)
        ratios.append(their_cpu / our_cpu)
        walls.append(their_wall / our_wall)
        peaks.append(peak)
        line = f"{our_cpu:.1f} s of CPU in {our_wall:.1f} s, the script {their_cpu:.1f} in {their_wall:.1f}"
        print(f"  {line}", flush=True)
    print(f"against datasets.map, {processes} processes: {statistics.median(ratios):.2f}x by CPU time "
          f"({min(ratios):.2f} to {max(ratios):.2f}), {statistics.median(walls):.2f}x by the wall clock")  # fmt: skip
    print(f"memory of the whole tree: {max(peaks) / 1e6:.0f} MB at most")


def awkward(texts: list[str], folder: Path) -> None:
    """Print two processes' memory on large Parquet pages and long lines, with shared memory counted twice and once."""
    import pyarrow
    import pyarrow.parquet

    text = "".join(texts)
    text *= 1 + 200_000_000 // len(text)

    def documents(size: int, count: int) -> list[str]:
        return [text[(at := place * 90_001 % (len(text) - size)) : at + size] for place in range(count)]

    def books(place: Path, size: int, count: int, codec: str = "zstd") -> None:
        table = pyarrow.table({"text": documents(size, 4 * count)})
        pyarrow.parquet.write_table(table, place, row_group_size=count, compression=codec)

    def lines(place: Path) -> None:
        with place.open("w") as file:
            file.writelines(json.dumps({"text": document}) + "\n" for document in documents(50_000_000, 4))

    rows: dict[str, tuple[str, Callable[[Path], None]]] = {
        "lines of JSON of 50 MB": ("lines.jsonl", lines),
        "Parquet, pages of 150 books of 400 kB (60 MB)": ("books.parquet", lambda place: books(place, 400_000, 150)),
        "the same, snappy": ("books.parquet", lambda place: books(place, 400_000, 150, "snappy")),
        "Parquet, pages of 1,024 such books (410 MB)": ("books.parquet", lambda place: books(place, 400_000, 1024)),
        "those, snappy": ("books.parquet", lambda place: books(place, 400_000, 1024, "snappy")),
        "Parquet, pages of two documents of 50 MB": ("two.parquet", lambda place: books(place, 50_000_000, 2)),
    }
    for number, (what, (name, write)) in enumerate(rows.items()):
        source, out = folder / name, folder / f"awkward-{number}"
        write(source)
        _, wall, (peak, shared_once) = _run([sys.executable, "-c", _TWO_PROCESSES, str(source), str(out)])
        figures = f"{peak / 1e6:.0f} MB, what is shared counted once {shared_once / 1e6:.0f}; {wall:.0f} s"
        print(f"{what}: {figures}", flush=True)


def _run(command: list[str]) -> tuple[float, float, tuple[int, int]]:
    """Run a command that must succeed; return its CPU seconds, wall seconds and the peak resident bytes of its process
    tree as (shared memory counted in each process, shared memory counted once)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    peaks, used = (0, 0), 0.0

    def once() -> None:
        nonlocal peaks
        with tempfile.TemporaryFile() as talk:
            child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=talk, stderr=talk)
            ended = threading.Event()

            def watch() -> None:
                nonlocal peaks, used
                while not ended.wait(0.03):
                    used = max(used, tree_cpu_s(child.pid))
                    peaks = max(peaks[0], tree_bytes(child.pid)), max(peaks[1], tree_bytes(child.pid, shared_once=True))

            watcher = threading.Thread(target=watch)
            watcher.start()
            code = child.wait()
            ended.set()
            watcher.join()
            talk.seek(0)
            assert code == 0, talk.read().decode()[-2000:]

    began = time.perf_counter()
    once()
    return used, time.perf_counter() - began, peaks


def main() -> None:
    """Run the measurements named in --rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="core,usual,memory")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--usual", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.usual:
        usual_script(*given.usual, given.processes)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = gather(given.megabytes * 10**6)
        size = sum(len(text.encode()) for text in texts)
        print(f"{len(texts):,} Python sources, {size / 1e6:.0f} MB")
        rows = given.rows.split(",")
        few = texts[: max(1, len(texts) // 4)]
        if "core" in rows:
            per_core(few, folder, given.rounds + 2)
        if "usual" in rows and find_spec("datasets") is None:
            print("against datasets.map: not measured; pip install datasets")
        elif "usual" in rows:
            source = folder / "corpus.jsonl"
            with source.open("w") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            against_datasets(source, folder, given.processes, given.rounds)
        if "memory" in rows:
            awkward(texts, folder)


if __name__ == "__main__":
    main()

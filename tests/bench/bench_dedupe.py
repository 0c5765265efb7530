"""Plants duplicates in text files of this machine; counts the duplicates found and the clean documents dropped.

    python tests/bench/bench_dedupe.py [--documents 8000] [--planted 800] [--many 2000000]

A document is clean if its Jaccard similarity with every other document is below the threshold. The similarity is
computed exactly, from the whole sets of five-word runs with a sparse matrix product, not from signatures. The planted
duplicates are copies with other white space, copies with 2 to 5 % of the words changed, and other texts under another
spelling of the same address. With --many, fingerprints of that many made-up documents are searched, to measure the
memory. Prints rows for docs/dev/BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import sysconfig
import tempfile
import time
import zlib
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpurun.data.dedupe import signatures
from gpurun.data.dedupe.fingerprint import PERMUTATIONS
from gpurun.data.dedupe.signatures import Dedupe, SignatureWriter
from gpurun.data.dedupe.stage import FingerprintWriter, drop_filter, find_duplicates
from gpurun.data.documents import Document
from tests.memory import forget_own_peak, own_peak_bytes

KINDS = ("exact", "near", "url")
_WORD = re.compile(r"\w+")
_ROW = "| {what} | {figure} | {bar} | {date}, A | `{command}` |"


def real_documents(most: int, seed: int) -> list[str]:
    """Return up to `most` sources and documents of this machine, each of forty words or more, in a random order."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")] + [Path("/usr/share")]
    files = sorted(
        {path for root in roots for end in ("py", "md", "rst", "txt", "html") for path in root.rglob(f"*.{end}")}
    )
    files += sorted(Path("/usr/share/doc").rglob("copyright"))
    random.Random(seed).shuffle(files)
    found: list[str] = []
    for path in files:
        if len(found) == most:
            break
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(_WORD.findall(text)) >= 40 and len(text) < 1_000_000:
            found.append(text)
    return found


def is_clean(texts: list[str], threshold: float) -> np.ndarray:
    """Return for each text whether its exact similarity with every other text is below the threshold."""
    from scipy.sparse import csr_matrix

    columns, starts = [], [0]
    for text in texts:
        words = _WORD.findall(text.casefold())
        runs = {zlib.crc32(" ".join(words[i : i + 5]).encode("utf-8", "replace")) for i in range(len(words) - 4)}
        columns += runs
        starts.append(starts[-1] + len(runs))
    _, places = np.unique(np.array(columns, dtype=np.uint32), return_inverse=True)
    matrix = csr_matrix((np.ones(len(places), dtype=np.int32), places, starts))
    sizes, clean = np.diff(starts), np.ones(len(texts), dtype=bool)
    for start in range(0, len(texts), 500):
        shared = (matrix[start : start + 500] @ matrix.T).tocoo()
        rows = shared.row + start
        alike = shared.data / (sizes[rows] + sizes[shared.col] - shared.data) >= threshold
        clean[rows[alike & (rows != shared.col)]] = False
    return clean


def changed(text: str, share: float, draw: random.Random) -> str:
    """Return the text with that share of its words replaced."""
    parts = re.split(r"(\w+)", text)
    places = range(1, len(parts), 2)
    for place in draw.sample(places, max(1, round(share * len(places)))):
        parts[place] = f"other{draw.randrange(10**6)}"
    return "".join(parts)


def plant(texts: list[str], count: int, draw: random.Random) -> list[Document]:
    """Return `count` duplicates of each kind in random order. Text number N has the address example.org/N."""
    planted = []
    for kind in KINDS:
        for number in draw.sample(range(len(texts)), count):
            text, url = texts[number], ""
            if kind == "exact":
                text = text.replace("\n", "\r\n") + " \n"
            elif kind == "near":
                text = changed(text, draw.uniform(0.02, 0.05), draw)
            else:
                url, text = f"http://www.EXAMPLE.org/{number}/?utm_source=x", f"{draw.random()} " * 50
            planted.append(Document(f"{kind} {len(planted)}", text, url))
    draw.shuffle(planted)
    return planted


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Plant duplicates, compute signatures and search; return the shares found and wrongly dropped, and the cost."""
    draw, dedupe = random.Random(given.seed), Dedupe(threshold=given.similarity)
    texts = real_documents(given.documents, given.seed)
    clean = is_clean(texts, dedupe.threshold)
    corpus = [Document(f"{number}", text, f"https://example.org/{number}") for number, text in enumerate(texts)]
    planted = plant(texts, given.planted, draw)
    tasks = [corpus[::2], corpus[1::2], planted]
    size = sum(len(text.text.encode("utf-8", "replace")) for task in tasks for text in task)
    begun = time.process_time()
    for index, task in enumerate(tasks):
        FingerprintWriter(folder, dedupe, "", "text").do(index, task, lambda count: None)
    signed = time.process_time()
    find_duplicates(folder, len(tasks), dedupe, identity="")
    searched = time.process_time()
    gone = {
        text.name
        for index, task in enumerate(tasks)
        for goes in [drop_filter(folder, index)]
        for text in task
        if goes()
    }
    found = {
        kind: sum(text.name in gone for text in planted if text.name.startswith(kind)) / given.planted for kind in KINDS
    }
    wrong = sum(f"{number}" in gone for number in np.flatnonzero(clean))
    return {
        "documents": len(texts), "bytes": size, "clean": int(clean.sum()), "wrong": wrong, "found": found,
        "signing": size / (signed - begun), "search_s": searched - signed,
    }  # fmt: skip


def write_many(folder: Path, documents: int, dedupe: Dedupe) -> None:
    """Write fingerprints of made-up documents in tasks of 250,000; every tenth is similar to the previous one."""
    dice = np.random.default_rng(1)
    for index, start in enumerate(range(0, documents, 250_000)):
        with SignatureWriter(folder, index, dedupe, "") as writer:
            for first in range(start, min(start + 250_000, documents), signatures.BLOCK):
                length = min(signatures.BLOCK, start + 250_000 - first, documents - first)
                rows = dice.integers(0, 2**32 - 1, (length, PERMUTATIONS), dtype=np.uint32)
                rows[9::10, : PERMUTATIONS * 3 // 4] = rows[8:-1:10, : PERMUTATIONS * 3 // 4][: len(rows[9::10])]
                keys = dice.integers(1, 2**63, (length, 2), dtype=np.uint64)
                writer.add_block(keys, rows)


def search_many(folder: Path, documents: int) -> tuple[int, float, int]:
    """Return (peak memory in bytes, CPU seconds, documents dropped) of a search. Call it in a process of its own."""
    dedupe = Dedupe()
    forget_own_peak()
    begun = time.process_time()
    record = find_duplicates(folder, -(-documents // 250_000), dedupe, identity="")
    return own_peak_bytes(), time.process_time() - begun, sum(record["dropped"].values())


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=8000)
    parser.add_argument("--planted", type=int, default=800)
    parser.add_argument("--similarity", type=float, default=Dedupe.threshold)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--many", type=int, default=0, help="made-up documents to search, for the memory")
    given = parser.parse_args()
    date, command = datetime.now(UTC).strftime("%Y-%m-%d"), "python tests/bench/bench_dedupe.py"
    with tempfile.TemporaryDirectory() as name:
        got = measure(given, Path(name))
    found = ", ".join(f"{kind} {share:.1%}" for kind, share in got["found"].items())
    size = f"{got['documents']:,} documents, {got['bytes'] / 1e6:.0f} MB with {given.planted} planted of each kind"
    print(_ROW.format(what=f"planted duplicates found ({size})", figure=found, bar="95 %", date=date, command=command))
    wrong = f"{got['wrong']} of {got['clean']:,} ({got['wrong'] / got['clean']:.2%})"
    print(_ROW.format(what="clean documents dropped", figure=wrong, bar="1 %", date=date, command=command))
    cost = f"{got['signing'] / 1e6:.1f} MB/s a core; {got['search_s']:.1f} s"
    print(_ROW.format(what="fingerprints; the search", figure=cost, bar="none", date=date, command=command))
    if given.many:
        with tempfile.TemporaryDirectory() as name:
            write_many(Path(name), given.many, Dedupe())
            with get_context("spawn").Pool(1) as pool:
                peak, seconds, gone = pool.apply(search_many, (Path(name), given.many))
        what = f"search of {given.many:,} documents' fingerprints: peak memory, CPU"
        figure = f"{peak / 1e6:.0f} MB, {seconds:.0f} s ({gone:,} go)"
        print(_ROW.format(what=what, figure=figure, bar="500 MB", date=date, command=f"{command} --many {given.many}"))


if __name__ == "__main__":
    main()

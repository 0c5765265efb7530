"""What one more process takes: nothing of what it shares with the others, and of a page no more than it must."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.memory import forget_own_peak, own_peak_bytes, tree_bytes
from trainer.prepare.corpora.division import forms_of
from trainer.prepare.corpora.workers import Tell, work_through
from trainer.prepare.sources.files import Form, Span
from trainer.prepare.sources.opening import open_source
from trainer.prepare.sources.reading import load_for, read_spans

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is told by /proc"),
]

_OPENED = """
import os, sys
from pathlib import Path
from trainer.prepare.corpora.executors import _Reading
from trainer.prepare.corpora.jobs import Signer
from trainer.prepare.corpora.look import _Look
from trainer.prepare.corpora.vocabulary import CharacterCounter
from trainer.prepare.dedupe.signatures import Dedupe
kinds = {"look": _Look, "count": CharacterCounter, "work": lambda *how: _Reading(Signer(Path(), Dedupe(), ""), *how)}
kinds[sys.argv[1]]("text", Path(), frozenset({sys.argv[2]})).open()
print("pyarrow.parquet" in sys.modules, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize(
    ("job", "form"), [("work", "parquet"), ("look", "parquet"), ("count", "parquet"), ("work", "lines")]
)
def test_what_parquet_is_read_with_is_loaded_before_the_fork_and_starts_no_thread(job: str, form: Form) -> None:
    """It takes 11 MB, of which nothing is shared where each loads it; a lock that a thread held stays held."""
    pytest.importorskip("pyarrow")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _OPENED, job, form]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    assert done.stdout.split() == [str(form == "parquet"), "1"]


@dataclass(frozen=True)
class Taken:
    """A job that reads a span and tells what that took of memory at most, and what is still held of it, in MB."""

    forms: frozenset[Form]

    def open(self) -> Callable[[Span, Tell], tuple[float, float]]:
        load_for(self.forms)
        return self._taken

    def _taken(self, span: Span, tell: Tell) -> tuple[float, float]:
        forget_own_peak()
        before = tree_bytes(os.getpid())
        for _ in read_spans([span], "text"):
            pass
        return (own_peak_bytes() - before) / 1e6, (tree_bytes(os.getpid()) - before) / 1e6


def taken(texts: list[str], path: Path, codec: str) -> list[tuple[float, float]]:
    """What a worker takes to read a file with one page of these texts, and then another one."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("a.parquet", "b.parquet"):
        parquet.write_table(arrow.table({"text": texts}), path / name, compression=codec, row_group_size=len(texts))
    spans = [Span(file, 0, 1) for file in open_source(str(path), "text", lambda _: None).files]
    job = Taken(forms_of([tuple(spans)]))
    return [found for _, found in work_through(job, spans, 1, lambda place, count: None)]


NOISE = "".join(f"{number * number} " for number in range(800_000))


@pytest.mark.parametrize("codec", ["zstd", "snappy"])
def test_a_page_of_what_the_web_has_takes_little_more_than_itself(codec: str, tmp_path: Path) -> None:
    texts = [NOISE[place * 3000 :][:3000] for place in range(1000)]
    _, (peak, _) = taken(texts, tmp_path, codec)
    assert peak < (3 if codec == "zstd" else 8), "pyarrow holds it three times"


def test_what_documents_of_some_hundred_kilobytes_took_is_given_back(tmp_path: Path) -> None:
    odd = ["", "é", "漢", "😀"]  # Of one, two and four bytes a character.
    parts = [
        [NOISE[at : at + 4000] for at in range(place, place + 400_000, 4000)] for place in range(0, 1_350_000, 9000)
    ]
    texts = [odd[number % 4].join(some) for number, some in enumerate(parts)]
    held = sum(held for _, held in taken(texts, tmp_path, "zstd"))
    assert held < 8, "what is freed in between is kept"

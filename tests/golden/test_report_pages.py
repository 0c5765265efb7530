"""Tests of the HTML report as text, and of what the page and the terminal show for unusual runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from drawing import check, check_scenes

from gpurun import __version__
from gpurun.cli.commands import report as verb
from gpurun.cli.commands.receipt import receipt
from gpurun.cli.session import Session
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Earlier, Mode
from tests.unit.ledger_samples import CloudRun
from tests.unit.report_samples import events, finished_run, opened_run, plan_of, write_events

BEFORE = Earlier(run="owl-07", step=60, bytes=1, receipt_sha256="a" * 64, spent_micros=usd(4))


class Words(HTMLParser):
    """The text of an HTML page as a reader sees it: a line for each block, with its cells separated."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.text, self.is_style = "", False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.is_style = tag == "style"
        self.text += {"td": " | ", "th": " | ", "span": " ", "small": " "}.get(tag, "\n" if tag not in "bia" else "")

    def handle_endtag(self, tag: str) -> None:
        self.is_style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self.is_style else " ".join(data.split()).join((" " * data[:1].isspace(), ""))

    @property
    def lines(self) -> list[str]:
        """Return the lines without receipts' digests and gpurun's version, which change from one report to the next."""
        text = re.sub(r"\b[0-9a-f]{64}\b", "SHA256", self.text).replace(f"gpurun {__version__}", "gpurun VERSION")
        text = re.sub(r"(receipt #\d+) [0-9a-f]{4}…[0-9a-f]{4}", r"\1 SHA256", text)
        return [line.strip(" |") for line in text.splitlines() if line.strip(" |")]


@pytest.fixture(autouse=True)
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.view.report.page.loss_chart", lambda *_, **__: "<svg></svg>")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def lines_of(home: Home, *runs: str) -> list[str]:
    path = home.root / "report.html"
    verb.report(Session(home=home, quiet=True), list(runs), html=str(path))
    return Words(path.read_text(encoding="utf-8")).lines


def test_a_page_of_two_runs(home: Home) -> None:
    finished_run(home, "fox-41", lr=3e-4, said="one ")
    finished_run(home, "owl-07", lr=6e-4, said="two ")
    check("report-page.txt", "\n".join(lines_of(home, "fox-41", "owl-07")))


def _went_on(home: Home, before: Earlier) -> None:
    folder = finished_run(home, "fox-41")
    folder.plan.write_text(plan_of("fox-41").model_copy(update={"continues": before}).to_json())


def _hostile(home: Home) -> None:
    odd = [b'{"kind":"step","step":70,"loss":NaN}', b'{"kind":"step","step":80,"loss":1e90}', b"\xff not json"]
    write_events(finished_run(home, "fox-41"), [*events(), *odd])


def _running(home: Home) -> None:
    run = opened_run(home, "fox-41").write()
    run.write(run.opened(), run.intended(), run.created())
    for note in [note for _, note in run.through_training()][:5]:
        run.write(note)


def _untrained(home: Home) -> None:
    bare = opened_run(home, "fox-41")
    bare.folder.events.unlink()
    bare.write(bare.opened())


def _forged(home: Home) -> None:
    folder = finished_run(home, "fox-41")
    envelope = json.loads(folder.receipt.read_bytes())
    envelope["signatures"][0]["sig"] = "A" * 86 + "=="
    folder.receipt.write_text(json.dumps(envelope))


def _best_was_lost(home: Home) -> None:
    run = opened_run(home, "fox-41")
    write_events(run.folder, [event | ({"val_loss": 1.5} if (event["kind"], event["step"]) == ("eval", 60) else {})
                              for event in events()])  # fmt: skip
    write = run.journal.write
    run.journal.write = lambda event, data: write(  # type: ignore[method-assign]
        event, {**data, "best": {"step": 120, "val_loss": 2.0}} if event is Event.COLLECT_OBSERVED else data
    )
    run.until_gone().settle()


def _failed(home: Home) -> None:
    class Killed(CloudRun):
        def through_training(self) -> Any:
            for seconds, (event, data) in super().through_training():
                ending = {"outcome": "failed", "reason": "", "exit_code": None, "message": "it was killed"}
                yield seconds, (event, {**data, **(ending if event is Event.TRAIN_OBSERVED else {})})

    run = Killed(home)
    run.folder.plan.write_text(plan_of("fox-41").to_json())
    write_events(run.folder, events())
    run.until_gone().settle()


ODD: dict[str, Callable[[Home], Any]] = {
    "a rehearsal": lambda home: finished_run(home, "fox-41", mode=Mode.REHEARSAL),
    "a translation": lambda home: finished_run(home, "fox-41", preset="encoder-decoder", tokenizer="word-pairs"),
    "it went on from another": lambda home: _went_on(home, BEFORE),
    "it went on at an unknown cost": lambda home: _went_on(home, BEFORE.model_copy(update={"spent_micros": None})),
    "lines that cannot be read": _hostile,
    "it runs": _running,
    "it never trained": _untrained,
    "it failed": _failed,
    "one loss": lambda home: write_events(finished_run(home, "fox-41"), events()[:2]),
    "a forged signature": _forged,
    "its best checkpoint is lost": _best_was_lost,
}
COMPARED: dict[str, dict[str, str]] = {
    "the same recipe": {},
    "other shards": {"source": "file"},
    "other tokens": {"tokenizer": "gpt2"},
}


def test_runs_unlike_the_usual_one(tmp_path: Path) -> None:
    """Only lines that the usual run's page and terminal do not have are compared."""
    usual = Home(tmp_path / "usual").prepare()
    finished_run(usual, "fox-41")
    known = {*lines_of(usual, "fox-41"), *_table(usual, "fox-41")}
    scenes = {}
    for number, (scene, make) in enumerate(ODD.items()):
        make(home := Home(tmp_path / f"{number}").prepare())
        lines = [*_table(home, "fox-41"), *lines_of(home, "fox-41")]
        scenes[scene] = "\n".join(line for line in lines if line not in known)
    check_scenes("report-odd.txt", scenes)


def test_runs_that_are_compared(tmp_path: Path) -> None:
    scenes = {}
    for number, (scene, other) in enumerate(COMPARED.items()):
        home = Home(tmp_path / f"{number}").prepare()
        finished_run(home, "fox-41")
        finished_run(home, "owl-07", **other)
        page = lines_of(home, "fox-41", "owl-07")
        lines = [*_table(home, "fox-41", "owl-07"), "", *(line for line in page if re.search("differ|Best|same", line))]
        scenes[scene] = "\n".join(lines)
    check_scenes("report-compared.txt", scenes)


def _table(home: Home, *runs: str) -> list[str]:
    """Return the lines of the terminal without the chart."""
    lines = verb.report(Session(home=home, quiet=True), list(runs), html="").text.splitlines()
    return [line for line in lines if not re.search("[│┤]|^ +0 +step", line)]


def test_a_receipt_whose_best_checkpoint_is_lost(home: Home) -> None:
    _best_was_lost(home)
    text = receipt(Session(home=home, quiet=True), "fox-41", md=False).text
    check("receipt-best-lost.txt", "\n".join(line for line in text.splitlines() if "best val" in line))

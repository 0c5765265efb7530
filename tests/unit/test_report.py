"""Tests of the report: one page that any reader can open safely, whatever its runs contain."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpurun.cli.app import build_app
from gpurun.cli.commands import report as verb
from gpurun.cli.commands.export import figures_of
from gpurun.cli.commands.receipt import receipt
from gpurun.cli.session import Session
from gpurun.core.clock import utc
from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, cost_of, format_exact_usd, usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Earlier, Mode, Request
from gpurun.ledger.runs import look_at_run
from gpurun.view.receipt_screen import NOT_HERE
from gpurun.view.report.grid import align_rows
from gpurun.view.report.series import MOST_MARKS, Kept, Mark, WrittenSample, hear
from gpurun.view.report.svg_charts import DOLLARS, Curve, above, axes_for, loss_chart, smooth
from gpurun.view.styled_text import cells
from tests.refusals import lacking, refusal
from tests.unit.ledger_samples import RATE, CloudRun, Note
from tests.unit.report_samples import TOKENS_PER_STEP, events, finished_run, opened_run, page_of, plan_of, write_events

AWAY = NOT_HERE.removeprefix("but ")
"""The remark on a best loss whose checkpoint was not downloaded."""


class Page(HTMLParser):
    """A report page as a browser would parse it: its elements with their attributes, and its text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(autouse=True)
def charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the charts, which take half a second of CPU per page, unless the test requests the fixture `drawn`."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("gpurun.view.report.page.loss_chart", lambda *_, **__: "<svg></svg>")


@pytest.fixture
def drawn() -> None:
    """Make `charts` keep the real charts."""


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(home=Home(tmp_path / "home").prepare(), quiet=True)


def report(session: Session, *runs: str) -> tuple[Page, str, dict[str, Any]]:
    """Write the report of these runs; return the parsed page, its HTML text, and its data."""
    path = session.home.root / "report.html"
    result = verb.report(session, list(runs), html=str(path))
    json.dumps(dict(result.data), allow_nan=False)
    return Page(page_of(path)), page_of(path), dict(result.data)


@pytest.mark.usefixtures("drawn")
def test_runs_are_overlaid_and_their_samples_stand_side_by_side(session: Session) -> None:
    finished_run(session.home, "fox-41", lr=3e-4, said="one ")
    finished_run(session.home, "owl-07", lr=6e-4, said="two ")
    page, content, data = report(session, "fox-41", "owl-07")
    assert {"var(--run-0)", "var(--run-1)"} <= set(re.findall(r"var\(--run-\d\)", content))
    assert data["differences"] == [{"key": "optim.lr", "values": ["0.0003", "0.0006"]}]
    row = content[content.index("step 120</th>") :]
    cells = re.findall(r"<td data-label=\"([\w-]+)\"><pre>(.*?)</pre>", row[: row.index("</tr>")])
    assert cells == [("fox-41", "<b>The </b>one 120"), ("owl-07", "<b>The </b>two 120")]
    receipts = [run["receipt_sha256"] for run in data["runs"]]
    assert all(digest in page.words for digest in receipts)
    assert lacking(page.words, "2.100 by fox-41", "epoch 2.00", "perplexity 8.2", "1.250 bits", "29.4 %") == []


def test_one_recipe_on_other_shards_is_not_called_the_same(session: Session) -> None:
    for name, source in (("fox-41", "stdlib"), ("owl-07", "file"), ("elk-33", "stdlib")):
        finished_run(session.home, name, source=source)
    _, _, data = report(session, "fox-41", "owl-07")
    (row,) = data["differences"]
    assert (row["key"], [value.split(",")[0] for value in row["values"]]) == ("data", ["stdlib", "file"])

    _, _, data = report(session, "fox-41", "elk-33")
    assert data["differences"] == []


def test_a_translation_that_counts_padding_is_given_no_epoch(session: Session) -> None:
    finished_run(session.home, "fox-41")
    finished_run(session.home, "owl-07", preset="encoder-decoder", tokenizer="word-pairs")
    assert "epoch 2.00" in report(session, "fox-41")[0].words
    translation = report(session, "owl-07")[0].words
    assert "2.100" in translation
    assert "epoch" not in translation


@pytest.mark.parametrize("other", [{"tokenizer": "gpt2"}, {"source": "file"}], ids=["other tokens", "other shards"])
def test_losses_of_different_measures_are_not_compared(session: Session, other: dict[str, str]) -> None:
    for name, more in (("fox-41", {}), ("owl-07", other), ("elk-33", {})):
        finished_run(session.home, name, **{"tokenizer": "char", "source": "stdlib", **more})
    page, content, _ = report(session, "fox-41", "elk-33")
    assert "2.100 by fox-41" in page.words
    assert "<b>2.100</b>" in content
    alike = verb.report(session, ["fox-41", "elk-33"], html="").text
    page, content, _ = report(session, "fox-41", "owl-07")
    assert "2.100 by" not in page.words
    assert "<b>2.100</b>" not in content
    assert len(verb.report(session, ["fox-41", "owl-07"], html="").text.splitlines()) > len(alike.splitlines())


@pytest.mark.usefixtures("drawn")
def test_the_page_runs_and_loads_nothing_and_is_reproducible(session: Session) -> None:
    finished_run(session.home, "fox-41")
    page, content, _ = report(session, "fox-41")
    policy = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert ["default-src 'none'" in (one or "") for one in policy] == [True]
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "img", "iframe", "object", "form", "a"})
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")]
        assert (attributes.get("href") or "#").startswith("#")
    assert set(re.findall(r"url\((.)", content)) <= {"#"}
    assert "@import" not in content
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids)), "a name that stands twice would let one chart use another's parts"
    assert report(session, "fox-41")[1] == content


LYING_START = (
    b'{"kind":"start","steps":1e400,"cuda_name":"\\"><script>x</script>","tokens_per_step":-1,"train_tokens":0}'
)
HOSTILE = [
    b'{"kind":"sample","step":60,"prompt":"<script>alert(1)</script>","text":"\\u001b]52;c;aGk=\\u0007<img src=x>"}',
    b'{"kind":"sample","step":60,"prompt":"The ","text":"' + b"A" * (10 << 20) + b'"}',
    b'{"kind":"step","step":70,"loss":NaN}',
    b'{"kind":"step","step":80,"loss":1e999}',
    b'{"kind":"step","step":90,"loss":1e90,"elapsed_s":1e300}',
    b'{"kind":"eval","step":-5,"val_loss":"</style><script>"}',
    b'{"kind":"warning","message":"\\u202e<b>evil</b>\\u001b[2J"}',
    b"[" * 100_000,
    b"\xff\xfe\x00 not json",
    b'{"kind":["step"]}',
]


@pytest.mark.usefixtures("drawn")
def test_whatever_a_machine_says_the_page_only_quotes_it(session: Session) -> None:
    folder = finished_run(session.home, "fox-41")
    write_events(folder, [LYING_START, *events(), *HOSTILE, {"kind": "stop", "reason": "done", "step": 120}])
    page, content, data = report(session, "fox-41")
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "img"})
    assert "<script>alert(1)</script>" in page.words, "as text"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", content)
    assert len(content) < 2 << 20
    notes = " ".join(data["runs"][0]["notes"])
    assert lacking(notes, "4 lines", "3 losses") == []
    assert "1 losses" in page.words


def test_a_running_run_is_shown_as_it_is_even_with_half_a_line(session: Session) -> None:
    run = opened_run(session.home, "fox-41").write()
    run.write(run.opened(), run.intended(), run.created())
    for event, data in [note for _, note in run.through_training()][:5]:
        run.write((event, data))
    with run.folder.events.open("ab") as torn:
        torn.write(b'{"kind":"step","st')
    page, _, data = report(session, "fox-41")
    row = data["runs"][0]
    assert (row["verdict"], row["receipt_sha256"], row["cost_is"]) == (None, None, "so far")
    assert len(row["notes"]) == 1, "that it is not finished, and nothing of the torn line"
    assert "no receipt" in page.words
    assert "2.100" in page.words


def test_a_run_that_never_trained_and_a_rehearsal_say_so(session: Session) -> None:
    bare = opened_run(session.home, "fox-41")
    bare.folder.events.unlink()
    bare.write(bare.opened())
    finished_run(session.home, "owl-07", mode=Mode.REHEARSAL)
    page, content, data = report(session, "fox-41", "owl-07")
    assert [len(run["notes"]) for run in data["runs"]] == [2, 1]
    assert "tiny (rehearsal)" in page.words
    assert 'class="dollars"' not in content, "a rehearsal costs nothing"


def test_a_continued_run_does_not_pass_for_the_whole(session: Session) -> None:
    run = opened_run(session.home, "owl-07")
    before = Earlier(run="fox-41", step=60, bytes=1, receipt_sha256="a" * 64, spent_micros=usd(4))
    run.folder.plan.write_text(plan_of("owl-07").model_copy(update={"continues": before}).to_json())
    run.until_gone().settle()
    said = figures_of(session, look_at_run(session.home, "owl-07"), 120)["continued from"]
    assert lacking(said, "fox-41", "step 60", "$4.00") == []
    assert said in report(session, "owl-07")[0].words


def test_a_continued_runs_dollars_begin_with_the_earlier_cost(session: Session) -> None:
    folder = finished_run(session.home, "fox-41")

    def spent(before: Earlier | None) -> Micros | None:
        folder.plan.write_text(plan_of("fox-41").model_copy(update={"continues": before}).to_json())
        return Micros(report(session, "fox-41")[2]["runs"][0]["loss"][0][-1])

    earlier, alone = Earlier(run="owl-07", step=60, bytes=1, receipt_sha256="a" * 64, spent_micros=usd(4)), spent(None)
    assert alone
    assert spent(earlier) == alone + usd(4)
    folder.plan.write_text(
        plan_of("fox-41").model_copy(update={"continues": earlier.model_copy(update={"spent_micros": None})}).to_json()
    )
    assert report(session, "fox-41")[2]["runs"][0]["loss"][0][-1] is None, "what is not known is not drawn for less"


def test_a_receipt_whose_signature_is_bad_is_called_that(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished_run(session.home, "fox-41")
    envelope = json.loads(folder.receipt.read_bytes())
    envelope["signatures"][0]["sig"] = "A" * 86 + "=="
    folder.receipt.write_text(json.dumps(envelope))
    assert "bad signature" in report(session, "fox-41")[0].words
    for width in ("60", "120"):
        monkeypatch.setenv("COLUMNS", width)
        row = verb.report(Session(home=session.home, quiet=True), ["fox-41"], html="").text.splitlines()[1]
        assert row.endswith("BAD SIGNATURE")
    folder.receipt.write_text("{}")
    page, _, data = report(session, "fox-41")
    assert "receipt.json" in data["runs"][0]["no_receipt"]
    assert "no receipt" in page.words
    folder.receipt.unlink()
    assert report(session, "fox-41")[2]["runs"][0]["no_receipt"]


@pytest.mark.usefixtures("drawn")
def test_dollars_count_from_the_moment_the_machine_was_asked_for(session: Session) -> None:
    folder = finished_run(session.home, "fox-41")
    records = [json.loads(line) for line in folder.journal.read_bytes().splitlines()]
    ordered, started = (
        next(r["wall"] for r in records if r["event"] == event)
        for event in (Event.CREATE_INTENDED, Event.TRAIN_STARTED)
    )
    _, content, data = report(session, "fox-41")
    step, loss, tokens, seconds, micros = data["runs"][0]["loss"][-1]
    assert (step, loss, tokens, seconds) == (120, 2.0, 120 * TOKENS_PER_STEP, 125.0)
    assert micros == cost_of(Micros(RATE), started - ordered + 125.0, 60)
    assert 'class="dollars"' in content
    assert content.count("<title>step 120: 2.1000</title>") == 8, (
        "every point of eight drawings has its figures as text"
    )


def test_a_trainer_that_went_on_from_a_checkpoint_is_heard_once() -> None:
    again = [{"kind": "start", "step": 60, "elapsed_s": 4.0, "resumed_from": 60, "steps": 120}]
    again += [{"kind": "step", "step": 70, "elapsed_s": 14.0, "loss": 1.5}]
    history = hear(json.dumps(event).encode() for event in [*events(), *again])
    assert [mark.step for mark in history.losses.items] == [10, 20, 30, 40, 50, 60, 70]
    assert history.losses.items[-1].seconds == 127.0 + 14.0
    assert [mark.step for mark in history.validation.items] == [60]
    assert [mark.step for mark in history.samples["The "].items] == [60]


def test_a_flood_keeps_a_bounded_even_part_and_the_last() -> None:
    kept = Kept[int](8)
    for number in range(1000):
        kept.add(number)
    assert kept.items == [0, 256, 512, 768, 999]
    history = hear(b'{"kind":"step","step":%d,"loss":1.0}' % step for step in range(3 * MOST_MARKS))
    assert len(history.losses.items) <= MOST_MARKS + 1
    assert history.losses.items[-1].step == 3 * MOST_MARKS - 1


def test_the_best_loss_is_the_best_of_all_even_if_not_kept() -> None:
    def heard(*more: dict[str, Any]) -> tuple[int, float] | None:
        losses = [2.0 if step == 7_002 else 3.0 + step / 1e6 for step in range(1, 2 * MOST_MARKS)]
        evals = [{"kind": "eval", "step": step, "val_loss": loss} for step, loss in enumerate(losses, 1)]
        best = hear(json.dumps(event).encode() for event in [*evals, *more]).best
        return best and (best.step, best.loss)

    assert heard() == (7_002, 2.0)
    assert heard({"kind": "start", "step": 7_001, "resumed_from": 7_001}) == (1, 3.000001), "7 002 is done again"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_and_its_notes_fit_the_terminal(
    width: int, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = Earlier(run="owl-07", step=60, bytes=1, receipt_sha256="a" * 64, spent_micros=usd(4))
    folder = finished_run(session.home, "fox-41")
    folder.plan.write_text(plan_of("fox-41").model_copy(update={"continues": earlier}).to_json())
    monkeypatch.setenv("COLUMNS", str(width))
    text = verb.report(Session(home=session.home, quiet=True), ["fox-41"], html="").text
    assert "owl-07" in text
    assert max(cells(line) for line in text.splitlines()) <= width


def test_samples_stand_by_shared_step_or_else_in_order() -> None:
    columns = [[WrittenSample(step, ()) for step in steps] for steps in ((60, 120), (60, 120, 180), (7, 13))]
    assert [name for name, _ in align_rows(columns[:2])] == ["step 60", "step 120", "step 180"]
    rows = align_rows(columns[1:])
    assert [name for name, _ in rows] == ["no. 1", "no. 2", "no. 3"]
    assert [[one and one.step for one in cells] for _, cells in rows] == [[60, 7], [120, 13], [180, None]]


def test_a_mean_does_not_lag_behind_a_falling_loss() -> None:
    falling = [10.0 - 0.5 * i for i in range(12)]
    assert smooth(falling, 3)[:-3] == pytest.approx(falling[:-3])
    assert smooth([1.0, 5.0, 1.0, 5.0, 1.0], 1) == pytest.approx([1.0, 7 / 3, 11 / 3, 7 / 3, 3.0])


def test_where_a_mean_ends_is_no_single_batch() -> None:
    assert smooth([3.0] * 599 + [3.4], 10)[-1] == pytest.approx(3.0, abs=0.05)


@pytest.mark.plots
@pytest.mark.process
def test_what_matplotlib_starts_has_no_key_of_a_cloud(tmp_path: Path) -> None:
    (tmp_path / "fc-list").write_text(f"#!/bin/sh\nenv >> {tmp_path}/seen\n")
    (tmp_path / "fc-list").chmod(0o755)
    words = "from gpurun.view.report.svg_charts import STEPS, loss_chart as draw; import os; draw([], STEPS)"
    words += "; print(os.environ['RUNPOD_API_KEY'])"
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MPLCONFIGDIR": str(tmp_path), "RUNPOD_API_KEY": "rpa_CANARY"}
    command = [sys.executable, "-c", words]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True)
    assert "MPLCONFIGDIR" in (tmp_path / "seen").read_text()
    assert "CANARY" not in (tmp_path / "seen").read_text()
    assert done.stdout == "rpa_CANARY\n"


def test_one_accident_does_not_flatten_the_rest() -> None:
    marks = [Mark(step, 4.0 - step / 60) for step in range(60)]
    curve = Curve([*marks, Mark(60, 1e9)], [])
    assert above([curve]) == 1
    assert [axis.name for axis in axes_for([curve])] == ["steps"]
    assert "1e+09" not in loss_chart([curve], axes_for([curve])[0])


def test_the_marks_of_an_axis_are_written_out() -> None:
    cheap = Curve([Mark(step, 2.125 + step / 1e4, spent_micros=Micros(2_500 * step)) for step in range(1, 9)], [])
    drawn = loss_chart([cheap], DOLLARS)
    assert ">$0.005<" in drawn
    assert ">2.1254<" in drawn


@pytest.mark.usefixtures("drawn")
def test_a_table_needs_no_matplotlib_and_a_page_says_it_does(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finished_run(session.home, "fox-41")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "2.100" in verb.report(session, ["fox-41"], html="").text
    with refusal(SetupError, "report.no_matplotlib") as missing:
        report(session, "fox-41")
    assert "[report]" in missing.value.hint
    assert not (session.home.root / "report.html").exists()


def test_runs_are_taken_by_glob_by_their_number_or_all(session: Session) -> None:
    for name in ("fox-41", "owl-07", "owl-08"):
        finished_run(session.home, name)

    def named(*runs: str, **more: Any) -> list[str]:
        return [run["run"] for run in verb.report(session, list(runs), html="", **more).data["runs"]]

    assert named("owl-*") == named("owl-0?", "owl-07") == ["owl-07", "owl-08"]
    assert named(last=2) == ["owl-07", "owl-08"]
    assert named("owl-08", every=True) == named(every=True) == ["fox-41", "owl-07", "owl-08"]
    assert named() == named(last=1) == ["owl-08"]
    with refusal(UsageError, "report.no_match"):
        named("elk-*")
    with refusal(UsageError, "report.last", "--last", "-1"):
        named(last=-1)


def test_differences_and_the_machines_end_are_on_table_and_page(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(session.home, "fox-41", lr=3e-4)
    finished_run(session.home, "owl-07", lr=6e-4)
    monkeypatch.setenv("COLUMNS", "160")
    table = verb.report(Session(home=session.home, quiet=True), ["fox-41", "owl-07"], html="").text
    assert [line.split("PROVEN")[1].split() for line in table.splitlines()[1:3]] == [["lr", "0.0003"], ["lr", "0.0006"]]
    page, content, data = report(session, "fox-41", "owl-07")
    assert "<small>lr 0.0003</small>" in content
    assert lacking(page.words, "hardware: runpod", "shutdown: PROVEN") == []
    assert {run["shutdown"] for run in data["runs"]} == {"destroyed"}


def test_the_page_shows_curves_first_then_time_and_machine(session: Session) -> None:
    for name, lr in (("fox-41", 3e-4), ("owl-07", 6e-4)):
        finished_run(session.home, name, lr=lr)
    page, content, data = report(session, "fox-41", "owl-07")
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["loss", "runs", "differs", "samples", "figures", "sources"]
    began = utc(look_at_run(session.home, "fox-41").opened_wall)
    assert f" · {began[:10]}" in page.words[: page.words.index("Loss")]
    assert f"done · {began[:16].replace('T', ' ')} UTC" in page.words
    row = content[content.index("<tbody><tr>") :]
    assert re.findall(r'data-label="hardware">(.*?)</td>', row) == ["NVIDIA H100<small>runpod 1×H100 80G</small>"] * 2
    assert data["runs"][0]["began_wall"] == look_at_run(session.home, "fox-41").opened_wall
    differing = content[content.index('id="differs"') : content.index('id="samples"')]
    assert re.findall(r"<td>(.*?)</td>", differing) == ["0.0003", "0.0006"], "one setting, and a row for each run"
    assert "·</td>" not in content, "where a run has no such setting the cell is empty"


def test_a_prompt_has_columns_for_the_runs_that_had_it(session: Session) -> None:
    finished_run(session.home, "fox-41")
    folder = finished_run(session.home, "owl-07")
    write_events(folder, [event for event in events() if event.get("prompt") != "def "])
    _, content, _ = report(session, "fox-41", "owl-07")
    alone = content[content.index("<q>def </q>") :]
    assert re.findall(r'data-label="([\w-]+)"><pre>', alone[: alone.index("</table>")]) == ["fox-41", "fox-41"]


def test_what_was_set_is_read_from_the_request(session: Session) -> None:
    """Two recipes may differ in every key; a key that the user set must still be shown."""
    runs = [finished_run(session.home, name) for name in ("fox-41", "owl-07")]
    many = [f"k{number}" for number in range(20)]
    for folder, (recipe, lr) in zip(runs, (("one", 1.0), ("two", 2.0)), strict=True):
        plan = json.loads(folder.plan.read_text())
        plan |= {"recipe": recipe, "resolved": {"optim": {"lr": lr}, "model": dict.fromkeys(many, lr)}}
        folder.plan.write_text(json.dumps(plan))
    runs[0].request.write_text(Request(recipe="one", overrides=("optim.lr=1",)).to_json())
    _, content, data = report(session, "fox-41", "owl-07")
    assert "optim.lr" in content[content.index('id="differs"') : content.index('id="samples"')]
    assert "model.k7" not in content[content.index('id="differs"') : content.index('id="samples"')]
    assert len(data["differences"]) == 21, "a program gets all of it"


def test_of_one_point_no_empty_chart_is_drawn(session: Session) -> None:
    folder = finished_run(session.home, "fox-41")
    write_events(folder, events()[:2])
    assert "<svg></svg>" not in report(session, "fox-41")[1]
    assert "┤" not in verb.report(session, ["fox-41"], html="").text


def test_wrong_wishes_are_told(session: Session, tmp_path: Path) -> None:
    finished_run(session.home, "fox-41")
    with refusal(UsageError, "run.unknown"):
        verb.report(session, ["nosuch"], html="")
    with refusal(GpurunError, "output.cannot_write"):
        verb.report(session, ["fox-41"], html=str(tmp_path / "no" / "r.html"))
    with refusal(UsageError, "report.two_outputs"):
        verb.report(Session(home=session.home, json=True), ["fox-41"], html="-")
    assert verb.report(session, ["fox-41", "fox"], html="-").text.count('<th scope="row"><svg') == 1, "named twice"


@pytest.mark.parametrize("place", [".", "/", "a-folder", "a-file/x.html", "no-folder/x.html", "x" * 300])
def test_an_unwritable_place_is_reported_and_keeps_what_is_there(
    place: str, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(session.home, "fox-41")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with refusal(SetupError, "output.cannot_write"):
        verb.report(session, ["fox-41"], html=place)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_device_is_written_to_and_never_replaced(session: Session, tmp_path: Path) -> None:
    finished_run(session.home, "fox-41")
    (tmp_path / "device").symlink_to("/dev/null")
    assert "kB" in verb.report(session, ["fox-41"], html=str(tmp_path / "device")).text
    assert (tmp_path / "device").is_char_device()


def test_a_page_in_the_users_own_folder_is_told_where_it_is(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(session.home, "fox-41")
    monkeypatch.setenv("HOME", str(tmp_path))
    page = str(verb.report(session, ["fox-41"], html="~/fox.html").data["html"])
    assert page == str(tmp_path / "fox.html")
    assert Path(page).is_file()


def test_a_dollar_axis_shows_every_decimal() -> None:
    shown = [format_exact_usd(Micros(micros)) for micros in (0, 5_000, 12_500_000, -250_000, 1_000_000_001)]
    assert shown == ["$0.00", "$0.005", "$12.50", "-$0.25", "$1,000.000001"]


def test_the_command_line_writes_the_page_and_says_what_is_on_it(session: Session, tmp_path: Path) -> None:
    finished_run(session.home, "fox-41")
    page, home = tmp_path / "r.html", ["--home", str(session.home.root)]
    said = CliRunner().invoke(
        build_app(), ["report", "@last", "--html", str(page), "--json", *home], standalone_mode=False
    )
    answer = json.loads(said.stdout)
    assert (answer["ok"], answer["data"]["runs"][0]["run"]) == (True, "fox-41")
    assert answer["data"]["html"] == str(page)
    assert page_of(page).startswith("<!doctype html>")
    assert "fox-41" in CliRunner().invoke(build_app(), ["report", "fox", *home], standalone_mode=False).stdout


def test_more_runs_than_a_chart_can_tell_apart_are_refused(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fox-41", "owl-07"):
        finished_run(session.home, name)
    monkeypatch.setattr("gpurun.view.report.svg_charts.MOST_RUNS", 1)
    with refusal(UsageError, "report.too_many", "2 runs"):
        verb.report(session, ["fox-41", "owl-07"], html="-")
    assert len(verb.report(session, ["fox-41", "owl-07"], html="").data["runs"]) == 2, "a table has room for all"


def test_a_run_that_failed_is_called_that_in_the_terminal_too(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed trainer writes no last event, so its run once looked successful in the terminal."""
    trained = CloudRun.through_training

    def killed(run: CloudRun) -> Iterator[tuple[float, Note]]:
        for seconds, (event, data) in trained(run):
            ending = {"outcome": "failed", "reason": "", "exit_code": None, "message": "it was killed"}
            yield seconds, (event, {**data, **(ending if event is Event.TRAIN_OBSERVED else {})})

    finished_run(session.home, "owl-07")
    monkeypatch.setattr(CloudRun, "through_training", killed)
    finished_run(session.home, "fox-41")
    shown = verb.report(Session(home=session.home, quiet=True), ["fox-41", "owl-07"], html="").text
    assert [line.split()[0] for line in shown.splitlines() if "failed" in line] == ["fox-41:"]


@pytest.mark.parametrize(
    ("best", "kept", "is_lost"),
    [
        (60, {"step": 60, "val_loss": 1.5}, True),
        (60, {"step": 120, "val_loss": 2.0}, True),
        (60, None, True),
        (120, {"step": 120, "val_loss": 1.5}, False),
    ],
    ids=["it was lost", "it lay between two", "none was judged", "it is at home"],
)
@pytest.mark.parametrize("markdown", [False, True])
def test_a_best_loss_without_its_checkpoint_at_home_says_so(
    session: Session, best: int, kept: dict[str, Any] | None, is_lost: bool, markdown: bool
) -> None:
    """The best loss may belong to a checkpoint that is not at home: `export` would write weights with another loss."""
    run = opened_run(session.home, "fox-41")
    rows = [row | ({"val_loss": 1.5} if (row["kind"], row["step"]) == ("eval", best) else {}) for row in events()]
    write_events(run.folder, rows)
    append = run.journal.write
    run.journal.write = lambda event, data: append(  # type: ignore[method-assign]
        event, {**data, "best": kept} if event is Event.COLLECT_OBSERVED else data
    )
    run.until_gone().settle()
    shown = " ".join(receipt(session, "fox-41", md=markdown).text.replace("\\", "").split())
    assert "best val 1.5000" in shown
    assert (AWAY in shown) is is_lost
    page, _, data = report(session, "fox-41")
    noted = [note for note in data["runs"][0]["notes"] if AWAY in note]
    assert [f"step {best}" in note for note in noted] == [True] * is_lost
    assert all(note in page.words for note in noted)
    assert (AWAY in " ".join(verb.report(session, ["fox-41"], html="").text.split())) is is_lost


def test_a_run_continued_from_a_better_checkpoint_has_it_at_home(session: Session) -> None:
    """The best checkpoint at home may be the earlier run's, with a lower loss than any of the continued run."""
    finished_run(session.home, "fox-41")
    assert "best val 2.1000" in receipt(session, "fox-41", md=False).text
    assert AWAY not in receipt(session, "fox-41", md=False).text


def test_a_running_run_may_still_bring_its_best_checkpoint_home(session: Session) -> None:
    run = opened_run(session.home, "fox-41")
    run.play(run.through_training())
    assert AWAY not in verb.report(session, ["fox-41"], html="").text

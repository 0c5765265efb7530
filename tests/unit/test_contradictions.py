"""Tests that evidence which contradicts itself is a problem of its run, so an edited and re-signed log is found."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.installed_files import recipe_file
from gpurun.core.journal_events import Event, LegPlanned
from gpurun.core.journal_records import Record
from gpurun.core.paths import Home
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.ledger.audit import AuditRow, audit
from gpurun.ledger.audit.contradictions import _Rates, _read_events, _step_problems, contradictions
from gpurun.ledger.log_facts import BY_ITS_WORD, NOT_A_PROVIDER, RENTED, SMOKE
from gpurun.ledger.signing import payload_of
from tests.refusals import lacking
from tests.tensor_file import as_tensors
from tests.unit.ledger_samples import WEIGHTS, CloudRun, Note

RESOLVED = resolve(load_recipe("course-lab"), "full").record
STATE_NAME = "checkpoints/000120.state.json"
STATE = {"v": 1, "step": 120, "loss": 2.0, "val_loss": 2.0, "torch": "2.13.0", "recipe": RESOLVED}


class Forged(CloudRun):
    """A run whose owner edited its files before gpurun signed them, so that every digest fits."""

    parameters = 28_032
    state: dict[str, Any] = STATE
    planned: dict[str, Any] = RESOLVED
    opened_with: dict[str, Any] = {}  # noqa: RUF012
    hello: dict[str, Any] = {"gpus": [{"name": "NVIDIA H100"}]}  # noqa: RUF012

    def plan(self) -> dict[str, Any]:
        plan = super().plan()
        return {**plan, "resolved": self.planned, "data": {**plan["data"], "vocab_size": 30}, **self.opened_with}

    def opened(self) -> Note:
        event, data = super().opened()
        return event, {**{key: one for key, one in data.items() if key != "resolved"}, **self.opened_with}

    def contents(self) -> dict[str, bytes]:  # type: ignore[override]
        return {
            **super().contents(),
            WEIGHTS: as_tensors(bytes(4 * self.parameters)),
            STATE_NAME: json.dumps(self.state).encode(),
        }

    def through_training(self) -> Any:
        for seconds, (event, data) in super().through_training():
            if "facts" in data:
                data["facts"] = {**data["facts"], **self.hello}
            yield seconds, (event, data)

    def forge(self, path: Path, *edits: tuple[str, str]) -> None:
        text = path.read_text()
        for old, new in edits:
            assert old in text, f"{path.name} has no {old}"
            text = text.replace(old, new)
        path.write_text(text)

    def row(self) -> AuditRow:
        self.until_gone().settle()
        return audit(self.home).rows[0]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def cpu_as_cuda(run: Forged) -> None:
    run.forge(run.folder.log, ("device: cpu", "device: cuda"))
    run.forge(run.folder.events, ('"device": "cpu"', '"device": "cuda"'))


def cpu_build(run: Forged) -> None:
    run.forge(run.folder.events, ('"torch": "2.13.0"', '"torch": "2.13.0+cpu"'))


def another_card(run: Forged) -> None:
    run.forge(run.folder.events, ('"NVIDIA H100"', '"NVIDIA A100-SXM4-80GB"'))


def a_maker_alone(run: Forged) -> None:
    run.forge(run.folder.events, ('"NVIDIA H100"', '"NVIDIA"'))


def no_card(run: Forged) -> None:
    run.hello = {"torch": {"found": True, "version": "2.13.0", "devices": []}, "gpus": []}


def too_quick(run: Forged) -> None:
    run.forge(run.folder.events, ('"NVIDIA H100"', '"NVIDIA H100 80GB HBM3"'))
    text = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
    changed = [{**row, "tokens_per_s": 9e12} if row["kind"] == "step" else row for row in text]
    run.folder.events.write_text("".join(json.dumps(row) + "\n" for row in changed))


def a_larger_model(run: Forged) -> None:
    run.forge(run.folder.events, ('"parameters": 28032', '"parameters": 124475904'))


def made_up_weights(run: Forged) -> None:
    run.contents = lambda: {**Forged.contents(run), WEIGHTS: b"weights"}  # type: ignore[method-assign]


def better_losses(run: Forged) -> None:
    run.forge(run.folder.events, ('"loss": 2.0,', '"loss": 1.58,'))
    run.forge(run.folder.log, ("loss 2.0000", "loss 1.5800"))


def better_log(run: Forged) -> None:
    run.forge(run.folder.log, ("loss 2.0000", "loss 1.5800"))


def longer_than_it_was(run: Forged) -> None:
    text = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
    changed = [{**row, "elapsed_s": 90.0 * row["step"]} if row["kind"] == "step" else row for row in text]
    run.folder.events.write_text("".join(json.dumps(row) + "\n" for row in changed))


def backwards(run: Forged) -> None:
    text = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
    changed = [{**row, "elapsed_s": 900.0 - row["step"]} if row["kind"] == "step" else row for row in text]
    run.folder.events.write_text("".join(json.dumps(row) + "\n" for row in changed))


def challenge_of_another(run: Forged) -> None:
    train = {**RESOLVED["train"], "challenge": f"ml-2026-word:{'0' * 64}"}
    run.planned = {**RESOLVED, "train": {**train, "seed": recipe_file.seed_of(train["challenge"])}}
    run.state = {**STATE, "recipe": run.planned}
    run.opened_with = {"challenge": train["challenge"]}
    run.folder.plan.write_text(json.dumps(run.plan()) + "\n")


def seed_of_its_own(run: Forged) -> None:
    challenge_of_another(run)
    run.planned["train"]["seed"] = 7
    run.folder.plan.write_text(json.dumps(run.plan()) + "\n")


def another_recipe(run: Forged) -> None:
    run.state = {**STATE, "recipe": {**RESOLVED, "train": {**RESOLVED["train"], "seed": 7}}}


@pytest.mark.parametrize(
    ("forge", "device", "named"),
    [
        (cpu_as_cuda, "cpu", ("no card",)),
        (cpu_build, "cuda", ("torch 2.13.0+cpu",)),
        (another_card, "cuda", ("H100",)),
        (a_maker_alone, "cuda", ("'NVIDIA'",)),
        (no_card, "cuda", ("no GPU",)),
        (too_quick, "cuda", ("9,000,000,000,000 tokens a second",)),
        (a_larger_model, "cuda", ("124,475,904 parameters", "28,032")),
        (made_up_weights, "cuda", ("7 bytes", "28,032 parameters", "112,128")),
        (better_losses, "cuda", ("loss 2.0 of step 120", "1.58")),
        (better_log, "cuda", ("log", "step 120", "1.5800")),
        (longer_than_it_was, "cuda", ("10800 s",)),
        (backwards, "cuda", ("events' own time",)),
        (challenge_of_another, "cuda", ("challenge", "another key")),
        (seed_of_its_own, "cuda", ("seed", "challenge")),
        (another_recipe, "cuda", ("another recipe", "train.seed")),
    ],
)
def test_a_handwritten_run_signed_again_does_not_hold(
    home: Home, monkeypatch: pytest.MonkeyPatch, forge: Callable[[Forged], None], device: str, named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Forged, "state", {**STATE, "torch": "2.13.0+cpu"} if forge is cpu_build else STATE)
    run = Forged(home, device=device)
    forge(run)
    for name, content in run.contents().items():
        (run.folder.artifacts / name).write_bytes(content)
    row = run.row()
    assert [lacking(problem, *named) for problem in row.problems].count([]) == 1, row.problems
    assert row.verdict == "does not hold"


def test_an_honest_run_of_the_same_kind_is_accused_of_nothing(home: Home) -> None:
    row = Forged(home).row()
    assert (row.problems, row.verdict) == ((), RENTED)


def test_cuda_in_the_form_for_machines_without_it_does_not_hold(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forged, "opened_with", {"form": "rehearsal"})
    (problem,) = Forged(home).row().problems
    assert "form" in problem


@pytest.mark.parametrize(
    ("opened", "device", "verdict"),
    [
        ({}, "cuda", RENTED),
        ({"mode": "local", "provider": "local"}, "cuda", BY_ITS_WORD),
        ({}, "cpu", SMOKE),
        ({"endpoint": "http://127.0.0.1:4010"}, "cuda", NOT_A_PROVIDER),
    ],
)
def test_a_verdict_says_whose_word_it_is_and_what_it_leaves_open(
    home: Home, monkeypatch: pytest.MonkeyPatch, opened: dict[str, Any], device: str, verdict: str
) -> None:
    monkeypatch.setattr(Forged, "opened_with", opened)
    run = Forged(home, device=device)
    row = run.row()
    statement = json.loads(payload_of(json.loads(run.folder.receipt.read_bytes())))
    assert statement["predicate"]["verdict"]["is"] == row.verdict == verdict
    assert statement["predicate"]["verdict"]["not_shown"]
    assert bool(row.warnings) is (verdict == NOT_A_PROVIDER), "under --strict that is a problem"


def test_one_rental_in_two_receipts_is_a_problem_of_both(home: Home) -> None:
    first, second = CloudRun(home), CloudRun(home, "owl-07")
    second.instance_id = first.instance_id
    for run in (first, second):
        run.until_gone().settle()
    rows = {row.run: row for row in audit(home).rows}
    assert [lacking(text, "runpod pod-fox-41", "fox-41 ") for text in rows["owl-07"].problems] == [[]]
    assert {row.verdict for row in rows.values()} == {"does not hold"}


def test_equal_events_are_a_problem_of_both_runs_equal_logs_not(home: Home) -> None:
    """Honest runs may print equal logs.

    Equal events, with times in milliseconds, show that one run copied the other.
    """
    first, second, third = CloudRun(home), CloudRun(home, "owl-07"), CloudRun(home, "bee-10")
    second.folder.events.write_bytes(first.folder.events.read_bytes())
    for run in (second, third):
        run.folder.log.write_bytes(first.folder.log.read_bytes())
    for run in (first, second, third):
        run.until_gone().settle()
    sha256 = hashlib.sha256(first.folder.events.read_bytes()).hexdigest()
    first, second, third = (row.problems for row in audit(home).rows)
    assert [lacking(text, sha256, "owl-07") for text in first] == [[]]
    assert [lacking(text, sha256, "fox-41") for text in second] == [[]]
    assert third == ()


def tell_steps(run: Forged, losses: dict[int, list[float]]) -> None:
    """Append these losses to the events, one line per process, as a resumed run would."""
    with run.folder.events.open("a") as events:
        for step, each in losses.items():
            for loss in each:
                events.write(json.dumps({"v": 1, "kind": "step", "step": step, "loss": loss}) + "\n")


@pytest.mark.parametrize(("others", "is_known"), [([1.58], True), ([1.58, 1.59], True), ([1.57, 1.58, 1.59], False)])
def test_a_loss_holds_by_either_of_two_processes_unjudged_beyond(
    home: Home, others: list[float], is_known: bool
) -> None:
    run = Forged(home)
    run.forge(run.folder.events, ('"loss": 2.0,', f'"loss": {others[0]},'))
    run.forge(run.folder.log, ("loss 2.0000", "loss 1.5800"))
    tell_steps(run, {120: others[1:]})
    problems = [problem for problem in run.row().problems if "loss" in problem]
    assert bool(problems) == is_known, problems  # The checkpoint's loss is 2.0.


@pytest.mark.parametrize(("reached", "accused"), [(40, False), (50, True)], ids=["lost with it", "never lost"])
def test_steps_lost_before_a_newer_checkpoint_accuse_no_run(tmp_path: Path, reached: int, accused: bool) -> None:
    """The machine pushed step 50 and was lost before its log came home.

    Only steps that the log had reached must be there.
    """
    folder = Home(tmp_path).run("fox-41")
    folder.path.mkdir(parents=True)
    events: list[dict[str, Any]] = [{"kind": "start", "step": 0}]
    events += [{"kind": "step", "step": step, "loss": 2.0} for step in (1, 10, 20, 30, 40)]
    events += [{"kind": "start", "step": 50, "resumed_from": 50}, {"kind": "step", "step": 60, "loss": 2.0}]
    folder.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    leg = LegPlanned(
        number=2, plan="legs/1.json", plan_sha256="0" * 64, token="t-1", step=50, reached=reached, spent_micros=1,
        left_micros=1,
    )  # fmt: skip
    record = Record(
        seq=1, prev="", wall=0.0, mono=0.0, boot_id="here", event=Event.LEG_PLANNED, data=leg.as_data()
    )  # fmt: skip
    plan = {"resolved": {"train": {"log_every": 10}}}
    receipt = {"training": {"outcome": "lost"}, "checkpoint": {"files": []}, "asked": {}}
    problems = list(_step_problems(_read_events(folder), [record], receipt, plan))
    assert problems == ["the events have no loss of step 50, which the trainer reports"] * accused


def test_what_is_kept_of_thirty_thousand_events_is_bounded(home: Home) -> None:
    """The audit must not keep 400 bytes per step, which took 404 MB for a million events."""
    folder = Forged(home).folder
    line = '{"v": 1, "kind": "step", "step": %d, "loss": 2.5, "elapsed_s": %d.0, "tokens_per_s": 1000.0}\n'
    with folder.events.open("w") as events:
        events.writelines(line % (step, step) for step in range(1, 30_001))
    tracemalloc.start()
    try:
        assert list(contradictions(folder, [], {}, {"asked": {"command": {}}})) == []
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_the_speed_in_the_middle_is_found_of_more_than_are_kept() -> None:
    rates = _Rates()
    for number in range(1_000_001):
        rates.add(float(number))
    assert rates.median() == pytest.approx(500_000, rel=1e-3)

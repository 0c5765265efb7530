"""Tests of continuing a run: which runs can be continued, and that only files named in their receipts are used."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.options import REQUEST, request_from
from gpurun.cli.session import Session
from gpurun.core.command import EVERYTHING, Command
from gpurun.core.errors import GpurunError, UsageError, VerificationFailed
from gpurun.core.installed_files import bundle_root
from gpurun.core.money import Micros, usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Choices, DataSummary, Earlier, Mode, Plan, Request
from gpurun.core.sweep import make_sweep
from gpurun.jobs.commands.continued_command import command_as_before
from gpurun.jobs.commands.continued_dev_box import with_last_folder
from gpurun.jobs.dev_box import KEEP, DevBoxJob
from gpurun.jobs.sweep import SweepJob
from gpurun.jobs.trainer import CONTINUED
from gpurun.jobs.training.continued_training import (
    earlier_bucket_note,
    longer_schedule_note,
    other_runs_from,
    training_as_before,
    with_checkpoint_beside,
    with_earlier_checkpoint,
)
from gpurun.jobs.training.recipe import ResolvedRecipe, differing_keys, load_recipe, resolve
from gpurun.ledger.audit import audit
from gpurun.ledger.signing import PRIVATE_NAME
from gpurun.ledger.write_receipt import read_receipt
from tests.changed_plan import changed_plan
from tests.plan_makers import catalogue_quote
from tests.refusals import lacking, refusal
from tests.tensor_file import as_tensors
from tests.unit.ledger_samples import CloudRun, Note, edit_lines
from tests.unit.report_samples import plan_of

OUTFIT = Choices(image="torch:2.9", setup="pip install lion", setup_limit_s=900)
FROM = Request(recipe="", continues="fox-41")
RECIPE = resolve(load_recipe("gpt2-124m"), "full", ("optim.lr=0.001",), 1)
KINDS = {"model.safetensors": "weights", "optim.safetensors": "optimizer", "state.json": "state"}


class StoppedRun(CloudRun):
    """A paid run of gpt2-124m that ended because its lease was over, with the checkpoints of two steps at home."""

    steps: tuple[int, ...] = (60, 120)
    mode = Mode.PAID

    def write_trainer_files(self) -> None:
        super().write_trainer_files()
        changes = {"resolved": RECIPE.record, "recipe": "gpt2-124m", "mode": self.mode}
        self.folder.plan.write_text(changed_plan(plan_of(self.folder.name), changes).to_json())
        request = Request(recipe="gpt2-124m", overrides=("optim.lr=0.001",), gpu=GpuNeed(count=1, name="H100"))
        choices = OUTFIT.model_copy(update={"spot": True, "weak_lease": True, "accept_cpu": True})
        request = request.model_copy(update={"data": "/srv/shards", "choices": choices})
        self.folder.request.write_text(request.to_json())

    def contents(self) -> dict[str, bytes]:  # type: ignore[override]
        return {
            f"checkpoints/{step:06d}.{kind}": as_tensors(f"{kind} {step}".encode() * 9)
            for step in self.steps
            for kind in KINDS
        }

    def manifest(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            | {"kind": KINDS[name.split(".", 1)[1]], "step": int(name[12:18])}
            for name, content in self.contents().items()
        ]

    def opened(self) -> Note:
        event, data = super().opened()
        return event, {**data, "mode": self.mode}


def stopped_run(home: Home, name: str = "fox-41", **kinds: Any) -> CloudRun:
    run: CloudRun = type("Run", (StoppedRun,), kinds)(home, name)
    return run.until_gone().settle(7)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def shards(**more: Any) -> DataSummary:
    return plan_of("owl-07").data.model_copy(update=more)


def refused_code(
    home: Home, request: Request = FROM, recipe: ResolvedRecipe = RECIPE, data: DataSummary | None = None
) -> str:
    """Assert that one of the three steps of a continuation refuses it with a hint; return the code of the error."""
    with pytest.raises(GpurunError) as refused:
        _go_on(home, request, recipe, data or shards())
    assert refused.value.hint
    return refused.value.code


def problems(home: Home, name: str) -> list[str]:
    (row,) = audit(home, [name]).rows
    return list(row.problems)


def _go_on(home: Home, request: Request, recipe: ResolvedRecipe, data: DataSummary) -> None:
    with_checkpoint_beside(
        data, with_earlier_checkpoint(recipe, training_as_before(request, home), home), home, home.staged_data("owl-07")
    )


def test_a_continued_run_repeats_all_but_the_cap_and_consents(home: Home) -> None:
    stopped_run(home)
    request = training_as_before(FROM.model_copy(update={"overrides": ("eval.every=50",)}), home)
    assert request.recipe == "gpt2-124m"
    assert request.overrides == ("optim.lr=0.001", "eval.every=50")
    assert (request.gpu, request.data) == (GpuNeed(count=1, name="H100"), "/srv/shards")
    assert (request.max_cost_micros, request.choices) == (None, OUTFIT)


def test_another_challenge_is_another_training(home: Home) -> None:
    """Another challenge than the earlier run's is refused.

    Otherwise a learner could pass off a copied run as their own.
    """
    stopped_run(home)
    other = FROM.model_copy(update={"overrides": (f'train.challenge="ml-2026-word:{"a" * 64}"',)})
    resolved = resolve(load_recipe("gpt2-124m"), "full", training_as_before(other, home).overrides)
    with refusal(UsageError, "continue.changed", "train.challenge, train.seed"):
        with_earlier_checkpoint(resolved, training_as_before(other, home), home)


def test_another_place_drops_the_old_places_image_and_set_up(home: Home) -> None:
    stopped_run(home)
    request = training_as_before(FROM.model_copy(update={"providers": ("aws",)}), home)
    assert (request.providers, request.choices) == (("aws",), Choices())


def test_the_newest_checkpoint_lies_beside_the_shards_to_ship(home: Home) -> None:
    run = stopped_run(home)
    resolved = with_earlier_checkpoint(RECIPE, training_as_before(FROM, home), home)
    into = home.staged_data("owl-07")
    data = with_checkpoint_beside(shards(), resolved, home, into)
    found = {
        path.relative_to(into / CONTINUED).as_posix(): path.read_bytes() for path in (into / CONTINUED).rglob("*.*")
    }
    manifest = json.loads(found.pop("MANIFEST.json"))
    assert found == {name: content for name, content in run.contents().items() if "000120" in name}
    assert (manifest["latest"], {file["name"] for file in manifest["files"]}) == (120, set(found))
    assert data.bytes == shards().bytes + sum(map(len, found.values()))


def test_the_plan_counts_the_steps_left_and_says_what_was_spent(home: Home) -> None:
    stopped_run(home)
    going = with_earlier_checkpoint(RECIPE, training_as_before(FROM, home), home)
    steps = RECIPE.tables.train.steps
    assert (going.first_step, going.steps_left) == (120, steps - 120)
    assert going.sha256 == RECIPE.sha256, "what is trained is the same"
    assert going.earlier is not None
    assert going.earlier.spent_micros is not None
    assert going.earlier.spent_micros > 0
    half = replace(going, earlier=going.earlier.model_copy(update={"step": steps // 2}))
    request = Request(recipe="gpt2-124m", gpu=GpuNeed(count=8, name="A100"))
    whole_s, half_s = (
        catalogue_quote(request, recipe).candidates[0].estimate.likely_s or 0 for recipe in (RECIPE, half)
    )
    assert half_s == pytest.approx(whole_s / 2, rel=0.02)


def test_a_lease_reaches_further_by_what_is_done_already() -> None:
    earlier = Earlier(run="fox-41", step=9_000, bytes=1, receipt_sha256="0" * 64)
    request = Request(recipe="gpt2-124m", gpu=GpuNeed(count=8, name="A100"), max_cost_micros=usd(8), uplink_mbit=1000)
    for recipe, first in ((RECIPE, 0), (replace(RECIPE, earlier=earlier), 9_000)):
        reaches = [candidate.reach.step for candidate in catalogue_quote(request, recipe).candidates if candidate.reach]
        assert reaches
        assert all(first < step < RECIPE.tables.train.steps for step in reaches)


def test_what_a_chain_of_runs_has_cost_is_added_up(home: Home) -> None:
    stopped_run(home)
    spent = with_earlier_checkpoint(RECIPE, training_as_before(FROM, home), home).earlier
    assert spent is not None

    class Second(StoppedRun):
        steps = (240,)

        def write_trainer_files(self) -> None:
            super().write_trainer_files()
            plan = plan_of(self.folder.name)
            plan = changed_plan(plan, {"resolved": RECIPE.record, "continues": spent})
            self.folder.plan.write_text(plan.to_json())

    Second(home, "owl-07").until_gone().settle(7)
    then = with_earlier_checkpoint(RECIPE, Request(recipe="", continues="owl-07"), home).earlier
    assert then is not None
    assert then.spent_micros == Micros(2 * (spent.spent_micros or 0))


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request(recipe="", continues="cow-1"), "run.unknown"),
        (Request(recipe="mini-gpt", continues="fox-41"), "continue.other_recipe"),
    ],
)
def test_another_run_or_recipe_than_there_is_is_refused(home: Home, request_: Request, code: str) -> None:
    stopped_run(home)
    assert refused_code(home, request_) == code


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ({"mode": Mode.REHEARSAL}, "continue.rehearsal"),
        ({"steps": (RECIPE.tables.train.steps,)}, "continue.finished"),
        ({"steps": ()}, "continue.no_checkpoint"),
    ],
)
def test_a_run_with_nothing_to_go_on_from_is_refused(home: Home, kinds: dict[str, Any], code: str) -> None:
    stopped_run(home, **kinds)
    assert refused_code(home) == code


def test_a_checkpoint_that_came_home_in_part_is_passed_over(home: Home) -> None:
    class Torn(StoppedRun):
        def manifest(self) -> list[dict[str, Any]]:
            return [file for file in super().manifest() if file["name"] != "checkpoints/000120.optim.safetensors"]

    Torn(home).until_gone().settle(7)
    assert with_earlier_checkpoint(RECIPE, FROM, home).first_step == 60


def test_a_trials_checkpoint_unlike_its_list_is_passed_over(home: Home) -> None:
    """A trial was stopped while it saved, so its newest files do not match its list: an older checkpoint is used."""
    own = resolve(load_recipe("gpt2-124m"), "full", ("optim.lr=0.002",), 1)
    best = "outputs/gpurun-sweep/best/002/"

    class Swept(StoppedRun):
        def write_trainer_files(self) -> None:
            super().write_trainer_files()
            plan = Plan.from_json(self.folder.plan.read_bytes())
            sweep = make_sweep({"optim.lr": ("0.001", "0.002")}, {})
            job = SweepJob(recipe=plan.job.recipe, recipe_sha256="0" * 64, sweep=sweep, at_once=1, trial=plan.job)
            self.folder.plan.write_text(plan.model_copy(update={"job": job}).to_json())

        def contents(self) -> dict[str, bytes]:  # type: ignore[override]
            files = super().contents()
            listed = [
                {"name": name, "sha256": hashlib.sha256(content).hexdigest()}
                | {"kind": KINDS[name.split(".", 1)[1]], "step": int(name[12:18])}
                for name, content in files.items()
            ]
            table = {"best": [2], "rows": [{"trial": 2, "state": "done", "params": {"optim.lr": "0.002"}}]}
            files["checkpoints/000120.optim.safetensors"] += b"saved again"
            return {
                **{best + name: content for name, content in files.items()},
                f"{best}MANIFEST.json": json.dumps({"files": listed}).encode(),
                "outputs/gpurun-sweep/trials.json": json.dumps(table).encode(),
            }

        def manifest(self) -> list[dict[str, Any]]:
            return [
                {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                | {"kind": "checkpoint", "step": 2}
                for name, content in self.contents().items()
            ]

    Swept(home).until_gone().settle(7)
    assert with_earlier_checkpoint(own, FROM, home).first_step == 60


def test_other_values_or_shards_are_refused_before_renting(home: Home) -> None:
    stopped_run(home)
    other = resolve(load_recipe("gpt2-124m"), "full", ("optim.lr=0.002",), 1)
    assert refused_code(home, recipe=other) == "continue.changed"
    assert refused_code(home, data=shards(sha256="1" * 64)) == "continue.other_data"


def test_a_run_may_be_planned_further_but_never_less_far(home: Home) -> None:
    planned = RECIPE.tables.train.steps
    stopped_run(home, steps=(planned,))
    longer = resolve(load_recipe("gpt2-124m"), "full", ("optim.lr=0.001", f"train.steps={planned + 500}"), 1)
    shorter = resolve(load_recipe("gpt2-124m"), "full", ("optim.lr=0.001", f"train.steps={planned - 500}"), 1)
    earlier = with_earlier_checkpoint(longer, FROM, home).earlier
    assert earlier is not None
    assert (earlier.step, earlier.steps) == (planned, planned)
    (note,) = longer_schedule_note(earlier, planned + 500)
    assert lacking(note, "fox-41", "18,865", "19,365") == []
    assert list(longer_schedule_note(earlier, planned)) == []
    assert refused_code(home, recipe=shorter) == "continue.changed"


def test_changes_are_listed_with_the_flags_that_undo_them(home: Home) -> None:
    """For each value that differs from the earlier run's, the hint gives a flag that restores the earlier value."""
    stopped_run(home)
    edited = ("optim.lr=0.002", 'data.source="my texts"', "train.batch_tokens=524288")
    with pytest.raises(UsageError) as refused:
        with_earlier_checkpoint(resolve(load_recipe("gpt2-124m"), "full", edited, 1), FROM, home)
    back = shlex.split(refused.value.hint.split(": ")[1].rsplit(". ", 1)[0])[1::2]
    assert "optim.lr=0.001" in back
    assert differing_keys(RECIPE.record, resolve(load_recipe("gpt2-124m"), "full", (*edited, *back), 1).record) == []


@pytest.mark.parametrize("name", ["checkpoints/000120.model.safetensors", "checkpoints/000120.state.json"])
@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b"other"), lambda path: path.unlink()])
def test_a_checkpoint_that_is_not_what_came_home_is_refused(home: Home, name: str, change: Any) -> None:
    run = stopped_run(home)
    change(run.folder.artifacts / name)
    assert refused_code(home) == "continue.altered"


def test_a_dev_box_with_an_altered_folder_is_not_continued(home: Home, tmp_path: Path) -> None:
    """A file that was changed after the upload was never on the box.

    The folder's digest in the receipt shows the change.
    """
    command = Command(argv=KEEP, outputs=EVERYTHING)

    class Box(StoppedRun):
        steps = ()

        def write_trainer_files(self) -> None:
            super().write_trainer_files()
            uploaded = self.folder.data / "work"
            uploaded.mkdir(parents=True)
            (uploaded / "a.py").write_text("print(1)")
            plan = Plan.from_json(self.folder.plan.read_bytes())
            job = DevBoxJob(recipe="dev box", recipe_sha256="0" * 64, command=command)
            data = plan.data.model_copy(update={"beside": str(self.folder.data)})
            plan = plan.model_copy(update={"job": job, "data": data})
            plan = plan.model_copy(update={"bundle_sha256": job.digest(plan, bundle_root())})
            self.folder.plan.write_text(plan.to_json())

    run = Box(home).until_gone().settle(7)
    with_last_folder(command, FROM, home, tmp_path / "first")
    assert (tmp_path / "first" / "a.py").read_text() == "print(1)"
    (run.folder.data / "work" / "a.py").write_text("print(2)")
    with refusal(VerificationFailed, "continue.altered", "gpurun audit fox-41"):
        with_last_folder(command, FROM, home, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_leftovers_of_another_run_are_replaced_not_written_into(home: Home) -> None:
    """A leftover file is a hard link to another run's checkpoint: writing into it would destroy what was paid for."""
    first, into = stopped_run(home), home.staged_data("owl-07")
    kept = {path: path.read_bytes() for path in first.folder.artifacts.rglob("*.*")}
    with_checkpoint_beside(shards(), with_earlier_checkpoint(RECIPE, FROM, home), home, into)

    class Another(StoppedRun):
        def contents(self) -> dict[str, bytes]:
            return {name: content[::-1] for name, content in super().contents().items()}

    second = Another(home, "elk-3").until_gone().settle(7)
    with_checkpoint_beside(
        shards(), with_earlier_checkpoint(RECIPE, Request(recipe="", continues="elk-3"), home), home, into
    )
    assert {path: path.read_bytes() for path in kept} == kept
    weights = "checkpoints/000120.model.safetensors"
    assert (into / CONTINUED / weights).read_bytes() == second.contents()[weights]


def test_a_run_that_is_not_over_is_not_gone_on_from(home: Home) -> None:
    StoppedRun(home).until_gone()
    assert refused_code(home) == "continue.unfinished"


def test_what_a_run_that_went_on_was_asked_is_asked_again(home: Home) -> None:
    stopped_run(home)
    request = training_as_before(FROM, home)

    class Second(StoppedRun):
        def write_trainer_files(self) -> None:
            super().write_trainer_files()
            self.folder.request.write_text(request.to_json())

    Second(home, "owl-07").until_gone().settle(7)
    again = training_as_before(Request(recipe="", continues="owl-07"), home)
    assert again == request.model_copy(update={"continues": "owl-07"})


def test_a_run_without_a_receipt_of_this_home_is_not_continued(home: Home) -> None:
    run = stopped_run(home)
    receipt = run.folder.receipt.read_bytes()
    run.folder.receipt.unlink()
    assert refused_code(home) == "continue.no_receipt"
    envelope = json.loads(receipt)
    envelope["signatures"][0]["sig"] = "AAAA" + envelope["signatures"][0]["sig"][4:]
    run.folder.receipt.write_text(json.dumps(envelope))
    assert refused_code(home) == "continue.no_receipt"


def test_a_plan_that_was_edited_says_nothing(home: Home) -> None:
    run = stopped_run(home)
    edit_lines(run.folder.plan, lambda lines: [line.replace(b'"steps": 18865', b'"steps": 18866') for line in lines])
    assert refused_code(home) == "continue.altered"


class ContinuedRun(StoppedRun):
    """A run that continues fox-41.

    Its plan file names the checkpoint `before`; the plan that it was opened with names `claims`.
    """

    before: Earlier
    claims: Earlier

    def plan(self) -> dict[str, Any]:
        signed = {"run", "step", "steps", "receipt_sha256"}
        return {**super().plan(), "continues": self.claims.model_dump(mode="json", include=signed)}

    def write_trainer_files(self) -> None:
        CloudRun.write_trainer_files(self)
        self.folder.plan.write_text(json.dumps(super().plan() | {"continues": self.before.model_dump(mode="json")}))


def went_on(home: Home, name: str, before: Earlier, claims: Earlier | None = None) -> list[str]:
    """Make a run that continued another one and has its own receipt; return the problems that the audit finds in it."""
    kind: type[ContinuedRun] = type("Went", (ContinuedRun,), {"before": before, "claims": claims or before})
    kind(home, name).until_gone().settle()
    return problems(home, name)


def test_the_receipt_names_the_checkpoint_for_the_audit_to_check(home: Home) -> None:
    stopped_run(home)
    receipt = hashlib.sha256(home.run("fox-41").receipt.read_bytes()).hexdigest()
    before = Earlier(run="fox-41", step=120, steps=500, bytes=1, receipt_sha256=receipt)
    assert went_on(home, "owl-07", before) == []
    continues = read_receipt(home, home.run("owl-07")).predicate["asked"]["continues"]
    assert continues == {"run": "fox-41", "step": 120, "steps": 500, "receipt_sha256": receipt}
    (problem,) = went_on(home, "bee-10", before, before.model_copy(update={"step": 60}))
    assert "not opened" in problem


def test_the_audit_wants_the_earlier_receipt_first_in_the_chain(home: Home) -> None:
    none = Earlier(run="fox-41", step=120, bytes=1, receipt_sha256="a" * 64)

    def is_named(name: str, before: Earlier) -> bool:
        """Return whether the audit's only problem is that the chain lacks the receipt of the earlier run."""
        (problem,) = went_on(home, name, before)
        return lacking(problem, before.run, "the receipt", "chain") == []

    assert is_named("owl-07", none), "no such run"
    stopped_run(home)
    receipt = hashlib.sha256(home.run("fox-41").receipt.read_bytes()).hexdigest()
    assert is_named("bee-10", none), "another receipt"
    later = none.model_copy(update={"run": "bee-10", "receipt_sha256": receipt})
    assert is_named("cow-10", later), "another run's receipt"
    assert went_on(home, "elk-10", none.model_copy(update={"receipt_sha256": receipt})) == []


def test_a_key_that_came_later_is_no_change() -> None:
    old, new = RECIPE.record, resolve(load_recipe("gpt2-124m"), "full", ("optim.lr=0.002", "eval.every=7"), 1).record
    assert differing_keys(old, new) == ["optim.lr"]
    del old["train"]["label_smoothing"], old["optim"]["muon_lr"]
    assert differing_keys(old, new) == ["optim.lr"], "keys that came later"
    new["train"]["label_smoothing"] = 0.1
    assert differing_keys(old, new) == ["optim.lr", "train.label_smoothing"]


def test_the_key_that_signs_is_of_this_home(home: Home) -> None:
    stopped_run(home)
    for path in home.keys.glob("*"):
        if path.name != PRIVATE_NAME:
            path.unlink()
    assert refused_code(home) == "continue.no_receipt"


def test_a_moved_home_still_finds_the_shards_of_an_earlier_run(tmp_path: Path) -> None:
    """owl-07 used the shards in fox-41's folder.

    After the home is moved, a continuation must find them at their new path.
    """

    class Second(StoppedRun):
        def write_trainer_files(self) -> None:
            super().write_trainer_files()
            shards_of_first = self.folder.path.parent / "fox-41" / "data"
            shards_of_first.mkdir(parents=True)
            (shards_of_first / "data.json").write_text("{}")
            plan = Plan.from_json(self.folder.plan.read_bytes())
            data = plan.data.model_copy(update={"folder": str(shards_of_first)})
            self.folder.plan.write_text(plan.model_copy(update={"data": data}).to_json())
            first_request = Request.from_json(self.folder.request.read_bytes())
            self.folder.request.write_text(first_request.model_copy(update={"data": str(shards_of_first)}).to_json())

    Second(Home(tmp_path / "old").prepare(), "owl-07").until_gone().settle(7)
    (tmp_path / "old").rename(tmp_path / "new")
    moved, request = Home(tmp_path / "new"), Request(recipe="", continues="owl-07")
    shards_there = moved.run("fox-41").data
    assert training_as_before(request, moved).data == str(shards_there)
    shutil.rmtree(shards_there)
    assert training_as_before(request, moved).data is None, "the recipe's own text is taken, not a folder that is gone"


def asked_of(home: Home, **changes: Any) -> None:
    """Make the earlier run, whose request has these changes."""

    class Asked(StoppedRun):
        def write_trainer_files(self) -> None:
            super().write_trainer_files()
            request = Request.from_json(self.folder.request.read_bytes())
            self.folder.request.write_text(request.model_copy(update=changes).to_json())

    Asked(home).until_gone().settle(7)


@pytest.mark.parametrize(
    ("before", "typed", "then"),
    [(("local",), [], ("local",)), ((), [], ("runpod",)), (("local",), ["aws"], ("aws",))],
)
def test_a_setting_rents_nothing_for_a_run_from_elsewhere(
    home: Home, before: tuple[str, ...], typed: list[str], then: tuple[str, ...]
) -> None:
    asked_of(home, providers=before)
    home.config.write_text('providers = "runpod"\n')
    given = {name: default for name, (_, default) in REQUEST.flags.items()}
    request = request_from(Session(home=home), **given | {"continues": "fox-41", "provider": typed})
    assert request.providers == then


@pytest.mark.parametrize(
    ("typed", "then"),
    [({}, (7200, 1800)), ({"idle": "off", "silent": "45m"}, (0, 2700)), ({"silent": "off"}, (7200, 0))],
)
def test_idle_and_silence_limits_are_kept_unless_typed_anew(
    home: Home, typed: dict[str, str], then: tuple[int, int]
) -> None:
    asked_of(home, choices=Choices(idle_s=7200, silent_s=1800))
    given = {name: default for name, (_, default) in REQUEST.flags.items()}
    choices = request_from(Session(home=home), **given | {"continues": "fox-41", "provider": ["aws"], **typed}).choices
    assert (choices.idle_s, choices.silent_s) == then


def test_another_box_gets_neither_the_old_host_key_nor_its_price(home: Home) -> None:
    box = {"host": "me@lab", "host_key": "SHA256:abc", "identity": "~/.ssh/lab", "price_micros_per_hour": usd(2)}
    asked_of(home, providers=("ssh",), **box)
    same = training_as_before(FROM, home)
    assert {name: getattr(same, name) for name in box} == box
    other = training_as_before(FROM.model_copy(update={"host": "me@desk"}), home)
    assert (other.providers, other.host, other.identity) == (("ssh",), "me@desk", "~/.ssh/lab")
    assert (other.host_key, other.price_micros_per_hour) == ("", None)


def test_a_command_on_another_box_gets_no_old_host_key_or_price(home: Home) -> None:
    box = {"host": "me@lab", "host_key": "SHA256:abc", "identity": "~/.ssh/lab", "price_micros_per_hour": usd(2)}
    asked_of(home, providers=("ssh",), command=Command(argv=("python", "train.py"), outputs=EVERYTHING), **box)
    same = command_as_before(FROM, home, ())
    assert {name: getattr(same, name) for name in box} == box
    other = command_as_before(FROM.model_copy(update={"host": "me@desk"}), home, ())
    assert (other.providers, other.host, other.identity) == (("ssh",), "me@desk", "~/.ssh/lab")
    assert (other.host_key, other.price_micros_per_hour) == ("", None)


def test_a_recipe_of_ones_own_may_lie_elsewhere_by_now(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_of(home, recipe="./mine.toml")
    (tmp_path / "mine.toml").write_text("")
    assert refused_code(home) == "continue.no_recipe"
    other = str(tmp_path / "mine.toml")
    assert training_as_before(FROM.model_copy(update={"recipe": other}), home).recipe == other
    assert (
        refused_code(home, FROM.model_copy(update={"recipe": str(tmp_path / "yours.toml")})) == "continue.other_recipe"
    )
    monkeypatch.chdir(tmp_path)
    assert training_as_before(FROM, home).recipe == "./mine.toml"


def test_who_went_on_from_the_same_run_before_is_named(home: Home) -> None:
    """A user who continues fox-41 twice pays twice for the same steps, so gpurun names the runs that continued it."""
    stopped_run(home)
    spent = with_earlier_checkpoint(RECIPE, FROM, home).earlier
    assert spent is not None

    class Second(StoppedRun):
        steps = (240,)

        def write_trainer_files(self) -> None:
            super().write_trainer_files()
            plan = Plan.from_json(self.folder.plan.read_bytes())
            self.folder.plan.write_text(plan.model_copy(update={"continues": spent}).to_json())

    Second(home, "owl-07").until_gone().settle(7)
    type("Lost", (Second,), {"steps": ()})(home, "elk-3").until_gone().settle(6)
    Second(home, "ant-12").until_gone()
    going, over = sorted(other_runs_from(spent, home))
    assert lacking(going, "ant-12", "fox-41", "gpurun attach ant-12") == []
    assert lacking(over, "owl-07", "fox-41", "step 240", "gpurun train --from owl-07") == []


def test_a_bucket_that_the_earlier_run_went_by_is_named(home: Home) -> None:
    """--stage must be given again.

    Without it all shards are uploaded on paid time, so a note names the earlier bucket.
    """
    run = stopped_run(home)
    earlier = with_earlier_checkpoint(RECIPE, FROM, home).earlier
    assert earlier is not None
    assert list(earlier_bucket_note(earlier, home)) == []
    plan = Plan.from_json(run.folder.plan.read_bytes())
    run.folder.plan.write_text(plan.model_copy(update={"choices": Choices(stage="s3://lab/gpurun")}).to_json())
    (note,) = earlier_bucket_note(earlier, home)
    assert "--stage s3://lab/gpurun" in note


def test_without_a_request_the_plan_says_what_can_be_continued(home: Home) -> None:
    """If request.json is lost, the plan gives recipe and provider, but not the overrides: the user must repeat them."""
    stopped_run(home).folder.request.unlink()
    request = training_as_before(FROM, home)
    assert (request.recipe, request.providers, request.choices) == ("gpt2-124m", ("runpod",), Choices())
    changed = resolve(load_recipe("gpt2-124m"), "full", request.overrides, 1)
    assert refused_code(home, recipe=changed) == "continue.changed"
    assert with_earlier_checkpoint(RECIPE, request, home).first_step == 120

"""Checks a recipe or a modified trainer by rehearsing it on this computer, before anything is rented.

The rehearsal is the same as with `--dry-run`: shards, supervisor, agent, trainer, collection, receipt. It uses a
temporary home, so that the user's runs and receipts are not affected; only the cache of tokenised text is shared.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gpurun.cli.interrupts import Interrupts
from gpurun.cli.session import Session
from gpurun.core.clock import Clock
from gpurun.core.errors import NoOffer, TrainingFailed, UsageError
from gpurun.core.journal_events import TrainObserved
from gpurun.core.journal_records import last_typed
from gpurun.core.paths import Home, RunFolder, make_private
from gpurun.core.run_plan import Choices, Plan, Request
from gpurun.core.stop_request import ask_to_stop
from gpurun.jobs.training.changed_recipe import own_reader
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.ledger.run_lock import holder_of
from gpurun.ledger.runs import Sight, create_run, look_at_run
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.supervisor import start_supervisor
from gpurun.planning.budget import expected_train_s
from gpurun.planning.place import Desk
from gpurun.planning.planner import make_plan
from gpurun.planning.trainer_proposal import TrainerProposal
from gpurun.view.check_table import CheckRow

_PERIOD_S = 0.2
_RUN = "rehearsal"


@contextmanager
def own_home(shared: Home) -> Iterator[Home]:
    """Yield a temporary home for a rehearsal, which shares the user's cache of tokenised text."""
    make_private(shared.prepare().cache)
    root = Path(tempfile.mkdtemp(prefix="check-", dir=shared.root))
    try:
        home = Home(root).prepare()
        home.cache.symlink_to(shared.cache, target_is_directory=True)
        yield home
    finally:
        shutil.rmtree(root, ignore_errors=True)


def check_recipe(session: Session, name: str, home: Home) -> CheckRow:
    """Plan and rehearse a recipe, and return its row; GpurunError if the plan or the rehearsal fails."""
    recipe, clock = load_recipe(name), session.clock
    began = clock.monotonic()
    plan, folder = rehearse_request(session, Request(recipe=name), home, "")
    predicate = read_receipt(home, folder).predicate
    figures = predicate["training"]["figures"]
    return replace(
        _describe_cheapest_plan(recipe.name, plan),
        rehearsal_s=round(clock.monotonic() - began, 3),
        first_loss=figures["first_loss"],
        last_loss=figures["last_loss"],
        verdict=predicate["verdict"]["says"],
    )


def rehearse_request(session: Session, request: Request, home: Home, trainer: str) -> tuple[Plan, RunFolder]:
    """Rehearse a request from its beginning in a temporary home; TrainingFailed if the rehearsal fails.

    Flags that concern only renting are ignored. `trainer` is the folder of a modified trainer, or "". A modified
    trainer is stopped after some of the steps, and a new process continues from its checkpoint, as on a spot machine.
    """
    choices = Choices(trainer=trainer, core_bundle=request.choices.core_bundle)
    rehearsal = request.model_copy(update={"dry_run": True, "continues": "", "choices": choices})
    again = f"To look closer: gpurun train {request.recipe_word} --dry-run"
    again += f" --trainer {shlex.quote(request.choices.trainer)}" if request.choices.trainer else ""
    hint = f"{again}, then gpurun logs @last."
    if not trainer or (part := _with_fewer_steps(rehearsal)) is None:
        return _rehearse_or_fail(session, rehearsal, home, _RUN, "", hint)
    _, first = _rehearse_or_fail(session, part, home, _RUN, "", hint)
    steps = look_at_run(home, first.name).plan.job.steps
    hint = f"A checkpoint must have the optimiser's state (trainer/optim.py: optimizer_tensors). {again}"
    after = f", stopped after step {steps} and continued from its checkpoint,"
    return _rehearse_or_fail(session, rehearsal.model_copy(update={"continues": _RUN}), home, f"{_RUN}-2", after, hint)


def _rehearse_or_fail(
    session: Session, rehearsal: Request, home: Home, name: str, how: str, hint: str
) -> tuple[Plan, RunFolder]:
    plan = make_plan(TrainerProposal(rehearsal, Desk(name, home, session.clock, session.talk_when_slow())))
    folder = create_run(home, rehearsal, plan)
    sight = _rehearse(home, folder, session.clock)
    if sight.state.outcome != "done":
        what = f"The rehearsal of {rehearsal.recipe}{how} {_describe_failed_rehearsal(sight)}"
        raise TrainingFailed("recipes.rehearsal_failed", what, hint=hint)
    return plan, folder


def _with_fewer_steps(rehearsal: Request) -> Request | None:
    """Return the rehearsal with half of its steps, or more if its schedule needs them; None if it has only one step."""
    recipe = load_recipe(rehearsal.recipe, own_reader(Path(rehearsal.choices.trainer)))
    steps = resolve(recipe, "rehearsal", rehearsal.overrides).tables.train.steps
    for fewer in sorted({steps // 2, steps - 1} - {0}):
        overrides = (*rehearsal.overrides, f"train.steps={fewer}")
        try:
            resolve(recipe, "rehearsal", overrides)
        except UsageError:
            continue
        return rehearsal.model_copy(update={"overrides": overrides})
    return None


def _describe_cheapest_plan(name: str, plan: Plan) -> CheckRow:
    """Return a row with the time and cost on the cheapest offer that finishes the recipe; only a name if none does."""
    fitting = [
        candidate for candidate in plan.candidates if candidate.finishes and candidate.expected_micros is not None
    ]
    if not fitting:
        return CheckRow(recipe=name)
    cheapest = min(fitting, key=lambda candidate: candidate.expected_micros or 0)
    return CheckRow(
        recipe=name,
        offer=f"{cheapest.offer.provider} {cheapest.offer.label}",
        planned_s=expected_train_s(cheapest.estimate),
        planned_micros=cheapest.expected_micros,
    )


def judge_recipe(row: CheckRow, name: str) -> None:
    """Raise NoOffer if no offer finishes the recipe, and TrainingFailed if its loss did not fall."""
    if row.planned_micros is None:
        what = f"No offer in the catalogue finishes {row.recipe}."
        raise NoOffer("recipes.no_offer", what, hint=f"To see why: gpurun plan {shlex.quote(name)}")
    if row.first_loss is None or row.last_loss is None or not row.last_loss < row.first_loss:
        what = f"The rehearsal of {row.recipe} did not learn: its loss went from {row.first_loss} to {row.last_loss}."
        raise TrainingFailed("recipes.learned_nothing", what, hint=_rehearse_command(name))


def _rehearse_command(name: str) -> str:
    return f"To look closer: gpurun train {shlex.quote(name)} --dry-run, then gpurun logs @last."


def _rehearse(home: Home, folder: RunFolder, clock: Clock) -> Sight:
    """Start the run's supervisor, and wait until the run is closed or the supervisor ends; the lease limits the time.

    On an interrupt, end the run before raising KeyboardInterrupt, so that no trainer keeps running in a deleted folder.
    """
    interrupted = False
    with Interrupts() as interrupts:
        start_supervisor(folder, home, clock)
        while True:
            if interrupts.take() is not None:
                ask_to_stop(folder, "destroy", by="signal", reason="recipes check was interrupted")
                interrupted = True
            driven = holder_of(folder.lock) is not None
            sight = look_at_run(home, folder.name)
            if not sight.unfinished or not driven:
                break
            clock.sleep(_PERIOD_S)
    if interrupted:
        raise KeyboardInterrupt
    return sight


def _describe_failed_rehearsal(sight: Sight) -> str:
    """Return the end of a sentence that says how a rehearsal failed."""
    if sight.state.failure:
        return f"failed: {sight.state.failure.message}"
    if ended := last_typed(sight.records, TrainObserved):
        return f"ended as {ended.outcome}: {ended.message or ended.reason}."
    log = sight.folder.supervisor_log
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    return f"was given up by its supervisor: {' '.join(last) or 'it wrote nothing'}."

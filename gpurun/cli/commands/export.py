"""`gpurun export`: a checkpoint in the form that other tools read, with a card of the run's figures."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun import __version__
from gpurun.cli.options import Checkpoint, RunArgument, Yes
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

if TYPE_CHECKING:
    from gpurun.ledger.runs import Sight
    from gpurun.view.report.series import Mark

FORMS = ("hf", "lab", "nanogpt", "mingpt", "tensorboard")
LIMIT_S = 3_600

app = typer.Typer(rich_markup_mode=None)


@verb(app, "export", examples=["gpurun export fox-41 ./fox-hf", "gpurun export @last --to tensorboard ./curves"])
def export(
    session: Session,
    run: RunArgument,
    folder: Annotated[
        str | None, typer.Argument(metavar="DIR", help="The folder to make; alone, of the usual run.")
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM",
            help="hf: transformers' form; nanogpt, mingpt: their ckpt.pt; lab: the course's file; tensorboard: curves.",
        ),
    ] = "hf",
    checkpoint: Checkpoint = "best",
    push: Annotated[
        str, typer.Option("--push", metavar="OWNER/NAME", help="Upload the model there, at the Hugging Face hub.")
    ] = "",
    yes: Yes = False,
) -> Result:
    """Write a run's checkpoint or curves for other tools, a model with a card of its receipt.

    A model's folder is new or empty, and is written whole or not at all. With one argument it is the folder. Curves go
    into a folder of the run's name in it.
    """
    from gpurun.cli.run_control import find_meant_run
    from gpurun.readers.weights import ask_trainer, find_checkpoint

    if push:
        from gpurun.cli import hub_push

        if to != "hf":
            what = "Only a model in transformers' form is uploaded."
            raise UsageError("export.push_form", what, hint="Leave --push out, or write --to hf.")
        hub_push.demand_push(push)
    if to not in FORMS:
        raise UsageError("export.unknown_form", f"--to {to!r} is not known.", hint=f"There is: {', '.join(FORMS)}.")
    if folder is None and (run.startswith("@") or run in session.home.run_names()):
        what = f"{run} is a run, and no folder is named for its model."
        raise UsageError("export.no_folder", what, hint=f"Name one: gpurun export {run} ./model")
    sight = find_meant_run(session, None if folder is None and run.strip() else run)
    place = Path(folder or run).expanduser().absolute()
    if to == "tensorboard":
        return _curves(session, sight, place / sight.folder.name)
    found = find_checkpoint(sight, checkpoint)
    session.say(f"step {found.step:,}, on this machine")
    figures = figures_of(session, sight, found.step)
    form = () if to == "hf" else ("--form", to)
    written = ask_trainer("trainer.export", found, str(place), *form, limit_s=LIMIT_S, figures=figures).splitlines()
    data = {"run": sight.folder.name, "step": found.step, "folder": str(place), "files": written, "figures": figures}
    after = ""
    if push:
        data["pushed"] = hub_push.push(session, place, push, yes=yes)
        after = f"It is at {data['pushed']}"
    return Result(data=data, text="\n".join(written), after=after)


def _curves(session: Session, sight: Sight, place: Path) -> Result:
    """Write what was measured as TensorBoard reads it, each column of `load_run(...).metrics` a scalar."""
    from gpurun.core.journal_records import Event
    from gpurun.readers.curve_log import TensorBoardLog, figures_in
    from gpurun.readers.loaded_run import load_run

    if place.exists():
        raise UsageError("export.not_empty", f"{place} is there already.", hint="Name another folder, or remove it.")
    began = next((record.wall for record in sight.records if record.event is Event.TRAIN_STARTED), 0.0)
    rows, log = load_run(sight.folder.name, session.home.root).rows, TensorBoardLog(place, began)
    for name, value, row in figures_in(rows):
        log.add(name, value, row)
    log.close()
    data = {"run": sight.folder.name, "folder": str(place), "rows": len(rows)}
    return Result(data=data, text=f"Wrote {place}. See it: tensorboard --logdir {shlex.quote(str(place.parent))}")


def figures_of(session: Session, sight: Sight, step: int) -> dict[str, Any]:
    """What the model card says of the run, in its own words; null where nobody measured it."""
    from gpurun.core.money import format_usd
    from gpurun.readers.run_material import earlier_words, material_of
    from gpurun.view.number_format import format_duration
    from gpurun.view.receipt_screen import cost_label, signature_word

    run = material_of(session.home, sight, session.clock.wall())
    receipt, last, best = run.receipt, run.last, run.told.best
    told = receipt.predicate if receipt else None
    here = next((mark for mark in run.told.validation.items if mark.step == step), None)
    cost = None if receipt is None or run.cost_micros is None else format_usd(run.cost_micros)
    return {
        "run": run.run,
        "recipe": run.recipe,
        "device" if run.told.device == "cpu" else "GPU": run.told.device or None,
        "machine": run.where,
        **({"went on from": earlier_words(sight.plan.continues)} if sight.plan.continues else {}),
        "time of training": None if run.train_s is None else format_duration(run.train_s),
        "cost of the whole rental": f"{cost} at most ({cost_label(told)})" if cost and told else None,
        "final training loss": _rounded(last),
        "validation loss at this step": _rounded(here),
        "best validation loss": _rounded(best),
        "verdict": f"{told['verdict']['is']}: {told['verdict']['says']}" if told else run.no_receipt,
        "receipt sha256": f"{receipt.sha256} ({signature_word(receipt)})" if receipt else None,
        "made by": f"gpurun {__version__}",
    }


def _rounded(mark: Mark | None) -> float | None:
    return None if mark is None else round(mark.loss, 4)

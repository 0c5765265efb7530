"""`gpurun export`: write a checkpoint in the format of other tools, with a model card."""

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
        str | None, typer.Argument(metavar="DIR", help="The folder to create. A single argument is the folder.")
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM",
            help="Write for hf (transformers), nanogpt or mingpt (ckpt.pt), lab (course), tensorboard (curves).",
        ),
    ] = "hf",
    checkpoint: Checkpoint = "best",
    push: Annotated[
        str, typer.Option("--push", metavar="OWNER/NAME", help="Upload the model to this repository on Hugging Face.")
    ] = "",
    yes: Yes = False,
) -> Result:
    """Export a run's checkpoint, with a model card, or its curves for other tools.

    A model needs a new or empty folder, and is written completely or not at all. A single argument is the folder.
    Curves go into a subfolder with the name of the run.
    """
    from gpurun.cli.run_control import find_meant_run
    from gpurun.readers.weights import ask_trainer, find_checkpoint

    if push:
        from gpurun.cli import hub_push

        if to != "hf":
            what = "Only a model in the format of transformers can be uploaded."
            raise UsageError("export.push_form", what, hint="Leave --push out, or write --to hf.")
        hub_push.require_push_setup(push)
    if to not in FORMS:
        raise UsageError("export.unknown_form", f"--to {to!r} is not known.", hint=f"Use one of: {', '.join(FORMS)}.")
    if folder is None and (run.startswith("@") or run in session.home.run_names()):
        what = f"{run} is a run, but the folder for its model is missing."
        raise UsageError("export.no_folder", what, hint=f"Name one: gpurun export {run} ./model")
    sight = find_meant_run(session, None if folder is None and run.strip() else run)
    place = Path(folder or run).expanduser().absolute()
    if to == "tensorboard":
        return _write_curves(session, sight, place / sight.folder.name)
    found = find_checkpoint(sight, checkpoint)
    session.say(f"step {found.step:,}, on this computer")
    figures = figures_of(session, sight, found.step)
    form = () if to == "hf" else ("--form", to)
    written = ask_trainer("trainer.export", found, str(place), *form, limit_s=LIMIT_S, figures=figures).splitlines()
    data = {"run": sight.folder.name, "step": found.step, "folder": str(place), "files": written, "figures": figures}
    after = ""
    if push:
        data["pushed"] = hub_push.push(session, place, push, yes=yes)
        after = f"It is at {data['pushed']}"
    return Result(data=data, text="\n".join(written), after=after)


def _write_curves(session: Session, sight: Sight, place: Path) -> Result:
    """Write a run's measurements for TensorBoard; each column of `load_run(...).metrics` becomes a scalar."""
    from gpurun.core.journal_records import Event
    from gpurun.readers.curve_log import TensorBoardLog, figures_in
    from gpurun.readers.loaded_run import load_run

    if place.exists():
        raise UsageError("export.not_empty", f"{place} already exists.", hint="Name another folder, or remove it.")
    began = next((record.wall for record in sight.records if record.event is Event.TRAIN_STARTED), 0.0)
    rows, log = load_run(sight.folder.name, session.home.root).rows, TensorBoardLog(place, began)
    for name, value, row in figures_in(rows):
        log.add(name, value, row)
    log.close()
    data = {"run": sight.folder.name, "folder": str(place), "rows": len(rows)}
    return Result(data=data, text=f"Wrote {place}. To see it: tensorboard --logdir {shlex.quote(str(place.parent))}")


def figures_of(session: Session, sight: Sight, step: int) -> dict[str, Any]:
    """Return the run's figures for the model card; None for a figure that was not measured."""
    from gpurun.core.money import format_usd
    from gpurun.readers.run_material import earlier_words, material_of
    from gpurun.view.number_format import format_duration
    from gpurun.view.receipt_screen import cost_label, signature_word

    run = material_of(session.home, sight, session.clock.wall())
    receipt, last, best = run.receipt, run.last, run.history.best
    predicate = receipt.predicate if receipt else None
    here = next((mark for mark in run.history.validation.items if mark.step == step), None)
    cost = None if receipt is None or run.cost_micros is None else format_usd(run.cost_micros)
    return {
        "run": run.run,
        "recipe": run.recipe,
        "device" if run.history.device == "cpu" else "GPU": run.history.device or None,
        "machine": run.where,
        **({"continued from": earlier_words(sight.plan.continues)} if sight.plan.continues else {}),
        "training time": None if run.train_s is None else format_duration(run.train_s),
        "cost of the whole rental": f"{cost} at most ({cost_label(predicate)})" if cost and predicate else None,
        "final training loss": _round_loss(last),
        "validation loss at this step": _round_loss(here),
        "best validation loss": _round_loss(best),
        "verdict": f"{predicate['verdict']['is']}: {predicate['verdict']['says']}" if predicate else run.no_receipt,
        "receipt sha256": f"{receipt.sha256} ({signature_word(receipt)})" if receipt else None,
        "made by": f"gpurun {__version__}",
    }


def _round_loss(mark: Mark | None) -> float | None:
    return None if mark is None else round(mark.loss, 4)

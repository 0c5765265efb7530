"""What `gpurun export` does: a checkpoint in the form that other tools read, with a card of the run's figures."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gpurun import __version__
from gpurun.cli.control import find
from gpurun.cli.reports import earlier_words, material_of
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.weights import ask_trainer, find_checkpoint
from gpurun.core.errors import UsageError
from gpurun.core.money import format_usd
from gpurun.lifecycle.runs import Sight
from gpurun.view.quantities import format_duration
from gpurun.view.report.told import Mark

FORMS = ("hf",)


def export_run(session: Session, run: str, folder: Path, *, form: str, checkpoint: str) -> Result:
    """Write a checkpoint into a folder that is new or empty, whole or not at all."""
    if form not in FORMS:
        raise UsageError("export.unknown_form", f"--to {form!r} is not known.", hint=f"There is: {', '.join(FORMS)}.")
    place, sight = folder.expanduser().absolute(), find(session, run)
    found = find_checkpoint(sight, checkpoint)
    session.say(f"step {found.step:,}, on this machine")
    figures = figures_of(session, sight, found.step)
    with tempfile.TemporaryDirectory(prefix="gpurun-export-") as own:
        card = Path(own) / "figures.json"
        card.write_text(json.dumps(figures), encoding="utf-8")
        written = ask_trainer(
            "trainer.export", str(found.weights), str(place), "--data", str(found.data), "--figures", str(card)
        ).splitlines()
    data = {"run": sight.folder.name, "step": found.step, "folder": str(place), "files": written, "figures": figures}
    return Result(data=data, text="\n".join(written))


def figures_of(session: Session, sight: Sight, step: int) -> dict[str, Any]:
    """What the model card says of the run, in its own words; null where nobody measured it."""
    run = material_of(session, sight)
    receipt, last, best = run.receipt, run.last, run.told.best
    here = next((mark for mark in run.told.validation.items if mark.step == step), None)
    cost = None if receipt is None or receipt.cost_micros is None else format_usd(receipt.cost_micros)
    return {
        "run": run.run,
        "recipe": run.recipe,
        "device" if run.told.device == "cpu" else "GPU": run.told.device or None,
        "machine": run.where,
        **({"went on from": earlier_words(sight.plan.continues)} if sight.plan.continues else {}),
        "time of training": None if run.train_s is None else format_duration(run.train_s),
        "cost of the whole rental": f"{cost} at most ({receipt.cost_label})" if cost and receipt else None,
        "final training loss": _rounded(last),
        "validation loss at this step": _rounded(here),
        "best validation loss": _rounded(best),
        "verdict": f"{receipt.verdict}: {receipt.sentence}" if receipt else run.no_receipt,
        "receipt sha256": f"{receipt.digest} ({receipt.signature})" if receipt else None,
        "made by": f"gpurun {__version__}",
    }


def _rounded(mark: Mark | None) -> float | None:
    return None if mark is None else round(mark.loss, 4)

"""`gpurun eval`: score a checkpoint on a public benchmark."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from gpurun.cli.options import Checkpoint, UsualRun
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

MOST_ITEMS = 1_000_000
LIMIT_S = 24 * 3600.0

app = typer.Typer(rich_markup_mode=None)


@verb(app, "eval", examples=["gpurun eval fox-41 --core --core-bundle eval_bundle.zip --items 100"])
def evaluate(
    session: Session,
    run: UsualRun = None,
    core: Annotated[bool, typer.Option("--core", help="Score on CORE: the 22 tasks of DCLM, as in nanochat.")] = False,
    core_bundle: Annotated[
        str,
        typer.Option("--core-bundle", metavar="FILE|URL", help="Read the tasks from this bundle (default: the run's)."),
    ] = "",
    items: Annotated[
        int, typer.Option("--items", metavar="N", help="Use at most this many questions of each task.")
    ] = MOST_ITEMS,
    checkpoint: Checkpoint = "best",
) -> Result:
    """Score a run's checkpoint on this computer, on a public benchmark."""
    from gpurun.cli.run_control import find_meant_run
    from gpurun.core.untrusted import parse_object
    from gpurun.data.core_bundle import FILE, bundle_file, write_core
    from gpurun.readers.weights import ask_trainer, find_checkpoint

    if not core:
        raise UsageError("usage.eval", "No benchmark was named.", hint="Add --core.")
    if not 0 < items <= MOST_ITEMS:
        raise UsageError(
            "usage.items", f"--items {items} is not between 1 and {MOST_ITEMS:,}.", hint="Try --items 500."
        )
    sight = find_meant_run(session, run)
    found = find_checkpoint(sight, checkpoint)
    with tempfile.TemporaryDirectory(prefix="gpurun-") as own:
        file = found.data / FILE
        if core_bundle:
            bundle = bundle_file(core_bundle, session.home.prepare().cache / "core", session.say)
            write_core(bundle, items, found.data, Path(own), session.talk_when_slow())
            file = Path(own, FILE)
        elif not file.is_file():
            what = f"{sight.folder.name} does not have the tasks of CORE."
            raise UsageError("core.no_bundle", what, hint="Name the bundle: --core-bundle eval_bundle.zip")
        elif items != MOST_ITEMS:
            what = f"--items {items} needs a bundle, because the questions stored with the run cannot be limited."
            raise UsageError("usage.items", what, hint="Add --core-bundle, or leave --items out.")
        session.say(f"step {found.step:,}, on this computer")
        answer = parse_object(ask_trainer("trainer.core_score", found, f"--items={file}", limit_s=LIMIT_S))
    return Result(data={"run": sight.folder.name, **answer}, text="\n".join(_format_scores(answer)))


def _format_scores(answer: dict[str, Any]) -> list[str]:
    """Return a line for each task, and one for CORE."""
    from gpurun.core.untrusted import safe_line

    width = max(map(len, answer["tasks"]))
    rows = [
        f"{safe_line(name):{width}}  {of['items']:>6,} items  {of['accuracy']:7.4f}  centered {of['centered']:7.4f}"
        for name, of in answer["tasks"].items()
    ]
    return [*rows, f"CORE {answer['core']:.4f} over {answer['core_items']:,} items"]

"""`gpurun import`: turn the evidence of a notebook into a run of this home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(rich_markup_mode=None)


@verb(app, "import", examples=["gpurun import ~/Downloads/evidence.zip", "gpurun import evidence.zip --name fox-41"])
def import_(
    session: Session,
    evidence: Annotated[Path, typer.Argument(metavar="FILE", help="The evidence.zip that a notebook wrote.")],
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Give the run this name.")] = "",
) -> Result:
    """Import the evidence of a notebook as a run, and sign a receipt that claims no more than its log shows.

    The result works like any other run with receipt, report, sample, export and train --from. The receipt states that
    gpurun did not see what it cost, and that the user must end the session.
    """
    from gpurun.cli.commands.plan import run_name
    from gpurun.ledger.write_receipt import read_receipt
    from gpurun.readers.imported_run import import_run

    with run_name(session, name) as run:
        folder, code = import_run(evidence.expanduser(), run, session.home, session.clock)
    receipt = read_receipt(session.home, folder)
    predicate, verdict = receipt.predicate, receipt.predicate["verdict"]
    steps = ", ".join(str(file["step"]) for file in predicate["checkpoint"]["files"] if file["kind"] == "weights")
    lines = [
        f"{run}: {predicate['training']['outcome']}, checkpoints of step {steps or '—'}, signed here as imported.",
        f"  {verdict['is']}: {verdict['says']}. {verdict.get('not_shown', '')}",
        "  If its session is still running, you must end it: gpurun cannot, and did not see it end.",
    ]
    data = {"run": run, "exit_code": int(code), "verdict": verdict["is"], "receipt_sha256": receipt.sha256}
    return Result(data=data, text="\n".join(lines), after=f"gpurun receipt {run}")

"""`gpurun report`: compare several runs."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpurun import __version__
from gpurun.cli.options import Runs
from gpurun.cli.render import write_file
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

app = typer.Typer(rich_markup_mode=None)


@verb(app, "report", examples=["gpurun report --last 5", "gpurun report fox-41 'owl-*' --html report.html"])
def report(
    session: Session,
    runs: Runs = [],  # noqa: B006
    every: Annotated[bool, typer.Option("--all", help="Compare every run of this home.")] = False,
    last: Annotated[int, typer.Option("--last", metavar="N", help="Compare the last N runs.")] = 0,
    html: Annotated[
        str, typer.Option("--html", metavar="FILE", help="Write one self-contained page to this file.")
    ] = "",
) -> Result:
    """Compare runs: loss by step, token, second and dollar, settings, and samples side by side."""
    from gpurun.ledger.runs import look_at_run
    from gpurun.readers.trial_material import materials_of
    from gpurun.view.number_format import format_bytes
    from gpurun.view.report.page import report_page
    from gpurun.view.report.report_model import list_differences
    from gpurun.view.report.summary import summary
    from gpurun.view.report.svg_charts import MOST_RUNS

    if html == "-" and session.json:
        hint = "Name a file: --html report.html"
        raise UsageError("report.two_outputs", "--json and --html - cannot both use standard output.", hint=hint)
    names = _choose_runs(session, runs, every=every, last=last)
    if html and len(names) > MOST_RUNS:
        what = f"{len(names)} runs are too many for one chart; the limit is {MOST_RUNS}."
        raise UsageError("report.too_many", what, hint="Name fewer runs, or leave --html out: the table shows all.")
    wall = session.clock.wall()
    material = [
        material_of_run
        for name in names
        for material_of_run in materials_of(session.home, look_at_run(session.home, name), wall)
    ]
    if html and len(material) > MOST_RUNS:
        session.say(f"The page shows {MOST_RUNS} of {len(material)} (the best of a sweep); the table shows all.")
        material = material[:MOST_RUNS]
    data = {
        "runs": [run.as_record() for run in material],
        "differences": [{"key": key, "values": values} for key, values in list_differences(material)],
        "html": str(Path(html).expanduser().absolute()) if html else None,
    }
    if not html:
        after = f"For a page with curves and samples: gpurun report {' '.join(names)} --html report.html"
        return Result(data=data, text=session.draw(summary(material, session.style)), after=after)
    page = report_page(material, version=__version__)
    if html == "-":
        return Result(data=data, text=page.rstrip("\n"))
    size = write_file(Path(html).expanduser(), page, flag="--html")
    return Result(data=data, text=f"Wrote {html} ({format_bytes(size)}). It opens in any browser, even offline.")


def _choose_runs(session: Session, runs: Sequence[str], *, every: bool, last: int) -> list[str]:
    """Return the chosen runs without duplicates: by name, by glob, the last N, or all; by default the usual run."""
    from gpurun.cli.run_control import resolve_run_name
    from gpurun.ledger.runs import planned_runs

    if last < 0:
        raise UsageError("report.last", f"--last {last} is not a number of runs.", hint="For example: --last 5")
    there = planned_runs(session.home)
    names = list(there) if every else there[-last:] if last else []
    for run in runs:
        if not set(run) & set("*?["):
            names.append(resolve_run_name(session, run))
            continue
        taken = fnmatch.filter(there, run)
        if not taken:
            raise UsageError("report.no_match", f"No run matches {run}.", hint="`gpurun ps --all` lists them.")
        names += taken
    return list(dict.fromkeys(names)) or [resolve_run_name(session, None)]

"""`gpurun roster`: give each learner of a class a challenge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.help_panels import make_verb_group
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb

app = typer.Typer(help="Give each learner of a class a challenge.", cls=make_verb_group(), rich_markup_mode=None)


@verb(app, "roster new", examples=["gpurun roster new ml-2026 --students students.txt"])
def new(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="CLASS", help="The class's name: letters, digits and dashes.")],
    *,
    students: Annotated[
        str, typer.Option("--students", metavar="FILE", help="Read the learners from this file, one per line.")
    ],
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME", help="Require this recipe.")] = "",
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Require this number of steps.")] = 0,
    data: Annotated[
        str, typer.Option("--data", metavar="SHA256", help="Require data with this hash, as in a receipt.")
    ] = "",
    trainer: Annotated[str, typer.Option("--trainer", metavar="official|SHA256", help="Require this trainer.")] = "",
    output: Annotated[
        str, typer.Option("-o", metavar="FILE", help="Write to this file (default CLASS.roster.json).")
    ] = "",
) -> Result:
    """Draw a challenge for each learner, which sets a run's seed. Keep the file, and hand out the challenges.

    A card with another recipe, other data, another trainer or fewer steps than required is a problem.
    """
    from gpurun.cli.render import write_file
    from gpurun.jobs.training.recipe import load_recipe
    from gpurun.readers.evidence.roster import ClassTask, new_roster, read_students

    task = ClassTask(
        recipe=load_recipe(recipe).name if recipe else "", steps=steps, data=data.lower(), trainer=trainer.lower()
    )
    roster = new_roster(name, read_students(Path(students).expanduser()), session.clock.wall(), task)
    path = Path(output or f"{name}.roster.json").expanduser()
    _refuse_existing(path)
    write_file(path, roster.to_json(), flag="-o")
    width = max(len(student.name) for student in roster.students)
    command = f"gpurun train {recipe or 'course-lab'}{f' --set train.steps={steps}' if steps else ''}"
    lines = [f"{student.name:{width}}  {command} --challenge {student.challenge}" for student in roster.students]
    after = f"Wrote {path}. To check the cards that they hand in: gpurun audit --roster FOLDER --class {path}"
    return Result(data=roster.model_dump(mode="json"), text="\n".join(lines), after=after)


def _refuse_existing(path: Path) -> None:
    """Raise UsageError if the file exists, because finished runs would not match new challenges."""
    from gpurun.core.errors import UsageError

    if path.exists():
        what = f"{path} already exists, and its challenges may already be in use."
        raise UsageError("roster.there", what, hint="Name another file with -o, or move the existing one.")

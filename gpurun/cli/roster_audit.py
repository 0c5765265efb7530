"""`gpurun audit --roster`: a folder of evidence cards, offline, as one table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpurun.cli.render import write_file
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, UsageError, VerificationFailed
from gpurun.core.money import format_figure
from gpurun.ledger.audit.findings import NO
from gpurun.ledger.evidence.class_check import UNREADABLE, CardRow, check_class
from gpurun.ledger.evidence.roster import read_roster
from gpurun.view.evidence_card import roster_screen

_COLUMNS = ("student", "file", "run", "verdict", "device", "loss", "val_loss", "cost", "receipt", "problems", "notes")


def audit_roster(
    session: Session, folder: str, class_file: str, csv_file: str, *, replay: bool, strict: bool, beside: bool
) -> Result:
    """Check every file of a folder; exit 10 where a card does not hold, or under `strict` where a note is left."""
    if not folder or beside:
        what = "--class and --csv go with --roster FOLDER, and no RUN, --since, --head, --key or --against-bill does."
        raise UsageError("usage.roster", what, hint="gpurun audit --roster cards/ --class ml-2026.roster.json")
    place = Path(folder).expanduser()
    try:
        names = sorted(name for name in os.listdir(place) if not name.startswith("."))
    except OSError as error:
        what = f"--roster {place} cannot be listed: {error.strerror}."
        raise UsageError("usage.roster", what, hint="Name the folder in which the cards lie.") from None
    roster = read_roster(_class_of(class_file)) if class_file else None
    rows = check_class((place / name for name in names if not (place / name).is_dir()), roster)
    if replay:
        _replay(session, rows, place)
    if csv_file:
        write_file(Path(csv_file).expanduser(), _csv(rows), flag="--csv")
    failed = any(row.problems or (strict and row.notes) for row in rows)
    said = [
        f"  {row.student or row.file}: {text}" for row in rows for text in (*row.problems, *row.notes, *row.checked)
    ]
    text = "\n".join([session.draw(roster_screen(rows, session.style)), *said])
    hint = "Each is named above; two cards that share what only one can have are both named."
    errors = (VerificationFailed("audit.failed", "A card does not hold.", hint=hint),) if failed else ()
    code = ExitCode.VERIFICATION_FAILED if failed else ExitCode.DONE
    data = {"ok": not failed, "rows": [_data(row) for row in rows]}
    return Result(data=data, text=text, errors=errors, exit_code=code)


def _class_of(told: str) -> Path:
    """A class's file, or the one that `roster new` writes for a class of that name."""
    path = Path(told).expanduser()
    return path if path.exists() else path.with_name(f"{path.name}.roster.json") if path.suffix != ".json" else path


def _replay(session: Session, rows: Sequence[CardRow], place: Path) -> None:
    """Compute again what cards with a checkpoint claim; of the others it is said that nothing was."""
    import tempfile

    from gpurun.cli.replay import replay_run
    from gpurun.core.untrusted import finding, parse_object
    from gpurun.ledger.evidence.card import PLAN, read_card
    from gpurun.ledger.evidence.class_check import lay_out

    for row in (row for row in rows if row.told):
        session.say(f"computing {row.file} again")
        with finding(row.problems.append, "it cannot be computed again"):
            card = read_card(place / row.file)
            if not card.large:
                row.checked.append("not replayed: its checkpoint is not in it (gpurun evidence --with-checkpoint)")
                continue
            with tempfile.TemporaryDirectory(prefix="gpurun-card-") as own:
                folder = lay_out(card, Path(own))
                card.unpack_large(folder.artifacts)
                data, recipe = folder.artifacts / "data", parse_object(card.files[PLAN])["resolved"]
                found = replay_run(folder, row.told, recipe, data)
            row.problems += found.problems
            row.checked += found.notes
        row.verdict = NO if row.problems and row.verdict != UNREADABLE else row.verdict


def _data(row: CardRow) -> dict[str, Any]:
    keys = (
        "student",
        "file",
        "run",
        "verdict",
        "device",
        "loss",
        "val_loss",
        "cost_micros",
        "cost_is",
        "receipt_sha256",
    )
    return {key: getattr(row, key) for key in keys} | {
        name: list(getattr(row, name)) for name in ("problems", "notes", "checked")
    }


def _csv(rows: Sequence[CardRow]) -> str:
    """The table for a spreadsheet, in which no cell is a formula: names and words are strangers'."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_COLUMNS)
    for row in rows:
        cost = "" if row.cost_micros is None else format_figure(row.cost_micros, row.cost_is)
        cells = [row.student, row.file, row.run, row.verdict, row.device, row.loss, row.val_loss, cost]
        cells += [row.receipt_sha256, "; ".join(row.problems), "; ".join([*row.notes, *row.checked])]
        writer.writerow([f"'{cell}" if str(cell)[:1] in ("=", "+", "-", "@", "\t") else cell for cell in cells])
    return out.getvalue()

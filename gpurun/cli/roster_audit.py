"""`gpurun audit --roster`: a folder of evidence cards, offline, as one table."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gpurun.cli.render import write_file
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, UsageError, VerificationFailed
from gpurun.core.installed_files import bundle_root
from gpurun.core.money import format_figure
from gpurun.core.untrusted import finding, parse_object
from gpurun.ledger.audit.findings import NO
from gpurun.planning.jobs import digest_of_trainer
from gpurun.readers.evidence.card import PLAN, read_card
from gpurun.readers.evidence.class_check import TWICE, UNREADABLE, CardRow, check_class, lay_out
from gpurun.readers.evidence.roster import read_roster
from gpurun.readers.replay import NOT_REPLAYED, Replayed, replay_run
from gpurun.view.evidence_card import roster_screen

_COLUMNS = (
    "student", "file", "run", "verdict", "recipe", "steps", "data", "trainer", "device", "loss", "val_loss", "cost",
    "receipt", "replayed", "problems", "notes",
)  # fmt: skip
CARD_S, MORE_S = 300.0, 180.0
MEAN_S = 120.0
"""A card is computed again for CARD_S at most, a folder for MEAN_S a card and MORE_S besides."""


@dataclass(frozen=True)
class RosterOrder:
    """What is asked of a folder of cards: `replay` computes them again, and `require_replay` takes no less."""

    folder: str
    class_file: str = ""
    csv_file: str = ""
    replay: bool = False
    require_replay: bool = False
    strict: bool = False


def audit_roster(session: Session, order: RosterOrder, *, beside: bool) -> Result:
    """Check every file of a folder; exit 10 where a card does not hold, or under `strict` where a note is left.

    `beside`: something was asked besides that only a home's runs have. Ctrl-C ends the computing, not the table.
    """
    if not order.folder or beside:
        what = "--class and --csv go with --roster FOLDER, and no RUN, --since, --head, --key or --against-bill does."
        raise UsageError("usage.roster", what, hint="gpurun audit --roster cards/ --class ml-2026.roster.json")
    place = Path(order.folder).expanduser()
    try:
        names = sorted(name for name in os.listdir(place) if not name.startswith("."))
    except OSError as error:
        what = f"--roster {place} cannot be listed: {error.strerror}."
        raise UsageError("usage.roster", what, hint="Name the folder in which the cards lie.") from None
    roster = read_roster(_class_of(order.class_file)) if order.class_file else None
    paths = [place / name for name in names if not (place / name).is_dir()]
    seen = count(1)

    def on_row(row: CardRow) -> None:
        session.say(f"{next(seen)}/{len(paths)} {row.student or row.file}: {row.verdict}")

    rows = check_class(paths, roster, official=digest_of_trainer(bundle_root() / "trainer"), on_row=on_row)
    if order.replay or order.require_replay:
        _replay(session, rows, place)
    for row in rows:
        if order.require_replay and row.told and row.replayed in ("", NOT_REPLAYED):
            row.problems.append("nothing of its training was computed again")
        row.verdict = NO if row.problems and row.verdict != UNREADABLE else row.verdict
    if order.csv_file:
        write_file(Path(order.csv_file).expanduser(), _csv(rows), flag="--csv")
    failed = any(row.problems or (order.strict and row.notes) for row in rows)
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
    judged = [row for row in rows if row.told and row.verdict != TWICE]
    ends_mono, why = session.clock.monotonic() + MORE_S + MEAN_S * len(judged), ""
    for number, row in enumerate(judged, start=1):
        row.replayed, left_s = NOT_REPLAYED, ends_mono - session.clock.monotonic()
        if left_s <= 0:
            why = "the time for this folder is over"
        if why:
            row.notes.append(f"not checked by a replay: {why}")
            continue
        session.say(f"{number}/{len(judged)} computing {row.student or row.file} again")
        try:
            with finding(row.problems.append, "it cannot be computed again"):
                replayed = _replayed(row, place, min(CARD_S, left_s))
                row.problems += replayed.problems
                row.checked += replayed.checked
                row.notes += replayed.unchecked
                row.replayed = replayed.extent
        except KeyboardInterrupt:
            why = "it was interrupted"
            row.notes.append(f"not checked by a replay: {why}")
            continue
        for text in (*row.problems, f"replayed: {row.replayed}"):
            session.say(f"  {text}")


def _replayed(row: CardRow, place: Path, limit_s: float) -> Replayed:
    """Compute one card again, for so long at most."""
    card = read_card(place / row.file)
    if not card.large:
        return Replayed.nothing("its checkpoint is not in it (gpurun evidence --with-checkpoint)")
    with tempfile.TemporaryDirectory(prefix="gpurun-card-") as own:
        folder = lay_out(card, Path(own))
        card.unpack_large(folder.artifacts)
        recipe = parse_object(card.files[PLAN])["resolved"]
        return replay_run(folder, row.told, recipe, folder.artifacts / "data", limit_s=limit_s)


def _data(row: CardRow) -> dict[str, Any]:
    keys = (
        "student", "file", "run", "verdict", "recipe", "steps", "data", "trainer", "device", "loss", "val_loss",
        "cost_micros", "cost_is", "receipt_sha256", "replayed",
    )  # fmt: skip
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
        cells = [row.student, row.file, row.run, row.verdict, row.recipe, row.steps, row.data, row.trainer]
        cells += [row.device, row.loss, row.val_loss, cost, row.receipt_sha256, row.replayed]
        cells += ["; ".join(row.problems), "; ".join([*row.notes, *row.checked])]
        writer.writerow([f"'{cell}" if str(cell)[:1] in ("=", "+", "-", "@", "\t") else cell for cell in cells])
    return out.getvalue()

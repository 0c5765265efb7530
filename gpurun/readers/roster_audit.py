"""Audits a folder of evidence cards, offline, and repeats their training on request."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from gpurun.core.clock import Clock
from gpurun.core.errors import UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.untrusted import finding, parse_object
from gpurun.jobs.trainer import digest_of_trainer
from gpurun.ledger.audit.findings import NO
from gpurun.readers.evidence.card import PLAN, read_card
from gpurun.readers.evidence.class_check import TWICE, UNREADABLE, CardRow, check_class, lay_out
from gpurun.readers.evidence.roster import read_roster
from gpurun.readers.replay import NOT_REPLAYED, Replayed, replay_run

CARD_S, MORE_S = 300.0, 180.0
MEAN_S = 120.0
"""Limits in seconds: recomputing takes at most CARD_S for a card, and for a folder MEAN_S per card plus MORE_S."""


def audit_roster(
    place: Path,
    class_file: str,
    clock: Clock,
    say: Callable[[str], None],
    *,
    replay: bool,
    require_replay: bool,
) -> list[CardRow]:
    """Return a row for each file of a folder, and for each learner of the class who did not hand in a card.

    `replay` recomputes the cards. With `require_replay` a card that cannot be recomputed has a problem. Ctrl-C ends
    only the recomputing.
    """
    try:
        names = sorted(name for name in os.listdir(place) if not name.startswith("."))
    except OSError as error:
        what = f"--roster {place} cannot be listed: {error.strerror}."
        raise UsageError("usage.roster", what, hint="Name the folder with the cards.") from None
    roster = None
    if class_file:
        path = Path(class_file).expanduser()
        # The name of a class means the file that `roster new` wrote for it.
        if not path.exists() and path.suffix != ".json":
            path = path.with_name(f"{path.name}.roster.json")
        roster = read_roster(path)
    paths = [place / name for name in names if not (place / name).is_dir()]
    number = count(1)

    def on_row(row: CardRow) -> None:
        say(f"{next(number)}/{len(paths)} {row.student or row.file}: {row.verdict}")

    rows = check_class(paths, roster, official=digest_of_trainer(bundle_root() / "trainer"), on_row=on_row)
    if replay or require_replay:
        _replay_cards(rows, place, clock, say)
    for row in rows:
        if require_replay and row.predicate and row.replayed in ("", NOT_REPLAYED):
            row.problems.append("nothing of its training was recomputed")
        row.verdict = NO if row.problems and row.verdict != UNREADABLE else row.verdict
    return rows


def _replay_cards(rows: Sequence[CardRow], place: Path, clock: Clock, say: Callable[[str], None]) -> None:
    """Recompute the cards within the folder's time limit. Add a note to each card that is not recomputed."""
    judged = [row for row in rows if row.predicate and row.verdict != TWICE]
    ends_mono, why = clock.monotonic() + MORE_S + MEAN_S * len(judged), ""
    for number, row in enumerate(judged, start=1):
        row.replayed, left_s = NOT_REPLAYED, ends_mono - clock.monotonic()
        if left_s <= 0:
            why = "the time limit for this folder was reached"
        if why:
            row.notes.append(f"not checked by a replay: {why}")
            continue

        what = f"{number}/{len(judged)} computing {row.student or row.file} again"

        def say_more(text: str, what: str = what) -> None:
            say(f"{what}: {text}")

        try:
            with finding(row.problems.append, "it cannot be recomputed"):
                replayed = _replay_card(row, place, say_more, min(CARD_S, left_s))
                row.problems += replayed.problems
                row.checked += replayed.checked
                row.notes += replayed.unchecked
                row.replayed = replayed.extent
        except KeyboardInterrupt:
            why = "it was interrupted"
            row.notes.append(f"not checked by a replay: {why}")
            continue
        for text in (*row.problems, f"replayed: {row.replayed}"):
            say(f"  {text}")


def _replay_card(row: CardRow, place: Path, say: Callable[[str], None], limit_s: float) -> Replayed:
    """Recompute one card, within `limit_s` seconds."""
    card = read_card(place / row.file)
    if not card.large:
        return Replayed.nothing("the card does not include a checkpoint (gpurun evidence --with-checkpoint)")
    with tempfile.TemporaryDirectory(prefix="gpurun-card-") as own:
        folder = lay_out(card, Path(own))
        card.unpack_large(folder.artifacts)
        recipe = parse_object(card.files[PLAN])["resolved"]
        return replay_run(folder, row.predicate, recipe, folder.artifacts / "data", say, limit_s=limit_s)

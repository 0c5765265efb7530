"""Checks a folder of cards, compares the cards with one another, and compares them with their class.

Each card is audited like a run of a home, from the card's own files. If two cards share something that must be unique,
both have a problem, because the files do not show which of them is the copy.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gpurun.core.money import Figure, Micros
from gpurun.core.paths import RUN_NAME, Home, RunFolder
from gpurun.core.receipt_rules import stated_trainer
from gpurun.core.untrusted import finding, number, parse_object, plain_line
from gpurun.ledger.audit.audit_run import audit_run
from gpurun.ledger.audit.findings import NO
from gpurun.ledger.audit.strict_lines import journal_lines
from gpurun.ledger.signing import parse_public_key, payload_of
from gpurun.readers.evidence.card import (
    EVENTS,
    JOURNAL,
    KEY,
    LOG,
    PLAN,
    RECEIPT,
    EvidenceCard,
    NoCard,
    is_saved_model,
    read_card,
)
from gpurun.readers.evidence.roster import OFFICIAL, ClassTask, Roster

NO_CARD, UNREADABLE, TWICE = "no card", "not a card", "handed in twice"
_DAY_S = 86_400.0


@dataclass
class CardRow:
    """The row of one file in the folder, or of one learner without a file.

    `notes` are warnings, which count as problems under --strict. `checked` lists what was recomputed. `replayed` states
    how much of the training was repeated: "all", "3 spans", "nothing", or "" if no replay was requested. `marks`
    describe properties that must be unique. `weights` and `saved` are digests: of a trainer's weights, and of a
    command's checkpoints.
    """

    file: str
    student: str = ""
    run: str = ""
    verdict: str = UNREADABLE
    recipe: str = ""
    steps: int = 0
    """The number of trained steps."""
    data: str = ""
    trainer: str = ""
    device: str = ""
    loss: float | None = None
    val_loss: float | None = None
    cost_micros: Micros | None = None
    cost_is: Figure = Figure.MEASURED
    receipt_sha256: str = ""
    challenge: str = ""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    replayed: str = ""
    marks: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    place: tuple[str, int, str] = ("", 0, "")
    """The id of the receipt's chain, the receipt's position in it, and the digest of the previous receipt."""
    predicate: Mapping[str, Any] = field(default_factory=dict)


def check_class(
    cards: Iterable[Path],
    roster: Roster | None,
    *,
    official: str = "",
    on_row: Callable[[CardRow], None] = lambda row: None,
) -> list[CardRow]:
    """Return a row for each file, in order, followed by a row for each learner of the class without a file.

    `official` is the sha256 of the official trainer. `on_row` is called with each row once its card was checked. The
    cards are compared with one another after that.
    """
    rows = []
    for path in cards:
        rows.append(_check_card(path, roster, official))
        on_row(rows[-1])
    _compare_cards(rows, is_class=roster is not None)
    handed_in = {row.student for row in rows}
    absent = (student.name for student in (roster.students if roster else ()) if student.name not in handed_in)
    rows += [CardRow(file="", student=name, verdict=NO_CARD) for name in absent]
    for row in rows:
        row.problems = [plain_line(problem) for problem in row.problems]
        row.verdict = NO if row.problems and row.verdict != UNREADABLE else row.verdict
    return rows


def _check_card(path: Path, roster: Roster | None, official: str) -> CardRow:
    row = CardRow(file=plain_line(path.name))
    with finding(row.problems.append, "it cannot be checked"):
        try:
            card = read_card(path)
            with tempfile.TemporaryDirectory(prefix="gpurun-card-") as own:
                _check_files(row, card, Path(own))
            _compare_with_class(row, roster, official)
        except NoCard as error:
            row.problems.append(str(error))
    return row


def lay_out(card: EvidenceCard, root: Path) -> RunFolder:
    """Create a run's folder with only the card's small files, and return it. Raise NoCard for an invalid run name."""
    statement = parse_object(payload_of(parse_object(card.files[RECEIPT])))
    name = statement["predicate"]["run"]
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise NoCard("its run has an impossible name")
    folder = Home(root).run(name)
    (folder.artifacts / "checkpoints").mkdir(parents=True)
    places = {RECEIPT: folder.receipt, JOURNAL: folder.journal, PLAN: folder.plan, LOG: folder.log}
    for member, place in (places | {EVENTS: folder.events}).items():
        if member in card.files:
            place.write_bytes(card.files[member])
    for member, content in card.files.items():
        if member.startswith("checkpoints/"):
            (folder.artifacts / member).write_bytes(content)
    return folder


def _check_files(row: CardRow, card: EvidenceCard, root: Path) -> None:
    """Check a card's own files, and whether they agree with one another."""
    folder = lay_out(card, root)
    keys = parse_public_key(card.files[KEY])
    content = card.files[RECEIPT]
    predicate = parse_object(payload_of(parse_object(content)))["predicate"]
    row.predicate, row.run, row.receipt_sha256 = predicate, folder.name, hashlib.sha256(content).hexdigest()
    if predicate["signing"]["keyid"] not in keys:
        row.problems.append("its signature does not belong to the public key in it")
    link = {"run": row.run, "seq": predicate["seq"], "prev": predicate["prev"], "receipt_sha256": row.receipt_sha256}
    found = audit_run(
        folder, {row.run: link}, keys, journal_lines(folder.journal), must_be_signed=True, has_travelled=True
    )
    left_out = [name for name in (JOURNAL, LOG, EVENTS) if name in card.left_out and name not in card.files]
    if JOURNAL in left_out:  # Without the journal, nothing else can be checked.
        row.notes.append(f"not checked, because its journal was left out: {card.left_out[JOURNAL]}")
        row.verdict = "not checked"
    else:
        row.problems += found.problems
        row.notes += [*found.warnings, *(f"{name} was left out: {card.left_out[name]}" for name in left_out)]
        row.verdict = found.verdict
    figures, start = predicate["training"]["figures"], predicate["training"]["start"]["event"] or {}
    row.recipe, row.data = (
        plain_line(str(value)) for value in (predicate["asked"]["recipe"], predicate["digests"]["data"])
    )
    row.steps = max(
        (file["step"] for file in predicate["checkpoint"]["files"] if type(file.get("step")) is int), default=0
    )
    row.trainer = stated_trainer(predicate)
    row.device = plain_line(str(start.get("cuda_name") or predicate["training"]["device"]))
    row.loss, row.val_loss = (number(figures.get(key)) for key in ("last_loss", "last_val_loss"))
    row.cost_micros, row.cost_is = found.measured_micros, found.measured_is
    row.challenge = str(predicate["asked"].get("challenge", ""))
    row.marks = {*found.marks}
    row.place = (str(predicate["signing"]["keyid"]), int(predicate["seq"]), str(predicate["prev"]))
    listed = {str(file["name"]): str(file["sha256"]) for file in predicate["checkpoint"]["files"]}
    for name, sha256 in card.large.items():
        if not name.startswith("data/") and listed.get(name) != sha256:
            row.problems.append(f"{plain_line(name)} differs from the file that its receipt lists")
    row.saved = {str(file["sha256"]) for file in predicate["checkpoint"]["files"] if is_saved_model(file)}
    row.weights = {str(file["sha256"]) for file in predicate["checkpoint"]["files"] if file["kind"] == "weights"}


def _compare_with_class(row: CardRow, roster: Roster | None, official: str) -> None:
    """Check that a card has a challenge of the class, and that its training is the class's task."""
    if not row.predicate:
        return
    is_official = row.trainer.startswith(OFFICIAL)
    if is_official and official and row.predicate["digests"]["trainer"] != official:
        row.notes.append(f"not checked: {row.trainer} belongs to another release of gpurun")
    if roster is None:
        return
    word = row.challenge.rpartition(":")[0]
    student = next((student for student in roster.students if student.challenge == word), None)
    if student is None:
        row.problems.append(f"its challenge {word!r} is not one of {roster.name}" if word else "it has no challenge")
        return
    row.student = student.name
    requested = row.predicate["timeline"]["asked"]
    if requested != "unknown" and datetime.fromisoformat(str(requested)).timestamp() < roster.made_wall - _DAY_S:
        row.problems.append(f"it claims to have begun before {roster.name} had its challenges")
    row.problems += _differences(roster.task, row)


def _differences(task: ClassTask, row: CardRow) -> Iterator[str]:
    """Yield each difference between a card's training and the class's task."""
    if task.recipe and row.recipe != task.recipe:
        yield f"it trained {row.recipe}, but the class was given {task.recipe}"
    if task.steps and row.steps != task.steps:
        yield f"its last checkpoint is of step {row.steps:,}, but the class was given {task.steps:,} steps"
    if task.data and not row.data.startswith(task.data):
        yield f"it trained on the data {row.data[:12]}…, but the class was given {task.data[:12]}…"
    if task.trainer == OFFICIAL and not row.trainer.startswith(OFFICIAL):
        used = f"a {row.trainer}" if row.trainer else "another program"
        yield f"it used {used}, but the class was given the official trainer"
    if task.trainer not in ("", OFFICIAL) and not str(row.predicate["digests"]["trainer"]).startswith(task.trainer):
        yield f"it did not use the trainer that the class was given ({task.trainer[:12]}…)"


def _compare_cards(rows: Sequence[CardRow], *, is_class: bool) -> None:
    """Add a problem to cards that share what must be unique: challenge, key, rental, log, receipt or weights."""
    judged = _latest_runs(_without_duplicates([row for row in rows if row.predicate]))
    for mark, owners in _groups_sharing((mark, row) for row in judged for mark in row.marks):
        _add_problem(owners, f"{mark} is shared with {{others}}")
    for word, owners in _groups_sharing((row.challenge.rpartition(":")[0], row) for row in judged if row.challenge):
        _add_problem(owners, f"the challenge {word} is also used by {{others}}")
    if is_class:
        for _, owners in _groups_sharing((row.place[0], row) for row in judged):
            if len({row.challenge for row in owners}) > 1:
                _add_problem(owners, "the same key signed it and {others}")
    for _, owners in _groups_sharing((sha256, row) for row in judged for sha256 in row.weights):
        if all(row.challenge for row in owners) and len({row.challenge for row in owners}) > 1:
            _add_problem(owners, "its checkpoint is identical to that of {others}, but other seeds give other weights")
        else:
            for row in owners:
                said = "the same weights as {others}: without challenges, the same training gives the same weights"
                row.notes.append(said.format(others=_other_files(owners, row)))
    for _, owners in _groups_sharing((sha256, row) for row in judged for sha256 in row.saved):
        for row in owners:
            why = "a command that ignores $GPURUN_SEED always saves the same weights, so this does not prove a copy"
            row.notes.append(f"the same checkpoint as {_other_files(owners, row)}: {why}")
    _compare_chains(judged)


def _without_duplicates(rows: Sequence[CardRow]) -> list[CardRow]:
    """Return the rows with only one of each set of identical cards. The challenge shows to whom a card belongs."""
    for _, owners in _groups_sharing((row.receipt_sha256, row) for row in rows):
        for row in owners:
            files = [other.file for other in owners if other is not row]
            row.checked.append(f"the same card as {', '.join(files[:3])}")
    return list({row.receipt_sha256: row for row in rows}.values())


def _latest_runs(rows: Sequence[CardRow]) -> list[CardRow]:
    """Return the rows without earlier runs by the same key for the same challenge, which are not copies."""
    counted = {row.receipt_sha256: row for row in rows}
    for _, owners in _groups_sharing(((row.challenge, row.place[0]), row) for row in rows if row.challenge):
        last = max(owners, key=lambda row: row.place[1])
        for row in owners:
            if row is not last:
                row.checked.append(f"handed in twice; the later counts: {last.file}")
                row.verdict = TWICE
                del counted[row.receipt_sha256]
    return list(counted.values())


def _compare_chains(rows: Sequence[CardRow]) -> None:
    """Check the receipts of each home: positions in the chain must differ, and each must follow the previous one."""
    for _, owners in _groups_sharing((row.place[:2], row) for row in rows):
        _add_problem(owners, "it has the same position in the chain of a home as {others}")
    at = {row.place[:2]: row for row in rows}
    for row in rows:
        before = at.get((row.place[0], row.place[1] - 1))
        if before is not None and before.receipt_sha256 != row.place[2]:
            _add_problem([before, row], "it is not in the same chain as {others}, although the same key signed both")


def _groups_sharing(pairs: Iterable[tuple[Any, CardRow]]) -> Iterator[tuple[Any, list[CardRow]]]:
    owners: dict[Any, list[CardRow]] = defaultdict(list)
    for key, row in pairs:
        owners[key].append(row)
    return ((key, found) for key, found in owners.items() if len(found) > 1)


def _add_problem(rows: Sequence[CardRow], sentence: str) -> None:
    for row in rows:
        row.problems.append(sentence.format(others=_other_files(rows, row)))


def _other_files(rows: Sequence[CardRow], row: CardRow) -> str:
    names = [other.student or other.file for other in rows if other is not row]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

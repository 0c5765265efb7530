"""Checks a folder of cards against one another, and against the class that requested them.

Each card is audited like a home's run, from its own files. Something unique that two cards share is a problem of
both, because the files do not show which of the two was copied.
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
    """One file of the folder, or one learner without a file.

    `notes` are warnings, which count under --strict; `checked` is what was recomputed, and `replayed` how much of
    the training was ("all", "3 spans", "nothing"; "" if not requested). `marks` are, in words, what no second card may
    have; `weights` are the digests of the checkpoints', `saved` those of files that a command saved as such.
    """

    file: str
    student: str = ""
    run: str = ""
    verdict: str = UNREADABLE
    recipe: str = ""
    steps: int = 0
    """How many steps were trained."""
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
    """The chain that it is in, its place there, and the receipt before it."""
    predicate: Mapping[str, Any] = field(default_factory=dict)


def check_class(
    cards: Iterable[Path],
    roster: Roster | None,
    *,
    official: str = "",
    on_row: Callable[[CardRow], None] = lambda row: None,
) -> list[CardRow]:
    """Return a row for each file, in order, then one for each learner of the class without a file.

    `official` is the sha256 of this gpurun's own trainer. `on_row` is called with each row once its card has been
    judged alone; comparisons between cards come after all of them.
    """
    rows = []
    for path in cards:
        rows.append(_row(path, roster, official))
        on_row(rows[-1])
    _hold_together(rows, is_class=roster is not None)
    handed_in = {row.student for row in rows}
    absent = (student.name for student in (roster.students if roster else ()) if student.name not in handed_in)
    rows += [CardRow(file="", student=name, verdict=NO_CARD) for name in absent]
    for row in rows:
        row.problems = [plain_line(problem) for problem in row.problems]
        row.verdict = NO if row.problems and row.verdict != UNREADABLE else row.verdict
    return rows


def _row(path: Path, roster: Roster | None, official: str) -> CardRow:
    row = CardRow(file=plain_line(path.name))
    with finding(row.problems.append, "it cannot be checked"):
        try:
            card = read_card(path)
            with tempfile.TemporaryDirectory(prefix="gpurun-card-") as own:
                _judge(row, card, Path(own))
            _hold_against(row, roster, official)
        except NoCard as error:
            row.problems.append(str(error))
    return row


def lay_out(card: EvidenceCard, root: Path) -> RunFolder:
    """Create the folder of a run with only a card's small files; NoCard for an invalid name."""
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


def _judge(row: CardRow, card: EvidenceCard, root: Path) -> None:
    """Check the card's own files, and whether they agree."""
    folder = lay_out(card, root)
    keys = parse_public_key(card.files[KEY])
    content = card.files[RECEIPT]
    predicate = parse_object(payload_of(parse_object(content)))["predicate"]
    row.predicate, row.run, row.receipt_sha256 = predicate, folder.name, hashlib.sha256(content).hexdigest()
    if predicate["signing"]["keyid"] not in keys:
        row.problems.append("it was signed by another key than the one in it")
    link = {"run": row.run, "seq": predicate["seq"], "prev": predicate["prev"], "receipt_sha256": row.receipt_sha256}
    found = audit_run(
        folder, {row.run: link}, keys, journal_lines(folder.journal), must_be_signed=True, has_travelled=True
    )
    left_out = [name for name in (JOURNAL, LOG, EVENTS) if name in card.left_out and name not in card.files]
    if JOURNAL in left_out:  # Then nothing else can be derived.
        row.notes.append(f"not checked, because its journal was left out: {card.left_out[JOURNAL]}")
        row.verdict = "not checked"
    else:
        row.problems += found.problems
        row.notes += [*found.warnings, *(f"{name} was left out: {card.left_out[name]}" for name in left_out)]
        row.verdict = found.verdict
    figures, start = predicate["training"]["figures"], predicate["training"]["start"]["event"] or {}
    row.recipe, row.data = (
        plain_line(str(text)) for text in (predicate["asked"]["recipe"], predicate["digests"]["data"])
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
            row.problems.append(f"{plain_line(name)} is not the file that its receipt lists")
    row.saved = {str(file["sha256"]) for file in predicate["checkpoint"]["files"] if is_saved_model(file)}
    row.weights = {str(file["sha256"]) for file in predicate["checkpoint"]["files"] if file["kind"] == "weights"}


def _hold_against(row: CardRow, roster: Roster | None, official: str) -> None:
    """Check whether the card belongs to the class, and trained what the class had to train."""
    if not row.predicate:
        return
    is_official = row.trainer.startswith(OFFICIAL)
    if is_official and official and row.predicate["digests"]["trainer"] != official:
        row.notes.append(f"not checked: {row.trainer} is of another release than this gpurun's")
    if roster is None:
        return
    word = row.challenge.rpartition(":")[0]
    student = next((learner for learner in roster.students if learner.challenge == word), None)
    if student is None:
        row.problems.append(f"its challenge {word!r} is not one of {roster.name}" if word else "it has no challenge")
        return
    row.student = student.name
    asked = row.predicate["timeline"]["asked"]
    if asked != "unknown" and datetime.fromisoformat(str(asked)).timestamp() < roster.made_wall - _DAY_S:
        row.problems.append(f"it claims to have begun before {roster.name} had its challenges")
    row.problems += _other_than(roster.task, row)


def _other_than(task: ClassTask, row: CardRow) -> Iterator[str]:
    """Yield how a card differs from what its class was given."""
    if task.recipe and row.recipe != task.recipe:
        yield f"it trained {row.recipe}, but the class was given {task.recipe}"
    if task.steps and row.steps != task.steps:
        yield f"its last checkpoint is of step {row.steps:,}, but the class was given {task.steps:,} steps"
    if task.data and not row.data.startswith(task.data):
        yield f"it trained on the data {row.data[:12]}…, but the class was given {task.data[:12]}…"
    if task.trainer == OFFICIAL and not row.trainer.startswith(OFFICIAL):
        used = f"a {row.trainer}" if row.trainer else "a program of its own"
        yield f"it used {used}, but the class was given the official trainer"
    if task.trainer not in ("", OFFICIAL) and not str(row.predicate["digests"]["trainer"]).startswith(task.trainer):
        yield f"it used another trainer than the class was given ({task.trainer[:12]}…)"


def _hold_together(rows: Sequence[CardRow], *, is_class: bool) -> None:
    """Find what two cards cannot both have: a word, a key, a rental, a log, a receipt, a place in a chain, weights."""
    judged = _last_of_each(_each_once([row for row in rows if row.predicate]))
    for mark, owners in _shared((mark, row) for row in judged for mark in row.marks):
        _accuse(owners, f"{mark} is also that of {{others}}")
    for word, owners in _shared((row.challenge.rpartition(":")[0], row) for row in judged if row.challenge):
        _accuse(owners, f"the challenge {word} is also used by {{others}}")
    if is_class:
        for _, owners in _shared((row.place[0], row) for row in judged):
            if len({row.challenge for row in owners}) > 1:
                _accuse(owners, "the same key signed it and {others}")
    for _, owners in _shared((sha256, row) for row in judged for sha256 in row.weights):
        if all(row.challenge for row in owners) and len({row.challenge for row in owners}) > 1:
            _accuse(owners, "its checkpoint is also that of {others}, but another seed gives other weights")
        else:
            for row in owners:
                said = "the same weights as {others}: without a challenge the same training also gives them"
                row.notes.append(said.format(others=_others(owners, row)))
    for _, owners in _shared((sha256, row) for row in judged for sha256 in row.saved):
        for row in owners:
            why = "a command that ignores $GPURUN_SEED always saves the same, so this is no proof of a copy"
            row.notes.append(f"the same checkpoint as {_others(owners, row)}: {why}")
    _hold_chains(judged)


def _each_once(rows: Sequence[CardRow]) -> list[CardRow]:
    """Return the rows, with one of each set of identical cards; the challenge, not the file name, shows the owner."""
    for _, owners in _shared((row.receipt_sha256, row) for row in rows):
        for row in owners:
            files = [other.file for other in owners if other is not row]
            row.checked.append(f"the same card as {', '.join(files[:3])}")
    return list({row.receipt_sha256: row for row in rows}.values())


def _last_of_each(rows: Sequence[CardRow]) -> list[CardRow]:
    """Return the rows, with only a learner's last run for a challenge: one key signed them, so none is a copy."""
    counted = {row.receipt_sha256: row for row in rows}
    for _, owners in _shared(((row.challenge, row.place[0]), row) for row in rows if row.challenge):
        last = max(owners, key=lambda row: row.place[1])
        for row in owners:
            if row is not last:
                row.checked.append(f"handed in twice; the later counts: {last.file}")
                row.verdict = TWICE
                del counted[row.receipt_sha256]
    return list(counted.values())


def _hold_chains(rows: Sequence[CardRow]) -> None:
    """Check the receipts of one home: each has its own place, and a later one follows the earlier."""
    for _, owners in _shared((row.place[:2], row) for row in rows):
        _accuse(owners, "one home also gave its place in the chain to {others}")
    at = {row.place[:2]: row for row in rows}
    for row in rows:
        before = at.get((row.place[0], row.place[1] - 1))
        if before is not None and before.receipt_sha256 != row.place[2]:
            _accuse([before, row], "it is not in one chain with {others}, although one key signed both")


def _shared(pairs: Iterable[tuple[Any, CardRow]]) -> Iterator[tuple[Any, list[CardRow]]]:
    owners: dict[Any, list[CardRow]] = defaultdict(list)
    for key, row in pairs:
        owners[key].append(row)
    return ((key, found) for key, found in owners.items() if len(found) > 1)


def _accuse(rows: Sequence[CardRow], sentence: str) -> None:
    for row in rows:
        row.problems.append(sentence.format(others=_others(rows, row)))


def _others(rows: Sequence[CardRow], row: CardRow) -> str:
    names = [other.student or other.file for other in rows if other is not row]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""Tests of what `gpurun receipt` tells a person and a script about a bad receipt or a broken promise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.commands.receipt import receipt
from gpurun.cli.session import Session
from gpurun.core.errors import VerificationFailed
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import canonical
from gpurun.core.run_plan import Request
from gpurun.ledger.signing import PRIVATE_NAME, PUBLIC_NAME, make_envelope, payload_of
from gpurun.ledger.write_receipt import read_receipt
from gpurun.readers.next_command import next_command
from gpurun.view.event_text import tell_record
from tests.refusals import lacking, refusal
from tests.unit.ledger_samples import CloudRun, Note, finished_run

COST = 57 * 60 * 2_490_000 // 3600


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(home=Home(tmp_path / "home").prepare())


def unsign(home: Home) -> None:
    """Delete the private key that an earlier run has made, so that later receipts cannot be signed."""
    finished_run(home, "owl-07")
    (home.keys / PRIVATE_NAME).unlink()


@pytest.mark.parametrize(
    ("before", "after", "code", "expected"),
    [
        (None, None, 0, None),
        (unsign, None, 0, None),
        (None, lambda home: (home.keys / PUBLIC_NAME).rename(home.keys / "old.pub"), 0, None),
        (None, lambda home: (home.keys / PUBLIC_NAME).unlink(), 10, "receipt.unknown_key"),
    ],
    ids=["signed", "unsigned", "the key was rotated", "a key that nobody knows"],
)
def test_a_script_hears_of_a_bad_signature_as_a_person_does(
    session: Session,
    before: Callable[[Home], None] | None,
    after: Callable[[Home], Any] | None,
    code: int,
    expected: str | None,
) -> None:
    if before is not None:
        before(session.home)
    finished_run(session.home)
    if after is not None:
        after(session.home)
    shown = receipt(session, "fox-41", md=False)
    assert ("BAD SIGNATURE" in shown.text) is bool(code)
    assert (int(shown.exit_code), [error.code for error in shown.errors]) == (code, [expected] if expected else [])


@pytest.mark.parametrize("markdown", [False, True])
def test_a_machines_losses_are_named_beside_the_rest_of_the_run(session: Session, markdown: bool) -> None:
    """The receipt must name the missing files: once only the last line of the run's output counted them."""
    run, lost = CloudRun(session.home), ["checkpoints/000110.model.safetensors", "samples/000110.txt"]
    append = run.journal.write
    lines: list[str] = []

    def with_losses(event: Event, data: dict[str, Any]) -> Any:
        record = append(event, {**data, "missing": lost} if event is Event.COLLECT_OBSERVED else data)
        lines.append(tell_record(record))
        return record

    run.journal.write = with_losses  # type: ignore[method-assign]
    run.until_gone().settle()
    assert any(f"2 MISSING: {', '.join(lost)}" in line for line in lines)
    shown = " ".join(receipt(session, "fox-41", md=markdown).text.replace("\\", "").split())
    assert f"Not home {'| ' if markdown else ''}{lost[0]} · {lost[1]}" in shown
    finished_run(session.home, "owl-07")
    assert "Not home" not in receipt(session, "owl-07", md=markdown).text


def test_a_receipt_with_overlong_lost_file_names_is_shown(session: Session) -> None:
    """A machine chooses the file names, so a receipt must be shown even if they are too long for its limits."""
    run = CloudRun(session.home)
    append, lost = run.journal.write, [f"checkpoints/{number:0400d}.json" for number in range(64)]
    run.journal.write = lambda event, data: append(  # type: ignore[method-assign]
        event, {**data, "missing": lost} if event is Event.COLLECT_OBSERVED else data
    )
    run.until_gone().settle()
    assert "fox-41" in receipt(session, "fox-41", md=False).text


@pytest.mark.parametrize("markdown", [False, True])
@pytest.mark.parametrize(
    ("part", "value"),
    [("cost", None), ("timeline", {}), ("checkpoint", {"files": [{}]}), ("verdict", "gpu"), ("prev", 7)],
)
def test_a_receipt_that_lacks_a_part_is_not_a_gpurun_bug(
    session: Session, part: str, value: Any, markdown: bool
) -> None:
    folder = finished_run(session.home)
    statement = json.loads(payload_of(json.loads(folder.receipt.read_bytes())))
    statement["predicate"][part] = value
    folder.receipt.write_text(json.dumps(make_envelope(canonical(statement), None)))
    with refusal(VerificationFailed, "receipt.unreadable", "receipt.json"):
        receipt(session, "fox-41", md=markdown)


def test_a_bad_signature_and_an_unknown_key_are_two_errors(session: Session) -> None:
    finished_run(session.home)
    envelope = json.loads(session.home.run("fox-41").receipt.read_bytes())
    envelope["signatures"][0]["sig"] = "AAAA" + envelope["signatures"][0]["sig"][4:]
    session.home.run("fox-41").receipt.write_text(json.dumps(envelope))
    shown = receipt(session, "fox-41", md=False)
    assert (int(shown.exit_code), shown.errors[0].code) == (10, "receipt.signature")


@pytest.mark.parametrize(
    ("cap", "facts"),
    [
        (COST, ("cap $2.37", "100 %")),
        (COST - 1, ("cap $2.37", "unknown")),
        (2_000_000, ("cap $2.00", "NOT KEPT", "$0.37")),
    ],
)
@pytest.mark.parametrize("markdown", [False, True])
def test_a_cap_that_was_not_kept_is_not_called_used(
    session: Session, cap: int, facts: tuple[str, ...], markdown: bool
) -> None:
    CloudRun(session.home, cap=cap).until_gone().settle()
    assert lacking(" ".join(receipt(session, "fox-41", md=markdown).text.split()), *facts) == []


@pytest.mark.parametrize(
    ("prompt", "text", "shown"),
    [
        ("def f(x):\n", "def f(x):\n\treturn 1", "def f(x):\n    return 1"),
        ("a\tb", "a\tb c", "a    b c"),
        ("long " * 100, "long " * 100 + "end", "long " * 100 + "end"),
        ("the dog\nsleeps.", "der Hund\nschläft.", "the dog\nsleeps.\nder Hund\nschläft."),
    ],
    ids=["a line end", "a tabulator", "longer than a record has it", "a translation"],
)
def test_a_prompt_of_several_lines_is_told_once_and_as_it_was(
    session: Session, prompt: str, text: str, shown: str
) -> None:
    run = CloudRun(session.home).until_gone()
    with run.folder.events.open("a") as events:
        events.write(json.dumps({"kind": "sample", "step": 120, "prompt": prompt, "text": text}) + "\n")
    run.settle()
    page = receipt(session, "fox-41", md=True).text
    assert page.endswith(f"## Sample\n\n```text\n{shown}\n```")


@pytest.mark.parametrize(
    ("recipe", "after"),
    [("mini-gpt", "gpurun plan mini-gpt"), ("/srv/a b/my.toml", "gpurun plan '/srv/a b/my.toml'")],
)
def test_the_next_step_of_a_rehearsal_names_the_recipe_as_asked(session: Session, recipe: str, after: str) -> None:
    class Rehearsed(CloudRun):
        def opened(self) -> Note:
            event, data = super().opened()
            return event, {**data, "mode": "rehearsal"}

    run = Rehearsed(session.home).until_gone()
    run.folder.request.write_text(Request(recipe=recipe, dry_run=True).to_json())
    run.settle()
    shown = next_command(read_receipt(session.home, run.folder).predicate, run.folder)
    assert shown.split("   #")[0] == after
    run.folder.request.unlink()
    assert next_command(read_receipt(session.home, run.folder).predicate, run.folder) == "gpurun audit fox-41"


@pytest.mark.parametrize(
    ("outcome", "exit_code", "home", "goes_on"),
    [
        ("lost", None, ("weights", "optimizer", "state"), True),
        ("lost", None, ("weights", "state"), False),
        ("failed", 0, ("weights", "optimizer", "state"), True),
        ("failed", 1, ("weights", "optimizer", "state"), False),
    ],
    ids=["taken", "taken, and no checkpoint is whole", "told to stop by its provider", "failed by itself"],
)
def test_the_next_step_of_a_lost_run_uses_what_is_whole_at_home(
    session: Session, outcome: str, exit_code: int | None, home: tuple[str, ...], goes_on: bool
) -> None:
    predicate = read_receipt(session.home, finished_run(session.home)).predicate
    predicate["training"] |= {"outcome": outcome, "exit_code": exit_code}
    predicate["checkpoint"] |= {"latest": 60, "files": [{"name": kind, "kind": kind, "step": 40} for kind in home]}
    command, _, remark = next_command(predicate, session.home.run(predicate["run"])).partition("   # ")
    assert (command == f"gpurun train --from {predicate['run']}" and "step 40" in remark) is goes_on


def test_every_digest_of_the_markdown_is_whole_somewhere(session: Session) -> None:
    finished_run(session.home)
    text = receipt(session, "fox-41", md=True).text
    cut = re.findall(r"\b([0-9a-f]{4})…([0-9a-f]{4})\b", text)
    assert cut
    assert [pair for pair in cut if not re.search(rf"\b{pair[0]}[0-9a-f]{{56}}{pair[1]}\b", text)] == []


@pytest.mark.parametrize("columns", [40, 60, 120])
def test_whose_receipt_it_is_shows_in_any_terminal_width(
    session: Session, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(session.home)
    monkeypatch.setenv("COLUMNS", str(columns))
    head = receipt(session, "fox-41", md=False).text.split("\n\n")[0]
    assert "Receipt fox-41" in head
    assert "#0001" in head
    assert max(map(len, head.splitlines())) <= columns

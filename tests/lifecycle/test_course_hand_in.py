"""Tests of the course's own script under `gpurun run`: a learner's card, and what its challenge proves."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurun.core.installed_files import recipe_file
from gpurun.core.journal_records import opened_of
from gpurun.core.paths import Home
from gpurun.ledger.journal import read_journal
from gpurun.ledger.signing import load_signer
from gpurun.readers.evidence.class_check import CardRow, check_class
from gpurun.readers.evidence.roster import ClassTask, Roster, Student
from tests.lifecycle.commands_here import Person
from tests.refusals import lacking
from tests.unit.class_samples import pack_again
from tests.users_scripts import COURSE_GPT

pytestmark = [pytest.mark.slow, pytest.mark.torch]
WORD = "ml-2026-k7h3m9q2x4ab"
SCRIPT = "mini_gpt2_train.py"


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Person:
    """Return a user who has run the course's script for a challenge and has made the card to hand in."""
    root = tmp_path_factory.mktemp("course")
    person = Person(root / "home", root / "lab")
    person.folder.joinpath(SCRIPT).write_text(COURSE_GPT)
    person.folder.joinpath("diary.txt").write_text("nobody's business")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPURUN_HOME", str(person.home))
        done = person.runs("--challenge", WORD, SCRIPT)
        assert done.returncode == 0, done.stderr
        packed = person.types("evidence", "-o", "card.zip", "--with-checkpoint")
        assert packed.returncode == 0, packed.stderr
    return person


@pytest.fixture(autouse=True)
def at_home(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURUN_HOME", str(person.home))


@pytest.fixture
def card(person: Person) -> Path:
    return person.folder / "card.zip"


def bound(person: Person) -> str:
    signer = load_signer(Home(person.home).keys)
    assert signer is not None
    return f"{WORD}:{signer.keyid}"


def a_class(word: str = WORD, task: ClassTask = ClassTask()) -> Roster:  # noqa: B008 - frozen
    return Roster(name="ml-2026", made_wall=0.0, students=(Student(name="Ada", challenge=word),), task=task)


def of_class(card: Path, roster: Roster) -> CardRow:
    return check_class([card], roster)[0]


def test_a_command_is_handed_its_challenge_and_a_32_bit_seed(person: Person) -> None:
    challenge = bound(person)
    log = (person.home / "runs/fox-41/run.log").read_text()
    seed = recipe_file.seed_of(challenge, 32)
    assert lacking(log, challenge, str(seed)) == []
    assert seed < 2**32
    assert opened_of(read_journal(person.home / "runs/fox-41/journal.jsonl").records).challenge == challenge
    receipt = person.receipt()
    assert receipt["asked"]["challenge"] == challenge
    assert WORD in receipt["verdict"]["says"]
    assert "the seed" in receipt["verdict"]["not_shown"]
    assert person.holds()


def test_the_card_has_all_that_the_course_asks_for(person: Person, card: Path) -> None:
    with zipfile.ZipFile(card) as archive:
        page, html = archive.read("card.md").decode(), archive.read("card.html").decode()
        checkpoint = archive.read("outputs/mini_gpt2_checkpoint.pt")
        names = archive.namelist()
    log = (person.home / "runs/fox-41/run.log").read_text()
    sample = re.findall("SAMPLE:.*", log)[0]
    assert bound(person) in page
    assert f"sha256 {hashlib.sha256(COURSE_GPT.encode()).hexdigest()}" in page
    assert person.receipt()["digests"]["trainer"] in page
    assert "CUDA device" in page
    assert "“Using device: cpu”" in page
    assert f"```text\n--- sample ---\n{sample}\n```\n" in page
    assert "step 40, " in page
    assert f"`{hashlib.sha256(checkpoint).hexdigest()}`" in page
    assert html.index("<polyline") < html.index("<table")
    assert not any("diary" in name or name.startswith("data/") for name in names), "the folder that one stands in"


def test_a_class_accepts_the_card_and_finds_one_put_in_its_place(person: Person, card: Path, tmp_path: Path) -> None:
    row = of_class(card, a_class())
    assert (row.student, row.problems, row.recipe) == ("Ada", [], SCRIPT)
    assert of_class(card, a_class(task=ClassTask(trainer=person.receipt()["digests"]["trainer"]))).problems == []
    (problem,) = of_class(card, a_class(task=ClassTask(trainer="official"))).problems
    assert "official trainer" in problem
    assert of_class(card, a_class("ml-2026-another23456")).problems
    other = tmp_path / "other.zip"
    other.write_bytes(card.read_bytes())

    def put(files: dict[str, bytes]) -> dict[str, bytes]:
        name, index = "outputs/mini_gpt2_checkpoint.pt", json.loads(files["card.json"])
        index["files"][name] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
        return {**files, name: b"x", "card.json": json.dumps(index).encode()}

    pack_again(other, put)
    (problem,) = of_class(other, a_class()).problems
    assert "outputs/mini_gpt2_checkpoint.pt" in problem


@pytest.mark.parametrize(
    ("edited", "problem"),
    [
        (lambda challenge: challenge.replace(WORD, "another-word"), "the plan's challenge"),
        (lambda challenge: f"{WORD}:{'a' * 64}", "another key"),
    ],
)
def test_a_plan_with_a_foreign_challenge_is_reported(
    card: Path, tmp_path: Path, edited: Callable[[str], str], problem: str
) -> None:
    other = tmp_path / "other.zip"
    other.write_bytes(card.read_bytes())

    def put(files: dict[str, bytes]) -> dict[str, bytes]:
        plan, index = json.loads(files["plan.json"]), json.loads(files["card.json"])
        plan["command"]["challenge"] = edited(plan["command"]["challenge"])
        content = json.dumps(plan).encode()
        index["files"]["plan.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return {**files, "plan.json": content, "card.json": json.dumps(index).encode()}

    pack_again(other, put)
    assert any(problem in found for found in of_class(other, a_class()).problems)

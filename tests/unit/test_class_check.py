"""Tests of the check of a class's cards: it names each forgery with its reason, and accuses no honest learner."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.records import canonical
from gpurun.ledger.signing import load_signer, make_envelope, payload_of
from gpurun.readers import roster_audit
from gpurun.readers.evidence.card import INDEX, NoCard, read_card
from gpurun.readers.evidence.class_check import CardRow, check_class
from gpurun.readers.evidence.roster import ClassTask, new_roster
from gpurun.readers.replay import Replayed
from gpurun.readers.roster_audit import audit_roster
from tests.command_line import gpurun
from tests.refusals import lacking
from tests.unit.class_samples import STATE_NAME, Lab, a_class, pack_again
from tests.unit.ledger_samples import WEIGHTS

HONEST = 28


def cards_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_of_forty_cards_the_twelve_forged_are_named_and_no_other(tmp_path: Path) -> None:
    into, roster = tmp_path / "cards", a_class(40)
    words = [student.challenge for student in roster.students]

    def lab(number: int, word: str | None = None, **more: object) -> Lab:
        return Lab(tmp_path, number, words[number] if word is None else word, **more)  # type: ignore[arg-type]

    kinds = ({}, {"device": "cpu"}, {"mode": "local", "provider": "local"})
    honest = [lab(number, **kinds[number % 3]) for number in range(HONEST)]
    for run in honest:
        run.hand_in(into)
    facts: dict[str, tuple[str, ...]] = {}

    def forged(name: str, run: Lab, *named: str) -> None:
        run.hand_in(into, name)
        facts[name] = named

    signed_log = lab(28, device="cpu").forge(("device: cpu", "device: cuda"), ('"cpu"', '"cuda"'))
    forged("a re-signed log.zip", signed_log, "no card")
    better = lab(29).forge(('"loss": 2.0,', '"loss": 1.58,'), ("loss 2.0000", "loss 1.5800"))
    forged("re-signed losses.zip", better, "loss 2.0 of step 120", "1.58")
    copied = lab(30)
    copied.state = {"recipe": honest[0].recipe}
    forged("a copied checkpoint.zip", copied.again(), "recipe", "train.seed", "train.challenge")
    shutil.copy(into / "lab-01.zip", into / "a copied card.zip")
    swapped = lab(32).hand_in(into, "a swapped checkpoint.zip")
    pack_again(swapped, lambda files: replace_in_card(files, STATE_NAME, b'{"step": 120, "loss": 1.0}'))
    facts["a swapped checkpoint.zip"] = (STATE_NAME,)
    forged("the challenge of another.zip", lab(33, words[34]), "challenge", words[34])
    forged("and of the other.zip", lab(34), "challenge", words[34])
    forged("no provider.zip", lab(35, endpoint="http://127.0.0.1:4010"))
    first = lab(36)
    forged("a chain that was begun again.zip", first, "home", "chain")
    again = Lab(tmp_path / "anew", 37, words[37])
    shutil.copytree(first.home.keys, again.home.keys, dirs_exist_ok=True)
    forged("the chain before.zip", Rebound(again, words[37]).run, "home", "chain")
    forged("a CPU's torch.zip", lab(38).forge(('"2.13.0"', '"2.13.0+cpu"')), "2.13.0+cpu")
    rentals = lab(31), lab(39)
    for run in rentals:
        run.token, run.instance_id = f"gr-{run.folder.name}-1", "pod-of-two"
        forged(f"one rental twice, {run.number}.zip", run, "runpod pod-of-two")

    began = time.process_time()
    found = check_class(cards_in(into), roster)
    assert time.process_time() - began < 40 * 0.06, "500 cards are to take 30 CPU-seconds"
    rows = {row.file: row for row in found}
    for name, named in facts.items():
        row = rows[name]
        if not named:
            assert row.verdict == "not a provider", row
            assert row.notes, "--strict calls it a problem"
            continue
        assert any(lacking(problem, *named) == [] for problem in row.problems), (name, row.problems)
        assert row.verdict == "does not hold"
    for run in honest:
        row = rows[f"{run.folder.name}.zip"]
        assert (row.problems, row.student) == ([], f"Learner {run.number:02d}")
        assert row.verdict == ("gpu, rented", "smoke", "gpu, as the machine says")[run.number % 3]
    copy = rows["a copied card.zip"]
    assert copy.student == "Learner 01", "whose it is its word says"
    assert ["lab-01.zip" in line for line in copy.checked] == [True]
    assert [row.student for row in found if row.verdict == "no card"] == ["Learner 33"], "whose word nobody used"


class Rebound:
    """A learner's run made again after another key was copied into the home, so that its challenge fits that key."""

    def __init__(self, run: Lab, word: str) -> None:
        shutil.rmtree(run.folder.path)
        self.run = Lab(run.home.root.parent, run.number, word)


def replace_in_card(files: dict[str, bytes], name: str, content: bytes) -> dict[str, bytes]:
    """Return the files of a handed-in run card with one file replaced, and its size and digest in the index updated."""
    index = json.loads(files[INDEX])
    index["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {**files, name: content, INDEX: json.dumps(index).encode()}


# Damaged and hostile cards --------------------------------------------------------------------------------------------


@pytest.fixture
def card(tmp_path: Path) -> Path:
    return Lab(tmp_path, 0, "").hand_in(tmp_path / "cards")


def bomb(path: Path) -> None:
    pack_again(path, lambda files: replace_in_card(files, "run.log", b"0" * (200 << 20)))


def traversal(path: Path) -> None:
    pack_again(path, lambda files: {**files, "../../evil": b"1"})


def absolute(path: Path) -> None:
    pack_again(path, lambda files: {**files, "/tmp/evil": b"1"})


def changed(path: Path) -> None:
    pack_again(path, lambda files: {**files, "run.log": files["run.log"] + b"device: cuda\n"})


def future(path: Path) -> None:
    pack_again(path, lambda files: {**files, INDEX: json.dumps(json.loads(files[INDEX]) | {"v": 2}).encode()})


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def torn(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[200:260] = b"\xff" * 60
    path.write_bytes(bytes(content))


def many(path: Path) -> None:
    content = path.read_bytes()
    place = content.rfind(b"PK\x05\x06")
    path.write_bytes(content[: place + 10] + struct.pack("<H", 65_535) + content[place + 12 :])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def text(path: Path) -> None:
    path.write_text("my evidence")


def keyless(path: Path) -> None:
    pack_again(path, lambda files: without(files, "key.pub"))


def without(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    index = json.loads(files[INDEX])
    del index["files"][name]
    return {key: one for key, one in files.items() if key != name} | {INDEX: json.dumps(index).encode()}


@pytest.mark.parametrize(
    ("harm", "fact"),
    [
        (bomb, "16,384 KB"),
        (traversal, "'../../evil'"),
        (absolute, "'/tmp/evil'"),
        (changed, "run.log"),
        (future, "version 2"),
        (truncated, "zip file"),
        (torn, ""),
        (many, "200 entries"),
        (pipe, "regular file"),
        (text, "zip file"),
        (keyless, "public key"),
    ],
)
def test_what_is_no_card_is_named_and_nothing_hangs(card: Path, harm: Callable[[Path], None], fact: str) -> None:
    harm(card)
    began = time.process_time()
    with pytest.raises(NoCard) as refused:
        read_card(card)
    assert fact in str(refused.value)
    assert time.process_time() - began < 2
    (row,) = check_class([card], None)
    assert (row.verdict, len(row.problems)) == ("not a card", 1)


def test_a_receipt_broken_and_re_signed_is_a_row_not_a_traceback(tmp_path: Path) -> None:
    run = Lab(tmp_path, 0, "")
    path = run.hand_in(tmp_path / "cards")
    envelope = json.loads(run.folder.receipt.read_bytes())
    signer = load_signer(run.home.keys)
    predicate = json.loads(payload_of(envelope))["predicate"]
    for key, odd in itertools.product(sorted(predicate), (None, [], "no", 10**30)):
        statement = json.loads(payload_of(envelope))
        statement["predicate"][key] = odd
        made = json.dumps(make_envelope(canonical(statement), signer)).encode()
        pack_again(path, lambda files, made=made: replace_in_card(files, "receipt.json", made))  # type: ignore[misc]
        (row, *_) = check_class([path], a_class(1))
        assert row.problems, f"{key} = {odd}"


def test_a_checkpoint_other_than_the_cards_list_is_not_opened(tmp_path: Path) -> None:
    path = Lab(tmp_path, 0, "").hand_in(tmp_path / "cards", with_checkpoint=True)
    pack_again(path, lambda files: {**files, WEIGHTS: b"other weights"})
    with pytest.raises(NoCard, match="000120"):
        read_card(path).unpack_large(tmp_path / "there")


def test_a_checkpoint_replaced_in_a_card_contradicts_its_receipt(tmp_path: Path) -> None:
    """A learner may put other weights, trained elsewhere, beside the receipt of their own cheap run."""
    path = Lab(tmp_path, 0, "").hand_in(tmp_path / "cards", with_checkpoint=True)
    assert check_class([path], None)[0].problems == []
    pack_again(path, lambda files: replace_in_card(files, WEIGHTS, b"other weights"))
    (row,) = check_class([path], None)
    (problem,) = row.problems
    assert lacking(problem, WEIGHTS, "receipt") == []


def test_receipts_of_one_key_are_of_one_chain_or_neither_holds(tmp_path: Path) -> None:
    first = Lab(tmp_path, 0, "")
    first.hand_in(tmp_path / "honest")
    Lab(tmp_path, 1, "", beside=first).hand_in(tmp_path / "honest")
    assert [row.problems for row in check_class(cards_in(tmp_path / "honest"), None)] == [[], []]
    rewritten = Lab(tmp_path / "anew", 2, "")
    shutil.copytree(first.home.keys, rewritten.home.keys, dirs_exist_ok=True)
    rewritten.hand_in(tmp_path / "unused")
    Lab(tmp_path, 3, "", beside=rewritten).hand_in(tmp_path / "honest")
    (tmp_path / "honest" / "lab-01.zip").unlink()
    rows = check_class(cards_in(tmp_path / "honest"), None)
    assert all(len(row.problems) == 1 for row in rows), [row.problems for row in rows]


def test_a_key_that_is_not_the_signers_does_not_hold(tmp_path: Path, card: Path) -> None:
    other = Lab(tmp_path, 1, "").home.keys / "ed25519.pub"
    pack_again(card, lambda files: replace_in_card(files, "key.pub", other.read_bytes()))
    (row,) = check_class([card], None)
    assert any("key" in problem for problem in row.problems)
    assert row.verdict == "does not hold"


def test_a_recipe_changed_in_the_plan_of_a_card_does_not_hold(card: Path) -> None:
    """A card's plan has no paths, so the audit can tie it to the signed run only by the digest of its recipe."""

    def easier(files: dict[str, bytes]) -> dict[str, bytes]:
        plan = json.loads(files["plan.json"])
        plan["resolved"]["optim"]["weight_decay"] = 0.5
        return replace_in_card(files, "plan.json", json.dumps(plan).encode())

    pack_again(card, easier)
    (row,) = check_class([card], None)
    assert "its recipe is not the one that the run was opened with" in row.problems
    assert row.verdict == "does not hold"


def test_no_file_of_a_card_names_a_folder_or_holds_a_key(tmp_path: Path) -> None:
    run = Lab(tmp_path, 0, "")
    run.folder.log.write_text(f"{run.folder.log.read_text()}Traceback in {run.home.root}/x.py\n")
    path = run.hand_in(tmp_path / "cards")
    with zipfile.ZipFile(path) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert str(tmp_path).encode() not in content
    assert b"PRIVATE KEY" not in content
    row: CardRow = check_class([path], None)[0]
    assert any("run.log" in note for note in row.notes)


def test_a_class_without_challenges_says_it_cannot_tell_copies(tmp_path: Path) -> None:
    runs = [Lab(tmp_path, number, "") for number in (0, 1)]
    for run in runs:
        run.number = 0
        run.again().hand_in(tmp_path / "cards")
    rows = check_class(cards_in(tmp_path / "cards"), None)
    assert [row.problems for row in rows] == [[], []]
    assert all("challenge" in row.notes[0] for row in rows)


# The verb ------------------------------------------------------------------------------------------------------------


def test_the_table_names_everyone_and_the_csv_holds_no_formula(own_home: Path, tmp_path: Path) -> None:
    roster = a_class(2)
    word = roster.students[0].challenge
    Lab(tmp_path, 0, word).hand_in(tmp_path / "cards", "=1+1.zip")
    (tmp_path / "ml.roster.json").write_text(roster.to_json())
    words = ("audit", "--roster", str(tmp_path / "cards"), "--class", str(tmp_path / "ml"))
    done = gpurun(*words, "--csv", str(tmp_path / "out.csv"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu, rented" in done.stdout
    assert "no card" in done.stdout
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [(row["student"], row["file"], row["verdict"]) for row in rows] == [
        ("Learner 00", "'=1+1.zip", "gpu, rented"), ("Learner 01", "", "no card")
    ]  # fmt: skip
    assert gpurun("audit", "--class", str(tmp_path / "ml")).returncode == 2
    assert gpurun("audit", "fox-41", "--roster", str(tmp_path / "cards")).returncode == 2


def test_under_strict_a_machine_of_no_provider_is_a_problem(own_home: Path, tmp_path: Path) -> None:
    Lab(tmp_path, 0, "", endpoint="http://127.0.0.1:4010").hand_in(tmp_path / "cards")
    words = ("audit", "--roster", str(tmp_path / "cards"))
    assert (gpurun(*words).returncode, gpurun(*words, "--strict").returncode) == (0, 10)


@pytest.fixture
def three_cards(tmp_path: Path) -> Path:
    for number, student in enumerate(a_class(3).students):
        Lab(tmp_path, number, student.challenge).hand_in(tmp_path / "cards")
    return tmp_path / "cards"


def test_ctrl_c_ends_the_computing_and_keeps_what_was_found(three_cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Replayed | type[BaseException]] = [Replayed(checked=("as told",), extent="all"), KeyboardInterrupt]
    monkeypatch.setattr(roster_audit, "_replay_card", Mock(side_effect=answers))
    said: list[str] = []
    rows = audit_roster(three_cards, "", VirtualClock(), said.append, replay=True, require_replay=False)
    assert [row.replayed for row in rows] == ["all", "nothing", "nothing"]
    assert [sum("interrupted" in note for note in row.notes) for row in rows] == [0, 1, 1]
    assert not any(row.problems for row in rows)
    first_done = said.index("  replayed: all")
    assert [line.partition(" ")[0] for line in said[:3]] == ["1/3", "2/3", "3/3"], "told as they come"
    assert first_done == 3, "before the second is computed"


def test_one_card_cannot_cost_a_folder_more_than_its_time(three_cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limits = VirtualClock(), list[float]()

    def for_ever(row: CardRow, place: Path, say: Callable[[str], None], limit_s: float) -> Replayed:
        limits.append(limit_s)
        clock.sleep(limit_s)
        return Replayed.nothing("it takes long")

    monkeypatch.setattr(roster_audit, "_replay_card", for_ever)
    rows = audit_roster(three_cards, "", clock, lambda _: None, replay=True, require_replay=False)
    assert limits == [300.0, 240.0], "a card five minutes, a folder two a card and three more"
    assert "folder" in rows[2].notes[-1]
    assert not any(row.problems for row in rows)


def test_an_honest_learner_who_hands_in_twice_is_not_accused(tmp_path: Path) -> None:
    into, roster = tmp_path / "cards", a_class(3)
    words = [one.challenge for one in roster.students]
    first = Lab(tmp_path, 0, words[0])
    first.hand_in(into, "monday.zip")
    Lab(tmp_path, 10, words[0], beside=first).hand_in(into, "tuesday.zip")
    Lab(tmp_path, 1, words[1]).hand_in(into, "other.zip")
    rows = {row.file: row for row in check_class(cards_in(into), roster) if row.file}
    assert all(not row.problems for row in rows.values()), [row.problems for row in rows.values()]
    assert rows["monday.zip"].verdict == "handed in twice"
    assert ["tuesday.zip" in text for text in rows["monday.zip"].checked] == [True]
    assert rows["tuesday.zip"].verdict == rows["other.zip"].verdict


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (ClassTask(), ()),
        (ClassTask(recipe="gpt2-124m", steps=120), ()),
        (ClassTask(recipe="mini-gpt"), ("gpt2-124m", "mini-gpt")),
        (ClassTask(steps=300), ("step 120", "300 steps")),
        (ClassTask(data="0123456789ab"), ("0123456789ab…",)),
        (ClassTask(trainer="0123456789ab"), ("trainer",)),
    ],
)
def test_what_a_class_was_given_is_held_against_each_card(
    tmp_path: Path, task: ClassTask, named: tuple[str, ...]
) -> None:
    into = tmp_path / "cards"
    roster = new_roster("ml-2026", ["Ada"], 0.0, task)
    Lab(tmp_path, 0, roster.students[0].challenge).hand_in(into)
    (row,) = check_class(cards_in(into), roster)
    assert (row.recipe, row.steps) == ("gpt2-124m", 120)
    assert [lacking(problem, *named) for problem in row.problems] == [[]] * bool(named)


def test_an_official_trainer_of_another_release_is_not_accused(tmp_path: Path) -> None:
    into = tmp_path / "cards"
    roster = new_roster("ml-2026", ["Ada"], 0.0, ClassTask(trainer="official"))
    Lab(tmp_path, 0, roster.students[0].challenge, trainer="official trainer 0.1.0").hand_in(into)
    (row,) = check_class(cards_in(into), roster, official="f" * 64)
    assert row.problems == []
    assert any("trainer 0.1.0" in note for note in row.notes)

"""Tests that a verb answers thousands of broken files from other people with a row or a sentence each, in seconds.

While test_fuzz.py breaks a run's own records, these tests break what is handed in: cards, checkpoints' states, rosters,
manifests, plan files, settings, shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode, UsageError
from gpurun.core.paths import Home
from gpurun.core.records import digest_json
from gpurun.data.prepare import PrepareOrder, prepare
from gpurun.ledger.write_receipt import read_receipt
from gpurun.readers.evidence.card import INDEX, pack_card
from gpurun.remote.client import FarSide
from tests.command_line import gpurun
from tests.security.far_hostile import Answers, entry, manifest, sized
from tests.security.fuzz import NASTY, altered, check, many, plain, torn
from tests.tensor_file import as_tensors
from tests.unit.class_samples import STATE_NAME, Lab, a_class, pack_again
from tests.unit.ledger_samples import CloudRun
from tests.unit.report_samples import finished_run, opened_run, plan_of

NESTED = b'{"step": 120, "loss": ' + b"[" * 5000 + b"]" * 5000 + b"}"
OPTIMIZER = "checkpoints/000120.optim.safetensors"
ANSWER = {"step": 120, "device": "cpu", "kind": "a CPU", "val_loss": 2.0, "again": []}
Change = Callable[[bytes, random.Random], bytes]


def broken(content: bytes, by: random.Random) -> bytes:
    """Return a JSON file with one of its values altered, or with its bytes torn."""
    return plain(altered(json.loads(content), by)) if by.random() < 0.7 else torn(content, by)


def with_optimizer(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [file | ({"kind": "optimizer"} if file["name"] == OPTIMIZER else {}) for file in files]


class Whole(Lab):
    """A learner's run with a complete checkpoint, for whose state the learner can choose any bytes (`said`)."""

    said = b""

    def contents(self) -> dict[str, bytes]:  # type: ignore[override]
        found = super().contents()
        return found | {OPTIMIZER: as_tensors(b"o" * 8), STATE_NAME: self.said or found[STATE_NAME]}

    def manifest(self) -> list[dict[str, Any]]:
        return with_optimizer(super().manifest())

    def hand_in_with_shards(self, into: Path, shards: Path) -> Path:
        self.until_gone().settle()
        predicate = read_receipt(self.home, self.folder).predicate
        content, _ = pack_card(
            self.folder, self.home.keys, self.plan(), {"card.md": "# Card"}, {**predicate},
            private=(), with_checkpoint=True, data=shards,
        )  # fmt: skip
        into.mkdir(exist_ok=True)
        path = into / f"{self.folder.name}.zip"
        path.write_bytes(content)
        return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of shards whose tokens are characters, a fifth of them held out."""
    place = tmp_path_factory.mktemp("made")
    (place / "text").write_text("".join(f"The quick brown fox number {n} jumps over the dog.\n" for n in range(400)))
    prepare(PrepareOrder(str(place / "text"), "char", place / "shards", val_fraction=0.2), lambda _: None)
    return place / "shards"


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the trainer by a made-up answer, because these tests are about what happens before and after it."""
    monkeypatch.setattr("gpurun.readers.replay.ask_trainer", lambda *_, **__: json.dumps(ANSWER))


def relisted(files: dict[str, bytes], name: str, content: bytes) -> dict[str, bytes]:
    """Return a card's files with one replaced, and its entry in the index made to match."""
    index = json.loads(files[INDEX])
    index["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return files | {name: content, INDEX: json.dumps(index).encode()}


def test_a_nested_state_in_one_card_spoils_only_that_card(tmp_path: Path, shards: Path) -> None:
    roster, cards = a_class(10), tmp_path / "cards"
    for number, student in enumerate(roster.students):
        lab = Whole(tmp_path, number, student.challenge)
        lab.said = NESTED if number == 3 else b""
        lab.again().hand_in_with_shards(cards, shards)
    said = check("audit", "--roster", str(cards), "--replay")
    assert re.search(r"lab-03\.zip: .*nested", said)
    done = gpurun("audit", "--roster", str(cards), "--replay", "--json")
    rows = json.loads(done.stdout.splitlines()[-1])["data"]["rows"]
    assert done.returncode == ExitCode.VERIFICATION_FAILED
    assert [row["file"] for row in rows if row["problems"]] == ["lab-03.zip"]
    assert sum("step 120" in str(row["checked"]) for row in rows) == 9


def test_a_nested_state_from_a_machine_spoils_only_its_run(own_home: Path, shards: Path) -> None:
    home = Home(own_home).prepare()

    class Hostile(CloudRun):
        said = NESTED

        def contents(self) -> dict[str, bytes]:  # type: ignore[override]
            weights = {"checkpoints/000120.model.safetensors": as_tensors(b"w" * 400), OPTIMIZER: as_tensors(b"o")}
            return weights | {STATE_NAME: self.said}

        def manifest(self) -> list[dict[str, Any]]:
            return with_optimizer(super().manifest())

    class Honest(Hostile):
        said = b'{"step": 120, "val_loss": 2.0}'

    for name, kind in (("fox-41", Hostile), ("owl-07", Honest)):
        run = kind(home, name)
        plan = plan_of(name)
        plan = plan.model_copy(update={"data": plan.data.model_copy(update={"folder": str(shards)})})
        plan.job.resolved["train"] |= {"batch_tokens": 1024, "init_from": ""}
        run.folder.plan.write_text(plan.to_json())
        run.until_gone().settle()
    said = check("audit", "--replay", "--all")
    assert re.search(r"fox-41: .*nested", said)
    assert re.search(r"owl-07: .*step 120", said)


def _spaces(path: Path) -> None:
    """Replace a card by a zip of a megabyte whose index is a gigabyte of spaces."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(INDEX, "w") as index:
        for _ in range(1 << 10):
            index.write(b" " * (1 << 20))


def _receipt(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Return a function that replaces bytes in the envelope of a card's receipt."""

    def change(path: Path) -> None:
        pack_again(path, lambda files: relisted(files, "receipt.json", files["receipt.json"].replace(old, new, 1)))

    return change


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


ODDITIES: dict[str, Callable[[Path], None]] = {
    "nested": lambda path: pack_again(path, lambda files: relisted(files, STATE_NAME, NESTED)),
    "NaN": _receipt(b'"signatures":', b'"more":NaN,"signatures":'),
    "huge": _receipt(b'"signatures":', b'"more":' + b"9" * 5000 + b',"signatures":'),
    "types": _receipt(b'"signatures": [', b'"signatures": 7, "other": ['),
    "twice": _receipt(b'"payload":', b'"payload":"e30=","payload":'),
    "spaces": _spaces,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "link": _link,
    "fifo": _fifo,
    "others": lambda path: shutil.copy(path.with_name("lab-00.zip"), path),
}


def test_each_odd_card_has_its_own_finding_and_others_are_graded(tmp_path: Path, shards: Path) -> None:
    roster, cards = a_class(2 * len(ODDITIES)), tmp_path / "cards"
    (tmp_path / "ml.roster.json").write_text(roster.to_json())
    names = [""] * len(ODDITIES) + list(ODDITIES)
    for number, student in enumerate(roster.students):
        lab = Whole(tmp_path, number, student.challenge)
        path = lab.again().hand_in_with_shards(cards, shards)
        if names[number]:
            ODDITIES[names[number]](path)
    check("audit", "--roster", str(cards), "--class", str(tmp_path / "ml.roster.json"), "--replay")
    words = ("audit", "--roster", str(cards), "--class", str(tmp_path / "ml.roster.json"), "--replay", "--json")
    rows = json.loads(gpurun(*words).stdout.splitlines()[-1])["data"]["rows"]
    by_file = {row["file"]: row for row in rows if row["file"]}
    in_order = [by_file[f"lab-{number:02d}.zip"] for number in range(len(names))]
    assert [row["verdict"] for row in in_order[:10]] == ["gpu, rented"] * 10
    assert not any(row["problems"] for row in in_order[:10])
    assert all(any("was recomputed: 2" in said for said in row["checked"]) for row in in_order[:10])
    # A copy of another learner's card is not a forgery, so neither has a problem, but each row names the other file.
    assert [not row["problems"] for row in in_order[10:]] == [name == "others" for name in ODDITIES]
    assert any("lab-19.zip" in line for line in in_order[0]["checked"])
    assert any("lab-00.zip" in line for line in in_order[-1]["checked"])
    assert not any(row["notes"] for row in in_order[:10])


@many
def test_no_broken_card_or_state_keeps_another_from_its_row(many: int, tmp_path: Path, shards: Path) -> None:
    roster, cards = a_class(2), tmp_path / "cards"
    labs = [Whole(tmp_path, number, student.challenge) for number, student in enumerate(roster.students)]
    honest, other = (lab.again().hand_in_with_shards(cards, shards) for lab in labs)
    (tmp_path / "ml.roster.json").write_text(roster.to_json())
    whole = other.read_bytes()
    for number in range(many):
        by = random.Random(number)
        names = ("receipt.json", "plan.json", "journal.jsonl", "events.jsonl", STATE_NAME, "data/data.json", INDEX)
        name = by.choice(names)

        def edit(files: dict[str, bytes], name: str = name, by: random.Random = by) -> dict[str, bytes]:
            made = broken(files[name], by) if name.endswith(".json") else torn(files[name], by)
            return files | {name: made} if name == INDEX else relisted(files, name, made)

        if by.random() < 0.8:
            pack_again(other, edit)
        else:
            other.write_bytes(torn(whole, by))
        replay = ("--replay",) if number % 2 else ()
        said = check("audit", "--roster", str(cards), "--class", str(tmp_path / "ml.roster.json"), *replay)
        assert honest.name in said, (number, name)
        assert other.name in said, (number, name)
        other.write_bytes(whole)


@many
def test_no_state_that_a_learner_signed_ends_the_check(many: int, tmp_path: Path, shards: Path) -> None:
    roster = a_class(1)
    whole = Whole(tmp_path / "first", 0, roster.students[0].challenge).contents()[STATE_NAME]
    for number in range(many):
        by = random.Random(number)
        root, lab = tmp_path / f"{number}", None
        lab = Whole(root, 0, roster.students[0].challenge)
        lab.said = broken(whole, by) if number else NESTED
        lab.again().hand_in_with_shards(root / "cards", shards)
        check("audit", "--roster", str(root / "cards"), "--replay")


@many
def test_no_broken_roster_is_a_trace(many: int, tmp_path: Path) -> None:
    roster, cards = a_class(3), tmp_path / "cards"
    Lab(tmp_path, 0, roster.students[0].challenge).hand_in(cards)
    for number in range(many):
        path = tmp_path / "ml.roster.json"
        path.write_bytes(broken(roster.to_json().encode(), random.Random(number)))
        check("audit", "--roster", str(cards), "--class", str(path))


@many
def test_no_broken_manifest_shows_a_traceback(many: int, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(own_home).prepare()
    run = opened_run(home, "fox-41")
    run.write(run.opened(), run.intended(), run.created())
    for _, note in list(run.through_training())[:5]:
        run.write(note)
    said = [b""]
    far = FarSide(Answers(manifest=lambda _: sized(said[0]), get=lambda _: b"half a file"))
    monkeypatch.setattr("gpurun.cli.collect_checkpoints.MachineConnector", lambda *_, **__: lambda _: far)
    monkeypatch.setattr("gpurun.lifecycle.artifacts.on_demand.PATIENCE_S", 0.0)
    finished_run(home, "owl-07")
    whole = manifest(entry(), entry("samples/000010.txt", kind="sample"))
    for number in range(many):
        by = random.Random(number)
        said[0] = broken(whole, by) if number else NESTED
        check("collect", "fox-41")
        for name in ("inventory.json", "manifest.json", "kept.json", "left.json"):
            (home.run("owl-07").path / name).write_bytes(broken(whole, by) if number else NESTED)
        check(*[("collect", "owl-07"), ("ps", "--all"), ("receipt", "owl-07")][number % 3])


@many
def test_no_broken_plan_file_is_a_trace(
    many: int, tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise UsageError("test.started", "It would begin now.", hint="Nothing is trained here.")

    monkeypatch.setattr("gpurun.lifecycle.supervisor.start_supervisor", started)
    Home(own_home).prepare()
    made = gpurun("plan", "mini-gpt", "--gpu", "cpu", "--dry-run", "-o", str(tmp_path / "plan.json"))
    assert made.returncode == 0, made.stderr
    whole = (tmp_path / "plan.json").read_bytes()
    for number in range(many):
        by, fields = random.Random(number), json.loads(whole)
        if by.random() < 0.5:  # With a correct digest, all of the file is read.
            del fields["sha256"]
            fields |= {"request": altered(fields["request"], by)}
            with suppress(ValueError):
                fields["sha256"] = digest_json(fields)
        (tmp_path / "own.json").write_bytes(plain(fields) if by.random() < 0.7 else broken(whole, by))
        check("train", str(tmp_path / "own.json"), "--no-input")


@many
def test_no_broken_settings_are_a_trace(many: int, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(own_home).prepare()
    monkeypatch.chdir(own_home)
    whole = b"\n".join(
        [b'recipe = "mini-gpt"', b"max_cost = 25", b'providers = ["runpod", "aws"]', b'color = "auto"', b"uplink = 48",
         b"[budget]", b"month = 100", b"[notify]", b'url = "https://ntfy.sh/my-runs"', b"[slurm.big]",
         b'host = "login"', b'partition = "gpu"', b""]
    )  # fmt: skip
    values = [b"=".join([b" ", line.split(b" = ")[1]]) for line in whole.split(b"\n") if b" = " in line]
    for number in range(many):
        by = random.Random(number)
        nasty = json.dumps(by.choice(NASTY)).encode() if by.random() < 0.8 else b"[" * 5000
        changed = whole.replace(by.choice(values)[2:], nasty, 1)
        made = changed if by.random() < 0.7 else torn(whole, by)
        (home.root / "gpurun.toml").write_bytes(made if number % 3 == 0 else b"")
        home.config.write_bytes(made if number % 3 else b"")
        check(*[("config", "show"), ("ps",), ("ps", "--all")][number % 3])


@many
def test_no_broken_shards_are_a_trace(many: int, tmp_path: Path, shards: Path, own_home: Path) -> None:
    Home(own_home).prepare()
    own = tmp_path / "shards"
    own.mkdir()
    whole = {path.name: path.read_bytes() for path in shards.iterdir()}
    for number in range(many):
        by = random.Random(number)
        name = by.choice(["data.json", "data.json", "vocab.json", *whole])
        made = broken(whole[name], by) if name.endswith(".json") else torn(whole[name], by)
        for other, content in whole.items():
            (own / other).write_bytes(made if other == name else content)
        words = ("plan", "mini-gpt", "--gpu", "cpu", "--dry-run", "--data") if number % 5 == 0 else ("data", "inspect")
        check(*words, str(own))

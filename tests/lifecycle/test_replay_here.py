"""Tests of changed weights that only a replay finds: all files of the home were made consistent and signed again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.paths import Home, RunFolder
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import write_receipt
from tests.command_line import gpurun
from tests.unit.ledger_samples import chain_anew

pytestmark = [pytest.mark.slow, pytest.mark.torch]
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows "


def nudge(path: Path, by: float) -> None:
    """Add `by` to every weight of a checkpoint."""
    from trainer.checkpoint import read_tensors, write_tensors

    tensors = {name: tensor + by for name, tensor in read_tensors(path).items()}
    with path.open("wb") as file:
        write_tensors(file.write, tensors)


def sign_again(home: Home, folder: RunFolder, name: str) -> None:
    """Rewrite the run's journal, receipt and chain with the digest that the file has now, and sign them again."""
    records: list[dict[str, Any]] = [json.loads(line) for line in folder.journal.read_bytes().splitlines()]
    content = (folder.artifacts / name).read_bytes()
    now = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    for record in records:
        for file in record["data"].get("files", []) if isinstance(record["data"].get("files"), list) else []:
            file.update(now if file["name"] == name else {})
    kept = [record for record in records if record["event"] not in ("receipt.observed", "run.closed")]
    chain_anew(folder.journal, kept)
    folder.receipt.unlink()
    home.ledger.unlink()
    written = write_receipt(home, folder)
    after = records[len(kept) :]
    after[0]["data"].update({"seq": written.seq, "sha256": written.sha256})
    chain_anew(folder.journal, [*kept, *after])


@pytest.mark.parametrize("moved", [0.0, 1e-3])
def test_moved_and_re_signed_weights_are_found_by_replay_alone(own_home: Path, tmp_path: Path, moved: float) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 3)
    words = ("course-lab", "--data", str(tmp_path / "text.txt"), "--provider", "local", "--challenge", "ml-2026-word")
    assert gpurun("train", *words, "--yes", "--name", "fox-41", "--no-progress").returncode == 0
    home, name = Home(own_home), "checkpoints/000300.model.safetensors"
    folder = home.run("fox-41")
    nudge(folder.artifacts / name, moved)
    sign_again(home, folder, name)
    (row,) = audit(home).rows
    assert (row.problems, row.verdict) == ((), "smoke"), "nothing contradicts it"
    done = gpurun("audit", "--replay")
    assert done.returncode == (10 if moved else 0), done.stdout
    if moved:
        assert "validation loss" in done.stdout
        assert "0 to 300 " in done.stdout
        assert "DOES NOT HOLD" in done.stdout
    else:
        assert "0 to 300 " in done.stdout


def trained(home: Path, text: Path, word: str, *more: str) -> RunFolder:
    """Train a learner's honest run in that learner's home, and return its folder."""
    words = ("course-lab", "--data", str(text), "--provider", "local", "--challenge", word, "--yes", "--no-progress")
    done = gpurun("train", *words, "--name", "fox-41", *more, "--home", str(home))
    assert done.returncode == 0, done.stderr
    return Home(home).run("fox-41")


def as_own(mine: RunFolder, theirs: RunFolder) -> None:
    """Copy a classmate's losses and slightly changed weights into a learner's own run."""
    name = "checkpoints/000300.model.safetensors"
    (mine.artifacts / name).write_bytes((theirs.artifacts / name).read_bytes())
    nudge(mine.artifacts / name, 1e-9)
    own = [json.loads(line) for line in mine.events.read_text().splitlines()]
    copied = [json.loads(line) for line in theirs.events.read_text().splitlines()]
    losses = {(event["kind"], event["step"]): event for event in copied if event["kind"] in ("step", "eval")}
    mine.events.write_text("".join(json.dumps(losses.get((line["kind"], line["step"]), line)) + "\n" for line in own))
    log = {line.split(" | ")[0]: line for line in theirs.log.read_text().splitlines() if line.startswith("step ")}
    lines = [log.get(line.split(" | ")[0], line) for line in mine.log.read_text().splitlines()]
    mine.log.write_text("\n".join(lines) + "\n")


def without_first_steps(mine: RunFolder) -> None:
    """Delete the events of the first 20 steps, which a replay compares."""
    events = [json.loads(line) for line in mine.events.read_text().splitlines()]
    kept = [event for event in events if event["kind"] != "step" or event["step"] > 20]
    mine.events.write_text("".join(json.dumps(event) + "\n" for event in kept))


def with_state(mine: RunFolder, theirs: RunFolder, **edits: Any) -> None:
    """Copy the classmate's losses into the checkpoint's state, and apply these edits to it."""
    name = "checkpoints/000300.state.json"
    state, other = (json.loads((folder.artifacts / name).read_bytes()) for folder in (mine, theirs))
    losses = {key: other[key] for key in ("loss", "val_loss") if key in other}
    (mine.artifacts / name).write_text(json.dumps({**state, **losses, **edits}))


@pytest.mark.parametrize(
    ("edits", "hides"),
    [
        ({"kind": "NVIDIA A100-SXM4-80GB | torch 2.13.0"}, False),
        ({"kind": "NVIDIA A100-SXM4-80GB | torch 2.13.0"}, True),
        ({"processes": 2}, False),
        ({"processes": 2}, True),
        ({}, False),
        ({}, True),
    ],
    ids=[
        "a card",
        "a card, no first steps",
        "two processes",
        "two, no first steps",
        "resumed",
        "resumed, no first steps",
    ],
)
def test_a_classmates_training_under_ones_own_challenge_is_found(
    own_home: Path, tmp_path: Path, edits: dict[str, Any], hides: bool
) -> None:
    """The replay must find a classmate's training that was signed under another challenge.

    It once passed six such cards.
    """
    (tmp_path / "text.txt").write_text(TEXT * 3)
    mine, theirs = (trained(tmp_path / name, tmp_path / "text.txt", f"ml-2026-{name}") for name in ("ada", "bob"))
    as_own(mine, theirs)
    with_state(mine, theirs, **edits)
    if not edits:  # The events claim a resume at step 150, which no other file shows.
        events = [json.loads(line) for line in mine.events.read_text().splitlines()]
        events.append({**next(event for event in events if event["kind"] == "start"), "step": 150, "resumed_from": 150})
        mine.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    if hides:
        without_first_steps(mine)
    for name in ("000300.model.safetensors", "000300.state.json"):
        sign_again(Home(tmp_path / "ada"), mine, f"checkpoints/{name}")
    done = gpurun("audit", "--replay", "--home", str(tmp_path / "ada"))
    assert done.returncode == 10, done.stdout
    assert "DOES NOT HOLD" in done.stdout
    assert ("repeated" in done.stdout) is not hides, "a step was taken again only where its loss is known"

"""What only a replay finds: weights that were moved, in a home whose every file was made to fit and signed again."""

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
    """Move every weight of a checkpoint."""
    from trainer.checkpoint import read_tensors, write_tensors

    tensors = {name: tensor + by for name, tensor in read_tensors(path).items()}
    with path.open("wb") as file:
        write_tensors(file.write, tensors)


def sign_again(home: Home, folder: RunFolder, name: str) -> None:
    """Make journal, receipt and chain of the run over, so that all of them have the file as it is now."""
    records: list[dict[str, Any]] = [json.loads(line) for line in folder.journal.read_bytes().splitlines()]
    sha256 = hashlib.sha256((folder.artifacts / name).read_bytes()).hexdigest()
    for record in records:
        for file in record["data"].get("files", []) if isinstance(record["data"].get("files"), list) else []:
            file.update({"sha256": sha256} if file["name"] == name else {})
    kept = [one for one in records if one["event"] not in ("receipt.observed", "run.closed")]
    chain_anew(folder.journal, kept)
    folder.receipt.unlink()
    home.ledger.unlink()
    written = write_receipt(home, folder)
    after = records[len(kept) :]
    after[0]["data"].update({"seq": written.seq, "sha256": written.sha256})
    chain_anew(folder.journal, [*kept, *after])


@pytest.mark.parametrize("moved", [0.0, 1e-3])
def test_weights_that_were_moved_and_signed_again_are_found_by_replay_alone(
    own_home: Path, tmp_path: Path, moved: float
) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 3)
    asked = ("course-lab", "--data", str(tmp_path / "text.txt"), "--provider", "local", "--challenge", "ml-2026-word")
    assert gpurun("train", *asked, "--yes", "--name", "fox-41", "--no-progress").returncode == 0
    home, name = Home(own_home), "checkpoints/000300.model.safetensors"
    folder = home.run("fox-41")
    nudge(folder.artifacts / name, moved)
    sign_again(home, folder, name)
    (row,) = audit(home).rows
    assert (row.problems, row.verdict) == ((), "smoke"), "nothing contradicts it"
    done = gpurun("audit", "--replay")
    assert done.returncode == (10 if moved else 0), done.stdout
    if moved:
        assert "have the validation loss" in done.stdout
        assert "are not the same to the bit, on the same kind of processor" in done.stdout
        assert "DOES NOT HOLD" in done.stdout
    else:
        assert "steps 0 to 300 are the same to the bit" in done.stdout

"""A trainer of the user's own: what is refused, and that it is what trains, what is named and what goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpurun import __version__
from gpurun.core.installed_files import bundle_root
from tests.command_line import gpurun

QUICK = ("--provider", "local", "--yes", "--json")
SMALL = ("--set", "train.checkpoint_every=100", "--set", "eval.every=100", "--set", "eval.tokens=256")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of gpurun's own trainer."""
    copied = shutil.copytree(bundle_root() / "trainer", tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(copied)


def told(home: Path, run: str) -> dict[str, Any]:
    envelope = json.loads(gpurun("receipt", run, "--json").stdout.splitlines()[-1])
    predicate: dict[str, Any] = envelope["data"]["statement"]["predicate"]
    return predicate


def test_a_trainer_changed_in_one_line_trains_is_named_and_goes_on(own_home: Path, copy: Path) -> None:
    loop = copy / "train.py"
    loop.write_text(loop.read_text().replace('"lr": lr, "grad_norm"', '"lr": 0.125, "grad_norm"'))
    begun = gpurun("train", "mini-gpt", *QUICK, *SMALL, "--set", "steps=2", "--trainer", str(copy), "--name", "fox-1")
    assert begun.returncode == 0, begun.stderr
    assert "lr 1.25e-01" in (own_home / "runs/fox-1/run.log").read_text()
    first = told(own_home, "fox-1")
    assert first["asked"]["trainer"] == "changed trainer"

    shutil.rmtree(copy)
    further = gpurun("train", "--from", "fox-1", "--set", "steps=3", *QUICK, "--name", "fox-2")
    assert further.returncode == 0, further.stderr
    second = told(own_home, "fox-2")
    assert second["digests"]["trainer"] == first["digests"]["trainer"]
    assert "lr 1.25e-01" in (own_home / "runs/fox-2/run.log").read_text()
    assert second["training"]["figures"]["last_step"] == 3
    audited = gpurun("audit")
    assert audited.returncode == 0
    assert f"fox-2: changed trainer, sha256 {first['digests']['trainer']}" in audited.stdout


def test_a_copy_in_which_nothing_is_changed_is_the_official_trainer(own_home: Path, copy: Path) -> None:
    planned = gpurun("plan", "mini-gpt", "--provider", "local", "--trainer", str(copy), "--json")
    assert json.loads(planned.stdout.splitlines()[-1])["data"]["trainer"] == f"official trainer {__version__}"


def _absent(copy: Path) -> None:
    shutil.rmtree(copy)


def _no_train(copy: Path) -> None:
    (copy / "train.py").unlink()


def _secret(copy: Path) -> None:
    (copy / "model.py").write_text('TOKEN = "hf_' + "a" * 34 + '"\n')


def _key_file(copy: Path) -> None:
    (copy / "id_ed25519").write_text("")


def _latin_1(copy: Path) -> None:
    (copy / "model.py").write_bytes(b"# caf\xe9\n")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (_absent, "trainer.absent"),
        (_no_train, "trainer.no_train"),
        (_secret, "pack.secret"),
        (_key_file, "pack.secret"),
        (_latin_1, "trainer.not_text"),
    ],
)
def test_what_is_no_trainer_or_holds_a_secret_is_refused_in_words(
    own_home: Path, copy: Path, spoil: Any, code: str
) -> None:
    spoil(copy)
    refused = gpurun("plan", "mini-gpt", "--provider", "local", "--trainer", str(copy), "--json")
    (error,) = json.loads(refused.stdout.splitlines()[-1])["errors"]
    assert (refused.returncode, error["code"]) == (2, code)
    assert str(copy) in error["message"]
    assert not [*(own_home / "cache" / "staged").glob("*")], "nothing is left of it"

"""Tests of the CORE score at the end of a run on this machine: planned, uploaded, computed, signed and repeated."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.installed_files import bundle_root
from tests.command_line import gpurun
from tests.core_bundle import write_bundle

SMALL = (
    *("--set", "data.tokenizer=gpt2", "--set", "model.layers=1", "--set", "model.heads=1", "--set", "model.width=16"),
    *("--set", "context=64", "--set", "train.steps=2", "--set", "train.checkpoint_every=2", "--set", "eval.every=2"),
    *("--set", "batch_tokens=512", "--set", "train.micro_batch=8", "--set", "warmup_steps=0", "--set", "limit_mb=1"),
    *("--set", "eval.tokens=256"),
)


def data_of(*words: str, code: int = 0) -> dict[str, Any]:
    done = gpurun(*words, "--json")
    assert done.returncode == code, done.stderr + done.stdout[-2000:]
    envelope: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return envelope if code else envelope["data"]


@pytest.mark.slow
def test_core_is_scored_at_the_end_signed_and_repeatable(own_home: Path, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle.zip")
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    words = ("mini-gpt", "--provider", "local", *SMALL, "--set", "eval.core=4", "--core-bundle", str(bundle))
    planned = " ".join(gpurun("plan", *words).stdout.split())
    assert re.search(r"\b4 items\b.*\b22\b", planned)
    data_of("train", *words, "--yes", "--name", "fox-1")

    receipt = data_of("receipt", "fox-1")["statement"]["predicate"]
    assert receipt["digests"]["core_bundle"] == digest
    core = receipt["training"]["figures"]["core"]
    assert (core["core_items"], core["bundle_sha256"]) == (12, digest)
    assert "CORE" in gpurun("receipt", "fox-1").stdout
    assert "core 0002 | CORE" in (own_home / "runs/fox-1/run.log").read_text()
    assert gpurun("audit", "--strict").returncode == 0

    again = data_of("eval", "fox-1", "--core", "--checkpoint", "last")
    other = data_of("eval", "fox-1", "--core", "--checkpoint", "last", "--core-bundle", str(bundle), "--items", "4")
    assert again["core"] == other["core"] == pytest.approx(core["core"])
    assert again["bundle_sha256"] == digest
    items = {label: task["items"] for label, task in again["tasks"].items()}
    assert items == {"animals": 4, "who_is_it": 4, "go_on": 4}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--set", "eval.core=4"), "core.no_bundle"),
        (("--core-bundle", "absent.zip"), "core.unused"),
        (("--set", "eval.core=4", "--core-bundle", "absent.zip"), "core.no_bundle"),
        (("--set", "eval.core=-1"), "recipe.bad_value"),
    ],
)
def test_a_core_score_without_tasks_and_tasks_alone_are_refused(
    own_home: Path, words: tuple[str, ...], error: str
) -> None:
    refused = data_of("plan", "mini-gpt", "--provider", "local", *words, code=2)
    assert [refusal["code"] for refusal in refused["errors"]] == [error]


def test_a_recipes_rehearsal_may_leave_it_out(own_home: Path, tmp_path: Path) -> None:
    recipe = (bundle_root() / "recipes" / "mini-gpt.toml").read_text()
    text = recipe.replace("every = 50\n", "every = 50\ncore = 4\n")
    text = text.replace("[rehearsal]\n", "[rehearsal]\neval = { core = 0 }\n")
    (tmp_path / "scored.toml").write_text(text)
    planned = data_of(
        "plan", str(tmp_path / "scored.toml"), "--dry-run", "--core-bundle", "https://example.org/any.zip"
    )
    assert planned["resolved"]["eval"]["core"] == 0
    assert not [note for note in planned["notes"] if note.startswith("CORE")]


def test_what_a_paid_run_takes_for_it_is_in_the_plan(own_home: Path, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle.zip")
    usual = data_of("plan", "gpt2-124m", "--gpu", "8xA100", "--max-cost", "60")
    words = ("--set", "eval.core=500", "--core-bundle", str(bundle))
    scored = data_of("plan", "gpt2-124m", "--gpu", "8xA100", "--max-cost", "60", *words)
    more_s = scored["estimate"]["expected_s"] - usual["estimate"]["expected_s"]
    assert 2 < more_s < 60, "16.5 million tokens, forward alone"
    assert scored["expected_micros"] > usual["expected_micros"]
    (note,) = (note for note in scored["notes"] if note.startswith("CORE"))
    assert "about 16 M tokens" in note
    assert "$0." in note

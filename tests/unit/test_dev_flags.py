"""Tests that a wrong flag of `gpurun dev` is refused before anything is requested."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import gpurun
from tests.refusals import lacking


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--git", "not an address"], "dev.git", ["'not an address'"]),
        (["--git", "--upload-pack=touch x"], "dev.git", ["'--upload-pack=touch x'"]),
        (["--git", "https://me:hunter2@host/repo"], "dev.git_secret", ["--git", "--upload DIR"]),
        (["--git", "https://hunter2@host/repo"], "dev.git_secret", ["--git", "--upload DIR"]),
        (["--git", "https://host/repo", "--upload", "."], "dev.two_folders", ["--git", "--upload"]),
        (["--from", "fox-41", "--git", "https://host/repo"], "dev.two_folders", ["--from", "--git"]),
        (["--from", "fox-41"], "run.unknown", ["'fox-41'"]),
        (["--upload", "nowhere"], "run.upload", ["/nowhere"]),
        (["--sync", "5s"], "usage.sync", ["'5s'", "10s to 1h"]),
        (["--idle", "10s"], "usage.idle", ["'10s'", "1m to a day"]),
        (["--pip", "numpy"], "run.pip_here", ["--pip"]),
        (["--outputs", "../x"], "run.glob", ["'../x'"]),
        (["--gpu", "2x8xH100"], "gpu.nodes", ["2 nodes", "--gpu 8xH100"]),
        (["--hours", "0"], "hours.bad", ["--hours 0"]),
        (["--upload", "../large"], "run.large", ["corpus.bin (40 GB)"]),
    ],
    ids=str,
)
def test_a_wrong_flag_is_refused_by_its_code(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: str, named: list[str]
) -> None:
    for name in ("lab", "large"):
        (tmp_path / name).mkdir()
    with open(tmp_path / "large" / "corpus.bin", "wb") as corpus:
        corpus.truncate(40_000_000_000)
    monkeypatch.chdir(tmp_path / "lab")
    done = gpurun("dev", "--provider", "local", *words)
    assert (done.returncode, lacking(" ".join(done.stderr.split()), f"[{code}]", *named)) == (2, []), done.stderr
    assert "hunter2" not in done.stderr
    assert not any(own_home.glob("runs/*")), "nothing was begun"

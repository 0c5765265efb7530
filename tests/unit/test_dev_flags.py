"""What is typed wrongly of `gpurun dev` is refused with a sentence before anything is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import gpurun


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--git", "not an address"], "is not the address of a repository"),
        (["--git", "--upload-pack=touch x"], "is not the address of a repository"),
        (["--git", "https://me:hunter2@host/repo"], "--git contains a user or password"),
        (["--git", "https://hunter2@host/repo"], "--git contains a user or password"),
        (["--git", "https://host/repo", "--upload", "."], "--git and --upload both define the content of the folder"),
        (["--from", "fox-41", "--git", "https://host/repo"], "--from and --git both define the content of the folder"),
        (["--from", "fox-41"], "no run"),
        (["--upload", "nowhere"], "There is no folder"),
        (["--sync", "5s"], "is out of range: files can be downloaded"),
        (["--idle", "10s"], "is out of range: an idle job can be stopped"),
        (["--pip", "numpy"], "--pip installs packages on another machine, not on this computer"),
        (["--outputs", "../x"], "is not in the command's folder"),
        (["--gpu", "2x8xH100"], "node"),
        (["--hours", "0"], "hours"),
        (["--upload", "../large"], "corpus.bin (40 GB)"),
    ],
    ids=str,
)
def test_a_wrong_line_has_its_sentence(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    for name in ("lab", "large"):
        (tmp_path / name).mkdir()
    with open(tmp_path / "large" / "corpus.bin", "wb") as corpus:
        corpus.truncate(40_000_000_000)
    monkeypatch.chdir(tmp_path / "lab")
    done = gpurun("dev", "--provider", "local", *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert "hunter2" not in done.stderr
    assert not any(own_home.glob("runs/*")), "nothing was begun"

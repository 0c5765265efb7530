"""A dev box on a rented machine: worked on in a terminal, asked about at its end, its files at home, the next one.

The cloud is emulated; ssh, sshd, git and the terminals are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, ticks
from tests.clouds.rented import User, runpod, somebody
from tests.clouds.terminal import Terminal
from tests.emulators import guests

pytestmark = [
    pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot"),
    pytest.mark.xdist_group("a dev box on runpod"),
]
RUN = "fox-41"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("dev")
    with runpod(folder / "cloud") as cloud, somebody(cloud, folder / "home of a user") as user:
        lab(folder)
        yield user
        assert cloud.alive() == []


def lab(folder: Path) -> Path:
    """A folder to work in."""
    place = folder / "lab"
    (place / "notes").mkdir(parents=True)
    (place / "train.py").write_text("print('hello')\n")
    (place / "old.py").write_text("print('old')\n")
    (place / ".gitignore").write_text("scratch/\n")
    (place / "notes" / ".gitignore").write_text("*.tmp\n")
    return place


def dev(user: User, *more: str, name: str = RUN, place: Path | None = None) -> list[str]:
    upload = [] if "--from" in more or "--git" in more else ["--upload", str(place or user.home.parent / "lab")]
    asks = ["--accept-cpu"] if "--from" in more else user.cloud.asks
    return ["dev", "--provider", user.cloud.name, "--max-cost", "5", "--yes", "--name", name, *asks, *upload, *more]


def outputs(user: User, name: str = RUN) -> dict[str, str]:
    root = user.home / "runs" / name / "artifacts" / "outputs"
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_text() for path in files}


def receipt(user: User, name: str = RUN) -> dict[str, Any]:
    return user.tells("receipt", name)[1]["data"]["statement"]["predicate"]


def until_over(user: User, name: str = RUN) -> None:
    assert user.types("wait", name).returncode == 0, user.said(name)


def test_a_box_is_worked_on_in_a_terminal_and_ends_by_its_question(user: User) -> None:
    terminal = Terminal(user, *dev(user, "--sync", "10s"))
    try:
        terminal.shows(f"{RUN} is ready", 120)
        told = terminal.shows("files home, machine gone, receipt")
        assert f"gpurun ssh {RUN}" in told
        assert f"vscode-remote://ssh-remote+gpurun-{RUN}/" in told
        terminal.types(
            "echo changed > train.py; rm old.py; mkdir -p scratch; echo a > notes/b.tmp; echo b > notes/b.md"
        )
        terminal.types("head -c 12000000 /dev/zero > scratch/big; head -c 1500000 /dev/urandom > ~/result.npz")
        terminal.types("pwd; echo; echo saved")
        terminal.shows("bundle/work")
        assert any(outputs(user).get("notes/b.md") for _ in ticks(SystemClock(), 0.5, 60)), user.said()
        other = Terminal(user, "ssh", RUN)
        try:
            other.types("echo he''re; cat")
            other.shows("here")
            terminal.types("exit")
            terminal.shows("Another terminal is open")
            assert terminal.process.wait(timeout=30) == 0
        finally:
            other.close()
    finally:
        terminal.close()
    again = Terminal(user, "stop", RUN)
    try:
        named = again.shows("[y/N]", 60)
        assert "scratch" in named
        assert "~/result.npz" in named
        again.types("n")
        again.shows("Nothing was ended")
        assert user.tells("ps")[1]["data"]["runs"][0]["phase"] == "training"
    finally:
        again.close()
    last = Terminal(user, "stop", RUN)
    try:
        last.shows("[y/N]", 60)
        last.types("y")
        last.shows("Receipt", 120)
        assert last.process.wait(timeout=30) == 0, user.said()
    finally:
        last.close()
    assert outputs(user) == {"train.py": "changed\n", "notes/b.md": "b\n"}
    assert (user.home.parent / "lab" / "train.py").read_text() == "print('hello')\n", "what it came from is untouched"
    told = receipt(user)
    assert (told["asked"]["job"], told["training"]["outcome"], told["training"]["reason"]) == (
        "dev_box",
        "stopped",
        "user",
    )
    assert told["training"]["sessions"]["terminals"] >= 1
    assert 0 < told["training"]["sessions"]["used_s"] <= told["training"]["sessions"]["open_s"]
    assert user.types("audit").returncode == 0


def test_the_next_box_has_the_folder_of_the_last_as_that_ended(user: User) -> None:
    begun = user.types(*dev(user, "--from", RUN, "--no-shell", "--json", name="fox-42"))
    assert begun.returncode == 0, begun.stderr + user.said("fox-42")
    assert json.loads(begun.stdout.splitlines()[-1])["data"]["host"] == "gpurun-fox-42"
    shown = user.types("ssh", "fox-42", "--", "sh", "-c", "ls; cat train.py notes/b.md")
    assert shown.stdout.split() == ["notes", "train.py", "changed", "b"]
    assert user.types("stop", "fox-42").returncode == 0
    assert outputs(user, "fox-42") == {}
    assert receipt(user, "fox-42")["asked"]["continues"]["run"] == RUN
    assert user.types("audit").returncode == 0

"""Tests of a dev box on a rented machine: work in a terminal, the question at its end, its files, the next box.

The cloud is emulated; ssh, sshd, git and the terminals are real.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.remote.key_pairs import make_keys
from tests.clouds.rented import CLOUDS, Cloud, User, runpod, somebody
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
    """Create a folder to work in, and return it."""
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
    return user.envelope("receipt", name)[1]["data"]["statement"]["predicate"]


def until_over(user: User, name: str = RUN) -> None:
    assert user.types("wait", name).returncode == 0, user.said(name)


def test_a_box_used_in_a_terminal_ends_by_its_question(user: User) -> None:
    terminal = Terminal(user, *dev(user, "--sync", "10s"))
    try:
        terminal.shows(f"{RUN} is ready", 120)
        shown = terminal.shows("download files, end machine, receipt")
        assert f"gpurun ssh {RUN}" in shown
        assert f"vscode-remote://ssh-remote+gpurun-{RUN}/" in shown
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
        again.shows("stop.declined")
        assert user.envelope("ps")[1]["data"]["runs"][0]["phase"] == "training"
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
    predicate = receipt(user)
    assert (predicate["asked"]["job"], predicate["training"]["outcome"], predicate["training"]["reason"]) == (
        "dev_box",
        "stopped",
        "user",
    )
    assert predicate["training"]["sessions"]["terminals"] >= 1
    assert 0 < predicate["training"]["sessions"]["used_s"] <= predicate["training"]["sessions"]["open_s"]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOUDS)
def test_a_box_that_nobody_uses_is_gone_with_its_files_at_home(tmp_path: Path, name: str) -> None:
    """With `--idle 1m`, background work keeps the box, and a terminal that is only open does not."""
    with CLOUDS[name](tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home of a user") as user:
        lab(tmp_path)
        begun = user.types(*dev(user, "--idle", "1m", "--sync", "10s", "--no-shell"))
        assert begun.returncode == 0, begun.stderr + user.said()
        burns = "timeout 70 sh -c 'while :; do :; done' & echo made > made.txt; wait"
        assert user.types("ssh", RUN, "--", "sh", "-c", burns).returncode == 0
        editor = Terminal(user, "ssh", RUN)
        try:
            editor.shows("bundle/work")
            began = time.monotonic()
            assert user.envelope("ps")[1]["data"]["runs"][0]["phase"] == "training", "a busy core kept it"
            editor.shows("is idle and ends at", 120)
            assert any(
                outputs(user) and not user.envelope("ps")[1]["data"]["runs"] for _ in ticks(SystemClock(), 1, 240)
            )
            assert cloud.alive() == []
            proof_s = 60  # The proof of death needs several reads, spread over time.
            assert time.monotonic() - began < 60 + 60 + proof_s, user.said()
        finally:
            editor.close()
        assert outputs(user) == {"made.txt": "made\n"}
        predicate = receipt(user)
        assert (predicate["training"]["outcome"], predicate["training"]["reason"]) == ("done", "idle")
        assert user.types("audit").returncode == 0


@pytest.mark.slow
def test_on_a_box_of_ones_own_others_work_does_not_keep_it(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "identity")
    with guests.Guest.boot(user="ubuntu", folder=tmp_path / "box", authorized_keys=[keys.client_public]) as box:
        box.wait_ready()
        asks = ("--host", f"{box.user}@{box.host}:{box.port}", "--identity", str(tmp_path / "identity" / "client"))
        cloud = Cloud("ssh", {}, guests.Meter(time.time), list, (*asks, "--gpu", "cpu"))
        with somebody(cloud, tmp_path / "home of a user") as user:
            lab(tmp_path)
            begun = user.types(*dev(user, "--idle", "1m", "--sync", "10s", "--no-shell"))
            assert begun.returncode == 0, begun.stderr + user.said()
            others = "cd /; nohup timeout 300 sh -c 'while :; do :; done' >/dev/null 2>&1 &"
            by_hand = ["ssh", "-i", asks[3], "-p", str(box.port), "-o", "StrictHostKeyChecking=no", "-o",
                       "UserKnownHostsFile=/dev/null", f"{box.user}@{box.host}", others]  # fmt: skip
            subprocess.run(by_hand, check=True, capture_output=True, timeout=60)
            # A process that began in the box's shell counts as its work, in whatever folder it runs.
            elsewhere = "echo made > made.txt; cd /; timeout 80 sh -c 'while :; do :; done'"
            began = time.monotonic()
            assert user.types("ssh", RUN, "--", "sh", "-c", elsewhere).returncode == 124, user.said()
            assert user.envelope("ps")[1]["data"]["runs"][0]["phase"] == "training"
            until_over(user)
            assert time.monotonic() - began > 80 + 50
            assert outputs(user) == {"made.txt": "made\n"}
            assert receipt(user)["training"]["reason"] == "idle"
        assert list((box.root / "home/ubuntu").glob(".gpurun/*")) == []


PIDS = Path("/sys/fs/cgroup/pids")
BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.5)
"""


@contextmanager
def few_processes(guest: guests.Guest, more: int) -> Iterator[Path]:
    """Let a machine have at most `more` processes above what it has; yield the file that counts them.

    The machine is killed afterwards.
    """
    folder = PIDS / f"gpurun-test-{os.getpid()}"
    folder.mkdir()
    try:
        for pid in guest.pids:
            with suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(str(pid))
        (folder / "pids.max").write_text(str(len(guest.pids) + more))
        yield folder / "pids.current"
    finally:
        guest.kill()
        for _ in ticks(SystemClock(), 0.1, 20):
            with suppress(OSError):
                folder.rmdir()
                break


@pytest.mark.slow
@pytest.mark.skipif(not os.access(PIDS, os.W_OK), reason="needs a machine whose processes may be counted")
def test_a_box_with_a_fork_bomb_ends_with_its_files_at_home(tmp_path: Path) -> None:
    """No shell starts on it any more, but `destroy` ends it, and the files of the last sync are at home."""
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home of a user") as user:
        lab(tmp_path)
        assert user.types(*dev(user, "--sync", "10s", "--no-shell")).returncode == 0, user.said()
        assert user.types("ssh", RUN, "--", "sh", "-c", "echo made > made.txt").returncode == 0
        assert any(outputs(user) for _ in ticks(SystemClock(), 0.5, 60))
        with few_processes(cloud.guests[0], 30) as count:
            throws = f"nohup python3 -c '{BOMB}' >/dev/null 2>&1 &"
            user.types("ssh", RUN, "--", "sh", "-c", throws)
            most = int((count.parent / "pids.max").read_text())
            assert any(int(count.read_text()) >= most for _ in ticks(SystemClock(), 0.2, 60))
            assert user.types("ssh", RUN, "--", "true").returncode == 255
            ended = user.types("destroy", RUN, "--yes")
            assert ended.returncode == 0, ended.stderr + user.said()
            assert cloud.alive() == []
        assert outputs(user) == {"made.txt": "made\n"}
        assert user.types("audit").returncode == 0


@pytest.mark.slow
def test_a_box_with_a_full_disk_ends_with_its_files_at_home(tmp_path: Path) -> None:
    with (
        runpod(tmp_path / "cloud", guests.Faults(disk_mb=300)) as cloud,
        somebody(cloud, tmp_path / "home of a user") as user,
    ):
        lab(tmp_path)
        begun = user.types(*dev(user, "--sync", "10m", "--output-gb", "0.05", "--idle", "1m", "--no-shell"))
        assert begun.returncode == 0, begun.stderr + user.said()
        fills = "echo made > made.txt; mkdir scratch; cat /dev/zero > scratch/fill; echo more > more.txt"
        filled = user.types("ssh", RUN, "--", "sh", "-c", fills)
        assert "No space left" in filled.stderr
        until_over(user)
        assert cloud.alive() == []
        assert outputs(user)["made.txt"] == "made\n"
        assert receipt(user)["training"]["reason"] == "idle"
        assert user.types("audit").returncode == 0


@pytest.mark.slow
def test_the_page_is_a_tutorial_that_does_what_it_says(tmp_path: Path) -> None:
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home of a user") as user:
        place = lab(tmp_path)
        page = (Path(__file__).parents[2] / "docs" / "DEV-BOX.md").read_text()
        lines = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0].splitlines()
        begins = f"{sys.executable} -m gpurun"
        # `--yes` answers the question; `--accept-cpu` because an emulated cloud has no card that torch can use.
        cases = f'dev) shift; {begins} dev --yes --accept-cpu --provider runpod "$@" ;; *) {begins} "$@" ;;'
        said = {}
        for line in lines:
            done = subprocess.run(
                ["bash", "-c", f'gpurun() {{ case "$1" in {cases} esac; }}; {line}'], cwd=place, env=user.environment(),
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
            )  # fmt: skip
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            said[line] = done.stdout
        assert said["gpurun ssh lab-2 -- cat notes.txt"] == "seen on the card\n"
        assert "STOPPED · user" in said["gpurun receipt lab-2"]
        assert len(lines) == 7
        assert cloud.alive() == []


def link_in(text: str) -> tuple[int, str]:
    """Return the local port and the token of JupyterLab's link in a text."""
    port, token = re.search(r"http://127\.0\.0\.1:(\d+)/lab\?token=(\w+)", text).groups()  # type: ignore[union-attr]
    return int(port), token


@pytest.mark.slow
def test_a_kernel_computes_through_the_tunnel_and_its_token(tmp_path: Path) -> None:
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home of a user") as user:
        lab(tmp_path)
        with socket.create_server(("127.0.0.1", 8888)):  # The guest shares this network: taken at both ends.
            terminal = Terminal(user, *dev(user, "--jupyter"))
            try:
                terminal.shows("while this shell is open", 180)
                shown = terminal.shows("bundle/work", 60)
                port, token = link_in(shown)
                url = f"http://127.0.0.1:{port}/api/kernels"
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(url, timeout=20)
                begin = urllib.request.Request(f"{url}?token={token}", data=b"{}", method="POST")
                kernel = json.load(urllib.request.urlopen(begin, timeout=60))["id"]
                assert computed(f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels?token={token}", "6 * 7") == "42"
                assert token not in "".join(
                    path.read_text(errors="replace") for path in user.home.rglob("*") if path.is_file()
                )
                terminal.types("exit")
                terminal.shows("(Enter)")
                terminal.types("e")
                terminal.shows("Receipt", 120)
            finally:
                terminal.close()
        assert cloud.alive() == []


def computed(url: str, code: str) -> str:
    """Return a kernel's answer to code that is sent over its websocket."""
    from websocket import create_connection

    channel = create_connection(url, timeout=60)
    header = {"msg_id": "1", "username": "", "session": "1", "msg_type": "execute_request", "version": "5.3"}
    content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    channel.send(json.dumps(message))
    while True:
        answer = json.loads(channel.recv())
        if answer["msg_type"] == "execute_result":
            return str(answer["content"]["data"]["text/plain"])
        assert answer["msg_type"] != "error", answer

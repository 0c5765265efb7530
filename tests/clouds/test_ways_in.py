"""Tests of the ways into a rented machine: shell, files and ports, by gpurun and by OpenSSH with gpurun's entry.

The cloud is emulated; ssh, sshd, scp and rsync are real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.secrets import child_environment
from tests.clouds.rented import User, runpod, somebody
from tests.clouds.terminal import Terminal
from tests.emulators import guests
from tests.refusals import lacking

pytestmark = [
    pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot"),
    pytest.mark.xdist_group("ways in on runpod"),
]
SCRIPT = """\
import functools, http.server, os, threading, time
os.makedirs("out", exist_ok=True)
open("out/hello.txt", "w").write("from the machine")
open("out/log.txt", "w").write("line\\n" * 4)
site = functools.partial(http.server.SimpleHTTPRequestHandler, directory="out")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), site)
threading.Thread(target=server.serve_forever, daemon=True).start()
open("out/port.txt", "w").write(str(server.server_port))
step = 0
while not os.path.exists("stop"):
    step += 1
    print(f"step {step} | loss 1.0", flush=True)
    time.sleep(0.2)
"""
DOCS = Path(__file__).parents[2] / "docs"
RUN, HOST = "fox-41", "gpurun-fox-41"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """Yield a user whose run is in progress on a rented machine, where it serves its outputs by HTTP."""
    folder = tmp_path_factory.mktemp("ways")
    with runpod(folder / "cloud") as cloud, somebody(cloud, folder / "home of a user") as user:
        (folder / "lab").mkdir()
        (folder / "lab" / "serve.py").write_text(SCRIPT)
        begun = user.types(
            "run", "--provider", "runpod", "--max-cost", "5", "--yes", "--name", RUN, *cloud.asks, "--detach",
            "--upload", str(folder / "lab"), "--outputs", "out/*", "--", "python", "serve.py",
        )  # fmt: skip
        assert begun.returncode == 0, begun.stderr + user.said()
        for _ in ticks(SystemClock(), 0.2, 60):
            if user.types("ssh", RUN, "--", "cat", "out/port.txt").stdout:
                break
        yield user
        user.types("destroy", RUN, "--yes")
        assert cloud.alive() == []


def config(user: User) -> Path:
    return user.home / "ssh" / "config"


def openssh(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of OpenSSH, or rsync, outside the user's environment, as an editor would."""
    return subprocess.run(
        [program, *words], env=child_environment(), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


def test_a_command_runs_in_the_jobs_folder_and_ends_as_it_does(user: User) -> None:
    shown = user.types("ssh", RUN, "--", "cat", "out/hello.txt")
    assert (shown.stdout, shown.stderr, shown.returncode) == ("from the machine", "", 0)
    assert user.types("ssh", RUN, "--", "sh", "-c", "echo '$HOME;' >&2; exit 7").returncode == 7
    assert user.types("ssh", RUN, "--", "printf", "%s|", "a b", "*", "$(id)").stdout == "a b|*|$(id)|"


def test_without_openssh_gpuruns_own_connection_does_the_same(user: User, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    shown = user.types("ssh", RUN, "--", "sh", "-c", "cat out/hello.txt; exit 7", PATH=str(tmp_path))
    assert (shown.stdout, shown.returncode) == ("from the machine", 7), shown.stderr
    lacks = user.types("forward", RUN, "8888", PATH=str(tmp_path))
    assert (lacks.returncode, "Install OpenSSH" in lacks.stderr) == (4, True)


@pytest.mark.parametrize("by", ["openssh", "gpurun itself"])
def test_a_shell_is_at_home_in_a_terminal_and_follows_its_size(user: User, tmp_path: Path, by: str) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    terminal = Terminal(user, "ssh", RUN, **({} if by == "openssh" else {"PATH": str(tmp_path)}))
    try:
        terminal.types("stty size; echo here: $(cat out/hello.txt)")
        terminal.shows("30 101")
        terminal.shows("here: from the machine")
        terminal.resize(44, 77)
        terminal.types("until stty size | grep 44; do sleep 0.1; done")
        terminal.shows("44 77")
        terminal.types("sleep 60 || echo cut")
        time.sleep(0.5)
        os.write(terminal.ours, b"\x03")
        terminal.types("exit 5")
        assert terminal.process.wait(timeout=20) == 5
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    finally:
        terminal.close()


def test_ssh_scp_and_rsync_reach_it_by_its_strict_entry(user: User, tmp_path: Path) -> None:
    code, envelope = user.envelope("ssh-config")
    (entry,) = envelope["data"]["entries"]
    assert (code, entry["host"], envelope["data"]["included"]) == (0, HOST, False)
    assert stat.S_IMODE(config(user).stat().st_mode) == 0o600
    strict = ("-F", str(config(user)), "-o", "StrictHostKeyChecking=yes")
    assert openssh("ssh", *strict, HOST, "echo in").stdout == "in\n"
    work = f"{entry['folder']}/bundle/work"
    copied = openssh("scp", *strict, f"{HOST}:{work}/out/hello.txt", str(tmp_path))
    assert copied.returncode == 0, copied.stderr
    by_ssh = f"ssh -F '{config(user)}' -o StrictHostKeyChecking=yes"
    synced = openssh("rsync", "-a", "-e", by_ssh, f"{HOST}:{work}/serve.py", str(tmp_path))
    assert synced.returncode == 0, synced.stderr
    assert [(tmp_path / name).read_text() for name in ("hello.txt", "serve.py")] == ["from the machine", SCRIPT]


def test_another_host_key_than_the_pinned_one_is_refused(user: User, tmp_path: Path) -> None:
    user.types("ssh-config")
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    kind, key, *_ = other.with_suffix(".pub").read_text().split()
    known = tmp_path / "known_hosts"
    known.write_text(f"{HOST} {kind} {key}\n")
    mistaken = tmp_path / "config"
    mistaken.write_text(config(user).read_text().replace(str(user.home / "ssh" / "known_hosts"), str(known)))
    refused = openssh("ssh", "-F", str(mistaken), "-o", "BatchMode=yes", HOST, "echo in")
    assert (refused.returncode, refused.stdout) == (255, "")
    assert "Host key verification failed" in refused.stderr


def test_a_port_is_forwarded_to_the_loopback_until_ctrl_c(user: User) -> None:
    there = user.types("ssh", RUN, "--", "cat", "out/port.txt").stdout
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here = taken.getsockname()[1]
        refused = user.types("forward", RUN, f"{here}:{there}")
    assert refused.returncode == 2
    assert lacking(refused.stderr, "[forward.port_taken]", str(here)) == []
    offered = refused.stderr.partition(f"gpurun forward {RUN} ")[2].split()[0]
    free = int(offered.partition(":")[0])
    tunnel = subprocess.Popen(
        [sys.executable, "-m", "gpurun.cli.app", "forward", RUN, offered, "--json"],
        env=user.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert tunnel.stderr is not None
        assert f"http://127.0.0.1:{free} is port {there}" in tunnel.stderr.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{free}/hello.txt", timeout=20) as page:
            assert page.read() == b"from the machine"
    finally:
        tunnel.send_signal(signal.SIGINT)
    out, _ = tunnel.communicate(timeout=20)
    assert json.loads(out)["data"]["ports"] == [{"here": free, "there": int(there)}]
    with socket.create_server(("127.0.0.1", free)):
        pass
    assert user.envelope("ps")[1]["data"]["runs"][0]["phase"] == "training"


def test_many_sessions_leave_the_supervisor_its_own(user: User) -> None:
    words = ["ssh", "-F", str(config(user)), HOST, "echo in; read line"]
    sessions = list[subprocess.Popen[bytes]]()
    try:
        for _ in range(12):
            sessions.append(
                subprocess.Popen(words, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert sessions[-1].stdout is not None
            assert sessions[-1].stdout.readline() == b"in\n"
        log = user.home / "runs" / RUN / "run.log"
        size = log.stat().st_size
        assert any(log.stat().st_size > size for _ in ticks(SystemClock(), 0.2, 60)), user.said()
    finally:
        for session in sessions:
            session.communicate(b"\n", timeout=20)


def test_every_line_of_the_page_does_what_it_says(user: User, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (DOCS / "DEV-BOX.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    # A reader's ~/.ssh/config includes the entries. The test must not change this account's, so it passes them with -F.
    preface = f"""gpurun() {{ "{sys.executable}" -m gpurun "$@"; }}
        for program in ssh scp; do eval "$program() {{ command $program -F '{config(user)}' \\"\\$@\\"; }}"; done
        export RSYNC_RSH="ssh -F '{config(user)}'"
    """
    said = {}
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", preface + line], cwd=tmp_path, env=user.environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        said[line.split()[1]] = done.stdout
    assert len(lines) == 6
    assert said["ssh"].count("line") == 3
    assert f"code --remote ssh-remote+{HOST}" in said["ssh-config"]
    assert (tmp_path / "log.txt").read_text() == "line\n" * 4
    assert list(tmp_path.glob("out-of-the-machine/.gpurun/*/bundle/work/serve.py"))


def test_at_the_runs_end_its_entry_goes_and_each_verb_says_why(user: User) -> None:
    user.types("ssh-config")
    assert f"Host {HOST}" in config(user).read_text()
    user.types("ssh", RUN, "--", "touch", "stop")
    assert user.types("wait", RUN).returncode == 0, user.said()
    assert any(f"Host {HOST}" not in config(user).read_text() for _ in ticks(SystemClock(), 0.2, 20))
    assert (user.home / "ssh" / "known_hosts").read_text() == ""
    for words in (("ssh", RUN), ("forward", RUN, "8888")):
        over = user.types(*words)
        assert (over.returncode, f"{RUN} is over" in over.stderr) == (2, True), over.stderr
    hello = user.home / "runs" / RUN / "artifacts" / "outputs" / "out" / "hello.txt"
    assert hello.read_text() == "from the machine"

"""Tests of a dev box as a job of the real Slurm, used through the login node; skipped where Slurm is missing."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.paths import Home
from gpurun.core.secrets import child_environment
from gpurun.ledger.audit import audit
from gpurun.remote.key_pairs import make_keys
from tests.clouds.rented import Cloud, User, somebody
from tests.clouds.terminal import Terminal
from tests.emulators import sshd
from tests.emulators.guests import Meter
from tests.emulators.slurm import missing
from tests.emulators.slurm.engine import Engine, running
from tests.later import LATER

WHY_NOT = missing() or sshd.missing()
pytestmark = [LATER, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is here")]
RUN = "fox-41"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with running(tmp_path / "slurm") as made:
        yield made


@pytest.fixture
def login(engine: Engine, tmp_path: Path) -> Iterator[sshd.Sshd]:
    """Yield the sshd of the login node, which is also the compute node's: both are this computer."""
    keys = make_keys(tmp_path / "keys")
    server = sshd.Sshd(
        tmp_path / "sshd", host_keys=[tmp_path / "keys" / "host"], authorized_keys=[keys.client_public],
        options=[f"SetEnv SLURM_CONF={engine.conf}"],
    )  # fmt: skip
    yield server
    server.close()


@contextmanager
def somebody_at(login: sshd.Sshd, engine: Engine, folder: Path) -> Iterator[User]:
    """Yield a user with a folder to work in, whose config.toml names the login node."""
    home = Home(folder / "home of a user").prepare()
    home.config.write_text(
        f'[slurm.lab]\nhost = "127.0.0.1"\nport = {login.port}\nuser = "{login.user}"\n'
        f'identity = "{folder / "keys" / "client"}"\nworkdir = "{engine.work}"\npython = "/usr/bin/python3"\n'
    )
    (folder / "lab").mkdir()
    (folder / "lab" / "train.py").write_text("print('hello')\n")
    cloud = Cloud("slurm", {}, Meter(time.time), list)
    with somebody(cloud, home.root) as user:
        yield user


def dev(user: User, *more: str) -> list[str]:
    upload = ("--upload", str(user.home.parent / "lab"))
    return ["dev", "--provider", "slurm", "--gpu", "cpu", "--accept-cpu", "--yes", "--name", RUN, *upload, *more]


def test_a_job_is_worked_on_in_a_terminal_that_follows_its_size(
    engine: Engine, login: sshd.Sshd, tmp_path: Path
) -> None:
    """The terminal is `srun --overlap --pty` over the login node; the printed ssh line forwards a port."""
    with somebody_at(login, engine, tmp_path) as user:
        terminal = Terminal(user, *dev(user))
        try:
            terminal.shows(f"{RUN} is ready", 120)
            shown = terminal.shows("download files, end machine, receipt")
            line = re.search(r"ssh -o .*?(?=   # if the cluster)", "".join(shown.splitlines()))
            assert line is not None, shown
            assert f"gpurun forward {RUN}" not in shown
            terminal.types("echo in job $SLURM_JOB_ID; stty size; echo b >b.txt")
            terminal.shows(f"in job {engine.ask('squeue', '-h', '-o', '%i').stdout.strip()}")
            terminal.shows("30 101")
            terminal.resize(44, 77)
            terminal.types("until stty size | grep 44; do sleep 0.1; done")
            terminal.shows("44 77")
            terminal.types("/usr/bin/python3 -m http.server --bind 127.0.0.1 6006 >/dev/null 2>&1 &")
            serves_by(line[0], login, tmp_path)
            terminal.types("exit")
            terminal.shows("(Enter)")
            terminal.types("e")
            terminal.shows("Receipt", 120)
            assert terminal.process.wait(timeout=30) == 0, user.said()
        finally:
            terminal.close()
        outputs = user.home / "runs" / RUN / "artifacts" / "outputs"
        assert {path.name: path.read_text() for path in outputs.iterdir()} == {"b.txt": "b\n"}
        assert list(engine.work.iterdir()) == []
        assert [row.problems for row in audit(Home(user.home)).rows] == [()]


def serves_by(line: str, login: sshd.Sshd, folder: Path) -> None:
    """Assert that the printed ssh line forwards port 6006 of a node with the same login as the login node."""
    own = ["-p", str(login.port), "-i", str(folder / "keys" / "client"), "-o", "HostName=127.0.0.1",
           "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]  # fmt: skip
    ssh, *words = shlex.split(line)
    assert "-L 127.0.0.1:6006:127.0.0.1:6006" in line
    here = [word.replace("127.0.0.1:6006:", "127.0.0.1:16006:") for word in words]
    tunnel = subprocess.Popen([ssh, *own, *here], env=child_environment(), stdin=subprocess.DEVNULL)
    try:
        for _ in ticks(SystemClock(), 0.2, 30):
            try:
                with urllib.request.urlopen("http://127.0.0.1:16006/", timeout=5) as page:
                    assert b"train.py" in page.read()
                    return
            except OSError:
                continue
        raise AssertionError("nothing answers")
    finally:
        tunnel.terminate()
        tunnel.wait()


def test_an_open_terminal_alone_does_not_keep_a_job(engine: Engine, login: sshd.Sshd, tmp_path: Path) -> None:
    with somebody_at(login, engine, tmp_path) as user:
        begun = user.types(*dev(user, "--idle", "1m", "--no-shell"))
        assert begun.returncode == 0, begun.stderr + user.said()
        assert user.types("ssh", RUN, "--", "sh", "-c", "echo made >made.txt").returncode == 0
        refused = user.types("forward", RUN, "6006")
        assert (refused.returncode, "[forward.cluster]" in refused.stderr) == (2, True), refused.stderr
        shell = Terminal(user, "ssh", RUN)
        try:
            shell.types("cd /; echo he''re")  # It is the run's shell outside the run's folder, too.
            shell.shows("here")
            shell.shows("is idle and ends at", 120)
            assert user.types("wait", RUN).returncode == 0, user.said()
        finally:
            shell.close()
        outputs = user.home / "runs" / RUN / "artifacts" / "outputs"
        assert {path.name: path.read_text() for path in outputs.iterdir()} == {"made.txt": "made\n"}
        training = user.envelope("receipt", RUN)[1]["data"]["statement"]["predicate"]["training"]
        assert (training["outcome"], training["reason"], training["sessions"]["terminals"]) == ("done", "idle", 1)
        assert list(engine.work.iterdir()) == []
        assert [row.problems for row in audit(Home(user.home)).rows] == [()]

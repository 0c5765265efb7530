"""Tests on the real Slurm as its users have it: not as root, behind a real sshd, with accounts and partitions.

Skipped where slurmctld, slurmdbd or MariaDB are not installed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.remote.key_pairs import make_keys
from tests.emulators import sshd
from tests.emulators.slurm import missing_books
from tests.emulators.slurm.engine import Engine, booked, running
from tests.later import LATER
from tests.lifecycle.slurm_engine_run import paid

WHY_NOT = missing_books() or sshd.missing()
pytestmark = [LATER, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is here")]
CLOSE_S = 3.0


@dataclass(frozen=True)
class User:
    """An account of this machine with dash as its login shell, its cluster, and the config.toml table for them."""

    name: str
    engine: Engine
    table: str


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder, name = Path(tempfile.mkdtemp(prefix="slurm-")), f"gpurun-{secrets.token_hex(3)}"
    folder.chmod(0o755)
    keys = tmp_path_factory.mktemp("keys")
    made = make_keys(keys)
    words = ["--create-home", "--base-dir", str(folder), "--shell", str(shutil.which("dash"))]
    subprocess.run(["useradd", "--password", "*", *words, name], check=True)  # Without "*" sshd calls it locked.
    try:
        with running(folder / "root", has_books=True) as engine:
            (engine.work / "of-user").mkdir(parents=True)
            shutil.chown(engine.work / "of-user", name, name)
            engine.ask("sacctmgr", "-i", "add", "account", "guests")
            engine.ask("sacctmgr", "-i", "add", "user", name, "account=guests,lab", "defaultaccount=guests")
            options = [f"SetEnv SLURM_CONF={engine.conf}", f"AllowUsers {name}"]
            server = sshd.Sshd(
                folder / "sshd", host_keys=[keys / "host"], authorized_keys=[made.client_public], options=options
            )
            try:
                lines = {"host": "127.0.0.1", "user": name, "identity": keys / "client"}
                table = "".join(f'{key} = "{value}"\n' for key, value in lines.items())
                table += f'port = {server.port}\nworkdir = "{engine.work}/of-user"\npython = "/usr/bin/python3"\n'
                yield User(name, engine, f"[slurm.lab]\n{table}")
            finally:
                server.close()
    finally:
        subprocess.run(["userdel", name], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def gpurun(home: Home, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPURUN_HOME": str(home.root)}
    argv = [sys.executable, "-m", "gpurun", *words]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.fixture
def home(user: User, tmp_path: Path) -> Home:
    made = Home(tmp_path / "home").prepare()
    made.config.write_text(user.table)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "t.sh").write_text("id -un >who.txt\n")
    return made


RUN = ("run", "--provider", "slurm", "--gpu", "cpu", "--accept-cpu", "--yes", "--name", "user-1")


def test_a_users_job_has_a_receipt_that_agrees_with_accounting(user: User, home: Home, tmp_path: Path) -> None:
    ran = gpurun(home, *RUN, "--partition", "shut", "--account", "lab", "--", "sh", "t.sh", cwd=tmp_path / "lab")
    assert ran.returncode == ExitCode.DONE, ran.stderr
    folder = home.run("user-1")
    assert (folder.artifacts / "outputs" / "who.txt").read_text().strip() == user.name
    number, billable_s = paid(folder)
    of_job = ("-o", "User,Account,Partition", "-j", number)
    assert user.engine.ask("sacct", "-X", "-n", "-P", *of_job).stdout.strip() == f"{user.name}|lab|shut"
    state, elapsed_s = booked(user.engine, number)
    assert (state, billable_s) == ("COMPLETED", pytest.approx(elapsed_s, abs=CLOSE_S))
    assert list((user.engine.work / "of-user").iterdir()) == []
    assert [row.problems for row in audit(home).rows] == [()]


def test_an_account_that_its_partition_refuses_is_reported_so(user: User, home: Home, tmp_path: Path) -> None:
    ran = gpurun(home, *RUN, "--partition", "shut", "--json", "--", "sh", "t.sh", cwd=tmp_path / "lab")
    (error,) = json.loads(ran.stdout.splitlines()[-1])["errors"]
    assert (ran.returncode, error["code"]) == (ExitCode.NO_OFFER, "slurm.not_admitted"), error
    assert "account = " in error["hint"]
    assert list((user.engine.work / "of-user").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--account", "physics"), "account = "),
        (("--qos", "gold"), "qos = "),
        (("--partition", "closed"), "--partition"),
    ],
)
def test_what_a_user_may_not_have_is_refused_with_a_hint(
    user: User, home: Home, tmp_path: Path, words: tuple[str, ...], hint: str
) -> None:
    before = user.engine.ask("sacct", "-X", "-n", "-a", "-o", "JobID").stdout
    ran = gpurun(home, *RUN, *words, "--json", "--", "sh", "t.sh", cwd=tmp_path / "lab")
    envelope = json.loads(ran.stdout)
    assert ran.returncode == ExitCode.NO_OFFER, envelope
    assert hint in envelope["errors"][0]["hint"]
    assert user.engine.ask("sacct", "-X", "-n", "-a", "-o", "JobID").stdout == before


def test_a_workdir_of_another_user_is_refused_first(user: User, home: Home, tmp_path: Path) -> None:
    home.config.write_text(user.table.replace("/of-user", ""))
    ran = gpurun(home, *RUN, "--json", "--", "sh", "t.sh", cwd=tmp_path / "lab")
    assert json.loads(ran.stdout)["errors"][0]["code"] == "slurm.workdir"

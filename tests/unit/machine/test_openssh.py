"""Tests of the user's own ssh as the way to a box: which settings of an entry in ~/.ssh/config apply.

The tests run the system's `ssh`; a wrapper names its configuration file, because ssh would otherwise take the
account's.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Place

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.cluster import Cluster
from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.core.journal_events import Incident
from gpurun.core.journal_records import all_typed
from gpurun.core.known_hosts import find_host_key, remember_host
from gpurun.core.paths import Home, RunFolder
from gpurun.core.run_plan import Box, Request
from gpurun.ledger.journal import read_journal
from gpurun.planning import own_box
from gpurun.remote.interface import MachineLost
from gpurun.remote.key_pairs import fingerprint, make_keys
from gpurun.remote.ssh import openssh
from gpurun.remote.ssh.openssh import Master, OpensshMachine
from gpurun.view.event_text import HEARD, SILENT
from tests.command_line import gpurun
from tests.emulators import sshd
from tests.emulators.slurm import ScriptedSlurm
from tests.refusals import lacking, refusal

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())
SSH = str(shutil.which("ssh"))


@pytest.fixture
def masters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Master]]:
    """Yield a list of all masters that the test opens, and close them at its end."""
    made, init = list[Master](), Master.__init__

    def noted(self: Master, *given: object, **named: object) -> None:
        init(self, *given, **named)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Master, "__init__", noted)
    yield made
    for master in made:
        master.close()


@pytest.fixture
def entry(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masters: list[Master]) -> Callable[..., None]:
    """Write the entry `lab` to an ssh config; return a function that writes it again with further `lines`."""
    config = tmp_path / "ssh_config"
    (wrapper := tmp_path / "bin" / "ssh").parent.mkdir()
    # If gpurun passes its own -F, ssh uses that one, because the last one counts.
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nexec {SSH} -F {config} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")

    def write(*lines: str, port: int = place.server.port, key: Path = place.client) -> None:
        usual = [f"HostName 127.0.0.1\nPort {port}\nUser {place.server.user}\nIdentityFile {key}\nIdentitiesOnly yes"]
        config.write_text("\n".join(["Host lab", *usual, *lines]) + "\n")

    write()
    return write


def settled(own_home: Path, **more: str) -> tuple[Box, list[str]]:
    request = Request(recipe="mini-gpt", host="lab", python=sys.executable, **more)  # type: ignore[arg-type]
    box, _, notes = own_box.reach_box(request, own_box.login_of("lab"), Home(own_home).prepare(), SystemClock())
    return box, notes


def machine(own_home: Path, folder: Path, **more: str) -> OpensshMachine:
    box, _ = settled(own_home, **more)
    way = own_box.make_box_machine(box, str(folder), SystemClock())
    assert isinstance(way, OpensshMachine)
    return way


# Calls over the user's ssh --------------------------------------------------------------------------------------------


def test_an_entry_is_resolved_reached_and_told(place: Place, entry: Callable[..., None], own_home: Path) -> None:
    box, lines = settled(own_home)
    assert (box.target, box.entry) == (f"{place.server.user}@127.0.0.1:{place.server.port}", "lab")
    assert fingerprint(box.host_key) == fingerprint(place.keys.host_public)
    assert lacking(lines[0], "lab", "~/.ssh/config") == []
    assert "first time" in lines[1]
    assert "first time" not in settled(own_home)[1][1]


def test_programs_are_fed_drained_and_ended_over_one_connection(
    place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path
) -> None:
    way = machine(own_home, tmp_path / "box")
    before = place.server.connections
    content = os.urandom(3 << 20)
    assert way.call(["cat"], stdin=[content[: 1 << 20], content[1 << 20 :]], timeout_s=30).stdout == content
    way.put("notes/deep.txt", b"two\nlines")
    assert (tmp_path / "box" / "notes" / "deep.txt").read_bytes() == b"two\nlines"
    came = bytearray()
    way.call(["cat", "notes/deep.txt"], sink=came.extend, timeout_s=10)
    assert bytes(came) == b"two\nlines"
    failed = way.call(["sh", "-c", "echo wrong >&2; exit 255"], timeout_s=10)
    assert (failed.exit_code, failed.stderr) == (255, b"wrong\n"), "ssh's own word for a connection that was lost"
    began = time.monotonic()
    with refusal(MachineLost, "machine.lost", "'sleep 60'", "1 s"):
        way.call(["sh", "-c", "sleep 60"], timeout_s=1)
    assert time.monotonic() - began < 10
    lanes = [way.lane() for _ in range(4)]
    threads = [threading.Thread(target=lane.call, args=(["true"],), kwargs={"timeout_s": 20}) for lane in lanes]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert way.answers(10)
    assert place.server.connections == before, "the master that the question had opened carries all of it"


def test_an_ended_master_is_reopened_where_a_key_is_enough(
    place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path, masters: list[Master]
) -> None:
    way = machine(own_home, tmp_path / "box")
    masters[-1].close()
    assert way.call(["echo", "again"], timeout_s=30).stdout == b"again\n"


def test_a_box_behind_a_proxy_is_reached_by_its_command(
    place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path
) -> None:
    relay = f"{sys.executable} -c 'import socket, sys, threading; {RELAY}' %h {place.server.port}"
    entry(f"ProxyCommand {relay}", port=1)
    way = machine(own_home, tmp_path / "box")
    assert way.call(["echo", "through"], timeout_s=30).stdout == b"through\n"
    assert find_host_key(Home(own_home), "127.0.0.1 by lab", 1) is not None, "the same address elsewhere is another box"


RELAY = (
    "wire = socket.create_connection((sys.argv[1], int(sys.argv[2]))); out = sys.stdout.buffer; "
    'threading.Thread(target=lambda: [wire.sendall(b) for b in iter(lambda: sys.stdin.buffer.raw.read(65536), b"")], '
    'daemon=True).start(); [(out.write(b), out.flush()) for b in iter(lambda: wire.recv(65536), b"")]'
)


def test_a_jump_host_of_an_entry_is_reached_by_its_own_entry(
    place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path
) -> None:
    inner = place.serve()
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{place.server.port} {' '.join(place.keys.host_public.split()[:2])}\n")
    gate = [
        "Host gate", "HostName 127.0.0.1", f"Port {place.server.port}", f"User {place.server.user}",
        f"IdentityFile {place.client}", "IdentitiesOnly yes", f"UserKnownHostsFile {known}",
    ]  # fmt: skip
    entry("ProxyJump gate", *gate, port=inner.port)
    assert machine(own_home, tmp_path / "box").call(["echo", "over"], timeout_s=30).stdout == b"over\n"
    assert "direct-tcpip" in place.server.log


# Settings that do not apply -------------------------------------------------------------------------------------------


def test_an_entry_gives_only_name_port_user_proxy_and_key(
    place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = place.serve("AcceptEnv MY_TOKEN LANG", "PermitUserEnvironment yes")
    ran = tmp_path / "ran-here"
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    entry(
        "ForwardAgent yes", "ForwardX11 yes", "SendEnv MY_TOKEN", "SetEnv MY_TOKEN=hunter3", "RequestTTY force",
        "PermitLocalCommand yes", f"LocalCommand touch {ran}", f"RemoteCommand touch {tmp_path}/ran-there; cat",
        f"LocalForward {tmp_path}/forward 127.0.0.1:{server.port}", "ExitOnForwardFailure no",
        f"ControlPath {tmp_path}/theirs", "UserKnownHostsFile /dev/null", "StrictHostKeyChecking no", port=server.port,
    )  # fmt: skip
    with sshd.key_agent(tmp_path, place.client) as agent:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
        way = machine(own_home, tmp_path / "box")
        script = 'test -t 0 && echo tty; echo "agent=$SSH_AUTH_SOCK token=$MY_TOKEN display=$DISPLAY"'
        assert way.call(["sh", "-c", script], timeout_s=20).stdout == b"agent= token= display=\n"
    left = [name for name in ("ran-here", "ran-there", "forward", "theirs") if (tmp_path / name).exists()]
    assert left == []
    assert "auth-agent" not in server.log
    assert "tcpip-forward" not in server.log


def test_a_host_key_other_than_the_known_is_refused_before_login(
    place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other")
    remember_host(Home(own_home).prepare(), "127.0.0.1", place.server.port, other.host_public)
    with refusal(SetupError, "ssh.host_key_changed"):
        settled(own_home)
    with refusal(GpurunError, "ssh.host_key_mismatch"):
        settled(own_home, host_key=fingerprint(other.host_public))
    host_key = " ".join(other.host_public.split()[:2])
    way = OpensshMachine("lab", identity="", host_key=host_key, folder=str(tmp_path / "box"), clock=SystemClock())
    with refusal(MachineLost, "ssh.host_key_mismatch"):
        way.call(["touch", "was-here"], timeout_s=20)
    assert "Accepted publickey" not in place.server.log
    assert not (tmp_path / "box").exists()


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=touch ran", "-oProxyCommand=touch@box", "--", "-Fnone", "lab; touch ran", "$(touch ran)", "a/b"],
)
def test_a_name_that_reads_as_an_option_or_command_is_refused(
    name: str, entry: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        own_box.login_of(name)
    with pytest.raises(UsageError):
        openssh.read_entry(name)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "asked").exists(), "no ssh was started for it"


def test_a_jump_that_ssh_would_take_for_an_option_is_refused(entry: Callable[..., None]) -> None:
    entry("ProxyJump x,-oProxyCommand=touch")
    with pytest.raises(GpurunError):
        own_box.login_of("lab")


def test_the_socket_lies_in_a_folder_that_is_the_users_alone(
    entry: Callable[..., None], own_home: Path, tmp_path: Path, masters: list[Master]
) -> None:
    machine(own_home, tmp_path / "box")
    socket = masters[-1]._socket
    assert stat.S_ISSOCK(socket.stat().st_mode)
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert len(str(socket)) + len(".0123456789abcdef") < 104, "a Mac's longest, and what ssh adds while it makes it"
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    with refusal(SetupError, "ssh.folder"):
        openssh._make_private_folder(shared)


# Messages -------------------------------------------------------------------------------------------------------------


def test_a_missing_entry_and_one_that_leads_nowhere_are_named(entry: Callable[..., None], own_home: Path) -> None:
    with pytest.raises(UsageError) as refused:
        own_box.login_of("lba")
    assert "~/.ssh/config" in refused.value.hint
    entry(port=1)
    with refusal(SetupError, "host.unreachable", "Connection refused") as lost:
        settled(own_home)
    assert lost.value.exit_code == 4


def test_a_login_beyond_a_key_waits_for_a_person_and_says_so(
    place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path
) -> None:
    """A supervisor has no terminal for a password prompt: its error must name `gpurun resume`."""
    server = place.serve("AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    entry(port=server.port)
    host_key = " ".join(place.keys.host_public.split()[:2])
    way = OpensshMachine("lab", identity="", host_key=host_key, folder=str(tmp_path / "box"), clock=SystemClock())
    with refusal(MachineLost, "ssh.asks") as lost:
        way.call(["true"], timeout_s=20)
    assert (lost.value.code, "gpurun resume" in lost.value.hint) == ("ssh.asks", True)


def test_a_plan_names_the_entry_and_takes_it(
    place: Place, entry: Callable[..., None], own_home: Path, masters: list[Master]
) -> None:
    done = gpurun(
        "plan",
        "mini-gpt",
        "--provider",
        "ssh",
        "--gpu",
        "cpu",
        "--host",
        "lab",
        "--set",
        "data.limit_mb=1",
        "--python",
        sys.executable,
        "--no-input",
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    assert "entry lab" in said
    refused = gpurun(
        "plan", "mini-gpt", "--provider", "ssh", "--gpu", "cpu", "--host", "lab", "--jump", "a@b", "--no-input"
    )
    assert refused.returncode == 2


def test_a_clusters_login_node_is_reached_by_an_entry(
    place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path, masters: list[Master]
) -> None:
    cluster = Cluster(name="centre", host="lab", workdir=str(tmp_path / "work"), transport="openssh")
    login = own_box.login_to(cluster, Home(own_home).prepare(), SystemClock())
    assert login.run(["echo", "sinfo"]).stdout == "sinfo\n"
    nowhere = replace(cluster, host="nowhere")
    with refusal(UsageError, "config.slurm", "no entry nowhere", "[slurm.centre]"):
        own_box.login_to(nowhere, Home(own_home), SystemClock()).run(["true"])


# A login that asks a person -------------------------------------------------------------------------------------------

PAM = """
auth required pam_exec.so quiet expose_authtok {folder}/check
auth optional pam_permit.so
account required pam_permit.so
session required pam_permit.so
"""


@pytest.fixture
def asking(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., sshd.Sshd]:
    """Return a function that starts a real sshd with a PAM prompt. The PAM rules exist only in a mount namespace."""
    (check := tmp_path / "check").write_text('#!/bin/sh\nread -r word; [ "$word" = opensesame ]\n')
    (tmp_path / "pam").write_text(PAM.format(folder=tmp_path))
    rules = f"mount --bind {tmp_path}/pam /etc/pam.d/sshd"
    (daemon := tmp_path / "sshd").write_text(f'#!/bin/sh\n{rules} && exec {sshd.SSHD} "$@"\n')
    (apart := tmp_path / "sshd-apart").write_text(f'#!/bin/sh\nexec unshare -m {daemon} "$@"\n')
    for program in (check, daemon, apart):
        program.chmod(0o755)
    monkeypatch.setattr(sshd, "SSHD", str(apart))
    usual = ("UsePAM yes", "KbdInteractiveAuthentication yes", "PermitRootLogin yes")
    return lambda *options: place.serve(*options, *usual)


def typed(word: str, *argv: str) -> tuple[int, str]:
    """Run a verb in a terminal and type `word` at each password prompt; return the exit code and the output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "gpurun", *argv])
    drawn, seen, end = b"", 0, time.monotonic() + 90
    while time.monotonic() < end:
        try:
            drawn += os.read(terminal, 4096)
        except OSError:
            break
        if drawn[seen:].rstrip().endswith(b"Password:"):
            seen = len(drawn)
            os.write(terminal, word.encode() + b"\n")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), " ".join(drawn.decode("utf-8", "replace").split())


@pytest.mark.slow
def test_a_person_answers_once_and_others_use_that_connection(
    asking: Callable[..., sshd.Sshd], place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path,
    masters: list[Master],
) -> None:  # fmt: skip
    server = asking("AuthenticationMethods publickey,keyboard-interactive")
    entry(port=server.port)
    plan = [
        "plan",
        "mini-gpt",
        "--provider",
        "ssh",
        "--gpu",
        "cpu",
        "--host",
        "lab",
        "--set",
        "data.limit_mb=1",
        "--python",
        sys.executable,
    ]
    host_key = " ".join(place.keys.host_public.split()[:2])
    way = OpensshMachine("lab", identity="", host_key=host_key, folder=str(tmp_path / "box"), clock=SystemClock())
    code, drawn = typed("wrong", *plan)
    assert (code, "Permission denied" in drawn) == (4, True), drawn
    with pytest.raises(MachineLost) as refused:
        way.call(["true"], timeout_s=20)
    assert refused.value.code == "ssh.asks"
    code, drawn = typed("opensesame", *plan)
    assert (code, drawn.count("Password:")) == (0, 1), drawn
    assert f"({place.server.user}@lab) Password:" in drawn
    logins = server.log.count("Accepted keyboard-interactive")
    assert way.call(["echo", "on"], timeout_s=20).stdout == b"on\n"
    assert server.log.count("Accepted keyboard-interactive") == logins == 1


@pytest.mark.slow
def test_a_boxs_password_is_asked_for_once_and_installs_the_key(
    asking: Callable[..., sshd.Sshd], place: Place, own_home: Path, tmp_path: Path
) -> None:
    (home := tmp_path / "home").mkdir()
    authorized = home / ".ssh" / "authorized_keys"
    server = asking(
        f"AuthorizedKeysFile {authorized}", f'ForceCommand export HOME={home} && cd && eval "$SSH_ORIGINAL_COMMAND"'
    )
    login = f"{server.user}@127.0.0.1:{server.port}"
    plan = [
        "plan",
        "mini-gpt",
        "--provider",
        "ssh",
        "--gpu",
        "cpu",
        "--host",
        login,
        "--set",
        "data.limit_mb=1",
        "--python",
        sys.executable,
    ]
    assert f"gpurun auth ssh {login}" in gpurun(*plan, "--no-input").stderr, "where its key has just been made"
    assert f"gpurun auth ssh {login}" in gpurun(*plan, "--no-input").stderr, "and where that is not let in"
    code, drawn = typed("wrong", "auth", "ssh", login)
    assert (code, authorized.exists()) == (4, False), drawn
    authorized.parent.mkdir(exist_ok=True)
    authorized.write_text("ssh-ed25519 AAAA somebody else's, without an end of line")
    for _ in range(2):
        code, drawn = typed("opensesame", "auth", "ssh", login)
        assert (code, "gpurun's key" in drawn) == (0, True), drawn
    lines = authorized.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["ssh-ed25519", "ssh-ed25519"], (
        "the other's is whole, ours stands once"
    )
    assert gpurun(*plan, "--no-input").returncode == 0
    assert "opensesame" not in drawn
    assert not [file for file in own_home.rglob("*") if file.is_file() and b"opensesame" in file.read_bytes()]


def test_a_password_is_asked_at_a_terminal_and_for_no_entry(entry: Callable[..., None]) -> None:
    refused = gpurun("auth", "ssh", "you@127.0.0.1:1")
    assert (refused.returncode, "input.needed" in refused.stderr) == (2, True)
    named = gpurun("auth", "ssh", "lab")
    assert (named.returncode, "ssh-copy-id lab" in named.stderr) == (2, True)


LOOP = """
import os, time
for step in range(1, 10_000):
    print(f"step {step}", flush=True)
    open("last.txt", "w").write(str(step))
    if os.path.exists(os.environ["ENOUGH"]):
        break
    time.sleep(0.2)
"""


def incidents(folder: RunFolder) -> list[tuple[str, str]]:
    """Return the journal's incidents about a machine that fell silent or answered again."""
    found = all_typed(read_journal(folder.journal).records, Incident)
    return [(incident.code, incident.message) for incident in found if incident.code in (SILENT, HEARD)]


def until(is_so: Callable[[], bool]) -> None:
    for _ in ticks(SystemClock(), 0.2, 90):
        if is_so():
            return
    raise AssertionError(gpurun("ps", "--all").stdout + gpurun("logs", "fox-41").stdout)


def lose_master(place: Place, folder: RunFolder) -> str:
    """Close the master connection of a run that trains; return the journal's message about that."""
    until(lambda: folder.log.exists() and "step 3" in folder.log.read_text())
    master = Master("lab", "", " ".join(place.keys.host_public.split()[:2]), asks=False)
    assert master.is_open
    master.close()
    until(lambda: bool(incidents(folder)))
    ((silent, message),) = incidents(folder)
    assert silent == SILENT
    return message


def assert_trained_without_restart(folder: RunFolder) -> None:
    """Assert that the training continued without a restart: its log and its file have every step once."""
    steps = [line for line in folder.log.read_text().splitlines() if line.startswith("step ")]
    assert steps == [f"step {number}" for number in range(1, len(steps) + 1)]
    assert (folder.artifacts / "outputs" / "last.txt").read_text() == str(len(steps))
    assert gpurun("audit").returncode == 0


@pytest.mark.slow
def test_a_run_outlives_its_master_and_goes_on_over_a_new_one(
    asking: Callable[..., sshd.Sshd], place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path,
    masters: list[Master], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server = asking("AuthenticationMethods publickey,keyboard-interactive")
    entry(port=server.port)
    (lab := tmp_path / "lab").mkdir()
    (lab / "t.py").write_text(LOOP)
    monkeypatch.chdir(lab)
    box = ("--provider", "ssh", "--host", "lab", "--gpu", "cpu", "--accept-cpu", "--python", sys.executable)
    more = ("--yes", "--detach", "--name", "fox-41", "--env", f"ENOUGH={tmp_path / 'enough'}", "--outputs", "*.txt")
    code, drawn = typed("opensesame", "run", *box, *more, "--", "python", "t.py")
    assert (code, drawn.count("Password:")) == (0, 1), drawn
    folder = Home(own_home).run("fox-41")

    message = lose_master(place, folder)
    assert lacking(message, "login", "`gpurun resume`", "terminal") == []
    before = len(folder.log.read_text())
    (tmp_path / "enough").touch()
    code, drawn = typed("opensesame", "resume", "fox-41")
    assert (code, drawn.count("Password:")) == (0, 1), drawn
    assert len(folder.log.read_text()) > before
    assert [code for code, _ in incidents(folder)] == [SILENT, HEARD]
    assert_trained_without_restart(folder)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[ScriptedSlurm]:
    """Yield a cluster whose programs are not on this computer's PATH."""
    made = ScriptedSlurm(tmp_path / "cluster")
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.parametrize("is_left", [False, True], ids=["it waits", "its supervisor has died too"])
def test_a_resume_asks_once_and_keeps_the_same_cluster_job(
    asking: Callable[..., sshd.Sshd], place: Place, entry: Callable[..., None], own_home: Path, tmp_path: Path,
    masters: list[Master], slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, is_left: bool,
) -> None:  # fmt: skip
    there = f'ForceCommand export PATH={slurm.bin}:$PATH; eval "$SSH_ORIGINAL_COMMAND"'
    server = asking("AuthenticationMethods publickey,keyboard-interactive", there)
    entry(port=server.port)
    home = Home(own_home).prepare()
    table = slurm.table.replace('host = "local"', 'host = "lab"\ntransport = "openssh"')
    home.config.write_text(table)
    (lab := tmp_path / "lab").mkdir()
    (lab / "t.py").write_text(LOOP)
    monkeypatch.chdir(lab)
    more = ("--yes", "--detach", "--name", "fox-41", "--env", f"ENOUGH={tmp_path / 'enough'}", "--outputs", "*.txt")
    words = ("run", "--provider", "slurm", "--gpu", "cpu", "--accept-cpu", *more, "--", "python", "t.py")
    code, drawn = typed("opensesame", *words)
    assert (code, drawn.count("Password:")) == (0, 1), drawn
    folder = home.run("fox-41")

    message = lose_master(place, folder)
    assert lacking(message, "`gpurun resume`", "terminal") == []
    if is_left:
        (row,) = json.loads(gpurun("ps", "--json").stdout)["data"]["runs"]
        os.kill(int(re.findall(r"\d+", row["owner"])[0]), signal.SIGKILL)
    (tmp_path / "enough").touch()
    code, drawn = typed("opensesame", "resume", "fox-41")
    assert (code, drawn.count("Password:")) == (0, 1), drawn
    assert (slurm.jobs, (slurm.state / "jobs" / "1" / "word").read_text()) == (["1"], "COMPLETED")
    assert list(slurm.work.iterdir()) == []
    assert_trained_without_restart(folder)

"""Tests that a machine behind a real sshd runs programs like a local one, whatever the network does."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import paramiko
import pytest
from conftest import Place
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import rsa

from gpurun.core.clock import SystemClock, VirtualClock
from gpurun.core.errors import ExitCode, UsageError
from gpurun.remote.archive import Pack, survey
from gpurun.remote.client import FarSide
from gpurun.remote.interface import MOST_REPLY_BYTES, FarRefusal, MachineLost
from gpurun.remote.key_pairs import fingerprint, make_keys
from gpurun.remote.ssh import HostKeyMismatch, connection, program, scan_host_key
from gpurun.remote.ssh import ssh_machine as machine
from gpurun.remote.ssh.program import put_argv
from tests.emulators import sshd
from tests.refusals import refusal

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())

PYTHON = [sys.executable, "-I", "-S", "-c"]


def until(true: Callable[[], Any], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.01)


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Start `call` on a thread; return the thread, and a list that gets the error that it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


# Programs


def test_a_program_runs_in_a_private_folder_and_gets_no_secret(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "canary-1")
    reply = place.machine().call(["sh", "-c", "pwd; ls -ld .; cat; echo words >&2; exit 3"], timeout_s=20)
    assert (reply.exit_code, reply.stderr) == (3, b"words\n")
    where, listed = reply.stdout.splitlines()
    assert where == str(place.folder).encode()
    assert listed.startswith(b"drwx------")
    assert "canary" not in place.server.log
    assert "env request" not in place.server.log.lower()
    assert "auth-agent-req" not in place.server.log


def test_a_program_without_room_on_a_connection_uses_another(place: Place) -> None:
    server = place.serve("MaxSessions 1")
    machine, (come, go) = place.machine(server.port), (place.home / "come", place.home / "go")
    waits = f"touch {come}; until [ -e {go} ]; do sleep 0.05; done; echo whole"
    replies: list[bytes] = []
    first, raised = in_background(lambda: replies.append(machine.call(["sh", "-c", waits], timeout_s=30).stdout))
    until(come.exists)
    for _ in range(3):
        assert machine.call(["cat"], stdin=iter([b"more"]), timeout_s=20).stdout == b"more"
    go.touch()
    first.join()
    assert (replies, raised, server.connections) == ([b"whole\n"], [], 2), "the second one is kept"
    machine.close()
    assert machine._beside is not None
    assert machine._beside._connection is None


def test_a_server_with_no_room_is_given_up_on_one_connection(place: Place) -> None:
    server = place.serve("MaxSessions 0")
    with refusal(MachineLost, "machine.lost", "Connect failed"):
        place.machine(server.port).call(["true"], timeout_s=20)
    assert server.connections == 1


def test_late_words_to_an_ended_program_end_no_connection(place: Place) -> None:
    machine = place.machine()
    machine.call(["true"], timeout_s=20)
    connection = machine._connection
    assert connection is not None
    channel = connection.channel()
    assert channel is not None
    end_of_input = paramiko.Message(b"\x60" + channel.remote_chanid.to_bytes(4, "big"))
    channel.exec_command("true")
    until(lambda: channel.closed)
    connection._transport._send_user_message(end_of_input)
    assert machine.call(["cat"], stdin=[b"more"], timeout_s=20).stdout == b"more", "its number is another program's now"
    assert machine._connection is connection


def test_a_relative_folder_is_below_the_logins_home(place: Place) -> None:
    home = Path(os.path.expanduser(f"~{place.server.user}"))
    folder = os.path.relpath(place.home / "far" / "-below", home)
    assert not folder.startswith("/")
    place.machine(folder=folder).put("x", b"1")
    assert (place.home / "far" / "-below" / "x").read_bytes() == b"1"


def test_arguments_arrive_as_they_are(place: Place) -> None:
    odd = [
        "",
        " ",
        "'",
        '"',
        "$HOME",
        "`id`",
        "$(id)",
        "\\",
        "\\n",
        "a\nb",
        ";",
        "&& exit",
        "*",
        "~",
        "!",
        "-n",
        "é\x1b[2J",
    ]
    reply = place.machine().call([*PYTHON, "import sys; print(ascii(sys.argv[1:]))", *odd], timeout_s=20)
    assert reply.stdout.decode().strip() == ascii(odd)


def test_all_calls_share_one_connection(place: Place) -> None:
    far = place.machine()
    assert place.server.connections == 0, "nothing is connected before it is needed"
    for number in range(5):
        assert far.call(["echo", str(number)], timeout_s=20).stdout == f"{number}\n".encode()
    assert place.server.connections == 1


def test_big_input_and_output_on_both_pipes_do_not_deadlock(place: Place) -> None:
    script = """
import sys
for block in iter(lambda: sys.stdin.buffer.read(65536), b''):
    sys.stdout.buffer.write(block)
    sys.stderr.buffer.write(block)
"""
    dice = random.Random(7)
    chunks = [dice.randbytes(dice.randrange(1, 2 << 20)) for _ in range(8)]
    reply = place.machine().call([*PYTHON, script], stdin=iter(chunks), timeout_s=60)
    is_whole = reply.stdout == reply.stderr == b"".join(chunks)
    assert is_whole


class AllAtOnce:
    """A channel that has received everything before the reader reads it."""

    def __init__(self, said: bytes) -> None:
        self.said, self.exit_status, self.eof_received, self.status_event = said, 0, True, threading.Event()
        self.status_event.set()
        self.where = "far:22"

    def channel(self, window_bytes: int = 0) -> AllAtOnce:
        return self

    def recv(self, most_bytes: int) -> bytes:
        block, self.said = self.said[:most_bytes], self.said[most_bytes:]
        return block

    def recv_stderr(self, most_bytes: int) -> bytes:
        return b""

    def exec_command(self, line: str) -> None: ...

    def shutdown_write(self) -> None: ...


@pytest.mark.parametrize("noise", [b"", b"noise", b"x" * 100_000 + b"mark\nmark but none\n"])
def test_a_large_answer_may_come_together_with_its_mark(noise: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_new_mark", lambda: "mark")
    answer = random.Random(5).randbytes(5 << 20)
    reply = program.RemoteProgram(AllAtOnce(noise + b"mark 77\n" + answer), "folder", ["true"]).wait(lambda: None)  # type: ignore[arg-type]
    assert reply is not None
    is_whole = reply.stdout == answer  # pytest would take minutes to show a difference
    assert is_whole


@pytest.mark.parametrize("output", ["recv", "recv_stderr"])
def test_a_line_cut_while_more_may_come_is_lost_at_once(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    far = AllAtOnce(b"mark 77\nhalf an answer")

    def cut(most_bytes: int) -> bytes:
        raise EOFError

    monkeypatch.setattr(far, output, cut)
    monkeypatch.setattr(program, "_new_mark", lambda: "mark")
    with refusal(MachineLost, "machine.lost", "EOFError"):
        program.RemoteProgram(far, "folder", ["true"]).wait(lambda: pytest.fail("it waits for what cannot come"))  # type: ignore[arg-type]


def test_an_answer_may_be_as_large_as_it_may_be(place: Place) -> None:
    reply = place.machine().call(["head", "-c", str(MOST_REPLY_BYTES), "/dev/zero"], timeout_s=60)
    is_whole = reply.stdout == bytes(MOST_REPLY_BYTES)
    assert is_whole


def test_a_program_that_does_not_read_to_the_end_is_no_error(place: Place) -> None:
    reply = place.machine().call([*PYTHON, "print('enough')"], stdin=(bytes(1 << 20) for _ in range(500)), timeout_s=60)
    assert (reply.exit_code, reply.stdout) == (0, b"enough\n")


def test_an_error_of_the_source_ends_the_program_and_is_raised(place: Place) -> None:
    far = place.machine()

    def source() -> Iterator[bytes]:
        yield b"half"
        raise UsageError("pack.changed", "it changed", hint="again")

    for argv in (
        [*PYTHON, "import sys; sys.stdin.read(); open('ended', 'w')"],
        ["sh", "-c", "(cat; touch ended) | cat"],
    ):
        with refusal(UsageError, "pack.changed", "it changed"):
            far.call(argv, stdin=source(), timeout_s=20)
    assert far.call(["true"], timeout_s=20).exit_code == 0
    assert not (place.folder / "ended").exists(), "half an input must never look like the whole of it"
    assert place.server.connections == 1, "the machine is not lost by that"


def test_a_program_that_takes_too_long_dies_with_its_children(place: Place) -> None:
    far = place.machine()
    far.call(["true"], timeout_s=20)
    started = time.monotonic()
    with refusal(MachineLost, "machine.lost", "sleep 60", "1 s"):
        far.call(["sh", "-c", "(sleep 60; touch late) & sleep 60"], timeout_s=1)
    assert time.monotonic() - started < 10
    until(lambda: not [link for link in Path("/proc").glob("[0-9]*/cwd") if _is_in(link, place.folder)])
    assert far.call(["echo", "on"], timeout_s=20).stdout == b"on\n"
    assert place.server.connections == 2, "what has failed once is not trusted again"


def _is_in(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link) == str(folder)
    except OSError:
        return False


def test_ctrl_c_ends_the_program_too(place: Place) -> None:
    far = place.machine()

    def source() -> Iterator[bytes]:
        yield b"half"
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(3)

    with pytest.raises(KeyboardInterrupt):
        far.call(["sh", "-c", "cat; touch ended"], stdin=source(), timeout_s=60)
    assert far.call(["ls"], timeout_s=20).stdout == b""


def test_a_program_that_a_signal_ends_has_its_exit_code(place: Place) -> None:
    reply = place.machine().call(
        [*PYTHON, "import os; print('so far', flush=True); os.kill(os.getpid(), 9)"], timeout_s=20
    )
    assert (reply.exit_code, reply.stdout) == (128 + 9, b"so far\n")


def test_an_answer_without_end_is_cut_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MOST_REPLY_BYTES", 1 << 20)
    far = place.machine()
    for shell in ("yes", "yes >&2"):
        with refusal(MachineLost, "machine.lost", "1048576 bytes"):
            far.call(["sh", "-c", shell], timeout_s=60)
    assert far.call(["head", "-c", str(1 << 20), "/dev/zero"], timeout_s=60).stdout == bytes(1 << 20)


def test_a_program_that_is_not_there_has_the_shells_exit_code(place: Place) -> None:
    far = place.machine()
    far.put("not-to-run", b"#!/bin/sh\n")
    assert far.call(["no-such-program"], timeout_s=20).exit_code == 127
    assert far.call(["./not-to-run"], timeout_s=20).exit_code == 126
    with pytest.raises(FarRefusal) as refused:
        FarSide(far, python="python3.99").install_agent()
    assert refused.value.reason == "no_python"


@pytest.mark.parametrize(
    "noise", ["echo hello; echo there >&2", "printf 'no line end'", "yes | head -c 300000", "read x"]
)
def test_what_a_login_prints_is_not_the_programs_output(place: Place, noise: str) -> None:
    """A login may print text, as from a .bashrc: that text must not be mixed with a program's output."""
    server = place.serve(login=f'command="{noise}; eval \\"$SSH_ORIGINAL_COMMAND\\""')
    far = place.machine(server.port)
    if noise == "read x":  # This login reads input, but the input belongs to the program.
        with refusal(MachineLost, "ssh.no_programs", "1 s"):
            far.call(["cat"], stdin=[b"to the program"], timeout_s=1)
        return
    assert far.call(["cat"], stdin=[b"to the program"], timeout_s=20).stdout == b"to the program"


def test_a_login_that_runs_nothing_is_told_in_its_own_words(place: Place) -> None:
    words = "printf 'This \\033[2Jaccount\\nis not available.'; exit 1"
    server = place.serve(login=f'command="{words}"')
    with refusal(MachineLost, "ssh.no_programs", "account is not available") as lost:
        place.machine(server.port).call(["true"], timeout_s=20)
    assert lost.value.what.isprintable()


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish", "tcsh", "ksh"])
def test_the_logins_shell_may_be_any(place: Place, shell: str) -> None:
    found = subprocess.run(["which", shell], capture_output=True, text=True).stdout.strip()
    if not found:
        pytest.skip(f"{shell} is not installed")
    server = place.serve(login=f'command="exec {found} -c \\"$SSH_ORIGINAL_COMMAND\\""')
    far = place.machine(server.port)
    far.put("a 'b' $c", b"1")
    assert far.call(["cat", "a 'b' $c"], timeout_s=20).stdout == b"1"


# The agent

TINY = Path(__file__).parents[2] / "emulators" / "tiny"


@pytest.mark.slow
def test_a_whole_run_goes_over_it(place: Place, tmp_path: Path) -> None:
    proxy = place.proxy()
    python = tmp_path / "tiny-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={TINY}:. exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    far = FarSide(place.machine(proxy.port), python=str(python))
    far.install_agent()
    assert far.hello().torch.found
    shards = random.Random(3).randbytes(2 << 20)
    recipe = json.dumps({"train": {"steps": 10_000}}).encode()
    pack = Pack(survey({"bundle/trainer": TINY / "trainer", "bundle/recipe.json": recipe, "data/x.bin": shards}))
    assert far.unpack(pack).manifest_sha256 == pack.manifest_sha256
    assert (place.folder / "data" / "x.bin").read_bytes() == shards
    paths = ["--recipe", "recipe.json", "--data", "../data", "--out", "../out"]
    walls = {"soft_stop_wall": time.time() + 60, "hard_stop_wall": time.time() + 90, "save_s": 5}
    walls |= {"soft_stop_s": 60, "hard_stop_s": 90}
    argv = [str(python), "-m", "trainer.train", *paths]
    job = {"v": 1, "run": "test-1", "argv": argv, "cwd": "bundle", "env": {}, **walls}
    try:
        assert not far.start(job).already
        proxy.cut()
        until(lambda: _without_loss(lambda: far.poll({"events.jsonl": (0, 1 << 20)}).chunks["events.jsonl"].data))
        assert far.start(job).already, "losing the connection has hurt no training"
        assert far.stop()
        until(lambda: far.poll({}).status.state == "exited")
        files = far.manifest(1 << 20).files
        assert files
        for file in files:
            far.fetch(file.name, file.bytes, file.sha256, tmp_path / "home")
            assert (tmp_path / "home" / file.name).read_bytes() == (place.folder / "out" / file.name).read_bytes()
    finally:
        far.farewell()
    assert not place.folder.exists() or not os.listdir(place.folder)


def _without_loss(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except MachineLost:
        return None


# Files


def test_put_replaces_whole_and_only_its_owner_reads_it(place: Place) -> None:
    far = place.machine()
    content = random.Random(1).randbytes(3 << 20)
    far.put("agent/job.json", content)
    far.put("agent/job.json", b"")
    assert (place.folder / "agent" / "job.json").read_bytes() == b""
    far.put("agent/job.json", content)
    assert (place.folder / "agent" / "job.json").read_bytes() == content
    assert (place.folder / "agent" / "job.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(place.folder / "agent") == ["job.json"]
    for name in ("-n", "a b/c'd", "$HOME", "*"):
        far.put(name, name.encode())
        assert (place.folder / name).read_bytes() == name.encode()
    (place.folder / "folder").mkdir()
    with refusal(FarRefusal, "far.os_error", "folder"):
        far.put("folder", b"x")


def test_half_a_file_never_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(b"the old one")
    for content in (b"", b"the new", b"the new one and more"):
        done = subprocess.run(put_argv("job.json", 11), input=content, cwd=tmp_path, capture_output=True)
        assert done.returncode != 0
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"job.json": b"the old one"}


def test_a_full_disk_is_told_as_such_and_leaves_the_old_file(place: Place) -> None:
    place.folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place.folder], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        far = place.machine()
        far.put("x", b"old")
        with pytest.raises(FarRefusal) as refused:
            far.put("x", bytes(1 << 20))
        assert refused.value.reason == "disk_full"
        assert {path.name: path.read_bytes() for path in place.folder.iterdir()} == {"x": b"old"}
    finally:
        subprocess.run(["umount", "-l", place.folder], check=True)


# Host keys


def other_key(folder: Path) -> str:
    return make_keys(folder).host_public


def rsa_host_key(path: Path) -> Path:
    made = rsa.generate_private_key(65537, 2048)
    path.write_bytes(made.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    path.chmod(0o600)
    return path


def test_another_host_key_is_a_hard_stop_and_nothing_is_sent(place: Place, tmp_path: Path) -> None:
    expected = other_key(tmp_path / "other")
    for host_key in (expected, fingerprint(expected)):
        far = place.machine(host_key=host_key)
        for _ in range(2):
            with pytest.raises(HostKeyMismatch) as mismatch:
                far.call(["touch", "sent"], timeout_s=20)
        assert mismatch.value.code == "ssh.host_key_mismatch"
        assert mismatch.value.exit_code == ExitCode.BUG
        assert mismatch.value.expected == fingerprint(expected)
        assert mismatch.value.got == fingerprint(place.keys.host_public)
    traces = ("userauth-request", "Entering interactive session", "Starting session", "input_session_request")
    assert not [trace for trace in traces if trace in place.server.log]
    assert not (place.folder / "sent").exists()
    place.machine().call(["true"], timeout_s=20)
    assert not [trace for trace in traces if trace not in place.server.log], "else the above would prove nothing"


def test_a_host_without_the_expected_key_type_is_another_host(place: Place, tmp_path: Path) -> None:
    server = place.serve(host_keys=(rsa_host_key(tmp_path / "rsa"),))
    with pytest.raises(HostKeyMismatch) as mismatch:
        place.machine(server.port).call(["true"], timeout_s=20)
    assert "ssh-ed25519" in mismatch.value.got
    assert "SHA256:" not in mismatch.value.got


def test_a_fingerprint_of_any_of_the_hosts_keys_is_enough(place: Place, tmp_path: Path) -> None:
    """A user may have pinned the RSA key of a host that also has an ed25519 key: that must be enough."""
    path = rsa_host_key(tmp_path / "rsa")
    public = form.load_ssh_private_key(path.read_bytes(), None).public_key()
    line = public.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()
    server = place.serve(host_keys=(place.home / "keys" / "host", path))
    for host_key in (fingerprint(line), line, fingerprint(place.keys.host_public), f"{place.keys.host_public}\n"):
        assert place.machine(server.port, host_key=host_key).call(["true"], timeout_s=20).exit_code == 0
    assert scan_host_key("127.0.0.1", server.port, SystemClock(), 20) == place.keys.host_public.rpartition(" ")[0]
    only = place.serve(host_keys=(path,))
    assert scan_host_key("127.0.0.1", only.port, SystemClock(), 20) == line


def test_a_scan_logs_nobody_in_and_says_why_it_fails(place: Place) -> None:
    seen = scan_host_key("127.0.0.1", place.server.port, SystemClock(), 20)
    assert fingerprint(seen) == fingerprint(place.keys.host_public)
    place.server.close()
    assert "userauth" not in place.server.log
    with refusal(MachineLost, "machine.lost", "refuses connections"):
        scan_host_key("127.0.0.1", place.server.port, SystemClock(), 20)


def test_only_the_key_that_was_named_is_shown(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        agent.settimeout(0)
        make_keys(tmp_path / "stranger")
        with refusal(MachineLost, "ssh.not_let_in", "Authentication failed"):
            place.machine(client_key=tmp_path / "stranger" / "client").call(["true"], timeout_s=20)
        with refusal(MachineLost, "ssh.not_let_in"):
            place.machine(client_key=None).call(["true"], timeout_s=20)
        with pytest.raises(BlockingIOError):
            agent.accept()
    requests = [line for line in place.server.log.splitlines() if "userauth-request for user" in line]
    assert [line.rpartition("method ")[2].split()[0] for line in requests] == ["publickey", "none"]


def test_a_host_key_that_is_none_is_refused(place: Place) -> None:
    with pytest.raises(UsageError):
        place.machine(host_key="none")


# The network


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "resolved: Name or service not known"),
        (TimeoutError(), r"no answer in \d+ s"),
        (OSError(113, "No route to host"), "reached: No route to host"),
        (ConnectionRefusedError(111, "x"), "refuses"),
    ],
)
def test_the_ways_of_not_being_reached_are_told_apart(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: OSError, words: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fails)
    with pytest.raises(MachineLost, match=words):
        place.machine().call(["true"], timeout_s=20)


def test_failed_connects_are_lost_at_once_and_space_out(place: Place) -> None:
    clock = VirtualClock()
    place.server.close()
    far = place.machine(clock=clock)
    at = []
    for _ in range(8):
        with pytest.raises(MachineLost, match="refuses"):
            far.call(["true"], timeout_s=60)
        at.append(clock.monotonic())
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert at[0] == 0
    assert gaps[0] < 1
    assert 7 <= gaps[-1] <= 15
    with refusal(MachineLost, "machine.lost", "in time"):
        far.call(["true"], timeout_s=1)
    # The earlier gaps are random, so their sum may be rounded up slightly.
    assert clock.monotonic() - at[-1] <= 1 + 1e-9


def test_a_waiter_for_a_connection_makes_none_when_all_are_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    came, connects, go_on, connect = list[str](), list[str](), threading.Event(), connection.connect

    class Noted:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            came.append(threading.current_thread().name)
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def slowly(*settings: Any) -> connection.ParamikoConnection:
        connects.append(threading.current_thread().name)
        assert go_on.wait(20)
        return connect(*settings)

    monkeypatch.setattr(connection, "connect", slowly)
    far = place.machine()
    far._connecting = Noted()  # type: ignore[assignment]
    calls = [in_background(lambda: far.call(["true"], timeout_s=20)) for _ in range(3)]
    until(lambda: connects and len(came) == 3)
    far.close()
    go_on.set()
    for thread, raised in calls:
        thread.join(20)
        assert [(type(error), "ended here" in str(error)) for error in raised] == [(MachineLost, True)]
    assert (len(connects), far._connection) == (1, None)
    assert far.call(["true"], timeout_s=20).exit_code == 0


def test_a_connection_cut_in_mid_call_is_lost_and_made_again(place: Place) -> None:
    proxy = place.proxy()
    far = place.machine(proxy.port)
    thread, raised = in_background(lambda: far.call(["sh", "-c", "touch begun; sleep 30"], timeout_s=60))
    until((place.folder / "begun").exists)
    proxy.cut()
    thread.join(10)
    assert isinstance(raised[0], MachineLost)
    assert "whole answer" in raised[0].what
    assert far.call(["echo", "again"], timeout_s=20).stdout == b"again\n"
    assert proxy.connections == 2


def test_a_cut_between_two_calls_costs_at_most_one_of_them(place: Place) -> None:
    proxy = place.proxy()
    far = place.machine(proxy.port)
    for _ in range(3):
        far.call(["true"], timeout_s=20)
        proxy.cut()
        try:
            far.call(["true"], timeout_s=20)
        except MachineLost:
            assert far.call(["true"], timeout_s=20).exit_code == 0


def test_an_answer_that_is_cut_is_never_taken_for_the_whole(place: Place) -> None:
    proxy = place.proxy()
    far = place.machine(proxy.port)
    script = "import sys, time; sys.stdout.write('x' * 999); sys.stdout.flush(); open('said', 'w'); time.sleep(30)"
    thread, raised = in_background(lambda: far.call([*PYTHON, script], timeout_s=60))
    until((place.folder / "said").exists)
    proxy.cut()
    thread.join(10)
    assert isinstance(raised[0], MachineLost)


@pytest.mark.parametrize("how", ["stall", "lose"])
@pytest.mark.parametrize("sends", [False, True])
def test_a_connection_that_falls_silent_is_dead_within_the_limit(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str, sends: bool
) -> None:
    monkeypatch.setattr(machine, "STALL_S", 1.0)
    proxy = place.proxy()
    far = place.machine(proxy.port)
    endless = (bytes(1 << 20) for _ in iter(int, 1))
    script = "import sys; open('begun', 'w'); [0 for _ in iter(lambda: sys.stdin.buffer.read(65536), b'')]; input()"
    thread, raised = in_background(
        lambda: far.call([*PYTHON, script] if sends else ["sh", "-c", "touch begun; sleep 60"],
                         stdin=endless if sends else None, timeout_s=600)
    )  # fmt: skip
    until((place.folder / "begun").exists)
    getattr(proxy, how)()
    stalled = time.monotonic()
    thread.join(15)
    assert isinstance(raised[0], MachineLost)
    assert "dead" in raised[0].what
    assert time.monotonic() - stalled < machine.KILL_S, "nobody is asked to kill anything over a dead connection"


@pytest.mark.slow
def test_a_stall_is_not_waited_out_when_the_time_is_over_before(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is stuck in a write cannot be ended, so the caller must not wait for it after its time limit."""
    monkeypatch.setattr(machine, "KILL_S", 0.5)
    proxy = place.proxy()
    far = place.machine(proxy.port)
    begun = threading.Event()

    def endless() -> Iterator[bytes]:
        for number in iter(int, 1):
            yield bytes((1 << 20) + number)
            begun.set()

    thread, raised = in_background(lambda: far.call(["sh", "-c", "cat > /dev/null"], stdin=endless(), timeout_s=3))
    assert begun.wait(20)
    proxy.stall()
    thread.join(10)
    assert isinstance(raised[0], MachineLost)
    assert " 3 s" in raised[0].what
    proxy.flow()
    assert far.call(["echo", "again"], timeout_s=20).stdout == b"again\n"


def test_a_program_that_is_silent_for_long_is_not_taken_for_dead(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STALL_S", 1.0)
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.2)
    reply = place.machine().call(["sh", "-c", "sleep 2.5; echo done"], timeout_s=20)
    assert reply.stdout == b"done\n"


def test_a_stalling_disk_here_is_not_taken_for_a_dead_connection(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STALL_S", 1.0)
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.2)
    far, came, others = place.machine(), bytearray(), []

    def take(block: bytes) -> None:
        if not came:
            others.append(in_background(lambda: far.call(["echo", "beside it"], timeout_s=20)))
            time.sleep(2.5)
        came.extend(block)

    far.call(["head", "-c", "3000000", "/dev/zero"], sink=take, timeout_s=20)
    assert bytes(came) == bytes(3_000_000)
    (thread, raised) = others[0]
    thread.join(15)
    assert raised == []


def test_many_connections_leave_no_thread_and_no_descriptor(place: Place) -> None:
    far = place.machine()
    strange = other_key(place.home / "other")

    def open_now() -> tuple[int, int]:
        """Return the number of threads, and the number of descriptors that are connected to the sshd."""
        ours = [number for number in os.listdir("/proc/self/fd") if _port_behind(int(number)) == place.server.port]
        return threading.active_count(), len(ours)

    before = open_now()
    for _ in range(5):
        assert far.call(["true"], timeout_s=20).exit_code == 0
        assert open_now()[1] == 1
        far.close()
        with pytest.raises(HostKeyMismatch):
            place.machine(host_key=strange).call(["true"], timeout_s=20)
    until(lambda: open_now() <= before)


def _port_behind(descriptor: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as found:
            return int(found.getpeername()[1])
    except (OSError, IndexError, ValueError):
        return 0

"""Tests that a lock stops every other process or thread wherever two would otherwise undo each other's work."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.core import aws_session, paths
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import RunHeld, SetupError
from gpurun.core.known_hosts import find_host_key, remember_host
from gpurun.core.paths import Home
from gpurun.core.stop_request import ask_to_stop, read_stop_request
from gpurun.jobs.commands import rehearsal_venv
from gpurun.ledger.run_lock import RunLock
from gpurun.lifecycle import supervisor
from gpurun.lifecycle.ways_in import config_of, write_entries
from gpurun.providers.aws import wire
from gpurun.remote.agent import finish_upload, job_control, job_state, receive, s3_pull, teardown
from gpurun.remote.agent.system import Refusal
from gpurun.remote.interface import MachineLost
from gpurun.remote.key_pairs import make_keys
from gpurun.remote.ssh.openssh import Master
from tests.lifecycle.tiny_runs import make_run

WAIT_S = 0.3
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB"


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the kernel lock of a file through another open file, which `flock` treats like another program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def waits_for(path: Path, work: Callable[[], object]) -> bool:
    """Return whether the work waits while the lock is held, and ends once the lock is released."""
    with held(path):
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(WAIT_S)
        waited = worker.is_alive()
    worker.join(10)
    return waited and not worker.is_alive()


def test_a_wish_waits_for_the_wish_of_another_terminal(tmp_path: Path) -> None:
    folder = make_run(Home(tmp_path))
    assert waits_for(folder.path / ".control.lock", lambda: ask_to_stop(folder, "save", by="user", reason="test"))
    assert getattr(read_stop_request(folder), "how", "") == "save"


def test_a_host_key_that_is_remembered_waits_for_another_one(tmp_path: Path) -> None:
    home = Home(tmp_path).prepare()
    assert waits_for(home.root / ".known_hosts.json.lock", lambda: remember_host(home, "box", 22, KEY))
    assert find_host_key(home, "box", 22) == KEY


def test_ssh_entries_are_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    home = Home(tmp_path).prepare()
    assert waits_for(home.ssh / ".lock", lambda: write_entries(home))
    assert config_of(home).exists()


def test_a_shared_login_is_opened_by_one_process_at_a_time() -> None:
    """Two that log in at once would each ask for the password, and one would remove the other's socket."""
    login = Master("no-such-host", "", KEY, asks=False)

    def log_in() -> None:
        with suppress(MachineLost):
            login.open(1.0)

    assert waits_for(login._folder / f"{login._socket.name}.lock", log_in)


def test_packages_of_a_rehearsal_are_installed_by_one_at_a_time(tmp_path: Path) -> None:
    """A second installer would begin by removing what the first has installed so far."""
    python, said = rehearsal_venv.venv_python(Home(tmp_path), ["numpy"]), list[str]()
    venv = python.parents[1]
    builder = threading.Thread(target=rehearsal_venv.build_venv, args=(python, ["numpy"], 60, said.append), daemon=True)
    with held(venv.with_suffix(".lock")):
        venv.mkdir()
        builder.start()
        builder.join(WAIT_S)
        assert venv.is_dir(), "what the first has there so far"
        (venv / rehearsal_venv._COMPLETE).touch()
    builder.join(10)
    assert (builder.is_alive(), said) == (False, [])


def test_keys_of_a_run_are_made_by_one_at_a_time(tmp_path: Path) -> None:
    assert waits_for(tmp_path / "ssh" / ".lock", lambda: make_keys(tmp_path / "ssh"))
    assert (tmp_path / "ssh" / "client").exists()


def test_a_supervisor_does_nothing_to_a_run_another_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    folder = make_run(home)
    monkeypatch.setattr(supervisor, "open_provider", lambda name, **_: pytest.fail("it may ask nobody"))
    with RunLock(folder.lock), pytest.raises(RunHeld):
        supervisor.supervise(home, folder.name, VirtualClock())
    assert not folder.journal.exists()


# The agent: every verb that changes what another one reads ------------------------------------------------------------

JOB = {"job": "job.json"}
VERBS: dict[str, tuple[str, Callable[[str], object]]] = {
    "begin": ("unpack.lock", lambda root: receive.begin(root, {"held": "ask", "sha256": "0" * 64})),
    "pull": ("unpack.lock", lambda root: s3_pull.pull(root, {"sha256": "0" * 64})),
    "settle": ("unpack.lock", lambda root: finish_upload.settle(root, {"layout": "0" * 64, "sha256": ""})),
    "start": ("unpack.lock", lambda root: job_control.start(root, JOB)),
    "shorten": ("lease.lock", lambda root: job_state.bring_forward(root, 1.0, 2.0)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_an_agent_verb_is_refused_while_another_holds_its_lock(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (receive, s3_pull, finish_upload):
        monkeypatch.setattr(module, "WAIT_S", 0.1)
    monkeypatch.setattr(job_control, "START_WAIT_S", 0.1)
    monkeypatch.setattr(s3_pull, "read_list", lambda _: b'{"files": []}')
    monkeypatch.setattr(receive, "read_list", lambda _: b'{"files": [], "part_bytes": 1}')
    monkeypatch.setattr(finish_upload, "read_list", lambda _: b'[]\n{"files": []}')
    monkeypatch.setattr(job_state, "locked", lambda root, name, wait_s: finish_upload.locked(root, name, 0.1))
    (tmp_path / "agent").mkdir()
    lock, call = VERBS[verb]
    with held(tmp_path / "agent" / lock), pytest.raises(Refusal) as refused:
        call(str(tmp_path))
    assert refused.value.error["code"] == "busy"
    assert sorted(path.name for path in (tmp_path / "agent").iterdir()) == [lock], "and nothing was changed"


def test_a_farewell_says_busy_when_the_keeper_cannot_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_own", "stop", "kill_all"):
        monkeypatch.setattr(teardown, name, lambda *_: None)
    monkeypatch.setattr(teardown, "WAIT_S", 0.1)
    (tmp_path / "agent").mkdir()
    with held(tmp_path / "agent" / "keeper.lock"), pytest.raises(Refusal) as refused:
        teardown.farewell(str(tmp_path), {})
    assert refused.value.error["code"] == "busy"
    assert tmp_path.exists()


# Threads of one process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["session", "client"])
def test_threads_asking_aws_at_once_share_a_session_and_client(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's documentation says that creating either is not safe for threads."""
    inside, most, made = 0, 0, []

    def careful(*_: object, **__: object) -> object:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threading.Event().wait(0.05)
        made.append(1)
        inside -= 1
        return SimpleNamespace(client=careful, region_name="us-east-1", get_credentials=lambda: None)

    import sys

    sdk = SimpleNamespace(session=SimpleNamespace(Session=careful))
    config = SimpleNamespace(Config=lambda **_: None)
    monkeypatch.setitem(sys.modules, "boto3", sdk)
    monkeypatch.setitem(sys.modules, "botocore.config", config)
    line = wire.AwsClients(VirtualClock())
    work = line._open_session if what == "session" else lambda: line._get_client("ec2", "us-east-1")
    if what == "client":
        with suppress(Exception):
            line._open_session()
        made.clear()
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert made == [1]


def test_threads_needing_aws_credentials_at_once_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class SlowCall:
        def __init__(self, _: object) -> None:
            threading.Event().wait(0.05)
            calls.append(1)

        def wait(self, seconds: float) -> bool:
            return seconds > 0

        def result(self) -> str:
            return "session"

    monkeypatch.setattr(aws_session, "Background", SlowCall)
    session = aws_session.AwsSession(VirtualClock())
    threads = [threading.Thread(target=session.keyed) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


def test_credentials_that_hang_are_given_up_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock, another thread could start to ask again in between, and its answer would be discarded."""
    session, hangs, is_held, seen = aws_session.AwsSession(VirtualClock()), threading.Event(), threading.Event(), []

    class Hangs:
        def __init__(self, _: object) -> None: ...

        def wait(self, seconds: float) -> bool:
            hangs.set()
            return not is_held.wait(5)

    def hold() -> None:
        hangs.wait(5)
        with session._lock:
            is_held.set()
            threading.Event().wait(0.1)
            seen.append(session._asking)

    monkeypatch.setattr(aws_session, "Background", Hangs)
    holder = threading.Thread(target=hold)
    holder.start()
    with pytest.raises(SetupError):
        session.keyed()
    holder.join()
    assert isinstance(seen[0], Hangs)
    assert session._asking is None


def test_threads_needing_the_homes_id_at_once_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ids, the home would take some of its own machines for those of another home."""
    write = paths.write_atomic

    def slowly(*what: object) -> None:
        threading.Event().wait(0.05)
        write(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(paths, "write_atomic", slowly)
    with ThreadPoolExecutor(6) as pool:
        assert len({*pool.map(lambda _: Home(tmp_path / "home").id, range(6))}) == 1

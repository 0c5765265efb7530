"""Tests of what only the `local` provider promises: its instances are processes that a test can inspect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.paths import Home
from gpurun.core.records import InstanceState
from gpurun.providers import local, local_guard, processes
from gpurun.providers.base import Provider, Rejected, Unknown
from gpurun.providers.processes import MARK, kill_instance, processes_of
from gpurun.providers.registry import open_provider
from tests.contract.orders import order, wait_for

CLOCK = SystemClock()


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[Provider]:
    made = open_provider("local", Home(tmp_path), CLOCK)
    yield made
    for instance in made.find(None):
        kill_instance(instance.token)


def test_the_deadline_ends_it_without_anybody(provider: Provider) -> None:
    created = provider.create(order(provider, lease_s=3.0))
    worker = marked_process(created.token)
    for _ in ticks(CLOCK, 0.05, 10):
        if worker.poll() is not None and provider.read(created.id).state is not InstanceState.RUNNING:
            return
    raise AssertionError("the instance outlived its deadline")


def marked_process(token: str) -> subprocess.Popen[bytes]:
    """Start a process of the instance in its own session; like a stuck trainer, it ignores SIGTERM."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", program], env={**os.environ, MARK: token}, start_new_session=True)


def test_local_destroy_kills_processes_that_left_the_session(provider: Provider) -> None:
    created = provider.create(order(provider))
    workers = [marked_process(created.token) for _ in range(3)]
    provider.destroy(created.id)
    assert [worker.wait(5) for worker in workers] == [-signal.SIGKILL] * 3
    assert processes_of(created.token) == []


def test_local_instance_whose_guard_died_is_not_called_running(provider: Provider) -> None:
    created = provider.create(order(provider))
    kill_instance(created.token)
    wait_for(provider, created, InstanceState.STOPPED)
    assert [instance.id for instance in provider.find(None)] == [created.id]


def test_local_never_turns_a_strange_id_into_a_path(provider: Provider) -> None:
    for strange in ("../../etc", "gr-../x", "", "gr-a/b"):
        with pytest.raises(Rejected):
            provider.destroy(strange)


def test_local_makes_one_instance_of_the_same_token_asked_twice(provider: Provider) -> None:
    first, second = provider.create(order(provider)), provider.create(order(provider))
    assert first.id == second.id
    assert len(provider.find(order(provider).token)) == 1


def test_local_calls_gone_what_was_never_made(provider: Provider) -> None:
    assert provider.read("gr-never-00000000").state is InstanceState.GONE


def test_a_second_guard_leaves_the_instance_to_the_first(provider: Provider, tmp_path: Path) -> None:
    created = provider.create(order(provider))
    assert created.address is not None
    folder = (tmp_path / created.address.folder).parent
    facts = (folder / local_guard.INSTANCE_FILE).read_bytes()
    local_guard.main(folder, created.token, "another", CLOCK.wall() + 1e6, CLOCK)
    assert (folder / local_guard.INSTANCE_FILE).read_bytes() == facts


def test_a_guard_ended_at_once_is_refused_only_if_all_is_gone(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "sys", SimpleNamespace(executable="/bin/false"))
    with pytest.raises(Rejected):
        provider.create(order(provider))
    left = provider.read(order(provider).token).model_copy(update={"state": InstanceState.STOPPED})
    monkeypatch.setattr(provider, "read", lambda _: left)
    with pytest.raises(Unknown):
        provider.create(order(provider))


AS_A_MAC_TAKES_THEM = ["-axEww", "-o", "pid=", "-o", "command="]
A_MACS_PS = """#!{python} -S
# macOS shows the environment with -E alone; its -e means all processes.
import os, sys
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open("/proc/%s/cmdline" % name, "rb").read().split(b"\\0")
        pairs = open("/proc/%s/environ" % name, "rb").read().split(b"\\0")
    except OSError:
        continue
    shown = words + (pairs if sys.argv[1:] == {flags} and not {shut} else [])
    sys.stdout.buffer.write(name.encode() + b" " + b" ".join(shown).replace(b"\\n", b" ") + b"\\n")
"""


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that replaces /proc by a ps like a Mac's; with `shut`, ps hides every environment."""

    def become(shut: bool) -> None:
        (program := tmp_path / "bin" / "ps").parent.mkdir(exist_ok=True)
        program.write_text(A_MACS_PS.format(python=sys.executable, shut=shut, flags=AS_A_MAC_TAKES_THEM))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setattr(processes, "PROC", tmp_path / "no-proc")
        processes.require_readable_marks.cache_clear()

    return become


def test_on_a_mac_a_living_instance_is_seen_and_its_end_is_seen(
    provider: Provider, mac: Callable[[bool], None]
) -> None:
    mac(False)
    created = provider.create(order(provider))
    assert wait_for(provider, created, InstanceState.RUNNING).id == created.id
    worker = marked_process(created.token)
    provider.destroy(created.id)
    assert worker.wait(5) == -signal.SIGKILL
    assert provider.read(created.id).state is InstanceState.GONE


def test_a_hidden_environment_makes_nothing_and_calls_none_gone(
    provider: Provider, mac: Callable[[bool], None]
) -> None:
    created = provider.create(order(provider))
    mac(True)
    for verb in (lambda: provider.read(created.id), lambda: provider.find(None)):
        with pytest.raises(Unknown, match="ps -axEww"):
            verb()
    with pytest.raises(Rejected, match="ps -axEww"):
        provider.create(order(provider))
    mac(False)
    assert processes_of(created.token), "it lives"
    mac(True)
    with pytest.raises(Unknown, match=created.id):
        provider.destroy(created.id)
    mac(False)

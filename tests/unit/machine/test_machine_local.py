"""Tests that a local machine runs programs as a remote one does: marked by token, without secrets or deadlocks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.errors import UsageError
from gpurun.remote import local_machine
from gpurun.remote.interface import FarRefusal, Machine, MachineLost
from gpurun.remote.local_machine import LocalMachine
from tests.refusals import refusal

PYTHON = [sys.executable, "-I", "-S", "-c"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return LocalMachine(tmp_path, "gr-test-0001")


def test_a_program_runs_in_the_folder_marked_and_without_secrets(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "canary-1")
    monkeypatch.setenv("SOMETHING_ELSE", "canary-2")
    reply = machine.call(["sh", "-c", "pwd; env; echo words >&2; exit 3"], timeout_s=10)
    assert (reply.exit_code, reply.stderr) == (3, b"words\n")
    assert str(tmp_path).encode() in reply.stdout
    assert b"GPURUN_INSTANCE=gr-test-0001" in reply.stdout
    assert b"canary" not in reply.stdout


def test_big_input_and_output_on_both_pipes_do_not_deadlock(machine: Machine) -> None:
    script = """
import sys
for block in iter(lambda: sys.stdin.buffer.read(65536), b''):
    sys.stdout.buffer.write(block)
    sys.stderr.buffer.write(block)
"""
    chunks = [bytes([number]) * (1 << 20) for number in range(8)]
    reply = machine.call([*PYTHON, script], stdin=iter(chunks), timeout_s=30)
    assert reply.stdout == reply.stderr == b"".join(chunks)


def test_a_program_that_does_not_read_to_the_end_is_no_error(machine: Machine) -> None:
    reply = machine.call([*PYTHON, "print('enough')"], stdin=(bytes(1 << 20) for _ in range(50)), timeout_s=30)
    assert (reply.exit_code, reply.stdout) == (0, b"enough\n")


def test_an_error_of_the_source_ends_the_program_and_is_raised(machine: Machine, tmp_path: Path) -> None:
    def source() -> Iterator[bytes]:
        yield b"half"
        raise UsageError("pack.changed", "it changed", hint="again")

    script = "import sys; sys.stdin.read(); open('ended', 'w')"
    with refusal(UsageError, "pack.changed", "it changed"):
        machine.call([*PYTHON, script], stdin=source(), timeout_s=10)
    assert not (tmp_path / "ended").exists(), "half an input must never look like the whole of it"


def test_a_program_that_takes_too_long_dies_with_its_children(machine: Machine, tmp_path: Path) -> None:
    with refusal(MachineLost, "machine.lost", "sleep 600", "0 s"):
        machine.call(["sh", "-c", "(sleep 600; true) & sleep 600"], timeout_s=0.5)
    end = time.monotonic() + 30
    while [link for link in Path("/proc").glob("[0-9]*/cwd") if is_in(link, tmp_path)]:  # A killed process lingers.
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.01)


def is_in(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link) == str(folder)
    except OSError:
        return False


def test_an_answer_without_end_is_cut_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_machine, "MOST_REPLY_BYTES", 1 << 20)
    with refusal(MachineLost, "machine.lost", "1048576 bytes"):
        machine.call(["yes"], timeout_s=30)


def test_no_program_and_no_folder_are_a_lost_machine(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(MachineLost):
        machine.call(["/no/such/program"], timeout_s=5)
    gone = LocalMachine(tmp_path / "gone", "gr-test-0002")
    with pytest.raises(MachineLost):
        gone.call(["true"], timeout_s=5)
    with pytest.raises(MachineLost):
        gone.put("agent.pyz", b"x")
    assert not (tmp_path / "gone").exists(), "what was destroyed is never made again by a late call"


def test_put_replaces_whole_and_a_write_that_fails_is_a_refusal(machine: Machine, tmp_path: Path) -> None:
    machine.put("agent/job.json", b"1")
    machine.put("agent/job.json", b"22")
    assert (tmp_path / "agent" / "job.json").read_bytes() == b"22"
    assert os.listdir(tmp_path / "agent") == ["job.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(FarRefusal) as refused:
        machine.put("folder", b"x")
    assert refused.value.reason == "os_error"

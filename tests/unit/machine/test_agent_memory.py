"""Tests of the kernel's figures on a job's memory: in both versions of cgroups, inside and outside a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import Box

from gpurun.remote.agent import memory_limits as memory

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 1 << 30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in place of the kernel's cgroup files; its file `own` names the group of this process."""
    monkeypatch.setattr(memory, "CGROUPS", str(tmp_path))
    monkeypatch.setattr(memory, "OWN", str(tmp_path / "own"))
    return tmp_path


def wrote(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_a_session_of_a_machine_with_cgroups_of_version_2(cgroups: Path) -> None:
    wrote(cgroups, own="0::/user.slice/session-7.scope\n")
    events = "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n"
    wrote(cgroups / "user.slice" / "session-7.scope", memory__events=events, memory__max="max\n")
    wrote(cgroups / "user.slice", memory__max=f"{GIB // 2}\n", memory__events="oom_kill 9\n")
    room = memory.room(1)
    assert (room["oom_kills"], room["memory_bytes"]) == (1, GIB // 2)


def test_a_container_sees_its_own_group_as_the_top(cgroups: Path) -> None:
    wrote(cgroups, own="0::/\n", memory__events="oom_kill 5\n", memory__max=f"{GIB // 4}\n")
    room = memory.room(5)
    assert (room["oom_kills"], room["memory_bytes"]) == (0, GIB // 4)


def test_a_group_of_version_1(cgroups: Path) -> None:
    wrote(cgroups, own="5:memory:/docker/ab12\n4:cpu:/\n0::/\n")
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"
    limit = f"{GIB // 8}\n"
    wrote(cgroups / "memory" / "docker" / "ab12", memory__oom_control=control, memory__limit_in_bytes=limit)
    wrote(cgroups / "memory", memory__limit_in_bytes="9223372036854771712\n")
    room = memory.room(0)
    assert (room["oom_kills"], room["memory_bytes"]) == (1, GIB // 8)


def test_without_figures_kills_are_unknown_memory_the_machines(cgroups: Path) -> None:
    wrote(cgroups, own="0::/\n")
    room = memory.room(None)
    assert (room["oom_kills"], room["memory_bytes"]) == (None, PHYSICAL)


def test_the_end_of_a_job_has_its_memory(box: Box) -> None:
    box.far.start(box.job("os.kill(os.getpid(), 9)"))
    status = box.until_exited()
    assert (status.signal, status.oom_kills in (0, None)) == (9, True)
    assert 0 < (status.memory_bytes or 0) <= PHYSICAL
    assert status.shm_bytes == os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks

"""Tests of the user's set-up script on a machine: started once, over with its first process, killed at its limit."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Box, Place, kill

from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import SetUp
from tests.refusals import refusal

MOST = 1 << 16


def ask(far: FarSide, script: str, limit_s: float = 60.0, offset: int = 0) -> tuple[SetUp, bytes]:
    return far.set_up(script.encode(), limit_s=limit_s, offset=offset, most=MOST)


def ended(box: Box, script: str, limit_s: float = 60.0) -> SetUp:
    return box.until(lambda: (said := ask(box.far, script, limit_s)[0]).state not in ("none", "running") and said)


def starts(box: Box) -> int:
    return len((box.folder / "starts").read_text().splitlines())


def test_setup_runs_once_and_reports_output_and_exit_code(box: Box) -> None:
    script = 'echo begun >>starts\npwd\nread word || echo "no input" >&2\nsleep 0.3\nexit 3\n'
    first, _ = ask(box.far, script)
    assert first.state == "running"
    said = ended(box, script)
    assert (said.state, said.exit_code, said.signal) == ("ended", 3, None)
    assert said.tail == f"{box.folder}\nno input\n"
    assert 0.3 <= said.ran_s < 30
    for offset in (0, 5, said.size, said.size + 9):
        again, part = ask(box.far, script, offset=offset)
        assert (again, part) == (again.model_copy(update={"bytes": len(part)}), said.tail.encode()[offset:])
        assert again.state == "ended"
    assert starts(box) == 1


def test_two_that_would_begin_it_begin_it_once(box: Box) -> None:
    box.machine.put("setup.sh", b"echo begun >>starts\n")
    words = box.agent_argv("setup", "--limit", "60.0", "--from", "0", "--most", "0")
    for _ in range(3):
        assert box.machine.call(words, timeout_s=30).exit_code == 0
        ended(box, "")
    assert starts(box) == 1


def test_its_background_processes_delay_nothing_and_end_with_it(box: Box) -> None:
    script = "nohup sleep 100 &\nsetsid sleep 100 &\necho done\n"
    begun = time.monotonic()
    assert ended(box, script).exit_code == 0
    assert time.monotonic() - begun < 20
    assert len(box.living()) == 2
    assert box.far.farewell() == 2
    assert box.living() == []


@pytest.mark.parametrize(
    ("line", "script", "tail"),
    [
        (f"#!{sys.executable} -I\n", "import sys; print(sys.version_info.major)", "3\n"),
        (f"#!/usr/bin/env {os.path.basename(shutil.which('python3') or 'python3')}\n", "print(len('four'))", "4\n"),
        ("", "echo $((1 + 1))", "2\n"),
    ],
)
def test_its_own_first_line_says_what_runs_it(box: Box, line: str, script: str, tail: str) -> None:
    said = ended(box, line + script + "\n")
    assert (said.exit_code, said.tail) == (0, tail)


def test_one_that_cannot_be_started_says_why(box: Box) -> None:
    said = ended(box, "#!/no/such/shell\necho never\n")
    assert (said.state, said.exit_code) == ("ended", 126)
    assert "setup.sh" in said.tail


def test_a_flood_of_words_is_one_start_and_comes_in_parts(box: Box) -> None:
    script = f"#!{sys.executable}\nopen('starts', 'a').write('begun\\n')\nprint('0123456789abcde\\n' * (40 << 16))\n"
    said = ended(box, script)
    assert (said.exit_code, said.size, starts(box)) == (0, (40 << 20) + 1, 1)
    assert len(said.tail) == 4000
    assert len(ask(box.far, script)[1]) == MOST


def test_at_its_limit_all_of_it_is_killed_though_nobody_asks(box: Box) -> None:
    script = "setsid sleep 100 &\necho working\nsleep 100\n"
    ask(box.far, script, limit_s=1.0)
    box.until(lambda: "end" in box.agent_file("setup.json"))
    box.until(lambda: not box.living())
    said, part = ask(box.far, script, limit_s=60.0)
    assert (said.state, said.exit_code, part) == ("killed", None, b"working\n")
    assert 1.0 <= said.ran_s < 20


def gone(box: Box) -> None:
    """Kill the agent's process that watches the script."""
    (watcher,) = (pid for pid in box.living() if b"\0attend\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    kill(watcher)


def rebooted(box: Box) -> None:
    """End all processes, and change the script's record to one from another boot."""
    box.close()
    record = box.agent_file("setup.json")
    (box.folder / "agent" / "setup.json").write_text(json.dumps(record | {"boot_id": "another"}))


def power_cut(box: Box) -> None:
    """End all processes, and empty the script's record, as a power cut may do."""
    box.close()
    (box.folder / "agent" / "setup.json").write_bytes(b"")


@pytest.mark.parametrize(("happens", "state"), [(gone, "lost"), (rebooted, "rebooted"), (power_cut, "rebooted")])
def test_one_whose_end_nobody_can_tell_is_never_begun_again(
    box: Box, happens: Callable[[Box], None], state: str
) -> None:
    script = "echo begun >>starts\nsleep 100\n"
    ask(box.far, script)
    box.until(lambda: (box.folder / "starts").exists())
    happens(box)
    assert [ask(box.far, script)[0].state for _ in range(2)] == [state, state]
    assert starts(box) == 1


def test_a_line_that_is_lost_twice_over_ssh_is_one_start(place: Place) -> None:
    proxy = place.proxy()
    far = FarSide(place.machine(proxy.port), python=sys.executable)
    far.install_agent()
    script = "echo begun >>starts\nsleep 1.5\necho done\n"
    states, cuts, begun = [], 0, time.monotonic()
    while "ended" not in states and time.monotonic() - begun < 30:
        try:
            said, part = ask(far, script)
        except MachineLost:  # The cut came just before; the next call logs in again.
            continue
        states.append(said.state)
        if cuts < 2:
            cuts += 1
            proxy.cut()
    assert (states[:2], states[-1]) == (["running", "running"], "ended")
    assert (said.exit_code, part) == (0, b"done\n")
    assert (place.folder / "starts").read_text() == "begun\n"


def test_an_answer_that_is_not_what_was_asked_for_is_refused(box: Box) -> None:
    assert ended(box, "echo hello\n").exit_code == 0
    for old, new in (
        ("bytes=len(data)", "bytes=len(data) - 1"),
        ('part(path, int(options["from"]), int(options["most"]))', "part(path, 0, 9)"),
    ):
        box.far.install_agent()
        box.alter_agent(old, new)
        with refusal(FarRefusal, "far.nonsense", "another part"):
            box.far.set_up(b"", limit_s=1.0, offset=0, most=3)

"""Tests that each rule of this folder fails for code that breaks it."""

from __future__ import annotations

import importlib
from graphlib import CycleError

import pytest
from house_sources import Source

WING, FAR = "gpurun/view/new.py", "gpurun/remote/agent/new.py"
DOWN = "test_floors.test_imports_go_down_a_floor_or_stay_in_their_room"
MACS = "test_macs.test_linux_calls_are_made_only_where_a_mac_has_a_substitute"
STEP = "from gpurun.lifecycle.steps.close_run import settle_run\n"
BROKEN = [
    (DOWN, "gpurun/ledger/new.py", "def f():\n    import gpurun.view\n"),
    (DOWN, WING, "from gpurun.cli import app\n"),
    (DOWN, "gpurun/ledger/new.py", "import gpurun.view\n"),
    (DOWN, "gpurun/lifecycle/new.py", "import gpurun.readers\n"),
    ("test_floors.test_only_the_driver_knows_the_steps", "gpurun/lifecycle/steps/new.py", STEP),
    ("test_floors.test_there_is_no_room_without_a_floor", "gpurun/ninth/new.py", ""),
    ("test_apart.test_the_two_sides_share_files_not_code", WING, 'import_module("torch.nn")\n'),
    ("test_apart.test_the_two_sides_share_files_not_code", "trainer/new.py", "from gpurun.core import money\n"),
    ("test_apart.test_ssh_has_one_door", WING, "from paramiko.client import SSHClient\n"),
    ("test_apart.test_the_far_sides_program_needs_only_the_standard_library", FAR, "import six"),
    ("test_one_room_each.test_only_view_and_cli_print", "gpurun/core/new.py", "print(1)\n"),
    ("test_one_room_each.test_only_view_and_cli_print", "gpurun/core/new.py", "import sys\nout = sys.stdout\n"),
    ("test_one_room_each.test_only_the_clock_reads_time_or_sleeps", WING, "from time import sleep\n"),
    ("test_one_room_each.test_only_the_clock_reads_time_or_sleeps", WING, "datetime.datetime.now()\n"),
    ("test_one_room_each.test_only_the_driver_appends_to_the_journal", "gpurun/lifecycle/new.py", "journal.append(1)"),
    ("test_money.test_only_money_py_does_sums_of_money", WING, "x = plan.worst_micros / 1e6\n"),
    ("test_money.test_only_money_py_does_sums_of_money", WING, "x = sum(row.spent_micros for row in rows)\n"),
    ("test_words.test_every_error_has_a_hint_and_a_code", WING, 'raise UsageError("a.b", "what", hint=" ")\n'),
    ("test_words.test_every_error_has_a_hint_and_a_code", WING, 'raise errors.NoOffer("A b", "what", hint="do")\n'),
    ("test_exceptions.test_nobody_swallows_an_exception", WING, "try:\n    x\nexcept Exception:\n    pass\n"),
    ("test_environment.test_environment_variables", WING, 'os.environ.get("NEW")\n'),
    ("test_sizes.test_no_vague_name", "gpurun/view/_utils.py", ""),
    ("test_one_door.test_no_providers_name_is_compared_outside_its_own_room", WING, "if name in ('ssh', 'x'): y()\n"),
    ("test_one_door.test_no_plan_is_asked_for_its_command_outside_of_jobs", WING, "if plan.job.command: x()\n"),
    (MACS, WING, "os.sched_getaffinity(0)\n"),
    (MACS, "trainer/new.py", "open('/proc/self/status')\n"),
    (MACS, WING, "from select import epoll\n"),
    ("test_glossary.test_no_module_is_named_with_a_retired_word", "gpurun/view/settle.py", ""),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN)
def test_a_rule_bites(rule: str, path: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = rule.partition(".")
    holder = importlib.import_module(module)
    monkeypatch.setattr(
        holder, "sources", lambda *packages: tuple(s for s in [Source(path, text)] if path.startswith(packages))
    )
    with pytest.raises(AssertionError):
        getattr(holder, name)()


def test_a_circle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = importlib.import_module("test_floors")
    circle = (
        Source("gpurun/view/a.py", "import gpurun.view.b\n"),
        Source("gpurun/view/b.py", "from gpurun.view import a\n"),
    )
    monkeypatch.setattr(holder, "sources", lambda *packages: circle)
    with pytest.raises(CycleError):
        holder.test_no_circle()

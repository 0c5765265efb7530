"""Helpers shared by test_never_gives_up.py and other tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpurun.core.errors import ExitCode, MayBeBilling
from gpurun.core.orphans import Orphan
from gpurun.core.paths import Home
from gpurun.lifecycle.reaper import sweep
from tests.emulators.fake import Fault
from tests.lifecycle.scripted_cloud import World


def supervised(world: World) -> Callable[[], ExitCode]:
    """Return a function that drives the run once, as a supervisor does, and raises MayBeBilling after an error."""

    def once() -> ExitCode:
        code = world.drive()
        if isinstance(code, str):
            raise MayBeBilling(code, code, hint="Wait.")
        return code

    return once


def killed_and_overdue(world: World) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    world.clock.sleep(world.plan.lease.total_s + 60)


def swept(world: World, home: Home) -> list[Orphan]:
    return list(sweep([world.cloud], home, world.clock, destroy_all=False, older_than_s=0, look_only=False))


def late_machine(world: World) -> None:
    """Make the first create time out and its machine appear after 180 s.

    After 120 s gpurun concludes that there is no such machine and rents a second one, which has trained by then.
    """
    world.cloud.script["create"] = [Fault.LATE]
    world.cloud.profile = replace(world.cloud.profile, late_s=180.0)
    world.far.train_s = 20.0

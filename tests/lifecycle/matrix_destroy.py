"""Helpers shared by test_matrix_destroy.py and other tests."""

from __future__ import annotations

from dataclasses import replace

from gpurun.core.records import Order
from tests.lifecycle.scripted_cloud import World


def beside(world: World, *, billed: bool) -> None:
    """Make the cloud create a disk with each machine.

    The disk outlives the machine and is billed if `billed` is true.
    """
    world.cloud.profile = replace(world.cloud.profile, leaves=("disk",))
    leave = world.cloud._leave_things

    def left(order: Order) -> None:
        leave(order)
        for thing in world.cloud.things:
            thing.leftover = thing.leftover.model_copy(update={"billed": billed})

    world.cloud._leave_things = left  # type: ignore[method-assign]

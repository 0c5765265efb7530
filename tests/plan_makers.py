"""Functions that make a plan from a request, as `gpurun train` and `gpurun run` do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpurun.core.clock import Clock, SystemClock
from gpurun.core.paths import Home
from gpurun.core.run_plan import Plan, Request
from gpurun.jobs.training.estimate import NO_PRIORS
from gpurun.jobs.training.history import Priors
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.planning.candidates import Quote, quote
from gpurun.planning.command_proposal import CommandProposal
from gpurun.planning.place import Clouds, Desk
from gpurun.planning.planner import make_plan as planned
from gpurun.planning.trainer_proposal import TrainerProposal


def make_plan(
    request: Request, *, run: str, home: Home, clock: Clock, say: Callable[[str], None], need_data: bool
) -> Plan:
    return planned(TrainerProposal(request, Desk(run, home, clock, say)), need_data=need_data)


def make_command_plan(
    request: Request, *, run: str, home: Home, clock: Clock, say: Callable[[str], None], **options: Any
) -> Plan:
    return planned(CommandProposal(request, Desk(run, home, clock, say), **options))


def catalogue_quote(request: Request, recipe: ResolvedRecipe, priors: Priors = NO_PRIORS) -> Quote:
    """Return a quote of the clouds' offers at the catalogue's prices."""
    desk = Desk("fox-41", Home(Path("/nowhere")), SystemClock(), print)
    return quote(request, recipe, Clouds(request, desk, is_shown=True), None, priors=priors)

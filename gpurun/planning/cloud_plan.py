"""The plan of a run that is paid for: asked of the clouds now, prepared here, nothing rented yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.core.clock import Clock
from gpurun.core.credentials import require_credential
from gpurun.core.errors import NoOffer, SetupError, UsageError
from gpurun.core.paths import Home
from gpurun.core.run_plan import DataSummary, Plan, Request
from gpurun.data.source_names import BUILT_IN, missing_shards
from gpurun.jobs.training.history import Priors, load_priors
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.planning.budget import disk_gb_on
from gpurun.planning.candidates import Quote, elsewhere, need_of, paid_plan, quote
from gpurun.planning.transfer import least_disk_gb, public_shards
from gpurun.providers.catalog import asked_as, terms_of
from gpurun.providers.registry import CLOUDS, OVERRIDES, ready_providers

if TYPE_CHECKING:
    from gpurun.planning.live_offers import Market


PRICES_HOLD_S = 60.0
"""How old the prices may be that a plan rests on: about as long as a person takes to say yes to them. Spot prices move
within minutes, and a create compares the price that it gets with the one agreed to."""


def shown_plan(
    request: Request, run: str, full: ResolvedRecipe, home: Home, clock: Clock, say: Callable[[str], None]
) -> Plan:
    """What renting would be: at live prices where there is a key, else at the catalogue's. Nothing is prepared.

    The hub is asked of a public set that --data names; UsageError where it has none of that name.
    """
    is_public = request.data is not None and public_shards(request, full.tables.data.source)
    data = _prepared(request, run, full, home, say) if is_public else None
    ready = ready_providers(home)
    names = [name for name in _named(request) if name in ready]
    market = _market(request, full, names, home, clock) if names else None
    priors, damage = load_priors(home)
    warnings = [*(market.warnings if market else ()), *([damage] if damage else [])]
    if market is not None and not market.offers and market.silent:
        warnings += [f"{name} could not be asked: {why}" for name, why in market.silent]
        market = None
    quoted = quote(request, full, market, data, priors, is_shown=True)
    made = _on_every_offer(request, run, full, quoted, priors, data)
    if small := _small_disk(made, full):
        warnings.append(f"{small.what} `train` refuses that. {small.hint}")
    return warned(made, names, tuple(warnings))


def _on_every_offer(
    request: Request, run: str, full: ResolvedRecipe, quoted: Quote, priors: Priors, data: DataSummary | None
) -> Plan:
    """The plan on the recipe's own GPU, beside all that the catalogue has where no GPU was asked for.

    Where the recipe's own does not do, it is the plan on the best of the others.
    """
    is_on_cpu = full.tables.hardware.on_cpu == "as_written"
    if request.gpu is not None or (need_of(request, full).is_any and not is_on_cpu):
        return paid_plan(request, run, full, quoted, data)
    every = elsewhere(request, full, quoted, priors)
    try:
        made = paid_plan(request, run, full, quoted, data)
    except NoOffer:
        made = paid_plan(request, run, full, every, data, by_gpu=True)
        asked = f"--gpu {asked_as(made.offer)}"
        why = f"The recipe's {need_of(request, full)} does not do under this cap: " if quoted.candidates else ""
        told = f"{why}`train` takes this one with {asked}."
        return made.told(told)
    return made.model_copy(update={"candidates": every.candidates, "notes": (*every.notes, *_beyond(made, quoted))})


def _beyond(made: Plan, quoted: Quote) -> tuple[str, ...]:
    """The notes that a plan has beside those of its quote."""
    return made.notes[len(quoted.notes) :]


def rented_plan(
    request: Request, run: str, full: ResolvedRecipe, home: Home, clock: Clock, say: Callable[[str], None]
) -> Plan:
    """The plan of a run that is to be started: every reason to refuse comes before the shards are prepared.

    The clouds are asked once, and again only where preparing took so long that their prices are old. UsageError,
    SetupError or NoOffer.
    """
    from gpurun.planning.live_offers import key_warning

    if request.max_cost_micros is None:
        raise UsageError("cap.missing", "A run that can spend money needs a cap.", hint="Give one: --max-cost 25.")
    source = full.tables.data.source
    if request.data is None and source not in BUILT_IN and not public_shards(request, source):
        raise missing_shards(source, request.recipe_word)
    names = with_keys(request, home)
    priors, damage = load_priors(home)
    asked_mono, market = clock.monotonic(), _market(request, full, names, home, clock)
    paid_plan(request, run, full, quote(request, full, market, priors=priors))
    data = shards_of(request, run, full, home, say)
    if clock.monotonic() - asked_mono > PRICES_HOLD_S:
        market = _market(request, full, names, home, clock)
    made = paid_plan(request, run, full, quote(request, full, market, data, priors), data)
    if small := _small_disk(made, full):
        raise small
    until_wall = clock.wall() + made.lease.total_s + made.lease.kill_allowance_s
    ending = key_warning(market, made.offer.provider, until_wall)
    return warned(made, names, (*market.warnings, *ending, *([damage] if damage else [])))


def _small_disk(plan: Plan, full: ResolvedRecipe) -> UsageError | None:
    """What is wrong with a disk that would be full on paid time, at any cloud that orders it and may be taken."""
    wanted_gb = full.tables.hardware.disk_gb
    needed_gb = least_disk_gb(full, plan.data.bytes, vocab_size=plan.data.vocab_size)
    for provider in (one.offer.provider for one in plan.approved if asked_as(one.offer) == asked_as(plan.offer)):
        terms = terms_of(provider)
        if terms.disk_per_gb_hour and disk_gb_on(provider, wanted_gb) < needed_gb:
            return UsageError(
                "disk.small",
                f"hardware.disk_gb is {wanted_gb}; the data ({plan.data.bytes / 1e9:.1f} GB) and the checkpoints of a "
                f"model of {plan.job.parameters:,} parameters take at least {needed_gb} GB at {provider}, beside what "
                "the image takes.",
                hint=f"Ask for a larger disk: --set hardware.disk_gb={needed_gb + terms.least_disk_gb}.",
            )
    return None


def shards_of(
    request: Request, run: str, resolved: ResolvedRecipe, home: Home, say: Callable[[str], None]
) -> DataSummary:
    """The shards of a run, prepared or checked here, with weights to start or go on from and what --warm finds."""
    from gpurun.jobs.training.checkpoint_file import take_checkpoint
    from gpurun.jobs.training.initial_weights import started
    from gpurun.planning.compile_cache import warmed
    from gpurun.planning.continue_from import carried

    into, found = home.staged_data(run), _prepared(request, run, resolved, home, say)
    if request.choices.init:
        take_checkpoint(Path(request.choices.init), into)
    data = carried(started(found, resolved, into), resolved, home, into)
    if resolved.tables.eval.core:
        from gpurun.jobs.training.core_tasks import with_core

        data = with_core(data, request, resolved, home, into, say)
    return warmed(data, request, resolved, home, into)


def _prepared(
    request: Request, run: str, resolved: ResolvedRecipe, home: Home, say: Callable[[str], None]
) -> DataSummary:
    """The shards alone; of a public set, what the hub says of those that the steps read."""
    from gpurun.data.run_shards import prepared

    named = public_shards(request, resolved.tables.data.source) or request.data
    into, accept_skipped = home.staged_data(run), request.choices.accept_skipped
    return prepared(resolved.record, named, into=into, cache=home.shards, say=say, accept_skipped=accept_skipped)


def _named(request: Request) -> list[str]:
    """The clouds that the request leaves."""
    return [name for name in CLOUDS if not request.providers or name in request.providers]


def with_keys(request: Request, home: Home) -> list[str]:
    """The clouds to rent from; SetupError when a named one, or every one, has no key."""
    ready = ready_providers(home)
    for name in request.providers:
        if name not in ready and name != "aws":
            require_credential(name, home)
    names = [name for name in _named(request) if name in ready]
    if not names:
        asked = "aws has no credentials" if request.providers else "There is no key for any cloud"
        raise SetupError(
            "auth.no_provider",
            f"{asked}, so nothing can be rented.",
            hint="Give one: gpurun auth set runpod (or lambda); for AWS: aws configure. Rehearse for nothing: add "
            "--dry-run. Train here: --provider local.",
        )
    return names


def _market(request: Request, full: ResolvedRecipe, names: list[str], home: Home, clock: Clock) -> Market:
    from gpurun.planning.live_offers import live_offers

    return live_offers(need_of(request, full), names, home, clock, request.choices)


def warned(plan: Plan, names: list[str], warnings: tuple[str, ...]) -> Plan:
    """The plan, with these warnings, and one for each key that the environment sends elsewhere."""
    diverted = [
        f"{variable} is set: {name} requests, and your key with them, go to {os.environ[variable]}."
        for name, variable in OVERRIDES.items()
        if name in names and os.environ.get(variable)
    ]
    return plan.told(warnings=(*warnings, *diverted))

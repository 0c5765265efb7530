"""The third hand: find what bears gpurun's mark at a provider, with local records or without, and end the overdue."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError, MayBeBilling, RunHeld, SetupError
from gpurun.core.model import Instance, InstanceState, Leftover, Teardown
from gpurun.core.paths import RUN_NAME, Home, RunFolder
from gpurun.ledger.durable import require_durable
from gpurun.ledger.lock import holder_of
from gpurun.lifecycle.control import wish
from gpurun.lifecycle.destroy import end
from gpurun.lifecycle.runs import asked_for, look
from gpurun.lifecycle.supervisor import supervise
from gpurun.providers.base import LeavesThings, Provider, Rejected, Unknown, their_wall

Fate = Literal["owned", "within lease", "overdue", "destroyed", "not proven gone"]


@dataclass(frozen=True)
class Orphan:
    """One instance that was found, and what was done about it. `owned`: a living supervisor here drives it."""

    instance: Instance
    fate: Fate
    overdue_s: float
    age_s: float | None


@dataclass(frozen=True)
class Stray:
    """One side resource that was found, and what was done about it."""

    leftover: Leftover
    fate: Literal["owned", "kept", "removed", "not removed"]


def sweep(
    providers: list[Provider], home: Home, clock: Clock, *, destroy_all: bool, older_than_s: float, look_only: bool
) -> Iterator[Orphan]:
    """Look at every provider; end what is past its deadline, or with `destroy_all` whatever no supervisor here owns.

    All of that is asked to end before the end of any is waited for. A provider that does not answer is MayBeBilling,
    raised once all the others have been swept.
    """
    silent: list[str] = []
    doomed: list[tuple[Orphan, Provider]] = []
    for provider in providers:
        found, unseen = _all_of(provider)
        silent += unseen
        for instance in (one for one in found if one.state is not InstanceState.GONE):  # Some clouds list their dead.
            orphan = _judge(instance, home, their_wall(provider, clock))
            is_doomed = orphan.fate == "overdue" or (destroy_all and orphan.fate == "within lease")
            if is_doomed and _is_older(orphan, older_than_s) and not look_only:
                doomed.append((orphan, provider))
                _ask_first(instance, provider)
            else:
                yield orphan
    for orphan, provider in doomed:
        yield _end(orphan, provider, home, clock)
    if silent:
        raise _cannot_look(silent)


def _ask_first(instance: Instance, provider: Provider) -> None:
    """Ask for an end that is proven later: a machine is billed until it is asked, and the proofs before it take long.

    A box that is kept is not billed, and is free only once its run has left it.
    """
    if provider.traits.teardown is Teardown.DESTROYED:
        with suppress(Exception):  # Whatever it was, it is asked again, and then the answer counts.
            provider.destroy(instance.id)


def _all_of(provider: Provider) -> tuple[Sequence[Instance], list[str]]:
    """Everything of gpurun's that the provider shows, and what it said in place of the rest."""
    try:
        return provider.find(None), []
    except Unknown as error:
        return error.found, [f"{provider.name} ({error})"]
    except SetupError as error:
        return [], [f"{provider.name} ({error})"]


def sweep_run(provider: Provider, folder: RunFolder, clock: Clock) -> list[str]:
    """End whatever a run asked for at a provider, by its tokens alone; the ids, proven gone. For a damaged journal.

    As many lists are read as a death needs, over as long: one of them may be old. What bears the run's name under a
    token that is nowhere in the journal may be another home's, or have had its record in the damage: it is not ended,
    and MayBeBilling names it. Unknown, SetupError or MayBeBilling; what can be seen is ended before either is raised.
    """
    traits, bearing, unclear = provider.traits, dict[str, Instance](), list[Unknown]()
    for turn in range(traits.death_reads):
        clock.sleep(traits.death_spread_s / max(1, traits.death_reads - 1) if turn else 0.0)
        try:
            listed = provider.find(None)
        except Unknown as error:
            listed = list(error.found)
            unclear.append(error)
        alive = [one for one in listed if one.state is not InstanceState.GONE]
        bearing |= {one.id: one for one in alive if one.run == folder.name}
    ours = [one for one in bearing.values() if asked_for(folder, one.token)]
    for one in ours:
        for _ in end(provider, clock, one.id, one.token, run=folder.name):
            pass
    if doubtful := [one.id for one in bearing.values() if one not in ours]:
        raise MayBeBilling(
            "destroy.doubtful",
            f"{provider.name} shows {', '.join(doubtful)} under the name of {folder.name}, whose damaged journal lacks "
            "its token: it may be this run's, or another home's.",
            hint=f"If it is yours: gpurun reap --destroy ends what is overdue; or by hand: {traits.console_url}.",
        )
    if unclear:
        raise unclear[-1]
    return [one.id for one in ours]


def _is_older(orphan: Orphan, than_s: float) -> bool:
    """Whether it is old enough to be ended; where the age is not told, only a passed deadline says so."""
    return than_s <= 0 or (orphan.overdue_s > 0 if orphan.age_s is None else orphan.age_s >= than_s)


def _judge(instance: Instance, home: Home, now: float) -> Orphan:
    """What an instance is, by its own tags and by whoever drives it here."""
    deadline_wall = instance.deadline_wall or _deadline_here(instance, home)
    overdue_s = now - deadline_wall if deadline_wall is not None else 0.0
    age_s = now - instance.created_wall if instance.created_wall is not None else None
    if _is_driven_here(instance.run, instance.token, home):
        return Orphan(instance, "owned", overdue_s, age_s)
    return Orphan(instance, "overdue" if overdue_s > 0 else "within lease", overdue_s, age_s)


def _deadline_here(instance: Instance, home: Home) -> float | None:
    """The deadline of a machine that does not tell its own, if this home's journal asked for it."""
    if not _is_ours(instance, home):
        return None
    return look(home, instance.run).state.deadline_wall


def _is_driven_here(run: str, token: str, home: Home) -> bool:
    """Whether a living supervisor of this home asked for that token; another home may have a run of the same name."""
    if not RUN_NAME.fullmatch(run):
        return False
    try:
        if holder_of(home.run(run).lock) is None:
            return False
        return asked_for(home.run(run), token)
    except OSError:  # They are another user's files, say: nobody is seen to drive it.
        return False


def _end(orphan: Orphan, provider: Provider, home: Home, clock: Clock) -> Orphan:
    """End it through its own journal where that can be, so that it gets its receipt; else by its token alone."""
    instance = orphan.instance
    try:
        if not _ends_by_its_journal(instance, home, clock):
            for _ in end(provider, clock, instance.id, instance.token, run=instance.run):
                pass
    except (MayBeBilling, RunHeld):
        return Orphan(instance, "not proven gone", orphan.overdue_s, orphan.age_s)
    return Orphan(instance, "destroyed", orphan.overdue_s, orphan.age_s)


def _ends_by_its_journal(instance: Instance, home: Home, clock: Clock) -> bool:
    """Drive the run to its end if this home has its journal; False when that cannot be, for whatever reason."""
    if not _is_ours(instance, home):
        return False
    try:
        require_durable(home.run(instance.run).path)
        wish(home.run(instance.run), "destroy", by="user", reason="reaped")
        supervise(home, instance.run, clock)
    except (MayBeBilling, RunHeld):
        raise
    except Exception as error:  # noqa: BLE001 - its receipt must wait; neither it nor the others of the sweep must.
        logging.warning("%s is ended without a record: %s", instance.run, error)
        return False
    return True


def _is_ours(instance: Instance, home: Home) -> bool:
    """Whether this home has the journal that asked for the instance, and that journal still has to see it end."""
    if not RUN_NAME.fullmatch(instance.run):
        return False
    try:
        if not home.run(instance.run).plan.exists():
            return False
        sight = look(home, instance.run)
    except (GpurunError, OSError):
        return False
    return sight.damage is None and sight.state.token == instance.token and sight.state.may_be_billing


def sweep_leftovers(
    providers: list[Provider], home: Home, clock: Clock, *, remove_all: bool, look_only: bool
) -> Iterator[Stray]:
    """Remove side resources that no living machine and no supervisor here needs any more.

    One that does not tell its deadline may belong to a rental that is just beginning elsewhere: it takes `remove_all`.
    A provider that does not answer is MayBeBilling, raised once all the others have been swept.
    """
    silent: list[str] = []
    for provider in providers:
        if not isinstance(provider, LeavesThings):
            continue
        try:
            # In this order: what a rental that begins just now puts beside its machine is not seen without it.
            found = provider.leftovers(None)
            needed = {one.token for one in provider.find(None) if one.state is not InstanceState.GONE}
        except (Unknown, SetupError) as error:
            silent.append(f"{provider.name} ({error})")
            continue
        for left in found:
            overdue = left.deadline_wall is not None and their_wall(provider, clock) > left.deadline_wall
            if _is_driven_here(left.run, left.token, home):
                yield Stray(left, "owned")
            elif left.token in needed or look_only or not (overdue or remove_all):
                yield Stray(left, "kept")
            else:
                yield _remove(left, provider)
    if silent:
        raise _cannot_look(silent)


def _remove(left: Leftover, provider: LeavesThings) -> Stray:
    try:
        provider.remove(left)
    except (Unknown, Rejected, SetupError):
        return Stray(left, "not removed")
    return Stray(left, "removed")


def _cannot_look(silent: list[str]) -> MayBeBilling:
    what = f"What exists could not be seen at {', '.join(silent)}."
    return MayBeBilling("reap.cannot_look", what, hint="Run it again once the provider answers, or look by hand.")

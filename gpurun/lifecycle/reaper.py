"""Find what carries gpurun's token at a provider, with or without local records, and end what is overdue.

A machine past its deadline is ended no matter who made it, and so is one that lives although its end is on record here.
Within its lease a machine is ended only on request: this home's by `--destroy`, another home's only if it was named and
confirmed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError, MayBeBilling, RunHeld, SetupError
from gpurun.core.machine_token import parse_token
from gpurun.core.orphans import LONGEST_LEASE_S, Fate, Orphan, Owner, Stray
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Instance, InstanceState, Leftover, Teardown
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.fsync import require_durable
from gpurun.ledger.runs import asked_for, look_at_run
from gpurun.lifecycle.instance.terminate import prove_termination
from gpurun.lifecycle.machine_owner import (
    deadline_here,
    home_in,
    id_of,
    is_over_here,
    knows_id,
    made_by,
    open_here,
    owner_of,
)
from gpurun.lifecycle.supervisor import supervise
from gpurun.providers.base import EndsBy, LeavesThings, Provider, Rejected, Unknown, their_wall


def sweep(
    providers: list[Provider],
    home: Home,
    clock: Clock,
    *,
    destroy_all: bool,
    older_than_s: float,
    look_only: bool,
    others: Container[str] = (),
) -> Iterator[Orphan]:
    """Look at every provider; end what is past its deadline, and with `destroy_all` this home's undriven machines.

    `others` has the ids of other homes' machines that must end as well. Machines that this home's journals wait for are
    read by id, whatever their name is now. Every end is requested before any is waited for. Raise MayBeBilling for
    providers that do not answer, once all the others have been swept.
    """
    silent: list[str] = []
    doomed: list[tuple[Orphan, Provider]] = []
    waited_for = open_here(home)
    for provider in providers:
        found, unseen = _all_of(provider, home, waited_for)
        silent += unseen
        # Some clouds list dead machines.
        for instance in (listed for listed in found if listed.state is not InstanceState.GONE):
            orphan = _judge(instance, home, provider, clock)
            is_named = instance.id in others or (destroy_all and orphan.owner.is_here)
            # By id and token: a machine with only the token may be training for a copy of this home.
            is_named = is_named or (orphan.has_outlived and knows_id(orphan.owner, instance, home))
            is_doomed = orphan.fate == "overdue" or (is_named and orphan.fate != "owned")
            if is_doomed and is_older(orphan, older_than_s) and not look_only:
                doomed.append((orphan, provider))
                _ask_first(instance, provider)
            else:
                yield orphan
    for orphan, provider in doomed:
        yield _end(orphan, provider, home, clock)
    if silent:
        raise _cannot_look(silent)


def _ask_first(instance: Instance, provider: Provider) -> None:
    """Request an end that is proven later: a machine is billed until then, and the proofs before it take long.

    A box is not billed, and is free only once its run has left it.
    """
    if provider.traits.teardown in (Teardown.DESTROYED, Teardown.RELEASED):
        with suppress(Exception):  # The request is repeated later, and then the reply counts.
            provider.destroy(instance.id)


def _all_of(
    provider: Provider, home: Home, waited_for: Mapping[tuple[str, str], tuple[str, str]]
) -> tuple[list[Instance], list[str]]:
    """Return every machine of gpurun's at the provider, by its list and by awaited ids, and the failures to look.

    A machine whose id is in a journal here gets the run and the token of that journal.
    """
    found, silent = list[Instance](), list[str]()
    try:
        found += provider.find(None)
    except Unknown as error:
        found += error.found
        silent.append(f"{provider.name} ({error})")
    except SetupError as error:
        return [], [f"{provider.name} ({error})"]
    ours = {name: own for (at, name), own in waited_for.items() if at == provider.name}
    for name in ours.keys() - {instance.id for instance in found}:
        try:
            found.append(provider.read(name))
        except (Unknown, Rejected, SetupError) as error:
            silent = silent or [f"{provider.name} ({error})"]
    return [
        _as_known(instance, home, *ours[instance.id]) if instance.id in ours else instance for instance in found
    ], silent


def _as_known(instance: Instance, home: Home, run: str, token: str) -> Instance:
    """Return the machine with the run and token that it was made with, whatever its name is now."""
    is_named = bool(instance.token) and asked_for(home.run(run), instance.token)
    return instance if is_named else instance.model_copy(update={"run": run, "token": token})


def alive_in_spite(folder: RunFolder, provider_named: Callable[[str], Provider]) -> list[str]:
    """Return the ids of a run's machines whose end is on record but which their providers show alive."""
    found, made = list[str](), made_by(folder)
    for instance in made:
        with suppress(SetupError):
            found += [instance.id] if _is_alive(instance, provider_named(instance.provider)) else []
    return found


def sweep_run(provider: Provider, folder: RunFolder, clock: Clock) -> list[str]:
    """End every machine that a run requested at a provider, by its tokens alone; return the ids, proven gone.

    This is for a damaged journal. As many lists are read, over as long a time, as a proof of an end needs, since one
    list may be old. A machine with the run's name, a token that the journal lacks, and no other home in that token may
    have had its record in the damaged part: it is not ended, and MayBeBilling names it. Raise Unknown, SetupError or
    MayBeBilling only after all that can be seen is ended.
    """
    traits, bearing, unclear = provider.traits, dict[str, Instance](), list[Unknown]()
    home_id = id_of(Home(folder.home))
    for turn in range(traits.death_reads):
        clock.sleep(traits.death_spread_s / max(1, traits.death_reads - 1) if turn else 0.0)
        try:
            listed = provider.find(None)
        except Unknown as error:
            listed = list(error.found)
            unclear.append(error)
        alive = [instance for instance in listed if instance.state is not InstanceState.GONE]
        bearing |= {
            instance.id: instance
            for instance in alive
            if instance.run == folder.name or asked_for(folder, instance.token)
        }
    ours = [instance for instance in bearing.values() if asked_for(folder, instance.token)]
    for instance in ours:
        for _ in prove_termination(provider, clock, instance.id, instance.token, run=folder.name):
            pass
    doubtful = [
        instance.id
        for instance in bearing.values()
        if instance not in ours and home_in(instance.token) in ("", home_id)
    ]
    if doubtful:
        raise MayBeBilling(
            "destroy.doubtful",
            f"{provider.name} lists {', '.join(doubtful)} with the name of {folder.name}, whose damaged journal lacks "
            "its token: it may be this run's, or another home's.",
            hint=f"If it is yours: gpurun reap --destroy ends what is overdue; or by hand: {traits.console_url}.",
        )
    if unclear:
        raise unclear[-1]
    return [instance.id for instance in ours]


def is_older(orphan: Orphan, than_s: float) -> bool:
    """Return whether it is old enough to end; without a known age, only a passed deadline counts."""
    return than_s <= 0 or (orphan.overdue_s > 0 if orphan.age_s is None else orphan.age_s >= than_s)


def _judge(instance: Instance, home: Home, provider: Provider, clock: Clock) -> Orphan:
    """Judge an instance by its token, by this home's journals, and last by its tags, which anyone may edit."""
    owner, now = owner_of(instance.run, instance.token, home), their_wall(provider, clock)
    deadline_wall = _deadline_of(instance, owner, home, provider, now)
    overdue_s = now - deadline_wall if deadline_wall is not None else 0.0
    age_s = now - instance.created_wall if instance.created_wall is not None else None
    fate: Fate = "owned" if owner.whose == "supervisor" else "overdue" if overdue_s > 0 else "within lease"
    if fate == "within lease" and deadline_wall is None:
        fate = "no deadline"
    is_over = fate != "owned" and is_over_here(owner, instance, home)
    if is_over and fate != "overdue":
        fate = "closed here"
    has_outlived = is_over and _is_alive(instance, provider)
    instance = instance.model_copy(update={"deadline_wall": deadline_wall})
    return Orphan(instance, fate, overdue_s, age_s, owner, has_outlived)


def _deadline_of(instance: Instance, owner: Owner, home: Home, provider: Provider, now: float) -> float | None:
    """Return when an instance must end; None if unknown, or known only by a name that no lease explains.

    A time in the past always counts, and so does any if the provider itself ends machines past their limit.
    """
    token, here = parse_token(instance.token), deadline_here(instance.token, owner, home)
    deadline_wall = (token.deadline_wall if token else None) or here or instance.deadline_wall
    since_wall = now if instance.created_wall is None else instance.created_wall
    is_limited = here is not None or provider.traits.ends_by is EndsBy.PROVIDER
    if deadline_wall is None or is_limited or deadline_wall <= max(now, since_wall + LONGEST_LEASE_S):
        return deadline_wall
    return None


def _is_alive(instance: Instance, provider: Provider) -> bool:
    """Return whether its provider reports this id, with this token, as alive: a list may be old."""
    try:
        reported = provider.read(instance.id)
    except (Unknown, Rejected, SetupError):
        return False
    return reported.token == instance.token and reported.state not in (InstanceState.GONE, InstanceState.UNKNOWN)


def _end(orphan: Orphan, provider: Provider, home: Home, clock: Clock) -> Orphan:
    """End it through its own journal if possible, for its receipt; otherwise by its token alone."""
    instance = orphan.instance
    try:
        if not _ends_by_its_journal(orphan, home, clock):
            for _ in prove_termination(
                provider, clock, instance.id, instance.token, run=orphan.owner.run or instance.run
            ):
                pass
    except (MayBeBilling, RunHeld):
        return replace(orphan, fate="not proven gone")
    return replace(orphan, fate="destroyed")


def _ends_by_its_journal(orphan: Orphan, home: Home, clock: Clock) -> bool:
    """Drive the run to its end. Return False if this home cannot drive it."""
    run = orphan.owner.run
    if run is None or not (orphan.has_outlived or _has_it_open(run, orphan.instance.token, home)):
        return False
    try:
        require_durable(home.run(run).path)
        if orphan.has_outlived:
            supervise(home, run, clock, outlived=orphan.instance)
            return True
        # A cluster's job ends itself, and its files are downloaded first.
        if not (orphan.fate == "overdue" and look_at_run(home, run).state.shared):
            ask_to_stop(home.run(run), "destroy", by="user", reason="reaped")
        supervise(home, run, clock)
    except (MayBeBilling, RunHeld):
        raise
    except Exception as error:  # noqa: BLE001 - its receipt can wait; its end, and the others, cannot.
        logging.warning("%s is ended without a record: %s", run, error)
        return False
    return True


def _has_it_open(run: str, token: str, home: Home) -> bool:
    """Return whether the run is undamaged, has this token, and its end is not proven yet."""
    try:
        if not home.run(run).plan.exists():
            return False
        sight = look_at_run(home, run)
    except (GpurunError, OSError):
        return False
    is_whole = sight.damage is None and sight.plan_lost is None
    return is_whole and sight.state.token == token and sight.state.may_be_billing


def sweep_leftovers(
    providers: list[Provider], home: Home, clock: Clock, *, remove_all: bool, look_only: bool, anyones: bool = False
) -> Iterator[Stray]:
    """Remove side resources that no living machine and no supervisor here needs.

    One whose deadline is not over, or not known, may belong to a rental that is just beginning: `remove_all` removes
    this home's, with `anyones` also the others'. Raise MayBeBilling for providers that do not answer, once all the
    others have been swept.
    """
    silent: list[str] = []
    for provider in providers:
        if not isinstance(provider, LeavesThings):
            continue
        try:
            found, needed, unseen = _beside(provider)
        except SetupError as error:
            silent.append(f"{provider.name} ({error})")
            continue
        silent += unseen
        for left in found:
            owner = owner_of(left.run, left.token, home)
            overdue = left.deadline_wall is not None and their_wall(provider, clock) > left.deadline_wall
            is_wanted = overdue or (remove_all and (owner.is_here or anyones))
            if owner.whose == "supervisor":
                yield Stray(left, "owned", owner)
            elif left.token in needed or look_only or not is_wanted:
                yield Stray(left, "kept", owner)
            elif left.holds and not remove_all:  # Finished results there may be the only copy.
                yield Stray(left, _brought_home(left, owner, provider, home, clock), owner)
            else:
                yield Stray(left, _removed(left, provider), owner)
    if silent:
        raise _cannot_look(silent)


def _beside(provider: Provider) -> tuple[list[Leftover], set[str], list[str]]:
    """Return the leftovers that can be judged, the tokens of living machines, and the failures to look."""
    silent, dark = dict[str, None](), set[str]()
    # In this order: a rental that begins between the two reads must not show a side resource without its machine.
    try:
        found = provider.leftovers(None) if isinstance(provider, LeavesThings) else []
    except Unknown as error:
        found = [*error.left]
        silent[f"{provider.name} ({error})"] = None
    try:
        listed = provider.find(None)
    except Unknown as error:
        listed, dark = [*error.found], set(error.regions)
        found = found if dark else []
        silent[f"{provider.name} ({error})"] = None
    needed = {instance.token for instance in listed if instance.state is not InstanceState.GONE}
    return [left for left in found if left.region not in dark], needed, [*silent]


def _brought_home(
    left: Leftover, owner: Owner, provider: LeavesThings, home: Home, clock: Clock
) -> Literal["removed", "kept"]:
    """Drive the run that owns a folder: it downloads what is there and removes it. "kept" if it cannot."""
    try:
        if owner.run is None or not _has_it_open(owner.run, left.token, home):
            return "kept"
        supervise(home, owner.run, clock)
        return "kept" if provider.leftovers(left.token) else "removed"
    except (GpurunError, Unknown):
        return "kept"


def _removed(left: Leftover, provider: LeavesThings) -> Literal["removed", "not removed"]:
    try:
        provider.remove(left)
    except (Unknown, Rejected, SetupError):
        return "not removed"
    return "removed"


def _cannot_look(silent: list[str]) -> MayBeBilling:
    what = f"What exists could not be seen at {', '.join(silent)}."
    return MayBeBilling(
        "reap.cannot_look", what, hint="Run the command again once the provider answers, or look in its console."
    )

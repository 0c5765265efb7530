"""Find the machines with gpurun's token at a provider, with or without local records, and end the overdue ones.

A machine beyond its deadline is ended, whichever home rented it. A machine that still runs although this home recorded
its end is ended too. Within its lease a machine is ended only on request: `--destroy` covers this home's machines, and
another home's machine must be named and confirmed.
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
from gpurun.ledger.runs import has_requested, look_at_run
from gpurun.lifecycle.instance.terminate import prove_termination
from gpurun.lifecycle.machine_owner import (
    awaited_machines,
    created_machines,
    has_recorded_end,
    home_id_in,
    journal_has_id,
    own_home_id,
    owner_of,
    recorded_deadline,
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
    """End overdue machines at every provider; with `destroy_all`, also this home's machines without a supervisor.

    Yield each machine with what was decided about it. `others` has the ids of other homes' machines to end as well. The
    machines that this home's journals wait for are read by id, because their names may have been edited. Every end is
    requested before the first proof begins. With `look_only`, nothing is ended. Raise MayBeBilling at the end if a
    provider did not answer.
    """
    silent: list[str] = []
    doomed: list[tuple[Orphan, Provider]] = []
    waited_for = awaited_machines(home)
    for provider in providers:
        found, unseen = _list_machines(provider, home, waited_for)
        silent += unseen
        for instance in found:
            if instance.state is InstanceState.GONE:  # Some clouds also list dead machines.
                continue
            orphan = _judge(instance, home, provider, clock)
            is_named = instance.id in others or (destroy_all and orphan.owner.is_here)
            # Id and token must both match: a machine with only the token may be training for a copy of this home.
            is_named = is_named or (orphan.has_outlived and journal_has_id(orphan.owner, instance, home))
            is_doomed = orphan.fate == "overdue" or (is_named and orphan.fate != "owned")
            if is_doomed and is_older(orphan, older_than_s) and not look_only:
                doomed.append((orphan, provider))
                _request_end_before_proof(instance, provider)
            else:
                yield orphan
    for orphan, provider in doomed:
        yield _end(orphan, provider, home, clock)
    if silent:
        raise _make_cannot_look_error(silent)


def _request_end_before_proof(instance: Instance, provider: Provider) -> None:
    """Request the end of a rented machine now and ignore the reply. `_end` repeats the request and proves it.

    The proofs of other machines take long, and this machine is billed meanwhile. A user's box is not billed, so its end
    is requested only by `_end`.
    """
    if provider.traits.teardown in (Teardown.DESTROYED, Teardown.RELEASED):
        with suppress(Exception):  # `_end` repeats the request and checks the reply.
            provider.destroy(instance.id)


def _list_machines(
    provider: Provider, home: Home, waited_for: Mapping[tuple[str, str], tuple[str, str]]
) -> tuple[list[Instance], list[str]]:
    """Return gpurun's machines at a provider, and messages about requests that failed.

    The machines come from the provider's list and from the ids that this home waits for. A machine whose id this home
    waits for gets the run and the token from that journal.
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
    for name in ours.keys() - {machine.id for machine in found}:
        try:
            found.append(provider.read(name))
        except (Unknown, Rejected, SetupError) as error:
            silent = silent or [f"{provider.name} ({error})"]
    machines = [
        _with_recorded_token(machine, home, *ours[machine.id]) if machine.id in ours else machine for machine in found
    ]
    return machines, silent


def _with_recorded_token(instance: Instance, home: Home, run: str, token: str) -> Instance:
    """Return the machine with the run and token of its journal, unless its own token is already in that journal."""
    is_named = bool(instance.token) and has_requested(home.run(run), instance.token)
    return instance if is_named else instance.model_copy(update={"run": run, "token": token})


def outlived_machines(folder: RunFolder, provider_named: Callable[[str], Provider]) -> list[str]:
    """Return the ids of a run's machines that their providers show as alive although the journal has their end."""
    found, made = list[str](), created_machines(folder)
    for instance in made:
        with suppress(SetupError):
            found += [instance.id] if _is_alive(instance, provider_named(instance.provider)) else []
    return found


def sweep_run(provider: Provider, folder: RunFolder, clock: Clock) -> list[str]:
    """End every machine with a token that a run requested at a provider; return the ids, all proven gone.

    This is for a damaged journal. The list is read as often, and over as long a time, as a proof needs, because a
    single list may be old. The damaged part may have had the record of a machine: then the machine has the run's name,
    and a token that is not in the journal and names no other home. Such a machine is not ended; MayBeBilling names it.
    Unknown, SetupError and MayBeBilling are raised only after all machines with a known token were ended.
    """
    traits, bearing, unclear = provider.traits, dict[str, Instance](), list[Unknown]()
    home_id = own_home_id(Home(folder.home))
    for turn in range(traits.death_reads):
        clock.sleep(traits.death_spread_s / max(1, traits.death_reads - 1) if turn else 0.0)
        try:
            listed = provider.find(None)
        except Unknown as error:
            listed = list(error.found)
            unclear.append(error)
        alive = [machine for machine in listed if machine.state is not InstanceState.GONE]
        for machine in alive:
            if machine.run == folder.name or has_requested(folder, machine.token):
                bearing[machine.id] = machine
    ours = [machine for machine in bearing.values() if has_requested(folder, machine.token)]
    for machine in ours:
        for _ in prove_termination(provider, clock, machine.id, machine.token, run=folder.name):
            pass
    others = [machine for machine in bearing.values() if machine not in ours]
    doubtful = [machine.id for machine in others if home_id_in(machine.token) in ("", home_id)]
    if doubtful:
        raise MayBeBilling(
            "destroy.doubtful",
            f"{provider.name} lists {', '.join(doubtful)}, named after {folder.name}. That run's journal is damaged "
            "and lacks the token: this may be the run's machine, or another home's.",
            hint=f"If it is yours: gpurun reap --destroy ends what is overdue; or by hand: {traits.console_url}.",
        )
    if unclear:
        raise unclear[-1]
    return [machine.id for machine in ours]


def is_older(orphan: Orphan, than_s: float) -> bool:
    """Return whether a machine is at least `than_s` seconds old.

    If its age is unknown, return whether its deadline has passed.
    """
    return than_s <= 0 or (orphan.overdue_s > 0 if orphan.age_s is None else orphan.age_s >= than_s)


def _judge(instance: Instance, home: Home, provider: Provider, clock: Clock) -> Orphan:
    """Decide what to do with a machine.

    The sources are its token, this home's journals and, with the lowest priority, its tags, which can be edited.
    """
    owner, now = owner_of(instance.run, instance.token, home), their_wall(provider, clock)
    deadline_wall = _deadline_of(instance, owner, home, provider, now)
    overdue_s = now - deadline_wall if deadline_wall is not None else 0.0
    age_s = now - instance.created_wall if instance.created_wall is not None else None
    fate: Fate = "owned" if owner.whose == "supervisor" else "overdue" if overdue_s > 0 else "within lease"
    if fate == "within lease" and deadline_wall is None:
        fate = "no deadline"
    is_over = fate != "owned" and has_recorded_end(owner, instance, home)
    if is_over and fate != "overdue":
        fate = "closed here"
    has_outlived = is_over and _is_alive(instance, provider)
    instance = instance.model_copy(update={"deadline_wall": deadline_wall})
    return Orphan(instance, fate, overdue_s, age_s, owner, has_outlived)


def _deadline_of(instance: Instance, owner: Owner, home: Home, provider: Provider, now: float) -> float | None:
    """Return when an instance must end; None if that is unknown or implausible.

    A deadline that only the machine's name or tags state is implausible if it is later than the longest lease allows.
    Every deadline is accepted if the provider itself ends machines at their deadline.
    """
    token, here = parse_token(instance.token), recorded_deadline(instance.token, owner, home)
    deadline_wall = (token.deadline_wall if token else None) or here or instance.deadline_wall
    since_wall = now if instance.created_wall is None else instance.created_wall
    is_limited = here is not None or provider.traits.ends_by is EndsBy.PROVIDER
    if deadline_wall is None or is_limited or deadline_wall <= max(now, since_wall + LONGEST_LEASE_S):
        return deadline_wall
    return None


def _is_alive(instance: Instance, provider: Provider) -> bool:
    """Read a machine, because a list may be old. Return whether it is alive and has the same token."""
    try:
        reported = provider.read(instance.id)
    except (Unknown, Rejected, SetupError):
        return False
    return reported.token == instance.token and reported.state not in (InstanceState.GONE, InstanceState.UNKNOWN)


def _end(orphan: Orphan, provider: Provider, home: Home, clock: Clock) -> Orphan:
    """End a machine. If possible, drive its run, which also writes the receipt; otherwise use only its token."""
    instance = orphan.instance
    try:
        if not _end_by_driving(orphan, home, clock):
            for _ in prove_termination(
                provider, clock, instance.id, instance.token, run=orphan.owner.run or instance.run
            ):
                pass
    except (MayBeBilling, RunHeld):
        return replace(orphan, fate="not proven gone")
    return replace(orphan, fate="destroyed")


def _end_by_driving(orphan: Orphan, home: Home, clock: Clock) -> bool:
    """Drive the run to its end. Return False if this home cannot drive the run."""
    run = orphan.owner.run
    if run is None or not (orphan.has_outlived or _is_open_run(run, orphan.instance.token, home)):
        return False
    try:
        require_durable(home.run(run).path)
        if orphan.has_outlived:
            supervise(home, run, clock, outlived=orphan.instance)
            return True
        # An overdue cluster job has ended itself; driving the run downloads its files.
        if not (orphan.fate == "overdue" and look_at_run(home, run).state.shared):
            ask_to_stop(home.run(run), "destroy", by="user", reason="reaped")
        supervise(home, run, clock)
    except (MayBeBilling, RunHeld):
        raise
    except Exception as error:  # noqa: BLE001 - the receipt can wait; ending the machines cannot.
        logging.warning("%s is ended without a record: %s", run, error)
        return False
    return True


def _is_open_run(run: str, token: str, home: Home) -> bool:
    """Return whether the run is undamaged, its machine has this token, and it may still be billed."""
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
    """Remove the side resources that no living machine and no local supervisor needs. Yield each with its fate.

    A resource without a deadline in the past may belong to a rental that is just beginning. It is removed only with
    `remove_all`; if it belongs to another home, only with `anyones` too. With `look_only`, nothing is removed. Raise
    MayBeBilling at the end if a provider did not answer.
    """
    silent: list[str] = []
    for provider in providers:
        if not isinstance(provider, LeavesThings):
            continue
        try:
            found, needed, unseen = _list_side_resources(provider)
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
            elif left.holds and not remove_all:  # The finished results in this resource may be the only copy.
                yield Stray(left, _drive_to_download(left, owner, provider, home, clock), owner)
            else:
                yield Stray(left, _remove(left, provider), owner)
    if silent:
        raise _make_cannot_look_error(silent)


def _list_side_resources(provider: Provider) -> tuple[list[Leftover], set[str], list[str]]:
    """Return leftovers in the regions that answered, tokens of living machines, and messages about failed requests."""
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
    needed = {machine.token for machine in listed if machine.state is not InstanceState.GONE}
    return [left for left in found if left.region not in dark], needed, [*silent]


def _drive_to_download(
    left: Leftover, owner: Owner, provider: LeavesThings, home: Home, clock: Clock
) -> Literal["removed", "kept"]:
    """Drive the run that owns a leftover folder, so that its files are downloaded and the folder is removed.

    Return "removed", or "kept" if the run cannot be driven or the folder remains.
    """
    try:
        if owner.run is None or not _is_open_run(owner.run, left.token, home):
            return "kept"
        supervise(home, owner.run, clock)
        return "kept" if provider.leftovers(left.token) else "removed"
    except (GpurunError, Unknown):
        return "kept"


def _remove(left: Leftover, provider: LeavesThings) -> Literal["removed", "not removed"]:
    try:
        provider.remove(left)
    except (Unknown, Rejected, SetupError):
        return "not removed"
    return "removed"


def _make_cannot_look_error(silent: list[str]) -> MayBeBilling:
    what = f"The machines could not be listed at {', '.join(silent)}."
    return MayBeBilling(
        "reap.cannot_look", what, hint="Run the command again once the provider answers, or look in its console."
    )

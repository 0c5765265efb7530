"""Find out which run and home own a machine, from its token, its id and this home's journals.

Two homes may have runs of the same name, and any user of the account can edit a name or a tag at a provider.
"""

from __future__ import annotations

from contextlib import suppress

from gpurun.core.errors import GpurunError, RunHeld, SetupError
from gpurun.core.journal_events import CreateIntended, CreateObserved, Incident
from gpurun.core.journal_records import Phase, RunState, all_typed, opened_of
from gpurun.core.machine_token import parse_token
from gpurun.core.orphans import Owner
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Instance, InstanceState
from gpurun.ledger.journal import read_journal
from gpurun.ledger.run_lock import holder_of
from gpurun.ledger.run_state import replay_journal
from gpurun.ledger.runs import has_requested, look_at_all, planned_runs
from gpurun.lifecycle.context import Context
from gpurun.providers.base import Provider, Unknown

_ENDED = (Phase.OPENED, Phase.GONE, Phase.SETTLED, Phase.CLOSED)


def recorded_deadline(token: str, owner: Owner, home: Home) -> float | None:
    """Return the deadline that this home's journal has for a token; None if it has none.

    The deadline is on the provider's clock if the machine reported it on that clock.
    """
    records = read_journal(home.run(owner.run).journal).records if owner.run is not None else []
    made = [event.instance.deadline_wall for event in all_typed(records, CreateObserved) if event.token == token]
    planned = [event.deadline_wall for event in all_typed(records, CreateIntended) if event.token == token]
    return next((wall for wall in (*made, *planned) if wall is not None), None)


def owner_of(run: str, token: str, home: Home) -> Owner:
    """Return the owner of a machine or resource.

    Only the token decides: homes may share run names, and any user of the account may edit tags.
    """
    home_id, here = home_id_in(token), _run_here(run, token, home)
    if here is not None:
        return Owner("supervisor" if _has_supervisor(home.run(here), token) else "here", home_id, here)
    if home_id:
        return Owner("here" if home_id == own_home_id(home) else "elsewhere", home_id)
    return Owner("unknown")


def home_id_in(token: str) -> str:
    """Return the id of the home that a token names; "" if it names none."""
    parsed = parse_token(token)
    return parsed.home if parsed else ""


def own_home_id(home: Home) -> str:
    """Return this home's id; "" if the id cannot be read, or not be created, for example on a full disk.

    With "", no machine counts as this home's.
    """
    try:
        return home.id
    except SetupError:
        return ""


def _run_here(run: str, token: str, home: Home) -> str | None:
    """Return the name of this home's run that has the token in its journal, or None.

    The token may contain only the start of the run's name.
    """
    parsed = parse_token(token)
    there = [folder.name for folder in home.folders()] if token else []
    for name in [name for name in there if name == run or (parsed and name.startswith(parsed.run))]:
        with suppress(OSError):  # Another user's files may be unreadable.
            if has_requested(home.run(name), token):
                return name
    return None


def _has_supervisor(folder: RunFolder, token: str) -> bool:
    """Return whether a living supervisor drives its run on the machine with this token.

    An earlier machine of the same run does not count. If the journal is damaged, the current machine is not known, and
    every machine of the run counts.
    """
    try:
        if holder_of(folder.lock) is None:
            return False
        reading = read_journal(folder.journal)
        return reading.damage is not None or replay_journal(folder.name, reading.records).token == token
    except (OSError, SetupError):
        return False


def awaited_machines(home: Home) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the machines that this home's runs still wait for: (provider, id) -> (run, token)."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    with suppress(OSError, GpurunError):  # A home that cannot be read must not prevent a check of the clouds.
        for sight, _ in look_at_all(home, planned_runs(home, only_open=True)):
            state = sight.state if sight is not None else None
            if state is None or not state.may_be_billing:
                continue
            ids = {name: token or state.token for name, token in state.late.items()}
            if state.instance is not None and state.phase not in _ENDED:
                ids[state.instance.id] = state.token
            for name, token in ids.items():
                attempt = state.attempts.get(token)
                found[attempt.provider if attempt is not None else state.provider, name] = state.run, token
    return found


def has_recorded_end(owner: Owner, instance: Instance, home: Home) -> bool:
    """Return whether a run of this home requested this machine and has since recorded its end.

    Return False if the journal is damaged, or if a supervisor drives the run, because the supervisor then ends the
    machine.
    """
    state = _read_undriven_state(owner, home)
    if state is None or instance.token not in state.attempts:
        return False
    return state.token != instance.token or state.phase in _ENDED


def created_machines(folder: RunFolder) -> list[Instance]:
    """Return the machines that a run's journal records as created: one per token, in their last recorded state."""
    created = all_typed(read_journal(folder.journal).records, CreateObserved)
    return list({event.token: event.instance for event in created}.values())


def journal_has_id(owner: Owner, instance: Instance, home: Home) -> bool:
    """Return whether the journal that has the machine's token also has its id."""
    records = read_journal(home.run(owner.run).journal).records if owner.run is not None else []
    ids = {event.instance.id for event in all_typed(records, CreateObserved) if event.token == instance.token}
    return instance.id in ids | {event.id for event in all_typed(records, Incident) if event.token == instance.token}


def refuse_beside_copy(provider: Provider, state: RunState, context: Context, outcome: str) -> None:
    """Raise RunHeld if the provider shows a living machine of this run that this journal did not request.

    A copied, synced or restored home has the same run and may be driving it. Machines of the home that opened the run
    are checked too, because a moved run folder still has that home's tokens. Raise Unknown if the provider's list is
    incomplete.
    """
    run, doubt = state.run, None
    try:
        found = provider.find(None)
    except Unknown as error:
        found, doubt = list(error.found), error
    homes = {context.home.id, opened_of(read_journal(context.folder.journal).records).home}
    for machine in found:
        token = parse_token(machine.token)
        # A token may contain only the start of the run's name.
        is_of_run = token is not None and token.home in homes and token.run_or(run) == run
        if is_of_run and machine.state is not InstanceState.GONE and machine.token not in state.attempts:
            raise RunHeld(
                "run.elsewhere",
                f"{machine.id} at {provider.name} was created for {run} by a copy of this home, and still exists.",
                hint=f"{outcome} In that copy of the home, continue the run or end its machine: gpurun destroy {run}.",
            )
    if doubt is not None:
        raise doubt


def _read_undriven_state(owner: Owner, home: Home) -> RunState | None:
    """Return the state of a run in this home if no process drives it and its journal is undamaged; otherwise None."""
    if owner.run is None:
        return None
    folder = home.run(owner.run)
    try:
        if holder_of(folder.lock) is not None:
            return None
        reading = read_journal(folder.journal)
    except (OSError, SetupError):
        return None
    return None if reading.damage is not None else replay_journal(folder.name, reading.records)

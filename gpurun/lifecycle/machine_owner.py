"""Whose a machine is, and whether its run still waits for it, by its token, its id and this home's journals.

Two homes may have runs of one name, and a name or a tag at a provider can be edited by anybody who has the account.
"""

from __future__ import annotations

from contextlib import suppress

from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.journal_events import CreateIntended, CreateObserved, Incident
from gpurun.core.journal_records import Phase, RunState, all_typed
from gpurun.core.machine_token import parse_token
from gpurun.core.orphans import Owner
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Instance
from gpurun.ledger.journal import read_journal
from gpurun.ledger.run_lock import holder_of
from gpurun.ledger.run_state import replay_journal
from gpurun.ledger.runs import asked_for, look_at_all, planned_runs

_OVER = (Phase.OPENED, Phase.GONE, Phase.SETTLED, Phase.CLOSED)


def deadline_here(token: str, owner: Owner, home: Home) -> float | None:
    """The deadline of a token as this home's journal has it; by the provider's clock where the machine told it then."""
    records = read_journal(home.run(owner.run).journal).records if owner.run is not None else []
    made = [one.instance.deadline_wall for one in all_typed(records, CreateObserved) if one.token == token]
    asked = [one.deadline_wall for one in all_typed(records, CreateIntended) if one.token == token]
    return next((wall for wall in (*made, *asked) if wall is not None), None)


def owner_of(run: str, token: str, home: Home) -> Owner:
    """Whose something is, by its token alone: two homes may have runs of one name, and a tag can be edited."""
    home_id, here = home_in(token), _run_here(run, token, home)
    if here is not None:
        return Owner("supervisor" if _is_driven(home.run(here), token) else "here", home_id, here)
    if home_id:
        return Owner("here" if home_id == id_of(home) else "elsewhere", home_id)
    return Owner("unknown")


def home_in(token: str) -> str:
    """Return the id of the home that a token names; "" where it names none."""
    told = parse_token(token)
    return told.home if told else ""


def id_of(home: Home) -> str:
    """This home's id; "" where it can be neither read nor made, as on a full disk: then nothing is known to be its."""
    try:
        return home.id
    except SetupError:
        return ""


def _run_here(run: str, token: str, home: Home) -> str | None:
    """The run of this home whose journal has the token; in a token, a long run's name is cut."""
    told = parse_token(token)
    there = [folder.name for folder in home.folders()] if token else []
    for name in [one for one in there if one == run or (told and one.startswith(told.run))]:
        with suppress(OSError):  # They are another user's files, say: nobody is seen to have asked for it.
            if asked_for(home.run(name), token):
                return name
    return None


def _is_driven(folder: RunFolder, token: str) -> bool:
    """Whether a living supervisor has it for its machine: what its run asked for earlier, it only wants gone.

    A journal that is damaged does not say which of them it is.
    """
    try:
        if holder_of(folder.lock) is None:
            return False
        reading = read_journal(folder.journal)
        return reading.damage is not None or replay_journal(folder.name, reading.records).token == token
    except (OSError, SetupError):
        return False


def open_here(home: Home) -> dict[tuple[str, str], tuple[str, str]]:
    """Return what this home's runs wait for and know by its id: by provider and id, the run and the token."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    with suppress(OSError, GpurunError):  # A home that cannot be read keeps nobody from looking at the clouds.
        for sight, _ in look_at_all(home, planned_runs(home, only_open=True)):
            state = sight.state if sight is not None else None
            if state is None or not state.may_be_billing:
                continue
            ids = {name: token or state.token for name, token in state.late.items()}
            if state.instance is not None and state.phase not in _OVER:
                ids[state.instance.id] = state.token
            for name, token in ids.items():
                asked = state.asked.get(token)
                found[asked.provider if asked is not None else state.provider, name] = state.run, token
    return found


def is_over_here(owner: Owner, instance: Instance, home: Home) -> bool:
    """Whether a run of this home asked for a machine, and its end was believed, whatever was found out since.

    False while somebody drives the run, who sees to it, and where its journal is damaged.
    """
    state = _state_of(owner, home)
    if state is None or instance.token not in state.asked:
        return False
    return state.token != instance.token or state.phase in _OVER


def made_by(folder: RunFolder) -> list[Instance]:
    """Return the machines that a run's journal has, each as it was told last at its creation."""
    return list(
        {one.token: one.instance for one in all_typed(read_journal(folder.journal).records, CreateObserved)}.values()
    )


def knows_id(owner: Owner, instance: Instance, home: Home) -> bool:
    """Whether the journal here that has the machine's token names its id with it, too."""
    records = read_journal(home.run(owner.run).journal).records if owner.run is not None else []
    ids = {one.instance.id for one in all_typed(records, CreateObserved) if one.token == instance.token}
    return instance.id in ids | {one.id for one in all_typed(records, Incident) if one.token == instance.token}


def _state_of(owner: Owner, home: Home) -> RunState | None:
    """The state of a run of this home that nobody drives and whose journal is whole."""
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

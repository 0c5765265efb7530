"""What `gpurun reap` says of what it found: whose it is, what became of it, what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurun.core.untrusted import safe_line
from gpurun.lifecycle.machine_owner import Owner
from gpurun.lifecycle.reaper import LONGEST_LEASE_S, Orphan, Stray
from gpurun.providers.base import Provider, endpoint_of
from gpurun.view.list_tables import OrphanRow

_ACTIONS = {
    "owned": "left: a supervisor here drives it",
    "within lease": "left: within its lease ({flags} ends it)",
    "no deadline": "DEADLINE UNKNOWN ({flags} ends it)",
    "closed here": "MAY BE BILLING: its end was believed",
    "overdue": "overdue: gpurun reap ends it",
    "destroyed": "destroyed, proven",
    "not proven gone": "NOT PROVEN GONE",
}
ALARMING = ("overdue", "not proven gone", "no deadline", "closed here")
RED = ("not proven gone", "no deadline", "closed here")


def reap_data(asked: Sequence[Provider], found: Sequence[Orphan], strays: Sequence[Stray]) -> dict[str, object]:
    """Who was asked and what was found, for programs."""
    return {
        "asked": [one.name for one in asked],
        "endpoints": {one.name: url for one in asked if (url := endpoint_of(one))},
        "found": [{**orphan.instance.model_dump(mode="json"), **_told(orphan)} for orphan in found],
        "leftovers": [{**stray.leftover.model_dump(mode="json"), **_told(stray)} for stray in strays],
    }


def _told(one: Orphan | Stray) -> dict[str, object]:
    return {"fate": one.fate, "owner": one.owner.whose, "home": one.owner.home}


def _owner(owner: Owner) -> str:
    """Whose it is, in words."""
    words = {"supervisor": "a supervisor here", "here": "this home", "elsewhere": f"home {owner.home}"}
    return words.get(owner.whose, "unknown")


def _flags(owner: Owner) -> str:
    return "--destroy" if owner.is_here else "--destroy --anyones"


def with_endpoint(provider: Provider) -> str:
    """The provider by its name; where something else than its own API answers in that name, by whose address too."""
    url = endpoint_of(provider)
    return f"{provider.name} at {safe_line(url)}, which is not its own address" if url else provider.name


def notes_of(found: list[Orphan]) -> Iterator[str]:
    """What to do about each machine that may be billed with nobody to end it, and what became of one that was so."""
    for one in found:
        who = safe_line(f"{one.instance.provider} {one.instance.id}")
        ends = f"gpurun reap {_flags(one.owner)}"
        if one.fate == "no deadline":
            most = f"{LONGEST_LEASE_S / 3600:.0f} h"
            yield (
                f"{who} tells no deadline, or one more than {most} after its start, of which no journal here knows. "
                f"If nobody needs it: {ends}, or its console."
            )
        elif one.fate == "closed here":
            yield f"{who} is listed, and by the record of {one.owner.run} there is no such machine: {ends} ends it."
        elif one.has_outlived:
            yield f"{who} lived though its end had been believed: gpurun audit {one.owner.run} says what that means."


def orphan_row(orphan: Orphan) -> OrphanRow:
    """The row of a machine."""
    instance = orphan.instance
    return OrphanRow(
        run=instance.run or "?",
        provider=instance.provider,
        instance=instance.id,
        state=str(instance.state),
        owner=_owner(orphan.owner),
        action=_ACTIONS[orphan.fate].format(flags=_flags(orphan.owner)),
        rate_micros_per_hour=instance.rate_micros_per_hour,
        created_wall=instance.created_wall,
        deadline_wall=instance.deadline_wall,
        alarming=orphan.fate in ALARMING,
    )


def stray_row(stray: Stray) -> OrphanRow:
    """The row of a thing that a machine left."""
    left = stray.leftover
    return OrphanRow(
        run=left.run or "?",
        provider=left.provider,
        instance=left.id,
        state=left.kind,
        owner=_owner(stray.owner),
        action={"kept": f"left: it may be needed ({_flags(stray.owner)} removes it)"}.get(stray.fate, stray.fate),
        rate_micros_per_hour=None,
        created_wall=None,
        deadline_wall=left.deadline_wall,
        alarming=stray.fate == "not removed",
    )

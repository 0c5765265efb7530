"""The result of `gpurun reap`: the owner of each machine, what happened to it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurun.core.clock import local_minute
from gpurun.core.money import format_rate
from gpurun.core.orphans import LONGEST_LEASE_S, Orphan, Owner, Stray
from gpurun.core.records import Instance, Leftover
from gpurun.core.untrusted import safe_line
from gpurun.view.number_format import UNKNOWN, format_duration
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, line
from gpurun.view.table import Column, table

_ACTIONS = {
    "owned": "left: a supervisor here drives it",
    "within lease": "left: within its lease ({flags} ends it)",
    "no deadline": "DEADLINE UNKNOWN ({flags} ends it)",
    "closed here": "MAY BE BILLING: its end was only assumed",
    "overdue": "overdue: gpurun reap ends it",
    "destroyed": "destroyed, proven",
    "not proven gone": "NOT PROVEN GONE",
}


def reap_table(found: Sequence[Orphan | Stray], queried: Sequence[str], style: Style, *, now: float) -> list[Line]:
    """Return a table of everything with gpurun's tag. If nothing was found, name the providers that were queried."""
    if not found:
        nothing = f" Nothing of gpurun is left at: {', '.join(queried)}."
        return [line(" ", Span("✔", "good"), nothing)] if queried else []
    columns = (
        Column(""),
        Column("RUN"),
        Column("PROVIDER", leaves=2),
        Column("INSTANCE", leaves=3),
        Column("STATE"),
        Column("OWNER", leaves=1),
        Column("$/h", right=True, leaves=4),
        Column("AGE", right=True, leaves=5),
        Column("DEADLINE", right=True, leaves=6),
        Column("ACTION", least=34),
    )
    return table(columns, [_cells(item, now) for item in found], style)


def reap_notes(found: Sequence[Orphan]) -> Iterator[str]:
    """Yield what to do about each machine that may be billed unattended, or what was done about it."""
    for orphan in found:
        who = safe_line(f"{orphan.instance.provider} {orphan.instance.id}")
        ends = f"gpurun reap {_reap_flags(orphan.owner)}"
        if orphan.fate == "no deadline":
            most = f"{LONGEST_LEASE_S / 3600:.0f} h"
            yield (
                f"{who} has no trustworthy deadline: none, or one more than {most} away that no journal has. "
                f"If it is not needed, end it with {ends}, or in the provider's console."
            )
        elif orphan.fate == "closed here":
            yield f"{who} is listed, although {orphan.owner.run} has recorded its end: {ends} ends it."
        elif orphan.has_outlived:
            audits = f"gpurun audit {orphan.owner.run} explains what that means."
            yield f"{who} was still alive although its end had been recorded: {audits}"


def _cells(found: Orphan | Stray, now: float) -> list[Cell]:
    owner, flags, rate, created_wall = found.owner, _reap_flags(found.owner), None, None
    thing: Instance | Leftover
    if isinstance(found, Orphan):
        thing, state, action = found.instance, str(found.instance.state), _ACTIONS[found.fate].format(flags=flags)
        rate, created_wall = found.instance.rate_micros_per_hour, found.instance.created_wall
    else:
        thing, state, action = found.leftover, found.leftover.kind, str(found.fate)
        if found.fate == "kept":
            action = f"left: it may be needed ({flags} removes it)"
    whose = {"supervisor": "a supervisor here", "here": "this home", "elsewhere": f"home {owner.home}"}
    look = "bad" if found.is_alarming else ""
    return [
        Span("!" if look else "", "bad"),
        Span(thing.run or "?", look),
        thing.provider,
        thing.id,
        Span(state, look),
        whose.get(owner.whose, "unknown"),
        UNKNOWN if rate is None else format_rate(rate).removesuffix("/h"),
        UNKNOWN if created_wall is None else format_duration(now - created_wall),
        UNKNOWN if thing.deadline_wall is None else local_minute(thing.deadline_wall, now=now),
        Span(action, look),
    ]


def _reap_flags(owner: Owner) -> str:
    return "--destroy" if owner.is_here else "--destroy --anyones"

"""The table of judged offers: which fit, their speed, time and cost, ranked by the cost of finishing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from gpurun.core.money import Micros, format_usd
from gpurun.view.number_format import UNKNOWN, format_duration
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, wrap
from gpurun.view.table import Column, table

if TYPE_CHECKING:
    from gpurun.core.records import Offer
    from gpurun.core.run_plan import Candidate, Estimate

__all__ = ["candidates_table", "guard_words"]

MOST_ROWS = 10
_COLUMNS: tuple[Column, ...] = (
    Column(""),
    Column("Provider", leaves=3),
    Column("GPU", least=14),
    Column("Region", leaves=6, least=9),
    Column("$/h", right=True, leaves=4),
    Column("fit", right=True, leaves=7),
    Column("tok/s", right=True, leaves=8),
    Column("time", right=True),
    Column("est. $", right=True),
    Column("slow $", right=True, leaves=2),
    Column("boot", right=True, leaves=9),
    Column("gets to", right=True, leaves=10),
    Column("dies by", leaves=5),
)
_OF_COMMANDS = ("", "Provider", "GPU", "Region", "$/h", "time", "boot", "dies by")
"""The columns that apply if the job is the user's own command."""
_LEGEND = {
    "fit": "fit: sequences at once on a GPU (or CPU) / GiB that they need",
    "slow $": "slow $: the cost at the slow end of the estimate",
    "dies by": "dies by: what ends the machine if this laptop is lost, or why it is not chosen",
}
"""The meaning of a column, shown below the table."""
_SHORT_DEATHS = (
    (re.compile(r"NO\b.*"), "NO"),
    (re.compile(r"yes · (power-off) .*"), r"\1"),
    (re.compile(r"yes · ([^,]+).*"), r"\1"),
)
"""Short names of what ends a machine, so that the column fits beside the others in a narrow terminal."""
_OBSTACLES = {
    "cap": "over cap",
    "hours": "over the hours",
    "memory": "no fit",
    "year": "over a year",
    "speed": "speed unknown",
    "batch": "uneven",
    "processes": "one process",
    "precision": "no bf16",
}
"""For each reason code, a short form of why an offer does not finish. It is used if no needed amount is known."""
_MEANINGS = {
    "NO": "NO: only this laptop ends it",
    "consent": "weak lease: only this laptop would end it; --accept-weak-lease allows it",
    "cap": "needs: the cap that it needs to finish",
    "speed": "speed unknown: no measurement for this card; --hours sets how long to train on it",
    "batch": "uneven: a step's sequences cannot be shared equally by the GPUs",
    "processes": 'one process: train.loop "huggingface" uses one GPU; others would be idle',
    "precision": "no bf16: the card lacks the recipe's precision",
}
"""The meaning of a short form, by its code, for the legend."""


def candidates_table(
    candidates: Sequence[Candidate],
    style: Style,
    *,
    chosen: Offer | None = None,
    cap: Micros | None = None,
    every: bool = False,
    end_s: int | None = None,
) -> list[Line]:
    """Return a row for each GPU and price, in the given order, and the meaning of the columns. Mark the chosen offer.

    With `end_s` the duration of the job is unknown: the time shown is its limit, minus the time that its end needs.
    Without `every` there are at most ten rows, preferably of rentable offers, and a note states how many offers are
    hidden, and why.
    """
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        offer = candidate.offer
        groups.setdefault((offer.provider, offer.label, offer.tier, offer.rate_micros_per_hour), []).append(candidate)
    ours = next((group for group in groups.values() if chosen in [candidate.offer for candidate in group]), None)
    shown = list(groups.values()) if every else _choose_best_groups(list(groups.values()), ours)
    columns, rows = _COLUMNS, [_row(group, chosen if group is ours else None, end_s=end_s) for group in shown]
    if end_s is not None:
        kept = [place for place, column in enumerate(_COLUMNS) if column.title in _OF_COMMANDS]
        columns, rows = tuple(_COLUMNS[place] for place in kept), [[row[place] for place in kept] for row in rows]
    lines = table(columns, rows, style)
    hidden = [group[0] for group in groups.values() if group not in shown]
    notes = [f"{len(hidden)} more ({_describe_hidden_rows(hidden)}): plan --all."] if hidden else []
    if cap is not None:
        is_any = any(group[0].lease is not None for group in shown)
        holds = f"The cap of {format_usd(cap)} holds whichever is rented."
        notes.append(holds if is_any else f"None of them finishes under the cap of {format_usd(cap)}.")
    notes.append(_legend(lines[0], [group[0] for group in shown]))
    return [*lines, *(row for text in notes for row in wrap(text, style, indent=2, look="dim"))]


def _choose_best_groups(groups: list[list[Candidate]], ours: list[Candidate] | None) -> list[list[Candidate]]:
    """Return the ten best groups of rentable offers, with the chosen one; if none is rentable, the ten best."""
    open_ones = [group for group in groups if group[0].lease is not None] or groups
    best = open_ones[:MOST_ROWS]
    return best if ours is None or ours in best else [*best[: MOST_ROWS - 1], ours]


def _describe_hidden_rows(hidden: list[Candidate]) -> str:
    """Return why rows are hidden, for example `31 over the cap, 4 dearer`."""
    kinds = Counter(
        "dearer" if row.lease is not None else "over the cap" if _legend_key(row) == "cap" else _describe_end(row).text
        for row in hidden
    )
    return ", ".join(f"{count} {word}" if len(kinds) > 1 else word for word, count in kinds.items())


def _legend(heading: Line, candidates: Sequence[Candidate]) -> str:
    """Return the meaning of the columns that are shown, and of the words in the last column."""
    shown = {span.text for span in heading}
    meanings = [text for title, text in _LEGEND.items() if title in shown]
    codes = {_legend_key(candidate) for candidate in candidates} if "dies by" in shown else set()
    meanings += [text for code, text in _MEANINGS.items() if code in codes]
    return "; ".join(meanings) + "."


def _row(group: Sequence[Candidate], chosen: Offer | None, *, end_s: int | None = None) -> list[Cell]:
    """Return the row of offers with one price: the chosen or the first offer, and how many more regions have it."""
    candidate = next((member for member in group if member.offer == chosen), group[0])
    offer, estimate = candidate.offer, candidate.estimate
    look = "" if candidate.lease is not None else "dim"
    regions = len({member.offer.region for member in group})
    return [
        Span("→" if chosen else "", "accent"),
        Span(offer.provider, look),
        Span(offer.label, look),
        Span(offer.place + (f" +{regions - 1}" if regions > 1 else ""), look),
        Span(_format_bare_amount(offer.rate_micros_per_hour), look),
        Span(_fit(offer, estimate), look),
        Span(_speed(estimate), look),
        Span(_time(candidate, end_s), look),
        Span(_format_bare_amount(candidate.expected_micros), look),
        Span(_format_bare_amount(candidate.slow_micros), look),
        Span(f"~{offer.boot_s} s" if offer.boot_s < 60 else f"~{-(-offer.boot_s // 60)} m", look),
        Span(_format_reach(candidate), look),
        _describe_end(candidate),
    ]


def _time(candidate: Candidate, end_s: int | None) -> str:
    """Return the likely duration of the job; with `end_s`, its limit."""
    seconds = candidate.estimate.likely_s
    if end_s is not None and candidate.lease:
        seconds = candidate.lease.train_s - end_s
    return UNKNOWN if seconds is None else format_duration(seconds)


def _describe_end(candidate: Candidate) -> Span:
    """Return what ends the machine, or why it cannot be rented, in one or two words."""
    is_for_hours = candidate.lease is not None and candidate.estimate.train_s is None
    if candidate.finishes or is_for_hours:
        whole = guard_words(candidate.offer)
        found = next(((match, short) for long, short in _SHORT_DEATHS if (match := long.fullmatch(whole.text))), None)
        return Span(found[0].expand(found[1]), whole.look) if found else whole
    if candidate.needs_consent:
        return Span("weak lease", "dim")
    if candidate.needed:
        return Span(f"needs {candidate.needed}", "dim")
    return Span(_OBSTACLES.get(candidate.obstacle) or candidate.why_not or "does not finish", "dim")


def _legend_key(candidate: Candidate) -> str:
    """Return the key of the last column's word in the legend."""
    return "consent" if candidate.needs_consent else candidate.obstacle or _describe_end(candidate).text


def guard_words(offer: Offer) -> Span:
    """Return what ends this machine if this computer does not, with the look "bad" if nothing does."""
    nobody = offer.dies_by_itself.upper().startswith("NO")
    return Span(offer.dies_by_itself, "bad" if nobody else "good")


def _fit(offer: Offer, estimate: Estimate) -> str:
    """Return the micro-batch and its memory per GPU, such as `64/27G`.

    Return "yes" if the offer's memory is unknown, and "no" if it is too small.
    """
    if not estimate.fits:
        return "no"
    is_known = offer.gpu_count or offer.memory_gb
    return f"{estimate.micro_batch}/{ceil(estimate.peak_bytes / 2**30)}G" if is_known else "yes"


def _speed(estimate: Estimate) -> str:
    """Return tokens per second from low to high in one unit, for example `1.31-1.75M`."""
    if estimate.tokens_per_s is None:
        return UNKNOWN
    low, high = estimate.tokens_per_s
    unit, name = next(pair for pair in ((1e6, "M"), (1e3, "k"), (1.0, "")) if high >= pair[0] or pair[0] == 1.0)
    first, last = (f"{each / unit:.{2 if high < 10 * unit else 0}f}" for each in (low, high))
    return f"{first}{name}" if first == last else f"{first}-{last}{name}"


def _format_reach(candidate: Candidate) -> str:
    """Return the share of the run's steps that the cap or --hours pays for; UNKNOWN if it pays for all."""
    reach = candidate.reach
    is_part = not candidate.finishes and reach is not None and reach.step < reach.steps
    return f"{100 * reach.step // reach.steps}%" if is_part and reach else UNKNOWN


def _format_bare_amount(amount: Micros | None) -> str:
    """Return an amount without the dollar sign, which is in the column's heading."""
    return UNKNOWN if amount is None else format_usd(amount).replace("$", "")

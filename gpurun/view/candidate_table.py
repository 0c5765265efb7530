"""The table of offers, judged: what fits, how fast, how long, how many dollars, ranked by what finishing takes."""

from __future__ import annotations

import re
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

__all__ = ["candidates_table", "death"]

_COLUMNS = (
    Column(""),
    Column("#", right=True, leaves=9),
    Column("Provider", leaves=2),
    Column("GPU", least=12),
    Column("Region", leaves=3, least=9),
    Column("$/h", right=True, leaves=1),
    Column("fit", right=True, leaves=7),
    Column("tok/s", right=True, leaves=8),
    Column("time", right=True, leaves=5),
    Column("est. $", right=True, leaves=4),
    Column("worst $", right=True),
    Column("boot", right=True, leaves=10),
    Column("dies by", least=13),
)
_LEGEND = {
    "fit": "fit: sequences at once on a GPU (or CPU) / GiB that this takes",
    "worst $": "worst $: the most it can cost, or how far the cap gets where it does not finish",
    "dies by": "dies by: what ends the machine when this laptop is lost, or why it is not taken",
}
"""What a column means, where it is shown."""
_SHORT = tuple(
    (re.compile(long), short)
    for long, short in (
        (r"NO\b.*", "NO"),
        (r"yes · (power-off) .*", r"\1"),
        (r"yes · ([^,]+).*", r"\1"),
        (r".* --accept-weak-lease", "weak lease"),
        (r"(needs \S+), over the cap", r"\1"),
        (r"over the cap", "over cap"),
        (r".* less than the (\S+ h) that it (needs)", r"\2 \1"),
        (r"(no fit): .*", r"\1"),
        (r"takes (over a year), .*", r"\1"),
        (r".* tokens a step cannot be shared among .*", "uneven"),
        (r".* trains in (one process), and here are .*", r"\1"),
        (r"\S+ (?:has (no bf16);|computes in fp16, which) .*", "no bf16"),
    )
)
"""The words of the last column: whole beside the other columns of a narrow terminal."""
_MEANINGS = {
    "NO": "NO: nothing but this laptop does",
    "weak lease": "weak lease: nothing but this laptop would end it; --accept-weak-lease takes it all the same",
    "needs $": "needs: the cap under which it finishes",
    "uneven": "uneven: a step's tokens are no whole number of sequences for each GPU",
    "one process": 'one process: train.loop "huggingface" uses one GPU, and more would wait',
    "no bf16": "no bf16: the card computes in fp16 or fp32, and the recipe does not",
}


def candidates_table(
    candidates: tuple[Candidate, ...], style: Style, *, chosen: Offer | None = None, legend: bool = True
) -> list[Line]:
    """Offers in the order given, the chosen one marked; what cannot finish says why not, or how far it gets."""
    rows = [_row(i, candidate, candidate.offer == chosen) for i, candidate in enumerate(candidates, 1)]
    lines = table(_COLUMNS, rows, style)
    return [*lines, *wrap(_legend(lines[0], candidates), style, indent=2, look="dim")] if legend else lines


def _legend(heading: Line, candidates: tuple[Candidate, ...]) -> str:
    """What the columns that are shown mean, and the words in the last one."""
    shown = {span.text for span in heading}
    said = [text for title, text in _LEGEND.items() if title in shown]
    last = {_last(candidate).text for candidate in candidates}
    said += [text for word, text in _MEANINGS.items() if any(one.startswith(word) for one in last)]
    return "; ".join(said) + "."


def _row(number: int, candidate: Candidate, chosen: bool) -> list[Cell]:
    offer, estimate = candidate.offer, candidate.estimate
    look = "" if candidate.finishes else "dim"
    return [
        Span("→" if chosen else "", "accent"),
        Span(str(number), look),
        Span(offer.provider, look),
        Span(offer.label, look),
        Span(offer.place, look),
        Span(_bare(offer.rate_micros_per_hour), look),
        Span(_fit(offer, estimate), look),
        Span(_speed(estimate), look),
        Span(UNKNOWN if estimate.likely_s is None else format_duration(estimate.likely_s), look),
        Span(_bare(candidate.expected_micros), look),
        Span(_worst(candidate), look),
        Span(f"~{offer.boot_s} s" if offer.boot_s < 60 else f"~{-(-offer.boot_s // 60)} m", look),
        _last(candidate),
    ]


def _last(candidate: Candidate) -> Span:
    """What ends the machine, or why it is not to be had, in a word or two."""
    whole = death(candidate.offer) if candidate.finishes else Span(candidate.why_not or "does not finish", "dim")
    found = next(((match, short) for long, short in _SHORT if (match := long.fullmatch(whole.text))), None)
    return Span(found[0].expand(found[1]), whole.look) if found else whole


def death(offer: Offer) -> Span:
    """Who ends this machine when the laptop does not; in capitals and colour when nobody does."""
    nobody = offer.dies_by_itself.upper().startswith("NO")
    return Span(offer.dies_by_itself, "bad" if nobody else "good")


def _fit(offer: Offer, estimate: Estimate) -> str:
    """The micro-batch and the memory that it takes on each GPU, or on a CPU whose memory is known: `64/27G`."""
    if not estimate.fits:
        return "no"
    is_known = offer.gpu_count or offer.memory_gb
    return f"{estimate.micro_batch}/{ceil(estimate.peak_bytes / 2**30)}G" if is_known else "yes"


def _speed(estimate: Estimate) -> str:
    """Tokens a second, low to high in one unit: `1.31-1.75M`."""
    if estimate.tokens_per_s is None:
        return UNKNOWN
    low, high = estimate.tokens_per_s
    unit, name = next(pair for pair in ((1e6, "M"), (1e3, "k"), (1.0, "")) if high >= pair[0] or pair[0] == 1.0)
    first, last = (f"{each / unit:.{2 if high < 10 * unit else 0}f}" for each in (low, high))
    return f"{first}{name}" if first == last else f"{first}-{last}{name}"


def _worst(candidate: Candidate) -> str:
    """The worst case where it finishes; else the share of the run that the cap or the hours would buy."""
    if candidate.finishes or candidate.lease is not None:
        return _bare(candidate.worst_micros)
    if not candidate.estimate.fits:
        return UNKNOWN
    reach = candidate.reach
    return f"to {100 * reach.step // reach.steps}%" if reach is not None and reach.step < reach.steps else UNKNOWN


def _bare(amount: Micros | None) -> str:
    """An amount for a column whose heading has the dollar sign."""
    return UNKNOWN if amount is None else format_usd(amount).replace("$", "")

"""The definition of a sweep: settings with their values, the number of trials, and how many results are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, product
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field

from gpurun.core.errors import UsageError
from gpurun.core.records import Frozen

Sampler = Literal["grid", "random", "tpe"]
SAMPLERS = ("grid", "random", "tpe")
USUAL_TRIALS, MOST_TRIALS = 20, 1000
MOST_LOOKED_AT = 256
"""The most combinations of settings that are checked before anything is rented."""
EARLIER = "earlier_sweep"
"""The name of the folder with the results of an earlier sweep or machine, from which a sweep continues."""
END_S = 15
"""How many seconds the sweep itself needs to end, after its trials have ended."""
LOG_FROM = 10
"""If the ends of a range differ by at least this factor, values are drawn on a logarithmic scale."""

_NUMBER = r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


class Range(Frozen):
    """A range of numbers, both ends included. `whole`: only integers. `log`: draw them on a logarithmic scale."""

    low: float
    high: float
    log: bool
    whole: bool

    @property
    def ends(self) -> tuple[str, str]:
        """Return both ends as text, in the form in which a trial gets its values."""
        low, high = ((int(end) if self.whole else end) for end in (self.low, self.high))
        return f"{low:.4g}" if not self.whole else str(low), f"{high:.4g}" if not self.whole else str(high)


Axis = tuple[str, ...] | Range


class Sweep(Frozen):
    """The trials of one job: `space` has each setting with its values, by name.

    `at_once` is how many trials run on a GPU at the same time (0: as many as the plan finds room for; for a command,
    one). The files of the `keep` best trials come home. `prune` is the method that ends bad trials early, "" for none.
    """

    space: dict[str, Axis]
    trials: int
    sampler: Sampler
    prune: Literal["", "asha"] = ""
    keep: Annotated[int, Field(ge=1)] = 1
    at_once: Annotated[int, Field(ge=0)] = 0
    seed: int = 0

    @property
    def combinations(self) -> int | None:
        """Return how many different trials are possible; None if a setting has a range."""
        listed = [len(axis) for axis in self.space.values() if isinstance(axis, tuple)]
        return prod(listed) if len(listed) == len(self.space) else None

    def corners(self) -> Iterator[dict[str, str]]:
        """Yield combinations to check before anything is rented: all combinations, with only the ends of a range.

        If there are too many, yield each value once, with the first values of the other settings, and then combinations
        of smallest and largest values.
        """
        values = [axis.ends if isinstance(axis, Range) else axis for axis in self.space.values()]
        first = [listed[0] for listed in values]
        found: Iterator[Sequence[str]] = product(*values)
        if prod(map(len, values)) > MOST_LOOKED_AT:
            each = ([*first[:at], value, *first[at + 1 :]] for at, listed in enumerate(values) for value in listed)
            found = chain(each, islice(product(*map(_find_extremes, values)), MOST_LOOKED_AT))
        for combination in found:
            yield dict(zip(self.space, combination, strict=True))

    def words(self) -> list[str]:
        """Return each setting and its values in words."""
        return [f"{name} {_describe_axis(axis)}" for name, axis in self.space.items()]


def _find_extremes(values: Sequence[str]) -> tuple[str, str]:
    """Return the smallest and the largest of numeric values; of other values the first and the last."""
    try:
        return min(values, key=float), max(values, key=float)
    except ValueError:
        return values[0], values[-1]


def _describe_axis(axis: Axis) -> str:
    return f"{axis.ends[0]} to {axis.ends[1]}" if isinstance(axis, Range) else ", ".join(axis)


def parse_axis(text: str) -> tuple[str, Axis]:
    """Return name and values of a --set option: `lr=1e-3,3e-4`, or a range `lr=1e-4..1e-2`; else UsageError."""
    name, sign, values = (part.strip() for part in text.partition("="))
    if not (sign and values and _NAME.fullmatch(name)):
        what = f"--set {text!r} is not of the form NAME=VALUE,VALUE."
        raise UsageError("sweep.set", what, hint="Write for example --set lr=1e-3,3e-4, or --set lr=1e-4..1e-2")
    return name, axis_of(name, _split_values(values))


def axis_of(name: str, values: Sequence[str]) -> Axis:
    """Return the values of one setting without repeats, or its range; UsageError for an empty value or range."""
    found = tuple(dict.fromkeys(values))
    bounds = _RANGE.fullmatch(found[0]) if len(found) == 1 else None
    if bounds is None:
        if "" in found:
            raise UsageError("sweep.set", f"--set {name} has an empty value.", hint="Write --set lr=1e-3,3e-4")
        return found
    low, high = float(bounds[1]), float(bounds[2])
    if not low < high:
        if low == high:
            what = f"--set {name}={found[0]} is one number, not a range."
            raise UsageError("sweep.set", what, hint="Give two different numbers, or the one value alone.")
        what = f"--set {name}={found[0]} goes from {bounds[1]} down to {bounds[2]}."
        raise UsageError(
            "sweep.set", what, hint=f"Write the smaller number first: --set {name}={bounds[2]}..{bounds[1]}"
        )
    whole = all(re.fullmatch(r"[+-]?\d+", bounds[place]) for place in (1, 2))
    return Range(low=low, high=high, log=low > 0 and high >= LOG_FROM * low, whole=whole)


def _split_values(text: str) -> list[str]:
    """Split at commas, except commas in brackets or quotes, because a value may be a list."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        parts[-1] += letter
    return [part.strip() for part in parts]


def make_sweep(space: Mapping[str, Axis], options: Mapping[str, Any]) -> Sweep:
    """Return the sweep of these settings and options; UsageError if they do not fit together."""
    varied = {name: axis for name, axis in space.items() if isinstance(axis, Range) or len(axis) > 1}
    if not varied:
        hint = "Give a setting several values: --set lr=1e-3,3e-4; a command also needs {lr} among its words."
        raise UsageError("sweep.nothing", "No setting has more than one value, so there is nothing to try.", hint=hint)
    listed = Sweep(space=dict(space), trials=1, sampler="grid").combinations
    trials, sampler, prune = options.get("trials") or 0, options.get("sampler") or "", options.get("prune") or ""
    if sampler not in ("", *SAMPLERS) or prune not in ("", "asha"):
        flag, value = ("--sampler", sampler) if sampler not in ("", *SAMPLERS) else ("--prune", prune)
        known = ", ".join(SAMPLERS) if flag == "--sampler" else "asha"
        raise UsageError("sweep.option", f"{flag} {value!r} is none of: {known}.", hint="Choose one, or leave it out.")
    sampler = sampler or ("grid" if listed is not None and trials in (0, listed) else "random")
    if sampler == "grid" and listed is None:
        ranges = [name for name, axis in space.items() if isinstance(axis, Range)]
        what = f"A grid tries every combination, but {ranges[0]} is a range."
        raise UsageError("sweep.grid", what, hint="List its values, or use --sampler random or tpe.")
    trials = trials or listed or USUAL_TRIALS
    if listed is not None and trials > listed:
        what = f"There are only {listed} combinations, so {trials} trials would repeat some."
        raise UsageError(
            "sweep.repeats", what, hint=f"Leave --trials out, give more values, or use at most --trials {listed}."
        )
    if sampler == "grid" and trials != listed:
        what = f"A grid tries all {listed} combinations, but --trials is {trials}."
        raise UsageError("sweep.grid", what, hint="Leave --trials out, or use --sampler random.")
    if trials > MOST_TRIALS:
        what = f"{trials:,} trials are more than the limit of {MOST_TRIALS:,} for one sweep."
        raise UsageError("sweep.many", what, hint="Give fewer values, or draw a sample: --sampler random --trials 100")
    few = {name: options[name] for name in ("keep", "at_once", "seed") if options.get(name)}
    fields = {"space": dict(sorted(space.items())), "trials": trials, "sampler": sampler, "prune": prune, **few}
    return Sweep.model_validate(fields)


def demand_filled(argv: Sequence[str], space: Mapping[str, Axis]) -> None:
    """Raise UsageError for a placeholder that no setting fills, and for a setting without a placeholder."""
    named = {name for word in argv for name in _PLACEHOLDER.findall(word)}
    if unknown := sorted(named - set(space)):
        what = f"No --set fills {{{unknown[0]}}} in the command."
        raise UsageError("sweep.placeholder", what, hint=f"Add --set {unknown[0]}=VALUE,VALUE, or take it out.")
    if unused := [name for name in space if name not in named]:
        what = f"--set {unused[0]} is not used in the command, so all trials would be the same."
        raise UsageError("sweep.placeholder", what, hint=f"Write {{{unused[0]}}} where its value belongs.")

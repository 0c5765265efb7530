"""Play many seeds, and reduce the first scenario that breaks a promise to a small one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, format_usd, total
from gpurun.ledger.write_receipt import read_receipt
from tests.simulation.checker import check, is_calm
from tests.simulation.generator import draw, draw_voyage
from tests.simulation.plans import DEARER
from tests.simulation.play import Played, play
from tests.simulation.scenario import Scenario

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Verdict:
    """The result of one scenario: the promises that it broke, and its history if it broke any."""

    scenario: Scenario
    breaches: tuple[str, ...]
    story: str
    ends: tuple[str, ...]
    voyage: Voyage | None = None


@dataclass(frozen=True)
class Voyage:
    """The result of a run that may continue on other machines; amounts are in micro-dollars.

    `again`: steps that were trained twice. `kept`: steps that a loop from scratch would have trained once more. `paid`:
    the clouds' bill. `bound`: the receipt's upper bound if nothing else went wrong and it saw the end of every
    machine, else 0. If the run moved
    and finished, `moved` is its cost by the receipt, and `on_demand` the cost of an unbroken run on demand.
    """

    finished: bool
    machines: int
    again: int
    kept: int
    bound: int
    paid: int
    moved: int
    on_demand: int


@dataclass(frozen=True)
class Summary:
    """The sums of many voyages."""

    voyages: int
    finished: int
    machines: int
    again: int
    kept: int
    paid: int
    watched: int
    moved: int
    on_demand: int

    def __str__(self) -> str:
        return (
            f"{self.finished:,} of {self.voyages:,} voyages finished, on {self.machines:,} machines; "
            f"{self.again:,} steps were trained twice, a loop from scratch would have trained {self.kept:,} more; "
            f"they cost {format_usd(Micros(self.paid))} by the clouds' meters; the receipts of the {self.watched:,} "
            "calm ones whose ends were all seen are at most 3 % above, or by a billing unit and two looks a machine; "
            f"those that moved and finished cost {format_usd(Micros(self.moved))} by their receipts, unbroken and on "
            f"demand, {DEARER} times as dear, {format_usd(Micros(self.on_demand))}"
        )


def summary(verdicts: Iterable[Verdict]) -> Summary:
    """Return the sums of the voyages."""
    voyages = [verdict.voyage for verdict in verdicts if verdict.voyage is not None]
    return Summary(
        voyages=len(voyages),
        finished=sum(voyage.finished for voyage in voyages),
        machines=sum(voyage.machines for voyage in voyages),
        again=sum(voyage.again for voyage in voyages),
        kept=sum(voyage.kept for voyage in voyages),
        paid=sum(voyage.paid for voyage in voyages),
        watched=sum(bool(voyage.bound) for voyage in voyages),
        moved=sum(voyage.moved for voyage in voyages),
        on_demand=sum(voyage.on_demand for voyage in voyages),
    )


def _voyage(played: Played) -> Voyage:
    plans = [record.data for record in played.records if record.event is Event.LEG_PLANNED and record.data.get("token")]
    end, bound, moved, on_demand = played.outcomes[-1], 0, 0, 0
    is_finished = end.exit_code == 0 and end.state.outcome == "done"
    if played.closed:
        predicate = read_receipt(played.home, played.folder).predicate
        cost, legs = predicate["cost"], predicate.get("legs", [])
        if is_finished and legs and all("on_demand_micros" in leg for leg in legs):
            moved, on_demand = cost["upper_bound_micros"] or 0, sum(leg["on_demand_micros"] for leg in legs)
        paid = [rental for rental in cost["rentals"] if rental["micros"]]
        if is_calm(played.scenario) and all(rental.get("end_is") == "measured" for rental in paid):
            bound = cost["upper_bound_micros"] or 0
    return Voyage(
        finished=is_finished,
        machines=sum(len(cloud.boxes) for cloud in played.clouds.values()),
        again=sum(max(0, plan["reached"] - plan["step"]) for plan in plans),
        kept=sum(plan["step"] for plan in plans),
        bound=bound,
        moved=moved,
        on_demand=on_demand,
        paid=total(*(cloud.metered() for cloud in played.clouds.values())),
    )


def folder_of_one_run() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder, in memory if possible, because a run syncs some fifty records."""
    return tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)


def judge(scenario: Scenario) -> Verdict:
    """Play a scenario in a temporary folder and check it."""
    with folder_of_one_run() as folder:
        played = play(scenario, Path(folder))
        breaches = tuple(check(played))
        story = "\n".join(_story(played)) if breaches else ""
        ends = tuple(outcome.words for outcome in played.outcomes)
        return Verdict(scenario, breaches, story, ends, _voyage(played) if scenario.legs else None)


def judge_seed(seed: int) -> Verdict:
    """Return the verdict on the scenario of a seed."""
    return judge(draw(seed))


def judge_voyage(seed: int) -> Verdict:
    """Return the verdict on the voyage of a seed."""
    return judge(draw_voyage(seed))


def shrunk(verdict: Verdict) -> Verdict:
    """Return the verdict on the smallest scenario found that still breaks one of the same promises."""
    kinds = {breach.partition(":")[0] for breach in verdict.breaches}
    for smaller in verdict.scenario.smaller():
        found = judge(smaller)
        if kinds & {breach.partition(":")[0] for breach in found.breaches}:
            return shrunk(found)
    return verdict


def _story(played: Played) -> Iterator[str]:
    """Yield calls with their faults, records and ends, in the order of time."""
    lines: list[tuple[float, str]] = []
    for cloud in played.clouds.values():
        lines += [
            (at_s, f"{cloud.name}.{verb}" + (f": {fault}" if fault != "made" else ""))
            for at_s, verb, fault in cloud.history
        ]
        for box in cloud.boxes:
            lines.append((box.born_s, f"* {box.id} is born, carries {box.order.token}, timer at {box.ends_s}"))
            if box.died_s is not None:
                lines.append((box.died_s, f"* {box.id} is dead"))
    lines += [(at_s, f"    {place}") for at_s, place in played.points if place.startswith("after ") and "." in place]
    lines += [
        (outcome.at_s, f"==> the supervisor ends: {outcome.words} ({outcome.exit_code}), {outcome.alive} alive")
        for outcome in played.outcomes
    ]
    seen = ""
    for at_s, words in sorted(lines, key=lambda line: line[0]):
        if words != seen and "far.poll" not in words:
            yield f"{at_s:9.1f} {words}"
        seen = words

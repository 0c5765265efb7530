"""Plays many seeds, and makes the first that breaks a promise as small as it can be."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.checker import check
from tests.simulation.generator import draw, draw_voyage
from tests.simulation.play import Played, play
from tests.simulation.scenario import Scenario

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Verdict:
    """What came of one scenario: the promises that it broke, and the story of how."""

    scenario: Scenario
    breaches: tuple[str, ...]
    story: str
    ends: tuple[str, ...]


def folder_of_one_run() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when it is left; in memory where there is one, since a run syncs some fifty records."""
    return tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)


def judge(scenario: Scenario) -> Verdict:
    """Play a scenario in a folder of its own and check it."""
    with folder_of_one_run() as folder:
        played = play(scenario, Path(folder))
        breaches = tuple(check(played))
        story = "\n".join(_story(played)) if breaches else ""
        return Verdict(scenario, breaches, story, tuple(outcome.words for outcome in played.outcomes))


def judge_seed(seed: int) -> Verdict:
    """The verdict on the scenario of a seed."""
    return judge(draw(seed))


def judge_voyage(seed: int) -> Verdict:
    """The verdict on the voyage of a seed."""
    return judge(draw_voyage(seed))


def shrunk(verdict: Verdict) -> Verdict:
    """The smallest scenario, one thing less at a time, that still breaks one of the same promises."""
    kinds = {breach.partition(":")[0] for breach in verdict.breaches}
    for smaller in verdict.scenario.smaller():
        found = judge(smaller)
        if kinds & {breach.partition(":")[0] for breach in found.breaches}:
            return shrunk(found)
    return verdict


def _story(played: Played) -> Iterator[str]:
    """Calls with their faults, records, and ends, in the order in which they happened."""
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
        (one.at_s, f"==> the supervisor ends: {one.words} ({one.exit_code}), {one.alive} alive")
        for one in played.outcomes
    ]
    seen = ""
    for at_s, words in sorted(lines, key=lambda line: line[0]):
        if words != seen and "far.poll" not in words:
            yield f"{at_s:9.1f} {words}"
        seen = words

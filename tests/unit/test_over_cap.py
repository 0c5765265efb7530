"""What a refusal over the cap names instead: each way fits the cap when it is typed."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest


@pytest.fixture
def planned(gpurun: Any) -> Any:
    """Plan by these words; return the exit code and the envelope."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = gpurun("plan", *words, "--json")
        return code, json.loads(out)

    return run


def ways_of(envelope: dict[str, Any]) -> list[str]:
    (error,) = envelope["errors"]
    assert error["code"] == "offer.over_cap"
    first, *ways = error["hint"].splitlines()
    assert first == "Each of these would do:"
    return [way.partition(": ")[0] for way in ways]


def typed(words: tuple[str, ...], way: str) -> tuple[str, ...]:
    """The command line that a person types who follows a way."""
    changed = shlex.split(way)
    if changed[0] == "gpurun":
        return tuple(changed[2:])
    kept = list(words)
    for flag in changed[::2]:
        if flag in kept:
            del kept[kept.index(flag) : kept.index(flag) + 2]
    return (*kept, *changed)


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (("gpt2-124m", "--gpu", "8xH100", "--max-cost", "25"), ["--gpu", "gpurun train modern-124m", "--hours"]),
        (("gpt2-124m", "--gpu", "T4", "--max-cost", "25"), ["--gpu", "gpurun train modern-124m", "--hours"]),
        (("gpt2-124m", "--max-cost", "10"), ["gpurun train modern-124m", "--gpu", "--gpu"]),
        (("gpt2-124m", "--gpu", "8xA100", "--max-cost", "6"), ["gpurun train modern-124m", "--hours", "--max-cost"]),
        (("mini-gpt", "--max-cost", "0.02"), ["--max-cost"]),
    ],
)
def test_each_way_that_a_refusal_names_fits_when_it_is_typed(
    planned: Any, words: tuple[str, ...], ways: list[str]
) -> None:
    """Told to raise the cap to $39.48, a user paid for eight H100 where eight A100 fitted."""
    code, envelope = planned(*words)
    found = ways_of(envelope)
    assert code == 5
    assert [way[: len(begin)] for way, begin in zip(found, ways, strict=True)] == ways
    for way in found:
        assert planned(*typed(words, way))[0] == 0, way

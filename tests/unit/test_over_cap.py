"""What a refusal over the cap names instead: each way fits the cap when it is typed."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from gpurun.core.money import Micros
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Choices
from gpurun.planning.market import Market
from gpurun.providers.catalog import rows_for


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


def test_a_spot_machine_is_named_where_a_cloud_has_one_that_fits(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue knows no spot prices, so only a cloud that is asked can name one."""
    asked: list[Choices] = []

    def market(need: GpuNeed, names: Any, home: Any, clock: Any, choices: Choices) -> Market:
        asked.append(choices)
        rate = Micros(15_000_000 if choices.spot else 32_000_000)
        update = {"spot": choices.spot, "rate_micros_per_hour": rate}
        rows = [row.model_copy(update=update) for row in rows_for(need, "runpod") if row.gpu_count == 8]
        return Market(tuple(rows), (), clock.wall(), ("runpod",))

    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_none")
    monkeypatch.setattr("gpurun.planning.live_offers.live_offers", market)
    words = ("gpt2-124m", "--gpu", "8xH100", "--max-cost", "25")
    code, envelope = planned(*words)
    spot = next(way for way in ways_of(envelope) if "--spot" in way)
    assert (code, spot) == (5, "--spot")
    assert planned(*words, spot)[0] == 0
    (error,) = envelope["errors"]
    assert "on runpod, which may take it away at any moment" in error["hint"]
    asked.clear()
    assert planned("gpt2-124m", "--gpu", "8xH100", "--max-cost", "6", "--spot")[0] == 5
    assert all(choices.spot for choices in asked), "what was asked for as spot is not named again"

"""Tests of the alternatives that a refusal over the cap names: each must fit the cap when it is typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.money import Micros
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Choices
from gpurun.planning.market import Market
from gpurun.providers.catalog import rows_for


@pytest.fixture
def planned(gpurun: Any) -> Any:
    """Return a function that runs `gpurun plan` with these words and returns the exit code and the envelope."""

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
    """Return the command line of a user who follows this alternative."""
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
    """A refusal once offered only a cap of $39.48 for eight H100, although eight A100 fitted the cap."""
    code, envelope = planned(*words)
    found = ways_of(envelope)
    assert code == 5
    assert [way[: len(begin)] for way, begin in zip(found, ways, strict=True)] == ways
    for way in found:
        assert planned(*typed(words, way))[0] == 0, way


def test_a_spot_machine_is_named_where_a_cloud_has_one_that_fits(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue has no spot prices: a refusal can name a spot machine only after a cloud's reply."""
    wishes: list[Choices] = []

    def market(need: GpuNeed, names: Any, home: Any, clock: Any, choices: Choices) -> Market:
        wishes.append(choices)
        rate = Micros(15_000_000 if choices.spot else 32_000_000)
        update = {"spot": choices.spot, "rate_micros_per_hour": rate}
        rows = [row.model_copy(update=update) for row in rows_for(need, "runpod") if row.gpu_count == 8]
        return Market(tuple(rows), (), clock.wall(), ("runpod",))

    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_none")
    monkeypatch.setattr("gpurun.planning.live_offers.live_offers", market)
    words = ("gpt2-124m", "--gpu", "8xH100", "--max-cost", "25")
    code, envelope = planned(*words)
    spot = next(way for way in ways_of(envelope) if "--spot" in way)
    assert (code, spot) == (5, "--spot --keep-going")
    moving, answer = planned(*words, *spot.split())
    assert (moving, "continues from its newest checkpoint on another one" in str(answer["data"])) == (0, True)
    (error,) = envelope["errors"]
    assert "on runpod, and then on another machine if that one is taken away" in error["hint"]
    wishes.clear()
    assert planned("gpt2-124m", "--gpu", "8xH100", "--max-cost", "6", "--spot")[0] == 5
    assert all(choices.spot for choices in wishes), "what was asked for as spot is not named again"


def asked_market(need: GpuNeed, names: Any, home: Any, clock: Any, choices: Choices) -> Market:
    """Return a cloud's offers at the catalogue's prices, or its spot offers at a third of these prices."""
    share, rows = 3 if choices.spot else 1, rows_for(need, names[0])
    rates = [Micros(row.rate_micros_per_hour // share) for row in rows]
    offers = [
        row.model_copy(update={"spot": choices.spot, "rate_micros_per_hour": rate})
        for row, rate in zip(rows, rates, strict=True)
        if row.gpu_count == need.count
    ]
    return Market(tuple(offers), (), clock.wall(), tuple(names))


@pytest.mark.parametrize(
    ("verb", "cap", "flags"),
    [
        ("run", "0.5", ["--gpu", "--spot", "--max-cost"]),
        ("dev", "0.5", ["--gpu", "--spot", "--max-cost"]),
        ("sweep", "2", ["--gpu", "--spot", "--max-cost"]),
    ],
)
def test_a_refusal_over_the_cap_names_what_would_do(
    gpurun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, cap: str, flags: list[str]
) -> None:
    """gpurun does not know how much memory a command needs, so it names only other cards with as much memory."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.py").write_text("print(1)\n")
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_none")
    monkeypatch.setattr("gpurun.planning.live_offers.live_offers", asked_market)
    upload = ("--upload", str(tmp_path / "lab"))
    before, after = {
        "run": (upload, ("--", "python", "train.py")),
        "dev": (upload, ()),
        "sweep": (("mini-gpt", "--set", "optim.lr=1e-3,3e-4", "--set", "train.seed=1,2,3"), ()),
    }[verb]

    def refused(*words: str) -> dict[str, Any]:
        (error,) = json.loads(gpurun(verb, *before, *words, "--json", "--no-input", *after)[1])["errors"]
        return dict(error)

    words = ("--gpu", "8xH100" if verb == "sweep" else "1xH100", "--max-cost", cap)
    ways = ways_of({"errors": [refused(*words)]})
    assert [way.split()[0] for way in ways] == flags
    for way in ways:
        assert refused(*typed(words, way))["code"] == "input.needed", way


def test_a_refused_training_is_offered_no_cloud_without_a_key(gpurun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Lambda card was once named as the cheapest that fits, although there was no key to rent it."""
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_none")
    monkeypatch.setattr("gpurun.planning.live_offers.live_offers", asked_market)
    words = ("gpt2-124m", "--gpu", "8xH100", "--max-cost", "25", "--accept-weak-lease", "--no-input", "--json")
    (error,) = json.loads(gpurun("train", *words)[1])["errors"]
    named = [way for way in error["hint"].splitlines() if way.startswith("--gpu")]
    assert error["code"] == "offer.over_cap"
    assert [way.partition(", on ")[2] for way in named] == ["runpod"], error

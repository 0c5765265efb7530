"""Tests of `gpurun offers`: live prices with a key, marked catalogue prices without one, even if a cloud fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.commands.offers import offers
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, SetupError, UsageError
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Offer
from gpurun.providers import registry
from gpurun.providers.base import Unknown
from tests.command_line import gpurun
from tests.refusals import lacking

Asked = Callable[[GpuNeed, Sequence[Offer]], list[Offer]]


class Shop:
    """A cloud that only lists offers."""

    def __init__(self, answer: Asked, spot: bool = False) -> None:
        self.offers = answer
        self.spot = spot


@pytest.fixture
def session(own_home: Path) -> Session:
    return Session(home=Home(own_home), quiet=True, clock=VirtualClock())


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Asked]:
    """Return the reply function of each cloud, which lists nothing until a test replaces it. Each cloud has a key."""
    answers: dict[str, Asked] = {}
    for name, variable in (("runpod", "RUNPOD_API_KEY"), ("lambda", "LAMBDA_API_KEY"), ("aws", "AWS_PROFILE")):
        opened = lambda home, clock, choices, name=name: Shop(answers[name], choices.spot)  # noqa: E731
        monkeypatch.setitem(registry.PROVIDERS, name, opened)
        monkeypatch.setenv(variable, "a-key")
        answers[name] = lambda need, known: []
    return answers


def live(dollars: str, region: str = "any") -> Asked:
    """Return a reply function that gives the first known offer with the requested count, at this price per hour."""

    def ask(need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        row = next(row for row in known if row.gpu_count == need.count)
        price = {"rate_micros_per_hour": int(float(dollars) * 1e6), "price_source": "live", "region": region}
        return [row.model_copy(update=price)]

    return ask


def silent(error: Exception) -> Asked:
    def ask(need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        raise error

    return ask


def listed(session: Session, gpu: str = "8xA100", *providers: str, **flags: Any) -> Result:
    return offers(session, gpu, providers, **{"max_price": "", "region": "", "spot": False, **flags})


def test_live_offers_come_cheapest_first_and_say_their_time(session: Session, clouds: dict[str, Asked]) -> None:
    clouds |= {"runpod": live("12"), "lambda": live("9.50"), "aws": live("20")}
    result = listed(session)
    assert [row["provider"] for row in result.data["offers"]] == ["lambda", "runpod", "aws"]
    assert (result.data["live"], result.data["read_at"]) == (True, "2027-01-15T08:00:00.000Z")
    assert "9.50" in result.text
    assert "NOT LIVE" not in result.text
    assert result.exit_code is ExitCode.DONE


def test_a_cloud_that_fails_is_a_line_and_the_others_are_listed(session: Session, clouds: dict[str, Asked]) -> None:
    refused = SetupError("auth.refused", "401.", hint="gpurun auth set runpod")
    clouds |= {"runpod": silent(refused), "lambda": silent(Unknown("it timed out")), "aws": live("20")}
    result = listed(session)
    assert [row["provider"] for row in result.data["offers"]] == ["aws"]
    assert {row["provider"]: row["why"] for row in result.data["silent"]} == {
        "runpod": "401. gpurun auth set runpod",
        "lambda": "it timed out",
    }
    assert lacking(result.text, "lambda", "it timed out") == []
    assert result.exit_code is ExitCode.DONE


@pytest.mark.parametrize("gpu", ["8xA100", "1xH100"])
def test_nothing_is_exit_5_and_the_catalogue_never_fills_in(
    session: Session, clouds: dict[str, Asked], gpu: str
) -> None:
    clouds["aws"] = silent(Unknown("no route"))
    result = listed(session, gpu)
    assert (result.exit_code, result.data["offers"]) == (ExitCode.NO_OFFER, [])
    assert result.errors[0].code == "offers.none"
    assert "no route" in result.text


def test_when_no_cloud_could_be_asked_that_is_said_instead(session: Session, clouds: dict[str, Asked]) -> None:
    clouds |= dict.fromkeys(clouds, silent(Unknown("no route")))
    result = listed(session)
    assert result.exit_code is ExitCode.SETUP, "as for train: this is no want of capacity"
    assert result.errors[0].code == "market.unreachable"


def test_a_price_limit_hides_the_dearer_and_names_the_cheapest(session: Session, clouds: dict[str, Asked]) -> None:
    clouds |= {"runpod": live("12"), "lambda": live("9.50")}
    assert [row["provider"] for row in listed(session, max_price="9.5").data["offers"]] == ["lambda"]
    result = listed(session, max_price="3")
    assert (result.exit_code, result.errors[0].code) == (ExitCode.NO_OFFER, "offers.too_dear")
    assert "$9.50/h" in result.errors[0].what
    assert "$0.01/h" in listed(session, gpu="any", max_price="0.01").errors[0].what


def test_a_cloud_price_from_the_catalogue_is_not_called_live(session: Session, clouds: dict[str, Asked]) -> None:
    clouds["runpod"] = live("12")
    clouds["aws"] = lambda need, known: [next(row for row in known if row.gpu_count == need.count)]
    warnings = listed(session).data["warnings"]
    assert ["aws" in warning for warning in warnings] == [True]


def test_a_region_and_a_provider_narrow(session: Session, clouds: dict[str, Asked]) -> None:
    clouds |= {"runpod": live("12", "EU-RO-1"), "lambda": live("9", "us-west-3"), "aws": live("20", "us-west-3")}
    assert [row["provider"] for row in listed(session, region="us-west-3").data["offers"]] == ["lambda", "aws"]
    assert [row["provider"] for row in listed(session, "8xA100", "runpod").data["offers"]] == ["runpod"]


def test_without_a_key_the_catalogue_is_listed_and_marked(session: Session) -> None:
    result = listed(session)
    assert (result.data["live"], result.data["read_at"]) == (False, None)
    assert "NOT LIVE" in result.text
    assert "gpurun auth set runpod" in result.text
    assert len(result.data["offers"]) >= 3


def test_a_cloud_without_a_key_is_named_beside_live_ones(
    session: Session, clouds: dict[str, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAMBDA_API_KEY")
    clouds["runpod"] = live("12")
    assert "lambda" in listed(session).text


def test_the_catalogue_knows_no_spot_prices_and_says_so(session: Session) -> None:
    result = listed(session, spot=True)
    assert result.exit_code is ExitCode.NO_OFFER
    assert "spot" in result.errors[0].what


def test_any_lists_every_card_of_the_catalogue_even_with_a_key(session: Session, clouds: dict[str, Asked]) -> None:
    result = listed(session, "any")
    assert {row["provider"] for row in result.data["offers"]} == {"runpod", "lambda", "aws"}
    assert "NOT LIVE" in result.text


def test_a_key_that_is_sent_elsewhere_is_worth_a_warning(
    session: Session, clouds: dict[str, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_BASE_URL", "http://127.0.0.1:9")
    clouds["runpod"] = live("12")
    assert "http://127.0.0.1:9" in listed(session).text


@pytest.mark.parametrize(("providers", "hint"), [(("runpad",), "runpod"), (("ssh",), "--provider ssh")])
def test_what_is_no_cloud_is_refused(session: Session, providers: tuple[str, ...], hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        listed(session, "8xA100", *providers)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [
        (["--gpu", "8xFOO"], 2, "gpu.unknown"),
        (["--max-price", "free"], 2, "money.not_a_number"),
        (["--max-price", "-1"], 2, "money.not_positive"),
        (["--gpu", "3xA100"], 5, "offers.none"),
        (["--provider", "aws", "--region", "mars-1"], 5, "offers.none"),
        (["--gpu", "8xA100"], 0, None),
    ],
)
def test_it_speaks_json_whatever_happens(arguments: list[str], code: int, name: str | None) -> None:
    done = gpurun("offers", *arguments, "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["exit_code"]) == (code, code)
    assert [error["code"] for error in answer["errors"]] == ([name] if name else [])

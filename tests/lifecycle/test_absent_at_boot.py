"""Tests of a machine that its provider reports as gone before it is ready: gpurun takes the next offer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Dearer, Event
from gpurun.core.money import Micros, seconds_within, times
from gpurun.core.paths import Home
from gpurun.core.records import Instance, InstanceState, Order
from gpurun.core.stop_request import ask_to_stop
from gpurun.core.transfer_progress import read_moving
from gpurun.ledger.audit import audit
from gpurun.ledger.run_state import replay_journal
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.context import real_seconds
from gpurun.view.progress_line import moving_words
from tests.emulators.fake import Box, Fault
from tests.lifecycle.offers_in_turn import Market
from tests.lifecycle.scripted_cloud import Killed
from tests.refusals import lacking

SETTLE_S = 120.0
REASON = "terminated · Client.InternalError: Client error on launch"


@pytest.fixture
def market(tmp_path: Path) -> Market:
    return Market(Home(tmp_path))


def capped_at(market: Market, machines: float) -> None:
    market.set_plan(cap_micros=round(machines * market.plan.worst_micros))


def never_was(market: Market) -> None:
    """Make the first create return the id of a machine that no list shows and that every read reports as absent."""
    find, read = market.cloud.find, market.cloud.read
    first = "i-local-1"

    def reading(name: str) -> Instance:
        return read("i-none").model_copy(update={"id": name}) if name == first else read(name)

    market.cloud.find = lambda token: [instance for instance in find(token) if instance.id != first]  # type: ignore[method-assign]
    market.cloud.read = reading  # type: ignore[method-assign]


def ended_at_launch(market: Market) -> None:
    """Make the first machine end at its launch; its provider then lists it as gone, with a reason."""
    make, find, read = market.cloud._make, market.cloud.find, market.cloud.read
    market.cloud.profile = replace(market.cloud.profile, tomb_s=3600.0)

    def made(order: Order, fault: Fault, at_s: float) -> Box:
        box = make(order, fault, at_s)
        if len(market.cloud.boxes) == 1:
            market.cloud._end(box, at_s)
        return box

    def with_reason(machine: Instance) -> Instance:
        return machine.model_copy(update={"said": REASON}) if machine.state is InstanceState.GONE else machine

    market.cloud._make = made  # type: ignore[method-assign]
    market.cloud.find = lambda token: [with_reason(machine) for machine in find(token)]  # type: ignore[method-assign]
    market.cloud.read = lambda name: with_reason(read(name))  # type: ignore[method-assign]


def waited_s(market: Market) -> float:
    """Return the seconds from the answer of the create to the first request to end that machine."""
    created, destroyed = (
        next(record for record in market.records if record.event is event)
        for event in (Event.CREATE_OBSERVED, Event.DESTROY_ASKED)
    )
    return destroyed.mono - created.mono


def gone(market: Market) -> list[str]:
    return [incident["message"] for incident in market.all_of(Event.INCIDENT) if incident["code"] == "boot.gone"]


def kept(market: Market) -> bool:
    cost = read_receipt(market.home, market.folder).predicate["cost"]
    assert market.cloud.metered() <= cost["upper_bound_micros"] <= (market.plan.cap_micros or 0)
    assert cost["cap_kept"] is True
    assert [row.problems for row in audit(market.home).rows] == [()]
    return True


def test_an_id_that_never_existed_yields_to_the_next_offer(market: Market) -> None:
    never_was(market)
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here", "second"]
    assert SETTLE_S <= waited_s(market) <= SETTLE_S + 10.0
    (message,) = gone(market)
    assert lacking(message, "local", "i-local-1") == []


def test_an_end_at_launch_is_passed_over_with_its_reason(market: Market) -> None:
    ended_at_launch(market)
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here", "second"]
    assert waited_s(market) <= 10.0
    assert REASON in gone(market)[0]
    assert kept(market)


def test_silence_ends_the_run_where_the_cap_pays_for_one_machine(market: Market) -> None:
    never_was(market)
    capped_at(market, 1.5)
    assert market.supervise() is ExitCode.NO_OFFER
    assert market.regions == ["here"]
    failed = market.all_of(Event.STEP_FAILED)[0]
    assert (failed["code"], failed["exit_code"]) == ("boot.gone", int(ExitCode.NO_OFFER))
    assert "--max-cost" in failed["hint"]


def test_a_listed_end_takes_only_its_real_cost_from_the_cap(market: Market) -> None:
    ended_at_launch(market)
    capped_at(market, 1.5)
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here", "second"]
    assert kept(market)


def test_to_the_micro_it_pays_for_none(market: Market) -> None:
    ended_at_launch(market)
    capped_at(market, 1)
    market.supervise()
    assert market.regions == ["here"]
    assert kept(market)


def test_the_last_offer_ends_the_run_with_the_reason(market: Market) -> None:
    market.set_plan(candidates=market.plan.candidates[:1])
    ended_at_launch(market)
    assert market.supervise() is ExitCode.NO_OFFER
    assert REASON in market.all_of(Event.STEP_FAILED)[0]["message"]
    assert kept(market)


def test_one_that_was_denied_for_a_hundred_seconds_is_used(market: Market) -> None:
    find, read = market.cloud.find, market.cloud.read

    def is_denied() -> bool:
        return any(box.born_s + 5.0 <= market.cloud.now < box.born_s + 105.0 for box in market.cloud.boxes)

    market.cloud.profile = replace(market.cloud.profile, boot_s=60.0)
    market.cloud.find = lambda token: [] if is_denied() else find(token)  # type: ignore[method-assign]
    market.cloud.read = lambda name: read("i-none") if is_denied() else read(name)  # type: ignore[method-assign]
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here"]
    assert kept(market)


def test_killed_before_the_end_is_proven_it_still_moves_on(market: Market) -> None:
    ended_at_launch(market)
    market.cloud.killing = "before destroy"
    with pytest.raises(Killed):
        market.supervise()
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here", "second"]
    assert kept(market)


def test_the_day_after_no_second_is_asked_for(market: Market) -> None:
    """The supervisor was killed before it could prove the machine's death.

    A day later the next one must not rent again.
    """
    ended_at_launch(market)
    market.cloud.killing = "before destroy"
    with pytest.raises(Killed):
        market.supervise()
    market.clock.sleep(86_400.0)
    assert market.supervise() is ExitCode.NO_OFFER
    assert market.regions == ["here"]
    assert [row.problems for row in audit(market.home).rows] == [()]


def test_a_stop_while_its_end_is_proven_asks_for_no_second(market: Market) -> None:
    ended_at_launch(market)
    market.cloud.killing = "before destroy"
    with pytest.raises(Killed):
        market.supervise()
    ask_to_stop(market.folder, "destroy", by="user", reason="no more")
    market.supervise()
    assert market.regions == ["here"]


def test_who_waits_is_shown_what_the_provider_says(market: Market) -> None:
    shown = list[str]()
    read = market.cloud.read
    market.cloud.profile = replace(market.cloud.profile, boot_s=40.0)

    def reading(name: str) -> Instance:
        moving = read_moving(market.folder, market.clock.wall())
        shown.append(moving_words(moving) if moving is not None else "")
        return read(name)

    market.cloud.read = reading  # type: ignore[method-assign]
    assert market.supervise() is ExitCode.DONE
    assert any(words.startswith("10 s of ") and words.endswith(" · local says PENDING") for words in shown)


def test_a_lease_shrinks_for_what_an_earlier_machine_cost(market: Market) -> None:
    """If the second machine's price rises, the time left must shrink by what the first machine has cost."""
    never_was(market)
    assert market.supervise() is ExitCode.DONE
    records = market.records
    spent = Micros(market.all_of(Event.CREATE_INTENDED)[1]["spent_micros"])
    second = [record.seq for record in records if record.event is Event.CREATE_OBSERVED][1]
    state = replay_journal("fox-41", [record for record in records if record.seq <= second])
    plan, clock = market.plan, VirtualClock(records[second].wall)
    dearer = Dearer(micros_per_hour=times(plan.offer.rate_micros_per_hour, 2), since_wall=clock.wall())
    attempt = state.attempts[state.token]
    now, had_all = (
        real_seconds(3600.0, state.model_copy(update={"dearer": (dearer,), "attempts": attempts}), plan, clock)
        for attempts in (state.attempts, {state.token: attempt.model_copy(update={"spent_micros": 0})})
    )
    at_twice_the_price = seconds_within(spent, plan.offer.rate_micros_per_hour) / 2
    assert at_twice_the_price > 0
    assert had_all - now == pytest.approx(at_twice_the_price, abs=1.0)

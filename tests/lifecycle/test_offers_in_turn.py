"""Tests that gpurun rents only what the user agreed to: approved offers, in order, at their price, one at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, times, usd
from gpurun.core.paths import Home
from gpurun.core.records import Instance, Order
from gpurun.planning.verify_machine import STALE_S
from gpurun.providers.base import NoCapacity, Rejected, Throttled, Unknown
from gpurun.providers.errors import RejectedFor, not_allowed
from tests.emulators.fake import Fault
from tests.lifecycle.offers_in_turn import Market
from tests.lifecycle.scripted_cloud import Killed, World
from tests.refusals import lacking


@pytest.fixture
def market(tmp_path: Path) -> Market:
    return Market(Home(tmp_path))


def test_no_capacity_takes_the_next_approved_offer_and_new_token(market: Market) -> None:
    market.cloud.script["create"] = [Fault.FULL, Fault.FULL]
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here", "second", "third"]
    assert len({intent["token"] for intent in market.all_of(Event.CREATE_INTENDED)}) == 3
    assert len(market.cloud.boxes) == 1
    assert not market.cloud.alive


def test_no_capacity_anywhere_makes_nothing_and_costs_nothing(market: Market) -> None:
    market.cloud.script["create"] = [Fault.FULL] * 9
    assert market.supervise() is ExitCode.NO_OFFER
    assert len(market.regions) == 3
    assert market.cloud.metered() == 0


def test_a_refusal_for_another_reason_takes_no_other_offer(market: Market) -> None:
    market.cloud.script["create"] = [Fault.REFUSED]
    assert market.supervise() is ExitCode.NO_OFFER
    assert market.regions == ["here"]


def refusing(market: Market, *refusals: Exception) -> None:
    """Refuse the next creates with these errors, one after the other."""
    waiting, create = list(refusals), market.cloud.create

    def refused(order: Order) -> Instance:
        if waiting:
            raise waiting.pop(0)
        return create(order)

    market.cloud.create = refused  # type: ignore[method-assign]


def no_rights(of_offer: bool = True) -> RejectedFor:
    return RejectedFor(not_allowed("The key may not.", hint="Give another key."), of_offer=of_offer)


def test_a_refusal_of_this_offer_alone_takes_the_next_one(market: Market) -> None:
    refusing(market, Rejected("HTTP 400: this cannot be placed", of_offer=True), no_rights())
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here", "second", "third"]
    assert len({intent["token"] for intent in market.all_of(Event.CREATE_INTENDED)}) == 3
    assert [data["reason"] for data in market.all_of(Event.CREATE_REFUSED)] == ["offer_rejected"] * 2
    assert len(market.cloud.boxes) == 1


def test_a_doubt_after_a_refusal_is_checked_and_no_offer_asked(market: Market) -> None:
    refusing(market, Rejected("HTTP 400", of_offer=True))
    market.cloud.script["create"] = [Fault.LOST]
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here", "second"]
    assert len(market.cloud.boxes) == 1


def test_refusals_of_every_offer_are_listed_and_the_last_decides(market: Market) -> None:
    refusing(market, no_rights(), NoCapacity("sold out"), Rejected("HTTP 400: no such rule", of_offer=True))
    assert market.supervise() is ExitCode.NO_OFFER
    (failed,) = market.all_of(Event.STEP_FAILED)
    assert failed["code"] == "create.rejected"
    assert all(words in failed["message"] for words in ("no such rule", "The key may not", "sold out"))
    assert market.cloud.metered() == 0


def test_one_reason_for_all_offers_is_shown_once(market: Market) -> None:
    refusing(market, *[Rejected("HTTP 400: no such rule.", of_offer=True)] * 3)
    assert market.supervise() is ExitCode.NO_OFFER
    (failed,) = market.all_of(Event.STEP_FAILED)
    assert len(market.regions) == 3
    assert failed["message"].count("no such rule") == 1


@pytest.mark.parametrize("offers", [1, 3])
def test_a_key_without_rights_stays_a_matter_of_setup(market: Market, offers: int) -> None:
    """If the key lacks rights for every approved offer, one or three, the exit code is that of setup."""
    market.set_plan(candidates=market.plan.candidates[:offers])
    refusing(market, *[no_rights() for _ in range(offers)])
    assert market.supervise() is ExitCode.SETUP
    (failed,) = market.all_of(Event.STEP_FAILED)
    assert (failed["code"], failed["message"]) == ("auth.not_allowed", "The key may not.")
    assert len(market.regions) == offers


def test_killed_after_a_refusal_it_asks_the_next_offer(market: Market) -> None:
    refusing(market, Rejected("HTTP 400", of_offer=True))
    market.cloud.killing = "before create"
    with pytest.raises(Killed):
        market.supervise()
    assert market.supervise() is ExitCode.DONE
    assert market.regions[0] == "here"
    assert set(market.regions[1:]) == {"second"}
    assert len(market.cloud.boxes) == 1


def test_a_lost_answer_is_looked_for_at_the_offer_it_was_about(market: Market) -> None:
    market.cloud.script["create"] = [Fault.FULL, Fault.LOST]
    assert market.supervise() is ExitCode.DONE
    assert market.regions == ["here", "second"]
    assert len(market.cloud.boxes) == 1


def test_each_attempt_stays_within_the_cap_by_itself(market: Market) -> None:
    market.cloud.script["create"] = [Fault.FULL]
    market.supervise()
    cap = market.plan.cap_micros
    assert cap is not None
    assert all(intent["worst_micros"] <= cap for intent in market.all_of(Event.CREATE_INTENDED))


def test_a_machine_type_other_than_agreed_is_destroyed(market: Market) -> None:
    market.set_plan(offer=market.plan.offer.model_copy(update={"type_id": "gpu_8x_a100"}), candidates=())
    market.cloud.gpu = "T4"
    assert market.supervise() is ExitCode.NO_OFFER
    assert not market.cloud.alive


@pytest.mark.parametrize(("age_s", "sent"), [(STALE_S - 1, True), (STALE_S + 1, False)])
def test_a_price_risen_since_the_plan_is_refused_before_asking(market: Market, age_s: float, sent: bool) -> None:
    market.set_plan(quoted_wall=market.clock.wall())
    market.clock.sleep(age_s)
    dearer = market.plan.offer.model_copy(update={"rate_micros_per_hour": times(rate_of(market), 2)})
    market.cloud.stock = [dearer]
    code = market.supervise()
    assert bool(market.all_of(Event.CREATE_INTENDED)) is sent
    assert code is (ExitCode.DONE if sent else ExitCode.NO_OFFER)


@pytest.mark.parametrize(
    "other", [{"tier": "community"}, {"spot": True}, {"type_id": "other"}, {"region": "elsewhere"}]
)
def test_a_price_rise_is_not_hidden_by_a_cheaper_offer(market: Market, other: dict[str, object]) -> None:
    market.set_plan(quoted_wall=market.clock.wall())
    market.clock.sleep(STALE_S + 1)
    dearer = market.plan.offer.model_copy(update={"rate_micros_per_hour": times(rate_of(market), 2)})
    market.cloud.stock = [dearer, market.plan.offer.model_copy(update=other)]
    assert market.supervise() is ExitCode.NO_OFFER
    assert not market.all_of(Event.CREATE_INTENDED)


def test_an_old_price_that_cannot_be_read_again_is_not_spent_on(market: Market) -> None:
    market.set_plan(quoted_wall=market.clock.wall())
    market.clock.sleep(STALE_S + 1)
    market.cloud.broken["offers"] = Unknown("503")
    assert market.supervise() is ExitCode.NO_OFFER
    assert market.cloud.created == 0


def test_what_lies_beside_the_machine_is_gone_before_the_receipt(market: Market) -> None:
    market.cloud.profile = replace(market.cloud.profile, leaves=("ssh_key", "firewall"))
    assert market.supervise() is ExitCode.DONE
    assert market.cloud.things
    assert all(thing.removed_s is not None for thing in market.cloud.things)


def test_a_machine_clock_an_hour_ahead_takes_no_training_time(market: Market) -> None:
    jobs = []
    start = market.far.start
    market.far.start = lambda job: (jobs.append(job), start(job))[1]  # type: ignore[method-assign]
    hello = market.far.hello
    market.far.hello = lambda python=None, **_: hello().model_copy(  # type: ignore[method-assign]
        update={"wall": market.clock.wall() + 3600}
    )
    assert market.supervise() is ExitCode.DONE
    left_s = jobs[0]["hard_stop_wall"] - 3600 - market.clock.wall()
    assert 0 < left_s < market.plan.lease.total_s


def rate_of(market: Market) -> Micros:
    return market.plan.offer.rate_micros_per_hour or usd(1)


def test_a_provider_that_takes_no_create_is_quoted_at_the_end(tmp_path: Path) -> None:
    world = World(Home(tmp_path))

    def busy(order: Order) -> Instance:
        raise Throttled("fake takes no more requests for now (429)")

    world.cloud.create = busy  # type: ignore[method-assign]
    assert world.drive() is ExitCode.NO_OFFER
    message = world.state.failure.message
    assert lacking(message, "3 attempts", "fake takes no more requests for now (429).") == []

"""Tests of the cap: it bounds the cost of the whole rental, whichever offer is chosen."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurun.core.errors import NoOffer, UsageError
from gpurun.core.money import Micros, parse_usd, usd
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, Estimate
from gpurun.jobs.trainer import TrainerJob
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.planning.budget import beside_rate, candidates, choose, expected_train_s, lease_for, worst_case
from gpurun.planning.transfer import Load, estimate_load
from gpurun.providers.catalog import all_offers, offers_for, parse_gpu, terms_of
from tests.later import examples
from tests.refusals import refusal

GPT2 = resolve(load_recipe("gpt2-124m"), "full")
LOAD = estimate_load(GPT2, ship_bytes=50_000_000)
EIGHT = offers_for(parse_gpu("8xA100"))


def plan(cap: str | None, *, load: Load = LOAD, hours: float | None = None) -> tuple[Candidate, ...]:
    return candidates(EIGHT, GPT2, load, cap=parse_usd(cap) if cap else None, hours=hours)


loads = st.builds(
    Load,
    ship_bytes=st.integers(0, 10**11),
    collect_bytes=st.integers(0, 10**11),
    disk_gb=st.integers(1, 2000),
    uplink_bits_per_s=st.floats(1e5, 1e10),
    downlink_bits_per_s=st.floats(1e5, 1e10),
)
guesses = st.tuples(st.floats(1, 1e6), st.floats(1, 20)).map(
    lambda pair: Estimate(
        fits=True,
        peak_bytes=1,
        micro_batch=1,
        tokens_per_s=(1.0, pair[1]),
        train_s=(pair[0], pair[0] * pair[1]),
        basis="drawn",
    )
)


def test_waiting_for_a_machine_is_in_no_lease_and_no_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan("25"), plan(None), plan("25", hours=2)
    monkeypatch.setattr("gpurun.planning.budget.terms_of", lambda *at: replace(terms_of(*at), patience={1: 86_400}))
    assert (plan("25"), plan(None), plan("25", hours=2)) == before
    assert {(one.offer.provider, one.lease.boot_s) for one in before[1] if one.lease} == {
        ("runpod", 300), ("lambda", 900), ("aws", 600)
    }  # fmt: skip


@given(
    offer=st.sampled_from(all_offers()),
    rate=st.integers(1, 200_000_000),
    guess=guesses,
    load=loads,
    cap=st.integers(1, 10**10),
    hours=st.none() | st.floats(0.01, 1000),
)
@settings(max_examples=examples(500), deadline=None)
def test_the_worst_case_of_a_lease_never_exceeds_the_cap(
    offer: Offer, rate: int, guess: Estimate, load: Load, cap: int, hours: float | None
) -> None:
    offer = offer.model_copy(update={"rate_micros_per_hour": Micros(rate)})
    lease = lease_for(offer, guess, load, cap=Micros(cap), hours=hours)
    if lease is None:
        return
    assert lease.train_s > 0
    assert worst_case(offer, lease, load) <= cap
    if hours is not None:
        assert lease.train_s <= ceil(hours * 3600)
    if lease.train_s < lease_for(offer, guess, load, cap=None, hours=hours).train_s:
        longer = lease.model_copy(update={"train_s": lease.train_s + offer.billing_unit_s + 1})
        assert worst_case(offer, longer, load) > cap, "the cap is used up to the last billing unit"


@given(guess=guesses, load=loads, cap=st.none() | st.integers(1, 10**9))
@settings(max_examples=examples(200), deadline=None)
def test_a_cap_of_what_it_needs_is_enough(guess: Estimate, load: Load, cap: int | None) -> None:
    for offer in EIGHT[:3]:
        probe = lease_for(offer, guess, load, cap=None)
        needed = worst_case(offer, probe.model_copy(update={"train_s": ceil(expected_train_s(guess))}), load)
        lease = lease_for(offer, guess, load, cap=needed)
        assert lease is not None
        assert lease.train_s >= expected_train_s(guess)


ENDLESS = resolve(load_recipe("gpt2-124m"), "full", ("train.steps=999999", "train.batch_tokens=4294967296"))


@pytest.mark.parametrize("cap", [None, "1000000"])
def test_more_time_than_the_longest_lease_is_refused_unpriced(cap: str | None) -> None:
    """A lease of centuries has no valid end date, and a hint to buy it would name an impossible --hours."""
    found = candidates(EIGHT, ENDLESS, LOAD, cap=parse_usd(cap) if cap else None)
    assert ["over a year" in offer.why_not for offer in found] == [True] * len(found)
    with refusal(NoOffer, "offer.none_fits", "over a year"):
        choose(found, LOAD, cap=parse_usd(cap) if cap else None)


def test_a_free_machine_trains_for_a_year_what_takes_longer() -> None:
    free = EIGHT[0].model_copy(update={"provider": "local", "rate_micros_per_hour": usd(0)})
    found = candidates([free], ENDLESS, LOAD, cap=None)
    assert choose(found, LOAD, cap=None).lease.train_s == 365 * 86400
    assert found[0].reach.step < 999_999


@pytest.mark.parametrize(
    ("written", "cap", "price"),
    [("25", 25_000_000, 25_000_000), ("$0.50", 500_000, 500_000), ("12.3456781", 12_345_678, 12_345_679)],
)
def test_a_cap_is_rounded_down_and_a_price_up(written: str, cap: int, price: int) -> None:
    assert (parse_usd(written), parse_usd(written, is_limit=False)) == (cap, price)


@pytest.mark.parametrize("written", ["0.0000009", "1e-400", "1e999999", "-0", "Infinity", "2_5", "25_00", "٢٥", "２５"])
def test_what_is_no_cap_to_the_micro_dollar_is_refused(written: str) -> None:
    with pytest.raises(UsageError):
        parse_usd(written)


def test_25_dollars_train_gpt2_on_eight_a100() -> None:
    found = plan("25")
    chosen = choose(found, LOAD, cap=parse_usd("25"))
    assert chosen is found[0]
    assert chosen.finishes
    assert chosen.offer.provider == "runpod"
    assert usd(20) < chosen.expected_micros < usd(23), "the published run is called a 20 dollar run"
    assert chosen.worst_micros <= usd(25)
    others = found[1:]
    assert all(not one.finishes and one.lease is None and one.worst_micros is None for one in others)
    assert others[0].why_not.startswith("needs $29")
    assert [one.expected_micros for one in others] == sorted(one.expected_micros for one in others)


def test_a_cap_below_every_finish_names_the_number_that_would_do() -> None:
    with pytest.raises(NoOffer) as refused:
        choose(plan("5"), LOAD, cap=parse_usd("5"))
    words = refused.value.hint.split("--max-cost ")[1].split(":")[0]
    assert choose(plan(words), LOAD, cap=parse_usd(words)).finishes
    less = str(float(words) - 0.02)
    with pytest.raises(NoOffer):
        choose(plan(less), LOAD, cap=parse_usd(less))


def test_hours_buy_a_part_on_purpose_and_it_is_said() -> None:
    chosen = choose(plan("25", hours=0.5), LOAD, cap=parse_usd("25"))
    assert chosen.lease is not None
    assert chosen.lease.train_s == 1800
    assert not chosen.finishes
    assert "0.5 h " in chosen.why_not


def test_the_hours_that_an_offer_is_said_to_need_are_enough() -> None:
    """If an offer is said to need 1.7 h, `--hours 1.7` must pay for every step: the last were once missing."""
    for short in plan(None, hours=0.01):
        *_, needed = map(float, re.findall(r"([\d.]+) h\b", short.why_not))
        assert next(one for one in plan(None, hours=needed) if one.offer == short.offer).finishes


@pytest.mark.parametrize("cap", [None, "15", "25"])
@pytest.mark.parametrize("hours", [0.5, 1.0, 24.0])
def test_a_part_costs_its_own_time_and_is_ranked_by_the_whole(cap: str | None, hours: float) -> None:
    """An hour of a long run must not be expected to cost as much as the whole run, more than its worst case."""
    found, whole = plan(cap, hours=hours), {one.offer: one for one in plan(None)}
    leased = [one for one in found if one.lease is not None]
    for one in leased:
        assert one.expected_micros is not None
        assert one.worst_micros is not None
        assert one.expected_micros < one.worst_micros
        if one.finishes:
            assert one.expected_micros == whole[one.offer].expected_micros
    parts = [whole[one.offer].expected_micros for one in leased if not one.finishes]
    assert parts == sorted(parts)


def test_without_a_cap_the_lease_is_three_times_the_slow_end() -> None:
    first = plan(None)[0]
    assert first.estimate.train_s is not None
    assert first.lease is not None
    assert first.lease.train_s == ceil(3 * first.estimate.train_s[1])


def test_a_slow_uplink_is_part_of_the_price() -> None:
    by_laptop = Load(ship_bytes=19_800_000_000, collect_bytes=LOAD.collect_bytes, disk_gb=100)
    assert by_laptop.ship_s > 2 * 3600
    assert not any(one.finishes for one in plan("25", load=by_laptop))


def test_aws_adds_disk_address_egress_and_lambda_rounds_minutes() -> None:
    aws = next(o for o in EIGHT if o.provider == "aws")
    lease = lease_for(aws, plan(None)[0].estimate, LOAD, cap=None)
    assert lease is not None
    seconds = lease.total_s + lease.kill_allowance_s
    compute = -(-aws.rate_micros_per_hour * seconds // 3600)
    extras = worst_case(aws, lease, LOAD) - compute
    once = 12 * 90_000  # Eight checkpoints of 124M parameters, rounded up to a gigabyte.
    assert once < extras < once + seconds / 3600 * (100 * 137 + 5_000) + 3
    slow = next(o for o in EIGHT if o.provider == "lambda")
    minute = lease.model_copy(update={"train_s": lease.train_s - (seconds % 60)})
    more = minute.model_copy(update={"train_s": minute.train_s + 1})
    step = worst_case(slow, more, LOAD) - worst_case(slow, minute, LOAD)
    assert step == pytest.approx(slow.rate_micros_per_hour / 60, abs=1)  # the whole sum is rounded up, not the step


def test_a_dearer_aws_region_plans_its_own_disk_and_egress() -> None:
    aws = next(o for o in EIGHT if o.provider == "aws")
    lease = lease_for(aws, plan(None)[0].estimate, LOAD, cap=None)
    assert lease is not None
    there = {
        name: aws.model_copy(update={"region": name}) for name in ("us-west-2", "eu-central-1", "sa-east-1", "any")
    }
    worst = {name: worst_case(offer, lease, LOAD) for name, offer in there.items()}
    assert worst["us-west-2"] == worst["eu-central-1"] == worst_case(aws, lease, LOAD)
    assert worst["sa-east-1"] == worst["any"] > worst["us-west-2"] + 12 * 60_000, (
        "twelve gigabytes at 15.4 cents, not 9"
    )
    hourly, once_only = beside_rate(there["sa-east-1"], 12 * 124_000_000, 100)
    assert hourly == 100 * 209 + 5_000
    assert once_only > beside_rate(aws, 12 * 124_000_000, 100)[1], "what the journal has to count with is the same"


@pytest.mark.parametrize("hours", [0.0, -1.0, float("nan"), float("inf")])
def test_hours_that_are_no_time_are_refused(hours: float) -> None:
    with pytest.raises(UsageError, match="--hours"):
        plan("25", hours=hours)


def test_no_offer_at_all_is_said() -> None:
    with refusal(NoOffer, "offer.none_fits"):
        choose((), LOAD, cap=None)


@pytest.mark.parametrize(("parameters", "needed_s"), [(124_000_000, 18), (1_560_000_000, 210)])
def test_a_larger_checkpoint_is_given_longer_to_save(parameters: int, needed_s: int) -> None:
    """Planned are 30 s for the step in progress, plus the checkpoint at 86 MB/s (measured on two loaded cores)."""
    assert TrainerJob.model_construct(parameters=parameters).save_s >= 30 + needed_s
    assert TrainerJob.model_construct(parameters=100_000).save_s == 60

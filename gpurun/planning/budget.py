"""Compute how long a rental may last and what it can cost, and which offers finish under the cap.

    worst = ceil_to_billing_unit(lease + kill allowance) x rate + disk + egress   <=  cap
    lease = boot + set-up + ship + train + collect + destroy

The training limit is --hours if given. Otherwise it is three times the slow end of the estimate, at least half an hour.
It is reduced until the worst case is within the cap. An offer finishes if the reduced limit still covers the expected
training time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, floor, inf

from gpurun.core.errors import NoOffer, UsageError
from gpurun.core.money import (
    SECONDS_PER_HOUR,
    Micros,
    cost_of,
    format_rate,
    format_usd,
    left_of,
    seconds_within,
    times,
    total,
)
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, Estimate, Lease, Reach
from gpurun.jobs.trainer import KEPT_CHECKPOINTS
from gpurun.jobs.training.estimate import NO_PRIORS, estimate, steps_of_work
from gpurun.jobs.training.history import Prior, Priors, describe_machine, loss_at, same_recipe
from gpurun.jobs.training.memory import GIB, usable_bytes
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.planning.transfer import BUCKET_BITS_PER_S, COLLECT_START_S, WORTH_A_BUCKET_S, Load
from gpurun.providers.catalog import gpu_flag, terms_of

DESTROY_S = 120
EXPECTED_BOOT_SHARE = 0.5  # A share of the limit: AWS took 101 to 147 of its 300 s (SkyPilot, PR 4091).
EXPECTED_DESTROY_S = 45  # At most 41 s were measured (docs/dev/BENCHMARKS.md); the proof alone takes 30 s.
MARGIN = 3
MOST_HOURS = 24 * 365
MOST_TRAIN_S = MOST_HOURS * SECONDS_PER_HOUR  # The longest lease, because later dates may overflow.
MOST_HINTS = 3
WOULD_DO = "Each of these would do:"
LEAST_TRAIN_S = 1800


def worst_case(offer: Offer, lease: Lease, load: Load) -> Micros:
    """Return the upper bound of a rental's cost: the whole lease and the kill allowance, with disk and egress."""
    return _compute_cost(offer, lease.total_s + lease.kill_allowance_s, load)


def disk_gb_on(provider: str, wanted_gb: int) -> int:
    """Return the disk size to order in GB: the requested size, but at least what the provider's images need."""
    return max(wanted_gb, terms_of(provider).least_disk_gb)


def beside_rate(offer: Offer, collect_bytes: int, disk_gb: int) -> tuple[Micros, Micros]:
    """Return a rental's costs in addition to its rate: per hour (disk, address), and once (egress of checkpoints)."""
    load = Load(0, collect_bytes, disk_gb)
    return _compute_side_cost_per_hour(offer, load), _compute_egress_cost(offer, load)


def rental_cost(offer: Offer, seconds: float, collect_bytes: int, disk_gb: int) -> Micros:
    """Return the cost of a rental of that many seconds, with disk, address and egress."""
    return _compute_cost(offer, seconds, Load(0, collect_bytes, disk_gb))


def expected_train_s(guess: Estimate) -> float:
    """Return the likely training time in seconds; infinity if the speed is not known."""
    return inf if guess.likely_s is None else guess.likely_s


def require_hours(hours: float | None) -> None:
    """Raise UsageError unless the hours are above 0 and at most a year."""
    if hours is not None and not 0 < hours <= MOST_HOURS:
        what = f"--hours {hours:g} is not a possible duration: it must be above 0 and at most {MOST_HOURS:,} (a year)."
        raise UsageError("hours.bad", what, hint="For example, write --hours 2.5")


def lease_for(
    offer: Offer, guess: Estimate, load: Load, *, cap: Micros | None, hours: float | None = None
) -> Lease | None:
    """Return the longest lease that the cap pays for; None if the cap or an unknown speed allows no training.

    The training limit is `hours` if given, else three times the slow end of the estimate, between half an hour and a
    year. The cap may reduce it. A run of minutes therefore never gets a lease of a day, even if the cap would pay for
    it.
    """
    require_hours(hours)
    if hours is not None:
        limit_s = ceil(hours * SECONDS_PER_HOUR)
    elif guess.train_s is not None:
        limit_s = max(LEAST_TRAIN_S, ceil(min(MOST_TRAIN_S, guess.train_s[1] * MARGIN)))
    else:
        return None
    hours_s = limit_s if hours is not None else None
    lease = _make_lease(offer, load, limit_s, hours_s)
    if cap is None or worst_case(offer, lease, load) <= cap:
        return lease
    others_s = lease.total_s + lease.kill_allowance_s - limit_s
    paid_s = seconds_within(
        left_of(cap, _compute_egress_cost(offer, load)), _compute_hourly_cost(offer, load), offer.billing_unit_s
    )
    train_s = int(min(limit_s, paid_s - others_s))
    # Each part of a price is rounded up separately, so the total can be a micro-dollar above the rounded sum.
    while train_s > 0 and worst_case(offer, _make_lease(offer, load, train_s), load) > cap:
        train_s -= offer.billing_unit_s
    return _make_lease(offer, load, train_s, hours_s) if train_s > 0 else None


def candidates(
    offers: Iterable[Offer],
    recipe: ResolvedRecipe,
    load: Load,
    *,
    cap: Micros | None,
    hours: float | None = None,
    vocab_size: int = 0,
    cpu_cores: int = 2,
    priors: Priors = NO_PRIORS,
    data_sha256: str = "",
) -> tuple[Candidate, ...]:
    """Return every offer with its time and cost, sorted: offers that finish first, then by the cost of finishing.

    A candidate with a lease may be rented: its worst case is within the cap. With `hours`, an offer may have a lease
    for only a part of the run. Without `hours`, a paid offer that cannot finish has no lease, and `why_not` states what
    it would need.
    """
    found, known = [], same_recipe(priors, recipe.sha256, data_sha256)
    for offer in offers:
        machine = describe_machine(offer, cpu_cores)
        guess = estimate(recipe, offer, vocab_size=vocab_size, cpu_cores=cpu_cores, priors=priors, machine=machine)
        lease = lease_for(offer, guess, load, cap=cap, hours=hours) if guess.fits else None
        found.append(judge_lease(offer, guess, load, lease, hours, reach_of(recipe, guess, lease, known)))
    return ranked(found, load)


def ranked(found: Iterable[Candidate], load: Load) -> tuple[Candidate, ...]:
    """Return the candidates sorted: those that finish, then those that may be rented; each by cost of finishing."""
    return tuple(sorted(found, key=lambda candidate: _make_sort_key(candidate, load)))


def choose(found: Sequence[Candidate], load: Load, *, cap: Micros | None, by_gpu: bool = False) -> Candidate:
    """Return the first candidate that may be rented. If there is none, raise NoOffer with a sufficient cap.

    With `by_gpu`, the candidates have other GPUs than the run would use without --gpu, so the hint includes --gpu.
    """
    for candidate in found:
        if candidate.lease is not None:
            return candidate
    within = [candidate for candidate in found if expected_train_s(candidate.estimate) <= MOST_TRAIN_S]
    needs = [(needed_cap(candidate.offer, candidate.estimate, load), candidate.offer) for candidate in within]
    if cap is None or not needs:
        raise _no_fit_error(found)
    needed, offer = min(needs, key=lambda pair: pair[0])
    reaching = [candidate for candidate in found if candidate.reach]
    furthest = max(reaching, key=lambda candidate: candidate.reach.step if candidate.reach else 0, default=None)
    reached, part = "", []
    if furthest is not None and furthest.reach is not None and furthest.reach.step:
        where = f"{furthest.offer.provider} {furthest.offer.label}"
        reached = f"The furthest it gets is {reach_words(furthest.reach)}, on {where}. "
        hours = floor(1000 * furthest.reach.train_s / SECONDS_PER_HOUR) / 1000
        if hours:
            on = f"--gpu {gpu_flag(furthest.offer)} " if by_gpu else ""
            part = [f"{on}--hours {hours:g}: a part now; the rest later by gpurun train --from RUN"]
    on = f"--gpu {gpu_flag(offer)} " if by_gpu else ""
    raise over_cap(
        f"No offer finishes within {format_usd(cap)}. {reached}The cheapest offer that does needs {format_usd(needed)} "
        f"({offer.provider} {offer.label}, {format_rate(offer.rate_micros_per_hour)}).",
        [*_bucket_hint(within, load, cap, by_gpu=by_gpu), *part, f"{on}--max-cost {as_typed(needed)}: a higher cap"],
    )


def over_cap(what: str, ways: Sequence[str]) -> NoOffer:
    """Return the refusal of a request that its cap does not pay for.

    Its hint has one line for each of the first few `ways`.
    """
    return NoOffer("offer.over_cap", what, hint="\n".join((WOULD_DO, *ways[:MOST_HINTS])))


def as_typed(amount: Micros) -> str:
    """Return an amount in the form that --max-cost takes: `1234.57`."""
    return format_usd(amount).removeprefix("$").replace(",", "")


def _bucket_hint(found: Sequence[Candidate], load: Load, cap: Micros, *, by_gpu: bool) -> list[str]:
    """Return a hint about a bucket: the cap, or else the upload speed, that would suffice.

    Return [] if pulling the shards from a bucket would save little time.
    """
    staged = replace(load, uplink_bits_per_s=BUCKET_BITS_PER_S)
    if load.ship_s - staged.ship_s < WORTH_A_BUCKET_S:
        return []
    needed, offer, guess = min(
        ((needed_cap(each.offer, each.estimate, staged), each.offer, each.estimate) for each in found),
        key=lambda need: need[0],
    )
    on = f"--gpu {gpu_flag(offer)} " if by_gpu else ""
    stage = f"{on}--stage s3://BUCKET/PREFIX"
    if needed > cap:
        return [f"{stage} --max-cost {as_typed(needed)}: the shards from a bucket, and a higher cap"]
    # Each second that the upload takes less shortens the lease by a second.
    bare = _make_lease(offer, replace(load, ship_bytes=0), ceil(expected_train_s(guess)))
    paid_s = seconds_within(
        left_of(cap, _compute_egress_cost(offer, load)), _compute_hourly_cost(offer, load), offer.billing_unit_s
    )
    line = ceil(8e-6 * load.ship_bytes / (paid_s - bare.total_s - bare.kill_allowance_s))
    return [f"{stage}: the shards from a bucket, {format_usd(needed)}; an upload at {line} Mbit/s suffices, too"]


def _no_fit_error(found: Sequence[Candidate]) -> NoOffer:
    """Return the refusal if no offer can run the recipe.

    If only memory is too small, suggest reductions for the offer that comes nearest.
    """
    if not found:
        hint = "Ask for another GPU with --gpu, or for a smaller model with --set."
        return NoOffer("offer.none_fits", "There is no offer for this need.", hint=hint)
    short = [candidate for candidate in found if candidate.estimate.obstacle == "memory"]
    rest = [candidate for candidate in reversed(found) if candidate not in short]
    reasons = {candidate.why_not: f"{candidate.offer.provider} {candidate.offer.label}" for candidate in rest}
    listed = "; ".join(f"{where}: {why}" for why, where in reversed(reasons.items()))
    what = f"No offer can run this recipe. {listed}." if listed else "No offer has the memory for this."
    if not short:
        hint = "Ask for another GPU with --gpu, or for a smaller model with --set."
        if any(candidate.estimate.fits and candidate.estimate.train_s is None for candidate in found):
            hint = "The card's speed is not known. Say how long to train: --hours 2."
        return NoOffer("offer.none_fits", what, hint=hint)
    nearest = min(short, key=lambda each: each.estimate.peak_bytes / max(1.0, usable_bytes(each.offer)))
    where = f"On {nearest.offer.provider} {nearest.offer.label}, which comes nearest"
    hint = "Do one of these with --set (model.context=…, model.layers=…), or ask for a larger --gpu."
    return NoOffer("offer.none_fits", f"{what} {where}, {nearest.estimate.basis}.", hint=hint)


def judge_lease(
    offer: Offer, guess: Estimate, load: Load, lease: Lease | None, hours: float | None, reach: Reach | None
) -> Candidate:
    """Return the candidate for one offer: its cost with this lease, whether it finishes, and if not, why."""
    needed_s = expected_train_s(guess)
    finishes = lease is not None and lease.train_s >= needed_s
    # With --hours, count only the requested part.
    train_s = min(needed_s, lease.train_s) if lease is not None and hours is not None else needed_s
    obstacle, needed, why_not = ("", "", "") if finishes else _find_obstacle(offer, guess, load, lease, hours)
    # If nothing is paid, a part of the run may be done.
    if hours is None and not finishes and offer.rate_micros_per_hour:
        lease = None
    worst = worst_case(offer, lease, load) if lease else None
    expected = slow = None
    if train_s < inf:
        slow_end_s = guess.train_s[1] if guess.train_s else train_s
        slow_s = max(train_s, min(slow_end_s, lease.train_s) if lease else slow_end_s)
        expected, slow = expected_cost(offer, train_s, load), expected_cost(offer, slow_s, load)
    return Candidate(
        offer=offer,
        estimate=guess,
        lease=lease,
        expected_micros=expected,
        slow_micros=min(slow, worst) if slow is not None and worst is not None else slow,
        worst_micros=worst,
        finishes=finishes,
        why_not=why_not,
        reach=reach,
        obstacle=obstacle,
        needed=needed,
    )


def _find_obstacle(
    offer: Offer, guess: Estimate, load: Load, lease: Lease | None, hours: float | None
) -> tuple[str, str, str]:
    """Return why an offer does not finish: (code, the cap or time that it would need, text)."""
    if guess.obstacle == "memory":
        return guess.obstacle, "", f"no fit: {guess.peak_bytes / GIB:.0f} GiB of {usable_bytes(offer) / GIB:.0f}"
    if guess.train_s is None:
        return guess.obstacle, "", guess.basis
    if expected_train_s(guess) > MOST_TRAIN_S and hours is None:
        return "year", "", "takes over a year, longer than any lease"
    if hours is not None and lease is not None and lease.train_s >= int(hours * SECONDS_PER_HOUR):
        needed = f"{ceil(100 * expected_train_s(guess) / SECONDS_PER_HOUR) / 100:g} h"
        return "hours", needed, f"{hours:g} h is less than the {needed} that it needs"
    needed = format_usd(needed_cap(offer, guess, load))
    return "cap", needed, f"needs {needed}, over the cap"


def _make_sort_key(candidate: Candidate, load: Load) -> tuple[bool, bool, int, Micros, str, str, str]:
    """Return a sort key: what finishes first, then what may be rented, the cost of finishing, price and names."""
    offer, guess = candidate.offer, candidate.estimate
    # If no speed is known, this is the cost of the requested hours.
    is_known = guess.train_s is not None
    dollars = expected_cost(offer, expected_train_s(guess), load) if is_known else candidate.expected_micros
    names = (offer.rate_micros_per_hour, offer.provider, offer.type_id, offer.region)
    return (not candidate.finishes, candidate.lease is None, sys.maxsize if dollars is None else dollars, *names)


def needed_cap(offer: Offer, guess: Estimate, load: Load) -> Micros:
    """Return the smallest cap under which an offer finishes."""
    return worst_case(offer, _make_lease(offer, load, ceil(expected_train_s(guess))), load)


def _make_lease(offer: Offer, load: Load, train_s: int, hours_s: int | None = None) -> Lease:
    return Lease(
        boot_s=offer.boot_s,
        setup_s=load.setup_s,
        ship_s=load.ship_s,
        train_s=train_s,
        collect_s=load.collect_s,
        destroy_s=DESTROY_S,
        hours_s=hours_s,
    )


def expected_cost(offer: Offer, train_s: float, load: Load) -> Micros:
    """Return the expected cost of a rental without problems: a usual boot, training, and `expected_end_s`."""
    before_s = ceil(EXPECTED_BOOT_SHARE * (offer.boot_s + load.setup_s)) + load.ship_s
    return _compute_cost(offer, before_s + ceil(train_s) + expected_end_s(load.collect_s), load)


def expected_end_s(collect_s: int) -> int:
    """Return the expected seconds from the end of training to the proven end of the machine.

    It is assumed that the last checkpoint is also the best. `collect_s` is the time limit of the download.
    """
    return COLLECT_START_S + (collect_s - COLLECT_START_S) // KEPT_CHECKPOINTS + EXPECTED_DESTROY_S


def _compute_cost(offer: Offer, seconds: float, load: Load) -> Micros:
    """Return the cost of that many seconds: compute, disk and other hourly costs, and the checkpoints' egress."""
    compute = cost_of(offer.rate_micros_per_hour, seconds, offer.billing_unit_s)
    beside = cost_of(_compute_side_cost_per_hour(offer, load), seconds, offer.billing_unit_s)
    return total(compute, beside, _compute_egress_cost(offer, load))


def _compute_hourly_cost(offer: Offer, load: Load) -> Micros:
    return total(offer.rate_micros_per_hour, _compute_side_cost_per_hour(offer, load))


def _compute_side_cost_per_hour(offer: Offer, load: Load) -> Micros:
    """Return the cost per hour of disk and address."""
    terms = terms_of(offer.provider, offer.region)
    return total(times(terms.disk_per_gb_hour, disk_gb_on(offer.provider, load.disk_gb)), terms.other_per_hour)


def egress_of(offer: Offer, left_bytes: int) -> Micros:
    """Return the cost of bytes that left a machine, with 5 % added for protocols, rounded up to tens of megabytes."""
    tens = -(-left_bytes * 105 // 1_000_000_000)
    return Micros(-(-terms_of(offer.provider, offer.region).egress_per_gb * tens // 100))


def _compute_egress_cost(offer: Offer, load: Load) -> Micros:
    return times(terms_of(offer.provider, offer.region).egress_per_gb, ceil(load.leaving_bytes / 1e9))


def reach_of(recipe: ResolvedRecipe, guess: Estimate, lease: Lease | None, known: Prior | None) -> Reach | None:
    """Return the last step that a lease covers at the likely speed; None without a lease or a known speed.

    `known` is an earlier run of the user with the same recipe and data. The start-up time is subtracted first, so that
    a run of only these steps finishes within the lease.
    """
    if lease is None or guess.train_s is None or guess.tokens_per_s is None or guess.likely_s is None:
        return None
    first = recipe.first_step
    left = recipe.steps_left
    steps = recipe.tables.train.steps
    step = steps
    if lease.train_s < guess.likely_s:
        tokens = steps_of_work(recipe) * recipe.tables.train.batch_tokens
        # The slow end includes the longest start-up: its time minus the time of its steps.
        start_s = max(0.0, guess.train_s[1] - tokens / guess.tokens_per_s[0])
        share = (lease.train_s - start_s) / max(1e-9, guess.likely_s - start_s)
        step = first + max(0, min(left - 1, int(left * share)))
    loss = loss_at(known, step) if known is not None and step else None
    of = known.run if known and loss is not None else ""
    return Reach(step=step, steps=steps, train_s=lease.train_s, val_loss=loss, val_loss_of=of)


def reach_words(reach: Reach) -> str:
    """Return text such as `step 3,950 of 18,865 (21 %)`, with an earlier run's validation loss at that step."""
    words = f"step {reach.step:,} of {reach.steps:,} ({reach.step / reach.steps:.0%})"
    if reach.val_loss is None:
        return words
    return f"{words}, where your run {reach.val_loss_of} had a validation loss of {reach.val_loss:.2f}"

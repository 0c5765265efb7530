"""Ranks the current offers for a run that continues on another machine, by the cost of finishing there.

An offer must have a GPU and a provider of the plan, cost no more than the agreed price, and not have a weaker guard. A
machine may cost at most what is left of the cap, so the cap limits all machines together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from gpurun.core.errors import NoOffer
from gpurun.core.journal_events import RateObserved
from gpurun.core.money import SECONDS_PER_HOUR, Micros, format_rate, format_usd
from gpurun.core.paths import Home
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, Estimate, Lease, Mode, Plan
from gpurun.ledger.reclaims import own_reclaims
from gpurun.planning.budget import expected_cost, lease_for, rental_cost, worst_case
from gpurun.planning.candidates import is_weak
from gpurun.planning.transfer import SHIP_START_S, Load, download_s
from gpurun.providers.base import Unknown
from gpurun.view.number_format import format_duration

LEAST_LEG_S = 300
"""Seconds that a machine must train at least to be worth its start-up, if the time to a checkpoint is not known."""
START_S = (7.0, 100.0)
"""The least and the most seconds before a trainer's first step. Each new machine imports and compiles again."""
USUAL_S = 24 * SECONDS_PER_HOUR
"""The most seconds that a job of unknown length may run on one machine."""
LEAST_HOURS_S = 60.0
"""The fewest seconds of the remaining --hours for which another machine is rented."""
MEASURED_SPREAD = 0.1


@dataclass(frozen=True)
class Standing:
    """The state of a run that has no machine now: where it continues, and how much money is left.

    `carried_bytes` is the size of its checkpoint and compile caches, which are uploaded again. `trained_s` is the time
    that all machines together have trained. `rate` was measured on the machine of the `rated` offer. `avoided` are
    providers and regions that currently take machines back too often. `left_micros` is None without a cap in dollars,
    and `left_gpu_hours` is None without a cap in GPU-hours.
    """

    step: int
    carried_bytes: int
    left_micros: Micros | None
    left_gpu_hours: float | None = None
    trained_s: float = 0.0
    rate: RateObserved | None = None
    rated: Offer | None = None
    avoided: frozenset[tuple[str, str]] = field(default_factory=frozenset)


def most_rate(plan: Plan) -> Micros:
    """Return the highest price per hour that the user agreed to: --max-rate, or that of the plan's dearest offer."""
    if plan.choices.max_rate_micros is not None:
        return plan.choices.max_rate_micros
    return max(candidate.offer.rate_micros_per_hour for candidate in plan.approved)


Shorten = Callable[[Lease, Offer, Micros | None], Lease]
"""Shortens a lease to what a place allows, like `LimitsJobs.lease_within`."""


def _keep_lease(lease: Lease, _: Offer, __: Micros | None) -> Lease:
    return lease


def leg_candidates(
    plan: Plan, offers: Sequence[Offer], standing: Standing, shorten: Shorten = _keep_lease
) -> list[Candidate]:
    """Return the offers on which the run of this plan can continue, each with its lease, the cheapest to finish first.

    Only offers count whose lease covers more than the machine's start-up: at least the time until the next checkpoint.
    """
    judged = [_judge_offer(plan, offer, standing, shorten) for offer in offers if _may_be_taken(plan, offer, standing)]
    load = _compute_load(plan, standing)
    return sorted(filter(None, judged), key=lambda candidate: _make_sort_key(candidate, load))


def least_leg_micros(plan: Plan) -> Micros:
    """Return the least that one machine costs: start-up, upload, training until a checkpoint, and download.

    Each part counts with the longest time that the lease allows, so the actual cost may be lower.
    """
    return rental_cost(plan.offer, _least_leg_s(plan), plan.job.home_bytes, plan.job.disk_gb)


def _least_leg_s(plan: Plan) -> float:
    lease = plan.lease
    beside_s = lease.boot_s + lease.setup_s + lease.ship_s + lease.collect_s + lease.destroy_s + lease.kill_allowance_s
    return beside_s + _interval_s(plan, None)


@dataclass(frozen=True)
class Need:
    """The least that one machine of a plan needs, and the cap that pays for it; both in dollars or both in GPU-hours.

    `words` formats such an amount.
    """

    least: float
    cap: float
    words: Callable[[float], str]

    @property
    def machines(self) -> int:
        """Return how many machines the cap pays for."""
        return int(self.cap // self.least)


def needs_of(plan: Plan, left_micros: Micros | None, left_gpu_hours: float | None) -> list[Need]:
    """Return the need of one machine for each cap of the plan. A free machine has no need in dollars."""
    found, least = list[Need](), least_leg_micros(plan)
    if least and left_micros is not None:
        found.append(Need(least, left_micros, lambda amount: format_usd(Micros(int(amount)))))
    if left_gpu_hours is not None:
        hours = _least_leg_s(plan) * plan.offer.processes / SECONDS_PER_HOUR
        found.append(Need(hours, left_gpu_hours, lambda amount: f"{amount:.2f} GPU-hours"))
    return found


def why_it_stays(plan: Plan) -> str:
    """Return why the run of a plan cannot continue on another machine; "" if it can."""
    if not plan.job.can_resume:
        return "Nothing says which of its files are checkpoints (--checkpoint-glob): it continues on no other machine."
    needs = needs_of(plan, plan.cap_micros, plan.choices.max_gpu_hours)
    if not needs and plan.mode is Mode.PAID and not plan.offer.rate_micros_per_hour:
        return "It will not continue on another machine: no cap bounds all of them together (--max-gpu-hours)."
    for need in needs:
        if need.machines < 2:
            pays = f"the cap of {need.words(need.cap)} does not pay for a second start-up"
            return f"It will not continue on another machine: {pays}, which needs {need.words(need.least)} at least."
    return ""


def legs_note(plan: Plan, home: Home) -> Iterator[str]:
    """Yield the notes of a plan whose run may continue on other machines: each one's need, and their number.

    The last note states how often the user's own machines of this kind were taken away, and the on-demand cost, as far
    as they are known.
    """
    needs = needs_of(plan, plan.cap_micros, plan.choices.max_gpu_hours)
    paid = min([plan.choices.legs, *(need.machines for need in needs)])
    ends = "is taken away or lost" + (", or its time there is over" if plan.lease.limit_s else "")
    most = f", at most {format_rate(most_rate(plan))}" if plan.offer.rate_micros_per_hour else ""
    least = " and ".join(need.words(need.least) for need in needs)
    yield (
        f"If its machine {ends}, it continues from its newest checkpoint on another one{most}. Each machine needs at "
        f"least {least} of the cap, counting the longest that its start-up, upload, one checkpoint and download may "
        f"take; the cap pays for {paid} of them."
    )
    if needs:
        caps = " and ".join(need.words(need.cap) for need in needs)
        yield f"All machines together {'cost' if plan.offer.rate_micros_per_hour else 'take'} at most the cap, {caps}."
    beside = " ".join(filter(None, (_reclaims_words(plan, home), _on_demand_words(plan))))
    if beside:
        yield beside


def _reclaims_words(plan: Plan, home: Home) -> str:
    """Return a sentence about how many of the user's machines of the plan's kind were taken away; "" if unknown."""
    reclaims = own_reclaims(home, plan.offer) if plan.offer.spot else None
    if reclaims is None:
        return ""
    yours = f"Of your {reclaims.machines} machines of this kind ({plan.offer.provider} {plan.offer.label} spot)"
    return f"{yours} {reclaims.taken} were taken away or lost, in {format_duration(reclaims.seconds)} together."


def _on_demand_words(plan: Plan) -> str:
    """Return a sentence about what the same machine costs on demand; "" if that price is not known."""
    rate = plan.offer.on_demand_micros_per_hour
    if rate is None:
        return ""
    offer, likely_s = plan.offer.model_copy(update={"rate_micros_per_hour": rate}), plan.estimate.likely_s
    dollars = ""
    if likely_s is not None:
        load = _compute_load(plan, Standing(step=0, carried_bytes=0, left_micros=plan.worst_micros))
        dollars = f", about {format_usd(expected_cost(offer, likely_s, load))} for the whole run"
    return f"On demand the same machine costs {format_rate(rate)}{dollars}."


def _may_be_taken(plan: Plan, offer: Offer, standing: Standing) -> bool:
    """Return whether the user agreed to such a machine, and its region is not avoided for taking machines back."""
    is_agreed = offer.spot == plan.choices.spot and offer.rate_micros_per_hour <= most_rate(plan)
    is_there = plan.choices.region in (None, offer.region)
    is_guarded = plan.choices.weak_lease or not is_weak(offer)
    return is_agreed and is_there and is_guarded and (offer.provider, offer.region) not in standing.avoided


def _judge_offer(plan: Plan, offer: Offer, standing: Standing, shorten: Shorten) -> Candidate | None:
    """Return the candidate for an offer; None if the plan has no estimate for its GPU, or the money is not enough."""
    known = next((approved for approved in plan.approved if _is_same_card(approved.offer, offer)), None)
    if known is None:
        return None
    load, guess = _compute_load(plan, standing), _estimate_rest(plan, known.estimate, offer, standing)
    hours_s, hours = plan.lease.hours_s, None
    if hours_s is not None:
        if hours_s - standing.trained_s < min(LEAST_HOURS_S, hours_s):
            return None
        hours = (hours_s - standing.trained_s) / SECONDS_PER_HOUR
    elif guess.train_s is None:
        hours = (USUAL_S + plan.job.save_s) / SECONDS_PER_HOUR
    lease = lease_for(offer, guess, load, cap=standing.left_micros, hours=hours)
    if lease is None:
        return None
    try:
        lease = shorten(lease, offer, standing.left_micros)
    except (NoOffer, Unknown):
        return None
    needed_s = guess.likely_s if guess.likely_s is not None else inf
    least_s = min(needed_s, _interval_s(plan, standing.rate)) + plan.job.save_s
    # If the place allows no longer job, a short job is accepted; two machines without a checkpoint end the run.
    if not lease.limit_s and lease.train_s < min(least_s, (hours or inf) * SECONDS_PER_HOUR):
        return None
    lease = lease.model_copy(update={"hours_s": None if hours_s is None else lease.hours_s})
    finishes = needed_s < inf and lease.train_s >= needed_s
    return Candidate(
        offer=offer,
        estimate=guess,
        lease=lease,
        expected_micros=expected_cost(offer, needed_s, load) if needed_s < inf else None,
        worst_micros=worst_case(offer, lease, load),
        finishes=finishes,
    )


def _is_same_card(known: Offer, offer: Offer) -> bool:
    """Return whether two offers have the same GPUs, so that a speed known for one offer holds for the other."""
    return (known.gpu, known.gpu_count, known.nodes, known.vram_gb) == (
        offer.gpu, offer.gpu_count, offer.nodes, offer.vram_gb
    )  # fmt: skip


def _compute_load(plan: Plan, standing: Standing) -> Load:
    """Return the transfers of another machine: the first machine's uploads by the same route, and carried files."""
    data, uplink = plan.data, plan.uplink.bits_per_s
    sent_s = max(0.0, plan.lease.ship_s - SHIP_START_S - download_s(data.public_bytes))
    sent_s += 8 * standing.carried_bytes / uplink
    ship_bytes = plan.ship_bytes + standing.carried_bytes
    own_bytes = max(0, ship_bytes - data.public_bytes)
    return Load(
        ship_bytes,
        plan.job.home_bytes,
        plan.job.disk_gb,
        public_bytes=min(ship_bytes, data.public_bytes),
        uplink_bits_per_s=8 * own_bytes / sent_s if own_bytes and sent_s else uplink,
        setup_s=plan.lease.setup_s,
    )


def _estimate_rest(plan: Plan, known: Estimate, offer: Offer, standing: Standing) -> Estimate:
    """Return the estimate for the remaining steps on an offer, from a measured speed or else from the plan."""
    steps, first = plan.job.steps, plan.continues.step if plan.continues else 0
    rate, step = standing.rate, max(standing.step, first)
    if steps and rate is not None and rate.step_s and standing.rated and _is_same_card(standing.rated, offer):
        left_s = max(0, steps - step) * rate.step_s
        slow_s, likely_s = left_s * (1 + MEASURED_SPREAD) + START_S[1], left_s + sum(START_S) / 2
        return known.model_copy(update={"train_s": (left_s + START_S[0], slow_s), "expected_s": likely_s})
    if known.train_s is None or steps <= first:
        return known
    share = max(0, steps - step) / (steps - first)
    low_s, high_s = (each * share + start for each, start in zip(known.train_s, START_S, strict=True))
    expected_s = None if known.expected_s is None else known.expected_s * share + sum(START_S) / 2
    return known.model_copy(update={"train_s": (low_s, high_s), "expected_s": expected_s})


def _interval_s(plan: Plan, rate: RateObserved | None) -> float:
    """Return the seconds from one checkpoint to the next; if unknown, the shortest training worth a machine."""
    every, steps, likely_s = plan.job.checkpoint_every, plan.job.steps, plan.estimate.likely_s
    step_s = rate.step_s if rate is not None else likely_s / steps if likely_s and steps else None
    if not every or not step_s:
        return float(LEAST_LEG_S)
    return ceil(min(every, steps or every) * step_s + START_S[1])


def _make_sort_key(candidate: Candidate, load: Load) -> tuple[bool, float, Micros, str, str, str]:
    """Return the sort key: what finishes first, then a lower cost of finishing, a lower price per hour, names."""
    offer, dollars = candidate.offer, candidate.expected_micros
    names = (offer.provider, offer.type_id, offer.region)
    return (not candidate.finishes, inf if dollars is None else dollars, offer.rate_micros_per_hour, *names)

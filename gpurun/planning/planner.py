"""A job in, a plan out: what it needs, what the place offers, how each offer would do, and the best by its rules.

Nothing is rented here and nothing is spent. What only some plans need is imported where they need it, because
`gpurun plan` should answer at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

from gpurun.core.clock import Clock
from gpurun.core.installed_files import bundle_root
from gpurun.core.made_before import Earlier
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Candidate, Choices, DataSummary, Job, Mode, Plan, Request
from gpurun.jobs.training.history import load_priors, uplink_of
from gpurun.planning.candidates import Quote
from gpurun.planning.market import Market
from gpurun.planning.place import Desk, Place, resolve_place

_BARE = {
    "finishes": True,
    "why_not": "",
    "reach": None,
    "slow_micros": None,
    "obstacle": "",
    "needed": "",
    "needs_consent": False,
}
"""The chosen offer as plan.json has it: what is planned counts as finishing, even if it is a part of the run."""


class Proposal(ABC):
    """A job that has no place yet; the desk admits its request before anything is read for it.

    `joins_nodes`: it can run on several nodes together. `earlier` is the checkpoint that it continues from.
    `priors` are the user's own runs (`damage` says what of them cannot be read), `uplink` is the user's line.
    """

    joins_nodes: ClassVar[bool] = False
    earlier: Earlier | None = None

    def __init__(self, request: Request, desk: Desk) -> None:
        self.request, self.desk = request, desk
        self.priors, self.damage = load_priors(desk.home)
        self.uplink = uplink_of(request, self.priors)

    @abstractmethod
    def need(self, place: Place) -> GpuNeed:
        """Return the GPUs to ask a place for; UsageError if they are not known."""

    @abstractmethod
    def quote(self, place: Place, market: Market | None, data: DataSummary | None) -> Quote:
        """Return the offers with their time and money, the best first; without `data` its size is guessed.

        Without a market, the catalogue is used.
        """

    @abstractmethod
    def choose(self, quote: Quote, place: Place) -> tuple[Candidate, Quote]:
        """Return the offer to take, and the quote that shows it; if there is none, NoOffer says what would do."""

    @abstractmethod
    def prepared_data(self) -> DataSummary:
        """Return the data of the job, made or checked here; UsageError if that is not possible."""

    @abstractmethod
    def job(self, data: DataSummary) -> Job:
        """Return the job itself, with its data."""

    def refuse_impossible(self, place: Place) -> None:  # noqa: B027 - a job may have nothing to refuse
        """Raise a UsageError for what could not run anywhere, before any place is asked for offers."""

    def known_data(self) -> DataSummary | None:
        """Return what is known about the data without preparing it; None if nothing is."""
        return self.prepared_data()

    def paid_form(self) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """Return the offers for the run that a rehearsal stands for, and what should be said about them."""
        return (), ()

    def described_data(self, quote: Quote) -> DataSummary:
        """Return the data as a plan without prepared data shows it."""
        return self.prepared_data()

    def processes(self, chosen: Candidate, place: Place) -> int:
        """Return how many processes run there."""
        return max(1, chosen.offer.gpu_count)

    def choices(self, place: Place) -> tuple[Choices, tuple[str, ...]]:
        """Return the choices with what a machine there needs for the job, and what should be said about that."""
        return self.request.choices, ()

    def completed(self, plan: Plan, chosen: Candidate, place: Place) -> Plan:
        """Return the plan with everything that the job's own kind adds to it; an error if it is not possible.

        `chosen` is the candidate with what a plan's file does not have, such as how far it gets.
        """
        return plan


def make_plan(proposal: Proposal, *, need_data: bool = True) -> Plan:
    """Plan a job. With `need_data` it will be started: its data is prepared and checked, and it must be possible.

    UsageError, NoOffer or SetupError if it is not; nothing but caches is left behind.
    """
    request, desk = proposal.request, proposal.desk
    place = resolve_place(request, desk, joins_nodes=proposal.joins_nodes, is_shown=not need_data)
    proposal.refuse_impossible(place)
    need = proposal.need(place)
    market = place.market(need)

    def quoted(market: Market | None, data: DataSummary | None) -> Quote:
        found = proposal.quote(place, market, data)
        if desk.bounds is None or place.mode is not Mode.PAID:
            return found
        kept, notes = desk.bounds.within(found.candidates)
        return replace(found, candidates=kept, notes=(*found.notes, *notes))

    if place.is_rented and need_data:  # Every reason to refuse comes before the shards are prepared.
        proposal.choose(quoted(market, None), place)
    data = proposal.prepared_data() if need_data or not place.is_rented else proposal.known_data()
    market = place.market_again(market, need)
    chosen, quote = proposal.choose(quoted(market, data), place)
    shown = data or proposal.described_data(quote)
    job = proposal.job(shown)
    chosen, may_be = place.settled(chosen, quote.candidates, job)
    choices, outfit_notes = proposal.choices(place)
    paid_offers, paid_notes = proposal.paid_form()
    silent = tuple(f"{name} could not be asked: {why}" for name, why in market.silent) if market else ()
    plan = Plan(
        run=desk.run,
        mode=place.mode,
        job=job,
        processes=proposal.processes(chosen, place),
        chosen=chosen.model_copy(update={**_BARE, "expected_micros": chosen.expected_micros or usd(0)}),
        cap_micros=request.max_cost_micros,
        cap_from=request.cap_from,
        candidates=may_be or paid_offers,
        data=shown,
        bundle_sha256="",
        ship_files=0,
        ship_bytes=quote.load.ship_bytes,
        notes=(*quote.notes, *outfit_notes, *place.notes, *paid_notes),
        warnings=(*silent, *place.warnings_for(chosen, market), *([proposal.damage] if proposal.damage else ())),
        choices=place.choices(choices),
        uplink=proposal.uplink,
        box=place.box,
        continues=proposal.earlier,
        quoted_wall=market.read_wall if market else 0.0,
    )
    if need_data or not place.is_rented:
        plan = with_bundle(plan, desk.home, desk.clock)
    plan = _with_legs(proposal.completed(plan, chosen, place), place, desk.home)
    return desk.bounds.demand_plan(plan) if desk.bounds else plan


_NO_OTHERS = "--keep-going changes nothing: only a cloud's machine or a cluster's job is replaced by another one."


def _with_legs(plan: Plan, place: Place, home: Home) -> Plan:
    """Return the plan with what it means that the run continues on another machine; without that where it cannot."""
    if not plan.choices.keep_going:
        return plan
    from gpurun.planning.legs import legs_note, why_it_stays

    stays = why_it_stays(plan) if place.has_others else _NO_OTHERS
    if not stays:
        return plan.told(*legs_note(plan, home))
    plan = plan.model_copy(update={"choices": plan.choices.model_copy(update={"keep_going": False})})
    return plan.told(warnings=(stays,)) if plan.mode is Mode.PAID else plan


def with_bundle(plan: Plan, home: Home, clock: Clock) -> Plan:
    """Return the plan with what it uploads: how many files and bytes, what of them is staged, its program's digest."""
    from gpurun.jobs.survey import surveyed
    from gpurun.jobs.training.compile_cache import compile_cache_note
    from gpurun.planning.staging import with_stage

    trainer = home.staged_trainer(plan.run) if plan.choices.trainer else bundle_root() / "trainer"
    seen = surveyed(plan, trainer)
    seen.demand_clean()
    digest = plan.job.digest(plan, trainer)
    warm = [compile_cache_note(plan, seen.files)] if plan.choices.warm else []
    update = {
        "job": plan.job.shipped(digest),
        "ship_files": len(seen.files),
        "ship_bytes": seen.total_bytes,
        "bundle_sha256": digest,
        "notes": (*plan.notes, *warm),
    }
    return with_stage(plan.model_copy(update=update), seen, clock)

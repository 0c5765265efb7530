"""Turn a proposal into a plan: read the place's offers, judge them, and choose the best.

Planning rents nothing and spends nothing. Modules that only some plans need are imported where they are used, so that
`gpurun plan` starts quickly.
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

_STORED_FIELDS = {
    "finishes": True,
    "why_not": "",
    "reach": None,
    "slow_micros": None,
    "obstacle": "",
    "needed": "",
    "needs_consent": False,
}
"""Values of the chosen offer's fields in plan.json. A planned part of a run counts as finishing."""


class Proposal(ABC):
    """A job that has no place yet. The desk admits its request before anything is read for it.

    `joins_nodes` means that it can run on several nodes together. `earlier` is the checkpoint from which it continues.
    `priors` are the measurements of the user's earlier runs; `damage` is a note if their file cannot be read. `uplink`
    is the speed of the user's connection.
    """

    joins_nodes: ClassVar[bool] = False
    earlier: Earlier | None = None

    def __init__(self, request: Request, desk: Desk) -> None:
        self.request, self.desk = request, desk
        self.priors, self.damage = load_priors(desk.home)
        self.uplink = uplink_of(request, self.priors)

    @abstractmethod
    def need(self, place: Place) -> GpuNeed:
        """Return the GPUs that the job needs. Raise UsageError if they are not known."""

    @abstractmethod
    def quote(self, place: Place, market: Market | None, data: DataSummary | None) -> Quote:
        """Return the offers with their time and cost, the best first.

        Without `data`, its size is estimated. Without a market, the catalogue's offers are used.
        """

    @abstractmethod
    def choose(self, quote: Quote, place: Place) -> tuple[Candidate, Quote]:
        """Return the chosen offer and the quote to show.

        Raise NoOffer, with a hint that names what would suffice, if none fits.
        """

    @abstractmethod
    def prepared_data(self) -> DataSummary:
        """Prepare or check the job's data on this computer, and return its summary.

        Raise UsageError if that is not possible.
        """

    @abstractmethod
    def job(self, data: DataSummary) -> Job:
        """Return the job with its data."""

    def refuse_impossible(self, place: Place) -> None:  # noqa: B027 - a job may have nothing to refuse
        """Raise UsageError for a request that cannot run anywhere, before any place is queried for offers."""

    def known_data(self) -> DataSummary | None:
        """Return what is known about the data without preparing it; None if nothing is known."""
        return self.prepared_data()

    def paid_form(self) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """Return the offers for the paid run that a rehearsal prepares, and notes about them."""
        return (), ()

    def described_data(self, quote: Quote) -> DataSummary:
        """Return the summary to show in a plan whose data is not prepared."""
        return self.prepared_data()

    def processes(self, chosen: Candidate, place: Place) -> int:
        """Return how many processes the job has at the place."""
        return max(1, chosen.offer.gpu_count)

    def choices(self, place: Place) -> tuple[Choices, tuple[str, ...]]:
        """Return the choices with the set-up that the job needs at the place, and notes about it."""
        return self.request.choices, ()

    def completed(self, plan: Plan, chosen: Candidate, place: Place) -> Plan:
        """Return the plan with the notes and checks of this kind of job. Raise an error if the plan is not possible.

        `chosen` has fields that plan.json does not have, for example the step that the lease reaches.
        """
        return plan


def make_plan(proposal: Proposal, *, need_data: bool = True) -> Plan:
    """Plan a job. `need_data` means that the plan will be started, so its data is prepared and checked.

    Raise UsageError, NoOffer or SetupError if the job is not possible; then only caches are left on disk.
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

    if place.is_rented and need_data:  # Refuse before the shards are prepared, not after.
        proposal.choose(quoted(market, None), place)
    data = proposal.prepared_data() if need_data or not place.is_rented else proposal.known_data()
    market = place.market_again(market, need)
    chosen, quote = proposal.choose(quoted(market, data), place)
    shown = data or proposal.described_data(quote)
    job = proposal.job(shown)
    chosen, may_be = place.candidates_under_rules(chosen, quote.candidates, job)
    choices, outfit_notes = proposal.choices(place)
    paid_offers, paid_notes = proposal.paid_form()
    silent = tuple(f"{name} could not be queried: {why}" for name, why in market.silent) if market else ()
    plan = Plan(
        run=desk.run,
        mode=place.mode,
        job=job,
        processes=proposal.processes(chosen, place),
        chosen=chosen.model_copy(update={**_STORED_FIELDS, "expected_micros": chosen.expected_micros or usd(0)}),
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
    return desk.bounds.checked_plan(plan) if desk.bounds else plan


_NO_OTHERS = "--keep-going has no effect: only a cloud's machine or a cluster's job can be replaced by another one."


def _with_legs(plan: Plan, place: Place, home: Home) -> Plan:
    """Return the plan with notes about --keep-going.

    If the run cannot continue elsewhere, switch --keep-going off and, for a paid run, add a warning.
    """
    if not plan.choices.keep_going:
        return plan
    from gpurun.planning.legs import legs_note, why_it_stays

    stays = why_it_stays(plan) if place.has_others else _NO_OTHERS
    if not stays:
        return plan.with_notes(*legs_note(plan, home))
    plan = plan.model_copy(update={"choices": plan.choices.model_copy(update={"keep_going": False})})
    return plan.with_notes(warnings=(stays,)) if plan.mode is Mode.PAID else plan


def with_bundle(plan: Plan, home: Home, clock: Clock) -> Plan:
    """Return the plan with its upload: the number of files and bytes, the staged files, and the program's digest."""
    from gpurun.jobs.survey import survey_run_files
    from gpurun.jobs.training.compile_cache import compile_cache_note
    from gpurun.planning.staging import with_stage

    trainer = home.staged_trainer(plan.run) if plan.choices.trainer else bundle_root() / "trainer"
    seen = survey_run_files(plan, trainer)
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

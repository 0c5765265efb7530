"""A job in, a plan out: what it needs, what the place offers, how each offer would do, by the place's rules the best.

Nothing is rented here and nothing is spent. What only some plans need is imported where they need it: `gpurun plan`
should answer at once.
"""

from __future__ import annotations

from gpurun.core.clock import Clock
from gpurun.core.installed_files import bundle_root
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Plan
from gpurun.planning.place import place_of
from gpurun.planning.proposal import Proposal

_BARE = {"finishes": True, "why_not": "", "reach": None, "slow_micros": None}
"""What is planned is done, even if it is a part of the run: so plan.json, which has no more of it, is read."""


def make_plan(proposal: Proposal, *, need_data: bool = True) -> Plan:
    """Plan a job. With `need_data` it is to be started: its data is prepared and checked, and it must be possible.

    UsageError, NoOffer or SetupError when it cannot be; nothing is left behind but caches.
    """
    request, desk = proposal.request, proposal.desk
    place = place_of(request, desk, joins_nodes=proposal.joins_nodes, is_shown=not need_data)
    proposal.demand(place)
    need = proposal.need(place)
    market = place.market(need)
    if place.is_rented and need_data:  # Every reason to refuse comes before the shards are prepared.
        proposal.choose(proposal.quote(place, market, None), place)
    data = proposal.prepare() if need_data or not place.is_rented else proposal.known()
    market = place.still(market, need)
    chosen, quote = proposal.choose(proposal.quote(place, market, data), place)
    shown = data or proposal.spoken_of(quote)
    job = proposal.job(shown)
    chosen = place.lease_rules(chosen, job)
    choices, fitted = proposal.choices(place)
    offered, told = proposal.beside()
    silent = tuple(f"{name} could not be asked: {why}" for name, why in market.silent) if market else ()
    plan = Plan(
        run=desk.run,
        mode=place.mode,
        job=job,
        processes=proposal.processes(chosen, place),
        chosen=chosen.model_copy(update={**_BARE, "expected_micros": chosen.expected_micros or usd(0)}),
        cap_micros=request.max_cost_micros,
        cap_from=request.cap_from,
        candidates=quote.candidates if place.is_rented else offered,
        data=shown,
        bundle_sha256="",
        ship_files=0,
        ship_bytes=quote.load.ship_bytes,
        notes=(*quote.notes, *fitted, *place.notes, *told),
        warnings=(*silent, *place.said_of(chosen, market), *([proposal.damage] if proposal.damage else ())),
        choices=place.choices(choices),
        uplink=proposal.uplink,
        box=place.box,
        continues=proposal.earlier,
        quoted_wall=market.read_wall if market else 0.0,
    )
    if need_data or not place.is_rented:
        plan = with_bundle(plan, desk.home, desk.clock)
    return proposal.checked(plan, chosen, place)


def with_bundle(plan: Plan, home: Home, clock: Clock) -> Plan:
    """Return the plan with what it ships: how many files and bytes, what of them is staged, its program's digest."""
    from gpurun.jobs.survey import surveyed
    from gpurun.planning.compile_cache import warm_notes
    from gpurun.planning.staging import with_stage

    trainer = home.staged_trainer(plan.run) if plan.choices.trainer else bundle_root() / "trainer"
    seen = surveyed(plan, trainer)
    seen.demand_clean()
    digest = plan.job.digest(plan, trainer)
    update = {
        "job": plan.job.shipped(digest),
        "ship_files": len(seen.files),
        "ship_bytes": seen.total_bytes,
        "bundle_sha256": digest,
        "notes": (*plan.notes, *warm_notes(plan, seen.files)),
    }
    return with_stage(plan.model_copy(update=update), seen, clock)

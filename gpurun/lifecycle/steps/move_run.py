"""Plan the next machine of a run whose machine was taken away or lost. The run resumes from its newest checkpoint.

This step only writes the next machine's plan, within what is left of the cap. The create step requests that machine
later, after the proof that the previous machine is gone. So a run never has two machines, however often it moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, floor
from typing import Any, cast

from gpurun.core.clock import local_minute
from gpurun.core.errors import GpurunError, NoOffer, SetupError
from gpurun.core.journal_events import (
    CreateIntended,
    FileBrought,
    FilesBrought,
    LegPlanned,
    RateObserved,
    TrainObserved,
)
from gpurun.core.journal_records import Event, Moment, Phase, Record, RunState, all_typed, last_typed
from gpurun.core.money import Micros, format_rate, format_usd, left_of
from gpurun.core.paths import make_private, write_atomic
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, Lease, Leg, LegFile, Plan, machine_kind
from gpurun.core.trainer_events import events_of
from gpurun.core.transfer_progress import moving
from gpurun.jobs.training.compile_cache import caches_among
from gpurun.ledger.journal import read_journal
from gpurun.ledger.paid_phases import phases_s
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.ledger.reclaims import is_time_over
from gpurun.ledger.rental import are_costs_bounded, rentals_of
from gpurun.lifecycle.artifacts.inventory import RANK, Inventory
from gpurun.lifecycle.artifacts.log_copy import end_lines
from gpurun.lifecycle.context import Context, Note, gpu_hours_at_most, spent_at_most
from gpurun.lifecycle.job_spec import secrets_of
from gpurun.planning.legs import Standing, leg_candidates, most_rate, needs_of
from gpurun.planning.verify_machine import need_of_offer
from gpurun.providers.base import LimitsJobs, Rejected, Unknown
from gpurun.providers.catalog import rows_for
from gpurun.remote.messages import ManifestFile

USUAL_WAIT_S = 900
"""Seconds that a run waits for a machine without --wait or --until. A cloud is usually sold out for minutes."""
LOOK_S, LATER_S, TURN_S = 30.0, 600.0, 5.0
AGAIN_S = 300.0
"""Seconds after which the wait is interrupted to check for a machine that appears late and is billed unnoticed."""
OFTEN_S = 3600.0
"""Seconds: a region that took back two machines within this time is then avoided for the same time."""
MOST_FRUITLESS = 1
"""How many machines in a row may end without a new checkpoint. After one more the run itself is taken as the cause."""


def move(state: RunState, context: Context) -> Iterator[Note]:
    """Plan the next leg. Raise NoOffer, with what the run would need to continue, if it cannot continue.

    The caller has proven that every earlier machine is gone and has removed its side resources
    (`close_run.close_machines`).
    """
    records = read_journal(context.folder.journal).records
    lost = _lost_machine(state, records)
    number = state.leg + (lost is not None)
    if number > state.legs:
        what = f"It has used {state.leg} machines, and --legs allows no more."
        raise NoOffer("move.legs", what, hint=_CONTINUE)
    checkpoint = newest_checkpoint(context, records)
    step = max((int(file["step"]) for file in checkpoint), default=0)
    fruitless = state.fruitless
    if lost is not None:
        fruitless = 0 if step > state.leg_step else state.fruitless + 1
    if fruitless > MOST_FRUITLESS:
        what = "Two machines in a row brought no new checkpoint home, so another one would not help."
        raise NoOffer("move.fruitless", what, hint=f"Save more often, so that less is lost. {_CONTINUE}")
    base = _base_plan(context)
    secrets_of(context)  # Raises before anything is rented if a secret is no longer available.
    purse = _compute_purse(base, state, records)
    files = tuple(LegFile(**file) for file in checkpoint)
    caches = tuple(LegFile(**file) for file in _compile_caches(context, records)) if files else ()
    standing = Standing(
        step=step,
        carried_bytes=sum(file.bytes for file in (*files, *caches)),
        left_micros=purse.left,
        left_gpu_hours=purse.left_gpu_hours,
        trained_s=phases_s(rentals_of(records)).get("training", 0.0),
        rate=last_typed(records, RateObserved),
        rated=_last_measured_offer(records),
    )
    found, wall = _wait_for_offers(base, standing, _find_avoided_regions(records, lost), state, context)
    if not found:
        return  # The wait resumes after a check for machines and resources that may have been left.
    leg = Leg(
        number=number,
        step=step,
        files=files,
        folder=str(context.folder.artifacts),
        spent_micros=purse.spent,
        left_micros=purse.left,
        left_gpu_hours=purse.left_gpu_hours,
        caches=caches,
        cached_on=_list_machine_kinds(records) if caches else (),
    )
    name, digest = _write_leg_plan(_plan_leg(base, leg, found, wall), state, context)
    _reset_downloads(context, records)
    lengths = end_lines(context.folder)
    before: dict[str, Any] = asdict(lost) if lost is not None else {}
    if purse.left_gpu_hours is not None:
        before["left_gpu_hours"] = purse.left_gpu_hours
    yield LegPlanned(
        number=number,
        plan=name,
        plan_sha256=digest,
        step=step,
        reached=max((event.step or 0 for event in events_of(context.folder.events)), default=0),
        files=list(checkpoint),
        fruitless=fruitless,
        spent_micros=purse.spent,
        left_micros=purse.left,
        events_bytes=lengths["events.jsonl"],
        log_bytes=lengths["trainer.log"],
        **before,
    )


_CONTINUE = "The downloaded files are kept; --from continues them in a new run."


@dataclass(frozen=True)
class _Lost:
    """The machine that was lost since the last plan. `why` is the reason, in the provider's words if it gave one."""

    token: str
    provider: str
    region: str
    why: str


def _lost_machine(state: RunState, records: Sequence[Record]) -> _Lost | None:
    """Return the lost machine; None if no machine was lost because no offer of the last plan was available."""
    attempt = state.attempts.get(state.token) if state.phase is Phase.GONE else None
    if attempt is None:
        return None
    ended = last_typed([record for record in records if record.seq > _leg_seq(records)], TrainObserved)
    failed = state.failure.message if state.failure is not None else ""
    why = (ended.message if ended else failed) or ("its time there was over" if state.reason == "lease" else "")
    return _Lost(attempt.token, attempt.provider, attempt.region, why)


def _leg_seq(records: Sequence[Record]) -> int:
    return next((record.seq for record in reversed(records) if record.event is Event.LEG_PLANNED), -1)


def newest_checkpoint(context: Context, records: Sequence[Record]) -> list[FileBrought]:
    """Return the files of the newest complete checkpoint on this computer, all digests checked again; [] without one.

    A checkpoint that was damaged since its download is skipped; the one before it is then used.
    """
    inventory, kinds = Inventory(context.folder), context.plan.job.terms.whole
    announced: dict[int, dict[str, ManifestFile]] = {}
    for file in _known_files(inventory, records):
        if file.kind in RANK:
            announced.setdefault(file.step, {})[file.name] = file
    for _, files in sorted(announced.items(), reverse=True):
        is_whole = {file.kind for file in files.values()} >= kinds
        if is_whole and all(inventory.has(file) for file in files.values()):
            return [cast(FileBrought, file.as_json()) for file in files.values()]
    return []


def _compile_caches(context: Context, records: Sequence[Record]) -> list[FileBrought]:
    """Return the compile caches of earlier machines that are complete on this computer."""
    inventory = Inventory(context.folder)
    made = [file for file in _known_files(inventory, records) if file.kind == "compile_cache" and inventory.has(file)]
    return caches_among(cast(FileBrought, file.as_json()) for file in made)


def _list_machine_kinds(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the kinds of machine that the run has had. A compile cache is valid only on the kind that wrote it."""
    offers = [Offer.model_validate(intent.offer) for intent in all_typed(records, CreateIntended)]
    return tuple(dict.fromkeys(map(machine_kind, offers)))


def _known_files(inventory: Inventory, records: Sequence[Record]) -> list[ManifestFile]:
    """Return every known file of the run: from the journal, the last machine's manifest and the inventory.

    The inventory is needed for a command's last complete checkpoint: the manifest may list it as an ordinary output, or
    list a newer file of that name that was not downloaded yet.
    """
    manifest = inventory.remembered()
    recorded = [ManifestFile(**file) for record in records for file in _get_record_files(record)]  # type: ignore[arg-type]
    return [*recorded, *(manifest.files if manifest else ()), *inventory.memory.whole]


def _get_record_files(record: Record) -> list[FileBrought]:
    """Return the files that were on this computer according to a record."""
    match record.typed:
        case FilesBrought(files=files) | LegPlanned(files=files):
            return files
    return []


def _base_plan(context: Context) -> Plan:
    """Return the plan that the user approved. Raise SetupError if it cannot be read."""
    try:
        return read_plan(context.folder)
    except (OSError, ValueError) as error:
        what = f"The plan that was agreed to cannot be read: {type(error).__name__}."
        raise SetupError("move.plan_damaged", what, hint=_CONTINUE) from error


@dataclass(frozen=True)
class _Purse:
    """The upper bound of what all machines so far cost, and what is left of each cap; None if that cap was not set."""

    spent: Micros
    left: Micros | None
    left_gpu_hours: float | None


def _compute_purse(base: Plan, state: RunState, records: Sequence[Record]) -> _Purse:
    """Return what may still be spent. Raise NoOffer if no cap limits the cost, or if nothing is left of the cap.

    A create request without a clear reply counts with its worst case.
    """
    rentals, cap, most_hours = rentals_of(records), base.cap_micros, base.choices.max_gpu_hours
    if cap is None and most_hours is None:
        raise NoOffer("move.unbounded", "The run has no cap for all its machines together.", hint=_CONTINUE)
    if not are_costs_bounded(rentals):
        raise NoOffer("move.unbounded", "The cost of the machines so far has no known upper limit.", hint=_CONTINUE)
    spent, hours = spent_at_most(state, records, state.leg + 1), gpu_hours_at_most(state, records, state.leg + 1)
    left = None if cap is None else left_of(cap, spent)
    # Rounded down, so that all machines together stay within the cap that the user typed.
    left_hours = None if most_hours is None else floor(max(0.0, most_hours - hours) * 1e6) / 1e6
    if left is not None and left <= 0:
        what = f"The machines until now cost {format_usd(spent)} at most, of the cap of {format_usd(cap or spent)}."
        raise NoOffer("move.over_cap", what, hint=f"Nothing is left for another one. {_CONTINUE}")
    return _Purse(spent, left, left_hours)


def _last_measured_offer(records: Sequence[Record]) -> Offer | None:
    """Return the offer of the machine whose speed was measured last; None if no speed was measured."""
    rated_seq = next((record.seq for record in reversed(records) if record.event is Event.RATE_OBSERVED), None)
    if rated_seq is None:
        return None
    intents = list(all_typed([record for record in records if record.seq < rated_seq], CreateIntended))
    return Offer.model_validate(intents[-1].offer)


def _find_avoided_regions(records: Sequence[Record], lost: _Lost | None) -> dict[tuple[str, str], float]:
    """Return the regions that took back two machines within an hour, and until when to avoid each."""
    plans = [record.typed for record in records if isinstance(record.typed, LegPlanned) and record.typed.token]
    places = {plan.token: (plan.provider, plan.region) for plan in plans}
    if lost is not None:
        places[lost.token] = (lost.provider, lost.region)
    last: dict[tuple[str, str], float] = {}
    until: dict[tuple[str, str], float] = {}
    for rental in rentals_of(records):
        place, proof = places.get(rental.token), rental.last(Event.DEATH_PROVEN)
        if place is None or proof is None or is_time_over(rental.records):
            continue
        if proof.wall - last.get(place, -OFTEN_S - 1) <= OFTEN_S:
            until[place] = proof.wall + OFTEN_S
        last[place] = proof.wall
    return until


def _wait_for_offers(
    base: Plan, standing: Standing, avoided: Mapping[tuple[str, str], float], state: RunState, context: Context
) -> tuple[list[Candidate], float]:
    """Return the offers to continue on and when their prices were read. If there are none, wait, at no cost.

    Return no offers if it is time to check for late machines. Raise NoOffer, with the cheapest offer seen, when the
    wait is over.
    """
    clock, wait_s = context.clock, _wait_left_s(base, context, max(avoided.values(), default=0.0))
    # If this computer's clock is set, the wait changes only with --until, which names a time of day.
    began_mono, best, silent = clock.monotonic(), "", list[str]()
    # A request that was just refused is not repeated immediately.
    due_s = _pause_s(state, context)
    with moving(context.folder, clock, "wait", max(1, ceil(wait_s))) as tell:
        while True:
            context.raise_if_stopped(state)
            now_wall, waited_s = clock.wall(), clock.monotonic() - began_mono
            is_too_late = 0 < base.choices.until_wall < now_wall
            if waited_s >= due_s:
                offers, silent = _list_current_offers(base, context)
                places = frozenset(place for place, end_wall in avoided.items() if 0 < end_wall - now_wall <= OFTEN_S)
                shorten = partial(_shorten_lease, base, standing, context)
                found = leg_candidates(base, offers, replace(standing, avoided=places), shorten)
                if found and not is_too_late:
                    return found, now_wall
                due_s, best = waited_s + LOOK_S, _describe_best_offer(offers) or best
            if waited_s >= wait_s or is_too_late:
                raise _make_no_offer_error(base, standing, best, silent)
            if waited_s >= AGAIN_S and waited_s >= due_s - LOOK_S:
                return [], now_wall
            waits = f"$0.00 an hour, until {local_minute(now_wall + wait_s - waited_s, now=now_wall)}"
            tell(int(waited_s), f"{waits}; {best or 'nothing on offer'}")
            clock.sleep(TURN_S)


def _pause_s(state: RunState, context: Context) -> float:
    """Return the seconds until the offers are read again: 0 after a machine's end, and more after each refusal.

    A change of the clock cannot make the pause longer.
    """
    if state.phase is Phase.GONE:
        return 0.0
    records = read_journal(context.folder.journal).records
    ends = [place for place, record in enumerate(records) if record.event is Event.DEATH_PROVEN]
    refusals = [record.wall for record in records[ends[-1] if ends else 0 :] if record.event is Event.STEP_FAILED]
    pause_s = min(LATER_S, LOOK_S * len(refusals))
    return min(pause_s, max(0.0, refusals[-1] + pause_s - context.clock.wall())) if refusals else 0.0


def _wait_left_s(base: Plan, context: Context, avoided_wall: float) -> float:
    """Return for how many more seconds the run waits, counted from the last machine's end or from the run's beginning.

    Without --wait, the run waits at least until an avoided region may be used again.
    """
    choices, now_wall = base.choices, context.clock.wall()
    records = read_journal(context.folder.journal).records
    since = [record for record in records if record.event in (Event.DEATH_PROVEN, Event.RUN_OPENED)]
    waited_s = context.since_s(Moment.from_record(since[-1])) if since else 0.0
    if choices.until_wall:
        named_s = choices.until_wall - now_wall
        return max(0.0, min(named_s, choices.wait_s - waited_s) if choices.wait_s else named_s)
    avoided_s = min(avoided_wall - now_wall, OFTEN_S) + LOOK_S
    return max(0.0, choices.wait_s - waited_s if choices.wait_s else max(USUAL_WAIT_S - waited_s, avoided_s))


def _list_current_offers(base: Plan, context: Context) -> tuple[list[Offer], list[str]]:
    """Return the current offers at the plan's providers for its GPUs, and a message for each that does not answer."""
    found, silent = dict[tuple[str, ...], Offer](), list[str]()
    agreed = dict[str, list[Offer]]()
    for offer in (candidate.offer for candidate in base.approved):
        agreed.setdefault(base.choices.opened_as(offer.provider, offer.region), []).append(offer)
    for word, known in agreed.items():
        name, needs = known[0].provider, {need_of_offer(offer) for offer in known}
        try:
            provider = context.provider_of(name, known[0].region)
            # If the catalogue does not have an offer, such as a cluster's nodes, the plan's own offers are used.
            for need in sorted(needs, key=str):
                for offer in provider.offers(need, rows_for(need, name) or known):
                    found[offer.provider, offer.type_id, offer.region, offer.tier, str(offer.spot)] = offer
        except (Unknown, Rejected, SetupError) as error:
            silent.append(f"{word} could not be asked: {str(error).rstrip('.')}")
    here = {"region": base.choices.region}
    if base.choices.region is not None:
        return [offer.model_copy(update=here) if offer.region == "any" else offer for offer in found.values()], silent
    return list(found.values()), silent


def _shorten_lease(
    base: Plan, standing: Standing, context: Context, lease: Lease, offer: Offer, cap: Micros | None
) -> Lease:
    """Return a lease shortened to what its provider and the rest of a cap in GPU-hours allow; see `LimitsJobs`."""
    provider = context.provider_of(offer.provider, offer.region)
    if not isinstance(provider, LimitsJobs):
        return lease
    choices = base.choices.model_copy(update={"max_gpu_hours": standing.left_gpu_hours})
    return provider.lease_within(lease, offer, choices, cap)


def _describe_best_offer(offers: Sequence[Offer]) -> str:
    """Return the cheapest of these offers in words: provider, label and rate; "" without offers."""
    best = min(offers, key=lambda offer: offer.rate_micros_per_hour, default=None)
    return f"best seen {best.provider} {best.label} {format_rate(best.rate_micros_per_hour)}" if best else ""


def _make_no_offer_error(base: Plan, standing: Standing, best: str, silent: Sequence[str]) -> NoOffer:
    """Return the error that ends the run, with the best offer seen and what the run would need to continue."""
    seen = "; ".join(filter(None, (best, *silent))) or "nothing of what the plan named is on offer"
    what = f"No machine to continue on was to be had: {seen}."
    needs = needs_of(base, standing.left_micros, standing.left_gpu_hours)
    left = " and ".join(need.words(need.cap) for need in needs)
    least = " and ".join(need.words(need.least) for need in needs)
    agreed = f"At most {format_rate(most_rate(base))} was agreed to, and {left} are left"
    hint = f"{agreed}; another machine needs {least} at least. Another time --wait 6h waits longer, at $0. {_CONTINUE}"
    return NoOffer("move.no_offer", what, hint=hint)


def _plan_leg(base: Plan, leg: Leg, found: Sequence[Candidate], wall: float) -> Plan:
    """Return the plan of a leg on the first candidate, with the others as alternatives."""
    update = {
        "leg": leg,
        "job": base.job.resumed(leg),
        "candidates": tuple(found),
        "quoted_wall": wall,
        "ship_bytes": base.ship_bytes + sum(file.bytes for file in (*leg.files, *leg.caches_for(found[0].offer))),
    }
    return base.model_copy(update=update).with_chosen(found[0])


def _write_leg_plan(plan: Plan, state: RunState, context: Context) -> tuple[str, str]:
    """Write the plan of a leg; return the file's path in the run's folder and its digest, for the journal."""
    make_private(context.folder.legs)
    count = sum(record.event is Event.LEG_PLANNED for record in read_journal(context.folder.journal).records) + 1
    content = plan.to_json().encode()
    write_atomic(context.folder.legs / f"{count}.json", content)
    return f"legs/{count}.json", hashlib.sha256(content).hexdigest()


def _reset_downloads(context: Context, records: Sequence[Record]) -> None:
    """Protect the files of earlier machines on this computer, and reset the egress count for the next machine.

    Later downloads replace only older checkpoints, as always. The best checkpoint of an earlier machine is kept.
    """
    with suppress(GpurunError):
        inventory = Inventory(context.folder)
        manifest, recorded = inventory.remembered(), [file for record in records for file in _get_record_files(record)]
        best = manifest.best.step if manifest and manifest.best else None
        known = {(file["name"], file["kind"], file["step"]) for file in recorded}
        known |= {(file.name, file.kind, file.step) for file in (manifest.files if manifest else ())}
        older = {name for name, kind, step in known if kind in RANK and step != best}
        inventory.note(files=tuple(name for name in inventory.memory.files if name in older), left={})

"""Request one instance, and find out whether it exists even if the reply is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from gpurun.core.clock import ticks
from gpurun.core.errors import GpurunError, MayBeBilling, NoOffer, SetupError
from gpurun.core.journal_events import (
    AgreedLease,
    CreateIntended,
    CreateObserved,
    CreateRefused,
    CreateUnknown,
    Incident,
    SeenMachine,
)
from gpurun.core.journal_records import PASSES_OVER, RunState
from gpurun.core.machine_token import make_token
from gpurun.core.money import Micros, format_usd, left_of, total
from gpurun.core.records import Instance, Offer, Order
from gpurun.core.run_plan import Mode, Plan
from gpurun.jobs.survey import require_planned_program
from gpurun.ledger.journal import read_journal
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.lifecycle.context import Context, Note, pays_for_another, spent_at_most
from gpurun.lifecycle.instance.readings import living_instances
from gpurun.lifecycle.instance.terminate import check_account, note_once
from gpurun.lifecycle.machine_owner import refuse_beside_copy
from gpurun.planning.budget import as_typed, beside_rate, disk_gb_on
from gpurun.planning.verify_machine import check_price
from gpurun.providers.base import (
    Guarded,
    HasAccounts,
    NoCapacity,
    Provider,
    Rejected,
    TellsTime,
    Throttled,
    Unknown,
    their_wall,
)
from gpurun.providers.catalog import terms_of
from gpurun.providers.errors import RejectedFor
from gpurun.remote.key_pairs import make_keys

ATTEMPTS = 3
# Seconds to keep looking after the settling time, if some of the provider's replies were lost.
LOOK_S = 300.0
LOOK_ON_S = 20.0
SEEN_S = 60.0
LATE_S = 60.0
UNSEEN = "create.unseen"
_MOST_SHOWN = 3


def create(state: RunState, context: Context) -> Iterator[Note]:
    """Send one create request, after its intent is on disk.

    If an earlier request has no reply, look for its machine instead. If the provider cannot fill this offer, the next
    attempt uses the next approved offer and a new token.
    """
    if state.token:
        yield from _look_for_machine(state, context)
        return
    if state.attempt - state.attempts_before - state.passed_over >= ATTEMPTS:
        raise NoOffer(
            "create.gave_up",
            f"{context.provider.name} created no instance in {ATTEMPTS} attempts{_last_reply(context)}.",
            hint="Try again later, or another provider with --provider.",
        )
    require_planned_program(context.plan, context.trainer)
    check_price(context.plan, context.provider, context.clock)
    account = _account_mark(context.provider)
    _refuse_beside_copy(state, context)
    context.raise_if_stopped(state)
    spent = _spent_so_far(state, context)
    order, asked_wall = _make_order(spent, state, context), context.clock.wall()
    yield _make_intent(order, spent, context, account, asked_wall + context.plan.lease.queue_s + order.lease_s)
    unsent = ""
    if context.clock.wall() > asked_wall + LATE_S:
        unsent = "it was not sent: this computer slept, so the deadline is too near"
    elif context.wants_stop(state):
        unsent = "it was not sent: a stop was requested"
    if unsent:
        yield CreateRefused(token=order.token, reason="not_sent", message=unsent)
        return
    try:
        _reserve_worst_case(order, state, context)
    except GpurunError as over:
        yield CreateRefused(token=order.token, reason="not_sent", message=str(over))
        raise
    try:
        instance = context.provider.create(order)
    except (NoCapacity, Rejected) as error:
        reason = _get_reason_code(error)
        yield CreateRefused(token=order.token, reason=reason, message=str(error))
        if reason in PASSES_OVER and context.has_offer(state.passed_over + 1):
            return
        raise _final_error(error, context) from error
    except Throttled as error:  # All tries were refused as too many requests.
        yield CreateRefused(token=order.token, reason="not_sent", message=str(error))
        return
    except Unknown as error:
        yield CreateUnknown(token=order.token, message=str(error))
        if error.again is None or context.wants_stop(state) or context.clock.wall() > asked_wall + LATE_S:
            return
        with contextlib.suppress(Unknown):
            yield CreateObserved(token=order.token, instance=SeenMachine.from_instance(error.again()), adopted=False)
        return
    if instance.token != order.token:
        yield CreateUnknown(token=order.token, message=f"the reply is about another machine: {instance.id}")
        return
    yield CreateObserved(token=order.token, instance=SeenMachine.from_instance(instance), adopted=False)


def _reserve_worst_case(order: Order, state: RunState, context: Context) -> None:
    """Reserve the worst case in each budget. A refusal or a proven end later replaces it by the actual cost."""
    for token, attempt in state.attempts.items():
        if attempt.answer == "refused":
            context.budgets.settle(token, Micros(0))
    until_wall = order.deadline_wall + context.plan.lease.kill_allowance_s
    context.budgets.hold(order.token, order.run, context.plan.worst_micros, until_wall)


def _refuse_beside_copy(state: RunState, context: Context) -> None:
    """Raise RunHeld if a copy of this home has a machine for this run; NoOffer if the provider does not answer.

    The machine of a run that moves may be at any provider of the plan, but only this offer's own provider must answer.
    """
    if not context.plan.offer.rate_micros_per_hour:
        return
    outcome, doubt = "Nothing was created here.", ""
    for name in _other_providers(state, context):
        with contextlib.suppress(Unknown, Rejected, SetupError):
            refuse_beside_copy(context.provider_named(name), state, context, outcome)
    for _ in ticks(context.clock, context.provider.traits.poll_s, SEEN_S):
        try:
            refuse_beside_copy(context.provider, state, context, outcome)
        except Unknown as error:
            doubt = str(error)
        else:
            return
    raise NoOffer("create.cannot_look", f"{doubt}.", hint="Nothing was rented. Try again, or another --provider.")


def _other_providers(state: RunState, context: Context) -> list[str]:
    """Return the other providers in the plan of a run that moves, without this offer's own provider."""
    names: dict[str, None] = {}
    if state.legs:
        with contextlib.suppress(OSError, ValueError):
            names = dict.fromkeys(candidate.offer.provider for candidate in read_plan(context.folder).approved)
    return [name for name in names if name != context.provider.name]


def _account_mark(provider: Provider) -> str:
    """Return the mark of the account that will rent the machine; "" if the provider has no accounts."""
    if not isinstance(provider, HasAccounts):
        return ""
    try:
        return provider.account_mark()
    except Unknown as error:
        raise NoOffer(
            "account.unknown",
            f"{provider.name} did not say to which account the key belongs: {error}.",
            hint="Nothing was rented. Try again, or another --provider.",
        ) from error


def _get_reason_code(refusal: NoCapacity | Rejected) -> str:
    """Return the journal's reason code for a create request that was refused."""
    if isinstance(refusal, NoCapacity):
        return "no_capacity"
    return "offer_rejected" if refusal.of_offer else "rejected"


def _final_error(refusal: NoCapacity | Rejected, context: Context) -> GpurunError:
    """Return the error that ends the run, with the last refusal and those of the offers that were tried before."""
    before = _earlier_refusals(str(refusal), context)
    if isinstance(refusal, RejectedFor):
        error = refusal.error
        return type(error)(error.code, error.what + before, hint=error.hint)
    code = "create.no_capacity" if isinstance(refusal, NoCapacity) else "create.rejected"
    return NoOffer(
        code,
        f"{context.provider.name} refused to create the instance: {str(refusal).rstrip('.')}.{before}",
        hint="Nothing was rented and nothing is billed. Try another --provider or --gpu.",
    )


def _last_reply(context: Context) -> str:
    """Return a clause with the provider's last reply, from the journal."""
    answers = [record.typed for record in read_journal(context.folder.journal).records]
    messages = [answer.message for answer in answers if isinstance(answer, CreateRefused | CreateUnknown)]
    return f"; the last reply was: {messages[-1].rstrip('.')}" if messages and messages[-1] else ""


def _earlier_refusals(last: str, context: Context) -> str:
    """Return a sentence with the refusals of earlier offers, each reason once; "" if there are none besides `last`."""
    refusals: dict[str, str] = {}
    name = ""
    for record in read_journal(context.folder.journal).records:
        match record.typed:
            case CreateIntended() as intent:
                offer = Offer.model_validate(intent.offer)
                name = f"{offer.provider} {offer.label} {offer.place}"
            case CreateRefused(reason=reason, message=message) if reason in PASSES_OVER:
                refusals.setdefault(message.rstrip("."), name)
    refusals.pop(last.rstrip("."), None)
    shown = [f"{name}: {message}" for message, name in refusals.items()][:_MOST_SHOWN]
    return f" Before that, {'; '.join(shown)}." if shown else ""


def _spent_so_far(state: RunState, context: Context) -> Micros:
    """Return the upper bound of what the run's earlier machines cost, including machines that are gone."""
    if state.leg == 1 and not any(attempt.answer == "made" for attempt in state.attempts.values()):
        return Micros(0)
    return spent_at_most(state, read_journal(context.folder.journal).records, state.leg)


def _make_order(spent: Micros, state: RunState, context: Context) -> Order:
    """Return an order with a new token and an absolute deadline. Raise NoOffer if it could exceed the cap."""
    plan = context.plan
    worst = total(plan.worst_micros, spent)
    if plan.cap_micros is not None and worst > plan.cap_micros:
        raise NoOffer(
            "cap.too_small",
            f"The worst case {format_usd(worst)} is over the cap {format_usd(plan.cap_micros)}.",
            hint=f"Raise the cap: --max-cost {as_typed(worst)}",
        )
    keys = make_keys(context.folder.ssh) if plan.mode is Mode.PAID and plan.box is None else None
    deadline_wall = _their_wall(context) + plan.lease.queue_s + plan.lease.total_s
    return Order(
        run=plan.run,
        token=make_token(context.home.id, deadline_wall, plan.run),
        attempt=state.attempt + 1,
        offer=plan.offer,
        deadline_wall=deadline_wall,
        lease_s=plan.lease.total_s,
        keys=keys,
        disk_gb=disk_gb_of(plan),
        image=plan.choices.image,
    )


def _their_wall(context: Context) -> float:
    """Return the time on the provider's clock, read again because the local clock may have been set just now."""
    if isinstance(context.provider, TellsTime):
        with contextlib.suppress(Unknown):  # The create request will report a provider that does not answer.
            context.provider.ask_time()
    return their_wall(context.provider, context.clock)


def disk_gb_of(plan: Plan) -> int:
    """Return the disk size to order in GB, which is the size that the plan's price includes."""
    return disk_gb_on(plan.offer.provider, plan.job.disk_gb)


def _make_intent(order: Order, spent: Micros, context: Context, account: str, deadline_wall: float) -> CreateIntended:
    plan = context.plan
    # The cost of earlier legs is already subtracted from this leg's cap.
    beside = left_of(spent, plan.leg.spent_micros) if plan.leg is not None else spent
    hourly, once_only = beside_rate(plan.offer, plan.job.home_bytes, order.disk_gb)
    intent = CreateIntended(
        attempt=order.attempt,
        token=order.token,
        provider=plan.offer.provider,
        account=account,
        offer=plan.offer.model_dump(mode="json"),
        rate_micros_per_hour=plan.offer.rate_micros_per_hour,
        beside_micros_per_hour=hourly,
        egress_micros=once_only,
        sends_itself=plan.job.sends_itself,
        billing_unit_s=plan.offer.billing_unit_s,
        least_billed_s=terms_of(plan.offer.provider).least_billed_s,
        worst_micros=plan.worst_micros,
        lease=AgreedLease.from_lease(plan.lease),
        hold_s=plan.choices.hold_s if context.provider.traits.removes_files else 0,
        timer_shares_key=isinstance(context.provider, Guarded) and context.provider.guard_shares_key,
        deadline_wall=deadline_wall,
    )
    return intent.model_copy(update={"spent_micros": beside}) if beside > 0 else intent


def _look_for_machine(state: RunState, context: Context) -> Iterator[Note]:
    """Look for the machine of a create request without a clear reply. Adopt it, or record that there is none.

    Absence is believed only if all lists during the provider's whole settling time are empty. A lost reply restarts
    that time.
    """
    traits, is_seeing = context.provider.traits, False
    looked_late = context.looks_late(state)
    unclear, steady_since = "no reply came", float("inf")
    for elapsed in ticks(context.clock, traits.poll_s, traits.settle_s + LOOK_S):
        if context.seconds_left(state) <= 0:
            return  # A machine may have run and ended meanwhile, so its end must be proven.
        try:
            found = _select_by_token(context.provider.find(state.token), state.token)
            notes = [] if found or is_seeing else check_account(state, context)
        except (Unknown, SetupError) as error:
            unclear, steady_since = str(error), float("inf")
            # A partial list may show the machine, but cannot prove its absence.
            found, notes = _select_by_token(error.found, state.token) if isinstance(error, Unknown) else [], []
            if not found:
                continue
        is_seeing = True
        for note in notes:
            yield from note_once(note, context)
        if found:
            yield CreateObserved(token=state.token, instance=SeenMachine.from_instance(found[0]), adopted=True)
            return
        steady_since = min(steady_since, elapsed)
        if elapsed - steady_since >= traits.settle_s and looked_late:
            raise NoOffer(
                UNSEEN,
                f"gpurun looked for {state.token} too late: that machine does not exist now, but may have run before.",
                hint="The machine is proven gone, and its worst case is counted. Train again: gpurun train.",
            )
        if elapsed - steady_since >= traits.settle_s:
            if not _pays_for_another(state, context):
                yield from _look_until_deadline(state, context)
            else:
                yield _absent_note(state)
            return
    by_hand = f" It can be ended by hand: {traits.console_url}." if traits.console_url else ""
    raise MayBeBilling(
        "create.cannot_look",
        f"{context.provider.name} does not say clearly whether {state.token} exists: {unclear}.",
        hint=f"Run `gpurun resume {state.run}` once the provider answers again.{by_hand}",
    )


def _look_until_deadline(state: RunState, context: Context) -> Iterator[Note]:
    """Look until the deadline, because the cap does not cover a second machine while the first may still appear.

    Raise NoOffer if every list until then was read and was empty: then no machine was created.
    """
    what = f"{context.provider.name} did not answer the create request for {state.token} and does not show it yet; "
    message = f"{what}gpurun looks until its deadline, because the cap does not cover a second machine"
    yield from note_once(Incident(code=UNSEEN, message=message), context)
    is_steady = True
    while context.seconds_left(state) > 0 and is_steady:
        context.clock.sleep(min(LOOK_ON_S, max(0.0, context.seconds_left(state))))
        try:
            found = _select_by_token(context.provider.find(state.token), state.token)
        except (Unknown, SetupError) as error:
            found = _select_by_token(error.found, state.token) if isinstance(error, Unknown) else []
            is_steady = bool(found)
        if found:
            yield CreateObserved(token=state.token, instance=SeenMachine.from_instance(found[0]), adopted=True)
            return
        if context.wants_stop(state):
            return
    if is_steady:
        yield _absent_note(state)
        raise NoOffer(UNSEEN, f"{context.provider.name} created no machine.", hint="Train again: gpurun train.")


def _select_by_token(listed: Sequence[Instance], token: str) -> list[Instance]:
    """Return the living machines with this token; without any, those that have ended, because they cost money too."""
    return living_instances(listed, token) or [machine for machine in listed if machine.token == token]


def _absent_note(state: RunState) -> Note:
    return CreateRefused(token=state.token, reason="absent", message="not found by its token")


def _pays_for_another(state: RunState, context: Context) -> bool:
    """Return whether the cap covers another machine, or the run stops and needs no other machine."""
    plan = context.plan
    return bool(state.stop or state.failure) or pays_for_another(state, plan.cap_left_micros, plan.worst_micros)

"""Ask for one instance, and know whether it exists: intent first, one at most, nothing forgotten."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from gpurun.core.clock import ticks
from gpurun.core.errors import MayBeBilling, NoOffer, SetupError
from gpurun.core.model import Instance, InstanceState, Order
from gpurun.core.money import format_usd
from gpurun.core.plan import Mode, Plan
from gpurun.core.progress import PASSES_OVER, Event, RunState
from gpurun.lifecycle.context import PASSING, Context, Note, by_our_clock, instance_of
from gpurun.lifecycle.instance.account import account_asked, vouched
from gpurun.lifecycle.instance.bargain import check_made, check_price, is_told_otherwise
from gpurun.lifecycle.instance.boot import is_worth_waiting, patience_s
from gpurun.lifecycle.instance.box import check_box
from gpurun.lifecycle.instance.duplicates import duplicates, incident, living, once
from gpurun.lifecycle.instance.refused import last_word, reason_of
from gpurun.lifecycle.quotes.market import clock_warning
from gpurun.machine.answers import Facts
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.far import FarSide
from gpurun.machine.remote import HostKeyMismatch
from gpurun.machine.ssh_keys import make_keys
from gpurun.planning.budget import beside_rate, disk_gb_on
from gpurun.planning.software import least_torch_of
from gpurun.providers.base import HandsOver, NoCapacity, Rejected, TellsTime, Unknown, their_wall

ATTEMPTS = 3
# How much longer than its settling time a provider that answers now and then is asked.
LOOK_S = 300.0
LATE_S = 60.0
_OTHER_IMAGE = "It is being destroyed. Choose an image with Python 3.8 or newer: --image."


def create(state: RunState, context: Context) -> Iterator[Note]:
    """Send one create, after its intent is on disk; or, when an earlier answer is missing, look for what it made.

    Where this offer certainly cannot be had, the next attempt is on the next approved one, with a token of its own.
    """
    if state.token:
        yield from _look_for(state, context)
        return
    if state.attempt - state.passed_over >= ATTEMPTS:
        raise NoOffer(
            "create.gave_up",
            f"{context.provider.name} made no instance in {ATTEMPTS} attempts.",
            hint="Try again later, or another provider with --provider.",
        )
    check_price(context.plan, context.provider, context.clock)
    account = account_asked(context.provider)
    order, asked_wall = _order(state, context), context.clock.wall()
    deadline = {"deadline_wall": asked_wall + order.lease_s}
    yield Event.CREATE_INTENDED, {**_intent(order, context), **deadline, "account": account}
    if context.clock.wall() > asked_wall + LATE_S:
        message = "it was not sent: this machine slept, and the deadline in it is too near"
        yield Event.CREATE_REFUSED, {"token": order.token, "reason": "absent", "message": message}
        return
    try:
        instance = context.provider.create(order)
    except (NoCapacity, Rejected) as error:
        reason = reason_of(error)
        yield Event.CREATE_REFUSED, {"token": order.token, "reason": reason, "message": str(error)}
        if reason in PASSES_OVER and context.has_offer(state.passed_over + 1):
            return
        raise last_word(error, context) from error
    except Unknown as error:
        yield Event.CREATE_UNKNOWN, {"token": order.token, "message": str(error)}
        return
    if instance.token != order.token:
        yield Event.CREATE_UNKNOWN, {"token": order.token, "message": f"the answer is about another: {instance.id}"}
        return
    yield Event.CREATE_OBSERVED, _observed(order.token, instance, adopted=False)


def await_ready(state: RunState, context: Context) -> Iterator[Note]:
    """Wait until the instance runs, is the only one and its agent answers; past our patience it is given up."""
    born = instance_of(state)
    check_made(born, context.plan)
    started = context.clock.monotonic()
    instance, facts, up_mono, last = born, None, None, "it never answered"
    for waited_s in ticks(context.clock, context.provider.traits.poll_s, patience_s(state, context)):
        if not is_worth_waiting(instance, waited_s, context):
            break
        context.heed(state)
        try:
            extras = duplicates(state, context)
            for extra in extras:
                yield from once(incident(extra), context)
                context.provider.destroy(extra.id)
            instance = context.provider.read(born.id)
            if is_told_otherwise(instance, born, context.plan):
                # On record first: the receipt counts what was told, and the next look at the journal refuses it.
                yield Event.CREATE_OBSERVED, _observed(state.token, instance, adopted=False)
                return
            if _is_up(instance, state.token) and not extras:
                up_mono = up_mono or context.clock.monotonic()
                far = context.reach(by_our_clock(instance, state))
                far.install_agent()
                armed = _arm(far, instance, context)
                _set_up(far, state, context)
                facts = far.hello()
                break
            said = f"the provider says {instance.said or instance.state}"
            last = f"{len(extras)} more bear its token" if extras else said
        except FarRefusal as refusal:
            last = _passing(refusal)
        except HostKeyMismatch:  # Never reached yet, and nothing there to save: it is not waited for.
            raise
        except (Unknown, Rejected, MachineLost) as error:
            last = str(error)
    now_mono = context.clock.monotonic()
    if facts is None:
        raise _given_up(born, now_mono - started, last)
    took = {"seconds": round(now_mono - started, 3), "connect_s": round(now_mono - (up_mono or now_mono), 3)}
    ready = {"id": born.id, "instance": instance.model_dump(mode="json"), "facts": facts.as_json(), **took}
    yield Event.READY_OBSERVED, ready | ({"armed": armed} if armed else {})
    yield from _judged(facts, context)


def _passing(refusal: FarRefusal) -> str:
    """The words of a refusal by the far side that time may mend; any other is raised."""
    if refusal.reason == "no_python":
        raise SetupError("box.no_python", refusal.what, hint=_OTHER_IMAGE) from refusal
    if refusal.reason not in PASSING:
        raise refusal
    return refusal.what


def _given_up(born: Instance, waited_s: float, last: str) -> NoOffer:
    return NoOffer(
        "boot.timeout",
        f"The instance {born.id} was not ready within {waited_s:.0f} s: {last.rstrip('.')}.",
        hint="It is being destroyed. Try again, or another region or provider.",
    )


def _judged(facts: Facts, context: Context) -> Iterator[Note]:
    """What should be known about the machine; an error where it will not do, before anything is sent there."""
    for told in clock_warning(context.provider):
        yield Event.INCIDENT, {"code": "clock.wrong", "message": told}
    plan = context.plan
    least_torch = least_torch_of(plan.resolved)
    for warning in check_box(facts, plan.offer, accept_cpu=plan.choices.accept_cpu, least_torch=least_torch):
        yield Event.INCIDENT, {"code": "box.warning", "message": warning}


def _arm(far: FarSide, instance: Instance, context: Context) -> str:
    """Hand over the dead-man timer where it could not be there from the start; in words what was armed."""
    hand = context.provider.hand(instance) if isinstance(context.provider, HandsOver) else None
    if hand is None:
        return ""
    far.arm(hand.script, hand.secret.reveal())
    return hand.words


def _set_up(far: FarSide, state: RunState, context: Context) -> None:
    """Run the user's own script there, if there is one; it may be run again after a cut, and its failure ends it.

    It may take as long as was planned for the boot, from now on: what the boot took is not taken from it.
    """
    script = context.plan.choices.setup
    if not script:
        return
    limit_s = min(context.plan.lease.boot_s, context.seconds_left(state))
    reply = far.set_up(script.encode(), timeout_s=limit_s)
    if reply.exit_code:
        words = reply.stderr[-500:].decode("utf-8", "replace").strip()
        raise SetupError(
            "setup.failed",
            f"The script of --setup ended with {reply.exit_code} on the machine: {words or 'it said nothing'}",
            hint="Mend it; `ssh` to a machine of your own is a cheap place to try it.",
        )


def _is_up(instance: Instance, token: str) -> bool:
    """Whether it runs, can be reached, and is the one that was asked for."""
    return instance.state is InstanceState.RUNNING and instance.address is not None and instance.token == token


def _order(state: RunState, context: Context) -> Order:
    """A new token and an absolute deadline, checked against the cap once more before anything is sent."""
    plan = context.plan
    worst = plan.worst_micros
    if plan.cap_micros is not None and worst > plan.cap_micros:
        raise NoOffer(
            "cap.too_small",
            f"The worst case {format_usd(worst)} is over the cap {format_usd(plan.cap_micros)}.",
            hint=f"Raise it: --max-cost {format_usd(worst).removeprefix('$').replace(',', '')}",
        )
    keys = make_keys(context.folder.ssh) if plan.mode is Mode.PAID and plan.box is None else None
    return Order(
        run=plan.run,
        token=f"gr-{plan.run}-{secrets.token_hex(4)}",
        attempt=state.attempt + 1,
        offer=plan.offer,
        deadline_wall=_their_wall(context) + plan.lease.total_s,
        lease_s=plan.lease.total_s,
        keys=keys,
        disk_gb=disk_gb_of(plan),
        image=plan.choices.image,
    )


def _their_wall(context: Context) -> float:
    """The time by the clock that the machine will obey, asked for anew: this one may have been set a moment ago."""
    if isinstance(context.provider, TellsTime):
        with contextlib.suppress(Unknown):  # Whoever does not answer now is met by the create that follows.
            context.provider.ask_time()
    return their_wall(context.provider, context.clock)


def disk_gb_of(plan: Plan) -> int:
    """The disk that is ordered, as it was priced."""
    return disk_gb_on(plan.offer.provider, int(plan.resolved["hardware"]["disk_gb"]))


def _intent(order: Order, context: Context) -> dict[str, object]:
    plan = context.plan
    hourly, once_only = beside_rate(plan.offer, plan.parameters, order.disk_gb)
    return {
        "attempt": order.attempt,
        "token": order.token,
        "provider": plan.offer.provider,
        "offer": plan.offer.model_dump(mode="json"),
        "rate_micros_per_hour": plan.offer.rate_micros_per_hour,
        "beside_micros_per_hour": hourly,
        "egress_micros": once_only,
        "billing_unit_s": plan.offer.billing_unit_s,
        "worst_micros": plan.worst_micros,
        "lease": plan.lease.model_dump(mode="json"),
    }


def _look_for(state: RunState, context: Context) -> Iterator[Note]:
    """Find what a create of unknown outcome made, and adopt the oldest; or believe that there is none.

    Absence is believed only after the provider's whole settling time of steady lists; one answer that is lost in
    between begins it anew.
    """
    traits, is_seeing = context.provider.traits, False
    looked_late = context.looks_late(state)
    unclear, steady_since = "nothing was answered", float("inf")
    for elapsed in ticks(context.clock, traits.poll_s, traits.settle_s + LOOK_S):
        if context.seconds_left(state) <= 0:
            return  # What it made may have lived and ended since: that is a death to prove, not an absence.
        try:
            found = living(context.provider.find(state.token), state.token)
            notes = [] if found or is_seeing else vouched(state, context)
        except (Unknown, SetupError) as error:
            unclear, steady_since = str(error), float("inf")
            # A list that could be read only in part may show it all the same: it is adopted, never believed absent.
            found, notes = living(error.found, state.token) if isinstance(error, Unknown) else [], []
            if not found:
                continue
        is_seeing = True
        for note in notes:
            yield from once(note, context)
        if found:
            yield Event.CREATE_OBSERVED, _observed(state.token, found[0], adopted=True)
            return
        steady_since = min(steady_since, elapsed)
        if elapsed - steady_since >= traits.settle_s and looked_late:
            raise NoOffer(
                "create.unseen",
                f"Nobody looked for {state.token} in time, and now it is not there: it may have lived meanwhile.",
                hint="It is proven gone, and counted as if it had lived. Train anew: gpurun train.",
            )
        if elapsed - steady_since >= traits.settle_s:
            yield Event.CREATE_REFUSED, {"token": state.token, "reason": "absent", "message": "not found by its token"}
            return
    by_hand = f" It can be ended by hand: {traits.console_url}." if traits.console_url else ""
    raise MayBeBilling(
        "create.cannot_look",
        f"{context.provider.name} does not say clearly whether {state.token} exists: {unclear}.",
        hint=f"Run `gpurun resume {state.run}` once the provider answers again.{by_hand}",
    )


def _observed(token: str, instance: Instance, *, adopted: bool) -> dict[str, object]:
    return {"token": token, "instance": instance.model_dump(mode="json"), "adopted": adopted}

"""Ask for one instance, and know whether it exists: intent first, one at most, nothing forgotten."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from gpurun.core.clock import ticks
from gpurun.core.errors import MayBeBilling, NoOffer, SetupError
from gpurun.core.model import Instance, InstanceState, Order, Plan
from gpurun.core.money import cost_of, format_rate, format_usd
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.lifecycle.duplicates import duplicates, incident, living, once
from gpurun.machine.base import MachineLost
from gpurun.providers.base import NoCapacity, Rejected, Unknown

ATTEMPTS = 3
# How much longer than its settling time a provider that answers now and then is asked.
LOOK_S = 300.0


def create(state: RunState, context: Context) -> Iterator[Note]:
    """Send one create, after its intent is on disk; or, when an earlier answer is missing, look for what it made."""
    if state.token:
        yield from _look_for(state, context)
        return
    if state.attempt >= ATTEMPTS:
        raise NoOffer(
            "create.gave_up",
            f"{context.provider.name} made no instance in {ATTEMPTS} attempts.",
            hint="Try again later, or another provider with --provider.",
        )
    order = _order(state, context)
    yield Event.CREATE_INTENDED, _intent(order, context)
    try:
        instance = context.provider.create(order)
    except (NoCapacity, Rejected) as error:
        reason = "no_capacity" if isinstance(error, NoCapacity) else "rejected"
        yield Event.CREATE_REFUSED, {"token": order.token, "reason": reason, "message": str(error)}
        raise NoOffer(
            f"create.{reason}",
            f"{context.provider.name} refused to make the instance: {error}.",
            hint="Nothing was made and nothing is billed. Try another --provider or --gpu.",
        ) from error
    except Unknown as error:
        yield Event.CREATE_UNKNOWN, {"token": order.token, "message": str(error)}
        return
    if instance.token != order.token:
        yield Event.CREATE_UNKNOWN, {"token": order.token, "message": f"the answer is about another: {instance.id}"}
        return
    yield Event.CREATE_OBSERVED, _observed(order.token, instance, adopted=False)


def await_ready(state: RunState, context: Context) -> Iterator[Note]:
    """Wait until the instance runs, is the only one and its agent answers; past the boot limit it is given up."""
    born = instance_of(state)
    _check_bargain(born, context)
    started = context.clock.monotonic()
    limit_s = min(context.plan.lease.boot_s, context.seconds_left(state))
    last = "it never answered"
    for _ in ticks(context.clock, context.provider.traits.poll_s, limit_s):
        context.heed(state)
        try:
            extras = duplicates(state, context)
            for extra in extras:
                yield from once(incident(extra), context)
                context.provider.destroy(extra.id)
            instance = context.provider.read(born.id)
            if _is_told_dearer(instance, born, context.plan):
                # On record first: the receipt counts what was told, and the next look at the journal refuses it.
                yield Event.CREATE_OBSERVED, _observed(state.token, instance, adopted=False)
                return
            if _is_up(instance, state.token) and not extras:
                far = context.reach(instance)
                far.install_agent()
                facts = far.hello()
                break
            last = f"{len(extras)} more bear its token" if extras else f"the provider says {instance.state}"
        except (Unknown, Rejected, MachineLost) as error:
            last = str(error)
    else:
        raise NoOffer(
            "boot.timeout",
            f"The instance {born.id} was not ready within {limit_s:.0f} s: {last}.",
            hint="It is being destroyed. Try again, or another region or provider.",
        )
    seconds = round(context.clock.monotonic() - started, 3)
    seen = instance.model_dump(mode="json")
    yield Event.READY_OBSERVED, {"id": born.id, "instance": seen, "facts": facts.as_json(), "seconds": seconds}
    if not facts.torch_found:
        raise SetupError(
            "box.no_torch",
            "No Python on the instance imports torch.",
            hint="On this machine: pip install 'gpurun[local]'. On a cloud: choose an image with PyTorch.",
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
            hint=f"Raise it: --max-cost {format_usd(worst).lstrip('$')}.",
        )
    return Order(
        run=plan.run,
        token=f"gr-{plan.run}-{secrets.token_hex(4)}",
        attempt=state.attempt + 1,
        offer=plan.offer,
        deadline_wall=context.clock.wall() + plan.lease.total_s,
    )


def _intent(order: Order, context: Context) -> dict[str, object]:
    plan = context.plan
    return {
        "attempt": order.attempt,
        "token": order.token,
        "provider": plan.offer.provider,
        "offer": plan.offer.model_dump(mode="json"),
        "rate_micros_per_hour": plan.offer.rate_micros_per_hour,
        "billing_unit_s": plan.offer.billing_unit_s,
        "worst_micros": plan.worst_micros,
        "lease": plan.lease.model_dump(mode="json"),
        "deadline_wall": order.deadline_wall,
    }


def _look_for(state: RunState, context: Context) -> Iterator[Note]:
    """Find what a create of unknown outcome made, and adopt the oldest; or believe that there is none.

    Absence is believed only after the provider's whole settling time of steady lists; one answer that is lost in
    between begins it anew.
    """
    traits = context.provider.traits
    unclear, steady_since = "nothing was answered", float("inf")
    for elapsed in ticks(context.clock, traits.poll_s, traits.settle_s + LOOK_S):
        try:
            found = living(context.provider.find(state.token), state.token)
        except (Unknown, SetupError) as error:
            unclear, steady_since = str(error), float("inf")
            continue
        if found:
            yield Event.CREATE_OBSERVED, _observed(state.token, found[0], adopted=True)
            return
        steady_since = min(steady_since, elapsed)
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


def _is_told_dearer(instance: Instance, born: Instance, plan: Plan) -> bool:
    """Whether the provider says only now that what it made is not what was agreed to."""
    told = (instance.rate_micros_per_hour, instance.gpu, instance.gpu_count)
    changed = told != (born.rate_micros_per_hour, born.gpu, born.gpu_count)
    return changed and instance.token == born.token and (_costs_more(instance, plan) or _is_another(instance, plan))


def _costs_more(instance: Instance, plan: Plan) -> bool:
    rate = instance.rate_micros_per_hour
    return rate is not None and rate > plan.offer.rate_micros_per_hour


def _is_another(instance: Instance, plan: Plan) -> bool:
    """Whether its GPUs are not those of the offer; what a provider does not tell is not held against it."""
    offer = plan.offer
    other_kind = bool(instance.gpu) and instance.gpu != offer.gpu
    return other_kind or (bool(instance.gpu_count) and instance.gpu_count != offer.gpu_count)


def _check_bargain(instance: Instance, context: Context) -> None:
    """Refuse an instance that costs more than was agreed to, or is another; the driver destroys it."""
    plan, rate = context.plan, instance.rate_micros_per_hour
    agreed = plan.offer.rate_micros_per_hour
    if rate is not None and _costs_more(instance, plan):
        worst = cost_of(rate, plan.lease.total_s + plan.lease.kill_allowance_s, plan.offer.billing_unit_s)
        raise NoOffer(
            "price.rose",
            f"The instance costs {format_rate(rate)}, not the {format_rate(agreed)} agreed to.",
            hint=f"It is being destroyed. At the new price the worst case is {format_usd(worst)}; run the plan again.",
        )
    if _is_another(instance, plan):
        raise NoOffer(
            "gpu.other",
            f"It is {instance.gpu_count or '?'}×{instance.gpu or '?'}, not the {plan.offer.label} agreed to.",
            hint="It is being destroyed. Run the plan again, or choose another --provider.",
        )

"""Ask for one instance, and know whether it exists: intent first, one at most, nothing forgotten."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from gpurun.core.clock import ticks
from gpurun.core.errors import MayBeBilling, NoOffer, SetupError
from gpurun.core.model import Instance, InstanceState, Order
from gpurun.core.money import cost_of, format_rate, format_usd
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.machine.base import MachineLost
from gpurun.providers.base import NoCapacity, Rejected, Unknown

ATTEMPTS = 3


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
    yield Event.CREATE_OBSERVED, _observed(order.token, instance, adopted=False)
    _check_price(instance, context)


def await_ready(state: RunState, context: Context) -> Iterator[Note]:
    """Wait until the instance runs and its agent answers; past the boot limit it is given up."""
    born = instance_of(state)
    started = context.clock.monotonic()
    limit_s = min(context.plan.lease.boot_s, context.seconds_left(state))
    last = "it never answered"
    for _ in ticks(context.clock, context.provider.traits.poll_s, limit_s):
        context.heed(state)
        try:
            instance = context.provider.read(born.id)
            if instance.state is InstanceState.RUNNING and instance.address is not None:
                far = context.reach(instance)
                far.install_agent()
                facts = far.hello()
                break
            last = f"the provider says {instance.state}"
        except (Unknown, MachineLost) as error:
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
    """Find what a create of unknown outcome made: adopt the oldest, report the others, or believe that there is none.

    Absence is believed only after the provider's whole settling time of steady lists.
    """
    traits = context.provider.traits
    unclear = ""
    for _ in ticks(context.clock, traits.poll_s, traits.settle_s):
        try:
            found = context.provider.find(state.token)
        except Unknown as error:
            unclear = str(error)
            continue
        unclear = ""
        if found:
            break
    else:
        if unclear:
            raise MayBeBilling(
                "create.cannot_look",
                f"{context.provider.name} does not answer whether {state.token} exists: {unclear}.",
                hint=f"Run `gpurun resume {state.run}` once the provider answers again.",
            )
        yield Event.CREATE_REFUSED, {"token": state.token, "reason": "absent", "message": "not found by its token"}
        return
    for extra in found[1:]:
        yield Event.INCIDENT, {"code": "create.duplicate", "message": f"a second instance {extra.id} bears the token"}
    yield Event.CREATE_OBSERVED, _observed(state.token, found[0], adopted=True)
    _check_price(found[0], context)


def _observed(token: str, instance: Instance, *, adopted: bool) -> dict[str, object]:
    return {"token": token, "instance": instance.model_dump(mode="json"), "adopted": adopted}


def _check_price(instance: Instance, context: Context) -> None:
    """Refuse an instance that costs more than was agreed to; the driver destroys it."""
    plan, rate = context.plan, instance.rate_micros_per_hour
    if rate is None or rate <= plan.offer.rate_micros_per_hour:
        return
    worst = cost_of(rate, plan.lease.total_s + plan.lease.kill_allowance_s, plan.offer.billing_unit_s)
    raise NoOffer(
        "price.rose",
        f"The instance costs {format_rate(rate)}, not the {format_rate(plan.offer.rate_micros_per_hour)} agreed to.",
        hint=f"It is being destroyed. At the new price the worst case is {format_usd(worst)}; run the plan again.",
    )

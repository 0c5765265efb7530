"""End an instance and prove it: the request is repeated until reading it back says that it is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from gpurun.core.clock import Clock, ticks
from gpurun.core.errors import GpurunError, MayBeBilling, SetupError
from gpurun.core.model import Instance, InstanceState, digest_of
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import RETRY_S, Context, Note, instance_of
from gpurun.lifecycle.home.at_home import is_here
from gpurun.lifecycle.home.worth import wanted
from gpurun.lifecycle.instance.account import vouched
from gpurun.lifecycle.instance.duplicates import incident, living, once
from gpurun.machine.answers import MOST_ANNOUNCED_BYTES
from gpurun.machine.base import FarRefusal
from gpurun.machine.far import FarSide
from gpurun.providers.base import Provider, Unknown

PATIENCE_S = 300.0
ASK_AGAIN_S = 30.0
# It is billed until it is gone, and waited for by a person: looked at more often than a machine that boots.
LOOK_EVERY_S, TICK_S = 5.0, 1.0
LEAVE_S = 60.0

# Nothing, or what is to be noted, if the key could see the machine; raises where that is not so or not known.
Vouch = Callable[[], list[Note]]


@dataclass(frozen=True)
class Reading:
    """One look at the provider: the instance's own state, and whether anything listed bears the token."""

    at_s: float
    state: InstanceState
    listed: bool
    answer_sha256: str

    @property
    def gone(self) -> bool:
        """Both ways of looking say that there is nothing."""
        return self.state is InstanceState.GONE and not self.listed


def destroy(state: RunState, context: Context) -> Iterator[Note]:
    """The step: destroy what the journal knows of and whatever else bears the run's token."""
    identifier = state.instance.id if state.instance else ""
    reason = "failure" if state.failure else state.stop or state.outcome or "lease"
    yield Event.DESTROY_INTENDED, {"id": identifier, "token": state.token, "reason": reason}
    if context.plan.box is not None:
        yield from _leave(state, context)
    hidden_s, vouch = context.unsettled_s(state), partial(vouched, state, context)
    cloud, clock = context.provider, context.clock
    for event, data in end(cloud, clock, identifier, state.token, run=state.run, hidden_s=hidden_s, vouch=vouch):
        if event is Event.INCIDENT:
            yield from once((event, data), context)
        else:
            yield event, data


def _leave(state: RunState, context: Context) -> Iterator[Note]:
    """A box that is kept: end the training there and take the run's folder away, as far as it can be reached.

    What the trainer wrote and is not here stays: there is no other copy, unless a person wanted nothing of it.
    """
    is_unwanted = state.stop == "destroy" and state.reason != "lease"
    lost = "it was never tried"
    for _ in ticks(context.clock, RETRY_S, LEAVE_S):
        try:
            far = context.reach(instance_of(state))
            kept = "" if is_unwanted else _only_there(far, context)
            far.farewell(keep_results=bool(kept))
        except GpurunError as error:  # Its host key is another, or ours is gone: no reason to keep the run open.
            lost = error.what.rstrip(".")
            continue
        if kept:
            told = f"{kept} kept on the box, in ~/.gpurun/{state.token}/out"
            yield from once((Event.INCIDENT, {"code": "box.results_left", "message": told}), context)
        return
    told = f"the box could not be reached to end the training ({lost}); its agent does so when the lease is over"
    yield from once((Event.INCIDENT, {"code": "box.not_left", "message": told}), context)


def _only_there(far: FarSide, context: Context) -> str:
    """What is finished over there, worth bringing and not here, in words; empty for nothing."""
    try:
        manifest = far.manifest(MOST_ANNOUNCED_BYTES)
    except FarRefusal as refusal:
        return f"what it has finished cannot be listed ({refusal.what.rstrip('.')}) and is"
    left = [file for file in wanted(manifest) if not is_here(context.folder.artifacts, file)]
    total_bytes = sum(file.bytes for file in left)
    return f"{len(left)} files ({total_bytes:,} bytes) that did not come home are" if left else ""


def end(
    provider: Provider,
    clock: Clock,
    identifier: str,
    token: str,
    *,
    run: str,
    hidden_s: float = 0.0,
    vouch: Vouch = list,
) -> Iterator[Note]:
    """Ask and read until death is proven; only what bears the token is ever asked to end.

    What was just asked for may be hidden for `hidden_s` longer: until then, or until it was seen, its absence proves
    nothing, and a request for its end may have gone to nobody. Nor does it prove anything to a key that could not see
    it: unless something that bears the token is seen, `vouch` has to answer first (`account.vouched`).
    After five minutes without proof it raises MayBeBilling; whoever called keeps the run red and tries again later.
    """
    asking = _Asking(provider, identifier, token, vouch)
    readings: list[Reading] = []
    started, due_s, poll_s = clock.monotonic(), 0.0, min(provider.traits.poll_s, LOOK_EVERY_S)
    for elapsed in ticks(clock, min(poll_s, TICK_S), PATIENCE_S + hidden_s):
        if not readings and elapsed - asking.asked_s >= ASK_AGAIN_S:
            yield from asking.ask(elapsed)
        if elapsed < due_s:
            continue
        due_s = elapsed + poll_s
        if not asking.is_seeing:
            yield from asking.look_whose_key()
            continue
        # Its own time, not the turn's: an asking that took half a minute must not count as half a minute of death.
        reading = _look(provider, identifier, token, round(clock.monotonic() - started, 3))
        if reading.gone and elapsed < hidden_s and not asking.was_seen:
            continue
        if not reading.gone:
            if readings:  # It was seen gone and is there again: all proof so far is void, and it is asked at once.
                readings, asking.asked_s = [], float("-inf")
            continue
        readings.append(reading)
        due_s = reading.at_s + _gap_s(provider)
        yield Event.DEATH_READ, {"id": identifier, **asdict(reading)}
        if _proves(provider, readings):
            yield Event.DEATH_PROVEN, _proof(provider, identifier, readings)
            return
    by_hand = provider.traits.console_url or token
    raise MayBeBilling(
        "destroy.not_gone",
        f"{provider.name} does not show {identifier or token} as gone after {PATIENCE_S:.0f} s: {asking.answer}.",
        hint=f"Run `gpurun destroy {run}`, or end it by hand: {by_hand}.",
    )


@dataclass
class _Asking:
    """The requests for an end so far, and what they showed."""

    provider: Provider
    identifier: str
    token: str
    vouch: Vouch
    attempt: int = 0
    asked_s: float = float("-inf")
    answer: str = "nothing was asked yet"
    was_seen: bool = False
    is_seeing: bool = False
    """Whether the key is one to which the machine would show itself."""

    def ask(self, elapsed: float) -> Iterator[Note]:
        """Ask for the end of all that bears the token."""
        self.attempt, self.asked_s = self.attempt + 1, elapsed
        self.answer, found = _ask(self.provider, self.identifier, self.token)
        more = found[0 if self.identifier else 1 :]
        yield from map(incident, (one for one in more if one.id != self.identifier))
        self.was_seen = self.was_seen or bool(found)
        self.is_seeing = self.is_seeing or self.was_seen
        yield Event.DESTROY_ASKED, {"id": self.identifier, "attempt": self.attempt, "answer": self.answer}

    def look_whose_key(self) -> Iterator[Note]:
        """Ask once who the key belongs to; what `vouch` raises of another account ends it all."""
        try:
            yield from self.vouch()
            self.is_seeing = True
        except (Unknown, SetupError) as error:  # A key that was revoked may be given back.
            self.answer = f"it does not say whose account the key belongs to: {error}"


def _ask(provider: Provider, identifier: str, token: str) -> tuple[str, list[Instance]]:
    """Request the end of the instance and of all that bears the token; the answer in words, and what was found.

    Each is asked whatever became of the others, and the known one whatever the list says. No answer is a reason to stop
    asking: a key that was revoked in mid-run may be restored, and the lease is watched.
    """
    found: list[Instance] = []
    asked, unclear = [], []
    try:
        found = living(provider.find(token), token)
    except Unknown as error:  # What a part of the list shows is enough to end it.
        found, unclear = living(error.found, token), [str(error)]
    except Exception as error:  # noqa: BLE001 - whatever it was, the known one is asked to end all the same.
        unclear.append(str(error))
    for name in sorted({one.id for one in found} | ({identifier} if identifier else set())):
        try:
            provider.destroy(name)
            asked.append(name)
        except Exception as error:  # noqa: BLE001 - the others are asked all the same, and this one again.
            unclear.append(f"{name}: {error}")
    words = f"asked {', '.join(asked) or 'nobody: none bears the token'}"
    return (f"no clear answer: {'; '.join(unclear)}" if unclear else words), found


def _look(provider: Provider, identifier: str, token: str, at_s: float) -> Reading:
    """Read the instance and the list; an unclear answer proves nothing."""
    try:
        listed = provider.find(token)
        one = provider.read(identifier) if identifier else None
    except Exception as error:  # noqa: BLE001 - whatever it was, it is no answer.
        return Reading(at_s, InstanceState.UNKNOWN, listed=True, answer_sha256=digest_of(str(error)))
    answer = digest_of([_plain(one), [_plain(other) for other in listed]])
    alive = bool(living(listed, token))  # Some clouds list their dead for an hour, and strangers of a like name.
    return Reading(at_s, one.state if one else InstanceState.GONE, listed=alive, answer_sha256=answer)


def _plain(instance: Instance | None) -> object:
    return instance.model_dump(mode="json") if instance else None


def _gap_s(provider: Provider) -> float:
    return provider.traits.death_spread_s / max(1, provider.traits.death_reads - 1)


def _spread_s(readings: list[Reading]) -> float:
    return round(readings[-1].at_s - readings[0].at_s, 3)


def _proves(provider: Provider, readings: list[Reading]) -> bool:
    traits = provider.traits
    return len(readings) >= traits.death_reads and _spread_s(readings) >= traits.death_spread_s


def _proof(provider: Provider, identifier: str, readings: list[Reading]) -> dict[str, object]:
    return {
        "id": identifier,
        "teardown": provider.traits.teardown,
        "reads": len(readings),
        "spread_s": _spread_s(readings),
        "evidence_sha256": digest_of([[r.at_s, r.state, r.listed, r.answer_sha256] for r in readings]),
    }

"""End an instance and prove it: the request is repeated until reading it back says that it is gone.

What one account rented does not exist for another one, so its absence there is no death.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf

from gpurun.core.background_call import Begin, Inline
from gpurun.core.clock import Clock, ticks
from gpurun.core.errors import MayBeBilling, SetupError, clauses
from gpurun.core.journal_records import Event, RunState
from gpurun.core.records import Instance, InstanceState, digest_of
from gpurun.core.stop_request import read_stop_request
from gpurun.ledger.journal import is_noted, read_journal
from gpurun.lifecycle.context import Context, Note, by_our_clock
from gpurun.providers.base import HasAccounts, Provider, Unknown

PATIENCE_S = 300.0
ASK_AGAIN_S = 30.0
# It is billed until it is gone, and waited for by a person: looked at more often than a machine that boots.
LOOK_EVERY_S, TICK_S = 5.0, 1.0
LIST_FIRST_S = 3.0
KNOCK_S = 2.0
"""So long a machine that its provider shows as gone has for a sign of life; beside the reading, not after it."""
REFUSED_S = 60.0

CLUSTER = "cluster:"
NAMED = "account:"
"""How the mark begins where the provider itself names its customer: no user needs to confirm it, and none can."""

# Nothing, or what is to be noted, if the key could see the machine; raises where that is not so or not known.
CheckAccount = Callable[[], list[Note]]


@dataclass(frozen=True)
class Reading:
    """One look at the provider: the instance's own state, and whether anything listed carries the token."""

    at_s: float
    state: InstanceState
    listed: bool
    answer_sha256: str
    ended_wall: float | None = None
    """The provider's own time of the end, where it tells one."""
    ran_s: float | None = None
    """For how long it ran, by its provider, where it had to queue before."""

    @property
    def gone(self) -> bool:
        """Both ways of looking say that there is nothing."""
        return self.state is InstanceState.GONE and not self.listed


def end(
    provider: Provider,
    clock: Clock,
    identifier: str,
    token: str,
    *,
    run: str,
    hidden_s: float = 0.0,
    check_account: CheckAccount = list,
    begin: Begin = Inline,
    refused: Callable[[Exception], list[Note]] = lambda _: [],
    knock: Callable[[], bool] = lambda: False,
) -> Iterator[Note]:
    """Ask and read until death is proven; only what carries the token is ever asked to end.

    What was just asked for may be hidden for `hidden_s` longer: until then, or until it was seen, its absence proves
    nothing, and a request for its end may have gone to nobody. Nor does it prove anything to a key that could not see
    it: unless something that carries the token is seen, `check_account` has to answer first (`account.vouched`).
    Where the request is not taken, `refused` is done beside it. A machine that answers a `knock` lives, whatever its
    provider says, which puts the proof off for twice the settling time at most. After five minutes without proof, or
    one in which the key was refused, it raises MayBeBilling; the caller keeps the run red and tries again later.
    """
    asking = _Asking(provider, identifier, token, check_account, begin)
    readings: list[Reading] = []
    started, due_s, poll_s = clock.monotonic(), 0.0, min(provider.traits.poll_s, LOOK_EVERY_S)
    for elapsed in ticks(clock, min(poll_s, TICK_S), PATIENCE_S + hidden_s):
        if not readings and elapsed - asking.asked_s >= ASK_AGAIN_S:
            yield from asking.ask(elapsed, clock.monotonic())
            for note in refused(asking.trouble) if asking.trouble is not None else ():
                asking.by_itself = str(note[1]["message"])
                yield note
        if asking.is_hopeless(elapsed, hidden_s):
            break
        if elapsed < due_s:
            continue
        due_s = elapsed + poll_s
        if not asking.is_seeing:
            yield from asking.look_whose_key()
            continue
        # Its own time, not the turn's: an asking that took half a minute must not count as half a minute of death.
        knocking = begin(knock) if len(readings) + 1 >= provider.traits.death_reads else None
        reading = look(provider, identifier, token, round(clock.monotonic() - started, 3))
        if reading.gone and elapsed < hidden_s and not asking.was_seen:
            continue
        if not reading.gone:
            asking.was_alive(reading, clock.monotonic())
            if readings:  # It was seen gone and is there again: all proof so far is void, and it is asked at once.
                readings, asking.asked_s = [], float("-inf")
            continue
        if knocking is not None and knocking.wait(KNOCK_S) and knocking.result():
            readings = []
            yield from asking.was_heard(elapsed, clock.monotonic())
            continue
        readings.append(reading)
        due_s = reading.at_s + _gap_s(provider)
        yield Event.DEATH_READ, {"id": identifier, **asdict(reading), **asking.before(clock.monotonic())}
        if proves(provider, readings):
            yield Event.DEATH_PROVEN, _proof(provider, identifier, readings)
            return
    raise asking.given_up(run)


@dataclass
class _Asking:
    """The requests for an end so far, and what they showed."""

    provider: Provider
    identifier: str
    token: str
    check_account: CheckAccount
    begin: Begin
    attempt: int = 0
    asked_s: float = float("-inf")
    answer: str = "nothing was asked yet"
    was_seen: bool = False
    is_seeing: bool = False
    """Whether the key is one to which the machine would show itself."""
    trouble: Exception | None = None
    """Why the provider did not take the last request; a SetupError where that is the key's fault."""
    by_itself: str = ""
    """What came of telling the machine to end itself."""
    alive_mono: float | None = None
    """When the machine was shown alive last."""
    denied_s: float = inf
    """When the machine answered for the first time while its provider showed it as gone."""
    found_gone: bool = False
    """Whether it was gone already by the list that was asked for before the first request."""

    def was_alive(self, reading: Reading, now_mono: float) -> None:
        """A reading that does not show it gone; what could not be read shows nothing."""
        if reading.state is not InstanceState.UNKNOWN:
            self.alive_mono, self.found_gone = now_mono, False

    def is_hopeless(self, elapsed: float, hidden_s: float) -> bool:
        """Whether the key was refused for a minute, or the provider denied for long what answers."""
        is_refused = isinstance(self.trouble, SetupError) and elapsed >= REFUSED_S + hidden_s
        return is_refused or elapsed - self.denied_s >= 2 * self.provider.traits.settle_s

    def was_heard(self, elapsed: float, now_mono: float) -> Iterator[Note]:
        """Take note that the machine answered while its provider showed it as gone; it is asked to end once more."""
        self.alive_mono, self.found_gone, self.asked_s = now_mono, False, float("-inf")
        self.denied_s = min(self.denied_s, elapsed)
        message = f"{self.provider.name} shows {self.identifier} as gone, and the machine answers over SSH"
        yield Event.INCIDENT, {"code": "death.denied", "message": f"{message} with its own host key: it lives"}

    def before(self, now_mono: float) -> dict[str, object]:
        """What is known of the machine's last life, for the books."""
        ago_s = None if self.alive_mono is None else round(now_mono - self.alive_mono, 3)
        return {"alive_s_ago": ago_s, "found_gone": self.found_gone}

    def ask(self, elapsed: float, now_mono: float) -> Iterator[Note]:
        """Ask for the end of all that carries the token."""
        self.attempt, self.asked_s = self.attempt + 1, elapsed
        answer = _ask(self.provider, self.identifier, self.token, self.begin)
        self.answer, found, self.trouble = answer.words, answer.found, answer.trouble
        self.found_gone = (self.found_gone or self.attempt == 1) and answer.is_clear and not found
        if found:
            self.alive_mono = now_mono
        more = found[0 if self.identifier else 1 :]
        yield from map(incident, (one for one in more if one.id != self.identifier))
        self.was_seen = self.was_seen or bool(found)
        self.is_seeing = self.is_seeing or self.was_seen
        told = {"id": self.identifier, "attempt": self.attempt, "answer": self.answer, "taken": answer.is_taken}
        yield Event.DESTROY_ASKED, told

    def given_up(self, run: str) -> MayBeBilling:
        """The error of an end that is not proven, with what would mend it."""
        by_hand = self.provider.traits.console_url or self.token
        what = f"{self.provider.name} does not show {self.identifier or self.token} as gone: {self.answer}."
        if self.denied_s < inf:
            what = f"{self.provider.name} shows {self.identifier} as gone, and it answers over SSH: {self.answer}."
        what += f" {self.by_itself}." if self.by_itself else ""
        first = f"{self.trouble.hint} Then: " if isinstance(self.trouble, SetupError) else "Run "
        return MayBeBilling(
            "destroy.not_gone", what, hint=f"{first}`gpurun destroy {run}`, or end it by hand: {by_hand}."
        )

    def look_whose_key(self) -> Iterator[Note]:
        """Ask once who the key belongs to; what `check_account` raises of another account ends it all."""
        try:
            yield from self.check_account()
            self.is_seeing = True
        except (Unknown, SetupError) as error:  # A key that was revoked may be given back.
            self.answer = f"it does not say whose account the key belongs to: {clauses([error])}"


@dataclass(frozen=True)
class _Answer:
    """What came of one request for an end.

    `found` carries the token by the list, which `is_clear` where it is whole and older than any request. `trouble` is
    why the request for the known machine was not taken; `is_taken`: one was, for that machine where its id is known.
    """

    words: str
    found: list[Instance]
    trouble: Exception | None
    is_clear: bool
    is_taken: bool


def _ask(provider: Provider, identifier: str, token: str, begin: Begin) -> _Answer:
    """Request the end of the instance and of all that carries the token.

    The list is begun first, as it may show that the key sees the machine, but a list that hangs delays nothing. Each
    is asked whatever became of the others. No answer is a reason to stop asking: a revoked key may be restored.
    """
    asked, unclear, refused = list[str](), list[str](), dict[str, Exception]()

    def ask(name: str) -> None:
        try:
            provider.destroy(name)
            asked.append(name)
        except Exception as error:  # noqa: BLE001 - the others are asked all the same, and this one again.
            refused[name] = error
            unclear.append(f"{name}: {error}")

    listing = begin(partial(_carrying, provider, token))
    is_first = listing.wait(LIST_FIRST_S)
    if identifier:
        ask(identifier)
    found, trouble = listing.result()
    unclear += trouble
    for name in sorted({one.id for one in found} - {identifier}):
        ask(name)
    words = f"asked {', '.join(asked) or 'nobody: none carries the token'}"
    return _Answer(
        words=f"no clear answer: {clauses(unclear)}" if unclear else words,
        found=found,
        trouble=refused.get(identifier),
        is_clear=is_first and not trouble,
        is_taken=identifier in asked if identifier else bool(asked),
    )


def _carrying(provider: Provider, token: str) -> tuple[list[Instance], list[str]]:
    """What is shown to carry the token, and why that may not be all."""
    try:
        return living(provider.find(token), token), []
    except Unknown as error:  # What a part of the list shows is enough to end it.
        return living(error.found, token), [str(error)]
    except Exception as error:  # noqa: BLE001 - whatever it was, the known one is asked to end all the same.
        return [], [str(error)]


def look(provider: Provider, identifier: str, token: str, at_s: float, *, but: str = "") -> Reading:
    """Read the instance and the list, in which the one that is named by `but` does not count; doubt proves nothing."""
    try:
        listed = provider.find(token)
        one = provider.read(identifier) if identifier else None
    except Exception as error:  # noqa: BLE001 - whatever it was, it is no answer.
        return Reading(at_s, InstanceState.UNKNOWN, listed=True, answer_sha256=digest_of(str(error)))
    answer = digest_of([_plain(one), [_plain(other) for other in listed]])
    # Some clouds list their dead for an hour, and strangers of a like name.
    alive = any(one.id != but for one in living(listed, token))
    told = (one.state, one.ended_wall, one.ran_s) if one else (InstanceState.GONE, None, None)
    state, ended_wall, ran_s = told
    return Reading(at_s, state, listed=alive, answer_sha256=answer, ended_wall=ended_wall, ran_s=ran_s)


def _plain(instance: Instance | None) -> object:
    return instance.model_dump(mode="json") if instance else None


def _gap_s(provider: Provider) -> float:
    return provider.traits.death_spread_s / max(1, provider.traits.death_reads - 1)


def _spread_s(readings: list[Reading]) -> float:
    return round(readings[-1].at_s - readings[0].at_s, 3)


def proves(provider: Provider, readings: list[Reading]) -> bool:
    """Whether readings that all say GONE are as many, and as far apart, as this provider's word needs."""
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


def living(found: Sequence[Instance], token: str) -> list[Instance]:
    """Those that carry this token, whatever a provider's own search took for the same, and are not gone."""
    return [one for one in found if one.token == token and one.state is not InstanceState.GONE]


def incident(extra: Instance) -> Note:
    """The record of a machine that is not the run's own and carries a token of it."""
    message = f"a second machine {extra.id} carries the token; it is ended, and its cost taken off this run's time"
    return Event.INCIDENT, {"code": "create.duplicate", "message": message, "id": extra.id, "token": extra.token}


def once(note: Note, context: Context) -> Iterator[Note]:
    """The note, unless the journal has it already."""
    event, data = note
    if not is_noted(context.folder.journal, read_journal(context.folder.journal).records, event, data):
        yield note


def is_other_account(provider: Provider, account: str, token: str) -> bool:
    """Whether the key used now is another account's than the one that asked; `Unknown` where neither can be told.

    Whatever carries the token here, alive or dead, shows that it is the same one, whatever became of its key.
    """
    if not account or not isinstance(provider, HasAccounts) or provider.account_mark() == account:
        return False
    return not any(one.token == token for one in provider.find(token))


def demand_account(provider: Provider, state: RunState, *, same_account: bool = False) -> None:
    """MayBeBilling where the key used now is of another account than the run, unless the user confirms it."""
    is_confirmed = same_account and not state.account.startswith(NAMED)
    if not is_confirmed and is_other_account(provider, state.account, state.token):
        raise other_account(provider, state)


def knock_of(state: RunState, context: Context, identifier: str) -> Callable[[], bool]:
    """Return a call that says whether the run's machine still answers at its address, by its pinned host key.

    Always False for one that never answered, for another than the run's own, and where an address outlives a machine.
    """
    instance = state.instance
    is_own = instance is not None and instance.id == identifier and instance.address is not None and state.facts
    if instance is None or not is_own or not context.provider.traits.takes_address:
        return lambda: False

    def knock() -> bool:
        try:
            return context.reach(by_our_clock(instance, state)).answers(KNOCK_S)
        except Exception:  # noqa: BLE001 - whatever it was, it is no sign of life.
            return False

    return knock


def check_account(state: RunState, context: Context) -> list[Note]:
    """Nothing, if an absence at the provider says something; what the user confirmed, if only that makes it so.

    `Unknown` or SetupError when the provider does not say so now; MayBeBilling when the key is another account's and
    the user does not confirm it. Asked beside a request for an end, never before it: silence here costs no money.
    """
    provider = context.provider
    if not is_other_account(provider, state.account, state.token):
        return []
    request = read_stop_request(context.folder)
    if request is not None and request.same_account and not state.account.startswith(NAMED):
        message = f"the key of {provider.name} is a new one; the user vouches that it is of the same account"
        return [(Event.INCIDENT, {"code": "account.vouched", "message": message})]
    raise other_account(provider, state)


def other_account(provider: Provider, state: RunState) -> MayBeBilling:
    """The error of a run that is finished under another account's key, or where a table leads to another cluster."""
    if state.account.startswith(CLUSTER):
        what = (
            f"{state.token} is a job of the {state.account.replace(':', ' ')}, and config.toml leads to another one now"
        )
        hint = (
            f"Put its table back as it was, then: gpurun resume {state.run}. If it is the same one under a new name: "
        )
        hint += f"gpurun destroy {state.run} --same-account"
        return MayBeBilling("account.other", f"{what}, which does not know it: that proves nothing.", hint=hint)
    hint = "Use the key of the account that rented it"
    if not state.account.startswith(NAMED):
        hint += f"; if it is the same account with a new key: gpurun destroy {state.run} --same-account"
    return MayBeBilling(
        "account.other",
        f"{state.token} was rented with another key of {provider.name} than the one used now, to which it does not "
        "exist: that proves nothing.",
        hint=f"{hint}. By hand: {provider.traits.console_url}.",
    )

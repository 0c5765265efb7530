"""End an instance and prove it: repeat the request until the provider reads it back as gone.

A machine rented by one account is invisible to another, so its absence there proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from typing import Any

from gpurun.core.background_call import Begin, Inline, Task
from gpurun.core.clock import Clock, ticks
from gpurun.core.errors import MayBeBilling, SetupError, clauses
from gpurun.core.journal_events import DeathRead, DestroyAsked, Incident, Json
from gpurun.core.journal_records import RunState
from gpurun.core.records import Instance, InstanceState
from gpurun.core.stop_request import read_stop_request
from gpurun.ledger.journal import is_noted, read_journal
from gpurun.lifecycle.context import Context, Note, by_our_clock
from gpurun.lifecycle.instance.readings import (
    GoneRow,
    InstanceReading,
    gap_s,
    living,
    look_at_instance,
    proof_of,
    proves,
)
from gpurun.providers.base import HasAccounts, Provider, Unknown

PATIENCE_S = 300.0
ASK_AGAIN_S = 30.0
# It is billed until it is gone, and a user waits for it: look more often than at a machine that boots.
LOOK_EVERY_S, TICK_S = 5.0, 1.0
LIST_FIRST_S = 3.0
KNOCK_S = 2.0
"""How long a machine that its provider shows as gone has for a sign of life; checked beside the reading."""
REFUSED_S = 60.0

CLUSTER = "cluster:"
NAMED = "account:"
"""The prefix of an account mark that the provider itself names: no user needs to confirm it, and none can."""

# Returns [], or notes to record, if the key could see the machine; raises if it could not, or that is not known.
CheckAccount = Callable[[], list[Note]]


def prove_termination(
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
    was_gone: bool = False,
) -> Iterator[Note]:
    """Request and read until the end is proven; only machines that carry the token are ever ended.

    A machine that was requested just now may stay hidden for `hidden_s`: until then, or until it was seen, its absence
    proves nothing, and a request for its end may not have reached it. Nor does absence prove anything to a key that
    could not see it: unless a machine with the token is seen, `check_account` has to confirm the key first
    (`account.vouched`). If a request is not accepted, `refused` is called as well. A machine that answers a `knock`
    lives, whatever its provider says, which delays the proof by twice the settling time at most. If it is on record
    that it `was_gone`, its return is recorded too. After five minutes without proof, or one in which the key was
    refused, raise MayBeBilling; the caller keeps the run red and retries later.
    """
    asking = _Asking(provider, identifier, token, check_account, begin, GoneRow(clock), was_gone)
    readings: list[InstanceReading] = []
    started, due_s, poll_s = clock.monotonic(), 0.0, min(provider.traits.poll_s, LOOK_EVERY_S)
    for elapsed in ticks(clock, min(poll_s, TICK_S), PATIENCE_S + hidden_s):
        if not readings and elapsed - asking.asked_s >= ASK_AGAIN_S:
            yield from asking.ask(elapsed, clock.monotonic(), refused)
        if asking.is_hopeless(elapsed, hidden_s):
            break
        if elapsed < due_s:
            continue
        due_s = elapsed + poll_s
        if not asking.is_seeing:
            yield from asking.look_whose_key()
            continue
        # The reading's own time, not the turn's: a request that took half a minute is not half a minute of proof.
        knocking = begin(knock) if len(readings) + 1 >= provider.traits.death_reads else None
        looked_mono = clock.monotonic()  # A list may take long, but cannot show life later than the reading before it.
        reading = look_at_instance(provider, identifier, token, round(looked_mono - started, 3), row=asking.row)
        if asking.may_be_hidden(elapsed, hidden_s) and reading.gone:
            continue
        if not reading.gone:
            yield from asking.was_alive(reading, looked_mono, len(readings))
            readings = []
            continue
        if knocking is not None and knocking.wait(KNOCK_S) and knocking.result():
            readings = []
            yield from asking.was_heard(elapsed, clock.monotonic())
            continue
        readings.append(reading)
        asking.was_gone = True
        due_s = reading.at_s + gap_s(provider)
        yield DeathRead(id=identifier, **asdict(reading), **asking.before(clock.monotonic()))
        if proves(provider, readings):
            yield proof_of(provider, identifier, readings)
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
    row: GoneRow
    was_gone: bool
    """Whether the last record of the machine shows it as gone."""
    attempt: int = 0
    asked_s: float = float("-inf")
    answer: str = "nothing was requested yet"
    was_seen: bool = False
    is_seeing: bool = False
    """Whether the key could see the machine."""
    trouble: Exception | None = None
    """Why the provider did not accept the last request; a SetupError if the key is at fault."""
    by_itself: str = ""
    """What came of telling the machine to end itself."""
    alive_mono: float | None = None
    """When the machine was last shown alive."""
    up_mono: float | None = None
    """When it was last shown as one whose end has not begun."""
    denied_s: float = inf
    """When the machine first answered while its provider showed it as gone."""

    def may_be_hidden(self, elapsed: float, hidden_s: float) -> bool:
        """Return whether its absence says nothing yet; if so, restart the series of GONE replies."""
        is_hidden = elapsed < hidden_s and not self.was_seen
        if is_hidden:
            self.row.since_mono = None
        return is_hidden

    def was_alive(self, reading: InstanceReading, now_mono: float, before: int) -> Iterator[Note]:
        """Take in a reading that does not show it gone. A failed reading or a mere list entry is no sign of life.

        If it is on record as gone, its return is noted. All proof `before` is void then, and its end is requested again
        at once.
        """
        if before:
            self.asked_s = float("-inf")
        if reading.state not in (InstanceState.UNKNOWN, InstanceState.GONE):
            self.alive_mono = now_mono
            if reading.state is not InstanceState.STOPPING:
                self.up_mono = now_mono
            yield from self.is_back(f"{self.provider.name} shows {self.identifier} again", reading.at_s)

    def is_back(self, message: str, at_s: float) -> Iterator[Note]:
        """Note that a machine lives that is on record as gone."""
        if self.was_gone:
            self.was_gone = False
            back = f"{message}, which was gone"
            yield Incident(code="machine.back", message=back, id=self.identifier, at_s=at_s)

    def is_hopeless(self, elapsed: float, hidden_s: float) -> bool:
        """Return whether the key was refused for a minute, or the provider long denied a machine that answers."""
        is_refused = isinstance(self.trouble, SetupError) and elapsed >= REFUSED_S + hidden_s
        return is_refused or elapsed - self.denied_s >= 2 * self.provider.traits.settle_s

    def was_heard(self, elapsed: float, now_mono: float) -> Iterator[Note]:
        """Note that the machine answered while its provider showed it as gone; its end is requested again."""
        self.alive_mono = self.up_mono = now_mono
        self.row.since_mono, self.asked_s = None, float("-inf")
        self.denied_s = min(self.denied_s, elapsed)
        message = f"{self.provider.name} shows {self.identifier} as gone, but the machine answers over SSH"
        yield Incident(code="death.denied", message=f"{message} with its own host key: it lives")
        yield from self.is_back(f"{self.identifier} answers over SSH", elapsed)

    def before(self, now_mono: float) -> Json:
        """Return when the machine was last alive, and since when it is gone, for the cost."""
        seen = {"alive_s_ago": self.alive_mono, "up_s_ago": self.up_mono}
        ago_s = {key: None if mono is None else round(now_mono - mono, 3) for key, mono in seen.items()}
        return {**ago_s, "gone_s_ago": self.row.seconds}

    def ask(self, elapsed: float, now_mono: float, refused: Callable[[Exception], list[Note]]) -> Iterator[Note]:
        """Request the end of all that carries the token; call `refused` if a request fails."""
        self.attempt, self.asked_s = self.attempt + 1, elapsed
        answer = _ask(self.provider, self.identifier, self.token, self.begin, self.row)
        self.answer, found, self.trouble = answer.words, answer.found, answer.trouble
        own = [machine.state for machine in found if machine.id == (self.identifier or machine.id)]
        self.alive_mono = now_mono if own else self.alive_mono
        # A list may lag behind, and show what was asked to end as running.
        if {*own} - {InstanceState.STOPPING} and (self.attempt == 1 or not self.identifier):
            self.up_mono = now_mono
        more = found[0 if self.identifier else 1 :]
        yield from map(incident, (machine for machine in more if machine.id != self.identifier))
        self.was_seen = self.was_seen or bool(found)
        self.is_seeing = self.is_seeing or self.was_seen
        yield DestroyAsked(id=self.identifier, attempt=self.attempt, answer=self.answer, taken=answer.is_taken)
        for note in refused(self.trouble) if self.trouble is not None else ():
            self.by_itself = note.message if isinstance(note, Incident) else ""
            yield note

    def given_up(self, run: str) -> MayBeBilling:
        """Return the error of an end that is not proven, with what would fix it."""
        by_hand = self.provider.traits.console_url or self.token
        what = f"{self.provider.name} does not show {self.identifier or self.token} as gone: {self.answer}."
        if self.denied_s < inf:
            what = f"{self.provider.name} shows {self.identifier} as gone, but it answers over SSH: {self.answer}."
        what += f" {self.by_itself}." if self.by_itself else ""
        first = f"{self.trouble.hint} Then: " if isinstance(self.trouble, SetupError) else "Run "
        return MayBeBilling(
            "destroy.not_gone", what, hint=f"{first}`gpurun destroy {run}`, or end it by hand: {by_hand}."
        )

    def look_whose_key(self) -> Iterator[Note]:
        """Find out once whose key this is; an error about another account propagates."""
        try:
            yield from self.check_account()
            self.is_seeing = True
        except (Unknown, SetupError) as error:  # A revoked key may be restored.
            self.answer = f"it did not say whose account the key belongs to: {clauses([error])}"


@dataclass(frozen=True)
class _Answer:
    """What came of one request for an end.

    `found` are the listed machines with the token. `trouble` is why the request for the known machine was not accepted.
    `is_taken`: one was, for the known machine if its id is known.
    """

    words: str
    found: list[Instance]
    trouble: Exception | None
    is_taken: bool


def _ask(provider: Provider, identifier: str, token: str, begin: Begin, row: GoneRow) -> _Answer:
    """Request the end of the instance and of all that carries the token.

    The list begins first, since it may show that the key sees the machine, but a list that hangs delays nothing: the
    known machine is read while the list, or the reply to the request, is waited for. Each machine is ended whatever
    became of the others. None of the replies is a reason to give up: a revoked key may be restored.
    """
    asked, unclear, refused = list[str](), list[str](), dict[str, Exception]()

    def waited(task: Task[Any]) -> Any:
        while identifier and not task.wait(LOOK_EVERY_S):
            with suppress(Exception):
                row.read(provider, identifier)
        return task.result()

    def ask(name: str) -> None:
        try:
            waited(begin(partial(provider.destroy, name)))
            asked.append(name)
        except Exception as error:  # noqa: BLE001 - the others are ended anyway, and this one is retried.
            refused[name] = error
            unclear.append(f"{name}: {error}")

    listing = begin(partial(_carrying, provider, token))
    listing.wait(LIST_FIRST_S)
    if identifier:
        ask(identifier)
    found, trouble = waited(listing)
    unclear += trouble
    for name in sorted({instance.id for instance in found} - {identifier}):
        ask(name)
    words = f"asked {', '.join(asked) or 'no machine: none carries the token'}"
    return _Answer(
        words=f"no clear reply: {clauses(unclear)}" if unclear else words,
        found=found,
        trouble=refused.get(identifier),
        is_taken=identifier in asked if identifier else bool(asked),
    )


def _carrying(provider: Provider, token: str) -> tuple[list[Instance], list[str]]:
    """Return the machines shown with the token, and the errors because of which they may not be all."""
    try:
        return living(provider.find(token), token), []
    except Unknown as error:  # A part of the list is enough to end what it shows.
        return living(error.found, token), [str(error)]
    except Exception as error:  # noqa: BLE001 - whatever it was, the known machine is ended anyway.
        return [], [str(error)]


def incident(extra: Instance) -> Note:
    """Return the record of a machine that carries the run's token but is not its own."""
    message = f"a second machine {extra.id} carries the token; it is ended, and its cost taken off this run's time"
    return Incident(code="create.duplicate", message=message, id=extra.id, token=extra.token)


def once(note: Note, context: Context) -> Iterator[Note]:
    """Yield the note, unless the journal has it already."""
    if not is_noted(context.folder.journal, read_journal(context.folder.journal).records, note):
        yield note


def is_other_account(provider: Provider, account: str, token: str) -> bool:
    """Return whether the key in use is another account's than the one that rented; `Unknown` if neither is known.

    A machine with the token here, alive or dead, shows that the account is the same, whatever became of its key.
    """
    if not account or not isinstance(provider, HasAccounts) or provider.account_mark() == account:
        return False
    return not any(instance.token == token for instance in provider.find(token))


def demand_account(provider: Provider, state: RunState, *, same_account: bool = False) -> None:
    """Raise MayBeBilling if the key in use is another account's than the run's, unless the user confirms it."""
    is_confirmed = same_account and not state.account.startswith(NAMED)
    if not is_confirmed and is_other_account(provider, state.account, state.token):
        raise other_account(provider, state)


def knock_of(state: RunState, context: Context, identifier: str) -> Callable[[], bool]:
    """Return a call that says whether the run's machine still answers at its address, by its pinned host key.

    Always False if it never answered, is not the run's own, or its address outlives it.
    """
    instance = state.instance
    is_own = instance is not None and instance.id == identifier and instance.address is not None and state.facts
    if instance is None or not is_own or not context.provider.traits.takes_address:
        return lambda: False

    def knock() -> bool:
        try:
            return context.reach(by_our_clock(instance, state)).answers(KNOCK_S)
        except Exception:  # noqa: BLE001 - whatever it was, it is not a sign of life.
            return False

    return knock


def check_account(state: RunState, context: Context) -> list[Note]:
    """Return [] if an absence at the provider is meaningful, or the user's confirmation if only that makes it so.

    `Unknown` or SetupError if the provider does not say now; MayBeBilling if the key is another account's and the user
    has not confirmed it. Called beside a request for an end, never before it: then a missing reply costs no money.
    """
    provider = context.provider
    if not is_other_account(provider, state.account, state.token):
        return []
    request = read_stop_request(context.folder)
    if request is not None and request.same_account and not state.account.startswith(NAMED):
        message = f"the key of {provider.name} is a new one; the user confirms that it belongs to the same account"
        return [Incident(code="account.vouched", message=message)]
    raise other_account(provider, state)


def other_account(provider: Provider, state: RunState) -> MayBeBilling:
    """Return the error for a run that is ended with another account's key, or whose cluster table leads elsewhere."""
    if state.account.startswith(CLUSTER):
        what = (
            f"{state.token} is a job of the {state.account.replace(':', ' ')}, but config.toml leads to another one now"
        )
        hint = f"Restore its table, then: gpurun resume {state.run}. If it is the same one under a new name: "
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

"""End an instance and prove it: the request is repeated until reading it back says that it is gone.

What one account rented does not exist for another one, so its absence there is no death.
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
    """Ask and read until death is proven; only what carries the token is ever asked to end.

    What was just asked for may be hidden for `hidden_s` longer: until then, or until it was seen, its absence proves
    nothing, and a request for its end may have gone to nobody. Nor does it prove anything to a key that could not see
    it: unless something that carries the token is seen, `check_account` has to answer first (`account.vouched`).
    Where the request is not taken, `refused` is done beside it. A machine that answers a `knock` lives, whatever its
    provider says, which puts the proof off for twice the settling time at most. Where it is on record that it
    `was_gone`, so is that it shows itself again. After five minutes without proof, or one in which the key was refused,
    it raises MayBeBilling; the caller keeps the run red and tries again later.
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
        # Its own time, not the turn's: an asking that took half a minute must not count as half a minute of death.
        knocking = begin(knock) if len(readings) + 1 >= provider.traits.death_reads else None
        looked_mono = clock.monotonic()  # A list may take long, and shows no later life than the reading before it.
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
    up_mono: float | None = None
    """When it was shown as one whose end has not begun."""
    denied_s: float = inf
    """When the machine answered for the first time while its provider showed it as gone."""

    def may_be_hidden(self, elapsed: float, hidden_s: float) -> bool:
        """Whether its absence says nothing yet; then no row of such answers begins either."""
        is_hidden = elapsed < hidden_s and not self.was_seen
        if is_hidden:
            self.row.since_mono = None
        return is_hidden

    def was_alive(self, reading: InstanceReading, now_mono: float, before: int) -> Iterator[Note]:
        """Take in a reading that does not show it gone; what could not be read, or only a list shows, is no sign.

        What is on record as gone and shows itself again is noted. All proof `before` is void then, and it is asked to
        end at once.
        """
        if before:
            self.asked_s = float("-inf")
        if reading.state not in (InstanceState.UNKNOWN, InstanceState.GONE):
            self.alive_mono = now_mono
            if reading.state is not InstanceState.STOPPING:
                self.up_mono = now_mono
            yield from self.is_back(f"{self.provider.name} shows {self.identifier} again", reading.at_s)

    def is_back(self, message: str, at_s: float) -> Iterator[Note]:
        """Note that the machine lives which is on record as gone."""
        if self.was_gone:
            self.was_gone = False
            back = f"{message}, which was gone"
            yield Incident(code="machine.back", message=back, id=self.identifier, at_s=at_s)

    def is_hopeless(self, elapsed: float, hidden_s: float) -> bool:
        """Whether the key was refused for a minute, or the provider denied for long what answers."""
        is_refused = isinstance(self.trouble, SetupError) and elapsed >= REFUSED_S + hidden_s
        return is_refused or elapsed - self.denied_s >= 2 * self.provider.traits.settle_s

    def was_heard(self, elapsed: float, now_mono: float) -> Iterator[Note]:
        """Take note that the machine answered while its provider showed it as gone; it is asked to end once more."""
        self.alive_mono = self.up_mono = now_mono
        self.row.since_mono, self.asked_s = None, float("-inf")
        self.denied_s = min(self.denied_s, elapsed)
        message = f"{self.provider.name} shows {self.identifier} as gone, and the machine answers over SSH"
        yield Incident(code="death.denied", message=f"{message} with its own host key: it lives")
        yield from self.is_back(f"{self.identifier} answers over SSH", elapsed)

    def before(self, now_mono: float) -> Json:
        """What is known of the machine's last life, and since when it is gone, for the books."""
        seen = {"alive_s_ago": self.alive_mono, "up_s_ago": self.up_mono}
        ago_s = {key: None if mono is None else round(now_mono - mono, 3) for key, mono in seen.items()}
        return {**ago_s, "gone_s_ago": self.row.seconds}

    def ask(self, elapsed: float, now_mono: float, refused: Callable[[Exception], list[Note]]) -> Iterator[Note]:
        """Ask for the end of all that carries the token; what is `refused` is done beside it."""
        self.attempt, self.asked_s = self.attempt + 1, elapsed
        answer = _ask(self.provider, self.identifier, self.token, self.begin, self.row)
        self.answer, found, self.trouble = answer.words, answer.found, answer.trouble
        own = [one.state for one in found if one.id == (self.identifier or one.id)]
        self.alive_mono = now_mono if own else self.alive_mono
        # A list may lag behind, and show what was asked to end as running.
        if {*own} - {InstanceState.STOPPING} and (self.attempt == 1 or not self.identifier):
            self.up_mono = now_mono
        more = found[0 if self.identifier else 1 :]
        yield from map(incident, (one for one in more if one.id != self.identifier))
        self.was_seen = self.was_seen or bool(found)
        self.is_seeing = self.is_seeing or self.was_seen
        yield DestroyAsked(id=self.identifier, attempt=self.attempt, answer=self.answer, taken=answer.is_taken)
        for note in refused(self.trouble) if self.trouble is not None else ():
            self.by_itself = note.message if isinstance(note, Incident) else ""
            yield note

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

    `found` carries the token by the list. `trouble` is why the request for the known machine was not taken; `is_taken`:
    one was, for that machine where its id is known.
    """

    words: str
    found: list[Instance]
    trouble: Exception | None
    is_taken: bool


def _ask(provider: Provider, identifier: str, token: str, begin: Begin, row: GoneRow) -> _Answer:
    """Request the end of the instance and of all that carries the token.

    The list is begun first, as it may show that the key sees the machine, but a list that hangs delays nothing: the
    known one is read while that, or the answer to the request, is waited for. Each is asked whatever became of the
    others. No answer is a reason to stop asking: a revoked key may be restored.
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
        except Exception as error:  # noqa: BLE001 - the others are asked all the same, and this one again.
            refused[name] = error
            unclear.append(f"{name}: {error}")

    listing = begin(partial(_carrying, provider, token))
    listing.wait(LIST_FIRST_S)
    if identifier:
        ask(identifier)
    found, trouble = waited(listing)
    unclear += trouble
    for name in sorted({one.id for one in found} - {identifier}):
        ask(name)
    words = f"asked {', '.join(asked) or 'nobody: none carries the token'}"
    return _Answer(
        words=f"no clear answer: {clauses(unclear)}" if unclear else words,
        found=found,
        trouble=refused.get(identifier),
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


def incident(extra: Instance) -> Note:
    """The record of a machine that is not the run's own and carries a token of it."""
    message = f"a second machine {extra.id} carries the token; it is ended, and its cost taken off this run's time"
    return Incident(code="create.duplicate", message=message, id=extra.id, token=extra.token)


def once(note: Note, context: Context) -> Iterator[Note]:
    """The note, unless the journal has it already."""
    if not is_noted(context.folder.journal, read_journal(context.folder.journal).records, note):
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
        return [Incident(code="account.vouched", message=message)]
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

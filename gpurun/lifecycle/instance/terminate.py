"""End an instance and prove it: repeat the request until the provider shows the instance as gone.

One account's key cannot see another account's machines, so a machine's absence from the wrong account proves nothing.
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
    are_proof,
    gap_s,
    living_instances,
    look_at_instance,
    proof_of,
)
from gpurun.providers.base import HasAccounts, Provider, Unknown

PATIENCE_S = 300.0
ASK_AGAIN_S = 30.0
# The machine is billed and a user waits, so it is read more often than a machine that boots.
LOOK_EVERY_S, TICK_S = 5.0, 1.0
LIST_FIRST_S = 3.0
KNOCK_S = 2.0
"""Seconds that a machine has to answer over SSH while its provider shows it as gone. This runs during the reading."""
REFUSED_S = 60.0

CLUSTER = "cluster:"
NAMED = "account:"
"""The prefix of account identifiers that come from the provider. The user need not confirm such an account."""

# Returns notes to record (or []) if the key belongs to the account with the machine; raises if not, or if unknown.
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
    """Request the end of a machine and read it until its end is proven. End only machines that have the token.

    The provider may hide a new machine for `hidden_s`. During that time its absence proves nothing unless it was seen
    before, and a request to end it may not have reached it.

    Absence also proves nothing if the key belongs to another account: unless a machine with the token is seen,
    `check_account` must confirm the key first (`account.vouched`).

    `refused` is called if the provider does not accept a request. `knock` tries to reach the machine over SSH; a
    machine that answers is alive, whatever its provider shows. This delays the proof by at most twice the settling
    time. `was_gone` means that the journal already shows the machine as gone; if it is alive again, that is recorded.

    Raise MayBeBilling after five minutes without proof, or after one minute in which the key was refused.
    """
    requests = _Requests(provider, identifier, token, check_account, begin, GoneRow(clock), was_gone)
    readings: list[InstanceReading] = []
    started, due_s, poll_s = clock.monotonic(), 0.0, min(provider.traits.poll_s, LOOK_EVERY_S)
    for elapsed in ticks(clock, min(poll_s, TICK_S), PATIENCE_S + hidden_s):
        if not readings and elapsed - requests.requested_s >= ASK_AGAIN_S:
            yield from requests.ask(elapsed, clock.monotonic(), refused)
        if requests.is_hopeless(elapsed, hidden_s):
            break
        if elapsed < due_s:
            continue
        due_s = elapsed + poll_s
        if not requests.sees_machines:
            yield from requests.look_at_account()
            continue
        # The time of the reading counts, because a slow request before it adds nothing to the proof.
        knocking = begin(knock) if len(readings) + 1 >= provider.traits.death_reads else None
        looked_mono = clock.monotonic()  # A slow list cannot show life after this time.
        reading = look_at_instance(provider, identifier, token, round(looked_mono - started, 3), row=requests.row)
        if requests.may_be_hidden(elapsed, hidden_s) and reading.gone:
            continue
        if not reading.gone:
            yield from requests.take_alive(reading, looked_mono, len(readings))
            readings = []
            continue
        if knocking is not None and knocking.wait(KNOCK_S) and knocking.result():
            readings = []
            yield from requests.take_answer(elapsed, clock.monotonic())
            continue
        readings.append(reading)
        requests.was_gone = True
        due_s = reading.at_s + gap_s(provider)
        yield DeathRead(id=identifier, **asdict(reading), **requests.seconds_ago(clock.monotonic()))
        if are_proof(provider, readings):
            yield proof_of(provider, identifier, readings)
            return
    raise requests.error(run)


@dataclass
class _Requests:
    """The requests to end a machine so far, and the provider's replies."""

    provider: Provider
    identifier: str
    token: str
    check_account: CheckAccount
    begin: Begin
    row: GoneRow
    was_gone: bool
    """Whether the journal's last record of the machine shows it as gone."""
    attempt: int = 0
    requested_s: float = float("-inf")
    answer: str = "nothing was requested yet"
    was_seen: bool = False
    sees_machines: bool = False
    """Whether the key is known to belong to the right account."""
    trouble: Exception | None = None
    """The error because of which the last request was not accepted; a SetupError if the key was refused."""
    self_end: str = ""
    """The message about the attempt to make the machine end itself."""
    alive_mono: float | None = None
    """When the machine was last shown alive."""
    up_mono: float | None = None
    """When the machine was last shown in a state that precedes its end."""
    denied_s: float = inf
    """When the machine first answered over SSH while its provider showed it as gone."""

    def may_be_hidden(self, elapsed: float, hidden_s: float) -> bool:
        """Return whether the machine's absence proves nothing yet; if so, restart the series of GONE replies."""
        is_hidden = elapsed < hidden_s and not self.was_seen
        if is_hidden:
            self.row.since_mono = None
        return is_hidden

    def take_alive(self, reading: InstanceReading, now_mono: float, before: int) -> Iterator[Note]:
        """Process a reading that does not show the machine as gone.

        Only a state other than UNKNOWN or GONE is a sign of life; a list entry alone is not. If the journal shows the
        machine as gone, a sign of life is recorded. If there were `before` readings in the series, they are void, and
        the end is requested again without delay.
        """
        if before:
            self.requested_s = float("-inf")
        if reading.state not in (InstanceState.UNKNOWN, InstanceState.GONE):
            self.alive_mono = now_mono
            if reading.state is not InstanceState.STOPPING:
                self.up_mono = now_mono
            yield from self.note_return(f"{self.provider.name} shows {self.identifier} again", reading.at_s)

    def note_return(self, message: str, at_s: float) -> Iterator[Note]:
        """Yield an incident if the journal shows the machine as gone although it is alive."""
        if self.was_gone:
            self.was_gone = False
            back = f"{message}, which was gone"
            yield Incident(code="machine.back", message=back, id=self.identifier, at_s=at_s)

    def is_hopeless(self, elapsed: float, hidden_s: float) -> bool:
        """Return whether to give up: the key was refused for a minute, or a machine shown as gone kept answering."""
        is_refused = isinstance(self.trouble, SetupError) and elapsed >= REFUSED_S + hidden_s
        return is_refused or elapsed - self.denied_s >= 2 * self.provider.traits.settle_s

    def take_answer(self, elapsed: float, now_mono: float) -> Iterator[Note]:
        """Record that the machine answered over SSH while its provider showed it as gone; request its end again."""
        self.alive_mono = self.up_mono = now_mono
        self.row.since_mono, self.requested_s = None, float("-inf")
        self.denied_s = min(self.denied_s, elapsed)
        message = f"{self.provider.name} shows {self.identifier} as gone, but the machine answers over SSH"
        yield Incident(code="death.denied", message=f"{message} with its own host key: it is alive")
        yield from self.note_return(f"{self.identifier} answers over SSH", elapsed)

    def seconds_ago(self, now_mono: float) -> Json:
        """Return how long ago the machine was last alive and how long it has been gone, as fields for the cost."""
        seen = {"alive_s_ago": self.alive_mono, "up_s_ago": self.up_mono}
        ago_s = {key: None if mono is None else round(now_mono - mono, 3) for key, mono in seen.items()}
        return {**ago_s, "gone_s_ago": self.row.seconds}

    def ask(self, elapsed: float, now_mono: float, refused: Callable[[Exception], list[Note]]) -> Iterator[Note]:
        """Request the end of every machine with the token.

        Call `refused` if the request fails for the known machine.
        """
        self.attempt, self.requested_s = self.attempt + 1, elapsed
        answer = _request_ends(self.provider, self.identifier, self.token, self.begin, self.row)
        self.answer, found, self.trouble = answer.words, answer.found, answer.trouble
        own = [machine.state for machine in found if machine.id == (self.identifier or machine.id)]
        self.alive_mono = now_mono if own else self.alive_mono
        # An old list may still show a machine as running after its end was requested.
        if {*own} - {InstanceState.STOPPING} and (self.attempt == 1 or not self.identifier):
            self.up_mono = now_mono
        more = found[0 if self.identifier else 1 :]
        yield from map(extra_machine_incident, (machine for machine in more if machine.id != self.identifier))
        self.was_seen = self.was_seen or bool(found)
        self.sees_machines = self.sees_machines or self.was_seen
        yield DestroyAsked(id=self.identifier, attempt=self.attempt, answer=self.answer, taken=answer.is_taken)
        for note in refused(self.trouble) if self.trouble is not None else ():
            self.self_end = note.message if isinstance(note, Incident) else ""
            yield note

    def error(self, run: str) -> MayBeBilling:
        """Return the error for an end that is not proven, with a hint that says what to do."""
        by_hand = self.provider.traits.console_url or self.token
        what = f"{self.provider.name} does not show {self.identifier or self.token} as gone: {self.answer}."
        if self.denied_s < inf:
            what = f"{self.provider.name} shows {self.identifier} as gone, but it answers over SSH: {self.answer}."
        what += f" {self.self_end}." if self.self_end else ""
        first = f"{self.trouble.hint} Then: " if isinstance(self.trouble, SetupError) else "Run "
        return MayBeBilling(
            "destroy.not_gone", what, hint=f"{first}`gpurun destroy {run}`, or end it by hand: {by_hand}."
        )

    def look_at_account(self) -> Iterator[Note]:
        """Check whether the key belongs to the right account. Raise if it belongs to another account."""
        try:
            yield from self.check_account()
            self.sees_machines = True
        except (Unknown, SetupError) as error:  # A revoked key may be restored, so this is tried again.
            self.answer = f"it did not say to which account the key belongs: {clauses([error])}"


@dataclass(frozen=True)
class _Replies:
    """The replies to one round of requests to end a machine.

    `found` are the listed machines with the token. `trouble` is the error of the request for the known machine.
    `is_taken` states whether the provider accepted that request; if no machine is known, whether it accepted any
    request.
    """

    words: str
    found: list[Instance]
    trouble: Exception | None
    is_taken: bool


def _request_ends(provider: Provider, identifier: str, token: str, begin: Begin, row: GoneRow) -> _Replies:
    """Request the end of the known instance and of every other machine with the token.

    The list is requested first, because it may show that the key sees the machine. If the list or a reply hangs, the
    known machine is still read meanwhile. A failure for one machine does not prevent the requests for the others. No
    reply is a reason to give up, because a revoked key may be restored.
    """
    requested, unclear, refused = list[str](), list[str](), dict[str, Exception]()

    def waited(task: Task[Any]) -> Any:
        while identifier and not task.wait(LOOK_EVERY_S):
            with suppress(Exception):
                row.read(provider, identifier)
        return task.result()

    def ask(name: str) -> None:
        try:
            waited(begin(partial(provider.destroy, name)))
            requested.append(name)
        except Exception as error:  # noqa: BLE001 - the other machines are still ended, and this request is repeated.
            refused[name] = error
            unclear.append(f"{name}: {error}")

    listing = begin(partial(_find_by_token, provider, token))
    listing.wait(LIST_FIRST_S)
    if identifier:
        ask(identifier)
    found, trouble = waited(listing)
    unclear += trouble
    for name in sorted({instance.id for instance in found} - {identifier}):
        ask(name)
    words = f"requested the end of {', '.join(requested) or 'no machine, because none carries the token'}"
    return _Replies(
        words=f"no clear reply: {clauses(unclear)}" if unclear else words,
        found=found,
        trouble=refused.get(identifier),
        is_taken=identifier in requested if identifier else bool(requested),
    )


def _find_by_token(provider: Provider, token: str) -> tuple[list[Instance], list[str]]:
    """Return the listed machines with the token, and the errors because of which others may be missing."""
    try:
        return living_instances(provider.find(token), token), []
    except Unknown as error:  # A partial list may still show machines to end.
        return living_instances(error.found, token), [str(error)]
    except Exception as error:  # noqa: BLE001 - the known machine is ended without a list.
        return [], [str(error)]


def extra_machine_incident(extra: Instance) -> Note:
    """Return the incident for an extra machine: it has a token of the run but is not the run's machine."""
    message = f"a second machine {extra.id} carries the token; it is ended, and its cost shortens this run's time"
    return Incident(code="create.duplicate", message=message, id=extra.id, token=extra.token)


def note_once(note: Note, context: Context) -> Iterator[Note]:
    """Yield the note unless the journal has it already."""
    if not is_noted(context.folder.journal, read_journal(context.folder.journal).records, note):
        yield note


def is_other_account(provider: Provider, account: str, token: str) -> bool:
    """Return whether the current key belongs to another account than the one that rented the machine.

    If the current account shows a machine with the token, alive or ended, it is the same account with a new key. Raise
    `Unknown` if the provider does not answer.
    """
    if not account or not isinstance(provider, HasAccounts) or provider.account_mark() == account:
        return False
    return not any(instance.token == token for instance in provider.find(token))


def require_account(provider: Provider, state: RunState, *, same_account: bool = False) -> None:
    """Raise MayBeBilling if the key belongs to another account than the run's and the user has not confirmed it."""
    is_confirmed = same_account and not state.account.startswith(NAMED)
    if not is_confirmed and is_other_account(provider, state.account, state.token):
        raise other_account(provider, state)


def make_answer_check(state: RunState, context: Context, identifier: str) -> Callable[[], bool]:
    """Return a function that tests whether the run's machine still answers at its address with its pinned host key.

    The function always returns False if the machine never answered, if it is not the run's own, or if another machine
    may get its address after its end.
    """
    instance = state.instance
    is_own = instance is not None and instance.id == identifier and instance.address is not None and state.facts
    if instance is None or not is_own or not context.provider.traits.closes_address:
        return lambda: False

    def knock() -> bool:
        try:
            return context.reach(by_our_clock(instance, state)).answers(KNOCK_S)
        except Exception:  # noqa: BLE001 - an error is not a sign of life.
            return False

    return knock


def check_account(state: RunState, context: Context) -> list[Note]:
    """Check that the key belongs to the account that rented the machine, because otherwise its absence proves nothing.

    Return [], or a note if only the user confirms that. Raise `Unknown` or SetupError if the provider does not answer
    now. Raise MayBeBilling if the key is another account's and the user has not confirmed it. Call this after
    requesting the machine's end, so that a missing reply does not delay that request.
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
    """Return the error for ending a run with another account's key, or with another cluster's table in config.toml."""
    if state.account.startswith(CLUSTER):
        cluster = state.account.replace(":", " ")
        what = f"{state.token} is a job of the {cluster}, but config.toml now names another one."
        hint = f"Restore its table, then: gpurun resume {state.run}. If it is the same cluster under a new name: "
        hint += f"gpurun destroy {state.run} --same-account"
        return MayBeBilling("account.other", f"{what} That one's answer cannot prove that the job ended.", hint=hint)
    hint = "Use the key of the account that rented it"
    if not state.account.startswith(NAMED):
        hint += f"; if it is the same account with a new key: gpurun destroy {state.run} --same-account"
    return MayBeBilling(
        "account.other",
        f"{state.token} was rented with another key of {provider.name}. The current key does not see the machine, "
        "which proves nothing.",
        hint=f"{hint}. By hand: {provider.traits.console_url}.",
    )

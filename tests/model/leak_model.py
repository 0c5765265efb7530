"""A small exhaustive model of create, find and destroy: every order in which client, cloud and network can act.

    python -m tests.model.leak_model              what the rules keep, and what breaking each of them loses

A state is (client step, journal on disk, machines at the cloud, messages in flight) and a few budgets that keep the
number of states finite. The words are those of gpurun.lifecycle and of the journal, so that a difference between the
two shows. The one assumption about time is a provider's settling time: a client that waits for it finds nothing in
flight and nothing hidden.

A leak is a state at rest in which a machine lives while the journal does not show its token as open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

MOST_STATES = 100_000


@dataclass(frozen=True)
class Rules:
    """The rules that the client keeps. Each is one promise of gpurun, and can be broken here."""

    intent_first: bool = True
    look_before_retry: bool = True
    ends_duplicates: bool = True
    death_reads: int = 3
    newborn_is_not_dead: bool = True


@dataclass(frozen=True, order=True)
class Box:
    """A machine: its token, and its phase: hidden (born, not visible yet), seen, or dead."""

    id: int
    token: int
    phase: str


@dataclass(frozen=True)
class State:
    """The state of client, cloud and network. Only the journal survives a crash of the client.

    `step`, `known` and `reads` are the client's memory; `crashes`, `twice`, `lies` and `deaf` are the remaining
    budgets.
    """

    step: str = "opened"
    token: int = 0
    known: int = 0
    reads: int = 0
    journal: tuple[tuple[str, int, int], ...] = ()
    boxes: tuple[Box, ...] = ()
    flying: tuple[tuple[str, int], ...] = ()
    crashes: int = 2
    twice: int = 1
    lies: int = 2
    deaf: int = 1

    def wrote(self, event: str, box: int = 0, token: int = 0) -> State:
        return replace(self, journal=(*self.journal, (event, token or self.token, box)))

    def sent(self, *messages: tuple[str, int]) -> State:
        return replace(self, flying=tuple(sorted({*self.flying, *messages})))

    def took(self, message: tuple[str, int]) -> State:
        return replace(self, flying=tuple(one for one in self.flying if one != message))

    def phase(self, box: int, phase: str) -> State:
        return replace(self, boxes=tuple(replace(b, phase=phase) if b.id == box else b for b in self.boxes))

    def shown(self, token: int) -> list[Box]:
        """Return the machines that a list shows for a token."""
        return [box for box in self.boxes if box.token == token and box.phase == "seen"]

    @property
    def settled(self) -> bool:
        """Return whether no create request is in flight and no machine is hidden, as after the settling time."""
        return not any(kind == "create" for kind, _ in self.flying) and all(b.phase != "hidden" for b in self.boxes)

    @property
    def open_tokens(self) -> set[int]:
        """Return the tokens that the journal shows as MAY_BE_BILLING."""
        asked = {token for event, token, _ in self.journal if event == "create.intended"}
        return asked - {token for event, token, _ in self.journal if event in ("create.refused", "death.proven")}

    @property
    def leaks(self) -> list[Box]:
        """Return the living machines that no open token of the journal covers; empty unless the state is at rest."""
        at_rest = self.step in ("closed", "never returns") and not self.flying and self.settled
        return [b for b in self.boxes if b.phase != "dead" and b.token not in self.open_tokens] if at_rest else []


def client(s: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Yield what the client may do next: a step of the lifecycle, or a crash."""
    if s.step == "opened" and s.token < 2:
        asked = replace(s, step="send", token=s.token + 1)
        yield "create.intended", asked.wrote("create.intended") if rules.intent_first else asked
    elif s.step == "opened":
        yield "gives up asking", replace(s, step="closed")
    elif s.step == "send":
        yield "sends create", replace(s, step="wait").sent(("create", s.token))
    elif s.step == "wait":
        late = s if rules.intent_first else s.wrote("create.intended")
        for kind, box in s.flying:
            if kind == "created":
                seen = replace(late.wrote("create.observed", box), step="have", known=box)
                yield f"create.observed {box}", seen.took((kind, box))
        if rules.look_before_retry:
            yield "create.unknown", replace(late.wrote("create.unknown"), step="look")
        else:
            yield "takes no answer for a no", replace(late.wrote("create.refused"), step="opened")
    elif s.step == "look" and s.settled:
        found = s.shown(s.token)
        if found:
            yield (
                f"adopts {found[0].id}",
                replace(s, step="have", known=found[0].id).wrote("create.observed", found[0].id),
            )
        else:
            yield "create.refused: absent", replace(s.wrote("create.refused"), step="opened")
    elif s.step == "have":
        yield "destroy.intended", replace(s, step="ask")
    elif s.step == "ask":
        wanted = {s.known} | ({box.id for box in s.shown(s.token)} if rules.ends_duplicates else set())
        yield (
            f"destroy.asked {sorted(wanted)}",
            replace(s, step="prove", reads=0).sent(*(("destroy", b) for b in wanted)),
        )
    elif s.step == "prove":
        yield from prove(s, rules)
    if s.step not in ("closed", "never returns") and s.crashes:
        yield "kill -9, and back", recover(replace(s, crashes=s.crashes - 1))
        yield "kill -9, for ever", replace(s, step="never returns", crashes=0)


def prove(s: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Yield the outcomes of one look at a machine that should be dead; a lie is a stale view without a living
    machine."""
    listed = s.shown(s.token) if rules.ends_duplicates else []
    gone = not listed and all(box.phase != "seen" for box in s.boxes if box.id == s.known)
    if gone and rules.newborn_is_not_dead and not s.settled:
        yield "too young to be called dead", replace(s, step="ask")
    elif gone:
        yield from believe(s, rules)
    else:
        yield "it is still there", replace(s, step="ask")
        if s.lies:
            yield from believe(replace(s, lies=s.lies - 1), rules)


def believe(s: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Count one more read that says GONE, and write the proof of death when there are enough."""
    read = replace(s, reads=s.reads + 1)
    if read.reads < rules.death_reads:
        yield f"death.read {read.reads}", read
    else:
        yield "death.proven", replace(read.wrote("death.proven"), step="closed")


def recover(s: State) -> State:
    """Return the state after a restart, when the journal alone decides the next step."""
    last: dict[int, tuple[str, int]] = {token: (event, box) for event, token, box in s.journal}
    token = max(last, default=0)
    event, box = last.get(token, ("", 0))
    step = {"create.observed": "have", "create.intended": "look", "create.unknown": "look", "death.proven": "closed"}
    return replace(s, step=step.get(event, "opened"), token=token, known=box, reads=0)


def cloud(s: State) -> Iterator[tuple[str, State]]:
    """Yield what the cloud and the network may do next."""
    for message in s.flying:
        kind, number = message
        if kind == "create":
            yield "create is lost", s.took(message)
            for copies in (1, 2)[: 1 + s.twice]:
                new = tuple(Box(len(s.boxes) + 1 + copy, number, "hidden") for copy in range(copies))
                made = replace(s.took(message), boxes=(*s.boxes, *new), twice=s.twice - (copies - 1))
                yield f"create makes {copies}", made.sent(("created", new[0].id))
        elif kind == "destroy":
            box = next(b for b in s.boxes if b.id == number)
            # A hidden machine is "not found": the request is answered and has no effect.
            yield (
                f"destroy of {box.phase} {number} arrives",
                (s.took(message) if box.phase == "hidden" else s.took(message).phase(number, "dead")),
            )
            if s.deaf:
                yield f"destroy of {number} does nothing", replace(s.took(message), deaf=s.deaf - 1)
        else:
            yield "the answer is lost", s.took(message)
    for box in s.boxes:
        if box.phase == "hidden":
            yield f"{box.id} appears", s.phase(box.id, "seen")


def search(rules: Rules) -> tuple[int, list[str] | None]:
    """Return the number of states, and the shortest way to a leak; None if there is no leak."""
    came: dict[State, tuple[State, str] | None] = {State(): None}
    waiting = deque(came)
    while waiting:
        state = waiting.popleft()
        if state.leaks:
            return len(came), _way(state, came)
        for label, after in (*client(state, rules), *cloud(state)):
            if after not in came:
                came[after] = (state, label)
                waiting.append(after)
        if len(came) > MOST_STATES:
            raise RuntimeError(f"more than {MOST_STATES:,} states")
    return len(came), None


def _way(state: State, came: dict[State, tuple[State, str] | None]) -> list[str]:
    labels = []
    before = came[state]
    while before is not None:
        labels.append(before[1])
        before = came[before[0]]
    return labels[::-1]


BROKEN = {
    "no intent first": Rules(intent_first=False),
    "retrying without looking": Rules(look_before_retry=False),
    "forgetting duplicates": Rules(ends_duplicates=False),
    "believing one 404": Rules(death_reads=1),
    "believing the 404 of what was just born": Rules(newborn_is_not_dead=False),
}


def main() -> None:
    for name, rules in {"all rules kept": Rules(), **BROKEN}.items():
        states, trace = search(rules)
        print(f"{name}: {states:,} states, {'no leak' if trace is None else f'a leak in {len(trace)} steps'}")
        for label in trace or ():
            print(f"    {label}")


if __name__ == "__main__":
    main()

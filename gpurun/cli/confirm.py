"""What `gpurun confirm-shutdown` does: knock at a box of the user's own, and state what was seen there."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from datetime import datetime

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.clock import Clock, local_time, ticks, utc
from gpurun.core.errors import GpurunError, MayBeBilling, UsageError, VerificationFailed
from gpurun.core.model import Teardown
from gpurun.core.money import Micros, format_rate, format_usd
from gpurun.ledger.confirmation import NAME, Confirmation, Try, box_of, read_confirmation, write_confirmation
from gpurun.ledger.receipt import Receipt, read_receipt
from gpurun.ledger.signing import Signature, load_signer
from gpurun.lifecycle.runs import find_run
from gpurun.providers.ssh_login import Login, parse_host

ANSWERS = "answers SSH"
QUIET = ("refused", "timed out", "unreachable")
SPAN_S, PERIOD_S, PATIENCE_S = 10.0, 2.5, 3.0
_MOST_PARTS = 16

Knock = Callable[[str, int], str]


def knock(host: str, port: int, patience_s: float = PATIENCE_S) -> str:
    """What a connection to a port meets: `answers SSH`, one of QUIET, or what tells nothing either way."""
    try:
        line = socket.create_connection((host, port), timeout=patience_s)
    except ConnectionRefusedError:
        return "refused"
    except socket.gaierror:
        return "its name is not known here"
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return "unreachable" if error.errno == errno.EHOSTUNREACH else "no network"
    with line:
        return _greeting_of(line)


def _greeting_of(line: socket.socket) -> str:
    """What a box says first. One that takes the call and is silent may be busy: that is no sign of its being off."""
    heard = b""
    try:
        for _ in range(_MOST_PARTS):
            part = line.recv(1024)
            heard += part
            if b"SSH-" in heard:
                return ANSWERS
            if not part:
                return "closed without a greeting"
    except TimeoutError:
        return "open without a greeting"
    except OSError:
        return "closed without a greeting"
    return "something else answers"


def confirm(session: Session, run: str, words: str | None, knocks: Knock = knock) -> Result:
    """Check the box of a run and sign what was seen; with `words` sign that the user says so, whatever was seen.

    Exit 9 when a box that costs money still answers, 10 when it cannot be confirmed for another reason.
    """
    if words is not None and not words.strip():
        raise UsageError("shutdown.no_words", "--force needs your own words.",
                         hint='Say how you know: --force "stopped it in the console at 15:02"')  # fmt: skip
    folder = session.home.run(find_run(session.home, run))
    receipt = read_receipt(session.home, folder)
    login = _box(receipt, folder.name)
    kept = read_confirmation(session.home, folder, receipt)
    # One without a signature may be anybody's: where there is a key, it is looked at again and signed.
    if kept is not None and kept.is_seen and (kept.signature is Signature.OK or not load_signer(session.home.keys)):
        return _told(kept, folder.name, session, f"{login.host} was confirmed before: {words_of(kept, session)}.")
    if not session.json:
        session.say(f"Knocking at {login.host} port {login.port} for about {SPAN_S:.0f} s.")
    tries = _knock_again_and_again(knocks, login, session.clock)
    if not words and not all(one.seen in QUIET for one in tries):
        raise _not_down(tries[-1].seen, login, receipt, folder.name)
    now, gone = session.clock.wall(), receipt.predicate["timeline"]["gone"]
    if utc(now) < gone:
        what = f"By this machine's clock it is {utc(now)}, before the run's end at {gone}; no statement of then holds."
        hint = "Set the clock, or wait until it has passed that; then run this again."
        raise VerificationFailed("shutdown.clock", what, hint=hint)
    made = write_confirmation(session.home, folder, receipt, tries, words=words or "", wall=now)
    return _told(made, folder.name, session, f"{login.host}: {words_of(made, session)}.")


def _box(receipt: Receipt, run: str) -> Login:
    """The box of a receipt; a UsageError where there is nothing for the user to end."""
    if receipt.signature not in (Signature.OK, Signature.UNSIGNED):
        raise VerificationFailed("receipt.signature", "The signature does not fit the receipt.",
                                 hint=f"gpurun audit {run}")  # fmt: skip
    ended = receipt.predicate["teardown"]["is"]
    if ended != Teardown.USER_OPERATED:
        how = "no machine was made for it" if ended is None else f"its machine ended as {ended!r}"
        raise UsageError("shutdown.not_yours", f"There is nothing to confirm for {run}: {how}.",
                         hint=f"What is known of its end: gpurun receipt {run}")  # fmt: skip
    return parse_host(box_of(receipt), name="the box of the receipt")


def _knock_again_and_again(knocks: Knock, login: Login, clock: Clock) -> list[Try]:
    """Tries until one comes after the whole span, however long each takes; the first sign of life ends it."""
    tries: list[Try] = []
    for at_s in ticks(clock, PERIOD_S, float("inf")):
        tries.append(Try(at_s, knocks(login.host, login.port)))
        if tries[-1].seen not in QUIET or at_s >= SPAN_S:
            break
    return tries


def _not_down(seen: str, login: Login, receipt: Receipt, run: str) -> GpurunError:
    """The refusal to sign: exit 9 while it answers and costs money."""
    rate = Micros(receipt.predicate["cost"]["rentals"][-1]["rate_micros_per_hour"])
    forced = f'If you know better: gpurun confirm-shutdown {run} --force "how you know"'
    if seen == ANSWERS and rate > 0:
        what = f"{login.host} port {login.port} still answers SSH, at {format_rate(rate)}."
        hint = f"Shut it down where you rented it, then run this again. {forced}"
        return MayBeBilling("shutdown.still_up", what, hint=hint)
    if seen == ANSWERS:
        what = f"{login.host} port {login.port} still answers SSH."
        return VerificationFailed("shutdown.still_up", what, hint=f"Shut it down, then run this again. {forced}")
    what = f"Whether {login.host} is down cannot be told: {seen}."
    return VerificationFailed("shutdown.cannot_tell", what, hint=f"Check that you are online and try again. {forced}")


def words_of(made: Confirmation, session: Session) -> str:
    """A confirmation in one line: what was seen or said, and when."""
    told = made.predicate
    at = local_time(datetime.fromisoformat(told["confirmed_at"]).timestamp(), now=session.clock.wall())
    unsigned = " (unsigned)" if made.signature is Signature.UNSIGNED else ""
    if not made.is_seen:
        return f"shutdown stated by you{unsigned} at {at}: {told['words']}"
    tries = told["checked"]["tries"]
    seen = " and ".join(dict.fromkeys(one["seen"] for one in tries))
    return f"shutdown confirmed{unsigned} at {at}: no SSH in {len(tries)} tries over {tries[-1]['at_s']:.0f} s ({seen})"


def _told(made: Confirmation, run: str, session: Session, text: str) -> Result:
    lines = [text]
    if made.is_seen:
        seen = {one["seen"] for one in made.predicate["checked"]["tries"]}
        lines.append(
            "  A rented container that refuses is stopped; a machine of its own that refuses is still switched on."
            if "refused" in seen
            else "  A machine that is off and a line that is cut look the same from here."
        )
    cost = made.predicate["cost"]["until_confirmed_micros"]
    if cost:
        lines.append(f"  At the price you gave it cost at most {format_usd(Micros(cost))} until then, storage aside.")
    if made.signature is Signature.UNSIGNED:
        lines.append("  Unsigned: this home has no readable key.")
    data = {"statement": made.predicate, "signature": made.signature, "file": str(session.home.run(run).path / NAME)}
    return Result(data=data, text="\n".join(lines), after=f"gpurun receipt {run}")


def shutdown_line(session: Session, run: str, receipt: Receipt) -> str:
    """What a receipt shows of its shutdown; "" while nothing was stated."""
    try:
        kept = read_confirmation(session.home, session.home.run(run), receipt)
    except VerificationFailed as error:
        return f"SHUTDOWN NOT CONFIRMED: {error.what}"
    if kept is None:
        return ""
    return f"SHUTDOWN NOT CONFIRMED: {kept.problem}" if kept.problem else words_of(kept, session)

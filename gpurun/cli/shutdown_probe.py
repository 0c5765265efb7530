"""Checks whether the user's own box still answers after a run, and describes the signed statement about it."""

from __future__ import annotations

import errno
import socket
from datetime import datetime

from gpurun.cli.session import Session
from gpurun.core.clock import Clock, local_time, ticks
from gpurun.core.errors import UsageError, VerificationFailed
from gpurun.core.receipt_record import Receipt, Signature
from gpurun.core.records import Teardown
from gpurun.ledger.shutdown_statement import Confirmation, Try, box_of, read_confirmation
from gpurun.providers.ssh_login import Login, parse_host

ANSWERS = "answers SSH"
QUIET = ("refused", "timed out", "unreachable")
SPAN_S, PERIOD_S, PATIENCE_S = 10.0, 2.5, 3.0
_MOST_PARTS = 16


def try_to_connect(host: str, port: int, patience_s: float = PATIENCE_S) -> str:
    """Try to connect, and return the result: `answers SSH`, one of QUIET, or an inconclusive result."""
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
        return _describe_greeting(line)


def _describe_greeting(line: socket.socket) -> str:
    """Describe what a box sends first. A box that sends nothing may be busy; that does not show that it is off."""
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


def box_login(receipt: Receipt, run: str) -> Login:
    """Return the login of a receipt's box; UsageError if the run did not use the user's own box."""
    if receipt.signature not in (Signature.OK, Signature.UNSIGNED):
        raise VerificationFailed("receipt.signature", "The signature does not match the receipt.",
                                 hint=f"gpurun audit {run}")  # fmt: skip
    ended = receipt.predicate["teardown"]["is"]
    if ended != Teardown.USER_OPERATED:
        how = "no machine was made for it" if ended is None else f"its machine ended as {ended!r}"
        raise UsageError("shutdown.not_yours", f"There is nothing to confirm for {run}: {how}.",
                         hint=f"To see how it ended: gpurun receipt {run}")  # fmt: skip
    if "imported" in receipt.predicate["asked"]:
        what = f"{run} ran in a notebook, and gpurun cannot see its session."
        raise UsageError("shutdown.no_box", what, hint="End the session on its platform; docs/ROUTES.md says where.")
    return parse_host(box_of(receipt), name="the box of the receipt")


def try_repeatedly(login: Login, clock: Clock, jump: str = "") -> list[Try]:
    """Try to connect repeatedly for SPAN_S, and return all tries; stop if the box may still be on.

    A box behind a jump host cannot be checked, because it can never be reached directly.
    """
    if jump:
        return [Try(0.0, f"it can be reached only through {jump}")]
    tries: list[Try] = []
    for at_s in ticks(clock, PERIOD_S, float("inf")):
        tries.append(Try(at_s, try_to_connect(login.host, login.port)))
        if tries[-1].seen not in QUIET or at_s >= SPAN_S:
            break
    return tries


def describe_confirmation(made: Confirmation, session: Session) -> str:
    """Describe a confirmation in one line: what was observed or stated, and when."""
    predicate = made.predicate
    at = local_time(datetime.fromisoformat(predicate["confirmed_at"]).timestamp(), now=session.clock.wall())
    unsigned = " (unsigned)" if made.signature is Signature.UNSIGNED else ""
    if not made.is_seen:
        return f"shutdown stated by you{unsigned} at {at}: {predicate['words']}"
    tries = predicate["checked"]["tries"]
    seen = " and ".join(dict.fromkeys(attempt["seen"] for attempt in tries))
    return f"shutdown confirmed{unsigned} at {at}: no SSH in {len(tries)} tries over {tries[-1]['at_s']:.0f} s ({seen})"


def shutdown_line(session: Session, run: str, receipt: Receipt) -> str:
    """Return the line about the shutdown for a receipt; "" if there is no statement."""
    try:
        kept = read_confirmation(session.home, session.home.run(run), receipt)
    except VerificationFailed as error:
        return f"SHUTDOWN NOT CONFIRMED: {error.what}"
    if kept is None:
        return ""
    return f"SHUTDOWN NOT CONFIRMED: {kept.problem}" if kept.problem else describe_confirmation(kept, session)

"""`gpurun confirm-shutdown`: check that your own box no longer answers, and sign a statement of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import GpurunError, MayBeBilling, UsageError, VerificationFailed
from gpurun.core.money import Micros, format_rate, format_usd

if TYPE_CHECKING:
    from gpurun.core.receipt_record import Receipt
    from gpurun.ledger.shutdown_statement import Confirmation
    from gpurun.providers.ssh_login import Login

app = typer.Typer(rich_markup_mode=None)


@verb(
    app,
    "confirm-shutdown",
    examples=["gpurun confirm-shutdown fox-41", 'gpurun confirm-shutdown @last --force "stopped it in the console"'],
)
def confirm_shutdown(
    session: Session,
    run: RunArgument,
    force: Annotated[
        str | None,
        typer.Option("--force", metavar="WORDS", help="State the shutdown in your own words, which are signed."),
    ] = None,
) -> Result:
    """Check that your own box has stopped answering after a run, and sign that beside the receipt.

    Exit 9 if a box that costs money still answers, 10 if it cannot be confirmed for another reason.
    """
    from gpurun.cli.shutdown_probe import QUIET, SPAN_S, box_login, describe_confirmation, try_repeatedly
    from gpurun.core.clock import utc
    from gpurun.core.receipt_record import Signature
    from gpurun.ledger.runs import find_run, look_at_run
    from gpurun.ledger.shutdown_statement import read_confirmation, write_confirmation
    from gpurun.ledger.signing import load_signer
    from gpurun.ledger.write_receipt import read_receipt

    if force is not None and not force.strip():
        raise UsageError("shutdown.no_words", "--force needs your own words.",
                         hint='State how you know: --force "stopped it in the console at 15:02"')  # fmt: skip
    folder = session.home.run(find_run(session.home, run))
    receipt = read_receipt(session.home, folder)
    login, box = box_login(receipt, folder.name), look_at_run(session.home, folder.name).plan.box
    kept = read_confirmation(session.home, folder, receipt)
    # An unsigned statement may be forged, so if there is a key now, check again and sign.
    if kept is not None and kept.is_seen and (kept.signature is Signature.OK or not load_signer(session.home.keys)):
        return _result_of(
            kept, folder.name, session, f"{login.host} was already confirmed: {describe_confirmation(kept, session)}."
        )
    if not session.json:
        session.say(f"Checking {login.host} port {login.port} for about {SPAN_S:.0f} s.")
    tries = try_repeatedly(login, session.clock, box.jump if box else "")
    if not force and not all(attempt.seen in QUIET for attempt in tries):
        raise _refusal_to_sign(tries[-1].seen, login, receipt, folder.name)
    now, gone = session.clock.wall(), receipt.predicate["timeline"]["gone"]
    if utc(now) < gone:
        what = (
            f"This computer's clock shows {utc(now)}, before the run's end at {gone}, so a statement would be invalid."
        )
        hint = "Set the clock or wait until that time, then run this again."
        raise VerificationFailed("shutdown.clock", what, hint=hint)
    made = write_confirmation(session.home, folder, receipt, tries, words=force or "", wall=now)
    return _result_of(made, folder.name, session, f"{login.host}: {describe_confirmation(made, session)}.")


def _refusal_to_sign(seen: str, login: Login, receipt: Receipt, run: str) -> GpurunError:
    """Return the error that refuses to sign; exit 9 if the box answers and costs money."""
    from gpurun.cli.shutdown_probe import ANSWERS

    rate = Micros(receipt.predicate["cost"]["rentals"][-1]["rate_micros_per_hour"])
    forced = f'If you are sure that it is off: gpurun confirm-shutdown {run} --force "how you know"'
    if seen == ANSWERS and rate > 0:
        what = f"{login.host} port {login.port} still answers SSH, at {format_rate(rate)}."
        hint = f"Shut it down where you rented it, then run this again. {forced}"
        return MayBeBilling("shutdown.still_up", what, hint=hint)
    if seen == ANSWERS:
        what = f"{login.host} port {login.port} still answers SSH."
        return VerificationFailed(
            "shutdown.still_up", what, hint=f"Shut the machine down, then run this again. {forced}"
        )
    what = f"gpurun cannot tell whether {login.host} is down: {seen}."
    return VerificationFailed("shutdown.cannot_tell", what, hint=f"Check that you are online and try again. {forced}")


def _result_of(made: Confirmation, run: str, session: Session, text: str) -> Result:
    from gpurun.core.receipt_record import Signature
    from gpurun.ledger.shutdown_statement import NAME

    lines = [text]
    if made.is_seen:
        seen = {attempt["seen"] for attempt in made.predicate["checked"]["tries"]}
        lines.append(
            "  A rented container that refuses connections is stopped; a whole machine that refuses them is still on."
            if "refused" in seen
            else "  From this computer, a machine that is off cannot be distinguished from a broken connection."
        )
    cost = made.predicate["cost"]["until_confirmed_micros"]
    if cost:
        lines.append(
            f"  At the price that you gave, it cost at most {format_usd(Micros(cost))} until then, without storage."
        )
    if made.signature is Signature.UNSIGNED:
        lines.append("  Unsigned: this home has no readable key.")
    data = {"statement": made.predicate, "signature": made.signature, "file": str(session.home.run(run).path / NAME)}
    return Result(data=data, text="\n".join(lines), after=f"gpurun receipt {run}")

"""`gpurun receipt`: show what a run did and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.options import UsualRun
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import VerificationFailed

if TYPE_CHECKING:
    from gpurun.core.receipt_record import Signature

app = typer.Typer(rich_markup_mode=None)


@verb(app, "receipt", examples=["gpurun receipt fox-41", "gpurun receipt --md > receipt.md"])
def receipt(
    session: Session,
    run: UsualRun = None,
    md: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
) -> Result:
    """Show a run's signed receipt."""
    from gpurun.cli.run_control import resolve_run_name
    from gpurun.cli.shutdown_probe import shutdown_line
    from gpurun.ledger.write_receipt import read_receipt
    from gpurun.readers.next_command import next_command
    from gpurun.view.receipt_markdown import receipt_markdown
    from gpurun.view.receipt_screen import receipt_screen

    folder = session.home.run(resolve_run_name(session, run))
    read = read_receipt(session.home, folder)
    shutdown = shutdown_line(session, folder.name, read)
    if md:
        text = receipt_markdown(read, shutdown=shutdown)
    else:
        now, then = session.clock.wall(), next_command(read.predicate, folder, shutdown)
        text = session.draw(receipt_screen(read, session.style, now=now, shutdown=shutdown, then=then))
    data: dict[str, Any] = {"statement": read.statement, "sha256": read.sha256, "signature": read.signature}
    data["shutdown"] = shutdown or None
    error = _error(session, folder.name, read.signature)
    if error is not None:
        return Result(data=data, text=text, errors=(error,), exit_code=error.exit_code)
    return Result(data=data, text=text)


def _error(session: Session, run: str, found: Signature) -> VerificationFailed | None:
    """Return the error of a signature that does not verify; an unsigned receipt is not an error."""
    from gpurun.core.receipt_record import Signature

    if found is Signature.BAD:
        what, hint = "The signature does not match the receipt.", f"gpurun audit {run}"
        return VerificationFailed("receipt.signature", what, hint=hint)
    if found is Signature.UNKNOWN_KEY:
        what = "The receipt is signed by a key that this home does not know."
        hint = f"If you trust the signer, store its public key as {session.home.keys}/NAME.pub"
        return VerificationFailed("receipt.unknown_key", what, hint=hint)
    return None

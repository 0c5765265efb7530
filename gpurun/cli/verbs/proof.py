"""`gpurun receipt`, `gpurun audit` and `gpurun reap`: what was paid, whether it holds, and what was forgotten."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.options import Providers, RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    verb(app, "receipt", examples=["gpurun receipt fox-41", "gpurun receipt @last --md > receipt.md"])(receipt)
    verb(app, "audit", examples=["gpurun audit", "gpurun audit fox-41 --against-bill --json"])(audit)
    verb(app, "reap", examples=["gpurun reap", "gpurun reap --destroy --older-than 1h --exit-code"])(reap)


def receipt(
    session: Session,
    run: RunArgument,
    md: Annotated[bool, typer.Option("--md", help="As Markdown.")] = False,
) -> Result:
    """Show a run's signed receipt."""
    from gpurun.cli.receipts import show_receipt

    return show_receipt(session, run, markdown=md)


def audit(
    session: Session,
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Only these; all by default.")] = [],  # noqa: B006
    since: Annotated[
        str, typer.Option("--since", metavar="DATE", help="Only runs opened on that day or later: 2026-11-01.")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as problems.")] = False,
    against_bill: Annotated[
        bool, typer.Option("--against-bill", help="Ask the providers what they billed, too.")
    ] = False,
    head: Annotated[
        str | None, typer.Option("--head", metavar="HASH", help="A head that you wrote down earlier, whole.")
    ] = None,
    key: Annotated[str, typer.Option("--key", metavar="PUB", help="Trust this public key file alone.")] = "",
) -> Result:
    """Check the chain, the signatures, the arithmetic and the checkpoints, with code of its own."""
    from gpurun.cli.audits import run_audit

    return run_audit(session, runs, since=since, strict=strict, head=head, key=key, against_bill=against_bill)


def reap(
    session: Session,
    provider: Providers = [],  # noqa: B006
    destroy: Annotated[bool, typer.Option("--destroy", help="End those within their lease too.")] = False,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Only instances older than that: 30m, 1h, 2d.")
    ] = "",
    look: Annotated[bool, typer.Option("--look", help="Only list; end nothing.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 9 if anything is left that should not be, 4 without a key.")
    ] = False,
) -> Result:
    """Find what bears gpurun's mark anywhere, and end what is past its deadline."""
    from gpurun.cli.reaping import run_reap

    return run_reap(session, provider, destroy=destroy, older_than=older_than, look_only=look, use_exit_code=exit_code)

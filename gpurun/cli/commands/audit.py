"""`gpurun audit`: check what the receipts state."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.durations import day_wall
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling, UsageError, VerificationFailed
from gpurun.core.money import format_usd, total, usd
from gpurun.ledger.run_lock import holder_of

if TYPE_CHECKING:
    from gpurun.ledger.audit import AuditReport, AuditRow
    from gpurun.lifecycle.charges import Bill
    from gpurun.readers.evidence.class_check import CardRow
    from gpurun.readers.replay import Replayed

app = typer.Typer(rich_markup_mode=None)

MORE_MICROS = usd("0.01")
"""The tolerance above a receipt's bound, because providers round their bills."""
_FOUND = ("run", "seq", "chain", "signature", "files", "death", "measured_micros", "measured_is")
_CARD = (
    "student", "file", "run", "verdict", "recipe", "steps", "data", "trainer", "device", "loss", "val_loss",
    "cost_micros", "cost_is", "receipt_sha256", "replayed", "problems", "notes", "checked",
)  # fmt: skip


@verb(app, "audit", examples=["gpurun audit", "gpurun audit fox-41 --against-bill --json"])
def audit(
    session: Session,
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="The runs (default: all).")] = [],  # noqa: B006
    since: Annotated[
        str, typer.Option("--since", metavar="DATE", help="Check only runs opened on this day or later: 2026-11-01.")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as problems.")] = False,
    against_bill: Annotated[
        bool, typer.Option("--against-bill", help="Also ask the providers what they billed.")
    ] = False,
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="HASH", help="Expect this head of the chain, a full hash that you noted."),
    ] = None,
    key: Annotated[str, typer.Option("--key", metavar="PUB", help="Trust only this public key file.")] = "",
    replay: Annotated[
        bool, typer.Option("--replay", help="Also compute the losses of the last checkpoint again.")
    ] = False,
    require_replay: Annotated[
        bool, typer.Option("--require-replay", help="Like --replay, but a run that cannot be replayed is a problem.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="With --replay: all runs instead of only the last.")] = False,
    roster: Annotated[str, typer.Option("--roster", metavar="FOLDER", help="Check this folder of cards instead.")] = "",
    class_file: Annotated[
        str, typer.Option("--class", metavar="CLASS", help="Compare the cards with this class.")
    ] = "",
    csv: Annotated[
        str, typer.Option("--csv", metavar="FILE", help="Also write the table of --roster to this file.")
    ] = "",
) -> Result:
    """Check journals, receipts, signatures, costs and checkpoints by computing them again.

    Exit 0 if everything holds, 10 if something does not, 9 if something may be billing. With `against_bill`, a bill
    above the bound of its receipt is a problem.
    """
    if roster or class_file or csv:
        from gpurun.readers.roster_audit import audit_roster

        if not roster or runs or since or head or key or against_bill:
            what = (
                "--class and --csv need --roster FOLDER, which excludes RUN, --since, --head, --key and --against-bill."
            )
            raise UsageError("usage.roster", what, hint="gpurun audit --roster cards/ --class ml-2026.roster.json")
        place, clock = Path(roster).expanduser(), session.clock
        cards = audit_roster(place, class_file, clock, session.say, replay=replay, require_replay=require_replay)
        return _cards_result(session, cards, csv, strict=strict)

    from gpurun.ledger.audit import audit as audit_home
    from gpurun.ledger.runs import find_run, planned_runs

    if (replay or require_replay) and not (runs or since or every) and planned_runs(session.home):
        runs = ["@last"]  # Replaying all runs would take hours, so the last run is the default.
    names = [find_run(session.home, run) for run in runs] or None
    # See who is driven before the audit, which takes minutes: a driven run may have ended by then.
    unclosed = (folder.name for folder in session.home.folders() if not folder.is_closed)
    driven = {name for name in unclosed if _is_driven(session, name)}
    report = audit_home(session.home, names, since=day_wall(since), expected_head=head, public_key=_read_key(key))
    bills = _ask_for_bills(session, report) if against_bill else {}
    report = replace(report, rows=tuple(_compare_with_bill(session, row, bills.get(row.run)) for row in report.rows))
    replays: dict[str, Replayed] = {}
    if replay or require_replay:
        from gpurun.readers.replay import with_replay

        replays = _replay_runs(session, report)
        rows = (with_replay(row, replays.get(row.run), is_required=require_replay) for row in report.rows)
        report = replace(report, rows=tuple(rows))
    return _audit_result(session, report, bills, replays, driven, strict=strict)


def _audit_result(
    session: Session,
    report: AuditReport,
    bills: dict[str, Bill],
    replays: dict[str, Replayed],
    driven: set[str],
    *,
    strict: bool,
) -> Result:
    """Return the table, its notes and the exit code; `driven` are the runs that had a supervisor before the audit."""
    from gpurun.view.audit_table import audit_screen

    problems = [*report.problems, *(problem for row in report.rows for problem in row.problems)]
    warnings = [warning for row in report.rows for warning in row.warnings]
    failed = bool(problems or (strict and warnings))
    code = ExitCode.VERIFICATION_FAILED if failed else ExitCode.DONE
    lost = [
        row.run
        for row in report.rows
        if row.may_be_billing and row.run not in driven and not _is_driven(session, row.run)
    ]
    code = ExitCode.MAY_BE_BILLING if lost else code
    billed = {run: bill.micros for run, bill in bills.items()}
    next_commands = {run: f"gpurun resume {run}" for run in lost}
    lines = audit_screen(report, billed, next_commands, session.style, exit_code=int(code))
    said = [f"  {row.run}: {text}" for row in report.rows for text in (*row.problems, *row.warnings)]
    said += [f"  {row.run}: {row.trainer}" for row in report.rows if row.trainer.startswith("changed")]
    for run, bill in bills.items():
        if bill.micros is not None and not bill.is_settled:
            said.append(f"  {run}: the bill is not settled yet")
        said += [f"  {run}: {text}" for text in bill.unclear]
    for run, replay in replays.items():
        said += [f"  {run}: {text}" for text in (*replay.checked, f"replayed: {replay.extent}")]
    text = "\n".join([session.draw(lines), *said, *(f"  {problem}" for problem in report.problems)])
    replay_lines = {run: [*replay.checked, *replay.unchecked] for run, replay in replays.items()}
    extents = {run: replay.extent for run, replay in replays.items()}
    data = _report_as_data(report, bills) | {"replay": replay_lines, "replayed": extents}
    return Result(data=data, text=text, errors=_errors(session, lost, failed), exit_code=code)


def _report_as_data(report: AuditReport, bills: dict[str, Bill]) -> dict[str, object]:
    """Return the whole report as data."""
    from gpurun.lifecycle.charges import Bill

    rows = []
    for row in report.rows:
        bill = bills.get(row.run) or Bill(None, is_settled=False)
        rows.append(
            {
                **{key: getattr(row, key) for key in _FOUND},
                "measured_is_floor": row.is_floor,
                "billed_micros": bill.micros,
                "billed_is_settled": bill.is_settled,
                "billed_unclear": list(bill.unclear),
                "verdict": row.verdict,
                "may_be_billing": row.may_be_billing,
                "problems": list(row.problems),
                "warnings": list(row.warnings),
                "trainer": row.trainer,
            }
        )
    return {
        "ok": report.sound,
        "rows": rows,
        "head": report.head,
        "receipts": report.receipts,
        "total_micros": report.total_micros,
        "problems": list(report.problems),
    }


def _compare_with_bill(session: Session, row: AuditRow, bill: Bill | None) -> AuditRow:
    """Return the row, with a problem added if the bill exceeds the receipt's bound."""
    from gpurun.ledger.audit.findings import NO

    billed, bound = bill.micros if bill is not None else None, row.measured_micros
    if billed is None or bound is None or row.is_floor or billed <= total(bound, MORE_MICROS):
        return row
    problem = f"{format_usd(billed)} was billed, but the receipt states {format_usd(bound)} at most"
    if living := _machines_still_listed(session, row.run):
        problem = f"{problem}; {', '.join(living)} still exists: gpurun reap records that and ends it"
        return replace(row, problems=(*row.problems, problem), verdict="may be billing", may_be_billing=True)
    return replace(row, problems=(*row.problems, problem), verdict=row.verdict if row.may_be_billing else NO)


def _cards_result(session: Session, rows: list[CardRow], csv: str, *, strict: bool) -> Result:
    """Return the table of a folder of cards; the exit code is 10 if a card has a problem or, with `strict`, a note."""
    from gpurun.cli.render import write_file
    from gpurun.view.evidence_card import roster_csv, roster_screen

    if csv:
        write_file(Path(csv).expanduser(), roster_csv(rows), flag="--csv")
    failed = any(row.problems or (strict and row.notes) for row in rows)
    said = [
        f"  {row.student or row.file}: {text}" for row in rows for text in (*row.problems, *row.notes, *row.checked)
    ]
    hint = "The lines above name each problem; two cards that share a unique value are both listed."
    errors = (VerificationFailed("audit.failed", "A card has a problem.", hint=hint),) if failed else ()
    return Result(
        data={"ok": not failed, "rows": [{key: getattr(row, key) for key in _CARD} for row in rows]},
        text="\n".join([session.draw(roster_screen(rows, session.style)), *said]),
        errors=errors,
        exit_code=ExitCode.VERIFICATION_FAILED if failed else ExitCode.DONE,
    )


def _ask_for_bills(session: Session, report: AuditReport) -> dict[str, Bill]:
    """Ask the providers for the bill of each run that cost something, and return the bills that they have."""
    from gpurun.lifecycle.charges import bill_of
    from gpurun.planning.own_box import login_to
    from gpurun.providers.registry import open_provider

    opened = cache(partial(open_provider, home=session.home, clock=session.clock, login=login_to))
    found = {row.run: bill_of(session.home.run(row.run), opened) for row in report.rows if row.measured_micros}
    return {run: bill for run, bill in found.items() if bill is not None}


def _machines_still_listed(session: Session, run: str) -> list[str]:
    """Return the run's machines that the provider still lists although the journal says that they ended."""
    from gpurun.lifecycle.reaper import outlived_machines
    from gpurun.planning.own_box import login_to
    from gpurun.providers.registry import open_provider

    return outlived_machines(
        session.home.run(run), partial(open_provider, home=session.home, clock=session.clock, login=login_to)
    )


def _replay_runs(session: Session, report: AuditReport) -> dict[str, Replayed]:
    """Replay each run that has a receipt, and return the results."""
    from gpurun.core.untrusted import finding
    from gpurun.ledger.runs import look_at_run
    from gpurun.ledger.write_receipt import read_receipt
    from gpurun.readers.replay import Replayed, replay_run

    found: dict[str, Replayed] = {}
    signed = [row for row in report.rows if row.seq is not None]
    for number, row in enumerate(signed, start=1):
        folder = session.home.run(row.run)
        what = f"{number}/{len(signed)} computing {row.run} again"

        def say(text: str, what: str = what) -> None:
            session.say(f"{what}: {text}")

        problems: list[str] = []
        with finding(problems.append, "it cannot be computed again"):
            try:
                plan, receipt = look_at_run(session.home, row.run).plan, read_receipt(session.home, folder).predicate
                data = Path(folder.now_at(plan.data.folder))
                found[row.run] = replay_run(folder, {**receipt}, plan.job.resolved, data, say)
            except (GpurunError, OSError) as error:
                found[row.run] = Replayed.nothing(str(error))
        if problems:
            found[row.run] = Replayed(problems=tuple(problems))
    return found


def _is_driven(session: Session, run: str) -> bool:
    """Return whether a local supervisor drives the run, and has not failed to prove that the machine is gone."""
    return holder_of(session.home.run(run).lock) is not None and not _why_not_proven_gone(session, run)


def _why_not_proven_gone(session: Session, run: str) -> str:
    """Return why the supervisor could not prove that the machine is gone, as `ps` shows it; "" if it has not failed."""
    from gpurun.ledger.runs import gave_up, look_at_run

    try:
        return gave_up(look_at_run(session.home, run), session.clock.wall())
    except GpurunError:  # A damaged run has its own row.
        return ""


def _errors(session: Session, lost: list[str], failed: bool) -> tuple[VerificationFailed | MayBeBilling, ...]:
    """Return the errors for the envelope; the table already shows the details."""
    if lost:
        hint = f"gpurun resume {lost[0]} finishes it; gpurun destroy {lost[0]} ends it at once."
        if session.home.run(lost[0]).is_closed:  # Only the bill shows that the machine exists.
            hint = "gpurun reap ends it."
        what = _why_not_proven_gone(session, lost[0]) or f"{lost[0]} is not proven gone, and no supervisor drives it."
        return (MayBeBilling("audit.may_be_billing", what, hint=hint),)
    if failed:
        hint = "The lines above name each problem; a lost receipt can be restored from a copy."
        return (VerificationFailed("audit.failed", "Some records do not hold.", hint=hint),)
    return ()


def _read_key(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        hint = "Give the .pub file of the signer's key."
        raise UsageError("usage.key", f"{path} cannot be read: {error.strerror}.", hint=hint) from None

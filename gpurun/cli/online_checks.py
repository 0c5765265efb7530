"""Checks the clouds for `gpurun doctor --online`: whether the key works, what it permits, and what is left over.

Each provider is asked in its own thread with a time limit. Nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

from gpurun.cli.session import Session
from gpurun.core.clock import local_minute
from gpurun.core.errors import ExitCode, GpurunError
from gpurun.core.money import format_rate, format_usd
from gpurun.core.orphans import Orphan
from gpurun.core.paths import RUN_NAME
from gpurun.core.records import Account, InstanceState, Leftover
from gpurun.ledger.run_lock import holder_of
from gpurun.lifecycle.reaper import sweep
from gpurun.planning.own_box import login_to
from gpurun.providers.base import LeavesThings, Provider, Unknown
from gpurun.providers.registry import CLOUDS, OVERRIDES, key_source, open_provider
from gpurun.view.list_tables import Finding
from gpurun.view.number_format import format_duration

LIMIT_S = 90.0
_CLOCK_AHEAD_S = 60.0


@dataclass(frozen=True)
class Checked:
    """The findings at one provider; `billing` means that something costs money there without a local supervisor."""

    provider: str
    findings: tuple[Finding, ...]
    account: Account | None = None
    billing: bool = False
    seen: tuple[dict[str, object], ...] = ()


def check_online(session: Session, names: Sequence[str], *, limit_s: float = LIMIT_S) -> list[Checked]:
    """Check these providers; a missing key, a failure or a timeout becomes a finding."""
    until = session.clock.monotonic() + limit_s
    running = [(name, _start_check(session, name)) for name in names]
    checked = []
    for name, future in running:
        try:
            checked.append(future.result(timeout=max(0.0, until - session.clock.monotonic())))
        except TimeoutError:
            text = f"{name} did not respond within {limit_s:.0f} s"
            checked.append(Checked(name, (Finding("bad", text, "try again; its machines were not checked"),)))
    return checked


def _start_check(session: Session, name: str) -> Future[Checked]:
    """Check a provider in a daemon thread, so that it cannot block the command; return the future result."""
    future: Future[Checked] = Future()

    def work() -> None:
        try:
            future.set_result(_check_provider(session, name))
        except BaseException as bug:  # noqa: BLE001 - it is raised again where the result is read.
            future.set_exception(bug)

    Thread(target=work, name=f"check {name}", daemon=True).start()
    return future


def online_code(checked: Sequence[Checked]) -> ExitCode:
    """Return 9 if something may be billing that no supervisor drives, 4 if a key or provider has a problem, else 0."""
    if any(check.billing for check in checked):
        return ExitCode.MAY_BE_BILLING
    bad = any(finding.level == "bad" for check in checked for finding in check.findings)
    return ExitCode.SETUP if bad else ExitCode.DONE


def online_data(checked: Sequence[Checked]) -> dict[str, object]:
    """Return the findings as data."""
    return {
        "providers": [
            {
                "provider": check.provider,
                "account": check.account.model_dump(mode="json") if check.account else None,
                "seen": list(check.seen),
                "findings": [{"level": f.level, "text": f.text, "hint": f.hint} for f in check.findings],
            }
            for check in checked
        ]
    }


def _check_provider(session: Session, name: str) -> Checked:
    """Check one provider step by step; a failure becomes a finding and ends the check."""
    findings = _warn_of_other_address(name)
    try:
        source = key_source(name, session.home) if name in CLOUDS else "no key needed"
        if source is None:
            return Checked(name, (Finding("warn", f"{name} has no key", f"gpurun auth set {name}"),))
        provider = open_provider(name, session.home, session.clock, login=login_to)
        account = provider.verify()
        findings += _account_findings(account, source)
        orphans = _list_machines(provider, session)
        left = _list_leftovers(provider, session, orphans)
    except Unknown as error:
        return Checked(
            name, (*findings, Finding("bad", f"{name} could not be checked: {error}", error.hint or "try again"))
        )
    except GpurunError as error:
        return Checked(name, (*findings, Finding("bad", f"{name}: {error.what}", error.hint)))
    findings += [_machine_finding(orphan, session) for orphan in orphans]
    findings += [_leftover_finding(name, left)] if left else []
    if not orphans and not left:
        findings.append(Finding("ok", f"gpurun has left nothing at {name}"))
    red = ("overdue", "no deadline", "closed here")
    billing = any(orphan.fate in red for orphan in orphans) or any(thing.billed for thing in left)
    seen = [{**orphan.instance.model_dump(mode="json"), "fate": orphan.fate} for orphan in orphans]
    seen += [{**thing.model_dump(mode="json"), "fate": "left over"} for thing in left]
    return Checked(name, tuple(findings), account, billing, tuple(seen))


def _list_machines(provider: Provider, session: Session) -> list[Orphan]:
    """Return each existing machine with gpurun's token, and what reap would do with it."""
    swept = sweep([provider], session.home, session.clock, destroy_all=False, older_than_s=0.0, look_only=True)
    return [orphan for orphan in swept if orphan.instance.state is not InstanceState.GONE]


def _warn_of_other_address(name: str) -> list[Finding]:
    """Return a warning if the key is sent to an address other than the provider's."""
    variable = OVERRIDES.get(name, "")
    if not os.environ.get(variable):
        return []
    text = f"{variable} is set: requests to {name}, and your key with them, go to {os.environ[variable]}"
    return [Finding("warn", text, f"unset {variable}")]


def _account_findings(account: Account, source: str) -> list[Finding]:
    """Return findings on the key's account, its permissions, its balance and the clock difference."""
    name = account.provider
    balance = "" if account.balance_micros is None else f", {format_usd(account.balance_micros)} left"
    found = [Finding("ok", f"{name}: key works ({account.identity}; from {source}){balance}")]
    if source == "no key needed":
        found = [Finding("ok", f"{name}: {account.identity}")]
    if account.balance_micros is not None and account.balance_micros <= 0:
        found.append(Finding("warn", f"{name} has no money left", "add credit in its console before you rent"))
    if account.missing:
        lacks = f"{name}: the key lacks permission to {', '.join(account.missing)}"
        found.append(Finding("warn", lacks, "grant it, or rentals there may fail or stay invisible"))
    ahead = account.clock_ahead_s
    if ahead is None:
        return found
    if abs(ahead) <= _CLOCK_AHEAD_S:
        return [*found, Finding("ok", f"clock within {max(1, round(abs(ahead)))} s of {name}'s")]
    side = "ahead of" if ahead > 0 else "behind"
    text = f"this machine's clock is {format_duration(abs(ahead))} {side} {name}'s"
    return [*found, Finding("warn", text, "synchronise it with a time server: every deadline depends on this clock")]


def _machine_finding(orphan: Orphan, session: Session) -> Finding:
    """Return the finding for a machine with gpurun's token."""
    instance = orphan.instance
    rate = f", {format_rate(instance.rate_micros_per_hour)}" if instance.rate_micros_per_hour else ""
    who = f"{instance.provider}: {instance.id} of {instance.run or 'an unknown run'} ({instance.state}{rate})"
    if orphan.fate == "owned":
        return Finding("ok", f"{who} is driven by a supervisor here")
    if orphan.fate == "overdue":
        return Finding("bad", f"{who} is {format_duration(orphan.overdue_s)} past its deadline",
                       f"gpurun reap --provider {instance.provider}")  # fmt: skip
    if orphan.fate == "closed here":
        return Finding("bad", f"{who} may be billing: it was believed to be gone",
                       f"gpurun reap --destroy --provider {instance.provider}")  # fmt: skip
    flags = "--destroy" if orphan.owner.is_here else "--destroy --anyones"
    whose = f"it belongs to another home ({orphan.owner.home})" if orphan.owner.home else "no supervisor here drives it"
    whose = "no supervisor here drives it" if orphan.owner.is_here else whose
    if instance.deadline_wall is None:
        return Finding("bad", f"{who} has no known deadline, and {whose}",
                       f"gpurun reap --provider {instance.provider} {flags}")  # fmt: skip
    until = local_minute(instance.deadline_wall, now=session.clock.wall())
    return Finding("warn", f"the lease of {who} ends at {until}; {whose}",
                   f"gpurun reap --provider {instance.provider} {flags} ends it")  # fmt: skip


def _list_leftovers(provider: Provider, session: Session, orphans: Sequence[Orphan]) -> list[Leftover]:
    """Return resources other than machines that belong to neither a visible machine nor a run driven here."""
    if not isinstance(provider, LeavesThings):
        return []
    needed = {orphan.instance.token for orphan in orphans}
    return [
        thing
        for thing in provider.leftovers(None)
        if thing.token not in needed
        and not (RUN_NAME.fullmatch(thing.run) and holder_of(session.home.run(thing.run).lock))
    ]


def _leftover_finding(name: str, left: Sequence[Leftover]) -> Finding:
    kinds = ", ".join(f"{thing.kind} {thing.id}" for thing in left[:4])
    more = f" and {len(left) - 4} more" if len(left) > 4 else ""
    billed = any(thing.billed for thing in left)
    text = f"{name}: left over from earlier runs: {kinds}{more}" + (", and billed" if billed else "")
    return Finding("bad" if billed else "warn", text, f"gpurun reap --provider {name} --destroy")

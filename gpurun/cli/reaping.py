"""The hunt for what was forgotten: on every cloud that there is a key for, with local records or without."""

from __future__ import annotations

import re

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, MayBeBilling, SetupError, UsageError
from gpurun.lifecycle.instance.account import demand_account
from gpurun.lifecycle.reap import Orphan, Stray, sweep, sweep_leftovers
from gpurun.lifecycle.runs import unfinished_runs
from gpurun.providers.base import Provider, Unknown
from gpurun.providers.registry import open_provider, ready_providers
from gpurun.view.listings import OrphanRow, reap_table
from gpurun.view.paint import render

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ACTIONS = {
    "owned": "left: a supervisor here drives it",
    "within lease": "left: within its lease (--destroy ends it)",
    "overdue": "overdue: gpurun reap ends it",
    "destroyed": "destroyed, proven",
    "not proven gone": "NOT PROVEN GONE",
}


def run_reap(
    session: Session, providers: list[str], *, destroy: bool, older_than: str, look_only: bool, use_exit_code: bool
) -> Result:
    """Sweep the providers; exit 9 when something that should be gone is not proven gone.

    With `use_exit_code` also when something is overdue, and 4 when there was no cloud to ask.
    """
    age_s = _age(older_than)
    names = providers or [*ready_providers(session.home), "local"]
    chosen, silent = _opened(session, names)
    found: list[Orphan] = []
    strays: list[Stray] = []
    try:
        swept = sweep(chosen, session.home, session.clock, destroy_all=destroy, older_than_s=age_s, look_only=look_only)
        for orphan in swept:
            found.append(orphan)
    except MayBeBilling as error:  # A provider did not answer; what the others said is told all the same.
        silent = error
    try:
        for stray in sweep_leftovers(chosen, session.home, session.clock, remove_all=destroy, look_only=look_only):
            strays.append(stray)
    except MayBeBilling as error:
        silent = silent or error
    silent = silent or _out_of_sight(session, names, chosen)
    keyless = _no_key() if names == ["local"] and not providers else None
    rows = [*map(_orphan_row, found), *map(_stray_row, strays)]
    alive = any(orphan.fate in ("overdue", "not proven gone") for orphan in found)
    lost = any(orphan.fate == "not proven gone" for orphan in found) or any(s.fate == "not removed" for s in strays)
    code = ExitCode.MAY_BE_BILLING if silent or lost or (use_exit_code and alive) else ExitCode.DONE
    data = {
        "asked": [provider.name for provider in chosen],
        "found": [{**orphan.instance.model_dump(mode="json"), "fate": orphan.fate} for orphan in found],
        "leftovers": [{**stray.leftover.model_dump(mode="json"), "fate": stray.fate} for stray in strays],
    }
    asked = [provider.name for provider in chosen]
    text = render(reap_table(rows, [] if silent else asked, session.style, now=session.clock.wall()), session.style)
    if silent is None and keyless is not None and use_exit_code:  # A cron job without its keys must not look well.
        return Result(data=data, text=text, errors=(keyless,), exit_code=code or keyless.exit_code)
    after = f"{keyless.what} {keyless.hint}" if keyless is not None else ""
    return Result(data=data, text=text, after=after, errors=(silent,) if silent else (), exit_code=code)


def _no_key() -> SetupError:
    """Only this machine was asked; what is rented cannot be seen from here."""
    what = "No cloud was asked: there is no key for any here."
    return SetupError("reap.no_key", what, hint="gpurun auth set runpod keeps one; cron has none of your shell.")


def _opened(session: Session, names: list[str]) -> tuple[list[Provider], MayBeBilling | None]:
    """The providers that can be asked; one whose key cannot be used keeps none of the others from being asked."""
    opened, silent = [], None
    for name in names:
        try:
            opened.append(open_provider(name, session.home, session.clock))
        except SetupError as error:
            silent = MayBeBilling("reap.cannot_look", f"{name} could not be asked: {error.what}", hint=error.hint)
    return opened, silent


def _out_of_sight(session: Session, names: list[str], asked: list[Provider]) -> MayBeBilling | None:
    """A run of this home that may be billed by somebody who was not asked, or was asked with another account's key."""
    for sight in unfinished_runs(session.home) if session.home.runs.is_dir() else []:
        name, run = sight.plan.offer.provider, sight.folder.name
        if not sight.state.may_be_billing:
            continue
        if name not in (*names, "ssh"):
            what = f"{run} may be billed by {name}, which was not asked."
            return MayBeBilling("reap.not_asked", what, hint=f"gpurun auth set {name}, then: gpurun reap")
        try:
            for provider in asked:
                if provider.name == name:
                    demand_account(provider, sight.state)
        except MayBeBilling as error:
            return error
        except (Unknown, SetupError) as error:
            what = f"{run} may be billed by {name}, which does not say whose account the key belongs to ({error})."
            return MayBeBilling("reap.cannot_look", what, hint="Run it again once the provider answers.")
    return None


def _orphan_row(orphan: Orphan) -> OrphanRow:
    instance = orphan.instance
    return OrphanRow(
        run=instance.run or "?",
        provider=instance.provider,
        instance=instance.id,
        state=str(instance.state),
        owner="a supervisor" if orphan.fate == "owned" else "nobody",
        action=_ACTIONS[orphan.fate],
        rate_micros_per_hour=instance.rate_micros_per_hour,
        created_wall=instance.created_wall,
        deadline_wall=instance.deadline_wall,
        alarming=orphan.fate in ("overdue", "not proven gone"),
    )


def _stray_row(stray: Stray) -> OrphanRow:
    left = stray.leftover
    return OrphanRow(
        run=left.run or "?",
        provider=left.provider,
        instance=left.id,
        state=left.kind,
        owner="a supervisor" if stray.fate == "owned" else "nobody",
        action={"kept": "left: it may be needed (--destroy removes it)"}.get(stray.fate, stray.fate),
        rate_micros_per_hour=None,
        created_wall=None,
        deadline_wall=left.deadline_wall,
        alarming=stray.fate == "not removed",
    )


def _age(text: str) -> float:
    """Seconds of `90s`, `10m`, `1h` or `2d`; empty means any age."""
    if not text:
        return 0.0
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if found is None:
        raise UsageError("usage.older_than", f"--older-than {text!r} is not an age.", hint="Write 30m, 1h or 2d.")
    return float(int(found[1]) * _AGES[found[2]])

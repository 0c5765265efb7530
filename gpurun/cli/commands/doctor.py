"""`gpurun doctor`: check the set-up without changing anything; each problem comes with a hint."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import Providers
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import ExitCode, GpurunError, SetupError
from gpurun.core.installed_files import has_other_gpurun, install_line
from gpurun.core.places import place_facts
from gpurun.core.untrusted import plain_line
from gpurun.view.list_tables import Finding, doctor_lines
from gpurun.view.number_format import format_bytes

_ENOUGH_BYTES = 2 * 10**9


app = typer.Typer(rich_markup_mode=None)


@verb(app, "doctor", examples=["gpurun doctor", "gpurun doctor --online --provider runpod"])
def doctor(
    session: Session,
    provider: Providers = [],  # noqa: B006 - Typer copies defaults.
    online: Annotated[bool, typer.Option("--online", help="Also ask the clouds; this changes nothing there.")] = False,
) -> Result:
    """Check this computer and its keys; with --online also ask the clouds about keys and leftovers.

    Exit 4 if something keeps gpurun from working here, 9 if something may be billing.
    """
    from gpurun.cli.online_checks import Checked, check_online, online_code, online_data
    from gpurun.providers.registry import CLOUDS, require_known

    require_known(provider)
    findings = [
        _python(),
        *_other_gpurun(),
        _torch(),
        _disk(session),
        _uplink(session),
        _home(session),
        _bundle(),
        _ledger(session),
    ]
    left, billing = _check_unfinished_runs(session)
    findings += left
    keys = [*_keys(session, provider or CLOUDS)]
    checked: list[Checked] = []
    if online:
        from gpurun.providers.registry import known_here

        clusters = [name for name in known_here(session.home) if place_facts(name).is_queued]
        names = provider or [*(name for name, finding in keys if finding.level == "ok"), *clusters]
        if names and not session.json:
            session.say(f"Asking {', '.join(names)}; this changes nothing there.")
        checked = check_online(session, names)
        keys = [(name, finding) for name, finding in keys if name not in names]
    findings += _key_findings(keys, named=bool(provider))
    findings += [finding for provider_check in checked for finding in provider_check.findings]
    bad = any(finding.level == "bad" for finding in findings)
    billing = billing or online_code(checked) is ExitCode.MAY_BE_BILLING
    code = ExitCode.MAY_BE_BILLING if billing else ExitCode.SETUP if bad else ExitCode.DONE
    data = {"findings": [{"level": f.level, "text": f.text, "hint": f.hint} for f in findings], **online_data(checked)}
    return Result(data=data, text=session.draw(doctor_lines(findings, session.style)), exit_code=code)


def _other_gpurun() -> Iterator[Finding]:
    """Yield a finding if another package named gpurun is installed and shares files with this package."""
    if has_other_gpurun():
        what = "another package named gpurun is installed and shares files with this one"
        yield Finding("bad", what, "pip uninstall gpurun gpurun-cap; then: pip install .")


def _check_unfinished_runs(session: Session) -> tuple[list[Finding], bool]:
    """Return findings on runs without a supervisor or with unreadable records, and whether anything may be billing."""
    from gpurun.ledger.runs import look_at_undriven

    left, unread = look_at_undriven(session.home)
    findings = [Finding("bad", error.what, error.hint) for error in unread]
    if left:
        names = ", ".join(sight.folder.name for sight in left)
        hint = f"gpurun resume {left[0].folder.name}"
        findings.append(Finding("bad", f"unfinished and without a supervisor: {names}", hint))
    elif not unread:
        findings.append(Finding("ok", "no unfinished runs"))
    return findings, any(sight.state.may_be_billing for sight in left)


def _keys(session: Session, names: Sequence[str]) -> Iterator[tuple[str, Finding]]:
    """Yield each cloud with a finding on whether it has a key, without asking the cloud."""
    from gpurun.providers.registry import CLOUDS, key_source

    for name in names:
        if name not in CLOUDS:
            continue
        try:
            source = key_source(name, session.home)
        except SetupError as error:
            yield name, Finding("bad", f"{name}: {error.what}", error.hint)
            continue
        if source is None:
            yield name, Finding("warn", f"{name} has no key", f"gpurun auth set {name}")
        else:
            hint = f"gpurun doctor --online --provider {name}"
            yield name, Finding("ok", f"{name} has a key from {source}, not tested", hint)


def _key_findings(keys: Sequence[tuple[str, Finding]], *, named: bool) -> list[Finding]:
    """Return the findings on keys; a missing key is reported only if no cloud has a key, or the cloud was named."""
    from gpurun.providers.registry import CLOUDS

    missing = [name for name, finding in keys if finding.level == "warn"]
    if not named and len(missing) == len(CLOUDS):
        return [Finding("warn", "no cloud has a key, so nothing can be rented", "gpurun auth set runpod")]
    return [finding for name, finding in keys if named or name not in missing]


def _python() -> Finding:
    return Finding("ok", f"python {platform.python_version()} at {sys.executable}")


def _torch() -> Finding:
    """Check that torch is installed, without importing it, which would take time and memory."""
    if importlib.util.find_spec("torch") is None:
        return Finding("warn", "no PyTorch: dry runs do not work, planning and renting do", install_line("local"))
    from importlib.metadata import version

    return Finding("ok", f"PyTorch {version('torch')} for dry runs")


def _disk(session: Session) -> Finding:
    folder = next(place for place in (session.home.root, *session.home.root.parents) if place.exists())
    free = shutil.disk_usage(folder).free
    text = f"{format_bytes(free)} free for runs"
    return (
        Finding("ok", text)
        if free > _ENOUGH_BYTES
        else Finding("warn", text, "a checkpoint may not fit: free some space")
    )


def _uplink(session: Session) -> Finding:
    """Return a finding with the upload speed that plans assume, and where it comes from."""
    from gpurun.core.run_plan import Request
    from gpurun.jobs.training.history import load_priors, uplink_of

    configured = session.settings["uplink"].value
    request = Request(recipe="", uplink_mbit=float(configured) if configured else None)
    line = uplink_of(request, load_priors(session.home)[0])
    unknown = f"the first upload measures it; or write uplink = 48 (Mbit/s) into {session.home.config}"
    hint = "" if configured else unknown
    return Finding("ok", f"uploads are planned at {line.words}", hint)


def _home(session: Session) -> Finding:
    """Check that the home can be used, and that fsync and locks work in it."""
    from gpurun.ledger.fsync import require_durable

    try:
        require_durable(session.home.prepare().runs)
    except GpurunError as error:
        return Finding("bad", error.what, error.hint)
    return Finding("ok", f"home {session.home.root}, private, locks and fsync work")


def _bundle() -> Finding:
    from gpurun.core.installed_files import bundle_root

    try:
        root = bundle_root()
    except GpurunError as error:
        return Finding("bad", error.what, error.hint)
    recipes = len(list(Path(root / "recipes").glob("*.toml")))
    return Finding("ok", f"trainer, {recipes} recipes and docs in {root}")


def _ledger(session: Session) -> Finding:
    """Check the chain of receipts; the audit checks what the receipts state."""
    from gpurun.ledger.audit.strict_lines import chain_lines

    try:
        links, problems = chain_lines(session.home.ledger)
    except SetupError as error:
        return Finding("bad", error.what, error.hint)
    if problems:
        return Finding("bad", f"the ledger chain is broken: {plain_line(problems[0])}", "gpurun audit")
    counted = "1 receipt" if len(links) == 1 else f"{len(links)} receipts"
    return Finding("ok", f"ledger chain intact ({counted}; gpurun audit checks what the receipts state)")

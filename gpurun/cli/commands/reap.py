"""`gpurun reap`: find forgotten machines on every cloud that has a key, with or without local records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from gpurun.cli.durations import span_s
from gpurun.cli.options import Providers
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import Declined, ExitCode, MayBeBilling, SetupError, UsageError
from gpurun.core.places import place_facts, place_kinds
from gpurun.core.untrusted import safe_line

if TYPE_CHECKING:
    from gpurun.core.orphans import Orphan, Stray
    from gpurun.providers.base import Provider


Found = TypeVar("Found")

app = typer.Typer(rich_markup_mode=None)


@verb(app, "reap", examples=["gpurun reap", "gpurun reap --destroy --older-than 1h --exit-code"])
def reap(
    session: Session,
    provider: Providers = [],  # noqa: B006
    destroy: Annotated[
        bool,
        typer.Option(
            "--destroy",
            help="Also end machines of this home before their deadline, unless a supervisor drives them.",
        ),
    ] = False,
    anyones: Annotated[
        bool,
        typer.Option(
            "--anyones", help="With --destroy: also end machines of other homes, after you confirm their number."
        ),
    ] = False,
    confirm: Annotated[
        int | None,
        typer.Option(
            "--confirm", metavar="N", min=0, help="Confirm this number of machines, if no prompt is possible."
        ),
    ] = None,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Consider only machines older than this: 30m, 1h, 2d.")
    ] = "",
    look: Annotated[bool, typer.Option("--look", help="Only list, without ending anything.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 9 if anything is left, 4 without a key.")
    ] = False,
) -> Result:
    """Find every machine with gpurun's token on every cloud, and end those past their deadline.

    Exit 9 if something that should be gone is not proven gone, or has no known deadline. With `exit_code`, also exit 9
    if something is overdue, and 4 if there was no cloud to ask.
    """
    from gpurun.lifecycle.reaper import sweep, sweep_leftovers
    from gpurun.providers.base import endpoint_of
    from gpurun.view.reap_table import reap_notes, reap_table

    if anyones > destroy or (confirm is not None) > anyones:
        hint = "Use gpurun reap --destroy --anyones; in a script add --confirm N with the number of machines."
        raise UsageError("usage.anyones", "--anyones needs --destroy, and --confirm needs --anyones.", hint=hint)
    from gpurun.providers.registry import known_here

    age_s = _parse_age(older_than)
    names = provider or known_here(session.home)
    chosen, silent = _open_providers(session, names)
    others = _confirm_ids(session, chosen, confirm, age_s) if anyones and not look else frozenset[str]()
    where = (chosen, session.home, session.clock)
    found, unseen = _collect_until_error(
        sweep(*where, destroy_all=destroy, older_than_s=age_s, look_only=look, others=others)
    )
    strays, unswept = _collect_until_error(sweep_leftovers(*where, remove_all=destroy, look_only=look, anyones=anyones))
    silent = unseen or silent or unswept or _unchecked_billing(session, names, chosen)
    keyless = None
    if place_kinds(names) == {"here"} and not provider:  # Without a key, gpurun cannot see rented machines.
        what = "No cloud was checked, because this home has no key for any cloud."
        keyless = SetupError(
            "reap.no_key", what, hint="gpurun auth set runpod stores one; cron does not have your shell's variables."
        )
    alive = any(orphan.is_alarming for orphan in found)
    lost = any(orphan.may_be_billing for orphan in found) or any(stray.is_alarming for stray in strays)
    code = ExitCode.MAY_BE_BILLING if silent or lost or (exit_code and alive) else ExitCode.DONE
    endpoints = {provider.name: url for provider in chosen if (url := endpoint_of(provider))}
    data = {
        "asked": [provider.name for provider in chosen],
        "endpoints": endpoints,
        "found": [orphan.instance.model_dump(mode="json") | _verdict_as_data(orphan) for orphan in found],
        "leftovers": [stray.leftover.model_dump(mode="json") | _verdict_as_data(stray) for stray in strays],
    }
    labels = [_format_provider_address(provider.name, endpoints.get(provider.name)) for provider in chosen]
    table = reap_table([*found, *strays], [] if silent else labels, session.style, now=session.clock.wall())
    text = session.draw(table)
    if silent is None and keyless is not None and exit_code:  # A cron job that cannot find its keys must not succeed.
        return Result(data=data, text=text, errors=(keyless,), exit_code=code or keyless.exit_code)
    notes = [*reap_notes(found)]
    if keyless is not None:
        notes.append(f"{keyless.what} {keyless.hint}")
    return Result(data=data, text=text, after="\n".join(notes), errors=(silent,) if silent else (), exit_code=code)


def _verdict_as_data(found: Orphan | Stray) -> dict[str, object]:
    return {"fate": found.fate, "owner": found.owner.whose, "home": found.owner.home}


def _format_provider_address(name: str, url: str | None) -> str:
    """Return a provider's name, with the address to which its requests go if that is not the usual address."""
    return f"{name} at {safe_line(url)}, which is not its usual address" if url else name


def _collect_until_error(swept: Iterable[Found]) -> tuple[list[Found], MayBeBilling | None]:
    """Return what was found, and the error of a provider that did not respond, if any."""
    found = list[Found]()
    try:
        for machine in swept:
            found.append(machine)
    except MayBeBilling as error:
        return found, error
    return found, None


def _confirm_ids(session: Session, chosen: list[Provider], confirm: int | None, age_s: float) -> frozenset[str]:
    """Ask the user to confirm how many machines of other homes to end, and return their ids; Declined otherwise."""
    from gpurun.lifecycle.reaper import is_older, sweep
    from gpurun.view.reap_table import reap_table

    # A provider that does not respond now is reported by the sweep that follows.
    seen, _ = _collect_until_error(
        sweep(chosen, session.home, session.clock, destroy_all=False, older_than_s=0.0, look_only=True)
    )
    mortal = ("within lease", "no deadline")
    theirs = [
        machine for machine in seen if is_older(machine, age_s) and not machine.owner.is_here and machine.fate in mortal
    ]
    if not theirs and confirm is None:
        return frozenset()
    confirmed = confirm
    if confirmed is None:
        session.say(session.draw(reap_table(theirs, [], session.style, now=session.clock.wall())))
        question = (
            f"These machines of other homes may be training. Type {len(theirs)} to end them and lose their files:"
        )
        typed = session.ask(question, flag=f"--confirm {len(theirs)}")
        confirmed = int(typed) if re.fullmatch(r"[0-9]{1,6}", typed) else None
    if confirmed != len(theirs):
        what = f"There are {len(theirs)} machines of other homes, but you confirmed another number, so none was ended."
        raise Declined("reap.declined", what, hint="List them first: gpurun reap --look")
    return frozenset(machine.instance.id for machine in theirs)


def _open_providers(session: Session, names: list[str]) -> tuple[list[Provider], MayBeBilling | None]:
    """Open the providers. Return those that opened, and one error that names all others; None if all opened."""
    from gpurun.planning.own_box import login_to
    from gpurun.providers.registry import open_provider

    opened, errors = [], dict[str, SetupError]()
    for name in names:
        try:
            opened.append(open_provider(name, session.home, session.clock, login=login_to))
        except SetupError as error:
            errors[name] = error
    if not errors:
        return opened, None
    what = " ".join(f"{name} could not be checked: {error.what}" for name, error in errors.items())
    hint = " ".join(dict.fromkeys(error.hint for error in errors.values()))
    return opened, MayBeBilling("reap.cannot_look", what, hint=hint)


def _unchecked_billing(session: Session, names: list[str], providers: list[Provider]) -> MayBeBilling | None:
    """Return an error if a run may be billed by a provider that was not checked, or by another account."""
    from gpurun.ledger.runs import unfinished_runs
    from gpurun.lifecycle.instance.terminate import require_account
    from gpurun.providers.base import Unknown

    for sight in unfinished_runs(session.home) if session.home.runs.is_dir() else []:
        name, run = sight.plan.offer.provider, sight.folder.name
        if not sight.state.may_be_billing:
            continue
        if name not in names and not place_facts(name).is_own_box:
            what = f"{run} may be billed by {name}, which was not checked."
            return MayBeBilling("reap.not_asked", what, hint=f"gpurun auth set {name}, then: gpurun reap")
        try:
            for provider in providers:
                if provider.name == name:
                    require_account(provider, sight.state)
        except MayBeBilling as error:
            return error
        except (Unknown, SetupError) as error:
            what = f"{run} may be billed by {name}, which does not report the account of the key ({error})."
            return MayBeBilling("reap.cannot_look", what, hint="Run the command again once the provider answers.")
    return None


def _parse_age(text: str) -> float:
    """Return the age in seconds, 0 for an empty text; UsageError if it is not an age."""
    age_s = span_s(text) if text else 0
    if age_s is None:
        raise UsageError("usage.older_than", f"--older-than {text!r} is not an age.", hint="Write 30m, 1h or 2d.")
    return float(age_s)

"""Implements `gpurun auth`: stores keys of clouds, read from a prompt or standard input, never from an argument."""

from __future__ import annotations

import getpass
import os
import sys
import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.help_panels import make_verb_group
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.credentials import (
    KEYS,
    LONGEST_KEY,
    VARIABLES,
    aws_source,
    clean_key,
    file_of,
    find_credential,
    forget_credential,
    store_credential,
)
from gpurun.core.errors import Declined, SetupError, UsageError, did_you_mean
from gpurun.core.secrets import Secret

if TYPE_CHECKING:
    from gpurun.view.key_table import KeyRow

_AWS = (
    "Set up the SDK's keys: `aws configure` or `aws sso login`, then AWS_PROFILE for a profile other than default; or "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Then: gpurun doctor --online --provider aws"
)


def _complete_key_name(incomplete: str) -> list[str]:
    return [name for name in KEYS if name.startswith(incomplete)]


Owner = Annotated[
    str, typer.Argument(metavar="PROVIDER", help="runpod, lambda or lambda-guard.", autocompletion=_complete_key_name)
]
# This argument is accepted only to be refused, because Typer would print an unexpected argument: the key.
Stray = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="no key here")]


app = typer.Typer(
    help="Store, show and remove the keys of clouds; install gpurun's own key on a box.",
    cls=make_verb_group("status"),
    rich_markup_mode=None,
)


@verb(app, "auth set", examples=["gpurun auth set runpod", "pass show runpod | gpurun auth set runpod --online"])
def set_key(
    session: Session,
    provider: Owner,
    stray: Stray = None,
    online: Annotated[bool, typer.Option("--online", help="Ask the provider whether the key works.")] = False,
) -> Result:
    """Store a provider's key, read from a prompt without echo or from standard input.

    With `online`, or after a yes at the prompt, the provider is asked whether the key works.
    """
    from gpurun.providers.registry import CLOUDS

    _require_keyed(provider)
    if stray:
        what = "A key must not be an argument: the shell's history and the process list would show it."
        raise UsageError(
            "auth.key_as_argument", what, hint=f"Make a new key at the provider, then: gpurun auth set {provider}"
        )
    key = _read_key(session, provider)
    where = store_credential(provider, key, session.home)
    lines = [f"Stored the key for {provider} in the {where}."]
    variable = VARIABLES.get(provider, "")
    shadowed = bool(variable and os.environ.get(variable, "").strip())
    if shadowed:
        lines.append(f"{variable} is set in this environment and takes precedence.")
    data: dict[str, object] = {"provider": provider, "kept": where, "shadowed_by": variable if shadowed else None}
    if provider not in CLOUDS:
        lines.append("It is copied to a machine only with --lambda-guard.")
        return Result(data=data, text="\n".join(lines))
    if not (online or _wants_check(session, provider)):
        after = f"Check it: gpurun doctor --online --provider {provider}"
        return Result(data=data, text="\n".join(lines), after=after)
    from gpurun.cli.online_checks import check_online, online_code, online_data
    from gpurun.view.list_tables import doctor_lines

    checked = check_online(session, [provider])
    found = [finding for check in checked for finding in check.findings]
    lines.append(session.draw(doctor_lines(found, session.style)))
    return Result(data={**data, **online_data(checked)}, text="\n".join(lines), exit_code=online_code(checked))


def _wants_check(session: Session, name: str) -> bool:
    """Ask whether to check the key now, if the session is interactive; Enter means yes."""
    if not session.interactive:
        return False
    question = f"The key is stored. Ask {name} now whether it works? That changes nothing there. [Y/n]"
    return session.ask(question, flag="--online").lower() in ("", "y", "yes")


def _read_key(session: Session, name: str) -> Secret:
    """Read a key from a prompt without echo, or from a pipe."""
    if not sys.stdin.isatty():
        return clean_key(sys.stdin.read(LONGEST_KEY * 4))
    if not session.interactive:
        hint = f"Pipe it in: pass show {name} | gpurun auth set {name}"
        raise UsageError("input.needed", f"The key for {name} is needed, but prompts are off.", hint=hint)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", getpass.GetPassWarning)
            typed = getpass.getpass(f"Key for {name} (it is not shown): ", stream=sys.stderr)
    except getpass.GetPassWarning:
        hint = f"Pipe it in: pass show {name} | gpurun auth set {name}"
        raise UsageError("auth.no_silent_prompt", "This terminal cannot hide what you type.", hint=hint) from None
    except EOFError:
        session.say("")
        raise Declined("auth.declined", "No key was given, so nothing has changed.", hint="Run it again.") from None
    except KeyboardInterrupt:
        session.say("")
        raise
    return clean_key(typed)


@verb(app, "auth ssh", examples=["gpurun auth ssh root@connect.example.com:40123"])
def ssh(
    session: Session,
    host: Annotated[
        str, typer.Argument(metavar="LOGIN", help="USER@HOST[:PORT]: a box of yours that takes a password.")
    ],
) -> Result:
    """Install gpurun's key on your own box, with its password, which only ssh reads and which is not stored."""
    from gpurun.planning.own_box import demand_password_login, install_own_key

    login = demand_password_login(host)
    if not session.interactive:
        hint = "Run it in a terminal, or add the key of --identity on the platform's website."
        raise UsageError("input.needed", f"The password of {login} is needed, but prompts are off.", hint=hint)
    public = install_own_key(login, session.home, session.clock, session.say)
    data = {"host": str(login), "public_key": public}
    text = f"{login} now accepts gpurun's key. Only ssh read the password, and it was not stored."
    return Result(data=data, text=text, after=f"Use it: gpurun train --provider ssh --host {login}")


@verb(app, "auth status", examples=["gpurun auth status", "gpurun auth status --json"])
def status(session: Session) -> Result:
    """Show which providers have a key and where it comes from, but no part of the key."""
    from gpurun.providers.registry import CLOUDS
    from gpurun.view.key_table import keys_table

    rows = [*(_row(session, name) for name in KEYS), _aws_row()]
    data = {
        "providers": [
            {"provider": row.name, "key": row.source is not None, "source": row.source, "problem": row.problem}
            for row in rows
        ]
    }
    broken = [row for row in rows if row.problem]
    missing = [row.name for row in rows if row.source is None and not row.problem and row.name in CLOUDS]
    after = f"To store a key: gpurun auth set {missing[0]}" if len(missing) == len(CLOUDS) else ""
    errors = tuple(SetupError("auth.broken_key", row.problem, hint=row.hint) for row in broken)
    return Result(
        data=data,
        text=session.draw(keys_table(rows, session.style)),
        after=after,
        errors=errors,
        exit_code=SetupError.exit_code if errors else Result().exit_code,
    )


def _row(session: Session, name: str) -> KeyRow:
    from gpurun.providers.registry import CLOUDS
    from gpurun.view.key_table import KeyRow

    about = "for --lambda-guard: ends a Lambda machine from within" if name not in CLOUDS else ""
    try:
        found = find_credential(name, session.home)
    except SetupError as error:
        return KeyRow(name, None, problem=error.what, hint=error.hint, about=about)
    also = file_of(name, session.home)
    if found is not None and found.source.startswith("environment") and also.exists():
        about = f"takes precedence over the key in file {also}"
    return KeyRow(name, found.source if found else None, about=about)


def _aws_row() -> KeyRow:
    """Return the row for AWS: where the environment or the files have keys. Whether the keys work is not checked."""
    from gpurun.view.key_table import KeyRow

    return KeyRow("aws", aws_source(), about="found by the AWS SDK itself")


@verb(app, "auth rm", examples=["gpurun auth rm runpod"])
def rm(session: Session, provider: Owner) -> Result:
    """Remove a key that `auth set` stored."""
    _require_keyed(provider)
    places = forget_credential(provider, session.home)
    variable = VARIABLES.get(provider, "")
    still = variable if variable and os.environ.get(variable, "").strip() else ""
    text = (
        f"Removed the key for {provider} from the {' and the '.join(places)}."
        if places
        else f"No key for {provider} was stored."
    )
    if still:
        text += f"\n{still} is still set in this environment: unset {still}"
    after = "The provider still accepts the key: revoke it there if nothing else uses it." if places else ""
    return Result(data={"provider": provider, "removed": places, "still_in": still or None}, text=text, after=after)


def _require_keyed(name: str) -> None:
    """Raise UsageError, with what to do instead, for a name whose key gpurun does not store."""
    from gpurun.providers.registry import PROVIDERS

    if name in KEYS:
        return
    if name == "aws":
        source = aws_source()
        now = f"it finds keys in the {source}" if source else "it finds none in the environment or in ~/.aws"
        raise UsageError("auth.aws", f"gpurun stores no AWS keys; the AWS SDK looks for them, and {now}.", hint=_AWS)
    if name in PROVIDERS:
        raise UsageError("auth.no_key_needed", f"{name} needs no key.", hint=f"Use it: gpurun train --provider {name}")
    hint = did_you_mean(name, (*KEYS, "aws"), otherwise=f"Keys are stored for {', '.join(KEYS)}.")
    raise UsageError("provider.unknown", f"This gpurun has no provider {name!r}.", hint=hint)

"""What the `auth` verbs do. No key is ever an argument, shown, or part of an error."""

from __future__ import annotations

import getpass
import os
import sys
import warnings

from gpurun.cli.result import Result
from gpurun.cli.session import Session
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
from gpurun.providers.registry import CLOUDS
from gpurun.view.keys import KeyRow, keys_table
from gpurun.view.listings import doctor_lines
from gpurun.view.paint import render

_AWS = (
    "Give them to the SDK: `aws configure` or `aws sso login`, then AWS_PROFILE if they are not the default; or "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Then: gpurun doctor --online --provider aws"
)


def keep_key(session: Session, name: str, stray: list[str], *, online: bool) -> Result:
    """Read a key, keep it, say where; with `online`, or when asked for at the prompt, ask the provider about it."""
    _require_keyed(name)
    if stray:
        what = (
            "A key is not taken as an argument: it would stay in the shell's history and show in the list of processes."
        )
        raise UsageError(
            "auth.key_as_argument", what, hint=f"Make a new key at the provider, then: gpurun auth set {name}"
        )
    key = _read_key(session, name)
    where = store_credential(name, key, session.home)
    lines = [f"Kept the key for {name} in the {where}."]
    variable = VARIABLES.get(name, "")
    shadowed = bool(variable and os.environ.get(variable, "").strip())
    if shadowed:
        lines.append(f"{variable} is set in this environment and goes before it.")
    data: dict[str, object] = {"provider": name, "kept": where, "shadowed_by": variable if shadowed else None}
    if name not in CLOUDS:
        lines.append("It is put on the machine only with --lambda-guard.")
        return Result(data=data, text="\n".join(lines))
    if not (online or _wants_check(session, name)):
        after = f"Check it: gpurun doctor --online --provider {name}"
        return Result(data=data, text="\n".join(lines), after=after)
    from gpurun.cli.online import check_online, online_code, online_data

    checked = check_online(session, [name])
    found = [finding for one in checked for finding in one.findings]
    lines.append(render(doctor_lines(found, session.style), session.style))
    return Result(data={**data, **online_data(checked)}, text="\n".join(lines), exit_code=online_code(checked))


def _wants_check(session: Session, name: str) -> bool:
    """Ask whether to check at once, where somebody can answer; Enter means yes."""
    if not session.interactive:
        return False
    question = f"It is kept. Ask {name} now whether it works? That changes nothing there. [Y/n]"
    return session.ask(question, flag="--online").lower() in ("", "y", "yes")


def _read_key(session: Session, name: str) -> Secret:
    """From a prompt that shows nothing, or from whatever is piped in."""
    if not sys.stdin.isatty():
        return clean_key(sys.stdin.read(LONGEST_KEY * 4))
    if not session.interactive:
        hint = f"Pipe it in: pass show {name} | gpurun auth set {name}"
        raise UsageError("input.needed", f"The key for {name} is needed, and asking is off.", hint=hint)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", getpass.GetPassWarning)
            typed = getpass.getpass(f"Key for {name} (it is not shown): ", stream=sys.stderr)
    except getpass.GetPassWarning:
        hint = f"Pipe it in: pass show {name} | gpurun auth set {name}"
        raise UsageError("auth.no_silent_prompt", "This terminal cannot hide what is typed.", hint=hint) from None
    except EOFError:
        session.say("")
        raise Declined("auth.declined", "No key was given; nothing has changed.", hint="Run it again.") from None
    except KeyboardInterrupt:
        session.say("")
        raise
    return clean_key(typed)


def key_status(session: Session) -> Result:
    """A row for every key: whether there is one, and where from."""
    rows = [*(_row(session, name) for name in KEYS), _aws_row()]
    data = {
        "providers": [
            {"provider": row.name, "key": row.source is not None, "source": row.source, "problem": row.problem}
            for row in rows
        ]
    }
    broken = [row for row in rows if row.problem]
    missing = [row.name for row in rows if row.source is None and not row.problem and row.name in CLOUDS]
    after = f"Give one: gpurun auth set {missing[0]}" if len(missing) == len(CLOUDS) else ""
    errors = tuple(SetupError("auth.broken_key", row.problem, hint=row.hint) for row in broken)
    return Result(
        data=data,
        text=render(keys_table(rows, session.style), session.style),
        after=after,
        errors=errors,
        exit_code=SetupError.exit_code if errors else Result().exit_code,
    )


def _row(session: Session, name: str) -> KeyRow:
    about = "for --lambda-guard: ends a Lambda machine from within" if name not in CLOUDS else ""
    try:
        found = find_credential(name, session.home)
    except SetupError as error:
        return KeyRow(name, None, problem=error.what, hint=error.hint, about=about)
    also = file_of(name, session.home)
    if found is not None and found.source.startswith("environment") and also.exists():
        about = f"goes before the one in file {also}"
    return KeyRow(name, found.source if found else None, about=about)


def _aws_row() -> KeyRow:
    """What the environment and the files say; only the SDK knows whether they hold, and a role of the machine."""
    return KeyRow("aws", aws_source(), about="found by the AWS SDK itself")


def remove_key(session: Session, name: str) -> Result:
    """Forget a key wherever gpurun kept it; one in the environment is the user's own to remove."""
    _require_keyed(name)
    places = forget_credential(name, session.home)
    variable = VARIABLES.get(name, "")
    still = variable if variable and os.environ.get(variable, "").strip() else ""
    text = (
        f"Removed the key for {name} from the {' and the '.join(places)}." if places else f"No key for {name} was kept."
    )
    if still:
        text += f"\n{still} is still set in this environment: unset {still}"
    after = "The provider still knows it: revoke it there if nothing else uses it." if places else ""
    return Result(data={"provider": name, "removed": places, "still_in": still or None}, text=text, after=after)


def _require_keyed(name: str) -> None:
    """Refuse names that no key is kept for, each with what to do instead."""
    if name in KEYS:
        return
    if name == "aws":
        source = aws_source()
        now = f"it finds some now in the {source}" if source else "it finds none in the environment or in ~/.aws"
        raise UsageError("auth.aws", f"gpurun keeps no AWS keys; the AWS SDK looks for them, and {now}.", hint=_AWS)
    if name in ("ssh", "local"):
        raise UsageError("auth.no_key_needed", f"{name} needs no key.", hint=f"Use it: gpurun train --provider {name}")
    hint = did_you_mean(name, (*KEYS, "aws"), otherwise=f"Keys are kept for {', '.join(KEYS)}.")
    raise UsageError("provider.unknown", f"This gpurun has no provider {name!r}.", hint=hint)

"""Defines the flags of `gpurun dev`, and builds the request for a dev box from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.command_options import (
    COMMAND,
    number_flag,
    parse_globs,
    parse_upload_globs,
    refuse_pip_here,
    repeated_flag,
)
from gpurun.cli.durations import sync_s
from gpurun.cli.options import RENTING, build_request_fields, flag, make_from_option, make_text_option, usual_providers
from gpurun.cli.session import Session
from gpurun.cli.verb import Shared
from gpurun.core.errors import UsageError

if TYPE_CHECKING:
    from gpurun.core.run_plan import Request
    from gpurun.planning.dev_box_proposal import DevBoxWishes

_ADDRESS = re.compile(r"(https?|git|ssh|file)://[^\s]+|[A-Za-z0-9._-]+@[A-Za-z0-9._-]+:[^\s]+")
_WITH_SECRET = re.compile(r"https?://[^/\s]*@|//[^/@\s]*:[^/@\s]*@")
"""Matches an address with a password, or with a user name, which may be a token."""
_NOT_HERE = ("stage", "log_to", "silent", "dry_run")
"""The renting flags that `gpurun dev` does not have; their defaults apply."""


def dev_box_request(session: Session, **typed: Any) -> tuple[Request, DevBoxWishes]:
    """Return the checked request for a dev box; with --from, missing values are taken from the earlier box."""
    from gpurun.core.command import EVERYTHING, Command
    from gpurun.core.run_plan import Request
    from gpurun.jobs.commands.continued_dev_box import dev_box_as_before
    from gpurun.jobs.dev_box import IDLE_S, KEEP, SYNC_S
    from gpurun.jobs.requirements import requirement_lines
    from gpurun.planning.dev_box_proposal import DevBoxWishes

    _demand_one_folder(typed)
    renting = build_request_fields(session, **{name: RENTING[name][1] for name in _NOT_HERE}, **typed)
    command = Command(
        argv=KEEP,
        folder=_upload_folder(typed),
        outputs=(*EVERYTHING, *parse_globs("--outputs", typed["outputs"], is_wide=True)),
        include=parse_upload_globs("--include", typed["include"]),
        exclude=parse_upload_globs("--exclude", typed["exclude"]),
        pip=tuple(line for text in typed["pip"] for line in requirement_lines(text)),
        output_bytes=int(1e9 * typed["output_gb"]),
        disk_gb=typed["disk"],
        grace_s=10,
    )
    request = Request(recipe="", **renting, command=command)
    if command.pip:
        refuse_pip_here(request, "Install it yourself, and leave --pip out.")
    wishes: dict[str, Any] = {
        "git": _require_plain_address(typed["git"]),
        "jupyter": typed["jupyter"],
        "sync_s": sync_s(typed["sync"]) if typed["sync"] else SYNC_S,
    }
    if typed["continues"] is not None:
        request, wishes = dev_box_as_before(request, wishes, session.home, usual_providers(session))
    if request.choices.idle_s is None:
        request = request.model_copy(update={"choices": request.choices.model_copy(update={"idle_s": IDLE_S})})
    return request, DevBoxWishes(**wishes)


def _demand_one_folder(typed: dict[str, Any]) -> None:
    """Raise a UsageError if two flags define the content of the folder."""
    given = [name for name, is_given in (("--from", typed["continues"] is not None), ("--git", typed["git"]),
                                         ("--upload", typed["upload"])) if is_given]  # fmt: skip
    if len(given) > 1:
        what = f"{given[0]} and {given[1]} both define the content of the folder."
        raise UsageError("dev.two_folders", what, hint="Use only one of them; add more files with --data or scp.")


def _upload_folder(typed: dict[str, Any]) -> str:
    """Return the folder to upload: --upload, else the working folder; "" if the files come from --git or --from."""
    if typed["git"] or typed["continues"] is not None:
        return ""
    place = Path(typed["upload"] or ".").expanduser().absolute()
    if not place.is_dir():
        raise UsageError("run.upload", f"There is no folder {place}.", hint="Name an existing folder: --upload .")
    return str(place)


def _require_plain_address(text: str) -> str:
    """Return the --git address unchanged.

    UsageError if it is not an address, or contains a user or password, because the plan stores it.
    """
    if text and not _ADDRESS.fullmatch(text):
        what = f"--git {text!r} is not the address of a repository."
        raise UsageError(
            "dev.git", what, hint="For example --git https://github.com/karpathy/nanoGPT; for a folder use --upload."
        )
    if _WITH_SECRET.search(text):
        what = "--git contains a user or password, which would be stored in the plan and on the machine."
        raise UsageError("dev.git_secret", what, hint="Clone it on this computer, and upload the folder: --upload DIR")
    return text


_RENTING = {name: kind for name, kind in RENTING.items() if name not in _NOT_HERE}
DEV_BOX = Shared(
    "wanted",
    {
        **_RENTING,
        "data": COMMAND.flags["data"],
        "hours": (
            Annotated[float | None, typer.Option("--hours", metavar="H", help="End the box after this many hours.")],
            None,
        ),
        "idle": (make_text_option("--idle", "DURATION", "End the box after this long without use (default 30m)."), ""),
        "continues": (make_from_option("Start with the files of an earlier box."), None),
        "upload": (make_text_option("--upload", "DIR", "Work in a copy of this folder (default: current)."), ""),
        "git": (make_text_option("--git", "URL", "Work in a clone of this repository."), ""),
        "include": COMMAND.flags["include"],
        "exclude": COMMAND.flags["exclude"],
        "pip": COMMAND.flags["pip"],
        "jupyter": (flag("--jupyter", "Start JupyterLab on the box, with a tunnel to it."), False),
        "outputs": (repeated_flag("--outputs", "GLOBS", "Also download these files from outside the folder."), []),
        "sync": (make_text_option("--sync", "DURATION", "Download changed files this often (default 5m)."), ""),
        "output_gb": COMMAND.flags["output_gb"],
        "disk": (number_flag(int, "--disk", "GB", "Rent a disk this large (default 50).", min=1, max=16_000), 50),
    },
    dev_box_request,
)
"""The flags that define a dev box and its files."""

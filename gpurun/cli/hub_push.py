"""`export --to hf --push OWNER/NAME`: uploads an exported model to the hub with the user's own login."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType

from gpurun.cli.session import Session
from gpurun.core.errors import Declined, SetupError, UsageError
from gpurun.core.installed_files import install_line

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def require_push_setup(name: str) -> None:
    """Raise an error if --push has no valid name, or huggingface_hub or its login is missing; nothing is written."""
    if not _NAME.fullmatch(name):
        raise UsageError("export.push_name", f"--push {name!r} is not the name of a model.", hint="Write OWNER/NAME.")
    if not _import_library().get_token():
        hint = "Run hf auth login, or set HF_TOKEN to a token with write access."
        raise SetupError("export.no_login", "You are not logged in to the hub.", hint=hint)


def push(session: Session, folder: Path, name: str, *, yes: bool) -> str:
    """Ask, upload a model's folder to an existing or a new private repository, and return the repository's address.

    Declined if the user says no; SetupError, with the hub's message, if the hub refuses.
    """
    library = _import_library()
    api = library.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    if not yes:
        question = f"Upload {folder} to {api.endpoint}/{name} (private, if it is new)? [y/N]"
        if session.ask(question, flag="--yes").lower() not in ("y", "yes"):
            raise Declined(
                "export.declined", f"Nothing was uploaded; the model is in {folder}.", hint="The folder was kept."
            )
    try:
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"gpurun export: {folder.name}")
    except (OSError, ValueError, library.errors.HfHubHTTPError) as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        hint = f"The model is in {folder}; the same command with another folder uploads it again."
        raise SetupError("export.not_pushed", f"The hub refused {name}: {what}", hint=hint) from None
    return str(address)


def _import_library() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        hint = install_line("data")
        raise SetupError("export.no_hub", "--push needs huggingface_hub, which is not installed.", hint=hint) from None
    return huggingface_hub

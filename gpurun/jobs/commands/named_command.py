"""Named commands, `recipes/commands/NAME.toml`: a public repository's own run, from a clone that its user has.

Nothing of the repository is here. The file says which it is, at which commit, and what `gpurun run` is to be told.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import bundle_root, recipe_file
from gpurun.core.paths import read_regular
from gpurun.core.records import Frozen
from gpurun.core.secrets import child_environment
from gpurun.jobs.commands.work_folder import commit_of


class NamedCommand(Frozen):
    """What a named command says; what its user types counts more. `gpu` to `data` are the flags of `gpurun run`."""

    name: str
    about: str
    repository: Annotated[str, Field(pattern=r"https://[\w./-]+")]
    commit: Annotated[str, Field(pattern=r"[0-9a-f]{40}")]
    command: tuple[str, ...]
    gpu: str
    outputs: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    data: str = ""
    hours: float | None = None
    disk: int = 50
    output_gb: float = 2.0

    @property
    def flags(self) -> dict[str, Any]:
        """What it stands for, by the names of the flags."""
        told = self.model_dump(include={"gpu", "data", "hours", "disk", "output_gb"})
        return told | {name: list(getattr(self, name)) for name in ("command", "outputs", "exclude", "pip")}


def named_commands() -> tuple[str, ...]:
    """The names of those that there are, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


def read_named(name: str) -> NamedCommand:
    """Read a named command; SetupError where this installation has a damaged one."""
    path = _folder() / f"{name}.toml"
    try:
        return NamedCommand.model_validate({**recipe_file.parse_toml(read_regular(path).decode()), "name": name})
    except (OSError, ValueError, ValidationError) as error:
        what = f"{path} is no named command: {str(error).splitlines()[0]}."
        raise SetupError("install.incomplete", what, hint="Install gpurun again.") from None


def demand_clone(named: NamedCommand, folder: Path) -> None:
    """UsageError where a folder is no clone of the repository at that commit, unchanged."""
    place, clone = shlex.quote(str(folder)), named.repository.rpartition("/")[2]
    found = commit_of(str(folder)) if folder.is_dir() else ""
    hint = f"git -C {place} checkout {named.commit}"
    if not found:
        what = f"{folder} is no clone of {named.repository}, which {named.name} runs."
        hint = f"git clone {named.repository} && git -C {clone} checkout {named.commit}; then --upload {clone}."
    elif found != named.commit:
        what = f"{named.name} runs {named.repository} at {named.commit[:12]}, and {folder} is at {found[:12]}."
    elif _is_changed(folder):
        what = f"{folder} has changes that are not in {named.commit[:12]}, which {named.name} runs."
        hint = f"To run what you changed, type it: gpurun run --upload {place} … -- {shlex.join(named.command)}"
    else:
        return
    raise UsageError("run.other_clone", what, hint=hint)


def _is_changed(folder: Path) -> bool:
    """Whether a file that git keeps there is another than in its commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "diff", "--quiet", "HEAD"], env=child_environment(),
            stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return True
    return done.returncode != 0


def _folder() -> Path:
    return bundle_root() / "recipes" / "commands"

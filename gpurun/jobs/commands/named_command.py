"""Reads named commands, which `gpurun run NAME` starts. Each is a table with flags of `gpurun run`.

A packaged command is `recipes/commands/NAME.toml`. It runs a public repository from the user's own clone, and contains
nothing of the repository. A folder's command is the table `[run.NAME]` in its gpurun.toml, which a stranger may have
written.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from gpurun.core.credentials import VARIABLES
from gpurun.core.errors import SetupError, UsageError, did_you_mean
from gpurun.core.installed_files import bundle_root, recipe_file
from gpurun.core.paths import Home, make_private, read_regular, write_atomic
from gpurun.core.records import Frozen, digest_json
from gpurun.core.secrets import child_environment
from gpurun.core.settings import PROJECT_FILE, project_runs
from gpurun.jobs.commands.work_folder import commit_of
from gpurun.remote.agent.processes import looks_secret
from gpurun.remote.archive import survey

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OF_A_SHELL = set("|&;<>`$\n")


def _split_words(command: Any) -> Any:
    """Split a command that is written as one string. Raise ValueError for shell syntax: no shell interprets it."""
    if not isinstance(command, str):
        return command
    if found := sorted(_OF_A_SHELL & set(command)):
        raise ValueError(f'it contains {found[0]!r}, which needs a shell: command = ["bash", "-c", "…"]')
    return shlex.split(command)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]


class NamedCommand(Frozen):
    """The table of one named command. Its fields `command` to `silent` are flags of `gpurun run`; a typed flag wins.

    `place` is the file or table from which it was read. A table must not set any other flag.
    """

    model_config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False)

    name: str
    place: str
    about: str = ""
    repository: Annotated[str, Field(pattern=r"https://[\w./-]+")] = ""
    commit: Annotated[str, Field(pattern=r"[0-9a-f]{40}")] = ""
    command: Annotated[tuple[str, ...], BeforeValidator(_split_words), Field(min_length=1)]
    upload: str = ""
    include: Texts = ()
    exclude: Texts = ()
    data: str = ""
    pip: Texts = ()
    image: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    secret: Texts = ()
    outputs: Texts = ()
    checkpoint_glob: str = ""
    resume_arg: str = ""
    gpu: str = ""
    spot: bool = False
    max_cost: str = ""
    hours: float | None = None
    disk: int = 50
    output_gb: float = 2.0
    total_steps: int = 0
    stop_signal: str = "TERM"
    grace: int = 60
    idle: str = ""
    silent: str = ""
    sweep: dict[str, Any] = Field(default_factory=dict)
    """The settings that `gpurun sweep NAME` tries. The command refers to them as {name}."""

    @property
    def flags(self) -> dict[str, Any]:
        """Return the flags that the table sets, keyed by name."""
        values = self.model_dump(mode="json", exclude_unset=True, exclude=set(_NO_FLAGS))
        if "env" in values:
            values["env"] = [f"{name}={value}" for name, value in self.env.items()]
        return values

    @property
    def digest(self) -> str:
        """Return the sha256 of the table and its name."""
        return digest_json(self.model_dump(mode="json", exclude_unset=True, exclude={"place"}))

    @property
    def comes_with_gpurun(self) -> bool:
        """Return whether the command came with gpurun, and therefore needs no approval."""
        return not self.place.endswith(PROJECT_FILE)


_NO_FLAGS = ("name", "place", "about", "repository", "commit", "sweep")
KEYS = tuple(key for key in NamedCommand.model_fields if key not in ("name", "place"))
"""The keys that a table may have."""


def packaged_commands() -> tuple[str, ...]:
    """Return the names of the packaged commands, sorted."""
    return tuple(sorted(path.stem for path in _packaged_folder().glob("*.toml")))


def read_packaged(name: str) -> NamedCommand:
    """Read a packaged command. Raise SetupError if its file is damaged."""
    path = _packaged_folder() / f"{name}.toml"
    try:
        return _parse_table(name, recipe_file.parse_toml(read_regular(path).decode()), str(path), ())
    except (OSError, ValueError, UsageError) as error:
        what = f"{path} is not a named command: {str(error).splitlines()[0]}."
        raise SetupError("install.incomplete", what, hint="Install gpurun again.") from None


def find_named(name: str, project: Path, flags: Collection[str]) -> NamedCommand | None:
    """Return the command with this name, preferably from the folder's own file; None if there is none.

    `flags` are the flags of `gpurun run`. Raise UsageError if a table sets one that tables must not set, or names a
    path outside of its folder.
    """
    tables = project_runs(project)
    if name in tables:
        named = _parse_table(name, tables[name], f"[run.{name}] of {PROJECT_FILE}", flags)
        _refuse_unsafe_files(named, project)
        return named
    return read_packaged(name) if name in packaged_commands() else None


def refuse_unknown(name: str, project: Path) -> UsageError:
    """Return the error for an unknown name; its hint lists the known names."""
    own = [found for found in project_runs(project) if _NAME.fullmatch(found)]
    here = f"In {PROJECT_FILE}: {', '.join(own)}. " if own else ""
    known = f"{here}Packaged: {', '.join(packaged_commands())}."
    near = did_you_mean(name, [*own, *packaged_commands()], otherwise="")
    file = f" To run the file of that name: ./{name}." if (project / name).is_file() else ""
    hint = f"{near} {known}{file} To run a program with that name: gpurun run … -- {name}".strip()
    return UsageError("run.no_such_name", f"There is no run and no program called {name!r} here.", hint=hint)


def _parse_table(name: str, table: Any, place: str, flags: Collection[str]) -> NamedCommand:
    """Return the command that a table describes. Raise UsageError, which names the key, for a wrong key or value."""
    if not _NAME.fullmatch(name) or not isinstance(table, Mapping):
        what = f"{place} is not a table whose name consists of letters, digits, _ and -."
        raise UsageError("run.table", what, hint='For example: [run.baseline] command = "python train.py"')
    values = {key.replace("-", "_"): value for key, value in table.items()}
    for key in values:
        if key not in KEYS and key in flags:
            what = f"{place} sets {key}, which is not allowed in a table."
            raise UsageError("run.not_in_a_table", what, hint=f"Remove it, and type it: --{key.replace('_', '-')}")
        if key not in KEYS:
            hint = did_you_mean(key, KEYS, otherwise=f"Known keys: {', '.join(KEYS)}.")
            raise UsageError("run.unknown_key", f"{place} has the unknown key {key!r}.", hint=hint)
    _refuse_secret_values(values, place)
    try:
        return NamedCommand.model_validate({**values, "name": name, "place": place})
    except ValidationError as error:
        fault = error.errors()[0]
        key, why = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        hint = f"Write {key} as shown in docs/ANY-SCRIPT.md under Runs that have a name."
        raise UsageError("run.table", f"{key} in {place}: {why}.", hint=hint) from None


def _refuse_secret_values(values: Mapping[str, Any], place: str) -> None:
    """Raise UsageError if the table contains a secret's value, or names the key of a provider's account."""
    secret, env = values.get("secret", ()), values.get("env", {})
    names = _as_list(secret)
    if not isinstance(names, list | tuple) or any("=" in str(name) for name in names):
        what = f"secret in {place} contains more than names; a file must not contain the value of a secret."
        hint = 'Write names only: secret = ["WANDB_API_KEY"]; the value comes from your shell.'
        raise UsageError("run.secret_value", what, hint=hint)
    for name, value in env.items() if isinstance(env, Mapping) else ():
        if looks_secret(name, str(value)):
            what = f"env.{name} in {place} looks like a key; a file must not contain its value."
            hint = f'Write secret = ["{name}"]; the value comes from your shell.'
            raise UsageError("run.secret_value", what, hint=hint)
    if own := [name for name in names if name in VARIABLES.values() or str(name).startswith("AWS_")]:
        what = f"secret in {place} names {own[0]}, a key that rents machines."
        raise UsageError("run.not_in_a_table", what, hint=f"Remove it, and type it: --secret {own[0]}")


def _refuse_unsafe_files(named: NamedCommand, project: Path) -> None:
    """Raise UsageError if a folder's table names a path outside of it, or includes a file that looks like a key."""
    files = [("pip", requirement) for requirement in named.pip if requirement.endswith(".txt")]
    data = [("data", named.data)] if named.data and not named.data.startswith("hf:") else []
    for key, path in [("upload", named.upload), *data, *files]:
        if path.startswith(("~", "s3:")) or not (project / path).resolve().is_relative_to(project.resolve()):
            what = f"{key} in {named.place} is {path}, which is not below the file's folder."
            raise UsageError("run.not_in_a_table", what, hint=f"Remove it, and type it: --{key} {shlex.quote(path)}")
    folder = project / named.upload
    let_in = {name: folder / name for name in named.include if (folder / name).is_file()}
    for refusal in survey(let_in, []).refusals:
        what = f"include in {named.place} names {refusal.path}: {refusal.reason}."
        hint = f"Remove it; if that file is not a key, type --include {shlex.quote(Path(refusal.path).name)}."
        raise UsageError("run.not_in_a_table", what, hint=hint)


def is_approved(named: NamedCommand, home: Home) -> bool:
    """Return whether the user has already approved exactly this table."""
    return (home.approved_runs / f"{named.digest}.json").is_file()


def approve(named: NamedCommand, home: Home) -> None:
    """Record that the user approved this table."""
    make_private(home.prepare().approved_runs)
    write_atomic(home.approved_runs / f"{named.digest}.json", named.to_json().encode())


def require_clone(named: NamedCommand, folder: Path) -> None:
    """Raise UsageError unless the folder is an unmodified clone of the command's repository at its commit."""
    place, clone = shlex.quote(str(folder)), named.repository.rpartition("/")[2]
    found = commit_of(str(folder)) if folder.is_dir() else ""
    hint = f"git -C {place} checkout {named.commit}"
    if not found:
        what = f"{folder} is not a clone of {named.repository}, which {named.name} runs."
        hint = f"git clone {named.repository} && git -C {clone} checkout {named.commit}; then --upload {clone}."
    elif found != named.commit:
        what = f"{named.name} runs {named.repository} at {named.commit[:12]}, and {folder} is at {found[:12]}."
    elif _is_changed(folder):
        what = f"{folder} has changes that are not in {named.commit[:12]}, which {named.name} runs."
        hint = f"To run your changed copy: gpurun run --upload {place} … -- {shlex.join(named.command)}"
    else:
        return
    raise UsageError("run.other_clone", what, hint=hint)


def _is_changed(folder: Path) -> bool:
    """Return whether a file that git tracks differs from the checked-out commit; True if git fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "diff", "--quiet", "HEAD"], env=child_environment(),
            stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return True
    return done.returncode != 0


def _packaged_folder() -> Path:
    return bundle_root() / "recipes" / "commands"

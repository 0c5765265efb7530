"""The user's own command, which runs in place of the bundled trainer: its words, its files, and how it is stopped."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from os.path import normpath
from pathlib import PurePosixPath

from pydantic import Field

from gpurun.core.errors import UsageError
from gpurun.core.records import Frozen

WORK = "bundle/work"
"""The working folder of a command, below the run's folder on the machine: a copy of the uploaded folder."""

EVERYTHING = ("**",)
"""The globs of the outputs if the user gives no --out: all new files below the command's folder."""
_GLOB = re.compile(r"[A-Za-z_*?\[][A-Za-z0-9_*?\[\]!-]*")
PUBLISH_START_S, DIGEST_BYTES_PER_S = 10, 4e8  # Each output is linked and read once.


NOTEBOOK = ("-m", "nbconvert", "--to", "notebook", "--execute", "--ExecutePreprocessor.kernel_name=python3")
"""Python's arguments to run a notebook; the executed notebook is a new file in the same folder."""


class Command(Frozen):
    """The command that `gpurun run` runs.

    `argv` has the words as the user typed them. `folder` is uploaded ("" for none), and its copy is the command's
    working folder on the machine. `outputs` are globs below it for the files that come home. `checkpoints` is a glob
    for the files that the command can resume from; the newest of them comes home first. To resume, `resume_arg` is
    appended to the command, with `{}` replaced by the checkpoint. `secrets` has only names, no values. `total_steps` is
    0 if unknown. `include` and `exclude` are globs: for files to upload that would be left out otherwise, and for files
    to leave out. `pip` has the requirement lines that are installed first. `imports` are the top-level modules that the
    program always imports and that are not in its folder. `python` is the Python of a rehearsal with `pip`. A command
    is stopped by `stop_signal`, and killed `grace_s` later. `output_bytes` is the assumed size of its outputs. Of the
    files in the folder, `executable` are those with the executable bit. `commit` is the commit that git had checked out
    in it. `resumed` is the checkpoint that the command resumes from, as a path below the folder. `challenge` is a
    teacher's word with the id of the signing key (WORD:KEYID).
    """

    argv: tuple[str, ...]
    folder: str = ""
    outputs: tuple[str, ...] = ()
    checkpoints: str = ""
    resume_arg: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    total_steps: int = 0
    stop_signal: str = "TERM"
    grace_s: int = 60
    executable: tuple[str, ...] = ()
    resumed: str = ""
    commit: str = ""
    output_bytes: int = 2_000_000_000
    disk_gb: int = 50
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    python: str = ""
    challenge: str = ""

    @property
    def save_s(self) -> int:
        """Return how long it may take after the stop signal: its own time to end, and the runner's to hash outputs."""
        return self.grace_s + PUBLISH_START_S + int(self.output_bytes / DIGEST_BYTES_PER_S)

    @property
    def words(self) -> list[str]:
        """Return the words that the machine starts, with `{python}` for the Python that has torch.

        They include `resume_arg` if the command resumes from a checkpoint.
        """
        first = self.argv[0]
        start = [first]
        if first in ("python", "python3"):
            start = ["{python}"]
        elif first.endswith(".py"):
            start = ["{python}", first]
        elif first.endswith(".ipynb"):
            start = ["{python}", *NOTEBOOK, first]
        elif first.endswith(".sh"):  # Without #! or the executable bit, bash runs it.
            start = [f"./{normpath(first)}"] if normpath(first) in self.executable else ["bash", first]
        more = [word.replace("{}", self.resumed) for word in shlex.split(self.resume_arg)] if self.resumed else []
        return [*start, *self.argv[1:], *more]

    @property
    def recorded(self) -> dict[str, list[str]]:
        """Return the entry for journal and receipt: the typed words, and the names of its variables without values."""
        return {"argv": list(self.argv), "env": sorted(self.env), "secrets": sorted(self.secrets)}

    @property
    def name(self) -> str:
        """Return the name for lists: that of the first .py or .sh file among its words, else that of the program."""
        scripts = [word for word in self.argv if PurePosixPath(word).suffix in (".py", ".sh")]
        return PurePosixPath((scripts or list(self.argv))[0]).name


def checked_globs(typed: Sequence[str]) -> tuple[str, ...]:
    """Return the globs of --pass-env; UsageError if one is not a pattern of variable names, or begins with GPURUN_."""
    for glob in typed:
        if not _GLOB.fullmatch(glob) or glob.startswith("GPURUN_"):
            what = f"--pass-env {glob!r} is not the name of a variable, nor a pattern such as 'VLLM_*'."
            raise UsageError("usage.pass_env", what, hint="To set a value: --env NAME=VALUE, --secret NAME.")
    return tuple(typed)

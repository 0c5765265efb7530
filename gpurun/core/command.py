"""A command of the user in place of the bundled trainer: what runs, and how it is watched and stopped."""

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
"""Where a command runs, below the run's folder on the machine: in a copy of the uploaded folder."""

EVERYTHING = ("**",)
"""The outputs if no --out is given: all new files below the command's folder."""
_GLOB = re.compile(r"[A-Za-z_*?\[][A-Za-z0-9_*?\[\]!-]*")
PUBLISH_START_S, DIGEST_BYTES_PER_S = 10, 4e8  # Each output is linked and read once.


NOTEBOOK = ("-m", "nbconvert", "--to", "notebook", "--execute", "--ExecutePreprocessor.kernel_name=python3")
"""How to run a notebook; the executed notebook is a new file in the same folder."""


class Command(Frozen):
    """The command that `gpurun run` runs.

    `argv` is as typed. `folder` is uploaded ("" for none) and is the command's working folder there. `outputs` are
    globs below it for the files that come home. `checkpoints` is a glob for the files that the command can resume from;
    the newest of them comes home first. To resume, `resume_arg` is appended to the command, with `{}` replaced by the
    checkpoint. Only the names of `secrets` are known here. `total_steps` is 0 if unknown. `include` and `exclude` are
    globs for files to upload although they would be left out, and for files to leave out. `pip` has the requirement
    lines that are installed first. `imports` are the top-level modules that the program always imports and that are not
    in its folder. `python` is the Python of a rehearsal with `pip`. A command is stopped by `stop_signal` and killed
    after `grace_s`. `output_bytes` is the assumed size of its outputs. `executable` are the files that have the
    executable bit, `commit` is the commit that git had checked out there, `resumed` is the checkpoint below the folder
    that it resumes from. `challenge` is a teacher's word with the id of the signing key (WORD:KEYID).
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
        """Return the seconds that it has after the stop signal: to end, and for its runner to hash the outputs."""
        return self.grace_s + PUBLISH_START_S + int(self.output_bytes / DIGEST_BYTES_PER_S)

    @property
    def words(self) -> list[str]:
        """Return the words to start, with `{python}` for the Python that has torch; they resume from its checkpoint."""
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
        """Return what journal and receipt record of it: the words, and the names of its variables without values."""
        return {"argv": list(self.argv), "env": sorted(self.env), "secrets": sorted(self.secrets)}

    @property
    def name(self) -> str:
        """Return its name in lists: the script's name, or the program's."""
        scripts = [word for word in self.argv if PurePosixPath(word).suffix in (".py", ".sh")]
        return PurePosixPath((scripts or list(self.argv))[0]).name


def checked_globs(typed: Sequence[str]) -> tuple[str, ...]:
    """Return the globs of --pass-env, each a name or a pattern of names; UsageError for anything else."""
    for glob in typed:
        if not _GLOB.fullmatch(glob) or glob.startswith("GPURUN_"):
            what = f"--pass-env {glob!r} is not the name of a variable, nor a pattern such as 'VLLM_*'."
            raise UsageError("usage.pass_env", what, hint="To set a value: --env NAME=VALUE, --secret NAME.")
    return tuple(typed)

"""A command of the user's own in the place of the bundled trainer: what runs, and how it is watched and stopped."""

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
"""What comes home where nobody says it: all that is new below the command's folder."""
_GLOB = re.compile(r"[A-Za-z_*?\[][A-Za-z0-9_*?\[\]!-]*")
PUBLISH_START_S, DIGEST_BYTES_PER_S = 10, 4e8  # What a command has left is linked and read once.


NOTEBOOK = ("-m", "nbconvert", "--to", "notebook", "--execute", "--ExecutePreprocessor.kernel_name=python3")
"""How a notebook is run; what it has become is a new file beside it."""


class Command(Frozen):
    """What `gpurun run` runs.

    `argv` is as typed. `folder` is uploaded ("" for none) and is the command's working folder there. `outputs` are
    globs below it of what comes home, `checkpoints` one of what the command can go on from; of those the newest comes
    first. `resume_arg` is added to the command when it goes on, `{}` standing for the checkpoint. Of `secrets` only the
    names are known here. `total_steps` is 0 where nobody has said it.
    `include` and `exclude` are globs of what is uploaded although it would be left out, and of what is not; `pip` has
    the lines of requirements that are installed first. `imports` are the top-level modules that the program imports
    whenever it runs, and that are not in its folder. `python` is the Python of a rehearsal with `pip`.
    A command is stopped by `stop_signal` and killed after `grace_s`. `output_bytes` is what its outputs are counted to
    weigh. `executable` are the files that may be started by themselves, `commit` is the one that git had checked out
    there, `resumed` is the checkpoint below its folder that it goes on from. `challenge` is a teacher's word with
    the id of the key that signs (WORD:KEYID).
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
        """How long it has from the stop signal on: to end, and its runner to find the digests of what it has left."""
        return self.grace_s + PUBLISH_START_S + int(self.output_bytes / DIGEST_BYTES_PER_S)

    @property
    def words(self) -> list[str]:
        """What is started there, `{python}` standing for the Python with torch; it goes on from its checkpoint."""
        first = self.argv[0]
        start = [first]
        if first in ("python", "python3"):
            start = ["{python}"]
        elif first.endswith(".py"):
            start = ["{python}", first]
        elif first.endswith(".ipynb"):
            start = ["{python}", *NOTEBOOK, first]
        elif first.endswith(".sh"):  # Without #! or a right to be started it is a text for bash.
            start = [f"./{normpath(first)}"] if normpath(first) in self.executable else ["bash", first]
        more = [word.replace("{}", self.resumed) for word in shlex.split(self.resume_arg)] if self.resumed else []
        return [*start, *self.argv[1:], *more]

    @property
    def told(self) -> dict[str, list[str]]:
        """What journal and receipt have of it: the words, and the names of its variables without a value."""
        return {"argv": list(self.argv), "env": sorted(self.env), "secrets": sorted(self.secrets)}

    @property
    def name(self) -> str:
        """What lists call it: the script's name, else the program's."""
        scripts = [word for word in self.argv if PurePosixPath(word).suffix in (".py", ".sh")]
        return PurePosixPath((scripts or list(self.argv))[0]).name


def checked_globs(typed: Sequence[str]) -> tuple[str, ...]:
    """The globs of --pass-env, each a name or a pattern of names; UsageError for anything else."""
    for glob in typed:
        if not _GLOB.fullmatch(glob) or glob.startswith("GPURUN_"):
            what = f"--pass-env {glob!r} is neither the name of a variable nor a pattern such as 'VLLM_*'."
            raise UsageError("usage.pass_env", what, hint="For a value of your own: --env NAME=VALUE, --secret NAME.")
    return tuple(typed)

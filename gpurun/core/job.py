"""A command of the user's own in the place of the bundled trainer: what runs, and how it is watched and stopped."""

from __future__ import annotations

from pathlib import PurePosixPath

from pydantic import Field

from gpurun.core.records import Frozen

WORK = "bundle/work"
"""Where a command runs, below the run's folder on the machine: in a copy of the uploaded folder."""


class Command(Frozen):
    """What `gpurun run` runs.

    `argv` is as typed. `folder` is uploaded ("" for none) and is the command's working folder there. `outputs` are
    globs below it of what comes home, `checkpoints` one of what the command can go on from; of those the newest comes
    first. `resume_arg` is added to the command when it goes on, `{}` standing for the checkpoint. Of `secrets` only the
    names are known here. `pip` are requirements that are installed first. `total_steps` is 0 where nobody has said it.
    A command is stopped by `stop_signal` and killed after `grace_s`. `output_bytes` is what its outputs are counted to
    weigh.
    """

    argv: tuple[str, ...]
    folder: str = ""
    outputs: tuple[str, ...] = ()
    checkpoints: str = ""
    resume_arg: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    total_steps: int = 0
    stop_signal: str = "TERM"
    grace_s: int = 60
    output_bytes: int = 4_000_000_000
    disk_gb: int = 50

    @property
    def name(self) -> str:
        """What lists call it: the script's name, else the program's."""
        scripts = [word for word in self.argv if PurePosixPath(word).suffix in (".py", ".sh")]
        return PurePosixPath((scripts or list(self.argv))[0]).name

"""Implements `--log-to tensorboard,wandb`: writes a run's figures to the user's experiment tracker during training.

  python -m gpurun.readers.curve_log HOME RUN

This module runs as a separate process without cloud keys, so that a failure of the tracker cannot affect the rental. It
reads the files that the supervisor has downloaded, so the machine needs neither the tracker's package nor its key.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Protocol

from gpurun.core.clock import Clock, SystemClock
from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.core.filelock import open_lock, take_lock
from gpurun.core.installed_files import install_line
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, RunFolder
from gpurun.core.secrets import child_environment
from gpurun.ledger.runs import Sight, look_at_run
from gpurun.readers.loaded_run import COLUMNS, load_run

TRACKERS = ("tensorboard", "wandb")
LOOK_S = 10.0
_WANDB_HOST = "api.wandb.ai"
Row = Mapping[str, float | int | None]


class CurveLog(Protocol):
    """One tracker's log of one run."""

    def add(self, name: str, value: float, row: Row) -> None:
        """Log one figure of a step; `row` has all figures of the step, including `seconds` since the trainer began."""

    def close(self) -> None:
        """Finish the log. Nothing is added after this."""


class TensorBoardLog:
    """Writes TensorBoard's event files below a folder; `began_wall` is the time when the trainer began."""

    def __init__(self, place: Path, began_wall: float) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError:
            hint = install_line("tensorboard")
            raise SetupError("export.no_tensorboard", "Curves for TensorBoard need its package.", hint=hint) from None
        self._writer, self._began_wall = Writer(str(place)), began_wall

    def add(self, name: str, value: float, row: Row) -> None:
        """See `CurveLog.add`."""
        wall = self._began_wall + (row["seconds"] or 0.0)
        self._writer.add_scalar(name, value, int(row["step"] or 0), wall_time=wall)

    def close(self) -> None:
        """See `CurveLog.close`."""
        self._writer.close()


class WandbLog:
    """Logs to a run of Weights & Biases with the same name, which a later process can continue."""

    def __init__(self, folder: RunFolder, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gpurun"), id=folder.name, name=folder.name, resume="allow",
            dir=str(folder.path), config=dict(config), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, name: str, value: float, row: Row) -> None:
        """See `CurveLog.add`."""
        self._run.log({name: value, "step": row["step"]})

    def close(self) -> None:
        """See `CurveLog.close`."""
        self._run.finish()


def parse_trackers(text: str) -> tuple[str, ...]:
    """Return the trackers in --log-to. Raise UsageError for an unknown one, SetupError for one that cannot be used."""
    names = tuple(dict.fromkeys(name_typed.strip() for name_typed in text.split(",") if name_typed.strip()))
    for name in names:
        if name not in TRACKERS:
            hint = f"Use one of: {', '.join(TRACKERS)}."
            raise UsageError("usage.log_to", f"--log-to {name!r} is not known.", hint=hint)
        if find_spec(name) is None:
            hint = install_line(name)
            raise SetupError("log_to.missing", f"--log-to {name} needs its package.", hint=hint)
    if "wandb" in names and not _is_logged_in():
        hint = "Run wandb login; or set WANDB_MODE=offline, and run wandb sync later."
        raise SetupError("log_to.no_login", "--log-to wandb: you are not logged in.", hint=hint)
    return names


def _is_logged_in() -> bool:
    """Return whether Weights & Biases has a key, or needs none."""
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled") or os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc().authenticators(_WANDB_HOST) is not None
    except (OSError, NetrcParseError):
        return False


def start_logging(folder: RunFolder, home: Home, trackers: Sequence[str]) -> str:
    """Start the process that logs a run, if --log-to is set. Return a sentence for the user, or ""."""
    if not trackers:
        return ""
    known = {name: os.environ[name] for name in os.environ if name.startswith("WANDB_") or name.endswith("_PROXY")}
    try:
        with open(folder.path / "curve_log.log", "ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "gpurun.readers.curve_log", str(home.root), folder.name],
                env=child_environment(known), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd=folder.path,
            )  # fmt: skip
    except OSError as error:  # The run has already started, so this error must not end the command.
        return f"The run's figures are not logged: {error.strerror}."
    place = shlex.quote(str(folder.path / "tensorboard"))
    return f"To see the curves: tensorboard --logdir {place}" if "tensorboard" in trackers else ""


def figures_in(rows: Sequence[Row]) -> Iterator[tuple[str, float, Row]]:
    """Yield each measured figure as (column, value, row)."""
    for row in rows:
        for name in COLUMNS[1:]:
            if (value := row[name]) is not None:
                yield name, value, row


def log_curve(home: Home, run: str, clock: Clock) -> None:
    """Follow a run and log each new figure once. Stop when the run ends or no process drives it."""
    done: set[tuple[float | None, str]] = set()
    logs: list[CurveLog] = []
    while True:
        sight = look_at_run(home, run)  # Check this first, so that all figures from before the run's end are read.
        rows = load_run(run, home.root).rows
        if rows and not logs:
            logs = _open_logs(sight)
        for name, value, row in figures_in(rows):
            if (row["step"], name) not in done:
                done.add((row["step"], name))
                for log in logs:
                    log.add(name, value, row)
        if not sight.unfinished or sight.owner is None:
            break
        clock.sleep(LOOK_S)
    for log in logs:
        log.close()


def _open_logs(sight: Sight) -> list[CurveLog]:
    """Return an open log for each tracker that the run uses."""
    began = next((record.wall for record in sight.records if record.event is Event.TRAIN_STARTED), 0.0)
    plan, trackers = sight.plan, sight.plan.choices.log_to
    config = {"recipe": plan.job.recipe, "machine": f"{plan.offer.provider} {plan.offer.label}", **plan.job.resolved}
    logs: list[CurveLog] = []
    if "tensorboard" in trackers:
        logs.append(TensorBoardLog(sight.folder.path / "tensorboard" / sight.folder.name, began))
    if "wandb" in trackers:
        logs.append(WandbLog(sight.folder, config))
    return logs


def main() -> int:
    """Log the run in the arguments. If another process already logs this run, exit without doing anything."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    home, run, clock = Home(Path(sys.argv[1])), sys.argv[2], SystemClock()
    try:
        if take_lock(open_lock(home.run(run).path / ".curve_log.lock")):
            log_curve(home, run, clock)
    except (GpurunError, OSError) as error:
        logging.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

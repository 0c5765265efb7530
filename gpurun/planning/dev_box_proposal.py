"""Describe a dev box to the planner. It gets the longest lease that the cap pays for, and usually ends when idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from gpurun.core.command import EVERYTHING, Command
from gpurun.core.errors import UsageError
from gpurun.core.money import format_usd
from gpurun.core.places import place_kinds
from gpurun.core.records import digest_json
from gpurun.core.run_plan import DataSummary, Earlier, Mode, Plan, Request
from gpurun.jobs.commands.continued_dev_box import with_last_folder
from gpurun.jobs.commands.work_folder import Admit
from gpurun.jobs.dev_box import JUPYTER, SYNC_S, DevBoxJob
from gpurun.jobs.requirements import distributions, provided_by
from gpurun.planning.command_proposal import CommandProposal
from gpurun.planning.place import Desk, Place
from gpurun.view.number_format import format_bytes, format_duration

_LAB = "jupyterlab"


@dataclass(frozen=True)
class DevBoxWishes:
    """The user's choices for a dev box, except its folder; `DevBoxJob` explains them."""

    git: str = ""
    at_commit: str = ""
    jupyter: bool = False
    sync_s: int = SYNC_S


class DevBoxProposal(CommandProposal):
    """Proposes a dev box. Its folder is copied immediately, like a command's."""

    joins_nodes: ClassVar[bool] = False

    def __init__(
        self,
        request: Request,
        wishes: DevBoxWishes,
        desk: Desk,
        *,
        is_asked: bool = True,
        admit: Admit = lambda _: None,
    ) -> None:
        self._wishes = wishes
        super().__init__(_add_jupyterlab(request) if wishes.jupyter else request, desk, is_asked=is_asked, admit=admit)

    def with_earlier(self, command: Command, work: Path) -> tuple[Command, Earlier | None]:
        """Copy the folder of the earlier dev box to `work`. Return the new command, and the earlier box's record.

        Without an earlier dev box, return the command unchanged and None.
        """
        if not self.request.continues:
            return command, None
        return with_last_folder(command, self.request, self.desk.home, work)

    def job(self, data: DataSummary) -> DevBoxJob:
        """Return the dev box as a job."""
        wishes, command = asdict(self._wishes), self.command.model_dump(mode="json", exclude={"folder", "commit"})
        return DevBoxJob(
            recipe="dev box", recipe_sha256=digest_json({**command, **wishes}), command=self.command, **wishes
        )

    def remarks(self, plan: Plan, place: Place) -> tuple[Iterable[str], Iterable[str]]:
        """Return notes about idling, syncing and JupyterLab, and warnings about cost and loss."""
        return self._box_notes(plan, place), _list_box_warnings(plan)

    def _box_notes(self, plan: Plan, place: Place) -> Iterator[str]:
        command, idle_s, every = self.command, plan.choices.idle_s or 0, format_duration(self._wishes.sync_s)
        if idle_s:
            yield (
                f"It ends after {format_duration(idle_s)} without a key press, a file change, traffic through a "
                "forwarded port, or a busy card or core (--idle)."
            )
        named = "".join(f", {glob}" for glob in command.outputs[len(EVERYTHING) :])
        size = format_bytes(command.output_bytes)
        lost = " Files elsewhere on the machine are lost with it." if place.is_rented else ""
        yield (
            f"Changes in its folder{named} are downloaded every {every} (--sync) and before its end, into the run's "
            f"own folder; the plan allows {size} (--output-gb).{lost}"
        )
        if self._wishes.jupyter and not place.forwards_ports:
            yield (
                "gpurun cannot forward a port to a cluster's job. You can reach JupyterLab if the cluster lets you log "
                "in to your job's node; gpurun prints the command for that."
            )
        if self._wishes.jupyter and _LAB in command.pip and plan.mode is Mode.PAID:
            yield "JupyterLab is installed first, as by --pip jupyterlab."


def _list_box_warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings about what a box without --idle may cost, and what is lost with a spot machine."""
    if not plan.choices.idle_s:
        costs = f", {format_usd(plan.worst_micros)}" if plan.worst_micros else ""
        yield (
            f"--idle off: a forgotten box is not noticed. Unless you end it, it runs to the end of its lease: "
            f"{format_duration(plan.lease.total_s)}{costs}."
        )
    if plan.choices.spot:
        yield "A spot machine may be taken away at any moment: changes since the last --sync are then lost."


def _add_jupyterlab(request: Request) -> Request:
    """Return the request with the command that starts JupyterLab. gpurun installs it only on a rented machine."""
    command, kinds = request.command, place_kinds(request.providers)
    if command is None:
        raise ValueError("the request has no command")
    pip = command.pip
    if kinds == {"here"}:
        if _LAB not in distributions([_LAB]):
            what = "--jupyter needs JupyterLab, and gpurun's own Python does not have it."
            raise UsageError("dev.no_jupyter", what, hint="pip install jupyterlab, or leave --jupyter out.")
    elif not kinds & {"box", "cluster"} and not provided_by(_LAB, pip):
        pip = (*pip, _LAB)
    return request.model_copy(update={"command": command.model_copy(update={"argv": JUPYTER, "pip": pip})})

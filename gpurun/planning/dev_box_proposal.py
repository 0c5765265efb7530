"""What a dev box tells the planner: it gets the longest lease that the cap pays for, and usually ends when idle."""

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
    """What the user wants of a dev box beside its folder; see `DevBoxJob`."""

    git: str = ""
    at_commit: str = ""
    jupyter: bool = False
    sync_s: int = SYNC_S


class DevBoxProposal(CommandProposal):
    """A dev box that will be rented; its folder is copied at once, like a command's."""

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
        super().__init__(_with_lab(request) if wishes.jupyter else request, desk, is_asked=is_asked, admit=admit)

    def with_earlier(self, command: Command, work: Path) -> tuple[Command, Earlier | None]:
        """See `CommandProposal.with_earlier`."""
        if not self.request.continues:
            return command, None
        return with_last_folder(command, self.request, self.desk.home, work)

    def job(self, data: DataSummary) -> DevBoxJob:
        """See `Proposal.job`."""
        wishes, command = asdict(self._wishes), self.command.model_dump(mode="json", exclude={"folder", "commit"})
        return DevBoxJob(
            recipe="dev box", recipe_sha256=digest_json({**command, **wishes}), command=self.command, **wishes
        )

    def remarks(self, plan: Plan, place: Place) -> tuple[Iterable[str], Iterable[str]]:
        """See `CommandProposal.remarks`."""
        return self._notes(plan, place), _warnings(plan)

    def _notes(self, plan: Plan, place: Place) -> Iterator[str]:
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
                "gpurun forwards no port of a cluster's job: you reach JupyterLab if the cluster lets you log in to "
                "the node of your own job; the line for that is printed."
            )
        if self._wishes.jupyter and any(package == _LAB for package in command.pip) and plan.mode is Mode.PAID:
            yield "JupyterLab is installed first, as by --pip jupyterlab."


def _warnings(plan: Plan) -> Iterator[str]:
    """Yield what a box costs that nothing ends before its lease, and what a spot machine may lose."""
    if not plan.choices.idle_s:
        costs = f", {format_usd(plan.worst_micros)}" if plan.worst_micros else ""
        yield (
            f"--idle off: a forgotten box is not noticed. Unless you end it, it runs to the end of its lease: "
            f"{format_duration(plan.lease.total_s)}{costs}."
        )
    if plan.choices.spot:
        yield "A spot machine may be taken away at any moment: what changed since the last --sync is lost then."


def _with_lab(request: Request) -> Request:
    """Return the request with the command for JupyterLab, which gpurun may install on a rented machine only."""
    command, kinds = request.command, place_kinds(request.providers)
    if command is None:
        raise ValueError("the request has no command")
    pip = command.pip
    if kinds == {"here"}:
        if _LAB not in distributions([_LAB]):
            what = "--jupyter needs JupyterLab, and gpurun's own Python here does not have it."
            raise UsageError("dev.no_jupyter", what, hint="pip install jupyterlab, or leave --jupyter out.")
    elif not kinds & {"box", "cluster"} and not provided_by(_LAB, pip):
        pip = (*pip, _LAB)
    return request.model_copy(update={"command": command.model_copy(update={"argv": JUPYTER, "pip": pip})})

"""Finds the folder and the JupyterLab of a dev box."""

from __future__ import annotations

from gpurun.cli.local_port import LOCALHOST
from gpurun.cli.session import Session
from gpurun.core.clock import ticks
from gpurun.core.errors import UsageError
from gpurun.core.journal_records import Phase
from gpurun.ledger.runs import Sight
from gpurun.lifecycle.connect import MachineConnector
from gpurun.lifecycle.context import get_instance
from gpurun.remote.messages import Doors, Lab

LAB_S = 60.0
"""How long JupyterLab may take to start."""


def doors_of(session: Session, sight: Sight) -> Doors:
    """Ask a dev box for its folder and its JupyterLab; wait for JupyterLab if it was requested."""
    far = MachineConnector(sight.folder, sight.plan, session.clock)(get_instance(sight.state))
    try:
        for _ in ticks(session.clock, 0.5, LAB_S):
            doors = far.doors()
            if doors.jupyter is not None or "jupyterlab" not in sight.plan.job.imports:
                return doors
        session.say(f"JupyterLab did not start within {LAB_S:.0f} s. To see why: gpurun logs {sight.folder.name}")
        return doors
    finally:
        far.close()


def link_of(lab: Lab, port: int) -> str:
    """Return the link that opens JupyterLab in a local browser."""
    return f"http://{LOCALHOST}:{port}/lab" + (f"?token={lab.token}" if lab.token else "")


def lab_of(session: Session, sight: Sight) -> Lab:
    """Return where a dev box's JupyterLab listens; UsageError if it has none."""
    name = sight.folder.name
    if not sight.plan.job.is_attended or sight.state.phase is not Phase.TRAINING:
        hint = f"Name the port: gpurun forward {name} 8888"
        raise UsageError("forward.no_lab", f"{name} is not a dev box with JupyterLab.", hint=hint)
    lab = doors_of(session, sight).jupyter
    if lab is None:
        hint = f"gpurun logs {name} shows whether it started. gpurun dev --jupyter starts one; or name a port."
        raise UsageError("forward.no_lab", f"{name} does not have a running JupyterLab.", hint=hint)
    return lab

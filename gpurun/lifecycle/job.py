"""What the agent is to run on the instance: a command line, its surroundings, and until when."""

from __future__ import annotations

from typing import Any

from gpurun.core.plan import Plan
from gpurun.core.progress import RunState
from gpurun.lifecycle.context import Context
from gpurun.planning.load import save_s
from gpurun.providers.base import SpotNotice

__all__ = ["command_of", "job_of", "surroundings_of"]


def job_of(state: RunState, context: Context) -> dict[str, Any]:
    """The agent's job (docs/FORMATS.md); the trainer is told to save early enough to bring it home.

    The stops are told in seconds too: the machine's clock may be set before it starts the job.
    """
    plan, lease = context.plan, context.plan.lease
    there = context.clock.wall() + state.clock_ahead_s  # The agent obeys its own clock.
    hard_stop_s = max(0.0, context.seconds_left(state) - lease.collect_s)
    soft_stop_s = max(0.0, min(hard_stop_s - save_s(plan.parameters), lease.train_s))
    notice_url = context.provider.notice_url if plan.offer.spot and isinstance(context.provider, SpotNotice) else ""
    return {
        "v": 1,
        "run": plan.run,
        "argv": command_of(plan),
        "cwd": "bundle",
        "env": surroundings_of(plan, int(state.facts.get("cpus") or 1)),
        "soft_stop_s": soft_stop_s,
        "hard_stop_s": hard_stop_s,
        "soft_stop_wall": there + soft_stop_s,
        "hard_stop_wall": there + hard_stop_s,
        "save_s": save_s(plan.parameters),
        **({"notice_url": notice_url} if notice_url else {}),
    }


def command_of(plan: Plan) -> list[str]:
    """The trainer, in the processes of the plan, with no more on each card at once than the plan found room for.

    It would find that out by itself, on paid time: by running out of memory, perhaps after it has compiled.
    """
    program = ["trainer.launch", f"--processes={plan.processes}"] if plan.processes > 1 else ["trainer.train"]
    paths = ["--recipe", "recipe.json", "--data", "../data", "--out", "../out"]
    fits = plan.estimate.micro_batch
    cut = [f"--micro-batch={fits}"] if 0 < fits < plan.resolved["train"]["micro_batch"] else []
    # Otherwise the trainer's own rule stands, as it does for a plan that was written before the plan decided this.
    shared = ["--parallel=fsdp"] if plan.estimate.sharded and plan.resolved["train"]["parallel"] == "auto" else []
    return ["{python}", "-m", *program, *paths, *cut, *shared]


def surroundings_of(plan: Plan, cpus: int) -> dict[str, str]:
    """The variables that the trainer needs beside the machine's own."""
    variables = {"PYTHONUNBUFFERED": "1"}
    if plan.processes > 1:
        # torchrun would give each process one thread, whatever there is.
        variables["OMP_NUM_THREADS"] = str(max(1, cpus // plan.processes))
    if plan.offer.provider == "local":
        # On a machine that somebody else uses too, a thread that spins keeps the one that it waits for from running;
        # one that sleeps at once is woken for each of a small step's many parts, which can take longer than they do.
        variables |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
    return variables

"""A run of a user's own command that failed on one rented card, as input of the views."""

from __future__ import annotations

import copy
from typing import Any

import view_samples as samples

from gpurun.core.command import Command
from gpurun.core.gpu_reading import GpuReading
from gpurun.core.money import usd
from gpurun.core.run_plan import Plan
from gpurun.ledger.spending import spent_by
from gpurun.view.live_state import Screen

ARGV = ("torchrun", "--nproc-per-node=1", "train.py", "--lr", "3e-4")
WORDS = "the command ended with exit code 1; its last words: torch.OutOfMemoryError: CUDA out of memory."


def plan(*argv: str, **changed: Any) -> Plan:
    command = Command(argv=argv or ARGV, env={"WANDB_MODE": "offline"}, secrets=("HF_TOKEN",))
    known: dict[str, Any] = {"command": command, "recipe": command.name, "resolved": {}, "parameters": 0}
    return samples.plan(**known | changed)


def live() -> tuple[Screen, float]:
    """Return the live view of a command half way, and the time that it shows.

    The command logs losses, but no learning rate. One output is finished; no file is marked as a checkpoint.
    """
    begun = samples.NOW - 6163
    screen = Screen(plan(), spent_by)
    records = [record for record in samples.story(begun, usd("2.49")) if str(record.event) != "rate.observed"]
    events: list[dict[str, Any]] = [
        {"kind": "start", "wall": begun, "elapsed_s": 0.0, "steps": None, "python": "3.12.1"}
    ]
    for step in range(10, 601, 10):
        at = {"wall": begun + 475 + step, "elapsed_s": float(step), "step": step}
        events.append({"kind": "step", **at, "loss": samples.loss_at(step), "steps": 900, "step_s": 1.0})
    events.append({"kind": "eval", "step": 600, "val_loss": 4.4})
    events.append({"kind": "output", "step": 600, "name": "out/model.pt", "bytes": 1_400_000_000})
    screen.update(
        records, samples.make_events(*events), [f"Epoch 2:  50%|█████     | 150/300 [loss={samples.loss_at(600):.3f}]"]
    )
    screen.update((), (), (), gpus=GpuReading(samples.NOW, 1, 94, 62_464, 81_920, 71, 608))
    return screen, samples.NOW


def predicate(**training: Any) -> dict[str, Any]:
    """Return what the receipt states. Its time is divided as a trainer's, as an older gpurun wrote it."""
    fields = copy.deepcopy(samples.PREDICATE)
    fields["asked"] |= {
        "recipe": "train.py",
        "command": {"argv": list(ARGV), "env": ["WANDB_MODE"], "secrets": ["HF_TOKEN"]},
    }
    fields["training"] |= {
        "outcome": "failed", "reason": "failed", "message": WORDS, "exit_code": 1, "device": "unknown",
        "start": {"is": "instance-reported", "event": {"device": None, "python": "3.12.1"}},
        "figures": {"is": "instance-reported", "last_step": 600, "last_loss": 4.3841, "best_val_loss": 4.4},
        "log": {"is": "instance-reported", "lines": []},
        "gpu_use": {"is": "instance-reported", "looks": 900, "busy": 870, "own": 870, "most_mib": 62_464},
        "warnings": {
            "is": "instance-reported",
            "lines": ["no new file matches out/** yet; the command's folder has train.py"],
        },
    }  # fmt: skip
    fields["training"] |= training
    fields["sample"], fields["runtime"]["planned"]["training_s"] = None, None
    file = {"bytes": 9, "sha256": samples.SHA, "step": 600}
    fields["checkpoint"] = {
        "latest": 600, "best": None, "missing": [],
        "files": [
            {"name": "outputs/out/ckpt.pt", "kind": "checkpoint", **file},
            *({"name": f"outputs/out/sample-{place:02d}.png", "kind": "output", **file} for place in range(23)),
        ],
    }  # fmt: skip
    says = "the command failed; a GPU was at work in 870 of 900 looks"
    fields["verdict"] = {"is": "gpu, rented", "says": says, "not_shown": "This receipt does not prove who ran it."}
    return fields


RECEIPT = samples.receipt(predicate())

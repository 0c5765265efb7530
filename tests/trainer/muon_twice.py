"""The function that each of two processes runs in a test of Muon; a spawned process must import it from a module."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import write_tensors
from trainer.distributed import DataParallel, Device, FullyShardedParallel, Processes, leave
from trainer.model import GPT
from trainer.optim import make_optimizer
from trainer.recipe import parse_recipe

DEVICE = Device(torch.device("cpu"), "fp32", None)


def muon_in_one_of_two(rank: int, folder: Path, record: dict[str, Any]) -> None:
    """Take three steps on this process's own data, with replicated and then with sharded weights; write each result."""
    faulthandler.enable()  # prints the place of an abort in C
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    recipe = parse_recipe(record)
    for kind in ("whole", "parts"):
        torch.manual_seed(0)
        model, processes = GPT(recipe.model), Processes(rank, rank, 2, 2, several=True)
        shared = DataParallel(model) if kind == "whole" else FullyShardedParallel(model, processes)
        optimizer = make_optimizer(model, recipe.optim, processes)
        for step in range(3):
            ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(2 * step + rank))
            shared.loss((ids[:, :-1], ids[:, 1:]), DEVICE, is_last=True).backward()
            optimizer.step()
            shared.clear()
        with (folder / f"{kind}-{rank}").open("wb") as file:
            write_tensors(file.write, dict(shared.whole(model.state_dict())))
    dist.destroy_process_group()
    leave(0)  # The trainer's processes end this way too: a normal exit may abort while torch's threads still run.

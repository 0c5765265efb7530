"""Puts a run together from a recipe, a data folder and an out folder; whatever does not fit is refused here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from trainer.announce import announce
from trainer.compile_cache import CompileCache, cache_name
from trainer.data import VALIDATION_SEED, Samples, TokenRow
from trainer.device import Device
from trainer.distributed import Processes
from trainer.events import Reporter
from trainer.items import Item, read_items
from trainer.model import GPT
from trainer.optim import make_optimizer, plan_batch
from trainer.parallel import Alone, Replicas, Shards, fits_replicated
from trainer.recipe import ModelConfig, Recipe, parameters_of
from trainer.resume import restore_model, restore_optimizer
from trainer.room import cut_as_before, read_room
from trainer.run import Progress, Run
from trainer.scale import LossScale
from trainer.shards import TokenData, open_data
from trainer.spike import SpikeGuard
from trainer.translation.task import TranslationTask

__all__ = ["assemble"]


def _open(recipe: Recipe, folder: Path, processes: Processes) -> tuple[TokenData, tuple[Item, ...]]:
    """Open the data folder, of which every machine has a copy; its processes share the reading of the shards."""
    opened: list[tuple[TokenData, tuple[Item, ...]]] = []

    def read() -> None:
        data = open_data(folder, recipe.data.tokenizer, recipe.sample.prompts)
        for shard in (*data.train, *data.val)[processes.local_rank :: processes.local_count]:
            shard.check_ids(data.tokenizer.vocab_size)
        opened.append((data, read_items(folder, recipe.eval.hellaswag_items, data.tokenizer.vocab_size)))

    processes.agree(read)
    return opened[0]


def _what_to_learn(
    recipe: Recipe, data_folder: Path, data: TokenData, sequences: int, processes: Processes
) -> dict[str, Any]:
    """Return the fields of a Run that tell a text from a parallel one; the weights are still on the CPU.

    They are drawn there, so that every kind of device starts from the same ones.
    """
    if recipe.model.preset == "encoder-decoder":
        task = TranslationTask.open(recipe, data_folder, data, sequences, processes)
        return {
            "train_samples": task.train_samples, "val_samples": task.val_samples, "eval_windows": task.eval_pairs,
            "model": task.build_model(recipe), "translation": task,
        }  # fmt: skip
    context, here = recipe.model.context, processes.local_count
    val = Samples(TokenRow(data.val, here), context, VALIDATION_SEED, "val")
    return {
        "train_samples": Samples(TokenRow(data.train, here), context, recipe.train.seed, "train"),
        "val_samples": val,
        "eval_windows": min(val.windows, max(1, recipe.eval.tokens // context)),
        "model": _build_gpt(recipe.model, data.tokenizer.vocab_size, recipe.train.seed),
    }


def _build_gpt(config: ModelConfig, vocab_size: int, seed: int) -> GPT:
    """Return a GPT whose weights the seed decides."""
    torch.manual_seed(seed)
    return GPT(config, vocab_size)


def _start_from(run: Run, data_folder: Path) -> None:
    """Load the weights that the recipe starts from, if it names any."""
    name = run.recipe.train.init_from
    if name:
        from trainer.pretrained import load_weights

        sha256 = run.data.tokenizer.sha256
        run.processes.agree(lambda: load_weights(run.gpt, data_folder / name, tokenizer_sha256=sha256))


def _parallel(run: Run) -> Alone:
    """Choose how the processes share the model; the first one's card decides for all."""
    if not run.processes.several:
        return Alone(run.model)
    card_bytes, wanted = run.device.memory_bytes, run.recipe.train.parallel
    fits = run.processes.from_first(
        lambda: card_bytes is None or fits_replicated(parameters_of(run.model.config), card_bytes)
    )
    if wanted == "ddp" or (wanted == "auto" and fits):
        return Replicas(run.model, run.processes)
    return Shards(run.model, run.processes)


def _compile(run: Run, folders: tuple[Path, Path]) -> str | None:
    """Set what training calls; return "loaded" or "none" of the compile cache, None where nothing is compiled."""
    run.forward = run.model
    if not run.recipe.train.compile:
        return None
    name = cache_name(run.model.config, run.device, run.plan.micro_batch, run.parallel.kind, run.processes.count)
    run.compile_cache = CompileCache(name, run.processes)
    run.forward = torch.compile(run.model, dynamic=False)
    # What this run has brought to the disk already is newer than what came along.
    return "loaded" if run.compile_cache.load(folders[::-1]) else "none"


def assemble(
    recipe: Recipe,
    folders: tuple[Path, Path],
    *,
    processes: Processes,
    device: Device,
    reporter: Reporter,
    stop_asked: threading.Event,
    progress: Progress,
) -> Run:
    """Check everything, build the model, go on from a checkpoint if (data, out) has one, and announce it."""
    data_folder, out = folders
    plan = plan_batch(recipe, processes.count)
    data, items = _open(recipe, data_folder, processes)
    what = _what_to_learn(recipe, data_folder, data, plan.sequences, processes)
    what["model"].to(device.torch)
    run = Run(
        recipe=recipe, processes=processes, device=device, reporter=reporter, stop_asked=stop_asked, data=data,
        hellaswag=items, plan=plan, progress=progress,
        scale=LossScale(device.precision == "fp16"), spikes=SpikeGuard(recipe.train.spike_z), **what,
    )  # fmt: skip
    restored = restore_model(run, data_folder, out)
    if restored is None:
        _start_from(run, data_folder)
    run.parallel = _parallel(run)
    run.optimizer = make_optimizer(run.model, recipe.optim)
    compile_cache = _compile(run, folders)  # named for the micro-batch that is planned, whatever fitted
    if restored is not None:
        restore_optimizer(run, restored)
    cut_as_before(run, processes.from_first(lambda: read_room(out)))
    announce(run, out, compile_cache=compile_cache)
    return run

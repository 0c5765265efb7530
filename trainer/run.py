"""What one training process holds, put together from a recipe, a data folder and an out folder, and announced.

A recipe, data or checkpoint that does not fit is refused here. A micro-batch that turns out too large is replaced in
`plan`.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import CheckpointStore
from trainer.compile_cache import CompileCache, cache_name
from trainer.data import BatchPlan, plan_batch, smaller
from trainer.distributed import Device, Processes, shared
from trainer.errors import OutOfMemory, TrainerError
from trainer.evaluate import Task, TextTask
from trainer.events import UNKNOWN_S, Reporter
from trainer.loss import chunked_cross_entropy
from trainer.model import GPT
from trainer.optim import LossScale, SpikeGuard, make_optimizer
from trainer.recipe import Recipe, parameters_of
from trainer.room import end_with_the_others, read_room, without_room
from trainer.saving import restore_model, restore_optimizer
from trainer.shards import open_data

__all__ = ["After", "Progress", "Run", "asked_to_stop", "kind_of", "places"]

LAUNCHER_EVERY_S = 1.0
"""How often a process looks whether torchrun is still there: without it nobody would wait for the end, nor know it."""


@dataclass
class Progress:
    """How far this process has come."""

    step: int = 0
    """Optimiser steps that were taken, those that were skipped among them: the tokens of these are used up."""
    skipped_steps: int = 0
    """Steps in which the weights did not move: fp16 overflowed, or the recipe skips spikes."""
    loss: float | None = None
    """The last step's."""
    val_loss: float | None = None
    """After the last step; None where it was not taken there."""
    began_monotonic_s: float | None = None
    """When this process started to train."""

    def train_s(self) -> float:
        """Return the seconds since training began in this process."""
        return 0.0 if self.began_monotonic_s is None else time.monotonic() - self.began_monotonic_s


class Run:
    """Everything that the loop uses."""

    def __init__(
        self,
        recipe: Recipe,
        folders: tuple[Path, Path],
        *,
        processes: Processes,
        device: Device,
        reporter: Reporter,
        stop_asked: threading.Event,
        progress: Progress,
    ) -> None:
        """Check everything, build the model, go on from a checkpoint if (data, out) has one, and report the start."""
        self.recipe, self.processes, self.device = recipe, processes, device
        self.reporter, self.stop_asked, self.progress = reporter, stop_asked, progress
        self.data, self.out, self.plan = *folders, plan_batch(recipe, processes.count)
        # Which card is to take which micro-batch by the recipe, before memory has run out.
        self.asked = {"card": device.cuda_name, "planned": self.plan.micro_batch}
        self.scale, self.spikes = LossScale(device.precision == "fp16"), SpikeGuard(recipe.train.spike_z)
        self.feed: Generator[tuple[Tensor, ...], None, None] | None = None
        self.durations: list[float] = []  # Seconds of the steps since the last that was reported,
        self.untold: dict[str, float] = {}  # and the figures of the last step, until they are.
        self.saved_step: int | None = None

        self.task = processes.agree(lambda: self.open_task(folders[0]))
        self.model = self.task.build_model(recipe)
        self.model.to(device.torch)
        self.writer, restored = restore_model(self.model, recipe, self.task.data, folders, processes, reporter)
        if recipe.train.init_from and restored is None:
            from trainer.pretrained import load_weights

            weights, sha256 = folders[0] / recipe.train.init_from, self.task.data.tokenizer.sha256
            processes.agree(lambda: load_weights(self.gpt, weights, tokenizer_sha256=sha256))
        self.parallel = shared(
            self.model, processes, wanted=recipe.train.parallel,
            parameters=parameters_of(self.model.config), card_bytes=device.memory_bytes,
        )  # fmt: skip
        self.optimizer = make_optimizer(self.model, recipe.optim, processes)
        self.compile_cache, is_loaded = None, None
        if recipe.train.compile:  # Named for the planned micro-batch, also where a smaller one is run.
            shared_by, mode = (self.parallel.kind, processes.count), recipe.train.compile_mode
            name = cache_name(self.model.config, device, self.plan.micro_batch, *shared_by, mode)
            self.compile_cache = CompileCache(name, processes)
            self.gpt.compile_blocks(mode)
            # What this run has brought to the disk already is newer than what came along.
            is_loaded = self.compile_cache.load(folders[::-1])
        if restored is not None:
            restore_optimizer(
                restored, self.model, self.optimizer, parallel=self.parallel, processes=processes,
                device=device.torch, put_back=self.put_back,
            )  # fmt: skip
            self.saved_step = self.progress.step
        if processes.several:
            self.cut_as_before(processes.from_first(lambda: read_room(folders[1])))
            end_with_the_others(self.out, lambda: self.writer is not None and self.writer.is_writing)
        self.announce(folders[1], is_loaded)

    @property
    def gpt(self) -> GPT:
        """`model`, of a run that continues text."""
        assert isinstance(self.model, GPT)
        return self.model

    def open_task(self, folder: Path) -> Task:
        """Open the data folder, of which every machine has a copy; its processes share the reading of the shards."""
        recipe, processes = self.recipe, self.processes
        data = open_data(folder, recipe.data.tokenizer, recipe.sample.prompts)
        for shard in (*data.train, *data.val)[processes.local_rank :: processes.local_count]:
            shard.check_ids(data.tokenizer.vocab_size)
        if recipe.model.preset == "encoder-decoder":
            from trainer.translation.task import TranslationTask

            return TranslationTask.open(recipe, folder, data, self.plan.sequences, processes)
        if recipe.eval.core:  # What would be missed after the last step is missed now.
            from trainer.core_score import demand_tasks

            demand_tasks(folder)
        return TextTask.open(recipe, folder, data, processes)

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint says beside its tensors."""
        self.progress.step, self.progress.loss = state["step"], state["loss"]
        self.progress.val_loss = state.get("val_loss")  # One from before this was noted is judged again.
        self.progress.skipped_steps = state["skipped_steps"]
        self.scale.restore(state["loss_scale"])
        self.spikes.restore(state["recent"])
        self.cut_as_before(state.get("room", {}))

    def cut_as_before(self, room: Mapping[str, Any]) -> None:
        """Begin with the micro-batch that fitted where the same was asked of such a card; else it runs out again."""
        if room.items() >= self.asked.items():
            while self.plan.micro_batch > room["fits"] and (plan := smaller(self.plan)):
                self.plan = plan

    def announce(self, out: Path, is_loaded: bool | None) -> None:
        """Report what will run, and what of it is not as the recipe may have hoped."""
        recipe, plan, data, count = self.recipe, self.plan, self.task.data, self.processes.count
        facts = {
            "device": self.device.torch.type,
            "cuda_name": self.device.cuda_name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "world_size": count,
            "parameters": parameters_of(self.model.config),
            "tokens_per_step": recipe.train.batch_tokens,
            "micro_batch": plan.micro_batch,
            "accumulation": plan.accumulation,
            "precision": self.device.precision,
            "steps": recipe.train.steps,
            "resumed_from": self.saved_step,
            "train_tokens": sum(shard.tokens for shard in data.train),
            "val_tokens": sum(shard.tokens for shard in data.val),
            "parallel": self.parallel.kind,
            "compile_cache": {True: "loaded", False: "none", None: None}[is_loaded],
        }
        self.reporter.start(self.progress.step, facts)
        if recipe.train.loop != "huggingface":  # whose blocks and loss are another library's
            self.reporter.say(f"code: {places(self.task.ideas(self.model))}")
        each = f"{plan.micro_batch} x {recipe.model.context} tokens x {count} processes"
        self.reporter.say(f"tokens per step: {recipe.train.batch_tokens:,} ({each} x {plan.accumulation} micro-steps)")
        groups = self.optimizer.param_groups
        for name, wanted in (("decayed", True), ("not decayed", False)):
            counts = [p.numel() for group in groups if bool(group["weight_decay"]) is wanted for p in group["params"]]
            self.reporter.say(f"{name}: {len(counts)} tensors, {sum(counts):,} parameters")
        if self.saved_step is not None:
            self.reporter.say(f"resumed from step {self.saved_step}")
        for code, message in self.shortcomings(out):
            self.reporter.warning(self.progress.step, code, message)

    def shortcomings(self, out: Path) -> Iterator[tuple[str, str]]:
        """Yield the code and the sentence of what is not as the recipe may have hoped."""
        recipe, task = self.recipe, self.task
        if self.device.is_cuda and recipe.train.precision == "auto" and self.device.precision == "fp16":
            message = f"{self.device.cuda_name} has no bf16; training runs in fp16, whose overflows cost a step each"
            yield "precision.fp16", message
        if recipe.train.parallel == "fsdp" and not self.processes.several:
            message = 'train.parallel is "fsdp", but one process has nobody to share with: it holds the whole model'
            yield "parallel.alone", message
        seen = task.eval_windows * recipe.model.context
        if seen < recipe.eval.tokens - recipe.model.context:
            yield "eval.fewer_tokens", f"eval.tokens is {recipe.eval.tokens}, but the val shards give only {seen}"
        if len(task.items) < (wanted := recipe.eval.hellaswag_items):
            yield "eval.fewer_items", f"eval.hellaswag_items is {wanted}, but the file has only {len(task.items)}"
        # Weights and two moments in fp32; while the fourth is being written, three are kept.
        need = 4 * 12 * parameters_of(self.model.config)
        if self.processes.is_first and (free := shutil.disk_usage(out).free) < need:
            yield "disk.small", f"{free / 1e9:.1f} GB of disk are free; checkpoints may take {need / 1e9:.1f} GB"

    def cut_smaller(self, plan: BatchPlan | None) -> None:
        """Let the step be taken again by the smaller plan, with the same tokens, once what failed has let go of its.

        Raise OutOfMemory if there is none.
        """
        self.close_feed()
        self.parallel.clear()
        if plan is None:
            context = self.recipe.model.context
            raise OutOfMemory(f"one sequence of context {context} does not fit into the card's memory")
        self.reporter.beat(UNKNOWN_S)  # another shape compiles again
        gc.collect()  # it rests during training, and what failed may have left cycles that hold tensors
        if self.device.is_cuda:
            torch.cuda.empty_cache()
        old, self.plan, step = self.plan, plan, self.progress.step
        message = f"memory ran out in step {step + 1}: micro_batch {old.micro_batch} became {plan.micro_batch}"
        message += f", in {plan.accumulation} portions; the step is taken again with the same tokens"
        self.reporter.warning(step, "memory.micro_batch", message)

    def without_room(self) -> TrainerError:
        """Return how this process ends, whose memory ran out in no step that could be taken again."""
        return without_room(
            self.out, self.plan, context=self.recipe.model.context, step=self.progress.step, asked=self.asked,
            is_several=self.processes.several, is_stopping=self.stop_asked.is_set(),
        )  # fmt: skip

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether a checkpoint with samples is due after the step that was taken last."""
        step, train = self.progress.step, self.recipe.train
        return step == train.steps or step % train.checkpoint_every == 0

    @property
    def evaluation_is_due(self) -> bool:
        """Whether an evaluation is: a checkpoint is judged when it is made, so that the best one is known."""
        return self.checkpoint_is_due or self.progress.step % self.recipe.eval.every == 0

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.reporter.beat(UNKNOWN_S)
        if self.writer is not None:
            self.writer.store()

    def score_core(self) -> None:
        """Answer CORE's tasks after the last step, where the recipe wants it; a stop before their end is a warning."""
        if not self.recipe.eval.core:
            return
        from trainer.core_score import FILE, as_record, core_score

        began = time.perf_counter()
        with torch.compiler.set_stance("force_eager"):
            found = core_score(
                self.gpt, self.data / FILE, self.plan.micro_batch, device=self.device, processes=self.processes,
                stopping=self.stop_asked.is_set, beat=lambda: self.reporter.beat(UNKNOWN_S),
            )  # fmt: skip
        if found is not None:
            figures = as_record(*found) | {"eval_s": time.perf_counter() - began}
            self.reporter.core(self.progress.step, figures)
            return
        message = "a stop was asked for before CORE's tasks were answered; the checkpoint can still be scored"
        self.reporter.warning(self.progress.step, "core.stopped", message)

    def close_feed(self) -> None:
        """End the thread that reads ahead."""
        if self.feed is not None:
            self.feed.close()
            self.feed = None


def places(ideas: Mapping[str, Callable[..., Any]]) -> str:
    """Return file and line of embedding, attention, loss, checkpoint and generation, for those who read it."""
    ideas = {"loss": chunked_cross_entropy, "checkpoint": CheckpointStore.save, **ideas}
    codes = {idea: inspect.unwrap(code).__code__ for idea, code in ideas.items()}
    root = f"{Path(__file__).parents[1]}/"
    return " | ".join(
        f"{idea} {codes[idea].co_filename.removeprefix(root)}:{codes[idea].co_firstlineno}"
        for idea in ("embedding", "attention", "loss", "checkpoint", "generation")
    )


def kind_of(device: Device) -> str:
    """Return what must be the same for the same bits to come out: card or processor, instructions, threads, torch."""
    if device.is_cuda:
        return f"{device.cuda_name} | torch {torch.__version__}"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        named = next(
            (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), ""
        )
    except OSError:
        named = ""
    with_what = torch.backends.cpu.get_cpu_capability()
    return f"{named or platform.machine()} {with_what} | {torch.get_num_threads()} threads | torch {torch.__version__}"


def asked_to_stop() -> threading.Event:
    """Return the flag that SIGTERM, Ctrl-C and the death of torchrun set from now on."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        # Event.set holds a lock: a second signal's handler would come in between and wait for it for ever.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        asked.set()

    def watch(launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_EVERY_S)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Started by torchrun, which tells nobody when it is killed.
        threading.Thread(target=watch, args=(os.getppid(),), name="launcher", daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr)  # every thread's stack, if found stuck
    return asked


After = Callable[[Run, dict[str, float], bool, float], str | None]
"""What is done after a step, given its figures, whether a stop is asked for, its seconds; "signal" ends the loop."""

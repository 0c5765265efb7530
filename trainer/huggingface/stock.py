"""The Hugging Face Trainer with a recipe's settings; where it has no setting, a method is overridden."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trainer.data import BatchPlan, position_seed, smaller
from trainer.errors import NonFinite
from trainer.huggingface.twin import Twin
from trainer.optim import learning_rate
from trainer.out_of_memory import shrink_micro_batch
from trainer.run import RunIO, Setup, State, StepResult

__all__ = ["stock_steps"]


def stock_steps(setup: Setup, state: State, io: RunIO, folder: str) -> Generator[StepResult, None, None]:
    """Take the remaining steps with Hugging Face's Trainer, each on request; its files in `folder` are not needed
    later.

    Its loop calls our code, not the reverse. Therefore it runs in a thread, which waits after each step until that has
    been handled.
    """
    transformers.utils.logging.set_verbosity_error()
    io.reporter.say(f"loop: the Hugging Face Trainer, transformers {transformers.__version__}")
    trainer = _Trainer(setup, state, io, folder)

    def work() -> None:
        try:
            trainer.train()
            trainer.taken.put(None)
        except BaseException as error:  # noqa: BLE001  passed to the loop, which raises it
            trainer.taken.put(error)

    thread = threading.Thread(target=work, name="huggingface", daemon=True)
    thread.start()
    try:
        while (result := trainer.taken.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            yield result
            trainer.is_next_wanted.put(True)
    finally:
        trainer.is_next_wanted.put(False)
        thread.join()


def _arguments(setup: Setup, state: State, folder: str) -> transformers.TrainingArguments:
    """Return Hugging Face's settings that correspond to the recipe's."""
    optim, train, cuda = setup.recipe.optim, setup.recipe.train, setup.device.is_cuda
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=train.steps - state.step,
        per_device_train_batch_size=state.plan.micro_batch, gradient_accumulation_steps=state.plan.accumulation,
        optim="adamw_torch_fused" if cuda else "adamw_torch", learning_rate=optim.lr, weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1, adam_beta2=optim.beta2, adam_epsilon=optim.eps, max_grad_norm=optim.grad_clip,
        train_sampling_strategy="sequential", bf16=setup.device.precision == "bf16", use_cpu=not cuda,
        logging_steps=1, logging_nan_inf_filter=False, report_to="none", save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, dataloader_pin_memory=cuda, seed=train.seed % 2**32,
    )  # fmt: skip
    # One process trains on one GPU; Hugging Face's Trainer would otherwise use every visible GPU.
    arguments._n_gpu = 1
    return arguments


def _next_smaller_plan(plan: BatchPlan) -> BatchPlan | None:
    """Return the next smaller plan, or None.

    The Trainer's loader still yields the current micro-batches, so the size of the smaller ones divides theirs.
    """
    part = smaller(BatchPlan(plan.sequences, plan.micro_batch, 1))
    return part and BatchPlan(plan.sequences, part.micro_batch, part.accumulation * plan.accumulation)


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The remaining samples, in the order in which the trainer's own loop takes them."""

    def __init__(self, setup: Setup, state: State) -> None:
        self._samples, each = setup.task.train_samples, state.plan.sequences
        self._first, self._count = state.step * each, (setup.recipe.train.steps - state.step) * each

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, targets = self._samples.read(self._first + index, 1)
        # GPT-2 shifts `labels` itself and would leave out the last target; it uses `shift_labels` unchanged.
        return {"input_ids": ids[0], "labels": ids[0], "shift_labels": targets[0]}


class _Trainer(transformers.Trainer):
    """Hugging Face's Trainer with the recipe's rates and dropout seeds, and checks for a finite loss and gradient."""

    optimizer: torch.optim.Optimizer  # Always set before use, although their type allows None.

    def __init__(self, setup: Setup, state: State, io: RunIO, folder: str) -> None:
        self._setup, self._state, self._io = setup, state, io
        self._twin = Twin(setup.gpt)
        # The two loops pass these in turn: a step that was taken (None at the end), and whether to take another.
        self.taken: queue.SimpleQueue[StepResult | BaseException | None] = queue.SimpleQueue()
        self.is_next_wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._first = state.step
        self._inputs: list[Any] = []
        self._portion = 0
        super().__init__(
            self._twin.model, _arguments(setup, state, folder), train_dataset=_Rows(setup, state),
            callbacks=[_Judge(self, state)],
        )  # fmt: skip
        self.remove_callback(transformers.trainer_callback.PrinterCallback)

    def create_optimizer(self, *given: Any) -> torch.optim.Optimizer:
        """Make Hugging Face's optimiser, with the state that the run was restored to."""
        optimizer = super().create_optimizer(*given)
        self._twin.give_state(self._setup.optimizer, optimizer)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Give every step the recipe's rate."""
        recipe, first = self._setup.recipe, self._first
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda taken: learning_rate(recipe, first + taken) / recipe.optim.lr
        )
        self.lr_scheduler = rates
        return rates

    def training_step(self, model: nn.Module, inputs: Any, *given: Any) -> Tensor:
        """Run one micro-step; if memory runs out, repeat the step's micro-steps so far with smaller portions."""
        self._inputs.append(inputs)
        waiting, loss = [inputs], None
        while waiting:
            loss = self._in_portions(model, waiting[0], *given)
            if loss is not None:
                del waiting[0]
                continue
            model.zero_grad()
            waiting, self._portion = list(self._inputs), 0
            shrink_micro_batch(self._setup, self._state, self._io, _next_smaller_plan(self._state.plan))
        if len(self._inputs) == self.args.gradient_accumulation_steps:
            self._inputs, self._portion = [], 0
        assert loss is not None
        return loss

    def _in_portions(self, model: nn.Module, inputs: Mapping[str, Tensor], *given: Any) -> Tensor | None:
        """Add the gradient of one micro-step of Hugging Face's loop, and return its loss; None if memory ran out."""
        step, plan, losses = self._state.step, self._state.plan, []
        rows = len(inputs["input_ids"])
        try:
            for first in range(0, rows, plan.micro_batch):
                # The dropout masks depend only on the position, so that resuming is exact.
                torch.manual_seed(position_seed(self._setup.recipe.train.seed, step, self._portion))
                self._portion += 1
                portion = {key: rows_of[first : first + plan.micro_batch] for key, rows_of in inputs.items()}
                losses.append(super().training_step(model, portion, *given))
        except torch.OutOfMemoryError:
            return None
        loss = torch.stack(losses).sum()
        if not math.isfinite(loss.item()):
            raise NonFinite(f"step {step + 1} has loss {loss.item()}; the weights did not move")
        return loss

    def result(self, logs: Mapping[str, float], seconds: float) -> StepResult:
        """Return the step that was taken, and give its state to the run's own optimiser, for a checkpoint."""
        self._twin.take_state(self._setup.optimizer, self.optimizer)
        lr = learning_rate(self._setup.recipe, self._state.step)
        figures = {"loss": float(logs["loss"]), "lr": lr, "grad_norm": float(logs["grad_norm"])}
        return StepResult(figures, self._io.stop_requested.is_set(), seconds)


class _Judge(transformers.TrainerCallback):
    """Checks each step before the weights move, and passes it on after it has been taken."""

    def __init__(self, trainer: _Trainer, state: State) -> None:
        self._trainer, self._state = trainer, state
        self._began_s = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Raise NonFinite if the gradient, after clipping, is NaN or infinite."""
        sums = [parameter.grad.sum() for parameter in given["model"].parameters() if parameter.grad is not None]
        if not math.isfinite(torch.stack(sums).sum().item()):
            raise NonFinite(f"step {self._state.step + 1} has no finite gradient; the weights did not move")

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Pass on the step. Hugging Face's log event follows every step, with its loss and its norm before clipping."""
        logs: Mapping[str, float] = given["logs"]
        if "grad_norm" not in logs:
            return  # the summary at the end
        self._trainer.taken.put(self._trainer.result(logs, time.perf_counter() - self._began_s))
        control.should_training_stop |= not self._trainer.is_next_wanted.get()
        self._began_s = time.perf_counter()

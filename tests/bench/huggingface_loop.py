"""The Hugging Face Trainer on GPT2LMHeadModel, in blocks of steps, as a rival for `bench_trainer.py`.

Stock settings, except those that make the runs comparable (AdamW's betas and decay, a constant rate, no dropout, no
reports). Needs transformers and accelerate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.bench.reference_loop import HEADER_BYTES, Shape, card_clock
from trainer.pretrained import LINEAR_NAMES

transformers.utils.logging.set_verbosity_error()


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A data set of `count` windows with their targets; `read` returns the pair of an index."""

    def __init__(self, count: int, read: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, targets = self._read(index)
        # GPT-2 would shift `labels` and leave out the last target; it takes `shift_labels` as they are.
        return {"input_ids": ids, "labels": ids, "shift_labels": targets}


class Watch(TrainerCallback):
    """A callback that keeps all logged losses, and the end time of each step (of those in `at`, if given)."""

    def __init__(self, clock: Callable[[], float], at: set[int] | None) -> None:
        self.clock, self.at = clock, at
        self.ends_s: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if self.at is None or state.global_step in self.at:
            self.ends_s.append(self.clock())

    def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


class HuggingFaceLoop:
    """A contestant whose every block is a run of the Trainer on the same model, without timing the first two steps."""

    def __init__(self, shape: Shape, file: Path, rate: float, out: Path, *, precision: str) -> None:
        self.precision = {"bf16": precision == "bf16", "use_cpu": not torch.cuda.is_available()}
        self.shape, self.rate, self.out = shape, rate, out
        self.row = np.memmap(file, dtype=np.uint16, mode="r", offset=HEADER_BYTES)
        config = GPT2Config(
            vocab_size=shape.vocab_size, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
            n_head=shape.heads, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of our model, with linear weights transposed to (in, out) as this model has them."""
        named = {name: w.t() if name.endswith(LINEAR_NAMES) else w for name, w in weights.items()}
        self.model.transformer.load_state_dict(named)

    def _window(self, index: int) -> tuple[Tensor, Tensor]:
        start, context = index * self.shape.context, self.shape.context
        window = torch.from_numpy(self.row[start : start + context + 1].astype(np.int64))
        return window[:-1], window[1:]

    def _train(
        self, rows: Rows, steps: int, clock: Callable[[], float], at: set[int] | None = None, **more: Any
    ) -> Watch:
        arguments = TrainingArguments(
            output_dir=str(self.out), max_steps=steps, per_device_train_batch_size=self.shape.batch,
            learning_rate=self.rate, lr_scheduler_type="constant", weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0,
            report_to="none", save_strategy="no", disable_tqdm=True, remove_unused_columns=False, **self.precision,
            **more,
        )  # fmt: skip
        watch = Watch(clock, at)
        trainer = Trainer(self.model, arguments, train_dataset=rows, callbacks=[watch])
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.train()
        return watch

    def losses(self, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
        """Train on the given batches; return the losses."""
        pairs = [(i, t) for ids, targets in batches for i, t in zip(ids, targets, strict=True)]
        rows, in_turn = Rows(len(pairs), pairs.__getitem__), {"train_sampling_strategy": "sequential"}
        return self._train(rows, len(batches), time.perf_counter, logging_steps=1, **in_turn).losses

    def block(self, steps: int, clock: Callable[[], float]) -> list[float]:
        """Train on random windows; return the seconds of each of the last `steps` steps, or their mean on a GPU."""
        rows = Rows((len(self.row) - 1) // self.shape.context, self._window)
        if clock is card_clock:
            return [float(np.diff(self._train(rows, steps + 2, clock, {2, steps + 2}).ends_s)[0]) / steps]
        return np.diff(self._train(rows, steps + 2, clock).ends_s)[-steps:].tolist()

"""Defines what a GPT trains on and how it is evaluated: windows of text, validation loss, HellaSwag, generated text.

All processes share the work of an evaluation. Text is generated token by token, with the plain module, never the
compiled one. trainer/translation/task.py has the counterpart of `TextTask` for sentence pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data import VALIDATION_SEED, Samples, TokenRow
from trainer.distributed import Device, Processes
from trainer.items import Item, read_items
from trainer.model import GPT
from trainer.recipe import Recipe, SampleConfig
from trainer.shards import Prompt, TokenData

if TYPE_CHECKING:
    from trainer.translation.model import Translator
    from trainer.translation.task import TranslationTask

__all__ = [
    "Evaluation",
    "Task",
    "TextTask",
    "accuracy",
    "filled_rows",
    "generate",
    "pick",
    "rounds",
    "score_answers",
    "token_bytes",
    "validation",
]

ITEMS_AT_ONCE = 8
WIDTHS = 64
"""On a GPU, texts are padded to a multiple of this: cuDNN's attention plans each new width for 23 to 37 ms."""
COLDEST = 1e-30
"""Below this temperature the likeliest token has all the probability, and dividing the logits would overflow fp32."""


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """The task of a GPT: to continue a text."""

    data: TokenData
    train_samples: Samples
    val_samples: Samples
    eval_windows: int
    """How many validation samples an evaluation uses."""
    eval_tokens: int
    items: tuple[Item, ...]
    """HellaSwag's items, which every evaluation answers."""

    @classmethod
    def open(cls, recipe: Recipe, folder: Path, data: TokenData, processes: Processes) -> TextTask:
        """Cut the shards into windows, and read HellaSwag's items if the recipe wants any."""
        context, here, items = recipe.model.context, processes.local_count, recipe.eval.hellaswag_items
        train = Samples(TokenRow(data.train, here), context, recipe.train.seed, "train", recipe.data.order)
        val = Samples(TokenRow(data.val, here), context, VALIDATION_SEED, "val", recipe.eval.order)
        windows = min(val.windows, max(1, recipe.eval.tokens // context))
        return cls(
            data=data, train_samples=train, val_samples=val, eval_windows=windows, eval_tokens=windows * context,
            items=read_items(folder, items, data.tokenizer.vocab_size) if items else (),
        )  # fmt: skip

    def build_model(self, recipe: Recipe) -> GPT:
        """Return a GPT with weights drawn from the seed, on the CPU, so that they are the same for every device."""
        torch.manual_seed(recipe.train.seed)
        return GPT(recipe.model, self.data.tokenizer.vocab_size)

    def bytes_of_ids(self) -> np.ndarray:
        """Return the number of bytes of each token of the vocabulary; see `token_bytes`."""
        return token_bytes(self.data.tokenizer.tokens, self.data.tokenizer.eot_id)

    def answers(
        self, model: nn.Module, prompts: Sequence[Prompt], sample: SampleConfig, seeds: Sequence[int],
        stopping: Callable[[], bool],
    ) -> list[str]:  # fmt: skip
        """Return the text of each prompt with the model's continuation."""
        assert isinstance(model, GPT)
        written = generate(model, [prompt.ids for prompt in prompts], sample, seeds=seeds, stopping=stopping)
        return [self.data.tokenizer.decode(ids) for ids in written]

    @staticmethod
    def landmarks(model: nn.Module) -> dict[str, Callable[..., Any]]:
        """Return the functions of this kind of model that a run's `source_map` lists, by name."""
        attention = type(model.get_submodule("h.0.attn"))
        return {"embedding": GPT.hidden, "attention": attention.forward, "generation": generate}


Task: TypeAlias = "TextTask | TranslationTask"


@dataclass(frozen=True)
class Evaluation:
    """The result of a validation: mean loss in nats per token, and bits per byte; None if they were not computed."""

    val_loss: float
    bits_per_byte: float | None

    @property
    def perplexity(self) -> float:
        """Return the loss as the number of equally likely tokens that it corresponds to."""
        return math.exp(min(self.val_loss, 700.0))


def token_bytes(tokens: tuple[bytes, ...], eot_id: int | None) -> np.ndarray:
    """Return how many bytes of text each token id stands for; the end-of-text token stands for none."""
    lengths = np.array([len(token) for token in tokens], dtype=np.int64)
    if eot_id is not None:
        lengths[eot_id] = 0
    return lengths


def rounds(items: int, each: int, processes: Processes) -> list[tuple[int, int]]:
    """Return this process's (first, count) of every round; all processes have the same number of rounds.

    That is necessary because a forward may need all processes. When the items run out, `count` is 0 and `first` is
    still a valid item.
    """
    starts = range(processes.rank * each, items + processes.count * each, processes.count * each)
    number = -(-items // (processes.count * each))
    return [(min(first, items - 1), max(0, min(each, items - first))) for first in list(starts)[:number]]


@torch.no_grad()
def validation(
    model: GPT | Translator,
    samples: Samples,
    windows: int,
    micro_batch: int,
    *,
    lengths: np.ndarray | None,
    device: Device,
    processes: Processes,
    stopping: Callable[[], bool],
) -> Evaluation | None:
    """Evaluate the first `windows` samples; return None in every process if `stopping` is true in any of them.

    `lengths` are those of `token_bytes`; None if bits per byte are not needed. All processes take part, because
    otherwise the others would wait longer than the collective's time limit.
    """
    # [sum of losses, windows, bytes]
    totals = torch.zeros(3, dtype=torch.float64, device=device.torch)
    model.eval()
    for first, count in rounds(windows, micro_batch, processes):
        if processes.any(stopping(), device.torch):
            model.train()
            return None
        inputs = samples.read(first, max(1, count))
        with device.autocast():
            loss = model(*(tensor.to(device.torch) for tensor in inputs))
        totals[0] += loss.double() * count
        totals[1] += count
        if lengths is not None and count:
            totals[2] += int(lengths[inputs[1].numpy()].sum())
    model.train()
    loss_sum, windows_seen, size = processes.summed(totals).tolist()
    tokens = windows * model.config.context
    return Evaluation(loss_sum / windows_seen, loss_sum / windows_seen * tokens / size / math.log(2) if size else None)


def choose_width(longest: int, context: int, kind: str) -> int:
    """Return the width of a batch whose longest text has `longest` tokens; `kind` is the type of its device."""
    return min(context, -(-longest // WIDTHS) * WIDTHS) if kind == "cuda" else longest


def filled_rows(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], context: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (rows, time) for pairs of a prefix and an ending; targets outside the ending are -100.

    A text that is longer than the model's context loses its beginning; a shorter text is padded at its end.
    """
    rows = [((*before, *ending)[-(context + 1) :], min(len(ending), context)) for before, ending in pairs]
    width = choose_width(max(len(row) for row, _ in rows) - 1, context, kind)
    ids, targets = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
    for index, (row, asked) in enumerate(rows):
        tokens = torch.tensor(row)
        ids[index, : len(row) - 1] = tokens[:-1]
        targets[index, len(row) - 1 - asked : len(row) - 1] = tokens[-asked:]
    return ids, targets


def score_answers(model: GPT, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's mean loss over its targets, and whether every target of the row is the likeliest token.

    Only the positions with targets go through the head.
    """
    asked = targets != -100
    logits = model.logits(model.hidden(ids)[asked])
    losses, missed = torch.zeros_like(targets, dtype=torch.float32), torch.zeros_like(asked)
    losses[asked] = F.cross_entropy(logits, targets[asked], reduction="none")
    missed[asked] = logits.argmax(dim=1) != targets[asked]
    return losses.sum(dim=1) / asked.sum(dim=1), ~missed.any(dim=1)


@torch.no_grad()
def accuracy(
    model: GPT, items: Sequence[Item], *, device: Device, processes: Processes, stopping: Callable[[], bool]
) -> float | None:
    """Return the share of items whose right ending has the lowest mean loss.

    Return None in every process if `stopping` is true in any of them.
    """
    right = torch.zeros((), dtype=torch.float64, device=device.torch)
    model.eval()
    for first, count in rounds(len(items), ITEMS_AT_ONCE, processes):
        if processes.any(stopping(), device.torch):
            model.train()
            return None
        some = items[first : first + max(1, count)]
        pairs = [(item.context, ending) for item in some for ending in item.endings]
        ids, targets = filled_rows(pairs, model.config.context, device.torch.type)
        with device.autocast():
            losses, _ = score_answers(model, ids.to(device.torch), targets.to(device.torch))
        labels = torch.tensor([item.label for item in some], device=device.torch)
        right += (losses.view(-1, 4).argmin(dim=1) == labels)[:count].sum()
    model.train()
    return float(processes.summed(right).item()) / len(items)


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator, top_p: float = 1.0) -> int:
    """Draw one id from logits (vocab,), among the `top_k` likeliest, or among all if `top_k` is 0.

    At temperature 0, return the likeliest. With `top_p` below 1, the draw is from the smallest set of likeliest tokens
    whose total probability, at this temperature, is at least `top_p`.
    """
    if temperature < COLDEST:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < torch.topk(logits, top_k).values[-1], -torch.inf)
    likely = torch.softmax(logits, dim=0)
    if top_p < 1.0:
        ordered, places = likely.sort(descending=True, stable=True)
        likely[places[ordered.cumsum(dim=0) - ordered >= top_p]] = 0.0
    return int(torch.multinomial(likely, 1, generator=generator))


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    config: SampleConfig,
    *,
    seeds: Sequence[int],
    stopping: Callable[[], bool] = lambda: False,
    top_p: float = 1.0,
    is_over: Callable[[Sequence[int]], bool] = lambda ids: False,
) -> list[list[int]]:
    """Return each prompt's ids and up to `config.tokens` more. A text ends early if `is_over` is true of its ids.

    The same seed gives the same text. All prompts continue in one batch, because on a GPU a forward of several rows
    takes no longer than of one. `stopping` is checked before each token.
    """
    texts = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(config.tokens):
        if stopping() or all(map(is_over, texts)):
            break
        logits = _next_logits(model, texts).cpu()
        for ids, row, generator in zip(texts, logits, generators, strict=True):
            if not is_over(ids):
                ids.append(pick(row, config.temperature, config.top_k, generator, top_p))
    return texts


def _next_logits(model: GPT, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits (text, vocab) for the token after each text. The padding after shorter texts has no effect."""
    visible = [text[-model.config.context :] for text in texts]
    device = model.wte.weight.device
    width = choose_width(max(len(ids) for ids in visible), model.config.context, device.type)
    rows = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in visible], device=device)
    return model.next_token_logits(rows, torch.tensor([len(ids) - 1 for ids in visible], device=device))

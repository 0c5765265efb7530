"""CORE (Li et al. 2024, DCLM): tasks for a model without fine-tuning; `python -m trainer.core_score OUT --data DATA`.

The first line of `core.jsonl` in the data folder has the bundle's sha256 and its tasks in order: label, random baseline
in percent, number of items. Each further line is an item: `prefix` and `rows` of token ids, a `label`, and `asked`,
which is the number of ids at the end of each row that the model must predict. The model chooses the row with the lowest
mean loss. An item without a label is right if every id to predict is the likeliest. A task's accuracy is centred by its
baseline, and CORE is the mean over tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch

from trainer.distributed import Device, Processes, choose_device
from trainer.errors import Refused
from trainer.evaluate import filled_rows, rounds, score_answers
from trainer.generate import open_checkpoint
from trainer.model import GPT

__all__ = ["FILE", "TaskScore", "as_record", "core_score", "demand_tasks", "main", "read_tasks"]

FILE = "core.jsonl"
MOST_TASKS = 1000


@dataclass(frozen=True)
class TaskScore:
    """A task: its name, the score of guessing (0 to 1), its number of items, and the share that is right."""

    label: str
    baseline: float
    items: int
    accuracy: float = 0.0

    @property
    def centered(self) -> float:
        """Return the accuracy on a scale on which guessing is 0 and a perfect score is 1."""
        return (self.accuracy - self.baseline) / (1 - self.baseline)


@dataclass(frozen=True)
class _Item:
    prefix: list[int]
    rows: list[list[int]]
    asked: list[int]
    label: int | None


def read_tasks(lines: TextIO) -> tuple[str, list[TaskScore]]:
    """Return the bundle's sha256 and the tasks from the first line; Refused if it is invalid."""
    try:
        head = json.loads(lines.readline())
        tasks = [TaskScore(str(t["label"]), t["random_baseline"] / 100, t["items"]) for t in head["tasks"]]
        if not 0 < len(tasks) <= MOST_TASKS or any(not 0 <= t.baseline < 1 or t.items < 1 for t in tasks):
            raise ValueError("a task needs items, and a baseline of at least 0 and below 100")
        return str(head["bundle_sha256"]), tasks
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"{FILE} does not begin with its tasks: {error}") from error


def demand_tasks(folder: Path) -> None:
    """Raise Refused if a data folder has no CORE items."""
    try:
        with (folder / FILE).open(encoding="utf-8") as lines:
            read_tasks(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"eval.core is above 0, but {FILE} in the data folder cannot be read") from error


def _item(line: str, vocab_size: int) -> _Item:
    try:
        record = json.loads(line)
        item = _Item(record["prefix"], record["rows"], record["asked"], record["label"])
        every = [item.prefix, *item.rows]
        if not all(type(i) is int and 0 <= i < vocab_size for ids in every for i in ids):
            raise ValueError("it must have token ids of this vocabulary")
        pairs = list(zip(item.asked, item.rows, strict=True))
        if not pairs or any(not 0 < asked < len(item.prefix) + len(row) for asked, row in pairs):
            raise ValueError("each row needs a token before those to predict")
        if not (item.label is None and len(pairs) == 1) and item.label not in range(len(pairs)):
            raise ValueError("the label must be the number of a row")
        return item
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"{FILE} has a line that is not an item: {error}") from error


def _pairs(item: _Item) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each row of an item as two lists: the ids that the model reads, and the ids that it must predict."""
    for row, asked in zip(item.rows, item.asked, strict=True):
        ids = [*item.prefix, *row]
        yield ids[:-asked], ids[-asked:]


def _right(model: GPT, items: Sequence[_Item], device: Device) -> list[bool]:
    """Return, for each item, whether the model answers it correctly."""
    pairs = [pair for item in items for pair in _pairs(item)]
    ids, targets = filled_rows(pairs, model.config.context, device.torch.type)
    with device.autocast():
        losses, exact = (
            found.tolist() for found in score_answers(model, ids.to(device.torch), targets.to(device.torch))
        )
    right, first = [], 0
    for item in items:
        some = losses[first : first + len(item.rows)]
        right.append(exact[first] if item.label is None else some.index(min(some)) == item.label)
        first += len(item.rows)
    return right


@torch.no_grad()
def core_score(
    model: GPT,
    file: Path,
    at_once: int,
    *,
    device: Device,
    processes: Processes,
    stopping: Callable[[], bool],
    beat: Callable[[], None] = lambda: None,
) -> tuple[str, list[TaskScore]] | None:
    """Return the bundle's sha256 and each task with its accuracy.

    Return None in every process if `stopping` is true in any of them. About `at_once` rows go through the model
    together. All processes take part, and each reads the whole file.
    """
    done: list[TaskScore] = []
    try:
        with file.open(encoding="utf-8") as lines:
            digest, tasks = read_tasks(lines)
            model.eval()
            for task in tasks:
                own = [line.rstrip("\n") for line in islice(lines, task.items)]
                if len(own) < task.items:
                    raise Refused(f"{FILE} ends within {task.label}")
                rows = max(1, len(json.loads(own[0]).get("rows", ())))
                right = torch.zeros((), dtype=torch.float64, device=device.torch)
                for first, count in rounds(task.items, max(1, at_once // rows), processes):
                    beat()
                    if processes.any(stopping(), device.torch):
                        model.train()
                        return None
                    some = [_item(line, model.vocab_size) for line in own[first : first + max(1, count)]]
                    right += sum(_right(model, some, device)[:count])
                share = float(processes.summed(right).item()) / task.items
                done.append(TaskScore(task.label, task.baseline, task.items, share))
    except (OSError, ValueError) as error:
        raise Refused(f"{FILE} cannot be read: {error}") from error
    model.train()
    return digest, done


def as_record(digest: str, tasks: Sequence[TaskScore]) -> dict[str, Any]:
    """Return a score in the form of an event: CORE, and the accuracy of each task."""
    by_label = {
        task.label: {"accuracy": task.accuracy, "centered": task.centered, "items": task.items} for task in tasks
    }
    items = sum(task.items for task in tasks)
    core = sum(task.centered for task in tasks) / len(tasks)
    return {"core": core, "core_items": items, "bundle_sha256": digest, "tasks": by_label}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the score of a checkpoint as one JSON line; return 0, or 2 if it is refused."""
    parser = argparse.ArgumentParser(prog="python -m trainer.core_score", description="CORE of a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="a run's out folder, or one NNNNNN.model.safetensors in it")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="where data.json and vocab.json are")
    parser.add_argument("--recipe", type=Path, metavar="JSON", help="a recipe to use in place of the checkpoint's")
    parser.add_argument("--items", type=Path, metavar="FILE", help="core.jsonl, if it is not in the data folder")
    parser.add_argument("--at-once", type=int, default=16, metavar="N", help="rows that go through the model together")
    given = parser.parse_args(arguments)
    try:
        trained = open_checkpoint(given.checkpoint, given.data, given.recipe)
        if not isinstance(trained.model, GPT):
            raise Refused("CORE needs a model that continues text, but this one translates")
        found = core_score(
            trained.model, given.items or given.data / FILE, given.at_once, device=choose_device("auto", 0, 1),
            processes=Processes(), stopping=lambda: False,
        )  # fmt: skip
        assert found is not None
        print(json.dumps({"step": trained.step, **as_record(*found)}), flush=True)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return refusal.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

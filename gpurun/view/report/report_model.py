"""What a report is made of: one RunMaterial a run, and what can be said by holding several side by side."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.job_terms import TRAINER, JobTerms
from gpurun.core.money import Micros
from gpurun.core.receipt_record import Receipt
from gpurun.core.untrusted import safe_line
from gpurun.view.number_format import short_hash
from gpurun.view.receipt_screen import cost_label, hardware_words, signature_word
from gpurun.view.report.series import Mark, Told

_LEFT_OUT = ("about",)
_MOST_NAMED = 3
_MOST_KEYS = 12
"""More keys than these that differ between two recipes are a wall; they stand under "Every setting"."""
_NUMBER = re.compile(r"-\d|-\.\d")


@dataclass(frozen=True)
class RunMaterial:
    """One run as the report shows it.

    `shards` says what it learned from, which no key of a recipe does: a text that is brought takes the recipe's place.
    `tokenizer_sha256` is of the vocabulary in whose tokens its losses are counted.
    `receipt` is None while there is none, `no_receipt` then says why. `spent_micros` is what a run that still goes on
    has cost so far. `notes` are sentences about what is missing or odd, for the reader of the page. A command has its
    words in `argv` and a digest over its folder, in place of a recipe, and no `parameters` that are known.

    `given` are the keys that its user set by --set, `trainer` says whose trainer it had. The values of `env` are
    compared and not shown: a page is passed on.
    """

    run: str
    recipe: str
    form: str
    mode: str
    where: str
    state: str
    parameters: int | None
    resolved: Mapping[str, Any]
    shards: str
    tokenizer_sha256: str
    told: Told
    receipt: Receipt | None = None
    no_receipt: str = ""
    spent_micros: Micros | None = None
    notes: tuple[str, ...] = ()
    terms: JobTerms = TRAINER
    argv: tuple[str, ...] = ()
    folder_sha256: str = ""
    began_wall: float | None = None
    given: tuple[str, ...] = ()
    trainer: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    pip: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """What it was told to do, key by key: the data and the resolved recipe, or a command's words and folder."""
        if self.terms.has_model:
            return {"data": self.shards} | _flat(self.resolved)
        folder = f"sha256 {short_hash(self.folder_sha256)}"
        return {"data": self.shards, "folder": folder, "command": safe_line(shlex.join(self.argv))}

    @property
    def program(self) -> str:
        """Return the trainer with its digest; "" where a command ran, which has its folder's."""
        return f"{self.trainer or 'trainer'}, sha256 {short_hash(self.folder_sha256)}" if self.terms.has_model else ""

    @property
    def day(self) -> str:
        """Return the day on which it began, in UTC; "" where that is not known."""
        return utc(self.began_wall)[:10] if self.began_wall else ""

    @property
    def last(self) -> Mark | None:
        """The last training loss."""
        marks = self.told.losses.items
        return marks[-1] if marks else None

    @property
    def cost_micros(self) -> Micros | None:
        """What it cost at most, by its receipt; so far, where there is none."""
        if self.receipt is None:
            return self.spent_micros
        upper = self.receipt.predicate["cost"]["upper_bound_micros"]
        return None if upper is None else Micros(upper)

    def epoch_at(self, step: int) -> float | None:
        """How often the training text had been seen after a step; of pairs no tokens tell it, a step's are padded."""
        seen, all_of_it = self.told.tokens_at(step), self.told.train_tokens
        is_padded = self.resolved.get("model", {}).get("preset") == "encoder-decoder"
        return seen / all_of_it if seen and all_of_it and not is_padded else None

    def as_record(self) -> dict[str, Any]:
        """The same as JSON data."""
        receipt, best, last = self.receipt, self.told.best, self.last
        told = receipt.predicate if receipt else None
        return {
            "run": self.run,
            "recipe": self.recipe,
            "form": self.form,
            "mode": self.mode,
            "where": self.where,
            "state": self.state,
            "began_wall": self.began_wall,
            "device": self.told.device or None,
            "parameters": self.parameters,
            "step": last.step if last else None,
            "steps": self.told.steps,
            "tokens": last.tokens if last else None,
            "train_s": self.train_s,
            "billable_s": told["runtime"]["billable_s"] if told else None,
            "cost_micros": self.cost_micros,
            "cost_is": cost_label(told) if told else "so far" if self.spent_micros is not None else "unknown",
            "final_loss": last.loss if last else None,
            "best_val_loss": best.loss if best else None,
            "best_val_step": best.step if best else None,
            "bits_per_byte": best.bits_per_byte if best else self.told.bits_per_byte,
            "core": self.told.core,
            "hellaswag": best.hellaswag if best else None,
            "hardware": hardware_words(told) if told else None,
            "shutdown": told["teardown"]["is"] if told else None,
            "verdict": told["verdict"]["is"] if told else None,
            "receipt_sha256": receipt.sha256 if receipt else None,
            "signature": signature_word(receipt) if receipt else None,
            "no_receipt": self.no_receipt,
            "notes": list(self.notes),
            "loss": [_mark_record(mark) for mark in self.told.losses.items],
            "validation": [_mark_record(mark) for mark in self.told.validation.items],
            "samples": {
                prompt: [{"step": one.step, "text": "\n".join(one.lines)} for one in kept.items]
                for prompt, kept in self.told.samples.items()
            },
        }

    @property
    def train_s(self) -> float | None:
        """How long it trained: by this machine's clock where the receipt has it, else as the trainer counted."""
        measured = self.receipt.predicate["training"]["seconds"]["train_s"] if self.receipt else None
        return measured if measured is not None else self.told.seconds or None


def _mark_record(mark: Mark) -> list[float | int | None]:
    """A mark as a short list: step, loss, tokens, seconds, micro-dollars."""
    seconds = round(mark.seconds, 3) if mark.seconds is not None else None
    return [mark.step, mark.loss, mark.tokens, seconds, mark.spent_micros]


def why_unranked(runs: Sequence[RunMaterial]) -> str:
    """Why one run's loss cannot be held against another's; empty where it can."""
    if len({run.terms for run in runs}) > 1 or len({run.argv and run.recipe for run in runs}) > 1:
        return "What ran is not the same script: what one calls its loss may be another thing than the other's."
    if len({run.tokenizer_sha256 for run in runs}) > 1:
        return "The tokenisers differ: hold these runs against one another by bits a byte, not by nats a token."
    if len({run.shards for run in runs}) > 1:
        return "The runs learned from different shards: a lower loss of one is not a better one."
    return ""


def find_lowest_loss(runs: Sequence[RunMaterial]) -> tuple[RunMaterial, Mark] | None:
    """The lowest validation loss and whose it is; None where there is none, or no one measure for all."""
    judged = [(run, run.told.best) for run in runs if run.told.best is not None]
    return min(judged, key=lambda one: one[1].loss, default=None) if not why_unranked(runs) else None


def settings(runs: Sequence[RunMaterial]) -> list[tuple[str, list[str]]]:
    """Every key of what the runs were told to do, with the value in each run; empty where it has no such key."""
    flat = [run.settings for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [(key, [one.get(key, "") for one in flat]) for key in keys]


def list_differences(runs: Sequence[RunMaterial]) -> list[tuple[str, list[str]]]:
    """Return every setting that is not the same in all runs; a recipe is not compared with a command."""
    found = []
    for key, values in settings(runs):
        kinds = {run.terms for run in runs if key in run.settings}
        if len({value for run, value in zip(runs, values, strict=True) if run.terms in kinds}) > 1:
            found.append((key, values))
    return found


def set_differences(runs: Sequence[RunMaterial]) -> list[tuple[str, list[str]]]:
    """Return what a user set and is not the same: data, code, arguments, and keys of recipes.

    All keys that differ within one recipe were set, by --set or in its file. Between two recipes nearly every key
    differs: those of --set are listed, and the others where they are few.
    """
    what = "recipe" if all(run.terms.has_model for run in runs) else "job"
    facts: list[tuple[str, Callable[[RunMaterial], str | None]]] = [
        (what, lambda run: run.recipe),
        ("data", lambda run: run.shards),
        ("trainer", lambda run: run.program or None),
        ("folder", lambda run: None if run.terms.has_model else run.settings["folder"]),
        ("--pip", lambda run: None if run.terms.has_model else safe_line(" ".join(run.pip))),
    ]
    rows = [(name, [fact(run) for run in runs]) for name, fact in facts]
    commands = {run.run: arguments_of(run.argv) for run in runs if not run.terms.has_model}
    for name in dict.fromkeys(name for words in commands.values() for name in words):
        rows.append((name, [commands[run.run].get(name, "") if run.run in commands else None for run in runs]))
    rows += _env_rows([run for run in runs if not run.terms.has_model], runs)
    flat = {run.run: _flat(run.resolved) for run in runs if run.terms.has_model}
    rows += [
        (key, [flat[run.run].get(key, "") if run.run in flat else None for run in runs])
        for key in _set_keys(runs, flat)
    ]
    return [(name, [value or "" for value in values]) for name, values in rows if len({*values} - {None}) > 1]


def _set_keys(runs: Sequence[RunMaterial], flat: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the keys of recipes that were set, in the recipe's order."""
    models = [run for run in runs if run.run in flat]
    keys = list(dict.fromkeys(key for run in models for key in flat[run.run]))

    def differing(some: Sequence[RunMaterial]) -> set[str]:
        return {key for key in keys if len({flat[run.run].get(key, "") for run in some}) > 1}

    given = {key for run in models for key in run.given}
    for recipe in {run.recipe for run in models}:
        given |= differing([run for run in models if run.recipe == recipe])
    every = differing(models)
    return [key for key in keys if key in (every if len(every) <= _MOST_KEYS else given)]


def _env_rows(commands: Sequence[RunMaterial], runs: Sequence[RunMaterial]) -> Iterator[tuple[str, list[str | None]]]:
    """Yield a row for each variable of --env, whose values are told apart and not shown."""
    for name in dict.fromkeys(name for run in commands for name in run.env):
        values = list(dict.fromkeys(run.env[name] for run in commands if name in run.env))
        words = {value: f"value {place}, not shown" for place, value in enumerate(values, 1)}
        shown = [words[run.env[name]] if name in run.env else "" if run in commands else None for run in runs]
        yield safe_line(f"--env {name}"), shown


def arguments_of(argv: Sequence[str]) -> dict[str, str]:
    """Return a command's arguments by name: `--lr 3e-4`, `--lr=3e-4` and `lr=3e-4`; what has no name by its place."""
    named: dict[str, str] = {}
    place, words = 0, [*argv]
    while words:
        word = words.pop(0)
        name, is_pair, value = word.partition("=")
        if _is_flag(word) and not is_pair:
            value = words.pop(0) if words and not _is_flag(words[0]) else "yes"
        elif not is_pair:
            place += 1
            name, value = f"word {place}", word
        named[safe_line(name)] = safe_line(f"{named.get(name, '')} {value}".strip())
    return named


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.match(word)


def own_settings(runs: Sequence[RunMaterial]) -> list[str]:
    """What each run has to itself: `lr 0.0003, layers 12`, by the last word of a key where that is enough.

    Of many settings the first few are named, and the others counted; of a command its own words are.
    """
    recipes = [run for run in runs if run.terms.has_model]
    told = iter(_own_keys(recipes) if recipes else ())
    commands = [run.argv for run in runs if not run.terms.has_model]
    return [next(told) if run.terms.has_model else _own_words(run.argv, commands) for run in runs]


def _own_words(argv: Sequence[str], every: Sequence[Sequence[str]]) -> str:
    """The words of a command from the first to the last that not all of them have, with the flag before them."""
    shortest = min(map(len, every))
    same = [len({words[place] for words in every}) == 1 for place in range(shortest)]
    first = same.index(False) if False in same else shortest
    back = [len({words[-1 - place] for words in every}) == 1 for place in range(shortest - first)]
    last = back.index(False) if False in back else shortest - first
    first -= first > 0 and argv[first - 1].startswith("-") and first < len(argv) - last
    return safe_line(shlex.join(argv[first : len(argv) - last]))


def _own_keys(runs: Sequence[RunMaterial]) -> list[str]:
    found = [(key, values) for key, values in set_differences(runs) if key not in ("recipe", "data")]
    words = [key.rpartition(".")[2] for key, _ in found]
    names = [word if words.count(word) == 1 else key for word, (key, _) in zip(words, found, strict=True)]
    shown, more = list(zip(names, found, strict=True))[:_MOST_NAMED], len(found) - _MOST_NAMED
    rest = [f"{more} more"] if more > 0 else []
    return [
        ", ".join([*(f"{name} {values[place]}" for name, (_, values) in shown), *rest]) for place in range(len(runs))
    ]


def is_drawn(runs: Sequence[RunMaterial]) -> bool:
    """Whether any run has told of two points: of one there is no curve."""
    return any(len(kept.items) > 1 for run in runs for kept in (run.told.losses, run.told.validation))


def _flat(tables: Mapping[str, Any]) -> dict[str, str]:
    """`{"model": {"layers": 2}}` as `{"model.layers": "2"}`, every value in one harmless line."""
    flat: dict[str, str] = {}
    for name, table in tables.items():
        pairs = table.items() if isinstance(table, Mapping) else ()
        flat |= {safe_line(f"{name}.{key}"): _shown(value) for key, value in pairs}
        if not isinstance(table, Mapping) and name not in _LEFT_OUT:
            flat[safe_line(name)] = _shown(table)
    return flat


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return safe_line(value)
    return safe_line(f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False))

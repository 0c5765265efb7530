"""The content of a report: one RunMaterial per run, and comparisons of several runs."""

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
from gpurun.view.report.series import Mark, RunHistory

_LEFT_OUT = ("about",)
_MOST_NAMED = 3
_MOST_KEYS = 12
"""If more keys than this differ between two recipes, they are only listed under "Every setting"."""
_NUMBER = re.compile(r"-\d|-\.\d")


@dataclass(frozen=True)
class RunMaterial:
    """One run as the report shows it.

    - `shards`: identifies its training data. If the user supplied the text, no key of the recipe does.
    - `tokenizer_sha256`: identifies the vocabulary of the tokens in its losses.
    - `receipt`: None without a receipt; `no_receipt` then has the reason.
    - `spent_micros`: the cost so far of an open run.
    - `notes`: sentences for the reader about missing or unusual things.
    - `argv` and `folder_sha256`: a command's words and the digest of its folder. A command has no recipe and no known
      `parameters`.
    - `given`: the keys that the user set with --set.
    - `trainer`: which trainer was used.
    - `env`: the values are compared but not shown, because a page is passed on to others.
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
    history: RunHistory
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
        """Return the run's settings by key: the data and the resolved recipe, or a command's words and folder."""
        if self.terms.has_model:
            return {"data": self.shards} | _flatten_tables(self.resolved)
        folder = f"sha256 {short_hash(self.folder_sha256)}"
        return {"data": self.shards, "folder": folder, "command": safe_line(shlex.join(self.argv))}

    @property
    def program(self) -> str:
        """Return the trainer with its digest; "" for a command, which has the digest of its folder instead."""
        return f"{self.trainer or 'trainer'}, sha256 {short_hash(self.folder_sha256)}" if self.terms.has_model else ""

    @property
    def day(self) -> str:
        """Return the day on which the run began, in UTC; "" if that is not known."""
        return utc(self.began_wall)[:10] if self.began_wall else ""

    @property
    def last(self) -> Mark | None:
        """Return the last training loss; None if there is none."""
        marks = self.history.losses.items
        return marks[-1] if marks else None

    @property
    def cost_micros(self) -> Micros | None:
        """Return the upper bound of the run's cost from its receipt; without a receipt, the cost so far."""
        if self.receipt is None:
            return self.spent_micros
        upper = self.receipt.predicate["cost"]["upper_bound_micros"]
        return None if upper is None else Micros(upper)

    def epoch_at(self, step: int) -> float | None:
        """Return how many epochs are done after a step; None if unknown, or for pairs, whose tokens include padding."""
        tokens, all_of_it = self.history.tokens_at(step), self.history.train_tokens
        is_padded = self.resolved.get("model", {}).get("preset") == "encoder-decoder"
        return tokens / all_of_it if tokens and all_of_it and not is_padded else None

    def as_record(self) -> dict[str, Any]:
        """Return the run's facts as JSON data."""
        receipt, best, last = self.receipt, self.history.best, self.last
        predicate = receipt.predicate if receipt else None
        return {
            "run": self.run,
            "recipe": self.recipe,
            "form": self.form,
            "mode": self.mode,
            "where": self.where,
            "state": self.state,
            "began_wall": self.began_wall,
            "device": self.history.device or None,
            "parameters": self.parameters,
            "step": last.step if last else None,
            "steps": self.history.steps,
            "tokens": last.tokens if last else None,
            "train_s": self.train_s,
            "billable_s": predicate["runtime"]["billable_s"] if predicate else None,
            "cost_micros": self.cost_micros,
            "cost_is": cost_label(predicate) if predicate else "so far" if self.spent_micros is not None else "unknown",
            "final_loss": last.loss if last else None,
            "best_val_loss": best.loss if best else None,
            "best_val_step": best.step if best else None,
            "bits_per_byte": best.bits_per_byte if best else self.history.bits_per_byte,
            "core": self.history.core,
            "hellaswag": best.hellaswag if best else None,
            "hardware": hardware_words(predicate) if predicate else None,
            "shutdown": predicate["teardown"]["is"] if predicate else None,
            "verdict": predicate["verdict"]["is"] if predicate else None,
            "receipt_sha256": receipt.sha256 if receipt else None,
            "signature": signature_word(receipt) if receipt else None,
            "no_receipt": self.no_receipt,
            "notes": list(self.notes),
            "loss": [_mark_record(mark) for mark in self.history.losses.items],
            "validation": [_mark_record(mark) for mark in self.history.validation.items],
            "samples": {
                prompt: [{"step": sample.step, "text": "\n".join(sample.lines)} for sample in kept.items]
                for prompt, kept in self.history.samples.items()
            },
        }

    @property
    def train_s(self) -> float | None:
        """Return the training time, by this computer's clock if the receipt has it, else as the trainer counted it."""
        measured = self.receipt.predicate["training"]["seconds"]["train_s"] if self.receipt else None
        return measured if measured is not None else self.history.seconds or None


def _mark_record(mark: Mark) -> list[float | int | None]:
    """Return a mark as a list: step, loss, tokens, seconds, micro-dollars."""
    seconds = round(mark.seconds, 3) if mark.seconds is not None else None
    return [mark.step, mark.loss, mark.tokens, seconds, mark.spent_micros]


def why_unranked(runs: Sequence[RunMaterial]) -> str:
    """Return why the runs' losses cannot be compared; "" if they can."""
    if len({run.terms for run in runs}) > 1 or len({run.argv and run.recipe for run in runs}) > 1:
        return "The runs used different scripts, whose losses may mean different things."
    if len({run.tokenizer_sha256 for run in runs}) > 1:
        return "The tokenisers differ: compare these runs by bits per byte, not by nats per token."
    if len({run.shards for run in runs}) > 1:
        return "The runs trained on different shards: a lower loss does not mean a better model."
    return ""


def find_lowest_loss(runs: Sequence[RunMaterial]) -> tuple[RunMaterial, Mark] | None:
    """Return the run with the lowest validation loss, and the loss; None if there is none, or none can be compared."""
    judged = [(run, run.history.best) for run in runs if run.history.best is not None]
    return min(judged, key=lambda pair: pair[1].loss, default=None) if not why_unranked(runs) else None


def settings(runs: Sequence[RunMaterial]) -> list[tuple[str, list[str]]]:
    """Return every key of the runs' settings, with its value in each run; "" if a run lacks the key."""
    flat = [run.settings for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    return [(key, [settings.get(key, "") for settings in flat]) for key in keys]


def list_differences(runs: Sequence[RunMaterial]) -> list[tuple[str, list[str]]]:
    """Return every setting that is not the same in all runs; a recipe is not compared with a command."""
    found = []
    for key, values in settings(runs):
        kinds = {run.terms for run in runs if key in run.settings}
        if len({value for run, value in zip(runs, values, strict=True) if run.terms in kinds}) > 1:
            found.append((key, values))
    return found


def set_differences(runs: Sequence[RunMaterial]) -> list[tuple[str, list[str]]]:
    """Return the settings that users changed and that differ: data, code, arguments, and keys of recipes.

    Within one recipe, all differing keys were set by the user, with --set or in its file. Between two recipes nearly
    every key differs: keys of --set are listed, and the others only if they are few.
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
    flat = {run.run: _flatten_tables(run.resolved) for run in runs if run.terms.has_model}
    rows += [
        (key, [flat[run.run].get(key, "") if run.run in flat else None for run in runs])
        for key in _set_keys(runs, flat)
    ]
    return [(name, [value or "" for value in values]) for name, values in rows if len({*values} - {None}) > 1]


def _set_keys(runs: Sequence[RunMaterial], flat: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the keys of recipes that the user set, in the recipe's order."""
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
    """Yield the name of each --env variable and, for each run, "value 1", "value 2", … instead of its value."""
    for name in dict.fromkeys(name for run in commands for name in run.env):
        values = list(dict.fromkeys(run.env[name] for run in commands if name in run.env))
        words = {value: f"value {place}, not shown" for place, value in enumerate(values, 1)}
        shown = [words[run.env[name]] if name in run.env else "" if run in commands else None for run in runs]
        yield safe_line(f"--env {name}"), shown


def arguments_of(argv: Sequence[str]) -> dict[str, str]:
    """Return a command's arguments: `--lr 3e-4`, `--lr=3e-4` and `lr=3e-4` by name, unnamed ones by position."""
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
    """Return the settings that distinguish each run, such as `lr 0.0003, layers 12`, with short keys where possible.

    If there are many, the first few are named and the others counted. For a command, return its words that differ.
    """
    recipes = [run for run in runs if run.terms.has_model]
    words = iter(_own_keys(recipes) if recipes else ())
    commands = [run.argv for run in runs if not run.terms.has_model]
    return [next(words) if run.terms.has_model else _own_words(run.argv, commands) for run in runs]


def _own_words(argv: Sequence[str], every: Sequence[Sequence[str]]) -> str:
    """Return the words of a command from the first to the last that differs between runs, and the flag before them."""
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
    """Return whether any run has reported two points, which a curve needs at least."""
    return any(len(kept.items) > 1 for run in runs for kept in (run.history.losses, run.history.validation))


def _flatten_tables(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return `{"model": {"layers": 2}}` as `{"model.layers": "2"}`, every value in one harmless line."""
    flat: dict[str, str] = {}
    for name, table in tables.items():
        pairs = table.items() if isinstance(table, Mapping) else ()
        flat |= {safe_line(f"{name}.{key}"): _format_setting(value) for key, value in pairs}
        if not isinstance(table, Mapping) and name not in _LEFT_OUT:
            flat[safe_line(name)] = _format_setting(table)
    return flat


def _format_setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return safe_line(value)
    return safe_line(f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False))

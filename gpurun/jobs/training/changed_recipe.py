"""Reads a recipe with a changed trainer's own `recipe.py`, and traces the memory of its model with its own modules.

Both run in a child process without keys, in bounded memory and time (core/bounded_program.py). Where gpurun's schema
has a key, gpurun's bounds apply to the output; keys and values that only the copy knows are not checked.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpurun.core.bounded_program import run_module
from gpurun.core.errors import UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.paths import make_private, read_regular, write_atomic
from gpurun.core.records import digest_json
from gpurun.core.untrusted import parse_object, read_object, whole
from gpurun.jobs.trainer import digest_of_trainer
from gpurun.jobs.training.memory import GIB, Way, tensor_bytes
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.view.number_format import format_count

READERS = ("__init__.py", "errors.py", "recipe.py", "recipe_file.py")
"""The modules that read a recipe. If a copy has them unchanged, gpurun reads its recipes with its own modules."""
READ_BYTES, READ_S = 1 << 30, 30.0
TRACE_BYTES, TRACE_S = 16 << 30, 600.0
MOST = 10**15
STATE_BYTES = 16
"""Per parameter: weight, gradient and AdamW's two moments in fp32."""


@dataclass(frozen=True)
class OwnReader:
    """Reads recipes with the changed trainer in the folder `trainer`."""

    trainer: Path

    def read(self, path: Path, overrides: Sequence[str] = (), *, rehearse: bool = False) -> dict[str, Any]:
        """Return a recipe's record with the overrides and, if wanted, its rehearsal applied; UsageError if refused."""
        words = [f"--recipe={path}", *(f"--set={override}" for override in overrides), *["--rehearse"] * rehearse]
        recipe = self._asked(path.name, words).get("recipe")
        if not isinstance(recipe, dict):
            raise _broken("it printed no recipe")
        return recipe

    def counts(self, record: Mapping[str, Any], vocab_size: int) -> tuple[int, int]:
        """Return the model's parameters and FLOPs per token as the copy's own functions compute them."""
        return _counts(self, json.dumps(record, sort_keys=True), vocab_size)

    def _asked(self, where: str, words: Sequence[str]) -> dict[str, Any]:
        module = "trainer.recipe_file"
        try:
            ended = run_module(module, words, trainer=self.trainer, most_bytes=READ_BYTES, limit_s=READ_S)
        except subprocess.TimeoutExpired:
            raise _broken(f"it took more than {READ_S:.0f} s") from None
        if ended.refusal:
            what = f"Your trainer's recipe.py refuses {where}: {ended.refusal}."
            raise UsageError("recipe.refused", what, hint="Change the recipe, --set, or your recipe.py.")
        try:
            return parse_object(ended.out)
        except ValueError:
            raise _broken(ended.last_lines) from None


@cache
def _counts(reader: OwnReader, record: str, vocab_size: int) -> tuple[int, int]:
    with _in_a_file(record) as path:
        answer = reader._asked("the recipe", [f"--recipe={path}", f"--vocab-size={vocab_size}"])
    parameters, flops = (whole(answer.get(key)) for key in ("parameters", "flops_per_token"))
    if parameters is None or flops is None or not (0 < parameters < MOST and 0 < flops < MOST):
        raise _broken("its parameters_of and flops_per_token must return two numbers above 0")
    return parameters, flops


def own_reader(trainer: Path) -> OwnReader | None:
    """Return the reader of a copy whose recipe modules differ from gpurun's own, else None."""
    ours = bundle_root() / "trainer"
    alike = (read_regular(ours / name) == _content(trainer / name) for name in READERS)
    return None if all(alike) else OwnReader(trainer)


def traced_form(resolved: ResolvedRecipe, trainer: Path, vocab_size: int, cache: Path) -> tuple[ResolvedRecipe, str]:
    """Return the recipe with the traced memory of a changed trainer's model, and a note about it for the plan.

    A trace takes seconds and is kept in `cache`. If tracing fails, the formula is used with the copy's parameters.
    """
    counted, model = resolved.parameters(vocab_size), resolved.tables.model
    largest = max(1, min(resolved.tables.train.micro_batch, resolved.tables.train.batch_tokens // model.context))
    traced, why = _traced(resolved.record, trainer, vocab_size, (1, largest), cache)
    way = Way(half=resolved.tables.train.precision != "fp32", muon=resolved.tables.optim.kind == "muon", gradient=True)
    if traced is None:
        more = STATE_BYTES * (counted - resolved.official_parameters(vocab_size))
        resolved = replace(resolved, beyond=((1, more), (1, more)))
        return resolved, f"Memory is estimated by the formula of gpurun's own model: yours could not be traced ({why})."
    parameters, peaks = traced
    first, last = ((size, peak - tensor_bytes(model, size, vocab_size, way)) for size, peak in peaks)
    note = f"Memory was traced here on your trainer's own model: {peaks[1][1] / GIB:.1f} GiB of tensors at "
    note += f"micro_batch {largest}."
    if parameters != counted:
        note += f" The model has {format_count(parameters)} parameters, but parameters_of in your recipe.py counts "
        note += f"{format_count(counted)}: correct it, because the trainer's figures and the audit depend on it."
    return replace(resolved, beyond=(first, last)), note


def _traced(
    record: Mapping[str, Any], trainer: Path, vocab_size: int, sizes: tuple[int, int], cache: Path
) -> tuple[tuple[int, list[tuple[int, int]]] | None, str]:
    """Return the parameters and each micro-batch's peak, or None and the reason why there are none."""
    parts = [digest_of_trainer(trainer), {name: record[name] for name in ("model", "optim", "train")}, vocab_size]
    kept = cache / f"{digest_json({'of': parts})}.json"
    if kept.exists() and (traced := _judged(read_object(kept), sizes)):
        return traced, ""
    if find_spec("torch") is None:
        return None, "PyTorch is not installed here"
    with _in_a_file(json.dumps(record)) as path:
        words = [f"--recipe={path}", f"--vocab-size={vocab_size}", *(f"--micro-batch={size}" for size in sizes)]
        try:
            ended = run_module("trainer.traced_memory", words, trainer=trainer, most_bytes=TRACE_BYTES, limit_s=TRACE_S)
        except subprocess.TimeoutExpired:
            return None, f"it took more than {TRACE_S / 60:.0f} minutes"
    try:
        answer = parse_object(ended.out)
    except ValueError:
        return None, ended.refusal or ended.last_lines
    if (traced := _judged(answer, sizes)) is None:
        return None, "it printed no plausible figures"
    make_private(cache)
    write_atomic(kept, json.dumps(answer).encode())
    return traced, ""


def _judged(answer: Mapping[str, Any], sizes: tuple[int, int]) -> tuple[int, list[tuple[int, int]]] | None:
    """Return the parameters and peaks of a trace; None if a figure is missing or implausible."""
    peaks, parameters = answer.get("peak_bytes"), whole(answer.get("parameters"))
    found = [(size, whole(peaks.get(str(size)))) for size in sizes] if isinstance(peaks, dict) else []
    sane = [(size, peak) for size, peak in found if peak is not None and 0 < peak < MOST]
    return (parameters, sane) if parameters and 0 < parameters < MOST and len(sane) == 2 else None


@contextmanager
def _in_a_file(record: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpurun-") as own:
        path = Path(own, "recipe.json")
        path.write_text(record, encoding="utf-8")
        yield path


def _content(path: Path) -> bytes:
    return read_regular(path) if path.is_file() else b""


def _broken(why: str) -> UsageError:
    what = f"Your trainer's recipe_file.py cannot read the recipe: {why}."
    hint = "Try it in the folder above your trainer: python -m trainer.recipe_file --recipe FILE"
    return UsageError("trainer.no_reader", what, hint=hint)

"""Reads a recipe with the user's own `recipe.py`, and traces the memory of the model that the user's modules build.

Both run in a child process without keys, with limited memory and time (core/bounded_program.py). For keys of gpurun's
schema, gpurun's limits apply to the result. Keys and values that only the user's copy knows are not checked.
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
"""The modules that read a recipe. If the user did not modify any of them, gpurun's own modules read the recipe."""
READ_BYTES, READ_S = 1 << 30, 30.0
TRACE_BYTES, TRACE_S = 16 << 30, 600.0
MOST = 10**15
STATE_BYTES = 16
"""Bytes per parameter: weight, gradient and AdamW's two moments, all in fp32."""


@dataclass(frozen=True)
class OwnReader:
    """Reads recipes with the modified trainer in the folder `trainer`."""

    trainer: Path

    def read(self, path: Path, overrides: Sequence[str] = (), *, rehearse: bool = False) -> dict[str, Any]:
        """Return a recipe's record, or its rehearsal, after the overrides. Raise UsageError if it is refused."""
        words = [f"--recipe={path}", *(f"--set={override}" for override in overrides), *["--rehearse"] * rehearse]
        recipe = self._run_recipe_file(path.name, words).get("recipe")
        if not isinstance(recipe, dict):
            raise _broken_reader_error("it printed no recipe")
        return recipe

    def counts(self, record: Mapping[str, Any], vocab_size: int) -> tuple[int, int]:
        """Return the model's parameters and FLOPs per token, computed by the user's own functions."""
        return _count_with_reader(self, json.dumps(record, sort_keys=True), vocab_size)

    def _run_recipe_file(self, where: str, words: Sequence[str]) -> dict[str, Any]:
        module = "trainer.recipe_file"
        try:
            ended = run_module(module, words, trainer=self.trainer, most_bytes=READ_BYTES, limit_s=READ_S)
        except subprocess.TimeoutExpired:
            raise _broken_reader_error(f"it took more than {READ_S:.0f} s") from None
        if ended.refusal:
            what = f"Your trainer's recipe.py refuses {where}: {ended.refusal}."
            raise UsageError("recipe.refused", what, hint="Change the recipe, --set, or your recipe.py.")
        try:
            return parse_object(ended.out)
        except ValueError:
            raise _broken_reader_error(ended.last_lines) from None


@cache
def _count_with_reader(reader: OwnReader, record: str, vocab_size: int) -> tuple[int, int]:
    with _temporary_file(record) as path:
        answer = reader._run_recipe_file("the recipe", [f"--recipe={path}", f"--vocab-size={vocab_size}"])
    parameters, flops = (whole(answer.get(key)) for key in ("parameters", "flops_per_token"))
    if parameters is None or flops is None or not (0 < parameters < MOST and 0 < flops < MOST):
        raise _broken_reader_error("its parameters_of and flops_per_token must each return a number above 0")
    return parameters, flops


def own_reader(trainer: Path) -> OwnReader | None:
    """Return the reader for a trainer whose recipe modules differ from gpurun's own; None if they are the same."""
    ours = bundle_root() / "trainer"
    alike = (read_regular(ours / name) == _read_bytes(trainer / name) for name in READERS)
    return None if all(alike) else OwnReader(trainer)


def traced_form(resolved: ResolvedRecipe, trainer: Path, vocab_size: int, cache: Path) -> tuple[ResolvedRecipe, str]:
    """Return the recipe with the traced memory of a modified trainer's model, and a note about it for the plan.

    A trace may take minutes; its result is stored in `cache`. If tracing fails, memory is estimated by the formula.
    """
    counted, model = resolved.parameters(vocab_size), resolved.tables.model
    largest = max(1, min(resolved.tables.train.micro_batch, resolved.tables.train.batch_tokens // model.context))
    traced, why = _trace_model(resolved.record, trainer, vocab_size, (1, largest), cache)
    way = Way(half=resolved.tables.train.precision != "fp32", muon=resolved.tables.optim.kind == "muon", gradient=True)
    if traced is None:
        more = STATE_BYTES * (counted - resolved.official_parameters(vocab_size))
        resolved = replace(resolved, beyond=((1, more), (1, more)))
        return resolved, f"Memory is estimated as for gpurun's own model, because yours could not be traced: {why}."
    parameters, peaks = traced
    first, last = ((size, peak - tensor_bytes(model, size, vocab_size, way)) for size, peak in peaks)
    note = f"Memory was traced on this computer with your trainer's model: {peaks[1][1] / GIB:.1f} GiB of tensors at "
    note += f"micro_batch {largest}."
    if parameters != counted:
        note += f" The model has {format_count(parameters)} parameters, but parameters_of in your recipe.py counts "
        note += f"{format_count(counted)}: correct it, because the trainer's figures and the audit depend on it."
    return replace(resolved, beyond=(first, last)), note


def _trace_model(
    record: Mapping[str, Any], trainer: Path, vocab_size: int, sizes: tuple[int, int], cache: Path
) -> tuple[tuple[int, list[tuple[int, int]]] | None, str]:
    """Return the parameter count with each micro-batch's peak bytes, and ""; if that fails, None and the reason."""
    parts = [digest_of_trainer(trainer), {name: record[name] for name in ("model", "optim", "train")}, vocab_size]
    kept = cache / f"{digest_json({'of': parts})}.json"
    if kept.exists() and (traced := _plausible_trace(read_object(kept), sizes)):
        return traced, ""
    if find_spec("torch") is None:
        return None, "PyTorch is not installed here"
    with _temporary_file(json.dumps(record)) as path:
        words = [f"--recipe={path}", f"--vocab-size={vocab_size}", *(f"--micro-batch={size}" for size in sizes)]
        try:
            ended = run_module("trainer.traced_memory", words, trainer=trainer, most_bytes=TRACE_BYTES, limit_s=TRACE_S)
        except subprocess.TimeoutExpired:
            return None, f"it took more than {TRACE_S / 60:.0f} minutes"
    try:
        answer = parse_object(ended.out)
    except ValueError:
        return None, ended.refusal or ended.last_lines
    if (traced := _plausible_trace(answer, sizes)) is None:
        return None, "it printed no plausible figures"
    make_private(cache)
    write_atomic(kept, json.dumps(answer).encode())
    return traced, ""


def _plausible_trace(answer: Mapping[str, Any], sizes: tuple[int, int]) -> tuple[int, list[tuple[int, int]]] | None:
    """Return a trace's number of parameters and peak bytes; None if a figure is missing or implausible."""
    peaks, parameters = answer.get("peak_bytes"), whole(answer.get("parameters"))
    found = [(size, whole(peaks.get(str(size)))) for size in sizes] if isinstance(peaks, dict) else []
    sane = [(size, peak) for size, peak in found if peak is not None and 0 < peak < MOST]
    return (parameters, sane) if parameters and 0 < parameters < MOST and len(sane) == 2 else None


@contextmanager
def _temporary_file(record: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpurun-") as own:
        path = Path(own, "recipe.json")
        path.write_text(record, encoding="utf-8")
        yield path


def _read_bytes(path: Path) -> bytes:
    return read_regular(path) if path.is_file() else b""


def _broken_reader_error(why: str) -> UsageError:
    what = f"Your trainer's recipe_file.py cannot read the recipe: {why}."
    hint = "Try it in the folder above your trainer: python -m trainer.recipe_file --recipe FILE"
    return UsageError("trainer.no_reader", what, hint=hint)

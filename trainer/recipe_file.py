"""Reads a recipe's file for training: recipe.toml with its defaults, or recipe.json, which has every key.

Its `[rehearsal]` is applied if requested, then every `--set`; gpurun uses the same functions for that. This module also
compares a checkpoint's recipe with the run's. It needs only the standard library, and Python 3.11 only for TOML.
`python -m trainer.recipe_file --recipe FILE` prints a recipe with every key, and its counts, as JSON; gpurun reads the
recipes of a changed trainer in this way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Literal

from trainer.errors import Refused
from trainer.recipe import (
    REHEARSED,
    TABLES,
    Recipe,
    RecipeError,
    flops_per_token,
    parameters_of,
    parse_recipe,
    unknown_key,
)

__all__ = [
    "Override",
    "add_recipe_words",
    "as_planned",
    "completed",
    "differing_keys",
    "laid_over",
    "main",
    "parse_override",
    "parse_toml",
    "read_recipe",
    "seed_of",
]

Override = tuple[tuple[str, ...], Any]
"""The path of a key, (table, key) or ("rehearsal", …), and its value."""
_BARE_WORD = re.compile(r"[A-Za-z0-9_./:~+-]+")


def add_recipe_words(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a recipe and change its keys."""
    parser.add_argument("--recipe", type=Path, required=True, help="a recipe: TOML, or the resolved one, recipe.json")
    change = "replace one key of the recipe, as in --set train.steps=500; may be given several times"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=change)
    parser.add_argument("--rehearse", action="store_true", help="train the small form in the recipe's [rehearsal]")


def read_recipe(path: Path, *, overrides: Sequence[str] = (), rehearse: bool = False) -> Recipe:
    """Read a recipe, apply its rehearsal table if `rehearse` and then the overrides, and check it; raise Refused."""
    is_toml = path.suffix == ".toml"
    try:
        text = path.read_text(encoding="utf-8-sig" if is_toml else "utf-8")
        recipe = parse_recipe(parse_toml(text) if is_toml else json.loads(text), is_whole=not is_toml)
        return parse_recipe(laid_over(recipe, [parse_override(text) for text in overrides], rehearse=rehearse))
    except OSError as error:
        raise Refused(f"the recipe {path} cannot be read: {error.strerror}") from error
    except RecipeError as error:
        raise Refused(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"the recipe {path} is not {'TOML' if is_toml else 'JSON'}: {error}") from error


def as_planned(recipe: Recipe, most: int | None, parallel: Literal["ddp", "fsdp"] | None) -> Recipe:
    """Return the recipe with micro-batches of at most `most` sequences, and with `parallel` in place of "auto".

    The steps and their tokens stay the same. Refused if `most` is below 1.
    """
    train = recipe.train
    if most is not None and most < 1:
        raise Refused(f"--micro-batch {most} is less than one sequence")
    if most is not None and most < train.micro_batch:
        train = replace(train, micro_batch=most)
    if parallel is not None and train.parallel == "auto":
        train = replace(train, parallel=parallel)
    return replace(recipe, train=train)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text; a ValueError says why it is invalid, has too long a number, or is nested too deeply."""
    import tomllib  # A machine that only reads recipe.json may have an older Python.

    try:
        tables = tomllib.loads(text)
        repr(tables)  # Dotted keys can nest so deeply that other code would fail; this fails first.
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return tables


def laid_over(recipe: Recipe, overrides: Sequence[Override], *, rehearse: bool) -> dict[str, Any]:
    """Return the recipe's record after the rehearsal, if requested, and then the overrides. The record is not checked.

    A challenge sets the seed; RecipeError if an override sets the seed too.
    """
    tables = deepcopy(recipe.as_record())
    _put(tables, (override for override in overrides if override[0][0] == "rehearsal"))
    if rehearse:
        for name in REHEARSED:
            tables[name].update(tables["rehearsal"][name])
        tables["hardware"]["on_cpu"] = "as_written"  # A rehearsal is what a machine without CUDA should run.
    _put(tables, (override for override in overrides if override[0][0] != "rehearsal"))
    train = tables["train"]
    if train["challenge"]:
        if any(path == ("train", "seed") for path, _ in overrides):
            raise RecipeError("does_not_add_up", "train.challenge gives the seed; leave --set train.seed out")
        train["seed"] = seed_of(train["challenge"])
    return tables


def seed_of(challenge: str, bits: int = 63) -> int:
    """Return the seed of a challenge, so that weights, order and masks depend on a word that was not known before.

    The seed is the first `bits` bits of a hash. With 63, the most that a recipe's integer has, no second key or word
    with the same seed can be found. An older gpurun used 32.
    """
    return int.from_bytes(hashlib.sha256(f"gpurun challenge {challenge}".encode()).digest()[:8], "big") >> (64 - bits)


def parse_override(text: str) -> Override:
    """Parse `table.key=value` into its path and its value.

    The table may be left out if only one table has the key; the prefix `rehearsal.` means the rehearsal's key. The
    value is TOML; a bare word is a string. Raises RecipeError: "malformed", "ambiguous" or "unknown_key".
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise RecipeError("malformed", f"--set {text!r} is not of the form key=value, as in train.steps=500")
    return _path_of(name), _value_of(value, text)


def _put(tables: dict[str, Any], overrides: Iterable[Override]) -> None:
    for (*outer, key), value in overrides:
        table = tables
        for name in outer:
            table = table[name]
        table[key] = value


def _value_of(value: str, text: str) -> Any:
    """Return the value as TOML reads it; a bare word is returned as a string. RecipeError for anything else."""
    try:
        parsed = parse_toml(f"value = {value}")
    except ValueError:
        parsed = {}
    if parsed.keys() == {"value"}:
        return parsed["value"]
    if _BARE_WORD.fullmatch(value):
        return value
    quoted = """put a text in quotes, twice over for the shell: --set 'data.source="my texts"'"""
    raise RecipeError("malformed", f"the value in --set {text!r} is not TOML; {quoted}")


def _path_of(name: str) -> tuple[str, ...]:
    """Return the path of a key: (table, key), or ("rehearsal", …); RecipeError if it is ambiguous or unknown."""
    plain = [(table, key.name) for table, kind in TABLES.items() for key in fields(kind)]
    rehearsed = [("rehearsal", *path) for path in plain if path[0] in REHEARSED]
    paths = {".".join(path): path for path in [*plain, *rehearsed, ("rehearsal", "processes")]}
    if name in paths:
        return paths[name]
    alike = [path for path in plain if path[-1] == name]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise RecipeError("ambiguous", f"--set {name} could mean {' or '.join(map('.'.join, alike))}")
    raise unknown_key(name, (*paths, *(key for _, key in plain)))


def completed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's recipe with the keys that were added since; their defaults keep the old behaviour."""
    defaults = {name: {key.name: key.default for key in fields(kind)} for name, kind in TABLES.items()}
    given = {name: {k: v for k, v in table.items() if v is not MISSING} for name, table in defaults.items()}
    return {**record, **{name: {**table, **record.get(name, {})} for name, table in given.items()}}


_MAY_CHANGE = {
    *("train.micro_batch", "train.compile", "train.compile_mode", "train.parallel", "train.log_every"),
    *("train.checkpoint_every", "train.keep_checkpoints", "train.spike", "train.spike_z", "eval.every"),
    *("eval.hellaswag_items", "eval.core"),
}


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys in which two recipe records would train differently.

    Samples, hardware and the keys in `_MAY_CHANGE` may differ, and steps may be added. The policy for a spike may
    differ, because otherwise a run that stopped at a spike would stop there again.
    """
    tables = [(name, completed(old)[name], new.get(name, {})) for name in TABLES if name not in ("sample", "hardware")]
    every = [(f"{name}.{key}", was.get(key), now.get(key)) for name, was, now in tables for key in sorted({*was, *now})]
    return [k for k, was, now in every if was != now and k not in _MAY_CHANGE and (k != "train.steps" or now < was)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the recipe, its parameters and its FLOPs per token as one JSON line; return 0, or 2 if it is refused."""
    parser = argparse.ArgumentParser(prog="python -m trainer.recipe_file", description="Print a recipe, counted.")
    add_recipe_words(parser)
    parser.add_argument("--vocab-size", type=int, default=0, help="the tokeniser's, for a model that leaves it open")
    given = parser.parse_args(arguments)
    try:
        recipe = read_recipe(given.recipe, overrides=given.overrides, rehearse=given.rehearse)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return refusal.exit_code
    record: dict[str, Any] = {"recipe": recipe.as_record(), "parameters": None, "flops_per_token": None}
    if vocab_size := recipe.model.vocab_size or given.vocab_size:
        record["parameters"] = parameters_of(recipe.model, vocab_size)
        record["flops_per_token"] = flops_per_token(recipe.model, vocab_size)
    print(json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

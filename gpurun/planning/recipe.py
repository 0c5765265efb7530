"""Recipes: found, read, checked, and resolved into the one dict that the trainer reads.

A recipe is data, so everything that can be wrong with it is found here, before anything is spent, in a sentence that
names the file, the key and the nearest right word.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from gpurun.core.errors import UsageError, did_you_mean
from gpurun.core.model import Frozen, digest_of
from gpurun.core.plan import Earlier
from gpurun.planning.bundle import bundle_root, page
from gpurun.planning.catalog import parse_gpu
from gpurun.planning.overrides import parse_override
from gpurun.planning.sums import what_does_not_add_up
from gpurun.planning.tables import REHEARSED, TABLES, ModelTable, RecipeTables, RehearsalTable

__all__ = [
    "Form",
    "Recipe",
    "ResolvedRecipe",
    "bundle_root",
    "check_tables",
    "list_recipes",
    "load_recipe",
    "new_recipe",
    "padded_vocab",
    "parameters_of",
    "resolve",
]

Form = Literal["full", "rehearsal"]

_VOCAB_MULTIPLE = 64


class Recipe(Frozen):
    """A recipe as its file has it, checked."""

    name: str
    path: str
    tables: RecipeTables

    @property
    def about(self) -> str:
        """One line for `recipes list`."""
        return self.tables.about


class ResolvedRecipe(Frozen):
    """A recipe after defaults, rehearsal and `--set`, for a number of processes that its batch can be shared among.

    `earlier` is the checkpoint that it goes on from; what is trained is the same, and less of it is left.
    """

    name: str
    form: Form
    processes: int
    tables: RecipeTables
    earlier: Earlier | None = None

    @property
    def first_step(self) -> int:
        """The steps that are taken already."""
        return self.earlier.step if self.earlier else 0

    @property
    def steps_left(self) -> int:
        """The steps that are still to be taken."""
        return self.tables.train.steps - self.first_step

    @property
    def record(self) -> dict[str, Any]:
        """What recipe.json holds: every key of every table but the rehearsal's, which has been applied."""
        return self.tables.model_dump(mode="json", exclude={"rehearsal"})

    @property
    def sha256(self) -> str:
        """The digest of `record`."""
        return digest_of(self.record)


def list_recipes() -> tuple[str, ...]:
    """The names of the bundled recipes, sorted."""
    return tuple(sorted(path.stem for path in (bundle_root() / "recipes").glob("*.toml")))


def load_recipe(name: str) -> Recipe:
    """Read and check a bundled recipe by its name, or any file by its path (it ends in .toml or has a slash).

    Raises UsageError: not found (names the nearest), malformed TOML (file and line), unknown or missing key, bad value.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name).expanduser()
    else:
        known = list_recipes()
        if name not in known:
            others = f"There are: {', '.join(known)}; or give a .toml file."
            hint = did_you_mean(name, known, otherwise=others)
            raise UsageError("recipe.unknown", f"There is no recipe {name!r}.", hint=hint)
        path = bundle_root() / "recipes" / f"{name}.toml"
    return Recipe(name=path.stem, path=str(path), tables=check_tables(_read(path), where=path.name))


def resolve(recipe: Recipe, form: Form, overrides: Sequence[str] = (), processes: int | None = None) -> ResolvedRecipe:
    """Apply the rehearsal (in that form), then `--set`, and check that the batch can be shared among the processes.

    `processes` None means what the recipe says: its rehearsal's number, or one for each GPU. Raises UsageError.
    """
    tables = recipe.tables.model_dump()
    parsed = [parse_override(text) for text in overrides]
    for path, value in parsed:
        if path[0] == "rehearsal":
            _put(tables, path, value)
    if form == "rehearsal":
        for name in REHEARSED:
            tables[name].update(tables["rehearsal"][name])
        tables["hardware"]["on_cpu"] = "as_written"  # What a machine without CUDA should do has just been done.
    for path, value in parsed:
        if path[0] != "rehearsal":
            _put(tables, path, value)
    where = recipe.name + (" (rehearsal)" if form == "rehearsal" else "") + (" with --set" if overrides else "")
    checked = check_tables(tables, where=where)
    if processes is None:
        asked = checked.rehearsal.processes if form == "rehearsal" else parse_gpu(checked.hardware.gpu).count
        processes = max(1, asked)
    _check_batch(checked, processes, where)
    if checked.train.loop == "huggingface" and processes > 1:
        _refuse(where, f'train.loop is "huggingface", which trains in one process; here are {processes} processes')
    return ResolvedRecipe(name=recipe.name, form=form, processes=processes, tables=checked)


def parameters_of(model: ModelTable, vocab_size: int = 0) -> int:
    """The number of parameters, embeddings included; `vocab_size` is the tokeniser's, for a model that says 0."""
    vocab, width = padded_vocab(model, vocab_size), model.width
    if model.preset == "modern":  # Matrices alone, and no positions.
        return 2 * vocab * width + 12 * model.layers * width * width
    norm = 2 * width if model.bias else width
    if model.preset == "encoder-decoder":  # A layer on either side, the decoder's with a second attention.
        layer = 5 * norm + 28 * width * width + (22 * width if model.bias else 0)
        return vocab * width + model.layers * layer + 2 * norm
    layer = 2 * norm + 12 * width * width + (9 * width if model.bias else 0)
    embeddings = (vocab + model.context) * width
    return embeddings + model.layers * layer + norm + (0 if model.tied else vocab * width)


def padded_vocab(model: ModelTable, vocab_size: int) -> int:
    """The rows of the embedding: the model's own number, else the tokeniser's padded up to a multiple of 64."""
    if model.vocab_size:
        return model.vocab_size
    if vocab_size < 1:
        raise ValueError("a model without a vocabulary size needs the tokeniser's")
    return -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def new_recipe(name: str) -> str:
    """The text of a whole recipe to start from, for `recipes new NAME`."""
    return _NEW_RECIPE.format(name=name)


def check_tables(tables: dict[str, Any], where: str) -> RecipeTables:
    """Validate the tables of a recipe; `where` says in the UsageError which one it was."""
    _check_names(tables, where)
    try:
        recipe = RecipeTables.model_validate(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UsageError(
                "recipe.missing_key",
                f"{where} has no {key}.",
                hint="`gpurun recipes new NAME` writes a whole recipe, `gpurun recipes show` prints one.",
            ) from None
        raise UsageError(
            "recipe.bad_value",
            f"{where}: {key} is {first['input']!r}. {first['msg']}.",
            hint=f"{page('FORMATS.md')} lists every key with its type and its bounds.",
        ) from None
    _check_sums(recipe, where)
    return recipe


def _read(path: Path) -> dict[str, Any]:
    """A TOML file's tables; what cannot be read or parsed is a UsageError with the place in it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(
            "recipe.unreadable",
            f"The recipe {path} cannot be read: {error.strerror}.",
            hint="Check the path; `gpurun recipes list` names the bundled ones.",
        ) from None
    except ValueError as error:  # No TOML, no UTF-8, or a number of more digits than Python reads.
        raise UsageError(
            "recipe.malformed", f"{path} is not valid TOML: {error}.", hint="Mend the line that it names."
        ) from None


def _check_names(tables: dict[str, Any], where: str) -> None:
    """Refuse the first unknown table or key, and name the nearest one."""
    _check_known(tables, RecipeTables.model_fields, where, "")
    for name, table in tables.items():
        if not isinstance(table, dict):
            continue  # A value where a table belongs, or `about`: the schema says what is wrong with it.
        fields = RehearsalTable.model_fields if name == "rehearsal" else TABLES[name].model_fields
        _check_known(table, fields, where, f"{name}.")
        if name == "rehearsal":
            for inner in REHEARSED:
                if isinstance(table.get(inner), dict):
                    _check_known(table[inner], TABLES[inner].model_fields, where, f"rehearsal.{inner}.")


def _check_known(keys: Iterable[str], known: Iterable[str], where: str, prefix: str) -> None:
    known = list(known)
    for key in keys:
        if key not in known:
            names = [f"{prefix}{name}" for name in known]
            hint = did_you_mean(f"{prefix}{key}", names, otherwise=f"Known here: {', '.join(known)}.")
            raise UsageError("recipe.unknown_key", f"{where} has the unknown key {prefix}{key}.", hint=hint)


def _check_sums(recipe: RecipeTables, where: str) -> None:
    """Refuse what the trainer would refuse: numbers that do not fit together, both of them named."""
    for what in what_does_not_add_up(recipe):
        _refuse(where, what)
    parse_gpu(recipe.hardware.gpu, name="hardware.gpu")


def _check_batch(recipe: RecipeTables, processes: int, where: str) -> None:
    """Refuse a batch that is not a whole number of sequences for every process."""
    context, batch = recipe.model.context, recipe.train.batch_tokens
    if batch % (context * processes):
        _refuse(
            where,
            f"train.batch_tokens {batch} is not a whole number of sequences of {context} for each of {processes} "
            f"process{'es' if processes > 1 else ''} ({context} x {processes} = {context * processes})",
        )


def _refuse(where: str, what: str) -> None:
    raise UsageError("recipe.does_not_add_up", f"{where}: {what}.", hint="Change one of them, in the file or by --set.")


def _put(tables: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tables = tables[name]
    tables[path[-1]] = value


_NEW_RECIPE = """\
about = "{name}: say in one line what it learns"

[model]
layers = 4
heads = 4
width = 128
context = 128

[data]
source = "stdlib"       # text that every Python brings; your own, a file or a folder: --data PATH
tokenizer = "char"      # or "gpt2"; or "bpe", trained on the text: vocab_size = 4096

[optim]
lr = 1e-3

[schedule]
kind = "cosine"
warmup_steps = 50

[train]
steps = 1000
batch_tokens = 8192     # tokens an optimiser step: context x sequences
micro_batch = 64        # sequences at once on a GPU, at most
checkpoint_every = 250

[eval]
every = 100
tokens = 16384

[sample]
prompts = ["The "]
tokens = 200

[hardware]
gpu = "1xA100"
disk_gb = 20
on_cpu = "rehearsal"    # without CUDA run the form below; or "as_written", or "refuse"

[rehearsal]
train = {{ steps = 60, batch_tokens = 2048, micro_batch = 16, checkpoint_every = 30 }}
"""

"""Finds and reads recipes, and applies the rehearsal and `--set`. The result is the dict that the trainer reads.

The schema is the trainer's (trainer/recipe.py). It is checked before anything is spent. An error names the file, the
key and the most similar valid word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_type_hints

from gpurun.core.errors import UsageError, did_you_mean
from gpurun.core.installed_files import bundle_root, page, recipe_file
from gpurun.core.installed_files import recipe as schema
from gpurun.core.paths import read_regular
from gpurun.core.records import digest_json
from gpurun.core.run_plan import Earlier
from gpurun.providers.catalog import parse_gpu

Form = Literal["full", "rehearsal"]
_FORMS: Mapping[Form, str] = {"full": "full form", "rehearsal": "rehearsal"}
ModelConfig = schema.ModelConfig
RecipeTables = schema.Recipe
differing_keys = recipe_file.differing_keys
flops_per_token = schema.flops_per_token
padded_vocab = schema.padded_vocab
parameters_of = schema.parameters_of


class Reader(Protocol):
    """Reads the recipes of a modified trainer (changed_recipe.py), which may have keys that gpurun does not know."""

    def read(self, path: Path, overrides: Sequence[str] = (), *, rehearse: bool = False) -> dict[str, Any]:
        """Return a recipe's record after the overrides; with `rehearse`, in its rehearsal form; or UsageError."""

    def counts(self, record: Mapping[str, Any], vocab_size: int) -> tuple[int, int]:
        """Return the model's parameters and FLOPs per token."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe. `written` has the keys of its file, without defaults.

    If the user modified the trainer, `reader` is that trainer's reader, and `tables` has only the part that gpurun
    knows.
    """

    name: str
    path: str
    tables: RecipeTables
    written: Mapping[str, Any]
    reader: Reader | None = None

    @property
    def about(self) -> str:
        """Return the recipe's description for `recipes list`, in one line."""
        return self.tables.about


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe after defaults, rehearsal and `--set`, for a number of processes that divides its batch.

    `earlier` is the checkpoint that it continues from, if any. The other fields are set for a modified trainer:
    `reader` is its reader. `whole` is the whole record, of which `tables` has only the part that gpurun knows. `beyond`
    states by how many bytes its tensors exceed memory.py's formula, as (micro-batch, bytes) for two micro-batches.
    """

    name: str
    form: Form
    processes: int
    tables: RecipeTables
    earlier: Earlier | None = None
    reader: Reader | None = None
    whole: Mapping[str, Any] | None = None
    beyond: tuple[tuple[int, int], tuple[int, int]] = ((1, 0), (1, 0))

    @property
    def first_step(self) -> int:
        """Return the number of steps that are already trained."""
        return self.earlier.step if self.earlier else 0

    @property
    def steps_left(self) -> int:
        """Return the number of steps that remain."""
        return self.tables.train.steps - self.first_step

    @property
    def record(self) -> dict[str, Any]:
        """Return the content of recipe.json: all tables except `rehearsal`, which is already applied."""
        record = self.tables.as_record() if self.whole is None else {**self.whole}
        del record["rehearsal"]
        return record

    def parameters(self, vocab_size: int = 0) -> int:
        """Return the number of parameters. `vocab_size` is the tokeniser's, used if the model's own is 0."""
        return self._count_parameters_and_flops(vocab_size)[0]

    def flops_per_token(self, vocab_size: int = 0) -> int:
        """Return the training FLOPs per token, as `schema.flops_per_token` computes them."""
        return self._count_parameters_and_flops(vocab_size)[1]

    def official_parameters(self, vocab_size: int = 0) -> int:
        """Return the number of parameters of gpurun's own model with these tables."""
        return parameters_of(self.tables.model, vocab_size)

    def beyond_formula(self, micro_batch: int) -> int:
        """Return by how many bytes a micro-batch's tensors exceed memory.py's formula, interpolated from two traces."""
        (first, least), (last, most) = self.beyond
        return least + (most - least) * (micro_batch - first) // max(1, last - first)

    def _count_parameters_and_flops(self, vocab_size: int) -> tuple[int, int]:
        if self.reader is not None:
            return self.reader.counts(self.record, vocab_size)
        return self.official_parameters(vocab_size), flops_per_token(self.tables.model, vocab_size)

    @property
    def sha256(self) -> str:
        """Return the digest of `record`."""
        return digest_json(self.record)


def read_model(table: Any) -> ModelConfig:
    """Return the `model` table of a resolved recipe. Raise ValueError if it is invalid."""
    model: ModelConfig = (
        table if isinstance(table, ModelConfig) else schema.read_table(ModelConfig, table, "model", is_whole=False)
    )
    return model


def list_recipes() -> tuple[str, ...]:
    """Return the names of the bundled recipes, sorted."""
    return tuple(sorted(path.stem for path in (bundle_root() / "recipes").glob("*.toml")))


def load_recipe(name: str, reader: Reader | None = None) -> LoadedRecipe:
    """Read and check a recipe: a bundled recipe by its name, or a file by its path, which ends in .toml or has a slash.

    With the `reader` of a modified trainer, the recipe may have keys that only that trainer knows. Raise UsageError if
    the recipe is not found or is malformed, or if a key is unknown, is missing or has an invalid value.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name).expanduser()
    else:
        known = list_recipes()
        if name not in known:
            others = f"Bundled recipes: {', '.join(known)}. Or give the path of a .toml file."
            hint = did_you_mean(name, known, otherwise=others)
            raise UsageError("recipe.unknown", f"There is no recipe {name!r}.", hint=hint)
        path = bundle_root() / "recipes" / f"{name}.toml"
    written = _read_toml(path)
    if reader is not None:
        return LoadedRecipe(path.stem, str(path), _known_tables(reader.read(path), path.name), written, reader)
    return LoadedRecipe(path.stem, str(path), check_tables(written, where=path.name), written)


def resolve(
    recipe: LoadedRecipe, form: Form, overrides: Sequence[str] = (), processes: int | None = None, nodes: int = 1
) -> ResolvedRecipe:
    """Apply the rehearsal (if `form` is "rehearsal"), then `--set`, and check that the processes divide the batch.

    `processes` is the total over all nodes; None means the rehearsal's own number, or one per GPU. Raise UsageError if
    the result is invalid.
    """
    where, whole = f"{recipe.name} ({_FORMS[form]})" + (" with --set" if overrides else ""), None
    if recipe.reader is not None:
        whole = recipe.reader.read(Path(recipe.path), overrides, rehearse=form == "rehearsal")
        checked = _known_tables(whole, where)
    else:
        parsed = [parse_set_option(text) for text in overrides]
        try:
            tables = recipe_file.laid_over(recipe.tables, parsed, rehearse=form == "rehearsal")
        except schema.RecipeError as error:
            raise _explain_recipe_error(error, where) from None
        checked = check_tables(tables, where=where)
    if processes is None:
        count = checked.rehearsal.processes if form == "rehearsal" else parse_gpu(checked.hardware.gpu).count
        processes = max(1, count)
    _check_batch(checked, processes, nodes, where)
    if checked.train.loop == "huggingface" and processes > 1:
        _refuse(where, f'train.loop is "huggingface", which trains in one process, not in {processes}')
    return ResolvedRecipe(recipe.name, form, processes, checked, reader=recipe.reader, whole=whole)


def hardware_of(recipe: LoadedRecipe, overrides: Sequence[str]) -> schema.HardwareConfig:
    """Return the table `hardware` after `--set`. It is read first, because it decides which form is trained."""
    paths = (known_override(text) for text in overrides)
    named = {path[1]: value for path, value in filter(None, paths) if path[0] == "hardware"}
    hardware, where = {**vars(recipe.tables.hardware), **named}, f"{recipe.name} with --set"
    try:
        checked: schema.HardwareConfig = schema.read_table(schema.HardwareConfig, hardware, "hardware", is_whole=False)
    except schema.RecipeError as error:
        raise _explain_recipe_error(error, where) from None
    return _require_one_node(checked, where)


def known_override(text: str) -> recipe_file.Override | None:
    """Return the path and value of a --set; None for a key that gpurun does not know (`resolve` checks it)."""
    try:
        return parse_set_option(text)
    except UsageError as error:
        if error.code == "set.unknown_key":
            return None
        raise


def parse_set_option(text: str) -> recipe_file.Override:
    """Return the path and value of `table.key=value`, read as the trainer does. Raise UsageError if it is invalid."""
    try:
        return recipe_file.parse_override(text)
    except schema.RecipeError as error:
        what, hint = f"{str(error)[0].upper()}{str(error)[1:]}.", "For example: --set train.steps=500"
        if error.kind == "unknown_key":
            what = f"Recipes do not have a key {error.key!r}."
            hint = did_you_mean(error.key, error.known, otherwise="gpurun recipes show NAME lists the keys.")
        raise UsageError(f"set.{error.kind}", what, hint=hint) from None


def new_recipe(name: str) -> str:
    """Return the text of a complete recipe to start from, for `recipes new NAME`."""
    return _NEW_RECIPE.format(name=name)


def check_tables(tables: dict[str, Any], where: str) -> RecipeTables:
    """Return a recipe's validated tables. If they are invalid, raise UsageError, which calls the recipe `where`."""
    try:
        recipe = schema.parse_recipe(tables, is_whole=False)
    except schema.RecipeError as error:
        raise _explain_recipe_error(error, where) from None
    _require_one_node(recipe.hardware, where)
    return recipe


def _require_one_node(hardware: schema.HardwareConfig, where: str) -> schema.HardwareConfig:
    if (need := parse_gpu(hardware.gpu, name="hardware.gpu")).nodes > 1:
        _refuse(where, f"hardware.gpu {need} is {need.nodes} nodes, but several nodes can be requested only with --gpu")
    return hardware


def _known_tables(record: Mapping[str, Any], where: str) -> RecipeTables:
    """Return the part of a modified trainer's recipe that gpurun knows. The plan is based on this part.

    Unknown keys are left out, and an unknown choice (such as "lion" for optim.kind) counts as the default. Everything
    else must be within gpurun's limits.
    """
    known: dict[str, Any] = {"rehearsal": record.get("rehearsal", {}), "about": record.get("about", "")}
    for name, kind in schema.TABLES.items():
        table, hints = record.get(name), get_type_hints(kind)
        given: dict[str, Any] = table if isinstance(table, dict) else {}  # `read_table` reports missing keys.
        known[name] = {key.name: given[key.name] for key in fields(kind) if key.name in given}
        for key in fields(kind):
            words = get_args(hints[key.name])
            value, has_default = given.get(key.name), key.default is not MISSING
            if words and has_default and isinstance(value, str) and value not in words:
                known[name][key.name] = key.default
    try:
        recipe: RecipeTables = schema.read_table(RecipeTables, known, "", is_whole=False)
    except schema.RecipeError as error:
        raise _explain_recipe_error(error, where) from None
    _require_one_node(recipe.hardware, where)
    return recipe


def _explain_recipe_error(error: schema.RecipeError, where: str) -> UsageError:
    """Return the error for an invalid recipe, with the recipe's name (`where`) and a hint."""
    what, hint = f"{where}: {error}.", "Change one of them, in the file or by --set."
    if error.kind == "unknown_key":
        what = f"{where} has the unknown key {error.key}."
        names = ", ".join(key.rpartition(".")[2] for key in error.known)
        hint = did_you_mean(error.key, error.known, otherwise=f"Known here: {names}.")
    elif error.kind == "missing_key":
        what = f"{where} has no {error.key}."
        hint = "`gpurun recipes new NAME` writes a complete recipe, `gpurun recipes show` prints one."
    elif error.kind == "bad_value":
        hint = f"{page('FORMATS.md')} lists every key with its type and its bounds."
    return UsageError(f"recipe.{error.kind}", what, hint=hint)


def _read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file's tables. Raise UsageError, with the line number, if it cannot be read or parsed."""
    try:
        return recipe_file.parse_toml(read_regular(path).decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(
            "recipe.unreadable",
            f"The recipe {path} cannot be read: {error.strerror}.",
            hint="Check the path; `gpurun recipes list` shows the bundled recipes.",
        ) from None
    except ValueError as error:
        raise UsageError(
            "recipe.malformed", f"{path} is not valid TOML: {error}.", hint="Fix the line named above."
        ) from None


def _check_batch(recipe: RecipeTables, processes: int, nodes: int, where: str) -> None:
    """Raise UsageError if the batch does not give each process a whole number of sequences."""
    context, batch = recipe.model.context, recipe.train.batch_tokens
    if batch % (context * processes):
        shared = f"{nodes} nodes x {processes // nodes} = " if nodes > 1 else ""
        _refuse(
            where,
            f"train.batch_tokens {batch} is not a whole number of sequences of {context} for each of "
            f"{shared}{processes} process{'es' if processes > 1 else ''} "
            f"({context} x {processes} = {context * processes})",
        )


def _refuse(where: str, what: str) -> None:
    raise UsageError("recipe.does_not_add_up", f"{where}: {what}.", hint="Change one of them, in the file or by --set.")


_NEW_RECIPE = """\
about = "{name}: describe in one line what the model learns"

[model]
layers = 4
heads = 4
width = 128
context = 128

[data]
source = "stdlib"       # text that comes with every Python; to use your own file or folder: --data PATH
tokenizer = "char"      # or "gpt2"; or "bpe", trained on the text: vocab_size = 4096

[optim]
lr = 1e-3

[schedule]
kind = "cosine"
warmup_steps = 50

[train]
steps = 1000
batch_tokens = 8192     # tokens per optimiser step: context x sequences
micro_batch = 64        # at most so many sequences on a GPU at once
checkpoint_every = 250

[eval]
every = 100
tokens = 16384

[sample]
prompts = ["The "]
tokens = 200

[hardware]
gpu = "any"             # the cheapest GPU that fits; or "1xH100", "8xA100"
disk_gb = 20
on_cpu = "rehearsal"    # without a GPU, train the small form below; or "as_written", or "refuse"

[rehearsal]
train = {{ steps = 60, batch_tokens = 2048, micro_batch = 16, checkpoint_every = 30 }}
"""

"""Finds and checks the weights that a run starts from (`train.init_from`), which are beside the shards.

`--init ckpt.pt` converts a checkpoint of nanoGPT or minGPT, which is a pickle file. The trainer reads it in a child
process on this computer, with an unpickler that creates only tensors and plain values. Only safetensors and JSON files
are uploaded. Weights that the trainer would refuse on paid time are refused before, if that can be seen without loading
them. docs/FORMATS.md has the rules.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gpurun.core.bounded_program import run_module
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import install_line
from gpurun.core.run_plan import DataSummary
from gpurun.core.tensor_file import TensorPlace, read_tensor_places
from gpurun.core.untrusted import error_words, read_object
from gpurun.jobs.training.recipe import ModelConfig, ResolvedRecipe, padded_vocab

INIT_FOLDER = "init"
"""The folder beside a run's data for weights that --init converted. train.init_from is then set to this name."""
_MEMORY_BYTES, _LIMIT_S = 6 << 30, 1800
_CHECKPOINT = re.compile(r"(\d{6})\.model\.safetensors")
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
"""Attention masks in published GPT-2 files. They are named like biases, but the trainer ignores them."""
AS_PUBLISHED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
"""The values that the trainer accepts for the keys of a config.json. A key may be missing."""
_TOKENIZER_KEY = "gpurun_tokenizer_sha256"
"""The key of an exported config.json that identifies its vocabulary."""
_BLOCK_BYTES = 1 << 20
_PUBLISHED = re.compile(r"(pytorch_)?model(-\d{5}-of-(?P<parts>\d{5}))?\.(safetensors|bin)(\.index\.json)?")
"""File names of weights in the library transformers: one file, a part, or an index of parts; safetensors or pickle."""
_LOAD = {"safetensors": "st.load_file(p)", "bin": 'torch.load(p, map_location="cpu", weights_only=True)'}
_MERGE = (
    "import sys, pathlib, torch, safetensors.torch as st; d = pathlib.Path(sys.argv[1]); w = {{}}; "
    # Tensors that share memory cannot be saved, so each is cloned.
    "[w.update({load}) for p in sorted(d.glob({files}))]; "
    'st.save_file({{k: v.contiguous().clone() for k, v in w.items()}}, d / "model.safetensors")'
)
_FITS = "Use weights of the recipe's own shape, or leave train.init_from out; a rehearsal's model is smaller."


def take_checkpoint(checkpoint: Path, into: Path) -> None:
    """Convert a checkpoint file, and write the weights to the run's own data folder.

    Raise UsageError if the file is not a checkpoint, or contains objects other than tensors and plain values.
    """
    if not checkpoint.is_file():
        what = f"--init {checkpoint} is not a file."
        raise UsageError("init.missing", what, hint="Name nanoGPT's ckpt.pt or minGPT's model.pt.")
    if find_spec("torch") is None:
        hint = f"{install_line('local')} (no NVIDIA GPU: from PyTorch's CPU index; see the README)."
        raise SetupError(
            "torch.missing", "--init reads a checkpoint with PyTorch, which is not installed here.", hint=hint
        )
    most_bytes = _MEMORY_BYTES + 4 * checkpoint.stat().st_size
    words = [str(checkpoint), str(into / INIT_FOLDER)]
    try:
        ended = run_module("trainer.foreign_weights", words, most_bytes=most_bytes, limit_s=_LIMIT_S)
    except subprocess.TimeoutExpired:
        what = f"Reading {checkpoint} took more than {_LIMIT_S / 60:.0f} minutes."
        raise UsageError("init.failed", what, hint="Use a faster machine.") from None
    if ended.refusal:
        hint = (
            "For other weights, put model.safetensors and config.json in a folder beside the shards: train.init_from."
        )
        raise UsageError("init.refused", f"{ended.refusal}.", hint=hint)
    if ended.code:
        hint = "It may be damaged, or crafted to take more memory than its size allows."
        what = f"{checkpoint} could not be read (exit code {ended.code}): {ended.last_lines}"
        raise UsageError("init.failed", what, hint=hint)


def add_initial_weights(data: DataSummary, resolved: ResolvedRecipe, own: Path | None = None) -> DataSummary:
    """Return the data with the size of the recipe's initial weights added. Raise UsageError if they do not fit.

    The weights are beside the shards, or in the run's `own` data folder if --init wrote them. A run that continues from
    a checkpoint ignores them.
    """
    name = resolved.tables.train.init_from
    if not name or resolved.earlier is not None:
        return data
    is_own = own is not None and (own / name).is_dir()
    if not data.beside and not is_own:
        raise UsageError(
            "weights.no_folder",
            f'train.init_from is "{name}": weights must be beside the shards, but this run makes its own from text.',
            hint="Make the shards once: gpurun data prepare RECIPE --source TEXT --out DIR; put the weights into DIR; "
            "add --data DIR. A checkpoint of nanoGPT or minGPT works with any text: --init ckpt.pt.",
        )
    files = weights_of(own if own is not None and is_own else Path(data.folder), name)
    weights = next(iter(files.values()))
    _require_single_file(weights, name)
    if not weights.is_file():
        raise UsageError(
            "weights.missing",
            f'train.init_from is "{name}", but {weights} does not exist.',
            hint="Put a folder with GPT-2's model.safetensors and config.json there, or a run's checkpoint.",
        )
    for fault in (*_find_faults(weights, resolved, data), *(_alphabet_faults(weights, data) if is_own else ())):
        raise UsageError("weights.unfit", f"{weights} {fault}.", hint=_FITS)
    return data.model_copy(update={"bytes": data.bytes + sum(file.stat().st_size for file in files.values())})


def _alphabet_faults(weights: Path, data: DataSummary) -> Iterator[str]:
    """Yield a fault if the weights and the data have different numbers of tokens (no check for gpt2)."""
    table = read_tensor_places(weights).get("wte.weight")
    rows = table.shape[0] if table is not None and table.shape else 0
    # The data's vocabulary may have one more character, U+FFFD, at its end.
    if data.tokenizer != "gpt2" and rows not in (data.vocab_size, data.vocab_size - 1):
        yield f"has {rows} tokens, but the data has {data.vocab_size}, so their characters differ"


def weights_of(folder: Path, name: str) -> dict[str, Path]:
    """Return the weights file that `name` refers to, and the JSON file beside it, keyed by path below the data folder.

    As in `trainer/pretrained.py`, `name` is a file, or a folder. In a folder, model.safetensors or else the newest
    checkpoint is used; if there is a manifest, only the checkpoints that it lists are considered. The returned files
    may be missing. Raise UsageError if the manifest is invalid.
    """
    weights = folder / name
    if weights.is_dir():
        below = weights / "checkpoints" if (weights / "checkpoints").is_dir() else weights
        found = sorted(file for file in below.iterdir() if _CHECKPOINT.fullmatch(file.name))
        whole = weights / "model.safetensors"
        weights = whole if whole.is_file() or not found else _newest_checkpoint(found)
    beside = _settings_path(weights)
    return {file.relative_to(folder).as_posix(): file for file in (weights, *([beside] if beside.is_file() else []))}


def _newest_checkpoint(found: list[Path]) -> Path:
    """Return the newest complete checkpoint of a folder, which may also have files of an interrupted save."""
    manifest = found[0].parent.parent / "MANIFEST.json"
    try:
        named = {entry["name"] for entry in read_object(manifest)["files"]}
    except FileNotFoundError:  # The checkpoints were copied without their manifest.
        return found[-1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{manifest} is not a valid manifest: {error!r}."
        raise UsageError("weights.unfit", what, hint="Name one file of weights in train.init_from.") from None
    return max((file for file in found if f"{file.parent.name}/{file.name}" in named), default=found[-1])


def _require_single_file(weights: Path, name: str) -> None:
    """Raise UsageError, with a command that converts them, if the weights are in several files or in a pickle file."""
    folder, whole = weights.parent, weights.with_name("model.safetensors")
    found = [file.name for file in sorted(folder.glob("*model*")) if _PUBLISHED.fullmatch(file.name)]
    if (weights == whole and whole.is_file()) or not found or weights.name not in (*found, whole.name):
        return
    what = f'train.init_from is "{name}", but weights must be one file model.safetensors'
    if whole.is_file():
        hint = f"Set train.init_from to the model.safetensors beside {weights.name}."
        raise UsageError("weights.parts", f"{what}.", hint=hint)
    files = [file for file in found if file.endswith(".safetensors")] or [
        file for file in found if file.endswith(".bin")
    ]
    parts = max((int(match["parts"] or 1) for file in files if (match := _PUBLISHED.fullmatch(file))), default=0)
    what += f"; {folder} holds {' to '.join(dict.fromkeys((files[0], files[-1]))) if files else found[0]}"
    if not files or len(files) < parts:
        missing = f"{len(files)} of {parts} parts" if files else "an index without its parts"
        raise UsageError("weights.parts", f"{what}: {missing}.", hint="Put all parts into that folder first.")
    kind = files[0].rpartition(".")[2]
    code = _MERGE.format(load=_LOAD[kind], files=json.dumps(f"*model-*.{kind}" if parts > 1 else files[0]))
    raise UsageError(
        "weights.parts",
        f"{what}.",
        hint="This command makes that file (it needs torch and safetensors):\n"
        f"python -c {shlex.quote(code)} {shlex.quote(str(folder))}",
    )


def _settings_path(weights: Path) -> Path:
    """Return the path of the JSON file beside the weights, which has the settings that the tensors do not show."""
    checkpoint = _CHECKPOINT.fullmatch(weights.name)
    return weights.with_name(f"{checkpoint[1]}.state.json" if checkpoint else "config.json")


def _find_faults(weights: Path, resolved: ResolvedRecipe, data: DataSummary) -> Iterator[str]:
    """Yield each reason why a weights file does not fit this recipe."""
    model = resolved.tables.model
    try:
        tensors = {name.removeprefix("transformer."): place for name, place in read_tensor_places(weights).items()}
    except (OSError, ValueError) as error:
        yield f"is not a complete safetensors file: {error_words(error)}"
        return
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    embedding, positions = shapes.get("wte.weight", []), shapes.get("wpe.weight", [])
    if len(embedding) != 2:
        yield "has no wte.weight, so it does not belong to a GPT"
        return
    yield from _faults_of_kind(weights, tensors, model)
    layers = len({name.split(".")[1] for name in shapes if name.startswith("h.")})
    if (layers, embedding[1]) != (model.layers, model.width):
        yield f"has {layers} layers of width {embedding[1]}, but the recipe has {model.layers} of {model.width}"
    if embedding[0] > padded_vocab(model, data.vocab_size):
        yield f"has {embedding[0]} tokens, but the model has {padded_vocab(model, data.vocab_size)}"
    if model.preset == "faithful" and (positions or [0])[0] < model.context:
        yield f"has {(positions or [0])[0]} positions, but model.context is {model.context}"
    try:
        settings = read_object(_settings_path(weights))
        is_ours = _CHECKPOINT.fullmatch(weights.name) is not None
        heads = int(settings["recipe"]["model"]["heads"] if is_ours else settings["n_head"])
        tokenizer = settings["data"]["tokenizer"] if is_ours else settings.get(_TOKENIZER_KEY, data.tokenizer_sha256)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"has a {_settings_path(weights).name} beside it that is not valid: {error!r}"
        return
    if heads != model.heads:
        yield f"was trained with {heads} heads, but model.heads is {model.heads}"
    if tokenizer != data.tokenizer_sha256:
        yield "was trained with a different tokeniser than the shards"
    for key, known in AS_PUBLISHED.items():
        if settings.get(key, known[0]) not in known:
            yield f"differs from the published GPT-2: its config.json has {key} = {json.dumps(settings[key])}"


def _faults_of_kind(weights: Path, tensors: Mapping[str, TensorPlace], model: ModelConfig) -> Iterator[str]:
    """Yield each structural difference between a weights file and the model: kind of block, biases, separate head."""
    blocks = "modern" if any(name.endswith("attn.c_q.weight") for name in tensors) else "faithful"
    if blocks != model.preset:
        yield f'has the preset "{blocks}", but model.preset is "{model.preset}"'
    biases = [name for name in tensors if name.endswith(".bias") and not _MASK.fullmatch(name)]
    if model.bias and not biases:
        yield "has no biases, but model.bias is true"
    # An exported model always has biases, which may all be zero.
    contents = (block for name in biases for block in _tensor_blocks(weights, tensors[name]))
    if not model.bias and any(block.strip(b"\0") for block in contents):
        yield "has biases, but model.bias is false"
    head = tensors.get("lm_head.weight")
    if model.tied and head is not None:
        both = zip_longest(_tensor_blocks(weights, head), _tensor_blocks(weights, tensors["wte.weight"]))
        if any(block != other for block, other in both):
            yield "has a separate head, but model.tied is true"


def _tensor_blocks(weights: Path, tensor: TensorPlace) -> Iterator[bytes]:
    with weights.open("rb") as file:
        file.seek(tensor.start)
        for start in range(tensor.start, tensor.stop, _BLOCK_BYTES):
            yield file.read(min(_BLOCK_BYTES, tensor.stop - start))

"""The weights that a run starts from (`train.init_from`): found beside the shards as the trainer finds them.

`--init ckpt.pt` makes them of a checkpoint of nanoGPT or minGPT. That file is a pickle: the trainer reads it here, in a
child process, by an unpickler that makes tensors and plain values only; what is uploaded is safetensors and JSON.
They are shipped from where they lie. What the trainer would refuse them for on paid time is refused here, as far as a
file says it without being loaded; docs/FORMATS.md has the rules.
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
"""Where the weights lie beside a run's data, and what train.init_from is then."""
_MEMORY_BYTES, _LIMIT_S = 6 << 30, 1800
_CHECKPOINT = re.compile(r"(\d{6})\.model\.safetensors")
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
"""What published GPT-2 files hold besides: no bias, and not looked at."""
AS_PUBLISHED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
"""What the trainer wants a config.json to say, where it says it."""
_TOKENIZER_KEY = "gpurun_tokenizer_sha256"
"""Where an exported config.json says which vocabulary its ids are of."""
_BLOCK_BYTES = 1 << 20
_PUBLISHED = re.compile(r"(pytorch_)?model(-\d{5}-of-(?P<parts>\d{5}))?\.(safetensors|bin)(\.index\.json)?")
"""How transformers names weights: whole, in parts, or an index of parts; as safetensors or as a pickle."""
_LOAD = {"safetensors": "st.load_file(p)", "bin": 'torch.load(p, map_location="cpu", weights_only=True)'}
_MERGE = (
    "import sys, pathlib, torch, safetensors.torch as st; d = pathlib.Path(sys.argv[1]); w = {{}}; "
    "[w.update({load}) for p in sorted(d.glob({files}))]; "  # Tensors that share memory are not saved: a clone each.
    'st.save_file({{k: v.contiguous().clone() for k, v in w.items()}}, d / "model.safetensors")'
)
_FITS = "Take weights of the recipe's own shape, or leave train.init_from out; a rehearsal's model is smaller."


def take_checkpoint(checkpoint: Path, into: Path) -> None:
    """Write the weights of a checkpoint into the run's own data folder; UsageError for what is none, or holds more."""
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
        what = f"{checkpoint} was not read after {_LIMIT_S / 60:.0f} minutes."
        raise UsageError("init.failed", what, hint="Take a faster machine.") from None
    if ended.refusal:
        hint = "Other weights: model.safetensors and config.json in a folder beside the shards, and train.init_from."
        raise UsageError("init.refused", f"{ended.refusal}.", hint=hint)
    if ended.code:
        hint = "It may be damaged, or made to take more memory than its size allows."
        what = f"{checkpoint} could not be read (exit code {ended.code}): {ended.last_lines}"
        raise UsageError("init.failed", what, hint=hint)


def started(data: DataSummary, resolved: ResolvedRecipe, own: Path | None = None) -> DataSummary:
    """The data with the weights that the recipe starts from counted as shipped; UsageError where they do not do.

    They lie beside the shards, or in the run's `own` data folder, where --init has put them. A run that goes on from a
    checkpoint does not look at them.
    """
    name = resolved.tables.train.init_from
    if not name or resolved.earlier is not None:
        return data
    is_own = own is not None and (own / name).is_dir()
    if not data.beside and not is_own:
        raise UsageError(
            "weights.no_folder",
            f'train.init_from is "{name}": weights lie beside the shards, and this run makes its own shards of text.',
            hint="Make the shards once: gpurun data prepare RECIPE --source TEXT --out DIR; put the weights into DIR; "
            "add --data DIR. A checkpoint of nanoGPT or minGPT goes with any text: --init ckpt.pt.",
        )
    files = weights_of(own if own is not None and is_own else Path(data.folder), name)
    weights = next(iter(files.values()))
    _demand_one_file(weights, name)
    if not weights.is_file():
        raise UsageError(
            "weights.missing",
            f'train.init_from is "{name}", and there is no {weights}.',
            hint="Put there a folder with GPT-2's model.safetensors and config.json, or a run's checkpoint.",
        )
    for fault in (*_faults(weights, resolved, data), *(_other_alphabet(weights, data) if is_own else ())):
        raise UsageError("weights.unfit", f"{weights} {fault}.", hint=_FITS)
    return data.model_copy(update={"bytes": data.bytes + sum(file.stat().st_size for file in files.values())})


def _other_alphabet(weights: Path, data: DataSummary) -> Iterator[str]:
    """What speaks against a checkpoint whose file does not say its tokeniser: of characters, another number of them."""
    table = read_tensor_places(weights).get("wte.weight")
    rows = table.shape[0] if table is not None and table.shape else 0
    # The data's vocabulary may have U+FFFD besides, at its end.
    if data.tokenizer != "gpt2" and rows not in (data.vocab_size, data.vocab_size - 1):
        yield f"has {rows} tokens, and the data {data.vocab_size}: they are not the same characters"


def weights_of(folder: Path, name: str) -> dict[str, Path]:
    """The file of weights that a name in the data folder means, there or not, and the JSON beside it: by their places.

    It is the file, a folder's model.safetensors or its newest checkpoint, as `trainer/pretrained.py` has it: where a
    manifest is, only what it names is one. UsageError for a manifest that cannot be understood.
    """
    weights = folder / name
    if weights.is_dir():
        below = weights / "checkpoints" if (weights / "checkpoints").is_dir() else weights
        found = sorted(file for file in below.iterdir() if _CHECKPOINT.fullmatch(file.name))
        whole = weights / "model.safetensors"
        weights = whole if whole.is_file() or not found else _newest(found)
    beside = _beside(weights)
    return {file.relative_to(folder).as_posix(): file for file in (weights, *([beside] if beside.is_file() else []))}


def _newest(found: list[Path]) -> Path:
    """The newest of a folder's checkpoints; beside them may lie what a death in mid-save has left."""
    manifest = found[0].parent.parent / "MANIFEST.json"
    try:
        named = {entry["name"] for entry in read_object(manifest)["files"]}
    except FileNotFoundError:  # They were copied elsewhere.
        return found[-1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"{manifest} cannot be understood: {error!r}."
        raise UsageError("weights.unfit", told, hint="Name one file of weights in train.init_from.") from None
    return max((file for file in found if f"{file.parent.name}/{file.name}" in named), default=found[-1])


def _demand_one_file(weights: Path, name: str) -> None:
    """UsageError where weights lie in parts or as a pickle: it says what there is, with the line that merges it."""
    folder, whole = weights.parent, weights.with_name("model.safetensors")
    found = [file.name for file in sorted(folder.glob("*model*")) if _PUBLISHED.fullmatch(file.name)]
    if (weights == whole and whole.is_file()) or not found or weights.name not in (*found, whole.name):
        return
    what = f'train.init_from is "{name}", and only one file model.safetensors is read'
    if whole.is_file():
        raise UsageError("weights.parts", f"{what}.", hint=f"There is one beside {weights.name}: name that.")
    files = [one for one in found if one.endswith(".safetensors")] or [one for one in found if one.endswith(".bin")]
    parts = max((int(told["parts"] or 1) for one in files if (told := _PUBLISHED.fullmatch(one))), default=0)
    what += f"; {folder} holds {' to '.join(dict.fromkeys((files[0], files[-1]))) if files else found[0]}"
    if not files or len(files) < parts:
        missing = f"{len(files)} of {parts} parts" if files else "an index without its parts"
        raise UsageError("weights.parts", f"{what}: {missing}.", hint="Bring all of them into that folder first.")
    kind = files[0].rpartition(".")[2]
    code = _MERGE.format(load=_LOAD[kind], files=json.dumps(f"*model-*.{kind}" if parts > 1 else files[0]))
    raise UsageError(
        "weights.parts",
        f"{what}.",
        hint="This makes one of it (it needs torch and safetensors):\n"
        f"python -c {shlex.quote(code)} {shlex.quote(str(folder))}",
    )


def _beside(weights: Path) -> Path:
    """The JSON file that says what no tensor does."""
    checkpoint = _CHECKPOINT.fullmatch(weights.name)
    return weights.with_name(f"{checkpoint[1]}.state.json" if checkpoint else "config.json")


def _faults(weights: Path, resolved: ResolvedRecipe, data: DataSummary) -> Iterator[str]:
    """What is wrong with a file of weights for this recipe."""
    model = resolved.tables.model
    try:
        tensors = {name.removeprefix("transformer."): place for name, place in read_tensor_places(weights).items()}
    except (OSError, ValueError) as error:
        yield f"is not a whole safetensors file, and nothing else is read: {error_words(error)}"
        return
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    embedding, positions = shapes.get("wte.weight", []), shapes.get("wpe.weight", [])
    if len(embedding) != 2:
        yield "holds no wte.weight: it is not a GPT's file"
        return
    yield from _faults_of_kind(weights, tensors, model)
    layers = len({name.split(".")[1] for name in shapes if name.startswith("h.")})
    if (layers, embedding[1]) != (model.layers, model.width):
        yield f"has {layers} layers of width {embedding[1]}, and the recipe {model.layers} of {model.width}"
    if embedding[0] > padded_vocab(model, data.vocab_size):
        yield f"has {embedding[0]} tokens, and the model {padded_vocab(model, data.vocab_size)}"
    if model.preset == "faithful" and (positions or [0])[0] < model.context:
        yield f"has {(positions or [0])[0]} positions, and model.context is {model.context}"
    try:
        told = read_object(_beside(weights))
        is_ours = _CHECKPOINT.fullmatch(weights.name) is not None
        heads = int(told["recipe"]["model"]["heads"] if is_ours else told["n_head"])
        tokenizer = told["data"]["tokenizer"] if is_ours else told.get(_TOKENIZER_KEY, data.tokenizer_sha256)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"has a {_beside(weights).name} beside it that does not say what it should: {error!r}"
        return
    if heads != model.heads:
        yield f"was trained with {heads} heads, and model.heads is {model.heads}"
    if tokenizer != data.tokenizer_sha256:
        yield "was trained with another tokeniser than that of the shards"
    for key, known in AS_PUBLISHED.items():
        if told.get(key, known[0]) not in known:
            yield f"is no GPT-2 as published: its config.json says {key} {json.dumps(told[key])}"


def _faults_of_kind(weights: Path, tensors: Mapping[str, TensorPlace], model: ModelConfig) -> Iterator[str]:
    """What a file has that the network has not, or the other way round: its blocks, biases, a head of its own."""
    blocks = "modern" if any(name.endswith("attn.c_q.weight") for name in tensors) else "faithful"
    if blocks != model.preset:
        yield f'is of the preset "{blocks}", and model.preset is "{model.preset}"'
    biases = [name for name in tensors if name.endswith(".bias") and not _MASK.fullmatch(name)]
    if model.bias and not biases:
        yield "has no biases, and model.bias is true"
    # An export has them in any case, all zero.
    if not model.bias and any(block.strip(b"\0") for name in biases for block in _content(weights, tensors[name])):
        yield "has biases, and model.bias is false"
    head = tensors.get("lm_head.weight")
    if model.tied and head is not None:
        both = zip_longest(_content(weights, head), _content(weights, tensors["wte.weight"]))
        if any(one != other for one, other in both):
            yield "has a head of its own, and model.tied is true"


def _content(weights: Path, tensor: TensorPlace) -> Iterator[bytes]:
    with weights.open("rb") as file:
        file.seek(tensor.start)
        for start in range(tensor.start, tensor.stop, _BLOCK_BYTES):
            yield file.read(min(_BLOCK_BYTES, tensor.stop - start))

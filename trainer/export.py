"""Writes a run's checkpoint as a folder that transformers loads: `python -m trainer.export OUT DIR --data DATA`.

GPT2LMHeadModel.from_pretrained(DIR) gives the same logits as the trainer. Only the `faithful` preset is a GPT-2. With
`--form`, the folder is for another program: the course (lab), nanoGPT or minGPT. Exit codes: 0 written, 2 refused.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import write_tensors
from trainer.errors import Refused
from trainer.foreign_weights import mingpt_files, nanogpt_files
from trainer.model import GPT
from trainer.model_card import model_card
from trainer.pretrained import LINEAR_NAMES, TOKENIZER_KEY
from trainer.recipe import ModelConfig, read_table
from trainer.recipe_file import completed
from trainer.run_checkpoint import open_run_checkpoint
from trainer.tokenizer import (
    GPT2_EOT,
    GPT2_MERGES,
    REPLACEMENT,
    printable_bytes,
    sha256_of_tokens,
    shipped_gpt2_tokens,
)

__all__ = ["export_hf", "export_lab", "main"]

LAB_FILE = "mini_gpt2_checkpoint.pt"
LAB_PARTS = {
    "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "ln2": "ln_2", "mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj",
}  # fmt: skip
"""The course's names for the parts of a block, each with gpurun's name, in the course's order."""


@dataclass(frozen=True)
class _Trained:
    """What an export needs from a checkpoint."""

    model: ModelConfig
    state: dict[str, Any]
    tensors: dict[str, Tensor]
    tokens: list[bytes]
    """The tokeniser's tokens, without the padding of the model's vocabulary."""
    source: str
    """A description of the data that the model was trained on."""


def export_hf(
    checkpoint: Path,
    folder: Path,
    *,
    data: Path | None = None,
    recipe: Path | None = None,
    figures: Mapping[str, Any],
) -> list[str]:
    """Write the folder, which must not exist or must be empty, completely or not at all; return its sorted file names.

    `checkpoint` is a run's out folder, whose newest checkpoint is used, or one file of weights in it. `data` is the
    folder with the run's vocab.json, which all tokenisers except GPT-2's need. `recipe` is a JSON file with a recipe to
    use in place of the checkpoint's. `figures` are shown in the model card. Raise Refused if the checkpoint, the data
    or the folder is unsuitable.
    """
    trained = _read(checkpoint.resolve(), data, recipe)
    texts = {
        "config.json": json.dumps(_config(trained), indent=1) + "\n",
        "generation_config.json": json.dumps(_generation(trained), indent=1) + "\n",
        "README.md": model_card(trained.state, trained.model, trained.source, figures),
        **_tokenizer_files(trained.state["recipe"]["data"]["tokenizer"], trained.tokens, trained.model.context),
    }

    def write(staged: Path) -> None:
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8", newline="\n")
        with (staged / "model.safetensors").open("wb") as file:
            write_tensors(file.write, _gpt2_tensors(trained))

    return _filled(folder, write)


def export_lab(checkpoint: Path, folder: Path, *, data: Path | None = None, recipe: Path | None = None) -> list[str]:
    """Write a folder as `export_hf` does, but with the course's one file, for `torch.load` with `weights_only=True`.

    The file has the weights under the course's names, the shape in `config`, and the alphabet in `stoi` and `itos`.
    """
    trained = _read(checkpoint.resolve(), data, recipe)
    model = trained.model
    if (name := trained.state["recipe"]["data"]["tokenizer"]) != "char":
        raise Refused(f'the course\'s file needs a token for each character, but this model has the tokeniser "{name}"')
    characters = [token.decode("utf-8") for token in trained.tokens]
    shape = {"vocab_size": len(characters), "block_size": model.context, "n_layer": model.layers}
    record = {
        "model_state": _lab_tensors(trained),
        "config": {**shape, "n_head": model.heads, "n_embd": model.width, "dropout": model.dropout},
        "stoi": {character: index for index, character in enumerate(characters)},
        "itos": dict(enumerate(characters)),
    }
    return _filled(folder, lambda staged: torch.save(record, staged / LAB_FILE))


def _lab_tensors(trained: _Trained) -> dict[str, Tensor]:
    """Return the tensors by the course's names, in its order: all biases, a mask per block, a separate head."""
    model, rows = trained.model, len(trained.tokens)
    mask = torch.tril(torch.ones(model.context, model.context)).view(1, 1, model.context, model.context)
    made: dict[str, Tensor] = {}

    def put(name: str, ours: str) -> None:
        weight = trained.tensors[f"{ours}.weight"]
        made[f"{name}.weight"] = (weight[:rows] if ours in ("wte", "lm_head") else weight).clone()
        if ours not in ("wte", "wpe"):
            bias = trained.tensors.get(f"{ours}.bias")
            made[f"{name}.bias"] = torch.zeros(len(made[f"{name}.weight"])) if bias is None else bias.clone()

    put("token_emb", "wte")
    put("pos_emb", "wpe")
    for layer in range(model.layers):
        theirs, ours = f"blocks.{layer}", f"h.{layer}"
        put(f"{theirs}.ln1", f"{ours}.ln_1")
        made[f"{theirs}.attn.mask"] = mask.clone()
        for name, own_name in LAB_PARTS.items():
            put(f"{theirs}.{name}", f"{ours}.{own_name}")
    put("ln_f", "ln_f")
    if model.tied:
        made["lm_head.weight"], made["lm_head.bias"] = made["token_emb.weight"].clone(), torch.zeros(rows)
    else:
        put("lm_head", "lm_head")
    return made


def export_other(
    form: str, checkpoint: Path, folder: Path, *, data: Path | None = None, recipe: Path | None = None
) -> list[str]:
    """Write a folder as `export_hf` does, in the format of nanoGPT (`form` "nanogpt") or of minGPT ("mingpt")."""
    trained = _read(checkpoint.resolve(), data, recipe)
    model, tensors, tokens = trained.model, trained.tensors, trained.tokens
    if form == "mingpt":
        return _filled(folder, lambda staged: mingpt_files(model, tensors, tokens, staged))
    return _filled(folder, lambda staged: nanogpt_files(model, tensors, tokens, trained.state, staged))


def _filled(folder: Path, write: Callable[[Path], None]) -> list[str]:
    """Write a folder completely or not at all; return its sorted file names. Refused if it has files already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} exists and is not empty; name another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # An existing folder may be a mount point or a working directory, so the files are moved into it.
        is_there = folder.exists()
        staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder if is_there else folder.parent))
        try:
            write(staged)
            names = sorted(os.listdir(staged))
            staged.chmod(0o755)
            if is_there:
                # Nothing loads a folder without its config.json, so that file comes last.
                for file_name in sorted(names, key=lambda name: name == "config.json"):
                    os.replace(staged / file_name, folder / file_name)
            else:
                os.replace(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise Refused(f"{folder} cannot be written: {error.strerror}") from error
    return names


def _read(checkpoint: Path, data: Path | None, recipe: Path | None) -> _Trained:
    """Read a checkpoint; Refused if it is damaged, if it is not a GPT-2, or if its tokeniser is missing."""
    opened = open_run_checkpoint(checkpoint, recipe)
    name, recipe_record, state = opened.weights.name, opened.state["recipe"], opened.state
    try:
        model = read_table(ModelConfig, completed(recipe_record)["model"], "model")
        if model.preset != "faithful":
            plain = f"{name} is plain safetensors, and the state.json beside it has its settings"
            raise Refused(f'a model of preset "{model.preset}" is not a GPT-2, so transformers cannot load it; {plain}')
        tokens = _tokens(recipe_record["data"]["tokenizer"], state["data"]["tokenizer"], data)
        tensors = opened.tensors(lambda: GPT(model, len(tokens)))
        return _Trained(model, state, tensors, tokens, _source(state, data))
    except OSError as error:
        raise Refused(f"{name} cannot be exported: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        raise Refused(f"{name} is not a valid checkpoint: {error!r}") from error


def _tokens(name: str, sha256: str, data: Path | None) -> list[bytes]:
    """Return the tokeniser's tokens, after checking that the checkpoint was trained with them."""
    if data is None and name != "gpt2":
        raise Refused(f'the tokeniser "{name}" depends on its text; name the data folder with its vocab.json')
    if data is None:
        tokens, where = shipped_gpt2_tokens(), "the GPT-2 vocabulary shipped here"
    else:
        where = str(data / "vocab.json")
        vocab = json.loads((data / "vocab.json").read_text(encoding="utf-8"))
        tokens = [base64.b64decode(token) for token in vocab["tokens_b64"]]
    if sha256_of_tokens(tokens) != sha256:
        raise Refused(f"{where} is not the tokeniser that the checkpoint was trained with: their sha256 differ")
    return tokens


def _source(state: Mapping[str, Any], data: Path | None) -> str:
    """Return a description of the data: the kind of source in data.json, and the recipe's source if different."""
    kind, named = "unknown", state["recipe"]["data"]["source"]
    if data is not None and (data / "data.json").is_file():
        manifest = json.loads((data / "data.json").read_text(encoding="utf-8"))
        if [shard["sha256"] for shard in manifest["train"]] == state["data"].get("train"):
            kind = manifest["source"]["kind"]
    return str(kind if kind == named else f"{kind} (the recipe says {named})")


def _gpt2_tensors(trained: _Trained) -> dict[str, Tensor]:
    """Return the tensors as transformers' GPT-2 has them: linear weights (in, out), no padding rows, all biases."""
    rows, tensors = len(trained.tokens), {}
    for name, tensor in trained.tensors.items():
        if name in ("wte.weight", "lm_head.weight"):
            tensor = tensor[:rows]
        elif name.endswith(LINEAR_NAMES):
            tensor = tensor.t()
        tensors[name if name == "lm_head.weight" else f"transformer.{name}"] = tensor.contiguous()
    if not trained.model.bias:
        for name, tensor in list(tensors.items()):
            if name.endswith((*LINEAR_NAMES, "ln_1.weight", "ln_2.weight", "ln_f.weight")):
                tensors[name.removesuffix("weight") + "bias"] = torch.zeros(tensor.shape[-1])
    return tensors


def _end_of_text(trained: _Trained) -> int | None:
    return len(trained.tokens) - 1 if trained.state["recipe"]["data"]["tokenizer"] in ("gpt2", "bpe") else None


def _config(trained: _Trained) -> dict[str, Any]:
    """Return the content of config.json: the model's shape under GPT-2's names."""
    model, end = trained.model, _end_of_text(trained)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": len(trained.tokens),
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), model.dropout),
        "tie_word_embeddings": model.tied,
        "torch_dtype": "float32",
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
        TOKENIZER_KEY: trained.state["data"]["tokenizer"],
    }


def _generation(trained: _Trained) -> dict[str, Any]:
    """Return the content of generation_config.json: transformers then samples as the recipe does."""
    end, sample = _end_of_text(trained), trained.state["recipe"]["sample"]
    warm = {"do_sample": True, "temperature": sample["temperature"], "top_k": sample["top_k"]}
    return {"bos_token_id": end, "eos_token_id": end, **(warm if sample["temperature"] else {"do_sample": False})}


def _tokenizer_files(name: str, tokens: Sequence[bytes], context: int) -> dict[str, str]:
    """Return the texts of the tokeniser's files, by name; `context` is the model's longest input in tokens."""
    files = _char(tokens) if name == "char" else _bytes(tokens, _published() if name == "gpt2" else _merges(tokens))
    config = files["tokenizer_config.json"] | {"model_max_length": context, "clean_up_tokenization_spaces": False}
    texts = {file: record if isinstance(record, str) else _json(record) for file, record in files.items()}
    return texts | {"tokenizer_config.json": _json(config)}


def _json(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, indent=1) + "\n"


def _tokenizer(**parts: Any) -> dict[str, Any]:
    """Return the content of a tokenizer.json from the parts that are not empty."""
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], **empty, **parts}


def _published() -> list[str]:
    """Return GPT-2's published merges as a list of lines `left right`."""
    return GPT2_MERGES.read_text(encoding="utf-8").split("\n")[1:-1]


def _merges(tokens: Sequence[bytes]) -> list[str]:
    """Return the merges, rebuilt from the tokens: a line `left right` for each pair of tokens that joins into a third.

    The lines are in the order of the third tokens. `BpeTokenizer` merges by the same rule without a list, but
    transformers needs the list.
    """
    ids = {token: index for index, token in enumerate(tokens[:-1])}
    printable, lines = printable_bytes(), []
    for token in tokens[256:-1]:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = sorted((ids[left], ids[right]) for left, right in pairs if left in ids and right in ids)
        lines += [" ".join(_printed(tokens[index], printable) for index in pair) for pair in known]
    return lines


def _printed(token: bytes, printable: dict[int, str]) -> str:
    return "".join(printable[byte] for byte in token)


def _bytes(tokens: Sequence[bytes], merges: Sequence[str]) -> dict[str, Any]:
    """Return the tokeniser files of a byte-level BPE with these merges; each byte is a printable character."""
    printable, end = printable_bytes(), GPT2_EOT.decode()
    written = [_printed(token, printable) for token in tokens[:-1]]
    vocab = {token: index for index, token in enumerate([*written, end])}
    pairs = [line.split(" ") for line in merges]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
    }
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": pairs}
    bytes_in = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    return {
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer.json": _tokenizer(
            added_tokens=[{"id": len(tokens) - 1, "content": end, **flags}],
            pre_tokenizer=bytes_in,
            post_processor=bytes_in,
            decoder=bytes_in,
            model=model,
        ),
        "tokenizer_config.json": config,
    }


def _char(tokens: Sequence[bytes]) -> dict[str, Any]:
    """Return the tokeniser files for one token per character; an unknown character becomes U+FFFD, as in training."""
    vocab = {token.decode("utf-8"): index for index, token in enumerate(tokens)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": REPLACEMENT}
    unknown = {"unk_token": REPLACEMENT} if REPLACEMENT in vocab else {}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return {
        "tokenizer.json": _tokenizer(pre_tokenizer=split, decoder={"type": "Fuse"}, model=model),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **unknown},
    }


def _figures(path: Path | None) -> dict[str, Any]:
    """Read the model card's figures: an object of strings, numbers, true, false and null."""
    if path is None:
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"the figures {path} cannot be read: {error}") from error
    if not isinstance(record, dict) or any(isinstance(value, dict | list) for value in record.values()):
        raise Refused(f"the figures {path} must be one JSON object of plain values")
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    about = "Write a run's checkpoint as a folder that transformers loads."
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=about)
    parser.add_argument("checkpoint", type=Path, help="a run's out folder, or one NNNNNN.model.safetensors in it")
    parser.add_argument("folder", type=Path, help="the folder to write; it must not exist yet, or be empty")
    parser.add_argument("--data", type=Path, help="the run's data folder with its vocab.json; only GPT-2's needs none")
    parser.add_argument("--recipe", type=Path, help="JSON: a recipe to use in place of the checkpoint's")
    parser.add_argument("--figures", type=Path, help="a JSON object of figures for the model card")
    parser.add_argument("--form", choices=("hf", "lab", "nanogpt", "mingpt"), default="hf", help=f"lab: {LAB_FILE}")
    arguments = parser.parse_args(argv)
    try:
        figures = _figures(arguments.figures)
        where = {"data": arguments.data, "recipe": arguments.recipe}
        if arguments.form == "lab":
            written = export_lab(arguments.checkpoint, arguments.folder, **where)
        elif arguments.form != "hf":
            written = export_other(arguments.form, arguments.checkpoint, arguments.folder, **where)
        else:
            written = export_hf(arguments.checkpoint, arguments.folder, **where, figures=figures)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 2
    print("\n".join(str(arguments.folder / name) for name in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())

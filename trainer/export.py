"""Writes a run's checkpoint as a folder that transformers loads: `python -m trainer.export OUT DIR --data DATA`.

GPT2LMHeadModel.from_pretrained(DIR) gives the logits that the trainer gives. Only the `faithful` preset is a GPT-2.
Exit codes: 0 written, 2 refused.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import Refused
from trainer.hf_tokenizer import tokenizer_files
from trainer.model import GPT
from trainer.model_card import model_card
from trainer.pretrained import LINEAR_NAMES, TOKENIZER_KEY
from trainer.recipe import ModelConfig, completed, read_table
from trainer.run_checkpoint import open_run_checkpoint
from trainer.tensors import write_tensors
from trainer.tokenizer import sha256_of_tokens, shipped_gpt2_tokens

__all__ = ["export_hf", "main"]


@dataclass(frozen=True)
class _Trained:
    """What an export needs of a checkpoint."""

    model: ModelConfig
    state: dict[str, Any]
    tensors: dict[str, Tensor]
    tokens: list[bytes]
    """The tokeniser's, without the padding that the model's vocabulary has."""
    source: str
    """What it learned from."""


def export_hf(
    checkpoint: Path,
    folder: Path,
    *,
    data: Path | None = None,
    recipe: Path | None = None,
    figures: Mapping[str, Any],
) -> list[str]:
    """Write the folder, which must not exist yet or be empty, whole or not at all; return its files' names, sorted.

    `checkpoint` is a run's out folder (its newest checkpoint is taken) or one file of weights in it. `data` is the
    folder that has the run's vocab.json, which all tokenisers but GPT-2's need. `recipe` is a JSON file that has the
    recipe in the checkpoint's place. `figures` go into the model card.
    Raise Refused where the checkpoint, the data or the folder is not fit.
    """
    trained = _read(checkpoint.resolve(), data, recipe)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} is there already and not empty; name another folder")
    texts = {
        "config.json": json.dumps(_config(trained), indent=1) + "\n",
        "generation_config.json": json.dumps(_generation(trained), indent=1) + "\n",
        "README.md": model_card(trained.state, trained.model, trained.source, figures),
        **tokenizer_files(trained.state["recipe"]["data"]["tokenizer"], trained.tokens, trained.model.context),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A folder that is there may be a mount, or where somebody stands: it is filled, and stays the same folder.
        is_there = folder.exists()
        staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder if is_there else folder.parent))
        try:
            for name, text in texts.items():
                (staged / name).write_text(text, encoding="utf-8", newline="\n")
            with (staged / "model.safetensors").open("wb") as file:
                write_tensors(file.write, _gpt2_tensors(trained))
            staged.chmod(0o755)
            if is_there:
                # Nothing loads a folder without its config.json: it comes last.
                for file_name in sorted(os.listdir(staged), key=lambda name: name == "config.json"):
                    os.replace(staged / file_name, folder / file_name)
            else:
                os.replace(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise Refused(f"{folder} cannot be written: {error.strerror}") from error
    return sorted([*texts, "model.safetensors"])


def _read(checkpoint: Path, data: Path | None, recipe: Path | None) -> _Trained:
    """Read a checkpoint; refuse one that is damaged, is no GPT-2, or whose tokeniser is not at hand."""
    opened = open_run_checkpoint(checkpoint, recipe)
    name, told, state = opened.weights.name, opened.state["recipe"], opened.state
    try:
        model = read_table(ModelConfig, completed(told)["model"], "model")
        if model.preset != "faithful":
            plain = f"{name} is plain safetensors already, and the state.json beside it has its settings"
            raise Refused(f'a model of preset "{model.preset}" is no GPT-2, so transformers cannot load it; {plain}')
        tokens = _tokens(told["data"]["tokenizer"], state["data"]["tokenizer"], data)
        tensors = opened.tensors(lambda: GPT(model, len(tokens)))
        return _Trained(model, state, tensors, tokens, _source(state, data))
    except OSError as error:
        raise Refused(f"{name} cannot be exported: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        raise Refused(f"{name} is not a sound checkpoint: {error!r}") from error


def _tokens(name: str, sha256: str, data: Path | None) -> list[bytes]:
    """Return the tokeniser's tokens, and make sure that they are those the checkpoint was trained with."""
    if data is None and name != "gpt2":
        raise Refused(f'the tokeniser "{name}" is made from its text; name the data folder that has its vocab.json')
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
    """Return what the tokens were made of: data.json has it; the recipe, what it is without a text that is brought."""
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
    """Return config.json: the shape, in GPT-2's words."""
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
    """Return generation_config.json: to sample as the recipe does."""
    end, sample = _end_of_text(trained), trained.state["recipe"]["sample"]
    warm = {"do_sample": True, "temperature": sample["temperature"], "top_k": sample["top_k"]}
    return {"bos_token_id": end, "eos_token_id": end, **(warm if sample["temperature"] else {"do_sample": False})}


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
    parser.add_argument("--recipe", type=Path, help="JSON: the recipe, in place of what the checkpoint says")
    parser.add_argument("--figures", type=Path, help="a JSON object of figures for the model card")
    arguments = parser.parse_args(argv)
    try:
        figures = _figures(arguments.figures)
        where = {"data": arguments.data, "recipe": arguments.recipe}
        written = export_hf(arguments.checkpoint, arguments.folder, **where, figures=figures)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 2
    print("\n".join(str(arguments.folder / name) for name in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Text from a checkpoint: `python -m trainer.generate OUT --data DATA --prompt "Once upon a time"`.

OUT is a run's out folder, of which the newest checkpoint is taken, or one file of weights in it; DATA has the run's
data.json and vocab.json. Prints one JSON line. Exit codes: 0 written, 2 refused. Nothing is unpickled. A prompt for
GPT-2's tokeniser needs tiktoken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config import ModelConfig, SampleConfig
from trainer.errors import Refused
from trainer.model import GPT, with_vocabulary
from trainer.pretrained import find_weights
from trainer.sample import generate
from trainer.shards import Tokenizer, load_tokenizer
from trainer.tensors import TensorFileError, read_tensors

__all__ = ["Trained", "encode", "main", "open_checkpoint"]

_SUFFIX = ".model.safetensors"


@dataclass(frozen=True)
class Trained:
    """A model as one checkpoint has it, the tokens it speaks in, and how its recipe sampled."""

    step: int
    model: GPT
    tokenizer: Tokenizer
    sample: SampleConfig
    seed: int


def open_checkpoint(checkpoint: Path, data: Path) -> Trained:
    """Open a checkpoint, the newest where a folder is named; Refused where it is damaged, no GPT, or of other data.

    Of its recipe only what is needed here is read: a key that has come since takes its default.
    """
    weights = find_weights(checkpoint)
    if not weights.name.endswith(_SUFFIX):
        raise Refused(f"{weights} is no checkpoint of a run: those are named NNNNNN{_SUFFIX}")
    try:
        beside = weights.with_name(weights.name.removesuffix(_SUFFIX) + ".state.json")
        state: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        recipe = state["recipe"]
        sample = SampleConfig(**recipe["sample"] | {"prompts": tuple(recipe["sample"]["prompts"])})
        tokenizer = _tokenizer(data, recipe["data"]["tokenizer"])
        if tokenizer.sha256 != state["data"]["tokenizer"]:
            raise Refused(f"{weights.name} was trained with another vocabulary than that in {data}")
        config = ModelConfig(**recipe["model"])
        if config.preset == "encoder-decoder":
            raise Refused(f"{weights.name} is of a translation model, which continues no text")
        model = GPT(with_vocabulary(config, tokenizer.vocab_size))
        model.load_state_dict(read_tensors(weights))
        step, seed = int(state["step"]), int(recipe["train"]["seed"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, TensorFileError) as error:
        raise Refused(f"{weights.name} is not a sound checkpoint of a GPT: {error}") from error
    return Trained(step, model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, sample, seed)


def _tokenizer(data: Path, name: str) -> Tokenizer:
    try:
        manifest = json.loads((data / "data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"data.json cannot be read from {data}: {error}") from error
    return load_tokenizer(data, manifest, name)


def encode(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's ids; an empty one is the end-of-text token. Refused names the first bad one."""
    from trainer.prepare.errors import Refusal
    from trainer.prepare.tokenizers import CharTokenizer, Gpt2Tokenizer

    if not prompt:
        if tokenizer.eot_id is None:
            raise Refused(f"the tokeniser {tokenizer.name} cannot begin with nothing; give it a character")
        return [tokenizer.eot_id]
    if tokenizer.name not in ("char", "gpt2"):
        raise Refused(f'text cannot be encoded for the tokeniser "{tokenizer.name}" here')
    is_char = tokenizer.name == "char"
    known = {token.decode("utf-8", "replace") for token in tokenizer.tokens} if is_char else None
    for character in prompt:
        if "\ud800" <= character <= "\udfff" or (known is not None and character not in known):
            shown = json.dumps(character, ensure_ascii=not character.isprintable())
            raise Refused(f"the character {shown} (U+{ord(character):04X}) is not in the vocabulary")
    try:
        kind = CharTokenizer if is_char else Gpt2Tokenizer
        return [int(i) for i in kind(tokenizer.tokens).encode([prompt])[0]]
    except Refusal as refusal:
        raise Refused(str(refusal)) from refusal


def _continue(given: argparse.Namespace) -> dict[str, Any]:
    """Do what the command line asks for."""
    trained = open_checkpoint(given.checkpoint, given.data)
    wanted = {name: getattr(given, name) for name in ("tokens", "temperature", "top_k")}
    config: SampleConfig = dataclasses.replace(
        trained.sample, **{name: value for name, value in wanted.items() if value is not None}
    )
    seed = trained.seed if given.seed is None else given.seed
    ids = encode(given.prompt, trained.tokenizer)
    written = generate(trained.model, ids, config, vocab_size=trained.tokenizer.vocab_size, seed=seed)
    text = trained.tokenizer.decode(written[len(ids) :])
    made = {"prompt": given.prompt, "text": text, "step": trained.step, "seed": seed}
    return made | {"tokens": len(written) - len(ids), "temperature": config.temperature, "top_k": config.top_k}


def _given(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.generate", description="Continue a text.")
    parser.add_argument("checkpoint", type=Path, help="a run's out folder, or one NNNNNN.model.safetensors in it")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="where data.json and vocab.json are")
    parser.add_argument("--prompt", required=True, help="what to continue")
    parser.add_argument("--tokens", type=int, help="how many tokens to write; the recipe's number by default")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest; the recipe's by default")
    parser.add_argument("--top-k", type=int, help="draw among so many; 0: all; the recipe's by default")
    parser.add_argument("--seed", type=int, help="the same seed, the same text; the recipe's by default")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON line; return the exit code."""
    try:
        print(json.dumps(_continue(_given(arguments))), flush=True)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return refusal.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

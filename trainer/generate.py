"""Generates text from a checkpoint: `python -m trainer.generate OUT --data DATA --prompt "Once upon a time"`.

A GPT continues the prompt; a translation model translates it. OUT is a run's out folder, whose newest checkpoint is
used, or one file of weights in it; DATA has the run's data.json and vocab.json. The command prints one JSON line. Exit
codes: 0 written, 2 refused. Nothing is unpickled. A prompt for byte-pair encoding needs tiktoken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.errors import Refused
from trainer.evaluate import generate
from trainer.model import GPT
from trainer.pair_tokenizer import UNKNOWN, PairTokenizer, WordTokenizer
from trainer.recipe import PAIR_TOKENIZERS, ModelConfig, RecipeError, SampleConfig, read_table
from trainer.run_checkpoint import open_run_checkpoint
from trainer.shards import Tokenizer, load_tokenizer, read_json
from trainer.tokenizer import TextTokenizer, tokenizer_of
from trainer.translation.batch import SpecialTokens
from trainer.translation.interpret import Interpreter
from trainer.translation.model import Translator
from trainer.translation.pairs import read_special_tokens

__all__ = ["Trained", "encode", "main", "open_checkpoint"]

MOST_SEED = 2**63 - 1
"""The largest seed of torch's generators; `gpurun sample` has the same limit."""


@dataclass(frozen=True)
class Trained:
    """A model from a checkpoint, its tokeniser, and the sampling settings and seed of its recipe."""

    step: int
    model: GPT | Translator
    tokenizer: Tokenizer
    sample: SampleConfig
    seed: int
    special: SpecialTokens | None = None
    """The special ids of sentence pairs; a GPT has none."""


def open_checkpoint(checkpoint: Path, data: Path, recipe: Path | None = None) -> Trained:
    """Open a checkpoint, or the newest one of a folder; Refused if it is damaged or belongs to other data.

    Only the needed tables of its recipe are read, and a key that the recipe lacks gets its default. `recipe` is a JSON
    file with a recipe to use in place of the checkpoint's.
    """
    opened = open_run_checkpoint(checkpoint, recipe)
    name, recipe_record = opened.weights.name, opened.state["recipe"]
    try:
        sample = read_table(SampleConfig, recipe_record["sample"], "sample", is_whole=False)
        tokenizer = load_tokenizer(data, read_json(data / "data.json"), recipe_record["data"]["tokenizer"])
        if tokenizer.sha256 != opened.state["data"]["tokenizer"]:
            raise Refused(f"{name} was trained with another vocabulary than that in {data}")
        shape = read_table(ModelConfig, recipe_record["model"], "model", is_whole=False)
        vocab_size, special = tokenizer.vocab_size, None
        build: Callable[[], GPT | Translator]
        if shape.preset == "encoder-decoder":
            special = read_special_tokens(data, vocab_size)
            build = partial(Translator, shape, vocab_size, pad_id=special.pad_id)
        else:
            build = partial(GPT, shape, vocab_size)
        tensors, seed = opened.tensors(build), int(recipe_record["train"]["seed"])
        model = build()
        model.load_state_dict(tensors)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise Refused(f"{name} is not a valid checkpoint: {error}") from error
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return Trained(opened.state["step"], model, tokenizer, sample, seed, special)


def encode(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the prompt; an empty prompt becomes the end-of-text token. Refused for an unknown character."""
    if not prompt:
        if tokenizer.eot_id is None:
            raise Refused(f"the tokeniser {tokenizer.name} cannot start with an empty prompt; give it a character")
        return [tokenizer.eot_id]
    if tokenizer.name not in ("char", "gpt2", "bpe", *PAIR_TOKENIZERS):
        raise Refused(f'text cannot be encoded for the tokeniser "{tokenizer.name}" here')
    is_char = tokenizer.name in ("char", "char-pairs")
    known = {token.decode("utf-8", "replace") for token in tokenizer.tokens} if is_char else None
    for character in prompt:
        if "\ud800" <= character <= "\udfff" or (known is not None and character not in known):
            shown = json.dumps(character, ensure_ascii=not character.isprintable())
            raise Refused(f"the character {shown} (U+{ord(character):04X}) is not in the vocabulary")
    if tokenizer.name in PAIR_TOKENIZERS:
        made: TextTokenizer = PairTokenizer.from_tokens(tokenizer.name, tokenizer.tokens)
    else:
        made = tokenizer_of(tokenizer.name, tokenizer.tokens)
    return [int(i) for i in made.encode([prompt])[0]]


def _do(given: argparse.Namespace) -> dict[str, Any]:
    """Run what the command line requests; Refused if a setting does not apply to the model."""
    trained = open_checkpoint(given.checkpoint, given.data, given.recipe)
    translates = trained.special is not None
    for name in ("temperature", "top_k", "top_p", "stop", "seed") if translates else ("beams", "length_penalty"):
        if getattr(given, name) is not None:
            how = "translates by search, without drawing" if translates else "continues text by drawing, without search"
            raise Refused(f"--{name.replace('_', '-')} does not apply to this model, which {how}")
    return _translate(given, trained) if translates else _continue(given, trained)


def _translate(given: argparse.Namespace, trained: Trained) -> dict[str, Any]:
    """Return the prompt's translation with its figures, and the prompt's words that are not in the vocabulary."""
    if not given.prompt.strip():
        raise Refused("the prompt is empty; there is nothing to translate")
    ids, context, sample = encode(given.prompt.strip(), trained.tokenizer), trained.model.config.context, trained.sample
    if len(ids) + 2 > context:
        raise Refused(f"the prompt needs {len(ids) + 2} positions with its start and end, but the model has {context}")
    beams = sample.beams if given.beams is None else given.beams
    alpha = sample.length_penalty if given.length_penalty is None else given.length_penalty
    if beams < 1 or alpha < 0:
        raise Refused(f"--beams {beams} and --length-penalty {alpha}: they must be at least 1 and 0")
    assert trained.special is not None
    assert isinstance(trained.model, Translator)
    interpreter = Interpreter(tokenizer=trained.tokenizer, special=trained.special)
    most = sample.tokens if given.tokens is None else given.tokens
    (found,) = interpreter.translate(trained.model, [ids], beams=beams, alpha=alpha, most=most)
    pieces = WordTokenizer.pieces(given.prompt) if trained.tokenizer.name == "word-pairs" else []
    unknown = [piece.strip() for piece, i in zip(pieces, ids, strict=False) if trained.tokenizer.tokens[i] == UNKNOWN]
    made = {"prompt": given.prompt, "text": interpreter.text(found.ids), "step": trained.step, "unknown": unknown}
    return made | {"tokens": len(found.ids), "beams": beams, "length_penalty": alpha}


def _continue(given: argparse.Namespace, trained: Trained) -> dict[str, Any]:
    """Return the continuation of the prompt, with its settings."""
    typed = {name: getattr(given, name) for name in ("tokens", "temperature", "top_k")}
    given_settings = {name: value for name, value in typed.items() if value is not None}
    try:
        config = read_table(SampleConfig, {**vars(trained.sample), **given_settings}, "sample")
    except RecipeError as error:
        raise Refused(str(error)) from error
    seed = trained.seed if given.seed is None else given.seed
    if not 0 <= seed <= MOST_SEED:
        raise Refused(f"--seed {seed} is not between 0 and {MOST_SEED:,}")
    top_p = 1.0 if given.top_p is None else given.top_p
    if not 0.0 < top_p <= 1.0:
        raise Refused(f"--top-p {top_p} is not above 0 and at most 1")
    if given.stop == "":
        raise Refused("--stop is empty; give it the text that ends a sample")
    ids, longest = encode(given.prompt, trained.tokenizer), len((given.stop or "").encode("utf-8", "surrogatepass"))

    def ends_with_stop(text: Sequence[int]) -> bool:
        """Return whether the stop text is in the new text's end; it has at most as many tokens as bytes."""
        end = list(text[max(len(ids), len(text) - longest) :])
        return given.stop is not None and given.stop in trained.tokenizer.decode(end)

    assert isinstance(trained.model, GPT)
    (written,) = generate(trained.model, [ids], config, seeds=[seed], top_p=top_p, is_over=ends_with_stop)
    text = trained.tokenizer.decode(written[len(ids) :])
    made = {"prompt": given.prompt, "text": text, "step": trained.step, "seed": seed}
    made |= {"tokens": len(written) - len(ids), "temperature": config.temperature, "top_k": config.top_k}
    if given.stop is not None:
        made["text"], found, _ = text.partition(given.stop)
        made["stopped"] = bool(found)
    return made | ({} if given.top_p is None else {"top_p": top_p})


def _given(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.generate", description="Continue a text, or translate it.")
    parser.add_argument("checkpoint", type=Path, help="a run's out folder, or one NNNNNN.model.safetensors in it")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="where data.json and vocab.json are")
    parser.add_argument("--recipe", type=Path, metavar="JSON", help="a recipe to use in place of the checkpoint's")
    parser.add_argument("--prompt", required=True, help="what to continue, or to translate")
    parser.add_argument("--tokens", type=int, help="how many tokens to write; the recipe's number by default")
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest token; default: the recipe's")
    parser.add_argument("--top-k", type=int, help="draw among this many tokens; 0: all; default: the recipe's")
    parser.add_argument("--top-p", type=float, help="draw among the fewest tokens that reach this probability; 1: all")
    parser.add_argument("--stop", help="a text that ends the sample, and is not shown")
    parser.add_argument("--seed", type=int, help="the same seed, the same text; the recipe's by default")
    parser.add_argument("--beams", type=int, help="for translations; 1 is greedy search; default: the recipe's")
    parser.add_argument("--length-penalty", type=float, help="for translations, an exponent; default: the recipe's")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON line; return the exit code."""
    try:
        print(json.dumps(_do(_given(arguments))), flush=True)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return refusal.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m trainer.translation --out OUT --data DATA`: how well a run's newest checkpoint translates held-out text.

Prints one JSON line; exit code 2 if the checkpoint or the data are refused, or sacrebleu is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.distributed import Processes
from trainer.errors import Refused
from trainer.recipe import parse_recipe
from trainer.recipe_file import completed
from trainer.run_checkpoint import open_run_checkpoint
from trainer.shards import open_data
from trainer.translation.bleu import corpus_bleu
from trainer.translation.task import TranslationTask

__all__ = ["main", "measure"]


def measure(
    out: Path, data_folder: Path, *, pairs: int = 0, beams: int | None = None, alpha: float | None = None
) -> dict[str, Any]:
    """Return BLEU and the share of exact translations over `pairs` held-out pairs (0: all), and how they were computed.

    Without `beams` and `alpha`, the search is that of the recipe's samples.
    """
    opened = open_run_checkpoint(out)
    try:
        recipe, step = parse_recipe(completed(opened.state["recipe"])), opened.state["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{opened.weights.name} has no valid state beside it: {error}") from error
    data = open_data(data_folder, recipe.data.tokenizer, ())
    if opened.state["data"] != data.identity():
        raise Refused(f"the checkpoint of step {step} was trained on other data than that in {data_folder}")
    task = TranslationTask.open(recipe, data_folder, data, 1, Processes())
    tensors = opened.tensors(lambda: task.build_model(recipe))
    model = task.build_model(recipe)
    model.load_state_dict(tensors)
    beams = recipe.sample.beams if beams is None else beams
    alpha = recipe.sample.length_penalty if alpha is None else alpha
    translations, references = task.translate_held_out(model, pairs or len(task.val), beams=beams, alpha=alpha)
    exact = sum(one == other for one, other in zip(translations, references, strict=True)) / len(references)
    bleu = corpus_bleu(translations, references)
    how = {"step": step, "pairs": len(references), "beams": beams, "length_penalty": alpha}
    return {"v": 1, "bleu": bleu.score, "signature": bleu.signature, "exact": exact, **how}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.translation", description="Score a run's translations.")
    parser.add_argument("--out", type=Path, required=True, help="a run's out folder, or one file of weights in it")
    parser.add_argument("--data", type=Path, required=True, help="the folder with the shards and data.json")
    parser.add_argument("--pairs", type=int, default=0, help="how many held-out pairs to translate (0: all)")
    parser.add_argument("--beams", type=int, help="1 is greedy search; default: the recipe's number")
    parser.add_argument("--length-penalty", type=float, help="the exponent of Wu et al. 2016; default: the recipe's")
    given = parser.parse_args(argv)
    try:
        if (given.beams is not None and given.beams < 1) or given.pairs < 0:
            raise Refused(f"--beams {given.beams} and --pairs {given.pairs}: they must be at least 1 and 0")
        found = measure(given.out, given.data, pairs=given.pairs, beams=given.beams, alpha=given.length_penalty)
    except Refused as refused:
        print(str(refused), file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

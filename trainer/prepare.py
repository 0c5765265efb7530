"""Turns a text file into shards without gpurun: `python -m trainer.prepare TEXT --recipe RECIPE --out DIR`.

Documents are separated by `<|endoftext|>`. The last ones are held out; of a single document, its end. The other
features of `gpurun data prepare` (folders, rows, duplicates, many cores, resuming) are not available here. Exit codes:
0 written, 2 refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from trainer.errors import Refused
from trainer.recipe_file import add_recipe_words, read_recipe
from trainer.shards import ShardWriter, manifest_of, write_json
from trainer.tokenizer import (
    GPT2_EOT,
    CharTokenizer,
    TextTokenizer,
    count_characters,
    cut_for_encoding,
    load_gpt2,
    vocabulary_json,
)


def write_data_folder(text: str, name: str, val_fraction: float, prompts: tuple[str, ...], out: Path) -> dict[str, int]:
    """Write a data folder (docs/FORMATS.md) into the new folder `out`; return the tokens of each split."""
    documents = [part for part in text.split(GPT2_EOT.decode()) if part.strip()]
    if len(documents) == 1:
        place = text.rfind("\n", 0, int(len(text) * (1 - val_fraction))) + 1 or int(len(text) * (1 - val_fraction))
        documents = [text[:place], text[place:]]
    if name not in ("char", "gpt2"):
        raise Refused(f"{name} needs gpurun data prepare; this command knows char and gpt2")
    tokenizer: TextTokenizer = (
        load_gpt2(print) if name == "gpt2" else CharTokenizer.from_character_counts(count_characters([text]))
    )
    held_out = max(1, round(len(documents) * val_fraction))
    splits = {"train": documents[:-held_out], "val": documents[-held_out:]}
    if not all("".join(parts) for parts in splits.values()):
        raise Refused("the text is too short to hold out a part and train on the rest")
    out.mkdir(parents=True)
    shards, tokens = {}, {}
    for split, parts in splits.items():
        with ShardWriter(out, split) as writer:
            for part in parts:
                if tokenizer.eot_id is not None:
                    writer.write(np.array([tokenizer.eot_id], dtype=np.uint16))
                for ids in tokenizer.encode([*cut_for_encoding(part)]):
                    writer.write(ids)
        shards[split], tokens[split] = writer.entries, writer.tokens
    write_json(out / "vocab.json", vocabulary_json(name, tokenizer.tokens))
    rows = zip(prompts, tokenizer.encode(prompts), strict=True)
    write_json(out / "prompts.json", [{"text": prompt, "ids": ids.tolist()} for prompt, ids in rows])
    source = {"kind": "file", "documents": len(documents), "bytes": len(text.encode())}
    write_json(out / "data.json", manifest_of(name, tokenizer.tokens, tokenizer.eot_id, source, shards))
    return tokens


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare", description="A text file in, shards out.")
    parser.add_argument("text", type=Path, help="a UTF-8 text file")
    add_recipe_words(parser)  # For its tokeniser, val_fraction and prompts.
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    given = parser.parse_args()
    try:
        recipe = read_recipe(given.recipe, overrides=given.overrides, rehearse=given.rehearse)
        data, prompts = recipe.data, recipe.sample.prompts
        print(
            write_data_folder(
                given.text.read_text("utf-8"), data.tokenizer, data.val_fraction, tuple(prompts), given.out
            )
        )
    except (Refused, OSError, ValueError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

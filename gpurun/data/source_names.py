"""The names that a text may go by instead of a path."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import page

STDLIB, HUB = "stdlib", "hf:"
BUILT_IN_PAIRS = ("copy", "english-german")
"""Sentence pairs that are made here: random letters to repeat, and 20,000 sentences by rule."""
YOUR_TEXT = "your-text"
"""What a recipe says that is made for a text of its user's."""
BUILT_IN = (STDLIB, *BUILT_IN_PAIRS)
"""Sources that need no --data: text and parallel texts that are found or made here."""
ON_THE_HUB = {
    "fineweb-edu-10b": "hf:HuggingFaceFW/fineweb-edu/sample/10BT",
    "fineweb-10b": "hf:HuggingFaceFW/fineweb/sample/10BT",
    "fineweb-100b": "hf:HuggingFaceFW/fineweb/sample/100BT",
    "climbmix-12b": "hf:karpathy/climbmix-400b-shuffle/shard_00[01]*",
}
"""Where the texts of the bundled recipes are to be had."""
PUBLIC_SHARDS = {
    "fineweb-edu-10b": "hf:kjj0/finewebedu10B-gpt2",
    "fineweb-10b": "hf:kjj0/fineweb10B-gpt2@889765ea1f903759787add96995d81171b632d0c",
}
"""Where ready shards of them are, in llm.c's format: what a recipe trains on where no --data is given."""
PUBLIC = re.compile(r"hf:.*|.*\.toml")
"""What --data names where the machine is to download it: a set of the hub, or a list of addresses."""


def demand_public_name(data: str) -> None:
    """Refuse what begins as a set of the hub and names none."""
    if data.startswith(HUB) and not re.fullmatch(r"hf:[\w.-]+(/[\w.-]+)+(@[\w./-]+)?", data):
        what = f"{data} does not name a data set of the hub."
        raise UsageError("usage.hub_name", what, hint="Write hf:OWNER/NAME, or hf:OWNER/NAME@REVISION.")


def missing_shards(source: str, recipe: str = "RECIPE") -> UsageError:
    """The recipe wants shards that are nowhere; a path is told where paths go."""
    hint = (
        f"Make the shards once, on this machine: gpurun data prepare {recipe} --out DIR; then add --data DIR. "
        f"To try the recipe now, add --dry-run. More of that: {page('DATA.md')}"
    )
    if source == YOUR_TEXT:
        hint = "The text is yours: add --data text.txt, of 230 characters or more. To try the recipe now: --dry-run."
    if any(Path(part).expanduser().exists() for part in source.split(",")):
        hint = f"data.source is a name; a text or shards of your own are named by --data {shlex.quote(source)}."
    return UsageError("data.missing", f"The recipe trains on {source}, and no --data was given.", hint=hint)

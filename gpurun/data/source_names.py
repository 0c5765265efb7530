"""Defines the names that can be given instead of the path of a text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import page

STDLIB, HUB = "stdlib", "hf:"
BUILT_IN_PAIRS = ("copy", "english-german")
"""Sentence pairs that gpurun generates: random letters to copy, and 20,000 sentences made by rules."""
YOUR_TEXT = "your-text"
"""The source name of a recipe that trains on the user's own text."""
BUILT_IN = (STDLIB, *BUILT_IN_PAIRS)
"""Sources that do not need --data, because they come with Python or are generated."""
ON_THE_HUB = {
    "fineweb-edu-10b": "hf:HuggingFaceFW/fineweb-edu/sample/10BT",
    "fineweb-10b": "hf:HuggingFaceFW/fineweb/sample/10BT",
    "fineweb-100b": "hf:HuggingFaceFW/fineweb/sample/100BT",
    "climbmix-12b": "hf:karpathy/climbmix-400b-shuffle/shard_00[01]*",
}
"""Where to get the texts of the bundled recipes."""
PUBLIC_SHARDS = {
    "fineweb-edu-10b": "hf:kjj0/finewebedu10B-gpt2",
    "fineweb-10b": "hf:kjj0/fineweb10B-gpt2@889765ea1f903759787add96995d81171b632d0c",
}
"""Where to get ready-made shards of these texts, in llm.c's format; a recipe uses them if there is no --data."""
PUBLIC = re.compile(r"hf:.*|.*\.toml")
"""Values of --data that the machine downloads: a data set of the hub, or a list of addresses."""


def require_public_name(data: str) -> None:
    """Raise UsageError for a value that begins like the name of a data set of the hub, but is not a valid name."""
    if data.startswith(HUB) and not re.fullmatch(r"hf:[\w.-]+(/[\w.-]+)+(@[\w./-]+)?", data):
        what = f"{data} does not name a data set of the hub."
        raise UsageError("usage.hub_name", what, hint="Write hf:OWNER/NAME, or hf:OWNER/NAME@REVISION.")


def missing_shards(source: str, recipe: str = "RECIPE") -> UsageError:
    """Return the error for a recipe whose shards are missing; if its source is a path, the hint says to use --data."""
    hint = (
        f"Make the shards once, on this machine: gpurun data prepare {recipe} --out DIR; then add --data DIR. "
        f"To try the recipe now, add --dry-run. More: {page('DATA.md')}"
    )
    if source == YOUR_TEXT:
        hint = "It trains on your own text: add --data text.txt, of 230 characters or more. To try it now: --dry-run."
    if any(Path(part).expanduser().exists() for part in source.split(",")):
        hint = f"data.source must be a name; give the path of your text or shards with --data {shlex.quote(source)}."
    return UsageError("data.missing", f"The recipe trains on {source}, and no --data was given.", hint=hint)

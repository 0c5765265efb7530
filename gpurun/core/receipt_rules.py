"""By which rules a receipt was made, which of its keys are words for people, and what is read before it is checked.

The rules are how figures, codes and fields follow from a run folder. Whoever changes what follows raises RULES: a
receipt of other rules is no forgery, and is held by what no rule changes (ledger/audit/other_rules.py). Words may
change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RULES = 4
"""The rules of this gpurun; a run that was opened without any has 1."""
TENSORS_READ = 3
"""Since these rules the weights that came home are safetensors."""
CAP_BROKEN_WHERE_SEEN = 4
"""Since these rules a cap is called broken only where the cost of what was seen is over it, whatever its bound is."""
WORDS = frozenset({
    "predicate.cost.says",
    "predicate.verdict.says",
    "predicate.verdict.not_shown",
    "predicate.training.message",
    "predicate.training.failed_step.message",
    "predicate.training.warnings.lines",
    "predicate.incidents[].message",
    "predicate.legs[].why",
})  # fmt: skip
"""Every key of a statement that holds sentences; a code, a field or a figure beside it says the same."""


def rules_of(opened: Mapping[str, Any]) -> int:
    """Return the rules that a run was opened by, or that a receipt names; a ValueError for what cannot be rules."""
    rules = opened.get("rules", 1)
    if type(rules) is not int or rules < 1:
        raise ValueError(f"{rules!r} are no rules")
    return rules


def trainer_told(told: Any) -> str:
    """`official trainer 0.1.0`, or `changed trainer, sha256 …` whole; "" where a receipt is too old to say.

    `told` is a receipt's predicate, which the audit reads before it is known to be one.
    """
    words = str(told["asked"].get("trainer", ""))
    return f"{words}, sha256 {told['digests']['trainer']}" if words.startswith("changed") else words

"""The rules by which a receipt was made, its keys that hold sentences, and what is read before it is checked.

The rules define how figures, codes and fields follow from a run folder. A change to that must raise RULES: a
receipt by other rules is not a forgery, and is checked only for what no rule changes (ledger/audit/other_rules.py).
Sentences may change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RULES = 5
"""The rules of this gpurun; a run that was opened without a rules number has 1."""
TENSORS_READ = 3
"""From these rules on, downloaded weights are safetensors."""
CAP_BROKEN_WHERE_SEEN = 4
"""From these rules on, a cap counts as broken only if the observed cost exceeds it, whatever the upper bound is."""
END_BY_MACHINE_CLOCK = 5
"""From these rules on, a job that ended long before its end was seen here has its time by the machine's clock, too.

The time of a run that moved is that of all its machines, and its timeline begins with the first one.
"""
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
"""Every key of a statement that holds sentences; a code, a field or a figure beside it has the same meaning."""


def rules_of(opened: Mapping[str, Any]) -> int:
    """Return the rules number of an opening record or a receipt; ValueError if it cannot be one."""
    rules = opened.get("rules", 1)
    if type(rules) is not int or rules < 1:
        raise ValueError(f"{rules!r} is not a rules number")
    return rules


def stated_trainer(predicate: Any) -> str:
    """Return `official trainer 0.1.0`, or `changed trainer, sha256 …` in full; "" if a receipt is too old to say.

    `predicate` is a receipt's predicate, which the audit reads before it has been validated.
    """
    words = str(predicate["asked"].get("trainer", ""))
    return f"{words}, sha256 {predicate['digests']['trainer']}" if words.startswith("changed") else words

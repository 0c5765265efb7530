"""The version of the rules by which a receipt is made, and the keys of a receipt that contain sentences.

The rules define how figures, codes and fields follow from a run folder. A change to them must raise RULES. A receipt by
other rules is not a forgery: it is checked only for what no rules change (ledger/audit/other_rules.py). Sentences may
change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RULES = 5
"""The version of this gpurun; a run that was opened without a version has 1."""
TENSORS_READ = 3
"""From this version on, downloaded weights are safetensors, and the audit checks that."""
CAP_BROKEN_WHERE_SEEN = 4
"""From this version on, a cap counts as broken only if the certain cost exceeds it, whatever the upper bound is."""
END_BY_MACHINE_CLOCK = 5
"""From this version on, a receipt also has the job's time by the machine's clock, if the end was observed late.

The training time of a run that moved is added up over all its machines, and its timeline begins with the first.
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
"""Every key of a statement that contains sentences for people; a code, field or figure beside it has the meaning."""


def rules_of(opened: Mapping[str, Any]) -> int:
    """Return the rules version in the data of `run.opened` or in a receipt's predicate; ValueError if it is invalid."""
    rules = opened.get("rules", 1)
    if type(rules) is not int or rules < 1:
        raise ValueError(f"{rules!r} is not a rules number")
    return rules


def stated_trainer(predicate: Any) -> str:
    """Return `official trainer 0.1.0`, or `changed trainer, sha256 …` in full; "" if an old receipt does not state it.

    `predicate` is a receipt's predicate, which the audit reads before it has been validated.
    """
    words = str(predicate["asked"].get("trainer", ""))
    return f"{words}, sha256 {predicate['digests']['trainer']}" if words.startswith("changed") else words

"""Tests that a receipt and the audit, which compute the same figures with separate code, never differ.

Only one of them once rounded its seconds, so every run with a risen price was called a forgery.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.journal_records import Record
from gpurun.core.paths import RunFolder
from gpurun.core.receipt_rules import RULES
from gpurun.ledger.audit.compare import find_differences
from gpurun.ledger.audit.other_rules import broken_by_any_rules
from gpurun.ledger.audit.rentals import measured_micros, money_and_death
from gpurun.ledger.rental import rentals_of
from gpurun.ledger.statement import build_statement
from tests.unit.drawn_journals import DrawnJournal

SEEN = (
    "price_rose",
    "extras",
    "its own timer",
    "provider-reported",
    "unseen",
    "measured",
    "not_proven",
    "refused",
    "the provider's bill",
    "billed",
)


def journal(seed: int, rules: int = RULES) -> list[Record]:
    return [Record.model_validate(record) for record in DrawnJournal(seed, rules).records]


def unlike(seed: int, folder: RunFolder, rules: int = RULES) -> list[str]:
    """Return the differences between receipt and audit for a random journal, and the rules that the receipt breaks."""
    records = journal(seed, rules)
    made = build_statement(folder, records, head="", seq=1, prev="", keyid=None)
    found = list(find_differences(money_and_death(records), made["predicate"], "predicate", keys="expected"))
    found += broken_by_any_rules({**made}, {**made}, records)
    spent = sum(rental.micros for rental in rentals_of(records))
    return found + ([] if measured_micros(records) == spent else ["what it has cost so far"])


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 10_000), marks=pytest.mark.slow)], ids=["300", "10,000"]
)
def test_both_say_the_same_of_every_drawn_journal(seeds: range, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    found = {seed: paths for seed in seeds if (paths := unlike(seed, folder))}
    assert found == {}


def test_both_keep_to_the_rules_by_which_a_run_was_opened(tmp_path: Path) -> None:
    assert [seed for seed in range(300) if unlike(seed, RunFolder(tmp_path), rules=3)] == []
    before, now = (
        [money_and_death(journal(seed, rules))["cost"]["cap_kept"] for seed in range(300)] for rules in (3, 4)
    )
    changed = {both for both in zip(before, now, strict=True) if both[0] is not both[1]}
    assert {*before} == {*now} == {True, False, None}
    assert changed == {(False, None), (None, False)}


def test_the_drawn_journals_have_all_that_bears_on_money(tmp_path: Path) -> None:
    """If the random journals lacked one of these cases, the comparison would prove nothing about it."""
    text = str([money_and_death(journal(seed)) for seed in range(300)])
    assert [word for word in SEEN if word not in text] == []

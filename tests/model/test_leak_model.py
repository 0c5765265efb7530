"""Tests of the exhaustive model: no order of events leaks a machine, and no rule can be dropped without a leak."""

from __future__ import annotations

import pytest

from gpurun.core.journal_records import Event
from tests.model.leak_model import BROKEN, MOST_STATES, Rules, search


def test_no_order_of_events_that_keeps_the_rules_leaks_a_machine() -> None:
    states, trace = search(Rules())
    assert trace is None, "\n".join(trace or ())
    assert 10_000 < states <= MOST_STATES, "it explores neither next to nothing nor without end"


@pytest.mark.parametrize("rules", BROKEN.values(), ids=list(BROKEN))
def test_whoever_breaks_a_rule_leaks(rules: Rules) -> None:
    _, trace = search(rules)
    assert trace, "a rule that can be broken for nothing is no rule"
    assert any("create makes" in label for label in trace), "a leak is a machine that was really made"


def test_the_model_speaks_the_journals_words() -> None:
    words = {
        label.split()[0].rstrip(":") for rules in BROKEN.values() for label in search(rules)[1] or () if "." in label
    }
    assert words <= {str(event) for event in Event}

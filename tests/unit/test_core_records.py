"""Tests of the byte form from which digests are computed: every text has one, even invalid Unicode."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gpurun.core.records import canonical

texts = st.text(st.characters(codec="utf-8") | st.just("\ud800"))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
)


@given(anything)
def test_canonical_bytes_are_json_of_the_same_value(value: object) -> None:
    assert json.loads(canonical({"": value}).decode()) == {"": value}


def test_half_of_a_surrogate_pair_is_kept_as_its_escape() -> None:
    assert canonical({"name": "\ud800é"}) == '{"name":"\\ud800é"}'.encode()

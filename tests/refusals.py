"""Checks of a text (names, figures and flags) and of a refusal (its class and code).

Only `golden/` compares whole sentences, so that better wording does not break other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def lacking(text: str, *named: str) -> list[str]:
    """Return which of these names and figures a text does not contain."""
    return [word for word in named if word not in text]


@contextmanager
def refusal(kind: type[Exception], code: str, *named: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this class and code; its text or hint must contain each of these names and figures."""
    with pytest.raises(kind) as caught:
        yield caught
    text = f"{caught.value}\n{getattr(caught.value, 'hint', '')}"
    assert (getattr(caught.value, "code", None), lacking(text, *named)) == (code, []), text

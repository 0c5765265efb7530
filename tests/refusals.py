"""What a test expects of a text: names, figures and flags, and of a refusal its class and code.

The sentence around them is held in `golden/`, if anywhere: a better one is no other fact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def lacking(text: str, *named: str) -> list[str]:
    """Return which of these names and figures a text does not have."""
    return [word for word in named if word not in text]


@contextmanager
def refusal(kind: type[Exception], code: str, *named: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this class and code, whose text or hint has each of these names and figures."""
    with pytest.raises(kind) as caught:
        yield caught
    text = f"{caught.value}\n{getattr(caught.value, 'hint', '')}"
    assert (getattr(caught.value, "code", None), lacking(text, *named)) == (code, []), text

"""How a test says which refusal it expects: by its class and code, and by the names and figures that it carries.

Its sentence is held in `golden/`, if anywhere: a better one is no other refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refusal(kind: type[Exception], code: str, *named: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this class and code, whose text or hint has each of these names and figures."""
    with pytest.raises(kind) as caught:
        yield caught
    text = f"{caught.value}\n{getattr(caught.value, 'hint', '')}"
    assert (getattr(caught.value, "code", None), [word for word in named if word not in text]) == (code, []), text

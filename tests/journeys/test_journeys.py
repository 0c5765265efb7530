"""Tests that no journey of docs/dev/ARCHITECTURE.md enters more files than its budget."""

from __future__ import annotations

import pytest

from tests.emulators import sshd
from tests.journeys.journeys import BUDGETS, files_of


@pytest.mark.xdist_group("journeys")
@pytest.mark.parametrize("name", ["plan", "create", "upload", "training", "download", "receipt", "run", "close"])
def test_a_journey_enters_no_more_files_than_its_budget(name: str) -> None:
    if name == "upload" and sshd.missing():
        pytest.skip(sshd.missing())
    assert len(files_of(name)) <= BUDGETS[name], files_of(name)

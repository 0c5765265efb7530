"""A fixture that records syncs and renames, for test_syncs.py and other tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each sync ("file" or "folder") and each rename ("name")."""
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append("folder" if path.is_dir() else "file")
        real_fsync(descriptor)

    def replace(source: str, target: str) -> None:
        steps.append("name")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return steps


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files are read from /proc")

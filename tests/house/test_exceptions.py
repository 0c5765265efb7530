"""Tests that no exception is swallowed."""

from __future__ import annotations

import ast

from house_sources import sources


def test_nobody_swallows_an_exception() -> None:
    """A handler for all exceptions must do more than `pass`."""
    hiding = []
    for source in sources("gpurun", "trainer"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                passes = all(isinstance(step, ast.Pass) for step in node.body)
                hiding += [source.at(node)] if caught in ("", "BaseException", "Exception") and passes else []
    assert not hiding, "\n".join(hiding)

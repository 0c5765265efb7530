"""Tests that only `core/paths.py` opens files of a home, because one may be a pipe, a device or endless."""

from __future__ import annotations

import ast

from house_sources import sources

ROOMS = ("gpurun/core/", "gpurun/ledger/", "gpurun/cli/", "gpurun/readers/", "gpurun/lifecycle/artifacts/")
# Modules that read files of the system, of gpurun itself, or that the user names on the command line.
OTHERS = {"clock", "waiting", "credentials", "options", "audit", "recipe_checks", "notebook_file", "help"}


def test_what_lies_in_a_home_is_read_by_one_function() -> None:
    found = [
        source.at(node)
        for source in sources("gpurun")
        if source.path.startswith(ROOMS) and source.path.split("/")[-1].removesuffix(".py") not in OTHERS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("read_bytes", "read_text")
        or (node.func.attr == "open" and any(ast.unparse(word) == "'rb'" for word in node.args))
    ]
    assert not found, "\n".join(found)

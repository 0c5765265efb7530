"""Tests that every import names an existing module, and that no test module imports another."""

from __future__ import annotations

import re

from house_sources import imports, sources


def test_every_import_names_a_module_that_there_is() -> None:
    """Many imports stand in functions, for a fast start; a wrong one would fail only when its function runs."""
    files = sources("gpurun", "trainer")
    modules = {source.module for source in files}
    missing = [
        f"{source.at(node)}: {name}"
        for source in files
        for node, name in imports(source)
        if name.startswith(("gpurun.", "trainer.")) and not {name, name.rpartition(".")[0]} & modules
    ]
    assert not missing, "\n".join(missing)


def test_no_test_module_imports_another() -> None:
    line = re.compile(r"^\s*(from|import) tests\.[a-z_.]*\btest_\w+", re.MULTILINE)
    crossed = [
        f"{source.path}: {found[0].strip()}" for source in sources("tests") for found in line.finditer(source.text)
    ]
    assert not crossed, "\n".join(crossed)

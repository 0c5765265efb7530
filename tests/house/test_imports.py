"""What is imported is there."""

from __future__ import annotations

import re

from house_sources import imports, sources


def test_every_import_names_a_module_that_there_is() -> None:
    """Many stand in functions, so that a command starts fast: nothing else would look at them before they are run."""
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

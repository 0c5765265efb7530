"""Tests that only one room each prints, reads the clock or appends to the journal."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from house_sources import Source, imports, sources

FAR_SIDE = "gpurun/remote/agent/"


def here(*apart: str) -> Iterator[tuple[Source, ast.AST]]:
    """Yield every node of gpurun outside the agent and some files or folders."""
    for source in sources("gpurun"):
        if not source.path.startswith((FAR_SIDE, *apart)):
            yield from ((source, node) for node in ast.walk(source.tree))


def test_only_view_and_cli_print() -> None:
    voices = ("print", "typer.echo", "typer.secho", "click.echo", "pprint.pprint", "sys.stdout.write")
    loud = [
        source.at(node)
        for source, node in here("gpurun/view/", "gpurun/cli/")
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in voices)
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.__stdout__"))
    ]
    assert not loud, "\n".join(loud)


def test_only_the_clock_reads_time_or_sleeps() -> None:
    reading = ("datetime.now", "datetime.utcnow", "datetime.today", "date.today", "asyncio.sleep", "os.times")
    found = [
        source.at(node)
        for source, node in here("gpurun/core/clock.py")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(reading)
    ]
    found += [
        f"{source.at(node)} imports {name}"
        for source in sources("gpurun")
        if not source.path.startswith((FAR_SIDE, "gpurun/core/clock.py"))
        for node, name in imports(source)
        if name.split(".")[0] == "time"
    ]
    assert not found, "\n".join(found)


def test_only_the_driver_appends_to_the_journal() -> None:
    writers = {
        source.path
        for source, node in here("gpurun/ledger/")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "write")
        if "journal" in ast.unparse(node.func.value).lower()
    }
    imported = "gpurun/readers/imported_run.py"  # It writes the journal of a run without a driver.
    assert writers == {"gpurun/lifecycle/driver.py", imported}

"""Tests that imports go down the floors without a circle, and that rooms of one floor do not import one another."""

from __future__ import annotations

from graphlib import TopologicalSorter

from house_sources import imports, sources

FLOORS = {"cli": 7, "readers": 6, "lifecycle": 5, "planning": 4, "jobs": 3, "view": 2, "core": 0} | dict.fromkeys(
    ("providers", "remote", "data", "ledger"), 1
)
DOORS = {("gpurun.__main__", "gpurun.cli.app.main"), ("gpurun", "gpurun.readers.loaded_run")}
"""The modules outside all rooms, `python -m gpurun` and `import gpurun`, each with the one import that it may make."""


def test_there_is_no_room_without_a_floor() -> None:
    assert {source.room for source in sources("gpurun")} - {""} <= set(FLOORS)


def test_imports_go_down_a_floor_or_stay_in_their_room() -> None:
    wrong = []
    for source in sources("gpurun"):
        for node, name in imports(source):
            top, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if top != "gpurun" or room in ("", "__version__", source.room) or (source.module, name) in DOORS:
                continue
            if not source.room or room not in FLOORS or FLOORS[room] >= FLOORS[source.room]:
                wrong.append(f"{source.at(node)}: {source.room} may not import {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_that_is_installed_needs_the_tests() -> None:
    found = [
        f"{source.at(node)}: {name}"
        for source in sources("gpurun", "trainer")
        for node, name in imports(source)
        if name.partition(".")[0] == "tests"
    ]
    assert not found, "\n".join(found)


def test_only_the_driver_knows_the_steps() -> None:
    known = [
        f"{source.at(node)}: {name}"
        for source in sources("gpurun")
        for node, name in imports(source)
        if name.startswith("gpurun.lifecycle.steps.") and source.path != "gpurun/lifecycle/driver.py"
    ]
    assert not known, "\n".join(known)


def test_no_circle() -> None:
    modules = {source.module for source in sources("gpurun", "trainer")}
    graph = {
        source.module: {
            target
            for _, name in imports(source)
            for target in (name, name.rpartition(".")[0])
            if target in modules
            and target not in ("gpurun", source.module)
            and not source.module.startswith(f"{target}.")
        }
        for source in sources("gpurun", "trainer")
    }
    TopologicalSorter(graph).prepare()  # A CycleError names the circle.

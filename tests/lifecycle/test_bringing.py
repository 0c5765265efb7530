"""What comes home at the end, in which order, and around what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import CollectFailed, ExitCode
from gpurun.core.paths import Home
from gpurun.core.progress import Event
from gpurun.lifecycle.home.at_home import remember
from gpurun.lifecycle.home.worth import spare, wanted
from gpurun.machine.answers import Best, Manifest, ManifestFile
from tests.lifecycle.scripted_cloud import SPARE, WEIGHTS, World
from tests.lifecycle.test_faults import kept, receipt_of

BEST, LATEST, OPTIMIZER = (name for name, _, _ in WEIGHTS)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def fetched(world: World) -> list[str]:
    """The names of the files that are asked for from now on, in this order, each once."""
    names, passing = list[str](), world.cloud.passing

    def hear(place: str) -> None:
        name = place.removeprefix("before far.get ")
        if name != place and name not in names:
            names.append(name)
        passing(place)

    world.cloud.passing = hear
    return names


def collected(world: World) -> dict[str, Any]:
    (record,) = world.all_of(Event.COLLECT_OBSERVED)
    return record


# Order


def test_the_latest_comes_first_then_the_best_and_the_one_before_stays_there(world: World) -> None:
    names = fetched(world)
    assert world.drive() is ExitCode.DONE
    assert names == [LATEST, OPTIMIZER, BEST]
    assert (collected(world)["missing"], collected(world)["left"]) == ([], [SPARE[0]])
    assert receipt_of(world)["checkpoint"]["missing"] == [], "it was not wanted, so nobody misses it"
    assert kept(world)


def listing(*files: tuple[str, str, int], latest: int | None, best: int | None) -> Manifest:
    found = [
        ManifestFile.model_validate({"name": name, "bytes": 1, "sha256": "0" * 64, "kind": kind, "step": step})
        for name, kind, step in files
    ]
    return Manifest(latest=latest, best=Best(step=best, val_loss=2.0) if best else None, files=tuple(found))


SEVERAL = (
    ("s1", "sample", 10), ("c", "compile_cache", 10), ("w10", "weights", 10), ("o20", "optimizer", 20),
    ("w20", "weights", 20), ("w30", "weights", 30), ("s3", "sample", 30), ("o30", "optimizer", 30),
    ("t30", "state", 30), ("t10", "state", 10),
)  # fmt: skip


@pytest.mark.parametrize(
    ("latest", "best", "order", "left"),
    [
        (30, 10, "t30 w30 o30 t10 w10 s3 c s1", "o20 w20"),
        (30, 20, "t30 w30 o30 w20 o20 s3 c s1", "w10 t10"),
        (30, 30, "t30 w30 o30 s3 c s1", "w10 o20 w20 t10"),
        (30, None, "t30 w30 o30 s3 c s1", "w10 o20 w20 t10"),
        (40, None, "s3 c s1 t30 w30 o30 w20 o20 t10 w10", ""),
        (None, None, "s3 c s1 t30 w30 o30 w20 o20 t10 w10", ""),
    ],
)
def test_what_is_worth_most_is_wanted_first(latest: int | None, best: int | None, order: str, left: str) -> None:
    """A list without the checkpoint that it calls the latest is odd: then none of the others is a mere spare."""
    manifest = listing(*SEVERAL, latest=latest, best=best)
    assert " ".join(file.name for file in wanted(manifest)) == order
    assert " ".join(file.name for file in spare(manifest)) == left


def damage(world: World, damaged: str) -> None:
    fetch = world.far.fetch

    def refusing(name: str, *rest: Any, **more: Any) -> Path:
        if name == damaged:
            raise CollectFailed("collect.wrong_digest", f"{name} came back 4 times with another digest.", hint="?")
        return fetch(name, *rest, **more)

    world.far.fetch = refusing  # type: ignore[method-assign]


def test_where_the_latest_is_damaged_the_one_before_comes_in_its_place(world: World) -> None:
    damage(world, LATEST)
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert SPARE[0] in {file["name"] for file in collected(world)["files"]}
    assert collected(world)["missing"] == [LATEST]
    assert "left" not in collected(world)
    assert kept(world)


def test_where_only_the_best_is_damaged_the_one_before_the_latest_is_no_help(world: World) -> None:
    damage(world, BEST)
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert (collected(world)["missing"], collected(world)["left"]) == ([BEST], [SPARE[0]])
    assert kept(world)


def test_what_came_home_early_of_the_one_before_is_on_record(world: World) -> None:
    (world.folder.artifacts / "checkpoints").mkdir(parents=True)
    (world.folder.artifacts / SPARE[0]).write_bytes(SPARE[1])
    assert world.drive() is ExitCode.DONE
    assert SPARE[0] in {file["name"] for file in receipt_of(world)["checkpoint"]["files"]}
    assert "left" not in collected(world)
    assert kept(world)


def test_of_a_machine_that_vanished_with_the_latest_at_home_the_one_before_is_not_missed(world: World) -> None:
    def vanish() -> None:
        if world.far.polls == 3:
            remember(world.folder, world.far.manifest(1 << 40))
            (world.folder.artifacts / "checkpoints").mkdir(parents=True)
            for name, content, _ in WEIGHTS:
                (world.folder.artifacts / name).write_bytes(content)
            world.cloud.boxes[0].died_s = world.cloud.now

    world.far.during = vanish
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert (collected(world)["missing"], collected(world)["left"]) == ([], [SPARE[0]])
    assert kept(world)

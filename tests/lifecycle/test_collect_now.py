"""Tests of `gpurun collect`: it downloads finished checkpoints during training and does not disturb the run."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from gpurun.cli import collect_checkpoints
from gpurun.cli.app import build_app
from gpurun.cli.commands.collect import collect
from gpurun.cli.run_control import find_meant_run
from gpurun.cli.session import Session
from gpurun.core.clock import SystemClock, VirtualClock
from gpurun.core.errors import CollectFailed, GpurunError, SetupError, StoreFull, UsageError, VerificationFailed
from gpurun.core.filelock import exclusive
from gpurun.core.journal_events import CollectObserved
from gpurun.core.journal_records import Event, Phase, RunState
from gpurun.core.paths import Home, RunFolder
from gpurun.core.run_plan import Choices, Plan
from gpurun.core.stop_request import ask_to_stop
from gpurun.lifecycle.artifacts import on_demand
from gpurun.lifecycle.artifacts.downloader import STUCK_S, BackgroundDownload
from gpurun.lifecycle.artifacts.inventory import Inventory
from gpurun.lifecycle.artifacts.on_demand import (
    OVER_PLAN,
    PATIENCE_S,
    UNREACHABLE,
    Brought,
    Only,
    Salvaged,
    bring_now,
    copy_out,
)
from gpurun.lifecycle.context import RETRY_S
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import Best, Manifest, ManifestFile
from gpurun.remote.resumable_file import HeldElsewhere
from tests.lifecycle.early import FREE, Instance, at_home, until
from tests.lifecycle.tiny_runs import events_of, make_run, start
from tests.refusals import lacking, refusal
from tests.unit.ledger_samples import WEIGHTS
from tests.unit.report_samples import finished_run, opened_run


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path / "instance")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def nobody(file: ManifestFile, have_bytes: int) -> None:
    """Ignore the progress."""


def bring(instance: Instance, folder: RunFolder, only: Only) -> Brought:
    return bring_now(instance.far, folder, only, VirtualClock(), nobody, FREE)


@pytest.mark.slow
def test_the_newest_comes_home_while_training_continues(own: Home) -> None:
    folder, session = make_run(own, steps=500, step_s=0.1), Session(home=own, quiet=True)
    child = start(own)
    try:

        def brought() -> Any:
            try:
                return collect(session, "fox-41", only="last")
            except UsageError:  # Nothing is finished yet.
                return None

        until(lambda: (folder.journal.exists() and brought()) or child.poll() is not None)
        collected = collect(session, "fox-41", only="all")
        assert collected.data["here"][0]["step"] == collected.data["latest"]
        assert {file["name"] for file in collected.data["here"]} <= at_home(folder)
        assert collected.data["not_here"] == []
        before = folder.events.stat().st_size
        until(lambda: folder.events.stat().st_size > before)
        assert "collect.intended" not in events_of(folder), "the supervisor has not heard of it"
    finally:
        ask_to_stop(folder, "now", by="user", reason="the test is over")
        child.communicate(timeout=60)
    assert child.returncode is not None
    assert "collect.observed" in events_of(folder), "and its own collect goes on as ever"


def untouched(path: Path) -> tuple[int, int, int]:
    """Return a file's inode and two of its timestamps, which a write changes and a read does not."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def test_only_requested_files_come_home_and_the_rest_are_named(instance: Instance, folder: RunFolder) -> None:
    names = instance.save(10, 20, 30, best=20)
    assert {file.step for file in bring(instance, folder, "best").here} == {20}
    assert at_home(folder) == set(names[2:4])
    brought = bring(instance, folder, "last")
    assert at_home(folder) == set(names[2:])
    assert {file.name for file in brought.left} == set(names[:2]), "what is here by another way is not lost"
    assert bring(instance, folder, "all").left == ()
    assert at_home(folder) == set(names)


def test_of_all_files_those_that_fit_come_home(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room for all files: gpurun must download those that fit, not refuse the whole list."""
    names = instance.save(10, 20, 30, best=10)
    size_bytes = (instance.out / names[0]).stat().st_size

    def usage(_: object) -> SimpleNamespace:
        taken = sum(path.stat().st_size for path in folder.artifacts.rglob("*") if path.is_file())
        return SimpleNamespace(total=0, free=2 * size_bytes + size_bytes // 2 - taken)

    monkeypatch.setattr("gpurun.remote.download.shutil.disk_usage", usage)
    with refusal(StoreFull, "collect.disk_full", "checkpoints/000010"):
        bring(instance, folder, "all")
    assert at_home(folder) == set(names[1:])


@pytest.mark.parametrize(("only", "word"), [("best", "evaluated"), ("last", "no checkpoint"), ("all", "no file")])
def test_what_is_not_finished_yet_cannot_be_brought(
    instance: Instance, folder: RunFolder, only: Only, word: str
) -> None:
    if only == "best":
        instance.save(10)
    with pytest.raises(UsageError, match=word) as refused:
        bring(instance, folder, only)
    assert refused.value.code == "checkpoint.none"


def test_the_next_checkpoint_does_not_replace_a_requested_copy(instance: Instance, folder: RunFolder) -> None:
    first = instance.save(10)
    BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    bring(instance, folder, "last")
    second = instance.save(20)
    BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    third = instance.save(30)
    BackgroundDownload(instance.far, folder, FREE, SystemClock()).bring(instance.far)
    assert at_home(folder) == {*first, *third}
    assert not set(second) & at_home(folder)


def test_two_who_ask_at_once_lose_neither_wish(folder: RunFolder) -> None:
    Inventory(folder).keep(["one"])
    second = threading.Thread(target=Inventory(folder).keep, args=(["two"],))
    with exclusive(folder.path / ".inventory.lock"):
        second.start()
        second.join(0.2)
        assert Inventory(folder).memory.kept == ("one",), "it waits"
    second.join()
    assert Inventory(folder).memory.kept == ("one", "two")


def test_a_file_that_the_supervisor_is_bringing_is_waited_for(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.save(10)
    fetch, held = instance.far.fetch, iter([HeldElsewhere("somebody")] * 100)

    def busy(*arguments: Any, **options: Any) -> Path:
        for lost in held:
            raise lost
        return fetch(*arguments, **options)

    monkeypatch.setattr(instance.far, "fetch", busy)
    assert len(bring(instance, folder, "last").here) == 2, "for longer than a dead line would be"


def test_a_file_that_a_stopped_collect_holds_is_brought_past_it(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `gpurun collect` stopped with ^Z in another terminal keeps its file locked.

    This one must not wait for it forever.
    """
    weights, state = instance.save(10)
    held, waited = hashlib.sha256((instance.out / weights).read_bytes()).hexdigest(), list[str]()
    fetch = instance.far.fetch

    def busy(name: str, size_bytes: int, sha256: str, *rest: Any, aside: bool = False, **more: Any) -> Path:
        if sha256 == held and not aside:
            waited.append(name)
            if len(waited) > 100:
                pytest.fail("it waits for ever")
            raise HeldElsewhere("somebody")
        return fetch(name, size_bytes, sha256, *rest, aside=aside, **more)

    monkeypatch.setattr(instance.far, "fetch", busy)
    assert len(bring(instance, folder, "last").here) == 2
    assert at_home(folder) == {weights, state}
    assert len(waited) * RETRY_S >= STUCK_S


def test_a_silent_machine_is_given_up_in_a_minute_and_says_so(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()

    def lost(_: int) -> None:
        raise MachineLost("no route")

    monkeypatch.setattr(instance.far, "manifest", lost)
    with refusal(CollectFailed, "collect.unreachable"):
        bring_now(instance.far, folder, "all", clock, nobody, FREE)
    assert PATIENCE_S <= clock.monotonic() <= PATIENCE_S + 5


def test_a_file_replaced_meanwhile_is_a_refusal_to_retry(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.save(10)

    def gone(*_: Any, **__: Any) -> Path:
        raise FarRefusal("no_such_file", "it is not in the manifest")

    monkeypatch.setattr(instance.far, "fetch", gone)
    with refusal(CollectFailed, "far.no_such_file"):
        bring(instance, folder, "all")


def test_a_disk_that_takes_nothing_more_is_reported_so(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    instance.save(10)
    monkeypatch.setattr(Inventory, "remember", full)
    with refusal(CollectFailed, "collect.cannot_store", "No space left"):
        bring(instance, folder, "all")


def test_a_checkpoint_replaced_during_the_fetch_is_let_go(
    instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.save(10)
    fetch = instance.far.fetch

    def overtaken(*_: Any, **__: Any) -> Path:
        monkeypatch.setattr(instance.far, "fetch", fetch)
        instance.save(20)
        raise FarRefusal("no_such_file", "it is not in the manifest")

    monkeypatch.setattr(instance.far, "fetch", overtaken)
    assert {file.step for file in bring(instance, folder, "last").here} == {20}


# A run that is over


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(home=Home(tmp_path / "home").prepare(), quiet=True)


def test_of_a_run_that_is_over_it_says_what_is_at_home(session: Session) -> None:
    folder = finished_run(session.home, "fox-41")
    collected = collect(session, "fox-41", only="best")
    assert "step 120 (" in collected.text
    nothing = Manifest()
    with refusal(UsageError, "checkpoint.none", "fox-41"):
        on_demand.select_files(nothing, "last", "fox-41", is_over=True)
    assert [file["name"] for file in collected.data["here"]] == [WEIGHTS, "checkpoints/000120.state.json"]
    (folder.artifacts / WEIGHTS).write_bytes(b"changed since")
    with pytest.raises(VerificationFailed) as refused:
        collect(session, "fox-41", only="last")
    assert refused.value.code == "checkpoint.missing"


@pytest.mark.parametrize(
    ("key", "field"),
    [("missing", "lost"), ("left", "left")],
)
def test_after_the_end_it_names_what_was_lost_and_what_was_left(
    session: Session, monkeypatch: pytest.MonkeyPatch, key: str, field: str
) -> None:
    run, name = opened_run(session.home, "fox-41"), "checkpoints/000110.model.safetensors"
    append = run.journal.write

    def with_losses(event: Event, data: dict[str, Any]) -> Any:
        return append(event, {**data, key: [name]} if event is Event.COLLECT_OBSERVED else data)

    monkeypatch.setattr(run.journal, "write", with_losses)
    run.until_gone().settle()
    result = collect(session, "fox-41", only="all")
    assert name in result.text
    assert {word: result.data[word] for word in ("lost", "left") if result.data[word]} == {field: [name]}


@pytest.mark.parametrize(
    ("lost", "only", "expected"),
    [
        ((), "last", [30, 30]),
        (("000030.optim",), "last", [20, 20]),
        (("000030.model", "000030.optim"), "last", [20, 20]),
        (("000020.optim",), "best", ("step 20", "gpurun collect fox-41 --only last")),
        (("000020.model", "000020.optim"), "best", ("step 20", "gpurun collect fox-41 --only last")),
        (("000030.optim", "000020.model"), "last", ("fox-41", "gpurun receipt fox-41")),
        (("000030.model", "000030.optim", "000020.optim"), "all", [20]),
    ],
)
def test_after_the_end_the_newest_is_the_newest_whole_one_here(
    session: Session, lost: tuple[str, ...], only: Only, expected: list[int] | tuple[str, ...]
) -> None:
    """A checkpoint that lacks a file at home does not count after the end.

    If the best one lacks files, the refusal names its step.
    """
    kinds = {"model": "weights", "optim": "optimizer"}
    names = [f"{step:06d}.{part}" for step in (20, 30) for part in kinds]
    sha256 = hashlib.sha256(b"x").hexdigest()
    files = [
        ManifestFile(f"checkpoints/{name}.safetensors", 1, sha256, kinds[name[7:]], int(name[:6]))  # type: ignore[arg-type]
        for name in names
        if name not in lost
    ]  # fmt: skip
    finished_run(session.home, "fox-41")
    sight = find_meant_run(session, "fox-41")
    for file in files:
        (sight.folder.artifacts / file.name).write_bytes(b"x")
    collected = CollectObserved(
        files=[file.as_json() for file in files],
        missing=[f"checkpoints/{name}.safetensors" for name in lost],
        latest=30,
        best={"step": 20, "val_loss": 2.0},
    )
    if isinstance(expected, tuple):
        with refusal(UsageError, "checkpoint.none", *expected):
            collect_checkpoints._verify_downloaded(sight, only, collected)
    else:
        assert [
            file["step"] for file in collect_checkpoints._verify_downloaded(sight, only, collected).data["here"]
        ] == expected


def test_what_the_end_brings_and_what_it_leaves_are_told_apart(
    session: Session, instance: Instance, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text must separate the files that the run's end will download from those that need `--only all`."""
    pushed_run(session, monkeypatch)
    state = RunState(run="fox-41", phase=Phase.TRAINING, instance=None)
    sight = replace(find_meant_run(session, "fox-41"), folder=folder, state=state)
    texts = {}
    for only in ("last", "best", "all"):
        instance.save(10, 20, 30, best=10)
        texts[only] = collect_checkpoints._download_result(sight, only, bring(instance, folder, only)).text
    assert lacking(texts["last"], "gpurun stop", "2 files") == [], "the best one would be lost"
    assert "gpurun stop" not in texts["best"]
    assert "(checkpoints/000020.weights, checkpoints/000020.state)" in texts["best"]
    assert "--only all" in texts["best"]
    assert not any(word in texts["all"] for word in ("gpurun stop", "--only"))


# Copies in another folder


def test_what_was_asked_for_is_copied_to_a_folder_once(session: Session, tmp_path: Path) -> None:
    folder, to = finished_run(session.home, "fox-41"), tmp_path / "new" / "best"
    collected = collect(session, "fox-41", only="best", to=str(to))
    names = [WEIGHTS, "checkpoints/000120.state.json"]
    assert lacking(collected.text, str(to), "2 files") == []
    assert sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()) == names
    assert (to / WEIGHTS).read_bytes() == (folder.artifacts / WEIGHTS).read_bytes()
    (to / WEIGHTS).chmod(0o400)
    before = untouched(to / WEIGHTS)
    collect(session, "fox-41", only="best", to=str(to))
    assert untouched(to / WEIGHTS) == before, "what is there is left alone"
    (to / WEIGHTS).unlink()
    (to / WEIGHTS).symlink_to(folder.artifacts / WEIGHTS)
    with pytest.raises(UsageError) as refused:
        collect(session, "fox-41", only="best", to=str(to))
    assert refused.value.code == "collect.in_the_way", "a link is no copy"


def test_a_file_in_the_way_is_kept_and_nothing_else_is_copied(session: Session, tmp_path: Path) -> None:
    finished_run(session.home, "fox-41")
    other = tmp_path / "to" / "checkpoints" / "000120.state.json"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    with refusal(UsageError, "collect.in_the_way"):
        collect(session, "fox-41", only="best", to=str(tmp_path / "to"))
    assert [path for path in (tmp_path / "to").rglob("*") if path.is_file()] == [other]
    assert other.read_text() == "mine"
    with refusal(UsageError, "usage.to"):
        collect(session, "fox-41", only="best", to=str(other))


def test_what_is_copied_is_what_came_home_or_nothing(session: Session, tmp_path: Path) -> None:
    folder, to = finished_run(session.home, "fox-41"), tmp_path / "to"
    (fields,) = [file for file in collect(session, "fox-41", only="all").data["here"] if file["name"] == WEIGHTS]
    whole = ManifestFile(**(fields | {"sha256": "0" * 64}))
    with pytest.raises(CollectFailed) as refused:
        copy_out(folder.artifacts, [whole], to)
    assert refused.value.code == "collect.altered"
    huge = replace(whole, bytes=1 << 60)
    with refusal(CollectFailed, "collect.disk_full", "1,152,921,504,606,846,976 bytes"):
        copy_out(folder.artifacts, [huge], to)
    with refusal(CollectFailed, "collect.cannot_store", "gone.bin", "No such file"):
        copy_out(folder.artifacts, [replace(whole, name="checkpoints/gone.bin")], to)
    with refusal(CollectFailed, "collect.cannot_store", "journal.jsonl", "Not a directory"):
        copy_out(folder.artifacts, [whole], folder.journal / "below")
    assert not [path for path in to.rglob("*") if path.is_file()]


def test_two_collects_into_one_folder_do_not_spoil_each_other(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, to, sync, names = b"good" * 1000, tmp_path / "out", os.fsync, list[set[str]]()
    folder.artifacts.mkdir()
    (folder.artifacts / "a.bin").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    file = ManifestFile(name="a.bin", bytes=len(content), sha256=sha256, kind="weights", step=1)

    def another_one(descriptor: int) -> None:
        """Start a second copy once the first has written all bytes, and interrupt the second one half way."""
        monkeypatch.setattr(os, "fsync", ended)
        second = threading.Thread(target=copy_and_end)
        second.start()
        second.join()
        monkeypatch.setattr(os, "fsync", sync)
        sync(descriptor)

    def copy_and_end() -> None:
        with pytest.raises(KeyboardInterrupt):
            copy_out(folder.artifacts, [file], to)

    def ended(_: int) -> None:
        names.append({path.name for path in to.iterdir()})
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", another_one)
    copy_out(folder.artifacts, [file], to)
    assert (to / "a.bin").read_bytes() == content
    assert len(names) == 1
    assert len(names[0]) == 2, "each its own"


STAGE = "s3://bucket/prefix"


def pushed_run(session: Session, monkeypatch: pytest.MonkeyPatch, *parts: str, **collected: Any) -> RunFolder:
    """Make a run that pushes to a simulated bucket.

    `parts` name the `CloudRun` methods that write the rest of its journal; `collected` has more fields of
    `collect.observed`.
    """
    run = opened_run(session.home, "fox-41")
    plan = Plan.from_json(run.folder.plan.read_bytes())
    run.folder.plan.write_text(plan.model_copy(update={"choices": Choices(stage=STAGE)}).to_json())
    place = {event: {"pushed": "fox-41/gr"} for event in ("train.intended", "train.started")}
    append, more = run.journal.write, {**place, "collect.observed": collected}
    monkeypatch.setattr(run.journal, "write", lambda event, data: append(event, {**data, **more.get(str(event), {})}))
    run.write(run.opened(), run.intended(), run.created())
    run.play(*(getattr(run, part)() for part in parts))

    def from_bucket(folder: RunFolder, url: str, place: str, _: object, *, choose: Any, tell: Any) -> Salvaged:
        assert (folder.name, url, place) == ("fox-41", STAGE, "fox-41/gr")
        manifest = Manifest.model_validate_json(json.dumps({"latest": 120, "files": run.manifest()}))
        return Salvaged(manifest, tuple(choose(manifest)), {}, (), 1)

    monkeypatch.setattr(collect_checkpoints, "download_pushed_files", from_bucket)
    return run.folder


@pytest.mark.parametrize("collected", [{"missing": [WEIGHTS]}, {"missing": [], "remembered": True}])
def test_a_gone_machines_missing_files_come_from_the_bucket(
    session: Session, monkeypatch: pytest.MonkeyPatch, collected: dict[str, Any]
) -> None:
    """`collect` must read the bucket if files are missing, or if the machine's list was old.

    The bucket may have newer files.
    """
    pushed_run(session, monkeypatch, "through_training", "death", **collected)
    answer = collect(session, "fox-41", only="last")
    assert [file["name"] for file in answer.data["here"]][:1] == [WEIGHTS]
    assert "the bucket" in answer.text


@pytest.mark.parametrize("unheard", ["collect.intended", "train.started"])
@pytest.mark.parametrize(
    "refusal",
    [
        CollectFailed(UNREACHABLE, "The machine cannot be reached: no route", hint="Ask again."),
        UsageError(OVER_PLAN, "Each byte that leaves this machine is charged.", hint="Wait."),
    ],
)
def test_an_unreachable_machines_pushes_come_from_the_bucket(
    session: Session, monkeypatch: pytest.MonkeyPatch, refusal: GpurunError, unheard: str
) -> None:
    folder = pushed_run(session, monkeypatch, "through_training", missing=[])
    lines = folder.journal.read_bytes().splitlines(keepends=True)
    folder.journal.write_bytes(b"".join(takewhile(lambda line: f'"event":"{unheard}"'.encode() not in line, lines)))
    monkeypatch.setattr(
        collect_checkpoints, "MachineConnector", lambda *_: lambda __: SimpleNamespace(close=lambda: None)
    )

    def unreachable(*_: object) -> Brought:
        raise refusal

    monkeypatch.setattr(collect_checkpoints, "bring_now", unreachable)
    assert "the bucket" in collect(session, "fox-41", only="all").text


def older_bucket(monkeypatch: pytest.MonkeyPatch, *, is_empty: bool = False) -> ManifestFile:
    """Simulate a bucket that is empty, or whose last push was step 60 when its URLs expired; return that file."""
    old = ManifestFile(name="checkpoints/000060.safetensors", bytes=5, sha256="6" * 64, kind="weights", step=60)
    manifest = Manifest() if is_empty else Manifest(latest=60, best=Best(step=60, val_loss=9.0), files=(old,))

    def from_bucket(*_: object, choose: Any, **__: Any) -> Salvaged:
        return Salvaged(manifest, tuple(choose(manifest)) if manifest.files else (), {}, (), 1)

    monkeypatch.setattr(collect_checkpoints, "download_pushed_files", from_bucket)
    return old


@pytest.mark.parametrize("only", ["last", "best"])
def test_the_bucket_is_not_the_newest_where_home_has_a_newer(
    session: Session, monkeypatch: pytest.MonkeyPatch, only: str
) -> None:
    pushed_run(session, monkeypatch, "through_training", "death", missing=["samples/000060.txt"])
    older_bucket(monkeypatch)
    collected = collect(session, "fox-41", only=only)
    assert {file["step"] for file in collected.data["here"]} == {120}
    assert "step 120 (" in collected.text


def test_all_of_a_run_is_what_is_at_home_and_in_the_bucket(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed_run(session, monkeypatch, "through_training", "death", missing=["samples/000060.txt"])
    old = older_bucket(monkeypatch)
    collected = collect(session, "fox-41", only="all")
    assert {WEIGHTS, old.name} <= {file["name"] for file in collected.data["here"]}
    assert collected.data["latest"] == 120
    assert "step 60" in collected.text
    assert "step 120 (" in collected.text


def test_a_broken_newest_at_home_yields_to_the_buckets_older_one(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed_run(session, monkeypatch, "through_training", "death", missing=["checkpoints/000120.optimizer"])
    old = older_bucket(monkeypatch)
    assert [file["name"] for file in collect(session, "fox-41", only="last").data["here"]] == [old.name]


@pytest.mark.parametrize("is_there", [False, True], ids=["is not there any more", "was never written to"])
def test_what_came_home_is_listed_and_copied_despite_the_bucket(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    pushed_run(session, monkeypatch, "through_training", "death", missing=["samples/000060.txt"])
    older_bucket(monkeypatch, is_empty=True)
    if not is_there:

        def refused(*_: object, **__: object) -> Salvaged:
            raise SetupError("stage.no_bucket", "There is no bucket.", hint="Make it.")

        monkeypatch.setattr(collect_checkpoints, "download_pushed_files", refused)
    collected = collect(session, "fox-41", only="last", to=str(tmp_path / "to"))
    assert {file["step"] for file in collected.data["here"]} == {120}
    assert (tmp_path / "to" / WEIGHTS).exists()


def test_a_run_whose_files_were_never_collected_says_so(session: Session) -> None:
    run = opened_run(session.home, "fox-41")
    run.write(run.opened(), run.intended(), run.created())
    run.play(run.death())
    with refusal(UsageError, "checkpoint.none", "gpurun receipt fox-41"):
        collect(session, "fox-41", only="all")


def test_a_wrong_choice_is_refused_before_anything_is_looked_at(session: Session) -> None:
    with refusal(UsageError, "usage.only", "'lst'") as refused:
        collect(session, "nobody", only="lst")
    assert refused.value.hint
    words = ["collect", "fox-41", "--only", "newest", "--json", "--home", str(session.home.root)]
    done = CliRunner().invoke(build_app(), words)
    assert json.loads(done.stdout.splitlines()[-1])["errors"][0]["code"] == "usage.only"


def test_a_run_that_has_no_machine_yet_has_nothing_to_bring(session: Session) -> None:
    make_run(session.home)
    with refusal(UsageError, "checkpoint.none", "gpurun attach fox-41"):
        collect(session, "fox-41", only="all")

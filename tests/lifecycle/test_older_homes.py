"""Tests that the homes of an older gpurun (commit aed5b6b, tokens `gr-…`) can be opened, audited, ended and continued.

Each archive in `homes/` is one home as that gpurun wrote it, on RunPod's emulator: a finished run, a run whose
supervisor was killed in training, and a run whose machine lives although gpurun asked the provider to end it.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event, Record
from gpurun.core.paths import Home
from gpurun.core.records import Offer, Order
from gpurun.core.stop_request import How, ask_to_stop
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.reaper import sweep
from gpurun.lifecycle.supervisor import supervise
from gpurun.remote.client import Chunk, Poll
from tests.emulators.fake import PROFILES, Box, FakeCloud
from tests.lifecycle.drive import TINY
from tests.lifecycle.scripted_cloud import ScriptedFar

HOMES = Path(__file__).with_name("homes")
RUN = "fox-41"


class Older:
    """A home from an older gpurun, unpacked; its clock starts 30 s after the last record.

    The simulated cloud holds the machine unless the run is finished.
    """

    def __init__(self, kind: str, into: Path) -> None:
        with tarfile.open(HOMES / f"{kind}.tar.gz") as archive:
            archive.extractall(into, filter="data")
        self.home = Home(into / kind)
        self.folder = self.home.run(RUN)
        if kind == "training":  # The scripted files do not have this model's size.
            events = self.folder.events.read_bytes()
            self.folder.events.write_bytes(events.replace(b'"parameters":4848', b'"parameters":null'))
        self.clock = VirtualClock(start=self.records[-1].wall + 30)
        intent = self.all_of(Event.CREATE_INTENDED)[-1]
        self.cloud = FakeCloud(PROFILES["runpod"], self.clock, account=intent["account"])
        self.token = intent["token"]
        self.box = self._box(intent)
        if kind != "finished":
            self.cloud.boxes.append(self.box)
        self.far = OlderFar(self.cloud, self.folder.events if kind == "training" else None)

    def _box(self, data: Mapping[str, Any]) -> Box:
        offer = Offer.model_validate(data["offer"])
        lease_s = sum(data["lease"].values()) - data["lease"]["kill_allowance_s"]
        order = Order(
            run=RUN, token=data["token"], attempt=1, offer=offer, deadline_wall=data["deadline_wall"], lease_s=lease_s
        )
        instance = self.all_of(Event.CREATE_OBSERVED)[-1]["instance"]
        lived_s = self.clock.wall() - self.records[1].wall
        box = Box(instance["id"], order, offer.rate_micros_per_hour, -lived_s, -lived_s, offer.gpu, offer.gpu_count)
        box.ends_s = data["deadline_wall"] - self.clock.wall()
        return box

    @property
    def records(self) -> tuple[Record, ...]:
        return read_journal(self.folder.journal).records

    def all_of(self, event: Event) -> list[dict[str, Any]]:
        return [record.data for record in self.records if record.event is event]

    @contextmanager
    def later(self) -> Iterator[None]:
        """Replace RunPod by the simulated cloud, and let the laptop have restarted since."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch("gpurun.lifecycle.supervisor.open_provider", return_value=self.cloud))
            for module in ("ledger.journal", "lifecycle.context"):
                stack.enter_context(mock.patch(f"gpurun.{module}.boot_id", return_value="a later boot"))
            yield

    def drive(self) -> ExitCode:
        with self.later():
            return supervise(self.home, RUN, self.clock, reach=lambda _: self.far, trainer=TINY / "trainer")

    def ask_to_stop(self, how: How) -> None:
        ask_to_stop(self.folder, how, by="user", reason="a test")

    def types(self, *words: str, capsys: pytest.CaptureFixture[str], expect: int = 0) -> Any:
        """Run one command in this home, assert its exit code, and return its last envelope."""
        with mock.patch.object(sys, "argv", ["gpurun", *words, "--json", "--home", str(self.home.root)]):
            code = run_app(build_app())
        out = capsys.readouterr().out
        assert code == expect, out
        return json.loads(out.splitlines()[-1])


class OlderFar(ScriptedFar):
    """A machine that an older gpurun left in training: it reports the events that this home has, and then the end."""

    def __init__(self, cloud: FakeCloud, events: Path | None) -> None:
        super().__init__(cloud)
        self.started_s, self.train_s = 0.0, 20.0
        self._content = events.read_bytes() if events else b""

    def poll(self, wants: Mapping[str, tuple[int, int]]) -> Poll:
        poll = super().poll(wants)
        end = b'{"kind":"stop","reason":"done","message":"","step":100000}\n'
        story = self._content + (end if self._has_ended else b"")
        at, most = wants["events.jsonl"]
        return Poll(poll.status, {**poll.chunks, "events.jsonl": Chunk(at, story[at : at + most], len(story))})


def test_a_finished_run_is_listed_shown_and_audited_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = Older("finished", tmp_path)
    before = finished.folder.receipt.read_bytes()
    (row,) = finished.types("ps", "--all", capsys=capsys)["data"]["runs"]
    assert (row["phase"], row["exit_code"], row["may_be_billing"]) == ("closed", 0, False)
    statement = finished.types("receipt", RUN, capsys=capsys)["data"]["statement"]
    assert statement["predicate"]["teardown"]["is"] == "destroyed"
    assert finished.types("audit", capsys=capsys)["ok"]
    assert finished.folder.receipt.read_bytes() == before


@pytest.mark.parametrize("kind", ["training", "billing"])
def test_a_machine_that_may_be_billed_is_red_in_ps(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = Older(kind, tmp_path).types("ps", capsys=capsys, expect=9)["data"]["runs"]
    assert row["may_be_billing"]


def test_training_goes_on_and_ends_with_all_at_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Older("training", tmp_path)
    assert training.drive() is ExitCode.DONE
    assert training.all_of(Event.TRAIN_OBSERVED)[-1]["outcome"] == "done"
    assert training.cloud.alive == []
    assert len(training.all_of(Event.COLLECT_OBSERVED)[-1]["files"]) == 3
    assert training.types("audit", capsys=capsys)["ok"]


@pytest.mark.parametrize("kind", ["training", "billing"])
def test_it_is_destroyed_proven_and_gets_its_receipt(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = Older(kind, tmp_path)
    older.ask_to_stop("destroy")
    assert older.drive() is ExitCode.INTERRUPTED
    assert older.cloud.alive == []
    assert older.types("audit", capsys=capsys)["ok"]


@pytest.mark.parametrize("kind", ["training", "billing"])
def test_reap_ends_what_this_homes_journal_has_the_token_of(kind: str, tmp_path: Path) -> None:
    older = Older(kind, tmp_path)
    older.clock.sleep(3 * 3600)
    older.box.ends_s = None
    with older.later():
        (found,) = sweep([older.cloud], older.home, older.clock, destroy_all=False, older_than_s=0.0, look_only=False)
    assert (found.fate, older.cloud.alive) == ("destroyed", [])
    assert older.folder.receipt.exists()

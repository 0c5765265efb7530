"""Tests that a machine that is not as rented, or cannot be used, is destroyed before anything is uploaded to it.

All rentals run in parallel, because each mostly waits for a proof of death; each test checks the end of one rental.
Commands and containers are real, and the cloud's meter shows the true cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.journal_records import Event, Record
from gpurun.ledger.journal import read_journal
from tests.clouds.rented import Cloud, User, runpod, somebody
from tests.emulators import guests
from tests.emulators.guests import FakeGpu, Faults
from tests.fake_torch import torch_source
from tests.refusals import lacking

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("wrong machines"),
    pytest.mark.skipif(bool(guests.whole()), reason=guests.whole() or "guests have disks of their own"),
]

ANY_GPU = ("--accept-cpu",)
A100 = "NVIDIA A100 80GB PCIe"
OURS = ""  # The torch that runs these tests: it has no CUDA, and takes seconds to import.
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
SETUP = "echo 'no route to the package index' >&2\nexit 9\n"


@dataclass(frozen=True)
class Wrong:
    """A fault of the machine, of its image's torch or of RunPod's description, and the flags that the user types."""

    faults: Faults | None = None
    gpus: Sequence[FakeGpu] | None = None
    torch: str = torch_source()
    said: Callable[[Any], None] | None = None
    asks: tuple[str, ...] = ()
    setup: str = ""
    tokens: int = 40_000


def _dearer(world: Any) -> None:
    world.price_factor = Decimal("1.5")


def _another(world: Any) -> None:
    world.told_gpu = "NVIDIA L4"


WRONGS = {
    "host key": Wrong(faults=Faults(wrong_host_key=True), asks=ANY_GPU),
    "no python": Wrong(faults=Faults(python3_missing=True), asks=ANY_GPU),
    "small disk": Wrong(faults=Faults(disk_mb=9), asks=ANY_GPU, tokens=4_500_000),
    "torch without CUDA": Wrong(torch=OURS),
    "no GPU": Wrong(gpus=[], torch=torch_source(devices=0)),
    "another GPU": Wrong(gpus=[FakeGpu("Tesla T4")], torch=torch_source("Tesla T4", 16)),
    "a lost bit": Wrong(gpus=[FakeGpu(A100, uncorrected_ecc=3)]),
    "no kernels": Wrong(torch=torch_source(A100, kernel=NO_KERNEL, archs=("sm_90", "sm_100"))),
    "old torch": Wrong(torch=torch_source(version="2.4.1")),
    "set-up fails": Wrong(setup=SETUP, gpus=[]),
    "dearer": Wrong(said=_dearer),
    "said to be another": Wrong(said=_another),
}


@dataclass(frozen=True)
class End:
    """The end of one rental, as its command, journal, receipt and cloud show it."""

    exit_code: int
    error: dict[str, str]
    journal: tuple[Record, ...]
    receipt: dict[str, Any]
    console: str
    alive: Sequence[object]
    micros: int
    pods: int

    def has(self, event: Event) -> bool:
        return any(record.event is event for record in self.journal)


def _rent(name: str, folder: Path) -> End:
    wrong, path = WRONGS[name], []
    if wrong.torch:
        (folder / "image/torch").mkdir(parents=True)
        (folder / "image/torch/__init__.py").write_text(wrong.torch)
        path = [folder / "image"]
    asks = wrong.asks
    if wrong.setup:
        (folder / "install.sh").write_text(wrong.setup)
        asks = (*asks, "--setup", str(folder / "install.sh"))
    (folder / "text.txt").write_text("to be, or not to be.\n" * (wrong.tokens // 21))
    with runpod(folder / "cloud", wrong.faults, wrong.gpus, path) as cloud:
        cloud.asks = asks
        if wrong.said:
            wrong.said(cloud.emulator.world)
        with somebody(cloud, folder / "home") as user:
            done = user.trains("--gpu", "1xA100", "--set", "train.steps=2", "--data", str(folder / "text.txt"))
            assert done.stdout, done.stderr
            return _end(user, cloud, done.returncode, json.loads(done.stdout.splitlines()[-1]))


def _end(user: User, cloud: Cloud, exit_code: int, envelope: Any) -> End:
    return End(
        exit_code=exit_code,
        error=envelope["errors"][0],
        journal=read_journal(user.home / "runs/fox-41/journal.jsonl").records,
        receipt=user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"],
        console="".join(guest.log for guest in cloud.guests),
        alive=list(cloud.alive()),
        micros=cloud.meter.total_micros(),
        pods=cloud.emulator.count("create"),
    )


Ends = Callable[[str], End]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    """Yield a function that waits for the rental with the named fault, and returns its end."""
    with ThreadPoolExecutor(len(WRONGS)) as pool:
        rentals = {name: pool.submit(_rent, name, tmp_path_factory.mktemp("rental")) for name in WRONGS}
        yield lambda name: rentals[name].result()


@pytest.fixture
def end(request: pytest.FixtureRequest, ends: Ends) -> End:
    """Return the end of the rental; assert that its only machine is proven dead, and got no upload.

    The receipt's cost is not below the meter's.
    """
    came_of: End = ends(request.param)
    assert came_of.alive == []
    assert came_of.pods == 1
    assert came_of.has(Event.DEATH_PROVEN)
    assert not came_of.has(Event.SHIP_OBSERVED)
    assert came_of.receipt["teardown"]["is"] == "destroyed"
    assert came_of.micros <= came_of.receipt["cost"]["upper_bound_micros"]
    assert came_of.error["hint"]
    assert "Traceback" not in json.dumps(came_of.error)
    return came_of


def after(name: str) -> pytest.MarkDecorator:
    """Return the mark that gives a test the end of the rental with the named fault, as `end`."""
    return pytest.mark.parametrize("end", [name], indirect=True)


@after("host key")
def test_a_host_key_other_than_the_ordered_one_is_sent_nothing(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (1, "ssh.host_key_mismatch")
    assert "Accepted" not in end.console
    assert "authenticating" not in end.console, "not even the user's name was told"
    assert not end.has(Event.READY_OBSERVED)


@after("no python")
def test_an_image_without_python_is_refused_by_that_name(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (4, "box.no_python")
    assert "python3" in end.error["message"]
    assert "--image" in end.error["hint"]


@after("small disk")
def test_a_disk_that_is_too_small_is_refused_with_the_size(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (4, "box.disk_small")
    assert "--set hardware.disk_gb=" in end.error["hint"]


@after("torch without CUDA")
def test_a_gpu_that_torch_cannot_use_is_refused_quoting_both(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (4, "box.driver_mismatch")
    assert " 0 of " in end.error["message"]
    assert "1 (driver 570.195.03)" in end.error["message"]


@after("no GPU")
def test_a_machine_without_the_gpu_that_was_ordered_is_refused(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (5, "box.no_gpu")
    assert "nvidia-smi" in end.error["message"]


@after("another GPU")
def test_a_gpu_other_than_ordered_is_refused_naming_both(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (5, "box.other_gpu")
    assert "A100" in end.error["message"]
    assert "Tesla T4" in end.error["message"]


@after("a lost bit")
def test_a_card_whose_memory_has_lost_bits_is_refused(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (5, "box.ecc_errors")


@after("no kernels")
def test_a_torch_built_for_other_cards_is_refused_naming_them(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (4, "box.no_kernels")
    assert lacking(end.error["message"], "sm_80", "sm_90, sm_100") == []
    assert "--image" in end.error["hint"]


@after("old torch")
def test_an_old_torch_is_refused_with_the_version_needed(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (4, "box.old_torch")
    assert "2.4.1" in end.error["message"]
    assert "2.8" in end.error["message"]


@after("set-up fails")
def test_the_users_script_runs_before_the_machine_is_judged(
    end: End,
) -> None:
    assert (end.exit_code, end.error["code"]) == (4, "setup.failed")
    assert "no route to the package index" in end.error["message"]


@after("dearer")
def test_a_machine_dearer_than_agreed_is_refused_by_both_prices(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (5, "price.rose")
    assert end.error["message"].count("$") == 2


@after("said to be another")
def test_a_machine_that_is_said_to_be_another_is_refused(end: End) -> None:
    assert (end.exit_code, end.error["code"]) == (5, "gpu.other")
    assert "L4" in end.error["message"]

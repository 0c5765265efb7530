"""Tests of the agent's first look at a machine: the driver's cards, and a Python whose torch can use them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Box

from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, Reply
from gpurun.remote.machine_facts import CardFacts
from gpurun.remote.messages import GpuNow
from tests.refusals import refusal

ECC = "ecc.errors.uncorrected.volatile.total"
Pretend = Callable[[str, str], None]


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return a function that puts a shell script on the PATH under a given name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
        (folder / name).chmod(0o755)

    return make


@pytest.fixture
def no_torch(box: Box) -> Path:
    """Return the path of a Python that does not exist, so that the look for torch is quick."""
    return box.folder / "no-such-python"


def cards(box: Box, no_torch: Path) -> tuple[CardFacts, ...]:
    return box.far.hello(python=str(no_torch)).gpus


def test_cards_are_told_with_memory_driver_and_errors(box: Box, no_torch: Path, pretend: Pretend) -> None:
    pretend(
        "nvidia-smi",
        f'[ "$*" = "--query-gpu=name,memory.total,driver_version,{ECC} --format=csv,noheader,nounits" ] || exit 2\n'
        'echo "NVIDIA A100-SXM4-80GB, 81920, 570.195.03, 0"\necho "NVIDIA A100-SXM4-80GB, 81920, 570.195.03, 3"',
    )
    healthy = CardFacts(name="NVIDIA A100-SXM4-80GB", memory_bytes=80 << 30, driver="570.195.03", ecc_errors=0)
    assert cards(box, no_torch) == (healthy, healthy.model_copy(update={"ecc_errors": 3}))


def test_what_a_card_does_not_have_is_none(box: Box, no_torch: Path, pretend: Pretend) -> None:
    pretend(
        "nvidia-smi", 'echo "NVIDIA GeForce RTX 4090, 24564, 550.1, [N/A]"\necho "NVIDIA GB10, [N/A], 580.1, [N/A]"'
    )
    first, second = cards(box, no_torch)
    assert (first.memory_bytes, first.ecc_errors) == (24564 << 20, None)
    assert second.memory_bytes is None


def test_a_driver_that_knows_no_errors_is_asked_without(box: Box, no_torch: Path, pretend: Pretend) -> None:
    pretend(
        "nvidia-smi",
        f'case $* in *{ECC}*) echo "Field is not a valid field."; exit 2 ;; esac\necho "Tesla T4, 15360, 470.1"',
    )
    assert cards(box, no_torch) == (
        CardFacts(name="Tesla T4", memory_bytes=15360 << 20, driver="470.1", ecc_errors=None),
    )


@pytest.mark.parametrize(
    "script",
    [
        'echo "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."; exit 9',
        'echo "Unable to determine the device handle for GPU0: Unknown Error"',
        "printf '\\377\\n'",
        "exit 0",
    ],
)
def test_a_driver_that_says_nothing_useful_has_no_cards(
    box: Box, no_torch: Path, pretend: Pretend, script: str
) -> None:
    pretend("nvidia-smi", script)
    assert cards(box, no_torch) == ()


def python_that_tells(path: Path, **torch: object) -> Path:
    answer = {"version": "2.9.0", "numpy": "2.1.0", "cuda": None, "devices": [], **torch}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('sh')}\necho '{json.dumps(answer)}'\n")
    path.chmod(0o755)
    return path


def test_numpy_is_told_beside_torch_and_its_absence_too(box: Box, tmp_path: Path) -> None:
    assert box.far.hello(python=str(python_that_tells(tmp_path / "py"))).torch.numpy == "2.1.0"
    bare = box.far.hello(python=str(python_that_tells(tmp_path / "py", numpy=None))).torch
    assert (bare.found, bare.numpy) == (True, None)


def test_the_python_in_a_folder_of_its_own_is_found(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretend: Pretend
) -> None:
    """Only a Python of a conda, venv or pyenv in the home has torch: the agent must find it."""
    pretend("python3", "exit 1")
    box.alter_agent("usual = [sys.executable, ", "usual = [")
    box.alter_agent('"/opt/pytorch/bin/python"', '""')
    box.alter_agent("expanduser(place)", 'expanduser(place if place[0] == "~" else "")')
    for place in (
        "miniconda3/envs/train",
        "miniforge3",
        "micromamba/envs/train",
        "project/.venv",
        "my-venv",
        ".venv",
        ".pyenv/versions/3.12.1",
    ):
        home = tmp_path / place.replace("/", "-")
        monkeypatch.setenv("HOME", str(home))
        device = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 79 << 30}
        found = python_that_tells(home / place / "bin" / "python", cuda="12.8", devices=[device])
        torch = json.loads(box.machine.call(box.agent_argv("hello"), timeout_s=60).stdout)["torch"]
        assert (torch["python"], torch["devices"]) == (str(found), [device])


def test_a_machine_without_python_says_what_it_lacks() -> None:
    class Bare:
        def call(self, argv: list[str], **_: object) -> Reply:
            return Reply(127, b"", b"sh: 1: exec: python3: not found\n")

        def put(self, path: str, content: bytes) -> None:
            pass

    far = FarSide(Bare())
    for ask in (far.install_agent, far.hello):
        with refusal(FarRefusal, "far.no_python", "python3", "3.8") as refused:
            ask()
        assert refused.value.reason == "no_python"


def test_the_heartbeat_reports_the_cards_or_nothing_if_unknown(box: Box, pretend: Pretend) -> None:
    pretend("nvidia-smi", 'echo "94, 62464, 81920, 71, 607.53"\necho "[N/A], 4, 81920, 30, [N/A]"')
    box.far.start(box.job("time.sleep(60)"))
    first, second = box.until(lambda: box.status().gpus)
    assert first == GpuNow(use_percent=94, memory_mib=62464, memory_of_mib=81920, celsius=71, watts=607)
    assert (second.use_percent, second.watts) == (None, None)
    box.far.stop(now=True, reason="user")
    assert box.until_exited().gpus == ()


@pytest.mark.parametrize(("holders", "is_own"), [("ps -e -o pid=", True), ("echo 1", False), ("exit 1", False)])
def test_the_jobs_work_on_a_card_is_counted_even_unobserved(
    box: Box, pretend: Pretend, holders: str, is_own: bool
) -> None:
    figures = 'echo "94, 62464, 81920, 71, 607.53"'
    pretend("nvidia-smi", f'case "$1" in *compute-apps*) {holders};; *) {figures};; esac')
    box.far.start(box.job("time.sleep(60)"))
    counted = box.until(lambda: (tally := box.status().gpu_tally) and tally.most_mib and tally)
    assert (counted.looks, counted.busy, counted.own) == (1, 1, int(is_own))
    box.far.stop(now=True, reason="user")
    assert box.until_exited().gpu_tally.looks >= counted.looks


@pytest.mark.parametrize("script", ["exit 6", "echo nonsense", "sleep 60"])
def test_a_tool_that_fails_or_hangs_says_and_delays_nothing(box: Box, pretend: Pretend, script: str) -> None:
    pretend("nvidia-smi", script)
    box.far.start(box.job("sys.exit(3)"))
    status = box.until_exited()
    assert (status.exit_code, status.gpus) == (3, ())

"""Tests of the agent's check of a machine: a card that does not work is reported before the upload, in its own words.

The box is behind a real sshd. Its nvidia-smi and torch are fakes that print what those of such machines print.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Place, alter_agent

from gpurun.core.errors import GpurunError, NoOffer, SetupError
from gpurun.core.money import usd
from gpurun.core.records import Offer
from gpurun.planning.verify_machine import check_box, on_record
from gpurun.remote.agent import probe
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal
from gpurun.remote.machine_facts import MachineFacts
from tests.emulators import sshd
from tests.fake_torch import torch_source
from tests.refusals import lacking

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "there is an sshd")

A100, RTX5090 = "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 5090"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
NOT_YET = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 802: system not yet initialized"
)
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.195"
LOST = "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.  Reboot the system to recover this GPU"


class LookedAt:
    """A box with a separate home, nvidia-smi and Pythons."""

    def __init__(self, place: Place) -> None:
        self.place, self.home, self.bin = place, place.home / "there", place.home / "there-bin"
        self.home.mkdir()
        self.bin.mkdir()
        login = f'environment="HOME={self.home}",environment="PATH={self.bin}:{SYSTEM_PATH}"'
        server = place.serve("PermitUserEnvironment yes", login=login)
        self.program(self.bin / "python3", f'exec {sys.executable} "$@"')
        self.far = FarSide(place.machine(server.port))
        self.far.install_agent()

    def program(self, path: Path, script: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('sh')}\n{script}\n")
        path.chmod(0o755)
        return path

    def has_torch(self, path: Path | None = None, **how: Any) -> Path:
        """Write a Python with a fake torch, and return its path."""
        path = path or self.home / "torch-env" / "bin" / "python"
        modules = path.parent.parent / "modules"
        (modules / "torch").mkdir(parents=True)
        (modules / "torch" / "__init__.py").write_text(torch_source(**how))
        return self.program(path, f'PYTHONPATH={modules}:$PYTHONPATH exec {sys.executable} "$@"')

    def has_cards(self, *rows: str, apps: str = "", tail: str = "") -> None:
        """Write an nvidia-smi with one card per row: name, memory, driver, uuid, memory used, MIG, errors."""
        lines = "\n".join(f"    echo '{row}'" for row in rows)
        holding = f"echo '{apps}'" if apps else ":"
        self.program(
            self.bin / "nvidia-smi", f'case "$1" in\n*compute-apps*) {holding} ;;\n*)\n{lines}\n{tail}\n;; esac'
        )

    def only_in_home(self) -> None:
        """Make the agent look for Pythons in the home only, because a Python of the system may have torch."""
        alter_agent(self.place.folder, 'usual = [sys.executable, shutil.which("python3") or "", ', "usual = [")
        alter_agent(self.place.folder, '"/opt/pytorch/bin/python"]', '""]')
        alter_agent(self.place.folder, "expanduser(place)", 'expanduser(place if place[0] == "~" else "")')


@pytest.fixture
def box(place: Place) -> Iterator[LookedAt]:
    return LookedAt(place)


def card(name: str = A100, total: int = 81920, used: int = 4, mig: str = "Disabled", ecc: str = "0") -> str:
    return f"{name}, {total}, 570.195.03, GPU-one, {used}, {mig}, {ecc}"


def offer(gpu: str = "A100", vram_gb: int = 80, provider: str = "runpod") -> Offer:
    return Offer(
        provider=provider, type_id="t", gpu=gpu, gpu_count=1, vram_gb=vram_gb, region="any",
        rate_micros_per_hour=usd(1), billing_unit_s=1, boot_s=300, price_source="a test", dies_by_itself="yes",
    )  # fmt: skip


def refused(facts: MachineFacts, ordered: Offer, *, needs_torch: bool = True) -> GpurunError:
    with pytest.raises(GpurunError) as error:
        check_box(facts, ordered, accept_cpu=False, needs_torch=needs_torch)
    return error.value


Trouble = tuple[dict[str, Any], str, str, type[GpurunError], tuple[str, ...]]
TROUBLES: dict[str, Trouble] = {
    "a torch without kernels for the card": (
        {"card": A100, "capability": (12, 0), "kernel": NO_KERNEL, "version": "2.8.0+cu126", "built_for": "12.6"},
        card(), "box.no_kernels", SetupError,
        ("2.8.0+cu126", "CUDA 12.6", "sm_120", "sm_80, sm_90", "CUDA 12.8 or newer", "whl/cu128", NO_KERNEL),
    ),
    "a card too old for the torch": (
        {"capability": (7, 0), "kernel": NO_KERNEL, "built_for": "13.0"}, card(), "box.no_kernels", SetupError,
        ("sm_70", "CUDA 12.6 or older", "whl/cu126"),
    ),
    "a card that computes wrong": (
        {"is_right": False}, card(), "box.gpu_fails", NoOffer, ("63.5", "64", "Another machine"),
    ),
    "error 802": (
        {"init": NOT_YET}, card(), "box.gpu_ill", NoOffer, ("Error 802: system not yet initialized", "another offer"),
    ),
    "busy or unavailable": ({"kernel": BUSY}, card(), "box.gpu_ill", NoOffer, (BUSY, "another offer")),
    "MIG left on": (
        {"init": "No CUDA GPUs are available"}, card(mig="Enabled"), "box.mig", NoOffer,
        ("MIG", "GPU 0", "No CUDA GPUs"),
    ),
    "held by another": (
        {"free_gb": 3}, card(used=78000), "box.gpu_held", NoOffer,
        ("82 GB of 85 GB", "python3 (pid 4711, 77990 MiB)", "another offer"),
    ),
    "no torch for the driver": (
        {"init": "The NVIDIA driver on your system is too old (found version 12020)."}, card(), "box.driver_mismatch",
        SetupError, ("too old (found version 12020)", "CUDA 12.8", "--image"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_a_card_that_does_not_work_is_refused_early_in_its_words(box: LookedAt, name: str) -> None:
    torch, row, code, kind, words = TROUBLES[name]
    box.has_cards(row, apps="GPU-one, 4711, /usr/bin/python3, 77990")
    error = refused(box.far.hello(python=str(box.has_torch(**torch))), offer())
    assert (error.code, type(error)) == (code, kind)
    for word in words:
        assert word in f"{error.what} {error.hint}"


@pytest.mark.parametrize(("said", "cure"), [(MISMATCH, "updated"), (LOST, "disappears")])
@pytest.mark.parametrize("needs_torch", [True, False])
def test_a_silent_driver_is_quoted_and_not_blamed_on_installing(
    box: LookedAt, said: str, cure: str, needs_torch: bool
) -> None:
    box.has_cards(tail=f"echo '{said}'; exit 18")
    facts = box.far.hello(python=str(box.has_torch(init="No CUDA GPUs are available", devices=0)))
    error = refused(facts, offer(), needs_torch=needs_torch)
    assert (error.code, type(error)) == ("box.gpu_ill", NoOffer)
    assert said.splitlines()[0].rstrip() in error.what
    assert "another offer" in error.hint
    assert "install" not in error.hint
    assert cure in refused(facts, offer(provider="ssh")).hint


def test_the_machines_words_are_made_harmless(box: LookedAt) -> None:
    box.has_cards(card())
    facts = box.far.hello(python=str(box.has_torch(kernel="CUDA\x1b[2Jerror\u202e: busy or unavailable")))
    assert "CUDAerror: busy or unavailable" in refused(facts, offer()).what


def test_an_rtx_5090_passes_with_a_torch_that_has_kernels_for_it(box: LookedAt) -> None:
    box.has_cards(card(RTX5090, 32607))
    torch = box.has_torch(card=RTX5090, memory_gb=34.2, capability=(12, 0), archs=("sm_90", "sm_120"))
    facts = box.far.hello(python=str(torch))
    assert check_box(facts, offer("RTX 5090", 32), accept_cpu=False) == ()
    (device,) = facts.torch.devices
    assert (device.capability, device.error) == ("12.0", None)


def test_a_card_a_desktop_uses_a_little_is_accepted_with_a_note(box: LookedAt) -> None:
    box.has_cards(card(used=12000), apps="GPU-one, 9, /usr/lib/Xorg, 12000")
    facts = box.far.hello(python=str(box.has_torch(free_gb=70)))
    (warning,) = check_box(facts, offer(), accept_cpu=False)
    assert "15 GB" in warning
    assert "Xorg (pid 9" in warning


def test_a_torch_that_cannot_be_imported_is_told_with_why(box: LookedAt) -> None:
    broken = "raise ImportError('/opt/libtorch_cuda.so: undefined symbol: ncclCommRegister')"
    error = refused(box.far.hello(python=str(box.has_torch(first=broken))), offer())
    assert error.code == "box.no_torch"
    assert "undefined symbol: ncclCommRegister" in error.what


def test_a_python_whose_torch_works_on_the_card_goes_first(box: LookedAt) -> None:
    """Two Pythons have torch, but the first one's has no kernels for the card: the agent must choose the second."""
    box.only_in_home()
    box.has_cards(card())
    box.has_torch(box.home / "miniconda3/envs/a/bin/python", kernel=NO_KERNEL)
    good = box.has_torch(box.home / "miniconda3/envs/b/bin/python")
    alter_agent(box.place.folder, '"/dev/nvidiactl"', '"/"')
    facts = box.far.hello()
    assert facts.torch.python == str(good)
    assert check_box(facts, offer(), accept_cpu=False) == ()


def test_pythons_are_asked_in_parallel_and_the_slow_one_is_named(box: LookedAt) -> None:
    """Three Pythons hang, as with a failed card. They share one time limit, and none is said to lack torch."""
    box.only_in_home()
    alter_agent(box.place.folder, "LIMIT_S = 180.0", "LIMIT_S = 5.0")
    hanging = [box.has_torch(box.home / f"miniconda3/envs/{name}/bin/python", import_s=600) for name in "abc"]
    waits: list[tuple[int, str]] = []
    began = time.monotonic()
    facts = box.far.hello(on_wait=lambda seconds, words: waits.append((seconds, words)))
    assert time.monotonic() - began < 3 * 5
    assert [look.python for look in facts.torch.looks] == [str(path) for path in hanging]
    assert not any(look.answered for look in facts.torch.looks)
    assert waits[0][0] >= 2
    assert str(hanging[0]) in waits[0][1]
    error = refused(facts, offer())
    assert (error.code, type(error)) == ("box.torch_silent", NoOffer)
    assert "not answer" in error.what
    assert "imports torch" not in error.what


def test_a_kernel_that_hangs_is_no_python_without_torch(box: LookedAt) -> None:
    alter_agent(box.place.folder, "LIMIT_S = 180.0", "LIMIT_S = 3.0")
    box.has_cards(card())
    hangs = "def _hang(place): time.sleep(600)"
    torch = box.has_torch(first=hangs)
    source = torch.parent.parent / "modules/torch/__init__.py"
    source.write_text(source.read_text().replace("staticmethod(lambda place: None)", "staticmethod(_hang)"))
    facts = box.far.hello(python=str(torch))
    assert (facts.torch.found, facts.torch.version) == (True, "2.13")
    error = refused(facts, offer())
    assert (error.code, type(error)) == ("box.gpu_ill", NoOffer)
    assert "not answer" in error.what


def test_a_small_shm_warns_a_command_and_not_the_trainer(box: LookedAt) -> None:
    box.has_cards(card())
    facts = box.far.hello(python=str(box.has_torch()))
    assert facts.shm_bytes == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    small = facts.model_copy(update={"shm_bytes": 64 << 20})
    (warning,) = check_box(small, offer(), accept_cpu=False, needs_torch=False)
    assert lacking(warning, "/dev/shm", "67 MB") == []
    assert "num_workers=0" in warning
    assert check_box(small, offer(), accept_cpu=False) == ()


def test_an_output_disk_that_takes_no_file_is_refused_as_it_says(box: LookedAt) -> None:
    """A disk may show free space and still take no file, as over a quota. (Here a folder has the file's name.)"""
    box.far.hello(python="/no/python")
    (box.place.folder / "out" / ".written").mkdir()
    with pytest.raises(FarRefusal, match=r"out/\.written") as refusal:
        box.far.hello(python="/no/python")
    assert refusal.value.exit_code == 4


def test_a_quota_that_only_a_sync_meets_is_seen_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk may accept bytes and refuse them only at the sync, so the check must sync."""

    def is_over_quota(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", is_over_quota)
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)):
        probe.write_out(str(tmp_path))
    assert list((tmp_path / "out").iterdir()) == []


def test_the_record_names_no_path_and_no_process_of_the_machine(box: LookedAt) -> None:
    box.has_cards(card(used=12000), apps="GPU-one, 9, /srv/ann/secret-model, 12000")
    record = str(on_record(box.far.hello(python=str(box.has_torch(init="/srv/ann: Error 802")))))
    assert "secret-model" not in record
    assert str(box.home) not in record
    assert "/srv/ann" not in record


def test_a_module_the_machine_lacks_is_found_without_running_it(box: LookedAt) -> None:
    python = box.has_torch()
    (python.parent.parent / "modules" / "explodes.py").write_text("raise SystemExit(9)")
    box.far.hello(python=str(python))
    found = box.far.missing_imports(["torch", "json", "explodes", "mingpt", "torchvision_of_nowhere"])
    assert (found.missing, found.python) == (("mingpt", "torchvision_of_nowhere"), str(python))
    beside = box.home / "src"
    beside.mkdir()
    (beside / "mingpt.py").write_text("")
    assert box.far.missing_imports(["mingpt"], str(beside)).missing == ()

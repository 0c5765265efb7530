"""Tests of what a plan learns from this computer (CPU, memory and cards), and of the files that a plan leaves."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpurun.cli.app import build_app
from gpurun.core.clock import SystemClock, VirtualClock
from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Box, Choices, DataSummary, Mode, Plan, Request
from gpurun.data import run_shards
from gpurun.data.shard_folder import inspect
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.ledger.runs import create_run
from gpurun.planning import own_box
from gpurun.planning.market import Market
from gpurun.planning.place import PRICES_HOLD_S
from gpurun.providers.catalog import offers_for, parse_gpu
from tests.changed_plan import changed_plan
from tests.machine_words import facts
from tests.plan_makers import make_plan
from tests.refusals import lacking, refusal

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGLJ7pAWpOHG6rtB1nzqhwtbbz3y8aAhY6YyQyq3a2cD"


def planned_here(tmp_path: Path, *overrides: str, hours: float | None = None) -> Plan:
    request = Request(recipe="mini-gpt", providers=("local",), overrides=("data.limit_mb=1", *overrides), hours=hours)
    home = Home(tmp_path).prepare()
    return make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=False)


def test_what_set_says_of_a_machine_without_cuda_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: False)
    assert planned_here(tmp_path).job.form == "rehearsal"
    assert planned_here(tmp_path, "hardware.on_cpu=as_written").job.form == "full"
    with refusal(GpurunError, "recipe.needs_gpu", "CUDA"):
        planned_here(tmp_path, "hardware.on_cpu=refuse")


LONG = ("schedule.warmup_steps=501", "rehearsal.train.steps=502")
"""A warm-up that fits into the 502 steps of the rehearsal, but not into the 500 steps of the full form."""


def test_a_warm_up_is_checked_against_the_form_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: False)
    assert planned_here(tmp_path, *LONG).job.form == "rehearsal"
    rented = Request(recipe="mini-gpt", providers=("aws",), gpu=parse_gpu("cpu"), overrides=LONG)
    home = Home(tmp_path)
    assert (
        make_plan(rented, run="elk-1", home=home, clock=SystemClock(), say=print, need_data=False).job.form
        == "rehearsal"
    )
    named = ("(rehearsal)", "--set", "schedule.warmup_steps 150", "train.steps 120")
    with refusal(UsageError, "recipe.does_not_add_up", *named):
        planned_here(tmp_path, "schedule.warmup_steps=150")
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: True)
    assert planned_here(tmp_path, "schedule.warmup_steps=150").job.form == "full"
    with refusal(UsageError, "recipe.does_not_add_up", "--set", "501 is", "train.steps", "500"):
        planned_here(tmp_path, *LONG)


def test_a_model_over_this_machines_memory_is_refused_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model too large for this computer was once planned for a week; the kernel killed it in its first minute."""
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: False)
    huge = ("model.layers=64", "model.width=16384")
    with pytest.raises(UsageError, match=r"at least 3[0-9,.]+ GiB") as refused:
        planned_here(tmp_path, *huge)
    assert refused.value.code == "memory.small"
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}[name])
    with refusal(UsageError, "memory.small", "0.0 GiB"):
        planned_here(tmp_path)
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: True)
    assert planned_here(tmp_path, *huge).job.form == "full", "on a GPU its memory counts, which is not known here"


@pytest.mark.parametrize(("hours", "warns"), [(0.002, True), (2, False), (None, False)])
def test_hours_for_a_part_say_how_far_on_an_own_machine_too(tmp_path: Path, hours: float | None, warns: bool) -> None:
    assert ("of 120 (" in " ".join(planned_here(tmp_path, hours=hours).warnings)) is warns


def test_a_plan_leaves_no_shards_behind_but_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    done = CliRunner().invoke(build_app(), ["plan", "mini-gpt", "--dry-run", "--set", "data.limit_mb=1"])
    assert done.exit_code == 0
    assert list((tmp_path / "cache" / "shards").iterdir())
    assert not list((tmp_path / "cache" / "staged").glob("*"))


def test_a_plan_says_what_of_a_folder_is_not_trained_on(tmp_path: Path) -> None:
    """A plan must warn of skipped files even if it tokenises nothing: the run trains on less than the user expects."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(f"to be or not to be {number}.\n" for number in range(2000)))
    (folder / "b.bin").write_bytes(bytes(100))
    request = Request(recipe="mini-gpt", providers=("local",), data=str(folder))
    home = Home(tmp_path / "home").prepare()
    made = make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=lambda _: None, need_data=False)
    assert [lacking(warning, str(folder), "1 binary") for warning in made.warnings] == [[]]


@pytest.mark.parametrize(
    ("dry_run", "steps", "brought", "warns"),
    [
        (False, 400, True, True),
        (True, 400, True, True),
        (False, 12, True, False),
        (False, 4_000, False, True),
        (True, 4_000, False, False),
    ],
    ids=["your text", "your text rehearsed", "four times at most", "bundled text", "bundled text rehearsed"],
)
def test_a_text_that_would_be_read_more_than_four_times_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool, steps: int, brought: bool, warns: bool
) -> None:
    """A plan once did not say that a text of six million tokens would be read 1,532 times."""
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: False)
    lines = [f"{number:02} quick brown foxes jump over a lazy dog.\n" for number in range(100)]
    (tmp_path / "text.txt").write_text("".join(lines))
    plan = make_plan(
        Request(
            recipe="mini-gpt",
            data=str(tmp_path / "text.txt") if brought else None,
            providers=("local",) if not dry_run else (),
            overrides=("data.limit_mb=1", f"train.steps={steps}", "train.batch_tokens=1024"),
            dry_run=dry_run,
        ),
        run="fox-41", home=Home(tmp_path / "home").prepare(), clock=SystemClock(), say=print, need_data=True,
    )  # fmt: skip
    assert (3_000 if brought else 500_000) < plan.data.train_tokens < (4_500 if brought else 1_000_000)
    often = [warning for warning in plan.warnings if f" {steps * 1024 / plan.data.train_tokens:,.0f} times" in warning]
    assert len(often) == warns
    if often:
        assert often[0].startswith("Your 3") is brought


def test_uncounted_tokens_are_not_said_to_be_read_often(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    request = Request(recipe="mini-gpt", data=str(tmp_path / "text.txt"), providers=("aws",))
    home = Home(tmp_path / "home").prepare()
    plan = make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=False)
    assert plan.data.train_tokens == 0
    assert " times" not in " ".join(plan.warnings)


def test_shards_of_a_command_that_was_killed_go_a_day_later(own_home: Path) -> None:
    """A killed command once left its shards behind forever, because no later command used their name."""
    home, now = Home(own_home).prepare(), time.time()
    killed, waiting, fresh = (home.staged / f"fox-41.{pid}" for pid in (2**22 + 1, os.getpid(), 2**22 + 2))
    for folder, age_s in ((killed, 90_000), (waiting, 90_000), (fresh, 60)):
        folder.mkdir(parents=True)
        (folder / "train.bin").write_bytes(bytes(10))
        os.utime(folder, (now - age_s, now - age_s))
    CliRunner().invoke(build_app(), ["plan", "gpt2-124m"])
    assert sorted(home.staged.iterdir()) == sorted((waiting, fresh))


def test_two_plans_of_one_run_name_have_shards_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plans once shared a folder: the second replaced the first's shards, or removed them when declined."""
    home, first = Home(tmp_path).prepare(), planned_here(tmp_path)
    with monkeypatch.context() as other_process:
        other_process.setattr("os.getpid", lambda: 0)
        second = planned_here(tmp_path, "data.val_fraction=0.5")
        shutil.rmtree(home.staged_data(second.run))
    opened = read_plan(create_run(home, Request(recipe="mini-gpt"), first)).data
    assert (opened.bytes, inspect(Path(opened.folder), tokenizer="char", vocab_size=0).sha256) == (
        first.data.bytes,
        first.data.sha256,
    )


@pytest.mark.parametrize(
    ("gpu", "card", "gib", "label"),
    [
        ("2x4090", "NVIDIA GeForce RTX 4090", 23.6, "2×RTX 4090 24G"),
        ("3xA100", "NVIDIA A100-SXM4-80GB", 79.25, "3×A100 SXM 80G"),
        ("3xA100", "NVIDIA A100-PCIE-40GB", 39.4, "3×A100 PCIe 40G"),
        ("2xA100-80GB", "NVIDIA A100 80GB PCIe", 79.25, "2×A100 PCIe 80G"),
    ],
)
def test_a_box_is_planned_by_the_card_that_it_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, card: str, gib: float, label: str
) -> None:
    """A box with such cards was once refused with "No offer has the memory for this. On ssh 2×RTX4090 0G"."""
    shown = facts(card, parse_gpu(gpu).count, gib)
    box = Box(target="root@box.example.com:22", identity="/k", host_key=HOST_KEY, trusted="given")
    monkeypatch.setattr(own_box, "reach_box", lambda *_, **__: (box, shown, []))
    request = Request(
        recipe="mini-gpt",
        providers=("ssh",),
        host="root@box.example.com",
        gpu=parse_gpu(gpu),
        overrides=("data.limit_mb=1", "train.batch_tokens=6144"),
    )
    home = Home(tmp_path / "home").prepare()
    plan = make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=False)
    assert (plan.offer.label, plan.processes) == (label, parse_gpu(gpu).count)
    assert plan.estimate.fits
    assert plan.estimate.tokens_per_s is not None
    assert plan.box == box


def test_no_cloud_to_ask_is_not_called_a_lack_of_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(need: GpuNeed, *_: object) -> Market:
        return Market((), (("runpod", "runpod gave no complete answer: Name or service not known"),), 0.0, ("runpod",))

    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_x")
    monkeypatch.setattr("gpurun.planning.live_offers.live_offers", silent)
    request = Request(recipe="mini-gpt", providers=("runpod",), max_cost_micros=1_000_000)
    home = Home(tmp_path).prepare()
    with refusal(SetupError, "market.unreachable", "runpod"):
        make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=True)


def rented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, *overrides: str, clock: VirtualClock | None = None
) -> Plan:
    """Return the plan of a paid run at the catalogue's prices.

    Its only note says how often the cloud was asked for offers.
    """
    needs: list[GpuNeed] = []

    def live(need: GpuNeed, *_: object) -> Market:
        needs.append(need)
        return Market(tuple(one for one in offers_for(need) if one.provider == provider), (), 0.0, (provider,))

    monkeypatch.setattr("gpurun.planning.live_offers.live_offers", live)
    monkeypatch.setattr("gpurun.planning.place.ready_providers", lambda home: [provider])
    request = Request(recipe="mini-gpt", providers=(provider,), max_cost_micros=usd(50), gpu=parse_gpu("1xA100"),
                      overrides=("data.limit_mb=1", *overrides), choices=Choices(weak_lease=True))  # fmt: skip
    home = Home(tmp_path).prepare()
    made = make_plan(request, run="fox-41", home=home, clock=clock or SystemClock(), say=print, need_data=True)
    return made.model_copy(update={"notes": (f"asked {len(needs)}x",)})


@pytest.mark.parametrize(("took_s", "times"), [(PRICES_HOLD_S, 1), (PRICES_HOLD_S + 1, 2)])
def test_clouds_are_asked_again_only_when_prices_have_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, times: int
) -> None:
    clock, held = VirtualClock(), run_shards.prepare_run_shards

    def slowly(*given: Any, **places: Any) -> DataSummary:
        clock.sleep(took_s)
        return held(*given, **places)

    monkeypatch.setattr(run_shards, "prepare_run_shards", slowly)
    assert rented(tmp_path, monkeypatch, "runpod", clock=clock).notes == (f"asked {times}x",)


def test_a_disk_that_checkpoints_would_fill_is_refused_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest two checkpoints, the best one and the one being written take 32 GB: a smaller disk must be refused."""
    large = ("model.layers=25", "model.width=1536", "model.heads=16", "train.checkpoint_every=100")
    with refusal(UsageError, "disk.small", "32 GB") as refused:
        rented(tmp_path, monkeypatch, "runpod", *large)
    larger = re.findall(r"--set (hardware\.disk_gb=\d+)", str(refused.value.hint))[0]
    assert rented(tmp_path, monkeypatch, "runpod", *large, larger).job.resolved["hardware"]["disk_gb"] == 52
    assert rented(tmp_path, monkeypatch, "runpod", *large, "train.checkpoint_every=250").lease, "there are but two"
    assert rented(tmp_path, monkeypatch, "lambda", *large).lease, "its disk is as large as it is"


def test_a_disk_that_the_data_would_fill_is_refused_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = run_shards.prepare_run_shards

    def huge(*given: Any, **places: Any) -> DataSummary:
        return held(*given, **places).model_copy(update={"bytes": 20 * 10**9})

    monkeypatch.setattr(run_shards, "prepare_run_shards", huge)
    with refusal(UsageError, "disk.small", "20.0"):
        rented(tmp_path, monkeypatch, "runpod", "hardware.disk_gb=20")
    assert rented(tmp_path, monkeypatch, "runpod", "hardware.disk_gb=40").lease


def test_threads_sleep_while_waiting_only_on_a_shared_machine(
    tmp_path: Path,
) -> None:
    here = planned_here(tmp_path)
    known = here.job.workload(here, bundle_root() / "trainer", cpus=8).env
    assert known == {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
    rented = changed_plan(here, {"offer": offers_for(parse_gpu("8xA100"))[0], "processes": 8, "mode": Mode.PAID})
    assert rented.job.workload(rented, bundle_root() / "trainer", cpus=96).env == {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "12",
    }


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, code: int = 0) -> None:
    """Put an `nvidia-smi` on the PATH that prints these lines and exits with `code`."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("lines", "code", "gpu", "memory"),
    [
        (("NVIDIA H200, 143771",), 0, "H200 SXM", 140),
        (("NVIDIA A100-SXM4-80GB, 81920", "NVIDIA A100-SXM4-80GB, 81920"), 0, "A100 SXM", 80),
        (("NVIDIA GeForce RTX 2060, 6144",), 0, "cpu", 0),
        (("NVIDIA-SMI has failed", "make sure that the driver runs"), 9, "cpu", 0),
        (("[Insufficient Permissions]",), 0, "cpu", 0),
    ],
    ids=["an H200", "two A100", "one that nobody rents out", "a broken driver", "no table"],
)
def test_the_card_of_this_machine_is_what_its_plan_reckons_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], code: int, gpu: str, memory: int
) -> None:
    """GPT-2 was once planned for 37 hours on 16 CPU cores; the computer's H200 then trained it in half a minute."""
    driver(tmp_path, monkeypatch, *lines, code=code)
    plan = planned_here(tmp_path / "home")
    offer = plan.offer
    assert (offer.gpu, offer.vram_gb, offer.gpu_count) == (gpu, memory, int(gpu != "cpu"))
    assert any("RTX 2060" in note for note in plan.notes) is ("RTX 2060" in lines[0])


def test_a_rehearsal_takes_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, "NVIDIA H200, 143771")
    request = Request(recipe="mini-gpt", dry_run=True, overrides=("data.limit_mb=1",))
    home = Home(tmp_path / "home").prepare()
    made = make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=False)
    assert made.offer.gpu == "cpu"

"""Tests of plans from the packaged catalogue: their notes, warnings, refusals and unusual screens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from drawing import check_scenes

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import GpurunError
from gpurun.core.money import parse_usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices, Plan, Request
from gpurun.providers.catalog import parse_gpu
from gpurun.view.plan_screen import plan_text
from gpurun.view.style import Style
from tests.plan_makers import make_plan

EIGHT = {"gpu": parse_gpu("8xA100")}
SIZES = ("width=6144", "heads=48", "layers=96")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a work folder with a text and folders of large shards, without any cloud's key and without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpurun.planning.place.ready_providers", lambda home: [])
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: False)
    Path("text.txt").write_text("a text")
    for name, size in (("shards", 5 * 10**9), ("many", 18865 * 524288 * 2)):
        Path(name).mkdir()
        with Path(name, "large.txt").open("wb") as sparse:
            sparse.truncate(size)
    return tmp_path


def planned(cap: str, **changes: Any) -> Plan:
    wanted = {"recipe": "gpt2-124m", "max_cost_micros": parse_usd(cap), "uplink_mbit": 1000} | changes
    home, clock = Home(Path("home")).prepare(), VirtualClock(1_800_000_000.0)
    return make_plan(Request(**wanted), run="fox-41", home=home, clock=clock, say=print, need_data=False)


USUAL: tuple[str, dict[str, Any]] = ("25", {})
NOTED: dict[str, tuple[str, dict[str, Any]]] = {
    "the recipe's own GPU is too dear": ("20", {}),
    "the recipe's GPU is not sold alone": (
        "5", {"recipe": "mini-gpt", "providers": ("aws",), "overrides": ("hardware.gpu=1xA100",)},
    ),
    "a machine without a GPU is the best": (
        "0.09",
        {
            "recipe": "tiny-hf", "providers": ("lambda",), "choices": Choices(weak_lease=True),
            "overrides": ("train.steps=20", "schedule.warmup_steps=0"),
        },
    ),
    "spot": ("60", {**EIGHT, "choices": Choices(spot=True)}),
    "shards of the recipe": ("25", {**EIGHT, "uplink_mbit": None}),
    "shards that are sent from here": ("60", {**EIGHT, "data": "shards", "uplink_mbit": None}),
    "a rehearsal of shards that are sent": (
        "25", {**EIGHT, "recipe": "gpt2-124m-owt", "dry_run": True, "uplink_mbit": None},
    ),
    "a disk that is too small": ("60", {**EIGHT, "overrides": ("hardware.disk_gb=10",)}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "none finishes under the cap": ("9", {}),
    "too small a cap for a named GPU": ("9", {"gpu": parse_gpu("1xH100")}),
    "no memory for the model": ("900000", {"overrides": SIZES}),
    "not a machine's memory": (
        "500",
        {
            "recipe": "mini-gpt", "gpu": parse_gpu("cpu"), "providers": ("aws",), "choices": Choices(accept_cpu=True),
            "overrides": ("width=2048", "heads=16", "context=512", "batch_tokens=4096", "layers=24"),
        },
    ),
    "a GPU that the cloud has not": ("5", {"recipe": "mini-gpt", "providers": ("aws",), "gpu": parse_gpu("1xA100")}),
    "an unknown region": ("5", {"providers": ("aws",), "choices": Choices(region="mars")}),
    "a GPU without a price": ("5", {"gpu": parse_gpu("1xA5000")}),
    "nothing there ends the machine": ("60", {"gpu": parse_gpu("1xA100"), "providers": ("lambda",)}),
    "the same without a cap": (
        "60", {"gpu": parse_gpu("1xA100"), "providers": ("lambda",), "max_cost_micros": None},
    ),
    "too much to send": ("25", {**EIGHT, "data": "many", "uplink_mbit": None}),
    "too much to send under a low cap": ("20", {**EIGHT, "data": "many", "uplink_mbit": None}),
    "data that is not there": ("60", {"data": "nowhere"}),
}  # fmt: skip
SCREENS: dict[str, tuple[str, dict[str, Any]]] = {
    "a part": ("25", {**EIGHT, "hours": 1.0}),
    "a set-up where minutes are billed": (
        "500",
        {
            **EIGHT, "providers": ("lambda",),
            "choices": Choices(weak_lease=True, setup="true", setup_limit_s=1800),
        },
    ),
    "a text that is not prepared": (
        "25", {"recipe": "mini-gpt", "data": "text.txt", "providers": ("lambda",), "choices": Choices(guard=True)},
    ),
    "steps that cannot be shared evenly": (
        "5",
        {
            "recipe": "mini-gpt", "providers": ("aws",),
            "overrides": ("train.batch_tokens=128", "hardware.gpu=2xB200"),
        },
    ),
    "one process, and cards without bf16": ("5", {"recipe": "tiny-hf", "providers": ("aws",)}),
}  # fmt: skip


def test_the_notes_of_plans() -> None:
    usual = planned(USUAL[0], **USUAL[1])
    scenes = {"as usual": "\n".join([*usual.notes, *usual.warnings])}
    for scene, (cap, options) in NOTED.items():
        plan = planned(cap, **options)
        said = [*plan.notes, *(f"WARNING {warning}" for warning in plan.warnings)]
        scenes[scene] = "\n".join(note for note in said if note not in usual.notes)
    check_scenes("plan-notes.txt", scenes)


def test_the_refusals_of_plans() -> None:
    scenes = {}
    for scene, (cap, options) in REFUSED.items():
        with pytest.raises(GpurunError) as refused:
            planned(cap, **options)
        scenes[scene] = f"{refused.value.what}\n  {refused.value.hint}\n  [{refused.value.code}]"
    check_scenes("plan-refusals.txt", scenes)


def test_the_screens_of_odd_plans() -> None:
    style = Style(width=120)
    scenes = {scene: plan_text(planned(cap, **options), style, every=True) for scene, (cap, options) in SCREENS.items()}
    rehearsed = plan_text(planned("5", **EIGHT, dry_run=True), style).splitlines()
    first, last = (next(at for at, line in enumerate(rehearsed) if word in line) for word in ("Provider", "Lease"))
    scenes["what a rehearsal shows where none finishes"] = "\n".join(rehearsed[first:last])
    check_scenes("plan-odd.txt", scenes)

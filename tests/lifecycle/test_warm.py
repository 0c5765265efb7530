"""Tests of uploading an earlier run's compile cache: only if requested, usable, and named in that run's receipt."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Choices, Request
from gpurun.jobs.training.compile_cache import MOST_BYTES, compile_cache_note, with_compile_caches
from gpurun.jobs.training.recipe import ResolvedRecipe, load_recipe, resolve
from gpurun.ledger.signing import PRIVATE_NAME
from gpurun.planning.candidates import need_of
from gpurun.remote.archive import survey
from tests.changed_plan import changed_plan
from tests.unit.ledger_samples import CloudRun, Note
from tests.unit.report_samples import plan_of

KEY = "compile-cache/0123456789abcdef.bin"
CACHE = b"compiled" * 1000
H100 = GpuNeed(count=1, name="H100")
RECIPE = resolve(load_recipe("gpt2-124m"), "full", ("train.compile=true",), 1)


class CompiledRun(CloudRun):
    """A run whose compile cache was downloaded from its machine."""

    cache, provider = CACHE, "runpod"

    def opened(self) -> Note:
        event, data = super().opened()
        return event, {**data, "provider": self.provider}

    def write_trainer_files(self) -> None:
        super().write_trainer_files()
        (self.folder.artifacts / KEY).parent.mkdir()
        (self.folder.artifacts / KEY).write_bytes(self.cache)

    def manifest(self) -> list[dict[str, Any]]:
        named = {"name": KEY, "bytes": len(self.cache), "sha256": hashlib.sha256(self.cache).hexdigest()}
        return [*super().manifest(), {**named, "kind": "compile_cache", "step": 120}]


def run_before(
    home: Home, name: str = "fox-41", *, cache: bytes = CACHE, provider: str = "runpod", host: str = ""
) -> CloudRun:
    kind = type("Run", (CompiledRun,), {"cache": cache, "provider": provider})
    run: CloudRun = kind(home, name)
    plan = plan_of(name)
    resolved = {**plan.job.resolved, "model": RECIPE.record["model"], "train": RECIPE.record["train"]}
    run.folder.plan.write_text(changed_plan(plan, {"resolved": resolved}).to_json())
    run.folder.request.write_text(Request(recipe="gpt2-124m", host=host).to_json())
    return run.until_gone().settle()


def request(**more: Any) -> Request:
    return Request(recipe="gpt2-124m", **{"gpu": H100, "choices": Choices(warm=True), **more})


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def sent_along(home: Home, wanted: Request | None = None, recipe: ResolvedRecipe = RECIPE) -> dict[str, bytes]:
    """Return the compile caches placed beside the shards, and assert that the plan's bytes include them."""
    into, data = home.staged_data("owl-07"), plan_of("owl-07").data
    into.mkdir(parents=True)
    needed = wanted or request()
    need = need_of(needed, recipe, is_rented=needed.providers != ("ssh",))
    found = with_compile_caches(data, needed, recipe, need, home, into)
    names = {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*.bin")}
    assert found.bytes == data.bytes + sum(map(len, names.values()))
    return names


def test_the_cache_of_the_same_model_and_card_goes_along(home: Home) -> None:
    run_before(home)
    assert sent_along(home) == {KEY: CACHE}
    plan = plan_of("owl-07").model_copy(update={"choices": Choices(warm=True)})
    plan = changed_plan(plan, {"resolved": RECIPE.record})
    seen = survey({"data": home.staged_data("owl-07")})
    seen.demand_clean()
    assert "(1 file, 8 kB)" in compile_cache_note(plan, seen.files)
    assert "downloads one" in compile_cache_note(plan, ())


def test_of_two_with_one_name_the_newest_goes(home: Home) -> None:
    run_before(home, "elk-33", cache=b"older")
    run_before(home, "fox-41")
    assert sent_along(home) == {KEY: CACHE}


def test_it_is_only_done_when_it_was_asked_for(home: Home) -> None:
    run_before(home)
    assert sent_along(home, request(choices=Choices())) == {}


@pytest.mark.parametrize(
    "what",
    [
        request(gpu=GpuNeed(count=1, name="A100")),
        request(gpu=GpuNeed(count=2, name="H100")),
        request(providers=("local",)),
        request(dry_run=True),
        request(providers=("ssh",), host="me@lab"),
    ],
    ids=["another card", "two of them", "this laptop", "a rehearsal here", "a box of one's own"],
)
def test_a_rented_compile_cache_goes_only_to_rented_equal_cards(home: Home, what: Request) -> None:
    run_before(home)
    assert sent_along(home, what) == {}


def test_another_model_or_one_that_is_not_compiled_gets_nothing(home: Home) -> None:
    run_before(home)
    other = resolve(load_recipe("gpt2-124m"), "full", ("train.compile=true", "model.layers=6"), 1)
    plain = resolve(load_recipe("gpt2-124m"), "full", ("train.compile=false",), 1)
    assert sent_along(home, recipe=other) == {}
    home.staged_data("owl-07").rmdir()
    assert sent_along(home, recipe=plain) == {}


def test_a_cache_the_receipt_does_not_name_never_goes(home: Home) -> None:
    run = run_before(home)
    (run.folder.artifacts / KEY).write_bytes(b"evil" * 2000)
    assert sent_along(home) == {}


def test_a_boxs_cache_goes_to_that_box_and_rented_machines(home: Home) -> None:
    run = run_before(home, provider="ssh", host="me@lab")
    for what, goes in (
        (request(providers=("ssh",), host="me@lab"), True),
        (request(providers=("ssh",), host="me@elsewhere"), False),
        (request(), True),
        (request(providers=("local",)), False),
    ):
        assert bool(sent_along(home, what)) is goes
        shutil.rmtree(home.staged_data("owl-07"))
    run.folder.request.write_text(Request(recipe="gpt2-124m", host="me@elsewhere").to_json())
    assert sent_along(home, request(providers=("ssh",), host="me@elsewhere")) == {}, "another request than it was"


def test_a_plan_other_than_the_receipts_vouches_for_nothing(home: Home) -> None:
    run = run_before(home)
    plan = run.folder.plan.read_text()
    run.folder.plan.write_text(plan + " ")
    assert sent_along(home) == {}


@pytest.mark.parametrize("how", ["changed", "not in the chain"])
def test_a_receipt_other_than_the_chains_vouches_for_nothing(home: Home, how: str) -> None:
    run = run_before(home)
    if how == "changed":
        run.folder.receipt.write_text(json.dumps(json.loads(run.folder.receipt.read_bytes())))
    else:
        home.ledger.write_bytes(b"")
    assert sent_along(home) == {}


def test_an_unsigned_receipt_vouches_for_nothing(home: Home) -> None:
    CloudRun(home, "elk-33").until_gone().settle()
    (home.keys / PRIVATE_NAME).unlink()
    run_before(home)
    assert sent_along(home) == {}


def test_what_is_larger_than_a_cache_may_be_stays_here(home: Home) -> None:
    run_before(home, cache=bytes(MOST_BYTES + 1))
    assert sent_along(home) == {}

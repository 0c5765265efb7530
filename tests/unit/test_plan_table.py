"""Tests of `gpurun plan`: without --gpu it judges every offer of the catalogue and ranks them by cost to finish."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path

import pytest

from gpurun.cli.commands.recipes import list_all
from gpurun.cli.session import Session
from gpurun.core.clock import SystemClock
from gpurun.core.errors import NoOffer, UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.money import format_usd, parse_usd, usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices, Estimate, Plan, Request
from gpurun.core.uplink import Uplink
from gpurun.jobs.training.estimate import estimate
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.planning.budget import candidates, rental_cost
from gpurun.planning.candidates import WEAK
from gpurun.planning.market import Market
from gpurun.planning.transfer import estimate_load, load_for
from gpurun.providers import catalog
from gpurun.providers.catalog import all_offers, gpu_flag, offers_for, parse_gpu, rows_for, terms_of
from gpurun.view.number_format import format_bytes, format_duration
from gpurun.view.plan_screen import plan_text
from gpurun.view.style import Style
from gpurun.view.styled_text import cells
from tests.changed_plan import changed_plan
from tests.plan_makers import catalogue_quote, make_plan
from tests.refusals import refusal

OFFERS = [offer for offer in all_offers() if offer.gpu_count]


def planned(home: Path, cap: str, **changes: object) -> Plan:
    wanted = {"recipe": "gpt2-124m", "max_cost_micros": parse_usd(cap), "uplink_mbit": 1000} | changes
    request = Request(**wanted)  # type: ignore[arg-type]
    return make_plan(request, run="fox-41", home=Home(home).prepare(), clock=SystemClock(), say=print, need_data=False)


def words_of(plan: Plan) -> tuple[str, ...]:
    """Return the command line that starts the trainer."""
    return plan.job.workload(plan, bundle_root() / "trainer", cpus=1).argv


@pytest.fixture(autouse=True)
def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.planning.place.ready_providers", lambda home: [])


def test_every_offer_is_judged_and_ranked_by_dollars_to_finish(tmp_path: Path) -> None:
    plan = planned(tmp_path, "25")
    shown = [one.offer for one in plan.candidates]
    assert sorted([*shown, *(one for one in OFFERS if one.type_id == "gpu_8x_v100_n")], key=str) == sorted(
        OFFERS, key=str
    )
    finishing = [one for one in plan.candidates if one.finishes]
    assert plan.candidates[: len(finishing)] == tuple(finishing)
    assert [one.expected_micros for one in finishing] == sorted(one.expected_micros for one in finishing)
    assert all(one.worst_micros is not None and one.worst_micros <= usd(25) for one in finishing)
    for one in plan.candidates:
        assert one.estimate.fits
        assert one.estimate.tokens_per_s is not None
        assert one.finishes or one.why_not
        assert one.finishes or one.why_not.startswith(WEAK) or one.reach is None or one.reach.step < one.reach.steps
    assert Plan.from_json(plan.to_json()) == plan


def test_only_one_of_types_that_differ_by_name_is_shown(tmp_path: Path) -> None:
    both = [one.type_id for one in OFFERS if one.gpu == "V100" and one.provider == "lambda"]
    assert len(both) == 2, "Lambda has it under two names, and a live price is looked up for either"
    for options in ({}, {"gpu": parse_gpu("8xV100"), "choices": Choices(weak_lease=True)}):
        plan = planned(tmp_path, "100", **options)
        assert [one.offer.type_id for one in plan.candidates if one.offer.type_id in both] == both[:1]


def test_a_part_that_hours_buy_is_named_beside_its_expected_cost(tmp_path: Path) -> None:
    plan = planned(tmp_path, "25", gpu=parse_gpu("8xA100"), hours=1.0)
    assert plan.expected_micros < plan.worst_micros
    reach = plan.candidates[0].reach
    assert reach is not None
    table = plan_text(plan, Style(width=120))
    part = f"{reach.step:,} of 18,865 ({reach.step / 18865:.0%})".replace(",", " ")
    assert part in table
    assert "18 865 (" not in plan_text(planned(tmp_path, "25", gpu=parse_gpu("8xA100"), hours=9.0), Style(width=120))


def test_eight_a100_are_near_the_published_94_minutes_and_price(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, "25")
    assert (plan.offer.gpu_count, plan.offer.gpu) == (8, "A100 SXM"), "without --gpu it is the recipe's own"
    assert plan.estimate.likely_s == pytest.approx(1.07 / 0.98 * 94 * 60, rel=0.05)
    assert usd(20) < plan.expected_micros < usd(23)
    assert all(figure in plan.estimate.basis for figure in ("llm.c", "56 %", "0.98x"))
    assert any("8xA100" in note for note in plan.notes)


def test_a_recipes_gpu_that_is_too_dear_yields_to_the_best_other(tmp_path: Path) -> None:
    plan = planned(tmp_path, "20")
    assert plan.offer.gpu_count == 1
    assert plan.worst_micros <= usd(20)
    assert any("--gpu 1xH100" in note for note in plan.notes)
    assert parse_gpu("1xH100").count == 1


def test_where_none_finishes_the_advice_is_what_train_then_does(tmp_path: Path) -> None:
    """`train` without --gpu takes the recipe's GPU, so an advised cap or time must come with its --gpu."""
    with refusal(NoOffer, "offer.over_cap", "$9.00") as refused:
        planned(tmp_path, "9")
    advised = re.findall(r"--gpu (\S+) --(max-cost|hours) ([0-9.]+)", refused.value.hint)
    (far, _, hours), (gpu, _, cap) = (way for way in advised if way[2] != "9.00")
    whole = planned(tmp_path, cap, gpu=parse_gpu(gpu))
    assert whole.candidates[0].finishes
    part = planned(tmp_path, "9", gpu=parse_gpu(far), hours=float(hours))
    reach = part.candidates[0].reach
    assert reach is not None
    assert f"({reach.step / reach.steps:.0%})" in refused.value.what
    with pytest.raises(NoOffer) as named:
        planned(tmp_path, "9", gpu=parse_gpu("1xH100"))
    assert not re.search(r"^--gpu", named.value.hint, re.M), "who named a GPU need not be told to"


@pytest.mark.parametrize(
    ("set_to", "others", "gpu"),
    [
        (("layers=96",), "", "8xB200"),
        (
            ("layers=40", "hardware.gpu=1xA100", "batch_tokens=1024"),
            "1024 tokens",
            "1xB300",
        ),
    ],
)
def test_where_none_fits_it_says_the_least_cut_and_its_offer(
    set_to: tuple[str, ...], others: str, gpu: str, tmp_path: Path
) -> None:
    """The advice once fitted the largest single card, although eight smaller cards can share a larger model."""
    sizes = ("width=6144", "heads=48", *set_to)
    with pytest.raises(NoOffer) as refused:
        planned(tmp_path, "900000", overrides=sizes)
    assert others in refused.value.what
    assert f"{parse_gpu(gpu).count}×{parse_gpu(gpu).name}" in refused.value.what
    cuts = re.findall(r"(layers|width) [0-9]+ -> ([0-9]+)", refused.value.what)
    assert [name for name, _ in cuts] == ["layers", "width"]
    for name, value in cuts:
        cut = (*sizes, f"model.{name}={value}")
        assert planned(tmp_path, "900000", overrides=cut, gpu=parse_gpu(gpu)).estimate.fits
        larger = int(value) + {"layers": 1, "width": 48}[name]
        with pytest.raises(NoOffer, match="micro_batch 1"):
            planned(tmp_path, "900000", overrides=(*sizes, f"model.{name}={larger}"))


def test_advised_hours_get_as_far_as_promised_however_few(tmp_path: Path) -> None:
    """The advised hours were once rounded to hundredths, which took half a minute away from four."""
    options = {"recipe": "gpt2-355m", "gpu": parse_gpu("8xB200"), "providers": ("aws",)}
    with pytest.raises(NoOffer) as refused:
        planned(tmp_path, "100", **options)
    promised = int(re.findall(r"step ([0-9,]+) of", refused.value.what)[0].replace(",", ""))
    hours = float(re.findall(r"--hours ([0-9.]+)", refused.value.hint)[0])
    reach = planned(tmp_path, "100", hours=hours, **options).candidates[0].reach
    assert reach is not None
    assert 0.97 * promised <= reach.step <= promised


def test_the_trainer_is_given_the_micro_batch_that_was_planned(
    tmp_path: Path,
) -> None:
    """The trainer once tried the recipe's micro-batch on paid time: 64 sequences on an L4, which holds only 32."""
    small, large = (planned(tmp_path, "9000", gpu=parse_gpu(gpu)) for gpu in ("1xL4", "1xH100"))
    assert (small.estimate.micro_batch, small.job.resolved["train"]["micro_batch"]) == (32, 64)
    assert "--micro-batch=32" in words_of(small)
    assert large.estimate.micro_batch == 64
    assert not [word for word in words_of(large) if word.startswith("--micro-batch")]


def test_no_deeper_model_fits_and_trainer_and_plan_share_alike(
    tmp_path: Path,
) -> None:
    """If a model does not fit, no deeper one may.

    A plan once accepted 79 layers on four T4, refused 80 to 95, and accepted 96.
    """
    sizes = ("width=768", "heads=12", "batch_tokens=4096", "micro_batch=1", "train.compile=false")
    offer = next(row for row in offers_for(parse_gpu("4xT4")) if row.gpu_count == 4)

    def guess(layers: int) -> Estimate:
        return estimate(resolve(load_recipe("gpt2-124m"), "full", (*sizes, f"layers={layers}"), processes=4), offer)

    fits = [guess(layers).fits for layers in range(60, 200, 4)]
    assert sorted(fits, reverse=True) == fits
    assert {guess(layers).sharded for layers in (60, 79)} == {False}
    assert {guess(layers).sharded for layers in (80, 95, 96)} == {True}
    for more, expected in (("layers=79", []), ("layers=80", ["--parallel=fsdp"]), ("parallel=fsdp", [])):
        command = words_of(planned(tmp_path, "9000", overrides=(*sizes, more), gpu=parse_gpu("4xT4")))
        assert [word for word in command if word.startswith("--parallel")] == expected


@pytest.mark.parametrize(("provider", "gib", "layers"), [("aws", 8, 6), ("lambda", 16, 14)])
def test_a_machine_without_a_gpu_does_not_hold_whatever_model(
    tmp_path: Path, provider: str, gib: int, layers: int
) -> None:
    """Every model once "fitted" on a machine without a GPU, where the kernel would have killed it on paid time."""
    keys = ("width=2048", "heads=16", "context=512", "batch_tokens=4096", "layers=24")
    options = {"recipe": "mini-gpt", "gpu": parse_gpu("cpu"), "providers": (provider,)}
    choices = Choices(accept_cpu=True, weak_lease=True)
    with refusal(NoOffer, "offer.none_fits", f"{gib} GiB", f"layers 24 -> {layers}"):
        planned(tmp_path, "500", overrides=keys, choices=choices, **options)
    cut = planned(tmp_path, "500", overrides=(*keys, f"layers={layers}"), choices=choices, **options)
    assert (cut.offer.gpu_count, cut.offer.memory_gb, cut.estimate.fits) == (0, gib, True)


@pytest.mark.parametrize(("dropout", "fit"), [("0.0", "4/6G"), ("0.1", "1/6G")])
def test_the_table_says_what_fits_on_a_machine_without_a_gpu(tmp_path: Path, dropout: str, fit: str) -> None:
    """On a CPU, attention keeps its weights in memory if there is dropout, so that fewer sequences fit."""
    sizes = ("layers=24", "width=512", "heads=8", "context=1024", "batch_tokens=65536", "micro_batch=64")
    options = {"recipe": "mini-gpt", "gpu": parse_gpu("cpu"), "providers": ("aws",)}
    choices = Choices(accept_cpu=True)
    plan = planned(tmp_path, "90", overrides=(*sizes, f"dropout={dropout}"), choices=choices, **options)
    row = next(line for line in plan_text(plan, Style(width=120)).splitlines() if "us-east-1" in line)
    assert row.split()[5] == fit


def test_where_a_machine_without_a_gpu_is_the_best_it_is_planned(tmp_path: Path) -> None:
    """The plan must name the machine without a GPU as the best; it once ended in a KeyError."""
    terms = {"recipe": "tiny-hf", "overrides": ("train.steps=20", "schedule.warmup_steps=0"), "providers": ("lambda",)}
    plan = planned(tmp_path, "0.09", choices=Choices(weak_lease=True), **terms)
    assert plan.offer.gpu_count == 0
    assert any("--gpu cpu" in note for note in plan.notes)


def test_an_unsold_recipe_gpu_shows_others_and_rehearses_free(tmp_path: Path) -> None:
    """AWS sells A100 only in eights: a plan for one A100 must show other GPUs and not advise to rent eight."""
    own = ("hardware.gpu=1xA100",)
    plan = planned(tmp_path, "5", recipe="mini-gpt", providers=("aws",), overrides=own)
    assert (plan.offer.gpu_count, {one.offer.provider for one in plan.candidates}) == (1, {"aws"})
    assert f"--gpu {gpu_flag(plan.offer)}" in plan.notes[-1]
    (unsold,) = (note for note in plan.notes if "8xA100" in note)
    assert "1xA100" in unsold
    request = Request(recipe="mini-gpt", overrides=("data.limit_mb=1", *own), providers=("aws",), dry_run=True)
    rehearsed = make_plan(
        request, run="fox-41", home=Home(tmp_path).prepare(), clock=SystemClock(), say=print, need_data=False
    )
    assert (rehearsed.candidates, rehearsed.worst_micros) == ((), 0)
    assert unsold in rehearsed.notes
    with refusal(NoOffer, "offer.none", "1xA100", "8xA100"):
        planned(tmp_path, "5", recipe="mini-gpt", providers=("aws",), gpu=parse_gpu("1xA100"))
    with refusal(NoOffer, "offer.no_region", "mars", "us-east-1"):
        planned(tmp_path, "5", providers=("aws",), choices=Choices(region="mars"))


def test_catalogue_prices_are_marked_and_keyless_clouds_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = [one.model_copy(update={"price_source": "live"}) for one in OFFERS if one.type_id == "NVIDIA A100-SXM4-80GB"]
    monkeypatch.setattr("gpurun.planning.place.ready_providers", lambda home: ["runpod"])
    for offers in ([one for one in live if one.gpu_count == 8], []):
        market = Market(tuple(offers), (), 1_800_000_000.0, ("runpod",))
        monkeypatch.setattr("gpurun.planning.live_offers.live_offers", lambda *_, market=market: market)
        plan = planned(tmp_path, "60")
        eights = [one.offer for one in plan.candidates if (one.offer.gpu, one.offer.gpu_count) == ("A100 SXM", 8)]
        assert {one.provider for one in eights} == {"aws", "lambda", *(one.provider for one in offers)}
        assert {one.provider for one in eights if one.price_source == "live"} == {one.provider for one in offers}
        assert any("runpod" in note for note in plan.notes)
        assert any("8xA100 now" in note for note in plan.notes) is (not offers)


def test_a_spot_plan_says_the_catalogue_has_no_spot_prices(tmp_path: Path) -> None:
    spot = planned(tmp_path, "60", gpu=parse_gpu("8xA100"), choices=Choices(spot=True))
    assert "on-demand" in spot.notes[0]
    assert "on-demand" not in planned(tmp_path, "60").notes[0]


def test_a_lambda_the_users_key_ends_is_no_weak_catalogue_lease(tmp_path: Path) -> None:
    """A plan with --lambda-guard but without a Lambda key was once refused with the advice to add --lambda-guard."""
    options = {"gpu": parse_gpu("1xA100"), "providers": ("lambda",)}
    for cap in (parse_usd("60"), None):
        with refusal(NoOffer, "offer.weak_lease", "1×A100", "--lambda-guard"):
            planned(tmp_path, "60", max_cost_micros=cap, **options)
    plan = planned(tmp_path, "60", choices=Choices(guard=True), **options)
    assert plan.offer.dies_by_itself == terms_of("lambda").with_guard
    everywhere = planned(tmp_path, "60", choices=Choices(guard=True))
    assert not any(one.why_not == WEAK for one in everywhere.candidates)


def test_with_a_gpu_only_that_is_shown(tmp_path: Path) -> None:
    plan = planned(tmp_path, "25", gpu=parse_gpu("8xA100"))
    assert {(one.offer.gpu_count, one.offer.gpu) for one in plan.candidates} == {(8, "A100 SXM")}


def test_shipping_counts_the_data_folder_and_a_missing_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "shards").mkdir()
    with (tmp_path / "shards" / "large.txt").open("wb") as sparse:
        sparse.truncate(10**9)
    by_name, by_tilde = (
        planned(tmp_path, "60", data=name, gpu=parse_gpu("8xA100"), uplink_mbit=20).lease.ship_s
        for name in (f"{tmp_path}/shards", "~/shards")
    )
    assert by_tilde == by_name > 8 * 10**9 / 20e6
    assert planned(tmp_path, "60", data="~/shards").data.source.startswith("~/shards ")
    with refusal(UsageError, "data.missing", "nowhere", "--data"):
        planned(tmp_path, "60", data=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "tokens", "code"),
    [("char", 97, "data.other_tokenizer"), ("gpt2", 60_000, "data.vocabulary_larger"), ("gpt2", 50257, "")],
)
def test_shards_with_a_tokeniser_train_refuses_fail_in_the_plan(
    tmp_path: Path, name: str, tokens: int, code: str
) -> None:
    tokenizer = {"name": name, "sha256": "0" * 64, "vocab_size": tokens}
    shard = {"name": "train_000001.bin", "tokens": 300, "sha256": ""}
    manifest = {"tokenizer": tokenizer, "source": {}, "train": [shard], "val": []}
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "data.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError) if code else contextlib.nullcontext() as refused:
        planned(tmp_path, "60", data=str(tmp_path / "shards"))
    assert not code or refused.value.code == code


@pytest.mark.parametrize(
    ("recipe", "most"), [("gpt2-124m-owt", 19e9), ("gpt2-124m-epochs", 6.1e9), ("shakespeare-char", 3e6)]
)
def test_shards_that_training_reads_many_times_travel_once(tmp_path: Path, recipe: str, most: float) -> None:
    """OpenWebText was once counted as an upload of 590 GB: 33 times its size, and six times the rented disk."""
    plan = planned(tmp_path, "90000", recipe=recipe, gpu=parse_gpu("1xA100"))
    assert plan.ship_bytes <= most
    assert plan.ship_bytes <= 1e9 * plan.job.resolved["hardware"]["disk_gb"]
    assert plan.data.train_tokens * 2 == plan.ship_bytes
    notes = " ".join(plan.notes)
    assert format_bytes(plan.ship_bytes) in notes


def test_a_plan_says_what_sending_unseen_shards_takes_and_costs(tmp_path: Path) -> None:
    """`plan` must say, as `train` does, how long an upload of 5 GB takes, what it costs and what would save it."""
    (tmp_path / "shards").mkdir()
    with (tmp_path / "shards" / "large.txt").open("wb") as sparse:
        sparse.truncate(5 * 10**9)
    plan = planned(tmp_path, "60", gpu=parse_gpu("8xA100"), data=str(tmp_path / "shards"), uplink_mbit=None)
    notes = " ".join(plan.notes)
    assert all(figure in notes for figure in ("33 min", "$6.06", "--stage s3://"))
    shown = " ".join(plan_text(plan, Style(width=120)).split())
    assert format_duration(plan.lease.ship_s) in shown
    assert "$6.28" in shown


def test_a_refusal_says_what_a_bucket_or_a_faster_line_would_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "shards").mkdir()
    with (tmp_path / "shards" / "large.txt").open("wb") as sparse:
        sparse.truncate(18865 * 524288 * 2)
    options = {"gpu": parse_gpu("8xA100"), "data": str(tmp_path / "shards")}
    with refusal(NoOffer, "offer.over_cap", "$47.04", "--stage s3://BUCKET/PREFIX:", "$23.05", "201 Mbit/s"):
        planned(tmp_path, "25", **options, uplink_mbit=None)
    assert planned(tmp_path, "25", **options, uplink_mbit=201).worst_micros <= usd(25)
    with pytest.raises(NoOffer):
        planned(tmp_path, "25", **options, uplink_mbit=200)
    with refusal(NoOffer, "offer.over_cap", "$47.04", "--stage s3://BUCKET/PREFIX --max-cost 23.05"):
        planned(tmp_path, "20", **options, uplink_mbit=None)
    staged = Request(recipe="gpt2-124m", **options, max_cost_micros=usd(25), choices=Choices(stage="s3://b"))
    (best, *_) = catalogue_quote(staged, resolve(load_recipe("gpt2-124m"), "full")).candidates
    assert best.finishes
    assert format_usd(best.expected_micros or usd(0)) == "$21.43"


def test_without_data_the_machine_downloads_the_recipes_shards(tmp_path: Path) -> None:
    """A new user must need neither a bucket nor an upload for the first command line of the README."""
    plan = planned(tmp_path, "25", gpu=parse_gpu("8xA100"), uplink_mbit=None)
    assert plan.chosen.finishes
    assert plan.worst_micros <= usd(25)
    (download,) = (note for note in plan.notes if "hf:kjj0/finewebedu10B-gpt2" in note)
    assert all(figure in download for figure in ("20 GB", "5 m 47 s"))
    assert "--stage" not in " ".join(plan.notes)
    shown = " ".join(plan_text(plan, Style(width=120)).split())
    assert all(figure in shown for figure in ("5 m 47 s", "$1.08"))
    first_screen = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").partition("make demo")[0]
    assert f"about {format_usd(plan.expected_micros)}" in first_screen


def test_a_rehearsal_says_the_paid_uploads_cost_and_its_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: False)
    options = {"recipe": "gpt2-124m-owt", "gpu": parse_gpu("8xA100"), "dry_run": True}
    notes = " ".join(planned(tmp_path, "25", **options, uplink_mbit=None).notes)
    assert all(figure in notes for figure in ("20 Mbit/s", "2 h 01 m", "118 min", "$21.90", "--stage s3://"))


def test_a_disk_that_train_would_find_too_small_is_in_the_plan(tmp_path: Path) -> None:
    """A disk that is too small was once priced without a warning; `train` refused it after making the shards."""
    options = {"gpu": parse_gpu("8xA100"), "overrides": ("hardware.disk_gb=10",)}
    warnings = " ".join(planned(tmp_path, "60", **options).warnings)
    assert all(figure in warnings for figure in ("19.8 GB", "--set hardware.disk_gb=46"))
    enough = {**options, "overrides": ("hardware.disk_gb=46",)}
    assert not planned(tmp_path, "60", **enough).warnings


def test_a_disk_too_small_at_the_next_cloud_is_in_the_plan_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS orders at least 75 GB, RunPod only what the recipe says: RunPod's disk was once full on paid time."""
    cheap = tuple(one.model_copy(update={"rate_micros_per_hour": usd(2)}) if one.provider == "aws" else one
                  for one in OFFERS)  # fmt: skip
    monkeypatch.setattr(catalog, "all_offers", lambda: cheap)
    options = {"gpu": parse_gpu("8xA100"), "overrides": ("hardware.disk_gb=20",)}
    plan = planned(tmp_path, "60", **options)
    assert plan.offer.provider == "aws"
    (too_small,) = plan.warnings
    assert all(figure in too_small for figure in ("26 GB", "runpod"))
    assert not planned(tmp_path, "60", **options, providers=("aws",)).warnings


def test_a_text_counts_by_what_is_taken_in_the_recipes_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"x" * (9 << 20))
    sizes = {
        limit: planned(
            tmp_path, "60", recipe="mini-gpt", data=str(tmp_path / "text.txt"), overrides=(f"data.limit_mb={limit}",)
        ).ship_bytes
        for limit in (0, 4)
    }
    assert sizes == {0: 18 << 20, 4: 8 << 20}, "two bytes for each character"


@pytest.mark.parametrize("has_manifest", [False, True])
def test_data_that_goes_by_a_bucket_is_planned_at_its_pace(tmp_path: Path, has_manifest: bool) -> None:
    """The plan once assumed an upload from this computer at 2 MB/s, although `train` would use the bucket."""
    shards = tmp_path / "shards"
    shards.mkdir()
    with (shards / "large.txt").open("wb") as sparse:
        sparse.truncate(10**9)
    if has_manifest:
        (shards / "data.json").write_text("{}")
    full = resolve(load_recipe("gpt2-124m"), "full")
    by = {
        stage: Request(recipe="gpt2-124m", data=str(shards), choices=Choices(stage=stage)) for stage in ("", "s3://b")
    }
    seconds = {stage: load_for(request, full, None, Uplink())[0].ship_s for stage, request in by.items()}
    assert seconds[""] > 400
    assert seconds["s3://b"] < 40


@pytest.mark.parametrize(
    ("width", "beside", "left"),
    [
        (40, (), ("Provider", "$/h", "Region", "dies by")),
        (60, ("Provider", "slow $"), ("Region", "dies by")),
        (80, ("Provider", "$/h", "slow $", "dies by"), ("tok/s", "boot")),
        (120, ("Provider", "$/h", "slow $", "dies by", "Region", "fit", "tok/s", "boot"), ()),
    ],
)
def test_time_and_dollars_always_show_and_the_region_drops_first(
    tmp_path: Path, width: int, beside: tuple[str, ...], left: tuple[str, ...]
) -> None:
    lines = plan_text(planned(tmp_path, "25", gpu=parse_gpu("8xA100")), Style(width=width)).splitlines()
    assert all(cells(line) <= width for line in lines)
    heading = next(line for line in lines if "est. $" in line)
    assert all(name in heading for name in ("GPU", "time", *beside))
    assert not any(name in heading for name in left)
    chosen = next(line for line in lines if "→" in line)
    assert all(word in chosen for word in ("8×A100 SXM 80G", "1 h 44 m", "21.92"))


def test_at_most_ten_fitting_rows_show_and_the_rest_count_by_why(tmp_path: Path) -> None:
    """A table of sixty offers, forty of which could not be rented, once hid the chosen one."""
    plan = planned(tmp_path, "60")
    table = plan_text(plan, Style(width=80))
    clouds = ("runpod", "lambda", "aws")
    rows = [line for line in table.splitlines() if any(f" {cloud}  " in line for cloud in clouds)]
    assert len(rows) == 10
    assert [row for row in rows if "→" in row and "8×A100" in row], "the recipe's own, whatever is cheaper"
    assert all(row.endswith(("pod key", "power-off")) for row in rows)
    more = re.search(r"  (\d+) more \((.+)\): plan --all\.", table)
    assert more is not None
    assert sum(int(count) for count in re.findall(r"\d+", more[2])) == int(more[1])
    assert {"dearer", "weak lease"} <= {part.split(" ", 1)[1] for part in more[2].split(", ")}
    assert "$60.00" in table
    every = plan_text(plan, Style(width=80), every=True)
    assert len([line for line in every.splitlines() if any(f" {cloud}  " in line for cloud in clouds)]) == 10 + int(
        more[1]
    )


def test_where_none_fits_a_rehearsal_still_shows_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.planning.trainer_proposal.has_cuda", lambda: False)
    plan = planned(tmp_path, "5", gpu=parse_gpu("8xA100"), dry_run=True)
    table = plan_text(plan, Style(width=120))
    assert "needs $" in table
    assert "→" not in table, "none is chosen"


def test_one_row_stands_for_a_card_at_one_price_in_many_regions(tmp_path: Path) -> None:
    plan = planned(tmp_path, "60", gpu=parse_gpu("8xA100"))
    first = plan.candidates[0]
    there = [
        first.model_copy(update={"offer": first.offer.model_copy(update={"region": region})}) for region in ("a", "b")
    ]
    same = plan.model_copy(update={"candidates": (first, *there)})
    table = plan_text(same, Style(width=120))
    assert len([line for line in table.splitlines() if "8×A100 SXM 80G" in line]) == 1
    assert "community +2" in table


def test_a_weak_lease_is_named_so_and_not_by_a_cap_it_would_need(tmp_path: Path) -> None:
    """The row of a Lambda offer once said "needs $35"; with that cap it said that it needs --accept-weak-lease."""
    plan = planned(tmp_path, "25", gpu=parse_gpu("8xA100"))
    at_lambda = [row for row in plan.candidates if row.offer.provider == "lambda"]
    assert at_lambda
    assert all(row.why_not.startswith(f"{WEAK}; needs $") for row in at_lambda)
    table = plan_text(plan, Style(width=120), every=True)
    assert all(row.endswith("weak lease") for row in table.splitlines() if " lambda " in row)


def test_the_slow_end_is_between_the_expected_and_the_worst(tmp_path: Path) -> None:
    for one in planned(tmp_path, "60").candidates:
        assert one.expected_micros is not None
        assert one.slow_micros is not None
        assert one.expected_micros <= one.slow_micros
        assert one.worst_micros is None or one.slow_micros <= one.worst_micros


@pytest.mark.parametrize(("recipe", "gpu"), [("mini-gpt", None), ("gpt2-124m", "any"), ("gpt2-124m", "8xany")])
def test_any_is_the_cheapest_card_that_fits_and_finishes(tmp_path: Path, recipe: str, gpu: str | None) -> None:
    plan = planned(tmp_path, "100", recipe=recipe, gpu=parse_gpu(gpu) if gpu else None)
    count = 8 if gpu == "8xany" else 1
    assert {one.offer.gpu_count for one in plan.candidates} == {count}
    finishing = [one.expected_micros for one in plan.candidates if one.finishes]
    assert plan.expected_micros == min(cost for cost in finishing if cost is not None)
    assert "GH200" not in {one.offer.gpu for one in plan.candidates}, "of another architecture: by its name alone"


@pytest.mark.parametrize("typed", ["A5000", "RTX 3090", "5090", "4000 Ada", "RTX4000ADA"])
def test_an_unmeasured_card_is_offered_for_hours_without_figures(
    tmp_path: Path, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = parse_gpu(f"1x{typed}")
    with refusal(NoOffer, "offer.none", "gpurun auth set runpod", "--hours"):
        planned(tmp_path, "5", gpu=need)
    (row,) = rows_for(need, "runpod")
    live = row.model_copy(update={"rate_micros_per_hour": usd("0.27"), "price_source": "live"})
    monkeypatch.setattr("gpurun.planning.place.ready_providers", lambda home: ["runpod"])
    dearer = live.model_copy(update={"rate_micros_per_hour": usd("0.40"), "tier": "secure"})
    market = Market((dearer, live), (), 1_800_000_000.0, ("runpod",))
    monkeypatch.setattr("gpurun.planning.live_offers.live_offers", lambda *_: market)
    with refusal(NoOffer, "offer.none_fits", "--hours 2"):
        planned(tmp_path, "5", gpu=need)
    plan = planned(tmp_path, "5", gpu=need, hours=2.0)
    assert plan.estimate.tokens_per_s is None
    assert plan.lease.train_s == 7200
    assert usd("0.54") < plan.expected_micros <= plan.worst_micros
    table = plan_text(plan, Style(width=80))
    assert "speed unknown" in table
    assert next(line for line in table.splitlines() if "→" in line).endswith("pod key")


def test_text_not_yet_counted_in_tokens_is_named_in_one_phrase(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    table = plan_text(planned(tmp_path, "25", recipe="mini-gpt", data=str(tmp_path / "text.txt")), Style(width=200))
    (ship,) = (line for line in table.splitlines() if "text.txt" in line)
    assert "char" in ship


@pytest.mark.parametrize("width", [80, 120])
def test_the_last_column_is_never_cut_and_the_flag_stands_below(tmp_path: Path, width: int) -> None:
    lines = plan_text(planned(tmp_path, "100"), Style(width=width), every=True).splitlines()
    rows = [line for line in lines if any(f"  {cloud}  " in f"{line}  " for cloud in ("runpod", "lambda", "aws"))]
    ends = {"pod key", "power-off", "weak lease"}
    assert all(row.endswith(tuple(ends)) or re.search(r"needs \$[\d,.]+$", row) for row in rows)
    assert ends == {end for end in ends if any(row.endswith(end) for row in rows)}
    assert any("--accept-weak-lease " in f"{line} " for line in lines)


def test_why_an_offer_cannot_train_is_a_word_explained_below(tmp_path: Path) -> None:
    table = plan_text(planned(tmp_path, "5", recipe="tiny-hf"), Style(width=120), every=True)
    keys = ("train.batch_tokens=128",)
    odd = plan_text(
        planned(tmp_path, "5", recipe="mini-gpt", overrides=(*keys, "hardware.gpu=2xB200")),
        Style(width=120),
        every=True,
    )
    for word, gpu, screen in (("one process", "8×A100", table), ("no bf16", "1×T4", table), ("uneven", "4×A100", odd)):
        rows = [line for line in screen.splitlines() if line.endswith(f"  {word}")]
        assert any(gpu in row for row in rows)
        assert f"; {word}: " in " ".join(screen.split())


def test_an_offer_that_only_this_laptop_ends_says_no_in_capitals(tmp_path: Path) -> None:
    plan = planned(tmp_path, "60", gpu=parse_gpu("8xA100"), choices=Choices(weak_lease=True))
    lines = plan_text(plan, Style(width=80)).splitlines()
    assert any("lambda" in line and line.endswith("  NO") for line in lines)
    assert any("NO: " in line for line in lines), "and says below what that is"


@pytest.mark.parametrize(
    ("cloud", "gpu"), [("lambda", "8xA100"), ("aws", "1xL4"), ("aws", "8xA100"), ("runpod", "8xA100")]
)
def test_the_worst_case_is_the_sum_that_is_written_beside_it(tmp_path: Path, cloud: str, gpu: str) -> None:
    """The sum printed beside the worst case must equal it: it was once 31 cents off for an L4, and 26 at Lambda."""
    plan = planned(tmp_path, "500", gpu=parse_gpu(gpu), providers=(cloud,), choices=Choices(weak_lease=True))
    table = " ".join(plan_text(plan, Style(width=120)).split())
    sum_of = re.search(
        r"\$([\d.,]+) = (?:(\d+) h)? ?(?:(\d+) m)? ?(?:(\d+) s)?(?: \([^)]*minute\))? × \$([\d.]+)/h"
        r"(?: \+ [^$]*\$([\d.]+))?",
        table,
    )
    assert sum_of is not None
    worst, hours, minutes, seconds, rate, beside = (float((part or "0").replace(",", "")) for part in sum_of.groups())
    assert worst == pytest.approx((hours + minutes / 60 + seconds / 3600) * rate + beside, abs=0.0101)
    assert ("minute) ×" in table) is (cloud == "lambda")


def test_a_set_ups_limit_is_in_lease_and_worst_case_and_shown(tmp_path: Path) -> None:
    options = {"gpu": parse_gpu("8xA100"), "providers": ("runpod",)}
    bare, usual, long = (
        planned(tmp_path, "500", **options, choices=choices)
        for choices in (Choices(), Choices(setup="true"), Choices(setup="true", setup_limit_s=1800))
    )
    assert [plan.lease.setup_s for plan in (bare, usual, long)] == [0, 600, 1800]
    assert [plan.lease.total_s - bare.lease.total_s for plan in (usual, long)] == [600, 1800]
    hourly = rental_cost(bare.offer, 3600, 0, 0) - rental_cost(bare.offer, 0, 0, 0)
    assert long.worst_micros - bare.worst_micros >= hourly // 2
    for candidate in (*usual.candidates, *long.candidates):
        assert candidate.lease is None or candidate.lease.setup_s in (600, 1800)
    text = [" ".join(plan_text(plan, Style(width=200)).split()) for plan in (bare, usual, long)]
    assert ["set-up" in table.lower() for table in text] == [False, True, True]
    assert text[2].count("30 m") >= 2, "on a line of its own, and in the sum of the lease"
    assert "--setup-limit" in text[2]
    tight = planned(tmp_path, "30", **options, choices=Choices(setup="true"))
    assert tight.worst_micros <= usd(30)


def test_pip_installed_hugging_face_libraries_get_set_up_time(tmp_path: Path) -> None:
    plan = planned(tmp_path, "500", recipe="tiny-hf", providers=("runpod",), gpu=parse_gpu("1xA100"))
    assert (bool(plan.choices.setup), plan.lease.setup_s) == (True, 600)


def test_what_is_left_of_the_cap_is_never_rounded_up(tmp_path: Path) -> None:
    plan = changed_plan(planned(tmp_path, "25"), {"worst_micros": usd("24.995")})
    assert "left $0.00" in plan_text(plan, Style(width=120))
    over = changed_plan(plan, {"worst_micros": usd("25.001")})
    assert "left -$0.01" in plan_text(over, Style(width=120))


def test_forty_offers_are_planned_well_within_300_ms() -> None:
    full = resolve(load_recipe("gpt2-124m"), "full")
    began = time.process_time()
    found = candidates(OFFERS[:40], full, estimate_load(full, 50_000_000), cap=parse_usd("25"))
    assert len(found) == 40
    assert time.process_time() - began < 0.3


def test_the_recipe_list_counts_the_same_parameters_as_a_plan(tmp_path: Path) -> None:
    """The list once assumed a vocabulary of characters, and showed a translation model a third too small."""
    listed = {row["name"]: row["parameters"] for row in list_all(Session(home=Home(tmp_path))).data["recipes"]}
    for name in ("annotated-transformer", "mini-gpt", "gpt2-124m"):
        assert listed[name] == planned(tmp_path, "2000", recipe=name).job.parameters

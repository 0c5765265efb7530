"""Tests of the packaged catalogue: what a value of `--gpu` means, and which offers match it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import cards as peaks
from gpurun.core.money import usd
from gpurun.core.records import GpuNeed
from gpurun.providers.catalog import all_offers, cards, counts_of, offers_for, parse_gpu, terms_of


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("8xA100", GpuNeed(count=8, name="A100")),
        ("A100", GpuNeed(count=1, name="A100")),
        ("8 × a100-80gb", GpuNeed(count=8, name="A100", memory_gb=80)),
        ("cpu", GpuNeed(count=0, name="cpu")),
        ("4090", GpuNeed(count=1, name="RTX4090")),
        ("2xRTX A6000", GpuNeed(count=2, name="A6000")),
        ("GH200", GpuNeed(count=1, name="GH200")),
        ("2x8xA100-80GB", GpuNeed(count=8, name="A100", memory_gb=80, nodes=2)),
        ("2x1xany", GpuNeed(count=1, name="any", nodes=2)),
        ("2 x cpu", GpuNeed(count=0, name="cpu", nodes=2)),
    ],
)
def test_a_gpu_is_read_as_people_write_it(text: str, need: GpuNeed) -> None:
    assert parse_gpu(text) == need
    assert parse_gpu(str(need)) == need


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("8xFOO", "gpu.unknown", "A100"),
        ("8xA1000", "gpu.unknown", " A100?"),
        ("H1000", "gpu.unknown", " H100?"),
        ("8xA10O", "gpu.unknown", " 8xA100?"),
        ("A100x8", "gpu.unknown", " 8xA100?"),
        ("L4O", "gpu.unknown", " 1xL40?"),
        ("0xA100", "gpu.none", "1xA100"),
        ("A100-60GB", "gpu.unknown_memory", "40 GB or 80 GB"),
        ("-1xA100", "gpu.malformed", "8xA100"),
        ("8x", "gpu.malformed", "8xA100"),
        ("", "gpu.malformed", "8xA100"),
        ("99999xA100", "gpu.malformed", "8xA100"),
        ("0x8xA100", "gpu.none", "8xA100"),
        ("2x0xA100", "gpu.none", "1xA100"),
        ("2x2x8xA100", "gpu.malformed", "8xA100"),
    ],
)
def test_what_is_no_gpu_is_refused_with_the_nearest(text: str, code: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_gpu(text)
    assert refused.value.code == code
    assert hint in refused.value.hint


def test_eight_a100_give_the_facts_pages_six_machines_in_order() -> None:
    offers = offers_for(parse_gpu("8xA100"))
    assert [(o.provider, o.vram_gb, o.rate_micros_per_hour) for o in offers] == [
        ("runpod", 80, usd("11.12")),
        ("runpod", 80, usd("14.32")),
        ("lambda", 40, usd("15.92")),
        ("aws", 40, usd("21.957642")),
        ("lambda", 80, usd("22.32")),
        ("aws", 80, usd("27.44705")),
    ]
    assert {o.vram_gb for o in offers_for(parse_gpu("8xA100-80GB"))} == {80}


def test_one_a100_has_no_aws_form_and_gh200_comes_only_by_name() -> None:
    assert "aws" not in {o.provider for o in offers_for(parse_gpu("1xA100"))}
    assert [o.arch for o in offers_for(parse_gpu("GH200"))] == ["aarch64"]
    assert not any(o.gpu == "GH200" for o in offers_for(parse_gpu("H100")))


def test_an_unoffered_gpu_count_gives_none_and_the_known_counts() -> None:
    need = parse_gpu("3xA100")
    assert offers_for(need) == []
    assert counts_of(need) == [1, 2, 4, 8]


def test_each_row_is_complete_and_bills_as_its_provider() -> None:
    offers = all_offers()
    assert len(offers) == 62
    assert len({(o.provider, o.type_id, o.tier, o.region, o.gpu_count) for o in offers}) == len(offers)
    for offer in offers:
        assert offer.rate_micros_per_hour > 0
        assert offer.boot_s >= 300
        assert offer.price_source.startswith("catalogue 2026-11-20")
        assert offer.gpu_count == 0 or (offer.gpu in cards() and offer.vram_gb > 0)
    assert {o.provider: (o.billing_unit_s, o.dies_by_itself.partition(" ")[0]) for o in offers} == {
        "runpod": (1, "yes"),
        "lambda": (60, "NO"),
        "aws": (1, "yes"),
    }


@pytest.mark.parametrize(
    ("provider", "planned_s", "patience_s"),
    [
        ("runpod", {1: 300, 8: 300}, {1: 1200, 8: 1200}),
        ("lambda", {1: 300, 2: 600, 4: 600, 8: 900}, {1: 600, 2: 900, 4: 900, 8: 1200}),
        ("aws", {0: 300, 1: 300, 4: 300, 8: 600}, {0: 600, 1: 600, 4: 600, 8: 900}),
        ("local", {1: 0}, {1: 0}),
    ],
)
def test_the_planned_boot_and_the_longest_wait_are_two_things(
    provider: str, planned_s: dict[int, int], patience_s: dict[int, int]
) -> None:
    """The planned boot is part of the worst case; the longest wait is not, and lets a slow machine boot."""
    terms = terms_of(provider)
    assert {count: terms.boot_limit_s(count) for count in planned_s} == planned_s
    assert {count: terms.patience_s(count) for count in patience_s} == patience_s


def test_the_free_providers_cost_nothing_beside_their_rate() -> None:
    terms = terms_of("local")
    assert (terms.disk_per_gb_hour, terms.other_per_hour, terms.egress_per_gb) == (0, 0, 0)


def test_every_card_has_one_peak_for_the_plan_and_the_mfu() -> None:
    assert all(cards()[kind].tflops == peaks.PEAKS[kind][1] for kind in cards())
    assert peaks.peak_tflops("NVIDIA H100 80GB HBM3") == cards()["H100 SXM"].tflops


def test_a_refreshed_catalogue_takes_prices_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "dev"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import refresh_catalog

    before = refresh_catalog.TABLE.read_text(encoding="utf-8")
    old = tomllib.loads(before)["offers"]["rows"]
    dearer = [
        one.model_copy(update={"rate_micros_per_hour": usd("9.87")}) for one in all_offers() if one.provider == "aws"
    ]
    after = tomllib.loads(refresh_catalog.refreshed(before, dearer, "2027-01-02"))
    assert after["date"] == "2027-01-02"
    assert "2027-01-02" in after["sources"]["LIVE"]
    for then, now in zip(old, after["offers"]["rows"], strict=True):
        assert now == ([*then[:5], "9.87", then[6], "LIVE"] if then[0] == "aws" else then)
    again = refresh_catalog.refreshed(refresh_catalog.refreshed(before, dearer, "2027-01-02"), dearer, "2027-01-03")
    assert tomllib.loads(again)["date"] == "2027-01-03"

"""Tests of the check of a machine before the upload, because every minute on an unsuitable machine is billed."""

from __future__ import annotations

import pytest

from gpurun.core.errors import GpurunError, NoOffer, SetupError
from gpurun.core.money import usd
from gpurun.core.records import Offer
from gpurun.core.run_plan import Choices
from gpurun.planning.verify_machine import check_box, check_nodes
from gpurun.providers.catalog import all_offers
from gpurun.remote.machine_facts import Gpu, LinkSpeed, MachineFacts, Node
from tests.machine_words import A100, GIB, facts
from tests.refusals import lacking, refusal


def offer(gpu: str = "A100 SXM", count: int = 8, vram_gb: int = 80) -> Offer:
    return Offer(
        provider="runpod",
        type_id="t",
        gpu=gpu,
        gpu_count=count,
        vram_gb=vram_gb,
        region="any",
        rate_micros_per_hour=usd(1),
        billing_unit_s=1,
        boot_s=300,
        price_source="a test",
        dies_by_itself="yes",
    )


def refused(machine: MachineFacts, ordered: Offer, *, accept_cpu: bool = False) -> GpurunError:
    with pytest.raises(GpurunError) as error:
        check_box(machine, ordered, accept_cpu=accept_cpu)
    return error.value


def test_the_machine_that_was_ordered_will_do_without_a_word() -> None:
    assert check_box(facts(), offer(), accept_cpu=False) == ()
    assert check_box(facts(), offer(), accept_cpu=True) == ()


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0a0+git1234", "2.13", "3.0.1+cu130"])
def test_torch_2_8_or_newer_will_do(version: str) -> None:
    assert check_box(facts(version=version), offer(), accept_cpu=False) == ()


@pytest.mark.parametrize("version", ["2.7.1+cu128", "1.13.1", "2.0"])
def test_an_older_torch_is_refused_with_both_figures(version: str) -> None:
    error = refused(facts(version=version), offer())
    assert (error.code, type(error)) == ("box.old_torch", SetupError)
    assert version in error.what
    assert "2.8" in error.what
    assert "--image" in error.hint


def test_a_torch_of_no_plain_version_is_warned_of() -> None:
    (warning,) = check_box(facts(version="git-abcdef"), offer(), accept_cpu=False)
    assert "git-abcdef" in warning


@pytest.mark.parametrize("accept_cpu", [False, True])
@pytest.mark.parametrize("ordered", [offer(), offer(count=0, gpu="cpu", vram_gb=0)])
def test_without_torch_or_numpy_nothing_can_be_trained_anywhere(ordered: Offer, accept_cpu: bool) -> None:
    error = refused(facts(found=False, python=None, version=None, numpy=None), ordered, accept_cpu=accept_cpu)
    assert (error.code, type(error)) == ("box.no_torch", SetupError)
    error = refused(facts(numpy=None), ordered, accept_cpu=accept_cpu)
    assert (error.code, type(error)) == ("box.no_numpy", SetupError)


def test_a_machine_without_a_gpu_is_refused_unless_cpu_will_do() -> None:
    machine = facts(count=0, cuda=None)
    error = refused(machine, offer())
    assert (error.code, type(error)) == ("box.no_gpu", NoOffer)
    assert "nvidia-smi" in error.what
    assert "--accept-cpu" in error.hint
    (warning,) = check_box(machine, offer(), accept_cpu=True)
    assert "CPU" in warning


def test_what_was_not_ordered_is_not_missed() -> None:
    cpu = offer(count=0, gpu="cpu", vram_gb=0)
    assert check_box(facts(count=0, cuda=None), cpu, accept_cpu=False) == ()
    assert check_box(facts(ecc=7), cpu, accept_cpu=False) == ()


def test_fewer_gpus_than_ordered_are_refused_even_where_cpu_does() -> None:
    for accept_cpu in (False, True):
        error = refused(facts(count=4), offer(), accept_cpu=accept_cpu)
        assert (error.code, type(error)) == ("box.fewer_gpus", NoOffer)
        assert "8×A100" in error.what
        assert "4 GPUs" in error.what


@pytest.mark.parametrize("usable", [0, 7])
def test_a_driver_torch_cannot_use_is_not_called_a_missing_gpu(usable: int) -> None:
    error = refused(facts(count=usable, cards=8, cuda=None if not usable else "12.8"), offer())
    assert (error.code, type(error)) == ("box.driver_mismatch", SetupError)
    assert lacking(error.what, f"{usable} of ", "8 (driver 570.1)") == []
    assert "--image" in error.hint


def test_gpus_beside_those_that_were_ordered_are_a_warning() -> None:
    """Users may deliberately show a run only two of their box's eight GPUs, so this is a warning and no refusal."""
    (warning,) = check_box(facts(count=2, cards=8), offer(count=2), accept_cpu=False)
    assert "2 GPUs" in warning
    assert "sees 8" in warning


def test_an_image_without_nvidia_smi_will_do() -> None:
    assert check_box(facts(cards=0), offer(), accept_cpu=False) == ()


@pytest.mark.parametrize(
    ("gib", "vram_gb"),
    [
        (79.25, 80),
        (39.4, 40),
        (14.56, 16),
        (22.03, 24),
        (44.3, 48),
        (139.8, 141),
        (178.4, 180),
        (268.6, 288),
        (15.7, 16),
    ],
)
def test_cards_hold_a_little_less_than_they_are_sold_by(gib: float, vram_gb: int) -> None:
    assert check_box(facts(gib=gib), offer(vram_gb=vram_gb), accept_cpu=False) == ()


@pytest.mark.parametrize(("gib", "vram_gb"), [(39.4, 80), (9.8, 80), (22.0, 48), (79.2, 141), (14.5, 24)])
def test_a_smaller_card_or_a_slice_of_one_is_refused(gib: float, vram_gb: int) -> None:
    error = refused(facts(gib=gib), offer(vram_gb=vram_gb))
    assert (error.code, type(error)) == ("box.less_memory", NoOffer)
    assert f"{vram_gb} GB" in error.what


def test_one_card_with_uncorrected_errors_is_enough() -> None:
    machine = facts()
    sick = machine.gpus[5].model_copy(update={"ecc_errors": 1})
    machine = machine.model_copy(update={"gpus": (*machine.gpus[:5], sick, *machine.gpus[6:])})
    error = refused(machine, offer())
    assert (error.code, type(error)) == ("box.ecc_errors", NoOffer)
    assert lacking(error.what, "GPU 5 ", A100, "1 uncorrected") == []


def test_cards_that_count_no_errors_will_do() -> None:
    assert check_box(facts(ecc=None), offer(), accept_cpu=False) == ()


TOLD = {
    "T4": "Tesla T4",
    "V100": "Tesla V100-SXM2-16GB",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "A10G": "NVIDIA A10G",
    "A10": "NVIDIA A10",
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "A40": "NVIDIA A40",
    "RTX A6000": "NVIDIA RTX A6000",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
    "A100 PCIe": "NVIDIA A100 80GB PCIe",
    "A100 SXM": "NVIDIA A100-SXM4-80GB",
    "H100 PCIe": "NVIDIA H100 PCIe",
    "H100 NVL": "NVIDIA H100 NVL",
    "H100 SXM": "NVIDIA H100 80GB HBM3",
    "GH200": "NVIDIA GH200 480GB",
    "H200 SXM": "NVIDIA H200",
    "B200": "NVIDIA B200",
    "B300": "NVIDIA B300 SXM6 AC",
}
"""The name that the driver gives to each card of the catalogue."""


def test_every_catalogue_card_is_known_by_its_drivers_name() -> None:
    assert {one.gpu for one in all_offers() if one.gpu_count} == set(TOLD)


@pytest.mark.parametrize("gpu", TOLD)
def test_a_card_is_taken_for_itself_and_for_no_other_model(gpu: str) -> None:
    assert check_box(facts(TOLD[gpu]), offer(gpu), accept_cpu=False) == ()
    models = {one: one.split()[-2 if one.endswith((" SXM", " PCIe", " NVL")) else -1] for one in TOLD}
    for other, name in TOLD.items():
        if models[other] != models[gpu]:
            assert refused(facts(name), offer(gpu)).code == "box.other_gpu", name


@pytest.mark.parametrize("card", ["RTX4090", "rtx 4090", "4090"])
def test_a_card_only_the_user_named_is_compared_as_they_meant_it(card: str) -> None:
    assert check_box(facts("NVIDIA GeForce RTX 4090"), offer(card), accept_cpu=False) == ()
    assert refused(facts("NVIDIA GeForce RTX 3090"), offer(card)).code == "box.other_gpu"


def test_a_card_named_without_a_model_is_not_compared() -> None:
    assert check_box(facts("Radeon"), offer("MI"), accept_cpu=False) == ()


def test_every_refusal_says_what_to_do() -> None:
    for machine in (facts(count=0, cuda=None), facts(count=4), facts("Tesla T4"), facts(gib=10), facts(ecc=2)):
        assert "--" in refused(machine, offer()).hint


def nodes(*cards: tuple[int, str], rate: float | None = 20.0) -> LinkSpeed:
    """Return the link speed between nodes with these cards, each (count, name).

    `rate` is in GB/s; None: not measured.
    """
    seen = tuple(
        Node(name=f"n{number}", devices=tuple(Gpu(name=name, memory_bytes=79 * GIB) for _ in range(count)))
        for number, (count, name) in enumerate(cards, start=1)
    )
    return LinkSpeed(nodes=seen, backend="nccl", seconds=20.0, gigabytes_per_s=rate)


TWO_NODES = offer(count=16).model_copy(update={"nodes": 2})


@pytest.mark.parametrize(
    ("seen", "code", "named"),
    [
        (nodes((8, A100), (7, A100), rate=None), "nodes.fewer_gpus", ("2×8×A100 SXM 80G", "n2")),
        (nodes((8, A100), (8, "Tesla T4")), "box.other_gpu", ("Tesla T4",)),
        (nodes((8, A100)), "nodes.fewer", (": 1",)),
        (nodes((8, A100), (8, A100), rate=0.11), "nodes.slow", ("0.11 GB/s", "1 GB/s")),
    ],
)
def test_every_node_is_looked_at_and_a_slow_network_is_refused(
    seen: LinkSpeed, code: str, named: tuple[str, ...]
) -> None:
    with refusal(GpurunError, code, *named):
        check_nodes(seen, facts(), TWO_NODES, Choices())


def test_nodes_as_ordered_pass_and_an_accepted_slow_network_does() -> None:
    assert check_box(facts(), TWO_NODES, accept_cpu=False) == ()
    check_nodes(nodes((8, A100), (8, A100)), facts(), TWO_NODES, Choices())
    check_nodes(nodes((8, A100), (8, A100), rate=0.11), facts(), TWO_NODES, Choices(slow_network=True))
    check_nodes(nodes((0, ""), (0, "")), facts(count=0), TWO_NODES, Choices(accept_cpu=True))

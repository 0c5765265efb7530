"""Tests of sampling: the same seed gives the same text, and only tokens of the vocabulary are drawn."""

from __future__ import annotations

import pytest
import torch

from trainer.distributed import Device, peak_flops
from trainer.evaluate import generate, pick
from trainer.model import GPT
from trainer.recipe import ModelConfig, SampleConfig
from trainer.shards import Tokenizer


def sample(**keys: object) -> SampleConfig:
    return SampleConfig(**{"prompts": ("a",), "tokens": 20, **keys})  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["faithful", "modern"])
def model(request: pytest.FixtureRequest) -> GPT:
    torch.manual_seed(0)
    shape = {"layers": 1, "heads": 2, "width": 16, "context": 8, "vocab_size": 64}
    own = {"preset": "modern", "bias": False, "tied": False} if request.param == "modern" else {}
    return GPT(ModelConfig(**shape | own)).eval()  # type: ignore[arg-type]


def test_the_seed_decides_and_the_padding_is_never_drawn(model: GPT) -> None:
    padded = GPT(model.config, 5).eval()
    padded.load_state_dict(model.state_dict())
    texts = generate(padded, [[1, 2]] * 3, sample(temperature=5.0), seeds=[7, 7, 8])
    assert texts[0] == texts[1] != texts[2]
    assert all(len(ids) == 22 and ids[:2] == [1, 2] and max(ids) < 5 for ids in texts)


def test_a_prompt_beyond_the_context_continues_from_its_end(model: GPT) -> None:
    prompts = [list(range(20)), list(range(12, 20))]
    long, short = generate(model, prompts, sample(temperature=0.0, tokens=3), seeds=[0, 0])
    assert long[20:] == short[8:]


def test_a_prompt_goes_on_as_it_would_without_those_beside_it(model: GPT) -> None:
    prompts, seeds = [[3], [1, 2, 3, 4, 5], list(range(20))], [5, 6, 7]
    together = generate(model, prompts, sample(), seeds=seeds)
    pairs = zip(prompts, seeds, strict=True)
    alone = [generate(model, [prompt], sample(), seeds=[seed]) for prompt, seed in pairs]
    assert together == [text for (text,) in alone]


def test_top_k_draws_among_the_likeliest_only() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    generator = torch.Generator().manual_seed(0)
    assert {pick(logits, 1.0, 2, generator) for _ in range(50)} == {1, 2}
    assert {pick(logits, 1.0, 0, generator) for _ in range(300)} >= {0, 1, 2}
    assert pick(logits, 0.0, 0, generator) == 1


def test_top_p_draws_among_the_fewest_that_reach_it_together() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))
    generator = torch.Generator().manual_seed(0)
    for top_p, drawn in ((0.4, {1}), (0.6, {1, 2}), (0.95, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})):
        assert {pick(logits, 1.0, 0, generator, top_p) for _ in range(400)} == drawn, top_p
    assert {pick(logits, 1.0, 3, generator, 0.75) for _ in range(400)} == {1, 2}
    frequent = sum(pick(logits, 1.0, 0, generator, 0.6) == 1 for _ in range(4000)) / 4000
    assert frequent == pytest.approx(0.625, abs=0.03), "what remains keeps its proportions"


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-39, 1e-31, 1e-10])
def test_the_coldest_draw_is_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    assert pick(logits, temperature, 2, torch.Generator().manual_seed(0)) == 1


def test_a_stop_ends_the_text_at_once(model: GPT) -> None:
    assert generate(model, [[1]], sample(), seeds=[0], stopping=lambda: True) == [[1]]


def test_bytes_that_are_no_whole_character_are_shown_as_such() -> None:
    tokenizer = Tokenizer("x", "", None, ("é".encode()[:1], "é".encode()[1:], b"a"))
    assert tokenizer.decode([0, 1, 2]) == "éa"
    assert tokenizer.decode([2, 0]) == "a\ufffd"


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("Quadro RTX 6000", 130.5),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA B200", 2250),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA A100-10C", None),
        ("NVIDIA A100-1-5CME", None),
        ("NVIDIA L40S-48Q", None),
    ],
)
def test_the_peak_is_known_or_it_is_none(name: str, teraflops: float | None) -> None:
    device = Device(torch.device("cuda", 0), "bf16", name)
    assert peak_flops(device) == (None if teraflops is None else teraflops * 1e12)
    assert peak_flops(Device(torch.device("cuda", 0), "fp32", name)) is None

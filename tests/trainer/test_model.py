"""Tests that the model is GPT-2: the same weights give the same logits as the reference implementation."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.model import GPT
from trainer.recipe import ModelConfig, padded_vocab, parameters_of


def small(**keys: object) -> ModelConfig:
    shape = {"layers": 3, "heads": 4, "width": 32, "context": 24, "vocab_size": 128, **keys}
    return ModelConfig(**shape)  # type: ignore[arg-type]


def test_logits_equal_those_of_transformers_gpt2() -> None:
    transformers = pytest.importorskip("transformers", reason="the reference GPT-2 is a test dependency only")
    torch.manual_seed(0)
    config = small()
    ours = GPT(config).eval()
    with torch.no_grad():
        for parameter in ours.parameters():  # also the biases and LayerNorms, which start as 0 and 1
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference_config = transformers.GPT2Config(
        vocab_size=128, n_positions=24, n_embd=32, n_layer=3, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    reference = transformers.GPT2LMHeadModel(reference_config).eval()
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {k: v.t() if k.endswith(linear) else v for k, v in ours.state_dict().items()}
    missing, unexpected = reference.transformer.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == ([], [])
    ids = torch.randint(128, (2, 24))
    with torch.no_grad():
        wanted = reference(ids).logits
        found = torch.nn.functional.linear(ours.hidden(ids), ours.head_weight)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    last = ours.next_token_logits(ids, torch.tensor([23, 7]))
    torch.testing.assert_close(last, wanted[[0, 1], [23, 7]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", ["faithful", "modern"])
def test_a_position_never_sees_a_later_one(preset: str) -> None:
    torch.manual_seed(0)
    faithful = preset == "faithful"
    model = GPT(small(preset=preset, bias=faithful, tied=faithful)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # weights that start at zero would hide the layers before them
            parameter.normal_(std=0.1)
    ids = torch.randint(128, (1, 24))
    changed = ids.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 128
    before, after = model.hidden(ids), model.hidden(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_the_first_loss_is_that_of_guessing() -> None:
    torch.manual_seed(0)
    model, ids = GPT(small()), torch.randint(128, (4, 25))
    assert model(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(math.log(128), abs=0.1)


def test_initial_weights_have_the_deviations_of_gpt2() -> None:
    torch.manual_seed(0)
    model = GPT(small(width=128))
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
    assert model.h[0].attn.c_attn.bias.abs().max().item() == 0.0
    assert model.h[0].ln_1.weight.min().item() == 1.0


def test_parameter_counts_are_the_published_ones() -> None:
    with torch.device("meta"):
        gpt2 = GPT(ModelConfig(layers=12, heads=12, width=768, context=1024, vocab_size=50257))
        mini = GPT(ModelConfig(layers=2, heads=2, width=64, context=64, vocab_size=128))
        untied = GPT(small(tied=False, bias=False))
    for model, count in ((gpt2, 124_439_808), (mini, 112_384), (untied, parameters_of(untied.config))):
        assert sum(tensor.numel() for tensor in model.parameters()) == parameters_of(model.config) == count
    assert not any(name.endswith("bias") for name, _ in untied.named_parameters())
    assert untied.lm_head.weight is not untied.wte.weight
    # llm.c's figure, 0.860 GFLOP a token, counts the positions too.
    assert gpt2.flops_per_token() == pytest.approx(0.860e9 - 6 * 1024 * 768, rel=1e-3)
    assert [padded_vocab(small(vocab_size=0), n) for n in (1, 64, 65, 50257)] == [64, 64, 128, 50304]

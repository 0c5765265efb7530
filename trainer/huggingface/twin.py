"""Builds GPT2LMHeadModel in the memory of gpurun's GPT: two models with one set of weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from trainer.model import GPT
from trainer.pretrained import LINEAR_NAMES

__all__ = ["Twin"]


def _turned(name: str, tensor: Tensor) -> Tensor:
    """Return a view in the other model's layout: linear weights are (out, in) in gpurun's GPT and
    (in, out) in GPT-2.
    """
    return tensor.t() if name.endswith(LINEAR_NAMES) and tensor.dim() == 2 else tensor


def _without_padding(vocab_size: int, head: nn.Module, given: tuple[Tensor, ...], logits: Tensor) -> None:
    """Set the probability of the vocabulary's padding to zero, in place, so that no loss includes it."""
    logits[..., vocab_size:] = -torch.inf


class Twin:
    """GPT2LMHeadModel with weights that are views of gpurun's; it also passes AdamW's state between both optimisers."""

    def __init__(self, ours: GPT) -> None:
        shape = ours.config
        config = GPT2Config(
            vocab_size=shape.vocab_size, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
            n_head=shape.heads, attn_pdrop=shape.dropout, embd_pdrop=shape.dropout, resid_pdrop=shape.dropout,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config).to(ours.wte.weight.device)  # type: ignore[arg-type]  # Typed without self.
        self.model.lm_head.register_forward_hook(partial(_without_padding, ours.vocab_size))
        theirs = dict(self.model.transformer.named_parameters())
        self._pairs: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        for name, parameter in ours.named_parameters():
            theirs[name].data = _turned(name, parameter.data)
            self._pairs.append((name, parameter, theirs.pop(name)))
        assert not theirs, f"GPT2LMHeadModel has tensors that ours has not: {sorted(theirs)}"

    def give_state(self, ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
        """Give Hugging Face's optimiser the state that the run's own was restored to; a new optimiser has no state."""
        for name, parameter, twin in self._pairs:
            if ours.state[parameter]:
                theirs.state[twin] = {key: _turned(name, value) for key, value in ours.state[parameter].items()}

    def take_state(self, ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
        """Give the run's own optimiser the current state of Hugging Face's, for a checkpoint."""
        for name, parameter, twin in self._pairs:
            ours.state[parameter] = {key: _turned(name, value) for key, value in theirs.state[twin].items()}

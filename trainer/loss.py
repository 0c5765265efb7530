"""Cross-entropy of a linear head in fp32, without ever holding the (tokens, vocab) logits.

For GPT-2 124M the logits and their gradient are two thirds of a step's memory. Here the tokens go through the head in
chunks; each chunk's gradient is computed in the forward pass, while its logits are at hand, and then they are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["chunked_cross_entropy"]

CHUNK_BYTES = 512 * 1024 * 1024
"""The fp32 logits of one chunk: large enough that adding up the weight's gradient costs little beside the products."""


def _chunk_tokens(vocab_size: int) -> int:
    """Return the largest power of two of tokens whose fp32 logits stay within CHUNK_BYTES."""
    return 1 << max(0, (CHUNK_BYTES // (4 * vocab_size)).bit_length() - 1)


def _nll(logits: Tensor, targets: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the kept tokens and the sums (n, 1) of the exponentials.

    The fp32 logits (n, vocab) become their exponentials relative to each row's largest, in place.
    """
    top = logits.amax(dim=1, keepdim=True)
    picked = logits.gather(1, targets.unsqueeze(1)) - top
    sums = logits.sub_(top).exp_().sum(dim=1, keepdim=True)
    return torch.where(keep, (sums.log() - picked).squeeze(1), 0.0).sum(), sums


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Mean loss; backward only scales what forward has computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, chunk: int, dtype: Any) -> Any:
        """Compute the loss and both gradients, chunk by chunk; matrix products run in `dtype`, all else in fp32."""
        keep = targets != ignored
        safe, count = torch.where(keep, targets, 0), keep.sum()
        head = weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            part, part_targets, part_keep = hidden[rows].to(dtype), safe[rows], keep[rows]
            logits = (part @ head.t()).float()
            nll, sums = _nll(logits, part_targets, part_keep)
            loss += nll
            # The gradient of the mean: (softmax - one_hot) / count, built in the logits' own memory.
            share = (part_keep / count).unsqueeze(1)
            logits.mul_(share / sums).scatter_add_(1, part_targets.unsqueeze(1), -share)
            grad = logits.to(dtype)
            grad_hidden[rows] = grad @ head
            grad_weight += grad.t() @ part
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Scale the gradients by that of the loss."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_outputs[0], grad_weight * grad_outputs[0], None, None, None, None


def _loss_alone(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, chunk: int, dtype: Any) -> Tensor:
    """Compute the mean loss, for evaluation."""
    keep = targets != ignored
    safe, head = torch.where(keep, targets, 0), weight.to(dtype)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        loss += _nll((hidden[rows].to(dtype) @ head.t()).float(), safe[rows], keep[rows])[0]
    return loss / keep.sum()


# torch.compile leaves this alone: unrolled over its chunks it would only make a long compile longer.
@torch.compiler.disable
def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, chunk_tokens: int | None = None
) -> Tensor:
    """Return the mean of cross_entropy(hidden @ weight.T, targets) over targets that are not `ignore_index`, in fp32.

    hidden (n, width), weight (vocab, width), targets (n) int64. Matrix products run in autocast's dtype where it is on.
    NaN where no target is left, as torch's own. The result may be differentiated once.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    compute = _ChunkedCrossEntropy.apply if torch.is_grad_enabled() else _loss_alone
    with torch.autocast(kind, enabled=False):
        return compute(hidden, weight, targets, ignore_index, chunk_tokens or _chunk_tokens(weight.shape[0]), dtype)

"""Computes the cross-entropy of a linear head in fp32, without ever holding the (tokens, vocab) logits.

For GPT-2 124M the logits and their gradient are two thirds of a step's memory. Here the tokens go through the head in
chunks. Each chunk's gradient is computed in the forward pass, while its logits exist; then the logits are dropped. When
compiled, the logits of a chunk stay in 16 bits, are read three times, and become their gradient in place
(tests/bench/count_loss.py counts the memory traffic of both ways).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["capped", "chunked_cross_entropy"]

CHUNK_BYTES = 256 * 1024 * 1024
"""The most bytes for the logits of a chunk on a CPU; large enough that summing gradients costs little."""
CARD_BYTES = 1024 * 1024 * 1024
"""The same limit on a GPU, if compiled: a step takes an H200 2 % less time than with chunks of 256 MiB."""
EAGER_BYTES = 2 * 1024 * 1024 * 1024
"""The same limit on a GPU without compilation: each operation on a chunk is a launch, so there should be few chunks."""

FP16_CHUNK_TOKENS = 8192
"""The most tokens of a chunk in fp16: their gradients of the head are summed in fp16, which ends at 65,504."""


@dataclass(frozen=True)
class _Settings:
    """How to compute a loss.

    `ignored` is the target without a loss, `chunk` the number of tokens per chunk, and `dtype` that of the products.
    The first `vocab_size` rows of the weight are tokens. `smoothing` is the label smoothing; `softcap` and `cap_by` are
    as in `capped`; `compiled` is whether chunks are computed in a compiled kernel.
    """

    ignored: int
    chunk: int
    dtype: torch.dtype
    smoothing: float
    vocab_size: int
    softcap: float
    cap_by: str
    compiled: bool


def capped(logits: Tensor, softcap: float, by: str = "tanh") -> Tensor:
    """Squash logits x smoothly into (-c, c), c being `softcap`; with a cap of 0 they are unchanged.

    `by` is "tanh" for c tanh(x / c) (Gemma Team 2024, arXiv:2408.00118), or "root" for c x / sqrt(x² + c²).
    """
    if not softcap:
        return logits
    return softcap * (torch.tanh(logits / softcap) if by == "tanh" else logits * torch.rsqrt(logits**2 + softcap**2))


def _cap_slope(bounded: Tensor, softcap: float, by: str) -> Tensor:
    """Return the derivative of `capped`, given its result `bounded`, which is overwritten."""
    slope = 1.0 - (bounded / softcap).square_()
    return slope if by == "tanh" else slope.clamp_(min=0.0).pow_(1.5)


def _chunk_tokens(token_bytes: int, dtype: torch.dtype, most_bytes: int = CHUNK_BYTES) -> int:
    """Return the largest power of two of tokens whose logits fit into `most_bytes`; fp16's sums limit it too."""
    chunk = 1 << max(0, (most_bytes // token_bytes).bit_length() - 1)
    return min(chunk, FP16_CHUNK_TOKENS) if dtype == torch.float16 else chunk


def _products(part: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
    """Return part @ head.T, plus the bias if there is one."""
    return part @ head.t() if bias is None else torch.addmm(bias, part, head.t())


def _nll(logits: Tensor, targets: Tensor, keep: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the kept tokens, and each token's sum of exponentials (n, 1).

    The fp32 logits (n, rows) are replaced in place by their exponentials relative to each row's largest; padding
    becomes zero.
    """
    smoothing, vocab_size = settings.smoothing, settings.vocab_size
    logits[:, vocab_size:] = -torch.inf
    top = logits.amax(dim=1, keepdim=True)
    aimed = logits.gather(1, targets.unsqueeze(1)) - top
    if smoothing:
        aimed = torch.lerp(aimed, logits[:, :vocab_size].mean(dim=1, keepdim=True) - top, smoothing)
    sums = logits.sub_(top).exp_().sum(dim=1, keepdim=True)
    return torch.where(keep, (sums.log() - aimed).squeeze(1), 0.0).sum(), sums


def _step_by_step(
    part: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, keep: Tensor, share: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk's kept tokens, and the gradient of its logits (n, rows) in the products' dtype.

    `share` (n, 1) is the weight of each token's loss in the result that is differentiated. Operations work in place.
    """
    logits, slope = capped(_products(part, head, bias).float(), settings.softcap, settings.cap_by), None
    if settings.softcap:  # The derivative of the capped logits by the products.
        slope = _cap_slope(logits, settings.softcap, settings.cap_by)
    nll, sums = _nll(logits, targets, keep, settings)
    logits.mul_(share / sums)
    if settings.smoothing:
        logits[:, : settings.vocab_size] -= share * (settings.smoothing / settings.vocab_size)
    logits.scatter_add_(1, targets.unsqueeze(1), -share * (1.0 - settings.smoothing))
    return nll, (logits if slope is None else logits.mul_(slope)).to(settings.dtype)


def _in_one_go(
    logits: Tensor, targets: Tensor, keep: Tensor, share: Tensor,
    vocab_size: int, smoothing: float, softcap: float, cap_by: str,
) -> Tensor:  # fmt: skip
    """Return the same loss as `_step_by_step`, and replace the products (n, rows) in place by their gradient.

    It is slow unless compiled. No large value has a name that is used twice, because the compiler would write that
    value to memory in fp32.
    """
    places = torch.arange(logits.shape[1], device=logits.device)
    known, aimed_at = places < vocab_size, targets.unsqueeze(1)
    bounded = capped(logits.float(), softcap, cap_by)
    values = torch.where(known, bounded, -torch.inf)
    top = values.amax(dim=1, keepdim=True)
    whole = top + (values - top).exp().sum(dim=1, keepdim=True).log()
    aimed = bounded.gather(1, aimed_at)
    if smoothing:
        mean = torch.where(known, bounded, 0.0).sum(dim=1, keepdim=True) / vocab_size
        aimed = torch.lerp(aimed, mean, smoothing)
    aim = torch.where(places == aimed_at, 1.0 - smoothing, 0.0)
    if smoothing:
        aim = aim + torch.where(known, smoothing / vocab_size, 0.0)
    slope = _cap_slope(bounded, softcap, cap_by) if softcap else 1.0
    nll = torch.where(keep, (whole - aimed).squeeze(1), 0.0).sum()
    logits.copy_(((values - whole).exp() - aim) * share * slope)
    return nll


@cache
def _compiled() -> Callable[..., Tensor]:
    """Return `_in_one_go` as a kernel. The products are not part of it, because torch's own library computes them."""
    return torch.compile(_in_one_go, dynamic=False)


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a 16-bit product can be added to fp32 on a device; not every torch and GPU can."""
    small = torch.ones(16, 16, dtype=dtype, device=device)
    sums = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(sums, small, small, out_dtype=sums.dtype, out=sums)
    except (RuntimeError, TypeError):
        return False
    return bool((sums == 16.0).all())  # Check the result, not only that it runs.


def _add_product(sums: Tensor, grad: Tensor, part: Tensor) -> None:
    """Add grad.T @ part to the fp32 `sums`. If torch can add within the product, the product is not rounded first."""
    if grad.dtype == sums.dtype:
        sums.addmm_(grad.t(), part)
    elif sums.is_cuda and _adds_in_fp32(sums.device, grad.dtype):
        torch.addmm(sums, grad.t(), part, out_dtype=sums.dtype, out=sums)
    else:
        sums += grad.t() @ part


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The mean loss; backward only scales the gradients that forward has computed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> Any:
        """Compute the loss and all gradients, chunk by chunk; products are in `dtype`, everything else is in fp32."""
        chunk, dtype = settings.chunk, settings.dtype
        keep = targets != settings.ignored
        safe, count = torch.where(keep, targets, 0), keep.sum()
        # In fp16, a token's share of the mean would round to zero, so the products use the gradient of the sum.
        whole = dtype == torch.float16
        head, head_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            part, labels = hidden[rows].to(dtype), (safe[rows], keep[rows])
            # The gradient of the mean is (softmax - smoothed one_hot) / count.
            share = (keep[rows].float() if whole else keep[rows] / count).unsqueeze(1)
            if settings.compiled:
                grad = _products(part, head, head_bias)
                how = settings.vocab_size, settings.smoothing, settings.softcap, settings.cap_by
                loss += _compiled()(grad, *labels, share, *how)
            else:
                nll, grad = _step_by_step(part, head, head_bias, *labels, share, settings)
                loss += nll
            grad_hidden[rows] = grad @ head
            _add_product(grad_weight, grad, part)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            del grad  # Otherwise it would exist beside the next chunk's.
        made = [grad_hidden, grad_weight] + ([] if grad_bias is None else [grad_bias])
        if whole:
            made = [gradient.div_(count) for gradient in made]
        ctx.save_for_backward(made[0], *(gradient.to(weight.dtype) for gradient in made[1:]))
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Scale the gradients by that of the loss."""
        made = [gradient * grad_outputs[0] for gradient in ctx.saved_tensors]
        return *made, *[None] * (5 - len(made))


def _loss_alone(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings) -> Tensor:
    """Return the mean loss without gradients, for evaluation."""
    keep = targets != settings.ignored
    safe, head = torch.where(keep, targets, 0), weight.to(settings.dtype)
    head_bias = None if bias is None else bias.to(settings.dtype)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], settings.chunk):
        rows = slice(start, start + settings.chunk)
        logits = _products(hidden[rows].to(settings.dtype), head, head_bias).float()
        logits = capped(logits, settings.softcap, settings.cap_by)
        loss += _nll(logits, safe[rows], keep[rows], settings)[0]
        del logits
    return loss / keep.sum()


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    cap_by: str = "tanh",
    compiled: bool = False,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the mean of cross_entropy(hidden @ weight.T, targets), in fp32, over targets that are not `ignore_index`.

    hidden (n, width), weight (rows, width), targets (n) int64; a `bias` (rows) is added to the logits. The first
    `vocab_size` rows are tokens (all rows, if None); the others are padding, which has no probability and no gradient.
    Matrix products are in autocast's dtype if autocast is on. With `label_smoothing` e, the target has a probability of
    1 - e plus e / vocab_size, and every other token has e / vocab_size (Szegedy et al. 2015, section 7). `softcap` and
    `cap_by` limit the logits, see `capped`. With `compiled`, the gradients of chunks are computed in a compiled kernel.
    Like torch's own function, it returns NaN if no target is left. The result can be differentiated once.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    rows = weight.shape[0]
    # Without compilation a chunk is in fp32; with a cap, its derivative and two temporary copies are needed as well.
    each = rows * (dtype.itemsize if compiled else 16 if softcap else 4)
    most = CHUNK_BYTES if not hidden.is_cuda else CARD_BYTES if compiled else EAGER_BYTES
    chunk = chunk_tokens or _chunk_tokens(each, dtype, most)
    settings = _Settings(
        ignored=ignore_index,
        chunk=chunk,
        dtype=dtype,
        smoothing=label_smoothing,
        vocab_size=vocab_size or rows,
        softcap=softcap,
        cap_by=cap_by,
        compiled=compiled,
    )
    compute = _ChunkedCrossEntropy.apply if torch.is_grad_enabled() else _loss_alone
    with torch.autocast(kind, enabled=False):
        return compute(hidden, weight, bias, targets, settings)

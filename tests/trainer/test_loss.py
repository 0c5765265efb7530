"""Tests that the chunked loss equals torch's own cross-entropy, in value and gradient, for any chunk size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainer import loss as loss_module
from trainer.loss import chunked_cross_entropy

TOKENS, WIDTH, VOCAB = 50, 16, 97


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCAB, WIDTH)
    targets = torch.randint(VOCAB, (TOKENS,))
    targets[::7] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3.0 * loss, inputs)


@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chunk", [1, 16, 50, 64])
def test_fp32_equals_torch(chunk: int, smoothing: float, softcap: float) -> None:
    hidden, weight, targets = tensors()
    logits = hidden @ weight.t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    wanted = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    how: dict[str, Any] = {"label_smoothing": smoothing, "chunk_tokens": chunk, "softcap": softcap}
    found = chunked_cross_entropy(hidden, weight, targets, **how)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, hidden, weight), gradients(wanted, hidden, weight))
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, targets, **how), wanted)


@pytest.mark.parametrize(("cap_by", "chunk"), [("tanh", 16), ("root", 16), ("root", 64)])
def test_a_bias_and_either_curve_of_the_cap_equal_torch(cap_by: str, chunk: int) -> None:
    hidden, weight, targets = tensors()
    bias = torch.randn(VOCAB).requires_grad_()
    logits = hidden @ weight.t() + bias
    logits = 2.0 * torch.tanh(logits / 2.0) if cap_by == "tanh" else 2.0 * logits / torch.sqrt(logits**2 + 4.0)
    wanted = F.cross_entropy(logits, targets)
    how: dict[str, Any] = {"chunk_tokens": chunk, "softcap": 2.0, "cap_by": cap_by, "bias": bias}
    found = chunked_cross_entropy(hidden, weight, targets, **how)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, hidden, weight, bias), gradients(wanted, hidden, weight, bias))
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, targets, **how), wanted)


def test_what_a_card_cannot_add_in_fp32_is_added_afterwards() -> None:
    """A T4 with an old torch refuses addmm with out_dtype, and a GPU that returns a wrong sum is not trusted."""
    cpu = torch.device("cpu")

    def by(addmm: Callable[..., Any]) -> bool:
        loss_module._adds_in_fp32.cache_clear()
        with mock.patch("torch.addmm", addmm):
            return loss_module._adds_in_fp32(cpu, torch.float16)

    def whole(sums: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> None:
        out.add_(left.to(out_dtype) @ right.to(out_dtype))

    assert by(whole)
    assert not by(mock.Mock(side_effect=RuntimeError("addmm with out_dtype is not supported on sm_75")))
    assert not by(mock.Mock(side_effect=TypeError("addmm() got an unexpected keyword argument 'out_dtype'")))
    assert not by(lambda sums, *_, out, **__: out.zero_())
    loss_module._adds_in_fp32.cache_clear()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("on_card", "chunks"), [(True, 1), (False, 4)])
def test_a_card_takes_more_logits_at_once_than_a_cpu(compiled: bool, on_card: bool, chunks: int) -> None:
    """8,192 tokens of GPT-2's vocabulary, on tensors without data that claim to be on a GPU or on the CPU."""
    rows, seen = 50_304, list[int]()

    def counted(part: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(part))
        return part.new_empty(len(part), rows)

    with (
        FakeTensorMode(),
        mock.patch.object(FakeTensor, "is_cuda", on_card),
        mock.patch.multiple(
            loss_module, _products=counted, _compiled=lambda: lambda *_: torch.zeros(()), _add_product=mock.Mock()
        ),
    ):
        hidden, weight = torch.empty(8192, 8, requires_grad=True), torch.empty(rows, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            chunked_cross_entropy(hidden, weight, torch.zeros(8192, dtype=torch.int64), compiled=compiled)
    assert len(seen) == (chunks if compiled else chunks * chunks // 2 or 1)
    assert sum(seen) == 8192


@pytest.mark.slow
@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, 0.0), (0.1, 5.0)])
def test_compiled_chunks_equal_those_taken_step_by_step(smoothing: float, softcap: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(500, 64, requires_grad=True), (torch.randn(1100, 64) * 0.3).requires_grad_()
    targets = torch.randint(1000, (500,))
    targets[::7] = -100
    how: dict[str, Any] = {"vocab_size": 1001, "label_smoothing": smoothing, "softcap": softcap, "chunk_tokens": 250}
    how |= {"cap_by": "root", "bias": torch.randn(1100)} if softcap else {}
    found, wanted = (chunked_cross_entropy(hidden, weight, targets, compiled=flag, **how) for flag in (True, False))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    for ours, reference in zip(gradients(found, hidden, weight), gradients(wanted, hidden, weight), strict=True):
        assert ((ours - reference).norm() / reference.norm()).item() < 1e-6
    assert gradients(chunked_cross_entropy(hidden, weight, targets, compiled=True, **how), weight)[0][1001:].max() == 0


@pytest.mark.slow
def test_a_compiled_loss_moves_a_third_of_the_bytes() -> None:
    """Checks a micro-batch of GPT-2 124M at its real size, by the compiler's own count of its kernels' bytes."""
    from tests.bench.count_loss import of_our_loss

    assert of_our_loss(compiled=True).size <= 70e9
    assert of_our_loss(compiled=False).size >= 160e9, "what it is held against is counted alike"


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, smoothing: float) -> Tensor:
    """Return the mean loss over the tokeniser's own ids, token by token from sums of exponentials, without padding."""
    losses = []
    for vector, target in zip(hidden, targets.tolist(), strict=True):
        if target != -100:
            scores = [vector @ weight[token] for token in range(vocab_size)]
            whole = torch.stack(scores).exp().sum().log()
            even = sum(whole - score for score in scores) / vocab_size
            losses.append((1 - smoothing) * (whole - scores[target]) + smoothing * even)
    return sum(losses) / len(losses)  # type: ignore[return-value]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_of_the_vocabulary_has_no_loss_nor_gradient(smoothing: float) -> None:
    hidden, weight, targets = tensors()
    weight, targets = weight.detach().double(), torch.where(targets < 0, targets, targets % 90)
    weight[90:] += 3.0  # far from zero, so that a padded row with a share in the loss would show
    hidden, weight = hidden.detach().double().requires_grad_(), weight.requires_grad_()
    wanted = plain_loss(hidden, weight, targets, 90, smoothing)
    how = {"vocab_size": 90, "label_smoothing": smoothing, "chunk_tokens": 16}
    found = chunked_cross_entropy(hidden, weight, targets, **how)
    torch.testing.assert_close(found, wanted.float())
    ours, reference = gradients(found, hidden, weight), gradients(wanted, hidden, weight)
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-7)
    assert ours[1][90:].abs().max() == 0.0
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, targets, **how), wanted.float())


def test_label_smoothing_is_the_papers_formula() -> None:
    hidden, weight, _ = (tensor.detach() for tensor in tensors())
    log_p = torch.log_softmax(hidden[:1] @ weight.t(), dim=1)[0]
    found = chunked_cross_entropy(hidden[:1], weight, torch.tensor([7]), label_smoothing=0.1)
    torch.testing.assert_close(found, -(0.9 * log_p[7] + 0.1 * log_p.mean()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bf16_hidden_states_give_an_unrounded_fp32_loss(smoothing: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 64).bfloat16(), torch.randn(2048, 64) * 0.2
    targets = torch.randint(2048, (256,))
    exact = F.cross_entropy(hidden.float() @ weight.bfloat16().float().t(), targets, label_smoothing=smoothing)
    found = chunked_cross_entropy(hidden, weight, targets, label_smoothing=smoothing)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact.item(), rel=1e-3)


def test_fp16_gradients_survive_a_batch_of_many_tokens() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(8192, 8, requires_grad=True), (torch.randn(2048, 8) * 0.1).requires_grad_()
    targets = torch.randint(2048, (8192,))
    exact = gradients(F.cross_entropy(hidden @ weight.t(), targets), hidden, weight)
    with torch.autocast("cpu", dtype=torch.float16):
        found = gradients(chunked_cross_entropy(hidden, weight, targets), hidden, weight)
    for ours, reference in zip(found, exact, strict=True):
        assert ((ours - reference).norm() / reference.norm()).item() < 5e-3


def test_fp16_gradients_survive_many_tokens() -> None:
    hidden, weight = torch.full((1 << 17, 4), 2.0, requires_grad=True), torch.zeros(64, 4, requires_grad=True)
    targets = torch.zeros(1 << 17, dtype=torch.int64)
    exact = gradients(F.cross_entropy(hidden @ weight.t(), targets), weight)
    with torch.autocast("cpu", dtype=torch.float16):
        found = gradients(chunked_cross_entropy(hidden, weight, targets), weight)
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-4)


def test_under_bf16_autocast_loss_and_gradients_are_torchs() -> None:
    hidden, weight, targets = tensors()
    exact = F.cross_entropy(hidden @ weight.t(), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = F.cross_entropy(F.linear(hidden, weight).float(), targets)
        found = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)
    assert found.item() == pytest.approx(exact.item(), rel=5e-3)
    for ours, reference in zip(gradients(found, hidden, weight), gradients(exact, hidden, weight), strict=True):
        assert ours.dtype == torch.float32
        assert ((ours - reference).norm() / reference.norm()).item() < 0.02


def test_ignored_targets_count_for_nothing() -> None:
    hidden, weight, targets = tensors()
    targets[:] = -100
    targets[3] = 5
    found = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    torch.testing.assert_close(found, F.cross_entropy(hidden[3:4] @ weight.t(), targets[3:4]))
    (gradient,) = gradients(found, hidden)
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [3]
    targets[3] = -100
    assert torch.isnan(chunked_cross_entropy(hidden, weight, targets))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_tensor_as_large_as_the_logits_ever_exists(monkeypatch: pytest.MonkeyPatch, smoothing: float) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 1000 * 64)
    hidden, weight = torch.randn(4096, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Largest() as largest:
        targets = torch.randint(1000, (4096,))
        chunked_cross_entropy(hidden, weight, targets, label_smoothing=smoothing).backward()
    assert largest.elements == 64 * 1000

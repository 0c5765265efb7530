"""Tests of the encoder-decoder: its masks, its loss and its searches."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from translation_lab import lab_recipe

from trainer.optim import learning_rate
from trainer.recipe import ModelConfig, parameters_of
from trainer.translation.batch import Batch, SpecialTokens, collate
from trainer.translation.decode import Hypothesis, beam_search, greedy_search, length_penalty
from trainer.translation.model import Translator, sinusoids

SPECIAL = SpecialTokens(pad_id=0, start_id=1, end_id=2)
VOCAB = 13


def model(seed: int = 0, label_smoothing: float = 0.0, sharpness: float = 1.0) -> Translator:
    """Return a small model in evaluation mode; a larger `sharpness` makes its predictions more confident."""
    torch.manual_seed(seed)
    shape = {"layers": 2, "heads": 2, "width": 16, "context": 12, "vocab_size": 16, "dropout": 0.1}
    config = ModelConfig(preset="encoder-decoder", **shape)  # type: ignore[arg-type]
    made = Translator(config, VOCAB, pad_id=0, label_smoothing=label_smoothing).eval()
    with torch.no_grad():
        made.embedding.weight.mul_(sharpness)
    return made


def pairs(*lengths: tuple[int, int], multiple: int = 1) -> Batch:
    """Return a batch of random pairs with these numbers of source and target tokens."""
    state = np.random.RandomState(5)
    sources, targets = [], []
    for source, target in lengths:
        sources.append(np.array([1, *state.randint(3, VOCAB, size=source), 2]))
        targets.append(np.array([*state.randint(3, VOCAB, size=target), 2]))
    return collate(sources, targets, SPECIAL, multiple)


def hidden(network: Translator, batch: Batch) -> torch.Tensor:
    return network.decode(batch.target, network.encode(batch.source), batch.source_mask)


def test_a_batch_holds_source_shifted_target_labels_and_masks() -> None:
    batch = collate([np.array([1, 7, 8, 2]), np.array([1, 9, 2])], [np.array([5, 2]), np.array([3, 4, 2])], SPECIAL)
    assert batch.source.tolist() == [[1, 7, 8, 2], [1, 9, 2, 0]]
    assert batch.target.tolist() == [[1, 5, 0], [1, 3, 4]]
    assert batch.labels.tolist() == [[5, 2, 0], [3, 4, 2]]
    assert batch.tokens == 5
    assert batch.source_mask.tolist() == [[[[True, True, True, True]]], [[[True, True, True, False]]]]
    assert batch.target_mask[0, 0].tolist() == [[True, False, False], [True, True, False], [True, True, False]]
    assert batch.target_mask[1, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_a_later_token_changes_nothing_that_came_before_it() -> None:
    network, batch = model(), pairs((5, 6))
    changed = Batch(batch.source, batch.target.clone(), batch.labels, 0)
    changed.target[0, 4] = batch.target[0, 4] % 9 + 3
    before, after = hidden(network, batch), hidden(network, changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:], atol=1e-3)


def test_neither_padding_nor_the_neighbours_change_anything() -> None:
    network = model()
    alone, beside, wide = pairs((3, 4)), pairs((3, 4), (8, 9)), pairs((3, 4), multiple=12)
    assert wide.source.shape[1] == wide.target.shape[1] == 12
    expected = hidden(network, alone)[0]
    for batch in (beside, wide):
        assert torch.equal(batch.source[0, :5], alone.source[0])
        assert torch.allclose(hidden(network, batch)[0, : len(expected)], expected, atol=1e-5)


def test_every_source_token_counts_for_every_target_token() -> None:
    network, batch = model(), pairs((4, 3))
    for place in range(1, 5):
        changed = batch.source.clone()
        changed[0, place] = changed[0, place] % 9 + 3
        other = hidden(network, Batch(changed, batch.target, batch.labels, 0))
        assert (hidden(network, batch) - other).abs().amax(dim=-1).min() > 1e-4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_smoothed_cross_entropy_of_real_labels(smoothing: float) -> None:
    network, batch = model(label_smoothing=smoothing).train(), pairs((3, 2), (5, 6))
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "heads"):
            module.dropout = 0.0
    with torch.no_grad():
        log_probabilities = (hidden(network, batch) @ network.embedding.weight[:VOCAB].t()).double().log_softmax(-1)
    total = 0.0
    for row, place in itertools.product(range(2), range(batch.labels.shape[1])):
        label = int(batch.labels[row, place])
        if label != 0:
            says = log_probabilities[row, place]
            total -= (1 - smoothing) * float(says[label]) + smoothing * float(says.mean())
    assert batch.tokens == 3 + 7
    loss = network(batch.source, batch.target, batch.labels, 0.5)
    assert loss.item() == pytest.approx(0.5 * total / batch.tokens, rel=1e-5)


def test_smoothing_is_of_training_alone() -> None:
    batch = pairs((3, 2), (5, 6))
    inputs = batch.source, batch.target, batch.labels
    assert torch.equal(model()(*inputs), model(label_smoothing=0.1)(*inputs))


def test_positions_are_the_papers_sinusoids() -> None:
    table = sinusoids(50, 10)
    for position, column in itertools.product((0, 1, 17, 49), range(10)):
        angle = position / 10_000 ** (2 * (column // 2) / 10)
        wanted = math.sin(angle) if column % 2 == 0 else math.cos(angle)
        assert float(table[position, column]) == pytest.approx(wanted, abs=1e-6)


def test_blocks_read_the_scaled_token_and_its_position() -> None:
    network, ids = model(), torch.tensor([[1, 7, 7]])
    network.encoder = torch.nn.ModuleList()
    network.encoder_norm = torch.nn.Identity()
    wanted = network.embedding.weight[ids] * math.sqrt(16) + sinusoids(3, 16)
    assert torch.allclose(network.encode(ids), wanted)


def test_the_rate_is_the_papers_formula() -> None:
    recipe = lab_recipe("copy", "char-pairs", optim={"lr": 2.0}, schedule={"warmup_steps": 30})
    width, warmup = recipe.model.width, 30
    for number in (1, 2, 29, 30, 31, 200):
        wanted = 2.0 * width**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert learning_rate(recipe, number - 1) == pytest.approx(wanted, rel=1e-12)


def test_weights_are_xaviers_and_three_uses_share_one_matrix() -> None:
    network = model()
    wide = network.encoder[0].feed_forward.wide.weight
    bound = math.sqrt(6 / (16 + 64))
    assert float(wide.detach().abs().max()) == pytest.approx(bound, rel=0.02)
    # Embedding; per encoder block 4 + 8 width^2, per decoder block 8 + 8, biases and LayerNorms; two last LayerNorms.
    width, layers = 16, 2
    encoder = 12 * width**2 + 9 * width + 4 * width
    decoder = 16 * width**2 + 13 * width + 6 * width
    count = 16 * width + layers * (encoder + decoder) + 4 * width
    assert sum(tensor.numel() for tensor in network.parameters()) == parameters_of(network.config) == count


def scored(network: Translator, source: torch.Tensor, found: Hypothesis) -> float:
    """Return the log-probability of a translation from one forward pass, with padding and start tokens excluded."""
    target = torch.tensor([[1, *found.ids[:-1]]])
    batch = Batch(source[None], target, target, 0)
    logits = hidden(network, batch) @ network.embedding.weight.t()
    logits[..., [0, 1]] = logits[..., VOCAB:] = -torch.inf
    says = logits.log_softmax(-1)[0]
    return float(sum(says[place, token] for place, token in enumerate(found.ids)))


@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_beam_search_never_scores_below_greedy(seed: int) -> None:
    network, batch = model(seed, sharpness=2.0), pairs((3, 1), (8, 1), (1, 1), (5, 1))
    greedy = greedy_search(network, batch.source, SPECIAL)
    assert beam_search(network, batch.source, SPECIAL, beams=1, alpha=0.6) == greedy
    for beams, alpha in ((2, 0.0), (4, 0.6), (9, 1.0)):
        best = beam_search(network, batch.source, SPECIAL, beams=beams, alpha=alpha)
        for source, found, reference in zip(batch.source, best, greedy, strict=True):
            assert found.score(alpha) >= reference.score(alpha)
            assert found.log_probability == pytest.approx(scored(network, source, found), abs=1e-3)
            assert set(found.ids) <= set(range(2, VOCAB))
            assert 2 not in found.ids[:-1]


@torch.no_grad()
def test_a_beam_as_wide_as_the_tree_finds_the_best_translation() -> None:
    torch.manual_seed(3)
    config = ModelConfig(layers=1, heads=2, width=16, context=3, vocab_size=16)
    vocab, source = 6, torch.tensor([[1, 4, 2]])
    network = Translator(config, vocab, pad_id=0).eval()
    network.embedding.weight.mul_(2.0)
    texts = [ids for length in range(4) for ids in itertools.product(range(3, vocab), repeat=length)]
    every = [(*ids, 2) for ids in texts if len(ids) < 3] + [ids for ids in texts if len(ids) == 3]

    def log_probability(ids: tuple[int, ...]) -> float:
        batch = Batch(source, torch.tensor([[1, *ids[:-1]]]), source, 0)
        logits = hidden(network, batch) @ network.embedding.weight.t()
        logits[..., [0, 1]] = logits[..., vocab:] = -torch.inf
        says = logits.log_softmax(-1)[0]
        return float(sum(says[place, token] for place, token in enumerate(ids)))

    for alpha in (0.0, 2.0):
        wanted = max(every, key=lambda ids, a=alpha: Hypothesis(ids, log_probability(ids)).score(a))
        (found,) = beam_search(network, source, SPECIAL, beams=len(every), alpha=alpha)
        assert found.ids == wanted


class Told:
    """A stand-in for the model with scripted probabilities of the next token after the tokens so far."""

    config, vocab_size = ModelConfig(layers=1, heads=1, width=1, context=4, vocab_size=8), 8

    def __init__(self, following: dict[tuple[int, ...], dict[int, float]]) -> None:
        self._following = following

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*source.shape, 1)

    def next_token_logits(self, target: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = [self._following.get(tuple(ids[1:]), {2: 1.0}) for ids in target.tolist()]
        return torch.tensor([[math.log(row.get(token, 1e-9)) for token in range(8)] for row in rows])

    def search(self, beams: int) -> Hypothesis:
        (found,) = beam_search(self, torch.tensor([[1, 3, 2]]), SPECIAL, beams=beams, alpha=0.0)  # type: ignore[arg-type]
        return found


FOUR_WAYS = {3: 0.25, 4: 0.25, 5: 0.25, 6: 0.25}


def test_beam_search_sees_past_a_word_that_leads_nowhere() -> None:
    scripted = Told({(): {3: 0.6, 4: 0.4}, (3,): FOUR_WAYS})
    assert scripted.search(1).ids[0] == 3
    assert scripted.search(2).ids == (4, 2)
    assert scripted.search(2).log_probability == pytest.approx(math.log(0.4), abs=1e-5)


def test_what_greedy_search_finds_is_not_lost_in_a_beam() -> None:
    # After two words both continuations of 4 (0.175 each) push the best one of 3 (0.12) out of a beam of two.
    scripted = Told({
        (): {3: 0.4, 4: 0.35, 5: 0.25}, (3,): {3: 0.3, 4: 0.24, 5: 0.24, 6: 0.22}, (4,): {3: 0.5, 4: 0.5},
        (4, 3): FOUR_WAYS, (4, 4): FOUR_WAYS, (5,): FOUR_WAYS,
    })  # fmt: skip
    assert scripted.search(2).ids == scripted.search(1).ids == (3, 3, 2)
    assert scripted.search(2).log_probability == pytest.approx(math.log(0.12), abs=1e-5)


def test_the_length_penalty_is_that_of_wu_et_al() -> None:
    assert length_penalty(torch.tensor([1.0, 7.0]), 0.6).tolist() == pytest.approx([1.0, 2.0**0.6])
    short, long = Hypothesis((5, 2), -2.0), Hypothesis((5, 6, 7, 8, 9, 10, 2), -2.5)
    assert short.score(0.0) > long.score(0.0)
    assert short.score(1.0) < long.score(1.0)


@torch.no_grad()
def test_a_translation_does_not_depend_on_its_neighbours() -> None:
    network, batch = model(1, sharpness=2.0), pairs((3, 1), (8, 1), (5, 1))
    together = beam_search(network, batch.source, SPECIAL, beams=3, alpha=0.6)
    for row, found in zip(batch.source, together, strict=True):
        (alone,) = beam_search(network, row[row != 0][None], SPECIAL, beams=3, alpha=0.6)
        assert alone.ids == found.ids

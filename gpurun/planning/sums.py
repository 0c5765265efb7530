"""What in a recipe does not add up: keys that are right by themselves and make no sense together.

The trainer refuses the same (trainer/combinations.py); a test holds that the two sides agree.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.planning.tables import DataTable, ModelTable, RecipeTables, SampleTable, ScheduleTable

__all__ = ["MOST_SAMPLES", "cooldown_steps", "what_does_not_add_up"]

MOST_SAMPLES = 9_000
"""Of a whole run: each is a file, and with its checkpoints' files they must fit into a manifest that is believed."""


def what_does_not_add_up(recipe: RecipeTables) -> Iterator[str]:
    """Yield a sentence, with the real numbers and without its full stop, for everything that does not fit together."""
    yield from _model(recipe.model)
    yield from _data(recipe.data)
    yield from _schedule(recipe.schedule)
    optim, schedule, steps = recipe.optim, recipe.schedule, recipe.train.steps
    if optim.muon_lr and optim.kind != "muon":
        yield f'optim.muon_lr is {optim.muon_lr}, but optim.kind is "{optim.kind}"; only "muon" has one'
    if schedule.min_lr > optim.lr:
        yield f"schedule.min_lr {schedule.min_lr} is above optim.lr {optim.lr}"
    warmup, cooldown = schedule.warmup_steps, cooldown_steps(schedule, steps)
    if warmup > steps:
        yield f"schedule.warmup_steps {warmup} is more than train.steps {steps}"
    elif warmup + cooldown > steps:
        yield f"schedule.warmup_steps {warmup} and a cool-down of {cooldown} steps are more than train.steps {steps}"
    prompts, checkpoints = len(recipe.sample.prompts), -(-steps // recipe.train.checkpoint_every)
    if prompts * checkpoints > MOST_SAMPLES:
        many = f"{prompts} sample.prompts at each of {checkpoints} checkpoints make {prompts * checkpoints} samples"
        yield f"{many}; at most {MOST_SAMPLES} come home"
    yield from _translation(recipe) if recipe.model.preset == "encoder-decoder" else _no_translation(recipe)
    if recipe.train.loop == "huggingface":
        yield from _huggingface(recipe)


def cooldown_steps(schedule: ScheduleTable, steps: int) -> int:
    """How many of a run's steps, the last ones, are the cool-down."""
    return round(schedule.cooldown_fraction * steps)


def _model(model: ModelTable) -> Iterator[str]:
    each, left = divmod(model.width, model.heads)
    if left:
        yield f"model.width {model.width} cannot be shared equally by model.heads {model.heads}"
    if model.preset == "encoder-decoder" and not model.tied:
        yield 'model.tied is false, but the preset "encoder-decoder" has no head of its own; set it to true'
    if model.preset != "modern":
        return
    if model.bias:
        yield 'model.bias is true, but the preset "modern" has no biases; set it to false'
    if model.tied:
        yield 'model.tied is true, but the preset "modern" has a head of its own; set it to false'
    if each % 2:
        yield f"model.width {model.width} by model.heads {model.heads} is {each}; a rotation needs an even number"


def _data(data: DataTable) -> Iterator[str]:
    size = data.vocab_size
    if size and data.tokenizer != "bpe":
        own = f'data.vocab_size is {size}, but data.tokenizer is "{data.tokenizer}"'
        yield f'{own}; only "bpe" trains a vocabulary of that size'
    elif 0 < size < 257:
        yield f"data.vocab_size is {size}; it must be 0, or lie between 257 and 50257"


def _schedule(schedule: ScheduleTable) -> Iterator[str]:
    kind, fraction = schedule.kind, schedule.cooldown_fraction
    if kind == "trapezoid" and not fraction:
        yield 'schedule.kind "trapezoid" needs a schedule.cooldown_fraction above 0'
    if kind != "trapezoid" and fraction:
        yield f'schedule.cooldown_fraction is {fraction}, but schedule.kind is "{kind}"; only "trapezoid" has one'
    if kind == "noam" and not schedule.warmup_steps:
        yield 'schedule.kind "noam" needs a schedule.warmup_steps of at least 1'
    if kind in ("noam", "constant") and schedule.min_lr:
        yield f'schedule.min_lr is {schedule.min_lr}, but schedule.kind "{kind}" has no lowest rate'


HUGGINGFACE: dict[str, dict[str, str | bool]] = {
    "model": {"preset": "faithful", "bias": True, "tied": True},
    "optim": {"kind": "adamw"},
    "train": {"compile": False, "spike": "off"},
}
"""What the Hugging Face Trainer trains there, and nothing else."""


def _huggingface(recipe: RecipeTables) -> Iterator[str]:
    """What only the trainer's own loop does, asked of the other."""
    for table, keys in HUGGINGFACE.items():
        for key, only in keys.items():
            value = getattr(getattr(recipe, table), key)
            if value != only:
                shown = [str(one).lower() if isinstance(one, bool) else f'"{one}"' for one in (value, only)]
                yield f'{table}.{key} is {shown[0]}, but train.loop "huggingface" has only {shown[1]}'
    if recipe.train.precision == "fp16":
        yield 'train.precision is "fp16", but train.loop "huggingface" has only "fp32" and "bf16"'
    if recipe.train.parallel == "fsdp":
        yield 'train.parallel is "fsdp", but train.loop "huggingface" trains in one process'


def _translation(recipe: RecipeTables) -> Iterator[str]:
    """What only a GPT has, asked of an encoder-decoder."""
    preset, data, train = 'the preset "encoder-decoder"', recipe.data, recipe.train
    if not data.is_parallel:
        yield f'data.tokenizer is "{data.tokenizer}", but {preset} reads sentence pairs: "char-pairs" or "word-pairs"'
    if train.compile:
        yield f"train.compile is true, but {preset} meets other lengths in every batch; set it to false"
    if train.init_from:
        yield f'train.init_from is "{train.init_from}", but {preset} starts from weights of its own'
    if recipe.eval.hellaswag_items:
        items = recipe.eval.hellaswag_items
        yield f"eval.hellaswag_items is {items}, but {preset} continues no text; set it to 0"
    if recipe.sample.top_k:
        top_k = recipe.sample.top_k
        yield f"sample.top_k is {top_k}, but {preset} searches for its translations and draws none; set it to 0"


def _no_translation(recipe: RecipeTables) -> Iterator[str]:
    """What only an encoder-decoder has, asked of a GPT."""
    but, data = f'but model.preset is "{recipe.model.preset}"; only "encoder-decoder"', recipe.data
    if data.is_parallel:
        yield f'data.tokenizer is "{data.tokenizer}", {but} reads sentence pairs'
    if recipe.train.label_smoothing:
        yield f"train.label_smoothing is {recipe.train.label_smoothing}, {but} has one"
    if recipe.sample.beams > 1:
        yield f"sample.beams is {recipe.sample.beams}, {but} searches"
    if recipe.sample.length_penalty != SampleTable.model_fields["length_penalty"].default:
        yield f"sample.length_penalty is {recipe.sample.length_penalty}, {but} searches"

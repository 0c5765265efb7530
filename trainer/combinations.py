"""Keys of a recipe that are right by themselves and make no sense together; each is refused in its own sentence.

The tables are tables.py's, which calls this module; gpurun refuses the same (gpurun/planning/sums.py).
"""

from __future__ import annotations

from typing import Any

from trainer.strict import check

__all__ = ["check_data", "check_model", "check_optim", "check_recipe", "check_schedule"]

PAIR_TOKENIZERS = ("char-pairs", "word-pairs")
MOST_SAMPLES = 9_000
"""Of a whole run: each is a file, and a manifest that names more than 10,000 is believed by nobody."""


def check_model(model: Any) -> None:
    """Refuse a shape that cannot be, and a preset with the keys of the other."""
    width, heads = model.width, model.heads
    check(width % heads == 0, f"model.width {width} cannot be shared equally by model.heads {heads}")
    if model.preset == "modern":
        check(not model.bias, 'model.bias is true, but the preset "modern" has no biases; set it to false')
        check(not model.tied, 'model.tied is true, but the preset "modern" has a head of its own; set it to false')
        each = width // heads
        check(each % 2 == 0, f"model.width {width} by model.heads {heads} is {each}; a rotation needs an even number")
    if model.preset == "encoder-decoder":
        own = 'model.tied is false, but the preset "encoder-decoder" has no head of its own; set it to true'
        check(model.tied, own)


def check_data(data: Any) -> None:
    """Refuse a size of vocabulary where none is trained, and one that none can have."""
    size, name = data.vocab_size, data.tokenizer
    trained = f'data.vocab_size is {size}, but data.tokenizer is "{name}"; only "bpe" trains a vocabulary of that size'
    check(not size or name == "bpe", trained)
    check(not size or 257 <= size <= 50257, f"data.vocab_size is {size}; it must be 0, or lie between 257 and 50257")


def check_optim(optim: Any) -> None:
    """Refuse a rate that nothing would use."""
    used = optim.kind == "muon" or not optim.muon_lr
    check(used, f'optim.muon_lr is {optim.muon_lr}, but optim.kind is "{optim.kind}"; only "muon" has one')


def check_schedule(schedule: Any) -> None:
    """Refuse a key of another kind of schedule, and a kind without what it needs."""
    kind, fraction = schedule.kind, schedule.cooldown_fraction
    if kind == "trapezoid":
        check(fraction > 0, 'schedule.kind "trapezoid" needs a schedule.cooldown_fraction above 0')
    else:
        only = f'schedule.cooldown_fraction is {fraction}, but schedule.kind is "{kind}"; only "trapezoid" has one'
        check(fraction == 0, only)
    if kind == "noam":
        check(schedule.warmup_steps >= 1, 'schedule.kind "noam" needs a schedule.warmup_steps of at least 1')
    if kind in ("noam", "constant"):
        low = schedule.min_lr
        check(low == 0, f'schedule.min_lr is {low}, but schedule.kind "{kind}" has no lowest rate')


def check_recipe(recipe: Any) -> None:
    """Refuse tables that do not fit one another."""
    warmup, steps = recipe.schedule.warmup_steps, recipe.train.steps
    check(warmup <= steps, f"schedule.warmup_steps {warmup} is more than train.steps {steps}")
    cooldown = recipe.schedule.cooldown_steps(steps)
    both = f"schedule.warmup_steps {warmup} and a cool-down of {cooldown} steps are more than train.steps {steps}"
    check(warmup + cooldown <= steps, both)
    low, high = recipe.schedule.min_lr, recipe.optim.lr
    check(low <= high, f"schedule.min_lr {low} is above optim.lr {high}")
    prompts, checkpoints = len(recipe.sample.prompts), -(-steps // recipe.train.checkpoint_every)
    many = f"{prompts} sample.prompts at each of {checkpoints} checkpoints make {prompts * checkpoints} samples"
    check(prompts * checkpoints <= MOST_SAMPLES, f"{many}; at most {MOST_SAMPLES} come home")
    _check_translation(recipe) if recipe.model.preset == "encoder-decoder" else _check_no_translation(recipe)
    if recipe.train.loop == "huggingface":
        _check_huggingface(recipe)


HUGGINGFACE = {
    "model": {"preset": "faithful", "bias": True, "tied": True},
    "optim": {"kind": "adamw"},
    "train": {"compile": False, "spike": "off"},
}
"""What the Hugging Face Trainer on GPT2LMHeadModel trains here, and nothing else."""


def _check_huggingface(recipe: Any) -> None:
    """Refuse what only our own loop does."""
    for table, keys in HUGGINGFACE.items():
        for key, only in keys.items():
            value = getattr(getattr(recipe, table), key)
            shown = [str(one).lower() if isinstance(one, bool) else f'"{one}"' for one in (value, only)]
            name = f"{table}.{key}"
            check(value == only, f'{name} is {shown[0]}, but train.loop "huggingface" has only {shown[1]}')
    train = recipe.train
    fp16 = 'train.precision is "fp16", but train.loop "huggingface" has only "fp32" and "bf16"'
    check(train.precision != "fp16", fp16)
    fsdp = 'train.parallel is "fsdp", but train.loop "huggingface" trains in one process'
    check(train.parallel != "fsdp", fsdp)


def _check_translation(recipe: Any) -> None:
    """Refuse for an encoder-decoder what only a GPT has."""
    preset, tokenizer, train = 'the preset "encoder-decoder"', recipe.data.tokenizer, recipe.train
    pairs = f'data.tokenizer is "{tokenizer}", but {preset} reads sentence pairs: "char-pairs" or "word-pairs"'
    check(tokenizer in PAIR_TOKENIZERS, pairs)
    check(not train.compile, f"train.compile is true, but {preset} meets other lengths in every batch; set it to false")
    check(not train.init_from, f'train.init_from is "{train.init_from}", but {preset} starts from weights of its own')
    items, top_k = recipe.eval.hellaswag_items, recipe.sample.top_k
    check(not items, f"eval.hellaswag_items is {items}, but {preset} continues no text; set it to 0")
    check(not top_k, f"sample.top_k is {top_k}, but {preset} searches for its translations and draws none; set it to 0")


def _check_no_translation(recipe: Any) -> None:
    """Refuse for a GPT what only an encoder-decoder has."""
    preset, tokenizer = recipe.model.preset, recipe.data.tokenizer
    smoothing, beams, only = recipe.train.label_smoothing, recipe.sample.beams, 'only "encoder-decoder"'
    pairs = f'data.tokenizer is "{tokenizer}", but model.preset is "{preset}"; {only} reads sentence pairs'
    check(tokenizer not in PAIR_TOKENIZERS, pairs)
    check(not smoothing, f'train.label_smoothing is {smoothing}, but model.preset is "{preset}"; {only} has one')
    check(beams == 1, f'sample.beams is {beams}, but model.preset is "{preset}"; {only} searches')
    penalty, default = recipe.sample.length_penalty, type(recipe.sample).length_penalty
    check(penalty == default, f'sample.length_penalty is {penalty}, but model.preset is "{preset}"; {only} searches')

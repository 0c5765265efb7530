"""Writes an exported model's card in Markdown: its shape, its training, and the figures of its run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.recipe import ModelConfig

__all__ = ["model_card"]

_FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- gpt2\n- gpurun\n---\n"
_MARKS = re.compile(r"([\\`*_{}\[\]<>|#~!&])")
_USE = """```python
from transformers import AutoTokenizer, GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
ids = tokenizer({prompt!r}, return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
```
"""


def model_card(state: Mapping[str, Any], model: ModelConfig, source: str, figures: Mapping[str, Any]) -> str:
    """Return the card's Markdown. `state` is the checkpoint's; `figures` are shown under the names that they have."""
    recipe, step = state["recipe"], state["step"]
    optim, schedule, train = recipe["optim"], recipe["schedule"], recipe["train"]
    rates = f"learning rate {optim['lr']:g}, weight decay {optim['weight_decay']:g}"
    shape = {
        "layers": model.layers,
        "heads": model.heads,
        "width": model.width,
        "context (tokens)": model.context,
        "tokeniser": recipe["data"]["tokenizer"],
    }
    training = {
        "step": f"{step:,} of {train['steps']:,}",
        "tokens seen": f"{state['tokens']:,}",
        "tokens a step": f"{train['batch_tokens']:,}",
        "data": source,
        "optimiser": f"{optim.get('kind', 'adamw')}, {rates}",
        "schedule": f"{schedule['kind']}, {schedule['warmup_steps']:,} steps of warm-up",
        "seed": train["seed"],
        "loss of the last step (nats a token)": state["loss"],
    }
    prompt = next(iter(recipe["sample"]["prompts"]), "The ")
    parts = [
        f"{_FRONT}# A GPT-2 trained with gpurun\n\n{_plain(recipe.get('about', ''))}\n",
        f"## The model\n\n{_table(shape)}",
        f"## The training\n\n{_table(training)}",
        *([f"## The run\n\n{_table(figures)}"] if figures else []),
        f"## Use\n\n{_USE.format(prompt=prompt)}",
    ]
    return "\n".join(parts)


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {_plain(name)} | {_plain(value)} |\n" for name, value in rows.items()]
    return "".join(["| | |\n| --- | --- |\n", *lines])


def _plain(value: Any) -> str:
    """Return a value as one printable line that Markdown and HTML show unchanged."""
    text = " ".join(("unknown" if value is None else str(value)).split())
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return _MARKS.sub(r"\\\1", shown)

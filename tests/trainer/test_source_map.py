"""Tests that the log tells a learner where in the code the ideas of a training are implemented."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.tiny_training import ROOT
from trainer.evaluate import TextTask
from trainer.model import GPT
from trainer.recipe import ModelConfig
from trainer.start import source_map
from trainer.translation.model import Translator
from trainer.translation.task import TranslationTask

SHAPE: dict[str, Any] = {"layers": 1, "heads": 1, "width": 8, "context": 8, "vocab_size": 8}
TEXT = {"loss": "def chunked_cross_entropy(", "checkpoint": "def save(", "generation": "def generate("}
OURS = {"embedding": "def hidden(", "attention": "def forward(", **TEXT}
TRANSLATED = {**OURS, "embedding": "def _embed(", "generation": "def beam_search("}


@pytest.mark.parametrize(("preset", "begins"), [("faithful", OURS), ("modern", OURS), ("encoder-decoder", TRANSLATED)])
def test_each_landmark_is_named_with_its_file_and_line(preset: str, begins: dict[str, str]) -> None:
    config = ModelConfig(preset=preset, bias=preset != "modern", tied=preset != "modern", **SHAPE)
    translates = begins is TRANSLATED
    model = Translator(config, pad_id=0) if translates else GPT(config)
    task = TranslationTask if translates else TextTask
    places = dict(part.split(" ") for part in source_map(task.landmarks(model)).split(" | "))
    assert list(places) == list(begins)
    for idea, place in places.items():
        file, line = place.split(":")
        code = (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1 :]
        first = next(text for text in code if not text.strip().startswith("@"))
        assert begins[idea] in first, place
    where = {"faithful": "trainer/model.py", "modern": "trainer/modern.py"}.get(preset, "trainer/translation/model.py")
    assert places["attention"].startswith(f"{where}:")

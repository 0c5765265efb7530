"""What a recipe needs beside torch 2.8 is known before anything is rented, and seen to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpurun.core.errors import UsageError
from gpurun.core.run_plan import Choices
from gpurun.planning.recipe import load_recipe, resolve
from gpurun.planning.requirements import HUGGINGFACE_SETUP, LEAST_TORCH, outfitted
from gpurun.providers.runpod.pods import IMAGE, IMAGE_CUDA

STOCK = load_recipe("tiny-hf").tables
OWN = Choices(image="mine:1", setup="pip install everything")


def test_a_recipe_that_needs_nothing_more_leaves_the_choices_alone() -> None:
    for name in ("mini-gpt", "gpt2-124m", "annotated-transformer", "modern-124m"):
        assert outfitted(load_recipe(name).tables, "runpod", OWN) == (OWN, ())


def test_the_usual_image_of_runpod_has_a_torch_that_trains() -> None:
    found = re.search(r"-cu(\d+)\d-torch(\d)(\d)\d-", IMAGE)
    assert found is not None
    assert (f"{found[2]}.{found[3]}", found[1]) == (LEAST_TORCH, IMAGE_CUDA.replace(".", ""))


def test_the_hugging_face_libraries_are_installed_first_unless_the_user_brings_them() -> None:
    for provider in ("runpod", "aws", "lambda"):
        choices, (said,) = outfitted(STOCK, provider, Choices())
        assert choices == Choices(setup=HUGGINGFACE_SETUP)
        assert "the image has not: pip installs them" in said
    choices, (said,) = outfitted(STOCK, "runpod", OWN)
    assert (choices, "--setup, or the image, must bring them" in said) == (OWN, True)
    choices, (said,) = outfitted(STOCK, "ssh", Choices())
    assert (choices, "the box must have them" in said) == (Choices(), True)


@pytest.mark.parametrize("found", [True, False])
def test_the_script_installs_for_the_python_that_has_torch(tmp_path: Path, found: bool) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {0 if found else 1}\necho "$PIP_BREAK_SYSTEM_PACKAGES $@"\n')
    python.chmod(0o755)
    done = subprocess.run(["/bin/sh", "-c", HUGGINGFACE_SETUP], env={"PATH": str(tmp_path)}, capture_output=True)
    if found:
        assert done.stdout == b"1 -m pip install -q --no-input accelerate>=1.1,<2 transformers>=5.6,<6\n"
    else:
        assert (done.returncode, done.stderr) == (1, b"no Python here imports torch\n")


def test_the_hugging_face_trainer_trains_in_one_process() -> None:
    with pytest.raises(UsageError, match="which trains in one process; here are 8 processes"):
        resolve(load_recipe("tiny-hf"), "full", processes=8)

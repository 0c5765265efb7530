"""What a recipe needs beside torch 2.8 is known before anything is rented, and seen to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpurun.core.errors import UsageError
from gpurun.core.run_plan import Choices, Request
from gpurun.planning.candidates import paid_plan, quote
from gpurun.planning.catalog import parse_gpu, terms_of
from gpurun.planning.recipe import load_recipe, resolve
from gpurun.planning.requirements import HUGGINGFACE_SETUP, images_by_provider, outfitted
from gpurun.providers.runpod.pods import IMAGE, IMAGE_CUDA

MUON, STOCK = load_recipe("modern-124m").tables, load_recipe("tiny-hf").tables
OWN = Choices(image="mine:1", setup="pip install everything")


def test_a_recipe_that_needs_nothing_more_leaves_the_choices_alone() -> None:
    for name in ("mini-gpt", "gpt2-124m", "annotated-transformer"):
        assert outfitted(load_recipe(name).tables, "runpod", OWN) == (OWN, ())


def test_muon_boots_an_image_whose_torch_has_it_where_the_usual_one_has_not() -> None:
    choices, (said,) = outfitted(MUON, "runpod", Choices(region="EU"))
    assert choices == Choices(region="EU", image=terms_of("runpod").newer_image)
    assert "needs torch 2.9 or newer, and runpod's usual image has 2.8" in said
    for provider in ("aws", "lambda", "ssh"):
        choices, (said,) = outfitted(MUON, provider, Choices())
        assert choices == Choices()
        assert "seen there" in said
    choices, (said,) = outfitted(MUON, "runpod", Choices(image="mine:1"))
    assert (choices.image, "the image mine:1 has is seen there" in said) == ("mine:1", True)


def test_the_next_offer_of_another_cloud_gets_that_clouds_image() -> None:
    images = images_by_provider(MUON, ("runpod", "aws"), Choices())
    assert images == {"runpod": terms_of("runpod").newer_image}
    assert images_by_provider(MUON, ("runpod", "aws"), OWN) is None
    assert images_by_provider(STOCK, ("runpod", "aws"), Choices()) is None
    full = resolve(load_recipe("modern-124m"), "full")
    request = Request(recipe="modern-124m", gpu=parse_gpu("8xA100"), providers=("runpod", "aws"))
    plan = paid_plan(request, "fox", full, quote(request, full))
    tried = [plan.on(one) for one in plan.approved]
    wanted = {(one.offer.provider, one.choices.image) for one in tried}
    assert wanted == {("runpod", terms_of("runpod").newer_image), ("aws", "")}


def test_the_catalogue_tells_of_runpods_images_what_their_tags_tell() -> None:
    terms = terms_of("runpod")
    for image, torch in ((IMAGE, terms.image_torch), (terms.newer_image, "2.9")):
        found = re.search(r"-cu(\d+)\d-torch(\d)(\d)\d-", image)
        assert found is not None
        assert (f"{found[2]}.{found[3]}", found[1]) == (torch, IMAGE_CUDA.replace(".", "")), image


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

"""Tests that the packages that a recipe needs besides torch 2.8 are known before the rental, and are installed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.core.errors import UsageError
from gpurun.core.run_plan import Choices
from gpurun.jobs.requirements import HUGGINGFACE_SETUP, LEAST_TORCH, add_required_packages
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.providers.runpod.pods import IMAGE, IMAGE_CUDA
from gpurun.remote.agent.torch_look import PROBE
from tests.fake_torch import torch_source
from tests.refusals import lacking, refusal

STOCK = load_recipe("tiny-hf").tables
OWN = Choices(image="mine:1", setup="pip install everything")


def test_a_recipe_with_no_further_needs_leaves_choices_alone() -> None:
    for name in ("mini-gpt", "gpt2-124m", "annotated-transformer", "modern-124m"):
        assert add_required_packages(load_recipe(name).tables, OWN, is_outfitted=True) == (OWN, ())


def test_the_usual_image_of_runpod_has_a_torch_that_trains() -> None:
    found = re.search(r"-cu(\d+)\d-torch(\d)(\d)\d-", IMAGE)
    assert found is not None
    assert (f"{found[2]}.{found[3]}", found[1]) == (LEAST_TORCH, IMAGE_CUDA.replace(".", ""))


def test_hugging_face_libraries_install_first_unless_brought() -> None:
    choices, (said,) = add_required_packages(STOCK, Choices(), is_outfitted=True)
    assert choices == Choices(setup=HUGGINGFACE_SETUP)
    assert "pip" in said
    choices, (said,) = add_required_packages(STOCK, OWN, is_outfitted=True)
    assert (choices, "--setup" in said) == (OWN, True)
    choices, (said,) = add_required_packages(STOCK, Choices(), is_outfitted=False)
    assert (choices, "--setup" in said) == (Choices(), True)


@pytest.mark.parametrize("found", [True, False])
def test_the_script_installs_for_the_python_that_has_torch(tmp_path: Path, found: bool) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {0 if found else 1}\necho "$PIP_BREAK_SYSTEM_PACKAGES $@"\n')
    python.chmod(0o755)
    done = subprocess.run(["/bin/sh", "-c", HUGGINGFACE_SETUP], env={"PATH": str(tmp_path)}, capture_output=True)
    if found:
        words = b"1 -m pip install -q --no-input --no-deps --only-binary :all: --require-hashes -r /dev/stdin\n"
        assert done.stdout == words
    else:
        assert (done.returncode, done.stderr) == (1, b"no Python here imports torch\n")


@pytest.mark.parametrize(("version", "machine"), [("3.14.0", "x86_64"), ("3.9.2", "aarch64"), ("3.12.1", "ppc64le")])
def test_a_machine_the_pins_are_not_for_gets_one_sentence(tmp_path: Path, version: str, machine: str) -> None:
    python = tmp_path / "python3"
    python.write_text(
        f"#!{sys.executable}\nimport platform, sys\nif 'torch' in sys.argv[2]:\n    sys.exit()\n"
        f"sys.version_info, platform.python_version = ({version.replace('.', ', ')}), lambda: '{version}'\n"
        f"platform.system, platform.machine = lambda: 'Linux', lambda: '{machine}'\nexec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    script, environment = ["/bin/sh", "-c", HUGGINGFACE_SETUP], {"PATH": str(tmp_path)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert lacking(done.stderr, version, machine, "--image") == []


def test_what_is_beside_torch_is_reported_as_pip_freeze_has_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch_source())
    for name, version in (("zarr", "3.0"), ("Accelerate", "1.15.0")):
        folder = tmp_path / f"{name.lower()}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-S", "-c", PROBE], input=b"\n", env=environment, capture_output=True)
    packages = json.loads(done.stdout.splitlines()[0])["packages"]
    assert packages == {"count": 2, "sha256": hashlib.sha256(b"Accelerate==1.15.0\nzarr==3.0").hexdigest()}


def test_the_hugging_face_trainer_trains_in_one_process() -> None:
    with refusal(UsageError, "recipe.does_not_add_up", "huggingface", "8"):
        resolve(load_recipe("tiny-hf"), "full", processes=8)

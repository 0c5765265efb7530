"""Tests of a plan's advice on files that a command would miss on the machine, and on the flag that uploads them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.command import Command
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices, Mode, Request
from gpurun.jobs.commands import work_folder as folders
from gpurun.jobs.commands.command_program import make_startable, with_notebook
from gpurun.jobs.commands.failure_cure import failure_cure
from gpurun.jobs.commands.python_source import read_notebook, read_python
from gpurun.jobs.commands.rehearsal_venv import build_venv, is_built, venv_python
from gpurun.jobs.commands.upload_advice import (
    file_warnings,
    import_warnings,
    imports_of,
    left_out_warnings,
    refuse_undecided,
    undecided_files,
    upload_notes,
)
from gpurun.jobs.commands.work_folder import (
    WorkFolder,
    copy_work_folder,
    refuse_unmatched_include,
    without_keys,
    work_folder,
)
from gpurun.jobs.requirements import PIP_MARK, distributions, provided_by, with_pip
from gpurun.providers.catalog import parse_gpu
from tests.plan_makers import make_command_plan
from tests.refusals import lacking, refusal

NANOGPT = {
    ".gitignore": "__pycache__/\n*.bin\n*.pkl\n*.pt\ninput.txt\n",
    "requirements.txt": "tiktoken\n",
    "configurator.py": "import sys\nfor arg in sys.argv[1:]:\n    if '=' not in arg: exec(open(arg).read())\n",
    "config/train_shakespeare_char.py": "dataset = 'shakespeare_char'\nout_dir = 'out-shakespeare-char'\n",
    "model.py": "import torch\ndef pretrained():\n    from transformers import GPT2LMHeadModel\n",
    "train.py": """
import os, pickle
import numpy as np
import torch
from model import pretrained
out_dir, dataset, wandb_log = 'out', 'openwebtext', False
exec(open('configurator.py').read())
data_dir = os.path.join('data', dataset)
train = np.memmap(os.path.join(data_dir, 'train.bin'), dtype=np.uint16, mode='r')
val = np.memmap(os.path.join(data_dir, 'val.bin'), dtype=np.uint16, mode='r')
if wandb_log:
    import wandb
torch.save({}, os.path.join(out_dir, 'ckpt.pt'))
""",
    "data/shakespeare_char/prepare.py": "import requests\nopen('input.txt')\n",
    "data/shakespeare_char/input.txt": "First Citizen",
    "data/shakespeare_char/train.bin": "\0" * 200,
    "data/shakespeare_char/val.bin": "\0" * 100,
    "out/ckpt.pt": "\0" * 200_000,
    ".env": "HF_TOKEN=x",
}
MINGPT = {
    "mingpt/__init__.py": "",
    "mingpt/utils.py": "import torch\n",
    "projects/chargpt/chargpt.py": "from mingpt.utils import CfgNode\nif __name__ == '__main__': open('input.txt')\n",
}
MAKEMORE = {
    "makemore.py": """
import argparse, os
import torch, no_such_module
from helper import words
parser = argparse.ArgumentParser()
parser.add_argument('--input-file', '-i', default='names.txt')
parser.add_argument('--config', default='config.yml')
parser.add_argument('--work-dir', '-o', default='out')
words(os.path.join('vocab', 'all'))
torch.save({}, 'model.pt')
""",
    "helper.py": "from rest import *\n",
    "rest/__init__.py": "",
    "rest/table.csv": "1,2",
    "names.txt": "emma",
    "vocab/all": "a",
    "model.pt": "weights of the last time",
    "photo.jpg": "what else lies in the folder",
    ".env": "KEY=1",
}
NANOGPT_WORDS = ("python", "train.py", "config/train_shakespeare_char.py")


def folder(place: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    return folder(tmp_path / "nano", NANOGPT)


def test_an_ignored_file_that_is_read_warns_with_the_flag(nano: Path) -> None:
    command = Command(argv=NANOGPT_WORDS, folder=str(nano))
    left = undecided_files(work_folder(command))
    assert {file.name: file.by for file in left} == {
        "data/shakespeare_char/train.bin": "train.py",
        "data/shakespeare_char/val.bin": "train.py",
        "out/ckpt.pt": None,
    }, "prepare.py is not run; what the program writes is not missed, though it is large"
    named, large = left_out_warnings(left)
    files = ("train.py", "data/shakespeare_char/train.bin (200 B)", "data/shakespeare_char/val.bin (100 B)")
    ways = ("--include 'data/**/*.bin'", "--exclude 'data/**/*.bin'")
    assert lacking(named, *files, *ways, "!data/**/*.bin", ".gpurunignore") == []
    assert lacking(large, "out/ckpt.pt (200 kB)", "--include out/ckpt.pt") == []
    with refusal(UsageError, "run.left_out", "train.py", *ways):
        refuse_undecided(left)


@pytest.mark.parametrize("ignored", ["*.bin\n", "data/\n", "data/*\n", "data/shakespeare_char\n"])
@pytest.mark.parametrize("way", ["flag", "file"])
def test_the_suggested_line_includes_it_however_it_was_left_out(nano: Path, ignored: str, way: str) -> None:
    (nano / ".gitignore").write_text(ignored)
    (nano / "data" / ".gitignore").write_text("*.bin\n")
    command = Command(argv=NANOGPT_WORDS, folder=str(nano), include=("data/**/*.bin",) if way == "flag" else ())
    if way == "file":
        (nano / ".gpurunignore").write_text("!data/**/*.bin\n")
    found = work_folder(command)
    assert {"data/shakespeare_char/train.bin", "data/shakespeare_char/val.bin"} <= set(found.files)
    assert not [file for file in undecided_files(found) if file.by is not None]


@pytest.mark.parametrize("decision", [{"exclude": ("*.bin",)}, {"own": "*.bin\n"}])
def test_what_its_user_leaves_out_is_decided(nano: Path, decision: dict[str, object]) -> None:
    own = str(decision.pop("own", ""))
    (nano / ".gpurunignore").write_text(own)
    command = Command(argv=NANOGPT_WORDS, folder=str(nano)).model_copy(update=decision)
    refuse_undecided(undecided_files(work_folder(command)))


def test_a_left_out_path_of_the_command_is_refused_until_decided(nano: Path) -> None:
    words = ("python", "train.py", "out/ckpt.pt")
    with refusal(UsageError, "run.ignored", "out/ckpt.pt") as refused:
        work_folder(Command(argv=words, folder=str(nano)))
    assert "--include 'out/ckpt.pt'" in refused.value.hint
    assert "out/ckpt.pt" in work_folder(Command(argv=words, folder=str(nano), include=("out/ckpt.pt",))).files
    assert "out/ckpt.pt" not in work_folder(Command(argv=words, folder=str(nano), exclude=("out",))).files


def test_a_fresh_clone_is_told_what_it_reads_and_does_not_have(tmp_path: Path) -> None:
    files = {name: text for name, text in NANOGPT.items() if not name.endswith((".bin", "input.txt", ".pt"))}
    found = work_folder(Command(argv=NANOGPT_WORDS, folder=str(folder(tmp_path / "nano", files))))
    warnings = list(file_warnings(found))
    assert [lacking(line, "train.py", name) for line, name in zip(warnings, ("train.bin", "val.bin"), strict=True)] == [
        [],
        [],
    ]
    assert "requirements.txt" in " ".join(
        upload_notes(found, Command(argv=NANOGPT_WORDS, folder=str(found.root)), is_installed_there=True)
    )


def test_a_module_where_python_does_not_look_gets_the_cure(tmp_path: Path) -> None:
    root = folder(tmp_path / "min", MINGPT)
    command = Command(argv=("python", "projects/chargpt/chargpt.py"), folder=str(root))
    found = work_folder(command)
    (warning,) = import_warnings(found, command, python=sys.executable, is_rented=True)
    assert lacking(warning, "chargpt.py", "mingpt", "--env PYTHONPATH=.") == []
    assert lacking(next(file_warnings(found)), "projects/chargpt/chargpt.py", "input.txt") == []
    for cured in (
        command.model_copy(update={"env": {"PYTHONPATH": "."}}),
        command.model_copy(update={"argv": ("python", "-m", "projects.chargpt.chargpt")}),
    ):
        assert not list(import_warnings(work_folder(cured), cured, python=sys.executable, is_rented=True))


def test_a_script_alone_takes_only_what_it_imports_and_names(tmp_path: Path) -> None:
    root = folder(tmp_path / "mk", MAKEMORE)
    command = Command(argv=("makemore.py",), folder=str(root / "makemore.py"))
    found = work_folder(command)
    along = {"helper.py", "names.txt", "rest/__init__.py", "rest/table.csv", "vocab/all"}
    assert set(found.files) == {"makemore.py", *along}
    said = " ".join(upload_notes(found, command, is_installed_there=True))
    assert lacking(said, "makemore.py", "helper.py, names.txt") == []
    assert lacking(" ".join(file_warnings(found)), "makemore.py", "config.yml") == []
    (warning,) = import_warnings(found, command, python=sys.executable, is_rented=True)
    assert lacking(warning, "makemore.py", "no_such_module") == []
    assert imports_of(found, command) == ("no_such_module", "torch")
    other = command.model_copy(update={"argv": ("makemore.py", "--config", "photo.jpg"), "exclude": ("names.txt",)})
    found = work_folder(other)
    assert "photo.jpg" in found.files
    assert "names.txt" not in found.files
    assert not [line for line in file_warnings(found) if "config.yml" in line]


def test_a_large_folder_does_not_go_along_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path / "mk", MAKEMORE)
    monkeypatch.setattr(folders, "MOST_BESIDE_FILES", 2)
    folder(root, {f"vocab/{number}": "x" for number in range(5)})
    found = work_folder(Command(argv=("makemore.py",), folder=str(root / "makemore.py")))
    assert not [name for name in found.files if name.startswith("vocab/")]
    assert "vocab" in found.words


def test_only_imports_that_surely_run_are_looked_for() -> None:
    source = read_python(
        "'''names.txt'''\nimport a\ntry:\n    import b\nexcept ImportError:\n    b = None\nif a:\n    import c\n"
        "def f():\n    import d\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import e\n"
        "if __name__ == '__main__':\n    import g\n"
    )
    assert {one.module: one.is_sure for one in source.imports} == {
        "a": True, "b": False, "c": False, "d": False, "typing": True, "g": True,
    }  # fmt: skip
    assert "names.txt" not in source.constants


def test_a_distribution_is_claimed_only_if_its_modules_are_known() -> None:
    assert provided_by("einops", ["einops>=0.7"])
    assert provided_by("yaml", ["PyYAML"]), "installed here, so its modules are known"
    assert not provided_by("no_such_module", ["other-name==1"])


def test_gpuruns_own_home_is_never_uploaded(nano: Path) -> None:
    folder(nano, {".gpurun/keys/signing": "canary"})
    found = work_folder(Command(argv=NANOGPT_WORDS, folder=str(nano), include=("*",)), nano / ".gpurun")
    assert not [name for name in found.files if name.startswith(".gpurun/")]


@pytest.mark.parametrize("answer", [True, False, None])
def test_a_key_files_template_is_asked_about_and_a_key_is_not(tmp_path: Path, answer: bool | None) -> None:
    root = folder(tmp_path / "t", {"train.py": "", ".env.example": "HF_TOKEN=\n", "sub/.env.sample": "TOKEN=\n"})
    command, names = Command(argv=("python", "train.py"), folder=str(root)), list[str]()

    def admit(name: str) -> bool | None:
        names.append(name)
        return answer

    if answer is None:
        with pytest.raises(UsageError) as refused:
            without_keys(command, work_folder(command), admit)
        assert lacking(refused.value.hint, "--exclude .env.example", "--include .env.example") == []
        assert "--secret NAME" in refused.value.hint
        by_flag = command.model_copy(update={"include": (".env.example",), "exclude": ("sub/.env.sample",)})
        assert ".env.example" in without_keys(by_flag, work_folder(by_flag))[1].files
        return
    decided, found = without_keys(command, work_folder(command), admit)
    assert names == [".env.example", "sub/.env.sample"]
    assert (".env.example" in found.files, decided.include) == (answer, tuple(names) if answer else ())
    (root / ".env.example").write_text("HF_TOKEN=hf_" + "a" * 34)
    with refusal(UsageError, "pack.secret", ".env.example"):
        without_keys(command, work_folder(command), admit)


def test_an_include_that_matches_nothing_is_refused_unless_data(nano: Path, tmp_path: Path) -> None:
    command = Command(argv=NANOGPT_WORDS, folder=str(nano), include=("*.npy",))
    with refusal(UsageError, "run.include"):
        refuse_unmatched_include(command, work_folder(command), None)
    data = folder(tmp_path / "data", {"token.txt": "x"})
    refuse_unmatched_include(command.model_copy(update={"include": ("token.txt",)}), work_folder(command), data)


@pytest.mark.parametrize(
    ("first", "text", "mode", "words"),
    [
        ("go.sh", "echo", 0o644, ["bash", "go.sh"]),
        ("./go.sh", "echo", 0o755, ["bash", "./go.sh"]),
        ("go.sh", "#!/bin/bash", 0o755, ["./go.sh"]),
        ("go.sh", "#!/usr/bin/env zsh", 0o644, ["./go.sh"]),
        ("./tool", "#!/bin/sh", 0o644, ["./tool"]),
        ("./tool", "\x7fELF", 0o755, ["./tool"]),
        ("lab.py", "", 0o644, ["{python}", "lab.py"]),
    ],
)
def test_a_file_is_run_as_what_it_is(tmp_path: Path, first: str, text: str, mode: int, words: list[str]) -> None:
    name = os.path.normpath(first)
    root = folder(tmp_path / "lab", {name: text})
    (root / name).chmod(mode)
    command = Command(argv=(first,), folder=str(root))
    found = work_folder(command)
    command = make_startable(copy_work_folder(command, found, tmp_path / "copy"), found).command
    assert command.words == words
    assert (name in command.executable) == (words[0] == f"./{name}")


@pytest.mark.parametrize(("first", "text"), [("./notes.txt", "hello"), ("tool", "#!/bin/sh"), ("./tool", "")])
def test_what_nothing_would_start_is_refused(tmp_path: Path, first: str, text: str) -> None:
    root = folder(tmp_path / "lab", {os.path.normpath(first): text})
    command = Command(argv=(first,), folder=str(root))
    with pytest.raises(UsageError) as refused:
        make_startable(command, work_folder(command))
    assert refused.value.code == "run.not_started"


def test_a_notebook_runs_by_nbconvert_installed_only_if_asked(tmp_path: Path) -> None:
    cells = '{"cells": [{"cell_type": "code", "source": ["%pip install x\\n", "import einops\\n", "open(\'a.csv\')"]}]}'
    source = read_notebook(cells)
    assert ([one.module for one in source.imports], source.reads) == (["einops"], {"a.csv"})
    root = folder(tmp_path / "lab", {"lab.ipynb": cells, "a.csv": "1"})
    command = Command(argv=("lab.ipynb",), folder=str(root / "lab.ipynb"))
    assert set(work_folder(command).files) == {"lab.ipynb", "a.csv"}
    assert command.words[:5] == ["{python}", "-m", "nbconvert", "--to", "notebook"]
    with_kernel, said = with_notebook(command, Request(recipe="", providers=("runpod",)), Mode.PAID)
    assert with_kernel.pip == ("nbconvert", "ipykernel")
    assert "--pip nbconvert --pip ipykernel" in " ".join(said)
    with pytest.raises(UsageError, match="installs nothing on your own machine") as refused:
        with_notebook(command, Request(recipe="", providers=("ssh",)), Mode.PAID)
    assert "--pip nbconvert --pip ipykernel" in refused.value.hint


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/shakespeare_char/train.bin'",
         "--include data/shakespeare_char/train.bin."),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/none.bin'", "data/none.bin"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'train.py'", ""),
        ("ModuleNotFoundError: No module named 'yaml.nodes'", "--pip PyYAML."),
        ("ModuleNotFoundError: No module named 'no_such'", "--pip no_such."),
        ("ModuleNotFoundError: No module named 'model'", "PYTHONPATH=."),
        ("RuntimeError: CUDA out of memory", ""),
    ],
)  # fmt: skip
def test_a_failure_is_told_with_its_cure(nano: Path, words: str, cure: str) -> None:
    advice = failure_cure(f"its last words: {words}", Command(argv=NANOGPT_WORDS, folder=str(nano)))
    assert cure.lower() in advice.lower()
    assert bool(cure) == bool(advice)


def wheel(place: Path, name: str) -> Path:
    """Write the smallest wheel that pip can install without a network, and return its path."""
    path, info = place / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as content:
        content.writestr(f"{name}_module.py", "figure = 41\n")
        content.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        content.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        content.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.process
def test_a_rehearsal_has_pips_packages_over_those_installed(tmp_path: Path) -> None:
    home, said = Home(tmp_path / "home"), list[str]()
    lines = [str(wheel(tmp_path, "gpuruntest"))]
    python = venv_python(home, lines)
    assert not is_built(python)
    build_venv(python, lines, 120, said.append)
    here = distributions(["gpuruntest_module", "torch", "no_such_module"], str(python))
    assert here["gpuruntest_module"] == ["gpuruntest"]
    assert "torch" in here, "the one that is installed here"
    assert "no_such_module" not in here
    build_venv(python, lines, 120, said.append)
    assert len(said) == 1, "it is built once"
    other = venv_python(home, ["./no-such.whl"])
    with refusal(SetupError, "run.pip_failed", "--pip") as refused:
        build_venv(other, ["./no-such.whl"], 120, said.append)
    assert "--setup" not in refused.value.hint
    assert not is_built(other)


def test_where_nothing_is_asked_a_left_out_file_fails_early(nano: Path, tmp_path: Path) -> None:
    (nano / ".env").unlink()
    command = Command(argv=NANOGPT_WORDS, folder=str(nano))
    request = Request(recipe="", command=command, gpu=parse_gpu("1xT4"), providers=("runpod",))

    def planned(request: Request, *, is_asked: bool) -> str:
        home = Home(tmp_path / "home").prepare()
        with pytest.raises(UsageError) as refused:
            make_command_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, is_asked=is_asked)
        return refused.value.code

    assert planned(request, is_asked=False) == "run.left_out"
    assert planned(request, is_asked=True) == "cap.missing"
    decided = command.model_copy(update={"include": ("*.bin",)})
    assert planned(request.model_copy(update={"command": decided}), is_asked=False) == "cap.missing"


@pytest.mark.parametrize("has", ["uv", "ensurepip", "nothing"])
def test_a_python_without_pip_falls_back_and_pips_words_are_kept(tmp_path: Path, has: str) -> None:
    programs = {
        "python3": f"""case "$*" in
            "-c import torch") ;;
            "-m pip --version") exit 1 ;;
            "-m ensurepip --user") {"true" if has == "ensurepip" else "exit 1"} ;;
            *) echo "python $*" >> calls ;;
        esac""",
        **({"uv": 'echo "uv $*" >> calls'} if has == "uv" else {}),
    }
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    script = with_pip(Choices(), ["einops"], str(tmp_path / "bin" / "python3")).setup
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True)
    assert PIP_MARK in done.stderr
    assert (done.returncode == 0) == (has != "nothing")
    if has == "nothing":
        assert "ensurepip" in done.stderr
    else:
        first = "uv pip install" if has == "uv" else "python -m pip install"
        assert (tmp_path / "calls").read_text().startswith(first)


def test_nothing_is_uploaded_where_there_is_no_folder() -> None:
    assert work_folder(Command(argv=("true",))) == WorkFolder({}, {})


@pytest.mark.parametrize(
    ("argv", "text", "needed"),
    [
        (("python", "train.py"), "import no_such_module\n", ("no_such_module",)),
        (("torchrun", "train.py"), "import no_such_module\n", ("no_such_module",)),
        (("uv", "run", "train.py"), "import no_such_module\n", ()),
        (("bash", "run.sh"), "import no_such_module\n", ()),
        (("python", "train.py"), "import os\nos.system('pip install x')\nimport no_such_module\n", ()),
        (("python", "train.py"), "import subprocess\nsubprocess.run(['pip', 'install', 'x'])\nimport x\n", ()),
        (("sh", "-c", "pip install x && python train.py"), "import x\n", ()),
    ],
)
def test_a_machine_needs_only_what_the_command_cannot_bring(
    tmp_path: Path, argv: tuple[str, ...], text: str, needed: tuple[str, ...]
) -> None:
    """A missing import ends the rental, but not if the command installs it: `uv run`, or a script that runs pip."""
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "run.sh").write_text("pip install no_such_module\npython train.py\n")
    command = Command(argv=argv, folder=str(tmp_path))
    assert imports_of(work_folder(command), command) == needed

"""Tests of `gpurun import`: a notebook's evidence becomes a run; anything else, or a contradiction, is refused."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.installed_files import recipe as schema
from gpurun.core.paths import Home
from gpurun.jobs.training.recipe import read_model
from gpurun.ledger.run_lock import RunLock
from tests.command_line import gpurun
from tests.refusals import lacking
from tests.tensor_file import as_tensors

TEXT = "To be, or not to be, that is the question:\nWhether tis nobler in the mind to suffer\n" * 6
Files = dict[str, bytes]


class Notebook:
    """A notebook for Kaggle whose own cells unpack and pack in the current folder; `train` acts as the trainer."""

    def __init__(self, folder: Path, *words: str) -> None:
        text = folder / "text.txt"
        text.write_text(TEXT)
        done = gpurun("notebook", "course-lab", "--for", "kaggle", "--data", str(text), *words)
        assert done.returncode == 0, done.stderr
        content = json.loads((folder / "course-lab.ipynb").read_text())
        self.metadata = content["metadata"]
        self.cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
        self.names: dict[str, Any] = {"EXIT_CODE": 0, "PROCESSES": 1}
        self.run("BUNDLE =")
        self.out = self.names["HERE"] / "out"

    def run(self, word: str) -> None:
        """Run the cell that contains this word, as a kernel would."""
        (cell,) = (one for one in self.cells if word in one)
        with redirect_stdout(io.StringIO()):
            exec(compile(cell, word, "exec"), self.names)

    def train(self, card: str | None = None, *, ends: bool = True, log_says: str = "") -> Path:
        """Write what a trainer leaves on that card (None: on a CPU), pack it, and return the zip's path."""
        here = self.names["HERE"]
        recipe, data = (json.loads((here / name).read_bytes()) for name in ("bundle/recipe.json", "data/data.json"))
        parameters = schema.parameters_of(read_model(recipe["model"]), data["tokenizer"]["vocab_size"])
        device, torch = ("cuda", "2.10.0+cu128") if card else ("cpu", "2.10.0+cpu")
        start = {"kind": "start", "step": 0, "device": device, "cuda_name": card, "torch": torch, "steps": 300}
        events = [start | {"world_size": 1, "parameters": parameters, "precision": "fp16" if card else "fp32"}]
        steps = [1, *(step for step in range(1, 301) if step % recipe["train"]["log_every"] == 0)]
        events += [
            {"kind": "step", "step": at, "loss": 450 / at, "tokens": 64 * at, "elapsed_s": 0.03 * at} for at in steps
        ]
        events += [{"kind": "stop", "step": 300, "reason": "done", "message": "", "train_s": 9.0}] if ends else []
        state = {"step": 300, "loss": 1.5, "torch": torch, "recipe": recipe, "data": {}}
        made = {
            "model.safetensors": ("weights", as_tensors(bytes(4 * parameters))),
            "optim.safetensors": ("optimizer", as_tensors(bytes(8 * parameters))),
            "state.json": ("state", json.dumps(state).encode()),
        }
        (self.out / "checkpoints").mkdir(parents=True)
        for name, (_, content) in made.items():
            (self.out / "checkpoints" / f"000300.{name}").write_bytes(content)
        files = [{"name": f"checkpoints/000300.{name}", "kind": kind, "step": 300} for name, (kind, _) in made.items()]
        (self.out / "MANIFEST.json").write_text(json.dumps({"v": 1, "latest": 300, "best": None, "files": files}))
        (self.out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        (here / "run.log").write_text(f"device: {log_says or device}\nstep 0300 | loss 1.5000 | lr 5.00e-03\n")
        self.run("manifest =")
        return Path("evidence.zip").absolute()


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    monkeypatch.chdir(tmp_path)
    return Notebook(tmp_path)


def receipt_of(run: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(gpurun("receipt", run, "--json").stdout)
    return dict(answer["data"]["statement"]["predicate"])


def packed_again(path: Path, change: Callable[[Files], Files]) -> None:
    """Replace a zip's files by those that `change` returns, and adapt its index."""
    with zipfile.ZipFile(path) as archive:
        files = change({name: archive.read(name) for name in archive.namelist() if name != "card.json"})
        index = json.loads(archive.read("card.json"))
    index["files"] = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, "card.json": json.dumps(index).encode()}.items():
            archive.writestr(name, content)


def edited(name: str, before: str, after: str) -> Callable[[Files], Files]:
    return lambda files: {**files, name: files[name].replace(before.encode(), after.encode())}


def test_a_gpu_is_as_the_machine_says_and_cost_and_end_unclaimed(notebook: Notebook) -> None:
    assert notebook.metadata["kaggle"]["isInternetEnabled"] is False
    done = gpurun("import", str(notebook.train("Tesla T4")), "--name", "fox-41")
    assert done.returncode == 0, done.stderr
    receipt = receipt_of("fox-41")
    assert receipt["verdict"]["is"] == "gpu, as the machine says"
    assert receipt["asked"]["imported"]["platform"] == "kaggle"
    assert receipt["teardown"] == {"is": "user_operated", "evidence": []}
    assert receipt["cost"]["upper_bound_micros"] is None
    assert receipt["cost"]["says"].startswith("not observed")
    assert gpurun("audit", "--strict").returncode == 0
    assert gpurun("evidence", "fox-41", "-o", "cards/card.zip").returncode != 0  # The folder does not exist.
    Path("cards").mkdir()
    assert gpurun("evidence", "fox-41", "-o", "cards/card.zip").returncode == 0
    assert "1 gpu, as the machine says" in gpurun("audit", "--roster", "cards").stdout


def test_a_cpu_is_a_smoke_test_and_a_training_comes_in_once(notebook: Notebook) -> None:
    path = notebook.train()
    assert gpurun("import", str(path), "--name", "fox-41").returncode == 0
    assert receipt_of("fox-41")["verdict"]["is"] == "smoke"
    packed_again(path, lambda files: files)
    again = gpurun("import", str(path))
    assert "fox-41" in again.stderr
    assert Home(Path("gpurun-home")).run_names() == ["fox-41"]


def test_what_was_packed_again_unchanged_is_taken(notebook: Notebook) -> None:
    path = notebook.train()
    packed_again(path, lambda files: files)
    assert gpurun("import", str(path)).returncode == 0


def test_what_was_packed_before_training_had_ended_says_so(notebook: Notebook) -> None:
    assert gpurun("import", str(notebook.train("Tesla T4", ends=False)), "--name", "fox-41").returncode == 0
    training = receipt_of("fox-41")["training"]
    assert (training["outcome"], "evidence" in training["message"]) == ("lost", True)
    assert gpurun("audit", "--strict").returncode == 0


@pytest.mark.parametrize(
    ("harm", "fact"),
    [
        (edited("plan.json", '"steps": 300', '"steps": 301'), "digest"),
        (edited("plan.json", '"platform": "kaggle"', '"platform": "moon"'), "newer gpurun"),
        (edited("plan.json", '"v": 1', '"v": 2'), "newer gpurun"),
        (edited("plan.json", '"recipe": "course-lab"', '"recipe": "/etc/x.toml"'), "newer gpurun"),
        (edited("plan.json", '"data_sha256": "', '"data_sha256": "0'), "shards"),
        (edited("data/vocab.json", '"', "'"), "vocabulary"),
        (edited("run.log", "loss 1.5000", "loss 1.0000"), "step 300 (1.0000)"),
        (edited("checkpoints/000300.state.json", '"lr": 0.005', '"lr": 0.5'), "optim.lr"),
        (lambda files: {**files, "checkpoints/000300.model.safetensors": b"few"}, "3 bytes"),
        (lambda files: {**files, "../../evil": b""}, "../../evil"),
        (lambda files: {**files, "run.log": bytes(64 << 20)}, "run.log"),
        (lambda files: {**files, "checkpoints/000001.optim.safetensors": bytes(80 << 20)}, "4 GB"),
        (lambda files: {name: one for name, one in files.items() if name != "events.jsonl"}, "events"),
    ],
)
def test_what_does_not_hold_leaves_nothing_behind(
    notebook: Notebook, harm: Callable[[Files], Files], fact: str, own_home: Path
) -> None:
    path = notebook.train()
    packed_again(path, harm)
    done = gpurun("import", str(path))
    assert done.returncode != 0
    assert fact in " ".join(done.stderr.split())
    assert not Home(own_home).run_names()
    assert not list(Home(own_home).staged.glob("*"))


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_half_a_download_is_refused(notebook: Notebook, keep: float) -> None:
    path = notebook.train()
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    assert "cut short" in gpurun("import", str(path)).stderr


def test_cpu_log_that_says_cuda_is_refused(notebook: Notebook) -> None:
    path = notebook.train("Tesla T4")
    packed_again(path, edited("events.jsonl", "2.10.0+cu128", "2.10.0+cpu"))
    assert "torch 2.10.0+cpu" in gpurun("import", str(path)).stderr


def test_a_challenge_holds_in_the_home_that_it_was_given_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Notebook(tmp_path, "--challenge", "ml-2026-k7h3m9q2x4ab").train()
    Home(tmp_path / "friend").prepare()
    assert "the key" in gpurun("import", str(path), "--home", "friend").stderr
    assert gpurun("import", str(path), "--name", "fox-41").returncode == 0
    assert receipt_of("fox-41")["asked"]["challenge"].startswith("ml-2026-k7h3m9q2x4ab:")
    assert gpurun("audit", "--strict").returncode == 0


def test_a_notebook_that_was_changed_unpacks_nothing(notebook: Notebook) -> None:
    shutil.rmtree(notebook.names["HERE"])
    place = next(place for place, cell in enumerate(notebook.cells) if "BUNDLE =" in cell)
    notebook.cells[place] = notebook.cells[place].replace('BUNDLE = "', 'BUNDLE = "AAAA')
    with pytest.raises(SystemExit, match="gpurun notebook"):
        notebook.run("BUNDLE =")


def test_an_import_that_was_killed_is_finished(
    notebook: Notebook, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, home = notebook.train(), list[Path](), Home(own_home)
    with monkeypatch.context() as patched:
        patched.setattr("gpurun.readers.imported_run.fsync_folder", synced.append)
        patched.setattr("gpurun.readers.imported_run.finish_import", lambda *_: 1 / 0)
        gpurun("import", str(path), "--name", "fox-41")
    assert home.runs in synced  # Synced, so that a power cut cannot lose the run's name.
    assert "fox-41" in gpurun("ps").stdout
    with RunLock(home.run("fox-41").lock):
        assert gpurun("resume", "fox-41").returncode != 0
    assert not home.run("fox-41").receipt.exists()
    assert gpurun("resume").returncode == 0
    assert gpurun("audit", "--strict").returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("course-lab", "--for", "sagemaker"), "notebook.platform", "colab, kaggle, jupyter"),
        (("tiny-wikitext", "--for", "colab", "--data", "hf:karpathy/climbmix-gpt2"), "notebook.public", "hf:karpathy"),
        (("course-lab", "--for", "colab"), "data.missing", "--data"),
    ],
)
def test_what_no_notebook_can_be_made_of_is_refused(words: tuple[str, ...], code: str, named: str) -> None:
    done = gpurun("notebook", *words)
    assert done.returncode != 0
    assert lacking(" ".join(done.stderr.split()), f"[{code}]", named) == []

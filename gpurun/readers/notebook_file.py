"""Makes a notebook that contains the trainer, a recipe and its shards. Its cells do not need a network.

The notebook is plain JSON in nbformat 4.5. Its last cells write and offer the evidence.zip that `gpurun import` reads
(docs/FORMATS.md).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpurun import __version__
from gpurun.core.errors import UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.run_plan import DataSummary
from gpurun.core.untrusted import read_object
from gpurun.jobs.trainer import digest_of_trainer, modules_of
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.view.number_format import format_bytes

PLATFORMS = {
    "colab": ("Runtime > Change runtime type > T4 GPU", "Runtime > Disconnect and delete runtime"),
    "kaggle": ("Settings > Accelerator > GPU T4 x2", "Run > Stop session"),
    "jupyter": ("whatever starts this server on a machine with a GPU", "the page where you started this server"),
}
"""For each platform: how to choose a GPU, and how to end the session."""
_COLAB = "https://colab.research.google.com"
_PUBLISHED = re.compile(
    r"https://(github)\.com/([\w.~%/-]+/blob/[\w.~%/-]+\.ipynb)|https://(gist)\.github\.com/([\w./-]+)"
)
MOST_BYTES = 12 << 20
"""The size limit of the bundle. Base64 makes it a third larger, and platforms accept notebooks of about 20 MB."""
FACTS = "facts.json"
_STAMP = (1980, 1, 1, 0, 0, 0)
_METADATA: dict[str, dict[str, Any]] = {
    "colab": {"accelerator": "GPU", "colab": {"provenance": [], "gpuType": "T4"}},
    "kaggle": {"kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": False}},
    "jupyter": {},
}

_ABOUT = """\
{badge}# {recipe}, trained by gpurun's trainer

1. Choose a GPU: {choose}. Without a GPU this is a smoke test.
2. Run all cells. Training saves and stops after `MINUTES`; run the cells again to continue.
3. Download `evidence.zip`, then run at home: `gpurun import evidence.zip`
4. **End the session yourself: {end}.** This notebook cannot."""
_CHECK = """\
import subprocess, sys

try:
    import torch
except ImportError:
    raise SystemExit("This kernel has no PyTorch. Type %pip install torch into a cell, restart it, then run all.")

CARDS = torch.cuda.device_count()
if CARDS:
    print(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout)
elif {on_cpu!r} == "as_written":
    print("This machine has no GPU: this is a smoke test on the CPU. To train on a GPU: {choose}.")
else:
    raise SystemExit("This machine has no GPU, and this recipe is not for a CPU. Choose a GPU: {choose}.")
print("torch", torch.__version__, "|", CARDS, "GPU" if CARDS == 1 else "GPUs")"""
_UNPACK = """\
import base64, hashlib, io, json, zipfile
from pathlib import Path

BUNDLE = "{bundle}"

packed = base64.b64decode(BUNDLE)
if hashlib.sha256(packed).hexdigest() != "{sha256}":
    raise SystemExit("This notebook was changed or cut short. Make it again with gpurun notebook.")
HERE = Path("gpurun-{short}").absolute()
zipfile.ZipFile(io.BytesIO(packed)).extractall(HERE)
print("Unpacked into", HERE)"""
_TRAIN = """\
import contextlib, os, signal, threading

MINUTES = {minutes}

# Every process takes the same number of whole sequences, or a single process takes them all.
PROCESSES = CARDS if CARDS > 1 and {sequences} % CARDS == 0 else 1
program = ["trainer.launch", f"--processes={{PROCESSES}}"] if PROCESSES > 1 else ["trainer.train"]
words = ["--recipe", "recipe.json", "--data", "../data", "--out", "../out"]
trainer = subprocess.Popen(
    [sys.executable, "-m", *program, *words], cwd=HERE / "bundle", env=os.environ | {{"PYTHONUNBUFFERED": "1"}},
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)

def stop():  # It saves, and ends. The signal goes to the training processes, because torchrun would kill them soon.
    found = Path(f"/proc/{{trainer.pid}}/task").glob("*/children") if PROCESSES > 1 else []
    children = [int(word) for path in found for word in path.read_text().split()]
    with contextlib.suppress(ProcessLookupError):
        for pid in children or [trainer.pid]:
            os.kill(pid, signal.SIGTERM)

def end():
    with contextlib.suppress(ProcessLookupError):
        os.killpg(trainer.pid, signal.SIGKILL)

deadlines = [threading.Timer(60 * MINUTES, stop), threading.Timer(60 * MINUTES + 300, end)]
try:
    for timer in deadlines:
        timer.start()
    with open(HERE / "run.log", "ab", buffering=0) as log:
        for line in trainer.stdout:
            log.write(line)
            print(line.decode(errors="replace"), end="")
finally:
    if trainer.poll() is None:  # The cell was interrupted.
        stop()
    EXIT_CODE = trainer.wait()
    for timer in deadlines:
        timer.cancel()
print("The trainer ended with exit code", EXIT_CODE)"""
_SAMPLE = """\
ask = ["trainer.generate", "../out", "--data", "../data", "--prompt", {prompt!r}]
said = subprocess.run([sys.executable, "-m", *ask], cwd=HERE / "bundle", capture_output=True, text=True)
print(said.stdout or said.stderr)"""
_PACK = """\
manifest = HERE / "out" / "MANIFEST.json"
made = json.loads(manifest.read_text()) if manifest.exists() else {"latest": None, "best": None, "files": []}
steps = {made["latest"], (made["best"] or {}).get("step")}
files = {"run.log": HERE / "run.log", "events.jsonl": HERE / "out" / "events.jsonl"}
files |= {f"data/{path.name}": path for path in (HERE / "data").iterdir()}
files |= {file["name"]: HERE / "out" / file["name"] for file in made["files"]
          if file["step"] in steps and file["kind"] in ("weights", "optimizer", "state")}
facts = json.loads((HERE / "facts.json").read_text())
facts |= {"exit_code": EXIT_CODE, "processes": PROCESSES, "best": made["best"]}
listed = {}
with zipfile.ZipFile("evidence.zip", "w") as archive:
    def put(name, content):
        listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        archive.writestr(name, content)
    for name, path in files.items():
        if path.is_file():
            put(name, path.read_bytes())
    put("plan.json", json.dumps(facts).encode())
    archive.writestr("card.json", json.dumps({"v": 1, "run": "", "files": listed, "left_out": {}}))
print("Wrote", Path("evidence.zip").absolute())"""
_DOWNLOAD = """\
try:
    from google.colab import files as colab
    colab.download("evidence.zip")
except ImportError:
    from IPython.display import FileLink, display
    display(FileLink("evidence.zip"))"""


def badge_to(url: str) -> str:
    """Return Colab's badge for a notebook that will be at this address. Raise UsageError if Colab cannot open it."""
    if not (found := _PUBLISHED.fullmatch(url)):
        what = f"Colab opens a notebook from GitHub or a gist, but {url} is neither."
        raise UsageError("notebook.url", what, hint="Write --url https://github.com/OWNER/NAME/blob/main/FILE.ipynb")
    host, path = (found[1], found[2]) if found[1] else (found[3], found[4])
    return f"[![Open in Colab]({_COLAB}/assets/colab-badge.svg)]({_COLAB}/{host}/{path})\n\n"


def notebook_of(
    resolved: ResolvedRecipe, data: DataSummary, facts: Mapping[str, Any], minutes: int, *, badge: str = ""
) -> bytes:
    """Return the notebook for the platform in `facts` (`notebook_facts`). Raise UsageError if it is too large."""
    packed = _zip_bundle(resolved, data, facts)
    choose, end = PLATFORMS[facts["platform"]]
    tables, sha256 = resolved.tables, hashlib.sha256(packed).hexdigest()
    bundle = base64.b64encode(packed).decode()
    one_process = tables.train.loop == "huggingface"
    sequences = 1 if one_process else tables.train.batch_tokens // tables.model.context
    codes = (
        _CHECK.format(on_cpu=tables.hardware.on_cpu, choose=choose),
        _UNPACK.format(bundle=bundle, sha256=sha256, short=sha256[:8]),
        _TRAIN.format(minutes=minutes, sequences=sequences),
        *([_SAMPLE.format(prompt=tables.sample.prompts[0])] if tables.sample.prompts else []),
        _PACK,
        _DOWNLOAD,
    )
    about = _ABOUT.format(badge=badge, recipe=facts["recipe"], choose=choose, end=end)
    cells = [
        _make_cell(0, "markdown", about),
        *(_make_cell(place, "code", code) for place, code in enumerate(codes, 1)),
    ]
    cells.append(_make_cell(len(cells), "markdown", f"**Now end the session: {end}.**"))
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "language_info": {"name": "python"},
        **_METADATA[facts["platform"]],
    }
    whole = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}
    return json.dumps(whole, indent=1).encode() + b"\n"


def notebook_facts(
    resolved: ResolvedRecipe, data: DataSummary, overrides: tuple[str, ...], platform: str
) -> dict[str, Any]:
    """Return the facts about the intended training for a notebook's evidence. The cells later add the outcome."""
    return {
        "v": 1,
        "kind": "notebook",
        "platform": platform,
        "recipe": resolved.name,
        "overrides": list(overrides),
        "recipe_sha256": resolved.sha256,
        "resolved": resolved.record,
        "data_sha256": data.sha256,
        "trainer_sha256": digest_of_trainer(bundle_root() / "trainer"),
        "gpurun_version": __version__,
    }


def _zip_bundle(resolved: ResolvedRecipe, data: DataSummary, facts: Mapping[str, Any]) -> bytes:
    """Return the bundle as a zip. The same content always gives the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _list_bundle_files(resolved, data, facts):
            member = zipfile.ZipInfo(name, _STAMP)
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)
            if out.tell() > MOST_BYTES:
                what = f"The shards and the trainer are larger than a notebook's limit, {format_bytes(MOST_BYTES)}."
                raise UsageError("notebook.large", what, hint="Use less text: --set data.limit_mb=4")
    return out.getvalue()


def _list_bundle_files(
    resolved: ResolvedRecipe, data: DataSummary, facts: Mapping[str, Any]
) -> Iterator[tuple[str, bytes]]:
    yield FACTS, json.dumps(facts, indent=1, sort_keys=True).encode()
    yield "bundle/recipe.json", json.dumps(resolved.record, indent=2, sort_keys=True).encode()
    for name, path in modules_of(bundle_root() / "trainer").items():
        yield f"bundle/trainer/{name}", path.read_bytes()
    for path in sorted(_list_shards(data), key=lambda path: path.name):
        yield f"data/{path.name}", path.read_bytes()


def _list_shards(data: DataSummary) -> Iterator[Path]:
    """Yield the shards: the files of a run's own folder, and those in a user's folder that data.json lists."""
    own = Path(data.beside or data.folder)
    yield from (path for path in own.iterdir() if path.is_file())
    if data.beside:
        manifest = read_object(own / "data.json")
        yield from (Path(data.folder, Path(file["name"]).name) for part in ("train", "val") for file in manifest[part])


def _make_cell(place: int, kind: str, text: str) -> dict[str, Any]:
    code: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"gpurun-{place}", "metadata": {}, "source": text, **code}

"""A tiny character corpus in the layout of docs/FORMATS.md, recipes for it, and the trainer's real command."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.items import FILE, Item, read_items

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the quick brown fox jumps over the lazy dog; " * 400

MODEL = {"layers": 1, "heads": 1, "width": 16, "context": 8}
"""The smallest GPT, for tests to which the shape does not matter."""

torch.set_num_threads(1)


def recipe_record(**tables: dict[str, Any]) -> dict[str, Any]:
    """Return a whole recipe.json of a very small model; keyword tables replace single keys."""
    record: dict[str, Any] = {
        "about": "a test",
        "model": {
            "preset": "faithful", "layers": 2, "heads": 2, "width": 16, "context": 16, "vocab_size": 0,
            "dropout": 0.1, "bias": True, "tied": True, "softcap": 0.0, "softcap_by": "tanh",
            "rotary": 1.0, "rotary_base": 10_000.0, "attention_scale": 0.0, "value_mix": False, "gains": False,
            "init_gain": 1.0, "stream": "fp32",
        },
        "data": {
            "source": "stdlib", "tokenizer": "char", "vocab_size": 0, "val_fraction": 0.1, "limit_mb": 0,
            "order": "permuted",
        },
        "optim": {
            "kind": "adamw", "lr": 1e-2, "muon_lr": 0.0, "embed_lr": 0.0, "head_lr": 0.0, "gain_lr": 0.0, "beta1": 0.9,
            "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "muon_weight_decay": 0.0, "embed_weight_decay": 0.0,
            "gain_weight_decay": 0.0, "cautious": False, "orthogonal": "newton-schulz", "muon_scale": "adamw",
            "muon_momentum_warmup": 0, "grad_clip": 1.0,
        },
        "schedule": {"kind": "cosine", "warmup_steps": 2, "min_lr": 1e-3, "cooldown_fraction": 0.0},
        "train": {
            "steps": 20, "batch_tokens": 128, "micro_batch": 2, "seed": 42, "challenge": "", "loop": "own",
            "precision": "fp32", "compile": False, "compile_mode": "default", "parallel": "auto", "init_from": "",
            "spike": "warn", "spike_z": 7.0, "label_smoothing": 0.0, "log_every": 1, "checkpoint_every": 10,
            "keep_checkpoints": 0,
        },
        "eval": {"every": 10, "tokens": 256, "order": "permuted", "hellaswag_items": 0, "core": 0},
        "sample": {"prompts": ["the "], "tokens": 8, "temperature": 0.8, "top_k": 0, "beams": 1, "length_penalty": 0.6},
        "hardware": {"gpu": "1xA100", "disk_gb": 10, "on_cpu": "as_written"},
        "rehearsal": {
            "processes": 1, "model": {}, "data": {}, "optim": {}, "schedule": {}, "train": {}, "eval": {}, "sample": {},
        },
    }  # fmt: skip
    for name, keys in tables.items():
        record[name].update(keys)
    return record


def write_shard(path: Path, tokens: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Write an llm.c shard and return its entry in data.json."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())
    return shard_entry(path, len(tokens))


def shard_entry(path: Path, tokens: int) -> dict[str, Any]:
    content = path.read_bytes()
    return {
        "name": path.name,
        "tokens": tokens,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def write_data(folder: Path, text: str = TEXT) -> Path:
    """Write two train shards, a val shard, data.json, vocab.json and prompts.json of a text's characters."""
    folder.mkdir(parents=True)
    alphabet = sorted(set(text))
    ids = np.array([alphabet.index(c) for c in text])
    tokens = [c.encode() for c in alphabet]
    digest = hashlib.sha256(b"".join(len(t).to_bytes(4, "little") + t for t in tokens)).hexdigest()
    held_out = len(ids) // 10
    parts = {"train_000001.bin": ids[held_out:-777], "train_000002.bin": ids[-777:], "val_000000.bin": ids[:held_out]}
    entries = {name: write_shard(folder / name, part) for name, part in parts.items()}
    manifest = {
        "v": 1, "dtype": "uint16", "eot": "none",
        "tokenizer": {"name": "char", "sha256": digest, "vocab_size": len(tokens), "eot_id": None},
        "source": {"kind": "stdlib", "digest": "0" * 64, "documents": 1, "bytes": len(text)},
        "train": [entries["train_000001.bin"], entries["train_000002.bin"]], "val": [entries["val_000000.bin"]],
    }  # fmt: skip
    vocab = {"v": 1, "name": "char", "tokens_b64": [base64.b64encode(t).decode() for t in tokens]}
    prompts = [{"text": "the ", "ids": [alphabet.index(c) for c in "the "]}]
    for name, record in (("data.json", manifest), ("vocab.json", vocab), ("prompts.json", prompts)):
        (folder / name).write_text(json.dumps(record))
    return folder


def write_items(folder: Path, count: int = 11) -> list[Item]:
    """Write hellaswag.jsonl into a data folder and return its items; the right ending is TEXT's, the others are
    random."""
    alphabet, draw, records = sorted(set(TEXT)), random.Random(0), []
    for number in range(count):
        ids = [alphabet.index(c) for c in TEXT[7 * number : 7 * number + 14]]
        endings = [[draw.randrange(len(alphabet)) for _ in range(draw.randint(2, 6))] for _ in range(4)]
        label = draw.randrange(4)
        endings[label] = ids[9:]
        records.append({"context": ids[:9], "endings": endings, "label": label})
    (folder / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_items(folder, count, len(alphabet)))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shared data folder, which no test may change."""
    return write_data(tmp_path_factory.mktemp("corpus") / "data")


def command(recipe: dict[str, Any], data: Path, out: Path, processes: int = 0) -> list[str]:
    """Write the recipe and return the real command line; `processes` 0 means plain python, more the launcher."""
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.parent / f"{out.name}.recipe.json"
    file.write_text(json.dumps(recipe))
    program = ["trainer.launch", f"--processes={processes}"] if processes else ["trainer.train"]
    folders = ["--recipe", str(file), "--data", str(data), "--out", str(out)]
    return [sys.executable, "-m", *program, *folders]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_command(recipe: dict[str, Any], data: Path, out: Path, processes: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the real command to its end and return its result."""
    argv = command(recipe, data, out, processes)
    return subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


def events(out: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if kind in (None, event["kind"])]


def whole_events(out: Path) -> list[dict[str, Any]]:
    text = (out / "events.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(out: Path) -> dict[int, float]:
    """Return the loss of every step; of a repeated step, the last one."""
    return {event["step"]: event["loss"] for event in events(out, "step")}


def patience_s(out: Path) -> float:
    """Return how many seconds the trainer may now be silent before it counts as stuck."""
    seconds: float = json.loads((out / "heartbeat.json").read_text())["patience_s"]
    return seconds


def manifest(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "MANIFEST.json").read_text())
    return loaded


LONG = {"train": {"steps": 100_000, "checkpoint_every": 50_000}, "eval": {"every": 50_000}}
"""Recipe keys for a training of several minutes."""


def torchrun(script: str, argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun in two processes, in place of the module `trainer.train`."""
    file = folder / "script.py"
    file.write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(file)]
    return subprocess.run(
        [sys.executable, *launch, *argv[argv.index("--recipe") :]],
        cwd=ROOT, env={**environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def workers(parent: int) -> Iterator[tuple[int, int]]:
    """Yield (pid, local rank) of torchrun's workers."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1] == str(parent)
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(v.split(b"=")[1]) for v in variables if v.startswith(b"LOCAL_RANK=")]
        if ours and ranks:
            yield int(folder.name), ranks[0]


Train = Callable[..., int]


def train_here(recipe: dict[str, Any], data: Path, out: Path, *words: str) -> int:
    """Run the command in this process, which has already imported torch, and return its exit code."""
    from trainer.train import main

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setattr("signal.signal", lambda *_: None)
        argv = command(recipe, data, out)
        return main([*argv[argv.index("--recipe") :], *words])


@pytest.fixture
def train(data: Path) -> Train:
    """Return a function `train(recipe, out, data, *words)` that calls `train_here`, by default on the shared data."""
    return lambda recipe, out, folder=data, *words: train_here(recipe, folder, out, *words)

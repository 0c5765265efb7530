"""Carries what torch.compile made from one rental to the next: minutes of compiling become seconds of loading.

The file is named for what it depends on: torch, triton, CUDA, the card and the model. It may run code when it is read,
as compiled code must: only a file that this machine was given in its data folder, or made itself, is ever loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from trainer.config import ModelConfig
from trainer.device import Device

__all__ = ["FOLDER", "cache_name", "load_compile_cache", "made_compile_cache"]

FOLDER = "compile-cache"


def cache_name(model: ModelConfig, device: Device) -> str:
    """Return the file's name below `out/` and `data/`: another torch, card or model has another one."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    parts = [torch.__version__, triton, torch.version.cuda, device.cuda_name or device.torch.type, device.precision]
    content = json.dumps([*parts, dataclasses.asdict(model)], sort_keys=True)
    return f"{FOLDER}/{hashlib.sha256(content.encode()).hexdigest()[:16]}.bin"


def load_compile_cache(name: str, folders: Sequence[Path]) -> bool:
    """Load the cache from the first folder that has it; False where none has, or torch cannot use what is there."""
    for path in (folder / name for folder in folders):
        if path.is_file():
            try:
                return torch.compiler.load_cache_artifacts(path.read_bytes()) is not None
            except Exception:  # noqa: BLE001  a cache that cannot be used costs time, and nothing else
                return False
    return False


def made_compile_cache() -> bytes | None:
    """Return what this process has compiled so far, for `load_compile_cache`; None if there is nothing."""
    made = torch.compiler.save_cache_artifacts()
    return None if made is None else made[0]

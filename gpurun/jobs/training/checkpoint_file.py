"""Weights to start from in a checkpoint of nanoGPT or minGPT (`--init ckpt.pt`), made into what a run starts from.

The file is a pickle. The trainer reads it here, in a child process, by an unpickler that makes tensors and plain values
only; what is uploaded is safetensors and JSON.
"""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

from gpurun.core.bounded_program import run_module
from gpurun.core.errors import SetupError, UsageError

INIT_FOLDER = "init"
"""Where the weights lie beside a run's data, and what train.init_from is then."""
_MEMORY_BYTES, _LIMIT_S = 6 << 30, 1800


def take_checkpoint(checkpoint: Path, into: Path) -> None:
    """Write the weights of a checkpoint into the run's own data folder; UsageError for what is none, or holds more."""
    if not checkpoint.is_file():
        what = f"--init {checkpoint} is not a file."
        raise UsageError("init.missing", what, hint="Name nanoGPT's ckpt.pt or minGPT's model.pt.")
    if find_spec("torch") is None:
        hint = "From the clone: pip install '.[local]' (no NVIDIA GPU: from PyTorch's CPU index; see the README)."
        raise SetupError(
            "torch.missing", "--init reads a checkpoint with PyTorch, which is not installed here.", hint=hint
        )
    most_bytes = _MEMORY_BYTES + 4 * checkpoint.stat().st_size
    words = [str(checkpoint), str(into / INIT_FOLDER)]
    try:
        ended = run_module("trainer.foreign_weights", words, most_bytes=most_bytes, limit_s=_LIMIT_S)
    except subprocess.TimeoutExpired:
        what = f"{checkpoint} was not read after {_LIMIT_S / 60:.0f} minutes."
        raise UsageError("init.failed", what, hint="Take a faster machine.") from None
    if ended.refusal:
        hint = "Other weights: model.safetensors and config.json in a folder beside the shards, and train.init_from."
        raise UsageError("init.refused", f"{ended.refusal}.", hint=hint)
    if ended.code:
        hint = "It may be damaged, or made to take more memory than its size allows."
        what = f"{checkpoint} could not be read (exit code {ended.code}): {ended.last_lines}"
        raise UsageError("init.failed", what, hint=hint)

"""Finds results that a command wrote outside the downloaded folders: below the home, /workspace and /tmp (or $TMPDIR).

The search runs once, when the command ends. Caches and downloads are not results; a checkpoint always is.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, Iterator, List, Set, Tuple

LARGE_BYTES = 1_000_000
MOST_NAMED = 20
SLACK_S = 0.1  # A file system's clock is coarser than Python's.
CHECKPOINTS = (
    ".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npz", ".h5", ".hdf5", ".keras", ".onnx", ".gguf", ".msgpack",
    ".pkl", ".joblib", ".tflite", ".distcp",
)  # fmt: skip
# Only these count in a dot folder, in a temporary folder, and beside an archive that was downloaded meanwhile.
WEIGHTS = tuple(suffix for suffix in CHECKPOINTS if suffix not in (".pkl", ".joblib", ".bin"))
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".whl", ".deb", ".rpm", ".parquet", ".arrow")
CACHES = frozenset((
    ".gpurun", ".git", ".venv", "venv", "node_modules", "__pycache__", "site-packages", "dist-packages", ".conda",
    ".triton", ".nv", ".npm", ".cargo", ".rustup", ".vscode-server", ".cursor-server", ".Trash", "Trash", ".keras",
    ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".nuget", ".gradle", ".m2", ".bun", ".uv",
))  # fmt: skip
BELOW_CACHE = frozenset((
    "huggingface", "torch", "torch_extensions", "pip", "uv", "matplotlib", "wandb", "vllm", "triton", "nvidia",
    "conda", "yarn", "go-build", "ms-playwright", "fontconfig", "mesa_shader_cache", "kagglehub", "modelscope",
    "tvm-ffi", "flashinfer", "numba", "cupy", "jax", "whisper", "clip", "sentence_transformers", "dvc", "ollama",
))  # fmt: skip
"""Subfolders of ~/.cache that contain downloaded or compiled files."""
HOME_MARK = "id.lock"
"""A file in gpurun's own home, whose artifacts have already been downloaded."""
TEMPORARY = re.compile(r"tmp[a-z0-9_]{6,12}|torchinductor_.*|pip-.*|uv-.*|torch_.*|pymp-.*|ray|systemd-private-.*|\..*")
HUB = re.compile(r"(models|datasets|spaces)--.*")
VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME",
    "PIP_CACHE_DIR", "UV_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
    "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "KAGGLEHUB_CACHE", "MODELSCOPE_CACHE", "VIRTUAL_ENV", "CONDA_PREFIX",
)  # fmt: skip
"""Variables that name the folder of a cache."""


def find_results(since_wall: float, passed_by: Iterable[str], limit_s: float) -> Dict[str, Any]:
    """Return the results that appeared or changed since `since_wall`, without those in `passed_by` and in caches.

    The result has their number, their bytes, and the twenty most important: weights first, then by size. `is_whole` is
    false if the time was over before everything was searched.
    """
    found = ResultCounter()
    deadline = time.monotonic() + limit_s
    known = {os.path.realpath(path) for path in passed_by} | caches()
    seen: Set[Tuple[int, int]] = set()
    for root in roots():
        for path, facts in results(root, since_wall - SLACK_S, known, deadline, seen):
            found.add(path, facts.st_size)
    return dict(found.as_json(), is_whole=time.monotonic() < deadline)


def roots() -> List[str]:
    """Return the home, /workspace and the temporary folder, as far as they exist and are not inside one another."""
    places = (os.path.expanduser("~"), "/workspace", os.environ.get("TMPDIR") or "/tmp")
    folders = [os.path.realpath(path) for path in places]
    found: List[str] = []
    for path in folders:
        if path != "/" and os.path.isdir(path) and not any((path + "/").startswith(parent + "/") for parent in found):
            found.append(path)
    return found


def caches() -> Set[str]:
    """Return the folders that variables name as caches."""
    return {os.path.realpath(os.environ[name]) for name in VARIABLES if os.environ.get(name)}


def results(
    root: str, since_wall: float, passed_by: Set[str], deadline: float, seen: Set[Tuple[int, int]]
) -> Iterator[Tuple[str, os.stat_result]]:
    """Yield the results below a root, without following links and only on the root's own file system."""
    waiting = [(root, False)]
    device = os.lstat(root).st_dev
    while waiting and time.monotonic() < deadline:
        folder, is_doubtful = waiting.pop()
        folders, files = list_folder(folder, device)
        new = [(path, facts) for path, facts in files if facts.st_mtime >= since_wall and path not in passed_by]
        is_doubtful = is_doubtful or any(path.endswith(ARCHIVES) for path, _ in new)
        for path, facts in new:
            place = (facts.st_dev, facts.st_ino)
            if place not in seen and is_result(path, facts.st_size, is_doubtful) and not is_download(path, root):
                seen.add(place)
                yield path, facts
        for path in folders:
            if path not in passed_by and not is_cache(path):
                is_hidden = TEMPORARY.fullmatch(os.path.basename(path)) is not None
                waiting.append((path, is_doubtful or is_hidden))


def list_folder(folder: str, device: int) -> Tuple[List[str], List[Tuple[str, os.stat_result]]]:
    """Return the subfolders of a folder, and this user's regular files with their facts, all on one file system."""
    folders: List[str] = []
    files: List[Tuple[str, os.stat_result]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                if facts.st_dev != device:
                    continue
                if stat.S_ISDIR(facts.st_mode):
                    folders.append(entry.path)
                elif stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid():
                    files.append((entry.path, facts))
    except OSError:  # The folder is another user's, or is gone by now.
        pass
    return folders, files


def is_result(path: str, size: int, is_doubtful: bool) -> bool:
    """Return whether a user would call a file a result: it is large, or has the name of a checkpoint."""
    name = os.path.basename(path).lower()
    if size == 0 or name.endswith((".tmp", ".lock", ".incomplete", ".part", ".swp")):
        return False
    if is_doubtful or name.startswith("."):
        return name.endswith(WEIGHTS)
    return name.endswith(CHECKPOINTS) or (size > LARGE_BYTES and not name.endswith(ARCHIVES))


def is_cache(path: str) -> bool:
    """Return whether a folder holds downloaded, installed or compiled files."""
    folder, name = os.path.split(path)
    if name in CACHES or HUB.fullmatch(name) or name.startswith("torchinductor_"):
        return True
    if os.path.basename(folder) == ".cache" and name in BELOW_CACHE:
        return True
    return any(os.path.exists(os.path.join(path, mark)) for mark in ("pyvenv.cfg", HOME_MARK))


def is_download(path: str, root: str) -> bool:
    """Return whether the Hugging Face hub has downloaded the file. The hub records each download in a folder."""
    folder = os.path.dirname(path)
    while len(folder) >= len(root):
        notes = os.path.join(folder, ".cache", "huggingface", "download")
        if os.path.isdir(notes):
            return os.path.exists(os.path.join(notes, os.path.relpath(path, folder) + ".metadata"))
        folder = os.path.dirname(folder)
    return False


class ResultCounter:
    """Counts results, and keeps only the names of the most important, because there may be millions."""

    def __init__(self) -> None:
        self.files, self.bytes = 0, 0
        self.heap: List[Tuple[bool, int, str]] = []

    def add(self, path: str, size: int) -> None:
        """Count one result."""
        self.files, self.bytes = self.files + 1, self.bytes + size
        push = heapq.heappush if len(self.heap) < MOST_NAMED else heapq.heappushpop
        push(self.heap, (path.lower().endswith(WEIGHTS), size, path))

    def as_json(self) -> Dict[str, Any]:
        """Return the results in the form of the event. A file below the home is named relative to it."""
        home = os.path.realpath(os.path.expanduser("~")) + os.sep
        ranked = sorted(self.heap, reverse=True)
        named = [(os.fsencode(path).decode("utf-8", "replace"), size) for _, size, path in ranked]
        first = [
            {"name": "~/" + path[len(home) :] if path.startswith(home) else path, "bytes": size} for path, size in named
        ]
        return {"files": self.files, "bytes": self.bytes, "first": first}

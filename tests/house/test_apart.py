"""Tests that gpurun and the trainer share files, not code, and that some packages are imported in one place only."""

from __future__ import annotations

import ast
import sys

from house_sources import imports, sources

from gpurun.core.installed_files import SHARED

FAR_SIDE, DOOR = "gpurun/remote/agent/", "gpurun/core/installed_files.py"
GUESTS = {"gpurun/remote/agent/runner/tpe.py": {"optuna"}}
"""Packages that a file loads only if the user requested and installed them."""


def importers(names: str, *packages: str) -> set[str]:
    return {s.path for s in sources(*packages) for _, found in imports(s) if found.split(".")[0] in names.split()}


def test_the_two_sides_share_files_not_code() -> None:
    assert importers("gpurun", "trainer") == set()
    assert importers("trainer", "gpurun") == {DOOR}, "but for what stands by itself"
    assert importers("torch", "gpurun") == set()


def test_what_gpurun_uses_of_trainer_stands_by_itself() -> None:
    ours = {f"trainer.{name}" for name in SHARED}
    for source in (source for source in sources("trainer") if source.module in ours):
        roots = {name.split(".")[0] for _, name in imports(source) if name.rpartition(".")[0] not in ours}
        assert roots <= sys.stdlib_module_names | {"numpy", "tiktoken"}, source.path


def test_ssh_has_one_door() -> None:
    elsewhere = [path for path in importers("paramiko", "gpurun", "trainer") if "gpurun/remote/ssh/" not in path]
    assert elsewhere == []


def test_the_far_sides_program_needs_only_the_standard_library() -> None:
    for source in sources("gpurun"):
        if source.path.startswith(FAR_SIDE):
            # The agent's modules are uploaded in one zip; no other module of gpurun is on the machine.
            names = [name for _, name in imports(source) if not name.startswith("gpurun.remote.agent.")]
            roots = {name.split(".")[0] for name in names}
            assert roots - GUESTS.get(source.path, set()) <= sys.stdlib_module_names, source.path


def test_nothing_imports_what_runs_code_when_it_is_read() -> None:
    unsafe = "pickle _pickle cPickle dill cloudpickle joblib shelve marshal"
    # These allow no import by the files they read: tests/unit/test_adopt.py, tests/trainer/test_foreign_weights.py.
    assert importers(unsafe, "gpurun", "trainer") == {"gpurun/data/nanogpt_meta.py", "trainer/foreign_weights.py"}


def test_no_checkpoint_is_read_by_torch_and_its_pickle_format() -> None:
    """Holes in torch's loader then do no harm, whatever version an image has (CVE-2025-32434, CVE-2026-24747)."""
    loads = [
        source.at(node)
        for source in sources("gpurun", "trainer")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.jit.load")
    ]
    assert loads == []

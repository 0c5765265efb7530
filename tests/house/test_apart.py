"""The two sides share files, not code; what is heavy or far has one door."""

from __future__ import annotations

import ast
import sys

import pytest
from house_sources import imports, sources

FAR_SIDE = "gpurun/machine/agent/"


def importers(name: str, *packages: str) -> set[str]:
    return {s.path for s in sources(*packages) for _, found in imports(s) if found.split(".")[0] == name}


def test_the_two_sides_share_files_not_code() -> None:
    assert importers("gpurun", "trainer") == set()
    assert importers("trainer", "gpurun") == set()
    assert importers("torch", "gpurun") == set()


def test_ssh_has_one_door() -> None:
    elsewhere = [path for path in importers("paramiko", "gpurun", "trainer") if "gpurun/machine/remote/" not in path]
    assert elsewhere == []


def test_the_far_sides_program_needs_only_the_standard_library() -> None:
    for source in sources("gpurun"):
        if source.path.startswith(FAR_SIDE):
            # Its own rooms travel with it, in one zip; nothing else of gpurun is there.
            names = [name for _, name in imports(source) if not name.startswith("gpurun.machine.agent.")]
            roots = {name.split(".")[0] for name in names}
            assert roots <= sys.stdlib_module_names, source.path


@pytest.mark.parametrize("name", ["pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"])
def test_nothing_imports_what_runs_code_when_it_is_read(name: str) -> None:
    assert importers(name, "gpurun", "trainer") == set()


def test_no_checkpoint_is_read_by_torch_whose_own_format_is_a_pickle() -> None:
    """So none of its holes counts here, whatever version an image has (CVE-2025-32434, CVE-2026-24747)."""
    loads = [
        source.at(node)
        for source in sources("gpurun", "trainer")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.jit.load")
    ]
    assert loads == []

"""Tests that the upload contains every module that training imports."""

from __future__ import annotations

import ast
from pathlib import Path

from gpurun.jobs.trainer import modules_of

TRAINER = Path(__file__).parents[2] / "trainer"


def test_every_trainer_module_that_training_imports_is_shipped() -> None:
    shipped, left = modules_of(TRAINER), ["train.py"]
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        assert name in shipped, name
        for node in ast.parse(shipped[name].read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer."):
                path = str(node.module).removeprefix("trainer.").replace(".", "/")
                left.append(f"{path}.py" if (TRAINER / f"{path}.py").exists() else f"{path}/__init__.py")
    assert len(seen) > 10

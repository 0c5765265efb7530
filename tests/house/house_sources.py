"""The source files that the rules of the house check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT, LOADERS = Path(__file__).parents[2], ("import_module", "__import__")


@dataclass(frozen=True)
class Source:
    """One module: its path from the repository's root, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @property
    def room(self) -> str:
        """Return `view` for gpurun/view/plan_screen.py, and "" for gpurun/__init__.py."""
        parts = self.path.split("/")
        return parts[1] if len(parts) > 2 else ""

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def sources(*packages: str) -> tuple[Source, ...]:
    """Return every Python file of the packages, sorted by path."""
    files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
    return tuple(Source(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in files)


def imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Yield every imported name in full, wherever the import stands; import_module with a literal string counts."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{source.at(node)}: import by the full name"
            yield from ((node, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LOADERS:
            yield from ((node, str(argument.value)) for argument in node.args[:1] if isinstance(argument, ast.Constant))

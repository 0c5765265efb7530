"""Public things say what they promise, and every error says what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from house_sources import Source, sources

from gpurun.core import errors

Described = ast.Module | ast.ClassDef | ast.FunctionDef
ERRORS = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)} - {"ExitCode"}
CODE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


def public(body: list[ast.stmt]) -> Iterator[Described]:
    """Classes and functions without an underscore; a body of `...` promises what its protocol says."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if not (len(node.body) == 1 and ast.unparse(node.body[0]) == "..."):
                yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def test_public_things_have_a_docstring_whose_first_line_is_a_sentence() -> None:
    silent = []
    for source in sources("gpurun"):
        for node in (source.tree, *public(source.tree.body)):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if not first.endswith("."):
                silent.append(f"{source.at(node)} {getattr(node, 'name', 'module')}: {first!r}")
    assert not silent, "\n".join(silent)


def errors_made(source: Source) -> Iterator[ast.Call]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ERRORS:
            yield node


def test_every_error_has_a_hint_and_a_code() -> None:
    bare = []
    for source in sources("gpurun"):
        for call in errors_made(source):
            hints = [keyword.value for keyword in call.keywords if keyword.arg == "hint"]
            empty = not hints or (isinstance(hints[0], ast.Constant) and not str(hints[0].value).strip())
            code = call.args[0] if call.args else None
            odd = isinstance(code, ast.Constant) and not CODE.fullmatch(str(code.value))
            bare += [f"{source.at(call)} {ast.unparse(call)[:80]}"] if empty or odd else []
    assert not bare, "\n".join(bare)

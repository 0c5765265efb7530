"""Tests that every error has a code and a hint about what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from house_sources import Source, sources

from gpurun.core import errors

ERRORS = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)} - {"ExitCode"}
CODE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


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

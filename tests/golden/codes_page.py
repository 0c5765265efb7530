"""Read the codes of gpurun's errors and incidents from its source, with the texts beside them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[a-z…][a-z0-9_…]*\.[a-z0-9_…]+")
PASSED_ON = {
    "_parse_within",
    "_over_ssh_note",
    "warn",
    "tell",
    "why",
    "ExtraGone",
    "StepFailed",
    "Incident",
    "__init__",
}
"""Functions that take a code as an argument, besides the exceptions themselves."""
WITHOUT_FAMILY = {"Refusal": ("far", 0), "FarRefusal": ("far", 0), "_bad_shard": ("data", 1)}
"""Functions that take a code without its family, with that family and the position of the argument."""
FILLED_IN = {"far.…", "data.…", "…"}
"""Codes that are composed of parts; the complete ones are found elsewhere."""
GAP = "…"
_ALONE = re.compile(r"[a-z][a-z_]+")
_PLACES = re.compile(rf"{GAP}(?:[ ,]*{GAP})+")


@dataclass(frozen=True)
class Entry:
    """A code at one place of the source. A part of its text that depends on the case is a GAP."""

    code: str
    raised: str
    what: str
    hint: str


@cache
def trees() -> tuple[ast.Module, ...]:
    """Return the parsed source files."""
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "gpurun").rglob("*.py")))


@cache
def entries() -> tuple[Entry, ...]:
    """Return an entry for each place that raises or records a code, sorted by code."""
    classes = {
        node.name: [ast.unparse(base) for base in node.bases]
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    shared = {
        name: value
        for tree in trees()
        for name, value in _assigned(tree.body).items()
        if name.isupper() and isinstance(value, ast.Constant)
    }
    found = [entry for tree in trees() for entry in _in_tree(tree, classes, shared)]
    found = [entry for entry in found if entry.code not in FILLED_IN]
    return tuple(sorted(dict.fromkeys(found), key=lambda entry: (entry.code, entry.raised, entry.what)))


def _in_tree(tree: ast.Module, classes: dict[str, list[str]], shared: dict[str, ast.expr]) -> Iterator[Entry]:
    constants = shared | _assigned(tree.body)
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for scope in scopes for node in ast.walk(scope)}
    rest = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in inner]
    seen: set[int] = set()
    for scope in reversed(scopes):
        calls = [node for node in ast.walk(scope) if isinstance(node, ast.Call) and id(node) not in seen]
        seen |= {id(node) for node in calls}
        yield from _of_calls(calls, constants, classes, scope)
    yield from _of_calls(rest, constants, classes, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            code, what = (_words(part, {}) for part in node.elts)
            if CODE.fullmatch(code) and " " in what:
                yield Entry(code, "", what, "")
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "code" and node.value is not None:
            yield Entry(_words(node.value, {}), "", "", "")


def _of_calls(
    calls: list[ast.Call], constants: dict[str, ast.expr], classes: dict[str, list[str]], scope: ast.AST | None
) -> Iterator[Entry]:
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        if name in WITHOUT_FAMILY:
            family, place = WITHOUT_FAMILY[name]
            code, what = (_words(part, constants) for part in call.args[place : place + 2])
            if "." not in code and GAP not in code:
                yield Entry(f"{family}.{code}", "", what, "")
            continue
        root = _root(name, classes)
        if root is None and name not in PASSED_ON:
            continue
        known = constants | (_before(scope, call.lineno) if scope is not None else {})
        named = {word.arg: word.value for word in call.keywords}
        parts = [*call.args, *filter(None, [named.get("code")])]
        alone = len(call.args) if "code" in named else 0 if root else None
        words = [_words(part, known) for part in parts]
        for place, part in enumerate(parts):
            if codes := [code for code in _either(part, known) if is_code(code, alone=place == alone)]:
                beside = [words[near] for near in (place + 1, place - 1) if 0 <= near < len(words)]
                beside += [_words(named[key], known) for key in ("what", "message") if key in named]
                what = next((text for text in beside if text.strip(f"{GAP} .")), "")
                hint = _words(named["hint"], known) if "hint" in named else ""
                yield from (Entry(code, root or "", what, hint) for code in codes)
                break


def is_code(text: str, *, alone: bool) -> bool:
    """Return whether a text is a code. A code without a family is recognised only where codes stand (`alone`)."""
    return bool(CODE.fullmatch(text) and text.strip(f"{GAP}.")) or (alone and bool(_ALONE.fullmatch(text)))


def _either(node: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """Return the codes that an expression may be."""
    if isinstance(node, ast.Name) and isinstance(known.get(node.id), ast.IfExp):
        node = known[node.id]
    if isinstance(node, ast.IfExp):
        return [*_either(node.body, known), *_either(node.orelse, known)]
    return [_words(node, known)]


def _root(name: str, classes: dict[str, list[str]]) -> str | None:
    """Return the class of core/errors.py that decides the exit code of an exception's class."""
    while name in classes:
        if "GpurunError" in classes[name] or name == "GpurunError":
            return name
        name = next(iter(classes[name]), "")
    return None


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the value that these statements assign to each name; the last one counts."""
    known: dict[str, ast.expr] = {}
    for node in body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                known |= {ast.unparse(name): value for name, value in zip(target.elts, node.value.elts, strict=False)}
            else:
                known[ast.unparse(target)] = node.value
    return known


def _before(scope: ast.AST, line: int) -> dict[str, ast.expr]:
    """Return the last value that each name of a function was assigned above a line."""
    given = [node for node in ast.walk(scope) if isinstance(node, ast.Assign) and node.lineno < line]
    return _assigned(sorted(given, key=lambda node: node.lineno))


def _words(node: ast.expr, known: dict[str, ast.expr], depth: int = 0) -> str:
    """Return an expression as text, with a GAP for each part that is only known at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return _PLACES.sub(GAP, "".join(_words(part, known, depth) for part in node.values))
    if isinstance(node, ast.FormattedValue):
        inner = _words(node.value, known, depth)
        return inner if isinstance(node.value, ast.Name | ast.Constant) and len(inner) < 60 else GAP
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left, known, depth) + _words(node.right, known, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return _PLACES.sub(GAP, re.sub(r"%[\d.]*[sdrfi]", GAP, _words(node.left, known, depth)))
    if isinstance(node, ast.IfExp):
        return _words(node.body, known, depth)
    if isinstance(node, ast.Name) and node.id in known and depth < 4:
        return _words(known[node.id], {key: value for key, value in known.items() if key != node.id}, depth + 1)
    return GAP

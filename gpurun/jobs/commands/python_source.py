"""Parses a program, without running it, to find its imports and the files that it names."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

_MOST_CONSTANT_CHARS = 300
_READERS = frozenset(
    {"load", "loadtxt", "genfromtxt", "fromfile", "memmap", "safe_load", "load_from_disk", "from_file", "load_file"}
    | {"read_text", "read_bytes", "open_dataset", "imread", "read"}
)
_WRITERS = frozenset(
    {"save", "savez", "savez_compressed", "savetxt", "savefig", "dump", "save_pretrained", "save_file", "to_csv"}
    | {"to_json", "to_parquet", "write_text", "write_bytes", "FileHandler", "makedirs", "mkdir", "save_to_disk"}
)
_JOINERS = frozenset({"join", "Path", "PurePath", "listdir", "scandir", "glob", "iglob", "walk"})
_OPTIONS_WRITTEN = re.compile(r"out|save|log|dest|ckpt|checkpoint|result", re.IGNORECASE)
_FILE_NAME = re.compile(r"[^\s:*?<>|\"'{}%]*[^\s:*?<>|\"'{}%/.]\.[A-Za-z][A-Za-z0-9]{0,7}")


@dataclass(frozen=True)
class Import:
    """An import of a module. `level` counts the leading dots; `is_sure` means that the file always imports it."""

    module: str
    names: tuple[str, ...]
    level: int
    is_sure: bool


@dataclass
class PythonSource:
    """The imports of one source file, and its text constants, grouped by how the file uses them."""

    imports: list[Import] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    defaults: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The default file names of options, each with the options that replace it."""
    searches_elsewhere: bool = False
    """Whether the file changes the module search path."""


def read_python(text: str) -> PythonSource:
    """Return the imports and constants of a Python file. Raise SyntaxError or ValueError if it cannot be parsed."""
    found = PythonSource()
    _visit(ast.parse(text), found, is_sure=True)
    found.reads -= found.writes
    return found


def read_notebook(text: str) -> PythonSource:
    """Return the imports and constants of a notebook's code. Raise ValueError or SyntaxError if it cannot be parsed."""
    lines: list[str] = []
    try:
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "code":
                lines += "".join(cell["source"]).splitlines()
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not a notebook: {error}") from None
    return read_python("\n".join("pass" if line.startswith(("%", "!")) else line for line in lines))


def read_shell(text: str) -> list[str]:
    """Return the words of a shell script."""
    words: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words += shlex.split(line, comments=True)
        except ValueError:  # A quotation spans several lines.
            words += line.split()
    return [word for word in words if len(word) <= _MOST_CONSTANT_CHARS]


def is_file_name(text: str) -> bool:
    """Return whether a text looks like a file name."""
    return len(text) <= _MOST_CONSTANT_CHARS and _FILE_NAME.fullmatch(text) is not None


def _visit(node: ast.AST, found: PythonSource, *, is_sure: bool) -> None:
    """Add the imports and texts of a syntax node and of all nodes below it."""
    if isinstance(node, ast.Import):
        found.imports += [Import(name.name, (), 0, is_sure) for name in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = tuple(name.name for name in node.names)
        found.imports.append(Import(node.module or "", names, node.level, is_sure))
    elif isinstance(node, ast.Call):
        _take_call(node, found)
    elif isinstance(node, ast.Attribute) and node.attr == "path" and getattr(node.value, "id", "") == "sys":
        found.searches_elsewhere = True
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.constants |= set(_find_texts(node))
    children: Iterator[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # A docstring.
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" in test:
            children = iter(node.orelse)
        is_sure = is_sure and "__name__" in test
    elif isinstance(node, ast.Try | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Match):
        is_sure = False
    for child in children:
        _visit(child, found, is_sure=is_sure)


def _take_call(call: ast.Call, found: PythonSource) -> None:
    """Add the files that a call reads or writes."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "add_argument":
        _take_option(call, found)
        return
    # The file is the first argument, or the object itself, as in Path("a.txt").read_text().
    places = [*call.args[:1], *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
    texts = {text for place in places for text in _find_texts(place)}
    if name == "save":  # torch.save(model, "a.pt")
        texts |= {text for place in call.args for text in _find_texts(place)}
    if name == "open":
        modes = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "mode")]
        mode = next((text for place in modes for text in _find_texts(place)), "r")
        (found.writes if set("wax") & set(mode) else found.reads).update(texts)
    elif name in _WRITERS:
        found.writes |= texts
    elif name in _READERS or name.startswith("read_"):
        found.reads |= texts
    if name in _JOINERS:
        found.folders |= {text for place in call.args for text in _find_texts(place)}


def _take_option(call: ast.Call, found: PythonSource) -> None:
    """Add the default of an argparse option if it looks like a file that the program reads."""
    options = tuple(text for place in call.args for text in _find_texts(place))
    for word in call.keywords:
        for text in _find_texts(word.value) if word.arg == "default" else ():
            if is_file_name(text) and not any(map(_OPTIONS_WRITTEN.search, options)):
                found.defaults[text] = options


def _find_texts(node: ast.AST) -> Iterator[str]:
    """Yield the text constants in an expression."""
    for below in ast.walk(node):
        text = below.value if isinstance(below, ast.Constant) else None
        if isinstance(text, str) and 0 < len(text) <= _MOST_CONSTANT_CHARS and "\n" not in text:
            yield text

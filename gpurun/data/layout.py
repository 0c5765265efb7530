"""Holds the user's options for reading a source's files; what the user leaves open is decided from the files."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from gpurun.core.errors import UsageError

AS_TEXT = "none"
"""As a delimiter: tables are read as text. As held-out data: files are not divided by their names."""
_DELIMITERS = {"tab": "\t", r"\t": "\t"}


@dataclass(frozen=True)
class Layout:
    """The user's options about a source's files; an empty field was not given.

    `column`: the column with a row's text (default "text"). `template`: a row's text composed of several columns, `{a}
    {b}`. `delimiter`: between a table's cells, or AS_TEXT. `has_head`: False if a table has no header row.
    `per_line`: each line of a text is a document. `include`, `exclude`: globs of names, as in .gitignore. `val`: a file
    or folder that is held out, or AS_TEXT. `val_fraction`: the share to hold out.
    """

    column: str = ""
    template: str = ""
    delimiter: str = ""
    has_head: bool = True
    per_line: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    val: str = ""
    val_fraction: float | None = None
    FLAGS: ClassVar = ("text-column", "template", "delimiter", "no-header", "per-line", "include", "exclude", "val")

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that make up a row's text."""
        named = [name for _, name in self._template_parts if name is not None]
        return tuple(dict.fromkeys(named)) if self.template else (self.column or ("text" if self.has_head else "1"),)

    @cached_property
    def _template_parts(self) -> list[tuple[str, str | None]]:
        """Return the template's literal texts, each with the column that follows it."""
        return [(literal, name) for literal, name, _, _ in string.Formatter().parse(self.template)]

    def text_of(self, cells: Mapping[str, str]) -> str:
        """Return a row's text; "" if all its columns are empty."""
        if not self.template:
            return cells[self.columns[0]]
        if not any(cells[name] for name in self.columns):
            return ""
        return "".join(literal + ("" if name is None else cells[name]) for literal, name in self._template_parts)

    @property
    def flags(self) -> dict[str, Any]:
        """Return the given options that affect the output bytes, keyed by the names of their flags."""
        options = {
            "text-column": self.column or "text",
            "template": self.template,
            "delimiter": self.delimiter,
            "no-header": not self.has_head,
            "per-line": self.per_line,
            "include": list(self.include),
            "exclude": list(self.exclude),
            "val": "named" if self.val and self.val != AS_TEXT else self.val,
        }
        return {name: value for name, value in options.items() if value}


AS_FOUND = Layout()
"""The layout without any options."""


def parse_layout(**fields: Any) -> Layout:
    """Return the layout from the command-line options; UsageError for an invalid template, delimiter or fraction.

    In a template or delimiter, the two characters `\\n` mean a line feed, and `\\t` a tab.
    """
    template, delimiter, fraction = fields.get("template", ""), fields.get("delimiter", ""), fields.get("val_fraction")
    if fraction is not None and not 0.0 < fraction < 1.0:
        what = f"A --val-fraction of {fraction} is not between 0 and 1."
        raise UsageError("usage.val_fraction", what, hint="Try 0.005.")
    if template and fields.get("column"):
        what = "--template and --text-column both define a row's text."
        raise UsageError("usage.template", what, hint="Leave one of them out.")
    template = template.replace(r"\n", "\n").replace(r"\t", "\t")
    try:
        parts = [part[1:] for part in string.Formatter().parse(template)]
    except ValueError as error:
        parts = [("", str(error), None)]
    named = [name for name, *_ in parts if name is not None]
    if template and (not all(named) or not named or any(spec or turned for _, spec, turned in parts)):
        what = f"--template {template[:80]!r} does not contain the name of a column."
        hint = r"Write column names in braces: --template '{instruction}\n{output}'; write a literal brace twice."
        raise UsageError("usage.template", what, hint=hint)
    delimiter = _DELIMITERS.get(delimiter, delimiter)
    if delimiter and delimiter != AS_TEXT and (len(delimiter) != 1 or delimiter in '"\r\n'):
        what = f"--delimiter {delimiter!r} is not one character."
        raise UsageError("usage.delimiter", what, hint="Use one such as ';', or tab; none reads tables as text.")
    if delimiter == AS_TEXT and not fields.get("has_head", True):
        what = "--delimiter none reads a table as text, but --no-header is for tables."
        raise UsageError("usage.delimiter", what, hint="Leave one of them out.")
    return Layout(**{**fields, "template": template, "delimiter": delimiter})

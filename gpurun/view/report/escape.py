"""Escapes text for HTML. All text of the page passes through this module, which first makes it harmless."""

from __future__ import annotations

import html
from collections.abc import Iterable

from gpurun.core.untrusted import safe_line


def escape_line(text: object) -> str:
    """Return the text as one harmless line that HTML shows as text, in an element or in a quoted attribute."""
    return html.escape(safe_line(str(text)), quote=True)


def lines_escaped(lines: Iterable[str]) -> str:
    """Return the lines, escaped, for an element that keeps line breaks and spaces."""
    return "\n".join(escape_line(line) for line in lines)


def tag(name: str, inner: str, **attributes: str) -> str:
    """Return an element around HTML that is already escaped. `class_` means class, `data_label` data-label."""
    spelled = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape_line(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{spelled}>{inner}</{name}>"

"""The agent as the one file that is shipped."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

AGENT = Path(__file__).parent / "agent"


def agent_zip() -> bytes:
    """The agent as the one file that is shipped: a zip that Python runs as it is, the same bytes for the same sources.

    It is not compressed, as it would cost every call more to inflate it than it costs once to send it.
    """
    package = ["gpurun", "remote", "agent"]
    content = {"/".join([*package[:depth], "__init__.py"]): b"" for depth in (1, 2)}
    for path in AGENT.glob("*.py"):
        content["/".join([*package, path.name]) if path.name != "__main__.py" else path.name] = path.read_bytes()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as zipped:
        for name in sorted(content):
            entry = zipfile.ZipInfo(name)  # dated 1980, whenever it is made
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # Unix, wherever it is made
            zipped.writestr(entry, content[name])
    return out.getvalue()

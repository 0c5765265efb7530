"""An emulator of the hub of public data sets: it serves the tree and the files of one data set, and nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shard(tokens: bytes) -> bytes:
    """Return a shard in llm.c's format; each byte is one token."""
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    return header + b"".join(bytes([token, 0]) for token in tokens)


class HubEmulator:
    """A hub with one data set, `me/tokens`: its files by path, and attributes that make its answers go wrong."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.gated: bool | str = False
        self.altered: dict[str, bytes] = {}
        self.redirect = ""
        self.refusals: list[int] = []
        """HTTP statuses for the next requests for a file, one each; 0 serves the file."""
        self.asked: list[str] = []

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.origin = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def tree(self) -> list[dict[str, Any]]:
        """Return the rows of the hub's file list; each file in LFS has its digest."""
        entries = [{"type": "file", "path": "README.md", "size": 3, "oid": "0" * 40}]
        for path, content in self.files.items():
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            entries.append({"type": "file", "path": path, "size": len(content), "oid": "1" * 40, "lfs": lfs})
        return entries


def _handler(hub: HubEmulator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.asked.append(self.path)
            assert "authorization" not in self.headers, "no key is ever sent"
            path = self.path.partition("?")[0]
            if path in (f"/api/datasets/me/tokens/revision/{name}" for name in ("main", COMMIT)):
                return self.answer(json.dumps({"sha": COMMIT, "gated": hub.gated, "private": False}).encode())
            if path == f"/api/datasets/me/tokens/tree/{COMMIT}":  # Two pages, because the hub splits a long list.
                rows, half = hub.tree(), len(hub.tree()) // 2
                if "cursor" in self.path:
                    return self.answer(json.dumps(rows[half:]).encode())
                return self.answer(json.dumps(rows[:half]).encode(), Link=f'<{hub.origin}{path}?cursor=x>; rel="next"')
            if path.startswith(file := f"/datasets/me/tokens/resolve/{COMMIT}/"):
                return self.file(path.removeprefix(file))
            return self.send_error(401)

        def file(self, path: str) -> None:
            if hub.refusals and (code := hub.refusals.pop(0)):
                return self.send_error(code)
            if hub.redirect:
                self.send_response(302)
                self.send_header("Location", hub.redirect)
                self.send_header("Content-Length", "0")
                return self.end_headers()
            if path == "README.md":
                return self.answer(b"me\n")
            content = hub.altered.get(path, hub.files[path])
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            assert found
            first, last = int(found[1]), min(int(found[2]), len(content) - 1)
            return self.answer(
                content[first : last + 1], 206, **{"Content-Range": f"bytes {first}-{last}/{len(content)}"}
            )

        def answer(self, content: bytes, code: int = 200, **headers: str) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    return Handler

"""The far side as its callers see it: one typed method a verb, over any `Machine`; every answer is checked."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.crashpoint import crashpoint
from gpurun.core.model import canonical
from gpurun.machine.answers import (
    Armed,
    Asked,
    Disarmed,
    Facts,
    Lease,
    Left,
    Manifest,
    Piece,
    Polled,
    Shipped,
    Sized,
    Started,
    Status,
    refusal_in,
    understood,
    understood_manifest,
)
from gpurun.machine.base import FarRefusal, Machine, Reply
from gpurun.machine.fetch import Wanted, fetch
from gpurun.machine.pack import Codec, Pack

AGENT = Path(__file__).parent / "agent"
_DIGEST_OF_AGENT = "import hashlib; print(hashlib.sha256(open('agent.pyz', 'rb').read()).hexdigest())"
_QUICK_S = 30.0
_START_S = 180.0
_PART_S = 300.0


def agent_zip() -> bytes:
    """The agent as the one file that is shipped: a zip that Python runs as it is, the same bytes for the same sources.

    It is not compressed, as it would cost every call more to inflate it than it costs once to send it.
    """
    package = ["gpurun", "machine", "agent"]
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


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file that grows, from `offset` on; `size` is how long the whole file was then."""

    offset: int
    data: bytes
    size: int


@dataclass(frozen=True)
class Poll:
    """The status, and a chunk for every file that was asked for."""

    status: Status
    chunks: Mapping[str, Chunk]


class FarSide:
    """The agent on a machine. Every method may be repeated; each raises MachineLost or FarRefusal."""

    def __init__(self, machine: Machine, python: str = "python3") -> None:
        self._machine = machine
        self._python = python

    def install_agent(self) -> None:
        """Put the agent there and read it back."""
        content = agent_zip()
        self._put("agent.pyz", content)
        reply = self._run(["-I", "-c", _DIGEST_OF_AGENT], timeout_s=_QUICK_S)
        if reply.stdout.strip() != hashlib.sha256(content).hexdigest().encode():
            raise FarRefusal("agent_damaged", f"agent.pyz did not arrive whole: {_words(reply.stderr)}")

    def hello(self, python: str | None = None) -> Facts:
        """What the machine is and has; importing torch there may take a minute on a cold disk.

        A Python named by its path, here or for this far side, is the only one that is asked for torch; else the agent
        looks for one that has it.
        """
        chosen = python or (self._python if "/" in self._python else None)
        options = ["--python", chosen] if chosen else []
        line, _ = self._ask("hello", *options, site=True, timeout_s=_START_S * 4)
        return understood(Facts, line)

    def unpack(
        self,
        pack: Pack,
        codec: Codec = "zstd",
        *,
        on_progress: Callable[[int], None] | None = None,
        timeout_s: float = 3600.0,
    ) -> Shipped:
        """Ship a pack; it is in place and verified there, or nothing of it is. Where there is no zstd, gzip is used.

        `on_progress` is told the content bytes sent so far; what it raises ends the call.
        """

        def told() -> Iterator[bytes]:
            for chunk in pack.stream(codec):
                yield chunk
                if on_progress is not None:
                    on_progress(pack.content_bytes)

        options = ("--codec", codec, "--limit", str(pack.survey.total_bytes))
        try:
            line, _ = self._ask("unpack", *options, stdin=told(), site=True, timeout_s=timeout_s)
        except FarRefusal as refusal:
            if refusal.reason != "no_codec" or codec == "gzip":
                raise
            return self.unpack(pack, "gzip", on_progress=on_progress, timeout_s=timeout_s)
        shipped = understood(Shipped, line)
        if shipped.manifest_sha256 != pack.manifest_sha256:
            raise FarRefusal("nonsense", "The instance says that it has unpacked another pack than the one sent.")
        return shipped

    def start(self, job: Mapping[str, Any]) -> Started:
        """Start the job (docs/FORMATS.md has its keys) unless it was started.

        Then an earlier lease in it shortens the lease and a later one changes nothing; another run, argv, cwd or env is
        FarRefusal `other_job`.
        """
        self._put("job.json", canonical(dict(job)))
        return understood(Started, self._ask("start", "--job", "job.json", timeout_s=_START_S)[0])

    def poll(self, wants: Mapping[str, tuple[int, int]]) -> Poll:
        """The status, and of each wanted file at most so many bytes from an offset on.

        `wants` maps `events.jsonl`, `trainer.log` or `agent.log` to (offset, most).
        """
        line, content = self._ask("poll", "--want", json.dumps({name: list(want) for name, want in wants.items()}))
        said, chunks, at = understood(Polled, line), {}, 0
        for piece in said.chunks:
            if piece.name not in wants or piece.name in chunks:
                raise FarRefusal("nonsense", "The instance answered for a file that was not asked for.")
            data = _cut(content, at, piece, *wants[piece.name])
            chunks[piece.name] = Chunk(piece.offset, data, piece.size)
            at += len(data)
        if at != len(content) or set(chunks) != set(wants):
            raise FarRefusal("nonsense", "The instance answered less or more than was asked for.")
        return Poll(said.status, chunks)

    def stop(self, *, now: bool = False, reason: str = "user") -> bool:
        """Ask for the trainer's end: save and stop, or KILL with `now`. False when there is no trainer to ask."""
        line, _ = self._ask("stop", *(["--now"] if now else []), "--reason", reason)
        return understood(Asked, line).asked

    def shorten(self, soft_stop_wall: float, hard_stop_wall: float) -> Lease:
        """Bring the lease forward; the answer is what holds now, never later than before."""
        line, _ = self._ask("shorten", "--soft", repr(float(soft_stop_wall)), "--hard", repr(float(hard_stop_wall)))
        return understood(Lease, line)

    def arm(self, script: bytes, secret: str) -> None:
        """Put a guard and its key there and start it, once: it ends the machine at its deadline, whoever is lost."""
        self._put("guard/guard.key", secret.encode())
        self._put("guard/guard.sh", script)
        understood(Armed, self._ask("arm")[0])

    def disarm(self) -> bool:
        """Take the guard and its key away; False when there was none."""
        return understood(Disarmed, self._ask("disarm")[0]).disarmed

    def set_up(self, script: bytes, *, timeout_s: float) -> Reply:
        """Run the user's own shell script in the run folder, and wait for its end."""
        self._put("setup.sh", script)
        crashpoint("before far.set_up")
        reply = self._machine.call(["sh", "setup.sh"], timeout_s=timeout_s)
        crashpoint("after far.set_up")
        return reply

    def farewell(self) -> int:
        """End the trainer at once and remove the run's whole folder; how many of its processes were ended.

        For a machine that is kept. The agent is put there again first, so that asking twice finds nothing to do.
        """
        self.install_agent()
        return understood(Left, self._ask("farewell", timeout_s=_START_S)[0]).killed

    def manifest(self, most_bytes: int) -> Manifest:
        """The finished files, none before there are any.

        FarRefusal when a single one of them is not acceptable, or they announce more than `most_bytes` in all.
        """
        try:
            line, content = self._ask("manifest", timeout_s=_PART_S)
        except FarRefusal as refusal:
            if refusal.reason == "no_manifest":
                return Manifest()
            raise
        sized = understood(Sized, line)
        if sized.bytes != len(content) or sized.sha256 != hashlib.sha256(content).hexdigest():
            raise FarRefusal("nonsense", "The instance's manifest did not arrive whole.")
        return understood_manifest(content, most_bytes)

    def fetch(
        self,
        name: str,
        size_bytes: int,
        sha256: str,
        into: Path,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> Path:
        """Bring a file of the manifest home, verified; see `gpurun.machine.fetch.fetch`."""

        def get(offset: int, most: int) -> bytes:
            options = ("--name", name, "--offset", str(offset), "--most", str(most))
            line, content = self._ask("get", *options, timeout_s=_PART_S)
            return _cut(content, 0, understood(Piece, line), offset, most)

        return fetch(Wanted(name, size_bytes, sha256, on_progress), into, get)

    def _put(self, name: str, content: bytes) -> None:
        """Put a file at the root of the run folder."""
        crashpoint("before far.put")
        self._machine.put(name, content)
        crashpoint("after far.put")

    def _ask(
        self,
        verb: str,
        *options: str,
        stdin: Iterable[bytes] | None = None,
        site: bool = False,
        timeout_s: float = _QUICK_S,
    ) -> tuple[bytes, bytes]:
        """One call of the agent: its line and what follows. Without `site` Python starts in half the time."""
        flags = ["-I"] if site else ["-I", "-S"]
        crashpoint(f"before far.{verb}")
        reply = self._run([*flags, "agent.pyz", verb, "--root", ".", *options], stdin=stdin, timeout_s=timeout_s)
        crashpoint(f"after far.{verb}")
        line, _, content = reply.stdout.partition(b"\n")
        if reply.exit_code != 0:
            raise refusal_in(line) or FarRefusal(
                "broken", f"The agent ended with {reply.exit_code} on {verb}: {_words(reply.stderr)}"
            )
        return line, content

    def _run(self, words: list[str], *, stdin: Iterable[bytes] | None = None, timeout_s: float) -> Reply:
        """Run the Python of the machine; FarRefusal `no_python` where it has none."""
        reply = self._machine.call([self._python, *words], stdin=stdin, timeout_s=timeout_s)
        if reply.exit_code in (126, 127):
            raise FarRefusal("no_python", f"The machine has no {self._python}.")
        return reply


def _cut(content: bytes, at: int, piece: Piece, offset: int, most: int) -> bytes:
    """The bytes that a piece announces, if it is the piece that was asked for."""
    data = content[at : at + piece.bytes]
    if piece.offset != offset or piece.bytes > most or len(data) != piece.bytes:
        raise FarRefusal("nonsense", f"The instance answered another part of {piece.name!r} than was asked for.")
    return data


def _words(stderr: bytes) -> str:
    """The end of what a program said on its way out."""
    return stderr[-500:].decode("utf-8", "replace").strip() or "it said nothing"

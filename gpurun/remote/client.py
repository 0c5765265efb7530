"""Calls the agent on a machine: one typed method for each of the agent's verbs. Every reply is checked."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpurun.core.crashpoint import crashpoint
from gpurun.core.records import canonical
from gpurun.remote.archive import Codec, Pack
from gpurun.remote.download import WantedFile, Whole, fetch, fetch_part
from gpurun.remote.interface import Answers, FarRefusal, Machine, Reply, Sink, Take
from gpurun.remote.machine_facts import LinkSpeed, Looking, MachineFacts, Missing
from gpurun.remote.messages import (
    MOST_LINE_BYTES,
    MOST_MANIFEST_BYTES,
    Doors,
    EndAnswer,
    FarewellAnswer,
    LeaseAnswer,
    Manifest,
    ManifestFile,
    Piece,
    Polled,
    SetUp,
    Shipped,
    Started,
    Status,
    StopAnswer,
    Unsaved,
    parse_message,
    refusal_in,
    understood_manifest,
)
from gpurun.remote.small_files import TakeFile, fetch_small_files
from gpurun.remote.upload import send_pack

AGENT = Path(__file__).parent / "agent"
_DIGEST_OF_AGENT = "import hashlib; print(hashlib.sha256(open('agent.pyz', 'rb').read()).hexdigest())"
EACH_NODE = ("pilot.sh", "nodes")
"""The arguments of `sh` that run a command on each node of a job, in the job's folder (providers/slurm/pilot.sh)."""
ANY_ON_EACH_NODE = (EACH_NODE[0], "each")
"""The same for a user's command, which gets a signal when it must stop."""
IN_IMAGE, PYTHON_IN_IMAGE = "in-image", "in-image-python"
"""Scripts that pilot.sh writes. They run their arguments, or a Python with them, in the job's image."""
NODES_SILENT = "nodes_silent"
TORCHRUN = "torch.distributed.run"
LOOK_S = 180
"""How many seconds `hello` may wait for the machine's Pythons (torch_look.LIMIT_S)."""
_QUICK_S = 30.0
_START_S = 180.0
_PART_S = 300.0
_LANE_BYTES = 8 << 20  # If a lane's share of a file is smaller, another login takes longer than it saves.
_SHARED_LANES = 3
MOST_LANES = 8
# A server's kernel may delay a reply by this much before a program runs, so a short round trip may look this long.
DELAYED_ANSWER_S = 0.04
SHORT_S = 0.01


@dataclass(frozen=True)
class Chunk:
    """Bytes of a growing file, from `offset` on; the whole file had `size` bytes at that time."""

    offset: int
    data: bytes
    size: int


@dataclass(frozen=True)
class Poll:
    """The job's status, and a chunk of every requested file."""

    status: Status
    chunks: Mapping[str, Chunk]


class FarSide:
    """A client of the agent on one machine. Any call may be repeated, and may raise MachineLost or FarRefusal."""

    _lanes: tuple[FarSide, ...] = ()

    def __init__(
        self, machine: Machine, python: str = "python3", private: Machine | None = None, job_python: str = ""
    ) -> None:
        """Talk to the agent over `machine`. If `machine` stores standard input on disk, use `private` for secrets.

        `python` runs the agent. `job_python` is the path of the job's Python, if that is known to be another one.
        """
        self._machine = machine
        self._private = private
        self._python = python
        self._job_python = job_python or (python if "/" in python else "")

    def answers(self, limit_s: float) -> bool:
        """Return whether the machine replies within `limit_s` seconds; False if that cannot be checked."""
        return isinstance(self._machine, Answers) and self._machine.answers(limit_s)

    def install_agent(self) -> None:
        """Upload the agent, and check its digest on the machine."""
        self._put_file("agent.pyz", agent_zip())
        if words := self._find_agent_fault():
            raise FarRefusal("agent_damaged", f"agent.pyz arrived damaged: {words}")

    def hello(self, python: str | None = None, on_wait: Callable[[int, str], None] = lambda *_: None) -> MachineFacts:
        """Return the machine's facts. This may take minutes, because the machine imports torch from a cold disk.

        If `python`, or else this object's Python, is a path, only that Python is searched for torch. `on_wait` is
        called with the seconds waited so far, and with what the machine is waiting for.
        """
        chosen = python or self._job_python
        options = ["--python", chosen] if chosen else []
        line, _ = self.ask("hello", *options, sink=_Looking(on_wait), site=True, timeout_s=LOOK_S + _PART_S)
        return parse_message(MachineFacts, line)

    def missing_imports(self, names: Sequence[str], python_path: str = "") -> Missing:
        """Return which top-level modules the job's Python cannot find. None is imported. Call `hello` first."""
        path = ["--path", python_path] if python_path else []
        path += ["--python", self._job_python] if self._job_python else []
        line, _ = self.ask("imports", "--names", ",".join(names), *path, timeout_s=_PART_S)
        return parse_message(Missing, line)

    def measure(self, program: bytes, processes_per_node: int, seconds: float, python: str) -> LinkSpeed:
        """Return the hardware of a job's nodes and the speed between them, as measured by trainer/network.py.

        Raise FarRefusal NODES_SILENT if not all nodes reply.
        """
        self._put_file("network.py", program)
        words = [*EACH_NODE, python, "-m", TORCHRUN, f"--nproc-per-node={processes_per_node}", "network.py"]
        reply = self._machine.call(["sh", *words, "--seconds", repr(seconds)], timeout_s=_START_S + seconds)
        if reply.exit_code != 0:
            raise FarRefusal(NODES_SILENT, f"Not all nodes answered: {_quote_last_words(reply.stderr)}")
        return parse_message(LinkSpeed, reply.stdout.strip().rpartition(b"\n")[2])

    def unpack(
        self,
        pack: Pack,
        codec: Codec = "zstd",
        *,
        on_progress: Callable[[int], None] | None = None,
        timeout_s: float = 3600.0,
    ) -> Shipped:
        """Upload a pack. Afterwards all its files are in place and verified, or none is (`remote.upload`)."""
        return send_pack(self, pack, codec, on_progress=on_progress, timeout_s=timeout_s)

    def start(self, job: Mapping[str, Any]) -> Started:
        """Start the job (docs/FORMATS.md has its keys) unless it was started before.

        If it was, the call can only shorten its lease. Raise FarRefusal `other_job` if a job with another run, argv,
        cwd or env was started.
        """
        self._put_file("job.json", canonical(dict(job)))
        return parse_message(Started, self.ask("start", "--job", "job.json", timeout_s=_START_S)[0])

    def hand_secrets(self, secrets: Mapping[str, str]) -> None:
        """Send the values of --secret for the job that is started next."""
        far = self if self._private is None else FarSide(self._private, self._python)
        far.ask("secrets", stdin=[json.dumps(dict(secrets)).encode()])

    def _find_agent_fault(self) -> str:
        """Check the uploaded agent's digest. Return "" if it is right, else the output of the check."""
        reply = self._run_python(["-I", "-c", _DIGEST_OF_AGENT], timeout_s=_QUICK_S)
        is_same = reply.stdout.strip() == hashlib.sha256(agent_zip()).hexdigest().encode()
        return "" if is_same else _quote_last_words(reply.stderr)

    def let_push(self, order: bytes) -> None:
        """Give the agent an order with secret URLs for pushing checkpoints. It replaces an earlier order."""
        self._put_file("agent/push.json", order)

    def poll(self, wants: Mapping[str, tuple[int, int]]) -> Poll:
        """Return the job's status, and a chunk of each requested file.

        `wants` maps `events.jsonl`, `trainer.log` or `agent.log` to (offset of the chunk, its maximum length in bytes).
        """
        line, content = self.ask("poll", "--want", json.dumps({name: list(want) for name, want in wants.items()}))
        answer = parse_message(Polled, line)
        chunks = {}
        at = 0
        for piece in answer.chunks:
            if piece.name not in wants or piece.name in chunks:
                raise FarRefusal("nonsense", "The instance sent a file that was not requested.")
            data = _extract_piece(content, at, piece, *wants[piece.name])
            chunks[piece.name] = Chunk(piece.offset, data, piece.size)
            at += len(data)
        if at != len(content) or set(chunks) != set(wants):
            raise FarRefusal("nonsense", "The instance sent less or more than was requested.")
        return Poll(answer.status, chunks)

    def doors(self) -> Doors:
        """Return how users reach a dev box: its host name, its folder, and JupyterLab's address."""
        return parse_message(Doors, self.ask("doors")[0])

    def unsaved(self) -> Unsaved:
        """Return what the end of a dev box would destroy, and how many terminals are open on the box."""
        return parse_message(Unsaved, self.ask("unsaved", timeout_s=2 * _QUICK_S)[0])

    def stop(self, *, now: bool = False, reason: str = "user") -> bool:
        """Request the trainer's end: save and stop, or KILL with `now`. Return False if there is no trainer."""
        line, _ = self.ask("stop", *(["--now"] if now else []), "--reason", reason)
        return parse_message(StopAnswer, line).asked

    def shorten(self, soft_stop_wall: float, hard_stop_wall: float) -> LeaseAnswer:
        """Shorten the lease. Return the lease that is now valid, which is never longer than before."""
        line, _ = self.ask("shorten", "--soft", repr(float(soft_stop_wall)), "--hard", repr(float(hard_stop_wall)))
        return parse_message(LeaseAnswer, line)

    def end(self, folder: str, at_wall: float = 0.0) -> EndAnswer:
        """Make the dead-man timer in `folder` end the machine at `at_wall` by the machine's clock (0: now).

        The deadline can only become earlier. Raise MachineLost if the machine ends before it has replied.
        """
        return parse_message(EndAnswer, self.ask("end", "--folder", folder, "--at", repr(float(at_wall)))[0])

    def set_up(self, script: bytes, *, limit_s: float, offset: int, most: int) -> tuple[SetUp, bytes]:
        """Return the state of the user's set-up script, and at most `most` bytes of its log from `offset`.

        The first call starts the script. No call waits for its end. The machine ends the script after `limit_s`
        seconds.
        """
        options = ("--from", str(offset), "--most", str(most))
        line, content = self.ask("setup", *options)
        answer = parse_message(SetUp, line)
        if answer.state == "none":
            self._put_file("setup.sh", script)
            line, content = self.ask("setup", "--limit", repr(float(limit_s)), *options)
            answer = parse_message(SetUp, line)
        if answer.bytes != len(content) or answer.bytes > most:
            raise FarRefusal("nonsense", "The instance sent another part of its log than requested.")
        return answer, content

    def farewell(self, *, keep_results: bool = False, keep_work: bool = False) -> int:
        """End the trainer at once, remove the run's whole folder, and return how many processes were ended.

        With `keep_results` the trainer's outputs stay, and with `keep_work` a command's own folder. The call may be
        repeated, also on a full disk, because the agent is uploaded only if it is missing or damaged.
        """
        if self._find_agent_fault():
            self.install_agent()
        names = [name for name, is_kept in (("out", keep_results), ("bundle", keep_work)) if is_kept]
        kept = ("--keep", ",".join(names)) if names else ()
        return parse_message(FarewellAnswer, self.ask("farewell", *kept, timeout_s=_START_S)[0]).killed

    def manifest(self, most_bytes: int) -> Manifest:
        """Return the list of finished files, which is empty before any file is finished.

        Raise FarRefusal if a name in the list is not allowed, or if the files have more than `most_bytes` in total.
        """
        arriving = Whole(MOST_MANIFEST_BYTES)
        try:
            self.ask("manifest", sink=arriving, timeout_s=_PART_S)
        except FarRefusal as refusal:
            if refusal.reason == "no_manifest":
                return Manifest()
            raise
        return understood_manifest(arriving.content(), most_bytes)

    def gather(self, files: Sequence[ManifestFile], take: TakeFile) -> list[ManifestFile]:
        """Download many small files and pass each to `take`. Return those that are gone (`remote.small_files`)."""
        return fetch_small_files(self, files, take)

    def fetch(
        self, name: str, size_bytes: int, sha256: str, into: Path, *,
        on_progress: Callable[[int], None] | None = None, aside: bool = False,
    ) -> Path:  # fmt: skip
        """Download a finished file into a folder, verify it, and return its path (`remote.download.fetch`)."""
        pulls = [partial(fetch_part, lane, name) for lane in self.lanes(1 + size_bytes // _LANE_BYTES)]
        return fetch(WantedFile(name, size_bytes, sha256, on_progress, aside), into, *pulls)

    def lanes(self, most: int, *, least: int = 1) -> list[FarSide]:
        """Return lanes for parallel use: more if the round trip is longer. They stay open until `close_lanes`.

        The first lanes share this object's connection, because another login takes a while. The others have their own
        connections, because packet loss slows each connection separately.
        """
        count = min(most, max(least, lanes_for(self.round_trip_s)))
        shared = min(count, _SHARED_LANES)
        more = count - shared - len(self._lanes)
        self._lanes = (*self._lanes, *(self.lane() for _ in range(more)))
        return [self] * shared + list(self._lanes[: count - shared])

    def lane(self) -> FarSide:
        """Return a client of the same agent over a separate connection, for one more thread."""
        return FarSide(self._machine.lane(), self._python, job_python=self._job_python)

    @contextmanager
    def many_lanes(self) -> Iterator[None]:
        """Keep lanes open in this context, and close all of them at its end."""
        try:
            yield
        finally:
            self.close_lanes()

    def close_lanes(self) -> None:
        """Close the connections that `lanes` has made."""
        for lane in self._lanes:
            lane.close()
        self._lanes = ()

    def close(self) -> None:
        """Close every connection. The next call makes a new one."""
        self.close_lanes()
        self._machine.close()
        if self._private is not None:
            self._private.close()

    @property
    def round_trip_s(self) -> float:
        """Return the round-trip time in seconds."""
        return self._machine.round_trip_s

    def _put_file(self, name: str, content: bytes) -> None:
        """Write a file to the root of the run's folder."""
        crashpoint("before far.put")
        self._machine.put(name, content)
        crashpoint("after far.put")

    def ask(
        self,
        verb: str,
        *options: str,
        stdin: Iterable[bytes] | None = None,
        sink: Sink | None = None,
        site: bool = False,
        timeout_s: float = _QUICK_S,
    ) -> tuple[bytes, bytes]:
        """Call the agent once. Return the JSON line of its reply, and the raw bytes after that line.

        With a `sink`, the raw bytes go to the sink instead. Without `site`, Python starts in half the time.
        """
        flags = ["-I"] if site else ["-I", "-S"]
        crashpoint(f"before far.{verb}")
        words = [*flags, "agent.pyz", verb, "--root", ".", *options]
        reply = self._run_python(words, stdin=stdin, sink=sink, timeout_s=timeout_s)
        crashpoint(f"after far.{verb}")
        line, _, content = reply.stdout.partition(b"\n") if sink is None else (bytes(sink.line), b"", b"")
        if reply.exit_code != 0:
            raise refusal_in(line) or FarRefusal(
                "broken", f"The agent ended with {reply.exit_code} on {verb}: {_quote_last_words(reply.stderr)}"
            )
        return line, content

    def _run_python(
        self,
        words: list[str],
        *,
        stdin: Iterable[bytes] | None = None,
        sink: Take | None = None,
        timeout_s: float = _QUICK_S,
    ) -> Reply:
        """Run the machine's Python. Raise FarRefusal `no_python` if it has none."""
        reply = self._machine.call([self._python, *words], stdin=stdin, sink=sink, timeout_s=timeout_s)
        if reply.exit_code in (126, 127):
            raise FarRefusal("no_python", f"The machine has no {self._python} (3.8 or newer is needed).")
        return reply


class _Looking:
    """Receives the reply to `hello`: reports what the machine waits for, line by line, and keeps the last line."""

    def __init__(self, on_wait: Callable[[int, str], None]) -> None:
        self.line = bytearray()
        self._rest = bytearray()
        self._on_wait = on_wait

    def __call__(self, block: bytes) -> None:
        self._rest += block
        while b"\n" in self._rest:
            self.line, _, self._rest = self._rest.partition(b"\n")
            if self.line.startswith(b'{"looking"'):
                waiting = parse_message(Looking, bytes(self.line)).looking
                self._on_wait(waiting.seconds, waiting.waits_for)
        if len(self._rest) > MOST_LINE_BYTES:
            raise FarRefusal("nonsense", f"The instance sent {len(self._rest)} bytes without a line end.")


def lanes_for(round_trip_s: float) -> int:
    """Return the number of lanes for a round-trip time.

    A lane carries one window of bytes per round trip, so a long round trip needs more lanes. With a short one
    a second lane would only delay the digest, because one thread per connection receives a download.
    """
    if round_trip_s < SHORT_S + DELAYED_ANSWER_S:
        return 1
    return min(MOST_LANES, 2 + int(max(0.0, round_trip_s - DELAYED_ANSWER_S) / 0.012))


def _extract_piece(content: bytes, at: int, piece: Piece, offset: int, most: int) -> bytes:
    """Return the bytes of a piece that begins at `at`. Raise FarRefusal `nonsense` if another piece was requested."""
    data = content[at : at + piece.bytes]
    if piece.offset != offset or piece.bytes > most or len(data) != piece.bytes:
        raise FarRefusal("nonsense", f"The instance sent another part of {piece.name!r} than requested.")
    return data


def _quote_last_words(stderr: bytes) -> str:
    """Return the end of a program's error output."""
    return stderr[-500:].decode("utf-8", "replace").strip() or "it said nothing"


def agent_zip() -> bytes:
    """Return the agent as one file: a zip that Python runs directly, with the same bytes for the same sources.

    It is not compressed: decompressing it at every call would take longer than sending it once.
    """
    package = ["gpurun", "remote", "agent"]
    content = {"/".join([*package[:depth], "__init__.py"]): b"" for depth in (1, 2)}
    for path in AGENT.glob("*.py"):
        content["/".join([*package, path.name]) if path.name != "__main__.py" else path.name] = path.read_bytes()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as zipped:
        for name in sorted(content):
            entry = zipfile.ZipInfo(name)  # Always dated 1980.
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # Always made as on Unix.
            zipped.writestr(entry, content[name])
    return out.getvalue()

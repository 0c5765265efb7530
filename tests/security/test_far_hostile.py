"""Tests that a machine that lies during a whole run changes no file outside the run's folder and controls no terminal.

The driver, far side, fetch and command line are real; only the machine's answers are made up. The tests compare the
whole tree of files, and do not rely on what gpurun says about it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import pty
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.errors import ExitCode
from gpurun.core.paths import Home
from gpurun.remote.client import FarSide, Poll
from gpurun.remote.interface import FarRefusal, Reply, Take
from gpurun.remote.machine_facts import MachineFacts
from gpurun.remote.messages import Manifest, parse_message, understood_manifest
from tests.lifecycle.faults import ended
from tests.lifecycle.scripted_cloud import ScriptedFar, World
from tests.memory import forget_own_peak, own_peak_bytes
from tests.refusals import refusal
from tests.security.far_hostile import CONTENT, GOOD, Answers, entry, manifest, sized
from tests.security.view_hostile import HOSTILE

SHA = "0" * 64
# Bytes that a real terminal would act on; gpurun itself sends none of them into a pipe.
_OBEYED = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]")


class Lying(ScriptedFar):
    """The scripted agent, except that for some verbs the real far side reads a lying machine's answers."""

    def lie(self, **answers: Callable[[list[str]], bytes]) -> None:
        self.lies = FarSide(Answers(**answers))
        self.false_verbs = set(answers)

    def manifest(self, most_bytes: int) -> Manifest:
        self._call("manifest")
        return self.lies.manifest(most_bytes) if "manifest" in self.false_verbs else super().manifest(most_bytes)

    def poll(self, wants: Mapping[str, tuple[int, int]]) -> Poll:
        if "poll" not in self.false_verbs:
            return super().poll(wants)
        self._call("poll")
        return self.lies.poll(wants)

    def fetch(self, name: str, size_bytes: int, sha256: str, into: Path, **more: Any) -> Path:
        if "get" not in self.false_verbs:
            return super().fetch(name, size_bytes, sha256, into, **more)
        return self.lies.fetch(name, size_bytes, sha256, into, **more)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(Home(tmp_path / "home"))
    made.far = Lying(made.cloud)
    made.far.lie()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("GPURUN_HOME", str(made.home.root))
    return made


def tree(root: Path) -> dict[str, str]:
    """Return every file, link and folder below `root`, with its kind and its digest or target."""
    found = {}
    for path in sorted(root.rglob("*")):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        what = (
            os.readlink(path)
            if kind == "link"
            else hashlib.sha256(path.read_bytes()).hexdigest()
            if kind == "file"
            else ""
        )
        found[str(path.relative_to(root))] = f"{kind} {what}"
    return found


def outside(world: World) -> dict[str, str]:
    """Return the tree without what every run may change: its folder, the ledger, the keys and the home's id."""
    kept = tree(world.home.root.parent)
    own = ("home/runs/fox-41", "home/ledger.jsonl", "home/keys", "home/id")
    return {name: what for name, what in kept.items() if not name.startswith(own)}


# Names and manifests --------------------------------------------------------------------------------------------------

NAMES = (
    *(
        "../x",
        "../../x",
        "/etc/x",
        "/",
        "..",
        ".",
        "",
        "checkpoints/../../x",
        "checkpoints//x",
        "a/b/c/d/e/f/g/h/i/j",
        "~/x",
    ),
    *("a\nb", "a\tb", "a\0b", "a\rb", "a\x1b[2Jb", "a\\b", "C:\\x", "\\\\host\\x", "a\x7f", "a\x9bb"),
    *("CON", "con.bin", "checkpoints/NUL", "COM1.txt", "LPT9", "aux", "a.", "a..", "checkpoints/a.", "a ", " a"),
    *("caf\u00e9", "cafe\u0301", "\u202egnp.exe", "a\u2066b", "\uff0e\uff0e\uff0fx", "a\u200bb", "\u2024\u2024/x"),
    *("x" * 81, "x" * 255, "x" * 256, "x" * 5000, "\u00e9" * 127, ".partial/x", ".partial", ".gpurun", "-rf /"),
)


def bombs() -> dict[str, bytes]:
    return {
        "three million entries": b'{"v": 1, "files": [' + b"{}," * 2_999_999 + b"{}]}",
        "more entries than there may be": manifest(*[entry()] * 10_001),
        "2^60 bytes": manifest(entry(bytes=2**60)),
        "2^62 bytes in two": manifest(entry(bytes=2**61), entry("b", bytes=2**61)),
        "2^64 bytes": manifest(entry(bytes=2**64)),
        "fewer than none": manifest(entry(bytes=-1)),
        "a file of no step": manifest(entry(), entry("samples/000010.txt", kind="sample", step=None)),
        "the same name twice": manifest(entry(), entry()),
        "a hundred checkpoints": manifest(*[entry(f"w{step}", step=step) for step in range(100)]),
        "the same name in capitals": manifest(entry(), entry(GOOD.upper())),
        "a file that is a folder": manifest(entry("a"), entry("a/b")),
        "nested without end": b'{"v": 1, "files": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "objects in objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "NaN for a size": b'{"v": 1, "files": [{"name": "a", "bytes": NaN}]}',
        "Infinity for a loss": b'{"v": 1, "best": {"step": 1, "val_loss": Infinity}, "files": []}',
        "a number of 10^6 digits": b'{"v": 1, "latest": ' + b"9" * 1_000_000 + b"}",
        "a key of a megabyte": b'{"' + b"k" * 1_000_000 + b'": 1}',
        "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        "escapes in place of JSON": b"\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J",
    }


def test_a_message_longer_than_makes_sense_is_not_parsed() -> None:
    """JSON may end in any number of blanks, so a valid message can have any size."""
    message = b'{"v": 1}'
    assert parse_message(Manifest, message + b" " * 92, most_bytes=100).files == ()
    with pytest.raises(FarRefusal, match="101"):
        parse_message(Manifest, message + b" " * 93, most_bytes=100)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_only_plain_names_are_taken_and_one_other_spoils_it_all(name: str) -> None:
    with pytest.raises(FarRefusal) as refused:
        understood_manifest(manifest(entry("a.bin"), entry(name)), 1 << 40)
    assert refused.value.what.isprintable()
    assert len(refused.value.what) < 1000


@pytest.mark.parametrize("bomb", list(bombs()))
def test_a_manifest_that_is_a_bomb_goes_off_nowhere(bomb: str) -> None:
    content, begun = bombs()[bomb], time.process_time()
    with pytest.raises(FarRefusal) as refused:
        understood_manifest(content, 1 << 40)
    assert time.process_time() - begun < 2.0
    assert refused.value.what.isprintable()
    assert len(refused.value.what) < 1000


HOSTILE_RUNS = {
    **{f"the name {name!a}": manifest(entry("a.bin"), entry(name)) for name in ("../x", "/etc/x", "a\nb", "CON")},
    **{name: content for name, content in bombs().items() if name in ("2^60 bytes", "nested without end", "a pickle")},
}


@pytest.mark.parametrize("name", HOSTILE_RUNS)
def test_a_hostile_manifest_collects_nothing_and_still_destroys(world: World, name: str) -> None:
    before = outside(world)
    world.far.lie(manifest=lambda argv: sized(HOSTILE_RUNS[name]))
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert outside(world) == before
    assert [path for path in world.folder.artifacts.rglob("*") if not path.is_dir()] == []
    assert ended(world)


# Files ----------------------------------------------------------------------------------------------------------------


def tarball() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        evil = tarfile.TarInfo("../../../../outside")
        evil.size = 4
        tar.addfile(evil, io.BytesIO(b"evil"))
    return out.getvalue()


def piece(argv: list[str], content: bytes, **changes: Any) -> bytes:
    options = dict(zip(argv[5::2], argv[6::2], strict=False))
    at, most = int(options["--offset"]), int(options["--most"])
    data = content[at : at + most]
    fields = {"name": options["--name"], "offset": at, "bytes": len(data), "size": len(content)}
    return json.dumps({**fields, **changes}).encode() + b"\n" + data


GETS: dict[str, Callable[[list[str]], bytes]] = {
    "a tar in place of the file": lambda argv: piece(argv, tarball()),
    "a tar of the announced length": lambda argv: piece(argv, (tarball() * 9)[: len(CONTENT)]),
    "more bytes than were asked for": lambda argv: piece(argv, CONTENT, bytes=len(CONTENT)) + b"more" * 9999,
    "more than was asked for, and says so": lambda argv: piece(argv, CONTENT + b"x" * (9 << 20), bytes=9 << 20),
    "2^60 bytes announced": lambda argv: piece(argv, CONTENT, bytes=2**60),
    "another part": lambda argv: piece(argv, CONTENT, offset=7),
    "nothing, for ever": lambda argv: piece(argv, b""),
    "a byte at a time of something else": lambda argv: piece(argv, b"x"),
    "no JSON": lambda argv: b"\x1b[2J\n" + CONTENT,
}


@pytest.mark.parametrize("lie", GETS)
def test_what_is_served_in_place_of_a_file_never_takes_its_name(world: World, lie: str) -> None:
    before = outside(world)
    world.far.lie(manifest=lambda argv: sized(manifest(entry())), get=GETS[lie])
    outcome = world.drive()
    took = world.folder.artifacts / GOOD
    assert outside(world) == before
    if lie == "more bytes than were asked for":  # Bytes after the announced ones are ignored.
        assert outcome in (ExitCode.DONE, ExitCode.COLLECT_FAILED)
    else:
        assert outcome is ExitCode.COLLECT_FAILED
        assert not took.exists()
    if took.exists():
        assert took.read_bytes() == CONTENT
    assert ended(world)


def test_a_link_in_a_files_place_is_replaced_not_written_through(world: World, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (world.folder.artifacts / "checkpoints").mkdir(parents=True)
    (world.folder.artifacts / GOOD).symlink_to(victim)
    (world.folder.artifacts / ".partial").mkdir()
    (world.folder.artifacts / ".partial" / entry()["sha256"]).symlink_to(victim)
    world.far.lie(manifest=lambda argv: sized(manifest(entry())), get=lambda argv: piece(argv, CONTENT))
    world.drive()
    assert victim.read_bytes() == b"mine"
    assert ended(world)


def test_a_link_to_the_right_bytes_is_not_a_file_at_home(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(CONTENT)
    target = tmp_path / "artifacts" / GOOD
    target.parent.mkdir(parents=True)
    target.symlink_to(tmp_path / "elsewhere")
    file = entry()
    far = FarSide(Answers(get=lambda argv: piece(argv, CONTENT)))
    far.fetch(GOOD, file["bytes"], file["sha256"], tmp_path / "artifacts")
    assert not target.is_symlink()
    assert target.read_bytes() == CONTENT


def test_a_file_of_equal_length_with_other_bytes_comes_again(tmp_path: Path) -> None:
    target = tmp_path / GOOD
    target.parent.mkdir(parents=True)
    target.write_bytes(b"?" * len(CONTENT))
    file = entry()
    FarSide(Answers(get=lambda argv: piece(argv, CONTENT))).fetch(GOOD, file["bytes"], file["sha256"], tmp_path)
    assert target.read_bytes() == CONTENT


# Uploads, as the machine confirms them --------------------------------------------------------------------------------


class Storing(Answers):
    """A machine that keeps an upload plus `damage`, and answers with the digest of what it keeps."""

    def __init__(self, damage: bytes = b"", **answers: Callable[[list[str]], bytes]) -> None:
        super().__init__(**answers)
        self.damage, self.kept = damage, b""

    def put(self, path: str, content: bytes) -> None:
        self.kept = content + self.damage

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        if "agent.pyz" in argv:
            list(stdin or ())
            return super().call(argv, timeout_s=timeout_s)
        return Reply(0, hashlib.sha256(self.kept).hexdigest().encode() + b"\n", b"")


def test_an_agent_that_did_not_arrive_whole_is_not_run() -> None:
    FarSide(Storing()).install_agent()
    with pytest.raises(FarRefusal) as refused:
        FarSide(Storing(damage=b"!")).install_agent()
    assert refused.value.reason == "agent_damaged"


def test_a_manifest_of_an_unannounced_length_is_not_whole() -> None:
    content = manifest(entry())
    head = {"bytes": len(content) + 1, "sha256": hashlib.sha256(content).hexdigest()}
    with refusal(FarRefusal, "far.nonsense"):
        FarSide(Answers(manifest=lambda argv: json.dumps(head).encode() + b"\n" + content)).manifest(1 << 40)


# Words ----------------------------------------------------------------------------------------------------------------


def polled(log: bytes, events: bytes) -> Callable[[list[str]], bytes]:
    """Return the answer to a poll that reports an ended trainer and serves these two files in full."""
    status = dict.fromkeys(("pid", "started_wall", "signal", "stop_reason", "soft_stop_wall", "hard_stop_wall"))
    status |= {"v": 1, "state": "exited", "wall": 1.8e9, "exit_code": 0, "stop_reason": "\x1b]52;c;eA==\x07"}

    def answer(argv: list[str]) -> bytes:
        chunks, rest = [], b""
        for name, (at, most) in json.loads(argv[argv.index("--want") + 1]).items():
            whole = {"trainer.log": log, "events.jsonl": events}[name]
            data = whole[at : at + most]
            chunks.append({"name": name, "offset": at, "bytes": len(data), "size": len(whole)})
            rest += data
        return json.dumps({"status": status, "chunks": chunks}).encode() + b"\n" + rest

    return answer


LOG = b"".join(raw + b"\n" for raw in HOSTILE.values()) + b"device: cuda\r\x1b[2Kdevice: cpu\n" + b"A" * 10_000_000
EVENTS = b"".join(
    json.dumps(event).encode() + b"\n"
    for event in (
        {"kind": "start", "device": "cuda\x1b[31m", "cuda_name": "\x1b]0;x\x07", "wall": 1.0, "step": 0},
        {"kind": "warning", "code": "\x1b[2J", "message": "[bold red]x[/] \x9b31m \u202e", "wall": 1.0, "step": 1},
        {"kind": "sample", "prompt": "\x1b[H", "text": "```\n\x1b]8;;http://evil\x07click\x1b]8;;\x07", "step": 1},
        {"kind": "stop", "reason": "done", "message": "\x1b[?1049h", "wall": 2.0, "step": 1},
    )
) + b"\xff\xfe not JSON \x1b[1m\n"  # fmt: skip

READERS = (
    ("logs", "fox-41"), ("logs", "fox-41", "--json"), ("attach", "fox-41"), ("attach", "fox-41", "--json"),
    ("ps", "--all"), ("ps", "--all", "--json"), ("receipt", "fox-41"), ("receipt", "fox-41", "--md"),
    ("receipt", "fox-41", "--json"), ("audit",), ("audit", "--json"), ("resume", "fox-41"),
)  # fmt: skip


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run one command in this process, as the shell would start it; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["gpurun", *words])
    return run_app(build_app())


def test_machine_words_are_kept_whole_and_steer_no_terminal(
    world: World, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = world.far.hello

    def odd(python: str | None = None, **_: Any) -> MachineFacts:
        facts = hello(python)
        evil = "Linux \x1b]52;c;eA==\x07\x9b31m\u202e"
        return facts.model_copy(update={"platform": evil, "python": evil, "boot_id": evil})

    world.far.hello = odd  # type: ignore[method-assign]
    world.far.lie(poll=polled(LOG, EVENTS))
    before = outside(world)
    world.drive()
    assert outside(world) == before
    assert world.folder.log.read_bytes() == LOG, "raw bytes are kept"
    assert ended(world)
    supervised = capfdbinary.readouterr()
    assert _OBEYED.findall(supervised.out + supervised.err) == []
    for words in READERS:
        typed(monkeypatch, *words)
        printed = capfdbinary.readouterr()
        assert printed.out + printed.err, words
        assert _OBEYED.findall(printed.out + printed.err) == [], words
        # With --json the log is complete, as with `--raw`; without it, only the readable part is printed.
        most_bytes = 12_000_000 if words[0] == "logs" and "--json" in words else 3_000_000
        assert len(printed.out + printed.err) < most_bytes, words


@pytest.mark.parametrize("verb", ["install_agent", "hello", "unpack", "start", "poll", "manifest"])
def test_a_refusal_in_the_machines_words_loses_its_escapes(
    world: World, verb: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "no \x1b]52;c;eA==\x07 \x9b2J \u202e [bold]x[/bold] \r\n second line " + "A" * 3000
    world.far.broken[verb] = FarRefusal("os_error", evil)
    world.drive()
    assert world.cloud.alive == []
    for words in (("attach", "fox-41"), ("receipt", "fox-41"), ("ps", "--all"), ("audit",)):
        typed(monkeypatch, *words)
        printed = capfdbinary.readouterr()
        assert _OBEYED.findall(printed.out + printed.err) == [], words


def test_a_raw_log_is_given_to_no_terminal(world: World) -> None:
    """Only a pipe gets the machine's own bytes."""
    world.far.lie(poll=polled(b"\x1b[31mred\n", EVENTS))
    world.drive()
    assert world.folder.log.read_bytes() == b"\x1b[31mred\n"
    mother, daughter = pty.openpty()
    command = [sys.executable, "-m", "gpurun.cli.app", "logs", "fox-41", "--raw"]
    root = Path(__file__).parents[2]
    refused = subprocess.run(command, stdout=daughter, stderr=subprocess.PIPE, timeout=60, cwd=root)
    os.close(daughter)
    os.close(mother)
    piped = subprocess.run(command, capture_output=True, timeout=60, cwd=root)
    assert refused.returncode == 2
    assert b"logs.raw_to_terminal" in refused.stderr or b"--raw" in refused.stderr
    assert piped.stdout == b"\x1b[31mred\n"


def test_nothing_on_this_side_unpickles_whatever_comes_home(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither gpurun nor a library unpickles while a run is driven and read (for the source: house/test_apart.py)."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    pickled = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x0etouch /tmp/evil\x94\x85\x94R\x94."
    file = entry(content=pickled)
    world.far.lie(manifest=lambda argv: sized(manifest(file)), get=lambda argv: piece(argv, pickled))
    assert world.drive() is ExitCode.DONE
    assert (world.folder.artifacts / GOOD).read_bytes() == pickled
    for words in (("receipt", "fox-41"), ("audit",), ("ps", "--all")):
        typed(monkeypatch, *words)


def test_nested_brackets_among_events_are_not_called_a_bug(tmp_path: Path) -> None:
    world = World(Home(tmp_path / "home"))
    world.far = Lying(world.cloud)
    world.far.lie(poll=polled(b"device: cuda\n", b"[" * 50_000 + b"\n" + EVENTS))
    world.drive()
    assert getattr(world.state.failure, "code", None) != "bug"


def test_a_manifest_of_many_empty_entries_fails_at_the_first() -> None:
    """In an earlier version, an error for each entry took gigabytes of memory for a manifest of megabytes."""
    forget_own_peak()
    before_bytes = own_peak_bytes()
    with pytest.raises(FarRefusal):
        understood_manifest(b'{"v": 1, "files": [' + b"{}," * 99_999 + b"{}]}", 1 << 40)
    assert own_peak_bytes() - before_bytes < 100 << 20

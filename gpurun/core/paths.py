"""Where things lie on the laptop, and how a file is written so that a crash leaves the old one or the new one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from gpurun.core.errors import ExitCode, SetupError, UsageError
from gpurun.core.filelock import exclusive

_ID = re.compile(r"[0-9a-f]{6}")
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
MOST_RECORD_BYTES = 64 << 20
"""Of a journal, a receipt, a plan: a thousand times what they have."""
_CLOSING_BYTES = 1024  # A closing line has some 300.


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; every viewer, audit and report reads these and nothing else."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def home(self) -> Path:
        """The home's own folder."""
        return self.path.parent.parent

    @property
    def request(self) -> Path:
        """What the user asked for."""
        return self.path / "request.json"

    @property
    def plan(self) -> Path:
        """What was shown and agreed to."""
        return self.path / "plan.json"

    @property
    def journal(self) -> Path:
        """What was intended and observed, in order."""
        return self.path / "journal.jsonl"

    @property
    def is_closed(self) -> bool:
        """Whether the journal's last line closes the run, and not with something that may be billed.

        A line that is torn, or that anything follows, closes nothing. Nothing before it is read: damage there is for
        the audit to find.
        """
        try:
            with open_regular(self.journal) as journal:
                journal.seek(max(0, journal.seek(0, os.SEEK_END) - _CLOSING_BYTES))
                *_, line, rest = journal.read().split(b"\n")
            record = json.loads(line)
            closes = (record["event"], rest) == ("run.closed", b"")
            return closes and int(record["data"]["exit_code"]) != ExitCode.MAY_BE_BILLING
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    @property
    def lock(self) -> Path:
        """The kernel lock of the process that owns the run."""
        return self.path / "run.lock"

    @property
    def control(self) -> Path:
        """What the user wants of the supervisor: stop, stop now, destroy."""
        return self.path / "control.json"

    @property
    def log(self) -> Path:
        """The trainer's own words, byte for byte."""
        return self.path / "run.log"

    @property
    def events(self) -> Path:
        """The trainer's events, byte for byte."""
        return self.path / "events.jsonl"

    @property
    def setup_log(self) -> Path:
        """What the script of --setup has said on the machine, byte for byte."""
        return self.path / "setup.log"

    @property
    def table_setup_log(self) -> Path:
        """What the `setup` of a cluster's table has said in the job, byte for byte; of a long one its end."""
        return self.path / "setup-table.log"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor wrote to its standard error."""
        return self.path / "supervisor.log"

    @property
    def data(self) -> Path:
        """Shards that were prepared for this run alone."""
        return self.path / "data"

    @property
    def trainer(self) -> Path:
        """The user's own trainer, as it was when the run was planned."""
        return self.path / "trainer"

    def now_at(self, told: str) -> str:
        """Where shards lie that a plan has at `told`: those of a run move with its home, which may have been moved."""
        old = Path(told)
        moved = self.path.parent / old.parent.name / old.name
        is_of_a_run = (old.parts[-3:-2], old.name) == (("runs",), self.data.name)
        return str(moved) if is_of_a_run and not os.path.isdir(old) and moved.is_dir() else told

    @property
    def staged(self) -> Path:
        """What of the run lies in a bucket, and the digests that were found when it was put there."""
        return self.path / "staged.json"

    @property
    def moving(self) -> Path:
        """How far the transfer is that goes on just now."""
        return self.path / "moving.json"

    @property
    def gpus(self) -> Path:
        """What the machine's cards do just now."""
        return self.path / "gpus.json"

    @property
    def push_key(self) -> Path:
        """The key with which the run's machine signs the list of what it pushes to a bucket."""
        return self.path / "push.key"

    @property
    def ssh(self) -> Path:
        """The run's own two key pairs, until it is over."""
        return self.path / "ssh"

    @property
    def legs(self) -> Path:
        """The plans of the machines that a run continued on, each as it was asked for."""
        return self.path / "legs"

    @property
    def artifacts(self) -> Path:
        """What came home: checkpoints and samples, digests verified."""
        return self.path / "artifacts"

    @property
    def removed(self) -> Path:
        """When its user had the files removed that had come home, and how many they were."""
        return self.path / "removed.json"

    @property
    def receipt(self) -> Path:
        """The signed receipt."""
        return self.path / "receipt.json"


@dataclass(frozen=True)
class Home:
    """The folder that holds all runs, keys and caches of one user (`GPURUN_HOME`)."""

    root: Path

    @property
    def runs(self) -> Path:
        """One folder a run."""
        return self.root / "runs"

    @property
    def keys(self) -> Path:
        """The signing key."""
        return self.root / "keys"

    @property
    def cache(self) -> Path:
        """Tokenised corpora, by digest; safe to delete."""
        return self.root / "cache"

    @property
    def shards(self) -> Path:
        """Tokenised text, by digest of text and tokeniser."""
        return self.cache / "shards"

    @property
    def staged(self) -> Path:
        """Shards of commands that have not opened their run yet."""
        return self.cache / "staged"

    def staged_data(self, run: str) -> Path:
        """Where this process keeps a run's shards until it opens the run; what a crash leaves here goes a day later.

        Until then the name is nobody's: another command may be planning a run of the same one.
        """
        return self.staged / f"{run}.{os.getpid()}"

    def staged_trainer(self, run: str) -> Path:
        """The same for the user's own trainer."""
        return self.staged / f"{run}.trainer.{os.getpid()}"

    @property
    def traced(self) -> Path:
        """What the steps of changed trainers take of memory, by digest of trainer and recipe."""
        return self.cache / "traced"

    @property
    def uploads(self) -> Path:
        """Uploads to buckets that are under way: what is needed to go on with them after a crash."""
        return self.cache / "uploads"

    @property
    def turns(self) -> Path:
        """When the next request to a cloud may be sent that counts them by account; one file each."""
        return self.cache / "turns"

    @property
    def ssh(self) -> Path:
        """The entries for OpenSSH of the machines that can be logged in to (`config`), and their host keys."""
        return self.root / "ssh"

    @property
    def instances(self) -> Path:
        """The folders of the `local` provider's instances."""
        return self.root / "instances"

    @property
    def priors(self) -> Path:
        """What the user's own runs have shown of speed and memory; plans rest on it, and do without it too."""
        return self.root / "priors.json"

    @property
    def approved_runs(self) -> Path:
        """The run tables of folders' files that the user has agreed to, a file each, by digest."""
        return self.root / "approved-runs"

    @property
    def ledger(self) -> Path:
        """The chain of receipts."""
        return self.root / "ledger.jsonl"

    @property
    def config(self) -> Path:
        """The user's configuration."""
        return self.root / "config.toml"

    @property
    def id(self) -> str:
        """Six hex digits that every token of this home carries: made at the first use, once, and the same in a copy.

        SetupError where they can be neither read nor written.
        """
        path = self.root / "id"
        try:
            if path.exists() and _ID.fullmatch(known := read_regular(path).decode()):
                return known
            make_private(self.root)
            with exclusive(self.root / "id.lock"):
                if not (path.exists() and _ID.fullmatch(read_regular(path).decode())):
                    write_atomic(path, secrets.token_hex(3).encode())
            return read_regular(path).decode()
        except (OSError, UnicodeError) as error:
            hint = "Give yourself read and write access to it, or choose another with --home DIR."
            raise SetupError("home.unusable", f"The file {path} cannot be used: {error}.", hint=hint) from None

    def run(self, name: str) -> RunFolder:
        """The folder of a run, whether it exists or not; a name that could leave the folder is a UsageError."""
        if not RUN_NAME.fullmatch(name):
            raise UsageError(
                "run.bad_name",
                f"{name!r} cannot be the name of a run.",
                hint="Use lower-case letters, digits and dashes, at most 40: --name fox-41.",
            )
        return RunFolder(self.runs / name)

    def folders(self) -> list[RunFolder]:
        """What has the name of a run among them, in no order: nothing is opened."""
        names = os.listdir(self.runs) if self.runs.is_dir() else []
        return [RunFolder(self.runs / name) for name in names if RUN_NAME.fullmatch(name)]

    def run_names(self, *, only_open: bool = False) -> list[str]:
        """The names of runs, oldest first by the beginning of the journal; without one by when they were asked.

        With `only_open` those are left out whose journal's last line closes them.
        """
        named = [one for one in self.folders() if not (only_open and one.is_closed)]
        found = [(asked_ns, one.name) for one in named if (asked_ns := _asked_ns(one)) is not None]
        return [name for _, name in sorted(found)]

    def prepare(self) -> Home:
        """Make the home, private to its owner; a home that cannot be read or written is a SetupError."""
        try:
            for folder in (self.root, self.runs):
                make_private(folder)
            if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise SetupError(
                "home.unusable",
                f"The folder {self.root} cannot be used: {error.strerror}.",
                hint="Give yourself read and write access to it, or choose another with --home DIR.",
            ) from None
        return self


def _asked_ns(run: RunFolder) -> int | None:
    """When a run was asked for; None of what never became one. A folder that is shut to us (sudo) is one."""
    try:
        # One whose request was removed may be billed all the same.
        found = next((path for path in (run.request, run.plan, run.journal) if path.is_file()), None)
        return (_begun_ns(run.journal) or found.stat().st_mtime_ns) if found else None
    except PermissionError:
        return run.path.stat().st_mtime_ns


def _begun_ns(journal: Path) -> int:
    """When a journal begins, by its own word: a copy of a home has other times; 0 where it has none."""
    try:
        with open_regular(journal) as lines:
            return int(json.loads(lines.readline(1 << 16))["wall"] * 1e9)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


MANDATE_VARIABLE = "GPURUN_MANDATE"
"""The variable that names a mandate's file, which every verb obeys."""


def default_home() -> Path:
    """`GPURUN_HOME`, else the XDG data folder."""
    chosen = os.environ.get("GPURUN_HOME")
    return home_at(chosen or f"{os.environ.get('XDG_DATA_HOME') or '~/.local/share'}/gpurun")


def home_at(told: str) -> Path:
    """The folder that is meant; a SetupError for a file, and for a `~` that is nobody's (a container without HOME)."""
    try:
        home = Path(told).expanduser().absolute()
    except RuntimeError:
        hint = "Name it by its whole path, with --home DIR or GPURUN_HOME."
        raise SetupError("home.unknown", f"Whose folder {told} is cannot be told here.", hint=hint) from None
    if os.path.exists(home) and not os.path.isdir(home):
        hint = "Name a folder with --home DIR or GPURUN_HOME."
        raise SetupError("home.unusable", f"{home} is no folder, so it can be no home.", hint=hint)
    return home


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can enter."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def fsync_file(descriptor: int) -> None:
    """Make what was written to a file survive a power cut."""
    os.fsync(descriptor)
    if hasattr(fcntl, "F_FULLFSYNC"):  # A Mac's fsync leaves it in the disk's own cache.
        with suppress(OSError):  # A network disk has no such call.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def fsync_folder(folder: Path) -> None:
    """Make a rename or a new name in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync_file(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BufferedReader:
    """Open a file of a home that may be a stranger's; OSError for what is none, or would be read for ever.

    That is a pipe, a device, and a file that is large and nearly all hole.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EIO, "it is no regular file", str(path))
        if facts.st_size > MOST_RECORD_BYTES and facts.st_blocks * 512 < facts.st_size // 64:
            raise OSError(errno.EIO, "it is large, and nearly all of it is a hole", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int = MOST_RECORD_BYTES) -> bytes:
    """The content of a file, see `open_regular`; OSError where it has more than so many bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EIO, f"it has more than {most:,} bytes", str(path))
        return file.read()


def is_stream(path: Path) -> bool:
    """Whether a device or a pipe lies there: that is written to, and never replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file whole: a reader or a crash sees the old bytes or the new ones, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(content)
            out.flush()
            fsync_file(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)

"""Where files are on the laptop, and how a file is written so that a crash leaves the old version or the new one."""

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
"""The limit for a journal, a receipt or a plan: a thousand times their usual size."""
_CLOSING_BYTES = 1024  # A closing line has about 300.


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; every viewer, audit and report reads these and nothing else."""

    path: Path

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.path.name

    @property
    def home(self) -> Path:
        """Return the folder of the home."""
        return self.path.parent.parent

    @property
    def request(self) -> Path:
        """Return the file with the user's request."""
        return self.path / "request.json"

    @property
    def plan(self) -> Path:
        """Return the file with the plan that was shown and approved."""
        return self.path / "plan.json"

    @property
    def journal(self) -> Path:
        """Return the journal: what was intended and observed, in order."""
        return self.path / "journal.jsonl"

    @property
    def is_closed(self) -> bool:
        """Return whether the journal's last line closes the run, with nothing left that may be billed.

        An incomplete line, or one with another line after it, closes nothing. Earlier lines are not read: finding
        damage there is the audit's task.
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
        """Return the lock file of the process that holds the run."""
        return self.path / "run.lock"

    @property
    def control(self) -> Path:
        """Return the file with the user's request to the supervisor: stop, stop now, destroy."""
        return self.path / "control.json"

    @property
    def log(self) -> Path:
        """Return the trainer's log, byte for byte."""
        return self.path / "run.log"

    @property
    def events(self) -> Path:
        """Return the trainer's events, byte for byte."""
        return self.path / "events.jsonl"

    @property
    def setup_log(self) -> Path:
        """Return the output of the --setup script on the machine, byte for byte."""
        return self.path / "setup.log"

    @property
    def table_setup_log(self) -> Path:
        """Return the output of the `setup` of a cluster's table in the job, byte for byte; of a long one the end."""
        return self.path / "setup-table.log"

    @property
    def supervisor_log(self) -> Path:
        """Return the supervisor's standard error."""
        return self.path / "supervisor.log"

    @property
    def data(self) -> Path:
        """Return the folder of shards that were prepared for this run alone."""
        return self.path / "data"

    @property
    def trainer(self) -> Path:
        """Return the folder of the user's own trainer, as it was when the run was planned."""
        return self.path / "trainer"

    def now_at(self, recorded: str) -> str:
        """Return where the shards of a plan are now: those inside a run's folder move when the home is moved."""
        old = Path(recorded)
        moved = self.path.parent / old.parent.name / old.name
        is_of_a_run = (old.parts[-3:-2], old.name) == (("runs",), self.data.name)
        return str(moved) if is_of_a_run and not os.path.isdir(old) and moved.is_dir() else recorded

    @property
    def staged(self) -> Path:
        """Return the record of which files of the run are in a bucket, and their digests at that time."""
        return self.path / "staged.json"

    @property
    def moving(self) -> Path:
        """Return the progress of the current transfer."""
        return self.path / "moving.json"

    @property
    def gpus(self) -> Path:
        """Return what the machine's GPUs do now."""
        return self.path / "gpus.json"

    @property
    def push_key(self) -> Path:
        """Return the key with which the run's machine signs the list of the files that it pushes to a bucket."""
        return self.path / "push.key"

    @property
    def ssh(self) -> Path:
        """Return the run's own two key pairs, kept until it ends."""
        return self.path / "ssh"

    @property
    def legs(self) -> Path:
        """Return the plans of the machines that the run continued on, one for each."""
        return self.path / "legs"

    @property
    def artifacts(self) -> Path:
        """Return the folder of downloaded files: checkpoints and samples, digests verified."""
        return self.path / "artifacts"

    @property
    def removed(self) -> Path:
        """Return the record of when the user had the downloaded files removed, and how many there were."""
        return self.path / "removed.json"

    @property
    def receipt(self) -> Path:
        """Return the signed receipt."""
        return self.path / "receipt.json"


@dataclass(frozen=True)
class Home:
    """The folder that holds all runs, keys and caches of one user (`GPURUN_HOME`)."""

    root: Path

    @property
    def runs(self) -> Path:
        """Return the folder that has one folder for each run."""
        return self.root / "runs"

    @property
    def keys(self) -> Path:
        """Return the folder of the signing key."""
        return self.root / "keys"

    @property
    def cache(self) -> Path:
        """Return the cache; it is safe to delete."""
        return self.root / "cache"

    @property
    def shards(self) -> Path:
        """Return the tokenised texts, by digest of text and tokeniser."""
        return self.cache / "shards"

    @property
    def staged(self) -> Path:
        """Return the shards of commands that have not opened their run yet."""
        return self.cache / "staged"

    def staged_data(self, run: str) -> Path:
        """Return where this process keeps a run's shards until it opens the run; after a crash they go a day later.

        Until then the name is not reserved: another command may be planning a run with the same name.
        """
        return self.staged / f"{run}.{os.getpid()}"

    def staged_trainer(self, run: str) -> Path:
        """Return the same for the user's own trainer."""
        return self.staged / f"{run}.trainer.{os.getpid()}"

    @property
    def traced(self) -> Path:
        """Return how much memory the steps of changed trainers take, by digest of trainer and recipe."""
        return self.cache / "traced"

    @property
    def uploads(self) -> Path:
        """Return the state of unfinished uploads to buckets, from which they are resumed after a crash."""
        return self.cache / "uploads"

    @property
    def turns(self) -> Path:
        """Return when the next request may be sent to a cloud that limits requests by account; one file each."""
        return self.cache / "turns"

    @property
    def ssh(self) -> Path:
        """Return the OpenSSH entries of the machines that can be logged in to (`config`), and their host keys."""
        return self.root / "ssh"

    @property
    def instances(self) -> Path:
        """Return the folders of the `local` provider's instances."""
        return self.root / "instances"

    @property
    def priors(self) -> Path:
        """Return what the user's own runs have shown of speed and memory; plans use it, and also work without it."""
        return self.root / "priors.json"

    @property
    def approved_runs(self) -> Path:
        """Return the run tables of folders' files that the user has approved, one file each, by digest."""
        return self.root / "approved-runs"

    @property
    def ledger(self) -> Path:
        """Return the chain of receipts."""
        return self.root / "ledger.jsonl"

    @property
    def config(self) -> Path:
        """Return the user's configuration file."""
        return self.root / "config.toml"

    @property
    def id(self) -> str:
        """Return the six hex digits that every token of this home carries: made once, at first use, and kept in a copy.

        SetupError if they can be neither read nor written.
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
        """Return the folder of a run, whether or not it exists; UsageError for a name that could leave the folder."""
        if not RUN_NAME.fullmatch(name):
            raise UsageError(
                "run.bad_name",
                f"{name!r} cannot be the name of a run.",
                hint="Use lower-case letters, digits and dashes, at most 40: --name fox-41.",
            )
        return RunFolder(self.runs / name)

    def folders(self) -> list[RunFolder]:
        """Return all folders whose name could be a run's, in no order; none of them is opened."""
        names = os.listdir(self.runs) if self.runs.is_dir() else []
        return [RunFolder(self.runs / name) for name in names if RUN_NAME.fullmatch(name)]

    def run_names(self, *, only_open: bool = False) -> list[str]:
        """Return the names of runs, oldest first by the start of the journal, or by the request without a journal.

        With `only_open`, runs are left out whose journal's last line closes them.
        """
        named = [folder for folder in self.folders() if not (only_open and folder.is_closed)]
        found = [(asked_ns, folder.name) for folder in named if (asked_ns := _asked_ns(folder)) is not None]
        return [name for _, name in sorted(found)]

    def prepare(self) -> Home:
        """Create the home, private to its owner; SetupError if it cannot be read or written."""
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
    """Return when a run was requested; None if it never became a run. An unreadable folder (sudo) counts as one."""
    try:
        # A run whose request was removed may still be billed.
        found = next((path for path in (run.request, run.plan, run.journal) if path.is_file()), None)
        return (_begun_ns(run.journal) or found.stat().st_mtime_ns) if found else None
    except PermissionError:
        return run.path.stat().st_mtime_ns


def _begun_ns(journal: Path) -> int:
    """Return when a journal begins, from its own content, because a copy of a home has other file times; 0 if empty."""
    try:
        with open_regular(journal) as lines:
            return int(json.loads(lines.readline(1 << 16))["wall"] * 1e9)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


MANDATE_VARIABLE = "GPURUN_MANDATE"
"""The environment variable with the path of a mandate's file, which every verb obeys."""


def default_home() -> Path:
    """Return `GPURUN_HOME`, or else the XDG data folder."""
    chosen = os.environ.get("GPURUN_HOME")
    return home_at(chosen or f"{os.environ.get('XDG_DATA_HOME') or '~/.local/share'}/gpurun")


def home_at(typed: str) -> Path:
    """Return the named folder; SetupError for a file, and for a `~` without a user (a container without HOME)."""
    try:
        home = Path(typed).expanduser().absolute()
    except RuntimeError:
        hint = "Give its absolute path, with --home DIR or GPURUN_HOME."
        raise SetupError(
            "home.unknown", f"{typed} cannot be resolved: no such user is known here.", hint=hint
        ) from None
    if os.path.exists(home) and not os.path.isdir(home):
        hint = "Name a folder with --home DIR or GPURUN_HOME."
        raise SetupError("home.unusable", f"{home} is not a folder, so it cannot be a home.", hint=hint)
    return home


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can enter."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def fsync_file(descriptor: int) -> None:
    """Make what was written to a file survive a power failure."""
    os.fsync(descriptor)
    if hasattr(fcntl, "F_FULLFSYNC"):  # A Mac's fsync leaves it in the disk's own cache.
        with suppress(OSError):  # A network disk does not support this call.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def fsync_folder(folder: Path) -> None:
    """Make a rename or a new name in this folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync_file(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BufferedReader:
    """Open a file of a home that may be a stranger's; OSError if it is not a regular file or might never end.

    That is a pipe, a device, or a large file that is almost entirely a hole.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EIO, "it is not a regular file", str(path))
        if facts.st_size > MOST_RECORD_BYTES and facts.st_blocks * 512 < facts.st_size // 64:
            raise OSError(errno.EIO, "it is large, and almost entirely a hole", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int = MOST_RECORD_BYTES) -> bytes:
    """Return the content of a file, opened as by `open_regular`; OSError if it has more than `most` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EIO, f"it has more than {most:,} bytes", str(path))
        return file.read()


def is_stream(path: Path) -> bool:
    """Return whether the path is a device or a pipe: those are written to, and never replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a reader or a crash sees the old bytes or the new ones, never a mixture."""
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

"""The paths of gpurun's files on this computer, and functions that read and write files safely."""

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
_CLOSING_BYTES = 1024  # A closing line has about 300 bytes.


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run's files. Viewers, audit and reports read only these files."""

    path: Path

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.path.name

    @property
    def home(self) -> Path:
        """Return the folder of the home that the run belongs to."""
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
        """Return the journal's file: what was intended and observed, in order."""
        return self.path / "journal.jsonl"

    @property
    def is_closed(self) -> bool:
        """Return whether the journal's last line is complete and closes the run, with nothing left that may be billed.

        Earlier lines are not read: finding damage in them is the audit's task.
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
        """Return the file that the process which drives the run has locked."""
        return self.path / "run.lock"

    @property
    def control(self) -> Path:
        """Return the file with the user's request to the supervisor: to stop, to stop now, or to destroy."""
        return self.path / "control.json"

    @property
    def log(self) -> Path:
        """Return the file with the trainer's log, byte for byte."""
        return self.path / "run.log"

    @property
    def events(self) -> Path:
        """Return the file with the trainer's events, byte for byte."""
        return self.path / "events.jsonl"

    @property
    def setup_log(self) -> Path:
        """Return the file with the output of the --setup script on the machine, byte for byte."""
        return self.path / "setup.log"

    @property
    def table_setup_log(self) -> Path:
        """Return the file with the output of the cluster table's `setup` in the job; of a long output, only the end."""
        return self.path / "setup-table.log"

    @property
    def supervisor_log(self) -> Path:
        """Return the file with the supervisor's standard error."""
        return self.path / "supervisor.log"

    @property
    def data(self) -> Path:
        """Return the folder of the shards that were prepared only for this run."""
        return self.path / "data"

    @property
    def trainer(self) -> Path:
        """Return the folder of the user's own trainer, as it was when the run was planned."""
        return self.path / "trainer"

    def now_at(self, recorded: str) -> str:
        """Return the present path of a folder of shards that a plan records, because a home may have been moved.

        A recorded path that is not inside a run's folder, or that still exists, is returned unchanged.
        """
        old = Path(recorded)
        moved = self.path.parent / old.parent.name / old.name
        is_of_a_run = (old.parts[-3:-2], old.name) == (("runs",), self.data.name)
        return str(moved) if is_of_a_run and not os.path.isdir(old) and moved.is_dir() else recorded

    @property
    def staged(self) -> Path:
        """Return the file that records which files of the run are in a bucket, with their digests at that time."""
        return self.path / "staged.json"

    @property
    def moving(self) -> Path:
        """Return the file with the progress of the current transfer."""
        return self.path / "moving.json"

    @property
    def gpus(self) -> Path:
        """Return the file with the present load of the machine's GPUs."""
        return self.path / "gpus.json"

    @property
    def push_key(self) -> Path:
        """Return the file of the key with which the run's machine signs the list of the files that it pushes."""
        return self.path / "push.key"

    @property
    def ssh(self) -> Path:
        """Return the folder of the run's two SSH key pairs. The client's private key is deleted when the run ends."""
        return self.path / "ssh"

    @property
    def legs(self) -> Path:
        """Return the folder of the plans by which the run continued on other machines, one file each."""
        return self.path / "legs"

    @property
    def artifacts(self) -> Path:
        """Return the folder of downloaded files: checkpoints and samples, digests verified."""
        return self.path / "artifacts"

    @property
    def removed(self) -> Path:
        """Return the file that records when the user let gpurun remove the downloaded files, and how many."""
        return self.path / "removed.json"

    @property
    def receipt(self) -> Path:
        """Return the file of the receipt."""
        return self.path / "receipt.json"


@dataclass(frozen=True)
class Home:
    """The folder that holds all runs, keys and caches of one user (`GPURUN_HOME`)."""

    root: Path

    @property
    def runs(self) -> Path:
        """Return the folder that contains a folder for each run."""
        return self.root / "runs"

    @property
    def keys(self) -> Path:
        """Return the folder of the keys: for signing, trusted public keys, and providers' keys without a keyring."""
        return self.root / "keys"

    @property
    def cache(self) -> Path:
        """Return the folder of the cache, which may be deleted at any time."""
        return self.root / "cache"

    @property
    def shards(self) -> Path:
        """Return the cache folder of tokenised texts, by the digest of text and tokeniser."""
        return self.cache / "shards"

    @property
    def staged(self) -> Path:
        """Return the cache folder of the shards of gpurun commands that have not created their run yet."""
        return self.cache / "staged"

    def staged_data(self, run: str) -> Path:
        """Return the folder in which this process keeps a run's shards until it creates the run.

        The process id is part of the path, because another process may be planning a run with the same name. What a
        crash leaves behind is removed a day later.
        """
        return self.staged / f"{run}.{os.getpid()}"

    def staged_trainer(self, run: str) -> Path:
        """Return the folder in which this process keeps the user's own trainer until it creates the run."""
        return self.staged / f"{run}.trainer.{os.getpid()}"

    @property
    def traced(self) -> Path:
        """Return the cache folder of how much memory a step of a changed trainer takes, by trainer and recipe."""
        return self.cache / "traced"

    @property
    def uploads(self) -> Path:
        """Return the cache folder that records unfinished uploads to buckets, so that they can resume after a crash."""
        return self.cache / "uploads"

    @property
    def turns(self) -> Path:
        """Return the cache folder for clouds that limit requests: a file per account with the next one's time."""
        return self.cache / "turns"

    @property
    def ssh(self) -> Path:
        """Return the folder with the OpenSSH entries (`config`) and host keys of the machines that accept logins."""
        return self.root / "ssh"

    @property
    def instances(self) -> Path:
        """Return the folder of the `local` provider's instances."""
        return self.root / "instances"

    @property
    def priors(self) -> Path:
        """Return the file with the speed and memory of the user's own runs, which plans use if it is there."""
        return self.root / "priors.json"

    @property
    def approved_runs(self) -> Path:
        """Return the folder of the named commands in project files that the user has approved, one file per digest."""
        return self.root / "approved-runs"

    @property
    def ledger(self) -> Path:
        """Return the file of the chain of receipts."""
        return self.root / "ledger.jsonl"

    @property
    def config(self) -> Path:
        """Return the user's configuration file."""
        return self.root / "config.toml"

    @property
    def id(self) -> str:
        """Return the six hex digits in every token of this home. They are made at first use, and a copy keeps them.

        Raise SetupError if their file can neither be read nor written.
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
        """Return all folders whose names are possible names of runs, in no order; their content is not checked."""
        names = os.listdir(self.runs) if self.runs.is_dir() else []
        return [RunFolder(self.runs / name) for name in names if RUN_NAME.fullmatch(name)]

    def run_names(self, *, only_open: bool = False) -> list[str]:
        """Return the names of the runs, oldest first: by the journal's first record, or else by the age of the request.

        With `only_open`, closed runs (`RunFolder.is_closed`) are left out.
        """
        named = [folder for folder in self.folders() if not (only_open and folder.is_closed)]
        found = [(asked_ns, folder.name) for folder in named if (asked_ns := _read_requested_ns(folder)) is not None]
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


def _read_requested_ns(run: RunFolder) -> int | None:
    """Return when a run was requested, in ns; None if it is not a run's folder. An unreadable one counts as a run's."""
    try:
        # A run whose request was removed may still be billed.
        found = next((path for path in (run.request, run.plan, run.journal) if path.is_file()), None)
        return (_read_begun_ns(run.journal) or found.stat().st_mtime_ns) if found else None
    except PermissionError:
        return run.path.stat().st_mtime_ns


def _read_begun_ns(journal: Path) -> int:
    """Return the time in a journal's first record, in ns; 0 if there is none. A copied file's own time is wrong."""
    try:
        with open_regular(journal) as lines:
            return int(json.loads(lines.readline(1 << 16))["wall"] * 1e9)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


MANDATE_VARIABLE = "GPURUN_MANDATE"
"""The environment variable with the path of a mandate's file, which then limits every verb."""


def default_home() -> Path:
    """Return the home in `GPURUN_HOME`, or else the one in the XDG data folder; SetupError as in `home_at`."""
    chosen = os.environ.get("GPURUN_HOME")
    return home_at(chosen or f"{os.environ.get('XDG_DATA_HOME') or '~/.local/share'}/gpurun")


def home_at(typed: str) -> Path:
    """Return the absolute path of a home; SetupError if it is a file, or if its `~` cannot be resolved."""
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
    """Create a folder, and the folders above it; only its owner can enter it. An existing folder stays as it is."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def fsync_file(descriptor: int) -> None:
    """Force what was written to an open file onto the disk: it survives a power failure."""
    os.fsync(descriptor)
    if hasattr(fcntl, "F_FULLFSYNC"):  # A Mac's fsync leaves it in the disk's own cache.
        with suppress(OSError):  # A network disk does not support this call.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def fsync_folder(folder: Path) -> None:
    """Force new and changed names in a folder onto the disk: they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync_file(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BufferedReader:
    """Open a file of a home that may come from a stranger; OSError if reading it might never end.

    This refuses pipes, devices, and large files that are almost entirely a hole.
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
    """Return whether a path is a device or a pipe, to which a caller writes instead of replacing it by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file as a whole: a reader sees the old bytes or the new ones, never a mixture, also after a crash."""
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

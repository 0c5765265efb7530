"""The command lines that are sent: constant programs of one line, with everything that varies as an argument.

The login's shell may be any (sh, fish, csh), so it is only asked to become `sh`; none of these programs has a
backslash, an exclamation mark or a line break, which those shells read differently between quotes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

# $1 the mark, $2 the folder, then the program. The mark says that all output from here on is the program's own, and
# which process group it is; the shell stays, so that a program that a signal ended has an exit code too (128 + it).
_RUN = '(umask 077; mkdir -p -- "$2") && cd -- "$2" && echo "$1 $$" && shift 2 && "$@"; exit'

# $1 the file, $2 its length. It is written beside its place and made durable before it takes that place.
_PUT = (
    "LC_ALL=C; export LC_ALL; umask 077; part=$1.$$.part; "
    'if [ -d "$1" ]; then echo "$1 is a folder" >&2; exit 1; fi; '
    'mkdir -p -- "$(dirname -- "$1")" && dd of="$part" bs=65536 conv=fsync && '
    '[ "$(wc -c < "$part")" -eq "$2" ] && mv -f -- "$part" "$1" && exit; '
    'code=$?; rm -f -- "$part"; exit "$code"'
)

# $1 the process group. Where a server makes none (dropbear) it is the shell, and the program its child.
_KILL = 'kill -s KILL -- "-$1" || kill -s KILL $(cat "/proc/$1/task/$1/children") "$1"'


def run_line(mark: str, folder: str, argv: Sequence[str]) -> str:
    """The command line that runs a program in a folder, which is made private where it is missing."""
    # `exec` keeps the process that the server leads a session with, so that its group is the program's.
    return "exec " + shlex.join(["sh", "-c", _RUN, "gpurun", mark, folder, *argv])


def put_argv(path: str, size_bytes: int) -> list[str]:
    """The program that replaces a file by what it is fed, if that is of the size told."""
    return ["sh", "-c", _PUT, "gpurun", path, str(size_bytes)]


def kill_argv(group: int) -> list[str]:
    """The program that ends a process group: a program that was run and all that it started and did not detach."""
    return ["sh", "-c", _KILL, "gpurun", str(group)]

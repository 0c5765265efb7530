"""Clones the folder of a dev box on the machine, with the machine's git and without any key."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List

MOST_WORDS = 300


class NotCloned(Exception):
    """The repository could not be cloned. The message contains git's own message."""


def clone(what: List[str], work: str) -> str:
    """Clone an address into `work`, without overwriting files; check out a named commit; return the commit."""
    address, commit = what
    into = work + ".clone"
    shutil.rmtree(into, ignore_errors=True)  # This is left from an interrupted start.
    git(["clone", "--quiet", "--", address, into])
    if commit:
        git(["-C", into, "checkout", "--quiet", commit])
    commit = git(["-C", into, "rev-parse", "HEAD"])
    move_below(into, work)
    return commit


def git(words: List[str]) -> str:
    """Return git's output. Raise NotCloned if git fails. git must not ask for a password."""
    try:
        done = subprocess.run(
            ["git", *words], env=git_environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    except OSError as error:
        raise NotCloned("git cannot be started on the machine (%s): install it with --setup" % error.strerror) from None
    if done.returncode:
        raise NotCloned("git %s: %s" % (words[0], done.stderr.decode("utf-8", "replace").strip()[-MOST_WORDS:]))
    return done.stdout.decode("ascii", "replace").strip()


def move_below(source: str, target: str) -> None:
    """Move everything from one folder into another. Existing entries are not changed."""
    for folder, folders, files in os.walk(source, topdown=False):
        there = os.path.normpath(os.path.join(target, os.path.relpath(folder, source)))
        os.makedirs(there, exist_ok=True)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links]:
            if not os.path.lexists(os.path.join(there, name)):
                os.rename(os.path.join(folder, name), os.path.join(there, name))
    shutil.rmtree(source, ignore_errors=True)


def git_environment() -> Dict[str, str]:
    """Return git's environment: its path and certificates, the proxy, and no prompt for a password."""
    known = re.compile(r"PATH|HOME|TMPDIR|LANG|LC_\w+|\w+_proxy|\w+_PROXY|SSL_CERT_\w+|CURL_CA_BUNDLE")
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
    return dict({name: value for name, value in os.environ.items() if known.fullmatch(name)}, **quiet)

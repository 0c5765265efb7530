"""Reads what a login on this machine exports, and selects what the job gets.

A command over SSH is not a login: it has neither the exports of ~/.profile nor, in a container, those of the container.
Both are read once, at `hello`. By default the job gets the families of `processes.FAMILIES`, without anything that
looks like a key. Of all other variables only the names are reported.
"""

from __future__ import annotations

import fnmatch
import os
import pwd
import re
import signal
import subprocess
import tempfile

from gpurun.remote.agent.processes import FAMILIES, OF_THE_CALL, looks_secret, may_pass_variable
from gpurun.remote.agent.system import path_in, read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, List, Mapping, Tuple

    from gpurun.remote.agent.system import Json

LOGIN_S = 10.0
MARK = b"\0gpurun\0"
FIRST_PROCESS = "/proc/1/environ"
BOOTED_BY_SYSTEMD = "/run/systemd/system"
SHELLS = ("bash", "zsh", "ksh", "dash", "sh")
# Specific to one login or shell, or to how a cluster numbers its job, and so not worth reporting.
USUAL = (
    r"SHELL|PWD|OLDPWD|SHLVL|_|TERM|TERM_\w+|COLORTERM|MAIL|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|IFS|PS\d|EDITOR|PAGER"
    r"|VISUAL|LESS\w*|LS_\w+|HIST\w*|MOTD_\w+|DBUS_\w+|SSH_\w+|BASH\w*|MANPATH|INFOPATH|LINES|COLUMNS|container"
    r"|DEBIAN_FRONTEND|S_COLORS|GPG_TTY|GPURUN_\w+|SLURM\w*|SBATCH\w*|SRUN\w*|PMI\w*|PMIX\w*|SPANK\w*"
)
MOST_NAMES, MOST_NAME, MOST_BYTES = 200, 100, 4 << 20


def learn(root: str) -> Json:
    """Store the exported variables that the job gets, and return the names to report.

    `passed` are stored variables of known families, `withheld` those that were not stored, `keys` those that
    look like keys. `note` says what could not be read.
    """
    exported, note = exports()
    may = {name: value for name, value in exported.items() if may_pass_variable(name, value)}
    values = {name: value for name, value in may.items() if not re.fullmatch(OF_THE_CALL, name)}
    write(path_in(root, "agent", "environment.json"), values)
    families = [name for name in values if re.fullmatch(FAMILIES, name)]
    others = {name for name in exported if name not in may and not re.fullmatch(USUAL, name)}
    keys = {name for name in others if re.fullmatch(FAMILIES, name)}
    return {"passed": name_some(families), "withheld": name_some(others - keys), "keys": name_some(keys), "note": note}


def remembered_variables(root: str) -> Dict[str, str]:
    """Return the variables that `learn` has stored; empty before that."""
    return dict(read(root, "agent", "environment.json") or {})


def granted_variables(globs: List[str]) -> Dict[str, str]:
    """Return the variables exported on this machine whose names match these globs."""
    return select_variables(globs, exports()[0]) if globs else {}


def select_variables(globs: List[str], exported: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that match these globs. A variable that looks like a key must be named in full."""
    return {
        name: value
        for name, value in exported.items()
        if name in globs or (any(fnmatch.fnmatchcase(name, glob) for glob in globs) and not looks_secret(name, value))
        if not name.startswith("GPURUN_")
    }


def exports() -> Tuple[Dict[str, str], str]:
    """Return all variables that are exported on this machine, and a note about those that could not be read.

    In a cluster's job, its own environment, which its set-up has made, is used. On the user's computer (recognised by
    GPURUN_INSTANCE) it is the environment in which the user started gpurun.
    """
    here = dict(os.environ)
    if "GPURUN_INSTANCE" in here:
        return here, ""
    container = {} if os.path.isdir(BOOTED_BY_SYSTEMD) else pairs(first_process())
    if "SLURM_JOB_ID" in here:
        return dict(container, **here), ""
    login, note = by_login()
    return dict(container, **dict(here, **login)), note


def first_process() -> bytes:
    """Return the container's variables; empty if its first process belongs to another user."""
    try:
        with open(FIRST_PROCESS, "rb") as file:
            return file.read()
    except OSError:
        return b""


def by_login() -> Tuple[Dict[str, str], str]:
    """Return what a login shell of this account exports; or, for example with a slow profile, why it is unknown.

    The call waits for the end of the shell, not of its output, which a background process of the profile may keep open.
    """
    shell = pwd.getpwuid(os.getuid()).pw_shell
    shell = shell if os.path.basename(shell) in SHELLS else "bash"
    with tempfile.TemporaryFile() as out:
        try:
            child = subprocess.Popen(
                [shell, "-lc", "printf '\\0gpurun\\0'; exec env -0"], env=os.environ, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return {}, "%s cannot be started: %s" % (shell, error.strerror)
        try:
            child.wait(LOGIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return {}, "its profile did not finish within %.0f s, so its exports are not passed on" % LOGIN_S
        out.seek(0)
        _, mark, output = out.read(MOST_BYTES).rpartition(MARK)
    is_whole = mark and child.returncode == 0
    return pairs(output), "" if is_whole else "its profile did not finish, so its exports are not passed on"


def pairs(content: bytes) -> Dict[str, str]:
    """Parse `NAME=VALUE` separated by zero bytes; names may only have letters, digits and _."""
    found = {}
    for pair in content.split(b"\0"):
        name, sign, value = os.fsdecode(pair).partition("=")
        if sign and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            found[name] = value
    return found


def name_some(found: Iterable[str]) -> List[str]:
    """Return the names in order, at most as many as a message may have."""
    return [name[:MOST_NAME] for name in sorted(found)][:MOST_NAMES]

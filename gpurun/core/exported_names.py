"""The names of what a machine's login exports: which of them --pass-env asks for, and what is said of the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from gpurun.core.errors import UsageError

_GLOB = re.compile(r"[A-Za-z_*?\[][A-Za-z0-9_*?\[\]!-]*")


def checked_globs(typed: Sequence[str]) -> tuple[str, ...]:
    """The globs of --pass-env, each a name or a pattern of names; UsageError for anything else."""
    for glob in typed:
        if not _GLOB.fullmatch(glob) or glob.startswith("GPURUN_"):
            what = f"--pass-env {glob!r} is neither the name of a variable nor a pattern such as 'VLLM_*'."
            raise UsageError("usage.pass_env", what, hint="For a value of your own: --env NAME=VALUE, --secret NAME.")
    return tuple(typed)


def not_passed(names: Sequence[str], globs: Sequence[str]) -> list[str]:
    """The names that no glob asks for."""
    return [name for name in names if not any(fnmatchcase(name, glob) for glob in globs)]

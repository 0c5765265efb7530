"""Conda for tests: the installed conda, or a stand-in that, like conda, is a shell function around a program."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

FUNCTION = """\
export CONDA_EXE='{base}/bin/conda'
conda() {{
    local exports
    case ${{1-}} in
        activate|deactivate)
            exports=$("$CONDA_EXE" shell.posix "$@") || return
            eval "$exports"
            ;;
        *) "$CONDA_EXE" "$@" ;;
    esac
}}
"""
PROGRAM = """\
#!/bin/sh
[ "$1 $2" = "shell.posix activate" ] || { echo "conda: $*?" >&2; exit 2; }
if ! [ -e "$3/conda-meta/history" ]; then
    echo "EnvironmentNameNotFound: Could not find conda environment: $3" >&2
    exit 1
fi
echo "export PATH='$3/bin:$PATH'
export CONDA_PREFIX='$3' CONDA_SHLVL='1' CONDA_DEFAULT_ENV='$3'"
for script in "$3"/etc/conda/activate.d/*.sh; do echo ". \\"$script\\""; done
"""


def conda_base(folder: Path) -> Path:
    """Return the folder in which conda is installed on this computer; without one, create a stand-in in `folder`."""
    if installed := shutil.which("conda"):
        return Path(installed).resolve().parents[1]
    base = folder / "conda"
    for name, text in (("etc/profile.d/conda.sh", FUNCTION.format(base=base)), ("bin/conda", PROGRAM)):
        (base / name).parent.mkdir(parents=True)
        (base / name).write_text(text)
    (base / "bin/conda").chmod(0o755)
    return base


def make_environment(folder: Path) -> Path:
    """Create an environment with this Python in `folder` and return it.

    Its activation prints a line and exports CUDA_HOME.
    """
    for name in ("conda-meta", "bin", "etc/conda/activate.d"):
        (folder / name).mkdir(parents=True)
    (folder / "conda-meta/history").touch()
    (folder / "etc/conda/activate.d/lab.sh").write_text('echo "$CONDA_PREFIX is active"\nexport CUDA_HOME=/opt/lab\n')
    (folder / "bin/python").symlink_to(Path(sys.executable).resolve())
    return folder

"""Apptainer for tests: a stand-in that runs everywhere, and the real program if it is installed (`install.sh`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OPT = "/opt/apptainer/usr/bin"
LIBC = tuple(f"usr/lib/x86_64-linux-gnu/{name}" for name in ("libc.so.6", "ld-linux-x86-64.so.2"))


@dataclass(frozen=True)
class Images:
    """An engine with two images: `good` has a Python with torch, `bare` has no Python.

    `setup` and `bare_setup` are the shell lines that put the engine into PATH and configure it for `good` and `bare`.
    `calls` is the file in which the stand-in records its calls; None for the real engine.
    """

    setup: str
    bare_setup: str
    good: Path
    bare: Path
    calls: Path | None = None


def real_apptainer() -> str | None:
    """Return the path of the real apptainer; None if it is not installed."""
    return shutil.which("apptainer", path=f"{os.environ['PATH']}:{OPT}")


def stand_in(folder: Path, python: Path) -> Images:
    """Create the stand-in and its images in `folder`. An image is a folder with a few programs in bin/."""
    (programs := folder / "engine").mkdir(parents=True)
    shutil.copy(HERE / "apptainer.sh", programs / "apptainer")
    (programs / "apptainer").chmod(0o755)
    images = [folder / "image.sif", folder / "bare.sif"]
    for image in images:
        (image / "bin").mkdir(parents=True)
        for name in ("sh", "true", "sleep", "cat", "uname"):
            (image / "bin" / name).symlink_to(str(shutil.which(name)))
    (images[0] / "bin" / "python3").symlink_to(python)
    calls = folder / "calls.txt"
    setup = f"export PATH={programs}:$PATH APPTAINER_CALLS={calls} APPTAINER_REGISTRY={images[0]}"
    return Images(setup, setup, images[0], images[1], calls)


def real_images(folder: Path, python: Path) -> Images:
    """Build two images with the real engine from nearly empty trees.

    `good` runs with this system's programs bound in.
    """
    program = real_apptainer()
    assert program is not None
    bound = f"/usr/bin,/usr/lib,{sys.base_prefix},{sys.prefix},{HERE.parents[2]}"
    made = list[Path]()
    for name in ("image", "bare"):
        root = folder / name
        for place in ("usr/bin", "usr/lib", "usr/local/bin", "etc", "proc", "sys", "dev", "tmp", "root", "var/tmp"):
            (root / place).mkdir(parents=True)
        for place in ("bin", "lib"):
            (root / place).symlink_to(f"usr/{place}")
        (root / "lib64").symlink_to("usr/lib/x86_64-linux-gnu")
        if name == "image":
            (root / "usr/local/bin/python3").write_text(python.read_text())
            (root / "usr/local/bin/python3").chmod(0o755)
        else:
            (root / "usr/lib/x86_64-linux-gnu").mkdir()
            for name_of_file in ("usr/bin/dash", "usr/bin/true", "usr/bin/cat", *LIBC):
                shutil.copy(f"/{name_of_file}", root / name_of_file)
            (root / "usr/bin/dash").rename(root / "usr/bin/sh")
        made.append(folder / f"{name}.sif")
        subprocess.run([program, "build", str(made[-1]), str(root)], check=True, capture_output=True)
    found = f"export PATH={Path(program).parent}:$PATH APPTAINER_USERNS=1"
    return Images(f"{found} APPTAINER_BIND={bound}", found, made[0], made[1])

"""Tests that the repository names no path of the machine on which it was written, and has no large or built file."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from house_sources import ROOT

# Folders that exist on most machines: to mention them reveals nothing.
_EVERYWHERE = {"/", "/tmp", "/var/tmp", "/home", "/root", "/opt", "/srv", "/mnt", "/usr/src", "/src", "/workspace"}


def tracked() -> list[Path]:
    """Return the files that are in git or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this is no git checkout")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_the_machine_it_was_built_on() -> None:
    places = {str(ROOT), str(ROOT.parent), str(Path.home())} - _EVERYWHERE
    known = "|".join(re.escape(place) for place in sorted(places, key=len, reverse=True))
    path = re.compile(rf"(?<![\w.])(?:(?:{known})/|/(?:home|Users)/(?!you\b|user\b)\w+/)".encode())
    named = [
        f"{file.relative_to(ROOT)}: {hit[0].decode()}" for file in tracked() if (hit := path.search(file.read_bytes()))
    ]
    assert not named, "\n".join(named)


def test_nothing_large_or_built_is_tracked() -> None:
    large = {str(file.relative_to(ROOT)): file.stat().st_size for file in tracked() if file.stat().st_size > 2_000_000}
    built = [str(file.relative_to(ROOT)) for file in tracked() if file.suffix in (".pyc", ".so", ".pt", ".pkl", ".bin")]
    assert (large, built) == ({}, [])

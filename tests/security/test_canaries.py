"""Tests that a key in the environment reaches no file, no output and no process of the instance."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpurun.providers.processes import processes_of

CANARIES = {
    "RUNPOD_API_KEY": "rpa_CANARY0000000000000000000000000001",
    "LAMBDA_API_KEY": "secret_CANARY_lambda_00000000000002",
    "AWS_SECRET_ACCESS_KEY": "CANARYaws/0000000000000000000000000003",
    "HF_TOKEN": "hf_CANARY0000000000000000000000000004",
}
GPURUN = [sys.executable, "-m", "gpurun.cli.app"]


def tainted(content: bytes) -> list[str]:
    return [name for name, value in CANARIES.items() if value.encode() in content]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--set", "steps=400"], ["--set", "lr=1e30", "--set", "grad_clip=0"]], ids=["works", "fails"]
)
def test_no_key_leaves_the_environment(own_home: Path, more: list[str]) -> None:
    environment = {**os.environ, **CANARIES}
    command = [*GPURUN, "train", "mini-gpt", "--provider", "local", "--yes", "-v", "--name", "fox-41", *more]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seen = b""
    while child.poll() is None:
        for token in os.listdir(own_home / "instances") if (own_home / "instances").is_dir() else []:
            for pid in processes_of(token):
                seen += environ_and_command_of(pid)
        time.sleep(0.05)
    out, err = child.communicate()
    assert seen, "no process of the instance was ever looked into"
    assert tainted(seen) == []
    assert tainted(out + err) == []
    for path in own_home.rglob("*"):
        if path.is_file():
            assert tainted(path.read_bytes()) == [], path
    audited = subprocess.run([*GPURUN, "audit", "--json"], env=environment, capture_output=True)
    assert tainted(audited.stdout + audited.stderr) == []


def environ_and_command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # The process ended after it was listed.

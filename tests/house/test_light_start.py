"""Tests that the command line starts fast: it loads nothing heavy, and its help costs little more than Typer alone."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from house_sources import ROOT

HEAVY = ("torch", "boto3", "botocore", "runpod", "paramiko", "trainer", "numpy", "pydantic", "rich", "cryptography")
NOT_FOR_A_PLAN = ("gpurun.remote", "gpurun.ledger.write_receipt", "cryptography", "urllib.request", "torch", "boto3")
NOT_FOR_A_PLAN += ("gpurun.providers.base", "gpurun.planning.live_offers", "gpurun.planning.history_file")


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = f"import sys, gpurun.cli.app\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_catalogue_plan_loads_no_package_it_does_not_need(tmp_path: Path) -> None:
    """A user runs it many times while choosing an offer, so it should answer quickly."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([name for name in {NOT_FOR_A_PLAN} if name in sys.modules]))\n"
        "sys.argv = ['gpurun', 'plan', 'gpt2-124m', '--max-cost', '25', '--json']\n"
        "sys.modules['keyring'] = None\n"
        "from gpurun.cli.app import main; main()"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "GPURUN_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"


def processor_s(code: str, environment: dict[str, str], *arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True, env=environment, cwd=ROOT)
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - sum(before[:2])


def test_help_costs_little_more_than_typer_alone(tmp_path: Path) -> None:
    """The ratio of processor times is 1.4 to 1.5.

    It compares medians of alternating runs with cached bytecode, and a busy machine gets three tries.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    programs = (("import typer",), ("from gpurun.cli.app import main; main()", "--help"))
    for code, *arguments in programs:
        processor_s(code, environment, *arguments)
    ratios = []
    for _ in range(3):
        rounds = [[processor_s(code, environment, *arguments) for code, *arguments in programs] for _ in range(7)]
        typer, ours = (statistics.median(times) for times in zip(*rounds, strict=True))
        ratios.append(ours / typer)
        if ratios[-1] <= 1.75:
            return
    pytest.fail(f"gpurun --help costs {min(ratios):.2f} times as much as importing typer")

"""Tests of the frozen list of environment variables that gpurun reads or sets; a new one is a new promise."""

from __future__ import annotations

import ast
import re

from house_sources import sources

from gpurun.core.credentials import VARIABLES
from gpurun.core.settings import DEFAULTS
from gpurun.providers.registry import OVERRIDES

ENVIRONMENT = """
    GPURUN_HOME GPURUN_RECIPE GPURUN_MAX_COST GPURUN_PROVIDERS GPURUN_COLOR GPURUN_ON_INTERRUPT GPURUN_UPLINK
    GPURUN_KEEP_GOING
    GPURUN_BUDGET_MONTH GPURUN_NOTIFY_URL GPURUN_NOTIFY_EXEC GPURUN_RECEIPT
    GPURUN_CRASH_AT GPURUN_CRASH_LOG GPURUN_DATA GPURUN_EVENTS GPURUN_GIT_COMMIT GPURUN_INSTANCE
    GPURUN_CHALLENGE GPURUN_SEED GPURUN_MANDATE GPURUN_TRIAL CUDA_VISIBLE_DEVICES
    RUNPOD_API_KEY RUNPOD_API_BASE_URL LAMBDA_API_KEY LAMBDA_API_BASE_URL
    GPURUN_RUN GPURUN_TOKEN GPURUN_DEADLINE GPURUN_LEASE_S GPURUN_API_URL
    PATH TMPDIR WANDB_API_KEY WANDB_MODE WANDB_PROJECT
    XDG_DATA_HOME HF_ENDPOINT NO_COLOR SHELL SLURM_JOB_ID TERM COLUMNS LINES LC_ALL LC_CTYPE LANG
"""


def variables_read(tree: ast.Module) -> set[str]:
    """Return the constant names in `environ[...]`, `.get(...)`, `.pop(...)`, `getenv(...)` and `... in environ`."""
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=place, slice=key) if ast.unparse(place).endswith(("environ", "environment")):
                keys.append(key)
            case ast.Call(func=ast.Attribute(value=place, attr="get" | "pop"), args=[key, *_]) if ast.unparse(
                place
            ).endswith(("environ", "environment")):
                keys.append(key)
            case ast.Call(func=function, args=[key, *_]) if ast.unparse(function).endswith("getenv"):
                keys.append(key)
            case ast.Compare(left=key, comparators=[place]) if ast.unparse(place).endswith(("environ", "environment")):
                keys.append(key)
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def test_environment_variables() -> None:
    """The list has the variables that gpurun reads, those of its providers, and every GPURUN_ name in its strings."""
    ours = re.compile(r"GPURUN_[A-Z_]+")
    read = {f"GPURUN_{key.upper().replace('.', '_')}" for key in DEFAULTS} | {*VARIABLES.values(), *OVERRIDES.values()}
    for source in sources("gpurun"):
        constants = [node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant)]
        read |= variables_read(source.tree) | {c for c in constants if isinstance(c, str) and ours.fullmatch(c)}
    assert sorted(read) == sorted(ENVIRONMENT.split())

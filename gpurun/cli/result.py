"""Defines the result that a command returns instead of printing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpurun.core.errors import ExitCode, GpurunError


@dataclass(frozen=True)
class Result:
    """Data for programs, text for people, errors, and the exit code.

    `text` is printed on standard output; `after`, usually the next command to type, is printed last on standard error.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    after: str = ""
    exit_code: ExitCode = ExitCode.DONE
    errors: tuple[GpurunError, ...] = ()

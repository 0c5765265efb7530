"""Define what a verb returns instead of printing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpurun.core.errors import ExitCode, GpurunError


@dataclass(frozen=True)
class Result:
    """Data for programs, text for people, and how the process ends.

    `text` goes to standard output as it is; `after` goes to standard error, last of all (the next command to type).
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    after: str = ""
    exit_code: ExitCode = ExitCode.DONE
    errors: tuple[GpurunError, ...] = ()

"""gpurun rents a GPU under a hard dollar cap, trains, and proves that the machine is gone."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "load_run", "runs"]


def __getattr__(name: str) -> Any:
    """What a notebook asks for is loaded when it is asked for: `import gpurun` alone stays light."""
    if name in __all__:
        from gpurun.readers import loaded_run

        return getattr(loaded_run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Where trainer, recipes and the pages of docs/ lie: at the root of a checkout, or inside the installed package."""

from __future__ import annotations

from pathlib import Path

import gpurun
from gpurun.core.errors import SetupError


def bundle_root() -> Path:
    """The folder that holds `trainer/` and `recipes/`; a SetupError when this installation has neither."""
    package = Path(gpurun.__file__).resolve().parent
    for root in (package / "_bundle", package.parent):
        if (root / "trainer" / "__init__.py").is_file() and (root / "recipes").is_dir():
            return root
    raise SetupError(
        "install.incomplete",
        f"The trainer and the recipes are missing beside {package}.",
        hint="Install gpurun again: pip install --force-reinstall gpurun",
    )


def page(name: str) -> Path:
    """A page of docs/, where a person who has no checkout can open it, too."""
    return bundle_root() / "docs" / name

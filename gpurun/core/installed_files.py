"""Finds trainer, recipes and the pages of docs/: at the root of a checkout, or inside the installed package.

`from gpurun.core.installed_files import recipe` imports the module `trainer.recipe`. gpurun imports modules of the
trainer only through this module, and only those that need no torch (SHARED).
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import gpurun
from gpurun.core.errors import SetupError

if TYPE_CHECKING:
    from trainer import cards as cards
    from trainer import errors as errors
    from trainer import items as items
    from trainer import pair_tokenizer as pair_tokenizer
    from trainer import recipe as recipe
    from trainer import recipe_file as recipe_file
    from trainer import recipe_rules as recipe_rules
    from trainer import shards as shards
    from trainer import tokenizer as tokenizer

SHARED = ("cards", "errors", "items", "pair_tokenizer", "recipe", "recipe_file", "recipe_rules", "shards", "tokenizer")
"""The trainer's modules that gpurun uses: they need at most numpy, tiktoken and one another."""


def bundle_root() -> Path:
    """Return the folder with `trainer/` and `recipes/`; SetupError if this installation has neither."""
    package = Path(gpurun.__file__).resolve().parent
    for root in (package / "_bundle", package.parent):
        if (root / "trainer" / "__init__.py").is_file() and (root / "recipes").is_dir():
            return root
    raise SetupError(
        "install.incomplete",
        f"The trainer and the recipes are missing beside {package}.",
        hint="Install gpurun again, from the clone: pip install --force-reinstall .",
    )


def has_other_gpurun() -> bool:
    """Return whether the unrelated package `gpurun` from the package index is installed in this environment too."""
    return any(
        (place / "METADATA").is_file() for path in sys.path for place in Path(path or ".").glob("gpurun-*.dist-info")
    )


def broken_installation(fault: ImportError) -> SetupError:
    """Return why a part of this installation cannot be imported, and how to repair it."""
    if has_other_gpurun():
        what = f"Another package that is called gpurun is installed here and shares this one's files: {fault}."
        hint = "pip uninstall gpurun gpurun-cap; then install gpurun-cap alone, from the clone: pip install ."
        return SetupError("install.other_gpurun", what, hint=hint)
    what = f"A package that gpurun needs is missing or broken: {fault}."
    return SetupError("install.incomplete", what, hint="Install gpurun again, from the clone: pip install .")


def install_line(extra: str) -> str:
    """Return the command that adds an extra to this installation: an editable one, or one by pipx, uv or pip."""
    package, prefix = Path(gpurun.__file__).resolve().parent, Path(sys.prefix)
    if (package.parent / "pyproject.toml").is_file():
        return f"pip install -e '{package.parent}[{extra}]'"
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx runpip gpurun-cap install 'gpurun-cap[{extra}]'"
    if (prefix / "uv-receipt.toml").is_file():
        return f"uv pip install --python '{sys.executable}' 'gpurun-cap[{extra}]'"
    return f"pip install 'gpurun-cap[{extra}]'"


def page(name: str) -> Path:
    """Return the path of a page of docs/, in the checkout or in the installed package."""
    return bundle_root() / "docs" / name


def _load_trainer_module(name: str) -> ModuleType:
    """Return a module of SHARED from this installation's trainer, even if the import path has another `trainer`."""
    if name not in SHARED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "trainer" not in sys.modules:
        place = bundle_root() / "trainer"
        spec = spec_from_file_location("trainer", place / "__init__.py", submodule_search_locations=[str(place)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules["trainer"] = package = module_from_spec(spec)
        spec.loader.exec_module(package)
    return import_module(f"trainer.{name}")


if not TYPE_CHECKING:
    __getattr__ = _load_trainer_module

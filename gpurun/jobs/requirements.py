"""Finds the packages that a job needs in addition to torch and numpy, and installs those that a machine lacks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.core.paths import read_regular
from gpurun.core.run_plan import Choices
from gpurun.core.secrets import child_environment
from gpurun.jobs.training.recipe import RecipeTables

__all__ = [
    "HUGGINGFACE_PACKAGES",
    "LEAST_TORCH",
    "PIP_MARK",
    "add_required_packages",
    "choose_setup_limit_s",
    "distributions",
    "provided_by",
    "requirement_lines",
    "with_pip",
    "with_pip_if_it_can",
]

LEAST_TORCH = "2.8"
"""The oldest torch that the trainer supports."""
SETUP_LIMIT_S = 600
"""The default time limit of a set-up script."""
HUGGINGFACE_PACKAGES = ("accelerate", "transformers")
# Pinned versions and wheel digests of these packages, and of their dependencies other than torch and numpy.
_PINS = Path(__file__).with_name("huggingface_pins.txt").read_text(encoding="ascii")
_IS_PINNED_FOR = """
import platform, sys
here = platform.system(), platform.machine()
if not ((3, 10) <= sys.version_info[:2] <= (3, 13) and here in (("Linux", "x86_64"), ("Linux", "aarch64"))):
    words = "Python %s on %s %s" % (platform.python_version(), here[0], here[1])
    sys.exit("gpurun pins accelerate and transformers for Python 3.10 to 3.13 on Linux (x86_64, aarch64), and "
             "here is " + words + ": take an --image that has them, or install them by --setup FILE.")
"""
HUGGINGFACE_SETUP = f"""\
# The Hugging Face Trainer, for the Python that has torch; torch itself stays as it is.
for python in /opt/pytorch/bin/python python3; do
    if "$python" -c 'import torch' 2>/dev/null; then
        "$python" -c '{_IS_PINNED_FOR}' || exit 1
        export PIP_BREAK_SYSTEM_PACKAGES=1
        exec "$python" -m pip install -q --no-input --no-deps --only-binary :all: --require-hashes \\
            -r /dev/stdin <<'END_OF_PINS'
{_PINS}END_OF_PINS
    fi
done
echo 'no Python here imports torch' >&2
exit 1
"""


PIP_MARK = "gpurun --pip:"
"""The beginning of each log line about the installation of --pip packages during set-up."""
# Packages are installed for the Python that runs the command: the first Python that has torch, else the last.
_PIP = """\
export PIP_BREAK_SYSTEM_PACKAGES=1
for python in {pythons}; do
    if "$python" -c 'import torch' 2>/dev/null; then break; fi
done
cat > requirements.gpurun.txt <<'END_OF_REQUIREMENTS'
{requirements}
END_OF_REQUIREMENTS
echo "{mark} for $python" >&2
if "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m pip install -q --no-input -r requirements.gpurun.txt
elif command -v uv >/dev/null; then
    uv pip install -q --break-system-packages --python "$(command -v "$python")" -r requirements.gpurun.txt
elif "$python" -m ensurepip --user >/dev/null 2>&1; then
    "$python" -m pip install -q --no-input -r requirements.gpurun.txt
else
    echo "{mark} $python has neither pip nor ensurepip, and there is no uv" >&2
    false
fi || {{ code=$?; echo "{mark} not installed" >&2; exit $code; }}
"""
_LOOK = """
import importlib.metadata, importlib.util, json, sys
by = importlib.metadata.packages_distributions()
print(json.dumps({n: by.get(n, []) for n in sys.argv[1:] if importlib.util.find_spec(n) is not None}))
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OTHER_NAMES = {
    "cv2": "opencv-python-headless", "sklearn": "scikit-learn", "skimage": "scikit-image", "PIL": "pillow",
    "yaml": "pyyaml", "dotenv": "python-dotenv", "bs4": "beautifulsoup4", "git": "gitpython",
}  # fmt: skip


def requirement_lines(requirement: str) -> list[str]:
    """Return the lines of a requirements file, or the requirement itself. Raise UsageError for an unreadable file."""
    if not requirement.endswith(".txt"):
        return [requirement]
    try:
        return read_regular(Path(requirement).expanduser()).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        raise UsageError("run.pip", f"--pip {requirement} cannot be read.", hint="Check its path.") from None


def with_pip(choices: Choices, lines: Sequence[str], python: str = "") -> Choices:
    """Return the choices with a set-up script that also installs the --pip requirements, after --setup."""
    if not lines:
        return choices
    pythons = python or "/opt/pytorch/bin/python python3"
    script = _PIP.format(pythons=pythons, requirements="\n".join(lines), mark=PIP_MARK)
    return choices.model_copy(update={"setup": f"{choices.setup.rstrip()}\n{script}" if choices.setup else script})


def with_pip_if_it_can(choices: Choices, lines: Sequence[str], python: str = "") -> Choices:
    """Return the choices with optional packages to install after --setup. If that fails, the job runs without them."""
    script = with_pip(Choices(), lines, python).setup
    script = f"(\n{script}) || echo '{PIP_MARK} {' '.join(lines)} could not be installed: it is done without' >&2\n"
    return choices.model_copy(update={"setup": f"{choices.setup.rstrip()}\n{script}" if choices.setup else script})


def distributions(modules: Iterable[str], python: str = sys.executable) -> dict[str, list[str]]:
    """Return the modules that a local Python can import, each with the distributions that provide it."""
    names = [name for name in modules if name.isidentifier()]
    if python == sys.executable:
        by = packages_distributions()
        return {name: list(by.get(name, [])) for name in names if find_spec(name) is not None}
    command = [python, "-I", "-c", _LOOK, *names]
    done = subprocess.run(command, env=child_environment(), capture_output=True, timeout=60, check=False)
    found: dict[str, list[str]] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def provided_by(module: str, lines: Iterable[str]) -> bool:
    """Return whether a --pip line names the module, or a distribution that provides it on this computer."""
    listed = {_normalize_name(found[0]) for line in lines if (found := _NAME.match(line.strip()))}
    return bool(listed & {_normalize_name(name) for name in (module, *packages_distributions().get(module, []))})


def distribution_of(module: str) -> str:
    """Return the name that pip probably uses for the distribution that provides a module."""
    return next(iter(packages_distributions().get(module, [])), _OTHER_NAMES.get(module, module))


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def add_required_packages(
    recipe: RecipeTables, choices: Choices, *, is_outfitted: bool
) -> tuple[Choices, tuple[str, ...]]:
    """Return the choices with the packages that the recipe needs, and notes about them for the plan.

    The user's own image or set-up script is kept, and a note states what it must provide. The default images of
    providers lack the Hugging Face libraries. If `is_outfitted` is false (the user's own machine), nothing is installed
    automatically. Nothing can be installed in the image of a cluster's job.
    """
    if recipe.train.loop != "huggingface":
        return choices, ()
    choices, words = _add_huggingface_setup(choices, is_outfitted=is_outfitted)
    return choices, (words,)


def choose_setup_limit_s(recipe: RecipeTables, choices: Choices, *, is_outfitted: bool) -> int:
    """Return the time limit, in seconds, of the script that runs before the upload; 0 if there is no script."""
    runs = choices.setup or (is_outfitted and recipe.train.loop == "huggingface")
    return (choices.setup_limit_s or SETUP_LIMIT_S) if runs else 0


def _add_huggingface_setup(choices: Choices, *, is_outfitted: bool) -> tuple[Choices, str]:
    need = 'train.loop "huggingface" needs transformers and accelerate'
    if choices.setup:
        return choices, f"{need}: your --setup script or image must provide them."
    if not is_outfitted:
        return choices, f"{need}: the machine must have them already, or --setup must install them."
    script = choices.model_copy(update={"setup": HUGGINGFACE_SETUP})
    return script, f"{need}, which the image lacks: pip installs them during set-up, within the set-up's time limit."

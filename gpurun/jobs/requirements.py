"""What a recipe needs on the machine beside torch 2.8 and numpy, and how a machine whose image lacks it comes to it."""

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
    "choose_setup_limit_s",
    "distributions",
    "outfitted",
    "provided_by",
    "requirement_lines",
    "with_pip",
    "with_pip_if_it_can",
]

LEAST_TORCH = "2.8"
"""The first torch that the trainer runs on."""
SETUP_LIMIT_S = 600
"""How long a script that sets the machine up may take where nobody says it."""
HUGGINGFACE_PACKAGES = ("accelerate", "transformers")
# Every version of theirs, and of what they need beside torch and numpy, with the digests of its wheels.
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
"""How the lines begin by which a set-up's log shows that --pip was at work."""
# pip is that of the Python which the command runs on: the one with torch, where there is one.
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


def requirement_lines(wanted: str) -> list[str]:
    """Return the requirements of a file, or the one that is named; UsageError where the file cannot be read."""
    if not wanted.endswith(".txt"):
        return [wanted]
    try:
        return read_regular(Path(wanted).expanduser()).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        raise UsageError("run.pip", f"--pip {wanted} cannot be read.", hint="Check its path.") from None


def with_pip(choices: Choices, lines: Sequence[str], python: str = "") -> Choices:
    """Return the choices with what --pip wants installed after --setup, for the Python that has torch."""
    if not lines:
        return choices
    pythons = python or "/opt/pytorch/bin/python python3"
    script = _PIP.format(pythons=pythons, requirements="\n".join(lines), mark=PIP_MARK)
    return choices.model_copy(update={"setup": f"{choices.setup.rstrip()}\n{script}" if choices.setup else script})


def with_pip_if_it_can(choices: Choices, lines: Sequence[str], python: str = "") -> Choices:
    """Return the choices with what is installed after --setup for what does without it: a failure is only said."""
    script = with_pip(Choices(), lines, python).setup
    script = f"(\n{script}) || echo '{PIP_MARK} {' '.join(lines)} could not be installed: it is done without' >&2\n"
    return choices.model_copy(update={"setup": f"{choices.setup.rstrip()}\n{script}" if choices.setup else script})


def distributions(modules: Iterable[str], python: str = sys.executable) -> dict[str, list[str]]:
    """Return those of the top-level modules that a Python here can import, with the distributions that have them."""
    names = [name for name in modules if name.isidentifier()]
    if python == sys.executable:
        by = packages_distributions()
        return {name: list(by.get(name, [])) for name in names if find_spec(name) is not None}
    command = [python, "-I", "-c", _LOOK, *names]
    done = subprocess.run(command, env=child_environment(), capture_output=True, timeout=60, check=False)
    found: dict[str, list[str]] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def provided_by(module: str, lines: Iterable[str]) -> bool:
    """Return whether a line of --pip certainly brings a module: it has its name, or its distribution's name here."""
    wanted = {_plain(found[0]) for line in lines if (found := _NAME.match(line.strip()))}
    return bool(wanted & {_plain(name) for name in (module, *packages_distributions().get(module, []))})


def distribution_of(module: str) -> str:
    """Return what pip probably calls the distribution that has a module."""
    return next(iter(packages_distributions().get(module, [])), _OTHER_NAMES.get(module, module))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def outfitted(recipe: RecipeTables, choices: Choices, *, is_outfitted: bool) -> tuple[Choices, tuple[str, ...]]:
    """The choices with which a provider's machine has what the recipe needs, and what should be said about that.

    What the user chose stands: an image or a script of the user's own is only told what it must bring. No image that a
    provider boots by itself is known to have the Hugging Face libraries. On a machine that is not `is_outfitted`, a box
    of the user's, nothing is put unasked, and in an image of a cluster's job nothing can be.
    """
    if recipe.train.loop != "huggingface":
        return choices, ()
    choices, words = _with_huggingface(choices, is_outfitted=is_outfitted)
    return choices, (words,)


def choose_setup_limit_s(recipe: RecipeTables, choices: Choices, *, is_outfitted: bool) -> int:
    """How long the script may take that runs on the machine before anything is sent; 0 where there is none."""
    runs = choices.setup or (is_outfitted and recipe.train.loop == "huggingface")
    return (choices.setup_limit_s or SETUP_LIMIT_S) if runs else 0


def _with_huggingface(choices: Choices, *, is_outfitted: bool) -> tuple[Choices, str]:
    need = 'train.loop "huggingface" needs transformers and accelerate'
    if choices.setup:
        return choices, f"{need}: the script of --setup, or the image, must bring them."
    if not is_outfitted:
        return choices, f"{need}: the machine must have them already, or get them from --setup."
    script = choices.model_copy(update={"setup": HUGGINGFACE_SETUP})
    return script, f"{need}, which the image has not: pip installs them there first, in a time of its own."

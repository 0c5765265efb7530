"""Set up `.venv` with PyTorch and gpurun and, without the argument `demo`, what the tests need. Standard library only.

It does nothing if `.venv` is up to date, so a second `make demo` or `make test` needs no network. It never
downloads gigabytes of CUDA for a machine without an NVIDIA GPU: there it installs PyTorch's CPU build. If something is
missing, one sentence names it, with the command that installs it.
"""

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "ready"
PIP = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
OS_RELEASE = Path("/etc/os-release")
NEWER = (
    "python3.13",
    "python3.12",
    "python3.11",
    "python3.14",
)  # The version for which most packages have wheels comes first.
BRINGS = {  # On Debian and Ubuntu, on Fedora and its relatives, on macOS.
    "python3.12": ("sudo apt install python3.12-venv", "sudo dnf install python3.12", "brew install python@3.12"),
    "python3-venv": ("sudo apt install python3-venv", "sudo dnf install python3", "brew install python@3.12"),
    "git": ("sudo apt install git", "sudo dnf install git", "xcode-select --install"),
    "c++": ("sudo apt install g++", "sudo dnf install gcc-c++", "xcode-select --install"),
}
NEED_BYTES = {True: 3 * 10**9 // 2, False: 4 * 10**9}  # For the demo; for everything.


def stop(what: str, hint: str) -> None:
    """Exit with a sentence about what happened, and what to do."""
    sys.exit(f"✗ {what}\n  {hint}")


def what_brings(*missing: str) -> str:
    """Return the commands that install what is missing on this system, or only the names if the system is unknown."""
    release = OS_RELEASE.read_text() if OS_RELEASE.exists() else ""
    column = 2 if sys.platform == "darwin" else 0 if "debian" in release else 1 if "fedora" in release else None
    if column is None:
        return f"Install {' and '.join(missing)}"
    return " && ".join(dict.fromkeys(BRINGS[name][column] for name in missing))


def check_machine(demo: bool) -> None:
    """Refuse what cannot work before anything is written, with what is missing and the command that installs it."""
    make = f"make {'demo' if demo else 'test'}"
    if sys.version_info < (3, 11):
        newer = next((name for name in NEWER if shutil.which(name)), None)
        first = "" if newer else f"{what_brings('python3.12')}, then: "
        what = f"gpurun needs Python 3.11; this is {sys.version.split()[0]}."
        stop(what, f"{first}{make} PYTHON={newer or 'python3.12'}")
    missing = [] if importlib.util.find_spec("ensurepip") else ["python3-venv"]  # Debian has a separate package for it.
    if not demo:
        missing += [name for name in ("git", "c++") if shutil.which(name) is None]
    if missing:
        stop(f"{' and '.join(missing)} missing here.", f"{what_brings(*missing)}, then: {make}")
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        stop(
            "PyTorch has no build for Macs with an Intel processor since version 2.2, and gpurun trains here with 2.8.",
            "Everything except training on this computer works: python3 -m venv .venv && .venv/bin/pip install .",
        )
    free = shutil.disk_usage(ROOT).free
    if free < NEED_BYTES[demo] and not VENV.exists():
        stop(f"Only {free / 1e9:.1f} GB are free here.", f"Make room for about {NEED_BYTES[demo] / 1e9:g} GB first.")


def wanted(demo: bool) -> str:
    """Return a digest of everything that decides what is installed."""
    parts = [
        "demo" if demo else "all",
        sys.version,
        *((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def pip(*arguments: str) -> None:
    """Run pip, or exit with a message that it failed."""
    if subprocess.run([*PIP, "install", "-q", *arguments], cwd=ROOT).returncode:
        stop("pip could not install what gpurun needs.", "Read its last lines above: no network, a full disk, a proxy?")


def would_bring_cuda() -> bool:
    """Return whether plain `pip install torch` would download CUDA libraries, judged by a dry run without downloads."""
    command = [*PIP, "install", "-q", "--dry-run", "--report", "-", "-c", "constraints.txt", "torch"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if answer.returncode:
        return False  # The real install will fail too, and print why.
    names = [item["metadata"]["name"] for item in json.loads(answer.stdout)["install"]]
    return any(name.startswith(("nvidia-", "cuda-")) for name in names)


def has_gpu() -> bool:
    """Return whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def main() -> None:
    """Bring `.venv` up to date. A `.venv` for the tests has everything that the demo needs."""
    demo = sys.argv[1:] == ["demo"]
    if STAMP.exists() and STAMP.read_text() in {wanted(demo), wanted(demo=False)}:
        return
    check_machine(demo)
    size = "0.3 GB to download, 1 GB here, most of it PyTorch" if demo else "1 GB to download, 2.3 GB here"
    print(f"Setting up .venv (once; {size}; a minute or two) …", flush=True)
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode:
        stop("The virtual environment could not be made.", "Read the lines above.")
    pip("--upgrade", "pip")
    cuda = os.environ.get("GPURUN_TORCH") == "cuda" or has_gpu()
    torch = ["--no-compile", "-c", "constraints.txt", "torch", "numpy"]
    if not cuda and would_bring_cuda():
        pip("--index-url", CPU_BUILDS, *torch)
    else:
        pip(*torch)
    pip("--no-compile", "-c", "constraints.txt", "-e", ".[report]" if demo else ".[local,dev]")
    STAMP.write_text(wanted(demo))
    print("Ready. To type gpurun by its name: . .venv/bin/activate", flush=True)


if __name__ == "__main__":
    main()

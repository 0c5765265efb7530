"""Sets up `.venv` with PyTorch and gpurun, and what its tests need unless `demo` is said. Standard library only.

It does nothing when `.venv` is up to date, so that a second `make demo` or `make test` needs no network. It never
fetches gigabytes of CUDA for a machine without an NVIDIA GPU: there it asks for PyTorch's CPU build. What is missing is
said in one sentence, with the command that mends it.
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
)  # The one that most packages have wheels for comes first.
BRINGS = {  # On Debian and Ubuntu, on Fedora and its kin, on macOS.
    "python3.12": ("sudo apt install python3.12-venv", "sudo dnf install python3.12", "brew install python@3.12"),
    "python3-venv": ("sudo apt install python3-venv", "sudo dnf install python3", "brew install python@3.12"),
    "git": ("sudo apt install git", "sudo dnf install git", "xcode-select --install"),
    "c++": ("sudo apt install g++", "sudo dnf install gcc-c++", "xcode-select --install"),
}
NEED_BYTES = {True: 3 * 10**9 // 2, False: 4 * 10**9}  # For the demo; for all.


def stop(what: str, hint: str) -> None:
    """End with a sentence and what to do."""
    sys.exit(f"✗ {what}\n  {hint}")


def what_brings(*missing: str) -> str:
    """The commands of this system that bring what is missing; the names alone where it is not known."""
    told = OS_RELEASE.read_text() if OS_RELEASE.exists() else ""
    column = 2 if sys.platform == "darwin" else 0 if "debian" in told else 1 if "fedora" in told else None
    if column is None:
        return f"Install {' and '.join(missing)}"
    return " && ".join(dict.fromkeys(BRINGS[name][column] for name in missing))


def check_machine(demo: bool) -> None:
    """Refuse what cannot work before anything is written: what is missing in one line, what brings it in another."""
    make = f"make {'demo' if demo else 'test'}"
    if sys.version_info < (3, 11):
        newer = next((name for name in NEWER if shutil.which(name)), None)
        first = "" if newer else f"{what_brings('python3.12')}, then: "
        what = f"gpurun needs Python 3.11; this is {sys.version.split()[0]}."
        stop(what, f"{first}{make} PYTHON={newer or 'python3.12'}")
    missing = [] if importlib.util.find_spec("ensurepip") else ["python3-venv"]  # Debian packs it apart from python3.
    if not demo:
        missing += [name for name in ("git", "c++") if shutil.which(name) is None]
    if missing:
        stop(f"{' and '.join(missing)} missing here.", f"{what_brings(*missing)}, then: {make}")
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        stop(
            "PyTorch has no build for Macs with an Intel processor since version 2.2, and gpurun trains here with 2.8.",
            "Without training here, all else works: python3 -m venv .venv && .venv/bin/pip install .",
        )
    free = shutil.disk_usage(ROOT).free
    if free < NEED_BYTES[demo] and not VENV.exists():
        stop(f"Only {free / 1e9:.1f} GB are free here.", f"Make room for about {NEED_BYTES[demo] / 1e9:g} GB first.")


def wanted(demo: bool) -> str:
    """A digest of all that decides what is installed."""
    parts = [
        "demo" if demo else "all",
        sys.version,
        *((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def pip(*arguments: str) -> None:
    """Run pip, or say that it failed."""
    if subprocess.run([*PIP, "install", "-q", *arguments], cwd=ROOT).returncode:
        stop("pip could not install what gpurun needs.", "Read its last lines above: no network, a full disk, a proxy?")


def would_bring_cuda() -> bool:
    """Whether plain `pip install torch` would fetch CUDA libraries, judged by a dry run that downloads no wheel."""
    command = [*PIP, "install", "-q", "--dry-run", "--report", "-", "-c", "constraints.txt", "torch"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if answer.returncode:
        return False  # The real install will fail too, and say why.
    names = [item["metadata"]["name"] for item in json.loads(answer.stdout)["install"]]
    return any(name.startswith(("nvidia-", "cuda-")) for name in names)


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def main() -> None:
    """Bring `.venv` up to date; one that has all has what the demo needs."""
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

"""Sets up `.venv` with PyTorch and gpurun, and what its tests need unless `demo` is said. Standard library only.

It does nothing when `.venv` is up to date, so that a second `make demo` or `make test` needs no network. It never
fetches gigabytes of CUDA for a machine without an NVIDIA GPU: there it asks for PyTorch's CPU build. What is missing is
said in one sentence, with the command that mends it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "ready"
PIP = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
NEED_BYTES = {True: 3 * 10**9 // 2, False: 4 * 10**9}  # For the demo; for all.


def stop(what: str, hint: str) -> None:
    """End with a sentence and what to do."""
    sys.exit(f"✗ {what}\n  {hint}")


def check_machine(demo: bool) -> None:
    """Refuse what cannot work before anything is written."""
    if sys.version_info < (3, 11):
        stop(
            f"gpurun needs Python 3.11; this is {sys.version.split()[0]}.",
            "Name a newer one: make venv PYTHON=python3.12",
        )
    try:
        import ensurepip  # noqa: F401 - Debian packs it apart from python3.
    except ImportError:
        stop("This Python cannot make virtual environments.", "On Debian or Ubuntu: sudo apt install python3-venv")
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
    pip("--no-compile", "-c", "constraints.txt", "-e", "." if demo else ".[local,dev]")
    STAMP.write_text(wanted(demo))
    print("Ready. To type gpurun by its name: . .venv/bin/activate", flush=True)


if __name__ == "__main__":
    main()

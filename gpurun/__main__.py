"""The command, by its name or as `python -m gpurun`: small, so that a Ctrl-C is kept while the rest is being read."""

from __future__ import annotations

import gc
import signal
import sys

NOT_HERE = (
    "gpurun runs on Linux and macOS. On Windows use WSL2: `wsl --install`, then in Ubuntu what docs/INSTALL.md says."
)


def main() -> None:
    """Run the command line; a Ctrl-C that comes first is answered by the verb, in a sentence or an envelope."""
    if sys.platform == "win32":
        sys.stderr.write(f"✗ {NOT_HERE}\n")
        sys.exit(4)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Half of a short command's time is its imports.
    gc.set_threshold(100_000, 20, 20)  # Starting makes many objects and hardly any garbage.
    from gpurun.cli.app import main as run

    run()


if __name__ == "__main__":
    main()

"""Run the emulator alone, for use by hand: it prints how to point gpurun at it, and ends with Ctrl-C.

python -m tests.emulators.runpod [--fake]      (--fake: pods that are nothing but an address)
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.emulators.runpod import FULL_KEY, FakeGuest, RunPodEmulator, real_guest
from tests.emulators.runpod.guest import Boot


def main() -> None:
    with TemporaryDirectory() as folder:
        boot = FakeGuest if "--fake" in sys.argv[1:] else real_guest(Path(folder))
        serve(boot)


def serve(boot: Boot) -> None:
    with RunPodEmulator(boot=boot) as emulator:
        print(f"export RUNPOD_API_BASE_URL={emulator.base_url} RUNPOD_API_KEY={FULL_KEY}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()

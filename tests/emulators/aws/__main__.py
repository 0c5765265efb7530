"""Run the emulator alone, for use by hand: it prints how to point gpurun at it, and ends with Ctrl-C.

python -m tests.emulators.aws [--fake]      (--fake: instances that are nothing but an address)
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.emulators.aws import AwsEmulator, FakeGuest, real_guest


def main() -> None:
    with TemporaryDirectory() as folder:
        boot = FakeGuest if "--fake" in sys.argv[1:] else real_guest(Path(folder))
        with AwsEmulator(boot=boot) as emulator:
            words = " ".join(f"{name}={value}" for name, value in emulator.environment.items())
            print(f"export {words}", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()

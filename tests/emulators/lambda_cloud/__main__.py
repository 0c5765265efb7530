"""Run the emulator alone, for use by hand: it prints how to point gpurun at it, and ends with Ctrl-C.

python -m tests.emulators.lambda_cloud [--fake]      (--fake: machines that are nothing but an address)
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.emulators.lambda_cloud import KEY, FakeGuest, LambdaEmulator, real_guest
from tests.emulators.lambda_cloud.guest import Boot


def main() -> None:
    with TemporaryDirectory() as folder:
        boot = FakeGuest if "--fake" in sys.argv[1:] else real_guest(Path(folder))
        serve(boot)


def serve(boot: Boot) -> None:
    with LambdaEmulator(boot=boot) as emulator:
        print(f"export LAMBDA_API_BASE_URL={emulator.base_url} LAMBDA_API_KEY={KEY}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()

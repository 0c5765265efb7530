"""Run the emulator alone, for use by hand: it prints how to point gpurun at it, and ends with Ctrl-C.

python -m tests.emulators.lambda_cloud [--fake]      (--fake: machines that are only an address)
"""

from __future__ import annotations

from tests.emulators.lambda_cloud import FakeGuest, LambdaEmulator, real_guest
from tests.emulators.serving import serve_by_hand

if __name__ == "__main__":
    serve_by_hand(LambdaEmulator, FakeGuest, real_guest)

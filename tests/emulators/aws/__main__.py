"""Run the emulator alone, for use by hand: it prints how to point gpurun at it, and ends with Ctrl-C.

python -m tests.emulators.aws [--fake]      (--fake: instances that are only an address)
"""

from __future__ import annotations

from tests.emulators.aws import AwsEmulator, FakeGuest, real_guest
from tests.emulators.serving import serve_by_hand

if __name__ == "__main__":
    serve_by_hand(AwsEmulator, FakeGuest, real_guest)

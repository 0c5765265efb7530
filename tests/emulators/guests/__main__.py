"""Boot one guest, print how to log in, and wait: python -m tests.emulators.guests [--pod]."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.emulators.guests import FakeGpu, Guest, missing, whole


def main() -> int:
    """Run one guest until Ctrl-C, or until it ends by itself."""
    if missing():
        print(missing(), file=sys.stderr)
        return 1
    if whole():
        print(f"The guest is a group of processes only: {whole()}.")
    with tempfile.TemporaryDirectory(prefix="guest-") as name:
        folder = Path(name)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        public = (folder / "key.pub").read_text(encoding="ascii")
        gpus = [FakeGpu()]
        if "--pod" in sys.argv[1:]:
            guest = Guest.boot(
                user="root", folder=folder / "guest", entrypoint=["/start.sh"], env={"PUBLIC_KEY": public}, gpus=gpus
            )
        else:
            guest = Guest.boot(user="ubuntu", folder=folder / "guest", authorized_keys=[public], gpus=gpus)
        with guest:
            guest.wait_ready()
            print(guest.log)
            print(f"ssh -i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \\")
            print(f"    -p {guest.port} {guest.user}@{guest.host}")
            print("Ctrl-C ends it.", flush=True)
            try:
                guest.wait_dead(float("inf"))
                print("It has ended by itself.")
            except KeyboardInterrupt:
                print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Real machines for the emulated clouds: each guest has its own files, processes, address, sshd and life.

As root on Linux, a guest is a whole machine: a set of namespaces over an overlay of this computer's root file system.
Elsewhere it is a group of plain processes with a folder for a home (`whole()` returns why).
By hand: python -m tests.emulators.guests

    guest = Guest.boot(user="ubuntu", folder=tmp_path, authorized_keys=[line], user_data="#cloud-config ...")
    guest.wait_ready()          # ssh -p guest.port guest.user@guest.host
    guest.kill()
"""

from __future__ import annotations

from tests.emulators.guests.ability import missing, whole
from tests.emulators.guests.guest import Guest
from tests.emulators.guests.meter import Meter
from tests.emulators.guests.shapes import FakeGpu, Faults, GuestFailed

__all__ = ["FakeGpu", "Faults", "Guest", "GuestFailed", "Meter", "missing", "whole"]

"""A machine over SSH: one kept connection, to the one host key that is expected.

`machine` fills in `Machine`, `shell` has the command lines, `program` feeds and drains one program, and `connection`,
the only room that knows paramiko and is loaded at the first connect, reaches the host.
"""

from gpurun.machine.remote.host_key import HostKeyMismatch
from gpurun.machine.remote.machine import RemoteMachine, scan_host_key

__all__ = ["HostKeyMismatch", "RemoteMachine", "scan_host_key"]

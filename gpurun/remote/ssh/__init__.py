"""A machine over SSH: one connection, which is kept open, and only to the expected host key.

`ssh_machine` implements `Machine`. `program` writes and reads one program's input and output. `connection` connects to
the host. Only `connection` and `transport`, which adapts paramiko, use paramiko, which is loaded at the first
connection.
"""

from gpurun.remote.ssh.host_key import ExpectedKey, HostKeyMismatch, Jump
from gpurun.remote.ssh.ssh_machine import RemoteMachine, scan_host_key

__all__ = ["ExpectedKey", "HostKeyMismatch", "Jump", "RemoteMachine", "scan_host_key"]

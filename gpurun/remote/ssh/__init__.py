"""A machine over SSH: one kept connection, only to the expected host key.

`ssh_machine` implements `Machine`, `program` feeds and drains one program, and `connection` reaches the host: only it
and `transport`, which adapts paramiko, know paramiko, which is loaded at the first connection.
"""

from gpurun.remote.ssh.host_key import ExpectedKey, HostKeyMismatch, Jump
from gpurun.remote.ssh.ssh_machine import RemoteMachine, scan_host_key

__all__ = ["ExpectedKey", "HostKeyMismatch", "Jump", "RemoteMachine", "scan_host_key"]

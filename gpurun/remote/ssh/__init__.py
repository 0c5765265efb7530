"""A machine over SSH: one kept connection, to the one host key that is expected.

`ssh_machine` fills in `Machine`, `program` feeds and drains one program, and `connection` reaches the host: with
`transport`, where paramiko is bent, it alone knows paramiko, which is loaded at the first connect.
"""

from gpurun.remote.ssh.host_key import ExpectedKey, HostKeyMismatch, Jump
from gpurun.remote.ssh.ssh_machine import RemoteMachine, scan_host_key

__all__ = ["ExpectedKey", "HostKeyMismatch", "Jump", "RemoteMachine", "scan_host_key"]

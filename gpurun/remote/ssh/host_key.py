"""The expected host key, and the error if a host shows another one."""

from __future__ import annotations

from dataclasses import dataclass

from gpurun.core.errors import UsageError
from gpurun.core.records import Address
from gpurun.remote.interface import MachineLost
from gpurun.remote.key_pairs import fingerprint

# The signature algorithms of each key type; the preferred type is first.
ALGORITHMS = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}


class HostKeyMismatch(MachineLost):
    """The machine at an address shows another host key than the expected one. Nothing was sent to it.

    The expected machine may still run: the connection from this computer may lead to another machine, for example to a
    firewall that replies to SSH.
    """

    def __init__(self, where: str, expected: str, got: str) -> None:
        super().__init__(
            f"{where} shows the host key {got}, but {expected} is expected. Nothing was sent there.",
            code="ssh.host_key_mismatch",
            hint="Another machine answers at this address, or someone intercepts the connection: do not log in there "
            "by hand. If it is your own box and was reinstalled, give its new key with --host-key.",
        )
        self.expected = expected
        self.got = got


@dataclass(frozen=True)
class ExpectedKey:
    """A host key's fingerprint, and its type if that is known. Then only a key of this type is requested."""

    fingerprint: str
    kind: str | None

    @classmethod
    def parse(cls, text: str) -> ExpectedKey:
        """Parse a public line or a fingerprint. Raise UsageError for anything else."""
        digest = fingerprint(text)
        kind = text.split()[0] if len(text.split()) > 1 else None
        if kind is not None and kind not in ALGORITHMS:
            hint = f"Give its key of another type ({', '.join(ALGORITHMS)}), or that key's SHA256 fingerprint."
            raise UsageError("host_key.unsupported", f"A host key of type {kind!r} cannot be checked.", hint=hint)
        return cls(digest, kind)

    @property
    def offers(self) -> tuple[tuple[str, ...], ...]:
        """Return what to request from a host, one set after another. A host can show only one key for each set."""
        return (ALGORITHMS[self.kind],) if self.kind else tuple(ALGORITHMS.values())


@dataclass(frozen=True)
class Jump:
    """A host on the way to another one (a bastion). It accepts the same login key, and must show this host key."""

    address: Address
    expected: ExpectedKey

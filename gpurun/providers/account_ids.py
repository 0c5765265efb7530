"""Marks of accounts: they show whether two keys belong to one customer, and reveal nothing else."""

from __future__ import annotations

from hashlib import sha256

from gpurun.core.secrets import Secret

_DIGITS = 16


def mark_of_account(provider: str, identifier: str) -> str:
    """Return `account:…`, from the provider's own id of its customer: the same for every key of that customer."""
    return f"account:{_digest('account', provider, identifier)}"


def mark_of_key(provider: str, base_url: str, key: Secret) -> str:
    """Return `key:…`, if a provider does not identify its customer: a new key of the same customer has another mark.

    64 bits of a hash of much more than 64 random bits: the key cannot be found from it.
    """
    return f"key:{_digest('key', provider, base_url, key.reveal())}"


def _digest(*parts: str) -> str:
    return sha256("\0".join(("gpurun", *parts)).encode()).hexdigest()[:_DIGITS]

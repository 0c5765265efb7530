"""Computes marks of accounts. A mark shows whether two keys belong to the same account, and reveals nothing else."""

from __future__ import annotations

from hashlib import sha256

from gpurun.core.secrets import Secret

_DIGITS = 16


def mark_of_account(provider: str, identifier: str) -> str:
    """Return `account:…`, from the account's id at the provider. It is the same for every key of the account."""
    return f"account:{_compute_digest('account', provider, identifier)}"


def mark_of_key(provider: str, base_url: str, key: Secret) -> str:
    """Return `key:…`, for a provider that does not identify the account. Each key of an account has a different mark.

    The mark has only 64 bits of a hash of a much longer random key, so the key cannot be recovered from it.
    """
    return f"key:{_compute_digest('key', provider, base_url, key.reveal())}"


def _compute_digest(*parts: str) -> str:
    return sha256("\0".join(("gpurun", *parts)).encode()).hexdigest()[:_DIGITS]

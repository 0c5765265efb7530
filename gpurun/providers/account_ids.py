"""Marks of accounts: they say whether two keys are one customer's, and nothing else follows from them."""

from __future__ import annotations

from hashlib import sha256

from gpurun.core.secrets import Secret

_DIGITS = 16


def mark_of_account(provider: str, identifier: str) -> str:
    """`account:…`, from the provider's own name for its customer: the same for every key that the customer has."""
    return f"account:{_digest('account', provider, identifier)}"


def mark_of_key(provider: str, base_url: str, key: Secret) -> str:
    """`key:…`, where a provider does not say who its customer is: a new key of the same customer has another.

    64 bits of a hash of what has far more than 64 bits of chance in it: no key can be found from it.
    """
    return f"key:{_digest('key', provider, base_url, key.reveal())}"


def _digest(*parts: str) -> str:
    return sha256("\0".join(("gpurun", *parts)).encode()).hexdigest()[:_DIGITS]

"""The order that the contract's tests send to a provider."""

from __future__ import annotations

import secrets

from pydantic import SecretStr

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.records import GpuNeed, Instance, InstanceState, Order, RunKeys
from gpurun.providers.base import Provider
from gpurun.providers.catalog import offers_for, rows_for

CLOCK = SystemClock()
NEED = GpuNeed(count=0, name="cpu")
KEYS = RunKeys(
    client_public="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJmMoWvlAGU9dPLcbZpF7dOt0rdWlmOSQ6WvEm3mB1Cd gpurun",
    host_public="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC3JB8iXeTMTyJ0pTuF9Z1wz1hL6M4mWkqDUFKTOZzAA gpurun",
    host_private=SecretStr("-----BEGIN OPENSSH PRIVATE KEY-----\nbm90IGEga2V5\n-----END OPENSSH PRIVATE KEY-----\n"),
)

# Random, because tests that run in parallel on this computer see the processes of every token.
TOKEN = f"gr-fox-41-{secrets.token_hex(4)}"


def order(provider: Provider, token: str = TOKEN, lease_s: float = 60.0) -> Order:
    """Return an order for the provider's first offer without a GPU."""
    known = rows_for(NEED, provider.name) or offers_for(NEED)
    queue_s = 600 if provider.name == "slurm" else 0
    return Order(
        run="fox-41",
        token=token,
        attempt=1,
        offer=provider.offers(NEED, known)[0],
        deadline_wall=float(int(CLOCK.wall() + lease_s + queue_s)),
        lease_s=int(lease_s),
        keys=KEYS,
        disk_gb=20,
    )


def wait_for(provider: Provider, instance: Instance, state: InstanceState) -> Instance:
    """Read an instance until it is in a state, and return it; fail after half a minute."""
    seen = instance
    for _ in ticks(CLOCK, 0.02, 30):
        seen = provider.read(instance.id)
        if seen.state is state:
            return seen
    raise AssertionError(f"{instance.id} is {seen.state}, not {state}")

"""How long a machine is waited for: by the catalogue's patience, and as far as the lease leaves time to train.

The lease plans one share for booting, and the deadline and the worst case follow from that. A machine that takes
longer, as a normal one may, takes it from its training: the deadline does not move.
"""

from __future__ import annotations

from gpurun.core.model import Instance, InstanceState
from gpurun.core.progress import RunState
from gpurun.lifecycle.context import Context
from gpurun.planning.catalog import terms_of
from gpurun.planning.load import save_s

LEAST_TRAINING = 0.1
"""The part of the training limit that must be left when a machine comes up: for less it is not worth its rental."""


def patience_s(state: RunState, context: Context) -> float:
    """How long from now a machine may take to be ready; zero or less is one look."""
    offer, lease = context.plan.offer, context.plan.lease
    longest_s = max(lease.boot_s, terms_of(offer.provider).patience_s(offer.gpu_count))
    least_s = lease.ship_s + LEAST_TRAINING * lease.train_s + save_s(context.plan.parameters) + lease.collect_s
    return min(longest_s, context.seconds_left(state) - least_s)


def is_worth_waiting(seen: Instance, waited_s: float, context: Context) -> bool:
    """Whether to look again: within the planned share in any case, after that only while the machine still comes up."""
    is_coming = seen.state in (InstanceState.PENDING, InstanceState.RUNNING)
    return is_coming or waited_s < context.plan.lease.boot_s

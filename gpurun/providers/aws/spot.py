"""The most that a spot machine costs per hour, read back from AWS: the maximum price that its request has on record."""

from __future__ import annotations

from gpurun.core.errors import SetupError
from gpurun.core.money import Micros
from gpurun.core.records import Instance, InstanceState
from gpurun.providers.aws.errors import NOT_ALLOWED
from gpurun.providers.aws.offers import parse_dollars
from gpurun.providers.aws.parse import parse_ec2_instance
from gpurun.providers.aws.wire import AwsClients, AwsRefused, AwsReply
from gpurun.providers.base import Unknown

_AWAKE = (InstanceState.PENDING, InstanceState.RUNNING)


class SpotLimits:
    """The maximum price of each spot request, read once: AWS does not change it, and takes the machine back above it.

    What AWS bills is the spot price of the zone, which moves below that price, so only the maximum bounds the cost.
    """

    def __init__(self, wire: AwsClients) -> None:
        self._wire = wire
        self._known: dict[str, Micros | None] = {}

    def read(self, region: str, entry: AwsReply) -> Instance:
        """Return an instance, with the most that it costs per hour if it is a spot machine and AWS reports that."""
        machine, request = parse_ec2_instance(region, entry), str(entry.get("SpotInstanceRequestId") or "")
        if request and request not in self._known and machine.state in _AWAKE:
            self._ask(region, request)
        limit = self._known.get(request)
        if limit is None:
            return machine
        return machine.model_copy(update={"rate_micros_per_hour": limit, "rate_is_limit": True})

    def _ask(self, region: str, request: str) -> None:
        """Read the maximum price of a request; the next reading tries again if AWS does not show the request yet.

        A failure leaves it unknown, because the machine itself was read.
        """
        try:
            answer = self._wire.call("ec2", region, "describe_spot_instance_requests", SpotInstanceRequestIds=[request])
        except (Unknown, SetupError):
            return
        except AwsRefused as refused:
            if refused.code in NOT_ALLOWED:
                self._known[request] = None
            return
        for known in answer.get("SpotInstanceRequests") or ():
            limit = parse_dollars(known.get("SpotPrice"))
            if known.get("SpotInstanceRequestId") == request and limit is not None:
                self._known[request] = limit

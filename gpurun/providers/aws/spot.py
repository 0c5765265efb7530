"""Reads the maximum price of a spot instance from its spot request at AWS."""

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
    """Reads and caches the maximum price of each spot request.

    AWS bills the zone's spot price, which varies, but reclaims the machine when that price passes the maximum. So the
    maximum, which never changes, bounds the cost.
    """

    def __init__(self, wire: AwsClients) -> None:
        self._wire = wire
        self._known: dict[str, Micros | None] = {}

    def read(self, region: str, entry: AwsReply) -> Instance:
        """Return an instance. If it is a spot instance and its maximum price is known, that is its rate, as a limit."""
        machine, request = parse_ec2_instance(region, entry), str(entry.get("SpotInstanceRequestId") or "")
        if request and request not in self._known and machine.state in _AWAKE:
            self._fetch_limit(region, request)
        limit = self._known.get(request)
        if limit is None:
            return machine
        return machine.model_copy(update={"rate_micros_per_hour": limit, "rate_is_limit": True})

    def _fetch_limit(self, region: str, request: str) -> None:
        """Read and cache the maximum price of a spot request. If AWS does not show it yet, the next `read` retries.

        Raises nothing: the instance itself was read, so a failure only leaves its price unknown.
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

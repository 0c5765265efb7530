"""Implements the six verbs on EC2, and lists and removes what a rental leaves besides its machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeVar

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError, clauses
from gpurun.core.records import Account, GpuNeed, Instance, InstanceState, Leftover, Offer, Order, Teardown
from gpurun.providers.aws.account import account_of, mark_of, may_launch, whoami
from gpurun.providers.aws.errors import NOT_ALLOWED, explain_early_refusal, explain_refusal
from gpurun.providers.aws.image import Image, choose_image
from gpurun.providers.aws.launch import launch, network_of
from gpurun.providers.aws.offers import offers_for_need
from gpurun.providers.aws.parse import NOT_THERE, instances_in, parse_ec2_instance, read_instance, split_instance_id
from gpurun.providers.aws.schedule import arm_schedule
from gpurun.providers.aws.side_resources import (
    find_firewall_group,
    leftovers_in,
    let_in,
    make_group,
    public_address,
    remove_leftover,
)
from gpurun.providers.aws.spot import SpotLimits
from gpurun.providers.aws.wire import AwsClients, AwsRefused, AwsReply, query_regions
from gpurun.providers.base import EndsBy, Rejected, Traits, Unknown
from gpurun.providers.errors import RejectedFor, no_such_region

T = TypeVar("T")


LET_IN_S = 60.0


class AwsProvider:
    """The `aws` provider: rents in the given region or the SDK's default one, and finds instances in every region.

    `my_address` returns the IP address that the firewall group admits.
    """

    name = "aws"
    guard_shares_key = False
    notice_url = "http://169.254.169.254"

    def __init__(
        self,
        clock: Clock,
        *,
        region: str | None = None,
        spot: bool = False,
        my_address: Callable[[], str] | None = None,
    ) -> None:
        self._wire = AwsClients(clock, region)
        self._named_region = region
        self._spot = spot
        self._limits = SpotLimits(self._wire)
        self._my_address = my_address or partial(public_address, clock)
        self._images: dict[tuple[str, str], Image] = {}
        self._homes: dict[str, str] = {}  # The region of each token: an order is sent to one region only.
        self._closed: set[str] = set()
        self._let_in_mono = float("-inf")

    @cached_property
    def traits(self) -> Traits:
        """Return the waiting times.

        EC2 lists a new instance within seconds, and a terminated one for about an hour.
        """
        region = self._wire.region
        return Traits(
            settle_s=120.0,
            poll_s=5.0,
            death_reads=3,
            death_spread_s=30.0,
            teardown=Teardown.DESTROYED,
            ends_by=EndsBy.MACHINE,
            console_url=f"https://{region}.console.aws.amazon.com/ec2/home?region={region}#Instances:tag-key=gpurun:run",
        )

    def verify(self) -> Account:
        """Return the caller's identity and the missing permissions, found by dry runs.

        Credentials that expire are reported as missing, too.
        """
        return account_of(self._wire)

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return the known types that the region offers: only spot offers with `spot`, else only on-demand offers."""
        if not self._has_region():
            return []
        try:
            return offers_for_need(self._wire, need, known, spot=self._spot)
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused

    def create(self, order: Order) -> Instance:
        """Create the firewall group, launch, and schedule the termination if the account has the role for schedules.

        The token is the idempotency key of the launch, so a second call for the same order returns the same instance.
        """
        region = order.offer.region
        self._homes[order.token] = region
        try:
            try:
                for instance in instances_in(self._wire, region, order.token):
                    if instance.state is not InstanceState.GONE:
                        return instance
                image = self._choose_image(region, order.image)
                network = network_of(self._wire, region)
                group = make_group(self._wire, order, network.vpc, self._my_address)
            except Unknown as error:  # No launch was sent.
                raise Rejected(f"nothing was launched: {error}", of_offer=True) from error
            return launch(self._wire, order, image, network, group, partial(self._finish_launch, order))
        except AwsRefused as refused:
            raise explain_early_refusal(refused) from refused
        except SetupError as error:  # The SDK could not sign the request, so none was sent.
            raise RejectedFor(error) from error

    def _finish_launch(self, order: Order, answer: AwsReply) -> Instance:
        instance = parse_ec2_instance(order.offer.region, answer)
        arm_schedule(self._wire, order, instance.id.rpartition("/")[2])
        return instance

    def find(self, token: str | None) -> list[Instance]:
        """Return all instances that carry the token (None: all of gpurun's), oldest first.

        EC2 still lists instances that were terminated in the last hour.
        """
        return self._find_in_regions(token, ())

    def find_in(self, regions: Sequence[str]) -> list[Instance]:
        """Return all of gpurun's instances in these regions."""
        return self._find_in_regions(None, regions)

    def _find_in_regions(self, token: str | None, regions: Sequence[str]) -> list[Instance]:
        answers, doubt = self._query_regions(token, lambda region: instances_in(self._wire, region, token), regions)
        found = sorted(
            (instance for here in answers for instance in here),
            key=lambda instance: (instance.created_wall or 0.0, instance.id),
        )
        if isinstance(doubt, Unknown):
            raise Unknown(str(doubt), found=tuple(found)) from doubt
        if doubt is not None:
            raise doubt
        if token and found:
            self._homes[token] = found[0].region
        return found

    def read(self, instance_id: str) -> Instance:
        """Return one instance; a spot instance has its maximum price. The id contains the region to query."""
        try:
            return read_instance(self._wire, instance_id, self._limits.read)
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused

    def destroy(self, instance_id: str) -> None:
        """Terminate an instance. If it is a spot instance, its one-time spot request ends with it."""
        region, identifier = split_instance_id(instance_id)
        try:
            self._wire.call("ec2", region, "terminate_instances", InstanceIds=[identifier])
        except AwsRefused as refused:
            if refused.code not in NOT_THERE:
                raise explain_refusal(refused) from refused

    def guard_folder(self, instance: Instance) -> str:
        """Return the folder of the timer that was armed at boot; its name is the deadline. "" without a deadline."""
        return "" if instance.deadline_wall is None else f"/var/lib/gpurun/{int(instance.deadline_wall)}"

    def let_in(self, instance: Instance) -> None:
        """Admit this computer's present address to the instance, at most once a minute."""
        now = self._wire.clock.monotonic()
        if now - self._let_in_mono < LET_IN_S:
            return
        self._let_in_mono = now
        try:
            group = find_firewall_group(self._wire, instance.region, instance.token)
            if group:
                let_in(self._wire, instance.region, group, self._my_address)
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused

    def leftovers(self, token: str | None) -> list[Leftover]:
        """Return firewall groups, schedules, and volumes and network interfaces that are not attached to a machine."""
        answers, doubt = self._query_regions(token, lambda region: leftovers_in(self._wire, region, token))
        if doubt is not None:
            raise doubt
        return [leftover for here in answers for leftover in here]

    @property
    def endpoint(self) -> str:
        """Return the address to which the SDK sends EC2 requests; "" if that is AWS's own."""
        return self._wire.endpoint

    @property
    def clock_ahead_s(self) -> float | None:
        """Return how many seconds this machine's clock is ahead of AWS's; None before AWS's first answer."""
        return self._wire.clock_ahead_s

    def regions(self) -> tuple[str, ...]:
        """Return the regions that the account has enabled."""
        return tuple(self._regions)

    def ask_time(self) -> None:
        """Request the caller's identity, because the answer carries AWS's time."""
        whoami(self._wire)

    def account_mark(self) -> str:
        """Return the mark of the account; SetupError if AWS does not accept the credentials."""
        return self._mark

    def key_ends_wall(self) -> float:
        """Return when the credentials expire, as `KeyEnds.key_ends_wall` defines it."""
        return self._wire.key_ends_wall()

    def remove(self, leftover: Leftover) -> None:
        """Request the removal of a leftover; Unknown while another resource still uses it."""
        remove_leftover(self._wire, leftover)

    def _choose_image(self, region: str, named: str) -> Image:
        """Return the image for a region. It is chosen only once, so that a repeated order sends the same request."""
        if (region, named) not in self._images:
            self._images[region, named] = choose_image(self._wire, region, named)
        return self._images[region, named]

    @cached_property
    def _mark(self) -> str:
        """Return the mark of the account; AWS is asked once."""
        return mark_of(self._wire)

    @cached_property
    def _regions(self) -> list[str]:
        """Return the regions that the account has enabled; Unknown if AWS lists none."""
        try:
            listed = list(self._wire.pages("ec2", self._wire.region, "describe_regions", "Regions"))
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused
        names = [str(region["RegionName"]) for region in listed]
        if not names:
            raise Unknown("AWS lists no regions")
        return names

    def _has_region(self) -> bool:
        """Return whether the chosen region exists; for an unknown one, the SDK would only report a failed connection.

        Return False if an unknown region comes from `--region`, because it may be another cloud's. Raise SetupError if
        it comes from the SDK's settings.
        """
        chosen = self._wire.chosen_region
        if not chosen or chosen == self._wire.region or chosen in self._regions:
            return True
        if self._named_region:
            return False
        error = no_such_region(chosen, {self.name: self._regions})
        raise SetupError(
            error.code, error.what, hint=f"{error.hint} It is set in the AWS SDK's configuration: aws configure."
        )

    def _query_regions(
        self, token: str | None, look: Callable[[str], list[T]], regions: Sequence[str] = ()
    ) -> tuple[list[list[T]], SetupError | Unknown | None]:
        """Query the token's region if it is known, else the given regions or all. Return the answers and an error.

        The error is None if every region answered, or if the token was found in one. A region that does not answer is
        ignored if the credentials can neither read it nor launch in it, because it cannot have an instance then.
        """
        home = self._homes.get(token or "")
        answers, silent = query_regions([home] if home else regions or self._regions, look)
        if token and any(answers.values()):
            return list(answers.values()), None
        doubtful = {region: error for region, error in silent.items() if home or not self._is_closed(region, error)}
        doubt = _explain_silence(doubtful, is_total=not answers) if doubtful else None
        return list(answers.values()), doubt

    def _is_closed(self, region: str, error: Exception) -> bool:
        """Return whether an organisation's policy denies all use of a region; never true of the chosen region."""
        if region in self._closed:
            return True
        denied = isinstance(error, AwsRefused) and error.code in NOT_ALLOWED
        if denied and region != self._wire.region and not may_launch(self._wire, region):
            self._closed.add(region)
        return region in self._closed


def _explain_silence(silent: dict[str, Exception], *, is_total: bool) -> SetupError | Unknown:
    """Return the error for regions that gave no answer; a SetupError if no region answered because of the key."""
    first = next(iter(silent.values()))
    judged = explain_refusal(first) if isinstance(first, AwsRefused) else first
    if is_total and isinstance(judged, SetupError):
        return judged
    reasons = clauses(f"{region}: {error}" for region, error in sorted(silent.items()))
    return Unknown(f"not every region of AWS could be read ({reasons})")

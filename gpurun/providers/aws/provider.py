"""The six verbs on EC2, and what a rental leaves beside its machine."""

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
from gpurun.providers.aws.wire import AwsClients, AwsRefused, Told, everywhere
from gpurun.providers.base import EndsBy, Rejected, Traits, Unknown
from gpurun.providers.errors import RejectedFor, no_such_region

T = TypeVar("T")


LET_IN_S = 60.0


class AwsProvider:
    """EC2 in the region that is named here, or in the SDK's own; what exists is looked for in every region.

    `my_address` tells the address that the firewall lets in.
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
        self._my_address = my_address or partial(public_address, clock)
        self._images: dict[tuple[str, str], Image] = {}
        self._homes: dict[str, str] = {}  # The region of each token: a token is sent to one region only.
        self._closed: set[str] = set()
        self._let_in_mono = float("-inf")

    @cached_property
    def traits(self) -> Traits:
        """EC2 shows a new instance within seconds, and lists the dead as such for about an hour."""
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
        """Ask who this is, and by dry runs what it may not do; credentials that may end too early are among that."""
        return account_of(self._wire)

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """The known types that are offered in the region, on demand or (with `spot`) on spot, never both."""
        if not self._has_region():
            return []
        try:
            return offers_for_need(self._wire, need, known, spot=self._spot)
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused

    def create(self, order: Order) -> Instance:
        """Make the firewall group, send the launch, and set the outside schedule if the account has its role.

        The launch carries the token as its idempotency key. The second call for an order gives what the first made.
        """
        region = order.offer.region
        self._homes[order.token] = region
        try:
            try:
                for one in instances_in(self._wire, region, order.token):
                    if one.state is not InstanceState.GONE:
                        return one
                image = self._image(region, order.image)
                network = network_of(self._wire, region)
                group = make_group(self._wire, order, network.vpc, self._my_address)
            except Unknown as error:  # No launch was sent.
                raise Rejected(f"nothing was launched: {error}", of_offer=True) from error
            return launch(self._wire, order, image, network, group, partial(self._made, order))
        except AwsRefused as refused:
            raise explain_early_refusal(refused) from refused
        except SetupError as error:  # The SDK could not sign the request, so that none was sent.
            raise RejectedFor(error) from error

    def _made(self, order: Order, told: Told) -> Instance:
        made = parse_ec2_instance(order.offer.region, told)
        arm_schedule(self._wire, order, made.id.rpartition("/")[2])
        return made

    def find(self, token: str | None) -> list[Instance]:
        """All that carries the token, the terminated of the last hour too, as long as EC2 lists them."""
        return self._found(token, ())

    def find_in(self, regions: Sequence[str]) -> list[Instance]:
        """All that is gpurun's in these regions."""
        return self._found(None, regions)

    def _found(self, token: str | None, regions: Sequence[str]) -> list[Instance]:
        answers, doubt = self._everywhere(token, lambda region: instances_in(self._wire, region, token), regions)
        found = sorted((one for here in answers for one in here), key=lambda one: (one.created_wall or 0.0, one.id))
        if isinstance(doubt, Unknown):
            raise Unknown(str(doubt), found=tuple(found)) from doubt
        if doubt is not None:
            raise doubt
        if token and found:
            self._homes[token] = found[0].region
        return found

    def read(self, instance_id: str) -> Instance:
        """One instance; its id names the region, so nobody else is asked."""
        try:
            return read_instance(self._wire, instance_id)
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused

    def destroy(self, instance_id: str) -> None:
        """Terminate it; a one-time spot request ends with its instance."""
        region, identifier = split_instance_id(instance_id)
        try:
            self._wire.call("ec2", region, "terminate_instances", InstanceIds=[identifier])
        except AwsRefused as refused:
            if refused.code not in NOT_THERE:
                raise explain_refusal(refused) from refused

    def guard_folder(self, instance: Instance) -> str:
        """The folder of the timer that was armed at boot, named by the deadline as it was ordered."""
        return "" if instance.deadline_wall is None else f"/var/lib/gpurun/{int(instance.deadline_wall)}"

    def let_in(self, instance: Instance) -> None:
        """Open its firewall to the address that this laptop has now, once a minute at most."""
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
        """Firewall groups, volumes and network cards that no machine holds, and schedules."""
        answers, doubt = self._everywhere(token, lambda region: leftovers_in(self._wire, region, token))
        if doubt is not None:
            raise doubt
        return [one for here in answers for one in here]

    @property
    def endpoint(self) -> str:
        """Where the SDK sends what is for EC2, if not to AWS."""
        return self._wire.endpoint

    @property
    def clock_ahead_s(self) -> float | None:
        """How far this machine's clock is ahead of AWS's; None before its first answer."""
        return self._wire.clock_ahead_s

    def regions(self) -> tuple[str, ...]:
        """The regions that the account has switched on."""
        return tuple(self._regions)

    def ask_time(self) -> None:
        """Ask whose the credentials are, whose answer carries a date as every one does."""
        whoami(self._wire)

    def account_mark(self) -> str:
        """The mark of the account that the credentials are of; SetupError when AWS does not take them."""
        return self._mark

    def key_ends_wall(self) -> float:
        """When these credentials end, where they are a session's."""
        return self._wire.key_ends_wall()

    def remove(self, leftover: Leftover) -> None:
        """Ask for the removal of one; Unknown while something still needs it."""
        remove_leftover(self._wire, leftover)

    def _image(self, region: str, named: str) -> Image:
        """The image of a region, chosen once: the same order must be the same request."""
        if (region, named) not in self._images:
            self._images[region, named] = choose_image(self._wire, region, named)
        return self._images[region, named]

    @cached_property
    def _mark(self) -> str:
        return mark_of(self._wire)

    @cached_property
    def _regions(self) -> list[str]:
        """Every region that the account has switched on."""
        try:
            told = list(self._wire.pages("ec2", self._wire.region, "describe_regions", "Regions"))
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused
        names = [str(one["RegionName"]) for one in told]
        if not names:
            raise Unknown("AWS names no region")
        return names

    def _has_region(self) -> bool:
        """Whether the chosen region is there, for of one that is not the SDK would only say that nobody answers.

        SetupError where it is the SDK's own settings that name such a one: `--region` may mean another cloud's.
        """
        chosen = self._wire.chosen_region
        if not chosen or chosen == self._wire.region or chosen in self._regions:
            return True
        if self._named_region:
            return False
        told = no_such_region(chosen, {self.name: self._regions})
        raise SetupError(told.code, told.what, hint=f"{told.hint} The AWS SDK's settings name it: aws configure.")

    def _everywhere(
        self, token: str | None, look: Callable[[str], list[T]], regions: Sequence[str] = ()
    ) -> tuple[list[list[T]], SetupError | Unknown | None]:
        """What each region answers: the token's own, where that is known, else those named, or all; and the doubt.

        A region that does not answer leaves one, unless what was looked for was found elsewhere, or nothing can be
        there: these credentials may neither look into it nor launch in it.
        """
        home = self._homes.get(token or "")
        told, silent = everywhere([home] if home else regions or self._regions, look)
        if token and any(told.values()):
            return list(told.values()), None
        doubtful = {region: error for region, error in silent.items() if home or not self._is_closed(region, error)}
        doubt = _unseen(doubtful, all_of_them=not told) if doubtful else None
        return list(told.values()), doubt

    def _is_closed(self, region: str, error: Exception) -> bool:
        """Whether an organisation's policy shuts a region; the chosen one is never taken for that."""
        if region in self._closed:
            return True
        denied = isinstance(error, AwsRefused) and error.code in NOT_ALLOWED
        if denied and region != self._wire.region and not may_launch(self._wire, region):
            self._closed.add(region)
        return region in self._closed


def _unseen(silent: dict[str, Exception], *, all_of_them: bool) -> SetupError | Unknown:
    """Why no answer can be given; where nobody answered for one reason, that reason is about the key."""
    first = next(iter(silent.values()))
    judged = explain_refusal(first) if isinstance(first, AwsRefused) else first
    if all_of_them and isinstance(judged, SetupError):
        return judged
    reasons = clauses(f"{region}: {error}" for region, error in sorted(silent.items()))
    return Unknown(f"AWS did not let itself be looked at everywhere ({reasons})")

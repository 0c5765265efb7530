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
from gpurun.providers.aws.spot import SpotLimits
from gpurun.providers.aws.wire import AwsClients, AwsRefused, AwsReply, everywhere
from gpurun.providers.base import EndsBy, Rejected, Traits, Unknown
from gpurun.providers.errors import RejectedFor, no_such_region

T = TypeVar("T")


LET_IN_S = 60.0


class AwsProvider:
    """EC2 in the named region, or in the SDK's own; what exists is looked for in every region.

    `my_address` returns the address that the firewall lets in.
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
        self._homes: dict[str, str] = {}  # The region of each token: a token is sent to one region only.
        self._closed: set[str] = set()
        self._let_in_mono = float("-inf")

    @cached_property
    def traits(self) -> Traits:
        """Return the waiting times: EC2 shows a new instance within seconds, and ended ones for about an hour."""
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
        """Check who this is, and by dry runs what is missing; credentials that expire too early are missing."""
        return account_of(self._wire)

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return the known types that are offered in the region, on demand or (with `spot`) on spot, never both."""
        if not self._has_region():
            return []
        try:
            return offers_for_need(self._wire, need, known, spot=self._spot)
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused

    def create(self, order: Order) -> Instance:
        """Make the firewall group, send the launch, and set the outside schedule if the account has its role.

        The launch carries the token as its idempotency key: a second call for an order returns what the first made.
        """
        region = order.offer.region
        self._homes[order.token] = region
        try:
            try:
                for instance in instances_in(self._wire, region, order.token):
                    if instance.state is not InstanceState.GONE:
                        return instance
                image = self._image(region, order.image)
                network = network_of(self._wire, region)
                group = make_group(self._wire, order, network.vpc, self._my_address)
            except Unknown as error:  # No launch was sent.
                raise Rejected(f"nothing was launched: {error}", of_offer=True) from error
            return launch(self._wire, order, image, network, group, partial(self._made, order))
        except AwsRefused as refused:
            raise explain_early_refusal(refused) from refused
        except SetupError as error:  # The SDK could not sign the request, so none was sent.
            raise RejectedFor(error) from error

    def _made(self, order: Order, answer: AwsReply) -> Instance:
        made = parse_ec2_instance(order.offer.region, answer)
        arm_schedule(self._wire, order, made.id.rpartition("/")[2])
        return made

    def find(self, token: str | None) -> list[Instance]:
        """Return everything that carries the token, including what ended in the last hour, as long as EC2 lists it."""
        return self._found(token, ())

    def find_in(self, regions: Sequence[str]) -> list[Instance]:
        """Return everything of gpurun's in these regions."""
        return self._found(None, regions)

    def _found(self, token: str | None, regions: Sequence[str]) -> list[Instance]:
        answers, doubt = self._everywhere(token, lambda region: instances_in(self._wire, region, token), regions)
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
        """Return one instance, of spot with its maximum price; its id has the region, so no other region is asked."""
        try:
            return read_instance(self._wire, instance_id, self._limits.read)
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
        """Return the folder of the timer that was armed at boot, named by the ordered deadline."""
        return "" if instance.deadline_wall is None else f"/var/lib/gpurun/{int(instance.deadline_wall)}"

    def let_in(self, instance: Instance) -> None:
        """Open its firewall to the address that this laptop has now, at most once a minute."""
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
        """Return firewall groups, volumes and network interfaces that no machine holds, and schedules."""
        answers, doubt = self._everywhere(token, lambda region: leftovers_in(self._wire, region, token))
        if doubt is not None:
            raise doubt
        return [instance for here in answers for instance in here]

    @property
    def endpoint(self) -> str:
        """Return where the SDK sends requests for EC2, if not to AWS."""
        return self._wire.endpoint

    @property
    def clock_ahead_s(self) -> float | None:
        """Return how far this machine's clock is ahead of AWS's; None before its first answer."""
        return self._wire.clock_ahead_s

    def regions(self) -> tuple[str, ...]:
        """Return the regions that the account has enabled."""
        return tuple(self._regions)

    def ask_time(self) -> None:
        """Ask whose the credentials are: the answer carries a date."""
        whoami(self._wire)

    def account_mark(self) -> str:
        """Return the mark of the account of these credentials; SetupError if AWS does not accept them."""
        return self._mark

    def key_ends_wall(self) -> float:
        """Return when these credentials expire, if they are a session's."""
        return self._wire.key_ends_wall()

    def remove(self, leftover: Leftover) -> None:
        """Request the removal of one; Unknown while something still needs it."""
        remove_leftover(self._wire, leftover)

    def _image(self, region: str, named: str) -> Image:
        """Return the image of a region, chosen once: the same order must be the same request."""
        if (region, named) not in self._images:
            self._images[region, named] = choose_image(self._wire, region, named)
        return self._images[region, named]

    @cached_property
    def _mark(self) -> str:
        return mark_of(self._wire)

    @cached_property
    def _regions(self) -> list[str]:
        """Return every region that the account has enabled."""
        try:
            listed = list(self._wire.pages("ec2", self._wire.region, "describe_regions", "Regions"))
        except AwsRefused as refused:
            raise explain_refusal(refused) from refused
        names = [str(region["RegionName"]) for region in listed]
        if not names:
            raise Unknown("AWS names no region")
        return names

    def _has_region(self) -> bool:
        """Return whether the chosen region exists; for one that does not, the SDK only reports that nothing answers.

        SetupError if the SDK's own settings name such a region: `--region` may mean another cloud's.
        """
        chosen = self._wire.chosen_region
        if not chosen or chosen == self._wire.region or chosen in self._regions:
            return True
        if self._named_region:
            return False
        error = no_such_region(chosen, {self.name: self._regions})
        raise SetupError(error.code, error.what, hint=f"{error.hint} The AWS SDK's settings name it: aws configure.")

    def _everywhere(
        self, token: str | None, look: Callable[[str], list[T]], regions: Sequence[str] = ()
    ) -> tuple[list[list[T]], SetupError | Unknown | None]:
        """Return what each region answers, and the doubt: the token's own region if known, else those given, or all.

        A region that does not answer leaves a doubt, unless what was looked for was found elsewhere, or nothing can be
        there, because these credentials may neither look into it nor launch in it.
        """
        home = self._homes.get(token or "")
        answers, silent = everywhere([home] if home else regions or self._regions, look)
        if token and any(answers.values()):
            return list(answers.values()), None
        doubtful = {region: error for region, error in silent.items() if home or not self._is_closed(region, error)}
        doubt = _unseen(doubtful, all_of_them=not answers) if doubtful else None
        return list(answers.values()), doubt

    def _is_closed(self, region: str, error: Exception) -> bool:
        """Return whether an organisation's policy closes a region; the chosen one never counts as closed."""
        if region in self._closed:
            return True
        denied = isinstance(error, AwsRefused) and error.code in NOT_ALLOWED
        if denied and region != self._wire.region and not may_launch(self._wire, region):
            self._closed.add(region)
        return region in self._closed


def _unseen(silent: dict[str, Exception], *, all_of_them: bool) -> SetupError | Unknown:
    """Return why there is no answer; if no region answered, for one reason, that reason concerns the key."""
    first = next(iter(silent.values()))
    judged = explain_refusal(first) if isinstance(first, AwsRefused) else first
    if all_of_them and isinstance(judged, SetupError):
        return judged
    reasons = clauses(f"{region}: {error}" for region, error in sorted(silent.items()))
    return Unknown(f"not every region of AWS could be read ({reasons})")

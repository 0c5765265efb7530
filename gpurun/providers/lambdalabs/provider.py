"""The six verbs on Lambda, the SSH key that a rental leaves, and the key by which a machine ends itself.

A launch has no idempotency key: an instance is recognised by its tags and its name. Nothing at Lambda ends a machine on
a timer, and one that powers itself off is still billed: only a call to the API ends it, from here or from the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.clock import Clock, utc
from gpurun.core.errors import SetupError
from gpurun.core.records import Account, GpuNeed, Instance, InstanceState, Leftover, Offer, Order, RunKeys, Teardown
from gpurun.core.secrets import Secret
from gpurun.providers._http import Answer, Gap, Http
from gpurun.providers.account_ids import mark_of_key
from gpurun.providers.base import NoCapacity, Rejected, Traits, Unknown
from gpurun.providers.lambdalabs import ssh_keys
from gpurun.providers.lambdalabs.guard_key import GuardKey
from gpurun.providers.lambdalabs.instances import (
    AILING,
    check_lambda_id,
    is_id,
    make_launch_body,
    make_launched_instance,
    parse_lambda_instance,
)
from gpurun.providers.lambdalabs.parse import (
    NOT_THERE,
    code_of,
    explain_lambda_answer,
    get_nested,
    hourly,
    is_success,
    judge_launch_answer,
    read_data,
)

URL = "https://cloud.lambda.ai/api/v1"
_BILLING_UNIT_S = 60
AILING_LIMIT_S = 300.0
"""How long gpurun waits for an unhealthy machine: one that powered itself off looks the same, and is still billed."""
_TRAITS = Traits(
    settle_s=120.0,
    poll_s=10.0,
    death_reads=3,
    death_spread_s=30.0,
    teardown=Teardown.DESTROYED,
    console_url="https://cloud.lambda.ai/instances",
)


@dataclass(frozen=True)
class Pace:
    """What Lambda allows: so many seconds between two requests, and between two launches; it answers 429 to more.

    A launch has a long time limit, because its answer is worth it; a terminate a short one, because it is known to
    hang.
    """

    request_s: float = 1.1
    launch_s: float = 12.0
    launch_limit_s: float = 30.0
    terminate_limit_s: float = 15.0


class LambdaProvider:
    """Lambda with one key; `guard_key` is put on each machine, so that it can end itself.

    `turns` is a folder through which all processes of this machine share Lambda's limits, which count by account.
    """

    name = "lambda"

    def __init__(
        self,
        key: Secret,
        clock: Clock,
        *,
        base_url: str = URL,
        guard_key: Secret | None = None,
        traits: Traits = _TRAITS,
        pace: Pace = Pace(),
        turns: Path | None = None,
    ) -> None:
        self.traits = traits
        self._clock = clock
        self._base_url = base_url.rstrip("/")
        self._pace = pace
        self._requests = Gap(pace.request_s, clock, turns and turns / "lambda")
        self._launches = Gap(pace.launch_s, clock, turns and turns / "lambda-launch")
        self._ailing_mono: dict[str, tuple[float, float]] = {}  # Since when, and when it was last reported so.
        self._mark = mark_of_key(self.name, self._base_url, key)
        self._http = self._opened(key)
        self._guard = None
        if guard_key is not None:
            own = None if guard_key.reveal() == key.reveal() else self._opened(guard_key)
            self._guard = GuardKey(guard_key, own, clock, pace.request_s)

    def verify(self) -> Account:
        """Read the list of instances, by which everything is found again. Lambda does not name the account."""
        self._instances()
        return Account(provider=self.name, identity="Lambda account", clock_ahead_s=self._http.clock_ahead_s)

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return the known types at their current price, once for each region that has one left.

        SetupError if the machine should end itself, and Lambda refuses the key for that.
        """
        if self._guard is not None:
            self._guard.require_taken()
        types = read_data(self._http.request("GET", "/instance-types"), dict)
        stamp = utc(self._clock.wall())
        now = {
            "billing_unit_s": _BILLING_UNIT_S,
            "price_source": f"live {stamp[:10]} {stamp[11:16]} UTC",
            "dies_by_itself": "yes · key on the box, armed at boot" if self._guard else "NO · laptop only",
        }
        found = []
        for row in {offer.type_id: offer for offer in known if offer.gpu_count == need.count}.values():
            entry = get_nested(types, row.type_id)
            kind = get_nested(entry, "instance_type")
            rate = hourly(kind.get("price_cents_per_hour"))
            sold = (kind.get("name"), get_nested(kind, "specs").get("gpus"))
            if rate is None or sold != (row.type_id, row.gpu_count):
                continue  # No longer sold, or changed: an instance of it would be refused when it is read back.
            for region in _regions(entry.get("regions_with_capacity_available")):
                found.append(row.model_copy(update={**now, "region": region, "rate_micros_per_hour": rate}))
        return found

    def create(self, order: Order) -> Instance:
        """Register the run's key, then launch. The answer is only an id: `read` reports the price.

        No second call is made for more, because whatever happened to it would put the id at risk.
        """
        if order.keys is None:
            raise Rejected("Lambda launches nothing without an SSH key")
        body = make_launch_body(order, self._user_data(order, order.keys))
        try:
            key_name = ssh_keys.register(self._http, order, order.keys.client_public)
        except Unknown as error:  # No launch was sent; a key that was registered anyway is a leftover.
            raise Rejected(f"nothing was launched: {error}", of_offer=True) from error
        try:
            self._require_sight(key_name)
            answer = self._launch({**body, "ssh_key_names": [key_name]})
            if not is_success(answer):
                raise judge_launch_answer(answer)
        except (NoCapacity, Rejected):
            self._forget_key(order.token)
            raise
        return make_launched_instance(order, _launched_id(answer))

    def find(self, token: str | None) -> list[Instance]:
        """Return every instance that carries the token in its tags or name, including terminated ones that are listed.

        Lambda has no launch time, so the lowest id comes first, not the oldest: any order will do, if every process
        that sees two instances of one token takes the same one for the first.
        """
        ours = [instance for instance in self._instances() if instance.token and token in (None, instance.token)]
        return sorted(ours, key=lambda instance: instance.id)

    def read(self, instance_id: str) -> Instance:
        """Return one instance; GONE only if Lambda reports it as terminated, or by its code that there is none.

        One that was reported as unhealthy for five minutes is STOPPED: it will not recover.
        """
        answer = self._http.request("GET", f"/instances/{check_lambda_id(instance_id)}")
        if answer.status == 404 and code_of(answer) == NOT_THERE:
            return Instance(id=instance_id, provider=self.name, token="", run="", state=InstanceState.GONE)
        read = parse_lambda_instance(read_data(answer, dict))
        if read.id != instance_id:
            raise Unknown(f"Lambda answered with {read.id} when asked about {instance_id}")
        return read.model_copy(update={"state": InstanceState.STOPPED}) if self._has_failed(read) else read

    def destroy(self, instance_id: str) -> None:
        """Terminate it. If no answer comes soon, it is Unknown: repeating the request does no harm."""
        answer = self._http.request(
            "POST",
            "/instance-operations/terminate",
            body={"instance_ids": [check_lambda_id(instance_id)]},
            timeout_s=self._pace.terminate_limit_s,
        )
        if not is_success(answer) and code_of(answer) != NOT_THERE:
            raise explain_lambda_answer(answer)

    def leftovers(self, token: str | None) -> list[Leftover]:
        """Return the SSH keys of rentals; the comment of each says when it is no longer needed."""
        return ssh_keys.left(self._http, token)

    def remove(self, leftover: Leftover) -> None:
        """Request the removal of a key; Unknown while a machine still uses it."""
        ssh_keys.remove_key(self._http, leftover)

    @property
    def guard_shares_key(self) -> bool:
        """Return whether the machine was given the account's own key, because there is none for the guard alone."""
        return self._guard is not None and not self._guard.is_own

    def guard_folder(self, instance: Instance) -> str:
        """Return where the guard, which starts at the machine's boot, keeps its time."""
        return "/var/lib/gpurun" if self._guard is not None else ""

    @property
    def endpoint(self) -> str:
        """Return the base URL in use, if it is not Lambda's."""
        return "" if self._base_url == URL else self._base_url

    @property
    def clock_ahead_s(self) -> float | None:
        """Return how far this machine's clock is ahead of Lambda's; None before its first answer."""
        return self._http.clock_ahead_s

    def regions(self) -> tuple[str, ...]:
        """Return the names of all regions, with capacity or without."""
        return tuple(_regions(read_data(self._http.request("GET", "/regions"), list)))

    def ask_time(self) -> None:
        """Read the list of instances: the answer carries a date."""
        self._instances()

    def account_mark(self) -> str:
        """Return the mark of the key, because Lambda does not say whose it is; sends no request."""
        return self._mark

    def _has_failed(self, read: Instance) -> bool:
        """Return whether it has been unhealthy for too long, as far as this process has seen.

        After a pause of that length the time starts again: no process reads a machine that has recovered.
        """
        if read.said != AILING:
            self._ailing_mono.pop(read.id, None)
            return False
        now = self._clock.monotonic()
        since, last = self._ailing_mono.get(read.id, (now, now))
        since = since if now - last < AILING_LIMIT_S else now
        self._ailing_mono[read.id] = since, now
        return now - since >= AILING_LIMIT_S

    def _user_data(self, order: Order, keys: RunKeys) -> str:
        """Return what the machine boots with; with a guard it contains a key, and goes only into the launch."""
        from gpurun.providers.guard import lambda_guard, lambda_user_data

        if self._guard is None:
            return lambda_user_data(keys=keys)
        guard = lambda_guard(
            key=self._guard.secret,
            base_url=self._base_url,
            token=order.token,
            deadline_wall=order.deadline_wall,
            lease_s=order.lease_s,
        )
        return lambda_user_data(keys=keys, guard=guard)

    def _opened(self, key: Secret) -> Http:
        headers = {"Authorization": f"Bearer {key.reveal()}"}
        return Http(self._base_url, headers=headers, clock=self._clock, name="lambda", gap=self._requests)

    def _instances(self) -> list[Instance]:
        """Return all instances of the account; Unknown if the list is incomplete: an absence must be certain."""
        return [parse_lambda_instance(entry) for entry in read_data(self._http.request("GET", "/instances"), list)]

    def _require_sight(self, key_name: str) -> None:
        """Refuse a launch that the guard's key could not end; if that is not known, no launch was sent either."""
        try:
            if self._guard is not None:
                self._guard.require_sight(key_name)
        except Unknown as error:
            raise Rejected(f"nothing was launched: {error}", of_offer=True) from error

    def _launch(self, body: dict[str, Any]) -> Answer:
        """Send a launch, so long after the one before that Lambda accepts it."""
        self._launches.wait()
        path = "/instance-operations/launch"
        try:
            return self._http.request("POST", path, body=body, timeout_s=self._pace.launch_limit_s)
        finally:
            self._launches.begin()

    def _forget_key(self, token: str) -> None:
        """Remove the key of a launch that certainly made nothing; one that stays is found as a leftover."""
        with suppress(Unknown, Rejected, SetupError):
            for leftover in self.leftovers(token):
                self.remove(leftover)


def _launched_id(answer: Answer) -> str:
    """Return the id that a launch gave. If it gave several, the others carry the same token and are found by it."""
    ids = read_data(answer, dict).get("instance_ids")
    if not isinstance(ids, list) or not ids or not is_id(ids[0]):
        raise Unknown("Lambda launched something, but did not return its id")
    return str(ids[0])


def _regions(listed: object) -> Iterator[str]:
    """Yield the names of the regions in a list."""
    for region in listed if isinstance(listed, list) else ():
        if isinstance(region, dict) and isinstance(region.get("name"), str):
            yield region["name"]

"""Implements the six verbs on Lambda, and removes the SSH key that a rental leaves.

A launch has no idempotency key, so gpurun recognises an instance by its tags and name. Lambda has no timer, and bills a
machine that has powered itself off. Only a call to the API terminates a machine, either from here or, with the guard's
key, from the machine.
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
    hourly_price,
    is_success,
    judge_launch_answer,
    read_data,
)

URL = "https://cloud.lambda.ai/api/v1"
_BILLING_UNIT_S = 60
AILING_LIMIT_S = 300.0
"""How long gpurun waits for an unhealthy machine to recover. A machine that powered itself off is unhealthy, too."""
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
    """The least time between two requests and between two launches, and the limits on their duration, in seconds.

    Lambda answers 429 if requests come faster. A launch may take long, because its answer has the instance's id. A
    terminate has a short limit, because it is known to hang.
    """

    request_s: float = 1.1
    launch_s: float = 12.0
    launch_limit_s: float = 30.0
    terminate_limit_s: float = 15.0


class LambdaProvider:
    """The `lambda` provider, for one key. `guard_key` is put on each rented machine, so that the machine can end
    itself.

    Lambda limits an account's requests, so gpurun's processes on this computer take turns, by files in the folder
    `turns`.
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
        self._ailing_mono: dict[str, tuple[float, float]] = {}  # The first and last unhealthy readings.
        self._mark = mark_of_key(self.name, self._base_url, key)
        self._http = self._open_http(key)
        self._guard = None
        if guard_key is not None:
            own = None if guard_key.reveal() == key.reveal() else self._open_http(guard_key)
            self._guard = GuardKey(guard_key, own, clock, pace.request_s)

    def verify(self) -> Account:
        """Check that the key may list instances. Lambda does not report the account's name."""
        self._list_instances()
        return Account(provider=self.name, identity="Lambda account", clock_ahead_s=self._http.clock_ahead_s)

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return the known types at their current price, one offer for each region with capacity.

        SetupError if Lambda refuses the guard's key, because then the machine could not end itself.
        """
        if self._guard is not None:
            self._guard.require_accepted()
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
            rate = hourly_price(kind.get("price_cents_per_hour"))
            sold = (kind.get("name"), get_nested(kind, "specs").get("gpus"))
            if rate is None or sold != (row.type_id, row.gpu_count):
                continue  # The type is no longer sold or has changed, so the check of the new instance would fail.
            for region in _list_regions(entry.get("regions_with_capacity_available")):
                found.append(row.model_copy(update={**now, "region": region, "rate_micros_per_hour": rate}))
        return found

    def create(self, order: Order) -> Instance:
        """Register the run's SSH key, then launch. The instance has only an id: `read` reports its price.

        There is no second call for the price, because its failure could lose the id.
        """
        if order.keys is None:
            raise Rejected("Lambda does not launch an instance without an SSH key")
        body = make_launch_body(order, self._build_user_data(order, order.keys))
        try:
            key_name = ssh_keys.register(self._http, order, order.keys.client_public)
        except Unknown as error:  # No launch was sent. If the key was registered, it is found as a leftover.
            raise Rejected(f"nothing was launched: {error}", of_offer=True) from error
        try:
            self._require_guard(key_name)
            answer = self._launch({**body, "ssh_key_names": [key_name]})
            if not is_success(answer):
                raise judge_launch_answer(answer)
        except (NoCapacity, Rejected):
            self._forget_key(order.token)
            raise
        return make_launched_instance(order, _parse_launched_id(answer))

    def find(self, token: str | None) -> list[Instance]:
        """Return every instance that carries the token in its tags or name, including terminated ones.

        The lowest id comes first, because Lambda reports no launch time. Because the order is fixed, every process
        that finds two instances for one token takes the same one as the first.
        """
        ours = [instance for instance in self._list_instances() if instance.token and token in (None, instance.token)]
        return sorted(ours, key=lambda instance: instance.id)

    def read(self, instance_id: str) -> Instance:
        """Return one instance; GONE if Lambda reports it as terminated or answers that it does not exist.

        An instance that has been unhealthy for five minutes is STOPPED, because it will not recover.
        """
        answer = self._http.request("GET", f"/instances/{check_lambda_id(instance_id)}")
        if answer.status == 404 and code_of(answer) == NOT_THERE:
            return Instance(id=instance_id, provider=self.name, token="", run="", state=InstanceState.GONE)
        read = parse_lambda_instance(read_data(answer, dict))
        if read.id != instance_id:
            raise Unknown(f"Lambda answered with {read.id} to a request for {instance_id}")
        return read.model_copy(update={"state": InstanceState.STOPPED}) if self._has_failed(read) else read

    def destroy(self, instance_id: str) -> None:
        """Terminate an instance; Unknown if no answer comes soon. Repeating the request is harmless."""
        answer = self._http.request(
            "POST",
            "/instance-operations/terminate",
            body={"instance_ids": [check_lambda_id(instance_id)]},
            timeout_s=self._pace.terminate_limit_s,
        )
        if not is_success(answer) and code_of(answer) != NOT_THERE:
            raise explain_lambda_answer(answer)

    def leftovers(self, token: str | None) -> list[Leftover]:
        """Return the SSH keys that gpurun registered. The comment of each has the deadline of its run."""
        return ssh_keys.leftover_keys(self._http, token)

    def remove(self, leftover: Leftover) -> None:
        """Remove an SSH key; Unknown while a machine still uses it."""
        ssh_keys.remove_key(self._http, leftover)

    @property
    def guard_shares_key(self) -> bool:
        """Return whether the guard uses the user's own key, because there is no separate key for it."""
        return self._guard is not None and not self._guard.is_own

    def guard_folder(self, instance: Instance) -> str:
        """Return the folder on the machine where the guard stores its deadline; "" without a guard."""
        return "/var/lib/gpurun" if self._guard is not None else ""

    @property
    def endpoint(self) -> str:
        """Return the base URL of the API; "" if it is Lambda's own."""
        return "" if self._base_url == URL else self._base_url

    @property
    def clock_ahead_s(self) -> float | None:
        """Return how many seconds this machine's clock is ahead of Lambda's; None before Lambda's first answer."""
        return self._http.clock_ahead_s

    def regions(self) -> tuple[str, ...]:
        """Return the names of all regions, with capacity or without."""
        return tuple(_list_regions(read_data(self._http.request("GET", "/regions"), list)))

    def ask_time(self) -> None:
        """List the instances, because the answer carries Lambda's time."""
        self._list_instances()

    def account_mark(self) -> str:
        """Return the mark of the key, because Lambda does not report the key's account. Sends no request."""
        return self._mark

    def _has_failed(self, read: Instance) -> bool:
        """Return whether this process has seen the instance unhealthy for `AILING_LIMIT_S`.

        If the last reading is that old, the time starts again, because the machine may have recovered in between.
        """
        if read.said != AILING:
            self._ailing_mono.pop(read.id, None)
            return False
        now = self._clock.monotonic()
        since, last = self._ailing_mono.get(read.id, (now, now))
        since = since if now - last < AILING_LIMIT_S else now
        self._ailing_mono[read.id] = since, now
        return now - since >= AILING_LIMIT_S

    def _build_user_data(self, order: Order, keys: RunKeys) -> str:
        """Return the user data of the machine. With a guard it contains a key, so it must not be logged."""
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

    def _open_http(self, key: Secret) -> Http:
        headers = {"Authorization": f"Bearer {key.reveal()}"}
        return Http(self._base_url, headers=headers, clock=self._clock, name="lambda", gap=self._requests)

    def _list_instances(self) -> list[Instance]:
        """Return all instances of the account; Unknown if the list is incomplete: an absent instance counts as gone."""
        return [parse_lambda_instance(entry) for entry in read_data(self._http.request("GET", "/instances"), list)]

    def _require_guard(self, key_name: str) -> None:
        """Check that the guard's key could terminate the machine; Rejected if it could not, or if that is not known."""
        try:
            if self._guard is not None:
                self._guard.require_same_account(key_name)
        except Unknown as error:
            raise Rejected(f"nothing was launched: {error}", of_offer=True) from error

    def _launch(self, body: dict[str, Any]) -> Answer:
        """Send a launch after the least time between two launches has passed."""
        self._launches.wait()
        path = "/instance-operations/launch"
        try:
            return self._http.request("POST", path, body=body, timeout_s=self._pace.launch_limit_s)
        finally:
            self._launches.begin()

    def _forget_key(self, token: str) -> None:
        """Try to remove the SSH key of a launch that created no instance. If it stays, it is found as a leftover."""
        with suppress(Unknown, Rejected, SetupError):
            for leftover in self.leftovers(token):
                self.remove(leftover)


def _parse_launched_id(answer: Answer) -> str:
    """Return the first id in the answer of a launch. Further instances would be found by their token."""
    ids = read_data(answer, dict).get("instance_ids")
    if not isinstance(ids, list) or not ids or not is_id(ids[0]):
        raise Unknown("Lambda launched an instance, but did not return its id")
    return str(ids[0])


def _list_regions(listed: object) -> Iterator[str]:
    """Yield the name of each region in a list of Lambda's."""
    for region in listed if isinstance(listed, list) else ():
        if isinstance(region, dict) and isinstance(region.get("name"), str):
            yield region["name"]

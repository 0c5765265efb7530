"""The six verbs on Lambda, the SSH key that a rental leaves, and the key by which a machine ends itself.

A launch has no idempotency key: an instance is known by its tags and its name. Nothing at Lambda ends a machine by
itself, and one that powers itself off is billed on: only a call to the API ends it, from here or from the machine.
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
"""How long an unhealthy machine is waited for: one that powered itself off is told so too, and is billed on."""
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

    A launch is waited for long, since its answer is worth it; a terminate shortly, since it is known to hang.
    """

    request_s: float = 1.1
    launch_s: float = 12.0
    launch_limit_s: float = 30.0
    terminate_limit_s: float = 15.0


class LambdaProvider:
    """Lambda under one key; `guard_key` is put on each machine, so that it can end itself.

    `turns` is a folder in which all processes of this machine keep Lambda's pace together, since it counts by account.
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
        self._ailing_mono: dict[str, tuple[float, float]] = {}  # Since when, and when it was last told so.
        self._mark = mark_of_key(self.name, self._base_url, key)
        self._http = self._opened(key)
        self._guard = None
        if guard_key is not None:
            own = None if guard_key.reveal() == key.reveal() else self._opened(guard_key)
            self._guard = GuardKey(guard_key, own, clock, pace.request_s)

    def verify(self) -> Account:
        """Read the list of instances, by which all is found again. Lambda tells no name of the account."""
        self._instances()
        return Account(provider=self.name, identity="Lambda account", clock_ahead_s=self._http.clock_ahead_s)

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """The known types at their price of now, once for each region that has one left.

        SetupError where the machine is to end itself, and Lambda does not take the key that is meant for that.
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
        for row in {one.type_id: one for one in known if one.gpu_count == need.count}.values():
            entry = get_nested(types, row.type_id)
            kind = get_nested(entry, "instance_type")
            rate = hourly(kind.get("price_cents_per_hour"))
            told = (kind.get("name"), get_nested(kind, "specs").get("gpus"))
            if rate is None or told != (row.type_id, row.gpu_count):
                continue  # Sold no more, or not what it was: an instance of it would be refused when it is read back.
            for region in _regions(entry.get("regions_with_capacity_available")):
                found.append(row.model_copy(update={**now, "region": region, "rate_micros_per_hour": rate}))
        return found

    def create(self, order: Order) -> Instance:
        """Register the run's key, then launch. What is told is the id alone: the rate is for `read` to tell.

        No second call is made for more, since whatever happened to it would put the id at risk.
        """
        if order.keys is None:
            raise Rejected("Lambda launches nothing without an SSH key")
        body = make_launch_body(order, self._user_data(order, order.keys))
        try:
            key_name = ssh_keys.register(self._http, order, order.keys.client_public)
        except Unknown as error:  # No launch was sent; a key that was registered all the same is a leftover.
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
        """Every instance that carries the token by its tags or its name, the terminated too as long as they are listed.

        Lambda tells no time of launch, so instead of the oldest the lowest id comes first: any order will do where
        everybody who looks at two of one token takes the same one for the first.
        """
        ours = [one for one in self._instances() if one.token and token in (None, one.token)]
        return sorted(ours, key=lambda one: one.id)

    def read(self, instance_id: str) -> Instance:
        """One instance; GONE only when Lambda says that it is terminated, or by its code that there is none.

        One that has been told as unhealthy for five minutes is STOPPED: it will not recover.
        """
        answer = self._http.request("GET", f"/instances/{check_lambda_id(instance_id)}")
        if answer.status == 404 and code_of(answer) == NOT_THERE:
            return Instance(id=instance_id, provider=self.name, token="", run="", state=InstanceState.GONE)
        read = parse_lambda_instance(read_data(answer, dict))
        if read.id != instance_id:
            raise Unknown(f"Lambda told of {read.id} when it was asked about {instance_id}")
        return read.model_copy(update={"state": InstanceState.STOPPED}) if self._has_failed(read) else read

    def destroy(self, instance_id: str) -> None:
        """Terminate it. An answer that does not come soon is Unknown: asking again harms nobody."""
        answer = self._http.request(
            "POST",
            "/instance-operations/terminate",
            body={"instance_ids": [check_lambda_id(instance_id)]},
            timeout_s=self._pace.terminate_limit_s,
        )
        if not is_success(answer) and code_of(answer) != NOT_THERE:
            raise explain_lambda_answer(answer)

    def leftovers(self, token: str | None) -> list[Leftover]:
        """The SSH keys of rentals; each says in its comment when it is no longer needed."""
        return ssh_keys.left(self._http, token)

    def remove(self, leftover: Leftover) -> None:
        """Ask for the removal of a key; Unknown while a machine still holds on to it."""
        ssh_keys.remove_key(self._http, leftover)

    @property
    def guard_shares_key(self) -> bool:
        """Whether the machine was given the account's own key, for want of one that is the guard's alone."""
        return self._guard is not None and not self._guard.is_own

    def guard_folder(self, instance: Instance) -> str:
        """Where the guard, which begins with the machine's boot, keeps its time."""
        return "/var/lib/gpurun" if self._guard is not None else ""

    @property
    def endpoint(self) -> str:
        """The base URL that is asked, where it is not Lambda's."""
        return "" if self._base_url == URL else self._base_url

    @property
    def clock_ahead_s(self) -> float | None:
        """How far this machine's clock is ahead of Lambda's; None before its first answer."""
        return self._http.clock_ahead_s

    def regions(self) -> tuple[str, ...]:
        """The names of all regions, with capacity or without."""
        return tuple(_regions(read_data(self._http.request("GET", "/regions"), list)))

    def ask_time(self) -> None:
        """Read the list of instances, whose answer carries a date as every one does."""
        self._instances()

    def account_mark(self) -> str:
        """The mark of the key, for Lambda does not say whose it is; nothing is asked."""
        return self._mark

    def _has_failed(self, read: Instance) -> bool:
        """Whether it has ailed for too long, as far as this process has looked.

        A look that comes so long after the last one begins again: nobody asks about a machine that answers again.
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
        """What the machine boots with; with a guard it holds the guard's key, and goes into nothing but the launch."""
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
        """All instances of the account; Unknown when the list does not come whole, since an absence must be one."""
        return [parse_lambda_instance(one) for one in read_data(self._http.request("GET", "/instances"), list)]

    def _require_sight(self, key_name: str) -> None:
        """Refuse to launch what the guard's key could not end; no launch was sent where that is not known."""
        try:
            if self._guard is not None:
                self._guard.require_sight(key_name)
        except Unknown as error:
            raise Rejected(f"nothing was launched: {error}", of_offer=True) from error

    def _launch(self, body: dict[str, Any]) -> Answer:
        """Send a launch, so long after the one before that Lambda takes it."""
        self._launches.wait()
        path = "/instance-operations/launch"
        try:
            return self._http.request("POST", path, body=body, timeout_s=self._pace.launch_limit_s)
        finally:
            self._launches.begin()

    def _forget_key(self, token: str) -> None:
        """Remove the key of a launch that certainly made nothing; one that stays is a leftover, and found as that."""
        with suppress(Unknown, Rejected, SetupError):
            for one in self.leftovers(token):
                self.remove(one)


def _launched_id(answer: Answer) -> str:
    """The id that a launch gave. Where it gave more than one, the others carry the same token and are found by it."""
    ids = read_data(answer, dict).get("instance_ids")
    if not isinstance(ids, list) or not ids or not is_id(ids[0]):
        raise Unknown("Lambda launched something, and does not say what")
    return str(ids[0])


def _regions(told: object) -> Iterator[str]:
    """The names of the regions in a list."""
    for region in told if isinstance(told, list) else ():
        if isinstance(region, dict) and isinstance(region.get("name"), str):
            yield region["name"]

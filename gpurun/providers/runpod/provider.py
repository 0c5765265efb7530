"""Implements the six verbs on RunPod.

RunPod has no idempotency key and no working timer. So gpurun recognises a pod by its name and environment, and the
guard, the first program in the pod, terminates the pod at its deadline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError
from gpurun.core.money import Micros, total
from gpurun.core.records import Account, Charge, GpuNeed, Instance, InstanceState, Offer, Order, Teardown
from gpurun.core.secrets import Secret
from gpurun.providers._http import Answer, Http
from gpurun.providers.account_ids import mark_of_account, mark_of_key
from gpurun.providers.base import Rejected, Traits, Unknown, their_wall
from gpurun.providers.runpod import graphql
from gpurun.providers.runpod.catalogue import cpu_offers, data_centers, gpu_offers
from gpurun.providers.runpod.parse import describe_runpod_error, explain_runpod_answer, judge_create_answer, money
from gpurun.providers.runpod.pods import BODY_LIMIT_BYTES, check_pod_id, make_pod_body, parse_pod
from gpurun.providers.runpod.spot import create_spot, spot_offers

URL = "https://api.runpod.io"
_MOST_PAGES = 200
_CREATE_LIMIT_S = 30.0
_SETTLED_AFTER = timedelta(hours=1)
_TRAITS = Traits(
    settle_s=120.0,
    poll_s=5.0,
    death_reads=3,
    death_spread_s=30.0,
    teardown=Teardown.DESTROYED,
    console_url="https://console.runpod.io/pods",
)

_USER_QUERY = {"query": "query{myself{id}}"}


class RunPodProvider:
    """The `runpod` provider, for one key.

    `base_url` is the origin of the API, without a path. `spot` adds spot pods to the offers. `region` limits the offers
    to a data centre.
    """

    name = "runpod"
    guard_shares_key = False

    def __init__(
        self,
        key: Secret,
        clock: Clock,
        *,
        base_url: str = URL,
        spot: bool = False,
        region: str | None = None,
        traits: Traits = _TRAITS,
    ) -> None:
        self.traits = traits
        self._key = key
        self._clock = clock
        self._base_url = base_url.rstrip("/")
        self._spot = spot
        self._region = region
        headers = {"Authorization": f"Bearer {key.reveal()}"}
        self._http = Http(self._base_url, headers=headers, clock=clock, name="runpod")

    def verify(self) -> Account:
        """Check the key by listing pods and deleting a pod that does not exist, which needs full access."""
        list(self._list_pods())
        probe = self._http.request("DELETE", "/v2/pods/gpurun-none")
        missing = ("write access to pods",) if probe.status in (401, 403) else ()
        identity, balance = self._query_identity_and_balance()
        ahead = self._http.clock_ahead_s
        return Account(
            provider=self.name, identity=identity, missing=missing, balance_micros=balance, clock_ahead_s=ahead
        )

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return the known rows at their live price in both clouds; with `spot` also as spot pods at the lowest bid."""
        now = self._clock.wall()
        if not need.count:
            return cpu_offers(self._http, known, now, self._region)
        found = gpu_offers(self._http, need, known, now, self._region)
        return found + (spot_offers(found, self._key, self._base_url) if self._spot else [])

    def create(self, order: Order) -> Instance:
        """Request a pod with the guard as its first process. For a spot offer, bid for the pod instead."""
        from gpurun.providers.guard import runpod_wrapper

        guard = runpod_wrapper()
        if order.offer.spot:
            return create_spot(order, self._key, self._base_url, guard)
        answer = self._post(make_pod_body(order, self._base_url, guard, as_args=False))
        if answer.status == 422 and any(field in describe_runpod_error(answer) for field in ("entrypoint", "cmd")):
            # No pod was created: this API lacks the newer fields for the first program, so use the older one.
            answer = self._post(make_pod_body(order, self._base_url, guard, as_args=True))
            if answer.status == 422 and "args" in describe_runpod_error(answer):
                raise Rejected(
                    f"RunPod accepts no start command, so no pod could end itself ({describe_runpod_error(answer)})"
                )
        if answer.status not in (200, 201, 202):
            raise judge_create_answer(answer)
        return parse_pod(answer.json)

    def find(self, token: str | None) -> list[Instance]:
        """Return every pod that carries the token (None: all of gpurun's), oldest first.

        The token is in the environment and, because that may not be shown, also in the name.
        """
        found: dict[str, Instance] = {}
        try:
            for pod in self._list_pods():
                instance = parse_pod(pod)
                if instance.token and token in (None, instance.token):
                    found[instance.id] = instance
        except Unknown as error:
            raise Unknown(str(error), found=_sort_oldest_first(found)) from error
        return list(_sort_oldest_first(found))

    def read(self, instance_id: str) -> Instance:
        """Return one pod; GONE after a 404, which alone proves nothing: the list of pods must lack it, too."""
        answer = self._http.request("GET", f"/v2/pods/{check_pod_id(instance_id)}")
        if answer.status == 404:
            return Instance(id=instance_id, provider=self.name, token="", run="", state=InstanceState.GONE)
        if answer.status != 200:
            raise explain_runpod_answer(answer)
        read = parse_pod(answer.json)
        if read.id != instance_id:
            raise Unknown(f"RunPod answered with {read.id} to a request for {instance_id}")
        return read

    def destroy(self, instance_id: str) -> None:
        """Request the termination of a pod; unlock it first if necessary.

        It is never only stopped, because the disk of a stopped pod is billed.
        """
        path = f"/v2/pods/{check_pod_id(instance_id)}"
        answer = self._http.request("DELETE", path)
        if answer.status == 409:
            unlocked = self._http.request("PATCH", path, body={"locked": False})
            answer = self._http.request("DELETE", path)
            if answer.status == 409 and unlocked.status != 200:
                words = f"it may be locked, and cannot be unlocked with this key ({describe_runpod_error(unlocked)})"
                raise Unknown(f"RunPod could not terminate the pod: {words}; terminate it in {self.traits.console_url}")
        if answer.status == 409:
            answer = self._http.request("POST", f"{path}/action", body={"action": "terminate"})
        if answer.status not in (200, 202, 204, 404):
            raise explain_runpod_answer(answer)

    def charges(self, instance_id: str, from_wall: float, to_wall: float) -> Charge | None:
        """Return what RunPod billed for these hours, settled an hour after their end; None if it has no record."""
        begin, end = _round_down_to_hour(from_wall), _round_down_to_hour(to_wall) + timedelta(hours=1)
        window = {"startTime": _format_moment(begin), "endTime": _format_moment(end), "bucketSize": "hour"}
        answer = self._http.request("GET", "/v2/billing/pods", query={"podId": check_pod_id(instance_id), **window})
        if answer.status != 200:
            raise explain_runpod_answer(answer)
        records = answer.json.get("records") if isinstance(answer.json, dict) else None
        if not isinstance(records, list):
            raise Unknown("RunPod's billing cannot be read")
        amounts = [
            _parse_amount(record)
            for record in records
            if isinstance(record, dict) and record.get("podId") == instance_id
        ]
        if not amounts:
            return None
        settled = datetime.fromtimestamp(their_wall(self, self._clock), UTC) - end > _SETTLED_AFTER
        return Charge(provider=self.name, instance_id=instance_id, micros=total(*amounts), settled=settled)

    @property
    def endpoint(self) -> str:
        """Return the origin of the API; "" if it is RunPod's own."""
        return "" if self._base_url == URL else self._base_url

    @property
    def clock_ahead_s(self) -> float | None:
        """Return how many seconds this machine's clock is ahead of RunPod's; None before RunPod's first answer."""
        return self._http.clock_ahead_s

    def regions(self) -> tuple[str, ...]:
        """Return the ids of the data centres, as `--region` takes them."""
        return data_centers(self._http)

    def guard_folder(self, instance: Instance) -> str:
        """Return the folder in which the guard of every pod keeps its time."""
        return "/var/lib/gpurun"

    def ask_time(self) -> None:
        """Request the user's id, because the answer carries RunPod's time."""
        self._http.request("POST", "/graphql", body=_USER_QUERY)

    def account_mark(self) -> str:
        """Return the mark of the user or, if GraphQL refuses the key, of the key. Only GraphQL reports the user.

        The answer is cached. Unknown if there is no clear answer, SetupError if REST refuses the key, too.
        """
        return self._mark

    @cached_property
    def _mark(self) -> str:
        answer = self._http.request("POST", "/graphql", body=_USER_QUERY)
        if answer.status >= 500:
            raise explain_runpod_answer(answer)
        user = _parse_user_id(answer.json) if answer.status == 200 else ""
        if user:
            return mark_of_account(self.name, user)
        list(self._list_pods())  # A key that may list pods is valid, even if GraphQL refuses it.
        return mark_of_key(self.name, self._base_url, self._key)

    def _post(self, body: dict[str, Any]) -> Answer:
        if len(json.dumps(body).encode()) > BODY_LIMIT_BYTES:
            raise Rejected(f"the order is larger than the {BODY_LIMIT_BYTES} bytes that RunPod accepts")
        return self._http.request("POST", "/v2/pods", body=body, timeout_s=_CREATE_LIMIT_S)

    def _list_pods(self) -> Iterator[Any]:
        """Yield every pod of the account; Unknown if the list is incomplete, because an absent pod counts as gone."""
        query: dict[str, str] = {}
        for _ in range(_MOST_PAGES):
            answer = self._http.request("GET", "/v2/pods", query=query)
            if answer.status != 200:
                raise explain_runpod_answer(answer)
            page = answer.json
            if not isinstance(page, dict) or not isinstance(page.get("pods"), list):
                raise Unknown("RunPod's list of pods cannot be read")
            yield from page["pods"]
            cursor, more = _parse_next_page(page)
            if not more:
                return
            if not cursor or cursor == query.get("cursor"):
                break
            query = {"cursor": cursor}
        raise Unknown("RunPod's list of pods has more pages, but the next one cannot be read")

    def _query_identity_and_balance(self) -> tuple[str, Micros | None]:
        """Return the account's name and balance from GraphQL; a general name and None if that fails."""
        if graphql.is_installed():
            try:
                data = graphql.ask("query{myself{id email clientBalance}}", self._key, self._base_url)
                me = data["myself"]
                return str(me.get("email") or me.get("id") or "RunPod account"), money(me.get("clientBalance"))
            except (Unknown, SetupError, graphql.GraphqlRefused, KeyError, AttributeError):
                return "RunPod account", None
        return "RunPod account", None


def _sort_oldest_first(found: Mapping[str, Instance]) -> tuple[Instance, ...]:
    return tuple(sorted(found.values(), key=lambda instance: (instance.created_wall or 0.0, instance.id)))


def _parse_user_id(payload: object) -> str:
    """Return the user's id; "" if GraphQL refuses the key, Unknown if its answer cannot be read."""
    if not isinstance(payload, dict) or not ({"data", "errors"} & set(payload)):
        raise Unknown("RunPod's GraphQL gave no complete answer")
    if "INTERNAL_SERVER_ERROR" in str(payload.get("errors")):
        raise Unknown("RunPod's GraphQL failed with an internal error")
    data = payload.get("data")
    me = data.get("myself") if isinstance(data, dict) else None
    return str(me.get("id") or "") if isinstance(me, dict) else ""


def _parse_next_page(page: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the cursor of the next page ("" if it cannot be read), and whether there is a next page."""
    parts = [page, *(page[name] for name in ("pagination", "pageInfo", "meta") if isinstance(page.get(name), dict))]
    for part in parts:
        for name in ("nextCursor", "next_cursor", "cursor", "endCursor"):
            if part.get(name) and part.get("hasNextPage", part.get("hasMore", True)):
                return str(part[name]), True
        if part.get("hasMore") or part.get("hasNextPage"):
            return "", True
    return "", False


def _parse_amount(record: Mapping[str, Any]) -> Micros:
    amount = money(record.get("totalAmount"))
    if amount is None:
        raise Unknown("RunPod's billing has a record without an amount")
    return amount


def _round_down_to_hour(wall: float) -> datetime:
    return datetime.fromtimestamp(wall, UTC).replace(minute=0, second=0, microsecond=0)


def _format_moment(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")

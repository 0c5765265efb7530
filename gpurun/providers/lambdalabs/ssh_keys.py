"""Registers the SSH key that a launch needs, under the run's token, and removes it when the machine is gone."""

from __future__ import annotations

import re
from typing import Any

from gpurun.core.machine_token import parse_token
from gpurun.core.records import Leftover, Order
from gpurun.providers._http import Http
from gpurun.providers.base import Rejected, Unknown
from gpurun.providers.lambdalabs.instances import check_lambda_id, is_id
from gpurun.providers.lambdalabs.parse import (
    NO_SUCH_PATH,
    NOT_THERE,
    code_of,
    describe_lambda_error,
    explain_lambda_answer,
    is_success,
    judge_launch_answer,
    read_data,
)

KIND = "ssh_key"
_IN_USE = ("ssh-keys/key-in-use", "global/conflict")
_COMMENT = re.compile(r"gpurun-deadline=(\S+)")


def register(http: Http, order: Order, public_key: str) -> str:
    """Register a public key for an order. Return its name at Lambda.

    The name is the order's token. If an earlier try of the same run registered the key, the name is that try's token,
    because Lambda may not accept a key twice. Rejected if a different key has the name. A lost answer is harmless,
    because a key costs nothing.
    """
    plain, listed = _strip_comment(public_key), _list_ssh_keys(http, refusing=True)
    same = [_parse_name(key) for key in listed if _strip_comment(str(key.get("public_key"))) == plain]
    if order.token in same:
        return order.token
    if any(_parse_name(key) == order.token for key in listed):
        raise Rejected(f"a different SSH key is registered at Lambda as {order.token}")
    earlier = sorted(name for name in same if (token := parse_token(name)) and token.run_or(order.run) == order.run)
    if earlier:
        return earlier[0]
    # A key cannot have tags, so its comment has the deadline, after which it is not needed.
    body = {"name": order.token, "public_key": f"{plain} gpurun-deadline={int(order.deadline_wall)}"}
    answer = http.request("POST", "/ssh-keys", body=body)
    if not is_success(answer):
        raise judge_launch_answer(answer)
    return order.token


def list_key_names(http: Http) -> list[str]:
    """Return the names of all SSH keys that `http` can list with its API key."""
    return [_parse_name(key) for key in _list_ssh_keys(http)]


def leftover_keys(http: Http, token: str | None) -> list[Leftover]:
    """Return the SSH keys named by the token (None: by any token), including those that a running machine uses."""
    return [
        _build_leftover(key)
        for key in _list_ssh_keys(http)
        if parse_token(_parse_name(key)) and token in (None, _parse_name(key))
    ]


def remove_key(http: Http, leftover: Leftover) -> None:
    """Remove an SSH key; Unknown while a machine still uses it. Harmless if it does not exist."""
    if leftover.kind != KIND:
        raise Rejected(f"gpurun does not create resources of the kind {leftover.kind} at Lambda")
    answer = http.request("DELETE", f"/ssh-keys/{check_lambda_id(leftover.id)}")
    if is_success(answer) or code_of(answer) in (NOT_THERE, NO_SUCH_PATH):
        return
    if code_of(answer) in _IN_USE:
        raise Unknown(f"the SSH key {leftover.id} is still in use ({describe_lambda_error(answer)})")
    raise explain_lambda_answer(answer)


def _list_ssh_keys(http: Http, *, refusing: bool = False) -> list[dict[str, Any]]:
    """Return every SSH key of the account. With `refusing`, a refusal is raised as an error of `create`."""
    answer = http.request("GET", "/ssh-keys")
    if refusing and not is_success(answer):
        raise judge_launch_answer(answer)
    listed = read_data(answer, list)
    if not all(isinstance(key, dict) and is_id(key.get("id")) for key in listed):
        raise Unknown("Lambda listed an SSH key without an id")
    return list(listed)


def _build_leftover(key: dict[str, Any]) -> Leftover:
    name = _parse_name(key)
    token = parse_token(name)
    deadline = _COMMENT.search(str(key.get("public_key")))
    return Leftover(
        provider="lambda",
        kind=KIND,
        id=key["id"],
        run=token.run if token else "",
        token=name,
        deadline_wall=token.deadline_or(deadline[1] if deadline else None) if token else None,
    )


def _parse_name(key: dict[str, Any]) -> str:
    return str(key.get("name"))


def _strip_comment(public_key: str) -> str:
    return " ".join(public_key.split()[:2])

"""Write a plan to a file with `plan -o` and read it with `train`: the request, and its quote at that time.

The file is a request, never an approval. `train` makes a new quote, checks it against the cap, and asks the user again.
The consent to a weak lease is not stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpurun.core.clock import local_time, utc
from gpurun.core.errors import UsageError
from gpurun.core.money import format_rate, format_usd
from gpurun.core.paths import read_regular
from gpurun.core.records import digest_json
from gpurun.core.run_plan import Plan, Quoted, Request
from gpurun.core.untrusted import parse_json

V = 1
KIND = "gpurun plan"
_WRITE_NEW = "Write a new one: gpurun plan … -o plan.json"


def plan_file(request: Request, plan: Plan, now_wall: float) -> str:
    """Return the text of the file. Its paths are absolute, so that `train` can use it in another folder."""
    whole = {
        name: str(Path(path).expanduser().absolute())
        for name in ("data", "identity")
        if (path := getattr(request, name)) and Path(path).expanduser().exists()
    }
    choices = request.choices.model_copy(update={"weak_lease": False})
    quoted = Quoted(
        wall=now_wall,
        recipe_sha256=plan.job.recipe_sha256,
        where=f"{plan.offer.provider} {plan.offer.label}",
        rate_micros_per_hour=plan.offer.rate_micros_per_hour,
        expected_micros=plan.expected_micros,
        worst_micros=plan.worst_micros,
    )
    kept = request.model_copy(update={**whole, "choices": choices, "quoted": quoted})
    body: dict[str, Any] = {"v": V, "kind": KIND, "written_at": utc(now_wall), "request": kept.model_dump(mode="json")}
    return json.dumps({**body, "sha256": digest_json(body)}, indent=2, sort_keys=True) + "\n"


def read_plan_file(path: str) -> Request:
    """Return the request in a file. Raise UsageError if it cannot be read, has another version, or was edited."""
    try:
        body = parse_json(read_regular(Path(path).expanduser()))
    except OSError as error:
        raise UsageError("plan_file.unreadable", f"{path} cannot be read: {error.strerror}.", hint=_WRITE_NEW) from None
    except ValueError:
        raise UsageError("plan_file.malformed", f"{path} is not JSON.", hint=_WRITE_NEW) from None
    if not isinstance(body, dict) or body.get("kind") != KIND:
        what = f"{path} is not a file that `plan -o` wrote."
        raise UsageError("plan_file.other", what, hint=f"{_WRITE_NEW} To continue from a run: gpurun train --from RUN.")
    if body.get("v") != V:
        what = f"{path} has version {body.get('v')}; this gpurun reads version {V}."
        raise UsageError("plan_file.version", what, hint=_WRITE_NEW)
    digest = body.pop("sha256", None)
    try:
        if digest != digest_json(body):
            raise ValueError
        request = Request.model_validate(body["request"])
    except (ValueError, KeyError, ValidationError):
        what = f"{path} was edited since gpurun wrote it."
        hint = f"Change the command, not the file. {_WRITE_NEW}; `train` also takes --max-cost with it."
        raise UsageError("plan_file.edited", what, hint=hint) from None
    return request


def since_quoted(plan: Plan, quoted: Quoted, now_wall: float) -> tuple[str, ...]:
    """Return warnings about what has changed since the file was written."""
    now = (f"{plan.offer.provider} {plan.offer.label}", plan.offer.rate_micros_per_hour, plan.expected_micros)
    when = f"The plan file is from {local_time(quoted.wall, now=now_wall)}"
    changes = []
    if now != (quoted.where, quoted.rate_micros_per_hour, quoted.expected_micros):
        was, rate = format_usd(quoted.expected_micros), format_rate(quoted.rate_micros_per_hour)
        is_now = f"now {format_usd(now[2])} on {now[0]} at {format_rate(now[1])}"
        changes.append(f"{when}, when {was} was expected on {quoted.where} at {rate}; {is_now}.")
    if plan.job.recipe_sha256 != quoted.recipe_sha256:
        changes.append(f"{when}: its recipe has changed since.")
    return tuple(changes)

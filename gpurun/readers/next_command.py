"""Chooses the next command to show after a receipt, and finds the step from which a new rental would continue."""

from __future__ import annotations

from gpurun.core.job_terms import terms_in
from gpurun.core.paths import RunFolder, read_regular
from gpurun.core.receipt_record import Predicate
from gpurun.core.run_plan import Request
from gpurun.jobs.training.continued_training import newest_whole


def next_command(predicate: Predicate, folder: RunFolder, shutdown: str = "") -> str:
    """Return the next command. `shutdown` is the line about the shutdown of the user's own box, or ""."""
    request = predicate["asked"]
    if shutdown.startswith("shutdown "):
        return f"gpurun audit {folder.name}"
    if predicate["teardown"]["is"] == "user_operated" and "imported" not in request:
        return f"gpurun confirm-shutdown {predicate['run']}   # once you have shut the box down"
    recipe = _recipe_argument(folder)
    if (
        recipe
        and terms_in(predicate).has_model
        and request["mode"] == "rehearsal"
        and predicate["training"]["outcome"] == "done"
    ):
        return f"gpurun plan {recipe}   # time and cost of the paid run, on every offer"
    if step := left_at(predicate):
        return f"{continuing_command(predicate)}   # continues after step {step}"
    return f"gpurun audit {predicate['run']}"


def continuing_command(predicate: Predicate) -> str:
    """Return the command that continues a run in a new rental."""
    return f"gpurun {terms_in(predicate).verb} --from {predicate['run']}"


def left_at(predicate: Predicate) -> int | None:
    """Return the step from which a new rental can continue a run that was interrupted; None if it cannot.

    A failed trainer would fail again, so the result is None. Exit code 0 is an exception, as after a stop on the
    machine.
    """
    training = predicate["training"]
    is_cut = training["outcome"] in ("stopped", "none", "lost")
    is_stopped_there = training["outcome"] == "failed" and training["exit_code"] == 0
    is_paid = predicate["asked"]["mode"] != "rehearsal"
    if not is_paid or not (is_cut or is_stopped_there):
        return None
    latest: int | None = predicate["checkpoint"]["latest"]
    return newest_whole(predicate["checkpoint"]["files"]) if terms_in(predicate).has_model else latest


def _recipe_argument(folder: RunFolder) -> str:
    """Return the recipe's name, or its file's path, to type in a command; "" if unknown or if a command was run."""
    try:
        request = Request.from_json(read_regular(folder.request))
    except (OSError, ValueError):
        return ""
    return request.recipe_word if request.recipe else ""

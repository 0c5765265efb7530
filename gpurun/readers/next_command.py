"""What a person types after a receipt, and from which step another rental goes on."""

from __future__ import annotations

from gpurun.core.job_terms import terms_in
from gpurun.core.paths import RunFolder, read_regular
from gpurun.core.receipt_record import Predicate
from gpurun.core.run_plan import Request
from gpurun.jobs.training.continued_training import newest_whole


def next_command(told: Predicate, folder: RunFolder, shutdown: str = "") -> str:
    """Return what a person types next; `shutdown` is what is known of the end of a box of their own."""
    asked = told["asked"]
    if shutdown.startswith("shutdown "):
        return f"gpurun audit {folder.name}"
    if told["teardown"]["is"] == "user_operated" and "imported" not in asked:
        return f"gpurun confirm-shutdown {told['run']}   # once you have shut the box down"
    recipe = _recipe_word(folder)
    if recipe and terms_in(told).has_model and asked["mode"] == "rehearsal" and told["training"]["outcome"] == "done":
        return f"gpurun plan {recipe}   # what the paid run would take, on every offer"
    if step := left_at(told):
        return f"{continuing_command(told)}   # goes on after step {step}"
    return f"gpurun audit {told['run']}"


def continuing_command(told: Predicate) -> str:
    """Return the command that goes on with a run in another rental."""
    return f"gpurun {terms_in(told).verb} --from {told['run']}"


def left_at(told: Predicate) -> int | None:
    """Return the step from which another rental goes on with a run that was cut off; None where it cannot.

    A trainer that failed by itself would again; one that was told to stop by somebody on the machine ended well.
    """
    training = told["training"]
    is_cut = training["outcome"] in ("stopped", "none", "lost")
    is_told = training["outcome"] == "failed" and training["exit_code"] == 0
    is_paid = told["asked"]["mode"] != "rehearsal"
    if not is_paid or not (is_cut or is_told):
        return None
    latest: int | None = told["checkpoint"]["latest"]
    return newest_whole(told["checkpoint"]["files"]) if terms_in(told).has_model else latest


def _recipe_word(folder: RunFolder) -> str:
    """Return the recipe as it was asked for, with the path of a file; "" where it is unknown, or for a command."""
    try:
        request = Request.from_json(read_regular(folder.request))
    except (OSError, ValueError):
        return ""
    return request.recipe_word if request.recipe else ""

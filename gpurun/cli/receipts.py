"""A receipt for this terminal, and what its reader types next."""

from __future__ import annotations

from gpurun.cli.session import Session
from gpurun.core.paths import RunFolder, read_regular
from gpurun.core.receipt_record import Predicate, Receipt
from gpurun.core.run_plan import Request, terms_in
from gpurun.view.receipt_screen import receipt_screen
from gpurun.view.styled_text import render


def receipt_text(receipt: Receipt, folder: RunFolder, session: Session, shutdown: str = "") -> str:
    """A receipt for this terminal, with what a person types next."""
    is_shut = shutdown.startswith("shutdown ")  # It is done, so it is not the next thing to do.
    then = f"gpurun audit {folder.name}" if is_shut else next_command(receipt.predicate, folder)
    lines = receipt_screen(receipt, session.style, now=session.clock.wall(), shutdown=shutdown, then=then)
    return render(lines, session.style)


def _recipe_word(folder: RunFolder) -> str:
    """The recipe as it was asked for, with the path of a file, of which the receipt has the name; "" where unknown.

    A command has no recipe.
    """
    try:
        request = Request.from_json(read_regular(folder.request))
    except (OSError, ValueError):
        return ""
    return request.recipe_word if request.recipe else ""


def next_command(told: Predicate, folder: RunFolder) -> str:
    """What a person types after this."""
    asked = told["asked"]
    if told["teardown"]["is"] == "user_operated" and "imported" not in asked:
        return f"gpurun confirm-shutdown {told['run']}   # once you have shut the box down"
    recipe = _recipe_word(folder)
    if recipe and asked["mode"] == "rehearsal" and told["training"]["outcome"] == "done":
        return f"gpurun plan {recipe}   # what the paid run would take, on every offer"
    if step := left_at(told):
        return f"{going_on(told)}   # goes on after step {step}"
    return f"gpurun audit {told['run']}"


def going_on(told: Predicate) -> str:
    """The command that goes on with a run in another rental."""
    return f"gpurun {terms_in(told).verb} --from {told['run']}"


def left_at(told: Predicate) -> int | None:
    """The step from which another rental goes on with a run that was cut off; None where there is nothing to go on.

    A trainer that failed by itself would again; one that was told to stop by somebody on the machine ended well.
    """
    from gpurun.planning.continue_from import newest_whole

    training = told["training"]
    is_cut = training["outcome"] in ("stopped", "none", "lost")
    is_told = training["outcome"] == "failed" and training["exit_code"] == 0
    is_paid = told["asked"]["mode"] != "rehearsal"
    if not is_paid or not (is_cut or is_told):
        return None
    latest: int | None = told["checkpoint"]["latest"]
    return newest_whole(told["checkpoint"]["files"]) if terms_in(told).has_model else latest

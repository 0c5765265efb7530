"""Receipts, brought from the ledger that makes them to the view that shows them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from gpurun.cli.confirm import shutdown_line
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import VerificationFailed
from gpurun.core.money import Micros
from gpurun.core.paths import Home, RunFolder
from gpurun.core.plan import Request
from gpurun.ledger.receipt import Receipt, read_receipt
from gpurun.ledger.signing import Signature
from gpurun.lifecycle.runs import Sight, find_run
from gpurun.view.paint import render
from gpurun.view.quantities import format_bytes
from gpurun.view.receipt import FileProof, PhaseTime, ReceiptView, receipt_markdown, receipt_screen

_PHASES = ("boot", "connect", "upload", "unpack", "training", "collect", "destroy", "other")
_IN_TRAINING = ("import", "compile", "steps", "eval", "checkpoint", "other")
_TIMES = ("asked", "exists", "ready", "shipped", "train_start", "train_end", "collected", "gone")


def show_receipt(session: Session, run: str, *, markdown: bool) -> Result:
    """A run's receipt as text, Markdown or data."""
    folder = session.home.run(find_run(session.home, run))
    receipt = read_receipt(session.home, folder)
    try:
        shutdown = shutdown_line(session, folder.name, receipt)
        view = replace(view_of(receipt, folder), shutdown=shutdown)
        if shutdown.startswith("shutdown "):  # It is done, so it is not the next thing to do.
            view = replace(view, next_command=f"gpurun audit {folder.name}")
        text = receipt_markdown(view) if markdown else receipt_text(view, session)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as odd:
        what = f"{folder.receipt} lacks what a receipt states, or states it in another form."
        hint = f"`gpurun audit {folder.name}` says what differs; put it back from a copy."
        raise VerificationFailed("receipt.unreadable", what, hint=hint) from odd
    data: dict[str, Any] = {"statement": receipt.statement, "sha256": receipt.sha256, "signature": receipt.signature}
    data["shutdown"] = shutdown or None
    error = _error(session, folder.name, receipt.signature)
    if error is not None:
        return Result(data=data, text=text, errors=(error,), exit_code=error.exit_code)
    return Result(data=data, text=text)


def _error(session: Session, run: str, found: Signature) -> VerificationFailed | None:
    """What a script is told of a signature that does not hold here; a receipt may be unsigned."""
    if found is Signature.BAD:
        what, hint = "The signature does not fit the receipt.", f"gpurun audit {run}"
        return VerificationFailed("receipt.signature", what, hint=hint)
    if found is Signature.UNKNOWN_KEY:
        what = "The receipt is signed by a key that this home does not know."
        hint = f"If you know whose it is, put its public key there: {session.home.keys}/NAME.pub"
        return VerificationFailed("receipt.unknown_key", what, hint=hint)
    return None


def receipt_view(home: Home, sight: Sight) -> ReceiptView:
    """The receipt of a run that has just ended."""
    return view_of(read_receipt(home, sight.folder), sight.folder)


def receipt_text(view: ReceiptView, session: Session) -> str:
    """A receipt for this terminal."""
    return render(receipt_screen(view, session.style, now=session.clock.wall()), session.style)


def view_of(receipt: Receipt, folder: RunFolder) -> ReceiptView:
    """A receipt's statement as the view wants it; of the run's folder only what to type next."""
    told: dict[str, Any] = receipt.predicate
    digests, cost, training = told["digests"], told["cost"], told["training"]
    files = [FileProof(one["name"], one["sha256"]) for one in told["checkpoint"]["files"] if one["kind"] != "sample"]
    return ReceiptView(
        run=told["run"],
        recipe=_recipe(told["asked"]),
        verdict=told["verdict"]["is"],
        sentence=told["verdict"]["says"],
        seq=told["seq"],
        digest=receipt.sha256,
        previous=told["prev"],
        signature=_signature(receipt.signature),
        recipe_sha256=digests["recipe"],
        trainer_sha256=digests["trainer"],
        data_sha256=digests["data"],
        gpurun_version=told["gpurun"]["version"],
        sent=_sent(told.get("shipping") or {}, is_local=told["asked"]["provider"] == "local"),
        instance=_instance(told["instance"]),
        machine=_machine(told),
        timeline=[(name, _wall(told["timeline"][name])) for name in _TIMES],
        training_s=training["seconds"]["train_s"],
        billable_s=told["runtime"]["billable_s"],
        **_times(told["runtime"]),
        cost_micros=_micros(cost["upper_bound_micros"]),
        cost_label=cost["is"],
        billed_micros=_micros(cost["billed_micros"]),
        cap_micros=_micros(cost["cap_micros"]),
        result=_result(training, begun=_wall(told["timeline"]["train_start"]) is not None),
        teardown=told["teardown"]["is"] or "",
        proof=_proof(told["teardown"]),
        proof_sha256=_proof_digest(told["teardown"]["evidence"]),
        checkpoints=files,
        missing=[str(one) for one in told["checkpoint"].get("missing") or ()],
        incidents=[f"{one['code']}: {one['message']}" for one in told["incidents"]],
        log_lines=training["log"]["lines"],
        sample=_sample(told["sample"]),
        next_command=_next(told, folder),
    )


def _sent(shipping: dict[str, Any], *, is_local: bool) -> list[str]:
    """Which bytes went which way; receipts of older versions, and of runs that shipped nothing, do not say."""
    ways = {
        "by_ssh_bytes": "to the run's own folder here" if is_local else "over SSH",
        "to_bucket_bytes": f"to {shipping.get('bucket')} before renting",
        "from_bucket_bytes": "from there to the machine",
    }
    return [f"{format_bytes(shipping[key])} {way}" for key, way in ways.items() if shipping.get(key) is not None]


def _times(runtime: dict[str, Any]) -> dict[str, Any]:
    """Where the paid seconds went, and what the plan had for it; receipts of older versions say less."""
    plan = runtime.get("planned") or {}
    limits, spent, inside = plan.get("limits_s", {}), runtime["phases_s"], runtime.get("training") or {}
    expected, told = plan.get("training_s"), inside.get("seconds") or {}
    return {
        "phases": [PhaseTime(name, spent[name], limits.get(name)) for name in _PHASES if name in spent],
        "expected_train_s": (float(expected[0]), float(expected[1])) if expected else None,
        "in_training": [PhaseTime(name, told[name]) for name in _IN_TRAINING if name in told],
    }


def _signature(found: Signature) -> Literal["signed", "unsigned", "bad"]:
    match found:
        case Signature.OK:
            return "signed"
        case Signature.UNSIGNED:
            return "unsigned"
    return "bad"


def _wall(stamp: str) -> float | None:
    """A UTC stamp as seconds; a time that is not known has none."""
    return None if stamp == "unknown" else datetime.fromisoformat(stamp).timestamp()


def _micros(amount: int | None) -> Micros | None:
    return None if amount is None else Micros(amount)


def _instance(told: dict[str, Any] | None) -> str:
    if told is None:
        return "none was made"
    gpu = f"{told['gpu_count']}×{told['gpu']}" if told["gpu_count"] else "cpu"
    return f"{told['provider']} {told['id']}, {gpu}, {told['region']}"


def _machine(told: dict[str, Any]) -> list[str]:
    """Platform, torch and device, as the machine itself told them."""
    hello = ((told["instance"] or {}).get("facts") or {}).get("hello") or {}
    start = told["training"]["start"]["event"] or {}
    torch = (hello.get("torch") or {}).get("version")
    device = start.get("cuda_name") or start.get("device")
    parts = [hello.get("platform"), f"torch {torch}" if torch else None, f"device {device}" if device else None]
    return [str(part) for part in parts if part]


def _result(training: dict[str, Any], *, begun: bool) -> str:
    """One line of what came out."""
    figures = training["figures"]
    step, loss, best = figures.get("last_step"), figures.get("last_loss"), figures.get("best_val_loss")
    nothing = "CUT OFF" if begun else "NEVER STARTED"
    words = [nothing if training["outcome"] == "none" else training["outcome"].upper()]
    words += [f"step {step}"] if step is not None else []
    words += [f"loss {loss:.4f}"] if isinstance(loss, float) else []
    words += [f"best val {best:.4f}"] if isinstance(best, float) else []
    return " · ".join([*words, *([training["reason"]] if training["outcome"] == "stopped" else [])])


def _proof(teardown: dict[str, Any]) -> str:
    """The reads behind the last machine's end; of a box of the user's own only its release was read."""
    evidence = teardown["evidence"]
    if not evidence or evidence[-1]["reads"] is None or teardown["is"] == "user_operated":
        return ""
    last = evidence[-1]
    over = f" over {last['spread_s']:.0f} s" if last["spread_s"] else ""
    return f"{last['reads']} read{'s' if last['reads'] > 1 else ''} GONE{over} + absent from the list"


def _proof_digest(evidence: list[dict[str, Any]]) -> str:
    return str(evidence[-1]["evidence_sha256"] or "") if evidence else ""


def _recipe(asked: dict[str, Any]) -> str:
    """What was trained, in which form, and what it went on from."""
    before = asked.get("continues")
    since = f", from {before['run']} after step {before['step']}" if before else ""
    return f"{asked['recipe']} ({asked['form']}{since})"


def _sample(sample: dict[str, Any] | None) -> str:
    """What the model wrote, with the prompt that it went on from; a translation stands below its source."""
    prompt, text = (str(sample.get(key, "")) for key in ("prompt", "text")) if sample else ("", "")
    # The record has a prompt in one line of bounded length, and the text as it was.
    prompt = prompt.replace(r"\u{a}", "\n").replace(r"\u{9}", "    ")
    return text if text.startswith(prompt.removesuffix("…")) else f"{prompt}\n{text}"


def _recipe_word(folder: RunFolder) -> str:
    """The recipe as it was asked for, with the path of a file, of which the receipt has the name; "" where unknown."""
    try:
        return Request.from_json(folder.request.read_bytes()).recipe_word
    except (OSError, ValueError):
        return ""


def _next(told: dict[str, Any], folder: RunFolder) -> str:
    """What a person types after this."""
    asked = told["asked"]
    if told["teardown"]["is"] == "user_operated":
        return f"gpurun confirm-shutdown {told['run']}   # once you have shut the box down"
    recipe = _recipe_word(folder)
    if recipe and asked["mode"] == "rehearsal" and told["training"]["outcome"] == "done":
        return f"gpurun plan {recipe}   # what the paid run would take, on every offer"
    step = told["checkpoint"]["latest"]
    if asked["mode"] != "rehearsal" and told["training"]["outcome"] in ("stopped", "none") and step:
        return f"gpurun train --from {told['run']}   # goes on after step {step}"
    return f"gpurun audit {told['run']}"

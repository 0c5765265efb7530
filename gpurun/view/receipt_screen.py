"""The receipt for a terminal. `receipt_markdown.py` has the form to hand in or to paste.

What was not measured is left out or called unknown, never guessed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from gpurun.core.clock import local_time
from gpurun.core.job_terms import terms_in
from gpurun.core.money import Figure, Micros, format_usd, left_of, percent_of, total
from gpurun.core.places import place_facts
from gpurun.core.receipt_record import UNKNOWN as NOT_KNOWN
from gpurun.core.receipt_record import Predicate, Receipt, ReceiptMachine, ReceiptTrials, Runtime, on_gpu
from gpurun.core.untrusted import safe_line, safe_text
from gpurun.view.number_format import UNKNOWN, format_bytes, format_cards, format_duration, format_whole, short_hash
from gpurun.view.receipt_files import cells_home, files_missing
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, count_cells, fold, line, spell, spread, wrap
from gpurun.view.table import fields
from gpurun.view.trial_table import TrialLine, trial_table

_SIGNED = {"ok": "signed", "unsigned": "unsigned"}
_PHASES = ("boot", "connect", "setup", "upload", "unpack", "training", "collect", "hold", "destroy", "other")
_IN_TRAINING = ("import", "compile", "steps", "eval", "checkpoint", "other")
_TIMES = ("asked", "exists", "ready", "shipped", "train_start", "train_end", "collected", "gone")
_TEARDOWNS = {
    "destroyed": ("Destroyed", "PROVEN", "good"),
    "processes_killed_host_kept": ("Ended", "PROVEN, this machine stays", "good"),
    "released": ("Released", "PROVEN, the provider no longer has it", "good"),
    "stopped_disk_billed": ("Stopped", "its disk is still billed", "warn"),
    "expires_at": ("Teardown", "expires by itself", "warn"),
    "user_operated": ("Teardown", "you must end this machine; gpurun cannot", "warn"),
    "not_proven": ("Teardown", "NOT PROVEN, may be billing", "bad"),
    "": ("Teardown", "no machine was made, so there is none to end", ""),
}
_MOST_FILES = 20
_MOST_TRIALS = 40
NOT_HERE = "but its checkpoint is not at home"
"""Added to the best validation loss if its checkpoint was not downloaded."""


def receipt_screen(receipt: Receipt, style: Style, *, now: float, shutdown: str = "", then: str = "") -> list[Line]:
    """Return the receipt for a terminal.

    `shutdown` is what is known about the end of the user's own box. `then` is the next command to type.
    """
    predicate = receipt.predicate
    mark = {
        "signed": Span("signed ✔", "good"),
        "unsigned": Span("unsigned", "warn"),
        "bad": Span("BAD SIGNATURE", "bad"),
    }
    title, chain = Span(f"#{predicate['seq']:04d}  ", "title"), Span(f"sha256 {short_hash(receipt.sha256)}  ", "dim")
    right = line(title, chain, mark[signature_word(receipt)])
    lines = [line(), *_draw_title(line("  ", Span(f"Receipt {predicate['run']}", "title")), right, style), line()]
    pairs = receipt_pairs(predicate, now=now, shutdown=shutdown, then=then)
    lines += fields([(name, parts) for name, parts in pairs if parts], style)
    if trials := predicate["training"].get("trials"):
        lines += [line(), *trial_table(trial_lines(trials), style, most=_MOST_TRIALS)]
    for title_of, texts in (
        ("log", log_lines(predicate)),
        ("sample", safe_text(sample_text(predicate), most_lines=12)),
    ):
        if any(texts):
            lines += [line(), line(Span(f"  ── {title_of} " + "─" * (style.width - 6 - len(title_of)), "dim"))]
            for text in texts:
                lines += fold(text, style, indent=2)
    verdict = predicate["verdict"]
    lines += [line(), *wrap(verdict["says"], style, indent=2, look="good" if on_gpu(verdict) else "warn")]
    return lines + wrap(verdict.get("not_shown", ""), style, indent=2, look="dim")


def trial_lines(trials: ReceiptTrials) -> list[TrialLine]:
    """Return the rows of a sweep's receipt for the table of trials."""
    return [
        TrialLine(
            number=row["trial"], state=row["state"], params=row["params"], step=row["step"], steps=row["steps"],
            loss=row["result"], seconds=row["seconds"], micros=None if row["micros"] is None else Micros(row["micros"]),
            why=row.get("why", ""), is_best=row["trial"] == trials["best"],
        )
        for row in trials["rows"]
    ]  # fmt: skip


def signature_word(receipt: Receipt) -> str:
    """Return the result of checking a receipt's signature: "signed", "unsigned" or "bad"."""
    return _SIGNED.get(receipt.signature, "bad")


def hardware_words(predicate: Predicate) -> str:
    """Return the rented machine, and what it reported about itself."""
    return " · ".join((_instance(predicate["instance"]), *(str(part) for part in _machine(predicate))))


def shutdown_words(predicate: Predicate) -> Span:
    """Return how the machine ended, and its proof."""
    ended = predicate["teardown"]["is"] or ""
    _, words, look = _TEARDOWNS.get(ended, ("Teardown", ended, "bad"))
    return Span(" · ".join(filter(None, (words, _proof(predicate)))), look)


def cost_label(predicate: Predicate) -> str:
    """Return a label that states how exactly the cost is known."""
    place = place_facts(predicate["asked"]["provider"])
    if place.is_queued and not any(rental["rate_micros_per_hour"] for rental in predicate["cost"]["rentals"]):
        return place.why_free
    says = predicate["cost"].get("says", "")
    is_plain = predicate["cost"]["is"] != Figure.BOUND and not says.startswith(("at most", "not observed"))
    return predicate["cost"]["is"] if is_plain else says or predicate["cost"]["is"]


def _draw_title(title: Line, right: Line, style: Style) -> list[Line]:
    """Return title and number in one line; in two lines if the title would be cut."""
    if count_cells(title) + 2 + count_cells(spell(span, style) for span in right) <= style.width:
        return [spread(title, right, style)]
    return [title, (Span("  "), *right)]


def receipt_pairs(predicate: Predicate, *, now: float, shutdown: str, then: str = "") -> list[tuple[str, list[Cell]]]:
    """Return the fields of the terminal's and the Markdown form, in order."""
    ended, digests, prev = predicate["teardown"]["is"] or "", predicate["digests"], predicate["prev"]
    name, ending, look = _TEARDOWNS.get(ended, ("Teardown", ended, "bad"))
    closed = Span(shutdown, "bad" if shutdown.startswith("SHUTDOWN NOT") else "good")
    proofs = predicate["teardown"]["evidence"]
    evidence = _format_digest("evidence", proofs[-1]["evidence_sha256"] or "") if proofs else ""
    chain = _format_digest("after", prev) if prev.strip("0") else "the first receipt of this home"
    terms = terms_in(predicate)
    whose = predicate["asked"].get("trainer", "trainer") if terms.has_model else "folder"
    trained = [_format_digest(whose, digests["trainer"]), _format_digest("data", digests["data"])]
    incidents = [f"{incident['code']}: {incident['message']}" for incident in predicate["incidents"]]
    return [
        (terms.label, [_recipe(predicate), *_variables(predicate), _format_digest("sha256", digests["recipe"])]),
        ("Shipped", [*trained, f"by gpurun {predicate['gpurun']['version']}"]),
        ("Sent", _sent(predicate)),
        ("Imported", _imported(predicate)),
        ("Instance", [_instance(predicate["instance"])] if "imported" not in predicate["asked"] else []),
        ("Machine", _machine(predicate)),
        ("Timeline", [f"{step} {_format_time(wall, now)}" for step, wall in times_of(predicate)]),
        ("Runtime", _runtime(predicate)),
        ("Paid time", _phases(predicate["runtime"], terms.doing, is_of_one="legs" not in predicate)),
        ("In training", _in_training(predicate["runtime"]) if terms.has_model else []),
        ("GPU", _gpu_use(predicate)),
        ("Sessions", _sessions(predicate)),
        ("Cost", _cost(predicate)),
        ("Legs", _legs(predicate)),
        ("Result", [Span(_result(predicate), "title")]),
        ("Why", _why_failed(predicate)),
        *cells_home(predicate),
        ("Not home", files_missing(predicate)),
        (name, [Span(ending, look), _proof(predicate), evidence, closed]),
        (
            "Warnings",
            [Span(warning, "warn") for warning in predicate["training"].get("warnings", {"lines": []})["lines"]],
        ),
        ("Incidents", [Span(incident, "warn") for incident in incidents]),
        ("Chain", [chain]),
        ("Next", [Span(then, "accent")] if then else []),
    ]


def _format_digest(word: str, digest: str) -> str:
    return f"{word} {short_hash(digest)}" if digest else ""


def times_of(predicate: Predicate) -> list[tuple[str, float | None]]:
    """Return when each event was seen, in seconds since the epoch; None if that is not known."""
    stamps: dict[str, Any] = {**predicate["timeline"]}
    known = {name: datetime.fromisoformat(stamps[name]) for name in _TIMES if stamps[name] != NOT_KNOWN}
    words = {name: name.replace("train", terms_in(predicate).verb).replace("_", " ") for name in _TIMES}
    return [(words[name], known[name].timestamp() if name in known else None) for name in _TIMES]


def _format_time(wall: float | None, now: float) -> str:
    return UNKNOWN if wall is None else local_time(wall, now=now)


def log_lines(predicate: Predicate) -> list[str]:
    """Return the lines of the trainer's log that the receipt quotes."""
    return [safe_line(text) for text in predicate["training"]["log"]["lines"]]


def _recipe(predicate: Predicate) -> str:
    """Return what was trained, in which form, and the run that it continued from."""
    request = predicate["asked"]
    before = request.get("continues")
    of = f" of {before['steps']}" if before and "steps" in before else ""
    after = f" after step {before['step']}{of}" if before and before["step"] else ""
    since = f", from {before['run']}{after}" if before else ""
    if command := request.get("command"):
        return f"{shlex.join(command['argv'])}{since}"
    form = f" ({request['form']}{since})" if terms_in(predicate).has_model else since
    return f"{request['recipe']}{form}"


def _variables(predicate: Predicate) -> list[Cell]:
    """Return the names of the variables that a command was given."""
    command = predicate["asked"].get("command")
    names = [*command["env"], *(f"{name} (secret)" for name in command["secrets"])] if command else []
    return [f"with {', '.join(names)}"] if names else []


def _gpu_use(predicate: Predicate) -> list[Cell]:
    """Return in how many of its samples the machine's agent found a GPU busy, and the most memory in use."""
    use = predicate["training"].get("gpu_use")
    if use is None:
        return []
    own = f", {use['own']} by a process of this run" if use["own"] else ""
    return [f"busy in {use['busy']} of {use['looks']} samples{own}", f"{use['most_mib'] / 1024:.1f} GiB at most"]


def _sessions(predicate: Predicate) -> list[Cell]:
    """Return how much a dev box was used in its terminals."""
    sessions = predicate["training"].get("sessions")
    if sessions is None:
        return []
    count = "1 terminal" if sessions["terminals"] == 1 else f"{sessions['terminals']} terminals"
    times = f"open for {format_duration(sessions['open_s'])}", f"in use for {format_duration(sessions['used_s'])}"
    return [count, *times, "as reported by the machine"]


def _sent(predicate: Predicate) -> list[Cell]:
    """Return how many bytes were uploaded by each route; [] for a receipt without that record."""
    shipping, is_local = predicate.get("shipping"), place_facts(predicate["asked"]["provider"]).is_here
    if shipping is None:
        return []
    ways = (
        (shipping["by_ssh_bytes"], "to the run's own folder here" if is_local else "over SSH"),
        (shipping["to_bucket_bytes"], f"to {shipping['bucket']} before renting"),
        (shipping["from_bucket_bytes"], "from there to the machine"),
        (shipping.get("public_bytes"), f"downloaded by the machine: {shipping.get('public')}"),
    )
    return [f"{format_bytes(sent)} {way}" for sent, way in ways if sent is not None]


def _instance(machine: ReceiptMachine | None) -> str:
    if machine is None:
        return "none was made"
    gpu = format_cards(machine["gpu"], machine["gpu_count"], machine.get("nodes", 1))
    at = f", asked at {machine['endpoint']}" if machine.get("endpoint") else ""
    return f"{machine['provider']} {machine['id']}, {gpu}, {machine['region']}{at}"


def _imported(predicate: Predicate) -> list[Cell]:
    """Return the origin of a run that was imported from a notebook."""
    imported = predicate["asked"].get("imported")
    if imported is None:
        return []
    by = f"made by gpurun {imported['gpurun_version']}"
    place = f"from a notebook on {imported['platform']}, as it reported"
    return [place, by, _format_digest("evidence", imported["evidence_sha256"])]


def _machine(predicate: Predicate) -> list[Cell]:
    """Return platform, torch and device, as the machine reported them."""
    machine, start = predicate["instance"], predicate["training"]["start"]["event"] or {}
    facts = machine["facts"] if machine else None
    hello: dict[str, Any] = (facts["hello"] if facts else None) or {}
    torch = (hello.get("torch") or {}).get("version")
    device = start.get("cuda_name") or start.get("device")
    parts = [hello.get("platform"), f"torch {torch}" if torch else None, f"device {device}" if device else None]
    return [str(part) for part in parts if part]


def _runtime(predicate: Predicate) -> list[Cell]:
    trained_s, billable_s = predicate["training"]["seconds"]["train_s"], predicate["runtime"]["billable_s"]
    doing = terms_in(predicate).doing
    unknown = f"{doing} unknown" if _is_begun(predicate) else "never started"
    train = unknown if trained_s is None else f"{format_duration(trained_s)} {doing}"
    if trained_s is not None and (machine_s := predicate["training"]["seconds"].get("told_s")) is not None:
        own = f"{format_duration(machine_s)} by the machine's clock"
        train = f"{format_duration(trained_s)} until the end of {doing} was seen, {own}"
    return [train, "billable unknown" if billable_s is None else f"{format_duration(billable_s)} billable"]


def _is_begun(predicate: Predicate) -> bool:
    return predicate["timeline"]["train_start"] != NOT_KNOWN or "imported" in predicate["asked"]


def _phases(runtime: Runtime, activity: str, *, is_of_one: bool) -> list[Cell]:
    """Return how long each paid phase took, with its limit in the plan. Phases without time and limit are left out.

    The plan limits a phase on one machine; unless `is_of_one`, the times are those of several machines, and no limit is
    shown. `activity` is the word for the phase of this kind of job, such as "training".
    """
    planned, spent = runtime.get("planned") if is_of_one else None, runtime["phases_s"]
    limits = planned["limits_s"] if planned else {}
    cells: list[Cell] = []
    for name in (phase for phase in _PHASES if phase in spent):
        seconds, limit_s = spent[name], limits.get(name)
        limit = "" if limit_s is None else f" of {format_duration(limit_s)}"
        late = limit_s is not None and seconds > limit_s
        if int(seconds) or limit:
            shown = activity if name == "training" else name
            cells.append(Span(f"{shown} {format_duration(seconds)}{limit}", "warn" if late else ""))
    expected = planned["training_s"] if planned else None
    if expected and cells:
        cells.append(f"{activity} expected {format_duration(expected[0])} to {format_duration(expected[1])}")
    return cells


def _in_training(runtime: Runtime) -> list[Cell]:
    training = runtime.get("training")
    inside = (training["seconds"] if training else None) or {}
    cells: list[Cell] = [f"{name} {format_duration(inside[name])}" for name in _IN_TRAINING if int(inside.get(name, 0))]
    return [*cells, "as reported by the machine"] if cells else []


def _cost(predicate: Predicate) -> list[Cell]:
    cost, cap = predicate["cost"], predicate["cost"]["cap_micros"]
    upper = None if cost["upper_bound_micros"] is None else Micros(cost["upper_bound_micros"])
    parts: list[Cell] = ["unknown" if upper is None else Span(format_usd(upper), "money"), cost_label(predicate)]
    if (says := cost.get("says")) and says not in parts:
        parts.append(says)
    if cost["billed_micros"] is not None:
        parts.append(f"provider bill {format_usd(Micros(cost['billed_micros']))}")
    if (on_demand := cost.get("on_demand_micros")) is not None:
        parts.append(f"on demand, by the price of then: about {format_usd(Micros(on_demand))}")
    if (used := cost.get("gpu_hours")) is not None:
        parts.append(_gpu_hours(used, predicate["asked"].get("max_gpu_hours")))
    if cap is None:
        return parts
    limit = f"cap {format_usd(Micros(cap))}"
    if upper is not None and cost["cap_kept"] is None:
        return [*parts, f"{limit}, unknown whether kept"]
    if upper is not None and upper > cap:
        return [*parts, Span(f"{limit} NOT KEPT, {format_usd(left_of(upper, Micros(cap)))} over it", "bad")]
    return [*parts, limit + ("" if upper is None else f", used {percent_of(upper, Micros(cap)):.0f} %")]


def _legs(predicate: Predicate) -> list[Cell]:
    """Return the machines of the run in order, each with its cost, its first step, and how it ended."""
    cells: list[Cell] = []
    for leg in predicate.get("legs", []):
        cards = format_cards(str(leg["gpu"]), leg["gpu_count"] or 0, 1)
        where = f"{leg['provider']} {cards}{' spot' if leg['spot'] else ''}"
        cost = "cost unknown" if leg["micros"] is None else format_usd(Micros(leg["micros"]))
        start = f"from step {format_whole(leg['step'])}" if leg["step"] else "from the beginning"
        twice = f", {format_whole(leg['again'])} steps repeated" if leg["again"] else ""
        dollars = f" ({format_usd(Micros(leg['again_micros']))})" if "again_micros" in leg else ""
        why = f", ended: {safe_line(leg['why'])}" if leg.get("why") else ""
        cells.append(f"leg {leg['leg']}: {where}, {start}{twice}{dollars}, {cost}{why}")
    return [*cells, *_legs_in_all(predicate)]


def _legs_in_all(predicate: Predicate) -> Iterator[Cell]:
    """Yield the steps that were trained twice in all legs, and the cost of an uninterrupted run on demand, if known.

    Both are estimates, from each machine's training time and its number of steps.
    """
    legs = predicate.get("legs", [])
    again = [leg for leg in legs if leg["again"]]
    if len(again) > 1 and all("again_micros" in leg for leg in again):
        steps, dollars = sum(leg["again"] for leg in again), total(*(Micros(leg["again_micros"]) for leg in again))
        yield f"trained twice in all: {format_whole(steps)} steps, about {format_usd(dollars)}"
    if legs and all("on_demand_micros" in leg for leg in legs):
        dollars = total(*(Micros(leg["on_demand_micros"]) for leg in legs))
        yield f"uninterrupted and on demand, at that time's prices: about {format_usd(dollars)}"


def _gpu_hours(used: float, most: float | None) -> Cell:
    """Return the GPU-hours used on a cluster, and their limit."""
    if most is None:
        return f"{used:.2f} GPU-hours"
    words = f"{used:.2f} of {most:g} GPU-hours"
    return words if used <= most else Span(f"{words}, {used - most:.2f} OVER", "bad")


def _result(predicate: Predicate) -> str:
    """Return the result in one line."""
    training = predicate["training"]
    figures = training["figures"]
    step, loss, best = figures.get("last_step"), figures.get("last_loss"), figures.get("best_val_loss")
    nothing = "CUT OFF" if _is_begun(predicate) else "NEVER STARTED"
    words = [nothing if training["outcome"] == "none" else training["outcome"].upper()]
    if not terms_in(predicate).has_model and training["exit_code"] is not None:
        words += [f"exit code {training['exit_code']}"]
    words += [f"step {step}"] if step is not None else []
    words += [f"loss {loss:.4f}"] if isinstance(loss, float) else []
    words += [_best_val(predicate, best)] if isinstance(best, float) else []
    core = figures.get("core")
    words += [f"CORE {core['core']:.4f}"] if isinstance(core, dict) and isinstance(core.get("core"), float) else []
    is_reasoned = training["outcome"] == "stopped" or (training["outcome"], training["reason"]) == ("done", "idle")
    return " · ".join([*words, *([training["reason"]] if is_reasoned else [])])


def _why_failed(predicate: Predicate) -> list[Cell]:
    """Return why a job failed or was lost, from the record's message."""
    training = predicate["training"]
    return [Span(safe_line(training["message"]), "warn")] if training["outcome"] in ("failed", "lost") else []


def _best_val(predicate: Predicate, loss: float) -> str:
    """Return the lowest loss of all evaluations, even if no checkpoint was saved at that step."""
    kept = predicate["checkpoint"]["best"]
    step, kept_loss = (kept.get("step"), kept.get("val_loss")) if isinstance(kept, dict) else (None, None)
    if not terms_in(predicate).has_model:  # For a command it is not known which of its outputs had that loss.
        return f"best val {loss:.4f}"
    files = predicate["checkpoint"]["files"]
    is_kept, is_home = kept_loss == loss, any((file["kind"], file["step"]) == ("weights", step) for file in files)
    # A run that continued another run has that run's best checkpoint, which may be the better one.
    if (is_kept and is_home) or (isinstance(kept_loss, float) and kept_loss < loss):
        return f"best val {loss:.4f}"
    return f"best val {loss:.4f}" + (f" at step {step}" if is_kept else "") + f", {NOT_HERE}"


def _proof(predicate: Predicate) -> str:
    """Return the readings that prove the last machine's end; "" without readings, and for the user's own box."""
    evidence = predicate["teardown"]["evidence"]
    last = evidence[-1] if evidence and predicate["teardown"]["is"] != "user_operated" else None
    reads = last["reads"] if last else None
    if last is None or reads is None:
        return ""
    over = f" over {last['spread_s']:.0f} s" if last["spread_s"] else ""
    return f"{reads} read{'s' if reads > 1 else ''} GONE{over} + absent from the list"


def sample_text(predicate: Predicate) -> str:
    """Return what the model wrote, with its prompt before it. A translation is below its source."""
    if predicate["sample"] is None:
        return ""
    text = predicate["sample"]["text"]
    # The record has the prompt in one line of limited length, and the text unchanged.
    prompt = predicate["sample"]["prompt"].replace(r"\u{a}", "\n").replace(r"\u{9}", "    ")
    return text if text.startswith(prompt.removesuffix("…")) else f"{prompt}\n{text}"

"""The receipt as a person reads it on a terminal; `receipt_markdown.py` has the same to hand in or to paste.

Unknown stays unknown: what nobody measured is left out or called unknown, never guessed.
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
from gpurun.core.receipt_record import Predicate, Receipt, ReceiptMachine, Runtime, TrialsTold, on_gpu
from gpurun.core.untrusted import safe_line, safe_text
from gpurun.view.number_format import UNKNOWN, format_bytes, format_cards, format_duration, short_hash
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
    "released": ("Released", "PROVEN, the provider has it no more", "good"),
    "stopped_disk_billed": ("Stopped", "its disk is still billed", "warn"),
    "expires_at": ("Teardown", "expires by itself", "warn"),
    "user_operated": ("Teardown", "yours to do: gpurun does not end this machine", "warn"),
    "not_proven": ("Teardown", "NOT PROVEN, may be billing", "bad"),
    "": ("Teardown", "no machine was made, none to end", ""),
}
_MOST_FILES = 20
_MOST_TRIALS = 40
NOT_HERE = "of which no checkpoint is at home"
"""What is said of the best validation loss where what had it is not here: nothing can be made of it."""


def receipt_screen(receipt: Receipt, style: Style, *, now: float, shutdown: str = "", then: str = "") -> list[Line]:
    """The receipt for a terminal.

    `shutdown` is what is known of the end of a box of the user's own, `then` the command that is typed next.
    """
    told = receipt.predicate
    mark = {
        "signed": Span("signed ✔", "good"),
        "unsigned": Span("unsigned", "warn"),
        "bad": Span("BAD SIGNATURE", "bad"),
    }
    title, chain = Span(f"#{told['seq']:04d}  ", "title"), Span(f"sha256 {short_hash(receipt.sha256)}  ", "dim")
    right = line(title, chain, mark[signature_word(receipt)])
    lines = [line(), *_headed(line("  ", Span(f"Receipt {told['run']}", "title")), right, style), line()]
    pairs = receipt_pairs(told, now=now, shutdown=shutdown, then=then)
    lines += fields([(name, parts) for name, parts in pairs if parts], style)
    if trials := told["training"].get("trials"):
        lines += [line(), *trial_table(told_trials(trials), style, most=_MOST_TRIALS)]
    for title_of, texts in (("log", log_lines(told)), ("sample", safe_text(sample_text(told), most_lines=12))):
        if any(texts):
            lines += [line(), line(Span(f"  ── {title_of} " + "─" * (style.width - 6 - len(title_of)), "dim"))]
            for text in texts:
                lines += fold(text, style, indent=2)
    verdict = told["verdict"]
    lines += [line(), *wrap(verdict["says"], style, indent=2, look="good" if on_gpu(verdict) else "warn")]
    return lines + wrap(verdict.get("not_shown", ""), style, indent=2, look="dim")


def told_trials(trials: TrialsTold) -> list[TrialLine]:
    """The rows of a sweep's receipt, as a table shows them."""
    return [
        TrialLine(
            number=row["trial"], state=row["state"], params=row["params"], step=row["step"], steps=row["steps"],
            loss=row["result"], seconds=row["seconds"], micros=None if row["micros"] is None else Micros(row["micros"]),
            why=row.get("why", ""), is_best=row["trial"] == trials["best"],
        )
        for row in trials["rows"]
    ]  # fmt: skip


def signature_word(receipt: Receipt) -> str:
    """What checking its signature found: "signed", "unsigned" or "bad"."""
    return _SIGNED.get(receipt.signature, "bad")


def hardware_words(told: Predicate) -> str:
    """The machine that was rented, and what it told of itself."""
    return " · ".join((_instance(told["instance"]), *(str(part) for part in _machine(told))))


def shutdown_words(told: Predicate) -> Span:
    """How the machine ended, and by what proof."""
    ended = told["teardown"]["is"] or ""
    _, said, look = _TEARDOWNS.get(ended, ("Teardown", ended, "bad"))
    return Span(" · ".join(filter(None, (said, _proof(told)))), look)


def cost_label(told: Predicate) -> str:
    """What the cost rests on."""
    place = place_facts(told["asked"]["provider"])
    if place.is_queued and not any(rental["rate_micros_per_hour"] for rental in told["cost"]["rentals"]):
        return place.why_free
    says = told["cost"].get("says", "")
    is_plain = told["cost"]["is"] != Figure.BOUND and not says.startswith(("at most", "not observed"))
    return told["cost"]["is"] if is_plain else says or told["cost"]["is"]


def _headed(title: Line, right: Line, style: Style) -> list[Line]:
    """Title and number in a line, or in two where the name would be cut."""
    if count_cells(title) + 2 + count_cells(spell(span, style) for span in right) <= style.width:
        return [spread(title, right, style)]
    return [title, (Span("  "), *right)]


def receipt_pairs(told: Predicate, *, now: float, shutdown: str, then: str = "") -> list[tuple[str, list[Cell]]]:
    """Return the fields of both forms, in their order."""
    ended, digests, prev = told["teardown"]["is"] or "", told["digests"], told["prev"]
    name, said, look = _TEARDOWNS.get(ended, ("Teardown", ended, "bad"))
    closed = Span(shutdown, "bad" if shutdown.startswith("SHUTDOWN NOT") else "good")
    proofs = told["teardown"]["evidence"]
    evidence = _hashed("evidence", proofs[-1]["evidence_sha256"] or "") if proofs else ""
    chain = _hashed("after", prev) if prev.strip("0") else "the first receipt of this home"
    terms = terms_in(told)
    whose = told["asked"].get("trainer", "trainer") if terms.has_model else "folder"
    trained = [_hashed(whose, digests["trainer"]), _hashed("data", digests["data"])]
    incidents = [f"{one['code']}: {one['message']}" for one in told["incidents"]]
    return [
        (terms.label, [_recipe(told), *_variables(told), _hashed("sha256", digests["recipe"])]),
        ("Shipped", [*trained, f"by gpurun {told['gpurun']['version']}"]),
        ("Sent", _sent(told)),
        ("Imported", _imported(told)),
        ("Instance", [_instance(told["instance"])] if "imported" not in told["asked"] else []),
        ("Machine", _machine(told)),
        ("Timeline", [f"{step} {_when(wall, now)}" for step, wall in times_of(told)]),
        ("Runtime", _runtime(told)),
        ("Paid time", _phases(told["runtime"], terms.doing)),
        ("In training", _in_training(told["runtime"]) if terms.has_model else []),
        ("GPU", _gpu_use(told)),
        ("Sessions", _sessions(told)),
        ("Cost", _cost(told)),
        ("Legs", _legs(told)),
        ("Result", [Span(_result(told), "title")]),
        ("Why", _why(told)),
        *cells_home(told),
        ("Not home", files_missing(told)),
        (name, [Span(said, look), _proof(told), evidence, closed]),
        ("Warnings", [Span(one, "warn") for one in told["training"].get("warnings", {"lines": []})["lines"]]),
        ("Incidents", [Span(incident, "warn") for incident in incidents]),
        ("Chain", [chain]),
        ("Next", [Span(then, "accent")] if then else []),
    ]


def _hashed(word: str, digest: str) -> str:
    return f"{word} {short_hash(digest)}" if digest else ""


def times_of(told: Predicate) -> list[tuple[str, float | None]]:
    """Return when each thing was seen, in seconds since the epoch; a time that is not known has none."""
    stamps: dict[str, Any] = {**told["timeline"]}
    known = {name: datetime.fromisoformat(stamps[name]) for name in _TIMES if stamps[name] != NOT_KNOWN}
    words = {name: name.replace("train", terms_in(told).verb).replace("_", " ") for name in _TIMES}
    return [(words[name], known[name].timestamp() if name in known else None) for name in _TIMES]


def _when(wall: float | None, now: float) -> str:
    return UNKNOWN if wall is None else local_time(wall, now=now)


def log_lines(told: Predicate) -> list[str]:
    """The lines of the trainer's log that the receipt quotes."""
    return [safe_line(text) for text in told["training"]["log"]["lines"]]


def _recipe(told: Predicate) -> str:
    """What was trained, in which form, and what it went on from."""
    asked = told["asked"]
    before = asked.get("continues")
    of = f" of {before['steps']}" if before and "steps" in before else ""
    after = f" after step {before['step']}{of}" if before and before["step"] else ""
    since = f", from {before['run']}{after}" if before else ""
    if command := asked.get("command"):
        return f"{shlex.join(command['argv'])}{since}"
    form = f" ({asked['form']}{since})" if terms_in(told).has_model else since
    return f"{asked['recipe']}{form}"


def _variables(told: Predicate) -> list[Cell]:
    """The names of the variables that a command was given."""
    command = told["asked"].get("command")
    names = [*command["env"], *(f"{name} (secret)" for name in command["secrets"])] if command else []
    return [f"with {', '.join(names)}"] if names else []


def _gpu_use(told: Predicate) -> list[Cell]:
    """How often the machine's agent saw the cards at work."""
    seen = told["training"].get("gpu_use")
    if seen is None:
        return []
    own = f", {seen['own']} by a process of this run" if seen["own"] else ""
    return [f"at work in {seen['busy']} of {seen['looks']} looks{own}", f"{seen['most_mib'] / 1024:.1f} GiB at most"]


def _sessions(told: Predicate) -> list[Cell]:
    """How people used a dev box."""
    seen = told["training"].get("sessions")
    if seen is None:
        return []
    count = "1 terminal" if seen["terminals"] == 1 else f"{seen['terminals']} terminals"
    times = f"open for {format_duration(seen['open_s'])}", f"in use for {format_duration(seen['used_s'])}"
    return [count, *times, "by the machine's word"]


def _sent(told: Predicate) -> list[Cell]:
    """Which bytes went which way; receipts of older versions, and of runs that shipped nothing, do not say."""
    shipping, is_local = told.get("shipping"), place_facts(told["asked"]["provider"]).is_here
    if shipping is None:
        return []
    ways = (
        (shipping["by_ssh_bytes"], "to the run's own folder here" if is_local else "over SSH"),
        (shipping["to_bucket_bytes"], f"to {shipping['bucket']} before renting"),
        (shipping["from_bucket_bytes"], "from there to the machine"),
        (shipping.get("public_bytes"), f"downloaded by the machine: {shipping.get('public')}"),
    )
    return [f"{format_bytes(sent)} {way}" for sent, way in ways if sent is not None]


def _instance(told: ReceiptMachine | None) -> str:
    if told is None:
        return "none was made"
    gpu = format_cards(told["gpu"], told["gpu_count"], told.get("nodes", 1))
    at = f", asked at {told['endpoint']}" if told.get("endpoint") else ""
    return f"{told['provider']} {told['id']}, {gpu}, {told['region']}{at}"


def _imported(told: Predicate) -> list[Cell]:
    """Whence a run came that ran in a notebook."""
    told_of = told["asked"].get("imported")
    if told_of is None:
        return []
    by = f"made by gpurun {told_of['gpurun_version']}"
    place = f"from a notebook on {told_of['platform']}, by its word"
    return [place, by, _hashed("evidence", told_of["evidence_sha256"])]


def _machine(told: Predicate) -> list[Cell]:
    """Platform, torch and device, as the machine itself told them."""
    machine, start = told["instance"], told["training"]["start"]["event"] or {}
    facts = machine["facts"] if machine else None
    hello: dict[str, Any] = (facts["hello"] if facts else None) or {}
    torch = (hello.get("torch") or {}).get("version")
    device = start.get("cuda_name") or start.get("device")
    parts = [hello.get("platform"), f"torch {torch}" if torch else None, f"device {device}" if device else None]
    return [str(part) for part in parts if part]


def _runtime(told: Predicate) -> list[Cell]:
    trained_s, billable_s = told["training"]["seconds"]["train_s"], told["runtime"]["billable_s"]
    doing = terms_in(told).doing
    unknown = f"{doing} unknown" if _is_begun(told) else "never started"
    train = unknown if trained_s is None else f"{format_duration(trained_s)} {doing}"
    return [train, "billable unknown" if billable_s is None else f"{format_duration(billable_s)} billable"]


def _is_begun(told: Predicate) -> bool:
    return told["timeline"]["train_start"] != NOT_KNOWN or "imported" in told["asked"]


def _phases(runtime: Runtime, doing: str) -> list[Cell]:
    """Where the paid seconds went, each phase beside what the plan allowed it; nothing is left out but zeros."""
    planned, spent = runtime.get("planned"), runtime["phases_s"]
    limits = planned["limits_s"] if planned else {}
    cells: list[Cell] = []
    for name in (one for one in _PHASES if one in spent):
        seconds, limit_s = spent[name], limits.get(name)
        limit = "" if limit_s is None else f" of {format_duration(limit_s)}"
        late = limit_s is not None and seconds > limit_s
        if int(seconds) or limit:
            shown = doing if name == "training" else name
            cells.append(Span(f"{shown} {format_duration(seconds)}{limit}", "warn" if late else ""))
    expected = planned["training_s"] if planned else None
    if expected and cells:
        cells.append(f"{doing} expected {format_duration(expected[0])} to {format_duration(expected[1])}")
    return cells


def _in_training(runtime: Runtime) -> list[Cell]:
    training = runtime.get("training")
    inside = (training["seconds"] if training else None) or {}
    cells: list[Cell] = [f"{name} {format_duration(inside[name])}" for name in _IN_TRAINING if int(inside.get(name, 0))]
    return [*cells, "by the machine's word"] if cells else []


def _cost(told: Predicate) -> list[Cell]:
    cost, cap = told["cost"], told["cost"]["cap_micros"]
    upper = None if cost["upper_bound_micros"] is None else Micros(cost["upper_bound_micros"])
    parts: list[Cell] = ["unknown" if upper is None else Span(format_usd(upper), "money"), cost_label(told)]
    if (says := cost.get("says")) and says not in parts:
        parts.append(says)
    if cost["billed_micros"] is not None:
        parts.append(f"provider bill {format_usd(Micros(cost['billed_micros']))}")
    if (used := cost.get("gpu_hours")) is not None:
        parts.append(_gpu_hours(used, told["asked"].get("max_gpu_hours")))
    if cap is None:
        return parts
    limit = f"cap {format_usd(Micros(cap))}"
    if upper is not None and cost["cap_kept"] is None:
        return [*parts, f"{limit}, kept or not is unknown"]
    if upper is not None and upper > cap:
        return [*parts, Span(f"{limit} NOT KEPT, {format_usd(left_of(upper, Micros(cap)))} over it", "bad")]
    return [*parts, limit + ("" if upper is None else f", used {percent_of(upper, Micros(cap)):.0f} %")]


def _legs(told: Predicate) -> list[Cell]:
    """The machines that it was on, one after the other, each with its cost, where it began, and how it ended."""
    cells: list[Cell] = []
    for leg in told.get("legs", []):
        cards = format_cards(str(leg["gpu"]), leg["gpu_count"] or 0, 1)
        where = f"{leg['provider']} {cards}{' spot' if leg['spot'] else ''}"
        cost = "cost unknown" if leg["micros"] is None else format_usd(Micros(leg["micros"]))
        start = f"from step {leg['step']:,}" if leg["step"] else "from the beginning"
        twice = f", {leg['again']:,} steps twice" if leg["again"] else ""
        dollars = f" ({format_usd(Micros(leg['again_micros']))})" if "again_micros" in leg else ""
        why = f", ended: {safe_line(leg['why'])}" if leg.get("why") else ""
        cells.append(f"leg {leg['leg']}: {where}, {start}{twice}{dollars}, {cost}{why}")
    return [*cells, *_legs_in_all(told)]


def _legs_in_all(told: Predicate) -> Iterator[Cell]:
    """Yield what all legs have trained twice, and what an unbroken run would have cost on demand, where that is known.

    Both are estimates: of the training time of a machine by its steps, and of what a whole machine would have taken.
    """
    legs = told.get("legs", [])
    again = [leg for leg in legs if leg["again"]]
    if len(again) > 1 and all("again_micros" in leg for leg in again):
        dollars = total(*(Micros(leg["again_micros"]) for leg in again))
        yield f"trained twice in all: {sum(leg['again'] for leg in again):,} steps, about {format_usd(dollars)}"
    if legs and all("on_demand_micros" in leg for leg in legs):
        dollars = total(*(Micros(leg["on_demand_micros"]) for leg in legs))
        yield f"unbroken and on demand, by the prices of then: about {format_usd(dollars)}"


def _gpu_hours(used: float, most: float | None) -> Cell:
    """The GPU-hours that a cluster gave, and of how many that were allowed."""
    if most is None:
        return f"{used:.2f} GPU-hours"
    words = f"{used:.2f} of {most:g} GPU-hours"
    return words if used <= most else Span(f"{words}, {used - most:.2f} OVER", "bad")


def _result(told: Predicate) -> str:
    """One line of what came out."""
    training = told["training"]
    figures = training["figures"]
    step, loss, best = figures.get("last_step"), figures.get("last_loss"), figures.get("best_val_loss")
    nothing = "CUT OFF" if _is_begun(told) else "NEVER STARTED"
    words = [nothing if training["outcome"] == "none" else training["outcome"].upper()]
    if not terms_in(told).has_model and training["exit_code"] is not None:
        words += [f"exit code {training['exit_code']}"]
    words += [f"step {step}"] if step is not None else []
    words += [f"loss {loss:.4f}"] if isinstance(loss, float) else []
    words += [_best_val(told, best)] if isinstance(best, float) else []
    core = figures.get("core")
    words += [f"CORE {core['core']:.4f}"] if isinstance(core, dict) and isinstance(core.get("core"), float) else []
    is_reasoned = training["outcome"] == "stopped" or (training["outcome"], training["reason"]) == ("done", "idle")
    return " · ".join([*words, *([training["reason"]] if is_reasoned else [])])


def _why(told: Predicate) -> list[Cell]:
    """The words of a job that failed, or of who lost sight of it."""
    training = told["training"]
    return [Span(safe_line(training["message"]), "warn")] if training["outcome"] in ("failed", "lost") else []


def _best_val(told: Predicate, loss: float) -> str:
    """The lowest loss of all evaluations; another is the best checkpoint's where that evaluation lay between two."""
    kept = told["checkpoint"]["best"]
    step, kept_loss = (kept.get("step"), kept.get("val_loss")) if isinstance(kept, dict) else (None, None)
    if not terms_in(told).has_model:  # Which of its outputs had that loss is not known.
        return f"best val {loss:.4f}"
    files = told["checkpoint"]["files"]
    is_kept, is_home = kept_loss == loss, any((one["kind"], one["step"]) == ("weights", step) for one in files)
    # A run that went on from another has that one's best checkpoint, which may be the better one.
    if (is_kept and is_home) or (isinstance(kept_loss, float) and kept_loss < loss):
        return f"best val {loss:.4f}"
    return f"best val {loss:.4f}" + (f" at step {step}" if is_kept else "") + f", {NOT_HERE}"


def _proof(told: Predicate) -> str:
    """The reads behind the last machine's end; of a box of the user's own only its release was read."""
    evidence = told["teardown"]["evidence"]
    last = evidence[-1] if evidence and told["teardown"]["is"] != "user_operated" else None
    reads = last["reads"] if last else None
    if last is None or reads is None:
        return ""
    over = f" over {last['spread_s']:.0f} s" if last["spread_s"] else ""
    return f"{reads} read{'s' if reads > 1 else ''} GONE{over} + absent from the list"


def sample_text(told: Predicate) -> str:
    """What the model wrote, with the prompt that it went on from; a translation stands below its source."""
    if told["sample"] is None:
        return ""
    text = told["sample"]["text"]
    # The record has a prompt in one line of bounded length, and the text as it was.
    prompt = told["sample"]["prompt"].replace(r"\u{a}", "\n").replace(r"\u{9}", "    ")
    return text if text.startswith(prompt.removesuffix("…")) else f"{prompt}\n{text}"

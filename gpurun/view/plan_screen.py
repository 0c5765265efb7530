"""The plan screen: what will be done, on which machine, and the most that it can cost, with the calculation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpurun.core.clock import local_minute
from gpurun.core.money import billed_seconds, cost_of, format_exact_usd, format_left, format_rate, format_usd, left_of
from gpurun.core.places import place_facts
from gpurun.view.candidate_table import candidates_table, guard_words
from gpurun.view.number_format import (
    format_bytes,
    format_duration,
    format_exact,
    format_files,
    format_whole,
    short_hash,
    why_free,
)
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, hang, line, render
from gpurun.view.table import fields

if TYPE_CHECKING:
    from gpurun.core.run_plan import Earlier, Plan
    from gpurun.core.stage_plan import StagePlan


def plan_text(plan: Plan, style: Style, *, now: float | None = None, every: bool = False) -> str:
    """Return the plan, ready to print."""
    return render(plan_screen(plan, style, now=now, every=every), style)


def plan_screen(plan: Plan, style: Style, *, now: float | None = None, every: bool = False) -> list[Line]:
    """Return the whole screen, with the best offers or, if `every`, all offers.

    With `now` (wall time), the screen shows when the lease would end if the run started now.
    """
    terms, (name, *more) = plan.job.terms, plan.job.headline()
    what: list[Cell] = [Span(name, "title"), *more]
    lines = [line(), *fields([(terms.label, what), ("Time", _time(plan)), ("Ship", _ship(plan))], style)]
    if plan.continues is not None:
        lines += fields([("From", _earlier(plan.continues))], style)
    if plan.lease.setup_s:
        limit = f"{format_exact(plan.lease.setup_s)} at most (--setup-limit)"
        lines += fields([("Set-up", ["a script on the machine, before anything is uploaded", limit])], style)
    if plan.stage is not None:
        lines += fields([("Stage", _stage(plan.stage, plan))], style)
    if plan.mode.value != "paid" or not plan.candidates:
        lines += fields([("Machine", _machine(plan))], style)
    if plan.candidates:
        if plan.mode.value == "rehearsal":
            lines += [line(), line(Span("  The paid run would be one of these:", "title"))]
        cap, end_s = plan.cap_micros, None if plan.job.is_estimated else plan.job.save_s
        offers = candidates_table(plan.candidates, style, chosen=plan.offer, cap=cap, every=every, end_s=end_s)
        lines += [line(), *offers]
    lines += [line(), *fields(_money(plan), style), *fields([("Lease", _lease(plan, now))], style)]
    if plan.mode.value == "paid":
        lines += fields([("Trust", _trust(plan))], style)
    if plan.notes or plan.warnings:
        lines.append(line())
    for warning in plan.warnings:
        lines += hang(Span("!", "warn"), warning, style)
    for note in plan.notes:
        lines += hang(Span("·", "dim"), note, style)
    return [*lines, line()]


def _earlier(earlier: Earlier) -> list[Cell]:
    """Return the checkpoint that the run continues from, and the cost so far."""
    spent = [] if not earlier.spent_micros else [f"at most {format_usd(earlier.spent_micros)} spent up to that step"]
    proof = Span(f"receipt {short_hash(earlier.receipt_sha256)}", "dim")
    of = f" of {earlier.steps:,}" if earlier.steps else ""
    step = (
        [f"after step {earlier.step:,}{of}".replace(",", " ")] if earlier.step else ["its folder, as it was at the end"]
    )
    return [Span(earlier.run, "title"), *step, format_bytes(earlier.bytes), *spent, proof]


def _time(plan: Plan) -> list[Cell]:
    """Return the expected training time, its limits, and its basis."""
    guess = plan.estimate
    if not plan.job.is_estimated:
        most_s = plan.lease.train_s - plan.job.save_s
        most_s = min(most_s, plan.lease.hours_s or most_s)
        return ["no estimate", f"it may run {format_duration(most_s)}; then it is stopped"]
    if guess.train_s is None or guess.likely_s is None:
        return ["speed unknown: it trains until its steps are done or the --hours are over"]
    low, high = (format_duration(seconds) for seconds in guess.train_s)
    between = [] if low == high else [f"between {low} and {high}"]
    return [f"est. {format_duration(guess.likely_s)}", *between, Span(guess.basis, "dim")]


def _ship(plan: Plan) -> list[Cell]:
    """Return what is uploaded, how long that takes, and its digests."""
    what, digests = plan.job.cargo(plan)
    if not plan.ship_files:  # Data that is not prepared yet has a size, but no files to count.
        return [*what, f"about {format_bytes(plan.ship_bytes)}", *_sending(plan)]
    size = f"{format_bytes(plan.ship_bytes)} in {format_files(plan.ship_files)}"
    return [*what, size, *_sending(plan), *digests]


def _sending(plan: Plan) -> list[Cell]:
    """Return how long the upload should take while the machine is paid for, and what that costs."""
    rate, seconds = plan.offer.rate_micros_per_hour, plan.lease.ship_s
    if plan.mode.value != "paid" or not rate:
        return []
    sending = f"{format_duration(seconds)} to send and unpack, {format_usd(cost_of(rate, seconds, 1))}"
    if plan.data.is_public:
        return [sending.replace("send and unpack", "download the data on the machine")]
    return [sending] if plan.choices.stage else [sending, f"uplink {plan.uplink.words}"]


def _stage(stage: StagePlan, plan: Plan) -> list[Cell]:
    """Return what is in the bucket, what will be uploaded before anything is rented, and the time that this saves."""
    if not stage.files:
        return [stage.url, "large files are uploaded there before anything is rented"]
    there = f"{stage.there_files} of {stage.files} files are there ({format_bytes(stage.there_bytes)})"
    left = f"{format_bytes(stage.bytes - stage.there_bytes)} to upload before renting"
    takes = f"about {format_duration(stage.upload_s)} (uplink {plan.uplink.words})"
    todo = f"{left}, {takes}" if stage.upload_s else "nothing to upload"
    worth = format_usd(cost_of(plan.offer.rate_micros_per_hour, stage.saves_s, 1))
    return [stage.url, there, todo, Span(f"saves {format_duration(stage.saves_s)} of the rental, {worth}", "good")]


def _machine(plan: Plan) -> list[Cell]:
    processes = "1 process" if plan.processes == 1 else f"{plan.processes} processes"
    place = "this machine" if place_facts(plan.offer.provider).is_here else plan.offer.provider
    return [f"{place}, {plan.offer.label}", processes, Span(f"dies by itself: {plan.offer.dies_by_itself}")]


def _money(plan: Plan) -> list[tuple[str, list[Cell]]]:
    """Return the worst case as a checkable sum: the billed lease at the exact price, plus the plan's other costs."""
    offer, lease = plan.offer, plan.lease
    if not plan.worst_micros:
        free = why_free(plan.offer.provider)
        return [("Cost", [Span("$0.00", "money"), free, *_cap(plan)])]
    longest = lease.total_s + lease.kill_allowance_s
    billed = billed_seconds(longest, offer.billing_unit_s)
    unit = " (by the minute)" if billed > longest else ""
    extra = left_of(plan.worst_micros, cost_of(offer.rate_micros_per_hour, longest, offer.billing_unit_s))
    total = f"{format_exact(billed)}{unit} × {format_exact_usd(offer.rate_micros_per_hour)}/h"
    added = f" + disk and egress {format_usd(extra)}" if extra > 0 else ""
    worst: list[Cell] = [Span(f"{format_usd(plan.worst_micros)} = {total}{added}", "money")]
    if plan.cap_micros is not None:
        left = left_of(plan.cap_micros, plan.worst_micros)
        worst += [*_cap(plan), Span(f"left {format_left(left)}", "good" if left >= 0 else "bad")]
    if not lease.queue_s:  # A scheduler itself ends the jobs that it starts.
        hourly = format_rate(offer.rate_micros_per_hour)
        worst.append(f"if {offer.provider} does not end it in time, {hourly} more until it does")
    if not plan.job.is_estimated:
        return [("Worst case", worst)]
    return [("Expected", [format_usd(plan.expected_micros), *_reach_of_part(plan)]), ("Worst case", worst)]


def _cap(plan: Plan) -> list[Cell]:
    """Return the cap, with its source if the user did not type it. A folder's file may have lowered it."""
    if plan.cap_micros is None:
        return []
    place = f" ({plan.cap_from})" if plan.cap_from not in ("", "--max-cost") else ""
    return [f"cap {format_usd(plan.cap_micros)}{place}"]


def _reach_of_part(plan: Plan) -> list[Cell]:
    """Return the last step that the run reaches, if --hours is too short for all its steps."""
    chosen = next((candidate for candidate in plan.candidates if candidate.offer == plan.offer), None)
    if chosen is None or chosen.reach is None or chosen.finishes:
        return []
    step, steps = chosen.reach.step, chosen.reach.steps
    return [Span(f"for a part: to step {format_whole(step)} of {format_whole(steps)} ({step / steps:.0%})", "warn")]


def _trust(plan: Plan) -> list[Cell]:
    """Return which machine will be trusted, and which secrets it receives."""
    from gpurun.providers.catalog import terms_of  # The catalogue is read only when a plan is drawn.

    key = f"host key: {plan.box.trusted}" if plan.box else place_facts(plan.offer.provider).trust
    named = [f"your {name}" for name in plan.job.secrets]
    guard = (
        ["the guard key, from its launch on"] if plan.choices.guard and terms_of(plan.offer.provider).with_guard else []
    )
    urls = ["URLs for its part of the bucket, which expire"] if plan.choices.stage else []
    secrets = " and ".join(guard + urls + named)
    secret_words = Span(f"secrets on the machine: {secrets}", "warn") if secrets else "secrets shipped: none"
    end, globs = guard_words(plan.offer), ", ".join(plan.choices.pass_env)
    login = [Span(f"passed on from its login: {globs}", "warn")] if globs else []
    return [key, secret_words, *login, Span(f"dies by itself: {end.text}", "" if end.look == "good" else end.look)]


def _lease(plan: Plan, now: float | None) -> list[Cell]:
    lease = plan.lease
    parts = (
        ("boot", lease.boot_s),
        *([("set-up", lease.setup_s)] if lease.setup_s else []),
        ("ship", lease.ship_s),
        (plan.job.terms.verb, lease.train_s),
        ("collect", lease.collect_s),
        ("destroy", lease.destroy_s),
    )
    sum_of = " + ".join(f"{name} {format_exact(seconds)}" for name, seconds in parts)
    until = [] if now is None else [f"until {local_minute(now + lease.total_s, now=now)}, if it starts now"]
    kill = [f"{format_exact(lease.kill_allowance_s)} more to kill it, in the worst case"] if plan.worst_micros else []
    queue = [f"after {format_exact(lease.queue_s)} in the queue at most"] if lease.queue_s else []
    return [*until, f"{format_exact(lease.total_s)} = {sum_of}", *kill, *queue]

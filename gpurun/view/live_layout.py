"""Draws the live view as a pure function of the `Screen`, the available room, and the time."""

from __future__ import annotations

from gpurun.core.clock import local_minute, local_time
from gpurun.core.money import Micros, format_usd, percent_of, share_of
from gpurun.core.places import place_facts
from gpurun.core.trainer_events import StepEvent
from gpurun.view.event_text import PHASES
from gpurun.view.live_state import PhaseTime, Screen
from gpurun.view.number_format import (
    format_bytes,
    format_count,
    format_duration,
    format_files,
    format_loss,
    format_percent,
    format_small,
    format_stopwatch,
    format_whole,
    why_free,
)
from gpurun.view.progress_line import moving_line
from gpurun.view.style import Style
from gpurun.view.styled_text import Line, Span, clip, clip_line, count_cells, flow, line, pad, spread, wrap
from gpurun.view.terminal_charts import Scale, bar, line_chart, sparkline
from gpurun.view.trial_table import TrialLine, trial_table

_LABEL = 8
_APART = "   "
_MOST_ALARM_LINES = 2
_SIDE = 34
_WIDE = 96
# Longer than a step, an evaluation or a lost connection usually lasts.
_QUIET_S = 120.0
_DOING = {
    "plan": "STARTING",
    "provision": "PROVISIONING",
    "ship": "SHIPPING",
    "run": "RUNNING",
    "collect": "COLLECTING",
    "destroy": "DESTROYING",
    "receipt": "SETTLING",
}
# The effect of Ctrl-C depends on the phase. The footer must never promise another effect.
_FOOTERS = {
    "run": "Ctrl-C: detach or stop",
    "collect": "Ctrl-C: leave; the rest continues without this terminal",
    "destroy": "Ctrl-C twice: leave before the machine is proven gone",
    "receipt": "",
}
_BEFORE_TRAINING = "Ctrl-C: give up and destroy the machine"
_BEFORE_COLLECTING = ("plan", "provision", "ship", "run")
_ENDS = {
    0: ("DONE", "good"),
    7: ("STOPPED BY BUDGET", "warn"),
    9: ("MAY BE BILLING", "bad"),
    130: ("STOPPED", "warn"),
}


_HELP = (
    ("step", "steps done, of all; eta: time for the others"),
    ("loss", "training loss; val: validation loss, at its step"),
    ("gpu", "use, memory, temperature, power; every 5 s"),
    ("money", "spent, expected in all, the worst case, the cap"),
    ("lease", "when the machine ends at the latest"),
    ("saved", "the last finished checkpoint, and what is here"),
    ("q", "leave; the run continues: gpurun attach"),
    ("?", "hide this"),
)


def live_screen(screen: Screen, style: Style, *, now: float, keys: bool = False, helps: bool = False) -> list[Line]:
    """Return the view as lines, none wider than the terminal, and at least one fewer than its height.

    Until the run is closed, the last line explains Ctrl-C and, with `keys`, names the key that opens the help. With
    `helps`, the help replaces chart and log. If there is little room, the chart is dropped first.
    """
    room = max(4, style.height - 1)
    head = [_header(screen, style, now), *_phases(screen, style, now)]
    training = _training(screen, style, now)
    foot = [*_money(screen, style, now), *_lease(screen, style, now), *_alarm(screen, style)]
    left = room - len(head) - len(training) - len(foot) - 3
    if screen.trials and not helps:
        trials = _trials(screen, style, now, max(3, left - 2))
        training, left = [*training, line(), *trials], left - len(trials) - 1
    chart = _chart(screen, style, min(9, left - 6)) if left >= 10 and not helps else []
    left -= len(chart) + bool(chart)
    log = _help(style) if helps else _log(screen, style, min(8, left - 2)) if left >= 3 else []
    blank = [line()] if left >= 0 else []
    footer = " · ".join(filter(None, (_footer(screen), "? help" if keys else "")))
    end = [line(Span(f" {footer}", "dim"))] if footer and screen.closed_wall is None else []
    lines = [*head, *blank, *training, *([line()] if chart else []), *chart, *blank, *foot, *log, *end]
    return [clip_line(row, style.width, style) for row in lines[:room]]


def _footer(screen: Screen) -> str:
    """Return what Ctrl-C does now. Between two machines the run has work to lose, so Ctrl-C asks first."""
    is_between = screen.is_waiting or (screen.leg and screen.phase in ("plan", "provision", "ship"))
    return _FOOTERS["run"] if is_between else _FOOTERS.get(screen.phase, _BEFORE_TRAINING)


def _help(style: Style) -> list[Line]:
    """Return the meaning of the lines and the keys."""
    blocks = (flow([line(text)], style, indent=_LABEL, first=line(Span(f" {word}", "title"))) for word, text in _HELP)
    return [line(), *(row for rows in blocks for row in rows)]


def _header(screen: Screen, style: Style, now: float) -> Line:
    plan, offer = screen.plan, screen.plan.offer
    rented = f"{offer.provider} {offer.label} {offer.place}"
    place = f"this machine, {offer.label}" if place_facts(offer.provider).is_here else rented
    leg = f"{screen.leg} · " if screen.leg else ""
    begun = screen.opened_wall if screen.opened_wall is not None else now
    age = format_duration((screen.closed_wall or now) - begun)
    return spread(
        line(" ", Span(plan.run, "title"), Span(f" · {plan.job.recipe} · {leg}{place}", "dim")),
        line(_state(screen), f"  {age}"),
        style,
    )


def _state(screen: Screen) -> Span:
    if screen.exit_code == 0 and screen.outcome == "stopped":
        return Span("STOPPED", "warn")  # It was stopped on request before its last step.
    if screen.exit_code is not None:
        return Span(*_ENDS.get(screen.exit_code, (f"FAILED exit {screen.exit_code}", "bad")))
    if screen.stopping and screen.phase in _BEFORE_COLLECTING:
        return Span("STOPPING", "warn")
    return Span("WAITING" if screen.is_waiting else _DOING[screen.phase], "accent")


def _phases(screen: Screen, style: Style, now: float) -> list[Line]:
    """Return the phases: a tick and the time if finished, a dot if current, a cross if failed."""
    narrow = style.width < 100
    names = PHASES[1:] if narrow and screen.phases["plan"].ended is not None else PHASES
    parts = [_phase(name, screen.phases[name], name == screen.phase, now) for name in names]
    return flow(parts, style, gap="  " if narrow else "   ", indent=1)


def _phase(name: str, phase: PhaseTime, current: bool, now: float) -> Line:
    seconds = phase.seconds(now)
    if phase.failed:
        return line(name, Span(" ✘", "bad"))
    if phase.ended is not None:
        took = f" {format_stopwatch(seconds)}" if seconds is not None and seconds >= 1 else ""
        return line(name, Span(" ✔", "good"), Span(took, "dim"))
    if current and seconds is not None:
        return line(Span(name, "title"), Span(" ●", "accent"), Span(f" {format_stopwatch(seconds)}", "dim"))
    return line(Span(f"{name} ·", "dim"))


def _training(screen: Screen, style: Style, now: float) -> list[Line]:
    """Return progress and figures once there are steps, and the current activity."""
    lines: list[Line] = []
    last, steps = screen.step, screen.steps
    if last is not None and last.step is not None:
        lines += _progress(screen, last.step, steps, style)
    lines += _figures(last, screen, style)
    lines += _cards(screen, style)
    silent_s = screen.silent_s(now)
    if silent_s is not None and silent_s >= _QUIET_S:
        warning = Span(f"no answer from the machine for {format_duration(silent_s)}: these figures are old", "warn")
        lines += flow([line(warning)], style, indent=_LABEL, first=line(Span(" quiet", "dim")))
    if (last is None or screen.phase != "run") and screen.story and screen.closed_wall is None:
        lines += flow([line(screen.story)], style, indent=_LABEL, first=line(Span(" now", "dim")))
    if screen.moving is not None and screen.closed_wall is None:
        lines.append(moving_line(screen.moving, style, label=_LABEL))
    return lines


def _progress(screen: Screen, step: int, steps: int | None, style: Style) -> list[Line]:
    """Return the progress in one line with a bar; if there is little room, in several lines without a bar."""
    label = line(Span(" step", "dim"))
    if not steps:
        return flow([line(Span(format_whole(step), "title"))], style, indent=_LABEL, first=label)
    share, eta = min(1.0, step / steps), screen.eta_s()
    parts = [line(Span(format_whole(step), "title"), f" / {format_whole(steps)}"), line(format_percent(share, 1))]
    parts += [line(f"eta {format_duration(eta)}")] if eta is not None else []
    room = style.width - _LABEL - sum(count_cells(part) + len(_APART) for part in parts) - 1
    if room >= 8:
        full, empty = bar(share, min(60, room))
        parts.insert(1, line(Span(full, "accent"), Span(empty, "dim")))
    return flow(parts, style, gap=_APART, indent=_LABEL, first=label)


def _figures(step: StepEvent | None, screen: Screen, style: Style) -> list[Line]:
    """Return the known figures of the latest step and the latest evaluation."""
    evaluation = screen.evaluation
    parts = [line(Span(format_loss(step.loss), "title"))] if step is not None and "loss" in step.said else []
    label = "loss" if parts or evaluation is not None else "speed"
    if evaluation is not None:
        at = evaluation.step
        where = "" if at is None else f" (step {format_whole(at)})"
        ring = Span("○ ", "warn")
        parts.append(line("val ", ring, Span(format_loss(evaluation.val_loss), "title"), Span(where, "dim")))
    rate, gradient, speed, mfu = (step.lr, step.grad_norm, step.tokens_per_s, step.mfu) if step else (None,) * 4
    if rate is not None:
        parts.append(line(f"lr {format_small(rate)}"))
    if gradient is not None:
        parts.append(line(f"grad {gradient:.2f}" if abs(gradient) < 1000 else f"grad {gradient:.1e}"))
    if speed is not None:
        parts.append(line(f"{format_count(speed)} tok/s"))
    if mfu is not None:
        parts.append(line(f"MFU {format_percent(mfu)}"))
    return flow(parts, style, gap="    ", indent=_LABEL, first=line(Span(f" {label}", "dim"))) if parts else []


def _cards(screen: Screen, style: Style) -> list[Line]:
    """Return the use, memory, temperature and power of the machine's GPUs; [] if they are not known."""
    now = screen.gpus
    if now is None or screen.phase != "run" or screen.closed_wall is not None:
        return []
    bars = sparkline(list(screen.gpu_use), width=12, scale=Scale(0.0, 100.0), unicode=style.unicode)
    use = "" if now.use_percent is None else f" {now.use_percent} %"
    of = "" if now.memory_of_mib is None else f" of {round(now.memory_of_mib / 1024)}"
    parts = [line(Span(bars, "accent"), use)] if use else []
    parts += [] if now.memory_mib is None else [line(f"{round(now.memory_mib / 1024)}{of} GiB")]
    parts += [] if now.celsius is None else [line(f"{now.celsius} °C")]
    parts += [] if now.watts is None else [line(f"{format_whole(now.watts)} W")]
    parts += (
        [line(Span(f"{now.count} cards: mean use, highest memory and temperature, total power", "dim"))]
        if now.count > 1
        else []
    )
    return flow(parts, style, gap="    ", indent=_LABEL, first=line(Span(" gpu", "dim")))


def _chart(screen: Screen, style: Style, height: int) -> list[Line]:
    """Return the loss curve and, if there is room beside it, the speed, the memory and the device."""
    if len(screen.losses.points) < 2 or height < 4:
        return []
    side = _draw_side_figures(screen, style) if style.width >= _WIDE else []
    width = min(style.width - 3 - (_SIDE if side else 0), 110)
    marks = screen.validation.points
    rows = line_chart(screen.losses.points, width=width, height=height, marks=marks, unicode=style.unicode)
    lines: list[Line] = []
    for i, row in enumerate(rows):
        left = Span(f"  {row}", "accent" if i < height else "dim")
        lines.append((*pad(left, width + 4), *side[i]) if i < len(side) else (left,))
    return lines


def _draw_side_figures(screen: Screen, style: Style) -> list[Line]:
    lines: list[Line] = []
    speeds = list(screen.speeds)
    if speeds:
        top = max(speeds)
        bars = sparkline(speeds, width=12, scale=Scale(0.0, top), unicode=style.unicode)
        lines.append(line(Span("speed  ", "dim"), Span(bars, "accent")))
        lines.append(line(Span(f"       0 to {format_count(top)} tok/s", "dim")))
    memory = screen.step.memory_peak_bytes if screen.step is not None else None
    if memory is not None:
        of = f" of {screen.plan.offer.vram_gb} GB" if screen.plan.offer.vram_gb else ""
        lines.append(line(Span("memory ", "dim"), f"{format_bytes(memory)}{of} at peak"))
    start = screen.start
    if start is not None and start.world_size is not None:
        size = start.world_size
        noun = "process" if size == 1 else "processes"
        device = start.cuda_name or start.device or ""
        lines += [line(Span("device ", "dim"), device), line(f"       {size} {noun}")]
    return [line(), *lines] if lines else []


def _trials(screen: Screen, style: Style, now: float, most: int) -> list[Line]:
    """Return a table of the trials. The cost of a trial is its share of the total cost, by seconds."""
    events, spent = list(screen.trials.values()), screen.spent(now)
    whole_s = sum(event.seconds or 0.0 for event in events if not event.is_restored)
    best = min(events, key=lambda event: event.rank)
    rows = [
        TrialLine(
            number=event.trial or 0,
            state=event.state,
            params=event.params,
            step=event.step,
            steps=event.steps,
            loss=event.result if event.result is not None else event.loss,
            seconds=event.seconds,
            micros=share_of(spent, 0.0 if event.is_restored else event.seconds or 0.0, whole_s),
            why=event.why,
            is_best=event is best and event.is_ranked,
        )
        for event in events
    ]
    return trial_table(rows, style, most=most)


def _money(screen: Screen, style: Style, now: float) -> list[Line]:
    plan, spent, end = screen.plan, screen.spent(now), screen.at_end(now)
    head = line(Span(" money", "dim"))
    parts = [line(Span(format_usd(spent), "money"), " now" if screen.closed_wall is None else "")]
    if not plan.worst_micros:
        free = why_free(plan.offer.provider)
        parts.append(line(free))
    elif end is not None:
        parts[0] = (*parts[0], *line(f" → ≈ {format_usd(end)} at the end"))
    if plan.worst_micros:
        parts.append(line(f"worst {format_usd(screen.worst_micros)}"))
    if plan.cap_micros is not None:
        parts.append(line(f"cap {format_usd(plan.cap_micros)}", *_draw_used_share(spent, plan.cap_micros, style)))
    return flow(parts, style, gap=" · ", indent=_LABEL, first=head)


def _draw_used_share(spent: Micros, cap: Micros, style: Style) -> Line:
    percent = percent_of(spent, cap)
    full, empty = bar(percent / 100, 20 if style.width >= 80 else 8)
    look = "bad" if percent > 100 else "warn" if percent >= 80 else "good"
    return line("  ", Span(full, look), Span(empty, "dim"), f"  {percent:.0f} %")


def _lease(screen: Screen, style: Style, now: float) -> list[Line]:
    """Return the pace, the time by which a living machine must end, and where the last checkpoint is."""
    lines: list[Line] = []
    if screen.pace and screen.phase == "run":
        lines += wrap(screen.pace, style, indent=_LABEL, look="warn" if screen.is_too_slow else "")[:2]
        lines[0] = (Span(" pace   ", "dim"), *lines[0][1:])
    if screen.queued is not None:
        words = f"{format_duration(screen.queued.total_s)} from its start"
        lines += flow([line(words)], style, indent=_LABEL, first=line(Span(" lease", "dim")))
    elif screen.deadline_wall is not None and screen.phases["destroy"].ended is None:
        left = screen.deadline_wall - now
        when = f"until {local_minute(screen.deadline_wall, now=now)}, "
        remaining = Span(f"{format_duration(left)} left" if left >= 0 else "OVER", "" if left >= 300 else "warn")
        lines += flow([line(when, remaining)], style, indent=_LABEL, first=line(Span(" lease", "dim")))
    return [*lines, *_saved(screen, style, now)]


def _saved(screen: Screen, style: Style, now: float) -> list[Line]:
    """Return where the newest checkpoint is, and which checkpoint or how many files are on this computer."""
    newest, home = screen.checkpoint.step if screen.checkpoint is not None else None, screen.home_step
    parts: list[Line] = []
    if newest is not None and (home is None or newest > home):
        parts.append(line(f"step {format_whole(newest)}, ", _describe_newest_checkpoint(screen, now)))
    if home is not None:
        parts.append(line(f"step {format_whole(home)}, here ", Span("✔", "good"), " digests match"))
    if newest is None and home is None and screen.home_files:
        parts.append(line(f"{format_files(screen.home_files)} here ", Span("✔", "good"), " digests match"))
    elif newest is None and home is None and screen.output is not None:
        name, size = screen.output
        parts.append(line(f"{clip(name, style.width // 2)} ({format_bytes(size)}) is finished"))
    return flow(parts, style, gap=" · ", indent=_LABEL, first=line(Span(" saved", "dim"))) if parts else []


def _describe_newest_checkpoint(screen: Screen, now: float) -> Span:
    """Return where the newest checkpoint is if it was not downloaded: still on the machine, or lost with it."""
    if screen.phases["destroy"].ended is not None:
        return Span("did not come home", "bad")
    written = screen.checkpoint_wall()
    return Span(f"on the machine since {local_time(written, now=now)}" if written else "on the machine")


def _alarm(screen: Screen, style: Style) -> list[Line]:
    if not screen.alarm:
        return []
    text = wrap(screen.alarm, style, indent=_LABEL, look="bad")[:_MOST_ALARM_LINES]
    return [(Span(" !      ", "bad"), *text[0][1:]), *text[1:]]


def _log(screen: Screen, style: Style, most: int) -> list[Line]:
    shown = list(screen.log)[-most:] if most > 0 else []
    if not shown:
        return []
    rule = line(Span(" ── log " + "─" * (style.width - 9), "dim"))
    return [rule, *(clip_line(line(Span(f" {entry}", "dim")), style.width, style) for entry in shown)]

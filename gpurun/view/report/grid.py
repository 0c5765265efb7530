"""Samples for the same prompts side by side: one row per checkpoint, and one column per run that had the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from gpurun.view.number_format import format_loss
from gpurun.view.report.escape import escape_line, lines_escaped, tag
from gpurun.view.report.line_styles import swatch
from gpurun.view.report.report_model import RunMaterial
from gpurun.view.report.series import WrittenSample

_SHARED_ENOUGH = 1.5


def samples_section(runs: Sequence[RunMaterial]) -> str:
    """Return a section for every prompt, with each run's samples over time. Only the first section is open."""
    prompts = list(dict.fromkeys(prompt for run in runs for prompt in run.history.samples))
    if not prompts:
        return tag("p", "No samples were reported.", class_="note")
    parts = [_draw_prompt(prompt, runs, is_open=not place) for place, prompt in enumerate(prompts)]
    left_out = len({prompt_left for run in runs for prompt_left in run.history.prompts_left_out})
    if left_out:
        parts.append(tag("p", f"{left_out} more prompts are not shown.", class_="note"))
    return "".join(parts)


def _draw_prompt(prompt: str, runs: Sequence[RunMaterial], *, is_open: bool) -> str:
    title = tag("q", escape_line(prompt)) if prompt else "an empty prompt"
    having = [(place, run) for place, run in enumerate(runs) if prompt in run.history.samples]
    columns = [run.history.samples[prompt].items for _, run in having]
    head = "".join(tag("th", f"{swatch(place)}{escape_line(run.run)}", scope="col") for place, run in having)
    rows = "".join(_row(name, cells, prompt, [run for _, run in having]) for name, cells in align_rows(columns))
    table = f'<table class="samples"><thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    opened = " open" if is_open else ""
    return f'<details{opened}><summary>{title}</summary><div class="wide" tabindex="0">{table}</div></details>'


def align_rows(columns: Sequence[Sequence[WrittenSample]]) -> list[tuple[str, list[WrittenSample | None]]]:
    """Return the rows with their names: by step if the runs share enough of their steps, else by position."""
    by_step = [{sample.step: sample for sample in column} for column in columns]
    steps = sorted({step for column in by_step for step in column})
    if len(steps) <= _SHARED_ENOUGH * max(len(column) for column in by_step):
        return [(f"step {step:,}", [column.get(step) for column in by_step]) for step in steps]
    ordered = [[column[step] for step in sorted(column)] for column in by_step]
    most = max(len(column) for column in ordered)
    return [
        (f"no. {place + 1}", [column[place] if place < len(column) else None for column in ordered])
        for place in range(most)
    ]


def _row(name: str, samples: Sequence[WrittenSample | None], prompt: str, runs: Sequence[RunMaterial]) -> str:
    cells = "".join(_cell(sample, prompt, run, name) for sample, run in zip(samples, runs, strict=True))
    return f"<tr>{tag('th', escape_line(name), scope='row')}{cells}</tr>"


def _cell(sample: WrittenSample | None, prompt: str, run: RunMaterial, name: str) -> str:
    if sample is None:
        return tag("td", "", class_="none", data_label=run.run)
    text = f"<b>{escape_line(prompt)}</b>{lines_escaped(sample.lines)}"
    return tag(
        "td", tag("pre", text) + tag("small", escape_line(_describe_sample(sample, run, name))), data_label=run.run
    )


def _describe_sample(sample: WrittenSample, run: RunMaterial, name: str) -> str:
    """Return the epoch and the validation loss of a sample, and its step if the row's name does not show it."""
    words = [] if name.startswith("step") else [f"step {sample.step:,}"]
    epoch = run.epoch_at(sample.step)
    words += [f"epoch {epoch:.2f}"] if epoch is not None else []
    words += [f"validation {format_loss(m.loss)}" for m in run.history.validation.items if m.step == sample.step][:1]
    return " · ".join(words)

"""The page's tables: the runs, the differences between their recipes, all settings, and the validation losses."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from gpurun.core.clock import utc
from gpurun.core.job_terms import TRAINER
from gpurun.core.money import Micros, format_usd
from gpurun.core.receipt_record import on_gpu
from gpurun.core.untrusted import safe_line
from gpurun.view.number_format import UNKNOWN, format_count, format_duration, format_loss, format_percent, short_hash
from gpurun.view.receipt_screen import cost_label, signature_word
from gpurun.view.report.escape import escape_line, tag
from gpurun.view.report.line_styles import swatch
from gpurun.view.report.report_model import RunMaterial, find_lowest_loss, list_differences, set_differences, settings
from gpurun.view.report.series import Mark

_MOST_ROWS = 60


def runs_table(runs: Sequence[RunMaterial]) -> str:
    """Return one row per run; on a narrow page each row becomes a card."""
    heads = ("run", "recipe", "hardware", "trained", "cost", "tokens", "final loss", "best validation", "verdict")
    best = find_lowest_loss(runs)
    rows = "".join(_run_row(place, run, heads, best[1].loss if best else None) for place, run in enumerate(runs))
    head = "".join(tag("th", escape_line(name), scope="col") for name in heads)
    return f'<table class="runs"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _run_row(place: int, run: RunMaterial, heads: Sequence[str], best: float | None) -> str:
    mark, last = run.history.best, run.last
    name = f"{swatch(place)}<b>{escape_line(run.run)}</b>{_small(_describe_end_and_begin(run))}"
    is_best = mark is not None and mark.loss == best
    cells = (
        escape_line(run.recipe) + _small(_describe_model_or_command(run)),
        escape_line(run.history.device or run.where) + _small(run.where if run.history.device else ""),
        _join_figure(UNKNOWN if run.train_s is None else format_duration(run.train_s))
        + _small(_describe_rented_time(run)),
        _join_figure(_format_amount(run.cost_micros)) + _small(_describe_cost(run)),
        _join_figure(_format_count_or_unknown(last.tokens if last else None)) + _small(_describe_steps(run)),
        escape_line(format_loss(last.loss if last else None)),
        (
            f"<b>{escape_line(format_loss(mark.loss))}</b>"
            if is_best and mark
            else escape_line(_format_loss_or_unknown(mark))
        )
        + _small(_describe_result_at(mark, run)),
        _verdict(run),
    )
    first = tag("th", name, scope="row")
    rest = "".join(tag("td", cell, data_label=head) for head, cell in zip(heads[1:], cells, strict=True))
    return f"<tr>{first}{rest}</tr>"


def _describe_end_and_begin(run: RunMaterial) -> str:
    """Return how a run ended, and when it began, in UTC."""
    began = f"{utc(run.began_wall)[:16].replace('T', ' ')} UTC" if run.began_wall else ""
    return " · ".join(filter(None, (run.state, began)))


def _describe_model_or_command(run: RunMaterial) -> str:
    """Return the size of a model, or the words of a command."""
    if not run.terms.has_model:
        return safe_line(shlex.join(run.argv))
    return "" if run.parameters is None else f"{format_count(run.parameters)} parameters"


def _join_figure(figure: str) -> str:
    """Return a number with its unit, joined so that no line break separates them."""
    return tag("span", escape_line(figure), class_="whole")


def _small(text: str) -> str:
    return tag("small", escape_line(text)) if text else ""


def _format_amount(amount: Micros | None) -> str:
    return "unknown" if amount is None else format_usd(amount)


def _describe_cost(run: RunMaterial) -> str:
    if run.receipt is not None:
        return cost_label(run.receipt.predicate)
    return "so far, not settled" if run.spent_micros is not None else ""


def _describe_rented_time(run: RunMaterial) -> str:
    """Return how long the machine was billed, if one was rented."""
    seconds = run.receipt.predicate["runtime"]["billable_s"] if run.receipt and run.mode == "paid" else None
    return "" if seconds is None else f"{format_duration(seconds)} rented"


def _describe_steps(run: RunMaterial) -> str:
    last = run.last
    if last is None:
        return "no steps were reported"
    return f"step {last.step:,}" + (f" of {run.history.steps:,}" if run.history.steps else "")


def _format_count_or_unknown(number: int | None) -> str:
    return UNKNOWN if number is None else format_count(number)


def _format_loss_or_unknown(mark: Mark | None) -> str:
    return UNKNOWN if mark is None else format_loss(mark.loss)


def _describe_result_at(mark: Mark | None, run: RunMaterial) -> str:
    core = [] if run.history.core is None else [f"CORE {run.history.core:.4f}"]
    if mark is None:
        bits = run.history.bits_per_byte
        return ", ".join([*([] if bits is None else [f"{bits:.3f} bits a byte"]), *core])
    words = [f"step {mark.step:,}"]
    words += [f"perplexity {math.exp(mark.loss):,.1f}"] if run.terms.has_model and 0 <= mark.loss < 14 else []
    words += [f"{mark.bits_per_byte:.3f} bits a byte"] if mark.bits_per_byte is not None else []
    words += [f"HellaSwag {format_percent(mark.hellaswag, 1)}"] if mark.hellaswag is not None else []
    return ", ".join([*words, *core])


def _verdict(run: RunMaterial) -> str:
    """Return the receipt's verdict and signature; for a run without a receipt, the reason why it has none."""
    receipt = run.receipt
    if receipt is None:
        return tag("span", "no receipt", class_="pill warn") + _small(run.no_receipt)
    signed = signature_word(receipt)
    if signed == "bad":
        return tag("span", "bad signature", class_="pill bad") + _small("nothing on this receipt can be trusted")
    verdict = receipt.predicate["verdict"]
    pill = tag("span", escape_line(verdict["is"]), class_="pill good" if on_gpu(verdict) else "pill warn")
    return pill + _small(f"receipt #{receipt.predicate['seq']:04d} {short_hash(receipt.sha256)}, {signed}")


def differences_table(runs: Sequence[RunMaterial]) -> str:
    """Return the settings that differ, with a note if more differ; a sentence if nothing differs."""
    found, kinds = set_differences(runs), {run.terms for run in runs}
    if not found:
        same = "resolved recipes are the same in every key, and so are the shards"
        same = same if kinds == {TRAINER} else "commands are the same, and so are their folders and data"
        return tag("p", f"The {same}.", class_="note")
    every = list_differences([run for run in runs if run.terms.has_model])
    is_cut = bool({key for key, _ in every} - {key for key, _ in found})
    words = "For different recipes only the changed settings are shown; Figures has every setting."
    return _matrix(runs, "set", found) + (tag("p", words, class_="note") if is_cut else "")


def settings_table(runs: Sequence[RunMaterial]) -> str:
    """Return all settings of the runs: one table per kind of job, with one row per key."""
    kinds = dict.fromkeys(run.terms for run in runs)
    each = [[(place, run) for place, run in enumerate(runs) if run.terms == kind] for kind in kinds]
    return "".join(
        _matrix([run for _, run in some], "key", settings([run for _, run in some]), [place for place, _ in some])
        for some in each
    )


def validation_table(runs: Sequence[RunMaterial]) -> str:
    """Return the validation losses: one row per step, one column per run. Of many steps, an even selection is shown."""
    columns = [{mark.step: mark.loss for mark in run.history.validation.items} for run in runs]
    steps = sorted({step for column in columns for step in column})
    if len(steps) > _MOST_ROWS:
        steps = [steps[round(i * (len(steps) - 1) / (_MOST_ROWS - 1))] for i in range(_MOST_ROWS)]
    rows = [(f"{step:,}", [format_loss(c[step]) if step in c else "" for c in columns]) for step in steps]
    return _matrix(runs, "step", rows) if rows else tag("p", "No validation losses were reported.", class_="note")


def _matrix(
    runs: Sequence[RunMaterial],
    corner: str,
    rows: Sequence[tuple[str, Sequence[str]]],
    places: Sequence[int] | None = None,
) -> str:
    """Return a table with one column per run; if there are more runs than `rows`, with one row per run.

    `corner` is the heading of the first column. `places` are the positions of the runs in the report, which determine
    their colours; without it the positions are 0, 1, and so on.
    """
    names = [
        f"{swatch(place)}{escape_line(run.run)}" for place, run in zip(places or range(len(runs)), runs, strict=True)
    ]
    keys, cells = [escape_line(key) for key, _ in rows], [list(map(escape_line, values)) for _, values in rows]
    if len(runs) > len(rows):
        corner, names, keys, cells = "run", keys, names, [list(column) for column in zip(*cells, strict=True)]
    head = "".join(tag("th", name, scope="col") for name in names)
    body = "".join(
        f"<tr>{tag('th', key, scope='row')}{''.join(tag('td', value) for value in values)}</tr>"
        for key, values in zip(keys, cells, strict=True)
    )
    table = f'<table class="matrix"><thead><tr><th scope="col">{corner}</th>{head}</tr></thead>'
    return f'<div class="wide" tabindex="0">{table}<tbody>{body}</tbody></table></div>'

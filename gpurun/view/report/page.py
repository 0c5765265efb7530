"""The whole page: one HTML file without scripts that loads nothing and also works offline."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from gpurun.core.money import format_usd, total
from gpurun.core.receipt_rules import stated_trainer
from gpurun.view.number_format import format_duration, format_loss
from gpurun.view.receipt_screen import hardware_words, shutdown_words, signature_word
from gpurun.view.report.escape import escape_line, tag
from gpurun.view.report.grid import samples_section
from gpurun.view.report.html_tables import differences_table, runs_table, settings_table, validation_table
from gpurun.view.report.line_styles import swatch
from gpurun.view.report.report_model import RunMaterial, find_lowest_loss, is_drawn, own_settings, why_unranked
from gpurun.view.report.svg_charts import Curve, above, axes_for, loss_chart

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def report_page(runs: Sequence[RunMaterial], *, version: str) -> str:
    """Return the report of at least one run. The same material gives the same bytes.

    Raise SetupError if matplotlib is missing.
    """
    title = _join_names([run.run for run in runs])
    heading = _join_names([tag("span", escape_line(run.run), class_="whole") for run in runs])
    sections = [
        _section("Loss", _charts(runs), "loss"),
        _section("Runs", runs_table(runs), "runs"),
        _section("What differs", differences_table(runs), "differs") if len(runs) > 1 else "",
        _section("Samples", samples_section(runs), "samples"),
        _section("Figures", _figures(runs), "figures"),
        _section("Where this comes from", _sources(runs), "sources"),
    ]
    style = files("gpurun.view.report").joinpath("page.css").read_text(encoding="utf-8")
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escape_line(title)} · gpurun report</title><style>{style}</style>"
    )
    top = f'<header><p class="kicker">gpurun report</p><h1>{heading}</h1>{_lede(runs)}</header>'
    foot = f"<footer>Made by gpurun {escape_line(version)}. This page runs nothing and loads nothing.</footer>"
    body = f"<body>{top}\n<main>{''.join(sections)}</main>\n{foot}</body>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n{body}</html>\n'


def _section(title: str, inner: str, name: str) -> str:
    return f'<section id="{name}"><h2>{escape_line(title)}</h2>{inner}</section>\n'


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _lede(runs: Sequence[RunMaterial]) -> str:
    """Return a line with the best result, the total time and cost, and the dates."""
    words = []
    if (best := find_lowest_loss(runs)) is not None:
        run, mark = best
        of = f" by {run.run}" if len(runs) > 1 else ""
        words.append(f"Best validation loss {format_loss(mark.loss)}{of}, step {mark.step:,}")
    doing = {run.terms.doing for run in runs}
    work = next(iter(doing)) if len(doing) == 1 else "work"
    words.append(f"{format_duration(sum(run.train_s or 0.0 for run in runs))} of {work}")
    costs = [run.cost_micros for run in runs if run.cost_micros is not None]
    unknown = len(runs) - len(costs)
    words.append(f"{format_usd(total(*costs))} in all" + (f", {unknown} not known" if unknown else ""))
    days = sorted({run.day for run in runs if run.day})
    words += [days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"] if days else []
    return tag("p", escape_line(" · ".join(words)), class_="lede")


def _charts(runs: Sequence[RunMaterial]) -> str:
    """Return one chart per axis. Radio buttons select one of them without a script; all are printed on paper."""
    curves = [Curve(run.history.losses.items, run.history.validation.items) for run in runs]
    if not is_drawn(runs):
        has_losses = any(curve.losses or curve.validation for curve in curves)
        words = "One loss is not a curve yet; the table has it." if has_losses else "No losses were reported."
        return tag("p", words, class_="note")
    axes = axes_for(curves)
    unit = "nats a token" if all(run.terms.has_model for run in runs) else ""
    inputs = "".join(
        f'<input type="radio" name="axis" id="by-{axis.name}"{"" if place else " checked"}>'
        for place, axis in enumerate(axes)
    )
    labels = "".join(f'<label for="by-{axis.name}">{escape_line(axis.name)}</label>' for axis in axes)
    figures = "".join(
        f'<figure class="{axis.name}"><div class="broad">{loss_chart(curves, axis, unit=unit)}</div>'
        f'<div class="slim">{loss_chart(curves, axis, unit=unit, narrow=True)}</div></figure>'
        for axis in axes
    )
    own = [tag("small", escape_line(words)) if words else "" for words in own_settings(runs)]
    legend = "".join(f"<li>{swatch(place)}{escape_line(run.run)} {own[place]}</li>" for place, run in enumerate(runs))
    words = "Line: training loss, its running mean over the thin raw line. Marks: validation loss."
    unranked = why_unranked(runs)
    words += f" {unranked}" if unranked else ""
    high = above(curves)
    words += f" {high} losses lie above the axis and are not drawn." if high else ""
    words += "" if axes[-1].name == "dollars" else _describe_missing_costs(runs)
    return (
        f'<div class="charts">{inputs}<nav aria-label="measure training in">{labels}</nav>'
        f'<ul class="legend">{legend}</ul>'
        f"{figures}{tag('p', escape_line(words), class_='note')}</div>"
    )


def _describe_missing_costs(runs: Sequence[RunMaterial]) -> str:
    """Return why there is no chart by cost."""
    if all(run.mode != "paid" or run.cost_micros == 0 for run in runs):
        return " No dollars: none of these runs cost anything."
    return " No dollars: the cost of reaching these losses is unknown."


def _figures(runs: Sequence[RunMaterial]) -> str:
    parts = (("Validation losses", validation_table(runs)), ("Every setting", settings_table(runs)))
    return "".join(f"<details><summary>{name}</summary>{inner}</details>" for name, inner in parts)


def _sources(runs: Sequence[RunMaterial]) -> str:
    """Return the sources of each run's figures: its receipt with the complete digest, its verdict, and notes."""
    items = []
    for place, run in enumerate(runs):
        receipt = run.receipt
        lines = [run.no_receipt]
        if receipt is not None:
            lines = [
                receipt.predicate["verdict"]["says"],
                f"hardware: {hardware_words(receipt.predicate)}",
                stated_trainer(receipt.predicate),
                f"shutdown: {shutdown_words(receipt.predicate).text}",
                f"receipt sha256 {receipt.sha256} ({signature_word(receipt)})",
            ]
            lines += [f"{incident['code']}: {incident['message']}" for incident in receipt.predicate["incidents"]]
        lines += [*run.notes, *(f"warning: {w}" for w in run.history.warnings)]
        inner = "".join(tag("li", escape_line(line)) for line in lines if line)
        items.append(f"<h3>{swatch(place)}{escape_line(run.run)}</h3><ul>{inner}</ul>")
    note = "Losses and samples were reported by the machine; cost and times were measured here, for the receipt."
    return "".join(items) + tag("p", note, class_="note")

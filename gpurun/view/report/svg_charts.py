"""The loss charts as SVG text, drawn by matplotlib and coloured by the page's own style sheet.

A chart contains only numbers of a run, and no text; names belong to the page. matplotlib writes colours unchanged, so
each colour in this module is a placeholder that is replaced by a CSS variable. Light, dark and print therefore use the
same drawing. The same figures give the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gpurun.core.errors import SetupError
from gpurun.core.installed_files import install_line
from gpurun.core.money import Micros, format_exact_usd
from gpurun.core.secrets import only_for_children
from gpurun.view.number_format import format_count
from gpurun.view.report.series import Mark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = 8
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "h")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
MOST_RUNS = COLORS * len(DASHES)

_INK, _GRID, _PAPER = "#01cd00", "#01cd01", "#01cd02"
_VARIABLES = {_INK: "var(--quiet)", _GRID: "var(--rule)", _PAPER: "var(--paper)"}
_MOST_POINTS = 500
_MOST_RINGS = 36
# The highest plausible initial loss: three times the logarithm of a vocabulary of 65,536 tokens.
_HIGHEST_START = 33.0


@dataclass(frozen=True)
class Curve:
    """What is drawn of one run. Its place in the report determines colour, shape and dash."""

    losses: Sequence[Mark]
    validation: Sequence[Mark]


@dataclass(frozen=True)
class Axis:
    """One way to measure progress. `position` returns a mark's position on the axis, or None if the mark has none."""

    name: str
    title: str
    position: Callable[[Mark], float | None]
    tick: Callable[[float], str]


def _format_whole_tick(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u2009")


def _usd_tick(value: float) -> str:
    return format_exact_usd(Micros(round(value)))


STEPS = Axis("steps", "optimiser steps", lambda mark: mark.step, _format_whole_tick)
TOKENS = Axis("tokens", "tokens seen", lambda mark: mark.tokens, format_count)
DOLLARS = Axis("dollars", "dollars spent on the rental", lambda mark: mark.spent_micros, _usd_tick)


def time_axis(longest_s: float) -> Axis:
    """Return the axis of training time, in the unit that suits the longest run."""
    units = ((3600, "hours"), (60, "minutes"))
    unit, name = next(((unit, name) for unit, name in units if longest_s >= 3 * unit), (1, "seconds"))
    return Axis(
        "time",
        f"training time in {name}",
        lambda mark: None if mark.seconds is None else mark.seconds / unit,
        lambda value: f"{value:g}",
    )


def axes_for(curves: Sequence[Curve]) -> list[Axis]:
    """Return the axes that have something to show. Dollars are shown only if something was paid."""
    marks = [mark for curve in curves for mark in (*curve.losses, *curve.validation)]
    longest_s = max((mark.seconds or 0.0 for mark in marks), default=0.0)
    axes = [STEPS, TOKENS, time_axis(longest_s), DOLLARS]
    return [axis for axis in axes if axis is STEPS or any(axis.position(mark) for mark in marks)]


@only_for_children("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")  # matplotlib starts the program fc-list.
def loss_chart(curves: Sequence[Curve], axis: Axis, *, unit: str = "nats a token", narrow: bool = False) -> str:
    """Return one chart as an `<svg>`: training losses thin, their running mean thicker, validation losses as points.

    Raise SetupError if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError(
            "report.no_matplotlib",
            "Drawing the report's charts needs matplotlib, which is not installed.",
            hint=f"{install_line('report')}; without --html the report does not need it.",
        ) from None
    size = (3.9, 3.5) if narrow else (9.2, 4.3)
    salt = f"gpurun-{axis.name}-{'narrow' if narrow else 'wide'}"
    settings: Any = {**matplotlib.rcParamsDefault, "backend": "agg", "svg.hashsalt": salt, **_LOOKS}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        for place, curve in enumerate(curves):
            _draw_curve(axes, place, curve, axis)
        _set_up_axes(axes, curves, axis, unit=unit, narrow=narrow)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    for place, curve in enumerate(curves):
        svg = _with_titles(
            svg, place, [f"step {_format_whole_tick(m.step)}: {m.loss:.4f}" for m in _choose_rings(curve, axis)]
        )
    return _strip_to_drawing(svg, f"Loss against {axis.title}")


_LOOKS: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.major.size": 4,
    "ytick.major.size": 0,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": True,
    "path.simplify": True,
}


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and its neighbours: at most `reach` before it, and as many after it.

    At the end there are fewer values after it. A mean over only earlier values would lag behind a falling loss and lie
    above it. At the end this does not matter, because a loss hardly falls there, and runs must not be compared by the
    loss of one batch.
    """
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        before = min(reach, i)
        after = min(before, len(values) - 1 - i)
        means.append((sums[i + after + 1] - sums[i - before]) / (before + after + 1))
    return means


def highest_shown(curves: Sequence[Curve]) -> float:
    """Return the highest loss that is drawn: a little above the first losses, so that no outlier flattens the rest."""
    tops = []
    for curve in curves:
        losses = [mark.loss for mark in (*curve.losses, *curve.validation)]
        if losses:
            tops.append(max(min(losses[0], _HIGHEST_START), sorted(losses)[len(losses) // 2]))
    return 1.06 * max(tops, default=1.0) or 1.0


def above(curves: Sequence[Curve]) -> int:
    """Return how many losses are above the highest that is drawn."""
    top = highest_shown(curves)
    return sum(mark.loss > top for curve in curves for mark in (*curve.losses, *curve.validation))


def _draw_curve(axes: Axes, place: int, curve: Curve, axis: Axis) -> None:
    color, dash = _color(place), DASHES[place // COLORS % len(DASHES)]
    raw = [(x, mark.loss) for mark in curve.losses if (x := axis.position(mark)) is not None]
    mean = smooth([loss for _, loss in raw], len(raw) // 60)
    thinned = _even_selection(list(zip(raw, mean, strict=True)), _MOST_POINTS)
    xs = [x for (x, _), _ in thinned]
    axes.plot(xs, [loss for (_, loss), _ in thinned], color=color, linewidth=0.8, alpha=0.38)
    axes.plot(xs, [loss for _, loss in thinned], color=color, linewidth=1.9, linestyle=dash, solid_capstyle="round")
    rings = _choose_rings(curve, axis)
    axes.plot(
        [axis.position(mark) or 0.0 for mark in rings],
        [mark.loss for mark in rings],
        color=color,
        linestyle="none",
        marker=SHAPES[place % len(SHAPES)],
        markersize=6,
        markerfacecolor=_PAPER,
        markeredgewidth=1.5,
        zorder=4,
        gid=f"validation-{place}",
    )


def _choose_rings(curve: Curve, axis: Axis) -> list[Mark]:
    """Return the validation losses that are drawn: an even selection of them."""
    return _even_selection([mark for mark in curve.validation if axis.position(mark) is not None], _MOST_RINGS)


def _set_up_axes(axes: Axes, curves: Sequence[Curve], axis: Axis, *, unit: str, narrow: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    highest = highest_shown(curves)
    shown = [m.loss for c in curves for m in (*c.losses, *c.validation) if m.loss <= highest]
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    room = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - room, high + room)
    furthest = max((axis.position(m) or 0.0 for c in curves for m in (*c.losses, *c.validation)), default=0.0)
    axes.set_xlim(0, 1.02 * furthest or 1.0)
    axes.set_xlabel(axis.title, labelpad=6)
    axes.set_ylabel(f"loss ({unit})" if unit else "loss", labelpad=8)
    whole = axis in (STEPS, TOKENS)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4 if narrow else 8, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: axis.tick(value)))


def _color(place: int) -> str:
    return f"#01ab{place % COLORS:02x}"


def _even_selection(items: list[Any], most: int) -> list[Any]:
    """Return at most `most` of the items: an even selection, including the first and the last item."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


_RUN_COLOR = re.compile(r"#01ab0([0-7])")
_ID = re.compile(r' id="(?![mp][0-9a-f]{10}")[^"]*"')
_OPENING = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')


def _strip_to_drawing(svg: str, title: str) -> str:
    """Return only the drawing: no prologue, no page-wide rules, no clashing ids, and CSS variables as colours."""
    body = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    body = _OPENING.sub(rf'<svg viewBox="\1" role="img" aria-label="{title}">', body, count=1)
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body).replace("xlink:href=", "href=")
    body = _RUN_COLOR.sub(r"var(--run-\1)", _ID.sub("", body))
    for stand_in, variable in _VARIABLES.items():
        body = body.replace(stand_in, variable)
    # A hundredth of a pixel is precise enough. The text between the tags stays unchanged.
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), body)
    return re.sub(r"\n\s*", "\n", body).replace("\n<defs>\n</defs>", "").strip()


def _with_titles(svg: str, place: int, titles: Sequence[str]) -> str:
    """Add tooltips to the validation points of one run. If a point outside the axes has no element, add none."""
    start = svg.find(f'id="validation-{place}"')
    if start < 0:
        return svg
    end = svg.find("</clipPath>", start) if svg.find('<g id="', start) < 0 else svg.find('<g id="', start)
    group = svg[start:end]
    if group.count("<use ") != len(titles):
        return svg
    waiting = iter(titles)
    group = re.sub(r"<use ([^>]*)/>", lambda use: f"<use {use[1]}><title>{next(waiting)}</title></use>", group)
    return svg[:start] + group + svg[end:]

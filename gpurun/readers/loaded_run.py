"""Loads past runs in a notebook or script: `gpurun.runs()` and `gpurun.load_run("fox-41")`. Writes nothing.

docs/NOTEBOOK.md describes the whole interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError
from gpurun.core.installed_files import install_line
from gpurun.core.money import MICROS_PER_USD
from gpurun.core.paths import Home, default_home, home_at
from gpurun.core.trainer_events import EvaluationEvent, SampleEvent, StepEvent, events_of

COLUMNS = ("step", "tokens", "seconds", "cost_usd", "loss", "val_loss", "bits_per_byte", "hellaswag", "lr", "grad_norm",
           "tokens_per_s", "mfu")  # fmt: skip
"""The columns of `Run.metrics`, with a row per logged or evaluated step; None (pandas: NaN) if not measured."""


@dataclass(frozen=True)
class Run:
    """A run in the state that it had when it was loaded."""

    name: str
    rows: tuple[Mapping[str, float | int | None], ...] = field(repr=False)
    samples: tuple[Mapping[str, Any], ...] = field(repr=False)
    """The model's samples: `step`, `prompt`, `text`."""
    receipt: Mapping[str, Any] | None = field(repr=False)
    """The receipt's predicate (docs/RECEIPTS.md), after its signature was checked; None before the run has ended."""

    @property
    def metrics(self) -> Any:
        """Return the rows as a pandas frame with the columns COLUMNS; without pandas, as a dict of lists."""
        table = {name: [row[name] for row in self.rows] for name in COLUMNS}
        try:
            import pandas
        except ImportError:
            return table
        return pandas.DataFrame(table)

    def plot(self, against: str = "step") -> Any:
        """Return a matplotlib figure of the losses against a column. Raise SetupError if matplotlib is missing."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            hint = install_line("report")
            raise SetupError("plot.no_matplotlib", "Charts need matplotlib.", hint=hint) from None
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for name, form in (("loss", "-"), ("val_loss", "o")):
            marks = [(row[against], row[name]) for row in self.rows if None not in (row[against], row[name])]
            axes.plot(*zip(*marks, strict=True) if marks else ([], []), form, label=name)
        axes.set(title=self.name, xlabel=against, ylabel="loss (nats per token)")
        axes.legend()
        return figure


def runs(home: str | Path | None = None) -> list[str]:
    """Return the names of a home's runs, oldest first. The default home is GPURUN_HOME, or else the usual folder."""
    from gpurun.ledger.runs import planned_runs

    return planned_runs(_home(home))


def load_run(name: str = "@last", home: str | Path | None = None) -> Run:
    """Return a run by its name, a unique beginning of the name, or "@last". Raise UsageError if there is no such run.

    If the receipt's signature is wrong, raise the same error as `gpurun receipt`.
    """
    from gpurun.ledger.runs import find_run, look_at_run
    from gpurun.ledger.write_receipt import read_receipt
    from gpurun.readers.run_material import spending_of

    place = _home(home)
    sight = look_at_run(place, find_run(place, name))
    spent_at, rows, samples = spending_of(sight), dict[int, dict[str, Any]](), list[dict[str, Any]]()
    for event in events_of(sight.folder.events):
        if isinstance(event, SampleEvent):
            samples.append({"step": event.step, "prompt": event.prompt, "text": event.text})
        if not isinstance(event, StepEvent | EvaluationEvent) or event.step is None:
            continue
        spent = None if event.elapsed_s is None else spent_at(event.elapsed_s)
        row = rows.setdefault(event.step, dict.fromkeys(COLUMNS))
        row |= {
            "step": event.step,
            "seconds": event.elapsed_s,
            "cost_usd": None if spent is None else spent / MICROS_PER_USD,
        }
        row |= {name: value for name in COLUMNS if (value := getattr(event, name, None)) is not None}
    receipt = read_receipt(place, sight.folder).predicate if sight.folder.receipt.exists() else None
    predicate = None if receipt is None else dict(receipt)
    return Run(sight.folder.name, tuple(rows[step] for step in sorted(rows)), tuple(samples), predicate)


def _home(named: str | Path | None) -> Home:
    return Home(default_home() if named is None else home_at(str(named)))

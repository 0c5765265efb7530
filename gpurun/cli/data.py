"""What the `data` verbs do."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode
from gpurun.lifecycle.corpus.corpora import add_hellaswag, inspect_data, prepare_data
from gpurun.planning.bundle import bundle_root
from gpurun.planning.recipe import load_recipe, resolve
from gpurun.view.paint import clip_line, render
from gpurun.view.prepared import DataFigures, data_lines, progress_line
from gpurun.view.style import probe

_PLAIN_PERIOD_S = 10.0


def prepare_folder(
    session: Session, recipe: str, *, source: str, out: str, options: Mapping[str, int | float | str]
) -> Result:
    """Make a folder of shards for a recipe, or go on with it, and say what it holds."""
    name = recipe or session.settings["recipe"].value
    loaded = load_recipe(name)
    resolved, wanted = resolve(loaded, "full"), loaded.tables.data
    place = Path(out or f"{resolved.name}-data").expanduser().absolute()
    if "val_fraction" in wanted.model_fields_set:
        options = {"val-fraction": wanted.val_fraction, **options}
    flags = [f"--{key}={value}" for key, value in options.items()]
    bar = _Bar(session)
    if wanted.limit_mb:
        bar.say(f"data.limit_mb {wanted.limit_mb} of {resolved.name} is for text that a run tokenises: all is prepared")
    try:
        answer = prepare_data(
            resolved.record,
            source=source,
            out=place,
            options=flags,
            root=bundle_root(),
            say=bar.say,
            progress=bar.show,
        )
    except KeyboardInterrupt:
        bar.end()
        kept = "Interrupted. What is finished stays: the same command goes on with it."
        return Result(exit_code=ExitCode.INTERRUPTED, after=kept)
    finally:
        bar.end()
    found = answer["data"]
    figures = DataFigures(
        **{key: found[key] for key in ("tokenizer", "tokenizer_sha256", "vocab_size", "train_tokens", "val_tokens")},
        shard_bytes=found["bytes"],
        source=answer["source"],
        skipped=answer["skipped"],
    )
    text = render(data_lines(place.name, figures, session.style), session.style)
    after = f"Train on it: gpurun train {shlex.quote(name)} --data {shlex.quote(out or place.name)}"
    data = {**found, "made": answer["made"], "documents": answer["source"]["documents"]}
    return Result(data=data, text=text, after=after)


def inspect_folder(session: Session, folder: Path) -> Result:
    """What a folder of shards holds, once every byte of it was checked."""
    found, manifest = inspect_data(folder.expanduser())
    shards = {split: len(manifest[split]) for split in ("train", "val")}
    figures = DataFigures(
        tokenizer=found.tokenizer,
        tokenizer_sha256=found.tokenizer_sha256,
        vocab_size=found.vocab_size,
        train_tokens=found.train_tokens,
        val_tokens=found.val_tokens,
        shard_bytes=found.bytes,
        source=manifest["source"],
        shards=shards,
        eot=str(manifest.get("eot", "unknown")),
    )
    told = {"eot": figures.eot, "dtype": manifest.get("dtype"), "shards": shards, "about": manifest["source"]}
    text = render(data_lines(folder.name, figures, session.style), session.style)
    return Result(data={**found.model_dump(exclude={"beside"}), **told}, text=text)


def hellaswag_folder(session: Session, questions: Path, folder: Path) -> Result:
    """Make a folder of shards ready to be judged by HellaSwag."""
    made = add_hellaswag(questions, folder, root=bundle_root(), say=session.say)
    after = f"Ask some at every evaluation: --data {folder} --set eval.hellaswag_items=1000"
    return Result(data=made, text=f"{made['items']:,} questions in {made['file']}", after=after)


class _Bar:
    """One line that is redrawn on a terminal; elsewhere a line now and then. Silent with --json and --quiet."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._style = probe(sys.stderr, color=session.color)
        self._redraws = self._style.redraw and not (session.no_progress or session.json or session.quiet)
        self._began: tuple[float, int] | None = None
        self._due = 0.0
        self._drawn = ""

    def say(self, text: str) -> None:
        """Talk above the bar."""
        self.end()
        if not self._session.json:
            self._session.say(text)

    def show(self, figures: Mapping[str, int]) -> None:
        """Draw how far it is; the time that is left is judged by this call's own work, not by what was done before."""
        now = self._session.clock.monotonic()
        self._began = self._began or (now, figures["done_bytes"])
        if now < self._due or self._session.json:
            return
        since, done_before = self._began
        line = progress_line(figures, elapsed_s=now - since, done_before=done_before, style=self._style)
        if self._redraws:
            # A line that folds is not one that can be redrawn; a terminal may be made narrower at any time.
            style = probe(sys.stderr, color=self._session.color)
            shown = render([clip_line(line, style.width - 1, style)], style)
            print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
            self._drawn = "\n" if figures["done_bytes"] > done_before else "\r\x1b[K"
        elif figures["done_bytes"] > done_before:
            self._session.say(render([line], self._style))
            self._due = now + _PLAIN_PERIOD_S

    def end(self) -> None:
        """Leave the line as it is and go to the next; one that tells of nothing yet is wiped away."""
        print(self._drawn, end="", file=sys.stderr, flush=True)
        self._drawn = ""

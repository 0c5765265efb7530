"""Implements `gpurun mandate`: defines what an agent may spend, and on what. Only a person at a terminal can do so."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.help_panels import make_verb_group
from gpurun.cli.options import read_script
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import Declined, UsageError

USUAL_UNTIL = "7d"

app = typer.Typer(
    help="Write, show and revoke mandates: what an agent may spend.", cls=make_verb_group("show"), rich_markup_mode=None
)


Total = Annotated[str, typer.Option("--total", metavar="USD", help="Limit the total cost of all runs.")]
PerRun = Annotated[str, typer.Option("--per-run", metavar="USD", help="Limit the cost of each run.")]
RateMax = Annotated[str, typer.Option("--rate-max", metavar="USD", help="Limit the hourly price of a machine.")]
Providers = Annotated[
    str, typer.Option("--providers", metavar="NAMES", help="Allow these: runpod, slurm:NAME, … (default: all clouds).")
]
Cards = Annotated[
    str, typer.Option("--cards", metavar="NAMES", help="Allow these: T4,L4, …, or cpu (default: all GPUs).")
]
Until = Annotated[
    str, typer.Option("--until", metavar="DURATION", help="Let the mandate expire after this time (default 7d).")
]
Root = Annotated[
    str, typer.Option("--root", metavar="DIR", help="Allow uploads only from this folder (default: current).")
]
Secrets = Annotated[
    list[str], typer.Option("--secret", metavar="NAME", help="Allow passing this variable; may be repeated.")
]
Images = Annotated[list[str], typer.Option("--image", metavar="IMAGE", help="Allow this image; may be repeated.")]
Setups = Annotated[
    list[str], typer.Option("--setup", metavar="SCRIPT", help="Allow this script as --setup; may be repeated.")
]


@verb(
    app,
    "mandate new",
    examples=["gpurun mandate new --total 25 --per-run 5", "gpurun mandate new --total 25 --per-run 5 --cards T4,L4"],
)
def new(
    session: Session,
    total: Total,
    per_run: PerRun,
    rate_max: RateMax = "",
    providers: Providers = "",
    cards: Cards = "",
    until: Until = USUAL_UNTIL,
    root: Root = "",
    secret: Secrets = [],  # noqa: B006 - Typer copies defaults.
    image: Images = [],  # noqa: B006 - Typer copies defaults.
    setup: Setups = [],  # noqa: B006 - Typer copies defaults.
    spot: Annotated[bool, typer.Option("--spot", help="Also allow spot machines.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", hidden=True)] = False,
) -> Result:
    """Write a mandate: what a process with the mandate's file may spend. Needs a person at a terminal."""
    from gpurun.core.money import parse_usd
    from gpurun.ledger.mandate import write_mandate
    from gpurun.view.mandate_screen import mandate_lines

    if yes or not session.interactive:
        what = "Only a person at a terminal can write a mandate; no flag can answer instead."
        raise UsageError("mandate.no_person", what, hint="Type it at a terminal, without --yes, --json and --no-input.")
    sums = {"total_micros": parse_usd(total, name="--total"), "per_run_micros": parse_usd(per_run, name="--per-run")}
    if sums["per_run_micros"] > sums["total_micros"]:
        raise UsageError("mandate.sums", "--per-run is more than --total.", hint="Use a smaller --per-run.")
    terms = {
        **sums,
        "rate_max_micros_per_hour": parse_usd(rate_max, name="--rate-max") if rate_max else None,
        "providers": _require_allowed_providers(session, _split_at_commas(providers)),
        "cards": _cards(_split_at_commas(cards)),
        "until_wall": session.clock.wall() + _span_s(until),
        "root": str(_resolve_root(session, root)),
        "secrets": tuple(_require_variable_name(name) for name in secret),
        "images": tuple(image),
        "setups": tuple(hashlib.sha256(read_script(path).encode()).hexdigest() for path in setup),
        "spot": spot,
    }
    session.say(session.draw(mandate_lines(terms, session.style, now=session.clock.wall())))
    if session.ask("Write this mandate? [y/N]", flag="an answer at a terminal").lower() not in ("y", "yes"):
        raise Declined("mandate.declined", "No mandate was written.", hint="Run it again with other terms.")
    mandate, path = write_mandate(session.home, session.clock, **terms)
    after = f"Start an agent with it: gpurun mcp --mandate {path}, or GPURUN_MANDATE={path} in its environment."
    return Result(data={"id": mandate.id, "file": str(path)}, text=str(path), after=after)


@verb(app, "mandate show", examples=["gpurun mandate show", "gpurun mandate show 1f3a9c0d"])
def show(
    session: Session,
    mandate_id: Annotated[str, typer.Argument(metavar="ID", help="The mandate to show (default: all).")] = "",
) -> Result:
    """Show the mandates of this home: their terms, what was spent under each, and what is left."""
    from gpurun.cli.budget_rows import mandate_row
    from gpurun.ledger.mandate import is_revoked, mandates_of
    from gpurun.view.budget_screen import budget_screen
    from gpurun.view.mandate_screen import mandate_lines

    known = dict(mandates_of(session.home))
    if session.bounds:
        known = {session.bounds.mandate.id: session.bounds.mandate}
    chosen = [_find_mandate(session, mandate_id, list(known))] if mandate_id else list(known)
    rows, lines = [], []
    for meant in chosen:
        mandate, row = known[meant], mandate_row(session, meant)
        revoked = is_revoked(session.home, meant)
        lines += budget_screen([row], [], [], session.style, now=session.clock.wall())
        terms = mandate.model_dump() if mandate else {}
        lines += mandate_lines(terms, session.style, now=session.clock.wall(), revoked=revoked)
        rows.append({"id": meant, "revoked": revoked, "terms": terms or None, "left_micros": row.left_micros})
    after = (
        "" if chosen else "There are no mandates. To write one at a terminal: gpurun mandate new --total 25 --per-run 5"
    )
    return Result(data={"mandates": rows}, text=session.draw(lines) if lines else "", after=after)


@verb(app, "mandate revoke", examples=["gpurun mandate revoke 1f3a9c0d"])
def revoke(session: Session, mandate_id: Annotated[str, typer.Argument(metavar="ID")]) -> Result:
    """Revoke a mandate permanently: it starts no new runs, and its current runs finish."""
    from gpurun.ledger.mandate import mandates_of, revoke_mandate

    meant = _find_mandate(session, mandate_id, [name for name, _ in mandates_of(session.home)])
    revoke_mandate(session.home, meant)
    text = f"The mandate {meant} is revoked. Its current runs will finish: gpurun ps"
    return Result(data={"id": meant, "revoked": True}, text=text)


def _find_mandate(session: Session, name: str, known: Sequence[str]) -> str:
    """Return the id of a mandate, given its id or its file; UsageError if it does not exist."""
    stem = Path(name).stem if "/" in name or name.endswith(".json") else name
    if stem not in known:
        what = f"There is no mandate {name!r} in {session.home.root}."
        raise UsageError("mandate.unknown", what, hint="gpurun mandate show lists them.")
    return stem


def _split_at_commas(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _require_allowed_providers(session: Session, names: Sequence[str]) -> tuple[str, ...]:
    """Return the providers; UsageError unless each is a cloud, or a cluster in config.toml."""
    from gpurun.core.places import place_facts
    from gpurun.core.settings import find_cluster
    from gpurun.providers.registry import require_known

    for name in names:
        kind, _, cluster = name.partition(":")
        require_known([kind])
        facts = place_facts(kind)
        if facts.is_queued and cluster:
            find_cluster(session.home, cluster)
        elif cluster or not facts.is_rented:
            what = (
                f"--providers {name!r} is not allowed in a mandate: it cannot include this computer or your own boxes."
            )
            raise UsageError("mandate.providers", what, hint="Name clouds, or a cluster: runpod,slurm:NAME")
    return tuple(names)


def _cards(names: Sequence[str]) -> tuple[str, ...]:
    from gpurun.providers.catalog import parse_gpu

    return tuple(parse_gpu(name, name="--cards").name for name in names)


def _span_s(text: str) -> int:
    from gpurun.cli.durations import span_s

    seconds = span_s(text)
    if not seconds or seconds > 366 * 86_400:
        what = f"--until {text!r} is not a valid duration for a mandate: at most a year."
        raise UsageError("mandate.until", what, hint="Write hours or days: --until 2d")
    return seconds


def _resolve_root(session: Session, text: str) -> Path:
    """Return the resolved folder; UsageError if it contains a home directory or gpurun's own files."""
    place = Path(os.path.realpath(Path(text or ".").expanduser()))
    if not place.is_dir():
        raise UsageError("mandate.root", f"There is no folder {place}.", hint="Name one: --root DIR")
    for kept in (Path.home(), session.home.root):
        inner = Path(os.path.realpath(kept))
        if place == inner or place in inner.parents:
            what = f"--root {place} contains {inner}, and anything below the root may be uploaded."
            raise UsageError("mandate.root", what, hint="Name the folder of one project: --root DIR")
    return place


def _require_variable_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name.startswith("GPURUN_"):
        what = f"--secret {name!r} is not the name of a variable."
        raise UsageError("mandate.secret", what, hint="Use letters, digits and _, not GPURUN_…, and never a value.")
    return name

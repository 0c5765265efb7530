"""Defines the flags that several commands share, and builds a Request from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.durations import (
    give_up_after_s,
    idle_s,
    limit_s,
    parse_hold_s,
    parse_setup_limit_s,
    queue_s,
    silent_s,
    until_wall,
    wait_s,
)
from gpurun.cli.session import Session
from gpurun.cli.verb import Shared

if TYPE_CHECKING:
    from gpurun.core.run_plan import Request as Request
else:  # The help of `plan` needs only the name, and importing the real class loads pydantic.
    Request = object


def complete_run(incomplete: str) -> list[str]:
    """Return the names of the runs that begin with `incomplete`."""
    from gpurun.core.errors import GpurunError
    from gpurun.core.paths import Home, default_home

    try:
        return [folder.name for folder in Home(default_home()).folders() if folder.name.startswith(incomplete)]
    except (GpurunError, OSError):  # A completion must not print an error into the command that is being typed.
        return []


def _complete_recipe(incomplete: str) -> list[str]:
    from gpurun.jobs.training.recipe import list_recipes

    return [name for name in list_recipes() if name.startswith(incomplete)]


def complete_gpu(incomplete: str) -> list[str]:
    """Return the names in the catalogue, with or without a count, that begin with `incomplete`."""
    from gpurun.providers.catalog import all_offers, card_names, gpu_flag

    names = {gpu_flag(offer) for offer in all_offers()} | {*card_names().values(), "any"}
    return sorted(name for name in names if name.startswith(incomplete))


def _complete_key_name(incomplete: str) -> list[str]:
    from dataclasses import fields

    from gpurun.core.installed_files import recipe

    keys = (f"{table}.{key.name}=" for table, kind in recipe.TABLES.items() for key in fields(kind))
    return [key for key in keys if key.startswith(incomplete)]


def _complete_provider(incomplete: str) -> list[str]:
    from gpurun.providers.registry import PROVIDERS

    return [name for name in PROVIDERS if name.startswith(incomplete)]


NAMED, USUAL = "Name, unique beginning, or @last", "the only open run, or the last"
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=f"{NAMED}.", autocompletion=complete_run)]
UsualRun = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help=f"{NAMED} (default: {USUAL}).", autocompletion=complete_run),
]
Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help=f"{NAMED} (default: {USUAL}).", autocompletion=complete_run),
]
ACCEPT_SKIPPED = "Accept a folder where most files are skipped."
RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe's name or file, or a plan file.", autocompletion=_complete_recipe),
]
RecipeNames = Annotated[
    list[str],
    typer.Argument(metavar="RECIPE", help="Recipes' names or files.", autocompletion=_complete_recipe),
]
Providers = Annotated[
    list[str],
    typer.Option("--provider", metavar="P", help="Use only this cloud; repeatable.", autocompletion=_complete_provider),
]  # fmt: skip
Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe; may be repeated.",
        autocompletion=_complete_key_name,
    ),
]
Checkpoint = Annotated[
    str, typer.Option("--checkpoint", metavar="NAME", help="Use this checkpoint: best, last, or a step: 000120.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Answer yes to every question.")]


def request_from(session: Session, **typed: Any) -> Request:
    """Return the checked request from the typed flags; missing values come from --from and the settings."""
    from gpurun.core.run_plan import Request

    if typed["recipe"].endswith(".json"):
        return _request_in_plan_file(session, **typed)
    settings, continues = session.settings, typed["continues"]
    renting = build_request_fields(session, **typed)
    trainer = str(Path(typed["trainer"]).expanduser().absolute()) if typed["trainer"] else ""
    init = str(Path(typed["init"]).expanduser().absolute()) if typed["init"] else ""
    own = {"warm": typed["warm"], "accept_skipped": typed["accept_skipped"], "trainer": trainer, "init": init}
    bundle = typed["core_bundle"]
    own["core_bundle"] = str(Path(bundle).expanduser().absolute()) if bundle and "://" not in bundle else bundle
    choices = renting["choices"].model_copy(update=own)
    kept = (f"train.keep_checkpoints={typed['keep_checkpoints']}",) if typed["keep_checkpoints"] else ()
    request = Request(
        recipe=_absolute_recipe(typed["recipe"] or (settings["recipe"].value if continues is None else "")),
        overrides=(
            *typed["overrides"],
            *kept,
            *challenge_override(session, typed["challenge"]),
            *_init_override(typed),
        ),
        **{**renting, "choices": choices},
    )
    if continues is None:
        return request
    from gpurun.jobs.training.continued_training import training_as_before

    return training_as_before(request, session.home, usual_providers(session))


def _init_override(typed: dict[str, Any]) -> tuple[str, ...]:
    """Return the override that makes a run start from the weights of --init; UsageError if two flags name weights."""
    if not typed["init"]:
        return ()
    from gpurun.core.errors import UsageError
    from gpurun.jobs.training.initial_weights import INIT_FOLDER

    for flag, is_said in (
        ("--from", bool(typed["continues"])),
        ("--set train.init_from", any(text.startswith("train.init_from=") for text in typed["overrides"])),
    ):
        if is_said:
            what = f"--init and {flag} both name the weights to start from."
            raise UsageError("usage.init", what, hint="Use only one of them.")
    return (f'train.init_from="{INIT_FOLDER}"',)


def usual_providers(session: Session) -> tuple[str, ...]:
    """Return the providers that the settings name."""
    return tuple(name.strip() for name in session.settings["providers"].value.split(",") if name.strip())


def build_request_fields(session: Session, **typed: Any) -> dict[str, Any]:
    """Return the fields of a Request for the flags of RENTING; missing values come from the settings."""
    from gpurun.core.command import checked_globs
    from gpurun.core.money import parse_usd
    from gpurun.core.run_plan import HOLD_S, Choices
    from gpurun.providers.catalog import parse_gpu

    if session.bounds and typed["continues"] is not None:
        from gpurun.cli.run_control import resolve_run_name

        resolve_run_name(session, typed["continues"])  # The run is about to be read, so it must belong to the mandate.
    settings, price = session.settings, typed["price_per_hour"]
    cap = typed["max_cost"] or settings["max_cost"].value
    providers = tuple(typed["provider"]) or (usual_providers(session) if typed["continues"] is None else ())
    clusters = tuple(dict.fromkeys(name.partition(":")[2] for name in providers if name.startswith("slurm:")))
    return {
        "gpu": parse_gpu(typed["gpu"]) if typed["gpu"] else None,
        "max_cost_micros": parse_usd(cap) if cap else None,
        "cap_from": typed.get("cap_from")
        or ("--max-cost" if typed["max_cost"] else settings["max_cost"].source if cap else ""),
        "providers": tuple(dict.fromkeys("slurm" if name.startswith("slurm:") else name for name in providers)),
        "data": typed["data"] or None,
        "hours": typed["hours"],
        "dry_run": typed["dry_run"],
        **{name: typed[name] for name in ("host", "host_key", "identity", "jump", "python")},
        "price_micros_per_hour": parse_usd(price, name="--price-per-hour", is_limit=False) if price else None,
        "uplink_mbit": float(settings["uplink"].value) if settings["uplink"].value else None,
        "continues": typed["continues"] or "",
        "choices": Choices(
            region=(clusters[0] if len(clusters) == 1 else typed["region"]) or None,
            clusters=clusters if len(clusters) > 1 else (),
            spot=typed["spot"],
            guard=typed["lambda_guard"],
            weak_lease=typed["accept_weak_lease"],
            accept_cpu=typed["accept_cpu"],
            image=typed["image"],
            setup=read_script(typed["setup"]),
            setup_limit_s=0 if typed["setup_limit"] is None else parse_setup_limit_s(typed["setup_limit"]),
            stage=typed["stage"],
            log_to=_parse_typed_trackers(typed["log_to"]),
            give_up_after_s=give_up_after_s(typed["give_up_after"]) if typed["give_up_after"] else 0,
            idle_s=idle_s(typed["idle"]) if typed["idle"] else None,
            silent_s=silent_s(typed["silent"]) if typed["silent"] else None,
            hold_s=parse_hold_s(typed["hold_on_failure"]) if typed["hold_on_failure"] else HOLD_S,
            queue_s=queue_s(typed["queue"]) if typed["queue"] else 0,
            max_gpu_hours=_checked_gpu_hours(typed["max_gpu_hours"]),
            limit_s=limit_s(typed["time"]) if typed["time"] else 0,
            **{name: typed[name] for name in ("partition", "account", "qos")},
            slow_network=typed["slow_network"],
            **_moving_choices(session, typed),
            pass_env=checked_globs(typed["pass_env"]) if typed["pass_env"] else (),
        ),
    }


def _moving_choices(session: Session, typed: dict[str, Any]) -> dict[str, Any]:
    """Return the choices for moving to other machines; UsageError for a flag that needs --keep-going."""
    from gpurun.core.errors import UsageError
    from gpurun.core.money import parse_usd
    from gpurun.core.run_plan import MOST_LEGS

    is_on = typed["keep_going"] or session.settings["keep_going"].value == "true"
    for name in ("legs", "wait", "until"):
        if typed[name] and not is_on:
            what = f"--{name} applies only to a run that continues on other machines."
            raise UsageError(f"usage.{name}", what, hint="Add --keep-going, or leave it out.")
    legs = MOST_LEGS if typed["legs"] is None else typed["legs"]
    if not 1 <= legs <= LONGEST_LEGS:
        what = f"--legs {legs} is out of range: it must be from 1 to {LONGEST_LEGS} machines."
        raise UsageError("usage.legs", what, hint="For example: --legs 5")
    rate = parse_usd(typed["max_rate"], name="--max-rate", is_limit=False) if typed["max_rate"] else None
    return {
        "keep_going": is_on,
        "legs": legs,
        "wait_s": wait_s(typed["wait"]) if typed["wait"] else 0,
        "until_wall": until_wall(typed["until"], session.clock.wall()) if typed["until"] else 0.0,
        "max_rate_micros": rate,
    }


LONGEST_LEGS = 50
_CHALLENGE = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{3,63}")


def challenge_override(session: Session, challenge: str) -> tuple[str, ...]:
    """Return the override train.challenge=CHALLENGE:KEYID, which determines the seed; () if there is no challenge."""
    return (f'train.challenge="{bound_challenge(session, challenge)}"',) if challenge else ()


def bound_challenge(session: Session, challenge: str) -> str:
    """Return CHALLENGE:KEYID, which adds the id of the key that will sign the receipt."""
    from gpurun.core.errors import SetupError, UsageError
    from gpurun.ledger.signing import load_signer

    if not _CHALLENGE.fullmatch(challenge):
        what = (
            f"--challenge {challenge[:80]!r} is not a challenge: it must have 4 to 64 letters, digits, dots or dashes."
        )
        raise UsageError("usage.challenge", what, hint="Copy the whole challenge that your teacher gave you.")
    signer = load_signer(session.home.prepare().keys)
    if signer is None:
        what = f"A challenge needs the key that signs receipts, and {session.home.keys} has no readable key."
        raise SetupError(
            "challenge.no_key", what, hint="docs/RECEIPTS.md, section The form, explains how to start over."
        )
    return f"{challenge}:{signer.keyid}"


_BESIDE_PLAN = ("recipe", "max_cost", "dry_run", "accept_weak_lease")
"""The arguments that are allowed with a plan file; the file defines everything else."""


def _request_in_plan_file(session: Session, **typed: Any) -> Request:
    """Return the request in a plan file; flags can change only the cap, the consent to a weak lease, and the rehearsal.

    The cap is --max-cost, else the lower of the user's cap and the file's: a file from a stranger cannot raise the
    user's cap.
    """
    from gpurun.core.errors import UsageError
    from gpurun.core.money import parse_usd
    from gpurun.planning.plan_file import read_plan_file

    path, cap = typed["recipe"], typed["max_cost"]
    other = next(
        (name for name, (_, usual) in REQUEST.flags.items() if typed[name] != usual and name not in _BESIDE_PLAN), ""
    )
    if other:
        what = f"{path} already defines the run, so {other.replace('_', '-')} is not allowed with it."
        hint = "Use only --max-cost, --accept-weak-lease or --dry-run with it, or write a new plan: gpurun plan -o FILE"
        raise UsageError("plan_file.flags", what, hint=hint)
    request = read_plan_file(path)
    choices = request.choices.model_copy(update={"weak_lease": typed["accept_weak_lease"]})
    update: dict[str, Any] = {"choices": choices, "dry_run": typed["dry_run"] or request.dry_run}
    own = session.settings["max_cost"]
    if cap:
        update |= {"max_cost_micros": parse_usd(cap), "cap_from": "--max-cost"}
    elif own.value and (request.max_cost_micros is None or parse_usd(own.value) < request.max_cost_micros):
        update |= {"max_cost_micros": parse_usd(own.value), "cap_from": own.source}
    return request.model_copy(update=update)


def _absolute_recipe(recipe: str) -> str:
    """Return a bundled recipe's name unchanged, and a file's path as absolute, so that `--from` finds it later."""
    return str(Path(recipe).expanduser().absolute()) if recipe.endswith(".toml") or "/" in recipe else recipe


def read_script(path: str) -> str:
    """Return the text of a script. The text is stored with the run, so the file may change afterwards."""
    from gpurun.core.errors import UsageError

    try:
        return Path(path).expanduser().read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        hint = "Name a shell script: --setup install.sh"
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError("usage.setup", f"--setup {path} cannot be read: {why}.", hint=hint) from None


def _checked_gpu_hours(hours: float | None) -> float | None:
    """Return the hours of --max-gpu-hours; UsageError if they are not positive."""
    from gpurun.core.errors import UsageError

    if hours is not None and not 0 < hours < 1e6:
        what = f"--max-gpu-hours {hours:g} is not a number of hours above 0."
        raise UsageError("usage.max_gpu_hours", what, hint="For example: --max-gpu-hours 16")
    return hours


def _parse_typed_trackers(text: str) -> tuple[str, ...]:
    """Return the trackers of --log-to, or none if it was not typed."""
    if not text:
        return ()
    from gpurun.readers.curve_log import parse_trackers

    return parse_trackers(text)


def flag(name: str, help_text: str) -> Any:
    """Return the type of a switch, for Typer."""
    return Annotated[bool, typer.Option(name, help=help_text)]


def make_text_option(
    name: str, metavar: str, help_text: str, complete: Callable[[str], list[str]] | None = None
) -> Any:
    """Return the type of a flag that takes a text, for Typer."""
    return Annotated[str, typer.Option(name, metavar=metavar, help=help_text, autocompletion=complete)]


def make_from_option(help_text: str) -> Any:
    """Return the type of --from, for Typer."""
    return Annotated[
        str | None, typer.Option("--from", metavar="RUN", help=help_text, autocompletion=complete_run)
    ]  # fmt: skip


RENTING: dict[str, tuple[Any, Any]] = {
    "gpu": (
        make_text_option("--gpu", "GPU", "Rent 8xA100-80GB, cpu, or any: the cheapest that fits.", complete_gpu),
        "",
    ),
    "max_cost": (make_text_option("--max-cost", "USD", "Never spend more than this on the whole run."), ""),
    "provider": (Providers, []),
    "region": (make_text_option("--region", "R", "Use only this region."), ""),
    "data": (make_text_option("--data", "PATH", "Train on text, shards, or hf:OWNER/NAME."), ""),
    "continues": (make_from_option("Continue from a run's newest checkpoint."), None),
    "stage": (make_text_option("--stage", "s3://BUCKET", "Upload the shards to this bucket before renting."), ""),
    "hours": (
        Annotated[float | None, typer.Option("--hours", metavar="H", help="Stop training after this many hours.")],
        None,
    ),
    "dry_run": (flag("--dry-run", "Rehearse on the CPU of this computer, for free."), False),
    "keep_going": (flag("--keep-going", "Continue on another machine if this one is lost."), False),
    "legs": (
        Annotated[int | None, typer.Option("--legs", metavar="N", help="Use at most this many machines (default 5).")],
        None,
    ),
    "wait": (make_text_option("--wait", "DURATION", "Wait this long for the next machine (default 15m)."), ""),
    "until": (make_text_option("--until", "HH:MM", "Wait until this time for the next machine."), ""),
    "max_rate": (make_text_option("--max-rate", "USD", "Rent no machine that costs more per hour."), ""),
    "spot": (flag("--spot", "Rent a spot machine: cheaper, but may be taken away."), False),
    "accept_weak_lease": (flag("--accept-weak-lease", "Rent even if only this computer ends the machine."), False),
    "lambda_guard": (flag("--lambda-guard", "Put a key on a Lambda machine so it can end itself."), False),
    "accept_cpu": (flag("--accept-cpu", "Train even if the machine has no CUDA device."), False),
    "image": (make_text_option("--image", "IMAGE", "Start the machine from this image."), ""),
    "setup": (make_text_option("--setup", "SCRIPT", "Run this script on the machine first."), ""),
    "setup_limit": (
        Annotated[
            float | None,
            typer.Option("--setup-limit", metavar="MIN", help="Stop --setup after this many minutes (default 10)."),
        ],
        None,
    ),
    "log_to": (
        make_text_option("--log-to", "TRACKERS", "Log to wandb, mlflow, trackio, tensorboard (commas)."),
        "",
    ),
    "give_up_after": (
        make_text_option("--give-up-after", "DURATION", "End a machine after this long without an answer."),
        "",
    ),
    "idle": (make_text_option("--idle", "DURATION", "Stop a job after this long without computing, or off."), ""),
    "silent": (make_text_option("--silent", "DURATION", "Stop a job after this long without output, or off."), ""),
    "hold_on_failure": (
        make_text_option("--hold-on-failure", "MIN|off", "Keep a failed run's machine this long (default 15)."),
        "",
    ),
    "host": (make_text_option("--host", "USER@HOST[:PORT]", "Use your own box, or its name in ~/.ssh/config."), ""),
    "host_key": (make_text_option("--host-key", "KEY", "Expect this host key or SHA256 fingerprint."), ""),
    "identity": (make_text_option("--identity", "FILE", "Log in with this private key, or `agent`."), ""),
    "jump": (make_text_option("--jump", "USER@HOST[:PORT]", "Reach the box through this host."), ""),
    "python": (make_text_option("--python", "PATH", "Use this Python on the box or cluster."), ""),
    "max_gpu_hours": (
        Annotated[
            float | None,
            typer.Option("--max-gpu-hours", metavar="H", help="Spend at most this many GPU hours on a cluster."),
        ],
        None,
    ),
    "queue": (make_text_option("--queue", "DURATION", "Let a job wait this long to start (default 1d)."), ""),
    "partition": (make_text_option("--partition", "NAME", "Use this partition of the cluster."), ""),
    "time": (make_text_option("--time", "DURATION", "Limit the job to this time on the cluster."), ""),
    "account": (make_text_option("--account", "NAME", "Charge the job to this account of the cluster."), ""),
    "qos": (make_text_option("--qos", "NAME", "Use this quality of service on the cluster."), ""),
    "slow_network": (flag("--slow-network", "Train even if the network between nodes is slow."), False),
    "pass_env": (
        Annotated[
            list[str], typer.Option("--pass-env", metavar="GLOB", help="Pass these variables of the login to the job.")
        ],
        [],
    ),
    "price_per_hour": (
        make_text_option("--price-per-hour", "USD", "Count this hourly price of the box toward the cap."),
        "",
    ),
}
"""The flags that define where a run takes place and what it may cost; `train` and `run` share them."""

REQUEST = Shared(
    "request",
    {
        "recipe": (RecipeArgument, ""),
        **RENTING,
        "overrides": (Set, []),
        "challenge": (
            make_text_option("--challenge", "C", "Derive the seed from your teacher's challenge."),
            "",
        ),
        "keep_checkpoints": (
            Annotated[
                int,
                typer.Option(
                    "--keep-checkpoints",
                    metavar="K",
                    show_default=False,
                    help="Keep K earlier checkpoints beside last and best.",
                ),
            ],
            0,
        ),
        "accept_skipped": (flag("--accept-skipped", "Accept a folder where most files are skipped."), False),
        "warm": (flag("--warm", "Upload the compile cache of earlier runs."), False),
        "init": (make_text_option("--init", "FILE", "Start from these weights: safetensors or ckpt.pt."), ""),
        "trainer": (make_text_option("--trainer", "DIR", "Use this trainer, a modified copy of gpurun's."), ""),
        "core_bundle": (make_text_option("--core-bundle", "FILE|URL", "Use this bundle's tasks, for eval.core."), ""),
    },
    request_from,
)
"""The flags that define a training run."""


@dataclass(frozen=True)
class Starting:
    """How a run is started and watched: the user's consent, the run's name, its notices."""

    yes: bool
    detach: bool
    no_wait: bool
    name: str
    on_interrupt: str
    notify: str
    program: str


STARTING = Shared(
    "starting",
    {
        "yes": (Yes, False),
        "detach": (flag("--detach", "Return once the machine is ready."), False),
        "no_wait": (flag("--no-wait", "Return once its supervisor has started."), False),
        "name": (make_text_option("--name", "TEXT", "Give the run this name."), ""),
        "on_interrupt": (make_text_option("--on-interrupt", "WHAT", "On Ctrl-C: ask, detach or stop."), ""),
        "notify": (make_text_option("--notify", "URL", "Post notices of the run to this URL."), ""),
        "program": (make_text_option("--exec", "CMD", "Run this with each notice on standard input."), ""),
    },
    lambda session, **typed: Starting(**typed),
)
"""The flags that control how a run starts; `train` and `run` share them."""

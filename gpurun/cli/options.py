"""The flags that more than one verb takes, each written once, and the Request that they make."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.durations import (
    give_up_after_s,
    hold_s,
    idle_s,
    limit_s,
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
else:  # The help of `plan` needs no more of it, and the real one loads pydantic.
    Request = object


def complete_run(incomplete: str) -> list[str]:
    """The runs whose names begin so."""
    from gpurun.core.errors import GpurunError
    from gpurun.core.paths import Home, default_home

    try:
        return [one.name for one in Home(default_home()).folders() if one.name.startswith(incomplete)]
    except (GpurunError, OSError):  # Nobody asked for more than names, and half a command stands there.
        return []


def _complete_recipe(incomplete: str) -> list[str]:
    from gpurun.jobs.training.recipe import list_recipes

    return [name for name in list_recipes() if name.startswith(incomplete)]


def complete_gpu(incomplete: str) -> list[str]:
    """What of the catalogue, with or without its number, begins so."""
    from gpurun.providers.catalog import all_offers, asked_as, card_names

    names = {asked_as(offer) for offer in all_offers()} | {*card_names().values(), "any"}
    return sorted(name for name in names if name.startswith(incomplete))


def _complete_key(incomplete: str) -> list[str]:
    from dataclasses import fields

    from gpurun.core.installed_files import recipe

    keys = (f"{table}.{key.name}=" for table, kind in recipe.TABLES.items() for key in fields(kind))
    return [key for key in keys if key.startswith(incomplete)]


def _complete_provider(incomplete: str) -> list[str]:
    from gpurun.providers.registry import PROVIDERS

    return [name for name in PROVIDERS if name.startswith(incomplete)]


NAMED, USUAL = "Name, unique beginning, or @last", "the only open one, else the last"
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=f"{NAMED}.", autocompletion=complete_run)]
UsualRun = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help=f"{NAMED}; without: {USUAL}.", autocompletion=complete_run),
]
Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help=f"{NAMED}; without: {USUAL}.", autocompletion=complete_run),
]
ACCEPT_SKIPPED = "Accept a folder of which more is skipped than read."
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
    typer.Option("--provider", metavar="P", help="Only this one; may be repeated.", autocompletion=_complete_provider),
]  # fmt: skip
Continues = Annotated[
    str | None,
    typer.Option("--from", metavar="RUN", help="Continue from a run's newest checkpoint.", autocompletion=complete_run),
]  # fmt: skip
Set = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a recipe's key; may be repeated.", autocompletion=_complete_key
    ),
]
Checkpoint = Annotated[str, typer.Option("--checkpoint", metavar="NAME", help="best, last, or a step: 000120.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def request_from(session: Session, **typed: Any) -> Request:
    """What was typed, with the settings' defaults and what --from brings filled in, checked one by one."""
    from gpurun.core.run_plan import Request

    if typed["recipe"].endswith(".json"):
        return _planned(session, **typed)
    settings, continues = session.settings, typed["continues"]
    renting = renting_from(session, **typed)
    trainer = str(Path(typed["trainer"]).expanduser().absolute()) if typed["trainer"] else ""
    init = str(Path(typed["init"]).expanduser().absolute()) if typed["init"] else ""
    own = {"warm": typed["warm"], "accept_skipped": typed["accept_skipped"], "trainer": trainer, "init": init}
    bundle = typed["core_bundle"]
    own["core_bundle"] = str(Path(bundle).expanduser().absolute()) if bundle and "://" not in bundle else bundle
    choices = renting["choices"].model_copy(update=own)
    kept = (f"train.keep_checkpoints={typed['keep_checkpoints']}",) if typed["keep_checkpoints"] else ()
    request = Request(
        recipe=_whole(typed["recipe"] or (settings["recipe"].value if continues is None else "")),
        overrides=(*typed["overrides"], *kept, *challenged(session, typed["challenge"]), *_init(typed)),
        **{**renting, "choices": choices},
    )
    if continues is None:
        return request
    from gpurun.jobs.training.continued_training import training_as_before

    return training_as_before(request, session.home, usual_providers(session))


def _init(typed: dict[str, Any]) -> tuple[str, ...]:
    """The override by which a run starts from the weights of --init; UsageError where it has others to start from."""
    if not typed["init"]:
        return ()
    from gpurun.core.errors import UsageError
    from gpurun.jobs.training.initial_weights import INIT_FOLDER

    for flag, is_said in (
        ("--from", bool(typed["continues"])),
        ("--set train.init_from", any(one.startswith("train.init_from=") for one in typed["overrides"])),
    ):
        if is_said:
            what = f"--init says which weights to start from, and so does {flag}."
            raise UsageError("usage.init", what, hint="Leave one of them out.")
    return (f'train.init_from="{INIT_FOLDER}"',)


def usual_providers(session: Session) -> tuple[str, ...]:
    """The clouds that the settings name."""
    return tuple(name.strip() for name in session.settings["providers"].value.split(",") if name.strip())


def renting_from(session: Session, **typed: Any) -> dict[str, Any]:
    """What was typed of the flags of RENTING, as a Request has it, with the settings' defaults."""
    from gpurun.core.command import checked_globs
    from gpurun.core.money import parse_usd
    from gpurun.core.run_plan import HOLD_S, Choices
    from gpurun.providers.catalog import parse_gpu

    if session.bounds and typed["continues"] is not None:
        from gpurun.cli.run_control import meant

        meant(session, typed["continues"])  # It is read from here on, so it must be the mandate's own.
    settings, price = session.settings, typed["price_per_hour"]
    cap = typed["max_cost"] or settings["max_cost"].value
    providers = tuple(typed["provider"]) or (usual_providers(session) if typed["continues"] is None else ())
    cluster = next((name.partition(":")[2] for name in providers if name.startswith("slurm:")), "")
    return {
        "gpu": parse_gpu(typed["gpu"]) if typed["gpu"] else None,
        "max_cost_micros": parse_usd(cap) if cap else None,
        "cap_from": typed.get("cap_from")
        or ("--max-cost" if typed["max_cost"] else settings["max_cost"].source if cap else ""),
        "providers": tuple("slurm" if name.startswith("slurm:") else name for name in providers),
        "data": typed["data"] or None,
        "hours": typed["hours"],
        "dry_run": typed["dry_run"],
        **{name: typed[name] for name in ("host", "host_key", "identity", "jump", "python")},
        "price_micros_per_hour": parse_usd(price, name="--price-per-hour", is_limit=False) if price else None,
        "uplink_mbit": float(settings["uplink"].value) if settings["uplink"].value else None,
        "continues": typed["continues"] or "",
        "choices": Choices(
            region=cluster or typed["region"] or None,
            spot=typed["spot"],
            guard=typed["lambda_guard"],
            weak_lease=typed["accept_weak_lease"],
            accept_cpu=typed["accept_cpu"],
            image=typed["image"],
            setup=read_script(typed["setup"]),
            setup_limit_s=0 if typed["setup_limit"] is None else parse_setup_limit_s(typed["setup_limit"]),
            stage=typed["stage"],
            log_to=_trackers(typed["log_to"]),
            give_up_after_s=give_up_after_s(typed["give_up_after"]) if typed["give_up_after"] else 0,
            idle_s=idle_s(typed["idle"]) if typed["idle"] else None,
            silent_s=silent_s(typed["silent"]) if typed["silent"] else None,
            hold_s=hold_s(typed["hold_on_failure"]) if typed["hold_on_failure"] else HOLD_S,
            queue_s=queue_s(typed["queue"]) if typed["queue"] else 0,
            max_gpu_hours=_gpu_hours(typed["max_gpu_hours"]),
            limit_s=limit_s(typed["time"]) if typed["time"] else 0,
            **{name: typed[name] for name in ("partition", "account", "qos")},
            slow_network=typed["slow_network"],
            **_moving(session, typed),
            pass_env=checked_globs(typed["pass_env"]) if typed["pass_env"] else (),
        ),
    }


def _moving(session: Session, typed: dict[str, Any]) -> dict[str, Any]:
    """What was typed of a run that continues on other machines, with the setting; UsageError for what needs it."""
    from gpurun.core.errors import UsageError
    from gpurun.core.money import parse_usd
    from gpurun.core.run_plan import MOST_LEGS

    is_on = typed["keep_going"] or session.settings["keep_going"].value == "true"
    for name in ("legs", "wait", "until"):
        if typed[name] and not is_on:
            what = f"--{name} is for a run that continues on other machines."
            raise UsageError(f"usage.{name}", what, hint="Add --keep-going, or leave it out.")
    legs = MOST_LEGS if typed["legs"] is None else typed["legs"]
    if not 1 <= legs <= LONGEST_LEGS:
        what = f"--legs {legs} is not a number of machines: from 1 to {LONGEST_LEGS}."
        raise UsageError("usage.legs", what, hint="Write for instance --legs 5")
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


def challenged(session: Session, challenge: str) -> tuple[str, ...]:
    """The override by which a run's seed follows from a teacher's word and the key that will sign its receipt."""
    return (f'train.challenge="{bound_challenge(session, challenge)}"',) if challenge else ()


def bound_challenge(session: Session, challenge: str) -> str:
    """Return a teacher's word with the id of the key that will sign: WORD:KEYID."""
    from gpurun.core.errors import SetupError, UsageError
    from gpurun.ledger.signing import load_signer

    if not _CHALLENGE.fullmatch(challenge):
        what = f"--challenge {challenge[:80]!r} is no challenge: 4 to 64 letters, digits, dots and dashes."
        raise UsageError("usage.challenge", what, hint="Copy the one that your teacher gave you, whole.")
    signer = load_signer(session.home.prepare().keys)
    if signer is None:
        what = (
            f"A challenge is bound to the key that signs receipts, and {session.home.keys} has none that can be read."
        )
        raise SetupError("challenge.no_key", what, hint="See The form in docs/RECEIPTS.md for how to begin again.")
    return f"{challenge}:{signer.keyid}"


_BESIDE_PLAN = ("recipe", "max_cost", "dry_run", "accept_weak_lease")
"""The arguments that may stand beside a plan file; everything else is in it."""


def _planned(session: Session, **typed: Any) -> Request:
    """The request in a plan file, with what a person may give beside it: the cap, consent, and a rehearsal.

    The file may be a stranger's: where the user has a cap of their own, it holds unless another is typed.
    """
    from gpurun.core.errors import UsageError
    from gpurun.core.money import parse_usd
    from gpurun.planning.plan_file import read_plan_file

    path, cap = typed["recipe"], typed["max_cost"]
    other = next(
        (name for name, (_, usual) in REQUEST.flags.items() if typed[name] != usual and name not in _BESIDE_PLAN), ""
    )
    if other:
        what = f"{path} says what is meant, and something else is asked for beside it ({other.replace('_', '-')})."
        hint = "Give only --max-cost, --accept-weak-lease or --dry-run with it; else write a new one by plan -o."
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


def _whole(recipe: str) -> str:
    """A bundled recipe's name as it is; a file's whole path, so that `--from` and hints find it from any folder."""
    return str(Path(recipe).expanduser().absolute()) if recipe.endswith(".toml") or "/" in recipe else recipe


def read_script(path: str) -> str:
    """The text of the script that was named; kept with the run, so that it may change or vanish here."""
    from gpurun.core.errors import UsageError

    try:
        return Path(path).expanduser().read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        hint = "Name a shell script: --setup install.sh"
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError("usage.setup", f"--setup {path} cannot be read: {why}.", hint=hint) from None


def _gpu_hours(hours: float | None) -> float | None:
    """The hours of --max-gpu-hours, checked."""
    from gpurun.core.errors import UsageError

    if hours is not None and not 0 < hours < 1e6:
        what = f"--max-gpu-hours {hours:g} is no number of hours above 0."
        raise UsageError("usage.max_gpu_hours", what, hint="Write for instance --max-gpu-hours 16")
    return hours


def _trackers(text: str) -> tuple[str, ...]:
    """The trackers of --log-to, none where it was not typed."""
    if not text:
        return ()
    from gpurun.readers.curve_log import checked_trackers

    return checked_trackers(text)


def flag(name: str, help_text: str) -> Any:
    """A switch, as Typer wants it."""
    return Annotated[bool, typer.Option(name, help=help_text)]


def make_text_option(
    name: str, metavar: str, help_text: str, complete: Callable[[str], list[str]] | None = None
) -> Any:
    """A flag with a text behind it, as Typer wants it."""
    return Annotated[str, typer.Option(name, metavar=metavar, help=help_text, autocompletion=complete)]


RENTING: dict[str, tuple[Any, Any]] = {
    "gpu": (
        make_text_option("--gpu", "GPU", "8xA100-80GB, cpu, or any: the cheapest that fits.", complete_gpu),
        "",
    ),
    "max_cost": (make_text_option("--max-cost", "USD", "What the whole run may cost at most."), ""),
    "provider": (Providers, []),
    "region": (make_text_option("--region", "R", "Only this region."), ""),
    "data": (make_text_option("--data", "PATH", "Text, shards, or hf:OWNER/NAME of public shards."), ""),
    "continues": (Continues, None),
    "stage": (make_text_option("--stage", "s3://BUCKET", "Upload shards to this bucket before renting."), ""),
    "hours": (Annotated[float | None, typer.Option("--hours", metavar="H", help="Train at most this long.")], None),
    "dry_run": (flag("--dry-run", "Rehearse on this machine's CPU, free."), False),
    "keep_going": (flag("--keep-going", "Continue on another machine if one is lost."), False),
    "legs": (
        Annotated[int | None, typer.Option("--legs", metavar="N", help="On so many machines at most; else 5.")],
        None,
    ),
    "wait": (make_text_option("--wait", "DURATION", "How long to wait for another; else 15m."), ""),
    "until": (make_text_option("--until", "HH:MM", "Until when to wait for another machine."), ""),
    "max_rate": (make_text_option("--max-rate", "USD", "What a machine may cost an hour."), ""),
    "spot": (flag("--spot", "Rent a spot machine: cheaper, may be taken away."), False),
    "accept_weak_lease": (flag("--accept-weak-lease", "Rent where only this computer ends the machine."), False),
    "lambda_guard": (flag("--lambda-guard", "Put a key on a Lambda machine that ends it."), False),
    "accept_cpu": (flag("--accept-cpu", "Train where the machine has no CUDA device."), False),
    "image": (make_text_option("--image", "IMAGE", "Another image than the provider's own."), ""),
    "setup": (make_text_option("--setup", "SCRIPT", "Run this there first."), ""),
    "setup_limit": (
        Annotated[
            float | None, typer.Option("--setup-limit", metavar="MIN", help="How long --setup may take; else 10.")
        ],
        None,
    ),
    "log_to": (
        make_text_option("--log-to", "TRACKERS", "wandb, mlflow, trackio or tensorboard; several by commas."),
        "",
    ),
    "give_up_after": (
        make_text_option("--give-up-after", "DURATION", "End a machine that answers no more so long."),
        "",
    ),
    "idle": (make_text_option("--idle", "DURATION", "Stop a job that computes nothing so long; off: never."), ""),
    "silent": (make_text_option("--silent", "DURATION", "Stop a job that writes nothing so long."), ""),
    "hold_on_failure": (
        make_text_option("--hold-on-failure", "MIN|off", "Keep a failed run's machine so long; else 15."),
        "",
    ),
    "host": (make_text_option("--host", "USER@HOST[:PORT]", "A box of yours, or its name in ~/.ssh/config."), ""),
    "host_key": (make_text_option("--host-key", "KEY", "Its host key or SHA256 fingerprint."), ""),
    "identity": (make_text_option("--identity", "FILE", "The private key to log in with, or `agent`."), ""),
    "jump": (make_text_option("--jump", "USER@HOST[:PORT]", "The host by which the box is reached."), ""),
    "python": (make_text_option("--python", "PATH", "The Python on the box or the cluster."), ""),
    "max_gpu_hours": (
        Annotated[
            float | None,
            typer.Option("--max-gpu-hours", metavar="H", help="Hours times GPUs that a cluster may spend at most."),
        ],
        None,
    ),
    "queue": (make_text_option("--queue", "DURATION", "How long a job may wait to begin; else a day."), ""),
    "partition": (make_text_option("--partition", "NAME", "The cluster's partition."), ""),
    "time": (make_text_option("--time", "DURATION", "How long a job may take there."), ""),
    "account": (make_text_option("--account", "NAME", "Whom the cluster counts it to."), ""),
    "qos": (make_text_option("--qos", "NAME", "The quality of service there."), ""),
    "slow_network": (flag("--slow-network", "Train though the nodes' network is slow."), False),
    "pass_env": (
        Annotated[
            list[str], typer.Option("--pass-env", metavar="GLOB", help="Variables of the machine's login for the job.")
        ],
        [],
    ),
    "price_per_hour": (make_text_option("--price-per-hour", "USD", "What the box costs an hour, for the cap."), ""),
}
"""The flags that say where a run is to be and what it may cost, the same for `train` and `run`."""

REQUEST = Shared(
    "request",
    {
        "recipe": (RecipeArgument, ""),
        **RENTING,
        "overrides": (Set, []),
        "challenge": (
            make_text_option("--challenge", "C", "What your teacher gave you; the seed follows from it."),
            "",
        ),
        "keep_checkpoints": (
            Annotated[
                int,
                typer.Option(
                    "--keep-checkpoints",
                    metavar="K",
                    show_default=False,
                    help="Earlier ones kept beside last and best.",
                ),
            ],
            0,
        ),
        "accept_skipped": (flag("--accept-skipped", "Accept a folder of which more is skipped than read."), False),
        "warm": (flag("--warm", "Upload the compile cache of earlier runs."), False),
        "init": (make_text_option("--init", "FILE", "Weights to begin from: safetensors or a ckpt.pt."), ""),
        "trainer": (make_text_option("--trainer", "DIR", "Ship this trainer, a changed copy of gpurun's own."), ""),
        "core_bundle": (make_text_option("--core-bundle", "FILE|URL", "The tasks of CORE, for eval.core."), ""),
    },
    request_from,
)
"""The flags that say what run is meant."""


@dataclass(frozen=True)
class Starting:
    """How a run is started and watched: its consent, its name, its notices."""

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
        "no_wait": (flag("--no-wait", "Return once its supervisor has begun."), False),
        "name": (make_text_option("--name", "TEXT", "The run's name."), ""),
        "on_interrupt": (make_text_option("--on-interrupt", "WHAT", "ask, detach or stop."), ""),
        "notify": (make_text_option("--notify", "URL", "Post notices of the run there."), ""),
        "program": (make_text_option("--exec", "CMD", "Run this with each notice on standard input."), ""),
    },
    lambda session, **typed: Starting(**typed),
)
"""The flags of starting a run, the same for `train` and `run`."""

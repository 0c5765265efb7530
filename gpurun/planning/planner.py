"""Request in, plan out: what will be trained, on what, for how long, and what it may cost at the worst.

Nothing is rented here and nothing is spent. A rehearsal's plan holds two things: the offers of the paid run as the
packaged catalogue prices them, and the run on this machine that rehearses it. What only some plans need is imported
where they need it: `gpurun plan` should answer at once.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.paths import Home
from gpurun.core.run_plan import Candidate, Mode, Plan, Request
from gpurun.core.secrets import child_environment
from gpurun.jobs.requirements import HUGGINGFACE_PACKAGES
from gpurun.jobs.training.history import load_priors
from gpurun.jobs.training.recipe import Recipe, ResolvedRecipe, hardware_of, load_recipe, resolve
from gpurun.ledger.chain import has_receipt
from gpurun.planning.candidates import quote
from gpurun.planning.cloud_plan import rented_plan, shown_plan
from gpurun.planning.transfer import advice, public_shards, unused_notes, vocabulary_of
from gpurun.providers.catalog import demand_one_node, parse_gpu
from gpurun.providers.registry import require_known
from gpurun.view.number_format import format_count

_ANIMALS = (
    "ant", "bat", "bee", "boa", "cat", "cod", "cow", "crab", "crow", "deer", "dog", "dove", "duck", "eel", "elk",
    "emu", "fox", "frog", "goat", "gull", "hare", "hawk", "hen", "heron", "ibex", "jay", "kiwi", "koi", "lark",
    "lion", "lynx", "mink", "mole", "moth", "mule", "newt", "orca", "owl", "ox", "panda", "pig", "pony", "puma",
    "ram", "rat", "rook", "seal", "slug", "swan", "tick", "toad", "tuna", "vole", "wasp", "wolf", "wren", "yak",
)  # fmt: skip

MOST_READS = 4
"""So often the same text teaches about as much as new text (Muennighoff et al., 2023)."""


def free_name(home: Home) -> str:
    """A short name that no run has or had: an animal and a number, which grows where many are taken."""
    numbers = 90
    while True:
        name = f"{secrets.choice(_ANIMALS)}-{secrets.randbelow(numbers) + 10}"
        if not home.run(name).path.exists() and not has_receipt(home, name):
            return name
        numbers += 10


def make_plan(
    request: Request, *, run: str, home: Home, clock: Clock, say: Callable[[str], None], need_data: bool
) -> Plan:
    """Plan a run. With `need_data` it is to be started: shards are prepared and checked, and it must be possible.

    UsageError, NoOffer or SetupError when it cannot be; nothing is left behind but caches.
    """
    notes: list[str] = []
    if own_trainer := request.choices.trainer:
        from gpurun.jobs.training.changed_recipe import own_reader
        from gpurun.jobs.training.changed_trainer import notes_of, take_trainer

        take_trainer(Path(own_trainer), home.staged_trainer(run))
        recipe = load_recipe(request.recipe, own_reader(home.staged_trainer(run)))
    else:
        recipe = load_recipe(request.recipe)
    plan = _planned(request, recipe, run, home, clock, say, need_data)
    if request.choices.core_bundle or plan.job.resolved["eval"].get("core"):
        from gpurun.jobs.training.core_tasks import core_note, demand_bundle

        demand_bundle(request, plan.job.resolved["eval"].get("core", 0))
        notes += core_note(plan)
    notes += notes_of(plan, home.staged_trainer(run)) if own_trainer else ()
    warnings = [*unused_notes(request, recipe, plan.job.resolved["data"]), *_reread(plan, request)]
    if plan.data.passed_over:
        warnings.append(f"Of {request.data} is passed over, and not trained on: {plan.data.passed_over}.")
    if plan.data.divided:
        notes.append(f"Of {request.data}, {plan.data.divided}.")
    if plan.continues:
        from gpurun.jobs.training.changed_trainer import other_than_before
        from gpurun.planning.continue_from import bucket_of, longer_than, others_from

        notes += [] if plan.choices.stage else bucket_of(plan.continues, home)
        notes += longer_than(plan.continues, plan.job.resolved["train"]["steps"])
        warnings += others_from(plan.continues, home)
        warnings += other_than_before(plan, home) if plan.job.trainer else ()
    if request.quoted is not None:
        from gpurun.planning.plan_file import since_quoted

        warnings += since_quoted(plan, request.quoted, clock.wall())
    return plan.told(*notes, warnings=warnings)


def _reread(plan: Plan, request: Request) -> tuple[str, ...]:
    """A note where the tokens are read many times over; of pairs a step's are padded, and tell nothing of that.

    The text that a rehearsal takes by itself is small on purpose.
    """
    model, data, train = (plan.job.resolved[table] for table in ("model", "data", "train"))
    tokens = plan.data.train_tokens
    reads = train["steps"] * train["batch_tokens"] / tokens if tokens else 0
    is_small_on_purpose = plan.mode is Mode.REHEARSAL and request.data is None
    if reads <= MOST_READS or is_small_on_purpose or model["preset"] == "encoder-decoder":
        return ()
    what = (
        f"Your {format_count(tokens)} tokens" if request.data else f"{format_count(tokens)} tokens of {data['source']}"
    )
    return (
        f"{what} would be read {reads:,.0f} times; more than {MOST_READS} add little: take more text, or fewer steps.",
    )


def _planned(
    request: Request, recipe: Recipe, run: str, home: Home, clock: Clock, say: Callable[[str], None], need_data: bool
) -> Plan:
    """The plan, by where it would be trained."""
    mode = _mode(request)
    _check_providers(request, mode)
    offered: tuple[Candidate, ...] = ()
    if mode is Mode.PAID:
        full, notes = _traced(_going_on(_rented_form(request, recipe), request, home), request, run, home, say)
        return _paid_plan(request, full, run, home, clock, say, need_data).told(*notes)
    if mode is Mode.REHEARSAL:
        here = resolve(recipe, "rehearsal", request.overrides)
        if _begins_at_rehearsal(request, home):
            here, notes = _going_on(here, request, home), ()
        else:
            offered, notes = _paid_form(request, recipe, home)
    else:
        here, notes = _form_here(request, recipe)
        here = _going_on(here, request, home)
    from gpurun.planning.local_plan import local_plan, small_memory

    _need_software(here)
    plan = local_plan(request, run, mode, here, home, clock, say)
    if not request.choices.trainer and not has_cuda() and (small := small_memory(plan, here)):
        raise small
    return with_bundle(plan.model_copy(update={"candidates": offered}).told(*notes), home, clock)


def _paid_plan(
    request: Request,
    full: ResolvedRecipe,
    run: str,
    home: Home,
    clock: Clock,
    say: Callable[[str], None],
    need_data: bool,
) -> Plan:
    """The plan of a run that is paid for, or that has a box or a cluster of the user's."""
    if request.providers == ("slurm",):
        from gpurun.planning.local_plan import job_plan

        return with_bundle(job_plan(request, run, full, home, clock, say), home, clock)
    if request.providers == ("ssh",):
        from gpurun.planning.local_plan import box_plan

        return with_bundle(box_plan(request, run, full, home, clock, say), home, clock)
    if need_data:
        return with_bundle(rented_plan(request, run, full, home, clock, say), home, clock)
    made = shown_plan(request, run, full, home, clock, say)
    if request.choices.stage:
        from gpurun.planning.staging import with_stage

        return with_stage(made, None, clock)
    is_sent = not public_shards(request, full.tables.data.source)
    return made.told(*advice(made.offer, made.uplink, made.ship_bytes)) if is_sent else made


def _traced(
    full: ResolvedRecipe, request: Request, run: str, home: Home, say: Callable[[str], None]
) -> tuple[ResolvedRecipe, tuple[str, ...]]:
    """The recipe with the memory of a changed trainer's model, traced, and a note that says so."""
    if not request.choices.trainer:
        return full, ()
    from gpurun.jobs.trainer import CHANGED, digest_of_trainer, words_of_trainer

    trainer = home.staged_trainer(run)
    if words_of_trainer(digest_of_trainer(trainer)) != CHANGED:
        return full, ()
    from gpurun.jobs.training.changed_recipe import traced_form

    say("The memory of the changed trainer's model is traced on this computer.")
    traced, note = traced_form(full, trainer, vocabulary_of(full), home.traced)
    return traced, (note,)


def _begins_at_rehearsal(request: Request, home: Home) -> bool:
    """Whether a rehearsal is to go on from another, as that of a changed trainer does; no command of a user's can."""
    if not request.continues:
        return False
    from gpurun.ledger.plan_from_journal import read_plan

    return read_plan(home.run(request.continues)).mode is Mode.REHEARSAL


def _rented_form(request: Request, recipe: Recipe) -> ResolvedRecipe:
    """The recipe as a rented machine trains it: in its rehearsal form where a machine without a GPU was asked for."""
    on_cpu = ("hardware.on_cpu=as_written",) if request.choices.accept_cpu else ()
    hardware = hardware_of(recipe, request.overrides + on_cpu)
    if (request.gpu or parse_gpu(hardware.gpu)).count or hardware.on_cpu == "as_written":
        return resolve(recipe, "full", request.overrides + on_cpu, _processes(request), _nodes(request))
    if hardware.on_cpu == "refuse":
        raise UsageError(
            "recipe.needs_gpu",
            f"{recipe.name} is written for {hardware.gpu}; it is not trained on a CPU.",
            hint=f"Leave --gpu out, or rehearse it here for nothing: gpurun train {request.recipe_word} --dry-run",
        )
    return resolve(recipe, "rehearsal", request.overrides, _nodes(request), _nodes(request))


def _paid_form(request: Request, recipe: Recipe, home: Home) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """What a rehearsal says of the paid run; `--set` may suit the rehearsal and not the form that would be paid for."""
    try:
        full = resolve(recipe, "full", request.overrides, _processes(request), _nodes(request))
    except UsageError as error:
        return (), (f"The paid form does not add up with --set, so it is not priced: {error.what}",)
    if {"ssh", "slurm"} & set(request.providers):
        return (), ("What it takes there is planned without --dry-run, by what the machine or the cluster has.",)
    full = _going_on(full, request, home)
    quoted = quote(request, full, priors=load_priors(home)[0], is_shown=True)
    begins = (f"The rehearsal begins at step 0; the paid run goes on from {full.earlier.run}.",) if full.earlier else ()
    is_sent = not request.choices.stage and not public_shards(request, full.tables.data.source)
    best = next(iter(quoted.candidates), None) if is_sent else None
    cure = advice(best.offer, quoted.uplink, quoted.load.ship_bytes) if best else ()
    return quoted.candidates, (*quoted.notes, *cure, *begins)


def _form_here(request: Request, recipe: Recipe) -> tuple[ResolvedRecipe, tuple[str, ...]]:
    """The recipe as this machine trains it, and what should be said about that."""
    hardware = hardware_of(recipe, request.overrides)
    if has_cuda() or hardware.on_cpu == "as_written":
        return resolve(recipe, "full", request.overrides, _processes(request)), ()
    if hardware.on_cpu == "refuse":
        raise UsageError(
            "recipe.needs_gpu",
            f"{recipe.name} is written for {hardware.gpu}, and this machine has no CUDA device.",
            hint=f"Rehearse it here for nothing: gpurun train {request.recipe_word} --dry-run",
        )
    note = "There is no CUDA device here, so the recipe's rehearsal form is trained."
    return resolve(recipe, "rehearsal", request.overrides, processes=1), (note,)


def _going_on(resolved: ResolvedRecipe, request: Request, home: Home) -> ResolvedRecipe:
    """The recipe with the checkpoint that it goes on from, if that is wanted."""
    if not request.continues:
        return resolved
    from gpurun.planning.continue_from import going_on

    return going_on(resolved, request, home)


def _mode(request: Request) -> Mode:
    if request.dry_run:
        return Mode.REHEARSAL
    return Mode.LOCAL if request.providers == ("local",) else Mode.PAID


def _check_providers(request: Request, mode: Mode) -> None:
    """Refuse names that no provider has, and mixtures that make no sense."""
    require_known(request.providers)
    for name in ("host", "jump", "python"):
        if getattr(request, name) and request.providers != ("ssh",):
            what = f"--{name} is for a box of your own."
            raise UsageError(f"{name}.unused", what, hint="Add --provider ssh, or leave it out.")
    if request.providers != ("slurm",):
        demand_one_node(request.gpu)
    if request.choices.max_gpu_hours is not None and request.providers != ("slurm",):
        what = "--max-gpu-hours caps a job on a cluster."
        raise UsageError("max_gpu_hours.unused", what, hint="Add --provider slurm, or cap it with --max-cost.")
    if mode is Mode.PAID and len(request.providers) > 1 and {"local", "ssh", "slurm"} & set(request.providers):
        hint = "Choose --provider local, ssh or slurm alone, or clouds only."
        raise UsageError("provider.mixed", "A machine of your own and a cloud cannot be mixed.", hint=hint)


def _processes(request: Request) -> int | None:
    """One process for each GPU asked for; one here; the recipe's own number where nothing was asked."""
    if request.providers == ("local",) and not request.dry_run:
        return 1
    return request.gpu.processes if request.gpu else None


def _nodes(request: Request) -> int:
    return request.gpu.nodes if request.gpu else 1


def has_cuda() -> bool:
    """Whether an NVIDIA driver answers; torch is the trainer's to import, not ours."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    return subprocess.run([tool, "-L"], env=child_environment(), capture_output=True, check=False).returncode == 0


def _need_software(here: ResolvedRecipe) -> None:
    """Refuse what needs a package that is not installed on this machine."""
    if find_spec("torch") is None:
        raise SetupError(
            "torch.missing",
            "Training on this machine needs PyTorch, which is not installed.",
            hint="From the clone: pip install '.[local]' (no NVIDIA GPU: from PyTorch's CPU index; see the README).",
        )
    missing = [name for name in HUGGINGFACE_PACKAGES if find_spec(name) is None]
    if here.tables.train.loop == "huggingface" and missing:
        what = f"{here.name} trains by the Hugging Face Trainer, and {' and '.join(missing)} is not installed here."
        raise SetupError("huggingface.missing", what, hint="From the clone: pip install '.[hf]'")


def with_bundle(plan: Plan, home: Home, clock: Clock) -> Plan:
    """The plan with what it ships: how many files and bytes, what of them is staged, one digest over the trainer."""
    from gpurun.jobs.survey import surveyed
    from gpurun.planning.compile_cache import warm_notes
    from gpurun.planning.staging import with_stage

    trainer = home.staged_trainer(plan.run) if plan.choices.trainer else bundle_root() / "trainer"
    seen = surveyed(plan, trainer)
    seen.demand_clean()
    digest = plan.job.digest(plan, trainer)
    update = {
        "job": plan.job.shipped(digest),
        "ship_files": len(seen.files),
        "ship_bytes": seen.total_bytes,
        "bundle_sha256": digest,
        "notes": (*plan.notes, *warm_notes(plan, seen.files)),
    }
    return with_stage(plan.model_copy(update=update), seen, clock)

"""Request in, plan out: what will be trained, on what, for how long, and what it may cost at the worst.

Nothing is rented here and nothing is spent. A rehearsal's plan holds two things: the offers of the paid run as the
packaged catalogue prices them, and the run on this machine that rehearses it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from typing import NoReturn

from gpurun.core.clock import Clock
from gpurun.core.errors import NoOffer, SetupError, UsageError, did_you_mean
from gpurun.core.model import Candidate, DataSummary, GpuNeed, Mode, Plan, Request, digest_of
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.lifecycle.quote import paid_plan, quote
from gpurun.lifecycle.shards import missing_shards, prepared
from gpurun.lifecycle.shipment import sources_of
from gpurun.machine.pack import survey
from gpurun.planning.budget import lease_for, load_of, worst_case
from gpurun.planning.bundle import bundle_root
from gpurun.planning.estimate import estimate
from gpurun.planning.recipe import Recipe, ResolvedRecipe, load_recipe, parameters_of, resolve
from gpurun.providers.base import Provider
from gpurun.providers.registry import PROVIDERS, open_provider


def make_plan(
    request: Request, *, run: str, home: Home, clock: Clock, say: Callable[[str], None], need_data: bool
) -> Plan:
    """Plan a run. With `need_data` it is to be started: shards are prepared and checked, and it must be possible.

    UsageError, NoOffer or SetupError when it cannot be; nothing is left behind but caches.
    """
    recipe = load_recipe(request.recipe)
    mode = _mode(request)
    _check_providers(request, mode)
    offered: tuple[Candidate, ...] = ()
    if mode is Mode.REHEARSAL:
        here = resolve(recipe, "rehearsal", request.overrides)
        offered, notes = _paid_form(request, recipe)
    else:
        full = resolve(recipe, "full", request.overrides, _processes(request))
        if mode is Mode.PAID:
            plan = paid_plan(request, run, full, quote(request, full))
            if need_data:
                _refuse_to_rent(plan, request, full)
            return plan
        here, notes = _form_here(request, recipe, full)
    _need_torch()
    places = {"into": home.staged_data(run), "cache": home.shards, "root": bundle_root()}
    data = prepared(here.record, request.data, **places, say=say)
    plan = _plan_here(request, run, mode, here, data, open_provider("local", home, clock))
    return with_bundle(plan.model_copy(update={"candidates": offered, "notes": notes}))


def _paid_form(request: Request, recipe: Recipe) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """What a rehearsal says of the paid run; `--set` may suit the rehearsal and not the form that would be paid for."""
    try:
        full = resolve(recipe, "full", request.overrides, _processes(request))
    except UsageError as error:
        return (), (f"The paid form does not add up with --set, so it is not priced: {error.what}",)
    quoted = quote(request, full)
    return quoted.candidates, quoted.notes


def _form_here(request: Request, recipe: Recipe, full: ResolvedRecipe) -> tuple[ResolvedRecipe, tuple[str, ...]]:
    """The recipe as this machine trains it, and what should be said about that."""
    if _has_cuda() or recipe.tables.hardware.on_cpu == "as_written":
        return full, ()
    if recipe.tables.hardware.on_cpu == "refuse":
        raise UsageError(
            "recipe.needs_gpu",
            f"{recipe.name} is written for {recipe.tables.hardware.gpu}, and this machine has no CUDA device.",
            hint=f"Rehearse it here for nothing: gpurun train {recipe.name} --dry-run",
        )
    note = "There is no CUDA device here, so the recipe's rehearsal form is trained."
    return resolve(recipe, "rehearsal", request.overrides, processes=1), (note,)


def _refuse_to_rent(plan: Plan, request: Request, full: ResolvedRecipe) -> NoReturn:
    """Say what stands between this plan and a rented machine; the last of it is this version of gpurun."""
    if request.max_cost_micros is None:
        raise UsageError("cap.missing", "A run that can spend money needs a cap.", hint="Say it: --max-cost 25.")
    if request.data is None and full.tables.data.source != "stdlib":
        raise missing_shards(full.tables.data.source)
    raise SetupError(
        "provider.not_yet",
        f"This gpurun cannot rent from {plan.offer.provider} yet: it knows the price, not the way.",
        hint="Rehearse the same run for nothing: add --dry-run. Or train here: --provider local.",
    )


def _mode(request: Request) -> Mode:
    if request.dry_run:
        return Mode.REHEARSAL
    return Mode.LOCAL if request.providers == ("local",) else Mode.PAID


def _check_providers(request: Request, mode: Mode) -> None:
    """Refuse names that no catalogue and no registry know."""
    known = sorted({"runpod", "lambda", "aws", *PROVIDERS})
    strange = [name for name in request.providers if name not in known]
    if strange:
        hint = did_you_mean(strange[0], known, otherwise=f"Known: {', '.join(known)}.")
        raise UsageError("provider.unknown", f"There is no provider {strange[0]!r}.", hint=hint)
    if mode is Mode.PAID and "local" in request.providers:
        hint = "Choose --provider local alone, or a cloud."
        raise UsageError("provider.mixed", "This machine and a cloud cannot be mixed.", hint=hint)


def _processes(request: Request) -> int | None:
    """One process for each GPU asked for; one here; the recipe's own number where nothing was asked."""
    if request.providers == ("local",) and not request.dry_run:
        return 1
    return max(1, request.gpu.count) if request.gpu else None


def _has_cuda() -> bool:
    """Whether an NVIDIA driver answers; torch is the trainer's to import, not ours."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise SetupError(
            "torch.missing",
            "Training on this machine needs PyTorch, which is not installed.",
            hint="pip install 'gpurun[local]' (without an NVIDIA GPU, from PyTorch's CPU index; see the README).",
        )


def _plan_here(
    request: Request, run: str, mode: Mode, resolved: ResolvedRecipe, data: DataSummary, provider: Provider
) -> Plan:
    """The plan of a run on this machine."""
    offer = provider.offers(GpuNeed(count=0, name="cpu"))[0]
    vocab = data.vocab_size
    guess = estimate(resolved, offer, vocab_size=vocab, cpu_cores=os.cpu_count() or 1)
    load = load_of(resolved, data.bytes, vocab_size=vocab)
    lease = lease_for(offer, guess, load, cap=None, hours=request.hours)
    if lease is None or not guess.fits:
        raise NoOffer("offer.none_fits", f"This machine cannot train it: {guess.basis}.", hint="Change it with --set.")
    return Plan(
        run=run,
        mode=mode,
        recipe=resolved.name,
        form=resolved.form,
        recipe_sha256=resolved.sha256,
        resolved=resolved.record,
        parameters=parameters_of(resolved.tables.model, vocab),
        processes=resolved.processes,
        offer=offer,
        estimate=guess,
        lease=lease,
        cap_micros=request.max_cost_micros,
        expected_micros=usd(0),
        worst_micros=worst_case(offer, lease, load),
        candidates=(),
        data=data,
        bundle_sha256="",
        ship_files=0,
        ship_bytes=0,
    )


def with_bundle(plan: Plan) -> Plan:
    """The plan with what it ships: how many files and bytes, and one digest over the trainer's sources."""
    trainer = bundle_root() / "trainer"
    seen = survey(sources_of(plan, trainer))
    seen.demand_clean()
    modules = {path.name: path.read_text(encoding="utf-8") for path in sorted(trainer.glob("*.py"))}
    update = {"ship_files": len(seen.files), "ship_bytes": seen.total_bytes, "bundle_sha256": digest_of(modules)}
    return plan.model_copy(update=update)

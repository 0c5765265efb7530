"""Describe a recipe's training to the planner: the form of the recipe, its shards, and the time and cost per offer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from gpurun.core.errors import NoOffer, SetupError, UsageError
from gpurun.core.installed_files import install_line
from gpurun.core.money import format_usd, usd
from gpurun.core.places import place_kinds
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Candidate, Choices, DataSummary, Job, Mode, Plan, Request
from gpurun.core.this_machine import has_cuda
from gpurun.data.source_names import BUILT_IN, missing_shards
from gpurun.jobs.requirements import HUGGINGFACE_PACKAGES, add_required_packages
from gpurun.jobs.trainer import TrainerJob
from gpurun.jobs.training.memory import GIB, tensor_bytes, way_of
from gpurun.jobs.training.recipe import LoadedRecipe, ResolvedRecipe, hardware_of, load_recipe, resolve
from gpurun.planning.budget import as_typed, choose, disk_gb_on, over_cap, reach_words
from gpurun.planning.candidates import Quote, choose_best, need_of, quote, quote_other_gpus
from gpurun.planning.market import Market
from gpurun.planning.place import Clouds, Desk, Place
from gpurun.planning.planner import Proposal
from gpurun.planning.transfer import advice, least_disk_gb, not_prepared, public_shards, unused_notes, vocabulary_of
from gpurun.planning.ways_under_cap import way_on_spot
from gpurun.providers.catalog import gpu_flag, parse_gpu, terms_of
from gpurun.view.number_format import format_count, format_duration

SMALLER = {
    "gpt2-124m": "modern-124m", "gpt2-124m-climbmix": "modern-124m", "gpt2-124m-epochs": "modern-124m",
    "gpt2-124m-owt": "modern-124m", "gpt2-355m": "gpt2-124m",
}  # fmt: skip
"""For some recipes, a smaller recipe with the same aim."""
MOST_READS = 4
"""How often text can be repeated and still teach about as much as new text (Muennighoff et al., 2023)."""


class TrainerProposal(Proposal):
    """Proposes the training of a recipe, in its full form or its rehearsal form.

    A free rehearsal (--dry-run) trains the rehearsal form. Otherwise the requested GPU, the recipe's hardware.on_cpu
    and, on this computer, CUDA decide.
    """

    joins_nodes: ClassVar[bool] = True

    def __init__(self, request: Request, desk: Desk) -> None:
        request = desk.admitted(request)
        super().__init__(request, desk)
        self._own_trainer = request.choices.trainer
        reader = None
        if self._own_trainer:
            from gpurun.jobs.training.changed_recipe import own_reader
            from gpurun.jobs.training.changed_trainer import take_trainer

            take_trainer(Path(self._own_trainer), desk.home.staged_trainer(desk.run))
            reader = own_reader(desk.home.staged_trainer(desk.run))
        self.recipe = load_recipe(request.recipe, reader) if reader else load_recipe(request.recipe)
        self._form_notes: tuple[str, ...] = ()
        self.resolved = self._form()
        self.earlier = self.resolved.earlier

    def _form(self) -> ResolvedRecipe:
        """Return the recipe in the form that will be trained, with the checkpoint from which it continues."""
        request, mode = self.request, self.request.mode
        if mode is Mode.PAID:
            return self._with_traced_memory(self._with_checkpoint(_resolve_rented_form(request, self.recipe)))
        if mode is Mode.REHEARSAL:
            here = resolve(self.recipe, "rehearsal", request.overrides)
            here = self._with_checkpoint(here) if self._continues_rehearsal() else here
        else:
            here, self._form_notes = _resolve_form_here(request, self.recipe)
            here = self._with_checkpoint(here)
        _require_packages(here)
        return here

    def _with_checkpoint(self, resolved: ResolvedRecipe) -> ResolvedRecipe:
        if not self.request.continues:
            return resolved
        from gpurun.jobs.training.continued_training import with_earlier_checkpoint

        return with_earlier_checkpoint(resolved, self.request, self.desk.home)

    def _continues_rehearsal(self) -> bool:
        """Return whether the request continues a rehearsal, as the second half of a changed trainer's does."""
        if not self.request.continues:
            return False
        from gpurun.ledger.plan_from_journal import read_plan

        return read_plan(self.desk.home.run(self.request.continues)).mode is Mode.REHEARSAL

    def _with_traced_memory(self, full: ResolvedRecipe) -> ResolvedRecipe:
        """Return the recipe; for a changed trainer, with the memory of its model as traced on this computer."""
        if not self._own_trainer:
            return full
        from gpurun.jobs.trainer import CHANGED, digest_of_trainer, words_of_trainer

        trainer = self.desk.home.staged_trainer(self.desk.run)
        if words_of_trainer(digest_of_trainer(trainer)) != CHANGED:
            return full
        from gpurun.jobs.training.changed_recipe import traced_form

        self.desk.say("The memory of the changed trainer's model is traced on this computer.")
        traced, note = traced_form(full, trainer, vocabulary_of(full), self.desk.home.traced)
        self._form_notes = (note,)
        return traced

    def need(self, place: Place) -> GpuNeed:
        """Return the requested GPUs, or those for which the recipe is written."""
        return need_of(self.request, self.resolved, is_rented=place.is_rented)

    def refuse_impossible(self, place: Place) -> None:
        """Raise UsageError if a run would rent a machine and its shards exist neither locally nor in public."""
        source = self.resolved.tables.data.source
        is_missing = self.request.data is None and source not in BUILT_IN and not public_shards(self.request, source)
        if place.is_rented and not place.is_shown and is_missing:
            raise missing_shards(source, self.request.recipe_word)

    def quote(self, place: Place, market: Market | None, data: DataSummary | None) -> Quote:
        """Return the offers with the time and cost of this recipe, the best first."""
        return quote(self.request, self.resolved, place, market, data, self.priors)

    def choose(self, quoted: Quote, place: Place) -> tuple[Candidate, Quote]:
        """Return the best offer with the recipe's own GPU, and the quote to show.

        A plan that is only shown and was requested without --gpu shows offers of all GPUs. If the recipe's own GPU does
        not fit the cap, the best offer with another GPU is chosen for it.
        """
        if not place.is_rented:
            return choose(quoted.candidates, quoted.load, cap=place.cap), quoted
        is_on_cpu = self.resolved.tables.hardware.on_cpu == "as_written"
        need = need_of(self.request, self.resolved, is_rented=True)
        every = partial(quote_other_gpus, self.request, self.resolved, place, quoted, self.priors)
        if not place.is_shown or self.request.gpu is not None or (need.is_any and not is_on_cpu):
            with self._suggesting_ways(place, every):
                return choose_best(quoted, self.request), quoted
        shown = every()
        try:
            return choose_best(quoted, self.request), shown
        except NoOffer:
            with self._suggesting_ways(place, lambda: shown):
                chosen = choose_best(shown, self.request, by_gpu=True)
        own = "No GPU fits" if need.is_any else f"The recipe's {need} does not fit"
        why = f"{own} this cap: " if quoted.candidates else ""
        way = f"{why}`train` takes this one with --gpu {gpu_flag(chosen.offer)}."
        return chosen, replace(shown, notes=(*shown.notes, way))

    @contextmanager
    def _suggesting_ways(self, place: Place, every: Callable[[], Quote]) -> Iterator[None]:
        """Add suggestions to a refusal over the cap: another GPU that fits, a spot machine, a smaller recipe."""
        try:
            yield
        except NoOffer as refusal:
            if refusal.code != "offer.over_cap":
                raise
            ways = [*_suggest_cheapest_offer(every(), place), *way_on_spot(self, _costs), *self._smaller_recipe(place)]
            raise over_cap(refusal.what, [*ways, *refusal.hint.splitlines()[1:]]) from None

    def _smaller_recipe(self, place: Place) -> Iterator[str]:
        """Yield the command that trains a smaller recipe with the same aim under this cap, if there is one."""
        request, name = self.request, SMALLER.get(self.recipe.name, "")
        if not name or request.overrides or request.data or request.continues or request.hours or self._own_trainer:
            return
        smaller = TrainerProposal(request.model_copy(update={"recipe": name, "gpu": None}), self.desk)
        quoted = smaller.quote(place, None, None)
        with suppress(NoOffer):
            every = quote_other_gpus(smaller.request, smaller.resolved, place, quoted, smaller.priors)
            chosen = choose_best(_keep_rentable_offers(every, place), request)
            on = f"--gpu {gpu_flag(chosen.offer)} --max-cost {as_typed(place.cap or usd(0))}"
            yield f"gpurun train {name} {on}: {_costs(chosen)}, a smaller recipe with the same aim"

    def prepared_data(self) -> DataSummary:
        """Prepare or check the shards, with initial weights or a checkpoint and compile caches. Return the summary."""
        from gpurun.planning.shards import summarize_shards

        return summarize_shards(self.request, self.resolved, self.desk)

    def known_data(self) -> DataSummary | None:
        """Return the hub's facts about a public set that --data names, else None.

        Raise UsageError for an unknown set.
        """
        from gpurun.planning.shards import prepared_shards

        is_public = self.request.data is not None and public_shards(self.request, self.resolved.tables.data.source)
        return prepared_shards(self.request, self.resolved, self.desk) if is_public else None

    def described_data(self, quoted: Quote) -> DataSummary:
        """Return the summary of data that is not prepared."""
        return not_prepared(self.request, self.resolved, quoted.load.ship_bytes)

    def paid_form(self) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """Return the offers for the paid run that a rehearsal prepares, and notes.

        Return no offers if --set does not fit the paid run, or if it would run on the user's own box or cluster.
        """
        request = self.request
        if request.mode is not Mode.REHEARSAL or self._continues_rehearsal():
            return (), ()
        try:
            full = resolve(self.recipe, "full", request.overrides, _count_processes(request), _count_nodes(request))
        except UsageError as error:
            return (), (f"The paid form is not possible with --set, so it is not priced: {error.what}",)
        if place_kinds(request.providers) - {"cloud", "here"}:
            return (), ("Plan without --dry-run to see its time there, which depends on the machine or the cluster.",)
        full = self._with_checkpoint(full)
        quoted = quote(request, full, Clouds(request, self.desk, is_shown=True), None, priors=self.priors)
        begins: tuple[str, ...] = ()
        if full.earlier:
            begins = (f"The rehearsal begins at step 0; the paid run continues from {full.earlier.run}.",)
        cure: tuple[str, ...] = ()
        is_sent = not request.choices.stage and not public_shards(request, full.tables.data.source)
        if quoted.candidates and is_sent:
            cure = advice(quoted.candidates[0].offer, quoted.uplink, quoted.load.ship_bytes)
        return quoted.candidates, (*quoted.notes, *cure, *begins)

    def job(self, data: DataSummary) -> Job:
        """Return the training as a job."""
        return TrainerJob(
            recipe=self.resolved.name,
            recipe_sha256=self.resolved.sha256,
            form=self.resolved.form,
            resolved=self.resolved.record,
            parameters=self.resolved.parameters(data.vocab_size),
        )

    def processes(self, chosen: Candidate, place: Place) -> int:
        """Return one process per GPU, or per node without GPUs; on this computer the recipe's own number."""
        return chosen.offer.gpu_count or (chosen.offer.nodes if place.mode is Mode.PAID else self.resolved.processes)

    def choices(self, place: Place) -> tuple[Choices, tuple[str, ...]]:
        """Return the choices with the set-up that a rented machine needs for the recipe, and notes about it."""
        if place.mode is not Mode.PAID:
            return self.request.choices, ()
        return add_required_packages(self.resolved.tables, self.request.choices, is_outfitted=place.is_outfitted)

    def completed(self, plan: Plan, chosen: Candidate, place: Place) -> Plan:
        """Return the plan with notes about recipe, data and time.

        Raise UsageError if memory or disk is certainly too small.
        """
        if place.is_rented:
            if small := _disk_error(plan, self.resolved):
                if not place.is_shown:
                    raise small
                plan = plan.with_notes(warnings=(f"{small.what} `train` refuses that. {small.hint}",))
        elif not chosen.finishes and chosen.reach is not None and chosen.lease is not None:
            part = f"The {format_duration(chosen.lease.train_s)} to train is enough for a part: it gets to "
            plan = plan.with_notes(warnings=(f"{part}{reach_words(chosen.reach)}.",))
        is_on_cpu_here = place.mode is not Mode.PAID and not self._own_trainer and not has_cuda()
        if is_on_cpu_here and (small := _memory_error(plan, self.resolved)):
            raise small
        if not plan.ship_files and place.is_shown:
            plan = self._with_upload_notes(plan)
        return self._with_recipe_notes(plan.with_notes(*self._form_notes))

    def _with_upload_notes(self, plan: Plan) -> Plan:
        """Return a plan that is only shown, with notes about its bucket, or about what a bucket would save."""
        if self.request.choices.stage:
            from gpurun.planning.staging import with_stage

            return with_stage(plan, None, self.desk.clock)
        is_sent = not public_shards(self.request, self.resolved.tables.data.source)
        return plan.with_notes(*advice(plan.offer, plan.uplink, plan.ship_bytes)) if is_sent else plan

    def _with_recipe_notes(self, plan: Plan) -> Plan:
        """Return the plan with notes about its recipe, its data and the run from which it continues."""
        request = self.request
        desk = self.desk
        resolved = self.resolved.record
        notes: list[str] = []
        if request.choices.core_bundle or resolved["eval"].get("core"):
            from gpurun.jobs.training.core_tasks import core_note, require_core_bundle

            require_core_bundle(request, resolved["eval"].get("core", 0))
            notes += core_note(plan)
        if self._own_trainer:
            from gpurun.jobs.training.changed_trainer import describe_changed_trainer

            notes += describe_changed_trainer(plan, desk.home.staged_trainer(desk.run))
        warnings = [*unused_notes(request, self.recipe, resolved["data"]), *_repeat_warning(plan, request)]
        if plan.data.passed_over:
            warnings.append(f"Skipped in {request.data}, and not trained on: {plan.data.passed_over}.")
        if plan.data.divided:
            notes.append(f"Of {request.data}, {plan.data.divided}.")
        if plan.continues:
            from gpurun.jobs.training.changed_trainer import other_than_before
            from gpurun.jobs.training.continued_training import (
                earlier_bucket_note,
                longer_schedule_note,
                other_runs_from,
            )

            if not plan.choices.stage:
                notes += earlier_bucket_note(plan.continues, desk.home)
            notes += longer_schedule_note(plan.continues, resolved["train"]["steps"])
            warnings += other_runs_from(plan.continues, desk.home)
            if plan.job.trainer:
                warnings += other_than_before(plan, desk.home)
        if request.quoted is not None:
            from gpurun.planning.plan_file import since_quoted

            warnings += since_quoted(plan, request.quoted, desk.clock.wall())
        return plan.with_notes(*notes, warnings=warnings)


def _suggest_cheapest_offer(every: Quote, place: Place) -> Iterator[str]:
    """Yield the flags for the cheapest offer that finishes within the cap, if there is one."""
    for candidate in _keep_rentable_offers(every, place).candidates:
        if candidate.lease is not None and candidate.finishes:
            yield f"--gpu {gpu_flag(candidate.offer)}: {_costs(candidate)}, on {candidate.offer.provider}"
            return


def _keep_rentable_offers(every: Quote, place: Place) -> Quote:
    """Return the quote with only the offers of providers from which the user can rent."""
    kept = tuple(candidate for candidate in every.candidates if place.may_rent_from(candidate.offer.provider))
    return replace(every, candidates=kept)


def _costs(candidate: Candidate) -> str:
    """Return a phrase with an offer's expected cost and time."""
    likely_s = candidate.estimate.likely_s or 0.0
    return f"about {format_usd(candidate.expected_micros or usd(0))} in {format_duration(likely_s)}"


def _repeat_warning(plan: Plan, request: Request) -> tuple[str, ...]:
    """Return a warning if the tokens are read many times.

    There is none for pairs, whose steps are padded, or for a rehearsal's default text, which is small on purpose.
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
        f"{what} would be read {reads:,.0f} times; more than {MOST_READS} add little. Use more text, or fewer steps.",
    )


def _resolve_rented_form(request: Request, recipe: LoadedRecipe) -> ResolvedRecipe:
    """Return the recipe in its form for a rented machine. Without a GPU, hardware.on_cpu decides the form."""
    on_cpu = ("hardware.on_cpu=as_written",) if request.choices.accept_cpu else ()
    hardware = hardware_of(recipe, request.overrides + on_cpu)
    if (request.gpu or parse_gpu(hardware.gpu)).count or hardware.on_cpu == "as_written":
        return resolve(recipe, "full", request.overrides + on_cpu, _count_processes(request), _count_nodes(request))
    if hardware.on_cpu == "refuse":
        raise UsageError(
            "recipe.needs_gpu",
            f"{recipe.name} is written for {hardware.gpu}; it is not trained on a CPU.",
            hint=f"Leave --gpu out, or rehearse it here for free: gpurun train {request.recipe_word} --dry-run",
        )
    return resolve(recipe, "rehearsal", request.overrides, _count_nodes(request), _count_nodes(request))


def _resolve_form_here(request: Request, recipe: LoadedRecipe) -> tuple[ResolvedRecipe, tuple[str, ...]]:
    """Return the recipe in its form for this computer, and notes about it."""
    hardware = hardware_of(recipe, request.overrides)
    if has_cuda() or hardware.on_cpu == "as_written":
        return resolve(recipe, "full", request.overrides, _count_processes(request)), ()
    if hardware.on_cpu == "refuse":
        raise UsageError(
            "recipe.needs_gpu",
            f"{recipe.name} is written for {hardware.gpu}, but this machine has no CUDA device.",
            hint=f"Rehearse it here for free: gpurun train {request.recipe_word} --dry-run",
        )
    note = "This machine has no CUDA device, so the recipe's rehearsal form is trained."
    return resolve(recipe, "rehearsal", request.overrides, processes=1), (note,)


def _count_processes(request: Request) -> int | None:
    """Return one process per requested GPU; 1 on this computer; None without a request (then the recipe decides)."""
    if request.mode is Mode.LOCAL:
        return 1
    return request.gpu.processes if request.gpu else None


def _count_nodes(request: Request) -> int:
    return request.gpu.nodes if request.gpu else 1


def _require_packages(here: ResolvedRecipe) -> None:
    """Raise SetupError if a package that the training needs is not installed on this computer."""
    if find_spec("torch") is None:
        raise SetupError(
            "torch.missing",
            "Training on this machine needs PyTorch, which is not installed.",
            hint=f"{install_line('local')} (no NVIDIA GPU: from PyTorch's CPU index; see the README).",
        )
    missing = [name for name in HUGGINGFACE_PACKAGES if find_spec(name) is None]
    if here.tables.train.loop == "huggingface" and missing:
        what = f"{here.name} trains with the Hugging Face Trainer, but {' and '.join(missing)} is not installed here."
        raise SetupError("huggingface.missing", what, hint=install_line("hf"))


def _disk_error(plan: Plan, full: ResolvedRecipe) -> UsageError | None:
    """Return the error for a disk that would fill up, at any approved cloud that charges for disk; else None."""
    wanted_gb = full.tables.hardware.disk_gb
    needed_gb = least_disk_gb(full, plan.data.bytes, vocab_size=plan.data.vocab_size)
    for candidate in plan.approved:
        provider = candidate.offer.provider
        if gpu_flag(candidate.offer) != gpu_flag(plan.offer):
            continue
        terms = terms_of(provider)
        if terms.disk_per_gb_hour and disk_gb_on(provider, wanted_gb) < needed_gb:
            return UsageError(
                "disk.small",
                f"hardware.disk_gb={wanted_gb} is too small: the data ({plan.data.bytes / 1e9:.1f} GB) and the "
                f"checkpoints ({plan.job.parameters:,} parameters) need at least {needed_gb} GB at {provider}, "
                "besides the image.",
                hint=f"Ask for a larger disk: --set hardware.disk_gb={needed_gb + terms.least_disk_gb}.",
            )
    return None


def _memory_error(plan: Plan, resolved: ResolvedRecipe) -> UsageError | None:
    """Return the error for a run on this computer's CPU whose tensors do not fit in memory; None if they fit.

    Only tensors are counted, not the interpreter, torch or a checkpoint that is being saved, so a run that would fit is
    never refused.
    """
    micro_batch, vocab_size = plan.estimate.micro_batch, plan.data.vocab_size
    way = way_of(resolved, plan.offer, plan.processes, micro_batch, vocab_size)
    needed = plan.processes * tensor_bytes(resolved.tables.model, micro_batch, vocab_size, way)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= there:
        return None
    return UsageError(
        "memory.small",
        f"Training {plan.job.parameters:,} parameters takes at least {needed / GIB:.1f} GiB of memory here, and this "
        f"machine has {there / GIB:.1f} GiB.",
        hint="Cut one of these with --set (model.layers, model.width, model.context, train.micro_batch), or train it "
        "on a GPU.",
    )

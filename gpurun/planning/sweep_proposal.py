"""Describe a sweep to the planner: how many trials fit on a GPU, how long all trials take, what the cap pays for.

Combinations from lists are checked before anything is rented. Each trial of a recipe counts like the most expensive
trial. It is not known whether trials that share a GPU are slower, so the slow end of the estimate assumes that they
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from math import ceil

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import install_line
from gpurun.core.money import SECONDS_PER_HOUR, Micros, format_usd
from gpurun.core.places import place_kinds
from gpurun.core.records import GpuNeed, Offer, digest_json
from gpurun.core.run_plan import Candidate, DataSummary, Estimate, Mode, Plan, Request
from gpurun.core.sweep import EARLIER, END_S, Sweep, demand_filled
from gpurun.jobs.command import CommandJob
from gpurun.jobs.commands.work_folder import Admit
from gpurun.jobs.earlier_sweep import take_earlier_sweep
from gpurun.jobs.requirements import with_pip_if_it_can
from gpurun.jobs.sweep import FOLDER, SweepJob
from gpurun.jobs.trainer import TrainerJob
from gpurun.jobs.training.estimate import estimate
from gpurun.jobs.training.history import describe_machine
from gpurun.jobs.training.memory import GIB, usable_bytes
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.planning.budget import as_typed, choose, judge_lease, lease_for, needed_cap, over_cap, ranked
from gpurun.planning.candidates import Quote, unless_weak
from gpurun.planning.command_proposal import USUAL_HOURS, CommandProposal
from gpurun.planning.market import Market
from gpurun.planning.place import Desk, Place
from gpurun.planning.planner import Proposal
from gpurun.planning.trainer_proposal import TrainerProposal
from gpurun.planning.transfer import vocabulary_of
from gpurun.planning.ways_under_cap import way_on_spot
from gpurun.providers.catalog import gpu_flag, list_alternatives

OPTUNA = "optuna>=4,<6"
MOST_SHARED = 8
"""The most trials that share a GPU without --at-once."""


def sweep_proposal(request: Request, desk: Desk, *, is_asked: bool, admit: Admit) -> Proposal:
    """Return the proposal for a sweep over a recipe or a command."""
    assert request.sweep is not None
    if request.command is not None:
        return CommandSweep(_add_sampler(request), desk, request.sweep, is_asked=is_asked, admit=admit)
    return RecipeSweep(_add_sampler(request), desk, request.sweep)


def _add_sampler(request: Request) -> Request:
    """Return the request; for the sampler tpe on a rented machine, with optuna added to the packages.

    Raise SetupError if optuna is missing for a run on this computer.
    """
    assert request.sweep is not None
    if request.sweep.sampler != "tpe":
        return request
    if request.mode is not Mode.PAID:
        if find_spec("optuna") is None:
            what = "The sampler tpe needs optuna, which is not installed here."
            raise SetupError("sweep.optuna", what, hint=f"{install_line('sweep')}; or use --sampler random")
        return request
    if not (packages := _sampler_packages(request)):
        return request
    choices = with_pip_if_it_can(request.choices, packages, request.python)
    return request.model_copy(update={"choices": choices})


def _sampler_packages(request: Request) -> tuple[str, ...]:
    """Return the packages to install for the sampler: optuna on a rented machine, otherwise none.

    On the user's own machine nothing is installed unless requested; optuna is used if the machine has it. If the
    installation fails, the machine samples at random.
    """
    is_rented = request.mode is Mode.PAID and place_kinds(request.providers) == {"cloud"}
    return (OPTUNA,) if is_rented and request.sweep is not None and request.sweep.sampler == "tpe" else ()


class CommandSweep(CommandProposal):
    """Proposes a sweep over a command, which runs many times with different arguments.

    The duration of a trial is not known.
    """

    def __init__(self, request: Request, desk: Desk, sweep: Sweep, *, is_asked: bool, admit: Admit) -> None:
        command = request.command
        assert command is not None
        demand_filled(command.argv, sweep.space)
        if outside := next((glob for glob in command.outputs if glob.startswith(("/", "~"))), ""):
            what = f"--outputs {outside} is one place for all trials, so each would overwrite the others' files there."
            raise UsageError(
                "sweep.outputs", what, hint="Let each trial write below its own folder, where it is started."
            )
        longer = command.model_copy(update={"grace_s": command.grace_s + END_S, "checkpoints": FOLDER})
        update = {"command": longer, "continues": ""}
        super().__init__(request.model_copy(update=update), desk, is_asked=is_asked, admit=admit)
        self.sweep = sweep
        self.earlier = take_earlier_sweep(request, sweep, desk.home, desk.home.staged_data(desk.run) / EARLIER)

    def job(self, data: DataSummary) -> SweepJob:
        """Return the sweep as a job."""
        trial = super().job(data)
        assert isinstance(trial, CommandJob)
        cards = self.request.gpu.processes if self.request.gpu and self.request.mode is Mode.PAID else 1
        at_once = min(self.sweep.trials, max(1, self.sweep.at_once) * cards)
        return _sweep_job(trial, self.sweep, at_once, _sampler_packages(self.request))

    def need(self, place: Place) -> GpuNeed:
        """Return the GPUs for the trials. Several nodes of a cluster count as that many separate jobs."""
        return super().need(place).apart

    def notes(self, plan: Plan) -> Iterator[str]:
        """Yield notes: how long the sweep may run, how trials are ranked, and how they share the machine."""
        if self.request.hours is None and plan.mode is Mode.PAID:
            longest = f"as long as the cap pays, and at most {USUAL_HOURS:.0f} h (--hours)"
            yield f"The duration of a trial is not known: all trials together may run {longest}."
        yield "Trials are ranked by the lowest validation loss that they print; by the last loss if they print none."
        if self.sweep.prune and not self.command.total_steps:
            yield f"--prune {self.sweep.prune} ends only a trial that reports how many steps it takes (--total-steps)."
        yield from _sharing_notes(plan)


class RecipeSweep(TrainerProposal):
    """Proposes a sweep over a recipe, which is trained with different settings.

    `resolved` is the most expensive trial.
    """

    def __init__(self, request: Request, desk: Desk, sweep: Sweep) -> None:
        self.sweep, self._at_once = sweep, 1
        self._per_trial: dict[Offer, Estimate] = {}
        self._data: DataSummary | None = None
        first, *others = (_with_settings(request, params) for params in sweep.corners())
        super().__init__(first, desk)
        forms = [self.resolved]
        for self.request in others:
            forms.append(self._form())
        self._forms = forms
        self.resolved = max(forms, key=_work_flops)
        self._largest = max(forms, key=_memory_rank)
        self.request = request
        into = desk.home.staged_data(desk.run) / EARLIER
        self.earlier = take_earlier_sweep(request, sweep, desk.home, into)

    def quote(self, place: Place, market: Market | None, data: DataSummary | None) -> Quote:
        """Return the offers, each with the time and cost of all trials."""
        self._data = data
        quoted = super().quote(place, market, data)
        return self._price_all_trials(quoted, place, [candidate.offer for candidate in quoted.candidates])

    def _price_all_trials(self, quoted: Quote, place: Place, offers: Sequence[Offer]) -> Quote:
        """Return the quote with these offers, each with the time and cost of all trials."""
        vocab = self._data.vocab_size if self._data else vocabulary_of(self.resolved)
        self._per_trial = {offer: self._estimate(offer, place, vocab) for offer in offers}
        fits = [self._trials_per_card(offer) for offer in offers if self._per_trial[offer].fits]
        cards = min((offer.processes for offer in offers), default=1)
        self._at_once = min(self.sweep.trials, cards * (self.sweep.at_once or min([MOST_SHARED, *fits])))
        if fits and self.sweep.at_once > min(fits):
            peak = max(guess.peak_bytes for guess in self._per_trial.values() if guess.fits)
            what = f"{self.sweep.at_once} trials of {peak / GIB:.1f} GiB each need more memory than a card has."
            raise UsageError("sweep.memory", what, hint=f"Take --at-once {min(fits)}, or leave it out.")
        job = self._job(self._data)
        load = replace(quoted.load, collect_bytes=job.home_bytes, disk_gb=job.disk_gb)
        found = [self._judge_offer(offer, place, replace(quoted, load=load)) for offer in offers]
        if place.is_rented and not self.request.choices.weak_lease:
            found = [unless_weak(candidate) for candidate in found]
        return replace(quoted, candidates=ranked(found, load), load=load)

    def choose(self, quoted: Quote, place: Place) -> tuple[Candidate, Quote]:
        """Return the best offer and the quote. Raise NoOffer if the cap does not pay for one trial on any offer."""
        fitting = [each for each in quoted.candidates if each.estimate.fits and each.estimate.train_s is not None]
        over = [each for each in fitting if each.lease is None and not each.needs_consent]
        if place.cap is None or not over or any(each.lease for each in quoted.candidates):
            return choose(quoted.candidates, quoted.load, cap=place.cap), quoted
        of_one = min(needed_cap(each.offer, self._per_trial[each.offer], quoted.load) for each in over)
        of_all = min(needed_cap(each.offer, each.estimate, quoted.load) for each in over)
        what = f"A cap of {format_usd(place.cap)} pays for less than one trial, which needs {format_usd(of_one)}."
        ways = [*self._other_card(quoted, place), *way_on_spot(self, self._costs)] if place.is_rented else []
        caps = {of_one: "one trial", of_all: f"all {self.sweep.trials} trials"}
        raise over_cap(
            what, [*ways, *(f"--max-cost {as_typed(cap)}: a higher cap, for {pays}" for cap, pays in caps.items())]
        )

    def _other_card(self, quoted: Quote, place: Place) -> Iterator[str]:
        """Yield the flags for the other GPU on which the cap pays for most trials, if there is one."""
        found: list[Candidate] = []
        for offer in list_alternatives(self.request, self.need(place), on_cpu=False, queried=quoted.queried):
            if place.may_rent_from(offer.provider):
                other = copy(self)
                with suppress(UsageError):  # --at-once may need more memory than this card has.
                    found += other._price_all_trials(quoted, place, [offer]).candidates
        for best in ranked((each for each in found if each.lease is not None), quoted.load)[:1]:
            yield f"--gpu {gpu_flag(best.offer)}: {self._costs(best)}, on {best.offer.provider}"

    def _costs(self, candidate: Candidate) -> str:
        """Return a phrase with the number of trials on an offer and their worst case."""
        return f"{self._trials_words(candidate)} for at most {format_usd(candidate.worst_micros or Micros(0))}"

    def _trials_words(self, chosen: Candidate) -> str:
        """Return a phrase with the number of trials for which the lease is long enough."""
        trials, likely_s = self.sweep.trials, chosen.estimate.likely_s
        share = chosen.lease.train_s / likely_s if chosen.lease is not None and likely_s else 1.0
        return f"all {trials} trials" if share >= 1 else f"about {max(1, int(trials * share))} of {trials} trials"

    def paid_form(self) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """Return no offers: a sweep's rehearsal does not show the paid sweep."""
        return (), ()

    def job(self, data: DataSummary) -> SweepJob:
        """Return the sweep as a job."""
        return self._job(data)

    def _job(self, data: DataSummary | None) -> SweepJob:
        return _sweep_job(self._make_longest_trial(data), self.sweep, self._at_once, _sampler_packages(self.request))

    def need(self, place: Place) -> GpuNeed:
        """Return the GPUs for the trials. Several nodes of a cluster count as that many separate jobs."""
        return super().need(place).apart

    def processes(self, chosen: Candidate, place: Place) -> int:
        """Return how many trials run at the same time."""
        return self._at_once

    def completed(self, plan: Plan, chosen: Candidate, place: Place) -> Plan:
        """Return the plan with the notes for one trial and for sharing, and a warning if the time is too short."""
        assert isinstance(plan.job, SweepJob)
        alone = plan.model_copy(update={"job": plan.job.trial, "continues": None})
        own = super().completed(alone, chosen, place).model_copy(update={"job": plan.job, "continues": plan.continues})
        if not chosen.finishes:
            enough = f"The time is enough for {self._trials_words(chosen)}; a stop keeps the best."
            own = own.with_notes(warnings=(enough,))
        return own.with_notes(*_sharing_notes(plan))

    def _make_longest_trial(self, data: DataSummary | None) -> TrainerJob:
        """Return one trial as a job: the longest trial, with the largest number of parameters of all trials."""
        vocab = data.vocab_size if data else vocabulary_of(self.resolved)
        return TrainerJob(
            recipe=self.resolved.name,
            recipe_sha256=self.resolved.sha256,
            form=self.resolved.form,
            resolved=self.resolved.record,
            parameters=max(form.parameters(vocab) for form in self._forms),
        )

    def _estimate(self, offer: Offer, place: Place, vocab: int) -> Estimate:
        """Return the estimate for one trial on one GPU: the time of the longest trial, the memory of the largest."""
        card = offer.model_copy(update={"gpu_count": min(1, offer.gpu_count), "jobs": 1})
        cores = place.cpu_cores
        machine = describe_machine(card, cores)
        time, room = (
            estimate(form, card, vocab_size=vocab, cpu_cores=cores, priors=self.priors, machine=machine)
            for form in (self.resolved, self._largest)
        )
        if not room.fits:
            return room
        return time.model_copy(update={"peak_bytes": room.peak_bytes, "micro_batch": room.micro_batch})

    def _trials_per_card(self, offer: Offer) -> int:
        """Return how many trials fit on one GPU. Without a GPU, trials share the cores: return --at-once or 1."""
        if not offer.gpu_count:
            return self.sweep.at_once or 1
        return max(1, int(usable_bytes(offer) / self._per_trial[offer].peak_bytes))

    def _judge_offer(self, offer: Offer, place: Place, quoted: Quote) -> Candidate:
        """Return the candidate for an offer, with a lease for all trials, or for as many as the cap pays for."""
        single, load, hours = self._per_trial[offer], quoted.load, self.request.hours
        whole = single
        if single.train_s is not None:
            trials, cards = self.sweep.trials, offer.processes
            low, high = single.train_s
            rounds, most = ceil(trials / self._at_once), ceil(trials / min(cards, self._at_once))
            between = low * rounds, high * most
            likely = single.expected_s * rounds if single.expected_s is not None and rounds == most else None
            basis = f"{trials} trials, {self._at_once} at once, each like the most expensive: {single.basis}"
            whole = single.model_copy(update={"train_s": between, "expected_s": likely, "basis": basis})
        lease = lease_for(offer, whole, load, cap=place.cap, hours=hours) if single.fits else None
        if lease is not None and hours is None and lease.train_s >= (single.likely_s or 0.0):
            hours = lease.train_s / SECONDS_PER_HOUR if lease.train_s < (whole.likely_s or 0.0) else None
        return judge_lease(offer, whole, load, lease, hours, None)


def _sweep_job(trial: CommandJob | TrainerJob, sweep: Sweep, at_once: int, installs: tuple[str, ...]) -> SweepJob:
    """Return the sweep over its trial's job."""
    settings = sweep.model_dump(mode="json", exclude={"at_once"})
    return SweepJob(
        recipe=f"sweep of {trial.recipe}",
        recipe_sha256=digest_json({"trial": trial.recipe_sha256, "sweep": settings}),
        form=trial.form,
        trainer=trial.trainer,
        sweep=sweep,
        at_once=at_once,
        installs=installs,
        trial=trial,
    )


def _with_settings(request: Request, params: dict[str, str]) -> Request:
    """Return the request for a single trial on one GPU, with these settings."""
    sets = tuple(f"{name}={value}" for name, value in params.items())
    gpu = request.gpu.model_copy(update={"count": min(1, request.gpu.count), "nodes": 1}) if request.gpu else None
    return request.model_copy(update={"overrides": (*request.overrides, *sets), "gpu": gpu, "continues": ""})


def _work_flops(form: ResolvedRecipe) -> float:
    """Return the amount of computation in a trial, in FLOPs."""
    train = form.tables.train
    return float(train.steps) * train.batch_tokens * form.flops_per_token(vocabulary_of(form))


def _memory_rank(form: ResolvedRecipe) -> float:
    """Return a rough number of bytes by which trials are compared."""
    model = form.tables.model
    kept = form.tables.train.micro_batch * model.context * model.width * model.layers * 34
    return float(kept + 16 * form.parameters(vocabulary_of(form)))


def _sharing_notes(plan: Plan) -> Iterator[str]:
    """Yield notes about how the trials share the machine."""
    job = plan.job
    assert isinstance(job, SweepJob)
    cards = plan.offer.gpu_count
    if job.at_once > plan.offer.processes:
        where = "on one card" if cards == 1 else f"on {cards} cards" if cards else "on this machine's cores"
        yield f"{job.at_once} trials run at once {where}; data and boot are paid once for all."
    if (jobs := plan.offer.jobs) > 1:
        yield f"One sbatch submits {jobs} jobs. Each starts its trials at once; all end with the first job's time."
    if plan.continues is not None:
        yield f"Trials that {plan.continues.run} has run are not run again."

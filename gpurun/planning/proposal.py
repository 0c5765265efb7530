"""What a kind of job tells the planner before there is a plan; each kind has one subclass of `Proposal`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from gpurun.core.made_before import Earlier
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Candidate, Choices, DataSummary, Job, Plan, Request
from gpurun.jobs.training.history import load_priors, uplink_of
from gpurun.planning.candidates import Quote
from gpurun.planning.market import Market
from gpurun.planning.place import Desk, Place


class Proposal(ABC):
    """A job that is wanted, and has no place yet.

    `joins_nodes`: it can run on several nodes together. `earlier` is the checkpoint that it goes on from.
    `priors` are the user's own runs (`damage` says what of them cannot be read), `uplink` is the user's line.
    """

    joins_nodes: ClassVar[bool] = False
    earlier: Earlier | None = None

    def __init__(self, request: Request, desk: Desk) -> None:
        self.request, self.desk = request, desk
        self.priors, self.damage = load_priors(desk.home)
        self.uplink = uplink_of(request, self.priors)

    @abstractmethod
    def need(self, place: Place) -> GpuNeed:
        """Return the GPUs to ask a place for; a UsageError where nobody said which."""

    @abstractmethod
    def quote(self, place: Place, market: Market | None, data: DataSummary | None) -> Quote:
        """Return the offers with their time and money, the best first; without `data` its size is guessed.

        Without a market the catalogue stands for it.
        """

    @abstractmethod
    def choose(self, quote: Quote, place: Place) -> tuple[Candidate, Quote]:
        """Return the offer to take, and the quote that shows it; a NoOffer says what would do where there is none."""

    @abstractmethod
    def prepare(self) -> DataSummary:
        """Return the data of the job, made or checked here; UsageError where it cannot be."""

    @abstractmethod
    def job(self, data: DataSummary) -> Job:
        """Return the job itself, on its data."""

    def demand(self, place: Place) -> None:  # noqa: B027 (a job may have nothing to refuse)
        """Raise a UsageError for what could be run nowhere, before anybody is asked for offers."""

    def known(self) -> DataSummary | None:
        """Return what can be said of the data without preparing it; None where it is only spoken of."""
        return self.prepare()

    def beside(self) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """Return the offers of the run that a rehearsal stands for, and what should be said of them."""
        return (), ()

    def spoken_of(self, quote: Quote) -> DataSummary:
        """Return the data as a plan shows it that has none prepared."""
        return self.prepare()

    def processes(self, chosen: Candidate, place: Place) -> int:
        """Return how many processes run there."""
        return max(1, chosen.offer.gpu_count)

    def choices(self, place: Place) -> tuple[Choices, tuple[str, ...]]:
        """Return the choices with what a machine there needs for the job, and what should be said of that."""
        return self.request.choices, ()

    def checked(self, plan: Plan, chosen: Candidate, place: Place) -> Plan:
        """Return the plan with all that the job's own kind has to say of it; an error where it cannot be.

        `chosen` is the candidate with what a plan's file does not have, as how far it gets.
        """
        return plan

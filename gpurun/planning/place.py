"""Where a run may be: in a cloud, on a user's box, on a user's cluster, or on this computer. Each kind is a class.

A place returns offers, has the rules for a lease at that place, and knows how to log in to its machines.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpurun.core.clock import Clock, local_minute
from gpurun.core.errors import GpurunError, NoOffer, SetupError, UsageError
from gpurun.core.money import Micros, usd
from gpurun.core.paths import Home
from gpurun.core.places import place_kinds
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Box, Candidate, Choices, Job, Lease, Mode, Request
from gpurun.core.this_machine import cards_here
from gpurun.planning.market import Market, key_warning
from gpurun.providers.catalog import demand_one_node, offers_for, rows_for
from gpurun.providers.registry import (
    CLOUDS,
    OVERRIDES,
    demand_keys,
    ready_providers,
    require_known,
)
from gpurun.view.number_format import format_duration

if TYPE_CHECKING:
    from gpurun.planning.mandate_bounds import Bounds
    from gpurun.remote.machine_facts import MachineFacts

PRICES_HOLD_S = 60.0
"""The most seconds that a plan's prices count as current: about the time that a user takes to approve it.

Spot prices change within minutes, and the create step compares the current price with the agreed price.
"""


@dataclass(frozen=True)
class Desk:
    """The circumstances of planning: run, home, clock, and the function that reports slow steps to the user.

    With `asks`, a user is present who can type a password for a place. `bounds` are those of a mandate.
    """

    run: str
    home: Home
    clock: Clock
    say: Callable[[str], None]
    asks: bool = False
    bounds: Bounds | None = None

    def admitted(self, request: Request) -> Request:
        """Return the request as the mandate admits it, before anything is read for it; raise if it is refused."""
        return self.bounds.admitted(request) if self.bounds else request

    def demand_uploadable(self, files: Iterable[Path]) -> None:
        """Raise UsageError for a file that a mandate does not allow to be uploaded."""
        if self.bounds:
            self.bounds.require_below_root("--upload", files)


class Place(ABC):
    """One kind of place, for a request.

    - `is_rented`: there are several offers, their prices change, and a machine is rented for this run alone.
    - `has_others`: a run whose machine at this place is lost can continue on another machine.
    - `is_shown`: the plan will not be started, so catalogue prices are enough where none can be read.
    - `joins_nodes`: the place has several nodes for one run.
    - `forwards_ports`: gpurun can forward a port of the machine.
    - `is_outfitted`: gpurun may install on the machine what a recipe needs.
    - `takes`: the options that are only for such a place.
    - `box`: how to log in to the machine, once that is known.
    """

    is_rented: ClassVar[bool] = False
    has_others: ClassVar[bool] = False
    joins_nodes: ClassVar[bool] = False
    forwards_ports: ClassVar[bool] = True
    is_outfitted: bool = False
    takes: ClassVar[frozenset[str]] = frozenset()
    mode: Mode = Mode.PAID
    box: Box | None = None

    def __init__(self, request: Request, desk: Desk, *, is_shown: bool = False) -> None:
        self.request, self.desk, self.is_shown = request, desk, is_shown
        self.notes: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()

    @property
    def cap(self) -> Micros | None:
        """Return the cap that must pay for a lease; None if nothing is paid."""
        return self.request.max_cost_micros if self.mode is Mode.PAID else None

    @property
    def cpu_cores(self) -> int:
        """Return how many CPU cores are assumed for training if there is no GPU."""
        return os.cpu_count() or 1

    @abstractmethod
    def market(self, need: GpuNeed) -> Market | None:
        """Return the current offers for a need; None if the packaged catalogue is used instead."""

    def market_again(self, market: Market | None, need: GpuNeed) -> Market | None:
        """Return the market, read again if it may have changed since it was read."""
        return market

    def may_rent_from(self, provider: str) -> bool:
        """Return whether a run that is started now could rent from this provider."""
        return True

    def apply_lease_rules(self, chosen: Candidate, job: Job) -> Candidate:
        """Return the candidate with the lease that the place allows. Raise NoOffer if that leaves no time."""
        return chosen

    def candidates_under_rules(
        self, chosen: Candidate, found: tuple[Candidate, ...], job: Job
    ) -> tuple[Candidate, tuple[Candidate, ...]]:
        """Return the chosen candidate and the alternatives, with the leases that the place allows."""
        return self.apply_lease_rules(chosen, job), found if self.is_rented else ()

    def choices(self, choices: Choices) -> Choices:
        """Return the choices with the values that the place decides."""
        return choices

    def warnings_for(self, chosen: Candidate, market: Market | None) -> tuple[str, ...]:
        """Return warnings about the place for this candidate."""
        return self.warnings

    def demand_cap(self) -> None:
        """Raise UsageError if a run that can spend money has no cap."""
        if self.request.max_cost_micros is None:
            raise UsageError("cap.missing", "A run that can spend money needs a cap.", hint="Give one: --max-cost 25.")


class ThisComputer(Place):
    """This computer: for a run that the user wants on it, and for the rehearsal of any other run."""

    def __init__(self, request: Request, desk: Desk, *, is_shown: bool = False) -> None:
        super().__init__(request, desk, is_shown=is_shown)
        self.mode = Mode.REHEARSAL if request.dry_run else Mode.LOCAL

    def market(self, need: GpuNeed) -> Market:
        """See `Place.market`. The offer does not depend on the need. A rehearsal uses no GPU."""
        from gpurun.providers.local import LocalProvider

        here = GpuNeed(count=0, name="cpu") if self.mode is Mode.REHEARSAL else GpuNeed(count=1, name="any")
        found = LocalProvider(self.desk.home, self.desk.clock).offers(here, ())
        cards = cards_here() if here.count else ()
        if cards and not found[0].gpu_count:
            self.notes = (f"The speed of {cards[0].name} is not known: the time is estimated for the CPU.",)
        return Market(tuple(found), (), 0.0)


class OwnBox(Place):
    """The box that --host names, at the price that its user states. It has answered before its plan is shown."""

    takes: ClassVar[frozenset[str]] = frozenset({"host", "jump", "python"})

    def market(self, need: GpuNeed) -> Market:
        """See `Place.market`. Raise SetupError if the box cannot do now what a run needs."""
        from gpurun.planning.own_box import login_of, reach_box
        from gpurun.providers.ssh import SshBox, SshProvider

        request, desk = self.request, self.desk
        if not request.host:
            hint = "Name it: --host ubuntu@203.0.113.7 (and --price-per-hour, so that the cap can hold)."
            raise UsageError("host.missing", "--provider ssh needs a --host.", hint=hint)
        login, rate = login_of(request.host), request.price_micros_per_hour or usd(0)
        if rate:
            self.demand_cap()
        self.box, self._facts, notes = reach_box(request, login, desk.home, desk.clock, asks=desk.asks, say=desk.say)
        box = SshBox(login.host, login.port, login.user, rate, need)
        rows = _select_seen_row(_nearest_rows(need), self._facts)
        (offer, *_) = SshProvider(desk.home, desk.clock, box).offers(need, rows)
        self.notes = tuple(notes)
        self.warnings = ("You must shut this box down yourself; gpurun cannot.",)
        if not rate:
            self.warnings += ("No --price-per-hour was given: it counts as free, and no cap applies.",)
        return Market((offer,), (), 0.0)

    def apply_lease_rules(self, chosen: Candidate, job: Job) -> Candidate:
        """See `Place.apply_lease_rules`. Raise an error if the box, by its own facts, lacks what the job needs."""
        from gpurun.planning.verify_machine import check_box

        choices = self.request.choices
        if not choices.setup:  # A script may install what is missing; the box is checked again after it.
            needs_torch = job.needs_torch
            found = check_box(self._facts, chosen.offer, accept_cpu=choices.accept_cpu, needs_torch=needs_torch)
            self.warnings += tuple(f"{warning}." for warning in found)
        return chosen


class OwnCluster(Place):
    """A user's cluster. It runs a job when the job reaches the head of the queue, for as long as its caps allow."""

    has_others: ClassVar[bool] = True
    joins_nodes: ClassVar[bool] = True
    forwards_ports: ClassVar[bool] = False
    is_outfitted = True
    takes: ClassVar[frozenset[str]] = frozenset({"max_gpu_hours", "limit_s", "partition", "account", "qos"})

    def market(self, need: GpuNeed) -> Market:
        """See `Place.market`. The cluster is queried for what it has now."""
        from gpurun.core.cluster import with_flags
        from gpurun.core.settings import find_cluster
        from gpurun.planning.cluster_look import no_answer
        from gpurun.planning.own_box import login_to
        from gpurun.providers.base import NoCapacity, Unknown
        from gpurun.providers.slurm.lease import too_small_error
        from gpurun.providers.slurm.provider import Site, SlurmProvider

        desk = self.desk
        choices = self.request.choices
        cluster = with_flags(find_cluster(desk.home, choices.region), **choices.of_cluster)
        self._image = cluster.container
        if self._image:
            self.is_outfitted = False
            if self.request.command is not None and self.request.command.pip:
                hint = "Have them in the image, or in a folder of your own: --env PYTHONPATH=…"
                raise UsageError("pip.image", "--pip installs nothing into an image: it is read-only.", hint=hint)
        if self._image and need.jobs > 1:
            what = f"{need} is {need.jobs} jobs, and the trials of an image run in one job."
            raise UsageError("sweep.image", what, hint=f"Ask for one node: --gpu {need.model_copy(update={'jobs': 1})}")
        if cluster.price_per_gpu_hour:
            self.demand_cap()
        login = login_to(cluster, desk.home, desk.clock, asks=desk.asks)
        self._provider = SlurmProvider([Site(cluster, login)], desk.clock)
        try:
            self._partition = self._provider.partition()
            offers = self._provider.offers(need, _nearest_rows(need))
        except Unknown as error:
            raise no_answer(cluster.name, error) from error
        except NoCapacity as error:
            hint = "Name another, with --partition or in config.toml: `sinfo -s` on the login node shows them."
            raise NoOffer("slurm.no_partition", f"{error}.", hint=hint) from error
        if not offers:
            raise too_small_error(self._partition, cluster, need)
        return Market((offers[0],), (), 0.0)

    def apply_lease_rules(self, chosen: Candidate, job: Job) -> Candidate:
        """See `Place.apply_lease_rules`. The partition's limit and --max-gpu-hours shorten the lease as well."""
        from gpurun.planning.budget import rental_cost
        from gpurun.providers.slurm.lease import gpu_hours, lease_of_job, may_outlive

        assert chosen.lease is not None
        offer = chosen.offer
        part = self._partition
        most = self.request.choices.max_gpu_hours
        lease = lease_of_job(chosen.lease, offer, part, self.request.choices, self.cap)
        worst = rental_cost(offer, lease.total_s + lease.kill_allowance_s, job.home_bytes, job.disk_gb)
        of_cap = "" if most is None else f" of the {most:g} allowed"
        begins = "It takes" if offer.rate_micros_per_hour else "It is not metered:"
        self.notes = (
            f"{begins} at most {gpu_hours(lease, offer):.2f}{of_cap} GPU-hours, counted from its start.",
            f"It may wait {format_duration(lease.queue_s)} in the queue, which costs nothing.",
            *([f"It runs in {self._image}, by apptainer exec --nv."] if self._image else []),
        )
        self._ask_cluster(offer, lease, job)
        if may_outlive(part):
            found = f"{offer.region} finds a job's processes by {part.tracker}"
            self.warnings = (*self.warnings, f"{found}: a detached process may outlive its job.")
        self._region = offer.region
        return chosen.model_copy(update={"lease": lease, "worst_micros": worst})

    def _ask_cluster(self, offer: Offer, lease: Lease, job: Job) -> None:
        """Ask the cluster when such a job would start and whether its login node has what the job needs.

        This comes before the job waits in a queue for hours. The results are added to notes and warnings.
        """
        from gpurun.providers.base import Unknown

        now = self.desk.clock.wall()
        try:
            start = self._provider.start_of(offer, lease.total_s)
            modules = [*(["torch"] if job.needs_torch else []), *job.imports]
            lacks = self._provider.look_at_login([] if self._image else modules)
            if self._image:
                lacks += self._provider.look_into_image(modules, needs_python=job.needs_torch or bool(modules))
        except Unknown as error:
            self.warnings = (f"{offer.region} could not be asked when it would start: {error}.",)
            return
        if start.wall is not None:
            wait_s = max(0.0, start.wall - now)
            when = f"in {format_duration(wait_s)}, {local_minute(start.wall, now=now)}" if wait_s >= 60 else "now"
            self.notes += (f"With its queue as it is now, Slurm would start it {when} (sbatch --test-only).",)
        elif start.words:
            self.warnings = (f"Slurm does not say when it would start: {start.words}.",)
        self.warnings += tuple(f"{words[:1].upper()}{words[1:]}" for words in lacks)

    def choices(self, choices: Choices) -> Choices:
        """See `Place.choices`: the name of the chosen cluster, and the image in its table."""
        return choices.model_copy(update={"region": self._region, "image": self._image})


class OwnClusters(OwnCluster):
    """Several of a user's clusters. A job is on one of them at a time, and a run may continue on another."""

    def market(self, need: GpuNeed) -> Market:
        """See `Place.market`. A cluster that cannot take the job now is left out, with its reason."""
        from gpurun.core.cluster import with_flags
        from gpurun.core.settings import find_cluster

        choices = self.request.choices
        tables = [with_flags(find_cluster(self.desk.home, name), **choices.of_cluster) for name in choices.clusters]
        if len({bool(table.price_per_gpu_hour) for table in tables}) > 1:
            free = ", ".join(table.name for table in tables if not table.price_per_gpu_hour)
            what = f"No one cap bounds the jobs on all these clusters: {free} has no price, and another one has."
            hint = "Name only clusters that have a price_per_gpu_hour in config.toml, or only clusters that have none."
            raise UsageError("slurm.mixed_caps", what, hint=hint)
        if len({table.container for table in tables}) > 1:
            what = "These clusters have different images: their tables in config.toml differ in `container`."
            raise UsageError("slurm.mixed_images", what, hint="Name the image that all of them have: --image.")
        self._on: dict[str, OwnCluster] = {}
        self._left_out, offers = list[GpurunError](), list[Offer]()
        for name in choices.clusters:
            own = choices.model_copy(update={"region": name, "clusters": ()})
            place = OwnCluster(self.request.model_copy(update={"choices": own}), self.desk, is_shown=self.is_shown)
            try:
                offers += place.market(need).offers
            except (NoOffer, SetupError) as error:
                self._left_out.append(error)
            else:
                self._on[name], self.is_outfitted = place, place.is_outfitted
        if not offers:
            raise self._left_out[0]
        return Market(tuple(offers), (), 0.0)

    def candidates_under_rules(
        self, chosen: Candidate, found: tuple[Candidate, ...], job: Job
    ) -> tuple[Candidate, tuple[Candidate, ...]]:
        """See `Place.candidates_under_rules`. The candidates stay in order, each under the rules of its own cluster."""
        ruled = list[Candidate]()
        alternatives = [other for other in found if other.lease is not None and other.offer != chosen.offer]
        for candidate in (chosen, *alternatives):
            try:
                ruled.append(self._on[candidate.offer.region].apply_lease_rules(candidate, job))
            except (NoOffer, SetupError) as error:
                self._left_out.append(error)
        if not ruled:
            raise self._left_out[0]
        first = self._on[ruled[0].offer.region]
        self._image = first._image
        others = ", ".join(candidate.offer.region for candidate in ruled[1:])
        also = f"; it may continue on {others}" if others and self.request.choices.keep_going else ""
        self.notes = (*first.notes, f"It is for {ruled[0].offer.region}{also}.")
        warned = [warning for candidate in ruled for warning in self._on[candidate.offer.region].warnings]
        self.warnings = (*(f"Left out: {error.what} {error.hint}" for error in self._left_out), *warned)
        return ruled[0], tuple(ruled)

    def choices(self, choices: Choices) -> Choices:
        """See `Place.choices`: the image of the named clusters."""
        return choices.model_copy(update={"image": self._image})


class Clouds(Place):
    """The clouds that have a key in this home. If none has a key and the plan is only shown, the catalogue is used."""

    is_rented: ClassVar[bool] = True
    has_others: ClassVar[bool] = True
    is_outfitted = True

    def __init__(self, request: Request, desk: Desk, *, is_shown: bool = False) -> None:
        super().__init__(request, desk, is_shown=is_shown)
        self._names, self._read_mono = list[str](), 0.0

    @property
    def cpu_cores(self) -> int:
        """Return how many CPU cores are assumed for training if there is no GPU."""
        return 2

    def market(self, need: GpuNeed) -> Market | None:
        """See `Place.market`."""
        named = self.request.providers or CLOUDS
        ready = [name for name in ready_providers(self.desk.home) if name in named]
        if not self.is_shown:
            self.demand_cap()
            self._demand_keys(ready)
        self._names = ready
        if not ready:
            return None
        from gpurun.planning.live_offers import live_offers

        self._read_mono = self.desk.clock.monotonic()
        market = live_offers(need, ready, self.desk.home, self.desk.clock, self.request.choices)
        if self.is_shown and not market.offers and market.silent:
            self.warnings = (*market.warnings, *(f"{name} could not be asked: {why}" for name, why in market.silent))
            return None
        return market

    def may_rent_from(self, provider: str) -> bool:
        """See `Place.may_rent_from`: whether there is a key for it; if a plan is only shown, every cloud counts."""
        return self.is_shown or provider in self._names

    def market_again(self, market: Market | None, need: GpuNeed) -> Market | None:
        """See `Place.market_again`: query the clouds again only if preparing took so long that prices are old."""
        is_old = self.desk.clock.monotonic() - self._read_mono > PRICES_HOLD_S
        return self.market(need) if is_old and not self.is_shown else market

    def warnings_for(self, chosen: Candidate, market: Market | None) -> tuple[str, ...]:
        """See `Place.warnings_for`: wrong clocks, a key that expires during the lease, keys sent to other addresses."""
        warnings = [*self.warnings, *(market.warnings if market else ())]
        if market is not None and chosen.lease is not None and not self.is_shown:
            until_wall = self.desk.clock.wall() + chosen.lease.total_s + chosen.lease.kill_allowance_s
            warnings += key_warning(market, chosen.offer.provider, until_wall)
        return (*warnings, *_warn_of_diverted_keys(self._names))

    def _demand_keys(self, ready: list[str]) -> None:
        """Raise SetupError if a named cloud, or every cloud, has no key."""
        demand_keys((name for name in self.request.providers if name not in ready), self.desk.home)
        if not ready:
            missing = "aws has no credentials" if self.request.providers else "There is no key for any cloud"
            raise SetupError(
                "auth.no_provider",
                f"{missing}, so nothing can be rented.",
                hint="Give one: gpurun auth set runpod (or lambda); for AWS: aws configure. Rehearse for free: add "
                "--dry-run. Train here: --provider local.",
            )


def _warn_of_diverted_keys(names: list[str]) -> list[str]:
    """Return a warning for each key that the environment sends to another address."""
    return [
        f"{variable} is set: {name} requests, and your key with them, go to {os.environ[variable]}."
        for name, variable in OVERRIDES.items()
        if name in names and os.environ.get(variable)
    ]


def _nearest_rows(need: GpuNeed) -> list[Offer]:
    """Return the catalogue's offers for a need; if none has this number of GPUs, all its rows, the cheapest first."""
    return offers_for(need) or sorted(rows_for(need), key=lambda row: row.rate_micros_per_hour)


def _select_seen_row(rows: list[Offer], facts: MachineFacts) -> list[Offer]:
    """Return the catalogue row that is nearest to the first GPU of a box; all rows if the box shows no GPU."""
    cards = facts.torch.devices or facts.gpus
    if not (rows and cards):
        return rows
    name, memory_bytes = cards[0].name.upper(), cards[0].memory_bytes or 0

    def distance(row: Offer) -> tuple[float, bool]:
        return abs(row.vram_gb * 1e9 - memory_bytes), row.gpu.split()[-1].upper() not in name

    return [min(rows, key=distance)]


PLACES: dict[str, type[Place]] = {"here": ThisComputer, "box": OwnBox, "cluster": OwnCluster, "cloud": Clouds}
"""The class of each kind of place."""


def resolve_place(request: Request, desk: Desk, *, joins_nodes: bool, is_shown: bool) -> Place:
    """Return the place that a request names for its job or rehearsal. Raise UsageError for a wrong choice.

    `joins_nodes` means that the job can run on several nodes together.
    """
    require_known(request.providers)
    kinds, mode = place_kinds(request.providers), request.mode
    named = PLACES[next(iter(kinds))] if len(kinds) == 1 else Clouds
    for name in ("host", "jump", "python"):
        if getattr(request, name) and name not in named.takes:
            what = f"--{name} is only for your own box."
            raise UsageError(f"{name}.unused", what, hint="Add --provider ssh, or leave it out.")
    if not (named.joins_nodes and joins_nodes):
        demand_one_node(request.gpu)
    if request.choices.max_gpu_hours is not None and "max_gpu_hours" not in named.takes:
        what = "--max-gpu-hours caps a job on a cluster."
        raise UsageError("max_gpu_hours.unused", what, hint="Add --provider slurm, or cap it with --max-cost.")
    for name in ("limit_s", "partition", "account", "qos"):
        if getattr(request.choices, name) and name not in named.takes:
            flag = "time" if name == "limit_s" else name
            what = f"--{flag} is for a job on a cluster."
            raise UsageError(f"{flag}.unused", what, hint="Add --provider slurm, or leave it out.")
    if mode is Mode.PAID and (len(kinds) > 1 or (len(request.providers) > 1 and not named.is_rented)):
        hint = "Choose --provider local, ssh or slurm alone, or clouds only."
        raise UsageError("provider.mixed", "A machine of your own and a cloud cannot be mixed.", hint=hint)
    if request.choices.clusters:
        named = OwnClusters
    return (named if mode is Mode.PAID else ThisComputer)(request, desk, is_shown=is_shown)

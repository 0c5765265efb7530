"""The plan of a command of the user's own: nothing is known of how long it takes, so the cap says how long it may."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from gpurun.core.clock import Clock
from gpurun.core.command import EVERYTHING, Command
from gpurun.core.credentials import require_secret
from gpurun.core.errors import GpurunError, NoOffer, UsageError
from gpurun.core.money import SECONDS_PER_HOUR, Micros, format_usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Offer, digest_of
from gpurun.core.run_plan import Box, Candidate, DataSummary, Estimate, Mode, Plan, Request
from gpurun.data.public_shards import files_of_the_hub
from gpurun.data.source_names import HUB
from gpurun.jobs.command import CommandJob
from gpurun.jobs.commands.command_program import startable, with_notebook
from gpurun.jobs.commands.rehearsal_venv import is_built, venv_python
from gpurun.jobs.commands.upload_advice import (
    demand_decided,
    file_warnings,
    import_warnings,
    imports_of,
    left_out_warnings,
    undecided,
)
from gpurun.jobs.commands.upload_advice import notes as upload_notes
from gpurun.jobs.commands.work_folder import Admit, WorkFolder, copied, refuse_vain, without_keys, work_folder
from gpurun.jobs.requirements import SETUP_LIMIT_S, with_pip
from gpurun.jobs.training.history import load_priors, uplink_of
from gpurun.ledger.chain import read_chain
from gpurun.ledger.write_receipt import read_receipt
from gpurun.planning.budget import demand_hours, lease_for, worst_case
from gpurun.planning.candidates import on_sale, price_notes, unless_weak
from gpurun.planning.cloud_plan import warned, with_keys
from gpurun.planning.local_plan import box_offer, box_warnings, in_queue, job_offer
from gpurun.planning.own_box import reached
from gpurun.planning.planner import has_cuda, with_bundle
from gpurun.planning.resumed_command import goes_on
from gpurun.planning.transfer import Load
from gpurun.providers.catalog import demand_one_node, parse_gpu
from gpurun.providers.local import LocalProvider
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.s3_client import Bucket
from gpurun.view.number_format import format_bytes, format_duration

USUAL_HOURS = 24.0
"""The longest that a command may run where nobody says --hours: a forgotten one ends."""
LEAST_RUN_S = 300
_MOST_EARLIER, _MOST_LOOKED = 3, 200


def make_command_plan(
    request: Request,
    *,
    run: str,
    home: Home,
    clock: Clock,
    say: Callable[[str], None],
    is_asked: bool = True,
    admit: Admit = lambda _: None,
) -> Plan:
    """Plan a command that is to be started; its folder is copied, so that what was planned is what is uploaded.

    Where nothing `is_asked` after it, what is left out and named is refused. UsageError, NoOffer or SetupError where it
    cannot be; nothing is left behind.
    """
    demand_hours(request.hours)
    staged = home.staged_data(run)
    uploaded = _uploaded(request, staged / "work", home, is_asked=is_asked, admit=admit)
    request = uploaded.request
    command, earlier = goes_on(uploaded.command, request, home, staged / "work")
    data = data_of(request, staged, clock, say)
    sent_bytes = sum(path.stat().st_size for path in (staged / "work").rglob("*") if path.is_file()) + data.bytes
    priors, damage = load_priors(home)
    uplink = uplink_of(request, priors)
    setup_s = (request.choices.setup_limit_s or SETUP_LIMIT_S) if request.choices.setup else 0
    load = Load(sent_bytes, command.output_bytes, command.disk_gb)
    load = replace(load, uplink_bits_per_s=uplink.bits_per_s, setup_s=setup_s, public_bytes=data.public_bytes)
    place = _Place(request, command, home, clock, load)
    chosen, candidates = place.chosen()
    made = Plan(
        run=run,
        mode=place.mode,
        job=CommandJob(
            recipe=command.name,
            recipe_sha256=digest_of(command.model_dump(mode="json", exclude={"folder", "commit"})),
            command=command,
        ),
        processes=max(1, chosen.offer.gpu_count),
        chosen=chosen,
        cap_micros=request.max_cost_micros if place.mode is Mode.PAID else None,
        cap_from=request.cap_from,
        candidates=candidates,
        data=data,
        bundle_sha256="",
        ship_files=0,
        ship_bytes=0,
        notes=(*place.notes, *uploaded.notes, *_notes(command, request, place.mode), *_earlier_runs(command, home)),
        warnings=(*uploaded.warnings, *place.warnings, *([damage] if damage else []), *_spot_warning(command, request)),
        choices=place.choices,
        uplink=uplink,
        box=place.box,
        continues=earlier,
        quoted_wall=place.quoted_wall,
    )
    made = with_bundle(made, home, clock)
    return warned(made, place.names, ()) if place.names else made


@dataclass(frozen=True)
class _Upload:
    """A command with its folder copied, the request with what is installed for it, and what the plan says of both."""

    command: Command
    request: Request
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def _uploaded(request: Request, work: Path, home: Home, *, is_asked: bool, admit: Admit) -> _Upload:
    """Look at what is uploaded for a command, and copy it to `work`."""
    mode, command = _mode(request), request.command
    if command is None:
        raise ValueError("the request has no command")
    for name in command.secrets:
        require_secret(name)
    found = work_folder(command, home.root)
    refuse_vain(command, found, Path(request.data) if request.data else None)
    left = undecided(found)
    if not is_asked and mode is Mode.PAID:
        demand_decided(left)
    command, found = without_keys(command, found, admit)
    program = startable(copied(command, found, work), found)
    command, kernel = with_notebook(program.command, request, mode)
    command = command.model_copy(update={"imports": imports_of(found, command)})
    if mode is Mode.REHEARSAL and command.pip:
        command = command.model_copy(update={"python": str(venv_python(home, command.pip))})
    elif mode is Mode.PAID:
        request = request.model_copy(update={"choices": with_pip(request.choices, command.pip, request.python)})
    notes = (*program.notes, *kernel, *upload_notes(found, command, is_installed_there=mode is not Mode.LOCAL))
    warnings = (*left_out_warnings(left), *file_warnings(found), *_imports(found, command, mode))
    return _Upload(command, request, notes, warnings)


def _mode(request: Request) -> Mode:
    """Whether a command is rehearsed, runs on this machine, or elsewhere."""
    is_local = request.providers == ("local",)
    return Mode.REHEARSAL if request.dry_run else Mode.LOCAL if is_local else Mode.PAID


def _imports(found: WorkFolder, command: Command, mode: Mode) -> Iterator[str]:
    """What is imported and nowhere to be seen; a rehearsal's own Python is asked once it is there."""
    is_there = not command.python or is_built(Path(command.python))
    python = command.python if command.python and is_there else sys.executable
    return import_warnings(found, command, python=python, is_rented=mode is Mode.PAID)


class _Place:
    """Where a command may run: this machine, a box of the user's, or what the clouds have under the cap."""

    def __init__(self, request: Request, command: Command, home: Home, clock: Clock, load: Load) -> None:
        self._request, self._home, self._clock, self._load = request, home, clock, load
        self._save_s, self._output_bytes = command.save_s, command.output_bytes
        self._asked_s = None if request.hours is None else ceil(request.hours * SECONDS_PER_HOUR)
        self._least_s = min(LEAST_RUN_S, LEAST_RUN_S if self._asked_s is None else self._asked_s)
        self.mode = _mode(request)
        self.notes: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.names: list[str] = []
        self.box: Box | None = None
        self.choices = request.choices
        self.quoted_wall = 0.0

    def chosen(self) -> tuple[Candidate, tuple[Candidate, ...]]:
        """The offer that is taken, and all that were judged."""
        demand_one_node(self._request.gpu)
        if self.mode is not Mode.PAID:
            offer = LocalProvider(self._home, self._clock).offers(GpuNeed(count=0, name="cpu"), ())[0]
            return self._judged(offer), ()
        if self._request.gpu is None:
            hint = "Say which: --gpu 1xT4, --gpu cpu; or run it here: --provider local, --dry-run."
            raise UsageError("gpu.missing", "Nobody knows which GPU a command of your own needs.", hint=hint)
        need = parse_gpu("1xA100") if self._request.gpu.is_any else self._request.gpu
        if "slurm" in self._request.providers:
            return self._queued(need), ()
        if self._request.providers == ("ssh",):
            offer, login = box_offer(self._request, need, self._home, self._clock)
            self.box, told = reached(self._request, login, self._home, self._clock)
            self.warnings = (*box_warnings(offer), *told)
            return self._judged(offer), ()
        return self._rented(self._request.gpu)

    def _queued(self, need: GpuNeed) -> Candidate:
        """A job on a cluster, for as long as its caps allow."""
        if len(self._request.providers) > 1:
            hint = "Choose --provider slurm alone, or clouds only."
            raise UsageError("provider.mixed", "A cluster and another provider cannot be mixed.", hint=hint)
        offer, part = job_offer(self._request, need, self._home, self._clock)
        found = self._judged(offer)
        if found.lease is None:
            raise self._refusal([found])
        chosen, notes, warnings = in_queue(found, part, self._request, self._output_bytes, self._load.disk_gb)
        self.notes, self.warnings = tuple(notes), tuple(warnings)
        self.choices = self.choices.model_copy(update={"region": offer.region})
        return chosen

    def _rented(self, need: GpuNeed) -> tuple[Candidate, tuple[Candidate, ...]]:
        """What the clouds have of it, the longest for the money first."""
        from gpurun.planning.live_offers import key_warning, live_offers

        request = self._request
        if request.max_cost_micros is None:
            raise UsageError("cap.missing", "A run that can spend money needs a cap.", hint="Give one: --max-cost 25.")
        self.names = with_keys(request, self._home)
        market = live_offers(need, self.names, self._home, self._clock, request.choices)
        offers = on_sale(market, need)
        self.quoted_wall = market.read_wall
        found = [self._judged(offer) for offer in offers]
        if not request.choices.weak_lease:
            found = [unless_weak(one) for one in found]
        found.sort(key=lambda one: (one.lease is None, one.offer.rate_micros_per_hour, one.offer.provider))
        if found[0].lease is None:
            raise self._refusal(found)
        self.notes = price_notes(request, offers, market)
        until_wall = self._clock.wall() + found[0].lease.total_s + found[0].lease.kill_allowance_s
        silent = tuple(f"{name} could not be asked: {why}" for name, why in market.silent)
        ending = key_warning(market, found[0].offer.provider, until_wall)
        self.warnings = (*market.warnings, *silent, *ending)
        return found[0], tuple(found)

    def _judged(self, offer: Offer) -> Candidate:
        """An offer with the longest lease that the cap pays for, or that was asked for.

        What a command needs to end and to save is kept beside the time that it runs: else it were stopped as it begins.
        """
        cap = self._request.max_cost_micros if self.mode is Mode.PAID else None
        guess = Estimate(
            fits=True, peak_bytes=0, micro_batch=0, tokens_per_s=None, train_s=None, basis="a command of your own"
        )
        hours = self._request.hours if self._request.hours is not None else USUAL_HOURS
        lease = lease_for(offer, guess, self._load, cap=cap, hours=hours + self._save_s / SECONDS_PER_HOUR)
        if lease is not None and lease.train_s < self._least_s + self._save_s:
            lease = None
        if lease is not None:
            lease = lease.model_copy(update={"hours_s": self._asked_s})
        return Candidate(
            offer=offer,
            estimate=guess,
            lease=lease,
            expected_micros=None,
            worst_micros=worst_case(offer, lease, self._load) if lease else None,
            finishes=lease is not None,
            why_not="" if lease is not None else "over the cap",
        )

    def _refusal(self, found: Sequence[Candidate]) -> NoOffer:
        """What would do where nothing may be rented."""
        weak = [one for one in found if one.why_not != "over the cap"]
        if weak:
            what = f"Only {weak[0].offer.provider} has it under this cap, and nothing on that machine ends it."
            hint = "Add --lambda-guard (puts a key on the machine that ends it), or --accept-weak-lease."
            return NoOffer("offer.weak_lease", what, hint=hint)
        needs = [(self._least(one.offer), one.offer) for one in found]
        needed, offer = min(needs, key=lambda pair: pair[0])
        amount = format_usd(needed).removeprefix("$").replace(",", "")
        span = format_duration(self._least_s)
        what = f"The cap pays for no {span} of any offer; {offer.label} needs {format_usd(needed)}."
        return NoOffer("offer.over_cap", what, hint=f"Raise the cap: --max-cost {amount}")

    def _least(self, offer: Offer) -> Micros:
        """The smallest cap under which a command runs at all."""
        guess = Estimate(fits=True, peak_bytes=0, micro_batch=0, tokens_per_s=None, train_s=None, basis="")
        lease = lease_for(offer, guess, self._load, cap=None, hours=(self._least_s + self._save_s) / SECONDS_PER_HOUR)
        assert lease is not None
        return worst_case(offer, lease, self._load)


def data_of(request: Request, staged: Path, clock: Clock, say: Callable[[str], None]) -> DataSummary:
    """What --data names, as it is; the command finds it where GPURUN_DATA says."""
    named, size = request.data, 0
    if named is not None:
        if named.startswith(HUB):
            found = files_of_the_hub(named, staged / "data", say)
            return found.model_copy(update={"folder": "", "beside": str(staged)})
        place = Path(named).expanduser().absolute()
        if named.startswith("s3://"):
            place = _out_of_bucket(named, staged / "data", clock, say)
            size = sum(one.stat().st_size for one in place.rglob("*") if one.is_file())
            return DataSummary(
                folder="", beside=str(staged), bytes=size, sha256=_listing_digest(place), source=named
            )  # fmt: skip
        if not place.is_dir():
            raise UsageError("data.missing", f"There is no folder {place}.", hint="Name a folder: --data PATH")
        named, size = str(place), sum(one.stat().st_size for one in place.rglob("*") if one.is_file())
    return DataSummary(
        folder=named or "",
        beside=str(staged),
        bytes=size,
        sha256=_listing_digest(Path(named)) if named else "",
        source=named or "no data",
    )


def _out_of_bucket(named: str, into: Path, clock: Clock, say: Callable[[str], None]) -> Path:
    """The objects below an address of a bucket, downloaded here by the user's own keys; the machine is given none."""
    bucket = Bucket(parse_address(named), clock)
    bucket.look()
    found, into = {name: size for name, size in bucket.below().items() if not name.endswith("/")}, into.resolve()
    if not found:
        raise UsageError("data.missing", f"There is nothing in {named}.", hint="Name a folder of a bucket.")
    need, free = sum(found.values()), shutil.disk_usage(into.parent).free
    say(f"downloading {len(found)} files of {named}, {format_bytes(need)}, before they are uploaded")
    if need > free:
        what = f"{named} holds {format_bytes(need)}, and {format_bytes(free)} are free here."
        raise UsageError("disk.too_small", what, hint="Have the command download it there, its key by --secret.")
    for name, size in found.items():
        target = into / name
        if not target.resolve().is_relative_to(into):
            raise UsageError("data.bad_name", f"{named} has an object of the name {name!r}.", hint="Rename it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for block in bucket.stream(bucket.address.key(name), 0, size) if size else ():
                file.write(block)
        if target.stat().st_size != size:
            what = f"{name} of {named} changed while it was downloaded."
            raise UsageError("data.changed", what, hint="Try again once nothing writes there.")
    return into


def _listing_digest(folder: Path) -> str:
    """A digest over the names and sizes of a folder; what is in its files is digested as they are sent."""
    listing = [[path.relative_to(folder).as_posix(), path.stat().st_size] for path in sorted(folder.rglob("*"))]
    return hashlib.sha256(repr(listing).encode("utf-8", "surrogateescape")).hexdigest()


def _notes(command: Command, request: Request, mode: Mode) -> Iterator[str]:
    """What is not obvious of the plan."""
    if request.hours is None and mode is Mode.PAID:
        longest = f"as long as the cap pays, and at most {USUAL_HOURS:.0f} h (--hours)"
        yield f"Nobody knows how long it takes: it may run {longest}."
    size = format_bytes(command.output_bytes)
    if command.outputs:
        globs = ", ".join(command.outputs)
        yield f"New files that match {globs} are downloaded; the plan allows {size} for them (--output-gb)."
    else:
        yield "No files are downloaded (--outputs)."
    if command.outputs == EVERYTHING and (Path(command.folder) / ".gpurunignore").is_file():
        yield "What .gpurunignore names stays on the machine, too; --outputs says otherwise."
    if mode is not Mode.PAID and not has_cuda():
        yield "This machine has no GPU. Your command must cope with that."


def _spot_warning(command: Command, request: Request) -> Iterator[str]:
    """What a spot machine that is taken away would cost."""
    if request.choices.spot and not command.checkpoints:
        yield "A spot machine may be taken away at any moment: without --checkpoint-glob, the loss of all is accepted."


def _earlier_runs(command: Command, home: Home) -> Iterator[str]:
    """What the user's own runs of the same script took, the last ones."""
    told = []
    for link in read_chain(home.ledger).links[-_MOST_LOOKED:]:
        with suppress(GpurunError):
            predicate = read_receipt(home, home.run(link.run)).predicate
            training, machine = predicate["training"], predicate["instance"]
            seconds, cost = training["seconds"]["train_s"], predicate["cost"]["upper_bound_micros"]
            if predicate["asked"]["recipe"] != command.name or training["outcome"] != "done" or not seconds:
                continue
            where = f"{machine['gpu_count']}x{machine['gpu']}" if machine and machine["gpu_count"] else "a CPU"
            paid = f", {format_usd(Micros(cost))}" if cost else ""
            told.append(f"{predicate['run']} took {format_duration(seconds)} on {where}{paid}")
    if told:
        yield f"Your own runs of {command.name}: {'; '.join(told[-_MOST_EARLIER:])}."

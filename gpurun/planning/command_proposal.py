"""Describe a user's own command to the planner. Its duration is not known, so the cap limits how long it runs."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import ClassVar

from gpurun.core.clock import Clock
from gpurun.core.command import EVERYTHING, Command
from gpurun.core.credentials import require_secret
from gpurun.core.errors import GpurunError, NoOffer, UsageError
from gpurun.core.money import SECONDS_PER_HOUR, Micros, format_rate, format_usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Offer, digest_json
from gpurun.core.run_plan import Candidate, DataSummary, Earlier, Estimate, Job, Mode, Plan, Request
from gpurun.core.this_machine import has_cuda
from gpurun.data.public_shards import files_of_the_hub
from gpurun.data.source_names import HUB
from gpurun.jobs.command import CommandJob
from gpurun.jobs.commands.command_program import make_startable, with_notebook
from gpurun.jobs.commands.continued_command import repeated_run, with_checkpoint
from gpurun.jobs.commands.rehearsal_venv import is_built, venv_python
from gpurun.jobs.commands.upload_advice import (
    file_warnings,
    import_warnings,
    imports_of,
    left_out_warnings,
    refuse_undecided,
    undecided_files,
    upload_notes,
)
from gpurun.jobs.commands.work_folder import (
    Admit,
    WorkFolder,
    copy_work_folder,
    refuse_unmatched_include,
    without_keys,
    work_folder,
)
from gpurun.jobs.requirements import SETUP_LIMIT_S, with_pip
from gpurun.ledger.chain import read_chain
from gpurun.ledger.write_receipt import read_receipt
from gpurun.planning.budget import as_typed, lease_for, over_cap, require_hours, worst_case
from gpurun.planning.candidates import Quote, on_sale, price_notes, unless_weak
from gpurun.planning.market import Market
from gpurun.planning.place import Desk, Place
from gpurun.planning.planner import Proposal
from gpurun.planning.transfer import Load
from gpurun.planning.ways_under_cap import way_on_spot
from gpurun.providers.catalog import catalogue_offers, gpu_flag, list_alternatives, parse_gpu
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.s3_client import Bucket
from gpurun.view.number_format import format_bytes, format_duration

USUAL_HOURS = 24.0
"""The most hours that a command runs without --hours, so that a forgotten command ends."""
LEAST_RUN_S = 300
_MOST_EARLIER, _MOST_READ = 3, 200
_UNKNOWN_TIME = Estimate(
    fits=True, peak_bytes=0, micro_batch=0, tokens_per_s=None, train_s=None, basis="a command of your own"
)


class CommandProposal(Proposal):
    """Proposes a command. Its folder is copied immediately, so that the upload is exactly what was planned.

    `is_asked` means that the user will be asked to confirm the plan. If not, a paid command that names files which are
    not uploaded is refused.
    """

    joins_nodes: ClassVar[bool] = True

    def __init__(self, request: Request, desk: Desk, *, is_asked: bool = True, admit: Admit = lambda _: None) -> None:
        request = desk.admitted(request)
        require_hours(request.hours)
        self._repeated = repeated_run(request, desk.home)
        work = desk.home.staged_data(desk.run) / "work"
        self._upload = _make_upload(request, work, desk, is_asked=is_asked, admit=admit)
        super().__init__(self._upload.request, desk)
        self.command, self.earlier = self.with_earlier(self._upload.command, work)
        self._data = summarize_data(self.request, work.parent, desk.clock, desk.say)
        self._sent_bytes = sum(path.stat().st_size for path in work.rglob("*") if path.is_file()) + self._data.bytes

    def with_earlier(self, command: Command, work: Path) -> tuple[Command, Earlier | None]:
        """Copy the checkpoint of an earlier run to `work`; return the command that uses it, and that run's record."""
        return with_checkpoint(command, self.request, self.desk.home, work)

    def need(self, place: Place) -> GpuNeed:
        """Return the requested GPUs; none for a rehearsal or a local run. Raise UsageError if --gpu is missing."""
        if place.mode is not Mode.PAID:
            return GpuNeed(count=0, name="cpu")
        if self.request.gpu is None:
            hint = "Name one: --gpu 1xT4, --gpu cpu; or run it here: --provider local, --dry-run."
            raise UsageError("gpu.missing", "gpurun cannot know which GPU your own command needs.", hint=hint)
        return parse_gpu("1xA100") if self.request.gpu.is_any and not place.is_rented else self.request.gpu

    def prepared_data(self) -> DataSummary:
        """Return the data that --data names, which was summarised when the proposal was created."""
        return self._data

    def quote(self, place: Place, market: Market | None, data: DataSummary | None) -> Quote:
        """Return the offers, each with the longest lease that the cap pays for, sorted by price per hour."""
        need = self.need(place)
        offers = on_sale(market, need) if market else catalogue_offers(self.request, need)
        setup_s = (self.request.choices.setup_limit_s or SETUP_LIMIT_S) if self.request.choices.setup else 0
        load = Load(
            self._sent_bytes,
            self.command.output_bytes,
            self.command.disk_gb,
            public_bytes=self._data.public_bytes,
            uplink_bits_per_s=self.uplink.bits_per_s,
            setup_s=setup_s,
        )
        hours = self.request.hours
        found = [judge_offer(offer, self.command, load, cap=place.cap, hours=hours) for offer in offers]
        if place.is_rented and not self.request.choices.weak_lease:
            found = [unless_weak(candidate) for candidate in found]
        found.sort(
            key=lambda candidate: (
                candidate.lease is None,
                candidate.offer.rate_micros_per_hour,
                candidate.offer.provider,
            )
        )
        if not place.is_rented:
            return Quote(tuple(found), load, self.uplink, ())
        return Quote(tuple(found), load, self.uplink, price_notes(self.request, offers, market))

    def choose(self, quoted: Quote, place: Place) -> tuple[Candidate, Quote]:
        """Return the first offer and the quote. Raise NoOffer if the first offer has no lease."""
        first = quoted.candidates[0]
        if first.lease is None:
            raise self._refusal(quoted, place)
        return first, quoted

    def job(self, data: DataSummary) -> Job:
        """Return the command as a job."""
        return CommandJob(
            recipe=self.command.name,
            recipe_sha256=digest_json(self.command.model_dump(mode="json", exclude={"folder", "commit"})),
            command=self.command,
        )

    def completed(self, plan: Plan, chosen: Candidate, place: Place) -> Plan:
        """Return the plan with notes and warnings about the upload, the outputs and earlier runs."""
        notes, warnings = self.remarks(plan, place)
        return plan.with_notes(*self._upload.notes, *notes, warnings=(*self._upload.warnings, *warnings))

    def remarks(self, plan: Plan, place: Place) -> tuple[Iterable[str], Iterable[str]]:
        """Return notes and warnings about the plan, except those about its upload."""
        notes = (*self.notes(plan), *_earlier_runs(self.command, self.desk.home))
        repeats = [f"{self._repeated} succeeded: its command runs again, unchanged."] if self._repeated else []
        return notes, (*_spot_warning(self.command, self.request), *repeats)

    def notes(self, plan: Plan) -> Iterator[str]:
        """Yield notes about the duration and the outputs."""
        yield from _command_notes(self.command, self.request, plan.mode)

    def _refusal(self, quoted: Quote, place: Place) -> NoOffer:
        """Return the refusal if no offer may be rented; its hint names what would suffice."""
        weak = [candidate for candidate in quoted.candidates if candidate.needs_consent]
        if weak:
            what = f"Only {weak[0].offer.provider} has it under this cap, and that machine cannot end itself."
            hint = "Add --lambda-guard (puts a key on the machine so that it can end itself), or --accept-weak-lease."
            return NoOffer("offer.weak_lease", what, hint=hint)
        hours = self.request.hours
        offers = [candidate.offer for candidate in quoted.candidates]
        needs = [(least_cap(offer, self.command, quoted.load, hours), offer) for offer in offers]
        needed, offer = min(needs, key=lambda pair: pair[0])
        span = format_duration(_shortest_s(hours))
        what = f"The cap does not pay for {span} on any offer; {offer.label} needs {format_usd(needed)}."
        ways = [*self._other_cards(quoted, place), *way_on_spot(self, self._costs)] if place.is_rented else []
        return over_cap(what, [*ways, f"--max-cost {as_typed(needed)}: a higher cap"])

    def _other_cards(self, quoted: Quote, place: Place) -> Iterator[str]:
        """Yield the flags for the cheapest other GPUs that the cap pays for, if there are any.

        Offers with as many GPUs and as much memory as requested come first, because nothing else is known about the
        command's needs.
        """
        need, hours, closest = self.need(place), self.request.hours, quoted.candidates[0].offer
        found = [
            judge_offer(offer, self.command, quoted.load, cap=place.cap, hours=hours)
            for offer in list_alternatives(self.request, need, on_cpu=False)
            if place.may_rent_from(offer.provider)
        ]
        if not self.request.choices.weak_lease:
            found = [unless_weak(candidate) for candidate in found]
        paid = [candidate for candidate in found if candidate.lease is not None]
        paid.sort(
            key=lambda candidate: (
                candidate.offer.gpu_count != need.count,
                candidate.offer.vram_gb < closest.vram_gb,
                candidate.offer.rate_micros_per_hour,
            )
        )
        for best in paid[:1]:
            offer = best.offer
            yield f"--gpu {gpu_flag(offer)}: {offer.vram_gb} GB each, {self._costs(best)}, on {offer.provider}"

    def _costs(self, candidate: Candidate) -> str:
        """Return a phrase with an offer's price and how long the cap pays for it."""
        assert candidate.lease is not None
        span = format_duration(candidate.lease.train_s - self.command.save_s)
        return f"{format_rate(candidate.offer.rate_micros_per_hour)} for up to {span}"


def judge_offer(offer: Offer, command: Command, load: Load, *, cap: Micros | None, hours: float | None) -> Candidate:
    """Return the candidate for an offer, with the requested lease or the longest that the cap pays for.

    The time that a command needs to save and end is added to its run time. Otherwise a short command would be stopped
    immediately.
    """
    lease_hours = (USUAL_HOURS if hours is None else hours) + command.save_s / SECONDS_PER_HOUR
    lease = lease_for(offer, _UNKNOWN_TIME, load, cap=cap, hours=lease_hours)
    if lease is not None and lease.train_s < _shortest_s(hours) + command.save_s:
        lease = None
    if lease is not None:
        hours_s = None if hours is None else ceil(hours * SECONDS_PER_HOUR)
        lease = lease.model_copy(update={"hours_s": hours_s})
    return Candidate(
        offer=offer,
        estimate=_UNKNOWN_TIME,
        lease=lease,
        expected_micros=None,
        worst_micros=worst_case(offer, lease, load) if lease else None,
        finishes=lease is not None,
        why_not="" if lease is not None else "over the cap",
        obstacle="" if lease is not None else "cap",
    )


def least_cap(offer: Offer, command: Command, load: Load, hours: float | None) -> Micros:
    """Return the smallest cap under which the command can run for the shortest useful time."""
    lease_hours = (_shortest_s(hours) + command.save_s) / SECONDS_PER_HOUR
    lease = lease_for(offer, _UNKNOWN_TIME, load, cap=None, hours=lease_hours)
    assert lease is not None
    return worst_case(offer, lease, load)


def _shortest_s(hours: float | None) -> int:
    """Return the shortest useful run time in seconds: five minutes, or the requested time if that is less."""
    return LEAST_RUN_S if hours is None else min(LEAST_RUN_S, ceil(hours * SECONDS_PER_HOUR))


@dataclass(frozen=True)
class _Upload:
    """A command whose folder was copied, the request with its packages, and notes about both for the plan."""

    command: Command
    request: Request
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def _make_upload(request: Request, work: Path, desk: Desk, *, is_asked: bool, admit: Admit) -> _Upload:
    """Check the files of a command and copy them to `work`; return the upload."""
    mode, command, home = request.mode, request.command, desk.home
    if command is None:
        raise ValueError("the request has no command")
    for name in command.secrets:
        require_secret(name)
    found = work_folder(command, home.root)
    refuse_unmatched_include(command, found, Path(request.data) if request.data else None)
    left = undecided_files(found)
    if not is_asked and mode is Mode.PAID:
        refuse_undecided(left)
    desk.demand_uploadable(found.files.values())
    command, found = without_keys(command, found, admit)
    program = make_startable(copy_work_folder(command, found, work), found)
    command, kernel = with_notebook(program.command, request, mode)
    command = command.model_copy(update={"imports": imports_of(found, command)})
    if mode is Mode.REHEARSAL and command.pip:
        command = command.model_copy(update={"python": str(venv_python(home, command.pip))})
    elif mode is Mode.PAID:
        request = request.model_copy(update={"choices": with_pip(request.choices, command.pip, request.python)})
    notes = (*program.notes, *kernel, *upload_notes(found, command, is_installed_there=mode is not Mode.LOCAL))
    warnings = (*left_out_warnings(left), *file_warnings(found), *_import_warnings(found, command, mode))
    return _Upload(command, request, notes, warnings)


def _import_warnings(found: WorkFolder, command: Command, mode: Mode) -> Iterator[str]:
    """Yield warnings about imports that are not found.

    A rehearsal's own environment is examined if it already exists.
    """
    is_there = not command.python or is_built(Path(command.python))
    python = command.python if command.python and is_there else sys.executable
    return import_warnings(found, command, python=python, is_rented=mode is Mode.PAID)


def summarize_data(request: Request, staged: Path, clock: Clock, say: Callable[[str], None]) -> DataSummary:
    """Return a summary of what --data names. The data is not changed; the command finds it at GPURUN_DATA."""
    named, size = request.data, 0
    if named is not None:
        if named.startswith(HUB):
            found = files_of_the_hub(named, staged / "data", say)
            return found.model_copy(update={"folder": "", "beside": str(staged)})
        place = Path(named).expanduser().absolute()
        if named.startswith("s3://"):
            place = _download_bucket(named, staged / "data", clock, say)
            size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
            return DataSummary(
                folder="", beside=str(staged), bytes=size, sha256=_listing_digest(place), source=named
            )  # fmt: skip
        if not place.is_dir():
            raise UsageError("data.missing", f"There is no folder {place}.", hint="Name a folder: --data PATH")
        named, size = str(place), sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return DataSummary(
        folder=named or "",
        beside=str(staged),
        bytes=size,
        sha256=_listing_digest(Path(named)) if named else "",
        source=named or "no data",
    )


def _download_bucket(named: str, into: Path, clock: Clock, say: Callable[[str], None]) -> Path:
    """Download the objects below a bucket's address to `into` on this computer, so that the machine needs no key."""
    bucket = Bucket(parse_address(named), clock)
    bucket.look()
    found, into = {name: size for name, size in bucket.below().items() if not name.endswith("/")}, into.resolve()
    if not found:
        raise UsageError("data.missing", f"There is nothing in {named}.", hint="Name a folder of a bucket.")
    need, free = sum(found.values()), shutil.disk_usage(into.parent).free
    say(f"downloading {len(found)} files from {named}, {format_bytes(need)}, before they are uploaded")
    if need > free:
        what = f"{named} holds {format_bytes(need)}, but only {format_bytes(free)} is free here."
        raise UsageError("disk.too_small", what, hint="Let the command download it, with its key from --secret.")
    for name, size in found.items():
        target = into / name
        if not target.resolve().is_relative_to(into):
            raise UsageError("data.bad_name", f"{named} has an object with the name {name!r}.", hint="Rename it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for block in bucket.stream(bucket.address.key(name), 0, size) if size else ():
                file.write(block)
        if target.stat().st_size != size:
            what = f"{name} of {named} changed while it was downloaded."
            raise UsageError("data.changed", what, hint="Try again once nothing writes there.")
    return into


def _listing_digest(folder: Path) -> str:
    """Return a digest of the names and sizes in a folder. The files' contents are digested when they are sent."""
    listing = [[path.relative_to(folder).as_posix(), path.stat().st_size] for path in sorted(folder.rglob("*"))]
    return hashlib.sha256(repr(listing).encode("utf-8", "surrogateescape")).hexdigest()


def _command_notes(command: Command, request: Request, mode: Mode) -> Iterator[str]:
    """Yield notes about the duration and the outputs."""
    if request.hours is None and mode is Mode.PAID:
        longest = f"as long as the cap pays, and at most {USUAL_HOURS:.0f} h (--hours)"
        yield f"Its duration is not known: it may run {longest}."
    size = format_bytes(command.output_bytes)
    if command.outputs:
        globs = ", ".join(command.outputs)
        yield f"New files that match {globs} are downloaded; the plan allows {size} for them (--output-gb)."
    else:
        yield "No files are downloaded (--outputs)."
    if command.outputs == EVERYTHING and (Path(command.folder) / ".gpurunignore").is_file():
        yield "Files that .gpurunignore names are not downloaded either; --outputs changes that."
    if mode is not Mode.PAID and not has_cuda():
        yield "This machine has no GPU. Your command must cope with that."


def _spot_warning(command: Command, request: Request) -> Iterator[str]:
    """Yield a warning if losing a spot machine would lose all results."""
    if request.choices.spot and not command.checkpoints:
        yield "A spot machine may be taken away at any moment: without --checkpoint-glob, all results are then lost."


def _earlier_runs(command: Command, home: Home) -> Iterator[str]:
    """Yield a note on the time and cost of the user's last runs of the same script."""
    runs = []
    for link in read_chain(home.ledger).links[-_MOST_READ:]:
        with suppress(GpurunError):
            predicate = read_receipt(home, home.run(link.run)).predicate
            training, machine = predicate["training"], predicate["instance"]
            seconds, cost = training["seconds"]["train_s"], predicate["cost"]["upper_bound_micros"]
            if predicate["asked"]["recipe"] != command.name or training["outcome"] != "done" or not seconds:
                continue
            where = f"{machine['gpu_count']}x{machine['gpu']}" if machine and machine["gpu_count"] else "a CPU"
            paid = f", {format_usd(Micros(cost))}" if cost else ""
            runs.append(f"{predicate['run']} took {format_duration(seconds)} on {where}{paid}")
    if runs:
        yield f"Your own runs of {command.name}: {'; '.join(runs[-_MOST_EARLIER:])}."

"""What a mandate allows to be planned: a request is checked before anything is read for it, and the plan afterwards.

This is the only door. Every proposal has its request admitted, every quote keeps only the allowed offers, and no plan
is made under a mandate without `demand_plan`; the mandate's sum is held where the run starts and where it rents.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.core.errors import GpurunError, NoOffer, UsageError
from gpurun.core.money import Micros, format_left, format_rate, format_usd
from gpurun.core.places import place_facts
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, Mode, Plan, Request
from gpurun.ledger.mandate import Mandate, MandateBudget
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.providers.catalog import card_names
from gpurun.providers.registry import CLOUDS, ready_providers

if TYPE_CHECKING:
    from gpurun.core.paths import Home

_NEVER = {
    "weak_lease": ("--accept-weak-lease", "Rent a machine that something on it or beside it ends."),
    "guard": ("--lambda-guard", "It would put a key of the account on the machine."),
    "trainer": ("--trainer", "It would run that folder's code on this computer: use `gpurun run` on a machine."),
    "stage": ("--stage", "Leave it out: files go over SSH."),
    "log_to": ("--log-to", "Read the figures with `gpurun logs`, or its `metrics` tool."),
    "pass_env": ("--pass-env", "Give a value with --env NAME=VALUE."),
    "warm": ("--warm", "It would upload files of other runs."),
}
"""Choices that no mandate allows, each with its flag and what to do instead."""
_BOX = ("host", "host_key", "identity", "jump", "python")


class Bounds:
    """The terms of one mandate, with what is left of its sum."""

    def __init__(self, mandate: Mandate, budget: MandateBudget, home: Home) -> None:
        self.mandate, self._budget, self._home = mandate, budget, home
        self._is_admitted = False

    def admitted(self, request: Request) -> Request:
        """Return the request with the mandate's bounds where it names none; an error if it goes beyond them.

        SetupError if the mandate has expired or was revoked.
        """
        self.demand_valid()
        self._demand_nothing_barred(request)
        self._demand_paths(request)
        if request.continues:
            self.demand_own(request.continues)
        self._is_admitted = True
        return request.model_copy(update={**self._places(request), **self._cap(request)})

    def demand_valid(self) -> None:
        """Raise SetupError if the mandate was edited, has expired or was revoked."""
        self._budget.mandate()

    def within(self, candidates: Sequence[Candidate]) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """Return the candidates that the mandate allows, and a note about the others; NoOffer if it allows none."""
        kept = tuple(candidate for candidate in candidates if self._against(candidate.offer) is None)
        if candidates and not kept:
            raise self._against(candidates[0].offer) or RuntimeError("an offer is both within and without")
        left_out = len(candidates) - len(kept)
        return kept, (f"The mandate excludes {left_out} other offer{'s' * (left_out > 1)}.",) if left_out else ()

    def demand_plan(self, plan: Plan) -> Plan:
        """Return the plan as approved under the mandate; an error if an offer of it, or the job, goes beyond."""
        if not self._is_admitted:
            raise RuntimeError("a proposal did not have its request admitted by the mandate")
        for candidate in plan.approved if plan.mode is not Mode.REHEARSAL else ():
            self._demand_candidate(candidate)
        for name in plan.job.secrets:
            self._demand_secret(name)
        return plan.model_copy(update={"mandate": self.mandate.id})

    def demand_below_root(self, flag: str, paths: Iterable[Path]) -> None:
        """Raise UsageError for a file that is, with every link followed, outside the mandate's root."""
        for path in paths:
            place = Path(os.path.realpath(path))
            if not self._is_below_root(place):
                what = f"{flag} {path} is outside {self.mandate.root}, the mandate's root"
                raise self._refusal("root", what, f"Name something below {self.mandate.root}; no link may lead out.")

    def demand_own(self, run: str) -> None:
        """Raise UsageError for a run that was not started under this mandate."""
        try:
            is_own = read_plan(self._home.run(run)).mandate == self.mandate.id
        except (OSError, ValueError):
            is_own = False
        if not is_own:
            raise self._refusal("run", f"{run} is not a run of this mandate", "Name one of your own: gpurun ps")

    def _demand_nothing_barred(self, request: Request) -> None:
        choices, command = request.choices, request.command
        for name, (flag, hint) in _NEVER.items():
            if getattr(choices, name):
                raise self._refusal("flag", f"{flag} is not allowed under a mandate", hint)
        for name in _BOX:
            if getattr(request, name):
                what = f"--{name.replace('_', '-')} is not allowed under a mandate"
                raise self._refusal("flag", what, "Leave it out: a mandate is for rented machines.")
        if request.mode is Mode.LOCAL or (request.mode is Mode.REHEARSAL and (command is not None or choices.setup)):
            what = "Your code must not run on this computer under a mandate"
            raise self._refusal("local", what, "Leave out --dry-run and --provider local; gpurun plan spends nothing.")
        most, typed = self.mandate.rate_max_micros_per_hour, choices.max_rate_micros
        if most is not None and typed is not None and typed > most:  # The next machines of a run may cost that much.
            what = f"--max-rate {typed / 1e6:g} is above {format_rate(most)}"
            raise self._refusal("rate", what, f"Use --max-rate {most / 1e6:g} or less.")
        if choices.spot and not self.mandate.spot:
            raise self._refusal("spot", "This mandate does not allow spot machines", "Leave --spot out.")
        if choices.image and choices.image not in self.mandate.images:
            allowed = f"It allows {', '.join(self.mandate.images)}." if self.mandate.images else "Leave --image out."
            raise self._refusal("image", f"This mandate does not allow the image {choices.image[:80]!r}", allowed)
        if choices.setup and hashlib.sha256(choices.setup.encode()).hexdigest() not in self.mandate.setups:
            what = "This mandate does not allow the script of --setup"
            raise self._refusal("setup", what, "Leave --setup out, or let your command do it: --pip WHAT installs.")
        for name in command.secrets if command else ():
            self._demand_secret(name)

    def _demand_paths(self, request: Request) -> None:
        choices, data, command = request.choices, request.data or "", request.command
        is_elsewhere = data.startswith("s3://") or data.endswith(".toml")  # A bucket, or a list of addresses.
        if is_elsewhere or "://" in choices.core_bundle:
            what = "Data in a bucket or from a list of addresses is read with this computer's keys, or from its network"
            raise self._refusal("root", what, "Name a folder below the root, or hf:OWNER/NAME.")
        # A parallel text may be two files, separated by a comma.
        parts = [] if data.startswith("hf:") else [Path(part).expanduser() for part in {data, *data.split(",")} if part]
        named = {
            "--data": parts,
            "--upload": [Path(command.folder)] if command and command.folder else [],
            "--init": [Path(choices.init)] if choices.init else [],
            "--core-bundle": [Path(choices.core_bundle)] if choices.core_bundle else [],
            "The recipe": [Path(request.recipe)] if request.recipe.endswith(".toml") or "/" in request.recipe else [],
        }
        for flag, paths in named.items():
            self.demand_below_root(flag, paths)
        for folder in parts:
            if folder.is_dir():
                self.demand_below_root("--data", _links_in(folder))

    def _places(self, request: Request) -> dict[str, tuple[str, ...]]:
        """Return the providers to ask: the mandate's if none is named; UsageError for one that it does not allow."""
        if request.mode is Mode.REHEARSAL:
            return {}
        regions = request.choices.clusters or (request.choices.region,)
        named = tuple(self._named(name, region) for name in request.providers for region in regions)
        allowed = self.mandate.providers or CLOUDS
        for name in named:
            if name not in allowed:
                what = f"{name} is not among the providers of this mandate: {', '.join(allowed)}"
                raise self._refusal("provider", what, f"Use one of them: --provider {allowed[0]}")
        if named or not self.mandate.providers:
            return {}
        clouds = [name for name in allowed if place_facts(name).is_rented and ":" not in name]
        if not clouds:
            raise self._refusal(
                "provider", "No provider is named", f"Use one of them: --provider {' or '.join(allowed)}"
            )
        return {"providers": tuple(name for name in ready_providers(self._home) if name in clouds) or tuple(clouds)}

    @staticmethod
    def _named(provider: str, region: str | None) -> str:
        """Return a provider as a mandate names it: a cluster with its name."""
        return f"{provider}:{region or ''}" if place_facts(provider).is_queued else provider

    def _cap(self, request: Request) -> dict[str, object]:
        """Return the cap that holds: the one that was typed, or the most that the mandate has for a run now."""
        if request.mode is Mode.REHEARSAL:
            return {}
        most, left = self.mandate.per_run_micros, self._budget.left() or Micros(0)
        if left <= 0:
            raise self._refusal("total", "Nothing is left of the mandate", _FREED, NoOffer)
        typed = request.max_cost_micros if request.cap_from == "--max-cost" or request.quoted else None
        if typed is not None and typed > most:
            what = f"A cap of {format_usd(typed)} is more than the {format_usd(most)} that a run may cost"
            raise self._refusal("per_run", what, f"Use --max-cost {most / 1e6:g} or less.", NoOffer)
        if typed is not None and typed > left:
            what = f"A cap of {format_usd(typed)} is more than what is left"
            raise self._refusal("total", what, f"{_FREED} Or use a smaller --max-cost.", NoOffer)
        if typed is not None:
            return {}
        own = request.max_cost_micros
        cap = min(most, left) if own is None else min(most, left, own)
        return {"max_cost_micros": Micros(cap), "cap_from": request.cap_from if cap == own else self.mandate.name}

    def _demand_candidate(self, candidate: Candidate) -> None:
        against = self._against(candidate.offer)
        if against is not None:
            raise against
        worst = candidate.worst_micros or Micros(0)
        if worst > self.mandate.per_run_micros:
            what = f"{candidate.offer.label} may cost {format_usd(worst)}, but a run at most {_usd(self.mandate)}"
            raise self._refusal("per_run", what, "Use a smaller --max-cost.", NoOffer)

    def _against(self, offer: Offer) -> GpurunError | None:
        """Return why the mandate does not allow an offer; None if it does."""
        mandate, name = self.mandate, self._named(offer.provider, offer.region)
        allowed = mandate.providers or CLOUDS
        if name not in allowed:
            what = f"{name} is not among the providers of this mandate: {', '.join(allowed)}"
            return self._refusal("provider", what, f"Use one of them: --provider {allowed[0]}", NoOffer)
        card = card_names().get(offer.gpu, offer.gpu) if offer.gpu_count else "cpu"
        if mandate.cards and card not in mandate.cards:
            what = f"{offer.label} is not among the cards of this mandate: {', '.join(mandate.cards)}"
            return self._refusal("card", what, f"Use one of them: --gpu 1x{mandate.cards[0]}", NoOffer)
        most = mandate.rate_max_micros_per_hour
        if most is not None and offer.rate_micros_per_hour > most:
            what = f"{offer.label} costs {format_rate(offer.rate_micros_per_hour)}, above {format_rate(most)}"
            return self._refusal("rate", what, "Use fewer or cheaper cards: gpurun offers --gpu any", NoOffer)
        if offer.spot and not mandate.spot:
            return self._refusal("spot", "This mandate does not allow spot machines", "Leave --spot out.", NoOffer)
        return None

    def _demand_secret(self, name: str) -> None:
        if name not in self.mandate.secrets:
            has = f"It allows {', '.join(self.mandate.secrets)}." if self.mandate.secrets else "It allows none."
            raise self._refusal("secret", f"This mandate does not allow the secret {name}", f"Leave it out. {has}")

    def _is_below_root(self, place: Path) -> bool:
        """Return whether a resolved path is below the root, by asking the disk, not by the names: it may ignore case.

        A root that has become a link since the mandate was written could lead anywhere, so nothing is below it.
        """
        root = self.mandate.root
        for above in (place, *place.parents) if os.path.realpath(root) == root else ():
            try:
                if above.samefile(root):
                    return True
            except OSError:
                continue
        return False

    def _refusal(self, why: str, what: str, hint: str, kind: type[GpurunError] = UsageError) -> GpurunError:
        """Return a refusal: what happened, what to do, and what is left."""
        return kind(f"mandate.{why}", f"{what}; {self.left_words()}.", hint=hint)

    def left_words(self) -> str:
        """Return what is left, as a clause."""
        try:
            left = format_left(self._budget.left() or Micros(0))
        except GpurunError as error:
            return f"what is left is not known ({error.code})"
        return f"{left} of {format_usd(self.mandate.total_micros)} is left"


_FREED = "A run that ends releases what it did not need: gpurun budget shows what is held."


def _usd(mandate: Mandate) -> str:
    return format_usd(mandate.per_run_micros)


def _links_in(folder: Path) -> Iterator[Path]:
    """Yield the links below a folder, which may lead out of it."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if (path := Path(place, name)).is_symlink():
                yield path

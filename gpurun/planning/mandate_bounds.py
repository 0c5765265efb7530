"""Enforce a mandate in planning: check the request before anything is read for it, and then the finished plan.

All planning under a mandate uses this module. It admits the request of every proposal, keeps only the allowed offers of
every quote, and checks every plan in `checked_plan`. The mandate's total is reserved elsewhere: where the run starts,
and where it rents.
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

_BARRED_CHOICES = {
    "weak_lease": ("--accept-weak-lease", "Rent a machine that can end itself, or that its provider ends."),
    "guard": ("--lambda-guard", "It would put a key of the account on the machine."),
    "trainer": ("--trainer", "It would run that folder's code on this computer: use `gpurun run` on a machine."),
    "stage": ("--stage", "Leave it out: files go over SSH."),
    "log_to": ("--log-to", "Read the figures with `gpurun logs`, or its `metrics` tool."),
    "pass_env": ("--pass-env", "Give a value with --env NAME=VALUE."),
    "warm": ("--warm", "It would upload files of other runs."),
}
"""Choices that no mandate allows, each with its flag and what to do instead."""
_BOX_OPTIONS = ("host", "host_key", "identity", "jump", "python")


class Bounds:
    """The terms of one mandate and what remains of its total."""

    def __init__(self, mandate: Mandate, budget: MandateBudget, home: Home) -> None:
        self.mandate, self._budget, self._home = mandate, budget, home
        self._is_admitted = False

    def admitted(self, request: Request) -> Request:
        """Return the request with the mandate's providers and cap filled in where the user named none.

        Raise UsageError or NoOffer if the request exceeds the mandate, and SetupError if the mandate has expired or was
        revoked.
        """
        self.require_valid()
        self._refuse_barred_choices(request)
        self._require_paths(request)
        if request.continues:
            self.require_own(request.continues)
        self._is_admitted = True
        return request.model_copy(update={**self._provider_update(request), **self._cap_update(request)})

    def require_valid(self) -> None:
        """Raise SetupError if the mandate was edited, has expired or was revoked."""
        self._budget.mandate()

    def within(self, candidates: Sequence[Candidate]) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """Return the candidates that the mandate allows, and a note about the others.

        Raise NoOffer if there are candidates but the mandate allows none of them.
        """
        kept = tuple(candidate for candidate in candidates if self._find_refusal(candidate.offer) is None)
        if candidates and not kept:
            raise self._find_refusal(candidates[0].offer) or RuntimeError("an offer is both within and without")
        left_out = len(candidates) - len(kept)
        return kept, (f"The mandate excludes {left_out} other offer{'s' * (left_out > 1)}.",) if left_out else ()

    def checked_plan(self, plan: Plan) -> Plan:
        """Return the plan marked with the mandate.

        Raise an error if one of its offers or its job exceeds the mandate.
        """
        if not self._is_admitted:
            raise RuntimeError("a proposal did not have its request admitted by the mandate")
        for candidate in plan.approved if plan.mode is not Mode.REHEARSAL else ():
            self._require_candidate(candidate)
        for name in plan.job.secrets:
            self._require_secret(name)
        return plan.model_copy(update={"mandate": self.mandate.id})

    def require_below_root(self, flag: str, paths: Iterable[Path]) -> None:
        """Raise UsageError for a path that, with all links resolved, is outside the mandate's root."""
        for path in paths:
            place = Path(os.path.realpath(path))
            if not self._is_below_root(place):
                what = f"{flag} {path} is outside {self.mandate.root}, the mandate's root"
                raise self._refusal("root", what, f"Name something below {self.mandate.root}; no link may lead out.")

    def require_own(self, run: str) -> None:
        """Raise UsageError for a run that was not planned under this mandate."""
        try:
            is_own = read_plan(self._home.run(run)).mandate == self.mandate.id
        except (OSError, ValueError):
            is_own = False
        if not is_own:
            raise self._refusal("run", f"{run} is not a run of this mandate", "Name one of your own: gpurun ps")

    def _refuse_barred_choices(self, request: Request) -> None:
        choices, command = request.choices, request.command
        for name, (flag, hint) in _BARRED_CHOICES.items():
            if getattr(choices, name):
                raise self._refusal("flag", f"{flag} is not allowed under a mandate", hint)
        for name in _BOX_OPTIONS:
            if getattr(request, name):
                what = f"--{name.replace('_', '-')} is not allowed under a mandate"
                raise self._refusal("flag", what, "Leave it out: a mandate is for rented machines.")
        if request.mode is Mode.LOCAL or (request.mode is Mode.REHEARSAL and (command is not None or choices.setup)):
            what = "Your code must not run on this computer under a mandate"
            raise self._refusal("local", what, "Leave out --dry-run and --provider local; gpurun plan spends nothing.")
        most, typed = self.mandate.rate_max_micros_per_hour, choices.max_rate_micros
        # The run's later machines may cost as much as --max-rate.
        if most is not None and typed is not None and typed > most:
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
            self._require_secret(name)

    def _require_paths(self, request: Request) -> None:
        choices, data, command = request.choices, request.data or "", request.command
        # The data is in a bucket, or it is a list of URLs.
        is_elsewhere = data.startswith("s3://") or data.endswith(".toml")
        if is_elsewhere or "://" in choices.core_bundle:
            what = "Data in a bucket or from a list of URLs would be read with this computer's keys or network"
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
            self.require_below_root(flag, paths)
        for folder in parts:
            if folder.is_dir():
                self.require_below_root("--data", _find_links(folder))

    def _provider_update(self, request: Request) -> dict[str, tuple[str, ...]]:
        """Return an update with the mandate's providers if the request names none; {} otherwise.

        Raise UsageError if the request names a provider that the mandate does not allow.
        """
        if request.mode is Mode.REHEARSAL:
            return {}
        regions = request.choices.clusters or (request.choices.region,)
        named = tuple(self._mandate_name(name, region) for name in request.providers for region in regions)
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
    def _mandate_name(provider: str, region: str | None) -> str:
        """Return a provider in the form that mandates use: a cluster is `slurm:NAME`, with its name."""
        return f"{provider}:{region or ''}" if place_facts(provider).is_queued else provider

    def _cap_update(self, request: Request) -> dict[str, object]:
        """Return an update with the cap: {} if the user typed one, else the most that the mandate allows now.

        Raise NoOffer if the typed cap exceeds the mandate, or if nothing is left of its total.
        """
        if request.mode is Mode.REHEARSAL:
            return {}
        most, left = self.mandate.per_run_micros, self._budget.left() or Micros(0)
        if left <= 0:
            raise self._refusal("total", "The mandate's total is used up", _FREED, NoOffer)
        typed = request.max_cost_micros if request.cap_from == "--max-cost" or request.quoted else None
        if typed is not None and typed > most:
            what = f"A cap of {format_usd(typed)} is above the {format_usd(most)} that a run may cost"
            raise self._refusal("per_run", what, f"Use --max-cost {most / 1e6:g} or less.", NoOffer)
        if typed is not None and typed > left:
            what = f"A cap of {format_usd(typed)} is more than the mandate has left"
            raise self._refusal("total", what, f"{_FREED} Or use a smaller --max-cost.", NoOffer)
        if typed is not None:
            return {}
        own = request.max_cost_micros
        cap = min(most, left) if own is None else min(most, left, own)
        return {"max_cost_micros": Micros(cap), "cap_from": request.cap_from if cap == own else self.mandate.name}

    def _require_candidate(self, candidate: Candidate) -> None:
        against = self._find_refusal(candidate.offer)
        if against is not None:
            raise against
        worst = candidate.worst_micros or Micros(0)
        if worst > self.mandate.per_run_micros:
            most = _format_per_run_cap(self.mandate)
            what = f"{candidate.offer.label} may cost {format_usd(worst)}, but a run at most {most}"
            raise self._refusal("per_run", what, "Use a smaller --max-cost.", NoOffer)

    def _find_refusal(self, offer: Offer) -> GpurunError | None:
        """Return the refusal of an offer that the mandate does not allow; None if it allows the offer."""
        mandate, name = self.mandate, self._mandate_name(offer.provider, offer.region)
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

    def _require_secret(self, name: str) -> None:
        if name not in self.mandate.secrets:
            has = f"It allows {', '.join(self.mandate.secrets)}." if self.mandate.secrets else "It allows none."
            raise self._refusal("secret", f"This mandate does not allow the secret {name}", f"Leave it out. {has}")

    def _is_below_root(self, place: Path) -> bool:
        """Return whether a resolved path is below the root. Compare files, not names: the disk may ignore case.

        If the root has become a link since the mandate was written, return False, because the link could lead anywhere.
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
        """Return a refusal that also states what remains of the mandate."""
        return kind(f"mandate.{why}", f"{what}; {self.left_words()}.", hint=hint)

    def left_words(self) -> str:
        """Return a clause about what remains of the mandate."""
        try:
            left = format_left(self._budget.left() or Micros(0))
        except GpurunError as error:
            return f"it is not known what is left ({error.code})"
        return f"{left} of {format_usd(self.mandate.total_micros)} is left"


_FREED = "A run that ends releases the amount that it did not use: gpurun budget shows reserved amounts."


def _format_per_run_cap(mandate: Mandate) -> str:
    return format_usd(mandate.per_run_micros)


def _find_links(folder: Path) -> Iterator[Path]:
    """Yield the symbolic links below a folder."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if (path := Path(place, name)).is_symlink():
                yield path

"""Reads an earlier run of this home that a new run continues. Only what its signed receipt confirms is used.

`training/continued_training.py` (train --from), `commands/continued_command.py` (run --from) and
`training/compile_cache.py` (--warm) use this module. The run's folder may have changed since the run ended; a file that
differs from the receipt is treated as missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gpurun.core.artifact_names import path_of
from gpurun.core.collected_record import read_stated_files
from gpurun.core.errors import GpurunError, UsageError, VerificationFailed
from gpurun.core.installed_files import page
from gpurun.core.money import Micros
from gpurun.core.paths import Home, RunFolder, open_regular, read_regular
from gpurun.core.receipt_record import Signature
from gpurun.core.records import Frozen
from gpurun.core.run_plan import Earlier, Plan, Request
from gpurun.ledger.chain import Chain, read_chain
from gpurun.ledger.runs import find_run, look_at_run
from gpurun.ledger.write_receipt import read_receipt

Model = TypeVar("Model", bound=Frozen)

_BLOCK_BYTES = 1 << 20
_OUTFIT = ("image", "setup", "setup_limit_s", "pass_env")
_BOX = ("host", "host_key", "jump", "python", "price_micros_per_hour")


@dataclass(frozen=True)
class EarlierRun:
    """A run that ended. `receipt` is the predicate of its receipt, `receipt_sha256` the receipt's digest."""

    folder: RunFolder
    receipt: dict[str, Any]
    receipt_sha256: str

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.folder.name

    def plan(self) -> Plan | None:
        """Return the run's plan; None if its file differs from the receipt."""
        return self._read_confirmed(Plan, self.folder.plan, "plan")

    def request(self) -> Request | None:
        """Return the user's request; None if its file differs from the receipt."""
        return self._read_confirmed(Request, self.folder.request, "request")

    def files(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the downloaded files of these kinds as the receipt lists them: name, bytes, sha256, kind, step."""
        home = self.receipt["checkpoint"]
        try:
            files = read_stated_files(self.folder, home["files"], home.get("listed"))
        except ValueError:  # The separate list was altered; the files named in the receipt itself still count.
            files = home["files"]
        return [file for file in files if file["kind"] in kinds]

    def content(self, file: dict[str, Any]) -> bytes | None:
        """Return the bytes of a small downloaded file; None if they differ from the receipt."""
        return _read_if_unchanged(path_of(self.folder.artifacts, str(file["name"])), file["sha256"])

    def unchanged(self, file: dict[str, Any]) -> Path:
        """Check a downloaded file's digest; return its path. Raise VerificationFailed if the digest is different."""
        path, digest = path_of(self.folder.artifacts, str(file["name"])), hashlib.sha256()
        try:
            with open_regular(path) as content:
                while block := content.read(_BLOCK_BYTES):
                    digest.update(block)
        except OSError:
            raise self.altered(str(file["name"])) from None
        if digest.hexdigest() != str(file["sha256"]):
            raise self.altered(str(file["name"]))
        return path

    def altered(self, what: str) -> VerificationFailed:
        """Return the error for `what`, such as a file, that is missing or differs from the receipt."""
        return VerificationFailed(
            "continue.altered",
            f"{self.name}: {what} is missing or differs from the receipt.",
            hint=f"gpurun audit {self.name} shows what changed; gpurun collect {self.name} downloads again "
            "the files that are still in the bucket.",
        )

    def continued_at(self, step: int, files: Sequence[dict[str, Any]], plan: Plan) -> Earlier:
        """Return the new plan's record of this run's checkpoint, including the cost of all runs that led to it."""
        spent = self.receipt["cost"]["upper_bound_micros"]
        before = plan.continues.spent_micros if plan.continues else Micros(0)
        return Earlier(
            run=self.name,
            step=step,
            bytes=sum(int(file["bytes"]) for file in files),
            receipt_sha256=self.receipt_sha256,
            spent_micros=None if spent is None or before is None else Micros(spent + before),
            steps=plan.job.steps,
        )

    def _read_confirmed(self, kind: type[Model], path: Path, name: str) -> Model | None:
        """Read a record from the run's folder; None unless its digest equals the receipt's digest of that name."""
        content = _read_if_unchanged(path, self.receipt["digests"][name])
        try:
            return kind.from_json(content) if content is not None else None
        except ValidationError:
            return None


def read_earlier_run(home: Home, chain: Chain, name: str) -> EarlierRun | None:
    """Return a run of this home; None if its receipt is not in the chain, or not signed with this home's key."""
    folder, link = home.run(name), chain.link_of(name)
    try:
        receipt = read_receipt(home, folder) if link else None
    except GpurunError:
        return None
    if link is None or receipt is None or receipt.signature is not Signature.OK:
        return None
    return EarlierRun(folder, {**receipt.predicate}, receipt.sha256) if receipt.sha256 == link.receipt_sha256 else None


def find_earlier_run(reference: str, home: Home) -> EarlierRun:
    """Return the run that `reference` names. Raise UsageError if it has not ended or has no valid receipt."""
    name = find_run(home, reference)
    if look_at_run(home, name).unfinished:
        hint = f"gpurun stop {name} saves and ends it. If its supervisor is dead, use gpurun resume {name} instead."
        raise UsageError("continue.unfinished", f"{name} has not ended yet.", hint=hint)
    run = read_earlier_run(home, read_chain(home.ledger), name)
    if run is None:
        raise UsageError(
            "continue.no_receipt",
            f"{name} has no receipt signed by this home, so its checkpoint cannot be verified.",
            hint=f"gpurun audit {name} shows why. You can still start a new run from its weights: train.init_from, see "
            f"{page('FORMATS.md')}",
        )
    return run


def on_the_same_place(request: Request, before: Request, usual: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that give a request the provider and machine of `before`; {} if it names a provider itself.

    If `before` named no provider, `usual` is used. The host key and the price are copied only for the same box.
    """
    if request.providers:
        return {}
    box: tuple[str, ...] = ("identity",) if before.host else ()
    if before.host and request.host in ("", before.host):
        box += _BOX
    outfit = {name: getattr(request.choices, name) or getattr(before.choices, name) for name in _OUTFIT}
    return {
        "providers": before.providers or usual,
        "choices": request.choices.model_copy(update=outfit),
        **{name: getattr(request, name) or getattr(before, name) for name in box},
    }


def _read_if_unchanged(path: Path, sha256: str) -> bytes | None:
    """Return a file's bytes if they have this digest, else None."""
    try:
        content = read_regular(path)
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == sha256 else None

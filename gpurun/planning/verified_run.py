"""What the signed receipts of this home confirm: an earlier run, what it was asked, planned and brought home.

A folder of a run may have been changed since; what is not what its receipt says is treated as if it were not there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gpurun.core.artifact_names import path_of
from gpurun.core.collected_record import files_of
from gpurun.core.errors import GpurunError
from gpurun.core.paths import Home, RunFolder, open_regular, read_regular
from gpurun.core.receipt_record import Signature
from gpurun.core.records import Frozen
from gpurun.core.run_plan import Plan, Request
from gpurun.ledger.chain import Chain
from gpurun.ledger.write_receipt import read_receipt

Model = TypeVar("Model", bound=Frozen)

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class VerifiedRun:
    """An earlier run: `told` is what its receipt states, whose digest is `receipt_sha256`."""

    folder: RunFolder
    told: dict[str, Any]
    receipt_sha256: str

    def plan(self) -> Plan | None:
        """The plan that the receipt was about."""
        return self._record(Plan, self.folder.plan, "plan")

    def request(self) -> Request | None:
        """What the user had asked for."""
        return self._record(Request, self.folder.request, "request")

    def files(self, *kinds: str) -> list[dict[str, Any]]:
        """What came home of these kinds, as the receipt has it: name, bytes, sha256, kind, step."""
        home = self.told["checkpoint"]
        try:
            files = files_of(self.folder, home["files"], home.get("listed"))
        except ValueError:  # Its list was altered: what stands in the receipt itself counts still.
            files = home["files"]
        return [file for file in files if file["kind"] in kinds]

    def content(self, file: dict[str, Any]) -> bytes | None:
        """A small file that came home, read once, if it is still what it was then."""
        return _content(path_of(self.folder.artifacts, str(file["name"])), file["sha256"])

    def holds(self, file: dict[str, Any]) -> bool:
        """Whether a file at home is still what came home then; all of it is read."""
        digest = hashlib.sha256()
        try:
            with open_regular(path_of(self.folder.artifacts, str(file["name"]))) as content:
                while block := content.read(_BLOCK_BYTES):
                    digest.update(block)
        except OSError:
            return False
        return digest.hexdigest() == str(file["sha256"])

    def _record(self, kind: type[Model], path: Path, name: str) -> Model | None:
        """A record of the run's folder, if it is the one whose digest the receipt has under this name."""
        content = _content(path, self.told["digests"][name])
        try:
            return kind.from_json(content) if content is not None else None
        except ValidationError:
            return None


def verified_run(home: Home, chain: Chain, name: str) -> VerifiedRun | None:
    """A run of this home, if its receipt is in the chain and signed by this home's key."""
    folder, link = home.run(name), chain.of(name)
    try:
        receipt = read_receipt(home, folder) if link else None
    except GpurunError:
        return None
    if link is None or receipt is None or receipt.signature is not Signature.OK:
        return None
    return VerifiedRun(folder, {**receipt.predicate}, receipt.sha256) if receipt.sha256 == link.receipt_sha256 else None


def _content(path: Path, sha256: str) -> bytes | None:
    """A file's bytes, if they have the digest."""
    try:
        content = read_regular(path)
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == sha256 else None

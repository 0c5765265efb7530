"""What may leave a machine before its run ends: where a provider charges for each byte, no more than the plan counts.

`left.json` in the run's folder has the digest and size of each file that was asked for by then, and what was given to
the machine to push. It is written before that, so that neither a crash nor a second process can make more of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from gpurun.core.exclusive import exclusive
from gpurun.core.paths import RunFolder, write_atomic
from gpurun.core.plan import Plan
from gpurun.machine.answers import ManifestFile
from gpurun.planning.load import early_bytes

BUCKET = "bucket"


class Allowance:
    """So many bytes, over a training of so many steps; `limit_bytes` is None where they cost nothing."""

    def __init__(self, folder: RunFolder, limit_bytes: int | None, steps: int) -> None:
        self.limit_bytes = limit_bytes
        self._steps = steps
        self._folder = folder

    @classmethod
    def of(cls, folder: RunFolder, plan: Plan) -> Allowance:
        """What a run's plan has paid for."""
        limit_bytes = early_bytes(plan.offer.provider, plan.parameters)
        return cls(folder, limit_bytes, int(plan.resolved["train"]["steps"]))

    def give_to_bucket(self) -> int | None:
        """What the machine may push where that is charged, too: all that is left of this, which is then spent.

        None where nothing is charged. Asked again, the same.
        """
        if self.limit_bytes is None:
            return None
        with exclusive(self._folder.path / ".left.lock"):
            left = self._left()
            if BUCKET not in left:
                left[BUCKET] = max(0, self.limit_bytes - sum(left.values()))
                write_atomic(self._path, json.dumps(left, sort_keys=True).encode())
            return left[BUCKET]

    @property
    def spent_bytes(self) -> int:
        """How much was asked for so far."""
        return sum(self._left().values())

    def take(self, files: Iterable[ManifestFile], *, by_step: int | None = None) -> bool:
        """Whether these may be fetched now, which is then noted; a file that was noted before costs nothing again.

        With `by_step` only that share of the whole is given out, so that checkpoints are spread over the training.
        """
        if self.limit_bytes is None:
            return True
        share = 1.0 if by_step is None else min(1.0, by_step / self._steps)
        with exclusive(self._folder.path / ".left.lock"):
            left = self._left() | {file.sha256: file.bytes for file in files}
            if sum(left.values()) > self.limit_bytes * share:
                return False
            write_atomic(self._path, json.dumps(left, sort_keys=True).encode())
            return True

    def _left(self) -> dict[str, int]:
        """By digest what was asked for; a list that cannot be understood counts as all of it."""
        try:
            return {str(sha256): int(size) for sha256, size in json.loads(self._path.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError):
            return {"": self.limit_bytes or 0}

    @property
    def _path(self) -> Path:
        return self._folder.path / "left.json"

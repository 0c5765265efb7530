"""Let the machine push its checkpoints to the bucket: URLs before the trainer starts, fresh ones while it trains."""

from __future__ import annotations

import logging
import secrets
from functools import partial
from pathlib import Path

from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.paths import write_atomic
from gpurun.core.progress import RunState
from gpurun.lifecycle.bucket.pull import PATIENCE_S
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.home.allowance import Allowance
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.bucket.address import parse_address
from gpurun.machine.bucket.patience import patiently
from gpurun.machine.bucket.slots import push_order, slot_bytes_for
from gpurun.machine.bucket.trouble import BucketLost
from gpurun.machine.bucket.wire import MOST_SIGNED_S, Bucket
from gpurun.machine.far import FarSide
from gpurun.planning.load import CHECKPOINT_BYTES

AFTER_S = 24 * 3600.0
"""URLs outlive the lease by this much, where they may: a machine whose end is late still saves what it has."""
FRESH_S, BRIEF_S = 12 * 3600.0, 900.0
"""How often they are made anew: those of lasting keys, and those that end with a session."""


class Pushing:
    """The URLs that one run's machine has. Where there is no bucket, all of this does nothing."""

    def __init__(self, state: RunState, context: Context, far: FarSide) -> None:
        self._state, self._context, self._far = state, context, far
        self._url = context.plan.choices.stage
        self._bucket = Bucket(parse_address(self._url), context.clock, is_paid=True) if self._url else None
        self._next_mono = float("-inf")

    @property
    def folder(self) -> str:
        """Where in the bucket the run's machine pushes to; another machine of the same run has another place."""
        return folder_of(self._url, self._context.plan.run, self._state.token) if self._url else ""

    def give(self) -> str:
        """Give the machine its URLs; the folder, or "" where there is no bucket. SetupError or BucketLost.

        A bucket that is away is waited for: without URLs now, nothing of the whole run is pushed.
        """
        if self._bucket is None:
            return ""
        heed = partial(self._context.heed, self._state)
        patiently(self._context.clock, PATIENCE_S, self._bucket.look, heed=heed)
        self._hand_over(self._bucket)
        return self.folder

    def refresh(self) -> None:
        """Give it fresh ones when the old ones are old; what fails is tried again later, and hurts no training."""
        if self._bucket is None or not self._state.pushed:
            return
        if self._context.clock.monotonic() < self._next_mono:
            return
        try:
            self._bucket.look()
            self._hand_over(self._bucket)
        except (SetupError, BucketLost, FarRefusal, MachineLost) as error:
            self._next_mono = self._context.clock.monotonic() + BRIEF_S
            logging.info("no fresh URLs for the machine: %s: %s", error.code, error.what)

    def _hand_over(self, bucket: Bucket) -> None:
        """Make the URLs; they are signed for the region and by the clock that the last look has found."""
        plan = self._context.plan
        is_free = plan.stage is not None and plan.stage.is_beside(plan.offer)
        left_s = self._context.seconds_left(self._state)
        try:
            key = key_of(self._context.folder.push_key, is_new=True)
            most_bytes = None if is_free else Allowance.of(self._context.folder, plan).give_to_bucket()
        except OSError as error:
            what = f"{self._context.folder.path} cannot be written: {error.strerror}."
            raise SetupError("stage.no_push", what, hint="Make room here before the next run.") from error
        order = push_order(
            bucket,
            self.folder,
            run=plan.run,
            key=key,
            slot_bytes=slot_bytes_for(CHECKPOINT_BYTES * plan.parameters),
            seconds=min(MOST_SIGNED_S, left_s + AFTER_S),
            most_bytes=most_bytes,
            steps=int(plan.resolved["train"]["steps"]),
        )
        self._far.let_push(order)
        self._next_mono = self._context.clock.monotonic() + (BRIEF_S if bucket.has_session else FRESH_S)


def folder_of(url: str, run: str, token: str) -> str:
    """Where in the bucket a machine's checkpoints are."""
    return parse_address(url).key("runs", run, token)


def key_of(path: Path, *, is_new: bool = False) -> str:
    """The key that the run's machine signs its list with; made at the first asking where it `is_new`."""
    if not path.exists() and is_new:
        write_atomic(path, secrets.token_hex(32).encode())
    try:
        return path.read_text()
    except FileNotFoundError:
        raise missing_key(path) from None


def missing_key(path: Path) -> GpurunError:
    """The key that would tell the machine's own list from another's is not here."""
    what = f"There is no {path}, with which the list in the bucket was signed."
    return SetupError("stage.no_push_key", what, hint="Put the run's folder back from a copy.")

"""Build the job that the machine receives: its command, its time limits, and the bucket to push checkpoints to."""

from __future__ import annotations

import logging
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from gpurun.core.credentials import require_secret
from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.journal_records import RunState
from gpurun.core.paths import write_atomic
from gpurun.core.run_plan import Choices
from gpurun.lifecycle.artifacts.inventory import EgressBudget
from gpurun.lifecycle.context import Context
from gpurun.providers.base import SpotNotice
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.push_slots import push_order, slot_bytes_for
from gpurun.remote.s3.s3_client import MOST_SIGNED_S, Bucket
from gpurun.remote.s3.s3_errors import BucketLost
from gpurun.remote.s3.s3_retry import retry_bucket_call

IDLE_S = 3600
"""Seconds that a job may be idle before it is ended, unless the user sets another time."""
LINGER_S = 900.0
"""Seconds that a machine waits for an offline client after training, in addition to the planned download time."""
PATIENCE_S = 60.0
AFTER_S = 24 * 3600.0
"""Seconds that URLs stay valid after the lease, if the service allows it, so that a late machine can still push."""
FRESH_S, BRIEF_S = 12 * 3600.0, 900.0
"""Seconds between two renewals of the URLs: with lasting keys, and with keys that expire with a session."""


def job_of(state: RunState, context: Context) -> dict[str, Any]:
    """Return the agent's job (docs/FORMATS.md). Its stop times leave enough time to download the last checkpoint.

    They are also given as durations, because the machine's clock may be corrected before the job starts.
    """
    plan = context.plan
    workload = plan.job.workload(plan, context.trainer, cpus=int(state.facts.get("cpus") or 1))
    there = context.clock.wall() + state.clock_ahead_s  # The agent uses its own clock.
    soft_stop_s, hard_stop_s = stops_of(state, context)
    notice_url = context.provider.notice_url if plan.offer.spot and isinstance(context.provider, SpotNotice) else ""
    return {
        "v": 1,
        "run": plan.run,
        "argv": list(workload.argv),
        "cwd": workload.cwd,
        "env": dict(workload.env),
        **({} if plan.job.needs_torch else {"any_python": True}),
        **({"pass_env": list(plan.choices.pass_env)} if plan.choices.pass_env else {}),
        "soft_stop_s": soft_stop_s,
        "hard_stop_s": hard_stop_s,
        "soft_stop_wall": there + soft_stop_s,
        "hard_stop_wall": there + hard_stop_s,
        "save_s": plan.job.save_s,
        **{f"{name}_s": seconds for name, seconds in limits_of(plan.choices).items()},
        **({"runner": True} if workload.has_runner else {}),
        **({"attended": "job" if context.is_shared else "machine"} if plan.job.is_attended else {}),
        **({"notice_url": notice_url} if notice_url else {}),
        **_make_linger_fields(state, context),
    }


def limits_of(choices: Choices) -> dict[str, int]:
    """Return the seconds that a job may be idle and silent before it is ended; 0 for no limit."""
    return {"idle": IDLE_S if choices.idle_s is None else choices.idle_s, "silent": choices.silent_s or 0}


def secrets_of(context: Context) -> dict[str, str]:
    """Return the values of --secret by name. Raise SetupError if a value is no longer available."""
    return {name: require_secret(name).reveal() for name in context.plan.job.secrets}


def _make_linger_fields(state: RunState, context: Context) -> dict[str, Any]:
    """Return the job's fields about how long the machine waits after training before it ends itself.

    Without a bucket they are empty, because then the machine has the only copy and keeps it until its deadline.
    """
    folder = context.guard_folder(state.instance) if state.pushed and state.armed and state.instance else ""
    return {"linger_s": context.plan.lease.collect_s + LINGER_S, "guard_folder": folder} if folder else {}


def ends_unwatched(state: RunState) -> str:
    """Return a clause about how the machine ends if this computer does not see the end of its training."""
    if state.linger_s:
        wait = f"{state.linger_s / 60:.0f} minutes after its work"
        return f"it was set to end itself {wait} if its files were in the bucket, else to keep them until its deadline"
    return "it kept its files until its deadline, since it had no bucket to put them into"


def stops_of(state: RunState, context: Context) -> tuple[float, float]:
    """Return the seconds until the trainer must save and stop, and the seconds until it is killed.

    Training may use the whole lease except the time to save, download and destroy. With --hours, it stops after at most
    that time.
    """
    hours_s = context.plan.lease.hours_s
    hard_stop_s = max(0.0, context.seconds_left(state) - context.collect_s)
    soft_stop_s = max(0.0, hard_stop_s - context.plan.job.save_s)
    return (soft_stop_s if hours_s is None else min(soft_stop_s, hours_s)), hard_stop_s


class Pushing:
    """Gives one machine the signed URLs that it needs to push files to the bucket.

    Without a bucket, every method does nothing.
    """

    def __init__(self, state: RunState, context: Context, far: FarSide) -> None:
        self._state, self._context, self._far = state, context, far
        self._url = context.plan.choices.stage
        self._bucket = Bucket(parse_address(self._url), context.clock, is_paid=True) if self._url else None
        self._next_mono = float("-inf")

    @property
    def folder(self) -> str:
        """Return the folder in the bucket for this machine; each machine of a run has its own."""
        return folder_of(self._url, self._context.plan.run, self._state.token) if self._url else ""

    def give(self) -> str:
        """Give the machine its URLs and return its folder in the bucket; "" without a bucket.

        Wait for a bucket that does not answer, because a machine without URLs would push nothing during the whole run.
        Raise SetupError or BucketLost if the bucket cannot be used.
        """
        if self._bucket is None:
            return ""
        raise_if_stopped = partial(self._context.raise_if_stopped, self._state)
        retry_bucket_call(self._context.clock, PATIENCE_S, self._bucket.look, raise_if_stopped=raise_if_stopped)
        self._send_signed_urls(self._bucket)
        return self.folder

    def refresh(self) -> None:
        """Renew the machine's URLs if that is due. A failure is logged and retried later."""
        if self._bucket is None or not self._state.pushed:
            return
        if self._context.clock.monotonic() < self._next_mono:
            return
        try:
            self._bucket.look()
            self._send_signed_urls(self._bucket)
        except (SetupError, BucketLost, FarRefusal, MachineLost) as error:
            self._next_mono = self._context.clock.monotonic() + BRIEF_S
            logging.info("no fresh URLs for the machine: %s: %s", error.code, error.what)

    def _send_signed_urls(self, bucket: Bucket) -> None:
        """Sign the URLs and send them. The region and the clock come from the last request to the bucket."""
        plan = self._context.plan
        is_free = plan.stage is not None and plan.stage.is_beside(plan.offer)
        left_s = self._context.seconds_left(self._state)
        try:
            key = read_list_key(self._context.folder.push_key, is_new=True)
            most_bytes = None if is_free else EgressBudget.from_plan(self._context.folder, plan).give_to_bucket()
        except OSError as error:
            what = f"{self._context.folder.path} cannot be written: {error.strerror}."
            raise SetupError("stage.no_push", what, hint="Make room here before the next run.") from error
        order = push_order(
            bucket,
            self.folder,
            run=plan.run,
            key=key,
            slot_bytes=slot_bytes_for(plan.job.checkpoint_bytes, plan.job.more_kept),
            seconds=min(MOST_SIGNED_S, left_s + AFTER_S),
            most_bytes=most_bytes,
            steps=max(1, plan.job.steps),
        )
        self._far.let_push(order)
        self._next_mono = self._context.clock.monotonic() + (BRIEF_S if bucket.has_session else FRESH_S)


def folder_of(url: str, run: str, token: str) -> str:
    """Return the place in the bucket for a machine's checkpoints."""
    return parse_address(url).key("runs", run, token)


def read_list_key(path: Path, *, is_new: bool = False) -> str:
    """Return the key with which the run's machine signs its list of files.

    If `is_new`, create the key unless it exists.
    """
    if not path.exists() and is_new:
        write_atomic(path, secrets.token_hex(32).encode())
    try:
        return path.read_text()
    except FileNotFoundError:
        raise missing_key(path) from None


def missing_key(path: Path) -> GpurunError:
    """Return the error for a missing key. Without the key, a forged list cannot be told from the machine's list."""
    what = f"The key {path}, which signed the list in the bucket, does not exist."
    return SetupError("stage.no_push_key", what, hint="Restore the run's folder from a backup.")

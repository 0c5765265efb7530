"""Starts a job once, after checking and recording it. After that, it can only be stopped, or be stopped earlier."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

from gpurun.remote.agent.finish_upload import read_upload_record
from gpurun.remote.agent.job_secrets import drop_secrets
from gpurun.remote.agent.job_state import bring_forward, clock_was_set, ensure_keeper, request_stop
from gpurun.remote.agent.processes import keepers, kill_all, send_signal
from gpurun.remote.agent.system import Refusal, locked, monotonic, path_in, read, read_part, write
from gpurun.remote.agent.torch_look import find_torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.remote.agent.system import Answer, Json

START_WAIT_S = 30
STOPS = ("soft_stop", "hard_stop")


def start(root: str, options: Json) -> Answer:
    """Start the job's trainer under a keeper, once. A second call can only shorten the lease."""
    locked(root, "unpack.lock", START_WAIT_S)
    job = by_this_clock(root, checked_job(root, os.path.abspath(options["job"])))
    what = json.dumps([job["run"], job["argv"], job["cwd"], job["env"]], sort_keys=True)
    digest = hashlib.sha256(what.encode()).hexdigest()
    known = read(root, "agent", "job.json")
    if known and known["sha256"] != digest:
        raise Refusal("other_job", "another job was started in this folder")
    bring_forward(root, job["soft_stop_wall"], job["hard_stop_wall"])
    if known is None:
        job["argv"] = [sys.executable if word == "{agent}" else word for word in job["argv"]]
        if "{python}" in job["argv"]:
            python = (read(root, "agent", "python.json") or find_torch(root, None))["python"]
            python = python or (sys.executable if job.get("any_python") else None)
            if python is None:
                raise Refusal("no_torch", "no Python with torch was found on this machine")
            job["argv"] = [python if word == "{python}" else word for word in job["argv"]]
        write(path_in(root, "agent", "job.json"), dict(job, sha256=digest))
    started, record, end = False, None, monotonic() + START_WAIT_S
    while record is None and monotonic() < end:
        outcome = ensure_keeper(root, fresh=not started)
        started = started or outcome == "started"
        record = read(root, "agent", "keeper.json")
        if outcome in ("ended", "nobody"):
            break
        time.sleep(0.02)
    drop_secrets(root)  # These secrets are left from a start that was requested twice.
    if record is None:
        raise Refusal("start_failed", "the trainer did not start: %s" % tail(root))
    return {"keeper_pid": record["keeper_pid"], "already": not started, "started_wall": record["started_wall"]}, b""


def checked_job(root: str, path: str) -> Json:
    """Return the requested job. Raise Refusal if it is malformed or has no verified upload."""
    job = read(path)
    try:
        numbers = [job[key] for key in ("save_s", *(which + unit for which in STOPS for unit in ("_s", "_wall")))]
        texts = [job["run"], *job["argv"], job["cwd"], *job["env"], *job["env"].values(), *job.get("pass_env", [])]
        good = job["v"] == 1 and job["argv"] and all(isinstance(text, str) for text in texts)
        numbers += [job.get(key, 0) for key in ("linger_s", "idle_s", "silent_s")]
        good = good and all(isinstance(number, (int, float)) and 0 <= number < 1e12 for number in numbers)
        good = good and isinstance(job["guard_folder"] if job.get("linger_s") else "", str)
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise Refusal("bad_job", "the job does not follow docs/FORMATS.md")
    if not read_upload_record(root) or not os.path.isdir(path_in(root, job["cwd"])):
        raise Refusal("not_shipped", "%s has no verified upload" % job["cwd"])
    return dict(job)


def by_this_clock(root: str, job: Json) -> Json:
    """Return the job with its stop times by this machine's clock: the durations from now, or the wall times if earlier.

    The wall times count only if the clock was not set since `hello` reported it, because otherwise they may be hours
    wrong.
    """
    now, was_set = time.time(), clock_was_set(root)
    for which in STOPS:
        by_seconds = now + job[which + "_s"]
        job[which + "_wall"] = by_seconds if was_set else min(by_seconds, job[which + "_wall"])
    return job


def tail(root: str) -> str:
    """Return the end of the keeper's log, at most 500 bytes."""
    path = path_in(root, "agent", "agent.log")
    return read_part(path, max(0, read_part(path, 0, 0)[1] - 500), 500)[0].decode("utf-8", "replace").strip()


def stop(root: str, options: Json) -> Answer:
    """Ask the keeper to end the trainer, by a signal if the disk is full. With `now`, also kill it from here."""
    stop, is_written = (root, "now" in options, options["reason"][:200]), True
    try:
        request_stop(*stop)
    except OSError:
        is_written = False
    asked = bool(read(root, "agent", "job.json")) and ensure_keeper(root, fresh=False) in ("kept", "adopted")
    if not is_written:
        send_signal(keepers(root), signal.SIGTERM)
        if stop[1]:
            kill_all(root)
    return {"asked": asked}, b""


def shorten(root: str, options: Json) -> Answer:
    """Shorten the lease. It is never extended."""
    soft, hard = float(options["soft"]), float(options["hard"])
    if not (0 <= soft < 1e12 and 0 <= hard < 1e12):
        raise Refusal("usage", "a lease needs two times in seconds since the epoch")
    lease = bring_forward(root, soft, hard)
    if read(root, "agent", "job.json"):
        ensure_keeper(root, fresh=False)
    return {key: lease[key] for key in ("soft_stop_wall", "hard_stop_wall")}, b""

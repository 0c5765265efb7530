"""Parses the output of squeue, sinfo, sacct and sbatch. Job names and comments may contain any text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from gpurun.core.machine_token import Token, parse_token
from gpurun.core.records import InstanceState
from gpurun.core.untrusted import safe_line, safe_text

SQUEUE = "%i|%T|%V|%M|%e|%r|%j|%k"
"""The format for squeue: job number (N_0, N_1 in a job array), state, submit, run and end time, reason, name, comment.

The comment comes last because it may contain the separator.
"""
SINFO = "%P|%a|%l|%t|%D|%G"
"""The format for sinfo: partition, whether it is up, time limit, node state, number of nodes, and their GPUs (GRES)."""

SACCT = "State,UID,JobName"
"""The format for sacct: how a job ended (`CANCELLED by UID` if a user cancelled it), its owner's UID, and its name."""

STARTS = re.compile(r"Job \d+ to start at (\d{9,}) ")
"""Matches the output of `sbatch --test-only` for an accepted job, under SLURM_TIME_FORMAT=%s."""
MOST_DIGITS = 10  # If a job can never start, Slurm prints a year after 6000, which takes more digits.

MOST_REASON_CHARS = 300  # Slurm's message about an account lists every account that the partition admits.

_STATES = {
    InstanceState.PENDING: ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
    InstanceState.RUNNING: ("RUNNING", "RESIZING"),
    InstanceState.STOPPING: ("COMPLETING", "SIGNALING", "STAGE_OUT"),
    InstanceState.STOPPED: ("SUSPENDED", "STOPPED"),
    InstanceState.GONE: (
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    ),
}  # fmt: skip
STATES = {word: state for state, words in _STATES.items() for word in words}

# Reasons why Slurm will never start a waiting job, and how its user can fix each. squeue prints either the code of the
# reason or a sentence; newer versions replace the sentence's spaces with underscores.
_ACCOUNT = (
    "Name an account that this partition admits (--account, or account = … in {table} of config.toml), or another "
    "partition. `sacctmgr show assoc user=$USER` lists yours."
)
_QOS = (
    "Name a QOS that this partition admits (--qos, or qos = … in {table} of config.toml), or another partition. "
    "`sacctmgr show assoc user=$USER format=account,qos` lists yours."
)
_TIME = "Ask for less time (--time, --hours, --max-gpu-hours), or name another --partition or --qos."
_SIZE = "Ask for fewer nodes or cards (--gpu), or name another --partition or --qos."
_PARTITION = "Name another partition (--partition, or partition = … in {table} of config.toml); `sinfo -s` lists them."
_GRES_KEY = "Write what the nodes call their GPUs in {table} of config.toml (gres = …); `sinfo -o %G` lists it."
_EXTRA = "Correct an option of `extra` in {table} of config.toml; `sinfo -N -o '%N %f'` lists nodes and their features."
_POLICY = (
    "A limit of your account or QOS: ask for less (--time, --hours, --gpu), or name another one (--account, --qos)."
)
_NOT_ADMITTED = {
    r"AccountNotAllowed|InvalidAccount|.*account.* this partition.*": _ACCOUNT,
    r"QOSNotAllowed|InvalidQOS|.*QOS.* this partition.*": _QOS,
    r"PartitionTimeLimit|QOSMaxWallDurationPerJobLimit|AssocMaxWallDurationPerJobLimit": _TIME,
    r"PartitionNodeLimit|(?:QOS|Assoc)Max(?:GRES|Node|Nodes|Cpu|Memory|Mem)PerJob(?:Limit)?": _SIZE,
}
# What sbatch prints when it refuses a job, and how the user can fix each.
_REFUSED = {
    r"invalid account": _ACCOUNT,
    r"invalid qos": _QOS,
    r"requested time limit": _TIME,
    r"generic resource|gres": _GRES_KEY,
    r"node configuration|node count|memory specification": _SIZE,
    r"accounting/qos policy": _POLICY,
    r"feature|node name": _EXTRA,
    r"partition": _PARTITION,
}
# Other reasons why a waiting job will not start. An admin, or the end of the user's other jobs, may change these.
_HOPELESS = re.compile(
    "|".join(_NOT_ADMITTED) + r"|PartitionConfig|PartitionInactive|BadConstraints|Invalid.*|InactiveLimit"
    r"|QOSMax.*|Assoc(?:Grp|Max).*|JobHeld.*|ReqNodeNotAvail.*|DependencyNeverSatisfied",
    re.IGNORECASE,
)
_FRAME = re.compile(r"^(?:sbatch: error: |Batch job submission failed: |allocation failure: )+")
_NUMBER = re.compile(r"([0-9]{1,10})(?:_([0-9]{1,6}))?")
_SPAN = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_GRES = re.compile(r"(gpu(?::[\w.-]+)?):(\d+)")
_OVER_TIME = re.compile(r"^OverTimeLimit\s*=\s*(\d+|UNLIMITED)", re.MULTILINE)
_TRACKER = re.compile(r"^ProctrackType\s*=\s*(\S+)", re.MULTILINE)
_UNAVAILABLE = ("down", "drain", "fail", "unk", "power", "maint", "reboot", "inval")


@dataclass(frozen=True)
class SlurmJob:
    """One of the user's jobs that gpurun submitted, recognised by the token in its name.

    `used_s` is how long it has run; None if not known. `array_index` is its index if it belongs to a job array, else
    None. The job with index 0 leads the array: the run's agent runs in it. `reason` is its state, with Slurm's reason
    if it waits.
    """

    number: int
    array_index: int | None
    token: Token
    state: InstanceState
    reason: str
    run: str
    deadline_wall: float | None
    gpu_count: int
    submitted_wall: float | None
    used_s: float | None
    ended_wall: float | None


@dataclass(frozen=True)
class Partition:
    """A partition: its time limit and its usable nodes.

    `nodes` are pairs: the GPUs on one node, and how many nodes have that number. `idle` is how many nodes run no job.
    `over_s` is how long Slurm lets a job run past its time limit before it starts to kill the job. `tracker` is the
    plugin that finds the processes of a job.
    """

    name: str
    longest_s: float
    nodes: tuple[tuple[int, int], ...]
    over_s: float = 0.0
    tracker: str = ""
    idle: int = 0
    is_up: bool = True
    is_default: bool = False

    @property
    def most_gpus(self) -> int:
        """Return the largest number of GPUs on one node."""
        return max((gpus for gpus, _ in self.nodes), default=0)

    def nodes_with(self, gpus: int) -> int:
        """Return how many nodes have at least this many GPUs."""
        return sum(count for there, count in self.nodes if there >= gpus)


def jobs_in(squeue: str) -> list[SlurmJob]:
    """Return gpurun's jobs in the output of squeue in the SQUEUE format. Other lines are ignored.

    A job array is returned as one job, with the state of its leading job. It is GONE once all of its jobs are gone. If
    only the leading job is gone, the array is STOPPED.
    """
    found: dict[int, list[SlurmJob]] = {}
    for line in squeue.splitlines():
        if (job := _parse_job(line)) is not None:
            found.setdefault(job.number, []).append(job)
    return [_merge_array(jobs) for jobs in found.values()]


def _merge_array(jobs: list[SlurmJob]) -> SlurmJob:
    """Return the jobs of one array as a single job. Its `used_s` is the longest of theirs."""
    lead = next((job for job in jobs if not job.array_index), None)
    whole = lead or jobs[0]
    used_s = max((job.used_s for job in jobs if job.used_s is not None), default=None)
    ended = [job.ended_wall for job in jobs if job.ended_wall is not None]
    whole = replace(whole, used_s=used_s, ended_wall=max(ended, default=None))
    living = [job.state for job in jobs if job.state is not InstanceState.GONE]
    if living and (lead is None or lead.state is InstanceState.GONE):
        state = InstanceState.UNKNOWN if InstanceState.UNKNOWN in living else InstanceState.STOPPED
        return replace(whole, state=state, reason=lead.reason if lead else "over", ended_wall=None)
    return whole


def cure_of(reason: str) -> str:
    """Return how to fix a job that Slurm will never start for this reason; "" for any other reason.

    The text has `{table}` where the name of the cluster's table in config.toml belongs.
    """
    reason = reason.removeprefix("PENDING: ")
    return next((cure for form, cure in _NOT_ADMITTED.items() if re.fullmatch(form, reason, re.IGNORECASE)), "")


def sbatch_refusal(stderr: str) -> tuple[str, str]:
    """Return why sbatch refused a job, and how to fix it as in `cure_of`; "" if the message is not recognised.

    If a limit is exceeded, sbatch prints two lines: the code of the limit, and a sentence that is the same for all.
    """
    lines = [_FRAME.sub("", line) for line in safe_text(stderr, most_lines=100) if line.strip()]
    for code in lines:
        if cure := cure_of(code):
            return (lines[-1] if code == lines[-1] else f"{lines[-1]}: {code}"), cure
    words = lines[-1] if lines else ""
    return words, next((cure for form, cure in _REFUSED.items() if re.search(form, words, re.IGNORECASE)), "")


def comment_of(run: str, deadline_wall: float, gpu_count: int) -> str:
    """Return the comment of a job: its run, its deadline and its number of GPUs. The job's name has the token."""
    return f"{run} {int(deadline_wall)} {gpu_count}"


def is_cancelled_by_user(sacct: str, token: str) -> bool | None:
    """Return whether the job's owner cancelled it, from the output of sacct in the SACCT format; None before its end.

    Slurm reuses job numbers, so a record whose name differs from `token` belongs to another job and is ignored.
    """
    for line in sacct.splitlines():
        state, uid, name = (*line.strip().split("|", 2), "", "")[:3]
        word = state.partition(" ")[0]
        if name and token in ("", name) and STATES.get(word) is InstanceState.GONE:
            return state == f"CANCELLED by {uid}"
    return None


def _parse_job(line: str) -> SlurmJob | None:
    fields = line.strip().split("|", 7)
    number = _NUMBER.fullmatch(fields[0])
    if len(fields) < 8 or number is None:
        return None
    _, word, submitted, used, ends, reason, name, comment = fields
    token = parse_token(name)
    if token is None:
        return None
    run, deadline, gpus = (*comment.split(" "), "", "", "")[:3]
    state = STATES.get(word, InstanceState.UNKNOWN)
    reason = reason.replace("_", " ")
    is_hopeless = state is InstanceState.PENDING and _HOPELESS.fullmatch(reason)
    is_waiting = state is InstanceState.PENDING and reason not in ("", "None")
    used_s = parse_slurm_time(used) if _SPAN.fullmatch(used) else None
    if state is InstanceState.RUNNING and used_s is None:
        state = InstanceState.UNKNOWN  # Without the start of a lease, its end is not known either.
    return SlurmJob(
        number=int(number[1]),
        array_index=int(number[2]) if number[2] else None,
        token=token,
        state=InstanceState.STOPPED if is_hopeless else state,
        reason=safe_line(f"{word}: {reason}" if is_waiting else word)[:MOST_REASON_CHARS],
        run=token.run_or(run),
        deadline_wall=token.deadline_or(deadline),
        gpu_count=int(gpus) if re.fullmatch(r"[0-9]{1,4}", gpus) else 0,
        submitted_wall=_parse_wall(submitted),
        used_s=used_s if state is not InstanceState.GONE or word != "FAILED" else None,
        ended_wall=_parse_wall(ends) if state is InstanceState.GONE else None,
    )


def _parse_wall(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{9,11}", text) else None


def parse_slurm_time(text: str) -> float:
    """Return the seconds of `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`; infinity for `infinite`, and 0 for anything else."""
    if text == "infinite":
        return inf
    found = _SPAN.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def partition_in(sinfo: str, name: str, gres: str) -> Partition | None:
    """Return the named partition, or the default if `name` is empty, from the output of sinfo; None if it is not up."""
    found = partitions_in(sinfo, gres)
    return next((part for part in found if part.is_up and (part.name == name if name else part.is_default)), None)


def partitions_in(sinfo: str, gres: str) -> list[Partition]:
    """Return every partition in the output of sinfo in the SINFO format, in the same order.

    The output of `scontrol show config` may follow; OverTimeLimit and ProctrackType are read from it. Nodes that are
    down or drained do not count. `gres` is the name under which the nodes offer their GPUs.
    """
    over = _OVER_TIME.search(sinfo)
    over_s = inf if over and over[1] == "UNLIMITED" else 60.0 * int(over[1]) if over else 0.0
    tracker = found[1] if (found := _TRACKER.search(sinfo)) else ""
    rows = [fields for line in sinfo.splitlines() if len(fields := line.split("|", 5)) == 6 and fields[4].isdigit()]
    parts = list[Partition]()
    for marked in dict.fromkeys(row[0] for row in rows):
        ours = [row for row in rows if row[0] == marked]
        parts.append(
            Partition(
                name=marked.rstrip("*"),
                longest_s=max(parse_slurm_time(row[2]) for row in ours),
                nodes=tuple(
                    (_count_gpus(row[5], gres), int(row[4])) for row in ours if not row[3].startswith(_UNAVAILABLE)
                ),
                over_s=over_s,
                tracker=tracker,
                idle=sum(int(row[4]) for row in ours if row[3].startswith("idle")),
                is_up=all(row[1] == "up" for row in ours),
                is_default=marked.endswith("*"),
            )
        )
    return parts


def _count_gpus(listed: str, gres: str) -> int:
    found: Iterable[tuple[str, str]] = _GRES.findall(listed)
    return sum(int(count) for kind, count in found if gres in (kind, kind.partition(":")[0]))

"""Implements the six verbs with sbatch, squeue, scancel and sinfo on a login node. A job's name is its token.

Two jobs with the same name never run at the same time (`--dependency=singleton`), so a job cannot be paid for twice if
the answer of an sbatch was lost. `--time` ends a job if its supervisor is lost; `--deadline` removes a job that did not
start in time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path, PurePosixPath
from typing import TypeVar

from gpurun.core.clock import Clock, local_minute, ticks
from gpurun.core.cluster import Cluster, LoginNode, LoginNodeResult, NoAnswer
from gpurun.core.crashpoint import crashpoint
from gpurun.core.errors import GpurunError, NoOffer, SetupError
from gpurun.core.machine_token import parse_token
from gpurun.core.money import Micros, times
from gpurun.core.records import Account, Address, GpuNeed, Instance, InstanceState, Leftover, Offer, Order, Teardown
from gpurun.core.run_plan import Choices, Lease
from gpurun.core.untrusted import last_words, safe_line, safe_text
from gpurun.providers.base import EndsBy, NoCapacity, Rejected, Traits, Unknown
from gpurun.providers.errors import RejectedFor
from gpurun.providers.slurm.jobs import (
    MOST_DIGITS,
    SACCT,
    SINFO,
    SQUEUE,
    STARTS,
    Partition,
    SlurmJob,
    comment_of,
    cure_of,
    is_cancelled_by_user,
    jobs_in,
    partition_in,
    partitions_in,
    sbatch_refusal,
)
from gpurun.providers.slurm.lease import lease_of_job

PILOT = Path(__file__).with_name("pilot.sh")
DIES_BY_ITSELF = "yes · Slurm's time limit"
NO_FOLDER = 97
BASH = "/bin/bash"
SBATCH_S = 60
"""How long sbatch may retry if it does not reach the controller. It is killed then, so it submits nothing later."""
BOOT_S = 120
PULL_S = 900
"""The time to pull an image of several gigabytes and to convert it into one file."""
JOIN_S = 60
"""The time until all nodes have answered and the connection between them has been measured."""
BOOKED_S = 15
"""How long to wait until the cluster's accounting shows the end of a job."""
IDLE_S = 900
"""A job that trains nothing ends after this long without a call from gpurun."""

_QUEUE = ["env", "SLURM_TIME_FORMAT=%s", "squeue", "-h", "-r", "--me", "-t", "all", "-o", SQUEUE]
_SUBMIT = (
    'umask 077; mkdir -p -- "$1" && cd -- "$1" && { mkdir -- "$2" 2>/dev/null || [ -d "$2" ]; } '
    f'&& {{ [ ! -x {BASH} ] || echo "#!{BASH} -l"; cat; }} >"$2/pilot.sh" || exit {NO_FOLDER}; '
    f'shift 2; exec timeout {SBATCH_S} sbatch "$@"'
)
# Arguments: $1 workdir, $2 Python, $3 set-up, then modules. Prints the exit codes of set-up and Python, whether the
# Python is on the workdir's disk, and the output. The trap is needed because a set-up may call `exit`.
_LOOK_THERE = r"""
cd / || exit
first() { there=$1; until [ -e "$there" ]; do there=$(dirname -- "$there"); done; }
first "$1"
[ -d "$there" ] && [ -w "$there" ] || { echo "look: shut - -"; exit; }
log=$(mktemp) || exit
trap 'echo "look: $? - -"; tail -c 2000 "$log"; rm -f "$log"; exit 0' EXIT
eval "$3" >"$log" 2>&1 </dev/null || exit
trap 'rm -f "$log"' EXIT
disk() { first "$1"; stat -Lc %d -- "$there"; }
shared=other
case $2 in /*) [ -L "$2" ] && ! [ -e "$2" ] || [ "$(disk "$2")" != "$(disk "$1")" ] || shared=shared;; esac
python=$2
shift 3
"$python" -c 'import sys
if sys.version_info < (3, 8): sys.exit(3)
from importlib.util import find_spec
lacks = [name for name in sys.argv[1:] if find_spec(name) is None]
print("\n".join(lacks))
sys.exit(bool(lacks))' "$@" >"$log" 2>/dev/null
echo "look: 0 $? $shared"; cat "$log"
"""
# Arguments: $1 workdir, $2 image, $3 set-up, then modules. Prints what was found, whether the image is on the workdir's
# disk, and the output.
_LOOK_INTO_IMAGE = r"""
cd / || exit
first() { there=$1; until [ -e "$there" ]; do there=$(dirname -- "$there"); done; }
disk() { first "$1"; stat -Lc %d -- "$there"; }
log=$(mktemp) || exit
trap 'rm -f "$log"' EXIT
eval "$3" >"$log" 2>&1 </dev/null || exit
shared=other
case $2 in /*) [ "$(disk "$2")" != "$(disk "$1")" ] || shared=shared;; esac
case $2 in /*) [ -e "$2" ] || { echo "look: missing - $shared"; exit; };; esac
engine=$(command -v apptainer || command -v singularity) || { echo "look: no-engine - $shared"; exit; }
case $2 in *://*) echo "look: pulled - $shared"; exit;; esac
image=$2
shift 3
"$engine" --silent exec "$image" sh -c 'for exe in python3 python; do command -v "$exe" >/dev/null && exec "$exe" "$@"
done; exit 4' sh -c 'import sys
from importlib.util import find_spec
lacks = [name for name in sys.argv[1:] if find_spec(name) is None]
print("\n".join(lacks))
sys.exit(3 if lacks else 0)' "$@" >"$log" 2>&1
echo "look: ended $? $shared"; cat "$log"
"""
_LOOK = f'shell="sh -c"; [ ! -x {BASH} ] || shell="{BASH} -lc"; exec timeout -k 5 60 $shell "$LOOK" "$0" "$@"'
_LOOK_RESULT = re.compile(r"^look: (\S+) (\S+) (\S+)\n(.*)", re.MULTILINE | re.DOTALL)
# Prints the job's place among all waiting jobs of its partition, in the scheduler's order, and then their number.
_QUEUE_PLACE = (
    'export SLURM_TIME_FORMAT=%s; p=$(squeue -h -r -j "$1" -o %P | head -n 1) && [ -n "$p" ] && '
    "squeue -h -r -t PENDING -p \"$p\" --sort=-p,i -o '%i|%S|%P' | "
    'awk -F\'|\' -v job="$1" \'$1 == job { print NR "|" $2 "|" $3 } END { print NR }\''
)
_ACCOUNTING = f'command -v sacct >/dev/null || exit 1; exec sacct -X -n -P -o {SACCT} -j "$1"'
_READ_SETUP_FAILURE = 'cd -- "$1" 2>/dev/null && cat setup.failed 2>/dev/null || exit 0; tail -c 2000 setup-table.log'
_READ_SETUP_LOG = f'tail -c {1 << 20} -- "$1/setup-table.log" 2>/dev/null || :'
_FINISHED = "out/MANIFEST.json"
_LEADER_SUFFIX = "_0"
_LIST_FOLDERS = f'cd -- "$1" 2>/dev/null || exit 0; ls -A; ls -d -- */{_FINISHED} 2>/dev/null || :'
_CHECK_WORKDIR = 'id -un; [ ! -e "$1" ] || [ -w "$1" ] || echo shut'
# Argument: $1 the run's folder. If the job's command has succeeded, asks the pilot once to exit, so that Slurm lists
# the job as completed. Exits with 0 if the pilot agrees.
_LET_PILOT_EXIT = r"""
cd -- "$1/calls" 2>/dev/null && [ ! -e leave.run ] && grep -q '"exit_code": 0[,}]' ../agent/exit.json 2>/dev/null &&
    mkdir leave.go || exit 1
left=50
until ls | grep -qxF leave.run; do
    left=$((left - 1))
    [ "$left" -gt 0 ] || exit 1
    sleep 0.1
done
"""
_CONNECTION_LOST = re.compile(
    "contact|timed out|timeout|bytes were|connection|communicat|socket|slurm_receive", re.IGNORECASE
)

_IMAGE_HINT = (
    "Make apptainer available (`module load apptainer` in `setup`). If the nodes have no internet access, fetch it on"
    " the login node (apptainer pull FILE.sif docker://…), and name that file."
)

T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """A cluster and the connection to its login node."""

    cluster: Cluster
    login: LoginNode


@dataclass(frozen=True)
class ExpectedStart:
    """Slurm's own estimate of when a job would start. If there is none, `wall` is None and `words` may explain why."""

    wall: float | None
    words: str = ""


class SlurmProvider:
    """The `slurm` provider: jobs on the given clusters. New jobs go to the first cluster."""

    name = "slurm"
    traits = Traits(
        settle_s=SBATCH_S + 30.0,
        poll_s=5.0,
        death_reads=3,
        death_spread_s=10.0,
        teardown=Teardown.RELEASED,
        console_url="",
        ends_by=EndsBy.PROVIDER,
    )

    def __init__(
        self, sites: Sequence[Site], clock: Clock, traits: Traits | None = None, *, faults: Sequence[str] = ()
    ) -> None:
        """`faults` are the errors in the tables of other clusters. Those clusters cannot be queried."""
        self._sites: Mapping[str, Site] = {site.cluster.name: site for site in sites}
        self._first = next(iter(self._sites.values()))
        self._clock, self._faults = clock, tuple(faults)
        self.traits = traits or self.traits

    def verify(self) -> Account:
        """Return the user's name on each cluster. Check that each controller answers and each workdir is writable."""
        found, missing = list[str](), list[str]()
        for site in self._sites.values():
            name, workdir = site.cluster.name, site.cluster.workdir
            lines = self._read_output(site, ["sh", "-c", _CHECK_WORKDIR, "gpurun", workdir]).splitlines()
            found.append(f"{lines[0]} on {name} ({self._read_cluster_name(site)})")
            if lines[1:2] == ["shut"]:
                missing.append(f"write to {workdir} on {name}")
        return Account(provider=self.name, identity=", ".join(found), missing=tuple(missing))

    def account_mark(self) -> str:
        """Return the Slurm name of the cluster for new jobs: its table in config.toml may later name another one."""
        return f"cluster:{self._read_cluster_name(self._first)}"

    def _read_cluster_name(self, site: Site) -> str:
        """Return the name that the cluster has in Slurm, which is the same on each of its login nodes."""
        found = re.search(
            r"^ClusterName\s*=\s*(\S+)", self._read_output(site, ["scontrol", "show", "config"]), re.MULTILINE
        )
        return found[1] if found else site.cluster.host

    def partition(self) -> Partition:
        """Return the partition for new jobs; NoCapacity if it does not exist or is not up."""
        cluster = self._first.cluster
        found = partition_in(self._run_sinfo(), cluster.partition, cluster.gres)
        if found is None:
            which = f"partition {cluster.partition!r}" if cluster.partition else "default partition"
            raise NoCapacity(f"{cluster.name} has no {which} that is up")
        return found

    def partitions(self) -> list[Partition]:
        """Return every partition of the cluster that gets new jobs."""
        return partitions_in(self._run_sinfo(), self._first.cluster.gres)

    def _run_sinfo(self) -> str:
        return self._read_output(self._first, ["sh", "-c", f"sinfo -h -o '{SINFO}' && scontrol show config"])

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return one offer at the cluster's price, or none if the partition has too few nodes with enough GPUs.

        Slurm does not report the card's memory, so the offer has the smallest card of the `known` rows that fit.
        """
        cluster = self._first.cluster
        try:
            part = self.partition()
        except NoCapacity:
            return []
        if need.nodes > part.nodes_with(need.count):
            return []
        fitting = [row for row in known if need.memory_gb in (None, row.vram_gb)]
        card = min(fitting, key=lambda row: row.vram_gb, default=None)
        return [
            Offer(
                provider=self.name,
                type_id=part.name,
                gpu=(card.gpu if card else need.name) if need.count else "cpu",
                gpu_count=need.jobs * need.nodes * need.count,
                vram_gb=(card.vram_gb if card else need.memory_gb or 0) if need.count else 0,
                region=cluster.name,
                rate_micros_per_hour=times(cluster.price_per_gpu_hour, need.processes),
                billing_unit_s=1,
                boot_s=BOOT_S + (JOIN_S if need.nodes > 1 else 0) + (PULL_S if cluster.is_pulled else 0),
                price_source="config.toml" if cluster.price_per_gpu_hour else "not metered",
                dies_by_itself=DIES_BY_ITSELF,
                nodes=need.nodes,
                jobs=need.jobs,
            )
        ]

    def lease_within(self, lease: Lease, offer: Offer, choices: Choices, cap: Micros | None) -> Lease:
        """Return the lease, cut down to its caps and the partition's time limit; NoOffer if no time is left."""
        try:
            return lease_of_job(lease, offer, self.partition(), choices, cap)
        except NoCapacity as error:
            raise NoOffer("slurm.no_partition", f"{error}.", hint="`sinfo -s` on the login node shows them.") from error

    def create(self, order: Order) -> Instance:
        """Submit the job and return it.

        Rejected if Slurm refuses the job, Unknown if the answer of sbatch was lost.
        """
        site, part = self._first, self.partition()
        minutes = order.lease_s // 60
        if minutes < 1:
            raise Rejected(f"Slurm counts in whole minutes, and {order.lease_s} s is less than a minute")
        if minutes * 60 > part.longest_s:
            limit = f"{part.longest_s / 60:,.0f} min"
            raise Rejected(
                f"partition {part.name} limits a job to {limit}, but this one needs {minutes:,} min", of_offer=True
            )
        folder = _format_folder_path(site, order.token)
        options = self._list_options(order, minutes, folder)
        argv = ["sh", "-c", _SUBMIT, "gpurun", site.cluster.workdir, order.token, *options]
        crashpoint("before slurm.create")
        reply = self._run(
            site,
            [
                *(*argv, f"{folder}/pilot.sh", folder, str(10 * IDLE_S), site.cluster.setup, site.cluster.container),
                str(60 * minutes),
            ],
            PILOT.read_bytes(),
        )
        crashpoint("after slurm.create")
        number = reply.stdout.strip().partition(";")[0]
        if reply.exit_code == 0 and number.isdigit():
            return self.read(f"{site.cluster.name}/{number}{_LEADER_SUFFIX if order.offer.jobs > 1 else ''}")
        words = last_words(reply.stderr.encode()) or f"sbatch ended with {reply.exit_code}"
        if reply.exit_code == NO_FOLDER:
            raise RejectedFor(_no_folder_error(site.cluster, words))
        if "job submission failed" in words.lower() and not _CONNECTION_LOST.search(words):
            self._remove_folder(site, order.token)
            refusal, cure = sbatch_refusal(reply.stderr)
            if not cure:
                raise Rejected(words, of_offer=True)
            hint = cure.format(table=f"[slurm.{site.cluster.name}]")
            error = NoOffer("slurm.refused", f"Slurm on {site.cluster.name} refused the job: {refusal}.", hint=hint)
            raise RejectedFor(error, of_offer=True)
        raise Unknown(words)

    def _list_options(self, order: Order, minutes: int, folder: str) -> list[str]:
        """Return the options of sbatch for an order."""
        waits_s = max(60, ceil(order.deadline_wall - self._clock.wall()))
        return [
            *self._list_requirements(order.offer, minutes),
            "--parsable",
            *([f"--array=0-{order.offer.jobs - 1}"] if order.offer.jobs > 1 else []),
            f"--job-name={order.token}",
            f"--comment={comment_of(order.run, order.deadline_wall, order.offer.gpu_count)}",
            f"--deadline=now+{waits_s}seconds",
            "--dependency=singleton",
            "--no-requeue",
            "--export=NONE",
            f"--chdir={folder}",
            f"--output={folder}/job.log",
        ]

    def _list_requirements(self, offer: Offer, minutes: int) -> list[str]:
        """Return the options that request nodes, GPUs and time.

        The user's own options come first, because sbatch obeys the last of two equal options.
        """
        cluster, gpus = self._first.cluster, offer.gpus_per_node
        named = {"partition": cluster.partition, "account": cluster.account, "qos": cluster.qos}
        return [
            *cluster.extra,
            *(f"--{key}={value}" for key, value in named.items() if value),
            *([f"--gres={cluster.gres}:{gpus}"] if gpus else []),
            f"--nodes={offer.nodes}",
            "--ntasks-per-node=1",
            f"--time={minutes}",
        ]

    def start_of(self, offer: Offer, lease_s: int) -> ExpectedStart:
        """Return when Slurm would start such a job with its present queue, without submitting one.

        Raises a NoOffer that says what to change if Slurm would refuse the job.
        """
        site = self._first
        requirements = self._list_requirements(offer, max(1, lease_s // 60))
        reply = self._run(site, ["env", "SLURM_TIME_FORMAT=%s", "sbatch", "--test-only", *requirements], b"#!/bin/sh\n")
        if found := STARTS.search(reply.stderr):
            is_some_day = len(found[1]) <= MOST_DIGITS
            never = ExpectedStart(None, "with its present queue, never")
            return ExpectedStart(float(found[1])) if is_some_day else never
        words, cure = sbatch_refusal(reply.stderr)
        if reply.exit_code and cure:
            what = f"Slurm on {site.cluster.name} would refuse the job: {words}."
            raise NoOffer("slurm.refused", what, hint=cure.format(table=f"[slurm.{site.cluster.name}]"))
        return ExpectedStart(None, words)

    def look_at_login(self, modules: Sequence[str]) -> list[str]:
        """Try the job's set-up and Python on the login node. Return warnings, because the compute nodes may differ.

        SetupError if the Python does not work or lacks a module, and it is on the disk that all nodes share.
        """
        cluster = self._first.cluster
        about = [cluster.workdir, cluster.python, cluster.setup or ":", *modules]
        reply = self._run(self._first, ["env", f"LOOK={_LOOK_THERE}", "sh", "-c", _LOOK, "gpurun", *about])
        found = _LOOK_RESULT.search(reply.stdout)
        setup, python, disk, words = found.groups() if found else ("", "", "", "")
        if setup == "shut":
            raise _no_folder_error(cluster)
        lines = [line for line in safe_text(words, most_lines=2000) if line.strip()]
        where = f"on the login node of {cluster.name}"
        if not python.isdigit():
            ended = f"ended with {setup}" if setup else "did not end within a minute"
            last = f", with the message: {lines[-1]}" if lines else ""
            return [f"the `setup` {ended} {where}{last}. The job will fail if the compute nodes behave the same."]
        if python == "0":
            return []
        lack = {"3": "is older than 3.8", "1": f"has no {', '.join(lines)}"}.get(python, "does not run")
        if disk == "shared":
            hint = f"In [slurm.{cluster.name}] of config.toml, name a Python that has torch (python = …)."
            what = f"{cluster.python} {lack}, {where}, which shares that disk with the nodes."
            raise SetupError("slurm.python", what, hint=hint)
        return [f"{cluster.python} {lack}, {where}; it may still work on the compute nodes."]

    def look_into_image(self, modules: Sequence[str], *, needs_python: bool) -> list[str]:
        """Try the job's image on the login node. Return warnings, because the compute nodes may differ.

        SetupError if the image is missing on the disk that all nodes share, or has no Python with these modules.
        """
        cluster = self._first.cluster
        about = [cluster.workdir, cluster.container, cluster.setup or ":", *modules]
        reply = self._run(self._first, ["env", f"LOOK={_LOOK_INTO_IMAGE}", "sh", "-c", _LOOK, "gpurun", *about])
        found = _LOOK_RESULT.search(reply.stdout)
        what, code, disk, words = found.groups() if found else ("", "", "", "")
        where = f"on the login node of {cluster.name}"
        hint = f"Correct `container` in [slurm.{cluster.name}] of config.toml, or --image."
        if what == "missing" and disk == "shared":
            raise SetupError("slurm.image", f"There is no {cluster.container} {where}.", hint=hint)
        lines = [line for line in safe_text(words, most_lines=2000) if line.strip()]
        if what == "ended" and code == "3":
            raise SetupError("slurm.image", f"{cluster.container} has no {', '.join(lines)}.", hint=hint)
        if what == "ended" and code == "4":
            no_python = f"{cluster.container} has neither python3 nor python"
            if needs_python:
                raise SetupError("slurm.image", f"{no_python}.", hint=hint)
            return [f"{no_python}: a command that needs Python will fail."]
        if what == "missing":
            return [f"there is no {cluster.container} {where}; the compute nodes may still have it."]
        if what == "no-engine":
            return [
                f"there is no apptainer or singularity {where}; the job will fail if the compute nodes have neither."
            ]
        if what == "ended" and code == "0":
            return []
        if what == "pulled":
            return [f"the job pulls {cluster.container} during its lease; the compute nodes must be able to reach it."]
        last = f": {lines[-1]}" if lines else ""
        return [f"{cluster.container} could not be tested {where}{last}."]

    def find(self, token: str | None) -> list[Instance]:
        """Return the user's jobs that carry the token (None: all of gpurun's), in every cluster, oldest first."""
        named = [f"--name={token}"] if token else []

        def jobs(site: Site) -> list[Instance]:
            listed = jobs_in(self._read_output(site, [*_QUEUE, *named]))
            return [self._build_instance(site, job) for job in listed if token in (None, job.token.text)]

        found, silent = self._query_all(jobs)
        found.sort(key=lambda instance: (instance.created_wall or 0.0, instance.id))
        if silent or self._faults:
            words = "; ".join([*silent.values(), *self._faults])
            raise Unknown(words, tuple(found), regions=frozenset(silent) | ({""} if self._faults else set()))
        return found

    def _query_all(self, query: Callable[[Site], list[T]]) -> tuple[list[T], dict[str, str]]:
        """Query every cluster. Return all results, and the error of each cluster that did not answer, by its name."""
        found, silent = list[T](), dict[str, str]()
        for site in self._sites.values():
            try:
                found += query(site)
            except Unknown as error:
                silent[site.cluster.name] = str(error)
            except GpurunError as error:  # For example a changed host key, which does not affect the other clusters.
                if len(self._sites) == 1 and not self._faults:
                    raise
                silent[site.cluster.name] = error.what
        return found, silent

    def read(self, instance_id: str) -> Instance:
        """Return one job as squeue shows it; GONE if the controller does not list it as a job of gpurun's."""
        site, number = self._locate(instance_id)
        crashpoint("before slurm.read")
        job_id = number.removesuffix(_LEADER_SUFFIX)
        reply = self._run(site, [*_QUEUE, "-j", job_id])
        if reply.exit_code and "invalid job id" not in reply.stderr.lower():
            raise Unknown(_describe_failure("squeue", reply))
        job = next((job for job in jobs_in(reply.stdout) if str(job.number) == job_id), None)
        if job is None:
            return Instance(id=instance_id, provider=self.name, token="", run="", state=InstanceState.GONE)
        return self._build_instance(site, job)

    def destroy(self, instance_id: str) -> None:
        """Request the end of the job. scancel gets number and name, in case Slurm reused the number for another job.

        If the job's command has succeeded, the first request asks the pilot to exit. Any later request cancels the job.
        """
        known = self.read(instance_id)
        site, number = self._locate(instance_id)
        if known.state is InstanceState.GONE:
            return
        crashpoint("before slurm.destroy")
        is_up = known.state is InstanceState.RUNNING and parse_token(known.token) is not None
        if (
            is_up
            and self._run(
                site, ["sh", "-c", _LET_PILOT_EXIT, "gpurun", _format_folder_path(site, known.token)]
            ).exit_code
            == 0
        ):
            return
        reply = self._run(site, ["scancel", "--me", f"--name={known.token}", number.removesuffix(_LEADER_SUFFIX)])
        crashpoint("after slurm.destroy")
        if reply.exit_code and "invalid job id" not in reply.stderr.lower():  # The job has just ended.
            raise Unknown(_describe_failure("scancel", reply))

    def leftovers(self, token: str | None) -> list[Leftover]:
        """Return the run folders in the shared workdir of every cluster."""

        def folders(site: Site) -> list[Leftover]:
            names = self._read_output(site, ["sh", "-c", _LIST_FOLDERS, "gpurun", site.cluster.workdir]).splitlines()
            return [
                Leftover(
                    provider=self.name,
                    kind="folder",
                    id=f"{site.cluster.name}:{_format_folder_path(site, named.text)}",
                    run=named.run,
                    token=named.text,
                    holds=f"{named.text}/{_FINISHED}" in names,
                    region=site.cluster.name,
                    deadline_wall=named.deadline_wall,
                )
                for named in filter(None, map(parse_token, names))
                if token in (None, named.text)
            ]

        found, silent = self._query_all(folders)
        if silent:
            raise Unknown("; ".join(silent.values()), left=tuple(found), regions=frozenset(silent))
        return found

    def remove(self, leftover: Leftover) -> None:
        """Remove a run's folder from the shared workdir."""
        site = self._sites.get(leftover.region)
        if site is None or parse_token(leftover.token) is None:
            raise Rejected(f"{leftover.id!r} is not a folder of gpurun's")
        self._remove_folder(site, leftover.token)

    def _remove_folder(self, site: Site, token: str) -> None:
        self._read_output(site, ["rm", "-rf", "--", _format_folder_path(site, token)])

    def _locate(self, instance_id: str) -> tuple[Site, str]:
        """Split the id `CLUSTER/NUMBER`. Return the cluster and the job number, which is `N_0` for a job array.

        Rejected if the id is malformed, Unknown if config.toml no longer describes the cluster.
        """
        name, _, number = instance_id.partition("/")
        if not re.fullmatch(rf"[0-9]{{1,10}}({_LEADER_SUFFIX})?", number):
            raise Rejected(f"{instance_id!r} is not a job of gpurun's")
        if name not in self._sites:
            raise Unknown(f"config.toml describes no cluster {name!r}")
        return self._sites[name], number

    def _build_instance(self, site: Site, job: SlurmJob) -> Instance:
        cluster, is_up = site.cluster, job.state is InstanceState.RUNNING
        folder = _format_folder_path(site, job.token.text)
        where = Address(kind="folder" if cluster.is_here else "ssh", folder=folder)
        if not cluster.is_here:
            where = where.model_copy(update={"host": cluster.host, "port": cluster.port, "user": cluster.user})
        return Instance(
            id=f"{cluster.name}/{job.number}{_LEADER_SUFFIX if job.array_index is not None else ''}",
            provider=self.name,
            token=job.token.text,
            run=job.run,
            state=job.state,
            address=where,
            gpu_count=job.gpu_count,
            created_wall=job.submitted_wall,
            deadline_wall=job.deadline_wall,
            region=cluster.name,
            said=job.reason,
            ended_wall=job.ended_wall,
            started_wall=self._clock.wall() - job.used_s if is_up and job.used_s is not None else None,
            ran_s=job.used_s if job.state is InstanceState.GONE else None,
        )

    def queue_words(self, instance: Instance) -> str:
        """Return why a job waits, its place in the queue and its expected start, as Slurm reports them now."""
        site, number = self._locate(instance.id)
        words = [instance.said.removeprefix("PENDING: ")]
        own, _, waiting = self._read_output(site, ["sh", "-c", _QUEUE_PLACE, "gpurun", number]).strip().partition("\n")
        place, start, partition = (*own.split("|"), "", "", "")[:3]
        if place.isdigit() and waiting.isdigit():
            words.append(f"place {place} of {waiting} in {safe_line(partition)}")
        if start.isdigit():
            words.append(f"start expected {local_minute(float(start), now=self._clock.wall())}")
        return " · ".join(words)

    def never_runs(self, instance: Instance) -> GpurunError | None:
        """Return the error of a job that Slurm will never start, was cancelled, or whose set-up failed; else None."""
        site, _ = self._locate(instance.id)
        cluster = site.cluster
        if instance.state is InstanceState.STOPPED:
            if not (cure := cure_of(instance.said)):
                return None
            what = f"Slurm on {cluster.name} will not start the job: {instance.said.removeprefix('PENDING: ')}."
            return NoOffer("slurm.not_admitted", what, hint=cure.format(table=f"[slurm.{cluster.name}]"))
        if instance.state is not InstanceState.GONE:
            return None
        if instance.said == "DEADLINE":
            what = f"The job did not start on {cluster.name} within the time allowed for the queue."
            return NoOffer("slurm.queue_over", what, hint="Let it wait longer: --queue 3d.")
        if self.was_ended_by_user(instance):
            what = f"The job was cancelled on {cluster.name} by its own user, so the run ends."
            return NoOffer("slurm.cancelled", what, hint="To try again, start a new run.")
        folder = _format_folder_path(site, instance.token) if parse_token(instance.token) else ""
        if not folder:
            return None
        ended, _, words = self._read_output(site, ["sh", "-c", _READ_SETUP_FAILURE, "gpurun", folder]).partition("\n")
        code, _, part = ended.partition(" ")
        if not code:
            return None
        lines = [line for line in safe_text(words, most_lines=2000) if line.strip()]
        output = " Its last output:\n" + "\n".join(lines) if lines else " It printed nothing."
        if part:
            what = f"The node could not start the image (exit code {safe_line(code)}).{output}"
            return SetupError("image.failed", what, hint=_IMAGE_HINT)
        what = f"The `setup` of {cluster.name} ended with {safe_line(code)} on the node: {cluster.setup}.{output}"
        hint = f"Correct `setup` in [slurm.{cluster.name}] of config.toml; it runs in a login shell of bash."
        return SetupError("setup.failed", what, hint=hint)

    def was_ended_by_user(self, instance: Instance) -> bool:
        """Return whether the job's owner cancelled it, by the cluster's accounting; False if that is not known.

        Waits up to `BOOKED_S` for the record. A cluster may keep no accounting, or hide it from its users.
        """
        for _ in ticks(self._clock, self.traits.poll_s, BOOKED_S):
            with suppress(Unknown, GpurunError):
                site, number = self._locate(instance.id)
                reply = self._run(site, ["sh", "-c", _ACCOUNTING, "gpurun", number])
                if reply.exit_code:
                    return False
                if (is_by_user := is_cancelled_by_user(reply.stdout, instance.token)) is not None:
                    return is_by_user
        return False

    def setup_log(self, instance: Instance) -> bytes:
        """Return the output of `setup` and of the container engine in the job; only its end if it is long."""
        site, _ = self._locate(instance.id)
        if not (site.cluster.setup or site.cluster.container) or parse_token(instance.token) is None:
            return b""
        return self._read_output(
            site, ["sh", "-c", _READ_SETUP_LOG, "gpurun", _format_folder_path(site, instance.token)]
        ).encode()

    def _read_output(self, site: Site, argv: Sequence[str]) -> str:
        """Return the output of a command; Unknown if the command fails."""
        reply = self._run(site, argv)
        if reply.exit_code:
            raise Unknown(_describe_failure(argv[0] if argv[0] not in ("env", "sh") else "Slurm", reply))
        return reply.stdout

    def _run(self, site: Site, argv: Sequence[str], stdin: bytes = b"") -> LoginNodeResult:
        try:
            reply = site.login.run(argv, stdin, timeout_s=SBATCH_S + 30.0)
        except NoAnswer as error:
            raise Unknown(str(error), hint=error.hint) from error
        if reply.exit_code == 127:
            what = f"{site.cluster.name} ({site.cluster.host}) has no Slurm: {last_words(reply.stderr.encode())}."
            hint = "Name its login node in config.toml; sbatch and squeue must be in the PATH of a plain ssh command."
            raise SetupError("slurm.not_there", what, hint=hint)
        return reply


def _no_folder_error(cluster: Cluster, words: str = "") -> SetupError:
    """Return the error for a workdir in which the user cannot create a folder."""
    what = f"You cannot write to {cluster.workdir} on {cluster.name}" + (f": {words}." if words else ".")
    hint = f"Name a writable folder that login and compute nodes share: workdir = … in [slurm.{cluster.name}]."
    return SetupError("slurm.workdir", what, hint=hint)


def _format_folder_path(site: Site, token: str) -> str:
    """Return the run's folder in the shared workdir."""
    return str(PurePosixPath(site.cluster.workdir) / token)


def _describe_failure(program: str, reply: LoginNodeResult) -> str:
    return f"{program} ended with {reply.exit_code}: {last_words(reply.stderr.encode()) or 'it printed nothing'}"

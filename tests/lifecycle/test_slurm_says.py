"""Tests that the scripted Slurm answers as the real one does: lists, refusals, reasons to wait, states and silence.

Skipped where slurmctld, slurmdbd or MariaDB are not installed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.records import InstanceState
from gpurun.planning.own_box import LoginHere
from gpurun.providers.slurm.jobs import MOST_DIGITS, SINFO, SQUEUE, STARTS, STATES, sbatch_refusal
from gpurun.providers.slurm.provider import Site, SlurmProvider
from tests.contract.orders import order, wait_for
from tests.emulators.slurm import LINE_OF_SINFO, REASONS, form_of, missing_books, scripted_slurm
from tests.emulators.slurm.engine import Engine, booked, running
from tests.emulators.slurm.programs import SAYS
from tests.later import LATER

CLOCK = SystemClock()
pytestmark = [LATER, pytest.mark.skipif(bool(missing_books()), reason=missing_books() or "it is here")]
LIBRARY = "/usr/lib/*/slurm-wlm/libslurmfull.so"
QOS = {
    "wall": "MaxWall=00:05:00",
    "cards": "MaxTRESPerJob=gres/gpu=1",
    "own": "MaxTRESPerUser=gres/gpu=1",
    "jobs": "MaxJobsPerUser=0",
    "gone": "MaxJobsPerUser=100",
}
ACCOUNTS = {"other": "GrpJobs=100", "capped": "GrpTRES=gres/gpu=1", "gone": "GrpJobs=100"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("slurm") / "root", has_books=True) as made:
        for kind, limits in (("qos", QOS), ("account", ACCOUNTS)):
            for name, limit in limits.items():
                made.ask("sacctmgr", "-i", "add", kind, name)
                made.ask("sacctmgr", "-i", "modify", kind, name, "set", limit)
        for account in ACCOUNTS:
            made.ask("sacctmgr", "-i", "add", "user", "root", f"account={account}")
        made.ask("sacctmgr", "-i", "modify", "user", "root", "set", f"qos=normal,low,{','.join(QOS)}")
        yield made


@pytest.fixture(autouse=True)
def emptied(engine: Engine) -> Iterator[None]:
    """After each test, cancel the jobs left in the cluster, and wait until its nodes take jobs again."""
    yield
    for _ in ticks(CLOCK, 0.5, 60):
        engine.ask("scancel", "-u", "root", is_checked=False)
        if set(engine.ask("sinfo", "-h", "-o", "%t", is_checked=False).stdout.split()) == {"idle"}:
            return
    raise AssertionError(engine.ask("sinfo").stdout)


COLUMNS = r"\d+\|{state}\|\d{{9,}}\|{used}\|{ends}\|{reason}\|gr-fox-41-\w+\|fox-41 \d+ 0"


def rows_of(provider: SlurmProvider, ask: Callable[..., str]) -> dict[InstanceState, str]:
    """Return the squeue lines, in gpurun's columns, of a running job and of one that waits because of the same name."""
    wish = order(provider)
    first = provider.create(wish)
    wait_for(provider, first, InstanceState.RUNNING)
    second = provider.create(wish)
    try:
        return {
            instance.state: ask(
                "squeue", "-h", "-r", "--me", "-t", "all", "-o", SQUEUE, "-j", instance.id.rpartition("/")[2]
            ).splitlines()[-1]
            for instance in (provider.read(first.id), provider.read(second.id))
        }
    finally:
        for instance in (second, first):
            provider.destroy(instance.id)


def test_lists_of_the_scripted_slurm_have_the_real_ones_columns(engine: Engine, tmp_path: Path) -> None:
    def ask_in(environment: dict[str, str]) -> Callable[..., str]:
        def ask(*argv: str) -> str:
            done = subprocess.run(argv, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
            return done.stdout.strip()

        return ask

    lists = list[dict[InstanceState, str]]()
    partitions = list[str]()
    real = ask_in({"SLURM_TIME_FORMAT": "%s"})
    lists.append(rows_of(SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK), real))
    partitions.append(real("sinfo", "-h", "-o", SINFO))
    with scripted_slurm(tmp_path) as made:
        lists.append(rows_of(SlurmProvider([Site(made.cluster, LoginHere())], CLOCK), real))
        partitions.append(real("sinfo", "-h", "-o", SINFO))
    for rows in lists:
        runs, waits = rows[InstanceState.RUNNING], rows[InstanceState.PENDING]
        assert re.fullmatch(COLUMNS.format(state="RUNNING", used=r"\d+:\d\d", ends=r"\d{9,}", reason="None"), runs), (
            runs
        )
        assert re.fullmatch(COLUMNS.format(state="PENDING", used="0:00", ends="N/A", reason=r"\w+"), waits), waits
    for text in partitions:
        assert [line for line in text.splitlines() if not LINE_OF_SINFO.fullmatch(line)] == []


def words_of(engine: Engine, *argv: str) -> list[str]:
    return engine.ask(*argv, is_checked=False).stderr.strip().splitlines()


def test_what_the_scripted_slurm_says_the_real_one_says(engine: Engine) -> None:
    done = engine.ask("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true").stdout.strip()
    booked(engine, done)
    assert words_of(engine, "squeue", "-j", "9999") == [SAYS["squeue"].format(SAYS["no_job"])]
    assert words_of(engine, "scancel", "--me", "--name=x", done) == [SAYS["not cancelled"].format(done)]
    step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--quiet")
    assert words_of(engine, *step, f"--jobid={done}", "true") == [SAYS["expired"].format(done)]
    assert words_of(engine, *step, "--jobid=9999", "true") == [SAYS["no step"].format(9999)]
    (starts,) = words_of(engine, "sbatch", "--test-only", "--wrap", "true")
    form = re.escape(SAYS["starts"]).replace(r"\{\}", r"\S+")
    assert re.fullmatch(form, starts)
    config = engine.ask("scontrol", "show", "config").stdout.splitlines()
    assert config[0].startswith(SAYS["config"])
    facts = {"cluster": "probe", "tracker": "proctrack/cgroup", "over": "0 min"}
    assert {SAYS[name].format(fact) for name, fact in facts.items()} <= set(config)
    engine.controller.send_signal(signal.SIGSTOP)  # The frozen controller accepts the request but does not answer.
    try:
        assert words_of(engine, "sbatch", "--wrap", "true")[-1] == SAYS["sbatch"].format(SAYS["timed out"])
    finally:
        engine.controller.send_signal(signal.SIGCONT)
    engine.controller.send_signal(signal.SIGTERM)
    engine.controller.wait()
    asked_of = {
        "squeue": ("squeue", "-h"),
        "sinfo": ("sinfo",),
        "scontrol": ("scontrol", "show", "config"),
        "sbatch": ("sbatch", "--wrap", "true"),
        "sbatch --test-only": ("sbatch", "--test-only", "--wrap", "true"),
        "scancel": ("scancel", "--me", "1"),
    }
    try:
        said = {name: words_of(engine, *argv)[-1] for name, argv in asked_of.items()}
    finally:
        engine.controller = engine.start("slurmctld", "-D", "-f", str(engine.conf))
    assert said == {name: SAYS[name].format(SAYS["away"]) for name in asked_of}


REFUSED = {
    ("--account=nobody",): "Invalid account or account/partition combination specified",
    ("--qos=nothing",): "Invalid qos specification",
    ("--mem=99999999",): "Requested node configuration is not available",
    ("--gres=gpu:a100:3",): "Requested node configuration is not available",
    ("--partition=leaving",): "Required partition not available (inactive or drain)",
    ("--partition=nowhere",): "Invalid partition name specified",
    ("--constraint=slow",): "Invalid feature specification",
    ("--nodelist=n9",): "Invalid node name specified",
    ("--qos=low", "--time=30"): REASONS["refused"][-1],
    ("--qos=low", "--ntasks=2"): REASONS["refused"][-1],
}
OF_ENFORCED_LIMITS = {
    ("--time=2:00:00",): "Requested time limit is invalid (missing or exceeds some limit)",
    ("--nodes=3",): "Node count specification invalid",
}


WAITS = {
    "JobHeldUser": "--hold",
    "PartitionConfig": "--nodes=3",
    "PartitionTimeLimit": "--time=2:00:00",
    "PartitionNodeLimit": "--partition=small --nodes=2",
    "PartitionDown": "--partition=closed",
    "AssocGrpGRES": "--account=capped --gres=gpu:2",
    "QOSMaxWallDurationPerJobLimit": "--qos=wall --time=30",
    "QOSMaxGRESPerJob": "--qos=cards --gres=gpu:2",
    "QOSMaxGRESPerUser": "--qos=own --gres=gpu:2",
    "QOSMaxJobsPerUserLimit": "--qos=jobs",
    "Job's account not permitted to use this partition ({} allows {} not {})": "--partition=shut --account=other",
    "Job's QOS not permitted to use this partition ({} allows {} not {})": "--partition=tier",
}
WAITS_AFTER = {
    "JobHeldAdmin": ("--begin=now+1hour", "scontrol hold {job}"),
    "InvalidAccount": ("--begin=now+1hour --account=gone", "sacctmgr -i delete user root account=gone"),
    "InvalidQOS": ("--begin=now+1hour --qos=gone", "sacctmgr -i modify user root set qos-=gone"),
    "BadConstraints": (
        "--begin=now+1hour --constraint=fast", "scontrol update nodename=n1 availablefeatures= activefeatures=",
    ),
    "ReqNodeNotAvail, UnavailableNodes:{}": (
        "--begin=now+1hour --nodelist=n1", "scontrol update nodename=n1 state=drain reason=a-test",
    ),
}  # fmt: skip
UNDONE = {
    "BadConstraints": "scontrol update nodename=n1 availablefeatures=fast activefeatures=fast",
    "ReqNodeNotAvail, UnavailableNodes:{}": "scontrol update nodename=n1 state=resume",
}


@contextmanager
def configured(engine: Engine, line: str) -> Iterator[None]:
    """Add a line to slurm.conf for the duration of the block."""
    before = engine.conf.read_text()
    try:
        for text in (f"{before}{line}\n", before):
            engine.conf.write_text(text)
            engine.ask("scontrol", "reconfigure")
            if text != before:
                yield
    finally:
        engine.conf.write_text(before)


def submitted(engine: Engine, options: str = "", script: str = "sleep 300") -> str:
    """Submit a job to the cluster, and return its number."""
    words = ("sbatch", "--parsable", "--output=/dev/null", *options.split(), "--wrap", script)
    return engine.ask(*words).stdout.strip()


def shown(engine: Engine, job: str, column: str, form: str) -> str:
    """Wait until the job's column matches the regex `form`; return its text, or the last text after two minutes."""
    for _ in ticks(CLOCK, 0.3, 120):
        if re.fullmatch(form, text := engine.ask("squeue", "-h", "-t", "all", "-j", job, "-o", column).stdout.strip()):
            break
    return text


def check_refusals(engine: Engine, refusals: Mapping[tuple[str, ...], str]) -> None:
    for options, refusal in refusals.items():
        assert words_of(engine, "sbatch", *options, "--wrap", "true")[-1] == SAYS["sbatch"].format(refusal)
        tried = words_of(engine, "sbatch", "--test-only", *options, "--wrap", "true")
        assert tried[-1] == SAYS["sbatch --test-only"].format(refusal)
        assert sbatch_refusal("\n".join(tried))[1], "each has its cure"


def test_each_refusal_on_record_is_one_of_the_real_sbatch(engine: Engine) -> None:
    check_refusals(engine, REFUSED)
    with configured(engine, "EnforcePartLimits=ANY"):
        check_refusals(engine, OF_ENFORCED_LIMITS)
    assert {*REFUSED.values(), *OF_ENFORCED_LIMITS.values()} == set(REASONS["refused"])
    limits = [words_of(engine, "sbatch", "--qos=low", more, "--wrap", "true")[-2] for more in ("--time=30", "-n2")]
    assert limits == [f"sbatch: error: {code}" for code in REASONS["limits"]]


@pytest.mark.parametrize("reason", [*WAITS, *WAITS_AFTER])
def test_each_reason_to_wait_is_one_of_the_real_squeue(engine: Engine, reason: str) -> None:
    options, then = (WAITS[reason], "") if reason in WAITS else WAITS_AFTER[reason]
    job = submitted(engine, options)
    try:
        if then:
            engine.ask(*then.format(job=job).split())
            engine.ask("scontrol", "update", f"jobid={job}", "starttime=now")
        found = shown(engine, job, "%T|%r", rf"PENDING\|{form_of(reason)}")
    finally:
        if reason in UNDONE:
            engine.ask(*UNDONE[reason].split())
    assert re.fullmatch(rf"PENDING\|{form_of(reason)}", found), found


def test_a_full_cluster_has_jobs_wait_for_resources_and_priority(engine: Engine) -> None:
    jobs = [submitted(engine, "--nodes=2 --exclusive") for _ in range(3)]
    waits = ("Resources", "Priority")
    assert [shown(engine, job, "%r", reason) for job, reason in zip(jobs[1:], waits, strict=True)] == list(waits)
    assert {*WAITS, *WAITS_AFTER, *waits} == set(REASONS["waits"]), "none is on record that was not brought out here"


def test_reasons_not_produced_here_are_in_slurms_own_library() -> None:
    (library,) = Path("/").glob(LIBRARY.lstrip("/"))
    content = library.read_bytes()
    missing = [words for words in REASONS["only in its library"] if b"\0%s\0" % words.encode() not in content]
    assert missing == []


def test_each_state_of_a_job_is_one_of_the_real_squeue(engine: Engine) -> None:
    late = submitted(engine, "--time=1")
    scripts = {"COMPLETED": "true", "FAILED": "false", "DEADLINE": "true"}
    jobs = {state: submitted(engine, script=script) for state, script in list(scripts.items())[:2]}
    jobs["DEADLINE"] = submitted(engine, "--time=5 --deadline=now+1minute")
    stubborn = submitted(engine, script="trap '' TERM; echo up; sleep 100 & wait; sleep 100")
    assert shown(engine, stubborn, "%T", "RUNNING") == "RUNNING"
    engine.ask("scancel", stubborn)
    assert shown(engine, stubborn, "%T", "COMPLETING") == "COMPLETING"
    jobs |= {"CANCELLED": stubborn, "TIMEOUT": late}
    assert {state: shown(engine, job, "%T", state) for state, job in jobs.items()} == {state: state for state in jobs}
    assert set(jobs) <= set(STATES)


def test_each_state_of_a_node_is_one_of_the_real_sinfo(engine: Engine) -> None:
    seen = set[str]()

    def look() -> None:
        lines = engine.ask("sinfo", "-h", "-o", SINFO).stdout.splitlines()
        assert [line for line in lines if not LINE_OF_SINFO.fullmatch(line)] == []
        seen.update(line.split("|")[3].rstrip("*") for line in lines)

    look()
    job = submitted(engine, "--nodelist=n2")
    assert shown(engine, job, "%T", "RUNNING") == "RUNNING"
    look()
    for state in ("drain", "down"):
        engine.ask("scontrol", "update", "nodename=n1", f"state={state}", "reason=a-test")
        look()
        engine.ask("scontrol", "update", "nodename=n1", "state=resume")
    assert seen >= {"idle", "mix", "drain", "down"}


def test_a_start_that_never_comes_reads_as_in_real_slurm(engine: Engine) -> None:
    submitted(engine, "--partition=closed")  # Neither this job nor one behind it would ever start.
    tried = ("sbatch", "--test-only", "--partition=closed", "--wrap", "true")
    found = STARTS.search("\n".join(words_of(engine, "env", "SLURM_TIME_FORMAT=%s", *tried)))
    assert found is not None
    assert len(found[1]) > MOST_DIGITS, found[0]


def test_an_over_time_limit_reads_as_in_real_slurm(engine: Engine) -> None:
    for value, words in (("5", "5 min"), ("UNLIMITED", "UNLIMITED")):
        with configured(engine, f"OverTimeLimit={value}"):
            assert SAYS["over"].format(words) in engine.ask("scontrol", "show", "config").stdout.splitlines()

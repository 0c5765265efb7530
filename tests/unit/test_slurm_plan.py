"""Tests of plans for a job on a cluster: the lease is what each cap pays for, counted from the job's start."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.durations import limit_s
from gpurun.core.errors import ExitCode, UsageError
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.remote.key_pairs import make_keys
from tests.command_line import gpurun
from tests.emulators.slurm import ScriptedSlurm, scripted_slurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSlurm]:
    home = Home(tmp_path / "home").prepare()
    monkeypatch.setenv("GPURUN_HOME", str(home.root))
    with scripted_slurm(tmp_path) as made:
        home.config.write_text(f"{made.table}price_per_gpu_hour = 1.5\n")
        yield made


def planned(*words: str) -> dict[str, Any]:
    """Return the plan of a job on two GPUs, or the error that refuses it."""
    answer = json.loads(gpurun("plan", "mini-gpt", "--provider", "slurm", "--gpu", "2xA100", "--json", *words).stdout)
    found: dict[str, Any] = answer["data"] if answer["ok"] else answer["errors"][0]
    return found


def longest_s(plan: dict[str, Any]) -> int:
    """Return the seconds from the start of the job to its latest end by Slurm."""
    parts = ("boot_s", "setup_s", "ship_s", "train_s", "collect_s", "destroy_s", "kill_allowance_s")
    return sum(plan["lease"][part] for part in parts)


def test_a_price_is_for_each_gpu_and_a_cap_is_wanted_and_kept(slurm: ScriptedSlurm) -> None:
    assert planned()["code"] == "cap.missing"
    plan = planned("--max-cost", "0.50")
    assert plan["offer"]["rate_micros_per_hour"] == usd(3)
    assert plan["worst_micros"] == -(-usd(3) * longest_s(plan) // 3600) <= usd("0.50")
    assert planned("--max-cost", "0.05")["code"] == "offer.over_cap"


def test_gpu_hours_are_a_cap_beside_the_dollars(slurm: ScriptedSlurm) -> None:
    plan = planned("--max-cost", "50", "--max-gpu-hours", "0.5")
    assert longest_s(plan) == 900
    assert (plan["choices"]["max_gpu_hours"], plan["worst_micros"]) == (0.5, usd("0.75"))


def test_a_cluster_whose_jobs_overrun_is_counted_in_or_refused(slurm: ScriptedSlurm) -> None:
    slurm.set("over", "5 min")
    plan = planned("--max-cost", "0.75")
    assert plan["lease"]["kill_allowance_s"] == 60 + 300
    assert (longest_s(plan), plan["worst_micros"]) == (900, usd("0.75"))
    slurm.set("over", "UNLIMITED")
    assert planned("--max-cost", "5")["code"] == "slurm.no_end"


@pytest.mark.parametrize(
    ("knob", "value", "code"),
    [
        ("away", "", "slurm.no_answer"),
        ("sinfo", "main*|up|1-00:00:00|idle|1|gpu:a100:1", "slurm.too_few"),
        ("sinfo", "main*|up|1-00:00:00|drain|1|gpu:a100:8", "slurm.too_few"),
        ("sinfo", "main*|down|1-00:00:00|idle|1|gpu:a100:8", "slurm.no_partition"),
        ("sinfo", "main*|up|2:00|idle|1|gpu:a100:8", "slurm.no_time"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_before_submitting(
    slurm: ScriptedSlurm, knob: str, value: str, code: str
) -> None:
    slurm.set(knob, value)
    assert planned("--max-cost", "50")["code"] == code
    assert slurm.jobs == []


def test_a_debug_partition_of_five_minutes_leaves_time_to_train(slurm: ScriptedSlurm) -> None:
    slurm.set("sinfo", "main*|up|5:00|idle|1|gpu:a100:8")
    plan = planned("--max-cost", "50")
    assert plan["lease"]["train_s"] >= 60
    assert longest_s(plan) - plan["lease"]["kill_allowance_s"] == 300


def test_what_is_typed_for_a_run_replaces_the_table(slurm: ScriptedSlurm) -> None:
    plan = planned("--max-cost", "50", "--partition", "debug", "--account", "lab", "--qos", "low", "--time", "9")
    assert (plan["offer"]["type_id"], longest_s(plan) - plan["lease"]["kill_allowance_s"]) == ("debug", 540)
    asked = (slurm.state / "asked").read_text()
    assert {"--partition=debug", "--account=lab", "--qos=low", "--time=9"} <= set(asked.splitlines())
    assert planned("--max-cost", "50", "--partition", "no-where")["code"] == "slurm.no_partition"
    for words, code in {
        ("--time", "soon"): "usage.time",
        ("--account", "a b"): "config.slurm",
        ("--image", "lab.sif"): "config.slurm",
        ("--time", "1"): "slurm.no_time",
    }.items():
        assert planned("--max-cost", "50", *words)["code"] == code


@pytest.mark.parametrize("flag", ["--partition", "--account", "--qos", "--time"])
def test_a_flag_of_a_cluster_is_refused_where_there_is_none(slurm: ScriptedSlurm, flag: str) -> None:
    answer = json.loads(gpurun("plan", "mini-gpt", "--provider", "runpod", flag, "9", "--json").stdout)
    assert answer["errors"][0]["code"] == f"{flag[2:]}.unused"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30m", 1800), ("90:30", 5430), ("1:30:00", 5400), ("1-12", None), ("1-12:30", 131400), ("0", None)],
)
def test_a_time_is_read_as_sbatch_reads_it(text: str, seconds: int | None) -> None:
    if seconds is None:
        with pytest.raises(UsageError):
            limit_s(text)
    else:
        assert limit_s(text) == seconds


@pytest.mark.parametrize(("way", "code"), [("", "slurm.no_answer"), ('transport = "openssh"', "config.slurm")])
def test_a_host_that_leads_nowhere_names_entry_and_transport(
    slurm: ScriptedSlurm, tmp_path: Path, way: str, code: str
) -> None:
    make_keys(Home(Path(os.environ["GPURUN_HOME"])).keys / "ssh")
    host = "127.0.0.1" if not way else "no-such-entry"
    write_table(slurm, f'host = "{host}"\nport = 1\nuser = "me"\n{way}')
    refused = planned("--max-cost", "50")
    assert (refused["code"], "transport" in refused["hint"]) == (code, True), refused


def test_a_login_node_without_slurm_is_told_as_that(slurm: ScriptedSlurm) -> None:
    for program in slurm.bin.iterdir():
        program.write_text("#!/bin/sh\nexit 127\n")
    assert planned("--max-cost", "50")["code"] == "slurm.not_there"


def test_a_plan_says_when_slurm_would_start_it_or_refuse_it(
    slurm: ScriptedSlurm,
) -> None:
    assert "start it now" in str(planned("--max-cost", "5")["notes"])
    slurm.set("start", str(int(time.time()) + 7300))
    assert "2 h 01 m" in str(planned("--max-cost", "5")["notes"])
    slurm.set("start", "130644808322")
    assert "never" in str(planned("--max-cost", "5")["warnings"])
    slurm.set("refuse", "Invalid qos specification")
    refused = planned("--max-cost", "5")
    assert (refused["code"], "qos = " in refused["hint"]) == ("slurm.refused", True)
    assert slurm.jobs == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("setup = 'no-such-module load cuda'", "`setup` ended with 127"),
        ("setup = 'echo hello; exit 0'", "hello"),
        ("python = 'no-such-python'", "such-python"),
    ],
)
def test_what_the_login_node_cannot_know_is_a_warning(slurm: ScriptedSlurm, line: str, words: str) -> None:
    write_table(slurm, line)
    assert words in str(planned("--max-cost", "5")["warnings"])


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("python = '{work}/venv/bin/python'", "slurm.python", "venv/bin/python"),
        ("python = '{old}'", "slurm.python", "3.8"),
        ("python = '{bare}'", "slurm.python", "torch"),
        ("workdir = '{bare}/shared'", "slurm.workdir", "bare/shared"),
    ],
)
def test_what_the_shared_disk_shows_is_refused_before_queueing(
    slurm: ScriptedSlurm, line: str, code: str, words: str
) -> None:
    scripts = {"old": "exit 3", "bare": 'exec python3 -S "$@"'}
    for name, script in scripts.items():
        (slurm.state / name).write_text(f"#!/bin/sh\n{script}\n")
        (slurm.state / name).chmod(0o755)
    write_table(slurm, line.format(work=slurm.work, **{name: slurm.state / name for name in scripts}))
    refused = planned("--max-cost", "5")
    assert (refused["code"], words in refused["message"]) == (code, True), refused
    assert "[slurm.lab]" in refused["hint"]


def write_table(slurm: ScriptedSlurm, line: str) -> None:
    """Write the cluster's table to config.toml with one line replaced, and a price."""
    key = line.partition(" ")[0]
    kept = [one for one in slurm.table.splitlines() if not one.startswith(f"{key} ")]
    config = Home(Path(os.environ["GPURUN_HOME"])).config
    config.write_text("\n".join([*kept, line, "price_per_gpu_hour = 1.5\n"]))


def test_a_clusters_offers_are_partitions_with_idle_and_limits(slurm: ScriptedSlurm) -> None:
    gpus = "gpu*|up|2-00:00:00|{}|1|gpu:a100:8"
    slurm.set("sinfo", "\n".join([gpus.format("idle"), gpus.format("drain"), "old|down|1:00|idle|2|(null)"]))
    answer = json.loads(gpurun("offers", "--provider", "slurm", "--json").stdout)
    (gpu, old) = answer["data"]["partitions"]
    assert (gpu["name"], gpu["nodes"], gpu["idle"], gpu["longest_s"]) == ("gpu", [[8, 1]], 1, 172800)
    assert (old["name"], old["is_up"]) == ("old", False)
    shown = gpurun("offers", "--provider", "slurm:lab", "--gpu", "8xA100").stdout
    assert ("gpu (default)" in shown, "old" in shown, "2 d 00 h" in shown) == (True, False, True)
    assert gpurun("offers", "--provider", "slurm", "--gpu", "16xA100").returncode == ExitCode.NO_OFFER
    slurm.set("away")
    assert gpurun("offers", "--provider", "slurm").returncode == ExitCode.SETUP

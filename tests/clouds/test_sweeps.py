"""Tests of a sweep on a rented machine: trials share a card, one rental, one cap and one receipt; the best is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.money import usd
from tests.clouds.rented import CLOUDS, User, kill_supervisors, somebody
from tests.emulators import guests
from tests.refusals import lacking

pytestmark = [
    pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot"),
    pytest.mark.xdist_group("sweeps"),
]
SCRIPT = """\
import sys, time
lr = float(sys.argv[1])
for step in range(1, 11):
    print(f"step {step}/10 | loss {lr + 1 / step:.4f}", flush=True)
    time.sleep(float(sys.argv[2]))
open("weights.bin", "w").write(sys.argv[1])
"""
EIGHT = ("--set", "lr=8,7,6,5,4,3,2,1", "--")
KINDS = ("running", "done")


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("sweep")
    with CLOUDS["runpod"](folder / "cloud") as cloud, somebody(cloud, folder / "home") as user:
        (folder / "lab").mkdir()
        (folder / "lab" / "train.py").write_text(SCRIPT)
        yield user


def sweeps(user: User, *words: str, name: str, cap: str = "5", pause: str = "0.1", timeout_s: float = 240.0) -> Any:
    return user.types(
        "sweep", "--provider", user.cloud.name, "--max-cost", cap, "--yes", "--json", "--name", name, *user.cloud.asks,
        "--upload", str(user.home.parent / "lab"), *words, *EIGHT, "python", "train.py", "{lr}", pause,
        timeout_s=timeout_s,
    )  # fmt: skip


def predicate_of(user: User, name: str) -> Any:
    return user.envelope("receipt", name)[1]["data"]["statement"]["predicate"]


def most_at_once(folder: Path) -> int:
    """Return the largest number of trials that ran together, by their `running` and end events."""
    running, most = set[int](), 0
    for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        if event["kind"] == "trial":
            (running.add if event["state"] == "running" else running.discard)(event["trial"])
            most = max(most, len(running))
    return most


def holds(user: User, name: str) -> Any:
    """Assert what holds for every sweep, and return the receipt's predicate.

    The machine is gone, the cost is within the cap and shared by the eight trials, and the audit finds no problem.
    """
    receipt = predicate_of(user, name)
    assert user.cloud.alive() == []
    assert receipt["teardown"]["is"] == "destroyed"
    assert 0 < receipt["cost"]["upper_bound_micros"] <= usd(5)
    rows = receipt["training"]["trials"]["rows"]
    assert [row["trial"] for row in rows] == list(range(1, 9))
    assert len({row["params"]["lr"] for row in rows}) == 8
    shares = sum(row["micros"] for row in rows)
    assert 0 <= shares - receipt["cost"]["upper_bound_micros"] <= 8
    assert user.envelope("audit", name)[1]["ok"] is True
    return receipt


@pytest.mark.parametrize("at_once", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_trials_share_a_card_and_one_rental_pays_for_all(user: User, at_once: int) -> None:
    name = f"fox-{at_once}"
    before = user.cloud.meter.total_micros()
    done = sweeps(user, "--at-once", str(at_once), name=name)
    assert done.returncode == 0, done.stderr + user.said(name)
    receipt = holds(user, name)
    assert most_at_once(user.home / "runs" / name) == at_once
    assert user.cloud.meter.total_micros() - before <= receipt["cost"]["upper_bound_micros"]
    assert len(receipt["cost"]["rentals"]) == 1
    best = receipt["training"]["trials"]["best"]
    place = user.home / "runs" / name / "artifacts" / "outputs" / "gpurun-sweep" / "best"
    assert [path.name for path in place.iterdir()] == [f"{best:03d}"]
    assert (place / f"{best:03d}" / "weights.bin").read_text() == "1"


@pytest.mark.slow
@pytest.mark.parametrize("record", KINDS)
@pytest.mark.parametrize("trial", [1, 3, 8])
def test_a_resume_after_a_trials_record_brings_all_rows(user: User, trial: int, record: str) -> None:
    name = f"hen-{trial}-{record}"
    begun = sweeps(user, "--detach", name=name, pause="0.2")
    assert begun.returncode == 0, begun.stderr + user.said(name)
    events, end = user.home / "runs" / name / "events.jsonl", time.monotonic() + 120
    while not events.exists() or not any(
        (event.get("trial"), event.get("state")) == (trial, record)
        for event in map(json.loads, events.read_text().splitlines())
    ):
        assert time.monotonic() < end, user.said(name)
        time.sleep(0.05)
    kill_supervisors(user.home)
    resumed = user.types("resume", name)
    assert resumed.returncode == 0, resumed.stderr + user.said(name)
    holds(user, name)
    log = (user.home / "runs" / name / "run.log").read_text()
    assert all(log.count(f"{number:03d} | step 1/10 ") == 1 for number in range(1, 9))


@pytest.mark.slow
def test_a_sweep_stopped_by_its_hours_can_be_continued(user: User) -> None:
    done = sweeps(user, "--hours", "0.002", name="owl-1", pause="0.4")
    assert done.returncode == 7, done.stderr + user.said("owl-1")
    first = predicate_of(user, "owl-1")
    over = [row["trial"] for row in first["training"]["trials"]["rows"] if row["state"] == "done"]
    assert 0 < len(over) < 8
    again = user.types("sweep", "--from", "owl-1", "--max-cost", "5", "--yes", "--json", "--name", "owl-2",
                       *user.cloud.asks)  # fmt: skip
    assert again.returncode == 0, again.stderr + user.said("owl-2")
    rows = holds(user, "owl-2")["training"]["trials"]["rows"]
    assert [row["trial"] for row in rows if row.get("restored")] == over


@pytest.mark.slow
def test_a_sweep_ends_at_its_cap_with_the_best_at_home(user: User) -> None:
    """The smallest cap that a refusal names pays for only some of the trials, which need twenty minutes in all."""
    refused = sweeps(user, name="elk-0", cap="0.01")
    least = refused.stdout.partition("--max-cost ")[2].partition(":")[0]
    before = user.cloud.meter.total_micros()
    done = sweeps(user, name="elk-1", cap=least, pause="15", timeout_s=1500)
    assert done.returncode == 7, done.stderr + user.said("elk-1")
    receipt = predicate_of(user, "elk-1")
    assert user.cloud.alive() == []
    assert user.cloud.meter.total_micros() - before <= receipt["cost"]["upper_bound_micros"] <= usd(least)
    table = receipt["training"]["trials"]
    assert 0 < sum(row["state"] == "done" for row in table["rows"]) < 8
    place = user.home / "runs" / "elk-1" / "artifacts" / "outputs" / "gpurun-sweep" / "best"
    assert (place / f"{table['best']:03d}" / "weights.bin").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [2, 4])
def test_twelve_trials_of_a_recipe_are_packed_by_two_and_by_four(user: User, tmp_path: Path, at_once: int) -> None:
    name = f"cat-{at_once}"
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 8)
    words = ("--set", "train.steps=12", "--set", "train.checkpoint_every=6", "--set", "eval.every=3",
             "--set", "optim.lr=1e-3,3e-3,1e-2", "--set", "model.layers=1,2", "--set", "train.seed=1,2",
             "--at-once", str(at_once))  # fmt: skip
    done = user.types(
        "sweep", "course-lab", "--data", str(text), "--provider", user.cloud.name, "--max-cost", "5", "--yes", "--json",
        "--name", name, *user.cloud.asks, *words, timeout_s=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + user.said(name)
    rows = predicate_of(user, name)["training"]["trials"]["rows"]
    assert [(row["trial"], row["state"]) for row in rows] == [(number, "done") for number in range(1, 13)]
    assert json.loads((user.home / "runs" / name / "plan.json").read_text())["processes"] == at_once
    assert most_at_once(user.home / "runs" / name) == at_once
    assert user.cloud.alive() == []
    assert user.envelope("audit", name)[1]["ok"] is True


@pytest.mark.parametrize(
    ("words", "code", "fact"),
    [
        (("mini-gpt", "--max-cost", "0.01"), "offer.over_cap", "$0.01"),
        (("mini-gpt", "--max-cost", "50", "--set", "model.width=65536"), "offer.none_fits", "memory"),
        (("gpt2-124m", "--max-cost", "50", "--at-once", "64"), "sweep.memory", "64 trials"),
    ],
)
def test_what_no_card_holds_or_no_cap_pays_rents_nothing(
    user: User, words: tuple[str, ...], code: str, fact: str
) -> None:
    sets = ("--set", "optim.lr=1e-3,3e-3", "--set", "train.seed=1,2")
    rents = len(user.cloud.guests)
    done = user.types("sweep", *words, *sets, "--provider", "runpod", "--yes", "--json", "--gpu", "1xA100")
    error = json.loads(done.stdout.splitlines()[-1])["errors"][0]
    assert (error["code"], fact in error["message"]) == (code, True), error
    assert len(user.cloud.guests) == rents


@pytest.mark.slow
def test_a_sweep_whose_machine_is_taken_continues_on_another(user: User) -> None:
    begun = sweeps(user, "--keep-going", "--at-once", "2", "--detach", name="emu-1", pause="0.4")
    assert begun.returncode == 0, begun.stderr + user.said("emu-1")
    folder, end = user.home / "runs" / "emu-1", time.monotonic() + 120
    table = folder / "artifacts" / "outputs" / "gpurun-sweep" / "trials.json"
    while not table.exists() or sum(row["state"] == "done" for row in json.loads(table.read_text())["rows"]) < 2:
        assert time.monotonic() < end, user.said("emu-1")
        time.sleep(0.05)
    before = {row["trial"] for row in json.loads(table.read_text())["rows"] if row["state"] == "done"}
    (pod,) = user.cloud.alive()
    with user.cloud.emulator.world.lock:
        user.cloud.emulator.world.act(pod.id, "stop")
    assert user.types("resume", "emu-1", timeout_s=400).returncode == 0, user.said("emu-1")
    receipt = holds(user, "emu-1")
    rows = receipt["training"]["trials"]["rows"]
    assert {row["state"] for row in rows} == {"done"}
    assert [row["trial"] for row in rows if row.get("restored") or not row["micros"]] == [], "this run has paid for all"
    assert len(receipt["cost"]["rentals"]) == len(receipt["legs"]) == 2
    log = (folder / "run.log").read_text()
    assert all(log.count(f"{number:03d} | step 1/10 ") == 1 for number in before)
    best = receipt["training"]["trials"]["best"]
    assert (folder / f"artifacts/outputs/gpurun-sweep/best/{best:03d}/weights.bin").read_text() == "1"


@pytest.mark.slow
def test_a_paid_machine_without_optuna_draws_at_random(user: User) -> None:
    (broken := user.home.parent / "lab" / "broken" / "optuna").mkdir(parents=True)
    (broken / "__init__.py").write_text("raise AttributeError('made for another numpy')\n")
    words = ("--sampler", "tpe", "--trials", "3", "--set", "lr=0.1..9", "--env", "PYTHONPATH=broken")
    done = user.types(
        "sweep", "--provider", user.cloud.name, "--max-cost", "5", "--yes", "--json", "--name", "emu-1",
        *user.cloud.asks, "--upload", str(user.home.parent / "lab"), *words, "--", "python", "train.py", "{lr}", "0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + user.said("emu-1")
    training = predicate_of(user, "emu-1")["training"]
    assert [row["state"] for row in training["trials"]["rows"]] == ["done"] * 3
    assert any(lacking(line, "optuna", "--sampler random") == [] for line in training["warnings"]["lines"])
    assert user.envelope("audit", "emu-1")[1]["ok"] is True

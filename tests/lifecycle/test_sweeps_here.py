"""Tests of a sweep on this machine, as a user runs it: one run, one receipt, and one row for each trial."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.paths import Home
from gpurun.jobs.commands.named_command import approve, find_named
from tests.lifecycle.commands_here import SMALL, Person, kill_supervisor
from tests.refusals import lacking

TRAIN = """\
import argparse, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--width", type=int, default=1)
parser.add_argument("--pause", type=float, default=0.0)
given = parser.parse_args()
for step in range(1, 11):
    print(f"step {step}/10 | loss {given.lr * given.width + 1 / step:.4f}", flush=True)
    time.sleep(given.pause)
open("weights.bin", "w").write(f"{given.lr}")
"""
TWELVE = ("--set", "lr=3,1,2", "--set", "width=1,2,3,4", "--")


@pytest.fixture
def person(own_home: Path, tmp_path: Path) -> Person:
    person = Person(own_home, tmp_path / "lab")
    (person.folder / "train.py").write_text(TRAIN)
    (person.folder / "text.txt").write_text("To be, or not to be, that is the question. " * 8)
    return person


def sweeps(
    person: Person, *words: str, name: str = "fox-41", timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    return person.types(
        "sweep", "--provider", "local", "--yes", "--name", name, "--json", *words, timeout_s=timeout_s
    )  # fmt: skip


def rows(person: Person, name: str = "fox-41") -> list[Any]:
    trial_rows: list[Any] = person.receipt(name)["training"]["trials"]["rows"]
    return trial_rows


def refused(person: Person, *words: str) -> str:
    done = sweeps(person, *words)
    assert done.returncode in (2, 4), (done.stdout, done.stderr)
    assert not (person.home / "runs" / "fox-41").exists()
    return str(json.loads(done.stdout.splitlines()[-1])["errors"][0]["code"])


def until(holds: Callable[[], object], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def trials_over(person: Person) -> int:
    events = person.home / "runs" / "fox-41" / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    return len({event["trial"] for event in map(json.loads, lines) if event.get("state") == "done"})


def test_twelve_trials_of_a_script_are_one_run_with_twelve_rows(person: Person) -> None:
    done = sweeps(
        person, "--at-once", "4", "--keep", "2", *TWELVE, "python", "train.py", "--lr", "{lr}", "--width", "{width}"
    )
    assert done.returncode == 0, done.stderr
    trials = rows(person)
    assert [row["trial"] for row in trials] == list(range(1, 13))
    assert {row["state"] for row in trials} == {"done"}
    assert len({(row["params"]["lr"], row["params"]["width"]) for row in trials}) == 12
    best = person.receipt()["training"]["trials"]["best"]
    assert (trials[best - 1]["params"], trials[best - 1]["result"]) == ({"lr": "1", "width": "1"}, 1.1)
    weights = {name: text for name, text in person.brought().items() if name.endswith("weights.bin")}
    assert weights[f"gpurun-sweep/best/{best:03d}/weights.bin"] == "1.0"
    assert len(weights) == 2
    listed = json.loads(person.types("report", "fox-41", "--json").stdout.splitlines()[-1])["data"]["runs"]
    assert next(listed_run["run"] for listed_run in listed) == f"fox-41/{best:03d}"
    assert len(listed) == 12
    shown = person.types("receipt", "fox-41").stdout
    assert shown.count(" done ") + shown.count(" best ") >= 12
    assert person.types("report", "fox-41", "--html", "sweep.html").returncode == 0
    assert person.receipt()["asked"]["job"] == "sweep"
    assert person.holds()


def test_a_resume_after_the_fifth_trial_ends_with_twelve_rows(person: Person) -> None:
    words = (*TWELVE, "python", "train.py", "--lr", "{lr}", "--width", "{width}", "--pause", "0.05")
    assert sweeps(person, "--detach", *words).returncode == 0
    until(lambda: trials_over(person) >= 4)
    kill_supervisor(person.home)
    assert person.types("resume", "fox-41").returncode == 0
    trials = rows(person)
    assert len(trials) == len({(row["params"]["lr"], row["params"]["width"]) for row in trials}) == 12
    assert [row["trial"] for row in trials] == list(range(1, 13))
    assert {row["state"] for row in trials} == {"done"}
    log = (person.home / "runs/fox-41/run.log").read_text()
    assert all(log.count(f"{number:03d} | step 1/10 ") == 1 for number in range(1, 13))
    assert len(list((person.home / "runs").glob("*/receipt.json"))) == 1
    assert person.holds()


def test_a_stop_keeps_the_best_and_another_sweep_does_the_rest(person: Person) -> None:
    words = (*TWELVE, "python", "train.py", "--lr", "{lr}", "--width", "{width}", "--pause", "0.05")
    assert sweeps(person, "--detach", *words).returncode == 0
    until(lambda: trials_over(person) >= 3)
    assert person.types("stop", "fox-41").returncode == 0
    first = rows(person)
    over = {row["trial"] for row in first if row["state"] == "done"}
    assert 3 <= len(over) < 12
    assert [name for name in person.brought() if name.endswith("weights.bin")]

    again = sweeps(person, "--from", "fox-41", name="fox-42")
    assert again.returncode == 0, again.stderr
    trials = rows(person, "fox-42")
    assert len({(row["params"]["lr"], row["params"]["width"]) for row in trials}) == len(trials) == 12
    assert {row["trial"] for row in trials if row.get("restored")} == over
    best = person.receipt("fox-42")["training"]["trials"]["best"]
    assert person.brought("fox-42")[f"gpurun-sweep/best/{best:03d}/weights.bin"] == "1.0"
    assert person.receipt("fox-42")["asked"]["continues"]["run"] == "fox-41"
    assert lacking(person.types("sweep", "--from", "fox-42", "--yes").stderr, "[continue.finished]", "12 trials") == []
    assert "no recipe" not in person.types("train", "--from", "fox-42", "--yes").stderr
    assert person.holds()


def test_a_sweep_whose_trials_fail_ends_after_three(person: Person) -> None:
    done = sweeps(person, *TWELVE, "python", "-c", "raise SystemExit('no such table {lr} {width}')")
    assert done.returncode == 6
    receipt = person.receipt()
    assert len(receipt["training"]["trials"]["rows"]) == 3
    assert "3 of 3 trials failed" in receipt["training"]["message"]
    assert "no such table" in receipt["training"]["message"]
    assert person.holds()


def test_a_sweep_in_a_folders_file_has_a_name(person: Person) -> None:
    (person.folder / "gpurun.toml").write_text(
        '[run.rates]\ncommand = "python train.py --lr {lr} --width {width}"\n'
        'sweep = { set = { lr = ["3", "1"], width = "2..9" }, trials = 4, sampler = "random", seed = 5 }\n'
    )
    named = find_named("rates", person.folder, ())
    assert named is not None
    approve(named, Home(person.home))
    done = sweeps(person, "rates")
    assert done.returncode == 0, done.stderr
    assert [row["state"] for row in rows(person)] == ["done"] * 4
    assert all(2 <= int(row["params"]["width"]) <= 9 for row in rows(person))
    assert "gpurun sweep rates" in person.runs("rates", name="fox-42").stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), "sweep.nothing"),
        (("course-lab",), "sweep.nothing"),
        (("course-lab", "--set", "optim.lrr=1,2"), "set.unknown_key"),
        (("course-lab", "--set", "optim.lr=1e-3,abc"), "recipe.bad_value"),
        (("course-lab", "--set", "model.heads=2,3"), "recipe.does_not_add_up"),
        (("course-lab", "--set", "optim.lr=1,2", "--env", "A=1"), "sweep.option"),
        (("--set", "lr=1,2", "--", "python", "train.py", "--lr", "{rate}"), "sweep.placeholder"),
        (("--set", "lr=1,2", "--set", "width=1,2", "--", "python", "train.py", "{lr}"), "sweep.placeholder"),
        (("--set", "lr=1,2", "--set", "lr=3", "--", "python", "train.py", "{lr}"), "sweep.set"),
        (("--set", "lr=2..1", "--", "python", "train.py", "{lr}"), "sweep.set"),
        (("--set", "lr=1,2", "--trials", "3", "--", "python", "train.py", "{lr}"), "sweep.repeats"),
        (("--set", "lr=1..2", "--sampler", "grid", "--", "python", "train.py", "{lr}"), "sweep.grid"),
        (("--set", "lr=1,2,3", "--sampler", "grid", "--trials", "2", "--", "python", "train.py", "{lr}"), "sweep.grid"),
        (("--set", "lr=1,2", "--prune", "median", "--", "python", "train.py", "{lr}"), "sweep.option"),
        (("--set", "lr=1,2", "--outputs", "~/out/**", "--", "python", "train.py", "{lr}"), "sweep.outputs"),
        (("--set", "lr=1,2", "python", "train.py"), "sweep.words"),
    ],
)  # fmt: skip
def test_an_impossible_sweep_is_refused_before_anything_begins(
    person: Person, words: tuple[str, ...], code: str
) -> None:
    data = ("--data", "text.txt") if words[:1] == ("course-lab",) else ()
    assert refused(person, *words[:1], *data, *words[1:]) == code


def test_two_sweeps_of_one_name_are_refused(person: Person) -> None:
    words = ("--set", "lr=1,2", "--", "python", "train.py", "--lr", "{lr}")
    assert sweeps(person, *words).returncode == 0
    again = sweeps(person, *words)
    assert again.returncode == 12
    assert "fox-41" in json.loads(again.stdout.splitlines()[-1])["errors"][0]["message"]


@pytest.mark.slow
def test_twelve_trials_have_the_losses_that_each_has_alone(person: Person) -> None:
    lists = ("--set", "optim.lr=1e-3,3e-3,1e-2", "--set", "model.layers=1,2", "--set", "train.seed=1,2")
    done = sweeps(person, "course-lab", "--data", "text.txt", *SMALL, *lists, "--at-once", "2", "--prune", "asha",
                  timeout_s=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = rows(person)
    assert len(trials) == 12
    assert {row["state"] for row in trials} == {"done", "pruned"}
    best = next(row for row in trials if row["trial"] == person.receipt()["training"]["trials"]["best"])
    own = [word for name, value in best["params"].items() for word in ("--set", f"{name}={value}")]
    alone = ("train", "course-lab", "--data", "text.txt", "--provider", "local", "--yes", "--name", "fox-42", *SMALL)
    assert person.types(*alone, *own).returncode == 0
    assert best["result"] == person.receipt("fox-42")["training"]["figures"]["best_val_loss"]
    place = person.home / "runs/fox-41/artifacts/outputs/gpurun-sweep/best" / f"{best['trial']:03d}" / "checkpoints"
    weights = {path.name: path.read_bytes() for path in place.glob("*.model.safetensors")}
    for path in (person.home / "runs/fox-42/artifacts/checkpoints").glob("*.model.safetensors"):
        assert weights[path.name] == path.read_bytes()

    more = ("train", "--from", "fox-41", "--provider", "local", "--yes", "--name", "fox-43", "--set", "train.steps=18")
    on = person.types(*more)
    assert on.returncode == 0, on.stderr
    assert person.receipt("fox-43")["training"]["figures"]["last_step"] == 18
    assert person.receipt("fox-43")["asked"]["continues"]["run"] == "fox-41"
    assert person.holds()


PAGE = (Path(__file__).parents[2] / "docs" / "SWEEPS.md").read_text()
HERE = ("--provider", "local", "--yes", "--name")


@pytest.mark.slow
def test_the_page_about_sweeps_holds_as_it_is_typed(person: Person) -> None:
    """The page's commands must work as printed, except that they run here and that the trials are shorter."""
    blocks = re.findall(r"```(?:bash|toml)\n(.*?)```", PAGE, re.DOTALL)
    (recipe, command), table, on_cluster, last = blocks[0].splitlines(), *blocks[1:]
    left, best = last.splitlines()
    rented, queued = " --gpu 1xL4 --max-cost 6", " --provider slurm --gpu 4x1xA100 --max-gpu-hours 8"
    (person.folder / "gpurun.toml").write_text(table)
    assert recipe.count(rented) == command.count(rented) == 1

    short = ("--set", "train.steps=4", "--set", "eval.every=2", "--set", "train.checkpoint_every=2")
    words = shlex.split(recipe.replace(rented, ""))[1:]
    done = person.types(*words, *short, *HERE, "fox-1", timeout_s=600)
    assert done.returncode == 0, done.stderr
    assert len(rows(person, "fox-1")) == 4

    assert on_cluster.count(queued) == 1
    done = person.types(
        *shlex.split(on_cluster.replace(queued, ""))[1:], "--at-once", "2", *short, *HERE, "fox-5", timeout_s=600
    )
    assert done.returncode == 0, done.stderr
    assert len(rows(person, "fox-5")) == 6

    verb, *words = shlex.split(command.replace(rented, ""))[1:]
    done = person.types(verb, *HERE, "fox-2", *words)
    assert done.returncode == 0, done.stderr
    drawn = [float(row["params"]["lr"]) for row in rows(person, "fox-2")]
    assert len(drawn) == 20
    assert all(1e-4 <= rate <= 1e-2 for rate in drawn)

    named = find_named("rates", person.folder, ())
    assert named is not None
    approve(named, Home(person.home))
    assert person.types("sweep", "rates", *HERE, "fox-3").returncode == 0
    assert len(rows(person, "fox-3")) == 5
    assert len({name.split("/")[2] for name in person.brought("fox-3") if "best/" in name}) == 2
    assert (person.home / "runs/fox-3/artifacts/outputs/gpurun-sweep/trials.json").is_file()

    again = shlex.split(left.replace("RUN", "fox-3"), comments=True)[1:]
    assert lacking(person.types(*again).stderr, "[continue.finished]", "5 trials") == []
    trained = shlex.split(best.replace("RUN", "fox-1"), comments=True)[1:]
    done = person.types(*trained, "--set", "train.steps=6", *HERE, "fox-4", timeout_s=600)
    assert done.returncode == 0, done.stderr
    assert person.receipt("fox-4")["asked"]["continues"]["run"] == "fox-1"
    assert person.holds()

"""Tests of a run that continues in another job of the real Slurm, after root cancelled the first at one of six moments.

Its last loss must equal that of an unbroken run, to the last digit. Skipped where Slurm is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event, Record
from gpurun.core.paths import Home, RunFolder
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.write_receipt import read_receipt
from gpurun.remote.key_pairs import make_keys
from tests.emulators import sshd
from tests.emulators.slurm import missing
from tests.emulators.slurm.engine import Engine, running
from tests.later import LATER
from tests.lifecycle.drive import tiny_python

CLOCK = SystemClock()
pytestmark = [LATER, pytest.mark.skipif(bool(missing()), reason=missing() or "it is here")]
TRAINING = """\
import json, os, random, sys, time
out, rng = "out/ckpt.json", random.Random(7)
state = {"step": 0, "weights": [rng.gauss(0, 1) for _ in range(8)], "speed": [0.0] * 8, "rng": rng.getstate()}
if "--resume" in sys.argv:
    state = json.load(open(out))
kind, numbers, gauss = state["rng"]
rng.setstate((kind, tuple(numbers), gauss))
os.makedirs("out", exist_ok=True)
for step in range(state["step"] + 1, 61):
    x = [rng.gauss(0, 1) for _ in range(8)]
    off = sum(w * v for w, v in zip(state["weights"], x)) - sum(x)
    state["speed"] = [0.9 * s - 0.02 * off * v for s, v in zip(state["speed"], x)]
    state["weights"] = [w + s for w, s in zip(state["weights"], state["speed"])]
    state["loss"] = off * off
    print(f"step {step}/60 loss {off * off:.17g}", flush=True)
    if step % 20 == 0:
        state |= {"step": step, "rng": rng.getstate()}
        with open(f"{out}.part", "w") as file:
            json.dump(state, file)
        os.rename(f"{out}.part", out)
    time.sleep(float(sys.argv[1]))
"""
"""A training with momentum and random batches, which saves the state of both; it pauses after each step."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("slurm") / "root") as made:
        yield made


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """Return a folder with the training script."""
    (folder := tmp_path / "lab").mkdir()
    (folder / "train.py").write_text(TRAINING)
    return folder


def unbroken(tmp_path: Path) -> dict[str, object]:
    """Run the same training script in one piece, and return its last checkpoint."""
    (whole := tmp_path / "whole").mkdir()
    subprocess.run([sys.executable, "-c", TRAINING, "0"], cwd=whole, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((whole / "out/ckpt.json").read_text()))


def begin(home: Home, lab: Path, *words: str, pause: str = "0.3", **environment: str) -> subprocess.Popen[bytes]:
    """Start gpurun with the training script in a run that may continue in another job; return the process."""
    own = ("--gpu", "cpu", "--accept-cpu", "--yes", "--name", "fox-41", "--max-gpu-hours", "3", "--keep-going")
    files = ("--checkpoint-glob", "out/ckpt.json", "--outputs", "out/ckpt.json", "--resume-arg=--resume")
    return subprocess.Popen(
        [sys.executable, "-m", "gpurun", "run", *words, *own, *files, "--", "python", "train.py", pause],
        env={**os.environ, "GPURUN_HOME": str(home.root), **environment}, cwd=lab, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def records(folder: RunFolder) -> list[Record]:
    return list(read_journal(folder.journal).records) if folder.journal.exists() else []


def recorded(event: Event) -> Callable[[Engine, RunFolder], bool]:
    return lambda engine, folder: any(record.event is event for record in records(folder))


def runs(engine: Engine, folder: RunFolder) -> bool:
    return "RUNNING" in engine.ask("squeue", "-h", "-o", "%T").stdout


def has_saved(engine: Engine, folder: RunFolder) -> bool:
    return any("ckpt.json" in path.read_text() for path in engine.work.glob("*/out/MANIFEST.json"))


MOMENTS: dict[str, Callable[[Engine, RunFolder], bool]] = {
    "submitted": recorded(Event.CREATE_OBSERVED),
    "booting": runs,
    "ready": recorded(Event.READY_OBSERVED),
    "training": recorded(Event.TRAIN_STARTED),
    "a checkpoint": has_saved,
    "collecting": recorded(Event.COLLECT_INTENDED),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_cancelled_by_root_it_continues_to_the_same_loss(
    engine: Engine, tmp_path: Path, lab: Path, moment: str
) -> None:
    home = Home(tmp_path / "home").prepare()
    table = f'[slurm.lab]\nhost = "local"\nworkdir = "{engine.work}"\npython = "{tiny_python(home.root)}"\n'
    home.config.write_text(table)
    child, folder = begin(home, lab, "--provider", "slurm"), home.run("fox-41")
    for _ in ticks(CLOCK, 0.05, 200):
        if MOMENTS[moment](engine, folder):
            break
    engine.ask("scancel", "-u", "root")
    story = lambda: [f"{record.event} {dict(record.data)}"[:400] for record in records(folder)]  # noqa: E731
    assert child.wait(timeout=500) == ExitCode.DONE, story()
    assert json.loads((folder.artifacts / "outputs/out/ckpt.json").read_text()) == unbroken(tmp_path)
    assert [row.problems for row in audit(home).rows] == [()]
    assert list(engine.work.iterdir()) == []
    intents = [record for record in records(folder) if record.event is Event.CREATE_INTENDED]
    if moment != "collecting":  # By then training was done, and its files come from the job's folder.
        assert len(intents) == 2, story()
    if moment == "a checkpoint":
        assert read_receipt(home, folder).predicate["legs"][1]["step"] >= 20


def test_taken_by_one_cluster_the_run_continues_on_another(engine: Engine, tmp_path: Path, lab: Path) -> None:
    """One cluster is on this machine, the other behind a login node.

    The one that took the job away accepts no other job.
    """
    home, keys = Home(tmp_path / "home").prepare(), make_keys(tmp_path / "keys")
    with running(tmp_path / "annex") as annex:
        login = sshd.Sshd(
            tmp_path / "sshd", host_keys=[tmp_path / "keys" / "host"], authorized_keys=[keys.client_public],
            options=[f"SetEnv SLURM_CONF={annex.conf}"],
        )  # fmt: skip
        python = tiny_python(home.root)
        home.config.write_text(
            f'[slurm.lab]\nhost = "local"\nworkdir = "{engine.work}"\npython = "{python}"\n'
            f'[slurm.annex]\nhost = "127.0.0.1"\nport = {login.port}\nuser = "{login.user}"\n'
            f'identity = "{tmp_path / "keys" / "client"}"\nworkdir = "{annex.work}"\npython = "{python}"\n'
        )
        try:
            both = ("--provider", "slurm:lab", "--provider", "slurm:annex")
            path = f"{engine.root / 'bin'}:{os.environ['PATH']}"
            child, folder = begin(home, lab, *both, pause="1", PATH=path), home.run("fox-41")
            clusters = {"lab": engine, "annex": annex}
            for _ in ticks(CLOCK, 0.05, 200):
                if any(has_saved(cluster, folder) for cluster in clusters.values()):
                    break
            (first,) = [record for record in records(folder) if record.event is Event.CREATE_INTENDED]
            taken = first.data["offer"]["region"]
            clusters[taken].ask("/usr/bin/scontrol", "update", "partitionname=main", "state=down")
            clusters[taken].ask("/usr/bin/scancel", "-u", "root")
            story = lambda: [f"{record.event} {dict(record.data)}"[:400] for record in records(folder)]  # noqa: E731
            assert child.wait(timeout=500) == ExitCode.DONE, story()
        finally:
            engine.ask("/usr/bin/scontrol", "update", "partitionname=main", "state=up")
            login.close()
        assert json.loads((folder.artifacts / "outputs/out/ckpt.json").read_text()) == unbroken(tmp_path)
        assert [row.problems for row in audit(home).rows] == [()]
        legs = read_receipt(home, folder).predicate["legs"]
        assert [leg["region"] for leg in legs] == [taken, *(clusters.keys() - {taken})]
        assert legs[1]["step"] >= 20
        assert [list(cluster.work.iterdir()) for cluster in clusters.values()] == [[], []]

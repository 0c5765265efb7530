"""Tests that a run on spot machines continues on another machine when its machine is taken away, and ends as one run.

Two clouds are emulated; sshd and the trainer are real. A moved run has exactly the losses of an unbroken run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import RunFolder
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.artifacts.inventory import Inventory
from tests.clouds.rented import Cloud, User, aws, kill_supervisors, runpod, somebody, supervisors
from tests.emulators import guests
from tests.emulators.s3 import S3Emulator
from tests.users_scripts import HUGGING_FACE, NANOGPT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")]

STEPS, EVERY = 600, 50
RECIPE = (
    "--set", f"train.steps={STEPS}", "--set", "train.batch_tokens=1024", "--set", "train.micro_batch=16",
    "--set", f"train.checkpoint_every={EVERY}", "--set", f"eval.every={EVERY}", "--set", "eval.tokens=2048",
)  # fmt: skip
SHORT = (*RECIPE, "--set", "train.steps=250")
SPOT = ("--gpu", "1xH100", "--spot", "--accept-cpu", "--provider", "runpod", "--provider", "aws")
PATIENCE_S = 400.0


@pytest.fixture
def clouds(tmp_path: Path) -> Iterator[tuple[User, Cloud, Cloud]]:
    """Yield a user who has keys for RunPod and AWS, and these two clouds."""
    with runpod(tmp_path / "runpod") as first, aws(tmp_path / "aws") as second:
        both = replace(first, environment={**first.environment, **second.environment})
        with somebody(both, tmp_path / "home") as user:
            yield user, first, second


def begin(user: User, *words: str, **more: str) -> subprocess.Popen[bytes]:
    """Start a command that begins the run, with `more` in its environment; return its process."""
    verb, *rest = words
    command = [sys.executable, "-m", "gpurun.cli.app", verb, "--yes", "--json", "--name", "fox-41", *rest]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env={**user.environment(), **more}, stdin=quiet, stdout=quiet, stderr=quiet)


def drive(user: User, **more: str) -> int:
    """Drive the run in a new supervisor until the run ends or the supervisor dies; return its exit status."""
    command = [sys.executable, "-m", "gpurun.lifecycle.supervisor", str(user.home), "fox-41"]
    quiet = subprocess.DEVNULL
    env = {**user.environment(), **more}
    return subprocess.run(command, env=env, stdin=quiet, stdout=quiet, stderr=quiet, timeout=PATIENCE_S).returncode


def records(user: User) -> list[Any]:
    return list(read_journal(user.home / "runs" / "fox-41" / "journal.jsonl").records)


def wait_for(user: User, what: str, true: Callable[[], bool], begun: subprocess.Popen[bytes] | None = None) -> None:
    for _ in ticks(SystemClock(), 0.1, PATIENCE_S):
        if true():
            return
        assert begun is None or begun.poll() is None, f"it ended before {what}:\n{user.said()}"
    pytest.fail(f"it never came to {what}:\n{user.said()}")


def saved_in(s3: S3Emulator) -> bool:
    """Return whether a machine has uploaded its list of finished files to a bucket."""
    return any(name.endswith("/head") for name in s3.keys(""))


def whole_at_home(user: User) -> int:
    """Return the newest step whose checkpoint is complete at home (three files), or 0."""
    folder = user.home / "runs" / "fox-41" / "artifacts" / "checkpoints"
    names = [path.name for path in folder.glob("*")] if folder.is_dir() else []
    steps = {name[:6] for name in names}
    return max((int(step) for step in steps if sum(name.startswith(step) for name in names) == 3), default=0)


def legs(user: User) -> list[dict[str, Any]]:
    return [record.data for record in records(user) if record.event is Event.LEG_PLANNED]


def losses(folder: Path) -> dict[int, float]:
    """Return the last loss that was reported for each step."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def test_taken_twice_at_runpod_it_reaches_the_same_loss_at_aws(
    clouds: tuple[User, Cloud, Cloud],
) -> None:
    user, first, second = clouds
    begun = begin(user, "train", "mini-gpt", "--max-cost", "20", *SPOT, *RECIPE, "--keep-going")
    for number in (1, 2):
        before = legs(user)[-1]["step"] if number > 1 else 0
        wait_for(user, f"a checkpoint on machine {number}", lambda: whole_at_home(user) > before, begun)  # noqa: B023
        (pod,) = first.alive()
        with first.emulator.world.lock:
            first.emulator.world.act(pod.id, "stop")
        wait_for(user, f"leg {number + 1}", lambda: len(legs(user)) >= number, begun)  # noqa: B023
    assert begun.wait(PATIENCE_S) == 0, user.said()
    providers = [record.data["provider"] for record in records(user) if record.event is Event.CREATE_INTENDED]
    assert providers == ["runpod", "runpod", "aws"]
    assert (first.alive(), second.alive()) == ([], [])
    receipt = user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"]
    bound = receipt["cost"]["upper_bound_micros"]
    assert first.meter.total_micros() + second.meter.total_micros() <= bound <= usd(20)
    assert [leg["leg"] for leg in receipt["legs"]] == [1, 2, 3]
    assert "took it back" in receipt["legs"][0]["why"]
    code, audit = user.envelope("audit")
    assert (code, audit["ok"]) == (0, True), json.dumps(audit)

    unbroken = user.types(
        "train", "mini-gpt", "--provider", "local", "--yes", "--json", "--name", "owl-7", *RECIPE, timeout_s=PATIENCE_S
    )
    assert unbroken.returncode == 0, unbroken.stderr
    moved, whole = losses(user.home / "runs" / "fox-41"), losses(user.home / "runs" / "owl-7")
    assert moved == whole
    assert max(moved) == STEPS


def test_killed_between_two_legs_it_resumes_with_one_machine(
    clouds: tuple[User, Cloud, Cloud],
) -> None:
    user, first, second = clouds
    begun = begin(user, "train", "mini-gpt", "--max-cost", "20", *SPOT, *RECIPE, "--keep-going")
    wait_for(user, "a checkpoint", lambda: whole_at_home(user) > 0, begun)
    (pod,) = first.alive()
    with first.emulator.world.lock:
        first.emulator.world.act(pod.id, "stop")
    wait_for(user, "the proof", lambda: any(record.event is Event.DEATH_PROVEN for record in records(user)), begun)
    begun.kill()
    kill_supervisors(user.home)
    assert user.types("resume", "fox-41", "--json", timeout_s=PATIENCE_S).returncode == 0, user.said()
    intents = [record for record in records(user) if record.event is Event.CREATE_INTENDED]
    assert len(intents) == 2
    assert (first.alive(), second.alive()) == ([], [])
    assert user.envelope("audit")[1]["ok"] is True


DYING = """\
import os, signal
from gpurun.ledger.journal import Journal

append = Journal.append

def append_and_die(journal, note):
    record = append(journal, note)
    if os.path.exists(os.environ["DIED_AT"]):
        with open(os.environ["DIED_AT"], "r+") as file:
            known, kind = file.read().split("\\n"), " ".join([record.event, str(record.data.get("code", ""))]).strip()
            if kind not in known:
                print(kind, file=file, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    return record

Journal.append = append_and_die
"""
"""Once the file DIED_AT exists, kills a supervisor after the first record of each kind, and adds the kind to it."""


def shim(folder: Path, text: str, **more: str) -> dict[str, str]:
    """Return environment variables that make each Python of the user run a text at its start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[2]}", **more}


def kinds_between(user: User) -> list[str]:
    """Return the kinds of the journal's records from the end of the first training to the second machine."""
    journal = records(user)
    ended = next(place for place, record in enumerate(journal) if record.event is Event.TRAIN_OBSERVED)
    made = [place for place, record in enumerate(journal) if record.event is Event.CREATE_OBSERVED][1]
    kinds = [" ".join([record.event, str(record.data.get("code", ""))]).strip() for record in journal[ended : made + 1]]
    return list(dict.fromkeys(kinds))


def dies_on_its_way(user: User, died: Path, environment: dict[str, str], between: Callable[[], None]) -> None:
    """Drive a run whose supervisor dies at each kind of record until the second machine; then resume it to its end."""
    deaths = lambda: died.read_text().splitlines()  # noqa: E731
    wait_for(user, "the first death", lambda: bool(deaths()) and not supervisors(user.home))
    while "create.observed" not in deaths():
        known = len(deaths())
        between()
        assert drive(user, **environment) == -9, f"it did not die after {deaths()[-1]}\n{user.said()}"
        assert len(deaths()) == known + 1
        assert len(user.cloud.alive()) <= 1
    died.unlink()
    assert user.types("resume", "fox-41", "--json", timeout_s=PATIENCE_S).returncode == 0, user.said()


def has_moved_once(user: User, cloud: Cloud, deaths: list[str]) -> None:
    """Assert that the run used two machines in turn within its cap, and a supervisor died at each kind of record."""
    assert cloud.alive() == []
    receipt = user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"]
    assert [leg["leg"] for leg in receipt["legs"]] == [1, 2]
    assert receipt["legs"][1]["step"] > 0
    assert cloud.meter.total_micros() <= receipt["cost"]["upper_bound_micros"] <= usd(20)
    code, audit = user.envelope("audit")
    assert (code, audit["ok"]) == (0, True), json.dumps(audit)
    assert set(kinds_between(user)) <= {*deaths}
    assert {"collect.intended", "death.proven", "leg.planned", "create.intended"} <= {*deaths}
    # With a bucket, the files of a lost machine are downloaded from there, once its end is proven.
    assert {"collect.observed", "salvage.observed"} & {*deaths}


def stop_pods(cloud: Cloud) -> None:
    """Let RunPod take back every pod that runs."""
    with cloud.emulator.world.lock:
        for pod in list(cloud.alive()):
            cloud.emulator.world.act(pod.id, "stop")  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [(), ("--stage", "s3://shards/lab")], ids=["files come home", "files go to a bucket"])
def test_killed_between_two_runpod_machines_it_is_one_run(tmp_path: Path, stage: tuple[str, ...]) -> None:
    died = tmp_path / "died"
    environment = shim(tmp_path / "shim", DYING, DIED_AT=str(died))
    with runpod(tmp_path / "cloud") as cloud, S3Emulator() as s3:
        keyed = replace(cloud, environment={**cloud.environment, **s3.environment})
        with somebody(keyed, tmp_path / "home") as user:
            train = ("train", "mini-gpt", "--max-cost", "20", *SPOT[:6], *RECIPE, *stage, "--keep-going", "--detach")
            assert begin(user, *train, **environment).wait(PATIENCE_S) == 0, user.said()
            wait_for(user, "a checkpoint", lambda: saved_in(s3) if stage else whole_at_home(user) > 0)
            died.touch()
            stop_pods(cloud)
            deaths: list[str] = []
            dies_on_its_way(user, died, environment, lambda: deaths.append(died.read_text()))
            assert len(cloud.emulator.world.pods) == 2
            has_moved_once(user, cloud, [*deaths[-1].splitlines(), "create.observed"])


def test_killed_before_it_reads_an_answer_it_is_one_run(tmp_path: Path) -> None:
    """The supervisor dies after it has read the lowest bid and created the pod, before the journal has either."""
    answered = "after create.intended > after runpod graphql > after runpod graphql"
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        train = ("train", "mini-gpt", "--max-cost", "20", *SPOT[:6], *SHORT, "--keep-going")
        # Detached, because a viewer would resume the run when its supervisor dies.
        assert begin(user, *train, "--detach", GPURUN_CRASH_AT="after train.observed").wait(PATIENCE_S) == 0
        wait_for(user, "a checkpoint", lambda: whole_at_home(user) > 0)
        stop_pods(cloud)
        lost = lambda: any(record.event is Event.TRAIN_OBSERVED for record in records(user))  # noqa: E731
        wait_for(user, "the loss", lambda: lost() and not supervisors(user.home))
        assert drive(user, GPURUN_CRASH_AT=answered) == -9, user.said()
        assert len(cloud.alive()) == 1
        assert user.types("resume", "fox-41", "--json", timeout_s=PATIENCE_S).returncode == 0, user.said()
        assert len(cloud.emulator.world.pods) == 2
        has_moved_once(user, cloud, kinds_between(user))


def test_without_capacity_it_waits_at_no_cost_and_continues(tmp_path: Path) -> None:
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        train = ("train", "mini-gpt", "--max-cost", "20", *SPOT[:6], *SHORT, "--keep-going", "--wait", "10m")
        begun = begin(user, *train)
        wait_for(user, "a checkpoint", lambda: whole_at_home(user) > 0, begun)
        (pod,) = cloud.alive()
        kinds = list(cloud.emulator.world.gpus.values())
        stock = [dict(kind.stock) for kind in kinds]
        with cloud.emulator.world.lock:
            for kind in kinds:
                kind.stock = dict.fromkeys(kind.stock, "NONE")
            cloud.emulator.world.act(pod.id, "stop")
        waits = lambda: user.envelope("ps")[1]["data"]["runs"][0]["is_waiting"]  # noqa: E731
        wait_for(user, "the wait", waits, begun)
        spent = user.envelope("ps")[1]["data"]["runs"][0]["spent_micros"]
        since = SystemClock().monotonic()
        wait_for(user, "two looks", lambda: SystemClock().monotonic() - since > 70, begun)
        row = user.envelope("ps")[1]["data"]["runs"][0]
        assert (row["is_waiting"], row["spent_micros"], row["may_be_billing"]) == (True, spent, False)
        assert "$0.00/h" in user.types("ps").stdout
        assert cloud.alive() == []
        with cloud.emulator.world.lock:
            for kind, before in zip(kinds, stock, strict=True):
                kind.stock = before
        assert begun.wait(PATIENCE_S) == 0, user.said()
        assert [leg["number"] for leg in legs(user)] == [2]
        assert user.envelope("audit")[1]["ok"] is True


class Notice(BaseHTTPRequestHandler):
    """EC2's metadata service for all machines of a test: it has a notice of reclaim while `is_given`."""

    is_given = False

    def do_PUT(self) -> None:
        self._answer(200, "a-token")

    def do_GET(self) -> None:
        notice = '{"action": "terminate", "time": "2026-11-27T08:02:00Z"}'
        self._answer(*((200, notice) if Notice.is_given else (404, "")))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def notice_here() -> Iterator[str]:
    """Yield Python text that makes the user's gpurun name this server to machines, which cannot reach EC2's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Notice) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        named = f"AwsProvider.notice_url = 'http://127.0.0.1:{server.server_port}'"
        Notice.is_given = False
        yield f"from gpurun.providers.aws.provider import AwsProvider\n{named}\n"
        server.shutdown()


def test_at_a_notice_of_aws_it_saves_downloads_and_moves(tmp_path: Path, notice_here: str) -> None:
    with aws(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        train = ("train", "mini-gpt", "--max-cost", "20", "--provider", "aws", *cloud.asks, "--spot", *SHORT)
        begun = begin(user, *train, "--keep-going", **shim(tmp_path / "shim", notice_here))
        wait_for(user, "a checkpoint", lambda: whole_at_home(user) > 0, begun)
        Notice.is_given = True
        ended = lambda: any(record.event is Event.TRAIN_OBSERVED for record in records(user))  # noqa: E731
        wait_for(user, "the end of the first machine's work", ended, begun)
        Notice.is_given = False
        assert begun.wait(PATIENCE_S) == 0, user.said()
        (leg,) = legs(user)
        saved = next(record.data for record in records(user) if record.event is Event.TRAIN_OBSERVED)
        assert saved["reason"] == "preempted"
        assert leg["step"] == leg["reached"] > 0, "all that was trained was saved, and came home"
        assert leg["step"] % EVERY, "it was saved for the notice, between two checkpoints"
        receipt = user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"]
        assert [leg["again"] for leg in receipt["legs"]] == [0, 0]
        bids = {form["InstanceMarketOptions.SpotOptions.SpotInstanceType"] for form in cloud.emulator.launches}
        assert bids == {"one-time"}
        assert all("on_demand_micros" in leg for leg in receipt["legs"])
        assert {rental["rate_is"] for rental in receipt["cost"]["rentals"]} == {"provider-limit"}
        assert receipt["cost"]["is"] == "bound", "AWS bills the price of the zone, which moves below the maximum"
        assert cloud.alive() == []
        assert user.envelope("audit")[1]["ok"] is True


def test_killed_between_two_aws_machines_it_is_one_run(tmp_path: Path, notice_here: str) -> None:
    """The first machine still lives while its files are downloaded, because AWS has given notice."""
    died = tmp_path / "died"
    environment = shim(tmp_path / "shim", notice_here + DYING, DIED_AT=str(died))
    with aws(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        train = ("train", "mini-gpt", "--max-cost", "20", "--provider", "aws", *cloud.asks, "--spot", *RECIPE)
        assert begin(user, *train, "--keep-going", "--detach", **environment).wait(PATIENCE_S) == 0, user.said()
        wait_for(user, "a checkpoint", lambda: whole_at_home(user) > 0)
        died.touch()
        Notice.is_given = True
        deaths: list[str] = []

        def between() -> None:
            Notice.is_given = False
            deaths.append(died.read_text())

        dies_on_its_way(user, died, environment, between)
        assert len(cloud.emulator.world.instances) == 2
        has_moved_once(user, cloud, [*deaths[-1].splitlines(), "create.observed"])


SLOW = """\
import time
class Slow(list):
    def __getitem__(self, place):
        time.sleep(0.01)
        return super().__getitem__(place)
"""


def test_a_hugging_face_trainer_continues_on_another_machine(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    script = HUGGING_FACE.replace("save_steps=10", "save_steps=20").replace("=rows)", "=Slow(rows))")
    assert "Slow(rows)" in script
    (lab / "hf.py").write_text(SLOW + script)
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        begun = begin(
            user, "run", "--provider", "runpod", "--gpu", "cpu", "--max-cost", "5", "--upload", str(lab),
            "--keep-going", "--checkpoint-glob", "out/checkpoint-*", "--resume-arg", "{}", "--", "python", "hf.py",
            "160",
        )  # fmt: skip
        home = user.home / "runs" / "fox-41" / "artifacts" / "outputs" / "out"
        inventory = Inventory(RunFolder(user.home / "runs" / "fox-41"))
        wait_for(user, "a whole checkpoint", lambda: bool(inventory.memory.whole), begun)
        (pod,) = cloud.alive()
        with cloud.emulator.world.lock:
            cloud.emulator.world.act(pod.id, "stop")
        assert begun.wait(PATIENCE_S) == 0, user.said()
        (leg,) = legs(user)
        steps = {int(file["name"].split("/")[2].removeprefix("checkpoint-")) for file in leg["files"]}
        assert len(steps) == 1, "it is one checkpoint, a folder of many files"
        assert min(steps) >= 20
        last = json.loads((home / "checkpoint-160" / "trainer_state.json").read_text())
        logged = [entry["step"] for entry in last["log_history"] if "loss" in entry]
        assert logged == list(range(5, 161, 5)), "its own state came along: it went on where it was saved"
        assert cloud.alive() == []
        assert user.envelope("audit")[1]["ok"] is True


def test_a_users_script_continues_on_another_machine(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "train.py").write_text(NANOGPT.replace("i % 10", "i % 300"))
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        begun = begin(
            user, "run", "--provider", "runpod", "--gpu", "cpu", "--max-cost", "5", "--upload", str(lab),
            "--keep-going", "--checkpoint-glob", "out-char/ckpt.pt", "--resume-arg=--init_from=resume",
            "--", "python", "train.py", "--max_iters=1500",
        )  # fmt: skip
        home = user.home / "runs" / "fox-41" / "artifacts" / "outputs" / "out-char" / "ckpt.pt"
        wait_for(user, "a checkpoint", lambda: home.exists() and json.loads(home.read_text())["iter"] > 0, begun)
        (pod,) = cloud.alive()
        with cloud.emulator.world.lock:
            cloud.emulator.world.act(pod.id, "stop")
        assert begun.wait(PATIENCE_S) == 0, user.said()
        assert json.loads(home.read_text()) == {"iter": 1499}
        (leg,) = legs(user)
        lines = [
            line for line in (user.home / "runs/fox-41/run.log").read_text().splitlines() if line.startswith("iter")
        ]
        iters = [int(line.split()[1].rstrip(":")) for line in lines]
        again = [number for number, before in zip(iters[1:], iters, strict=False) if number <= before]
        assert len(again) == 1, "it began once more, and not at the beginning"
        assert again[0] % 300 == 1
        assert [file["name"] for file in leg["files"]] == ["outputs/out-char/ckpt.pt"]
        assert cloud.alive() == []
        assert user.envelope("audit")[1]["ok"] is True

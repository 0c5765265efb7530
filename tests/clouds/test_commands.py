"""Tests of a user's own script on a rented machine: it has the same cap, proof and receipt as the bundled trainer."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.money import usd
from gpurun.remote.key_pairs import make_keys
from tests.any_names import NASTY, below, possible, script
from tests.clouds.rented import CLOUDS, Cloud, User, kill_supervisors, somebody
from tests.emulators import guests
from tests.emulators.guests import Faults, Guest, Meter
from tests.users_scripts import COURSE, HUGGING_FACE, NANOGPT

pytestmark = pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")

EVERY_DAY = "runpod"  # The other clouds run only in `make full`.
ALL = [
    pytest.param(name, marks=[pytest.mark.xdist_group(f"command on {name}")] + [pytest.mark.slow] * (name != EVERY_DAY))
    for name in sorted(CLOUDS)
]
SCRIPT = """\
import json, os, signal, sys, time
ckpt, out = "out/ckpt.json", "out/log.txt"
os.makedirs("out", exist_ok=True)
first = json.load(open(ckpt))["step"] + 1 if "--resume" in sys.argv else 0
assert open("more/words.txt").read() == "hello"
print("token", os.environ["MY_TOKEN"], os.environ["MODE"], flush=True)
def save(step):
    json.dump({"step": step}, open(ckpt, "w"))
for step in range(first, first + int(sys.argv[1])):
    def stop(*_):
        save(step)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    line = f"step {step} | loss {4 / (step + 1):.4f} | lr 3.0e-04 | 40,000 tok/s"
    print(line, flush=True)
    open(out, "a").write(line + "\\n")
    if step % 50 == 0:
        save(step)
    time.sleep(0.02)
save(step)
"""


@pytest.fixture(scope="module", params=ALL)
def user(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("command")
    with CLOUDS[request.param](folder / "cloud") as cloud, somebody(cloud, folder / "home") as user:
        lab = folder / "lab"
        (lab / "more").mkdir(parents=True)
        (lab / "more" / "words.txt").write_text("hello")
        (lab / "train.py").write_text(SCRIPT)
        yield user


def lab_of(user: User) -> str:
    return str(user.home.parent / "lab")


def runs(user: User, *words: str, name: str, more: tuple[str, ...] = ()) -> Any:
    return user.types(
        "run", "--provider", user.cloud.name, "--max-cost", "5", "--yes", "--json", "--name", name, *user.cloud.asks,
        "--upload", lab_of(user), "--checkpoint-glob", "out/ckpt.json", "--resume-arg", "--resume",
        "--secret", "MY_TOKEN", "--env", "MODE=paid", *more, "--", "python", "train.py", *words, MY_TOKEN="canary-77",
    )  # fmt: skip


def receipt(user: User, name: str) -> Any:
    return user.envelope("receipt", name)[1]["data"]["statement"]["predicate"]


def brought(user: User, name: str) -> Path:
    return user.home / "runs" / name / "artifacts" / "outputs" / "out"


def test_outputs_are_home_within_the_cap_and_the_machine_is_gone(user: User) -> None:
    done = runs(user, "120", name="fox-41")
    assert done.returncode == 0, done.stderr + user.said()
    assert user.cloud.alive() == []
    predicate = receipt(user, "fox-41")
    assert user.cloud.meter.total_micros() <= predicate["cost"]["upper_bound_micros"] <= usd(5)
    assert predicate["teardown"]["is"] == "destroyed"
    command = predicate["asked"]["command"]
    assert command == {"argv": ["python", "train.py", "120"], "env": ["MODE"], "secrets": ["MY_TOKEN"]}
    assert json.loads((brought(user, "fox-41") / "ckpt.json").read_text()) == {"step": 119}
    assert (brought(user, "fox-41") / "log.txt").read_text().count("loss") == 120
    assert "token [secret] paid" in (user.home / "runs/fox-41/run.log").read_text()
    assert [path for path in user.home.rglob("*") if path.is_file() and b"canary-77" in path.read_bytes()] == []
    assert user.envelope("audit")[1]["ok"] is True


@pytest.mark.slow
def test_a_script_stopped_by_its_hours_continues_elsewhere(user: User) -> None:
    done = runs(user, "100000", name="owl-1", more=("--hours", "0.002"))
    assert done.returncode == 7, done.stderr + user.said("owl-1")
    step = json.loads((brought(user, "owl-1") / "ckpt.json").read_text())["step"]
    assert step > 20
    assert "gpurun run --from owl-1" in done.stderr + done.stdout + user.types("receipt", "owl-1").stdout
    again = runs(user, "30", name="owl-2", more=("--from", "owl-1"))
    assert again.returncode == 0, again.stderr + user.said("owl-2")
    assert json.loads((brought(user, "owl-2") / "ckpt.json").read_text())["step"] == step + 30
    assert user.cloud.alive() == []
    assert user.envelope("audit")[1]["ok"] is True


@pytest.mark.slow
def test_its_supervisor_may_be_killed_while_it_runs(user: User) -> None:
    begun = runs(user, "400", name="hen-1", more=("--detach",))
    assert begun.returncode == 0, begun.stderr + user.said("hen-1")
    kill_supervisors(user.home)
    resumed = user.types("resume", "hen-1", MY_TOKEN="canary-77")
    assert resumed.returncode == 0, resumed.stderr + user.said("hen-1")
    assert json.loads((brought(user, "hen-1") / "ckpt.json").read_text()) == {"step": 399}
    assert user.cloud.alive() == []
    assert user.envelope("audit")[1]["ok"] is True


BROUGHT = {
    "mini_gpt2_train.py": (COURSE, ["python", "mini_gpt2_train.py"], {"gpu_train_log.txt", "mini_gpt2_checkpoint.pt"}),
    "train.py": (NANOGPT, ["python", "train.py", "--max_iters=120"], {"out-char/ckpt.pt"}),
    "hf.py": (HUGGING_FACE, ["python", "hf.py", "20"], {"out/checkpoint-20/model.safetensors"}),
    "speedrun.sh": ("mkdir out; for i in 1 2 3; do echo $i >> out/log; done", ["bash", "speedrun.sh"], {"out/log"}),
}
"""By the script's file name: its text, its command line, and the outputs that must be downloaded."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BROUGHT)
def test_real_world_scripts_run_unchanged_and_bring_outputs_home(user: User, name: str, tmp_path: Path) -> None:
    text, words, outputs = BROUGHT[name]
    (tmp_path / name).write_text(text)
    run = f"yak-{len(name)}"
    done = user.types(
        "run", "--provider", user.cloud.name, "--max-cost", "5", "--yes", "--json", "--name", run, *user.cloud.asks,
        "--upload", str(tmp_path), "--", *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + user.said(run)
    home = user.home / "runs" / run / "artifacts" / "outputs"
    assert outputs <= {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
    assert user.cloud.alive() == []
    assert user.envelope("audit", run)[1]["ok"] is True


@pytest.mark.slow
def test_on_a_box_of_ones_own_nothing_of_it_is_left(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "identity")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "run.sh").write_text("echo step 1 '|' loss 2.5; mkdir out; echo $MY_TOKEN | wc -c > out/count")
    with Guest.boot(user="ubuntu", folder=tmp_path / "box", authorized_keys=[keys.client_public]) as box:
        box.wait_ready()
        place = f"{box.user}@{box.host}:{box.port}"
        asks = ("--host", place, "--identity", str(tmp_path / "identity" / "client"), "--gpu", "cpu")
        with somebody(Cloud("ssh", {}, Meter(time.time), list, asks), tmp_path / "home") as user:
            done = user.types(
                "run", "--provider", "ssh", *asks, "--yes", "--json", "--name", "fox-41", "--secret", "MY_TOKEN",
                "--upload", str(tmp_path / "lab"), "--", "bash", "run.sh", MY_TOKEN="canary-77",
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr + user.said()
            assert (brought(user, "fox-41") / "count").read_text().strip() == "10"
            assert receipt(user, "fox-41")["teardown"]["is"] == "user_operated"
        assert list((box.root / "home/ubuntu").glob(".gpurun/*")) == []
    assert not list(Path("/dev/shm").glob("gpurun-*"))


@pytest.mark.slow
def test_files_of_any_name_and_number_come_home_despite_a_kill(user: User, tmp_path: Path) -> None:
    files = possible([*NASTY, *(b"frames/%d/img %04d.png" % (number % 3, number) for number in range(1_500))])
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.py").write_text(f"{script(files)}\nimport time\ntime.sleep(4)\n")
    words = ("--provider", user.cloud.name, "--max-cost", "5", "--yes", "--json", "--detach", *user.cloud.asks)
    begun = user.types("run", *words, "--name", "elk-9", "--upload", str(tmp_path / "lab"), "--", "python", "train.py")
    assert begun.returncode == 0, begun.stderr + user.said("elk-9")
    artifacts = user.home / "runs" / "elk-9" / "artifacts" / "outputs"
    end = time.monotonic() + 120
    while not list(artifacts.glob("frames/*/*")) and time.monotonic() < end:
        time.sleep(0.05)
    kill_supervisors(user.home)
    resumed = user.types("resume", "elk-9")
    assert resumed.returncode == 0, resumed.stderr + user.said("elk-9")
    assert below(artifacts) == files
    assert user.cloud.alive() == []
    assert user.envelope("audit", "elk-9")[1]["ok"] is True


BACKGROUND = """\
mkdir -p ~/checkpoints && echo weights > ~/checkpoints/last.pt
nohup python3 -c 'while True: pass' > train.log 2>&1 &
echo started
"""


def test_background_training_on_a_box_is_exit_6_and_strays_stay(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "identity")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "run.sh").write_text(BACKGROUND)
    with Guest.boot(user="ubuntu", folder=tmp_path / "box", authorized_keys=[keys.client_public]) as box:
        box.wait_ready()
        place = f"{box.user}@{box.host}:{box.port}"
        asks = ("--host", place, "--identity", str(tmp_path / "identity" / "client"), "--gpu", "cpu")
        with somebody(Cloud("ssh", {}, Meter(time.time), list, asks), tmp_path / "home") as user:
            done = user.types(
                "run", "--provider", "ssh", *asks, "--yes", "--json", "--name", "fox-41",
                "--upload", str(tmp_path / "lab"), "--", "bash", "run.sh",
            )  # fmt: skip
            assert done.returncode == 6, done.stdout + done.stderr + user.said()
            training = receipt(user, "fox-41")["training"]
            assert (training["outcome"], training["reason"], training["exit_code"]) == ("failed", "still_working", 0)
            assert "still working" in training["message"]
            assert "~/checkpoints/last.pt (8 B)" in training["message"]
            assert "hold.intended" not in user.events()
            assert user.envelope("audit")[1]["ok"] is True
        assert (box.root / "home/ubuntu/checkpoints/last.pt").read_text() == "weights\n"


ELSEWHERE = """\
mkdir -p ~/checkpoints out && echo here > out/log.txt
head -c 2000000 /dev/urandom > ~/checkpoints/last.pt
echo scratch > /tmp/epoch.ckpt
echo cache > ~/.cache.txt
"""


def elsewhere(user: User, name: str, *more: str) -> Any:
    folder = user.home.parent / f"lab-{name}"
    folder.mkdir()
    (folder / "run.sh").write_text(ELSEWHERE)
    return user.types(
        "run", "--provider", user.cloud.name, "--max-cost", "5", "--yes", "--json", "--name", name, *user.cloud.asks,
        "--upload", str(folder), *more, "--", "bash", "run.sh",
    )  # fmt: skip


def state_of(user: User, name: str) -> Any:
    return next(run for run in user.envelope("ps", "--all")[1]["data"]["runs"] if run["run"] == name)


def until(true: Any, limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


def test_results_outside_the_folder_are_named_and_held(user: User, tmp_path: Path) -> None:
    begun = elsewhere(user, "elk-1", "--detach")
    assert begun.returncode == 0, begun.stderr + user.said("elk-1")
    until(lambda: state_of(user, "elk-1")["phase"] == "held")
    until_wall = state_of(user, "elk-1")["held_until_wall"]
    assert "held until" in user.types("ps").stdout
    kill_supervisors(user.home)
    resumed = user.resumes("elk-1")
    assert state_of(user, "elk-1")["held_until_wall"] == until_wall
    printed = user.types("collect", "elk-1").stdout
    assert "~/checkpoints/last.pt (2 MB)" in printed
    assert "/tmp/epoch.ckpt" in printed
    assert ".cache.txt" not in printed
    (by_hand,) = [line.removeprefix("By hand: ") for line in printed.splitlines() if line.startswith("By hand: ")]
    *words, _ = shlex.split(by_hand.replace(":PATH", ":checkpoints/last.pt"))
    subprocess.run([*words, str(tmp_path)], check=True, stdin=subprocess.DEVNULL)
    assert (tmp_path / "last.pt").stat().st_size == 2_000_000
    assert user.cloud.alive() != []
    destroyed = user.types("destroy", "elk-1", "--yes")
    assert destroyed.returncode == 6, destroyed.stderr + user.said("elk-1")
    assert resumed.wait(60) == 6
    assert user.cloud.alive() == []
    ended = receipt(user, "elk-1")
    assert (ended["training"]["reason"], ended["training"]["exit_code"]) == ("outputs_elsewhere", 0)
    assert "--outputs '~/checkpoints/**'" in ended["training"]["message"]
    assert user.cloud.meter.total_micros() <= usd(10)
    assert user.envelope("audit")[1]["ok"] is True


@pytest.mark.slow
def test_a_hold_that_is_over_ends_the_machine_with_proof(user: User) -> None:
    done = elsewhere(user, "elk-2", "--hold-on-failure", "1")
    assert done.returncode == 6, done.stderr + user.said("elk-2")
    assert user.cloud.alive() == []
    predicate = receipt(user, "elk-2")
    assert 55 <= predicate["runtime"]["phases_s"]["hold"] <= 65
    assert predicate["teardown"]["is"] == "destroyed"
    assert user.envelope("audit")[1]["ok"] is True


FULL = """\
mkdir out && head -c 3000000 /dev/urandom > out/ckpt.pt && sha256sum out/ckpt.pt
cat /dev/zero > fill 2>/dev/null
rm -f fill.log; echo "the disk is full" > out/last.txt; exit 0
"""


@pytest.mark.xdist_group("command on runpod")
def test_a_disk_filled_by_the_command_loses_nothing_finished(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "run.sh").write_text(FULL)
    with (
        CLOUDS["runpod"](tmp_path / "cloud", faults=Faults(disk_mb=60)) as cloud,  # type: ignore[call-arg]
        somebody(cloud, tmp_path / "home") as user,
    ):
        done = user.types(
            "run", "--provider", "runpod", "--max-cost", "5", "--yes", "--json", "--name", "emu-1", *cloud.asks,
            "--outputs", "out/**", "--upload", str(tmp_path / "lab"), "--hold-on-failure", "1", "--", "bash", "run.sh",
        )  # fmt: skip
        log = (user.home / "runs/emu-1/run.log").read_text()
        assert done.returncode == 0, done.stderr + user.said("emu-1")
        brought = user.home / "runs/emu-1/artifacts/outputs/out/ckpt.pt"
        assert hashlib.sha256(brought.read_bytes()).hexdigest() == log.split()[0]
        assert cloud.alive() == []

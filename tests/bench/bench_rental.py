"""Where the seconds of a small rental go, on an emulated cloud with a real machine: run by `make bench-rental`.

Measures three times: from a ready machine to the first step, without the transfer and Python's import of torch; from
Ctrl-C to the proof of death; and, in a run that ends normally, from the last step to the destroy request, without the
copying.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Event, Record
from gpurun.ledger.journal import read_journal
from tests.clouds.rented import CLOUDS, SMALL, User

ROUNDS = 3


def main() -> None:
    print("cloud   ready→first step, less transfer and import   Ctrl-C→proven   last step→destroy sent, less copying")
    for name, opened in CLOUDS.items():
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as place, opened(Path(place) / "cloud") as cloud:
                user = User(cloud, Path(place) / "home")
                overhead_s, proof_s = rental(user)
                print(f"{name:7} {overhead_s:10.2f} s {proof_s:37.1f} s {ending(user):15.2f} s", flush=True)


def rental(user: User) -> tuple[float, float]:
    """Start a run and interrupt it once it trains; return (start overhead, Ctrl-C to proof of death), in seconds."""
    command = [sys.executable, "-m", "gpurun.cli.app", "train", "mini-gpt", "--provider", user.cloud.name, "--yes",
               "--max-cost", "5", "--name", "fox-41", "--on-interrupt", "stop", *user.cloud.asks, *SMALL,
               "--set", "train.steps=100000", "--set", "train.checkpoint_every=100000", "--hours", "0.1"]  # fmt: skip
    child = subprocess.Popen(command, env=user.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = user.home / "runs" / "fox-41"
    for _ in ticks(SystemClock(), 0.1, 180):
        if any(event["kind"] == "step" for event in events(folder)):
            break
    pressed_wall = SystemClock().wall()
    child.send_signal(signal.SIGINT)
    child.wait(180)
    seen = {record.event: record for record in read_journal(folder / "journal.jsonl").records}
    return overhead(seen, events(folder)), seen[Event.DEATH_PROVEN].wall - pressed_wall


def ending(user: User) -> float:
    """Run a training to its end; return the seconds from its last step to the destroy request, less the copying."""
    user.trains(name="owl-7")
    folder = user.home / "runs" / "owl-7"
    seen = {record.event: record for record in read_journal(folder / "journal.jsonl").records}
    last_wall = max(event["wall"] for event in events(folder) if event["kind"] == "step")
    copied_s = seen[Event.COLLECT_OBSERVED].data["seconds"]
    return float(seen[Event.DESTROY_INTENDED].wall - last_wall - copied_s)


def overhead(seen: dict[Event, Record], story: list[dict[str, Any]]) -> float:
    """Return the seconds from the ready machine to the first step, without the transfer and the trainer's own start."""
    first = next(event for event in story if event["kind"] == "step")
    start = next(event for event in story if event["kind"] == "start")
    importing_s = start["wall"] - seen[Event.TRAIN_STARTED].data["started_wall"]
    whole_s = first["wall"] - seen[Event.READY_OBSERVED].wall
    return float(whole_s - seen[Event.SHIP_OBSERVED].data["seconds"] - importing_s)


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the trainer's events whose whole line has been downloaded."""
    path = folder / "events.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines() if line]


if __name__ == "__main__":
    main()

"""Tests that a run is resumed after its supervisor was killed in the upload, the training and the download.

A proxy in front of the machine's sshd delays the traffic and counts the bytes in each direction.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from zstandard import ZstdCompressor

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Event
from gpurun.ledger.journal import read_journal
from tests.clouds.rented import CLOUDS, Cloud, User, kill_supervisors, somebody
from tests.emulators import guests
from tests.emulators.proxy import Proxy
from tests.later import LATER

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")]

ROUND_TRIP_S = 0.05
# Text that does not compress well: about a third of it is sent when the first supervisor dies.
TEXT_BYTES, UNDER_WAY_BYTES = 24_000_000, 9_000_000
# A cut loses the bytes in transit: one SSH window per lane, and what is in both computers' buffers.
LOST_BYTES = 5_000_000
MOST_SENT = 1.3
# Beside the shards: the trainer, the agent and logins are sent; polls, log and events of a minute are received.
OTHER_SENT_BYTES, OTHER_BROUGHT_BYTES = 1_000_000, 2_000_000
_hosts = itertools.count(1)
compress = ZstdCompressor(level=1).compress


class Ways:
    """The proxies in front of a cloud's machines."""

    def __init__(self, cloud: Cloud) -> None:
        self.proxies: list[Proxy] = []
        self._boot = cloud.emulator.world.boot
        cloud.emulator.world.boot = self._booted

    def _booted(self, wanted: Any) -> Any:
        guest = self._boot(wanted)
        at = (f"127.91.7.{next(_hosts)}", guest.port)
        self.proxies.append(Proxy(guest.port, host=guest.host, at=at, round_trip_s=ROUND_TRIP_S))
        guest.host = at[0]
        return guest

    @property
    def sent_bytes(self) -> int:
        return sum(proxy.sent_bytes for proxy in self.proxies)

    @property
    def brought_bytes(self) -> int:
        return sum(proxy.brought_bytes for proxy in self.proxies)

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture(params=["runpod", pytest.param("lambda", marks=LATER), pytest.param("aws", marks=LATER)])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[User, Ways]]:
    with CLOUDS[request.param](tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        ways = Ways(cloud)
        try:
            yield user, ways
        finally:
            ways.close()


def wait_until(true: Callable[[], object], user: User) -> None:
    for _ in ticks(SystemClock(), 0.01, 120):
        if true():
            return
    pytest.fail(user.said())


def resume_until_then_kill(true: Callable[[], object], user: User) -> None:
    """Run `gpurun resume` until a condition is true, then kill it and the supervisor."""
    command = [sys.executable, "-m", "gpurun.cli.app", "resume", "fox-41", "--no-progress"]
    with subprocess.Popen(command, env=user.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as viewer:  # fmt: skip
        try:
            wait_until(true, user)
        finally:
            viewer.kill()
            kill_supervisors(user.home)


def data_of(user: User, event: Event) -> dict[str, Any]:
    records = read_journal(user.home / "runs" / "fox-41" / "journal.jsonl").records
    return next(dict(record.data) for record in reversed(records) if record.event is event)


def test_killed_in_any_phase_and_resumed_nothing_is_sent_twice(far: tuple[User, Ways], tmp_path: Path) -> None:
    user, ways = far
    text = tmp_path / "text.txt"
    text.write_bytes(base64.encodebytes(random.Random(5).randbytes(TEXT_BYTES * 3 // 4)))
    begun = user.begins("--data", str(text), "--set", "data.limit_mb=0", "--set", "train.steps=900", "--set",
                        "train.checkpoint_every=300")  # fmt: skip

    wait_until(lambda: Event.SHIP_INTENDED in user.events() and ways.sent_bytes > UNDER_WAY_BYTES, user)
    kill_supervisors(user.home)
    assert begun.wait(60) == 0, "its machine was ready"
    assert Event.SHIP_OBSERVED not in user.events(), "killed while it uploaded"
    shown = json.loads((user.home / "runs" / "fox-41" / "moving.json").read_bytes())
    assert (shown["what"], shown["total"] > 2 * TEXT_BYTES) == ("ship", True), "what a viewer was shown"

    resume_until_then_kill(lambda: Event.TRAIN_STARTED in user.events(), user)
    assert Event.TRAIN_OBSERVED not in user.events(), "killed while it trained"
    sent_bytes, resent_bytes = ways.sent_bytes, data_of(user, Event.SHIP_OBSERVED)["sent_bytes"]

    resume_until_then_kill(lambda: Event.COLLECT_INTENDED in user.events(), user)
    assert Event.COLLECT_OBSERVED not in user.events(), "killed while it collected"

    code, _ = user.envelope("resume", "fox-41")
    assert code == 0, user.said()
    assert user.cloud.alive() == []
    assert user.events().count(Event.CREATE_OBSERVED) == 1

    files = data_of(user, Event.COLLECT_OBSERVED)["files"]
    artifacts = user.home / "runs" / "fox-41" / "artifacts"
    digests = {file["name"]: hashlib.sha256((artifacts / file["name"]).read_bytes()).hexdigest() for file in files}
    assert digests == {file["name"]: file["sha256"] for file in files}
    assert {900} <= {file["step"] for file in files}
    packed_bytes = sum(len(compress(shard.read_bytes())) for shard in user.home.glob("runs/fox-41/data/*"))
    assert resent_bytes < packed_bytes - UNDER_WAY_BYTES + LOST_BYTES, "what was there is not sent again"
    assert sent_bytes <= MOST_SENT * packed_bytes + OTHER_SENT_BYTES
    made_bytes = sum(file["bytes"] for file in files) * 3 // 2  # Three checkpoints are downloaded, two are kept.
    assert ways.brought_bytes <= MOST_SENT * made_bytes + OTHER_BROUGHT_BYTES
    code, audit = user.envelope("audit")
    assert (code, audit["ok"]) == (0, True), json.dumps(audit)

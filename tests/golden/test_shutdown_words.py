"""Tests of the words about the end of a user's own box: when it is confirmed, in the receipt and in the audit."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from drawing import check_scenes

from gpurun.cli import shutdown_probe
from gpurun.cli.commands.confirm_shutdown import confirm_shutdown
from gpurun.cli.commands.receipt import receipt
from gpurun.cli.session import Session
from gpurun.cli.shutdown_probe import ANSWERS
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import GpurunError
from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.ledger.signing import PRIVATE_NAME, make_envelope, payload_of
from tests.unit.confirm import BoxRun


@pytest.fixture
def session(tmp_path: Path) -> Session:
    home = Home(tmp_path / "home").prepare()
    BoxRun(home).until_gone().settle()
    return Session(home=home, quiet=True, clock=VirtualClock(1_800_007_200.0))


def confirm(session: Session, words: str | None, seen: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutdown_probe, "try_to_connect", lambda host, port: seen)
        try:
            return confirm_shutdown(session, "fox-41", words).text
        except GpurunError as error:
            return f"{error.what}\n{error.hint}\n[{error.code}]"


def in_receipt(session: Session) -> str:
    text = receipt(session, "fox-41", md=False).text
    return "\n".join(line for line in text.splitlines() if re.search("(?i)shutdown|shut down", line))


def in_audit(session: Session) -> str:
    (row,) = audit(session.home).rows
    return "\n".join([row.death, *row.problems, *row.warnings])


def test_the_end_of_a_box_of_ones_own(session: Session) -> None:
    path = session.home.run("fox-41").path / "shutdown.json"
    scenes = {"it answers": confirm(session, None, ANSWERS), "nothing is known": confirm(session, None, "no network")}
    scenes["the receipt before"] = in_receipt(session)
    scenes["the user's word"] = confirm(session, "I pulled the plug", ANSWERS)
    scenes["the receipt after the user's word"] = in_receipt(session)
    scenes["it is silent"] = confirm(session, None, "refused")
    scenes["it was confirmed before"] = confirm(session, "I pulled the plug", "refused")
    scenes["the receipt after that"] = in_receipt(session)
    signed = json.loads(path.read_bytes())
    path.write_text(json.dumps(make_envelope(payload_of(signed), None)))
    scenes["a signature taken off"] = f"{in_receipt(session)}\n{in_audit(session)}"
    edited = json.loads(payload_of(signed))
    edited["predicate"]["box"] = "root@elsewhere:22"
    path.write_text(json.dumps(make_envelope(json.dumps(edited).encode(), None)))
    scenes["of another box"] = f"{in_receipt(session)}\n{in_audit(session)}"
    path.write_text("not json")
    scenes["no statement"] = in_audit(session)
    path.unlink()
    (session.home.keys / PRIVATE_NAME).unlink()
    scenes["without a key"] = confirm(session, None, "refused")
    check_scenes("shutdown-words.txt", scenes)

"""Tests of `gpurun confirm-shutdown`: it signs the results of attempts to connect, or the user's word."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli import shutdown_probe
from gpurun.cli.commands.confirm_shutdown import confirm_shutdown
from gpurun.cli.commands.receipt import receipt
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.shutdown_probe import ANSWERS, try_to_connect
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import MayBeBilling, UsageError, VerificationFailed
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import canonical
from gpurun.ledger.audit import AuditRow, audit
from gpurun.ledger.signing import PRIVATE_NAME, PUBLIC_NAME, load_signer, make_envelope, payload_of
from gpurun.ledger.write_receipt import read_receipt
from tests.refusals import lacking, refusal
from tests.unit.confirm import BoxRun
from tests.unit.ledger_samples import RATE, finished_run


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_800_007_200.0)  # Two hours after the run's start.


@pytest.fixture
def session(home: Home, clock: VirtualClock) -> Session:
    return Session(home=home, quiet=True, clock=clock)


@pytest.fixture
def folder(home: Home) -> RunFolder:
    return BoxRun(home).until_gone().settle().folder


def always(seen: str) -> Callable[[str, int], str]:
    return lambda host, port: seen


def confirm(session: Session, run: str, words: str | None, knocks: Callable[[str, int], str]) -> Result:
    """Run `gpurun confirm-shutdown`, with `knocks` in place of each attempt to connect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutdown_probe, "try_to_connect", knocks)
        return confirm_shutdown(session, run, words)


def row(home: Home) -> AuditRow:
    (only,) = audit(home).rows
    return only


def edit(home: Home, folder: RunFolder, change: Callable[[Any], None]) -> None:
    """Change the signed statement about the shutdown and sign it again, as the owner of the key could."""
    path = folder.path / "shutdown.json"
    statement = json.loads(payload_of(json.loads(path.read_bytes())))
    change(statement)
    path.write_text(json.dumps(make_envelope(canonical(statement), load_signer(home.keys))))


# Attempts to connect --------------------------------------------------------------------------------------------------


def test_a_box_that_stays_silent_is_confirmed_and_signed(
    session: Session, home: Home, folder: RunFolder, clock: VirtualClock
) -> None:
    knocked: list[tuple[str, int]] = []

    def refuse(host: str, port: int) -> str:
        knocked.append((host, port))
        return "refused"

    result = confirm(session, "fox-41", None, refuse)
    assert set(knocked) == {("connect.example.com", 40123)}
    statement = result.data["statement"]
    assert [attempt["seen"] for attempt in statement["checked"]["tries"]] == ["refused"] * 5
    assert statement["checked"]["tries"][-1]["at_s"] == 10.0
    assert (statement["verdict"], statement["words"]) == ("confirmed", None)
    found = row(home)
    assert (found.death, found.problems, found.warnings) == ("shutdown confirmed", (), ())


@pytest.mark.parametrize("knock_s", [1.75, 4.0, 6.0, 12.0])
def test_slow_calls_still_span_the_time_that_the_audit_wants(
    session: Session, home: Home, folder: RunFolder, clock: VirtualClock, knock_s: float
) -> None:
    """An attempt to connect may be slow, as with several addresses: the attempts must still span the required time."""

    def time_out(host: str, port: int) -> str:
        clock.sleep(knock_s)
        return "timed out"

    confirm(session, "fox-41", None, time_out)
    found = row(home)
    assert (found.death, found.problems) == ("shutdown confirmed", ())


def test_it_says_what_the_box_cost_to_its_end_not_just_training(session: Session, folder: RunFolder) -> None:
    """The receipt's cost ends with the run, but the box is billed to its shutdown: the statement includes that."""
    result = confirm(session, "fox-41", None, always("timed out"))
    seconds = 7200 + 10  # From the request to the end of the last attempt.
    assert result.data["statement"]["cost"]["until_confirmed_micros"] == -(-seconds // 60) * 60 * RATE // 3600
    assert "$5.03" in result.text


def test_a_clock_set_back_makes_no_box_cheaper_than_its_receipt(
    session: Session, home: Home, clock: VirtualClock
) -> None:
    run = BoxRun(home)
    run.write(run.opened(), run.intended(), run.created())
    run.clock.jump_wall(-3000)
    run.play(run.through_training(), run.death()).settle()
    clock.jump_wall(-6500)  # About five minutes after the end.
    micros = confirm(session, "fox-41", None, always("timed out")).data["statement"]["cost"]["until_confirmed_micros"]
    assert micros > (read_receipt(home, run.folder).predicate["cost"]["upper_bound_micros"] or 0)
    assert row(home).problems == ()


@pytest.mark.parametrize("past_s", [0.0004, 0.0006, 0.9999])
def test_its_cost_follows_from_the_stated_times_at_any_boundary(
    session: Session, home: Home, folder: RunFolder, clock: VirtualClock, past_s: float
) -> None:
    """The cost must follow from the stated milliseconds: by the exact clock it could be one billing unit higher."""
    clock.sleep(50 + past_s)  # 121 minutes after the request, once the ten seconds of attempts are over.
    confirm(session, "fox-41", None, always("refused"))
    assert row(home).problems == ()


def test_a_clock_from_before_the_end_signs_nothing_final(
    session: Session, folder: RunFolder, clock: VirtualClock
) -> None:
    """The clock was ahead during the run and is now corrected.

    A statement dated before the run's end proves nothing.
    """
    clock.jump_wall(-5400)
    with refusal(VerificationFailed, "shutdown.clock"):
        confirm(session, "fox-41", None, always("refused"))
    assert not (folder.path / "shutdown.json").exists()


def test_a_box_that_still_answers_and_costs_money_is_exit_9(session: Session, folder: RunFolder) -> None:
    with refusal(MayBeBilling, "shutdown.still_up", "$2.49/h"):
        confirm(session, "fox-41", None, always(ANSWERS))
    assert not (folder.path / "shutdown.json").exists()


def test_a_free_box_that_still_answers_is_exit_10(session: Session, home: Home) -> None:
    run = BoxRun(home, "owl-07")
    run.rate = 0
    run.until_gone().settle()
    with refusal(VerificationFailed, "shutdown.still_up", "connect.example.com port 40123"):
        confirm(session, "owl-07", None, always(ANSWERS))


def test_one_sign_of_life_among_the_tries_is_enough(session: Session, folder: RunFolder) -> None:
    seen = iter(["timed out", "timed out", ANSWERS])
    with pytest.raises(MayBeBilling):
        confirm(session, "fox-41", None, lambda host, port: next(seen))


@pytest.mark.parametrize(
    "seen", ["no network", "its name is not known here", "open without a greeting", "closed without a greeting"]
)
def test_what_tells_nothing_is_not_signed_as_an_end(session: Session, folder: RunFolder, seen: str) -> None:
    """Every box looks shut down to a laptop that is offline, so such attempts must not be signed."""
    with refusal(VerificationFailed, "shutdown.cannot_tell", "--force"):
        confirm(session, "fox-41", None, always(seen))
    assert not (folder.path / "shutdown.json").exists()


# The user's word ------------------------------------------------------------------------------------------------------


def test_the_users_word_is_signed_as_a_word_with_what_was_seen(session: Session, home: Home, folder: RunFolder) -> None:
    result = confirm(session, "fox-41", "I pulled the \x1b[31mplug", always(ANSWERS))
    statement = result.data["statement"]
    assert statement["verdict"] == "stated by the user"
    assert statement["checked"]["tries"][0]["seen"] == ANSWERS
    assert "\x1b" not in result.text + statement["words"]
    assert row(home).death == "shutdown stated"


def test_a_users_word_yields_to_later_sight_and_not_vice_versa(session: Session, home: Home, folder: RunFolder) -> None:
    confirm(session, "fox-41", "trust me", always(ANSWERS))
    confirm(session, "fox-41", None, always("refused"))
    assert row(home).death == "shutdown confirmed"
    again = confirm(session, "fox-41", "trust me", always(ANSWERS))
    assert again.data["statement"]["verdict"] == "confirmed"
    assert row(home).death == "shutdown confirmed"


@pytest.mark.parametrize("words", ["", "  "])
def test_a_word_must_be_a_word(session: Session, folder: RunFolder, words: str) -> None:
    with refusal(UsageError, "shutdown.no_words"):
        confirm(session, "fox-41", words, always("refused"))


# Runs that can be confirmed -------------------------------------------------------------------------------------------


def test_a_machine_that_gpurun_ended_has_nothing_to_confirm(session: Session, home: Home) -> None:
    finished_run(home)
    with pytest.raises(UsageError, match="'destroyed'"):
        confirm(session, "fox-41", None, always("refused"))


def test_a_run_without_a_receipt_is_not_over(session: Session, home: Home) -> None:
    BoxRun(home).until_gone()
    with refusal(UsageError, "receipt.none"):
        confirm(session, "fox-41", None, always("refused"))


# In the audit and the receipt -----------------------------------------------------------------------------------------


def shown(session: Session, **flags: bool) -> Result:
    return receipt(session, "fox-41", **{"md": False, **flags})


def test_the_audit_says_whose_duty_the_end_is_until_confirmed(home: Home, folder: RunFolder) -> None:
    assert row(home).death == "yours to end"


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload["subject"][0]["digest"].update(sha256="0" * 64),
        lambda payload: payload["subject"].append({"name": "another", "digest": {"sha256": "0" * 64}}),
        lambda payload: payload["predicate"].update(box="root@elsewhere:22"),
        lambda payload: payload["predicate"].update(run="owl-07"),
        lambda payload: payload["predicate"].update(confirmed_at="2020-01-01T00:00:00.000Z"),
        lambda payload: payload["predicate"]["cost"].update(until_confirmed_micros=1),
        lambda payload: payload["predicate"]["checked"].update(tries=[]),
        lambda payload: payload["predicate"]["checked"].update(tries=payload["predicate"]["checked"]["tries"][:1]),
        lambda payload: payload["predicate"]["checked"]["tries"][0].update(seen=ANSWERS),
        lambda payload: payload["predicate"].update(verdict="stated by the user"),
        lambda payload: payload["predicate"].update(words="trust me"),
        lambda payload: payload.update(predicateType="https://gpurun.dev/receipt/v1"),
        lambda payload: payload.pop("predicate"),
    ],
)
def test_even_the_keys_owner_cannot_state_what_does_not_follow(
    session: Session, home: Home, folder: RunFolder, change: Callable[[Any], None]
) -> None:
    confirm(session, "fox-41", None, always("refused"))
    edit(home, folder, change)
    found = row(home)
    assert found.death == "yours to end"
    assert any("shutdown.json" in problem for problem in found.problems)


def test_another_hand_is_seen(session: Session, home: Home, folder: RunFolder, tmp_path: Path) -> None:
    confirm(session, "fox-41", None, always("refused"))
    path = folder.path / "shutdown.json"
    stranger = load_signer(tmp_path / "other")
    path.write_text(json.dumps(make_envelope(payload_of(json.loads(path.read_bytes())), stranger)))
    assert [lacking(problem, "signature", "shutdown.json") for problem in row(home).problems] == [[]]
    path.write_text("not json")
    assert ["shutdown.json" in problem for problem in row(home).problems] == [True]


def test_without_a_key_it_is_unsigned_and_says_so(session: Session, home: Home, folder: RunFolder) -> None:
    (home.keys / PRIVATE_NAME).unlink()
    assert "Unsigned" in confirm(session, "fox-41", None, always("refused")).text
    found = row(home)
    assert (found.death, found.problems) == ("shutdown confirmed", ())
    assert any("shutdown.json" in warning for warning in found.warnings)
    (named,) = audit(home, public_key=(home.keys / PUBLIC_NAME).read_bytes()).rows
    assert ["shutdown.json" in problem for problem in named.problems] == [True]


def test_a_confirmation_for_a_machine_gpurun_ended_is_nonsense(home: Home) -> None:
    folder = finished_run(home)
    (folder.path / "shutdown.json").write_text("{}")
    assert len(row(home).problems) == 1


def test_the_receipt_shows_it_and_stays_the_same_receipt(session: Session, home: Home, folder: RunFolder) -> None:
    before = folder.receipt.read_bytes()
    assert "gpurun confirm-shutdown fox-41" in shown(session).text
    confirm(session, "fox-41", None, always("refused"))
    confirmed = str(shown(session).data["shutdown"])
    assert confirmed.startswith("shutdown confirmed")
    assert confirmed in " ".join(shown(session).text.split())
    assert "confirm-shutdown" not in shown(session).text
    assert confirmed in " ".join(shown(session, md=True).text.split())
    assert folder.receipt.read_bytes() == before
    assert read_receipt(home, folder).signature == "ok"


def test_an_unsigned_confirmation_is_shown_so_and_is_replaceable(session: Session, folder: RunFolder) -> None:
    confirm(session, "fox-41", None, always("refused"))
    path = folder.path / "shutdown.json"
    path.write_text(json.dumps(make_envelope(payload_of(json.loads(path.read_bytes())), None)))
    assert "unsigned" in str(shown(session).data["shutdown"])
    with refusal(MayBeBilling, "shutdown.still_up", "$2.49/h"):
        confirm(session, "fox-41", None, always(ANSWERS))
    confirm(session, "fox-41", None, always("refused"))
    assert "unsigned" not in str(shown(session).data["shutdown"])


@pytest.mark.parametrize(
    "change",
    [
        {"checked": {"tries": []}},
        {"checked": {"tries": [{"at_s": 10.0, "seen": "\x1b]0;all is well\x07"}]}},
        {"checked": {"tries": [{"at_s": "long", "seen": "refused"}]}},
        {"cost": {"until_confirmed_micros": "nothing"}},
        {"confirmed_at": "0001-01-01"},
    ],
    ids=["no tries", "an escape sequence", "no seconds", "no amount", "no stamp"],
)
@pytest.mark.parametrize("signed", [True, False])
def test_a_handwritten_file_is_not_a_statement_and_not_shown(
    session: Session, home: Home, folder: RunFolder, change: dict[str, Any], signed: bool
) -> None:
    confirm(session, "fox-41", None, always("refused"))
    edit(home, folder, lambda payload: payload["predicate"].update(change))
    if not signed:
        path = folder.path / "shutdown.json"
        path.write_text(json.dumps(make_envelope(payload_of(json.loads(path.read_bytes())), None)))
    assert "NOT CONFIRMED" in shown(session).text
    with refusal(VerificationFailed, "shutdown.unreadable"):
        confirm(session, "fox-41", None, always("refused"))


def test_the_receipt_shows_a_confirmation_that_fails_as_none(session: Session, home: Home, folder: RunFolder) -> None:
    confirm(session, "fox-41", None, always("refused"))
    edit(home, folder, lambda payload: payload["predicate"].update(box="root@elsewhere:22"))
    assert "NOT CONFIRMED" in shown(session).text
    (folder.path / "shutdown.json").write_text("not json")
    assert "NOT CONFIRMED" in shown(session).text


# Attempts to connect to real sockets ----------------------------------------------------------------------------------


@contextmanager
def server(*words: bytes, stay: bool = False) -> Iterator[int]:
    """Serve on a local port and yield the port; send `words` to each caller and then hang up, unless `stay` is true."""
    calls: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                call, _ = listening.accept()
            except OSError:
                return
            calls.append(call)
            for word in words:
                call.sendall(word)
            if not stay:
                call.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for call in calls:
                call.close()
            thread.join(5)


@pytest.mark.parametrize(
    ("words", "stay", "seen"),
    [
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], True, ANSWERS),
        ([b"welcome to the gateway\r\n", b"SSH-2.0-x\r\n"], True, ANSWERS),
        ([], False, "closed without a greeting"),
        ([], True, "open without a greeting"),
        ([b"HTTP/1.1 400\r\n"], True, "open without a greeting"),
        ([b"x" * 40_000], True, "something else answers"),
    ],
)
def test_a_port_that_takes_the_call_is_listened_to(words: list[bytes], stay: bool, seen: str) -> None:
    with server(*words, stay=stay) as port:
        assert try_to_connect("127.0.0.1", port, 0.5) == seen


def test_a_port_that_nobody_listens_at_refuses() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert try_to_connect("127.0.0.1", taken.getsockname()[1], 0.5) == "refused"


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (TimeoutError(), "timed out"),
        (OSError(113, "No route to host"), "unreachable"),
        (OSError(101, "Network is unreachable"), "no network"),
        (socket.gaierror(-3, "Temporary failure"), "its name is not known here"),
    ],
)
def test_what_keeps_a_call_from_being_made_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: OSError, seen: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert try_to_connect("box", 22, 0.5) == seen

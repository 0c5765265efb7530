"""Tests of `gpurun doctor`: which keys exist, what the clouds answer, and above all what is left in their accounts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.commands.doctor import doctor
from gpurun.cli.online_checks import check_online, online_code
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.clock import SystemClock
from gpurun.core.errors import ExitCode, SetupError, UsageError
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import Account, Instance, InstanceState, Leftover
from gpurun.ledger.run_lock import RunLock
from gpurun.providers import registry
from gpurun.providers.base import Unknown
from tests.emulators.fake.profile import RUNPOD
from tests.refusals import lacking

CLOCK = SystemClock()


class Cloud:
    """A cloud that answers from its fields. A function in `fails` runs first and may raise or wait."""

    traits = RUNPOD.traits

    def __init__(self, name: str = "runpod") -> None:
        self.name = name
        self.account = Account(provider=name, identity="ada@example.com")
        self.machines: list[Instance] = []
        self.things: list[Leftover] = []
        self.changed = False
        self.fails: dict[str, Callable[[], Any]] = {}

    def verify(self) -> Account:
        self.fails.get("verify", bool)()
        return self.account

    def find(self, token: str | None) -> list[Instance]:
        self.fails.get("find", bool)()
        return self.machines

    def leftovers(self, token: str | None) -> list[Leftover]:
        self.fails.get("leftovers", bool)()
        return self.things

    def remove(self, leftover: Leftover) -> None:
        self.changed = True

    def destroy(self, instance_id: str) -> None:
        self.changed = True


def machine(run: str = "elk-33", *, left_s: float | None = 600, **changes: Any) -> Instance:
    deadline = None if left_s is None else CLOCK.wall() + left_s
    facts = {"id": f"pod-{run}", "provider": "runpod", "token": f"gr-{run}-7f3a91c0", "run": run}
    state = {"state": InstanceState.RUNNING, "rate_micros_per_hour": usd("2.49"), "deadline_wall": deadline}
    return Instance(**{**facts, **state, **changes})


def thing(*, billed: bool = False, token: str = "gr-elk-33-7f3a91c0") -> Leftover:
    return Leftover(provider="runpod", kind="volume", id="vol-1", run="elk-33", token=token, billed=billed)


def failing(error: Exception) -> Callable[[], None]:
    def raise_error() -> None:
        raise error

    return raise_error


@pytest.fixture
def session(own_home: Path) -> Session:
    return Session(home=Home(own_home).prepare(), quiet=True)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    monkeypatch.setitem(registry.PROVIDERS, "runpod", lambda home, clock, choices: made)
    monkeypatch.setenv("RUNPOD_API_KEY", "a-key")
    return made


def findings_of(result: Result, level: str) -> str:
    return "\n".join(f"{f['text']} → {f['hint']}" for f in result.data["findings"] if f["level"] == level)


# Keys ----------------------------------------------------------------------------------------------------------------


def test_without_any_key_one_line_says_so_and_nothing_is_wrong(session: Session) -> None:
    result = doctor(session)
    assert len(findings_of(result, "warn").splitlines()) == 1
    assert result.exit_code is ExitCode.DONE


def test_it_says_the_planned_upload_rate_and_how_to_change_it(session: Session) -> None:
    assert "20 Mbit/s" in findings_of(doctor(session), "ok")
    session.home.config.write_text("uplink = 48")
    assert "48 Mbit/s" in findings_of(doctor(Session(home=session.home, quiet=True)), "ok")


def test_offline_it_names_the_keys_and_asks_nobody(session: Session, cloud: Cloud) -> None:
    cloud.fails["verify"] = failing(AssertionError("it was asked"))
    result = doctor(session)
    assert lacking(findings_of(result, "ok"), "runpod", "RUNPOD_API_KEY") == []
    assert "lambda" not in findings_of(result, "warn"), "a cloud that one does not use is no fault"


def test_a_named_cloud_without_a_key_is_told_with_the_command(session: Session) -> None:
    result = doctor(session, ["lambda"], online=True)
    assert "→ gpurun auth set lambda" in findings_of(result, "warn")


def test_a_key_that_works_is_told_with_its_account_and_balance(session: Session, cloud: Cloud) -> None:
    account = {"balance_micros": usd("12.34"), "clock_ahead_s": -0.4}
    cloud.account = cloud.account.model_copy(update=account)
    result = doctor(session, online=True)
    assert lacking(findings_of(result, "ok"), "ada@example.com", "RUNPOD_API_KEY", "$12.34", "within 1 s") == []
    assert (findings_of(result, "warn"), findings_of(result, "bad")) == ("", "")
    assert result.exit_code is ExitCode.DONE
    assert result.data["providers"][0]["account"]["balance_micros"] == usd("12.34")


def test_a_wrong_key_is_one_clear_line_and_exit_4(session: Session, cloud: Cloud) -> None:
    refused = SetupError("auth.refused", "The key is not known there.", hint="gpurun auth set runpod")
    cloud.fails["verify"] = failing(refused)
    result = doctor(session, online=True)
    assert findings_of(result, "bad") == f"runpod: {refused.what} → {refused.hint}"
    assert result.exit_code is ExitCode.SETUP


def test_a_lacking_right_an_empty_account_or_wrong_clock_warns(session: Session, cloud: Cloud) -> None:
    short = {"missing": ("ec2:DescribeInstances",), "balance_micros": usd(0), "clock_ahead_s": 75.0}
    cloud.account = cloud.account.model_copy(update=short)
    result = doctor(session, online=True)
    warnings = findings_of(result, "warn")
    assert lacking(warnings, "ec2:DescribeInstances", "1 m 15 s ahead") == []
    assert len(warnings.splitlines()) == 3
    assert result.exit_code is ExitCode.DONE


def test_a_key_sent_elsewhere_is_named_even_if_nothing_answers(
    session: Session, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_BASE_URL", "http://127.0.0.1:9")
    cloud.fails["verify"] = failing(Unknown("connection refused"))
    result = doctor(session, online=True)
    assert "http://127.0.0.1:9" in findings_of(result, "warn")
    assert "connection refused" in findings_of(result, "bad")


# Machines and leftovers -----------------------------------------------------------------------------------------------


def test_an_overdue_machine_outranks_all_and_is_not_touched(session: Session, cloud: Cloud) -> None:
    cloud.machines = [machine(left_s=-7500)]
    result = doctor(session, online=True)
    overdue = ("pod-elk-33", "RUNNING", "$2.49/h", "2 h 05 m", "→ gpurun reap --provider runpod")
    assert lacking(findings_of(result, "bad"), *overdue) == []
    assert result.exit_code is ExitCode.MAY_BE_BILLING
    assert not cloud.changed


def test_an_undriven_machine_within_its_lease_is_a_warning(session: Session, cloud: Cloud) -> None:
    cloud.machines = [machine()]
    result = doctor(session, online=True)
    assert "pod-elk-33" in findings_of(result, "warn")
    assert result.exit_code is ExitCode.DONE


def test_a_machine_driven_here_is_fine_and_so_are_its_things(session: Session, cloud: Cloud) -> None:
    cloud.machines, cloud.things = [machine()], [thing(billed=True)]
    session.home.run("elk-33").path.mkdir()
    session.home.run("elk-33").journal.write_text(f'{{"token":"{cloud.machines[0].token}"}}\n')
    with RunLock(session.home.run("elk-33").lock):
        result = doctor(session, online=True)
    assert "pod-elk-33" in findings_of(result, "ok")
    assert "pod-elk-33" not in findings_of(result, "bad")


def test_a_machine_without_a_deadline_is_told(session: Session, cloud: Cloud) -> None:
    cloud.machines = [machine(left_s=None)]
    result = doctor(session, online=True)
    assert lacking(findings_of(result, "bad"), "pod-elk-33", "--destroy --anyones") == [], "nor whose it is"
    assert result.exit_code is ExitCode.MAY_BE_BILLING


def test_dead_machines_still_listed_give_no_finding(session: Session, cloud: Cloud) -> None:
    cloud.machines = [machine(left_s=-7500, state=InstanceState.GONE)]
    result = doctor(session, online=True)
    assert (findings_of(result, "bad"), findings_of(result, "warn"), result.exit_code) == ("", "", ExitCode.DONE)


def test_things_left_over_are_a_warning_and_billed_ones_exit_9(session: Session, cloud: Cloud) -> None:
    cloud.things = [thing()]
    assert "volume vol-1" in findings_of(doctor(session, online=True), "warn")
    cloud.things = [thing(billed=True)]
    result = doctor(session, online=True)
    assert "and billed" in findings_of(result, "bad")
    assert result.exit_code is ExitCode.MAY_BE_BILLING


@pytest.mark.parametrize("verb", ["find", "leftovers"])
@pytest.mark.parametrize(
    "error", [Unknown("it timed out"), SetupError("auth.denied", "It may not list.", hint="Allow it.")]
)
def test_what_cannot_be_seen_is_never_called_nothing(
    session: Session, cloud: Cloud, verb: str, error: Exception
) -> None:
    *_, nothing_left = findings_of(doctor(session, online=True), "ok").splitlines()
    cloud.fails[verb] = failing(error)
    result = doctor(session, online=True)
    assert nothing_left not in findings_of(result, "ok")
    assert len(findings_of(result, "bad").splitlines()) == 1
    assert result.exit_code is ExitCode.SETUP


# Many clouds ---------------------------------------------------------------------------------------------------------


def test_a_cloud_that_never_answers_holds_up_no_other(
    session: Session, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_ever = threading.Event()
    stuck = Cloud("lambda")
    stuck.fails["verify"] = for_ever.wait
    monkeypatch.setitem(registry.PROVIDERS, "lambda", lambda home, clock, choices: stuck)
    monkeypatch.setenv("LAMBDA_API_KEY", "a-key")
    try:
        late, quick = check_online(session, ["lambda", "runpod"], limit_s=1.0)
    finally:
        for_ever.set()
    assert "1 s" in late.findings[0].text
    assert quick.account == cloud.account
    assert online_code([late, quick]) is ExitCode.SETUP


def test_a_bug_in_a_provider_is_not_taken_for_an_answer(session: Session, cloud: Cloud) -> None:
    cloud.fails["verify"] = failing(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        doctor(session, online=True)


def test_own_machines_need_no_key(session: Session) -> None:
    result = doctor(session, ["local", "ssh"], online=True)
    assert " ssh " in f"{findings_of(result, 'ok')} "
    assert result.exit_code is ExitCode.DONE


def test_an_unknown_provider_is_refused_before_anything_is_asked(session: Session) -> None:
    with pytest.raises(UsageError) as refused:
        doctor(session, ["runpad"], online=True)
    assert "runpod" in refused.value.hint

"""Tests of a mandate: it limits how much an AI agent may spend, and on what, in every plan and for every rental."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpurun.cli.app import VERBS, module_of
from gpurun.cli.mandate_door import ALLOWED
from gpurun.core.clock import SystemClock, VirtualClock, ticks
from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.ledger.budget import RESERVED_S, MonthBudget
from gpurun.ledger.mandate import (
    Mandate,
    MandateBudget,
    budgets_of,
    file_of,
    mandate_here,
    revoke_mandate,
    write_mandate,
)
from gpurun.ledger.run_lock import RunLock
from tests.command_line import gpurun
from tests.refusals import refusal

TERMS: dict[str, Any] = {"total_micros": usd("2.5"), "per_run_micros": usd(1)}


@pytest.fixture
def home(own_home: Path) -> Home:
    return Home(own_home).prepare()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(SystemClock().wall())


@pytest.fixture
def mandate(home: Home, clock: VirtualClock, tmp_path: Path) -> Mandate:
    return written(home, clock, tmp_path)


def written(home: Home, clock: Any, root: Path, **terms: Any) -> Mandate:
    (root / "lab").mkdir(exist_ok=True)
    mandate = {"root": str(root / "lab"), "until_wall": clock.wall() + 3600, **TERMS, **terms}
    return write_mandate(home, clock, **mandate)[0]


@pytest.fixture
def within(home: Home, mandate: Mandate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put a mandate in force for every command, make its root the current folder, and return the root."""
    monkeypatch.setenv("GPURUN_MANDATE", str(file_of(home, mandate.id)))
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_" + "x" * 40)
    root = tmp_path / "lab"
    (root / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(root)
    return root


def left(home: Home, clock: Any, mandate: Mandate) -> int:
    return MandateBudget(home, clock, mandate.id).left() or 0


# The money that is left


def test_of_forty_approvals_only_what_the_sums_pay_for_begins(
    home: Home, clock: VirtualClock, mandate: Mandate
) -> None:
    home.config.write_text("budget.month = 1.9")

    def begins(number: int) -> bool:
        run = f"fox-{number}"
        try:
            with budgets_of(home, clock, mandate.id).reserved(run, usd("0.9")):
                return True
        except NoOffer:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begins, range(40))) == 2
    assert left(home, clock, mandate) == usd("0.7"), "what the month refused is not held in the mandate"
    assert MonthBudget(home, clock).left() == usd("0.1")


def test_an_approval_returns_when_no_process_drives_it(home: Home, clock: VirtualClock, mandate: Mandate) -> None:
    """If the process dies before its create intent, no machine was requested: the reserved money must be free again."""
    for number in range(50):
        with budgets_of(home, clock, mandate.id).reserved(f"fox-{number}", usd(1)):
            pass  # As if the process were killed here: nothing frees its reservation.
        assert left(home, clock, mandate) == usd("1.5")
        clock.sleep(RESERVED_S + 1)
        assert left(home, clock, mandate) == usd("2.5")


def test_an_approval_is_kept_while_its_run_is_driven(home: Home, clock: VirtualClock, mandate: Mandate) -> None:
    """A job may wait in a queue for hours before its create: the reserved money must stay reserved."""
    run = home.run("fox-41")
    run.path.mkdir(parents=True)
    budgets = budgets_of(home, clock, mandate.id)
    with RunLock(run.lock), budgets.reserved("fox-41", usd(1)):
        clock.sleep(10 * RESERVED_S)
        assert left(home, clock, mandate) == usd("1.5")
        budgets.hold("gr-1", "fox-41", usd("0.8"), clock.wall() + 60)
        assert left(home, clock, mandate) == usd("1.7"), "the rental has taken the place of the approval"
    clock.sleep(365 * 86_400)
    entries = MandateBudget(home, clock, mandate.id).entries()
    assert [held.micros for held in entries] == [usd("0.8")], "what may exist is held until its end is proven"


def test_a_run_costs_no_more_than_a_run_may_with_all_its_rentals(
    home: Home, clock: VirtualClock, mandate: Mandate
) -> None:
    budgets = budgets_of(home, clock, mandate.id)
    budgets.hold("gr-1", "fox-41", usd("0.7"), clock.wall() + 60)
    budgets.settle("gr-1", usd("0.5"))
    with refusal(NoOffer, "mandate.per_run", "$1.10", "$1.00", "$2.00"):
        budgets.hold("gr-2", "fox-41", usd("0.6"), clock.wall() + 60)
    budgets.hold("gr-2", "fox-41", usd("0.5"), clock.wall() + 60)


def test_a_sum_that_was_taken_away_does_not_bring_its_money_back(
    home: Home, clock: VirtualClock, mandate: Mandate
) -> None:
    budgets = budgets_of(home, clock, mandate.id)
    budgets.hold("gr-1", "fox-41", usd(1), clock.wall() + 60)
    MandateBudget(home, clock, mandate.id).path.unlink()
    with refusal(SetupError, "budget.unreadable", mandate.id):
        budgets.hold("gr-2", "owl-1", usd(1), clock.wall() + 60)


# The mandate's file


def edited(path: Path) -> None:
    envelope = json.loads(path.read_bytes())
    envelope["payload"] = envelope["payload"].replace("A", "B", 1)
    path.write_text(json.dumps(envelope))


def test_an_edited_expired_or_foreign_mandate_is_refused(
    home: Home, clock: VirtualClock, mandate: Mandate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(budget: MandateBudget) -> str:
        with pytest.raises(SetupError) as refusal:
            budget.hold("gr-1", "fox-41", usd(1), clock.wall() + 60)
        return refusal.value.code

    other = Home(tmp_path / "other").prepare()
    foreign = written(other, clock, tmp_path)
    for name, code in ((file_of(other, foreign.id), "mandate.foreign"), (tmp_path / "none.json", "mandate.unreadable")):
        monkeypatch.setenv("GPURUN_MANDATE", str(name))
        with pytest.raises(SetupError) as refusal:
            mandate_here(home)
        assert refusal.value.code == code
    budget = MandateBudget(home, clock, mandate.id)
    before = file_of(home, mandate.id).read_bytes()
    edited(file_of(home, mandate.id))
    assert refused(budget) == "mandate.edited"
    file_of(home, mandate.id).write_bytes(before)
    clock.sleep(3601)
    assert refused(budget) == "mandate.expired"
    revoke_mandate(home, mandate.id)
    assert refused(budget) == "mandate.revoked"
    budget.settle("gr-1", usd("0.1"))
    assert [held.micros for held in budget.entries()] == [usd("0.1")], "what was paid counts in it all the same"


def test_a_receipt_is_no_mandate_though_the_same_key_signed_it(
    home: Home, clock: VirtualClock, mandate: Mandate
) -> None:
    path = file_of(home, mandate.id)
    path.write_text(path.read_text().replace("vnd.gpurun.mandate", "vnd.in-toto"))
    with pytest.raises(SetupError, match="was edited"):
        MandateBudget(home, clock, mandate.id).limit()


def at_a_terminal(answer: str, *words: str) -> tuple[int, str]:
    """Type a command line at a pseudo-terminal and answer its question; return the exit code and the shown text."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "gpurun.cli.app", *words])
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
            if b"[y/N]" in part:
                os.write(terminal, answer.encode() + b"\n")
    except OSError:  # The terminal is closed when its process ends.
        pass
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_it_is_written_by_a_person_at_a_terminal_alone(home: Home, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    words = ["mandate", "new", "--total", "25", "--per-run", "5", "--root", str(tmp_path / "lab"), "--cards", "L4"]
    for more in ([], ["--yes"], ["--json"]):
        done = gpurun(*words, *more)
        assert "mandate.no_person" in done.stdout + done.stderr
    assert at_a_terminal("n", *words)[0] == 3
    assert not list((home.root / "mandates").glob("*.json"))
    code, shown = at_a_terminal("y", *words)
    assert (code, "[y/N]" in shown) == (0, True)
    (row,) = json.loads(gpurun("mandate", "show", "--json").stdout)["data"]["mandates"]
    assert (row["terms"]["cards"], row["left_micros"]) == (["L4"], 25_000_000)
    assert gpurun("mandate", "revoke", row["id"]).returncode == 0
    assert json.loads(gpurun("mandate", "show", row["id"], "--json").stdout)["data"]["mandates"][0]["revoked"]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (["--total", "1", "--per-run", "5"], "mandate.sums"),
        (["--total", "NaN"], "money.not_positive"),
        (["--total", "٢٥"], "money.not_a_number"),
        (["--rate-max", "-1"], "money.not_positive"),
        (["--providers", "local"], "mandate.providers"),
        (["--providers", "ssh"], "mandate.providers"),
        (["--until", "9999d"], "mandate.until"),
        (["--root", "/"], "mandate.root"),
        (["--secret", "A=b"], "mandate.secret"),
    ],
)
def test_terms_that_cannot_be_are_refused(home: Home, wrong: list[str], code: str) -> None:
    _, shown = at_a_terminal("y", "mandate", "new", "--total", "25", "--per-run", "0.5", *wrong)
    assert code in shown


# What a mandate forbids

RUN = ["run", "--yes", "--json", "--gpu", "1xT4"]
REFUSED = {
    "mandate.per_run": [*RUN, "--max-cost", "1.01", "train.py"],
    "mandate.local": [*RUN, "--provider", "local", "train.py"],
    "mandate.provider": [*RUN, "--provider", "slurm:lab", "train.py"],
    "mandate.spot": [*RUN, "--spot", "train.py"],
    "mandate.image": [*RUN, "--image", "evil/image", "train.py"],
    "mandate.setup": [*RUN, "--setup", "train.py", "train.py"],
    "mandate.secret": [*RUN, "--secret", "AWS_SECRET_ACCESS_KEY", "train.py"],
    "mandate.run": ["train", "--yes", "--json", "--from", "elk-42"],
    "mandate.verb": ["auth", "status", "--json"],
}
FLAGS = {
    "--dry-run": "mandate.local",
    "--accept-weak-lease": "mandate.flag",
    "--lambda-guard": "mandate.flag",
    "--stage=s3://bucket": "mandate.flag",
    "--pass-env=VLLM_*": "mandate.flag",
    "--log-to=tensorboard": "mandate.flag",
    "--notify=https://example.com/x": "mandate.flag",
    "--exec=true": "mandate.flag",
    "--host=me@127.0.0.1": "mandate.flag",
    "--data=/etc": "mandate.root",
    "--data=s3://bucket/x": "mandate.root",
    "--data=out-there": "mandate.root",
    "--data=train.py,/etc/hostname": "mandate.root",
    "--data=addresses.toml": "mandate.root",
    "--data=inner": "mandate.root",
    "--upload=..": "mandate.root",
    "--upload=with-link": "mandate.root",
    "--pip=../requirements.txt": "mandate.root",
}


@pytest.mark.parametrize(
    ("words", "code"),
    [(words, code) for code, words in REFUSED.items()] + [([*RUN, flag, "train.py"], FLAGS[flag]) for flag in FLAGS],
    ids=[*REFUSED, *FLAGS],
)
def test_each_way_out_is_refused_with_code_hint_and_sum_left(
    home: Home, within: Path, words: list[str], code: str
) -> None:
    from tests.unit.ledger_samples import finished_run

    finished_run(home, "elk-42")
    (within / "out-there").symlink_to("/etc")
    (within / "inner").mkdir()
    (within / "inner" / "shards").symlink_to("/etc")
    (within / "with-link").mkdir()
    (within / "with-link" / "train.py").write_text("print(1)")
    (within / "with-link" / "words.txt").symlink_to("/etc/hostname")
    (within.parent / "requirements.txt").write_text("requests\n")
    done = gpurun(*words)
    (error,) = json.loads(done.stdout)["errors"]
    assert error["code"] == code
    assert "$2.50 of $2.50 is left" in error["message"]
    assert error["hint"]
    assert [name for name in home.run_names() if name != "elk-42"] == []


def test_the_folders_own_case_counts_not_its_spelling(home: Home, within: Path) -> None:
    for spelled in (f"{within}/../lab", str(within) + "/./"):
        done = gpurun(*RUN, "--upload", spelled, "train.py")
        assert "mandate.root" not in done.stdout
    (within.parent / "lab-2").mkdir()
    assert "mandate.root" in gpurun(*RUN, "--upload", f"{within}-2", "train.py").stdout


def test_a_root_that_has_become_a_link_holds_nothing(home: Home, within: Path) -> None:
    secret = within.parent / "secret"
    secret.mkdir()
    (secret / "train.py").write_text("print(1)\n")
    within.rename(within.parent / "old")
    within.symlink_to(secret)
    assert "mandate.root" in gpurun(*RUN, "--upload", str(within), "--", "python", "train.py").stdout


def test_other_peoples_runs_are_not_seen_read_or_ended(home: Home, within: Path) -> None:
    from tests.unit.ledger_samples import finished_run

    finished_run(home, "elk-42")
    for verb in ("logs", "receipt", "stop", "collect", "destroy", "wait", "attach", "resume"):
        assert "mandate.run" in gpurun(verb, "elk-42", "--json").stdout, verb
    assert json.loads(gpurun("ps", "--all", "--json").stdout)["data"]["runs"] == []


def test_every_verb_that_is_not_named_is_refused(within: Path) -> None:
    from importlib import import_module

    known = set()
    for name in VERBS:
        for command in import_module(f"gpurun.cli.commands.{module_of(name)}").app.registered_commands:
            known |= {command.name if command.name == name else f"{name} {command.name}"}
    assert known >= ALLOWED
    for name in ("reap", "aws setup", "auth rm runpod", "mandate revoke x", "config show --home /tmp", "rm x"):
        code = "mandate.foreign" if "--home" in name else "mandate.verb"
        assert code in gpurun(*name.split(), "--json").stdout, name


def test_a_plan_is_made_on_what_the_mandate_lets_be_rented(
    home: Home, clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = {"cards": ("T4", "L4"), "rate_max_micros_per_hour": usd("0.7"), "providers": ("aws",)}
    tight = written(home, clock, tmp_path, **terms)
    monkeypatch.setenv("GPURUN_MANDATE", str(file_of(home, tight.id)))
    monkeypatch.chdir(tmp_path / "lab")
    made = json.loads(gpurun("plan", "mini-gpt", "--gpu", "any", "--json").stdout)["data"]
    assert (made["offer"]["gpu"], made["cap_micros"], made["mandate"]) == ("T4", usd(1), tight.id)
    for gpu, code in (("8xA100", "mandate.card"), ("1xA10G", "mandate.card"), ("1xL4", "mandate.rate")):
        assert code in gpurun("plan", "mini-gpt", "--gpu", gpu, "--json").stdout, gpu
    moving = ("plan", "mini-gpt", "--gpu", "1xT4", "--keep-going", "--json", "--max-rate")
    assert "mandate.rate" in gpurun(*moving, "0.71").stdout, "its next machines may cost so much"
    assert "mandate.rate" not in gpurun(*moving, "0.70").stdout


def test_nothing_of_it_is_loaded_where_there_is_none(home: Home) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print([name for name in sys.modules if 'mandate' in name]))\n"
        "sys.argv = ['gpurun', 'version']\n"
        "from gpurun.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_refusal_never_says_how_to_leave_the_mandate(within: Path) -> None:
    (error,) = json.loads(gpurun("auth", "set", "runpod", "--json").stdout)["errors"]
    assert error["code"] == "mandate.verb"
    assert "GPURUN_MANDATE" not in error["hint"]


# An agent's tools


@pytest.fixture
def desk(home: Home, within: Path) -> Any:
    from gpurun.cli.agent_tools import AgentDesk
    from gpurun.cli.session import Session

    session = Session(home=home, json=True, quiet=True, no_input=True)
    assert session.bounds
    return AgentDesk(session, session.bounds)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_cost_usd": float("nan")}, {"max_cost_usd": float("-inf")}, {"max_cost_usd": 10**400},
        {"max_hours": float("nan")}, {"name": "fox-\u0664\u0661"}, {"env": {"A": "\ud800"}}, {"command": ["a\0b"]},
        {"command": ["a"] * 65}, {"command": ["a" * 5000]}, {"disk_gb": 1.5}, {"pip": "torch"}, {"home": "/tmp"},
    ],
)  # fmt: skip
def test_what_is_not_of_its_schema_reaches_no_verb(desk: Any, wrong: dict[str, Any]) -> None:
    answer, is_error = desk.answer("run", {"command": ["python", "train.py"], **wrong})
    assert is_error
    assert answer["error"]["code"] == "mcp.arguments"
    assert "$2.50 of $2.50 is left" in answer["error"]["what"]


def test_each_schema_is_closed_and_names_its_units(desk: Any) -> None:
    from gpurun.cli.agent_tools import TOOLS

    units = re.compile(r"_(usd|usd_per_hour|hours|minutes|s|gb)$")
    for tool in TOOLS.values():
        assert tool.schema["additionalProperties"] is False
        for name, field in tool.schema["properties"].items():
            kinds = [part.get("type") for part in field.get("anyOf", [field])]
            is_measure = "number" in kinds or ("integer" in kinds and name not in ("lines", "rows", "samples"))
            assert bool(units.search(name)) == is_measure, name


def test_an_answer_fits_and_says_what_was_cut(desk: Any) -> None:
    from gpurun.cli.agent_tools import MOST_BYTES, encode_response, shorten_response

    long = {"last_lines": [f"line {number} \u202e" * 20 for number in range(200)], "offers": [{"a": "b" * 999}] * 99}
    answer = shorten_response(long)
    assert len(encode_response(answer)) <= MOST_BYTES
    assert answer["cut"]["last_lines"]["of"] == 200
    assert answer["last_lines"][-1] == long["last_lines"][-1], "of what is last, the last stays"
    assert shorten_response({"value": float("nan")}) == {"value": None}


def test_a_long_call_continues_and_status_has_its_result(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits for a minute, but tokenising may take longer: `run` returns, and `status` has the result."""
    monkeypatch.setattr("gpurun.cli.agent_tools.BEGIN_LIMIT_S", 0.01)
    answer, is_error = desk.answer("run", {"command": ["python", "train.py"], "max_cost_usd": 1.5})
    assert (is_error, answer["under_way"]) == (False, True)
    for _ in ticks(SystemClock(), 0.1, 60):
        status, is_error = desk.answer("status", {"run": answer["run"]})
        if is_error:
            break
        assert status["state"] == "being planned"
    assert status["error"]["code"] == "mandate.per_run"
    assert desk.answer("status", {"run": answer["run"]})[0]["error"]["code"] == "mandate.run"


@pytest.mark.parametrize("missing", ["anyio", "mcp"])
def test_without_its_package_mcp_names_the_install_line(
    within: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "gpurun.cli.mcp_server", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    (error,) = json.loads(gpurun("mcp", "--json").stdout)["errors"]
    assert error["code"] == "mcp.missing"
    assert "[mcp]" in error["hint"]


def test_an_agent_is_served_within_one_mandate_and_never_without(home: Home, within: Path) -> None:
    other = written(home, SystemClock(), within.parent)
    assert "mandate.other" in gpurun("mcp", "--mandate", str(file_of(home, other.id)), "--json").stdout
    with mock.patch.dict(os.environ):
        del os.environ["GPURUN_MANDATE"]
        assert "mandate.missing" in gpurun("mcp", "--json").stdout

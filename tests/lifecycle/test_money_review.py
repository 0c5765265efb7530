"""Tests of faults that a review of the rentals found: each could have left a machine that is billed without end."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.cli import run_control
from gpurun.cli.app import build_app, run_app
from gpurun.core import stop_request as wishes
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, GpurunError, SetupError
from gpurun.core.journal_records import Phase
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Address, Instance
from gpurun.ledger.journal import Journal
from gpurun.ledger.run_lock import RunLock
from gpurun.ledger.runs import look_at_run
from gpurun.lifecycle import supervisor
from gpurun.lifecycle.connect import MachineConnector
from gpurun.lifecycle.reaper import sweep, sweep_run
from gpurun.providers.base import Rejected, Unknown
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.key_pairs import make_keys
from gpurun.remote.ssh import RemoteMachine
from gpurun.remote.ssh.ssh_machine import LEAST_S
from tests.emulators.fake import Fault
from tests.lifecycle.drive import TINY
from tests.lifecycle.faults import receipt_of
from tests.lifecycle.money_review import Session
from tests.lifecycle.offers_in_turn import Market
from tests.lifecycle.scripted_cloud import Killed, ScriptedCloud, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


@pytest.fixture
def market(tmp_path: Path) -> Market:
    return Market(Home(tmp_path))


def test_a_list_that_cannot_be_read_keeps_no_known_machine_alive(world: World) -> None:
    """Even if the list is broken, gpurun must end the machine, because the journal has its id."""
    world.far.during = lambda: world.cloud.broken.update(find=Unknown("a machine without an id is in the list"))
    assert world.drive() == "destroy.not_gone"
    assert world.cloud.alive == []


def test_a_full_disk_at_the_lease_end_keeps_no_machine_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpurun must end a machine even if it cannot record that.

    An unrecorded end costs nothing, a living machine does.
    """
    full = SetupError("disk.full", "There is no space left.", hint="Free some.")

    def refuse(*_: object) -> None:
        raise full

    world.far.during = lambda: monkeypatch.setattr(Journal, "write", refuse)
    world.far.train_s = 1e9
    world.drive()
    assert world.cloud.alive == []


def test_an_unwritable_home_keeps_no_machine_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = SetupError("ledger.unwritable", "It cannot be written: I/O error.", hint="Mend it.")

    def refuse(*_: object) -> None:
        raise gone

    world.far.during = lambda: monkeypatch.setattr(Journal, "write", refuse)
    world.drive()
    assert world.cloud.alive == []


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("killing", ["before far.manifest", ""])
def test_a_journal_without_its_records_rents_no_second_machine(world: World, killing: str, left: int) -> None:
    """The journal was emptied or restored from an old copy.

    Other files show that a machine may live, so gpurun must not rent another one.
    """
    world.cloud.killing = killing
    assert world.drive() == ("killed" if killing else ExitCode.DONE)
    lines = world.folder.journal.read_bytes().splitlines(keepends=True)
    world.folder.journal.write_bytes(b"".join(lines[:left]))
    assert world.drive() == "journal.damaged"
    assert world.cloud.created == 1
    assert world.folder.journal.read_bytes() == b"".join(lines[:left])
    sight = look_at_run(world.home, world.folder.name)
    assert sight.damage is not None
    assert "lost" in sight.damage


def test_a_firewall_that_cannot_be_opened_anew_ends_no_training(world: World) -> None:
    """The line broke, and the laptop's public address cannot be found for the firewall: the training must survive."""
    calls = []

    def let_in(instance: Instance) -> None:
        calls.append(instance.id)
        raise Rejected("the public address of this machine could not be found out")

    world.cloud.let_in = let_in  # type: ignore[attr-defined]
    world.far.broken["poll"] = MachineLost("the line broke")
    world.far.broken_times["poll"] = 1
    assert world.drive() is ExitCode.DONE
    assert calls


def test_a_passed_over_offers_key_is_not_needed_for_the_end(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    market.cloud.script["create"] = [Fault.FULL]
    second = market.plan.offer.model_copy(update={"provider": "lambda"})
    market.set_plan(candidates=(market.candidate(market.plan.offer), market.candidate(second)))

    def opened(name: str, **_: Any) -> ScriptedCloud:
        if name != "lambda" and market.cloud.alive:
            raise SetupError("auth.no_key", f"There is no key for {name}.", hint="gpurun auth set")
        return market.cloud

    monkeypatch.setattr(supervisor, "open_provider", opened)

    def once() -> ExitCode | str:
        try:
            return supervisor.supervise(
                market.home, market.folder.name, market.clock, reach=lambda _: market.far, trainer=TINY / "trainer"
            )
        except GpurunError as error:
            return error.code

    # The first attempt finds no capacity; the second makes a machine, and the supervisor dies.
    market.far.during = lambda: setattr(market.cloud, "killing", "before far.poll")
    with pytest.raises(Killed):
        once()
    market.far.during = lambda: None
    assert len(market.cloud.alive) == 1
    assert once() is ExitCode.DONE
    assert market.cloud.alive == []


def damaged(market: World) -> None:
    """Damage the journal's second line, so that the lines after it are not trusted."""
    lines = market.folder.journal.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"gpurun-", b"gpurxn-", 1)
    market.folder.journal.write_bytes(b"\n".join(lines))


def killed_on_the_second_offer(market: Market, provider: str) -> None:
    second = market.plan.offer.model_copy(update={"provider": provider})
    market.set_plan(candidates=(market.candidate(market.plan.offer), market.candidate(second)))
    market.cloud.script["create"] = [Fault.FULL]
    market.far.during = lambda: setattr(market.cloud, "killing", "before far.poll")
    with pytest.raises(Killed):
        market.supervise()
    assert len(market.cloud.alive) == 1


def test_a_damaged_journal_is_swept_at_every_possible_provider(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_on_the_second_offer(market, "lambda")
    damaged(market)
    empty = ScriptedCloud(market.clock)
    monkeypatch.setattr(
        "gpurun.providers.registry.open_provider", lambda name, *_, **__: market.cloud if name == "lambda" else empty
    )
    sight = look_at_run(market.home, market.folder.name)
    assert sight.damage
    run_control.sweep_damaged(Session(home=market.home, clock=market.clock), sight)  # type: ignore[arg-type]
    assert market.cloud.alive == []


def test_a_damaged_journal_ends_no_other_homes_run_of_its_name(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    theirs = World(Home(tmp_path / "another"))
    assert theirs.folder.name == world.folder.name
    theirs.cloud, theirs.clock = world.cloud, world.clock
    theirs.far.cloud, theirs.far.clock = world.cloud, world.clock
    world.cloud.killing = "before far.poll"
    assert theirs.drive() == "killed"
    damaged(world)
    monkeypatch.setattr("gpurun.providers.registry.open_provider", lambda *_, **__: world.cloud)
    sight = look_at_run(world.home, world.folder.name)
    run_control.sweep_damaged(Session(home=world.home, clock=world.clock), sight)  # type: ignore[arg-type]
    assert [box.order.token for box in world.cloud.alive] == [theirs.state.token]


def test_a_machine_with_a_damaged_token_is_never_called_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the token is damaged, the machine may be another home's: it is not ended, but reported as possibly billed."""
    world.cloud.killing = "before far.poll"
    world.drive()
    lines = world.folder.journal.read_bytes().splitlines(keepends=True)
    world.folder.journal.write_bytes(lines[0] + b"\0" * sum(map(len, lines[1:-1])) + b"\n{}\n")
    monkeypatch.setattr("gpurun.providers.registry.open_provider", lambda *_, **__: world.cloud)
    sight = look_at_run(world.home, world.folder.name)
    assert sight.damage
    outcome = run_control.sweep_damaged(Session(home=world.home, clock=world.clock), sight)  # type: ignore[arg-type]
    assert outcome.exit_code is ExitCode.MAY_BE_BILLING
    assert world.cloud.alive[0].id in outcome.errors[0].what


def test_a_damaged_journal_also_ends_the_readable_part_of_a_list(world: World) -> None:
    world.cloud.killing = "before far.poll"
    world.drive()
    damaged(world)
    find = world.cloud.find

    def first_page(token: str | None) -> list[Instance]:
        if token is None:
            raise Unknown("the next page cannot be had", found=tuple(find(token)))
        return find(token)

    world.cloud.find = first_page  # type: ignore[method-assign]
    with pytest.raises(Unknown):
        sweep_run(world.cloud, world.folder, world.clock)
    assert world.cloud.alive == []


def test_a_damaged_journal_and_a_refused_key_are_may_be_billing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.cloud.killing = "before far.poll"
    world.drive()
    damaged(world)
    world.cloud.broken["find"] = SetupError("auth.refused", "The key is refused.", hint="Give another.")
    monkeypatch.setattr("gpurun.providers.registry.open_provider", lambda *_, **__: world.cloud)
    sight = look_at_run(world.home, world.folder.name)
    try:
        code = run_control.sweep_damaged(Session(home=world.home, clock=world.clock), sight).exit_code  # type: ignore[arg-type]
    except GpurunError as error:
        code = error.exit_code
    assert code is ExitCode.MAY_BE_BILLING


def test_sharing_a_runs_name_does_not_make_a_machine_ours(world: World, tmp_path: Path) -> None:
    """A live supervisor here must not protect another home's overdue machine whose run has the same name."""
    world.cloud.killing = "before far.poll"
    world.drive()
    world.clock.sleep(world.plan.lease.total_s + 60)
    here = World(Home(tmp_path / "another"))
    assert here.folder.name == world.folder.name
    with RunLock(here.folder.lock):
        found = list(sweep([world.cloud], here.home, world.clock, destroy_all=False, older_than_s=0, look_only=False))
    assert [machine.fate for machine in found] == ["destroyed"]
    assert world.cloud.alive == []


def test_a_late_first_machine_is_seen_before_the_receipt(world: World) -> None:
    """The first machine appears after 180 s, when gpurun has rented a second one: both must be ended."""
    world.cloud.script["create"] = [Fault.LATE]
    world.cloud.profile = replace(world.cloud.profile, late_s=180.0)
    world.far.train_s = 200.0
    world.drive()
    assert len(world.cloud.boxes) == 2
    assert world.cloud.alive == []


def test_a_call_that_hangs_at_the_end_leaves_time_to_destroy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ends = VirtualClock(), list[float]()

    def hangs(_: RemoteMachine, end_mono: float) -> None:
        ends.append(end_mono)
        raise MachineLost("no answer")

    monkeypatch.setattr(RemoteMachine, "_ensure_connection", hangs)
    folder, address = world.home.run("fox-41"), Address(kind="ssh", host="127.0.0.1", port=22, user="me")
    make_keys(folder.ssh)
    deadline_wall, ask_mono = clock.wall() + 500, clock.monotonic() + 500 - world.plan.lease.destroy_s
    instance: Any = SimpleNamespace(id="x", provider="fake", token="gr-x", address=address, deadline_wall=deadline_wall)
    far = MachineConnector(folder, world.plan, clock)(instance)
    for _ in range(2):
        with pytest.raises(MachineLost, match="no answer"):
            far.hello()
        clock.sleep(1000.0)
    assert ends == [ask_mono, clock.monotonic() - 1000 + LEAST_S], (
        "its end is asked for then; it is looked at all the same"
    )


def test_a_possible_unwatched_life_counts_against_the_cap(world: World) -> None:
    """A machine may have lived for 400 s without a supervisor. Cap and receipt must count that time."""
    world.cloud.killing = "after create"
    assert world.drive() == "killed"
    world.clock.sleep(400.0)
    (box,) = world.cloud.alive
    box.died_s = world.clock.monotonic()
    world.far.train_s = 1e9
    world.drive()
    assert world.state.phase is Phase.CLOSED
    assert receipt_of(world)["cost"]["upper_bound_micros"] >= world.cloud.metered()
    assert world.cloud.metered() <= (world.plan.cap_micros or 0)


def test_older_than_spares_a_machine_whose_age_is_unknown(world: World) -> None:
    """Lambda reports no age, so `reap --destroy --older-than 2d` must not end a machine that may be a minute old."""
    world.cloud.killing = "before far.poll"
    world.drive()
    find = world.cloud.find
    world.cloud.find = lambda token: [  # type: ignore[method-assign]
        instance.model_copy(update={"created_wall": None}) for instance in find(token)
    ]
    list(sweep([world.cloud], world.home, world.clock, destroy_all=True, older_than_s=2 * 86400, look_only=False))
    assert len(world.cloud.alive) == 1


def test_reap_is_not_content_without_the_key_of_a_billing_cloud(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LAMBDA_API_KEY", "RUNPOD_API_KEY", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(market.home.root))
    killed_on_the_second_offer(market, "lambda")
    assert look_at_run(market.home, market.folder.name).state.may_be_billing
    monkeypatch.setenv("GPURUN_HOME", str(market.home.root))
    monkeypatch.setattr("sys.argv", ["gpurun", "reap"])
    assert run_app(build_app()) == ExitCode.MAY_BE_BILLING


def test_a_machine_without_its_deadline_is_not_within_its_lease(world: World) -> None:
    """The list lacks the machine's deadline: `reap` must take it from the journal and call the machine overdue."""
    world.cloud.killing = "before far.poll"
    world.drive()
    find = world.cloud.find
    world.cloud.find = lambda token: [  # type: ignore[method-assign]
        instance.model_copy(update={"deadline_wall": None}) for instance in find(token)
    ]
    world.clock.sleep(world.plan.lease.total_s + 60)
    (machine,) = sweep([world.cloud], world.home, world.clock, destroy_all=False, older_than_s=0, look_only=True)
    assert machine.fate == "overdue"


def test_a_simultaneous_milder_request_does_not_undo_destroy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read = wishes.read_stop_request

    def destroy() -> None:
        wishes.ask_to_stop(world.folder, "destroy", by="user", reason="the second terminal")

    second = threading.Thread(target=destroy)

    def interrupted(folder: RunFolder) -> wishes.StopRequest | None:
        seen = read(folder)
        monkeypatch.setattr(wishes, "read_stop_request", read)
        second.start()
        second.join(0.2)  # Without a lock the second thread writes now; with a lock it waits for its turn.
        return seen

    monkeypatch.setattr(wishes, "read_stop_request", interrupted)
    wishes.ask_to_stop(world.folder, "save", by="user", reason="the first terminal")
    second.join()
    standing = wishes.read_stop_request(world.folder)
    assert standing is not None
    assert standing.how == "destroy"


def test_an_undying_machine_does_not_save_its_duplicate(world: World) -> None:
    world.cloud.killing = "before far.poll"
    world.drive()
    first = world.cloud.boxes[0]
    world.cloud._make(first.order, Fault.NONE, world.clock.monotonic())
    real = world.cloud.destroy

    def stuck(instance_id: str) -> None:
        if instance_id == first.id:
            raise Unknown("409")
        real(instance_id)

    world.cloud.destroy = stuck  # type: ignore[method-assign]
    world.drive()
    assert world.cloud.alive == [first]


def test_an_agent_busy_for_a_moment_in_boot_loses_no_machine(world: World) -> None:
    """A killed supervisor's call still holds the agent's lock: the next one must try again, not give up the machine."""
    world.far.broken["hello"] = FarRefusal("busy", "another call holds the lock")
    world.far.broken_times["hello"] = 1
    assert world.drive() is ExitCode.DONE

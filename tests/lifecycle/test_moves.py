"""Tests of a run that continues on another machine after a loss: when, from which checkpoint, and at what cost.

They are whole runs in virtual time on simulated clouds, each with its own meter. The simulated machine trains and
saves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.core.clock import utc
from gpurun.core.errors import ExitCode
from gpurun.core.job_terms import COMMAND
from gpurun.core.journal_events import StepFailed
from gpurun.core.journal_records import Event, Phase, RunState
from gpurun.core.money import Micros, format_rate, format_usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Offer
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.audit import audit
from gpurun.ledger.audit.event_sequence import order_problems
from gpurun.ledger.budget import MonthBudget
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.ledger.reclaims import Reclaims, own_reclaims, was_taken
from gpurun.ledger.rental import rentals_of
from gpurun.ledger.run_state import Step, may_move, next_step
from gpurun.ledger.runs import look_at_run
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.artifacts.inventory import Inventory
from gpurun.lifecycle.steps.move_run import newest_checkpoint
from gpurun.planning.legs import legs_note
from gpurun.readers.run_status import run_data, run_row
from gpurun.remote.archive import Pack
from gpurun.remote.interface import FarRefusal
from gpurun.remote.messages import Manifest, ManifestFile
from gpurun.view.receipt_screen import receipt_screen
from gpurun.view.style import Style
from tests.changed_plan import changed_plan
from tests.emulators.fake import Fault
from tests.simulation.checker import check
from tests.simulation.nemesis import Killed
from tests.simulation.plans import RUN
from tests.simulation.play import PAUSE_S, Stage
from tests.simulation.scenario import Deed, Scenario
from tests.simulation.soak import folder_of_one_run


class Voyage:
    """One run on simulated clouds. `at` maps (nth machine, step) to what happens when the trainer reaches that step."""

    def __init__(self, root: Path, *profiles: str, **more: Any) -> None:
        scenario: dict[str, Any] = {"train_s": 120.0, "machines": 5, "legs": 5, **more}
        self.stage = Stage(Scenario(0, profiles or ("runpod",), **scenario), root)
        self.played = self.stage.played
        self.at: dict[tuple[int, int], Callable[[], None]] = {}

    @property
    def boxes(self) -> list[Any]:
        return [box for cloud in self.played.clouds.values() for box in cloud.boxes]

    def on_spot(self, dearer: int) -> None:
        """Make every offer spot.

        `dearer` is the on-demand price as a multiple of the spot price; 0 makes it unknown.
        """

        def spot(offer: Offer) -> Offer:
            price = offer.rate_micros_per_hour * dearer or None
            return offer.model_copy(update={"spot": True, "on_demand_micros_per_hour": price})

        plan = self.played.plan
        found = tuple(candidate.model_copy(update={"offer": spot(candidate.offer)}) for candidate in plan.candidates)
        choices = plan.choices.model_copy(update={"spot": True})
        changed = changed_plan(plan, {"candidates": found, "offer": found[0].offer, "choices": choices})
        self.played.folder.plan.write_text(changed.to_json())
        for cloud in self.played.clouds.values():
            cloud.stock = [spot(offer) for offer in cloud.stock]

    def take(self) -> None:
        """Take every running machine away, as its provider may."""
        for cloud in self.played.clouds.values():
            cloud.take()

    def take_at(self, *steps: int) -> None:
        """Take the first machine away at the first of these steps, the second machine at the second, and so on."""
        for place, step in enumerate(steps, start=1):
            self.at[place, step] = self.take

    @contextmanager
    def _watched(self) -> Iterator[None]:
        reach = self.stage._reach

        def watched(instance: Any) -> Any:
            far = reach(instance)
            far.during = lambda: self._look(far)
            return far

        self.stage._reach = watched  # type: ignore[method-assign]
        yield

    def _look(self, far: Any) -> None:
        machine = [box.id for box in self.boxes].index(far._box_id) + 1
        for place, step in sorted(self.at):
            if place == machine and far._step >= step:
                self.at.pop((place, step))()

    def drive(self) -> str:
        """Drive the run once; return the name of its exit code, or the code of its error."""
        with self.stage.set_up(), self._watched():
            return self.stage.drive().words

    def drive_to_the_end(self) -> str:
        """Drive the run until it is closed, as a user would; return the last outcome."""
        with self.stage.set_up(), self._watched():
            self.stage.drive_to_the_end()
        return self.played.outcomes[-1].words

    def at_record(self, event: Event, then: Callable[[], None]) -> None:
        """Call `then` once, when the journal first has this event."""
        passing, due = self.stage.nemesis.passing, [then]

        def passed(place: str) -> None:
            passing(place)
            if place == f"after {event}" and due:
                due.pop()()

        self.stage.nemesis.passing = passed  # type: ignore[method-assign]

    @property
    def legs(self) -> list[dict[str, Any]]:
        return [record.data for record in self.played.records if record.event is Event.LEG_PLANNED]

    @property
    def failures(self) -> list[str]:
        return [record.data["code"] for record in self.played.records if record.event is Event.STEP_FAILED]

    @property
    def receipt(self) -> Any:
        return read_receipt(self.played.home, self.played.folder).predicate

    def problems(self) -> list[str]:
        """Return the problems that the simulation's checker and the audit find."""
        rows = audit(self.played.home).rows
        return [*check(self.played), *(problem for row in rows for problem in row.problems)]


@pytest.fixture
def voyage(tmp_path: Path) -> Voyage:
    return Voyage(tmp_path)


def test_taken_twice_it_continues_from_its_newest_checkpoint(voyage: Voyage) -> None:
    voyage.take_at(12, 23)
    assert voyage.drive() == "DONE"
    assert [leg["step"] for leg in voyage.legs] == [10, 20]
    receipt = voyage.receipt
    assert [leg["leg"] for leg in receipt["legs"]] == [1, 2, 3]
    assert [leg["again"] for leg in receipt["legs"]] == [0, 2, 3]
    assert "taken" in receipt["legs"][0]["why"] or "ended" in receipt["legs"][0]["why"]
    assert "why" not in receipt["legs"][2]
    assert sum(leg["micros"] for leg in receipt["legs"]) == receipt["cost"]["upper_bound_micros"]
    assert receipt["cost"]["cap_kept"] is True
    assert len(receipt["teardown"]["evidence"]) == 3
    assert voyage.problems() == []


def test_the_receipt_times_the_training_on_all_machines(voyage: Voyage) -> None:
    voyage.take_at(12, 23)
    assert voyage.drive() == "DONE"
    begins, ends = (
        [record.wall for record in voyage.played.records if record.event is event]
        for event in (Event.TRAIN_STARTED, Event.TRAIN_OBSERVED)
    )
    assert len(begins) == len(ends) == 3
    measured_s = voyage.receipt["training"]["seconds"]["train_s"]
    assert measured_s == pytest.approx(sum(ends) - sum(begins), abs=3), "downloads after the end do not count"
    timeline = voyage.receipt["timeline"]
    assert (timeline["train_start"], timeline["train_end"]) == (utc(begins[0]), utc(ends[-1]))


def test_the_receipt_has_repeated_steps_and_the_on_demand_cost(tmp_path: Path) -> None:
    moved, unbroken = Voyage(tmp_path / "moved"), Voyage(tmp_path / "unbroken")
    moved.on_spot(3)
    moved.take_at(12, 23)
    assert (moved.drive(), unbroken.drive()) == ("DONE", "DONE")
    legs = moved.receipt["legs"]
    assert [leg["spot"] for leg in legs] == [True, True, True]
    assert "on_demand_micros" not in moved.receipt["cost"], "its legs have it, without what was trained twice"
    assert ["again_micros" in leg for leg in legs] == [False, True, True]
    rate = legs_rate(moved)
    step_micros = 120.0 / 30 * rate / 3600
    # The training time includes polls of the machine every few seconds, which makes each step dearer.
    for leg in legs[1:]:
        assert leg["again"] * step_micros * 0.9 <= leg["again_micros"] <= leg["again"] * step_micros * 2
    on_demand = sum(leg["on_demand_micros"] for leg in legs)
    assert on_demand == pytest.approx(3 * unbroken.receipt["cost"]["upper_bound_micros"], rel=0.25)
    text = receipt_text(moved)
    assert format_usd(on_demand) in text
    assert format_usd(sum(leg["again_micros"] for leg in legs[1:])) in text
    assert moved.problems() == []


@pytest.mark.parametrize("above", [0, 1], ids=["as agreed", "a micro-dollar more"])
def test_a_reported_maximum_price_makes_the_cost_a_bound(voyage: Voyage, above: int) -> None:
    """On AWS spot the provider reports only a maximum price: the receipt must call the cost a bound."""
    (cloud,) = voyage.played.clouds.values()
    agreed, read = cloud.stock[0].rate_micros_per_hour, cloud.read

    def limited(instance_id: str) -> Any:
        known = read(instance_id)
        price = {} if known.rate_micros_per_hour is None else {"rate_micros_per_hour": agreed + above}
        return known.model_copy(update={**price, "rate_is_limit": bool(price)})

    cloud.read = limited  # type: ignore[method-assign]
    assert voyage.drive() == ("NO_OFFER" if above else "DONE")
    cost = voyage.receipt["cost"]
    (rental,) = cost["rentals"]
    assert (rental["rate_is"], rental["rate_micros_per_hour"]) == ("provider-limit", agreed + above)
    assert cost["is"] == "bound"
    assert "may bill" in cost["says"]
    if above:
        assert voyage.failures == ["price.rose"]
        assert Event.SHIP_INTENDED not in [record.event for record in voyage.played.records]
    assert [row.problems for row in audit(voyage.played.home).rows] == [()]


def test_a_spot_run_that_never_moved_has_its_on_demand_cost(voyage: Voyage) -> None:
    voyage.on_spot(3)
    assert voyage.drive() == "DONE"
    cost = voyage.receipt["cost"]
    assert cost["on_demand_micros"] == pytest.approx(3 * cost["upper_bound_micros"], rel=0.01)
    assert format_usd(cost["on_demand_micros"]) in receipt_text(voyage)
    assert "legs" not in voyage.receipt
    assert voyage.problems() == []


@pytest.mark.parametrize("taken", [(), (12,)], ids=["never moved", "moved"])
def test_where_no_price_on_demand_was_known_none_is_claimed(voyage: Voyage, taken: tuple[int, ...]) -> None:
    voyage.on_spot(0)
    voyage.take_at(*taken)
    assert voyage.drive() == "DONE"
    assert "on_demand" not in json.dumps(voyage.receipt)
    assert "on demand" not in receipt_text(voyage)
    assert b"on_demand" not in voyage.played.folder.journal.read_bytes()


def legs_rate(voyage: Voyage) -> int:
    (rate,) = {rental["rate_micros_per_hour"] for rental in voyage.receipt["cost"]["rentals"]}
    return int(rate)


def receipt_text(voyage: Voyage) -> str:
    """Return the text of `gpurun receipt` as one line."""
    receipt = read_receipt(voyage.played.home, voyage.played.folder)
    lines = receipt_screen(receipt, Style(width=200), now=voyage.stage.laptop.wall())
    return " ".join("".join(span.text for span in line).strip() for line in lines)


def test_ten_receipts_let_a_plan_state_how_often_spot_is_taken(voyage: Voyage) -> None:
    voyage.on_spot(3)
    voyage.take_at(12, 23)
    assert voyage.drive() == "DONE"
    home, plan = Home(voyage.played.home.root.parent / "others").prepare(), read_plan(voyage.played.folder)
    rentals = rentals_of(voyage.played.records)
    assert [was_taken(rental.records) for rental in rentals] == [True, True, False]

    def another(number: int) -> None:
        folder = home.run(f"run-{number}")
        folder.path.mkdir(parents=True)
        folder.journal.write_bytes(voyage.played.folder.journal.read_bytes())
        folder.receipt.write_bytes(voyage.played.folder.receipt.read_bytes())

    for number in range(9):
        another(number)
    assert own_reclaims(home, plan.offer) is None
    assert "18" not in " ".join(legs_note(plan, home)).split(), "no rate is made of nine"
    another(9)
    home.run("broken").path.mkdir()
    home.run("broken").receipt.write_bytes(b"no receipt")
    home.run("broken").journal.write_bytes(b"no journal")
    seconds = 10 * sum(rental.seconds for rental in rentals)
    assert own_reclaims(home, plan.offer) == Reclaims(30, 20, pytest.approx(seconds))
    words = list(legs_note(plan, home))[-1]
    assert {"30", "20"} <= set(words.split())
    assert format_rate(Micros(3 * plan.offer.rate_micros_per_hour)) in words
    other = plan.offer.model_copy(update={"spot": False})
    assert own_reclaims(home, other) is None, "they were of another kind"


CACHE, CODE = "compile-cache/0123456789abcdef.bin", b"what torch has compiled"


def compiling(voyage: Voyage) -> list[list[str]]:
    """Give every machine a compile cache; return a list that gets, for each machine, the cache files uploaded to it."""
    reach, sent, known_fars = voyage.stage._reach, list[list[str]](), list[Any]()

    def compiles(instance: Any) -> Any:
        far = reach(instance)
        if far in known_fars:
            return far
        known_fars.append(far)
        manifest, fetch, unpack = far.manifest, far.fetch, far.unpack
        digest = hashlib.sha256(CODE).hexdigest()

        def listed(most_bytes: int) -> Manifest:
            known = manifest(most_bytes)
            named = {"name": CACHE, "bytes": len(CODE), "sha256": digest, "kind": "compile_cache"}
            return known.model_copy(update={"files": (*known.files, ManifestFile(step=known.latest or 0, **named))})

        def fetched(name: str, size_bytes: int, sha256: str, into: Path, **more: Any) -> Path:
            if name != CACHE:
                return Path(fetch(name, size_bytes, sha256, into, **more))
            (into / CACHE).parent.mkdir(parents=True, exist_ok=True)
            (into / CACHE).write_bytes(CODE)
            return into / CACHE

        def unpacked(pack: Pack, *of: Any, **more: Any) -> Any:
            sent.append([file.name for file in pack.survey.files if "compile-cache" in file.name])
            return unpack(pack, *of, **more)

        far.manifest, far.fetch, far.unpack = listed, fetched, unpacked
        return far

    voyage.stage._reach = compiles  # type: ignore[method-assign]
    return sent


def test_compiled_code_goes_only_to_the_same_cards_and_cloud(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, "runpod", "aws")
    sent = compiling(voyage)
    voyage.take_at(12, 23)
    assert voyage.drive() == "DONE"
    providers = [record.data["provider"] for record in voyage.played.records if record.event is Event.CREATE_INTENDED]
    assert list(zip(providers, sent, strict=True)) == [("runpod", []), ("runpod", [f"data/{CACHE}"]), ("aws", [])]
    first = read_plan(voyage.played.folder).ship_bytes
    second = json.loads((voyage.played.folder.legs / "1.json").read_text())
    carried = sum(file["bytes"] for file in second["leg"]["files"]) + len(CODE)
    assert second["ship_bytes"] == first + carried, "the plan of the leg counts what it uploads once more"


def test_what_was_compiled_and_is_damaged_at_home_stays_at_home(voyage: Voyage) -> None:
    sent = compiling(voyage)

    def spoil_and_take() -> None:
        (voyage.played.folder.artifacts / CACHE).write_bytes(b"code of somebody else's")
        voyage.take()

    voyage.at[1, 12] = spoil_and_take
    assert voyage.drive() == "DONE"
    assert sent == [[], []]


def test_without_the_flag_a_machine_taken_away_ends_the_run(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=0)
    reach = voyage.stage._reach

    def taken(instance: Any) -> Any:
        far = reach(instance)
        far.during = lambda: voyage.take() if far.clock.monotonic() > far.started_s + 30 else None
        return far

    voyage.stage._reach = taken  # type: ignore[method-assign]
    with voyage.stage.set_up():
        assert voyage.stage.drive().words == "TRAINING_FAILED"
    assert voyage.legs == []
    assert "legs" not in voyage.receipt
    assert "legs" not in voyage.receipt["asked"]


def test_without_a_checkpoint_it_starts_again_once_and_then_ends(voyage: Voyage) -> None:
    voyage.take_at(3, 3, 3)
    assert voyage.drive() == "TRAINING_FAILED"
    assert [leg["step"] for leg in voyage.legs] == [0]
    assert voyage.failures[-1] == "move.fruitless"
    assert len(voyage.boxes) == 2
    assert voyage.problems() == []


def test_two_machines_without_a_new_checkpoint_end_the_run(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=9, machines=9)
    voyage.take_at(7, 8, 12, 13, 14)
    assert voyage.drive() == "TRAINING_FAILED"
    assert [leg["step"] for leg in voyage.legs] == [5, 5, 10, 10]
    assert voyage.failures[-1] == "move.fruitless"


def test_a_damaged_checkpoint_gives_way_to_the_one_before(voyage: Voyage) -> None:
    def spoil_and_take() -> None:
        (voyage.played.folder.artifacts / "checkpoints" / "000015.optim.safetensors").write_bytes(b"spoilt")
        voyage.take()

    voyage.at[1, 17] = spoil_and_take
    assert voyage.drive() == "DONE"
    assert [leg["step"] for leg in voyage.legs] == [10]
    assert voyage.legs[0]["reached"] == 17
    assert check(voyage.played) == []


@pytest.mark.parametrize(
    "newer", ["checkpoint-40/model.pt", "checkpoint-20/model.pt"], ids=["beside it", "in its place"]
)
def test_a_checkpoint_that_is_still_on_its_way_does_not_count(tmp_path: Path, newer: str) -> None:
    """The machine is taken during a download.

    The newer checkpoint is listed but not at home, so the older one counts.
    """

    def file(name: str, content: bytes, kind: str, step: int) -> ManifestFile:
        digest = hashlib.sha256(content).hexdigest()
        named = {"name": f"outputs/out/{name}", "bytes": len(content), "sha256": digest, "kind": kind, "step": step}
        return ManifestFile(**named)

    folder = RunFolder(tmp_path / "fox-41")
    inventory, saved = Inventory(folder), file("checkpoint-20/model.pt", b"twenty", "checkpoint", 20)
    (folder.artifacts / saved.name).parent.mkdir(parents=True)
    (folder.artifacts / saved.name).write_bytes(b"twenty")
    inventory.note(step=20, whole=(saved,))
    entries = (file("checkpoint-20/model.pt", b"twenty", "output", 20), file(newer, b"forty", "checkpoint", 40))
    listed = {entry.name: entry for entry in entries}
    inventory.remember(Manifest(latest=40, best=None, files=tuple(listed.values())))
    terms = SimpleNamespace(job=SimpleNamespace(terms=COMMAND))
    context: Any = SimpleNamespace(folder=folder, plan=terms)
    assert newest_checkpoint(context, []) == [saved.as_json()]
    (folder.artifacts / saved.name).write_bytes(b"forty.")
    assert newest_checkpoint(context, []) == [], "what was damaged since does not"


def test_it_is_on_no_more_machines_than_were_agreed_to(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=2)
    voyage.take_at(7, 12)
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.legs"
    assert len(voyage.boxes) == 2


def test_what_ends_it_is_why_it_did_not_move(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=1)
    voyage.take_at(7)
    assert voyage.drive() == "TRAINING_FAILED"
    failure = look_at_run(voyage.played.home, RUN).state.failure
    assert failure is not None
    assert (failure.code, voyage.receipt["training"]["failed_step"]["code"]) == ("move.legs", "move.legs")
    assert "--from" in failure.hint
    assert voyage.problems() == []


def test_a_cap_that_pays_no_further_start_up_ends_the_run(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, machines=1)
    voyage.take_at(7)
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert len(voyage.boxes) == 1
    assert voyage.problems() == []


def test_sold_out_for_a_while_it_waits_at_no_cost_and_continues(voyage: Voyage) -> None:
    (cloud,) = voyage.played.clouds.values()
    stock, shown = list(cloud.stock), []

    def sell_out() -> None:
        voyage.take()
        cloud.stock = ()

    voyage.at[1, 7] = sell_out
    offers = cloud.offers

    def watched(*need: Any) -> Any:
        found = offers(*need)
        if not found and not shown:
            shown.append(voyage.stage.true.monotonic())
        if shown and voyage.stage.true.monotonic() > shown[0] + 600:
            cloud.stock = stock
        if shown and not cloud.stock:
            sight = look_at_run(voyage.played.home, RUN)
            shown.append((run_row(sight, voyage.stage.laptop.wall()), run_data(sight, run_row(sight, 0.0))))
        return found

    cloud.offers = watched  # type: ignore[method-assign]
    assert voyage.drive() == "DONE"
    row, data = shown[-1]
    assert row.state.startswith("waiting, $0.00/h")
    assert data["is_waiting"] is True
    gone, second = (box for box in voyage.boxes)
    assert second.born_s - (gone.died_s or 0.0) > 600
    assert voyage.problems() == []


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0], ids=["a day ahead", "a day back"])
def test_a_clock_that_is_set_does_not_change_the_wait(voyage: Voyage, jump_s: float) -> None:
    (cloud,) = voyage.played.clouds.values()
    stock, offers, asked_s = list(cloud.stock), cloud.offers, list[float]()

    def sell_out() -> None:
        voyage.take()
        cloud.stock = ()

    def restocked(*need: Any) -> Any:
        if not cloud.stock:
            asked_s.append(cloud.now)
        if len(asked_s) == 3:
            voyage.stage.laptop.jump_wall(jump_s)
        cloud.stock = stock if len(asked_s) > 14 else cloud.stock
        return offers(*need)

    voyage.at[1, 12] = sell_out
    cloud.offers = restocked  # type: ignore[method-assign]
    assert voyage.drive() == "DONE"
    assert asked_s[14] - asked_s[0] < 600, "it looked every half minute, as before"
    assert voyage.problems() == []


def test_sold_out_for_too_long_it_ends_and_says_why(voyage: Voyage) -> None:
    (cloud,) = voyage.played.clouds.values()

    def sell_out() -> None:
        voyage.take()
        cloud.stock = ()

    voyage.at[1, 7] = sell_out
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert voyage.problems() == []


def test_refused_creates_are_asked_for_again_until_one_is_taken(voyage: Voyage) -> None:
    (cloud,) = voyage.played.clouds.values()

    def take() -> None:
        voyage.take()
        cloud.script["create"] = [Fault.FULL, Fault.FULL, Fault.FULL]

    voyage.at[1, 12] = take
    assert voyage.drive() == "DONE"
    assert len(voyage.legs) == 4
    assert {leg["number"] for leg in voyage.legs} == {2}
    assert [bool(leg.get("token")) for leg in voyage.legs] == [True, False, False, False]
    assert voyage.problems() == []


def test_after_the_end_of_the_wait_no_machine_is_requested(voyage: Voyage) -> None:
    until_wall = voyage.stage.laptop.wall() + 100.0
    choices = voyage.played.plan.choices.model_copy(update={"until_wall": until_wall})
    voyage.played.folder.plan.write_text(changed_plan(voyage.played.plan, {"choices": choices}).to_json())

    voyage.take_at(12)
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert len(voyage.boxes) == 1


def test_a_machine_that_appears_during_the_wait_is_ended_soon(voyage: Voyage) -> None:
    choices = voyage.played.plan.choices.model_copy(update={"wait_s": 3600})
    voyage.played.folder.plan.write_text(changed_plan(voyage.played.plan, {"choices": choices}).to_json())
    (cloud,) = voyage.played.clouds.values()
    stock, offers = list(cloud.stock), cloud.offers

    def sell_out() -> None:
        cloud._late.append((cloud.now + 300.0, cloud.boxes[0].order))
        voyage.take()
        cloud.stock = ()

    def restocked(*need: Any) -> Any:
        cloud.stock = stock if not cloud.boxes or cloud.now > (cloud.boxes[0].died_s or cloud.now) + 1500 else ()
        return offers(*need)

    voyage.at[1, 12] = sell_out
    cloud.offers = restocked  # type: ignore[method-assign]
    assert voyage.drive() == "DONE"
    _, late, last = cloud.boxes
    assert late.died_s is not None
    assert late.died_s - late.born_s < 600
    assert late.died_s < last.born_s


def test_creates_that_are_refused_for_too_long_end_it(voyage: Voyage) -> None:
    (cloud,) = voyage.played.clouds.values()

    def take() -> None:
        voyage.take()
        cloud.script["create"] = [Fault.FULL] * 99

    voyage.at[1, 12] = take
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert len(voyage.legs) < 15
    assert voyage.problems() == []


def test_the_next_lease_is_as_long_as_the_rest_of_the_cap_pays(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, machines=2)
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    first, second = (record.data for record in voyage.played.records if record.event is Event.CREATE_INTENDED)
    (leg,) = voyage.legs
    assert first["worst_micros"] < second["worst_micros"] <= leg["left_micros"]
    assert second["worst_micros"] > 0.99 * leg["left_micros"], "it is not cut shorter than that"
    assert voyage.problems() == []


def test_a_create_without_a_clear_answer_counts_in_full(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, machines=9)
    (cloud,) = voyage.played.clouds.values()
    cloud.script["create"] = [Fault.DROPPED]
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    first, _, _ = (record.data for record in voyage.played.records if record.event is Event.CREATE_INTENDED)
    (leg,) = voyage.legs
    assert leg["spent_micros"] == first["worst_micros"] + voyage.receipt["legs"][0]["micros"]
    assert voyage.problems() == []


def test_no_machine_is_taken_that_nothing_but_this_laptop_ends(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, "runpod", "lambda")

    def sell_out() -> None:
        voyage.take()
        voyage.played.clouds["runpod"].stock = ()

    voyage.at[1, 7] = sell_out
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert len(voyage.boxes) == 1


def test_a_region_that_took_two_machines_in_an_hour_is_skipped(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, "runpod", "aws")
    voyage.take_at(7, 12)
    assert voyage.drive() == "DONE"
    providers = [record.data["provider"] for record in voyage.played.records if record.event is Event.CREATE_INTENDED]
    assert providers == ["runpod", "runpod", "aws"]
    assert voyage.problems() == []


def test_a_dearer_offer_than_was_agreed_to_is_not_taken(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path)
    (cloud,) = voyage.played.clouds.values()

    def take_and_raise() -> None:
        voyage.take()
        rate = cloud.stock[0].rate_micros_per_hour
        cloud.stock = [offer.model_copy(update={"rate_micros_per_hour": rate + 1}) for offer in cloud.stock]

    voyage.at[1, 7] = take_and_raise
    assert voyage.drive() == "TRAINING_FAILED"
    assert len(voyage.boxes) == 1
    assert voyage.failures[-1] == "move.no_offer"


@pytest.mark.parametrize("how", ["save", "destroy"])
def test_a_stop_while_it_looks_for_a_machine_ends_the_run(voyage: Voyage, how: Any) -> None:
    (cloud,) = voyage.played.clouds.values()

    def sell_out() -> None:
        voyage.take()
        cloud.stock = ()

    voyage.at[1, 7] = sell_out
    offers, needs = cloud.offers, []

    def stopped(*need: Any) -> Any:
        needs.append(need)
        if len(needs) == 3:
            ask_to_stop(voyage.played.folder, how, by="user", reason="enough")
        return offers(*need)

    cloud.offers = stopped  # type: ignore[method-assign]
    assert voyage.drive() in ("INTERRUPTED", "TRAINING_FAILED")
    assert len(needs) == 3
    assert voyage.legs == []
    assert voyage.problems() == []


def test_a_late_machine_of_the_first_leg_is_ended_and_paid(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path)
    (cloud,) = voyage.played.clouds.values()
    orders = []

    def take() -> None:
        orders.append(cloud.boxes[0].order)
        voyage.take()

    voyage.at[1, 12] = take
    voyage.at[2, 14] = lambda: cloud._late.append((cloud.now, orders[0]))
    assert voyage.drive() == "DONE"
    late = cloud.boxes[2]
    assert late.order.token == cloud.boxes[0].order.token
    assert late.died_s is not None
    cost = voyage.receipt["cost"]
    assert [len(rental.get("extras", [])) for rental in cost["rentals"]] == [1, 0]
    assert cloud.metered() <= cost["upper_bound_micros"]
    assert cloud.metered() <= cost["cap_micros"]


def copied(voyage: Voyage, at: tuple[int, int], then: Callable[[], None]) -> Home:
    """When this machine reaches this step, copy the home to another folder and then call `then`; return the copy."""
    copy = Home(voyage.played.home.root.parent / "copy")

    def copy_home() -> None:
        copytree(voyage.played.home.root, copy.root)
        then()

    voyage.at[at] = copy_home
    return copy


def die() -> None:
    raise Killed("the laptop")


def continued_in(voyage: Voyage, home: Home) -> None:
    """Drive the run from this other home from now on, with the same clouds."""
    voyage.played.home, voyage.played.folder = home, home.run(RUN)


@pytest.mark.parametrize("next_cloud", ["runpod", "aws"])
def test_a_copied_home_rents_nothing_once_the_first_has_moved(tmp_path: Path, next_cloud: str) -> None:
    """A copy of the home does not know that the run has moved.

    It must find the new machine in any cloud and rent none.
    """
    voyage = Voyage(tmp_path, "runpod", "aws", machines=9)
    clouds, first = voyage.played.clouds, voyage.played.home
    stock = {name: cloud.stock for name, cloud in clouds.items()}

    def take() -> None:
        voyage.take()
        for name, cloud in clouds.items():
            cloud.stock = stock[name] if name == next_cloud else ()

    copy = copied(voyage, (1, 12), take)
    voyage.at[2, 14] = die
    assert voyage.drive() == "killed"
    (machine,) = clouds[next_cloud].alive
    for name, cloud in clouds.items():
        cloud.stock = stock[name]
    continued_in(voyage, copy)
    assert voyage.drive() == "RUN_HELD"
    assert voyage.failures[-1] == "run.elsewhere"
    failure = look_at_run(copy, RUN).state.failure
    assert failure is not None
    assert machine.id in failure.message
    assert [box.id for cloud in clouds.values() for box in cloud.alive] == [machine.id]
    continued_in(voyage, first)
    assert voyage.drive() == "DONE"
    assert len(voyage.boxes) == 2
    assert [row.problems for row in audit(first).rows] == [()]


def test_of_two_homes_at_once_one_sees_the_other_and_ends(tmp_path: Path) -> None:
    """Lists lag, so the check before the create misses the other home's machine.

    The check before the upload must find it.
    """
    voyage = Voyage(tmp_path, machines=9)
    (cloud,) = voyage.played.clouds.values()
    copy = copied(voyage, (1, 12), voyage.take)
    voyage.at[2, 14] = die
    assert voyage.drive() == "killed"
    first = cloud.boxes[-1]
    continued_in(voyage, copy)
    find = cloud.find
    cloud.find = lambda token: find(token) if len(cloud.boxes) > 2 else []  # type: ignore[method-assign]
    assert voyage.drive() == "RUN_HELD"
    assert [box.died_s is None for box in cloud.boxes] == [False, True, False]
    assert cloud.alive == [first]
    assert Event.SHIP_INTENDED not in [record.event for record in voyage.played.records][-20:], "nothing was uploaded"


def test_a_run_copied_alone_sees_the_machine_of_its_first_home(tmp_path: Path) -> None:
    """A run in a home with another id must find its machine by the token, which names the home that opened the run."""
    voyage = Voyage(tmp_path, machines=9)
    copy = copied(voyage, (1, 12), voyage.take)
    voyage.at[2, 14] = die
    assert voyage.drive() == "killed"
    (copy.root / "id").unlink()
    assert copy.id != voyage.played.home.id
    continued_in(voyage, copy)
    assert voyage.drive() == "RUN_HELD"
    assert len([box for box in voyage.boxes if box.died_s is None]) == 1


def next_create(voyage: Voyage, *, faults: tuple[Fault, ...]) -> None:
    """Take the first machine away at step 12, and script these faults for the creates after it."""
    (cloud,) = voyage.played.clouds.values()

    def take() -> None:
        voyage.take()
        cloud.script["create"] = list(faults)

    voyage.at[1, 12] = take


def give_notice(voyage: Voyage) -> None:
    """Give notice to the first machine at step 12.

    Its agent saves and stops the trainer, but the machine still exists.
    """
    voyage.at[1, 12] = lambda: next(iter(voyage.stage._fars.values())).stop(reason="preempted")


def held(voyage: Voyage) -> None:
    """Give notice while a finished file cannot be read. The machine is held for that file, and is then taken away."""

    def breaks() -> None:
        (far,) = voyage.stage._fars.values()
        far.broken["get checkpoints/000010.optim.safetensors"] = FarRefusal("unreadable", "its disk does not read it")

    voyage.at[1, 9] = breaks
    give_notice(voyage)
    voyage.at_record(Event.HOLD_INTENDED, voyage.take)


def silent(voyage: Voyage) -> None:
    """Take the first machine away.

    Its provider answers nothing for the ten minutes after gpurun records that it will destroy the machine.
    """
    (cloud,) = voyage.played.clouds.values()
    voyage.take_at(12)
    voyage.at_record(Event.DESTROY_INTENDED, lambda: cloud.outages.append((cloud.now, cloud.now + 600.0)))


ORDERS: dict[str, Callable[[Voyage], None]] = {
    "taken": lambda voyage: voyage.take_at(12),
    "noticed": give_notice,
    "held": held,
    "sold out": partial(next_create, faults=(Fault.FULL,)),
    "answer lost": partial(next_create, faults=(Fault.LOST,)),
    "request lost": partial(next_create, faults=(Fault.DROPPED,)),
    "gone at once": partial(next_create, faults=(Fault.STILLBORN,)),
    "silent": silent,
}
"""The ways in which a run gets from one machine to the next."""
NEVER_BETWEEN = {
    "at the beginning of a run": {Event.RUN_OPENED, Event.STAGE_INTENDED, Event.STAGE_OBSERVED},
    "at the end of a run": {Event.BILL_OBSERVED, Event.RECEIPT_OBSERVED, Event.RUN_CLOSED},
    "while a machine works": {
        Event.READY_OBSERVED, Event.SHIP_INTENDED, Event.SHIP_OBSERVED, Event.TRAIN_INTENDED, Event.TRAIN_STARTED,
        Event.RATE_OBSERVED,
    },
    "a stop ends the run": {Event.STOP_REQUESTED},
    "only with a bucket, on the emulated clouds": {Event.SALVAGE_INTENDED, Event.SALVAGE_OBSERVED},
}  # fmt: skip
TORN, RICH = b'{"seq": 9, "ev', 30
"""The half of a record that a killed supervisor leaves, and the number of machines that the cap pays for."""


def label(record: Any) -> str:
    """Return the event of a record, followed by its code if it has one."""
    return " ".join(filter(None, (record.event, str(record.data.get("code", "")))))


def deaths_between(voyage: Voyage) -> list[tuple[int, str, str]]:
    """Return (crash point, label before, label) of each record from the start of training to the last create."""
    events = {f"after {event}" for event in Event}
    numbers = [number for number, (_, place) in enumerate(voyage.played.points, start=1) if place in events]
    records = voyage.played.records
    begun = next(place for place, record in enumerate(records) if record.event is Event.TRAIN_STARTED)
    made = [place for place, record in enumerate(records) if record.event is Event.CREATE_OBSERVED][-1]
    return [(numbers[n], label(records[n - 1]), label(records[n])) for n in range(begun + 1, made + 1)]


def test_killed_at_any_record_between_two_machines_it_is_one_run() -> None:
    """Kill the supervisor at each record of an undisturbed run, with half a record written: the run must still end."""
    seen: set[tuple[str, str]] = set()
    met: set[str] = {Event.JOURNAL_REPAIRED}
    for order, prepare in ORDERS.items():
        with folder_of_one_run() as folder:
            undisturbed = Voyage(Path(folder), machines=RICH)
            prepare(undisturbed)
            assert undisturbed.drive_to_the_end() == "DONE", order
            deaths = deaths_between(undisturbed)
        for number, before, name in deaths:
            met.add(name.partition(" ")[0])
            if (before, name) not in seen:
                seen.add((before, name))
                with folder_of_one_run() as folder:
                    killed = Voyage(Path(folder), machines=RICH, deeds=(Deed(number, "kill"),))
                    prepare(killed)
                    while (ended := killed.drive()) == "destroy.not_gone":
                        killed.stage.true.sleep(PAUSE_S)
                    assert ended == "killed"
                    assert label(killed.played.records[-1]) == name
                    with killed.played.folder.journal.open("ab") as journal:
                        journal.write(TORN)
                    came_to = killed.drive_to_the_end(), killed.problems()
                    assert came_to == ("DONE", []), f"{order}: killed after {name}, which came after {before}"
                    assert Event.JOURNAL_REPAIRED in [record.event for record in killed.played.records]
    assert {*Event} - met == {*itertools.chain.from_iterable(NEVER_BETWEEN.values())}


def test_the_month_settles_each_machine_once_it_is_proven_gone(voyage: Voyage) -> None:
    budget = MonthBudget(voyage.played.home, voyage.stage.laptop)
    held: list[tuple[int, bool]] = []

    def look() -> None:
        held.extend((entry.micros, entry.is_spent) for entry in budget.entries())

    voyage.take_at(12)
    voyage.at[2, 14] = look
    assert voyage.drive() == "DONE"
    assert sorted(is_spent for _, is_spent in held) == [False, True]
    (spent,) = [micros for micros, is_spent in held if is_spent]
    assert spent == voyage.receipt["legs"][0]["micros"]
    assert sum(entry.micros for entry in budget.entries()) == voyage.receipt["cost"]["upper_bound_micros"]


def test_the_machine_of_a_leg_whose_plan_is_lost_is_ended(voyage: Voyage) -> None:
    def lose_plan() -> None:
        for path in voyage.played.folder.legs.iterdir():
            path.unlink()
        ask_to_stop(voyage.played.folder, "destroy", by="user", reason="enough")

    voyage.take_at(12)
    voyage.at[2, 14] = lose_plan
    assert voyage.drive() == "INTERRUPTED"
    assert all(box.died_s is not None for box in voyage.boxes)


def test_the_audit_finds_a_second_machine_requested_too_early(voyage: Voyage) -> None:
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    records = list(voyage.played.records)
    assert list(order_problems(records)) == []
    events = [record.event for record in records]
    proof = events.index(Event.DEATH_PROVEN)
    problems = " ".join(order_problems([*records[:proof], *records[proof + 1 :]]))
    assert "the machine before it was not proven gone" in problems
    assert "a second machine was requested before the first was proven gone" in problems


def test_the_audit_finds_more_machines_than_were_agreed_to(voyage: Voyage) -> None:
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    records = list(voyage.played.records)

    def agreed(legs: int) -> list[Any]:
        opened = records[0].model_copy(update={"data": {**records[0].data, "legs": legs}})
        return list(order_problems([type(opened).model_validate(opened.model_dump()), *records[1:]]))

    assert agreed(2) == []
    assert len(agreed(1)) == 1


def test_the_audit_finds_a_leg_that_the_cap_did_not_pay(voyage: Voyage) -> None:
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    records = list(voyage.played.records)
    place = [i for i, record in enumerate(records) if record.event is Event.CREATE_INTENDED][-1]
    dear = records[place].model_copy(
        update={"data": {**records[place].data, "worst_micros": voyage.played.plan.cap_micros}}
    )
    records[place] = type(dear).model_validate(dear.model_dump())
    assert any("left of the cap" in problem for problem in order_problems(records))


_LOST = StepFailed(step="collect", code="machine.lost", message="", exit_code=ExitCode.TRAINING_FAILED)
_FULL = StepFailed(step="create", code="create.no_capacity", message="", exit_code=ExitCode.NO_OFFER)


@pytest.mark.parametrize(
    ("fields", "moves"),
    [
        ({"outcome": "lost", "reason": "lost", "failure": _LOST}, True),
        ({"outcome": "failed", "reason": "preempted"}, True),
        ({"failure": _LOST}, True),
        ({"outcome": "done", "failure": _LOST}, True),
        ({"phase": Phase.OPENED, "failure": _FULL}, True),
        ({"outcome": "failed", "reason": "nonfinite"}, False),
        ({"outcome": "failed", "reason": "oom", "failure": _LOST}, False),
        ({"outcome": "done"}, False),
        ({"outcome": "stopped", "reason": "lease"}, False),
        ({"outcome": "lost", "stop": "save"}, False),
        ({"outcome": "lost", "stop": "destroy", "reason": "lease"}, False),
        ({"outcome": "lost", "stays": True}, False),
        ({"outcome": "lost", "legs": 0}, False),
        ({"failure": _FULL}, False),
    ],
)
def test_only_the_journals_outcome_decides_what_moves(fields: dict[str, Any], moves: bool) -> None:
    state = RunState(**{"run": RUN, "phase": Phase.GONE, "legs": 5, **fields})
    assert may_move(state) is moves
    assert next_step(state) is (Step.MOVE if moves else Step.SETTLE)


def test_a_plan_that_does_not_move_is_written_as_ever(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=0)
    assert "leg" not in json.loads(voyage.played.folder.plan.read_text())

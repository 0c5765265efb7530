"""Tests of a dev box on this machine, with the real agent: an idle box ends, and files made on it come home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.command import EVERYTHING, Command
from gpurun.core.errors import ExitCode, GpurunError
from gpurun.core.journal_records import Event, Phase
from gpurun.core.money import usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import InstanceState
from gpurun.core.run_plan import Choices, Lease, Plan, Request
from gpurun.jobs.dev_box import KEEP
from gpurun.ledger.audit import audit
from gpurun.ledger.runs import create_run, ends_soon, look_at_run
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.connect import MachineConnector
from gpurun.lifecycle.context import get_instance
from gpurun.lifecycle.notices import Noticed
from gpurun.lifecycle.supervisor import start_supervisor
from gpurun.planning.dev_box_proposal import DevBoxProposal, DevBoxWishes
from gpurun.planning.place import Desk
from gpurun.planning.planner import make_plan
from gpurun.providers.local import LocalProvider
from gpurun.remote.client import FarSide
from tests.clouds.rented import kill_supervisors, supervisors
from tests.refusals import refusal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="who uses a box is read in /proc")
RUN, CLOCK = "fox-41", SystemClock()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    home = Home(tmp_path / "home").prepare()
    yield home
    kill_supervisors(home.root)
    for machine in LocalProvider(home, CLOCK).find(None):
        LocalProvider(home, CLOCK).destroy(machine.id)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    place = tmp_path / "lab"
    place.mkdir()
    (place / "a.py").write_text("print(1)\n")
    (place / "gone.py").write_text("print(2)\n")
    (place / ".gitignore").write_text("scratch/\n")
    return place


def planned(
    home: Home, folder: Path | None, name: str = RUN, idle_s: int = 1800, **wishes: Any
) -> tuple[Request, Plan]:
    """Return the request and the plan of a dev box here; `idle_s` may be shorter than the command line allows."""
    continues = wishes.pop("continues", "")
    command = Command(argv=KEEP, folder=str(folder or ""), outputs=EVERYTHING, grace_s=2)
    request = Request(
        recipe="", providers=("local",), command=command, continues=continues, choices=Choices(idle_s=idle_s)
    )
    proposal = DevBoxProposal(request, DevBoxWishes(**{"sync_s": 1, **wishes}), Desk(name, home, CLOCK, print))
    return request, make_plan(proposal)


def begun(home: Home, folder: Path | None, name: str = RUN, lease: Lease | None = None, **more: Any) -> RunFolder:
    """Start a dev box, wait until its job has started, and return the run's folder."""
    request, plan = planned(home, folder, name, **more)
    if lease is not None:
        plan = plan.model_copy(update={"chosen": plan.chosen.model_copy(update={"lease": lease})})
    made = create_run(home, request, plan)
    start_supervisor(made, home, CLOCK)
    assert any(b'"start"' in made.events.read_bytes() for _ in ticks(CLOCK, 0.1, 60) if made.events.exists()), said(
        made
    )
    return made


def said(made: RunFolder) -> str:
    return made.supervisor_log.read_text() + made.journal.read_text()[-3000:]


def there(home: Home, name: str = RUN) -> FarSide:
    sight = look_at_run(home, name)
    return MachineConnector(sight.folder, sight.plan, CLOCK)(get_instance(sight.state))


def over(home: Home, made: RunFolder, limit_s: float = 60.0) -> dict[str, Any]:
    """Wait until the run is finished, and return the training part of its receipt."""
    assert any(not look_at_run(home, made.name).unfinished for _ in ticks(CLOCK, 0.2, limit_s)), said(made)
    return dict(read_receipt(home, made).predicate["training"])


def outputs(made: RunFolder) -> dict[str, str]:
    root = made.artifacts / "outputs"
    return {p.relative_to(root).as_posix(): p.read_text() for p in root.rglob("*") if p.is_file()}


def test_an_idle_box_ends_and_the_next_one_has_its_files(home: Home, lab: Path) -> None:
    made = begun(home, lab, idle_s=8)
    work = Path(there(home).doors().folder)
    (work / "a.py").write_text("print(3)\n")
    (work / "gone.py").unlink()
    (work / "scratch").mkdir()
    (work / "scratch" / "x").write_text("x")
    assert any(outputs(made) == {"a.py": "print(3)\n"} for _ in ticks(CLOCK, 0.2, 20)), "a sync brings it"
    (work / "last.txt").write_text("the last words\n")
    ended = over(home, made)
    assert (ended["outcome"], ended["reason"], ended["exit_code"]) == ("done", "idle", None)
    assert outputs(made) == {"a.py": "print(3)\n", "last.txt": "the last words\n"}
    assert (lab / "a.py").read_text() == "print(1)\n"
    sight = look_at_run(home, RUN)
    assert sight.state.exit_code == ExitCode.DONE
    codes = [record.typed.code for record in sight.records if record.event is Event.INCIDENT]
    assert "dev.idle_soon" in codes
    notices = [notice for notice, _, _ in Noticed(made, 0).news(sight.records, CLOCK.wall())]
    assert "idle soon" in notices
    assert LocalProvider(home, CLOCK).find(None) == []

    later = begun(home, None, "fox-42", continues=RUN)
    work = Path(there(home, "fox-42").doors().folder)
    here = {p.relative_to(work).as_posix(): p.read_text() for p in work.rglob("*") if p.is_file()}
    assert here == {"a.py": "print(3)\n", "last.txt": "the last words\n", ".gitignore": "scratch/\n"}
    assert read_receipt(home, made).predicate["asked"]["job"] == "dev_box"
    there(home, "fox-42").stop()
    assert over(home, later)["outcome"] == "stopped"
    assert [row.problems for row in audit(home).rows] == [(), ()]


def test_a_clone_is_the_folder_and_what_is_not_pushed_is_named(home: Home, lab: Path, tmp_path: Path) -> None:
    def git(*words: str, at: Path = lab) -> None:
        identity = ("-c", "user.name=me", "-c", "user.email=me@lab")
        subprocess.run(["git", *identity, *words], cwd=at, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "first")
    made = begun(home, None, git=f"file://{lab}")
    far = there(home)
    work = Path(far.doors().folder)
    assert (work / "a.py").read_text() == "print(1)\n"
    assert (far.unsaved().files, far.unsaved().commits) == (0, 0)
    (work / "a.py").write_text("print(4)\n")
    git("commit", "-qam", "second", at=work)
    (work / "scratch").mkdir()
    (work / "scratch" / "model.pt").write_bytes(bytes(11_000_000))
    unsaved = far.unsaved()
    assert (unsaved.files, unsaved.commits, [file.name for file in unsaved.first]) == (1, 1, ["scratch"])
    far.stop()
    over(home, made)
    assert outputs(made) == {"a.py": "print(4)\n"}, "nothing of an unchanged clone, and nothing that git leaves out"

    git("commit", "-q", "--allow-empty", "-m", "meanwhile")
    _, plan = planned(home, None, "fox-42", continues=RUN, git=f"file://{lab}")
    assert plan.continues is not None


def test_a_repository_that_cannot_be_cloned_is_quoted_from_git(home: Home, tmp_path: Path) -> None:
    request, plan = planned(home, None, git=f"file://{tmp_path}/nothing")
    made = create_run(home, request, plan)
    start_supervisor(made, home, CLOCK)
    ended = over(home, made)
    assert ended["outcome"] == "failed"
    assert "does not appear to be a git repository" in ended["message"] or "does not exist" in ended["message"]


@pytest.mark.slow
def test_a_dead_supervisor_changes_nothing_for_the_lease(home: Home, lab: Path) -> None:
    """The supervisor is killed.

    The guard must end the machine at its deadline, and the next supervisor must write the receipt.
    """
    lease = Lease(boot_s=40, ship_s=20, train_s=25, collect_s=5, destroy_s=5, kill_allowance_s=5)
    made = begun(home, lab, lease=lease)
    (Path(there(home).doors().folder) / "made.txt").write_text("x")
    assert any(outputs(made) for _ in ticks(CLOCK, 0.2, 20))
    for pid in supervisors(home.root):
        os.kill(pid, signal.SIGKILL)
    local = LocalProvider(home, CLOCK)
    assert any(local.find(None)[0].state is not InstanceState.RUNNING for _ in ticks(CLOCK, 0.5, 120))
    start_supervisor(made, home, CLOCK)
    over(home, made)
    assert outputs(made) == {"made.txt": "x"}
    assert [row.problems for row in audit(home).rows] == [()]


def test_a_box_whose_lease_is_nearly_over_says_so(home: Home, lab: Path) -> None:
    made = begun(home, lab)
    sight = look_at_run(home, RUN)
    now, deadline = CLOCK.wall(), sight.state.deadline_wall
    assert deadline is not None
    assert sight.state.phase is Phase.TRAINING
    assert ends_soon(sight.state, sight.plan, now) == ""
    soon = ends_soon(sight.state, sight.plan, deadline - 2000)
    assert f"gpurun dev --from {RUN}" in soon
    notices = {notice: words for notice, words, _ in Noticed(made, 0).news(sight.records, deadline - 2000)}
    assert notices["ends soon"] == soon
    there(home).stop()
    over(home, made)


def test_a_plan_says_what_a_box_costs_that_is_never_idle(home: Home, lab: Path) -> None:
    _, plan = planned(home, lab, idle_s=0)
    assert any("--idle off" in warning and "1 d" in warning for warning in plan.warnings)
    rented = plan.model_copy(update={"chosen": plan.chosen.model_copy(update={"worst_micros": usd(3)})})
    from gpurun.planning.dev_box_proposal import _list_box_warnings

    assert "$3.00" in next(iter(_list_box_warnings(rented)))


def test_a_folder_that_was_altered_since_is_not_taken(home: Home, lab: Path) -> None:
    made = begun(home, lab)
    (Path(there(home).doors().folder) / "b.txt").write_text("b")
    there(home).stop()
    over(home, made)
    (made.artifacts / "outputs" / "b.txt").write_text("other")
    with refusal(GpurunError, "continue.altered", "b.txt"):
        planned(home, None, "fox-42", continues=RUN)

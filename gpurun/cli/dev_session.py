"""Serves the user of a dev box: shows commands, opens a shell and a tunnel to JupyterLab, and asks before the end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.cli.dev_doors import doors_of, link_of
from gpurun.cli.interrupts import Interrupts, ask_user, costs_on
from gpurun.cli.local_port import free_port, is_free
from gpurun.cli.openssh import program, ssh_argv, ssh_environment, tunnel_into_job
from gpurun.cli.result import Result
from gpurun.cli.run_control import stop_run
from gpurun.cli.session import Session
from gpurun.cli.viewer import Viewer, follow_run, result_of_leaving
from gpurun.core.clock import ticks
from gpurun.core.errors import ExitCode, GpurunError
from gpurun.core.journal_records import Phase
from gpurun.core.paths import RunFolder
from gpurun.core.places import place_facts
from gpurun.core.secrets import child_environment
from gpurun.core.trainer_events import StartEvent, events_of
from gpurun.core.untrusted import safe_line
from gpurun.ledger.runs import Sight, look_at_run
from gpurun.lifecycle.connect import MachineConnector
from gpurun.lifecycle.context import get_instance
from gpurun.lifecycle.ways_in import WayIn, alias_of, config_of, way_to_run, words_there
from gpurun.remote.messages import Doors, Unsaved
from gpurun.view.number_format import format_bytes, format_duration, format_files

TUNNEL_S = 20.0
"""How long a tunnel may take to open."""
LOST = 255
"""The exit code of ssh when the connection failed."""
_MOST_NAMED = 6


class _UntilInUse(Viewer):
    """Follows a run until its machine can be used, or the run ends."""

    is_in_use = False

    def _turn(self) -> Result | None:
        sight = look_at_run(self._session.home, self._folder.name)
        if sight.state.phase is Phase.TRAINING and _has_begun(self._folder):
            self.is_in_use = True
            return Result()
        return super()._turn()


def _has_begun(folder: RunFolder) -> bool:
    """Return whether the machine has reported that its folder is ready."""
    try:
        return any(isinstance(event, StartEvent) for event in events_of(folder.events))
    except OSError:
        return False


def work_there(session: Session, folder: RunFolder, on_interrupt: str, heard: Interrupts, *, has_shell: bool) -> Result:
    """Follow a dev box until it can be used, print the next commands, and open a shell if there is a terminal."""
    viewer = _UntilInUse(session, folder, on_interrupt)
    left = viewer.follow(heard)
    if not viewer.is_in_use:
        return left
    sight = look_at_run(session.home, folder.name)
    try:
        place = _Place.ask_machine(session, sight)
    except GpurunError as error:  # The box keeps running.
        session.say(f"The box does not respond now: {error.what} To try again: gpurun ssh {folder.name}")
        return result_of_leaving(session, sight)
    is_entered = place.is_here or place.way is not None
    if not (has_shell and is_entered and session.interactive and sys.stdout.isatty()):
        return Result(data=place.data(), text="\n".join(place.lines()))
    session.say("\n".join(place.lines()))
    with _hold_tunnel(session, place):
        code = place.shell(session)
    if any(number != signal.SIGINT for number in iter(heard.take, None)):  # The terminal was closed.
        return result_of_leaving(session, look_at_run(session.home, folder.name))
    return _result_after_shell(session, folder, code)


@dataclass(frozen=True)
class _Place:
    """How to reach a dev box. `doors` has its folder and its JupyterLab.

    `way` is None if the box is this computer, or if no way to the box was found; `why_not` then says why.
    """

    sight: Sight
    doors: Doors
    way: WayIn | None
    why_not: str
    ready_line: str
    config: Path

    @classmethod
    def ask_machine(cls, session: Session, sight: Sight) -> _Place:
        """Ask the machine for its folder, and wait for JupyterLab if it was requested."""
        doors, name = doors_of(session, sight), sight.folder.name
        way, why_not = None, ""
        if not place_facts(sight.plan.offer.provider).is_here:
            try:
                way = way_to_run(session.home, name, session.clock)
            except GpurunError as error:
                why_not = f"{error.what} {error.hint}"
        return cls(sight, doors, way, why_not, _ready_line(session, sight), config_of(session.home))

    @property
    def run(self) -> str:
        """Return the run's name."""
        return self.sight.folder.name

    @property
    def is_here(self) -> bool:
        """Return whether the box is this machine."""
        return place_facts(self.sight.plan.offer.provider).is_here

    @property
    def editor(self) -> str:
        """Return the command that opens the box's folder in VS Code."""
        if self.is_here:
            return f"code {shlex.quote(self.doors.folder)}"
        return f"code --folder-uri {shlex.quote(f'vscode-remote://ssh-remote+{alias_of(self.run)}{self.doors.folder}')}"

    def lines(self) -> list[str]:
        """Return the commands to type next."""
        lab = self.doors.jupyter
        lines = [self.ready_line]
        lines += [f"  {self.why_not}"] if self.why_not else []
        if self.is_here:
            lines.append(f"  cd {shlex.quote(self.doors.folder)}")
            lines += [f"  {link_of(lab, lab.port)}"] if lab else []
        elif self.way is not None and self.way.job:
            here, there = (free_port(lab.port), lab.port) if lab else (6006, 6006)
            lines.append(f"  gpurun ssh {self.run}")
            lines += [f"  {link_of(lab, here)}   # with its port forwarded:"] if lab else []
            line = tunnel_into_job(self.config, self.way, [(here, there)], self.doors.host)
            lines.append(f"  {line}   # if the cluster lets you log in to your job's node")
        else:
            lines.append(f"  gpurun ssh {self.run}")
            what = "   JupyterLab, its link printed" if lab else " 6006   port 6006 of the machine, at 127.0.0.1:6006"
            lines.append(f"  gpurun forward {self.run}{what}")
        is_editable = self.is_here or (self.way is not None and self.way.entry is not None and not self.way.job)
        once = "" if self.is_here else "   # after `gpurun ssh-config`, once"
        lines += [f"  {self.editor}{once}"] if is_editable else []
        return [*lines, f"  gpurun stop {self.run}   download files, end machine, receipt"]

    def data(self) -> dict[str, object]:
        """Return the information of `lines` as data, without JupyterLab's token."""
        lab = self.doors.jupyter
        fields = {"run": self.run, "folder": str(self.sight.folder.path), "there": self.doors.folder}
        return {**fields, "host": None if self.is_here else alias_of(self.run), "editor": self.editor,
                "jupyter_port": lab.port if lab else None}  # fmt: skip

    def shell(self, session: Session) -> int:
        """Open a shell in the box's folder at this terminal, and return the shell's exit code."""
        if self.is_here:
            words = words_there(str(Path(self.doors.folder).parents[1]), [os.environ.get("SHELL") or "/bin/sh"])
            return subprocess.call(words, env=child_environment({"TERM": os.environ.get("TERM", "dumb")}))
        assert self.way is not None
        line = self.way.command([], at_terminal=True)
        if self.way.entry is None:
            return subprocess.call(shlex.split(line), env=ssh_environment())
        if program() is not None:
            words = ssh_argv(self.config, self.way.entry, "-t", command=line)
            return subprocess.call(words, env=ssh_environment())
        from gpurun.cli.terminal_shell import run_here

        try:
            return run_here(self.way.entry, line, session.clock, at_terminal=True)
        except GpurunError as error:
            session.say(error.what)
            return LOST


def _ready_line(session: Session, sight: Sight) -> str:
    """Return a line that says that the box is ready, what it costs, and when it ends."""
    costs, idle_s = costs_on(sight, session.clock.wall()), sight.plan.choices.idle_s
    ends = (
        f"it ends after {format_duration(idle_s)} without use" if idle_s else "idle time does not end it (--idle off)"
    )
    return f"{sight.folder.name} is ready: {sight.plan.offer.label}{f', {costs}' if costs else ''}; {ends}."


@contextmanager
def _hold_tunnel(session: Session, place: _Place) -> Iterator[None]:
    """Keep a tunnel to JupyterLab open if the box has one, and print its link. A failure does not end the shell."""
    lab = place.doors.jupyter
    if lab is None or place.is_here or (place.way is not None and place.way.job):
        yield
        return
    try:
        port = free_port(lab.port)
        to = f"{port}:{lab.port}"
        words = [sys.executable, "-m", "gpurun", "--home", str(session.home.root), "forward", place.run, to]
        tunnel = subprocess.Popen(
            words, env=ssh_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except (GpurunError, OSError) as error:
        session.say(f"The tunnel to JupyterLab failed: {error}")
        yield
        return
    try:
        for _ in ticks(session.clock, 0.1, TUNNEL_S):
            if tunnel.poll() is not None or not is_free(port):
                break
        if tunnel.poll() is None:
            session.say(f"JupyterLab, while this shell is open:\n  {link_of(lab, port)}")
        else:
            assert tunnel.stderr is not None
            why = tunnel.stderr.read().decode("utf-8", "replace").strip()
            session.say(f"The tunnel to JupyterLab failed: {safe_line(why)[:500]}")
        yield
    finally:
        tunnel.terminate()
        with suppress(subprocess.TimeoutExpired):
            tunnel.wait(5)
        tunnel.kill()
        tunnel.wait()


def _result_after_shell(session: Session, folder: RunFolder, code: int) -> Result:
    """Show the state of the box after a shell has ended; after the last shell, ask whether to end the box."""
    sight = look_at_run(session.home, folder.name)
    if sight.state.phase is not Phase.TRAINING:
        return follow_run(session, folder)
    costs = costs_on(sight, session.clock.wall())
    on = f"{folder.name} continues{f' ({costs})' if costs else ''}. To end it: gpurun stop {folder.name}"
    kept = replace(result_of_leaving(session, sight), after=on, exit_code=ExitCode.DONE)
    if code == LOST:
        session.say(f"The connection ended, but the box is still running. To return: gpurun ssh {folder.name}")
        return kept
    unsaved = unsaved_of(session, sight)
    if unsaved is not None and unsaved.terminals:
        session.say(f"Another terminal is open on {folder.name}, so the box is kept.")
        return kept
    idle_s = sight.plan.choices.idle_s
    until = f"until it is idle for {format_duration(idle_s)}" if idle_s else "until its lease ends"
    question = f"[k]eep {folder.name} {until} (Enter)  [e]nd it now, and download its files"
    if not ask_user(session, question, flag="gpurun stop", on_interrupt="k").lower().startswith("e"):
        return kept
    if not confirm_loss(session, folder.name, unsaved):
        return kept
    return stop_run(session, sight, "save", "ended by its user", leaves=unsaved is not None)


def unsaved_of(session: Session, sight: Sight) -> Unsaved | None:
    """Ask a dev box which of its files are not downloaded; None, after a message, if the box does not respond."""
    far = MachineConnector(sight.folder, sight.plan, session.clock)(get_instance(sight.state))
    try:
        return far.unsaved()
    except GpurunError as error:
        session.say(f"gpurun could not check what would be lost: {error.what}")
        return None
    finally:
        far.close()


def confirm_loss(session: Session, run: str, unsaved: Unsaved | None) -> bool:
    """List what would be lost with a box, and ask; True if nothing is lost or the user agrees."""
    if unsaved is None or not (unsaved.files or unsaved.commits):
        return True
    if unsaved.files:
        size = format_bytes(unsaved.bytes)
        session.say(f"{format_files(unsaved.files)} ({size}) would not be downloaded:")
        for file in unsaved.first[:_MOST_NAMED]:
            session.say(f"  {safe_line(file.name)}  {format_bytes(file.bytes)}")
        session.say(f"Move them into its folder, or fetch them: gpurun ssh-config, then scp {alias_of(run)}:FILE .")
    if unsaved.commits:
        commits = "1 commit is" if unsaved.commits == 1 else f"{unsaved.commits} commits are"
        session.say(f"{commits} not pushed, and .git is not downloaded. To put them into a file that is downloaded:")
        session.say("  git bundle create commits.bundle --all")
    return ask_user(session, "Lose them? [y/N]", flag="--yes", on_interrupt="n").lower() in ("y", "yes")


def confirm_stop_of_box(session: Session, sight: Sight) -> bool | None:
    """Ask before `gpurun stop` ends a dev box; True if nothing is lost or the user agrees, False after a no.

    None if the user cannot be asked, the box is not in use, or it does not respond.
    """
    if not (session.interactive and sight.state.phase is Phase.TRAINING):
        return None
    unsaved = unsaved_of(session, sight)
    return None if unsaved is None else confirm_loss(session, sight.folder.name, unsaved)

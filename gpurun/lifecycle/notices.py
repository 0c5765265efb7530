"""Send a run's notices to its user: by a POST to the URL in `notify.url`, or by calling the program in `notify.exec`.

A thread reads the run's journal and sends the notices, so that no step waits for them. A notice that cannot be sent is
logged and dropped. A restarted supervisor sends nothing about records that are older than itself.
"""

from __future__ import annotations

import json
import logging
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPSConnection
from threading import Event as Flag
from threading import Thread
from typing import Any
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError
from gpurun.core.journal_events import Incident, TrainObserved
from gpurun.core.journal_records import Event, Record
from gpurun.core.money import figure_words, format_usd
from gpurun.core.paths import RunFolder
from gpurun.core.run_plan import Plan
from gpurun.core.secrets import child_environment
from gpurun.core.settings import Setting, is_of_the_link
from gpurun.ledger.journal import read_journal
from gpurun.ledger.plan_from_journal import plan_of
from gpurun.ledger.run_state import replay_journal
from gpurun.ledger.runs import ends_soon
from gpurun.ledger.spending import spending
from gpurun.view.event_text import IDLE_OVER, IDLE_SOON, JOB_SILENT, tell_record

LOOK_S = 5.0
SEND_S = 10.0
PROGRAM_S = 60.0
SPENT_SHARE = 0.8
_NOTICE_OF: Mapping[str, str] = {
    Event.TRAIN_STARTED: "started",
    Event.TRAIN_OBSERVED: "trained",
    Event.HOLD_INTENDED: "held",
    Event.LEG_PLANNED: "moved",
    Event.RUN_CLOSED: "finished",
}


class _RefuseRedirects(HTTPRedirectHandler):
    """A handler that refuses redirects: a notice goes only to the address that the user set."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _connect(address: tuple[str, int], *more: Any) -> socket.socket:
    """Connect to a host. Raise ConnectionRefusedError if its name resolves to a link-local address."""
    found = socket.create_connection(address, *more)
    peer = found.getpeername()[0]
    if is_of_the_link(peer):
        found.close()
        raise ConnectionRefusedError(f"{address[0]} leads to {peer}, where a cloud's machines have their keys")
    return found


class _Connection(HTTPSConnection):
    """An HTTPS connection that refuses link-local addresses."""

    def __init__(self, *of: Any, **more: Any) -> None:
        super().__init__(*of, **more)
        self._create_connection = _connect


class _PublicHTTPSHandler(HTTPSHandler):
    """Opens https URLs with `_Connection`."""

    def https_open(self, request: Request) -> Any:
        return self.do_open(_Connection, request)


class Noticed:
    """Derives notices from a run's records, each kind once per machine. The first `seen` records cause none."""

    def __init__(self, folder: RunFolder, seen: int, plan: Plan | None = None) -> None:
        self._folder, self._seen, self._plan = folder, seen, plan
        self._sent: set[str] = set()

    def news(self, records: Sequence[Record], now_wall: float) -> Iterator[tuple[str, str, int]]:
        """Yield (kind, message, micro-dollars spent so far) for each notice that is now due."""
        self._plan = self._plan or plan_of(self._folder, records)[0]
        spent, cap = spending(records, now_wall, is_watched=True), self._plan.cap_micros
        new, self._seen = records[self._seen :], len(records)
        found = [
            (kind, tell_record(record, self._plan.job.terms)) for record in new if (kind := _get_notice_kind(record))
        ]
        if any(isinstance(record.typed, Incident) and record.typed.code == IDLE_OVER for record in new):
            self._sent.discard("idle soon")
        is_attended = self._plan.job.is_attended
        if is_attended and (words := ends_soon(replay_journal(self._folder.name, records), self._plan, now_wall)):
            found.append(("ends soon", words))
        if cap and spent.micros >= SPENT_SHARE * cap:
            found.insert(0, ("cap", f"{figure_words(spent.micros, spent.figure)} of {format_usd(cap)} are spent"))
        for notice, message in found:
            if notice == "moved":  # The next machine may send the same notices again.
                self._sent -= {"moved", "started", "trained", "held", "silent"}
            if notice not in self._sent:
                self._sent.add(notice)
                yield notice, message, spent.micros


class Notices:
    """Sends the notices of one run, beginning with the records that are new from now on."""

    def __init__(self, folder: RunFolder, clock: Clock, settings: Mapping[str, Setting]) -> None:
        self._folder, self._clock = folder, clock
        self._url, self._program = settings["notify.url"].value, settings["notify.exec"].value
        self._billing_warning = self._billing_warning_sent = ""
        self._noticed = Noticed(folder, len(read_journal(folder.journal).records) if self.are_wanted else 0)

    @property
    def are_wanted(self) -> bool:
        """Return whether the user set an address or a program."""
        return bool(self._url or self._program)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Send notices while the block runs, and the last notices at its end."""
        if not self.are_wanted:
            yield
            return
        over = Flag()
        thread = Thread(target=self._follow, args=(over,), name="notices", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2 * (SEND_S + PROGRAM_S))

    def may_be_billing(self, error: GpurunError) -> None:
        """Have the thread send a notice, once, that a machine is not proven gone.

        Return without waiting, so that the next attempt can begin.
        """
        self._billing_warning = f"{error.what} {error.hint}"

    def look(self) -> None:
        """Send notices for the new records in the journal, and for states such as a cap that is nearly spent."""
        for notice in self._noticed.news(read_journal(self._folder.journal).records, self._clock.wall()):
            self._send(*notice)

    def _follow(self, over: Flag) -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(LOOK_S)
            if self._billing_warning and not self._billing_warning_sent:
                self._billing_warning_sent = self._billing_warning
                self._send("may be billing", self._billing_warning, None)
            with suppress(GpurunError, OSError):  # A damaged journal is handled by the supervisor.
                self.look()

    def _send(self, notice: str, message: str, spent_micros: int | None) -> None:
        """Send one notice to the address and the program."""
        run = self._folder.name
        payload = {"v": 1, "run": run, "notice": notice, "message": message, "spent_micros": spent_micros}
        body = json.dumps(payload).encode()
        try:
            if self._url:
                request = Request(self._url, data=body, headers={"Content-Type": "application/json"})
                build_opener(_RefuseRedirects(), _PublicHTTPSHandler()).open(request, timeout=SEND_S).close()
            if self._program:
                receipt = {"GPURUN_RECEIPT": str(self._folder.receipt)}
                subprocess.run(
                    shlex.split(self._program),
                    input=body,
                    env=child_environment(receipt),
                    timeout=PROGRAM_S,
                    check=True,
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            why = getattr(error, "reason", error)  # The text of other errors may contain secrets.
            why = why if isinstance(why, ConnectionRefusedError) else type(error).__name__
            logging.warning("The notice %r was not delivered: %s", notice, why)


def _get_notice_kind(record: Record) -> str:
    """Return the kind of notice that a record causes; "" if it causes none."""
    match record.typed:
        case Incident(code=code):
            return {JOB_SILENT: "silent", IDLE_SOON: "idle soon"}.get(code, "")
        case TrainObserved(reason="nonfinite"):
            return "loss not finite"
    return _NOTICE_OF.get(record.event, "")

"""Uses this machine as a free provider: an instance is a folder and every process that carries the instance's mark.

It follows the rules of a cloud, without short cuts: the answer of a create may be lost, an instance is found by its
token, only the agent has access to it, and only a read-back proves its end.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpurun.core.clock import Clock, ticks
from gpurun.core.crashpoint import crashpoint
from gpurun.core.machine_token import parse_token
from gpurun.core.money import usd
from gpurun.core.paths import Home, make_private
from gpurun.core.records import Account, Address, GpuNeed, Instance, InstanceState, Offer, Order, Teardown
from gpurun.core.secrets import child_environment
from gpurun.core.this_machine import cards_here
from gpurun.providers.base import EndsBy, Rejected, Traits, Unknown
from gpurun.providers.catalog import kind_of
from gpurun.providers.local_guard import INSTANCE_FILE
from gpurun.providers.processes import MARK, UnreadableMarks, kill_instance, processes_of, require_readable_marks

_BOOT_LIMIT_S = 15.0


class LocalProvider:
    """The `local` provider: each instance is a folder below the home, with a guard process."""

    name = "local"
    guard_shares_key = False
    traits = Traits(
        settle_s=1.0,
        poll_s=0.1,
        death_reads=1,
        death_spread_s=0.0,
        teardown=Teardown.PROCESSES_KILLED_HOST_KEPT,
        console_url="",
        ends_by=EndsBy.MACHINE,
    )

    def __init__(self, home: Home, clock: Clock) -> None:
        self._folder = home.instances
        self._clock = clock

    def verify(self) -> Account:
        """Return the account, which is named after this machine and needs no key."""
        return Account(provider=self.name, identity=platform.node())

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return this machine at no cost, with one of its GPUs if one is needed and the catalogue has the card."""
        card = next(iter(cards_here()), None) if need.count else None
        kind = kind_of(card.name) if card else None
        offer = Offer(
            provider=self.name,
            type_id="this-machine",
            gpu=kind or "cpu",
            gpu_count=1 if kind else 0,
            vram_gb=card.memory_mib // 1024 if card and kind else 0,
            region="here",
            rate_micros_per_hour=usd(0),
            billing_unit_s=1,
            boot_s=int(_BOOT_LIMIT_S),
            price_source="free",
            dies_by_itself="yes · guard process",
            arch=platform.machine(),
        )
        return [offer]

    def create(self, order: Order) -> Instance:
        """Start the guard, which creates the folder. Return the instance once its folder exists."""
        folder = self._folder_of(order.token)
        try:
            require_readable_marks()
        except UnreadableMarks as error:
            raise Rejected(f"this machine does not show which processes belong to an instance: {error}") from error
        make_private(self._folder)
        crashpoint("before local.create")
        command = [sys.executable, "-m", "gpurun.providers.local_guard", str(folder), order.token, order.run]
        try:
            with open(self._folder / f"{order.token}.log", "ab") as log:
                guard = subprocess.Popen(
                    [*command, repr(order.deadline_wall)],
                    env=child_environment({MARK: order.token, "PYTHONPATH": str(Path(__file__).parents[2])}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError as error:
            raise Rejected(f"this machine cannot start a process: {error}") from error
        crashpoint("after local.create")
        for _ in ticks(self._clock, 0.02, _BOOT_LIMIT_S):
            if (folder / INSTANCE_FILE).exists():
                return self.read(order.token)
            if guard.poll() not in (None, 0):
                raise self._clean_up(order.token)
        raise Unknown("the guard was started but its folder did not appear")

    def find(self, token: str | None) -> list[Instance]:
        """Return all instances, found by their folders and processes, oldest first."""
        tokens = {token} if token else self._list_tokens()
        found = [self.read(name) for name in sorted(tokens)]
        return sorted((i for i in found if i.state is not InstanceState.GONE), key=lambda i: i.created_wall or 0.0)

    def read(self, instance_id: str) -> Instance:
        """Return an instance by its folder and the process table; Unknown if marks cannot be read."""
        folder = self._folder_of(instance_id)
        crashpoint("before local.read")
        facts = _read_facts(folder)
        try:
            alive = processes_of(instance_id)
        except UnreadableMarks as error:  # Otherwise a living process could be taken for gone.
            raise Unknown(f"it is not known whether {instance_id} is alive: {error}") from error
        if facts:
            state = InstanceState.RUNNING if facts["guard"] in alive else InstanceState.STOPPED
        elif alive:
            state = InstanceState.PENDING
        else:
            state = InstanceState.STOPPED if folder.exists() else InstanceState.GONE
        return Instance(
            id=instance_id,
            provider=self.name,
            token=instance_id,
            run=str(facts.get("run", "")),
            state=state,
            address=Address(kind="folder", folder=f"{self._folder.name}/{instance_id}/machine") if facts else None,
            rate_micros_per_hour=usd(0),
            created_wall=facts.get("created_wall"),
            deadline_wall=facts.get("deadline_wall"),
            region="here",
        )

    def destroy(self, instance_id: str) -> None:
        """Kill every process that carries the mark, then remove the folder. Harmless if neither exists."""
        folder = self._folder_of(instance_id)
        crashpoint("before local.destroy")
        (folder / INSTANCE_FILE).unlink(missing_ok=True)  # First, so that a guard that is just starting ends.
        try:
            for _ in ticks(self._clock, 0.02, 5.0):
                if not kill_instance(instance_id):
                    break
        except UnreadableMarks as error:
            raise Unknown(f"the processes of {instance_id} cannot be seen: {error}") from error
        shutil.rmtree(folder, ignore_errors=True)
        (self._folder / f"{instance_id}.log").unlink(missing_ok=True)
        crashpoint("after local.destroy")

    def guard_folder(self, instance: Instance) -> str:
        """Return the instance's folder, which its guard process watches."""
        return str(self._folder_of(instance.id))

    def _clean_up(self, token: str) -> Rejected | Unknown:
        """Clean up after a guard that ended immediately. Return Rejected if nothing is left, else Unknown."""
        log = self._folder / f"{token}.log"
        words = log.read_text(errors="replace").strip()[-300:] if log.exists() else ""
        self.destroy(token)
        if self.read(token).state is InstanceState.GONE:
            return Rejected(f"the guard ended at once: {words or 'it printed nothing'}")
        return Unknown("the guard ended at once, but the instance could not be removed")

    def _folder_of(self, token: str) -> Path:
        """Return the folder of an instance; Rejected for a malformed token, because it becomes part of a path."""
        if parse_token(token) is None:
            raise Rejected(f"{token!r} is not the token of a local instance")
        return self._folder / token

    def _list_tokens(self) -> set[str]:
        """Return every token that has a folder. A process without a folder is found only if its token is known."""
        if not self._folder.is_dir():
            return set()
        return {name for name in os.listdir(self._folder) if parse_token(name)}


def _read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that the guard wrote; {} if their file is missing or malformed."""
    try:
        facts = json.loads((folder / INSTANCE_FILE).read_bytes())
        return {
            "run": str(facts["run"]),
            "guard": int(facts["guard"]),
            "created_wall": float(facts["created_wall"]),
            "deadline_wall": float(facts["deadline_wall"]),
        }
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}

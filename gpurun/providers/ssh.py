"""Uses a box that you already have, such as a lab server, an AutoDL or Vast instance, or a Lightning studio.

gpurun cannot start or stop the box. So an instance is a record in this home that a run uses a box until a deadline:
`instances/ssh/TOKEN.json`. `create` writes the record and `destroy` removes it. The agent ends the processes on the
box, and the user shuts the box down.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gpurun.core.clock import Clock
from gpurun.core.crashpoint import crashpoint
from gpurun.core.errors import UsageError
from gpurun.core.filelock import exclusive
from gpurun.core.machine_token import parse_token
from gpurun.core.money import Micros
from gpurun.core.paths import Home, fsync_folder, make_private, write_atomic
from gpurun.core.records import Account, Address, Frozen, GpuNeed, Instance, InstanceState, Offer, Order, Teardown
from gpurun.providers.base import EndsBy, Rejected, Traits, Unknown
from gpurun.providers.ssh_login import Login, parse_host

__all__ = ["Login", "SshBox", "SshProvider", "parse_host"]

DIES_BY_ITSELF = "NO · yours to shut down"


@dataclass(frozen=True)
class SshBox:
    """The user's own box, with the hourly price and the GPUs that the user stated."""

    host: str
    port: int
    user: str
    rate_micros_per_hour: Micros
    need: GpuNeed

    @property
    def login(self) -> Login:
        """Return the login on the box."""
        return Login(self.user, self.host, self.port)


class _Use(Frozen):
    """The record that a run uses a box."""

    v: int = 1
    run: str
    token: str
    type_id: str
    user: str
    host: str
    port: int
    region: str
    created_wall: float
    deadline_wall: float


class SshProvider:
    """The `ssh` provider. Each box takes one run at a time, reserved by a record in this home."""

    name = "ssh"
    traits = Traits(
        settle_s=0.0,
        poll_s=0.5,
        death_reads=1,
        death_spread_s=0.0,
        teardown=Teardown.USER_OPERATED,
        console_url="",
        ends_by=EndsBy.MACHINE,
    )

    def __init__(self, home: Home, clock: Clock, box: SshBox | None = None) -> None:
        self._folder = home.instances / "ssh"
        self._clock = clock
        self._box = box

    def verify(self) -> Account:
        """Return the account, which is named after this machine and needs no key."""
        return Account(provider=self.name, identity=f"your own boxes, from {platform.node()}")

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return the box at the price that the user stated; an empty list if the user has named no box.

        Its card is not known yet: the offer names the card with the least memory among the `known` rows that fit, so
        that a plan does not rely on more. The agent detects the real card later.
        """
        if self._box is None:
            return []
        fitting = [row for row in known if need.memory_gb in (None, row.vram_gb)]
        card = min(fitting, key=lambda row: row.vram_gb, default=None)
        return [
            Offer(
                provider=self.name,
                type_id=str(self._box.login),
                gpu=card.gpu if card and need.count else need.name,
                gpu_count=need.count,
                vram_gb=(card.vram_gb if card else need.memory_gb or 0) if need.count else 0,
                region=self._box.host,
                rate_micros_per_hour=self._box.rate_micros_per_hour,
                billing_unit_s=60,
                boot_s=60,
                price_source="yours",
                dies_by_itself=DIES_BY_ITSELF,
            )
        ]

    def create(self, order: Order) -> Instance:
        """Reserve the offer's box (its `type_id`) for the token; Rejected while another run uses the box."""
        path = self._record_path(order.token)
        try:
            login = parse_host(order.offer.type_id)
        except UsageError as error:
            raise Rejected(error.what) from error
        use = _Use(
            run=order.run,
            token=order.token,
            type_id=order.offer.type_id,
            user=login.user,
            host=login.host,
            port=login.port,
            region=order.offer.region,
            created_wall=self._clock.wall(),
            deadline_wall=order.deadline_wall,
        )
        crashpoint("before ssh.create")
        try:
            make_private(self._folder)
            with exclusive(self._folder / ".lock"):
                if not path.exists():
                    self._refuse_if_taken(use)
                    write_atomic(path, use.to_json().encode())
        except OSError as error:
            raise Unknown(f"the record of the box cannot be written: {error.strerror}") from error
        crashpoint("after ssh.create")
        return self.read(order.token)

    def find(self, token: str | None) -> list[Instance]:
        """Return every box that is in use according to this home's records, oldest first."""
        tokens = [token] if token else self._list_tokens()
        found = [self.read(name) for name in tokens]
        return sorted((i for i in found if i.state is not InstanceState.GONE), key=lambda i: i.created_wall or 0.0)

    def read(self, instance_id: str) -> Instance:
        """Return the instance of a record; UNKNOWN if the record cannot be read, GONE if there is none."""
        path = self._record_path(instance_id)
        crashpoint("before ssh.read")
        try:
            use = _Use.from_json(path.read_bytes())
        except FileNotFoundError:
            return self._build_unrecorded_instance(instance_id, InstanceState.GONE, "")
        except (OSError, ValidationError) as error:
            reason = f"its record is damaged: {type(error).__name__}"
            return self._build_unrecorded_instance(instance_id, InstanceState.UNKNOWN, reason)
        return Instance(
            id=instance_id,
            provider=self.name,
            token=use.token,
            run=use.run,
            state=InstanceState.RUNNING,
            address=Address(kind="ssh", host=use.host, port=use.port, user=use.user),
            created_wall=use.created_wall,
            deadline_wall=use.deadline_wall,
            region=use.region,
            type_id=use.type_id,
        )

    def destroy(self, instance_id: str) -> None:
        """Release the box by removing its record; harmless if there is none. The box itself keeps running."""
        path = self._record_path(instance_id)
        crashpoint("before ssh.destroy")
        path.unlink(missing_ok=True)
        if self._folder.is_dir():
            fsync_folder(self._folder)  # A record that comes back after a power cut would block the box.
        crashpoint("after ssh.destroy")

    def _build_unrecorded_instance(self, token: str, state: InstanceState, reason: str) -> Instance:
        return Instance(id=token, provider=self.name, token=token, run="", state=state, said=reason)

    def _refuse_if_taken(self, use: _Use) -> None:
        """Raise Rejected if another run uses the box.

        Two trainers would compete for memory, and the end of the first run would kill both.
        """
        for other in self.find(None):
            address = other.address
            if address is not None and (address.host, address.port) == (use.host, use.port):
                raise Rejected(
                    f"{use.host} port {use.port} is in use by the run {other.run} "
                    f"(gpurun destroy {other.run} ends it; gpurun reap --provider ssh --destroy a forgotten one)"
                )

    def _record_path(self, token: str) -> Path:
        """Return the path of a token's record; Rejected for a malformed token, because it becomes part of a path."""
        if parse_token(token) is None:
            raise Rejected(f"{token!r} is not the token of a box in use")
        return self._folder / f"{token}.json"

    def _list_tokens(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return sorted(path.stem for path in self._folder.glob("*.json") if parse_token(path.stem))

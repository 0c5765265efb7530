"""Tests of the errors of a forwarded port on which nothing listens at the other end, with a real sshd."""

from __future__ import annotations

import socket
import threading

import pytest
from conftest import Place

from gpurun.cli.commands.forward import forward as forward_verb
from gpurun.cli.local_port import is_free
from gpurun.cli.session import Session
from gpurun.core.errors import SetupError
from gpurun.core.paths import Home
from gpurun.core.records import Address
from gpurun.lifecycle import ways_in
from gpurun.lifecycle.ways_in import WayIn, config_of
from gpurun.remote.ssh.entry import HostEntry
from tests.emulators import sshd

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())


def forward_once(place: Place, monkeypatch: pytest.MonkeyPatch, server: sshd.Sshd) -> tuple[str, list[str]]:
    """Forward a port and use it once; return the code of the error that ends `forward`, and the output before it."""
    home, said = Home(place.home / "home").prepare(), list[str]()
    host_key = " ".join(place.keys.host_public.split()[:2])
    address = Address(kind="ssh", host="127.0.0.1", port=server.port, user=server.user)
    entry = HostEntry("gpurun-fox-41", address, str(place.client), host_key)
    home.ssh.mkdir()
    (home.ssh / "known_hosts").write_text(entry.known())
    config_of(home).write_text(entry.config(home.ssh / "known_hosts", config_of(home)))
    monkeypatch.setattr(ways_in, "way_to_run", lambda *_: WayIn("fox-41", entry, "x"))
    monkeypatch.setattr("gpurun.cli.run_control.resolve_run_name", lambda session, run: run)

    def use(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            client.recv(1)

    class Listening(Session):
        def say(self, text: str) -> None:
            said.append(text)
            if text.startswith("http://"):
                threading.Thread(target=use, args=(here,), daemon=True).start()
            elif text.startswith("Nothing listens"):
                server.close()

    with socket.create_server(("127.0.0.1", 0)) as free:
        here = free.getsockname()[1]
    with pytest.raises(SetupError) as raised:
        forward_verb(Listening(home), "fox-41", [f"{here}:9"])
    assert is_free(here)
    return raised.value.code, said


def test_a_server_that_forbids_forwarding_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = forward_once(place, monkeypatch, place.serve("AllowTcpForwarding no"))
    assert code == "forward.forbidden"


def test_nobody_at_the_port_is_told_and_the_machines_end_ends_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = forward_once(place, monkeypatch, place.serve())
    assert code == "forward.ended"
    address, way_out, nobody = said
    assert address.startswith("http://")
    assert way_out.startswith("Ctrl-C")
    assert nobody.startswith("Nothing listens")

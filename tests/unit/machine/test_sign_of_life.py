"""Tests of a machine's sign of life: only its own host key, shown by a real sshd, counts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from conftest import Place

from gpurun.core.clock import SystemClock
from gpurun.core.run_plan import Box
from gpurun.planning.own_box import shown_host_key
from gpurun.remote.client import FarSide
from gpurun.remote.key_pairs import fingerprint, make_keys
from gpurun.remote.ssh import HostKeyMismatch
from tests.emulators import sshd

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())
LIMIT_S = 10.0


@pytest.mark.parametrize("of", [str, fingerprint])
def test_a_machine_answers_by_its_host_key_without_a_login(place: Place, of: type[str]) -> None:
    far = FarSide(place.machine(host_key=of(place.keys.host_public)))
    assert far.answers(LIMIT_S)
    assert "userauth-request" not in place.server.log


def test_it_answers_though_the_key_to_log_in_with_is_forgotten(place: Place) -> None:
    far = FarSide(place.machine())
    place.client.unlink()
    assert far.answers(LIMIT_S)


def test_another_machine_at_its_address_is_no_sign_of_life(place: Place, tmp_path: Path) -> None:
    expected = make_keys(tmp_path / "others").host_public
    assert not FarSide(place.machine(host_key=expected)).answers(LIMIT_S)
    assert "Connection from" in place.server.log, "else the above would prove nothing"


def test_nothing_that_listens_is_none(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert not FarSide(place.machine(taken.getsockname()[1])).answers(LIMIT_S)


def test_a_silent_listener_shows_no_sign_of_life_in_the_limit(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not FarSide(place.machine(silent.getsockname()[1])).answers(1.0)


def test_an_sshd_that_has_ended_answers_no_more(place: Place) -> None:
    far = FarSide(place.machine())
    assert far.answers(LIMIT_S)
    place.server.close()
    assert not far.answers(LIMIT_S)


def test_a_key_known_by_its_fingerprint_is_asked_for_whole(place: Place) -> None:
    line = " ".join(place.keys.host_public.split()[:2])
    target = f"{place.server.user}@127.0.0.1:{place.server.port}"
    box = Box(target=target, identity=str(place.client), host_key=fingerprint(line), trusted="given")
    assert shown_host_key(box, SystemClock()) == line
    other = fingerprint(place.keys.client_public)
    with pytest.raises(HostKeyMismatch):
        shown_host_key(box.model_copy(update={"host_key": other}), SystemClock())

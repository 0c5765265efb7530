"""Tests of what conftest.py promises to every test: no network, no cloud's key, and a separate home."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest


def test_no_test_leaves_this_machine() -> None:
    with socket.socket() as far, pytest.raises(OSError, match="may not connect"):
        far.connect(("192.0.2.1", 443))
    with pytest.raises(OSError, match="may not connect"):
        socket.create_connection(("api.example.com", 443), timeout=1)
    with socket.socket(type=socket.SOCK_DGRAM) as far, pytest.raises(OSError, match="may not connect"):
        far.sendto(b"x", ("192.0.2.1", 53))


def test_this_machine_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        assert near.getpeername() == server.getsockname()


def test_home_keys_and_time_zone(tmp_path: Path) -> None:
    assert Path(os.environ["GPURUN_HOME"]).parent == tmp_path
    assert [name for name in os.environ if name.startswith(("RUNPOD_", "LAMBDA_", "AWS_ACCESS", "AWS_SECRET"))] == []
    assert time.strftime("%Z", time.localtime(0)) == "UTC"


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests here")
@pytest.mark.xdist_group("one worker")
def test_tests_of_one_group_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    """Otherwise each worker would rent again what a group shares, which takes minutes."""
    assert request.node.nodeid.endswith("@one worker")


def test_a_trainer_takes_one_thread() -> None:
    """This must also hold for trainers that a module's fixtures start."""
    assert os.environ["OMP_NUM_THREADS"] == "1"

"""Tests that data which must survive a power cut is synced in order: the file, its name, then the folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import SetupError
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, write_atomic
from gpurun.ledger.chain import Link, append_link, chain_locked, read_chain
from gpurun.ledger.fsync import append_durably, require_durable
from gpurun.ledger.journal import GENESIS, Journal
from gpurun.ledger.signing import load_signer
from tests.lifecycle.tiny_runs import make_run
from tests.simulation import syncs
from tests.simulation.syncs import needs_proc

story = syncs.story


@needs_proc
def test_a_file_that_is_replaced_whole(story: list[str], tmp_path: Path) -> None:
    write_atomic(tmp_path / "plan.json", b"{}")
    assert story == ["file", "name", "folder"]


@needs_proc
def test_a_journals_first_record_and_its_next(story: list[str], tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.jsonl", VirtualClock())
    journal.write(Event.INCIDENT, {})
    assert story[-2:] == ["file", "folder"]
    journal.write(Event.INCIDENT, {})
    assert story[-1] == "file"


@needs_proc
def test_a_torn_line_that_is_cut(story: list[str], tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"half')
    Journal.open(path, VirtualClock())
    assert story[:2] == ["file", "folder"]


@needs_proc
def test_the_chain_of_receipts(story: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with chain_locked(path):
        assert story == ["folder"], "the file that is locked is there for everybody"
        append_link(path, read_chain(path), Link(seq=1, run="fox-41", receipt_sha256="0" * 64, prev=GENESIS))
    assert story == ["folder", "file", "folder"]


@needs_proc
def test_a_new_signing_key_and_then_its_public_half(story: list[str], tmp_path: Path) -> None:
    assert load_signer(tmp_path / "keys") is not None
    assert story == ["file", "folder", "file", "name", "folder"]


@needs_proc
def test_a_new_run(story: list[str], tmp_path: Path) -> None:
    make_run(Home(tmp_path))
    assert story[-7:] == ["file", "name", "folder"] * 2 + ["folder"], "the request, the plan, and the run's own name"


@needs_proc
def test_the_cut_after_a_failed_append_is_synced(
    story: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SetupError):
        append_durably(tmp_path / "journal.jsonl", b"line\n", after=0)
    assert story == ["file"]


@needs_proc
def test_a_folder_is_probed_with_real_syncs(story: list[str], tmp_path: Path) -> None:
    require_durable(tmp_path)
    assert story == ["file", "folder"]

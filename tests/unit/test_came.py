"""Tests of what a receipt states about the machine: what the provider delivered, and the machine's incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import read_receipt
from tests.unit.ledger_samples import CloudRun


def notebook_facts(tmp_path: Path, *, endpoint: str = "", **came: Any) -> dict[str, Any]:
    """Return the receipt's facts of a run whose machine showed a wrong host key; assert that the audit accepts them.

    `came` replaces fields of the instance that the provider delivered.
    """
    run = CloudRun(Home(tmp_path / "home").prepare())
    event, data = run.opened()
    for never_begun in (run.folder.log, run.folder.events):
        never_begun.unlink()
    run.write((event, {**data, "home": "0a1b2c", "endpoint": endpoint}), run.intended(), run.created(**came))
    wrong = {"step": "await_ready", "code": "ssh.strange_host", "message": "a strange host key", "hint": ""}
    run.write((Event.STEP_FAILED, {**wrong, "exit_code": 1})).play(run.death()).settle(1)
    assert audit(run.home).rows[0].problems == ()
    return read_receipt(run.home, run.folder).predicate


def test_what_came_is_named_and_not_what_was_ordered(tmp_path: Path) -> None:
    instance = notebook_facts(tmp_path, type_id="A100-PCIE", gpu="A100", region="US-TX-3")["instance"]
    assert (instance["type"], instance["gpu"], instance["region"]) == ("A100-PCIE", "A100", "US-TX-3")
    assert "as_ordered" not in instance


def test_what_the_provider_did_not_tell_is_called_as_ordered(tmp_path: Path) -> None:
    instance = notebook_facts(tmp_path, region="")["instance"]
    assert (instance["type"], instance["region"], instance["as_ordered"]) == ("H100-SXM", "EU-RO-1", ["region", "type"])


def test_another_address_than_the_providers_own_is_named(tmp_path: Path) -> None:
    assert notebook_facts(tmp_path, endpoint="http://127.0.0.1:9")["instance"]["endpoint"] == "http://127.0.0.1:9"


def test_a_step_that_failed_is_an_incident(tmp_path: Path) -> None:
    assert [one["code"] for one in notebook_facts(tmp_path)["incidents"]] == ["ssh.strange_host"]

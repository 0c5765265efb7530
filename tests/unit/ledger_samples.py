"""Run folders as the lifecycle leaves them, written with the real journal on a virtual clock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpurun.core.clock import VirtualClock
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, RunFolder
from gpurun.core.receipt_rules import RULES
from gpurun.core.records import canonical, digest_json
from gpurun.ledger.journal import GENESIS, Journal, seal_of
from gpurun.ledger.signing import load_signer, make_envelope, payload_of
from gpurun.ledger.write_receipt import write_receipt
from tests.tensor_file import as_tensors

RATE = 2_490_000
WEIGHTS = "checkpoints/000120.model.safetensors"
Note = tuple[Event, dict[str, Any]]


class CloudRun:
    """A paid run of one hour on one H100, written event by event. A test changes only the events that it is about."""

    parameters = 124_475_904

    def __init__(self, home: Home, name: str = "fox-41", *, device: str = "cuda", cap: int | None = 12_000_000) -> None:
        self.home, self.folder, self.clock = home, home.prepare().run(name), VirtualClock()
        self.device, self.cap = device, cap
        self.token, self.instance_id = f"gr-{name}-7f3a91", f"pod-{name}"
        self.folder.path.mkdir(mode=0o700)
        self.folder.request.write_text('{"recipe": "gpt2-124m"}\n')
        self.folder.plan.write_text(json.dumps(self.plan()) + "\n")
        self.write_trainer_files()
        self.journal = Journal.open(self.folder.journal, self.clock)

    def write_trainer_files(self) -> None:
        """Write the trainer's files: a log, events, a checkpoint, its state and a sample."""
        gpu = "NVIDIA H100" if self.device == "cuda" else None
        name = [f"cuda_name: {gpu}"] if gpu else []
        steps = [(step, 4.0 - step / 60) for step in (1, *range(10, 121, 10))]
        lines = [f"step {step:04d} | loss {loss:.4f} | lr 3.00e-04 | elapsed {step}.0 s" for step, loss in steps]
        code = "code: embedding trainer/model.py:130 | attention trainer/model.py:45 | loss trainer/loss.py:104"
        log = [
            f"device: {self.device}",
            *name,
            f"parameters: {self.parameters:,}",
            code,
            *lines,
            f"checkpoint: {WEIGHTS}",
        ]
        log += [f"a run of its own: {self.folder.name}"]
        self.folder.log.write_text("\n".join([*log, "--- sample ---", "The def of device: cuda", ""]))
        start = {"kind": "start", "device": self.device, "cuda_name": gpu, "torch": "2.13.0", "of": self.folder.name}
        start |= {"python": "3.12.1", "world_size": 1, "parameters": self.parameters, "steps": 120, "precision": "bf16"}
        events = [start, *({"kind": "step", "step": s, "loss": x, "tokens": s * 1024} for s, x in steps)]
        events += [{"kind": "eval", "step": s, "val_loss": 5.0 - s / 40} for s in (60, 120)]
        events += [
            {"kind": "sample", "step": 120, "prompt": "The", "text": "The def\n  of \x1b[31mred", "name": "s.txt"}
        ]
        events += [{"kind": "stop", "step": 120, "reason": "done", "train_s": 3000.5, "final_loss": 2.0}]
        self.folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        for name_of_file, content in self.contents().items():
            path = self.folder.artifacts / name_of_file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    @staticmethod
    def contents() -> dict[str, bytes]:
        """Return the files that the run downloads, by name."""
        return {
            WEIGHTS: as_tensors(b"weights" * 100),
            "checkpoints/000120.state.json": b"{}",
            "samples/000120.txt": b"The def",
        }

    def manifest(self) -> list[dict[str, Any]]:
        kinds = {"safetensors": "weights", "json": "state", "txt": "sample"}
        return [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            | {"kind": kinds[name.rsplit(".", 1)[1]], "step": 120}
            for name, content in self.contents().items()
        ]

    def instance(self, **changes: Any) -> dict[str, Any]:
        fields = {"id": self.instance_id, "provider": "runpod", "token": self.token, "run": self.folder.name}
        fields |= {"state": "RUNNING", "address": None, "gpu": "H100", "gpu_count": 1, "rate_micros_per_hour": RATE}
        return fields | {"created_wall": None, "deadline_wall": None, "region": "EU-RO-1"} | changes

    def plan(self) -> dict[str, Any]:
        request = {"run": self.folder.name, "mode": "paid", "recipe": "gpt2-124m", "form": "full"}
        digests = {"recipe_sha256": digest_json("recipe"), "bundle_sha256": digest_json("bundle")}
        data = {"data": {"sha256": digest_json("data")}}
        return {"v": 1, **request, **digests, **data, "cap_micros": self.cap, "worst_micros": 11_230_000}

    def opened(self) -> Note:
        plan = self.plan()
        fields = {key: value for key, value in plan.items() if key not in ("v", "data")}
        fields |= {"data_sha256": plan["data"]["sha256"], "gpurun_version": "0.1.0", "provider": "runpod"}
        for part, path in (("request", self.folder.request), ("plan", self.folder.plan)):
            fields[f"{part}_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        fields |= {"platform": "Linux x86_64, Python 3.12", "endpoint": "", "challenge": "", "rules": RULES}
        return Event.RUN_OPENED, fields

    def intended(self, attempt: int = 1) -> Note:
        lease = {"boot_s": 300, "ship_s": 600, "train_s": 3600, "collect_s": 300, "destroy_s": 300}
        offer = {"provider": "runpod", "type_id": "H100-SXM", "gpu": "H100", "gpu_count": 1, "region": "EU-RO-1"}
        order = {"attempt": attempt, "token": self.token, "provider": "runpod", "offer": offer, "billing_unit_s": 60}
        order |= {"rate_micros_per_hour": RATE, "worst_micros": 11_230_000, "lease": {**lease, "kill_allowance_s": 60}}
        return Event.CREATE_INTENDED, {**order, "deadline_wall": self.clock.wall() + 5100}

    def created(self, **changes: Any) -> Note:
        return Event.CREATE_OBSERVED, {"token": self.token, "instance": self.instance(**changes), "adopted": False}

    def through_training(self) -> Iterator[tuple[float, Note]]:
        """Yield (seconds, event) from the ready machine to the downloaded files; the seconds pass before the event."""
        facts = {"v": 1, "platform": "Linux", "torch": {"found": True, "version": "2.13.0", "cuda": "13.0"}}
        ready = {"id": self.instance_id, "instance": self.instance(), "facts": facts, "seconds": 108.0}
        shipped = {"files": 51, "bytes": 1000, "sent_bytes": 600, "seconds": 200.0, "already": False}
        trained = {"outcome": "done", "reason": "done", "exit_code": 0, "message": "", "ended_wall": None}
        got = {"files": self.manifest(), "missing": [], "latest": 120, "best": {"step": 120, "val_loss": 2.0}}
        yield 108, (Event.READY_OBSERVED, ready)
        yield 0, (Event.SHIP_INTENDED, {"files": 51, "bytes": 1000})
        yield 200, (Event.SHIP_OBSERVED, {**shipped, "manifest_sha256": digest_json("pack")})
        stops = {"soft_stop_wall": self.clock.wall() + 3600, "hard_stop_wall": self.clock.wall() + 3700}
        yield 0, (Event.TRAIN_INTENDED, {"job_sha256": digest_json("job"), "argv": ["python"], **stops})
        yield 1, (Event.TRAIN_STARTED, {"keeper_pid": 4, "started_wall": self.clock.wall(), "already": False})
        yield 3001, (Event.TRAIN_OBSERVED, trained)
        yield 0, (Event.COLLECT_INTENDED, {})
        yield 25, (Event.COLLECT_OBSERVED, {**got, "seconds": 25.0})

    def death(self, *, reads: int = 3, gap_s: float = 15, teardown: str = "destroyed") -> Iterator[tuple[float, Note]]:
        """Yield the request to end the machine, the readings that find it gone, and the proof of death."""
        yield 0, (Event.DESTROY_INTENDED, {"id": self.instance_id, "token": self.token, "reason": "done"})
        yield 1, (Event.DESTROY_ASKED, {"id": self.instance_id, "attempt": 1, "answer": "asked"})
        taken = [[place * gap_s, "GONE", False, digest_json(place)] for place in range(reads)]
        for at_s, state, listed, answer in taken:
            seen = {"id": self.instance_id, "at_s": at_s, "state": state, "listed": listed, "answer_sha256": answer}
            yield (gap_s if at_s else 2), (Event.DEATH_READ, seen)
        claim = {"id": self.instance_id, "teardown": teardown, "reads": reads, "spread_s": (reads - 1) * gap_s}
        yield 0, (Event.DEATH_PROVEN, {**claim, "evidence_sha256": digest_json(taken)})

    def write(self, *notes: Note) -> CloudRun:
        for event, data in notes:
            self.journal.write(event, data)
        return self

    def play(self, *parts: Iterator[tuple[float, Note]]) -> CloudRun:
        for part in parts:
            for seconds, note in part:
                self.clock.sleep(seconds)
                self.write(note)
        return self

    def until_gone(self) -> CloudRun:
        """Write every event up to the proof of death."""
        self.write(self.opened(), self.intended())
        self.clock.sleep(3)
        self.write(self.created())
        return self.play(self.through_training(), self.death())

    def settle(self, exit_code: int = 0) -> CloudRun:
        """Write the receipt and close the run."""
        written = write_receipt(self.home, self.folder)
        seen = {"seq": written.seq, "sha256": written.sha256}
        return self.write((Event.RECEIPT_OBSERVED, seen), (Event.RUN_CLOSED, {"exit_code": exit_code}))


def finished_run(home: Home, name: str = "fox-41", **kinds: Any) -> RunFolder:
    """Return the folder of a whole run with its receipt."""
    return CloudRun(home, name, **kinds).until_gone().settle().folder


def edit_lines(path: Path, edit: Callable[[list[bytes]], list[bytes]]) -> None:
    """Replace the lines of a file by those that `edit` returns."""
    path.write_bytes(b"".join(line + b"\n" for line in edit(path.read_bytes().splitlines())))


def forge_statement(home: Home, folder: RunFolder, edit: Callable[[Any], Any]) -> None:
    """Change a receipt's statement as the key's owner could: sign it again, and adapt the chain and the journal.

    The receipt must be the last link of the chain, and `receipt.observed` the journal's last record but one.
    """
    envelope = json.loads(folder.receipt.read_bytes())
    statement = edit(json.loads(payload_of(envelope)))
    folder.receipt.write_text(json.dumps(make_envelope(canonical(statement), load_signer(home.keys))))
    sha256 = hashlib.sha256(folder.receipt.read_bytes()).hexdigest()
    links = [json.loads(line) for line in home.ledger.read_bytes().splitlines()]
    links[-1]["receipt_sha256"] = sha256
    home.ledger.write_bytes(b"".join(canonical(link) + b"\n" for link in links))
    records = [json.loads(line) for line in folder.journal.read_bytes().splitlines()]
    records[-2]["data"]["sha256"] = sha256
    chain_anew(folder.journal, records)


def chain_anew(path: Path, records: list[dict[str, Any]]) -> None:
    """Write records to a journal with new numbers, links and seal, as if they had been written in this order."""
    before, lines = GENESIS, []
    for seq, record in enumerate(records, start=1):
        record |= {"seq": seq, "prev": before}
        if record["event"] == Event.RUN_CLOSED:
            record["data"] = {**record["data"], "seal": seal_of(record)}
        lines.append(canonical(record))
        before = hashlib.sha256(lines[-1]).hexdigest()
    path.write_bytes(b"".join(line + b"\n" for line in lines))

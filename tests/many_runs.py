"""A home with many runs: copies of one real run under other names, with matching journals, receipts and chain."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import canonical
from gpurun.core.run_plan import Lease
from gpurun.ledger.chain import GENESIS
from gpurun.ledger.signing import load_signer
from gpurun.ledger.write_receipt import receipt_bytes
from tests.lifecycle.drive import drive
from tests.lifecycle.tiny_runs import make_run
from tests.unit.ledger_samples import chain_anew

TEMPLATE = "fox-41"
# So long that gpurun does not start a supervisor for an open run: its machine does not exist.
LEASE = Lease(boot_s=20, ship_s=20, train_s=10**7, collect_s=20, destroy_s=20, kill_allowance_s=5)
OWN = shutil.ignore_patterns("journal.jsonl", "plan.json", "receipt.json", "*.lock")


def many_runs(root: Path, closed: int, open_ones: int) -> Home:
    """Return a home with closed runs `run-00000`, ... that pass the audit, and runs `open-0`, ... still in training."""
    driven, home = Home(root / "driven"), Home(root / "home").prepare()
    template = make_run(driven, TEMPLATE, lease=LEASE)
    assert drive(driven, TEMPLATE) == 0
    (driven.root / "keys").rename(home.keys)
    (driven.root / "id").rename(home.root / "id")
    signer, head, links = load_signer(home.keys), GENESIS, []
    records = [json.loads(line) for line in template.journal.read_bytes().splitlines()]
    for seq in range(1, closed + 1):
        folder, own = _copied(template, home, f"run-{seq - 1:05d}", records)
        place = next(place for place, record in enumerate(own) if record["event"] == "receipt.observed")
        chain_anew(folder.journal, own[:place])
        receipt = receipt_bytes(folder, seq, head, signer)
        folder.receipt.write_bytes(receipt)
        before, head = head, hashlib.sha256(receipt).hexdigest()
        links.append({"prev": before, "seq": seq, "run": folder.name, "receipt_sha256": head})
        own[place]["data"] |= {"seq": seq, "sha256": head}
        chain_anew(folder.journal, own)
    home.ledger.write_bytes(b"".join(canonical(link) + b"\n" for link in links))
    begun = next(place for place, record in enumerate(records) if record["event"] == "train.started")
    for number in range(open_ones):
        folder, own = _copied(template, home, f"open-{number}", records)
        chain_anew(folder.journal, own[: begun + 1])
    return home


def _copied(template: RunFolder, home: Home, name: str, records: list[dict[str, Any]]) -> tuple[RunFolder, Any]:
    """Copy a run under another name without its journal; return the folder and the records for a journal."""
    folder = home.run(name)
    shutil.copytree(template.path, folder.path, ignore=OWN, copy_function=os.link)
    folder.lock.touch()
    plan = template.plan.read_bytes().replace(TEMPLATE.encode(), name.encode())
    folder.plan.write_bytes(plan)
    own = json.loads(json.dumps(records).replace(TEMPLATE, name))
    own[0]["data"]["plan_sha256"] = hashlib.sha256(plan).hexdigest()
    return folder, own

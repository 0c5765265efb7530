"""A home of many runs: one that was driven, under other names, with journals, receipts and their chain to match."""

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
# So long that no supervisor is started for an open one, whose machine there is none of.
LEASE = Lease(boot_s=20, ship_s=20, train_s=10**7, collect_s=20, destroy_s=20, kill_allowance_s=5)
OWN = shutil.ignore_patterns("journal.jsonl", "plan.json", "receipt.json", "*.lock")


def many_runs(root: Path, closed: int, open_ones: int) -> Home:
    """A home with runs `run-00000` and on, which a sound audit finds in order, and `open-0` and on in training."""
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
    """A run's folder under another name, without a journal, and the records for one."""
    folder = home.run(name)
    shutil.copytree(template.path, folder.path, ignore=OWN, copy_function=os.link)
    folder.lock.touch()
    plan = template.plan.read_bytes().replace(TEMPLATE.encode(), name.encode())
    folder.plan.write_bytes(plan)
    own = json.loads(json.dumps(records).replace(TEMPLATE, name))
    own[0]["data"]["plan_sha256"] = hashlib.sha256(plan).hexdigest()
    return folder, own

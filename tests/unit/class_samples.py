"""Samples for tests of `gpurun class`: a roster, learners' runs in one or several homes, and their hand-ins."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpurun.core.installed_files import recipe_file
from gpurun.core.paths import Home
from gpurun.core.receipt_record import Receipt
from gpurun.core.records import digest_json
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.ledger.signing import load_signer
from gpurun.ledger.write_receipt import read_receipt
from gpurun.readers.evidence.card import pack_card
from gpurun.readers.evidence.roster import Roster, new_roster
from tests.tensor_file import as_tensors
from tests.unit.ledger_samples import CloudRun, Note

RESOLVED = resolve(load_recipe("course-lab"), "full").record
STATE_NAME = "checkpoints/000120.state.json"


def a_class(count: int) -> Roster:
    """Return a roster of `count` learners, made at time 0."""
    return new_roster("ml-2026", [f"Learner {number:02d}" for number in range(count)], 0.0)


class Lab(CloudRun):
    """One learner's run in their own home, or in the home of the run `beside`.

    Its seed follows from the challenge word and the home's key; without a word the run has no challenge.
    `opened_with` replaces fields of `run.opened`; a mode or trainer in it goes into the plan too.
    """

    parameters = 28_032

    def __init__(
        self, root: Path, number: int, word: str, *, device: str = "cuda", beside: Lab | None = None, **opened_with: Any
    ) -> None:
        home = beside.home if beside else Home(root / f"home-{number}").prepare()
        signer = load_signer(home.keys)
        assert signer is not None
        self.number, self.opened_with, self.state = number, opened_with, dict[str, Any]()
        self.recipe = {**RESOLVED, "train": dict(RESOLVED["train"])}
        if word:
            self.recipe["train"]["challenge"] = f"{word}:{signer.keyid}"
            self.recipe["train"]["seed"] = recipe_file.seed_of(f"{word}:{signer.keyid}")
            self.opened_with["challenge"] = self.recipe["train"]["challenge"]
        super().__init__(home, f"lab-{number:02d}", device=device)

    def plan(self) -> dict[str, Any]:
        plan = super().plan()
        data = {**plan["data"], "vocab_size": 30, "folder": f"{self.home.root}/runs/x/data"}
        own = {key: self.opened_with[key] for key in ("mode", "trainer") if key in self.opened_with}
        return {**plan, "recipe_sha256": digest_json(self.recipe), "resolved": self.recipe, "data": data, **own}

    def opened(self) -> Note:
        event, data = super().opened()
        return event, {**{key: one for key, one in data.items() if key != "resolved"}, **self.opened_with}

    def contents(self) -> dict[str, bytes]:  # type: ignore[override]
        state = {"step": 120, "loss": 2.0, "val_loss": 2.0, "torch": "2.13.0", "recipe": self.recipe} | self.state
        weights = as_tensors(f"{self.number:04d}".encode() * self.parameters)
        return {
            **super().contents(),
            "checkpoints/000120.model.safetensors": weights,
            STATE_NAME: json.dumps(state).encode(),
        }

    def forge(self, *edits: tuple[str, str]) -> Lab:
        """Replace texts in the log and the events before gpurun signs them, as a cheating learner would."""
        for path in (self.folder.log, self.folder.events):
            text = path.read_text()
            for old, new in edits:
                text = text.replace(old, new)
            path.write_text(text)
        return self

    def again(self) -> Lab:
        """Write the files that `contents` returns over the downloaded ones."""
        for name, content in self.contents().items():
            (self.folder.artifacts / name).write_bytes(content)
        return self

    def hand_in(self, into: Path, name: str = "", *, with_checkpoint: bool = False) -> Path:
        """Sign the run if it has no receipt yet, write its card into a folder, and return the card's path."""
        if not self.folder.receipt.exists():
            self.until_gone().settle()
        receipt: Receipt = read_receipt(self.home, self.folder)
        content, _ = pack_card(
            self.folder, self.home.keys, self.plan(), {"card.md": "# Card"}, {**receipt.predicate},
            private=(str(self.home.root),), with_checkpoint=with_checkpoint, data=None,
        )  # fmt: skip
        into.mkdir(exist_ok=True)
        path = into / (name or f"{self.folder.name}.zip")
        path.write_bytes(content)
        return path


def pack_again(path: Path, edit: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    """Rewrite a zip with the files that `edit` returns for its files."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in edit(files).items():
            archive.writestr(name, content)

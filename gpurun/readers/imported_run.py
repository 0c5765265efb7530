"""Makes a run from a notebook's evidence, and signs and chains its receipt as that of an imported run.

The file is untrusted. As in every run, the training is what the machine reported. gpurun did not observe the cost or
the end of the session, and the receipt states that.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from gpurun.core.clock import Clock
from gpurun.core.errors import ExitCode, UsageError, VerificationFailed
from gpurun.core.installed_files import recipe as schema
from gpurun.core.journal_events import CollectObserved, FileBrought, ReceiptObserved, RunClosed, TrainObserved
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import Home, RunFolder, fsync_folder, make_private, open_regular, read_regular, write_atomic
from gpurun.core.receipt_record import UNKNOWN
from gpurun.core.records import Frozen, Offer
from gpurun.core.run_plan import Candidate, DataSummary, Estimate, Lease, Mode, Plan, Request
from gpurun.core.trainer_events import StartEvent, StopEvent, events_of
from gpurun.core.untrusted import number, plain_line
from gpurun.data.shard_folder import inspect_data, require_fitting_shards
from gpurun.jobs.trainer import TrainerJob
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.ledger.audit.contradictions import contradictions
from gpurun.ledger.journal import Journal
from gpurun.ledger.run_lock import RunLock
from gpurun.ledger.run_state import exit_code_of, replay_journal
from gpurun.ledger.runs import demand_free, opening_record
from gpurun.ledger.signing import load_signer
from gpurun.ledger.statement import basis_of, build_statement
from gpurun.ledger.write_receipt import write_receipt
from gpurun.readers.evidence.card import EVENTS, LOG, PLAN, RECEIPT, EvidenceCard, NoCard, read_listed

_KINDS = {"model.safetensors": "weights", "optim.safetensors": "optimizer", "state.json": "state"}
_AGAIN = "Download it again from the notebook, and do not unpack it."
_LOST = {"outcome": "lost", "reason": "lost", "message": "its evidence was packed before its training had ended"}


class _Stated(Frozen):
    """The facts that a notebook's evidence adds to the trainer's files. The cells of notebook_file.py write them."""

    v: Literal[1]
    kind: Literal["notebook"]
    platform: Literal["colab", "kaggle", "jupyter"]
    recipe: Annotated[str, Field(pattern=r"^[^/\\]{1,80}$")]
    overrides: tuple[str, ...]
    recipe_sha256: str
    resolved: dict[str, Any]
    data_sha256: str
    trainer_sha256: str
    gpurun_version: str
    exit_code: Annotated[int, Field(ge=-255, le=255)] | None = None
    best: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Evidence:
    """A notebook's evidence after it was read and checked."""

    card: EvidenceCard
    stated: _Stated
    resolved: ResolvedRecipe
    sha256: str

    @property
    def origin(self) -> dict[str, str]:
        """Return the run's origin in the form in which the journal records it."""
        events = hashlib.sha256(self.card.files[EVENTS]).hexdigest()
        facts = {"platform": self.stated.platform, "gpurun_version": plain_line(self.stated.gpurun_version)[:40]}
        return {**facts, "evidence_sha256": self.sha256, "events_sha256": events}


def import_run(path: Path, name: str, home: Home, clock: Clock) -> tuple[RunFolder, ExitCode]:
    """Make and close a run with this name from a notebook's evidence. Return the run's folder and exit code.

    The run is made in a hidden folder, and appears only when it is complete. Raise UsageError if the evidence was
    imported before or belongs to another home, and VerificationFailed if the file is not such evidence or contradicts
    itself.
    """
    staged = RunFolder(home.staged_data(name))
    shutil.rmtree(staged.path, ignore_errors=True)
    make_private(staged.path)
    try:
        evidence = _read_evidence(path, home)
        evidence.card.unpack_large(staged.artifacts)
    except NoCard as error:
        what = f"{path} is not evidence that can become a run: {error}."
        hint = _AGAIN if path.exists() else "Name the file that was downloaded: gpurun import ~/Downloads/evidence.zip"
        raise VerificationFailed("import.refused", what, hint=hint) from error
    except OSError as error:
        what = f"{path} cannot be unpacked: {error.strerror}."
        raise UsageError("import.unreadable", what, hint="Check the file's name, and free disk space for it.") from None
    (staged.artifacts / "data").rename(staged.data)
    for member, content in evidence.card.files.items():
        place = {LOG: staged.log, EVENTS: staged.events}.get(member, staged.artifacts / member)
        if member.startswith("checkpoints/") or member in (LOG, EVENTS):
            place.parent.mkdir(exist_ok=True)
            write_atomic(place, content)
    folder = home.run(name)
    request = Request(recipe=evidence.stated.recipe, overrides=evidence.stated.overrides)
    plan = _plan_of(name, request, evidence, _check_shards(staged.data, folder.data, evidence), staged.events)
    write_atomic(staged.request, request.to_json().encode())
    write_atomic(staged.plan, plan.to_json().encode())
    _write_journal(staged, plan, evidence, home, clock)
    demand_free(home, name)
    make_private(folder.path.parent)
    staged.path.rename(folder.path)
    fsync_folder(folder.path.parent)
    return folder, finish_import(home, folder, clock)


def finish_import(home: Home, folder: RunFolder, clock: Clock) -> ExitCode:
    """Write, sign and chain the receipt of an imported run, and close the run. Repeating the call changes nothing."""
    with RunLock(folder.lock):
        journal = Journal.open(folder.journal, clock)
        written = write_receipt(home, folder)
        done = {record.event for record in journal.records}
        if Event.RECEIPT_OBSERVED not in done:
            journal.append(ReceiptObserved(seq=written.seq, sha256=written.sha256))
        code = exit_code_of(replay_journal(folder.name, journal.records))
        if Event.RUN_CLOSED not in done:
            journal.append(RunClosed(exit_code=code))
        return code


def _read_evidence(path: Path, home: Home) -> _Evidence:
    """Read the evidence. Raise NoCard if it is incomplete, UsageError if it is a card or may not be imported here."""
    card = read_listed(path)
    if RECEIPT in card.files:
        what = f"{path} is the card of a run that already has its receipt."
        raise UsageError("import.card", what, hint=f"Check it: gpurun audit --roster {path.parent}")
    if not {PLAN, LOG, EVENTS, "data/data.json"} <= card.files.keys() | card.large.keys():
        raise NoCard("it has no plan, log, events or shards; perhaps the last cell ran before training began")
    try:
        stated = _Stated.from_json(card.files[PLAN])
        tables = schema.parse_recipe(stated.resolved)
    except (ValidationError, schema.RecipeError, RecursionError) as error:
        raise NoCard("its description of the recipe is not a notebook's, or is a newer gpurun's") from error
    resolved = ResolvedRecipe(name=plain_line(stated.recipe)[:80], form="full", processes=1, tables=tables)
    if resolved.sha256 != stated.recipe_sha256 or resolved.record != stated.resolved:
        raise NoCard("its recipe does not have the digest that it states")
    with open_regular(path) as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    evidence = _Evidence(card, stated, resolved, sha256)
    _refuse_foreign(evidence, home)
    return evidence


def _refuse_foreign(evidence: _Evidence, home: Home) -> None:
    """Raise UsageError if the evidence was imported before, or was made for the key of another home."""
    events = evidence.origin["events_sha256"]
    for name in home.run_names():
        with suppress(OSError):
            if events.encode() in read_regular(home.run(name).journal):
                what = f"This training was imported before, as {name}."
                raise UsageError("import.twice", what, hint=f"gpurun receipt {name}")
    keyid = evidence.resolved.tables.train.challenge.rpartition(":")[2]
    signer = load_signer(home.keys)
    if keyid and (signer is None or signer.keyid != keyid):
        what = f"Its challenge was given to the key {keyid[:12]}…, which is not the key of {home.root}."
        hint = "Import it into the home where the notebook was made: --home DIR"
        raise UsageError("import.other_key", what, hint=hint)


def _check_shards(there: Path, later: Path, evidence: _Evidence) -> DataSummary:
    """Check every byte of the shards, and return their summary, in which their folder is `later`."""
    tables = evidence.resolved.tables
    found, manifest = inspect_data(there)
    require_fitting_shards(there, manifest, tokenizer=tables.data.tokenizer, vocab_size=tables.model.vocab_size)
    if found.sha256 != evidence.stated.data_sha256:
        what = "Its shards differ from the shards in the notebook."
        raise VerificationFailed("import.other_data", what, hint=_AGAIN)
    return found.model_copy(update={"folder": str(later)})


def _plan_of(run: str, request: Request, evidence: _Evidence, data: DataSummary, events: Path) -> Plan:
    """Return the plan that corresponds to the notebook's training, on the GPUs that its trainer reported."""
    stated, tables = evidence.stated, evidence.resolved.tables
    start = next((event for event in events_of(events) if isinstance(event, StartEvent)), None)
    card = start.cuda_name if start else None
    count = (start.world_size or 1) if start and card else 0
    offer = Offer(
        provider=stated.platform, type_id="notebook", gpu=card or "cpu", gpu_count=count, vram_gb=0, region="any",
        rate_micros_per_hour=usd(0), billing_unit_s=1, boot_s=0, price_source="not observed",
        dies_by_itself="yours to end",
    )  # fmt: skip
    estimate = Estimate(
        fits=True, peak_bytes=0, micro_batch=tables.train.micro_batch, tokens_per_s=None, train_s=None, basis="imported"
    )
    chosen = Candidate(
        offer=offer, estimate=estimate, lease=Lease(boot_s=0, ship_s=0, train_s=0, collect_s=0, destroy_s=0),
        expected_micros=usd(0), worst_micros=usd(0), finishes=True,
    )  # fmt: skip
    trainer = stated.trainer_sha256 if re.fullmatch("[0-9a-f]{64}", stated.trainer_sha256) else UNKNOWN
    resolved = evidence.resolved
    job = TrainerJob(
        recipe=resolved.name,
        recipe_sha256=resolved.sha256,
        form=resolved.form,
        resolved=resolved.record,
        parameters=resolved.parameters(data.vocab_size),
    )
    return Plan(
        run=run,
        mode=Mode.IMPORTED,
        job=job.shipped(trainer),
        processes=count or resolved.processes,
        chosen=chosen,
        cap_micros=request.max_cost_micros,
        cap_from=request.cap_from,
        candidates=(),
        data=data,
        bundle_sha256=trainer,
        ship_files=0,
        ship_bytes=0,
        choices=request.choices,
        continues=resolved.earlier,
    )


def _write_journal(folder: RunFolder, plan: Plan, evidence: _Evidence, home: Home, clock: Clock) -> None:
    """Write the journal up to the record of the downloaded files. Raise VerificationFailed if it contradicts itself."""
    journal = Journal.open(folder.journal, clock)
    journal.append(opening_record(plan, folder, home, endpoint="", imported=evidence.origin))
    journal.append(TrainObserved(**_training_outcome(folder.events, evidence.stated), ended_wall=None))
    files = list(_listed_files(evidence.card, folder.artifacts))
    steps = {file["step"] for file in files}
    best = evidence.stated.best or {}
    val_loss = number(best.get("val_loss"))
    is_kept = type(best.get("step")) is int and best["step"] in steps and val_loss is not None
    journal.append(
        CollectObserved(
            files=files,
            missing=[],
            latest=max(steps, default=None),
            best={"step": best["step"], "val_loss": val_loss} if is_kept else None,
        )
    )
    records, signer = basis_of(journal.records), load_signer(home.keys)
    keyid = signer.keyid if signer else None
    predicate = build_statement(folder, records, head=journal.head, seq=0, prev="", keyid=keyid)["predicate"]
    wrong = next(contradictions(folder, records, plan.model_dump(mode="json"), {**predicate}), None)
    if wrong:
        hint = "Import the notebook's file unchanged. This import was undone."
        raise VerificationFailed("import.contradicts", f"The evidence contradicts itself: {wrong}.", hint=hint)


def _listed_files(card: EvidenceCard, artifacts: Path) -> Iterator[FileBrought]:
    """Yield the checkpoint files with their digests, as their manifest lists them."""
    for name in sorted(card.files.keys() | card.large.keys()):
        if name.startswith("checkpoints/"):
            step, _, kind = name.removeprefix("checkpoints/").partition(".")
            content = card.files.get(name)
            sha256 = card.large[name] if content is None else hashlib.sha256(content).hexdigest()
            size = (artifacts / name).stat().st_size
            yield {"name": name, "bytes": size, "sha256": sha256, "kind": _KINDS[kind], "step": int(step)}


def _training_outcome(events: Path, notebook: _Stated) -> dict[str, Any]:
    """Return the training's outcome from the trainer's last event; without a stop event, the outcome is `lost`."""
    last: StopEvent | None = None
    for event in events_of(events):
        if isinstance(event, StartEvent | StopEvent):
            last = event if isinstance(event, StopEvent) else None
    if last is None:
        return {**_LOST, "exit_code": notebook.exit_code}
    outcome = {"done": "done", "signal": "stopped"}.get(last.reason, "failed")
    message = "" if outcome == "done" else last.message or "it was stopped before its last step, and saved first"
    return {"outcome": outcome, "reason": last.reason, "message": message, "exit_code": notebook.exit_code}

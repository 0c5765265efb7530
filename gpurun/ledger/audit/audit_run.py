"""Audits one run: checks its journal, its receipt and its files, and that they agree with each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gpurun.core.artifact_names import path_of
from gpurun.core.collected_record import read_stated_files
from gpurun.core.journal_events import Incident, ReceiptObserved, RunClosed, RunOpened
from gpurun.core.journal_records import Event, Record, all_typed, last_brought, opened_of
from gpurun.core.money import Figure, Micros, format_usd
from gpurun.core.paths import RunFolder, read_regular
from gpurun.core.receipt_record import Predicate, Signature
from gpurun.core.receipt_rules import CAP_BROKEN_WHERE_SEEN, RULES, TENSORS_READ, rules_of, stated_trainer
from gpurun.core.records import canonical, digest_json
from gpurun.core.tensor_file import read_tensor_places
from gpurun.core.untrusted import Malformed, error_words, finding, parse_object, plain_line, read_object
from gpurun.ledger.audit.compare import find_differences
from gpurun.ledger.audit.contradictions import contradictions, weaknesses
from gpurun.ledger.audit.event_sequence import find_unended, is_rented, order_problems
from gpurun.ledger.audit.findings import NO, AuditRow, Mark, marks_of
from gpurun.ledger.audit.other_rules import broken_by_any_rules, note_of
from gpurun.ledger.audit.rentals import lines_with, measured_micros, money_and_death
from gpurun.ledger.audit.shutdown_check import check_shutdown
from gpurun.ledger.audit.strict_lines import Json, Lines
from gpurun.ledger.log_facts import NOT_A_PROVIDER, digest_file, verdict_of
from gpurun.ledger.signing import payload_of, verify
from gpurun.ledger.spending import spending
from gpurun.ledger.statement import AFTERWARDS, build_statement, failed_step

_EARLIER = {"run", "step", "steps", "receipt_sha256"}
_MOST_NAMED = 8
_TENSORS = {"weights", "optimizer"}
"""The kinds of files that the trainer writes as safetensors."""


@dataclass
class _Findings:
    """The results of all checks of one run. `is_partial` means that its journal is incomplete.

    `has_travelled` means that only the run's evidence is present: its plan without paths, and no request.
    """

    must_be_signed: bool = False
    has_travelled: bool = False
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    chain: Mark = "none"
    signature: Mark = "none"
    files: str = "0/0"
    verdict: str = "none"
    trainer: str = ""
    receipt_proves_death: bool = False
    is_partial: bool = False
    death: str = "proven"
    marks: frozenset[str] = frozenset()

    def guarded(self, what: str, check: Callable[[], None]) -> None:
        """Run a check of `what`. If it raises an error because of malformed data, that is a problem of the run."""
        with finding(self.problems.append, f"{what} cannot be followed"):
            check()

    def unsigned(self, message: str) -> None:
        """Add an unsigned file to the problems if the user named a key, else to the warnings."""
        (self.problems if self.must_be_signed else self.warnings).append(message)


def audit_run(
    folder: RunFolder,
    chain: Mapping[str, Json],
    keys: Mapping[str, Ed25519PublicKey],
    lines: Lines,
    *,
    must_be_signed: bool = False,
    has_travelled: bool = False,
) -> AuditRow:
    """Audit one run and return its row. `lines` is its journal, `chain` has the links of the chain by run.

    `has_travelled` means that only the evidence of the run is present: then missing files are not reported, and the run
    from which it continues is not looked up, because it is in another home.
    """
    found, link = _Findings(must_be_signed, has_travelled), chain.get(folder.name)
    found.guarded("the journal", lambda: _check_journal(found, lines, folder, link))
    if link is not None:
        found.guarded("the receipt", lambda: _check_receipt(found, lines, folder, link, keys))
        if not has_travelled:
            found.guarded("the run that it continues from", lambda: _check_origin(found, lines.records, link, chain))
    found.guarded("the list of files", lambda: _check_files(found, lines.records, folder))
    # What a signed receipt in the chain has proven stays proven, even if the journal is damaged.
    late, billed = find_unended(_select_after_receipt(lines.records) if found.receipt_proves_death else lines.records)
    is_open = lines.hides_intent or is_rented(lines.records)
    unseen = bool(late) or (is_open and not found.receipt_proves_death)
    live = unseen or bool(billed)
    spent, figure = _choose_higher_cost(found, lines.records)
    proven = found.receipt_proves_death or any(record.event is Event.DEATH_PROVEN for record in lines.records)
    return AuditRow(
        run=folder.name,
        seq=link["seq"] if link else None,
        chain=found.chain,
        signature=found.signature,
        files=found.files,
        death="not seen" if unseen else found.death if proven else "none",
        measured_micros=spent,
        verdict="may be billing" if live else NO if found.problems else found.verdict,
        may_be_billing=live,
        measured_is=Figure.FLOOR if live or found.is_partial else figure,
        problems=tuple(plain_line(problem) for problem in found.problems),
        warnings=tuple(plain_line(warning) for warning in found.warnings),
        trainer=plain_line(found.trainer),
        marks=found.marks,
    )


def _choose_higher_cost(found: _Findings, records: Sequence[Record]) -> tuple[Micros | None, Figure]:
    """Return the higher of two costs, gpurun's usual one and the audit's own, and its kind; None if it is not known.

    If the two differ, that is added to the problems.
    """
    with finding(found.problems.append, "the cost cannot be derived from the journal"):
        own = measured_micros(records)
        if own is None:
            return None, Figure.MEASURED
        spent = spending(records)
        if spent.micros != own:
            amounts = f"{format_usd(spent.micros)} and {format_usd(own)}"
            found.problems.append(f"two computations of its cost disagree: {amounts}")
        return max(spent.micros, own), spent.figure
    return None, Figure.MEASURED


def _select_after_receipt(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records after `receipt.observed`; none if there is no such record."""
    places = [place for place, record in enumerate(records) if record.event is Event.RECEIPT_OBSERVED]
    return records[places[0] + 1 :] if places else ()


def _check_journal(found: _Findings, lines: Lines, folder: RunFolder, link: Json | None) -> None:
    records = lines.records
    found.is_partial = lines.problem is not None or not records
    if lines.problem is not None:
        found.problems.append(lines.problem)
        found.chain = "ok" if lines.is_linked else "bad"
    elif not records:
        found.problems.append("the journal is missing or empty")
    else:
        found.chain = "ok"
    if lines.torn and link is not None:
        repair = f"if power failed just then, gpurun resume {folder.name} repairs it"
        found.problems.append(f"the journal's last line is torn although the run has its receipt; {repair}")
    elif lines.torn:
        found.warnings.append(f"the journal's last line is unfinished; gpurun resume {folder.name} repairs it")
    newer = dict.fromkeys(record.event for record in records if not isinstance(record.event, Event))
    if newer:
        found.warnings.append(f"a newer gpurun wrote {', '.join(newer)} in its journal; this one cannot check that")
    found.problems += order_problems(records)
    observed = next(all_typed(records, ReceiptObserved), None)
    if link is None and observed:
        found.problems.append(f"its receipt #{observed.seq} is missing from the chain")
    if link is not None and observed and (observed.seq, observed.sha256) != (link["seq"], link["receipt_sha256"]):
        found.problems.append("the journal and the chain name different receipts")
    if records and opened_of(records).run != folder.name:
        found.problems.append("the journal belongs to another run")
    closings = lines_with(records, RunClosed)
    for line, closed in closings:
        if closed.exit_code == 0 and failed_step(records[: line.seq]) is not None:
            found.problems.append(
                f"journal line {line.seq}, run.closed: a run with a failed step cannot have exit code 0"
            )
    if records and link is not None and lines.problem is None and not closings:
        found.warnings.append(f"it has its receipt but was not closed; gpurun resume {folder.name} closes it")


def _check_receipt(
    found: _Findings, lines: Lines, folder: RunFolder, link: Json, keys: Mapping[str, Ed25519PublicKey]
) -> None:
    """Check the receipt's digest, form and signature, all figures in it, and what the journal records after it."""
    if not folder.receipt.is_file():
        found.chain = "bad"
        found.problems.append(f"receipt #{link['seq']} is missing")
        return
    content = read_regular(folder.receipt)
    in_chain = hashlib.sha256(content).hexdigest() == link["receipt_sha256"]
    if not in_chain:
        found.chain = "bad"
        found.problems.append(f"receipt #{link['seq']} is not the one in the chain")
    envelope = parse_object(content)
    payload = payload_of(envelope)
    statement = parse_object(payload)
    if canonical(statement) != payload:
        found.problems.append("the receipt is not written in canonical form")
    _check_signature(found, envelope, statement["predicate"]["signing"]["keyid"], keys)
    found.verdict, found.trainer = str(statement["predicate"]["verdict"]["is"]), stated_trainer(statement["predicate"])
    codes = [incident["code"] for incident in statement["predicate"]["incidents"]]
    left = codes.count("create.late") > codes.count("create.late_gone")
    ended = statement["predicate"]["teardown"]["is"] not in (None, "not_proven") and not left
    found.receipt_proves_death = in_chain and found.signature == "ok" and ended
    _check_shutdown(found, folder, statement, hashlib.sha256(content).hexdigest(), keys)
    head = statement["predicate"]["journal"]["head"]
    if head not in lines.digests:
        found.is_partial = True
        if lines.problem is None:
            found.chain = "bad"
            found.problems.append("the receipt was made from another journal")
        return
    count = lines.digests.index(head) + 1
    known = [record for record in lines.records[count:] if isinstance(record.event, Event)]
    _check_later_records(found, [record for record in known if record.event not in AFTERWARDS])
    _compare_with_receipt(found, folder, lines.records[:count], statement, link)


def _check_later_records(found: _Findings, later: Sequence[Record]) -> None:
    """Check the journal's records after the receipt: only incidents may follow, and some of them void its bound."""
    codes: set[str] = set()
    for record in later:
        at, incident = f"journal line {record.seq}", record.typed
        if not isinstance(incident, Incident):
            found.problems.append(f"{at} ({record.event}) is newer than the receipt")
            return
        if incident.code == "create.late" or (incident.code == "leftover" and incident.billed):
            found.problems.append(f"the receipt's bound is void: {incident.message} ({at})")
        elif incident.code not in codes and not incident.code.endswith("_gone"):
            found.warnings.append(f"{at} came after the receipt: {incident.message}")
        codes.add(incident.code)


def _check_origin(found: _Findings, records: Sequence[Record], link: Json, chain: Mapping[str, Json]) -> None:
    """Check that the earlier run from which this run continues has its receipt in the chain, before this run's."""
    before = opened_of(records).continues if records else None
    if before:
        earlier = chain.get(before["run"], {})
        if earlier.get("receipt_sha256") != before["receipt_sha256"] or earlier["seq"] >= link["seq"]:
            found.problems.append(
                f"the receipt of {before['run']}, which it continues from, is not before it in the chain"
            )


def _check_shutdown(
    found: _Findings, folder: RunFolder, statement: Json, sha256: str, keys: Mapping[str, Ed25519PublicKey]
) -> None:
    """Check the statement about the shutdown of the user's own box, which the user has to end."""
    shutdown = check_shutdown(folder, statement, sha256, keys)
    if shutdown is not None:
        found.death = shutdown.death
        found.problems += [shutdown.problem] if shutdown.problem else []
        if shutdown.unsigned:
            found.unsigned(shutdown.unsigned)


def _check_signature(found: _Findings, envelope: Json, keyid: Any, keys: Mapping[str, Ed25519PublicKey]) -> None:
    answer = verify(envelope, keys)
    signers = [signature["keyid"] for signature in envelope["signatures"]]
    if signers != ([keyid] if keyid else []):
        found.signature = "bad"
        found.problems.append("the receipt is not signed by the key that it names")
    elif answer is Signature.OK:
        found.signature = "ok"
    elif answer is Signature.UNSIGNED:
        found.unsigned("the receipt is unsigned: there was no readable key when it was made")
    elif answer is Signature.UNKNOWN_KEY:
        found.signature = "bad"
        found.problems.append(f"the receipt is signed by the key {str(keyid)[:12]}…, which is not known here")
    else:
        found.signature = "bad"
        found.problems.append("the receipt's signature is not valid")


def _compare_with_receipt(
    found: _Findings, folder: RunFolder, basis: Sequence[Record], statement: Json, link: Json
) -> None:
    """Compare all codes, fields and figures of the receipt with the run folder as it is now, and the cost with the cap.

    Money and ends are also computed with the audit's own code, which does not have the faults of the code that wrote
    them. A receipt by other rules is checked only for what no rules change, and gets a warning.
    """
    predicate = statement["predicate"]
    head, keyid = predicate["journal"]["head"], predicate["signing"]["keyid"]
    opened = opened_of(basis)
    again = build_statement(folder, basis, head=head, seq=link["seq"], prev=link["prev"], keyid=keyid)
    own = money_and_death(basis)
    found_own = find_differences(own, predicate, "predicate", keys="expected")
    unlike = list(dict.fromkeys([*find_differences({**again}, statement, ""), *found_own]))
    if (rules := opened.rules or 1) != RULES:
        broken = list(broken_by_any_rules(statement, again, basis))
        found.warnings.append(note_of(rules, [path for path in unlike if path not in broken]))
        unlike = broken
    # The receipt's statement about ends is only believed if the journal does not contradict it.
    found.receipt_proves_death &= not any(path.startswith("predicate.teardown") for path in unlike)
    if rules != rules_of(predicate):
        found.problems.append("the receipt names other rules than the run was opened with")
    if unlike:
        more = f" and {len(unlike) - _MOST_NAMED} more" if len(unlike) > _MOST_NAMED else ""
        shown = ", ".join(path.removeprefix("predicate.") for path in unlike[:_MOST_NAMED])
        found.problems.append(f"the receipt does not follow from the run: {shown}{more}")
    if own["cost"]["cap_kept"] is False:
        found.problems.append("the cap was not kept")
    elif rules >= CAP_BROKEN_WHERE_SEEN and (own["cost"]["upper_bound_micros"] or 0) > (opened.cap_micros or inf):
        found.warnings.append("the cost may have been over the cap; it is not known whether it was")
    made = again["predicate"]
    found.verdict = _modernize_verdict(opened, made)
    if found.verdict == NOT_A_PROVIDER:
        found.warnings.append(f"{opened.endpoint} answered instead of {opened.provider}, and is not a provider")
    found.marks = marks_of(made)
    for name, path in (("request", folder.request), ("plan", folder.plan)) if not found.has_travelled else ():
        if getattr(opened, f"{name}_sha256") != digest_file(path)["sha256"]:
            found.problems.append(f"{name}.json is not the one that the run was opened with")
    plan = read_object(folder.plan)
    # A command's digest also covers its values and folders, which do not travel.
    if found.has_travelled and opened.has_model and digest_json(plan["resolved"]) != opened.recipe_sha256:
        found.problems.append("its recipe is not the one that the run was opened with")
    found.problems += contradictions(folder, basis, plan, made)
    found.warnings += weaknesses(folder, plan, made) if opened.has_model else ()
    found.problems += _opening_problems(opened, plan)


def _modernize_verdict(opened: RunOpened, made: Predicate) -> str:
    """Return the run's verdict as one of today's words, also for an older receipt."""
    if not opened.has_model:  # The log of a command does not decide its verdict.
        return made["verdict"]["is"]
    return verdict_of(opened, made["instance"], made["training"]["device"], made["training"]["outcome"])["is"]


def _identify_checkpoint(earlier: Json) -> Json:
    """Return the fields that identify the checkpoint from which a run continues; `steps` only if it is known."""
    return {key: earlier[key] for key in earlier if key in _EARLIER and (key != "steps" or earlier[key])}


def _opening_problems(opened: RunOpened, plan: Json) -> Iterator[str]:
    """Yield a problem for each field in which `run.opened` differs from the plan.

    The plan is read key by key and not as a `Plan`, because a plan of an older or newer gpurun may not be a valid
    `Plan`, although it is not a forgery.
    """
    for name in ("run", "mode", "recipe", "form", "recipe_sha256", "bundle_sha256", "cap_micros"):
        if getattr(opened, name) != plan[name]:
            yield f"the run was not opened with the plan's {name}"
    if (opened.trainer or "") != plan.get("trainer", ""):
        yield "the run was not opened with the plan's trainer"
    if opened.max_gpu_hours != plan.get("choices", {}).get("max_gpu_hours"):
        yield "the run was not opened with the plan's max_gpu_hours"
    approved = plan.get("candidates", ()) if plan["mode"] == "paid" else ()
    worst = max(plan["worst_micros"], *(candidate["worst_micros"] or 0 for candidate in approved), 0)
    if opened.worst_micros != worst:
        yield "the run was not opened with the plan's worst_micros"
    choices = plan.get("choices", {})
    if opened.legs != (choices.get("legs", 0) if choices.get("keep_going") else 0):
        yield "the run was not opened with the plan's legs"
    if _identify_checkpoint(opened.continues or {}) != _identify_checkpoint(plan.get("continues") or {}):
        yield "the run was not opened with the checkpoint that its plan continues from"
    command = plan.get("command")
    names = {"env": sorted(command["env"]), "secrets": sorted(command["secrets"])} if command else {}
    if opened.command != ({"argv": command["argv"], **names} if command else None):
        yield "the run was not opened with the command of its plan"
    if opened.data_sha256 != plan["data"]["sha256"]:
        yield "the run was not opened with the plan's data"
    if opened.core_bundle_sha256 != plan["data"].get("core_sha256", ""):
        yield "the run was not opened with the plan's CORE bundle"


def _check_files(found: _Findings, records: Sequence[Record], folder: RunFolder) -> None:
    """Check the digest of each downloaded file. A missing file is a warning, a different content is a problem."""
    collected = last_brought(records)
    files: Sequence[Mapping[str, Any]] = collected.files if collected else ()
    try:
        files = read_stated_files(folder, collected.files, collected.listed) if collected else ()
    except ValueError as error:
        found.problems.append(f"the list of collected files cannot be read: {error}")
    missing: list[str] = []
    held, is_read = 0, any((opened.rules or 1) >= TENSORS_READ for opened in all_typed(records[:1], RunOpened))
    for file in files:
        try:
            path = path_of(folder.artifacts, file["name"])
        except ValueError:
            path = folder.artifacts / file["name"]
        if not path.resolve().is_relative_to(folder.artifacts.resolve()):
            found.problems.append(f"the file name {file['name']!r} leads out of the run folder")
        elif not path.is_file():
            missing.append(file["name"])
        elif path.stat().st_size != file["bytes"] or digest_file(path)["sha256"] != file["sha256"]:
            found.problems.append(f"{file['name']} is not the file that was collected")
        else:
            held += 1
            if is_read and (fault := _describe_tensor_fault(path, file)):
                # A user's command may write any format; the trainer writes only safetensors.
                (found.warnings if file["kind"] == "checkpoint" else found.problems).append(fault)
    found.files = f"{held}/{len(files)}"
    if missing and not found.has_travelled:
        by_user = " (gpurun rm)" if folder.removed.is_file() else ""
        named = f"{missing[0]} is" if len(missing) == 1 else f"{len(missing)} files, including {missing[0]}, are"
        found.warnings.append(f"{named} no longer here{by_user}")


def _describe_tensor_fault(path: Path, file: Mapping[str, Any]) -> str:
    """Return why a downloaded file with tensors is not a valid safetensors file; "" if it is, or has no tensors."""
    is_tensors = file["kind"] in _TENSORS or (file["kind"] == "checkpoint" and file["name"].endswith(".safetensors"))
    if is_tensors:
        try:
            read_tensor_places(path)
        except (OSError, Malformed) as error:
            return f"{file['name']} is not a safetensors file: {error_words(error)}"
    return ""

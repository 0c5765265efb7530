"""Tests that docs/CODES.md has every code of the source; GPURUN_UPDATE_GOLDEN=1 writes it again."""

from __future__ import annotations

import ast
import os
import re

import pytest
from codes_page import CODE, GAP, ROOT, Entry, entries, trees

from gpurun.core import errors
from gpurun.core.journal_events import Event

PAGE = ROOT / "docs" / "CODES.md"
HEAD = """# The codes of messages

This page is generated from the source. A code stands in brackets below a message, in `error.code` of `--json`, and
among a receipt's incidents. Each row has its exit code, its message (with … for the parts that vary) and what to do.
If you know the symptom but not the code: [Troubleshooting](TROUBLESHOOTING.md).
"""
pytestmark = pytest.mark.xdist_group("codes")
NO_CODE = re.compile(
    r"trainer\.\w+|memory\.\w+|path\.simplify|\w+\.(json|jsonl|toml|log|lock|py|bin|pkl|yaml|pub|sh)|set\.unknown_key"
)
"""Strings that look like codes but name modules of the trainer, keys or files."""
WORDS = {
    "account.no_funds": "The account's balance does not pay for it.",
    "account.no_quota": "The account may not have so many of these.",
    "account.not_ready": "The account may not rent anything yet.",
    "audit.may_be_billing": "A machine is not proven gone.",
    "auth.broken_key": "A stored key, or the file with it, cannot be used.",
    "auth.not_allowed": "The provider takes the key and does not let it do this.",
    "boot.rejected": "The provider says that the machine will not boot.",
    "box.gpu_ill": "A card of the machine does not run the small kernel that is tried before the upload.",
    "box.mig": "MIG is switched on for a card, which has no instance that torch can use.",
    "box.warning": "What should be known about the machine: its login's variables, its torch, its cards.",
    "box.no_kernels": "A card runs nothing with this torch: it has no kernels for such a card.",
    "clock.wrong": "This computer's clock and the provider's differ.",
    "config.slurm": "The table of a cluster in config.toml has a fault.",
    "data.bad_line": "A row of the data is not as the others are; the message has its file and line.",
    "far.not_seen": "What has changed on the machine could not be looked at.",
    "host.unreachable": "The box does not answer at its address.",
    "init.refused": "The checkpoint whose weights are asked for does not fit, or is no checkpoint that can be read.",
    "job.silent": "The job has written nothing for long.",
    "loss_not_finite": "A loss was not a finite number.",
    "machine.ends_itself": "The machine was seen to end by its own timer.",
    "machine.gone": "The provider's answers do not have the machine just now.",
    "machine.not_told": "The provider did not say what became of a machine.",
    "mcp.arguments": "A tool was called with arguments that it does not take.",
    "nodes.silent": "Nodes of the job did not answer one another.",
    "offer.no_capacity": "The provider has none of these to rent just now.",
    "offers.none": "No cloud that was asked has such a card.",
    "offer.over_cap": "The cap pays for no offer to the end; the message names what would do, up to three ways.",
    "outputs.failed": "The command's outputs could not be looked for; they are looked for again.",
    "outputs.none": "No output is there yet, or none of the names that --outputs has.",
    "outputs.not_looked_for": "Outside of the command's folder nothing could be looked for.",
    "provider.retired": "The provider no longer takes the calls of this version of gpurun.",
    "recipe.does_not_add_up": "Two values of the recipe do not fit together; the message names both.",
    "run.unfinished": "The run has no receipt yet, and its supervisor does not work any more.",
    "slurm.disk_full": "The disk of the cluster's workdir is full.",
    "slurm.no_partition": "No partition of the cluster has such a node.",
    "stage.not_pulled": "The machine did not take files from the bucket; they are uploaded from here.",
    "stage.unreachable": "The bucket does not answer.",
    "stage.…": "The machine could not take files from the bucket, for the code's reason; they are uploaded from here.",
    "train.…": "The job ended badly; the code has the reason that it gave, as train.diverged or train.killed.",
    "trainer.refused": "The trainer does not take what it was given; the message is its own.",
    "usage": "The command line cannot be read: an unknown verb or flag, or a value that is missing.",
}
"""The texts of codes whose messages are composed elsewhere."""


def has_words(text: str) -> bool:
    return re.search(r"[A-Za-z]{3}", text) is not None


def best_of(found: list[Entry]) -> Entry:
    """Return the entry of a code with the most complete text."""

    def gaps(entry: Entry) -> tuple[bool, bool, int]:
        return not has_words(entry.what), not has_words(entry.hint), entry.what.count(GAP)

    return min(found, key=gaps)


def drawn() -> str:
    by_code: dict[str, list[Entry]] = {}
    for entry in entries():
        by_code.setdefault(entry.code, []).append(entry)
    lines, family = [HEAD], ""
    for code, found in by_code.items():
        if code.partition(".")[0] != family:
            family = code.partition(".")[0]
            lines += ["", f"## {family}", ""] if len(lines) > 1 else [f"## {family}", ""]
            lines += ["| code | exit | what it says | what to do |", "| --- | --- | --- | --- |"]
        entry = best_of(found)
        number = getattr(errors, entry.raised).exit_code if hasattr(errors, entry.raised) else ""
        number = "" if number == 1 else f"{number:d}" if number else ""
        what = WORDS.get(code, entry.what)
        assert has_words(what), f"{code} needs words in {__file__}"
        hint = entry.hint if has_words(entry.hint) else ""
        lines.append(f"| `{code}` | {number} | {_cell(what)} | {_cell(hint)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = " ".join(text.split())
    return re.sub(r"([|*<\[\]])", r"\\\1", text)


def test_the_page_of_codes_is_what_the_source_has() -> None:
    if os.environ.get("GPURUN_UPDATE_GOLDEN"):
        PAGE.write_text(drawn(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == drawn()


def test_no_code_is_missing_on_the_page() -> None:
    """Every string of the source that looks like a code is a known code, an event, or excluded by NO_CODE."""
    known = {entry.code for entry in entries()}
    families = {code.partition(".")[0] for code in known}
    missing = {
        node.value
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
        if node.value.partition(".")[0] in families and node.value not in known
    }
    assert {code for code in missing - set(Event) if not NO_CODE.fullmatch(code)} == set()

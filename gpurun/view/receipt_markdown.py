"""A receipt as Markdown, to hand in or to paste: whole digests, and times in UTC."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpurun.core.artifact_names import shown
from gpurun.core.clock import utc
from gpurun.core.job_terms import terms_in
from gpurun.core.receipt_record import Predicate, Receipt
from gpurun.core.untrusted import safe_line, safe_text
from gpurun.view.number_format import UNKNOWN
from gpurun.view.receipt_files import files_home
from gpurun.view.receipt_screen import log_lines, receipt_pairs, sample_text, signature_word, times_of
from gpurun.view.styled_text import Span

_MOST_FILES = 200
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~!&])")


def receipt_markdown(receipt: Receipt, *, shutdown: str = "") -> str:
    """The same as Markdown: a table with whole digests and UTC times, then log and sample as literal blocks."""
    told = receipt.predicate
    lines = [
        f"# Receipt {escape_markdown(told['run'])} #{told['seq']:04d}",
        "",
        f"**{escape_markdown(told['verdict']['says'])}**"
        + escape_markdown(f" {told['verdict'].get('not_shown', '')}".rstrip()),
        "",
        "| | |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {escape_markdown(value)} |" for name, value in card_pairs(receipt, shutdown)]
    for title, files in file_rows(told):
        lines += ["", f"| {title} | sha256 |", "| --- | --- |"]
        lines += [
            f"| {escape_markdown(name)} | {f'`{escape_markdown(sha256)}`' if sha256 else ''} |"
            for name, sha256 in files
        ]
    for title, texts in (("Log", log_lines(told)), ("Sample", safe_text(sample_text(told)))):
        if any(texts):
            lines += ["", *literal_block(title, texts)]
    return "\n".join(lines)


def literal_block(title: str, texts: Sequence[str]) -> list[str]:
    """Return lines below a title, in a fence that none of them closes."""
    longest = max((len(run) for text in texts for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"## {title}", "", f"{fence}text", *texts, fence]


def card_pairs(receipt: Receipt, shutdown: str) -> list[tuple[str, str]]:
    """What is handed in of a receipt, name by name: whole digests, and times in UTC."""
    told = receipt.predicate
    pairs: list[tuple[str, str]] = []
    for name, parts in receipt_pairs(told, now=0.0, shutdown=shutdown):
        texts = [part.text if isinstance(part, Span) else part for part in parts]
        if name == "Timeline":
            texts = [f"{step} {UNKNOWN if wall is None else utc(wall)}" for step, wall in times_of(told)]
        if name not in ("Checkpoints", "Outputs", "Next", "Chain", "Shipped") and any(texts):
            pairs.append((name, " · ".join(text for text in texts if text)))
    proofs = told["teardown"]["evidence"]
    terms = terms_in(told)
    digests = (
        (f"{terms.label} sha256", told["digests"]["recipe"]),
        ("Trainer", told["asked"].get("trainer", "")),
        ("Trainer sha256" if terms.has_model else "Folder sha256", told["digests"]["trainer"]),
        ("Data sha256", told["digests"]["data"]),
        ("Evidence sha256", proofs[-1]["evidence_sha256"] if proofs else ""),
        ("Receipt sha256", receipt.sha256),
        ("After", told["prev"]),
    )
    words = {"signed": "signed, ed25519", "unsigned": "unsigned", "bad": "BAD SIGNATURE"}
    pairs += [(name, digest) for name, digest in digests if digest]
    return [*pairs, ("Signature", words[signature_word(receipt)])]


def file_rows(told: Predicate) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return what came home, by "checkpoint" and "output": names with digests, and of very many how many more."""
    rows = []
    for home in files_home(told):
        names = [(shown(file["name"]), file["sha256"]) for file in home.files[:_MOST_FILES]]
        more = home.more(_MOST_FILES)
        rest = [(f"and {more} more, in {'collected.list' if home.unnamed else 'receipt.json'}", "")] if more else []
        rows += [(home.title.lower().removesuffix("s"), [*names, *rest])] if home.files else []
    return rows


def escape_markdown(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    return _MARKDOWN.sub(r"\\\1", safe_line(text))

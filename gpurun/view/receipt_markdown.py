"""A receipt in Markdown, to hand in or to paste, with complete digests and times in UTC."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpurun.core.artifact_names import readable_name
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
    """Return the receipt in Markdown: a table with complete digests and UTC times, then log and sample as blocks."""
    predicate = receipt.predicate
    lines = [
        f"# Receipt {escape_markdown(predicate['run'])} #{predicate['seq']:04d}",
        "",
        f"**{escape_markdown(predicate['verdict']['says'])}**"
        + escape_markdown(f" {predicate['verdict'].get('not_shown', '')}".rstrip()),
        "",
        "| | |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {escape_markdown(value)} |" for name, value in card_pairs(receipt, shutdown)]
    for title, files in file_rows(predicate):
        lines += ["", f"| {title} | sha256 |", "| --- | --- |"]
        lines += [
            f"| {escape_markdown(name)} | {f'`{escape_markdown(sha256)}`' if sha256 else ''} |"
            for name, sha256 in files
        ]
    for title, texts in (("Log", log_lines(predicate)), ("Sample", safe_text(sample_text(predicate)))):
        if any(texts):
            lines += ["", *literal_block(title, texts)]
    return "\n".join(lines)


def literal_block(title: str, texts: Sequence[str]) -> list[str]:
    """Return the lines below a title, in a fenced block that none of the lines can close."""
    longest = max((len(run) for text in texts for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"## {title}", "", f"{fence}text", *texts, fence]


def card_pairs(receipt: Receipt, shutdown: str) -> list[tuple[str, str]]:
    """Return the fields of a receipt to hand in, as (name, text), with complete digests and times in UTC."""
    predicate = receipt.predicate
    pairs: list[tuple[str, str]] = []
    for name, parts in receipt_pairs(predicate, now=0.0, shutdown=shutdown):
        texts = [part.text if isinstance(part, Span) else part for part in parts]
        if name == "Timeline":
            texts = [f"{step} {UNKNOWN if wall is None else utc(wall)}" for step, wall in times_of(predicate)]
        if name not in ("Checkpoints", "Outputs", "Next", "Chain", "Shipped") and any(texts):
            pairs.append((name, " · ".join(text for text in texts if text)))
    proofs = predicate["teardown"]["evidence"]
    terms = terms_in(predicate)
    digests = (
        (f"{terms.label} sha256", predicate["digests"]["recipe"]),
        ("Trainer", predicate["asked"].get("trainer", "")),
        ("Trainer sha256" if terms.has_model else "Folder sha256", predicate["digests"]["trainer"]),
        ("Data sha256", predicate["digests"]["data"]),
        ("Evidence sha256", proofs[-1]["evidence_sha256"] if proofs else ""),
        ("Receipt sha256", receipt.sha256),
        ("After", predicate["prev"]),
    )
    words = {"signed": "signed, ed25519", "unsigned": "unsigned", "bad": "BAD SIGNATURE"}
    pairs += [(name, digest) for name, digest in digests if digest]
    return [*pairs, ("Signature", words[signature_word(receipt)])]


def file_rows(predicate: Predicate) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the downloaded files as "checkpoint" and "output": names with digests, and a count of the rest."""
    rows = []
    for home in files_home(predicate):
        names = [(readable_name(file["name"]), file["sha256"]) for file in home.files[:_MOST_FILES]]
        more = home.more(_MOST_FILES)
        rest = [(f"and {more} more, in {'collected.list' if home.unnamed else 'receipt.json'}", "")] if more else []
        rows += [(home.title.lower().removesuffix("s"), [*names, *rest])] if home.files else []
    return rows


def escape_markdown(text: str) -> str:
    """Return text that Markdown and HTML show unchanged."""
    return _MARKDOWN.sub(r"\\\1", safe_line(text))

"""Converts CORE's bundle (DCLM, in nanochat's layout) to items of token ids: `core.jsonl`, see docs/FORMATS.md.

The bundle is a zip: `core.yaml` lists the tasks, `eval_meta_data.csv` has the scores that guessing reaches, and
`eval_data/` the questions, one JSON object per line. Prompts, the selection of questions and the choice of examples
follow nanochat, with the same seeds, so that scores can be compared. A text begins with the tokeniser's end-of-text
token, if it has one.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.core.paths import make_private, write_atomic
from gpurun.core.untrusted import error_words, number, parse_object, plain_line, whole
from gpurun.data.hellaswag import tokenizer_of_shards
from gpurun.data.refusals import Say, translate_refusals

FILE = "core.jsonl"
MOST_BUNDLE_BYTES, MOST_MEMBER_BYTES = 1 << 30, 1 << 30
MOST_TASKS, MOST_SHOTS = 200, 100
SHUFFLE_SEED, SHOT_SEED = 1337, 1234
_TALK_S = 60
_HINT = "Give the zip in nanochat's layout (eval_bundle.zip): core.yaml, eval_meta_data.csv and eval_data/."


@dataclass(frozen=True)
class _Task:
    label: str
    kind: str
    place: str
    shots: int
    delimiter: str
    baseline: float
    """The score that guessing reaches, in percent."""


def bundle_file(named: str, cache: Path, say: Say) -> Path:
    """Return the path of the bundle; a URL is downloaded to `cache`. UsageError or SetupError if that fails."""
    if "://" not in named:
        return local_file(named)
    if not named.startswith("https://"):
        raise UsageError("core.not_https", f"{plain_line(named)} is not an https:// address.", hint=_HINT)
    kept = cache / f"{hashlib.sha256(named.encode()).hexdigest()}.zip"
    if not kept.exists():
        say(f"downloading CORE's bundle from {urlsplit(named).netloc}")
        try:
            request = urllib.request.Request(named, headers={"User-Agent": "gpurun"})
            with urllib.request.urlopen(request, timeout=_TALK_S) as answer:
                content = answer.read(MOST_BUNDLE_BYTES + 1)
        except (OSError, ValueError) as error:
            what = f"CORE's bundle cannot be downloaded: {error_words(error)}."
            raise SetupError("core.unreachable", what, hint="Download it yourself, then give its path.") from None
        if len(content) > MOST_BUNDLE_BYTES:
            raise UsageError("core.too_large", f"{plain_line(named)} has more than 1 GiB.", hint=_HINT)
        make_private(cache)
        write_atomic(kept, content)
    return kept


def local_file(named: str) -> Path:
    """Return the named file; UsageError if there is none."""
    path = Path(named).expanduser()
    if not path.is_file():
        raise UsageError("core.no_bundle", f"There is no file {path}.", hint=_HINT)
    return path


def write_core(bundle: Path, most: int, shards: Path, into: Path, say: Say) -> tuple[str, int]:
    """Write at most `most` items of each task to `into`; return the bundle's sha256 and the tokens in all rows.

    The tokeniser is that of the folder `shards`. UsageError, which names the place, if the bundle is invalid.
    """
    with bundle.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    tokens, heads, lines = 0, list[dict[str, Any]](), list[str]()
    with translate_refusals("Nothing was left behind."), _open_bundle(bundle) as files:
        tokenizer = tokenizer_of_shards(shards, say)
        for task in _list_tasks(files):
            items = list(_build_items(task, _read_questions(files, task, most), tokenizer))
            say(f"{task.label}: {len(items):,} items of CORE")
            heads.append({"label": task.label, "random_baseline": task.baseline, "items": len(items)})
            tokens += sum(len(item["prefix"]) + len(row) for item in items for row in item["rows"])
            lines += [json.dumps(item, separators=(",", ":")) for item in items]
        head = json.dumps({"v": 1, "bundle_sha256": digest, "tasks": heads})
        write_atomic(into / FILE, "\n".join([head, *lines, ""]).encode())
    return digest, tokens


def _open_bundle(bundle: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(bundle)
    except (zipfile.BadZipFile, OSError):
        raise UsageError("core.no_bundle", f"{bundle} is not a zip file.", hint=_HINT) from None


def _read_member_text(files: zipfile.ZipFile, name: str) -> str:
    """Return a member's text. Its name may have any folders in front, because the zip may have an outer folder."""
    found = [member for member in files.infolist() if f"/{member.filename}".endswith(f"/{name}")]
    if not found:
        raise UsageError("core.no_bundle", f"The bundle has no {plain_line(name)}.", hint=_HINT)
    if found[0].file_size > MOST_MEMBER_BYTES:
        raise UsageError("core.too_large", f"{plain_line(name)} of the bundle has more than 1 GiB.", hint=_HINT)
    try:
        return files.read(found[0]).decode("utf-8-sig")
    except (ValueError, OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise _bad_bundle_error(name, error) from None


def _list_tasks(files: zipfile.ZipFile) -> Iterator[_Task]:
    """Yield the tasks that core.yaml lists, each with its baseline."""
    import yaml  # Only a bundle needs it.

    try:
        entries = yaml.safe_load(_read_member_text(files, "core.yaml"))["icl_tasks"]
        rows = csv.DictReader(io.StringIO(_read_member_text(files, "eval_meta_data.csv")))
        baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in rows}
        if not 0 < len(entries) <= MOST_TASKS:
            raise ValueError(f"{len(entries)} tasks")
        tasks = [_parse_task(entry, baselines) for entry in entries]
    except (yaml.YAMLError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise _bad_bundle_error("core.yaml or eval_meta_data.csv", error) from None
    yield from tasks


def _parse_task(entry: Mapping[str, Any], baselines: Mapping[str, float]) -> _Task:
    label, place, kind = str(entry["label"]), PurePosixPath(str(entry["dataset_uri"])), entry["icl_task_type"]
    shots, baseline = whole(entry["num_fewshot"][0]), number(baselines[label])
    if kind not in _ROWS:
        raise ValueError(f"{label} has the unknown kind {kind!r}")
    if shots is None or shots > MOST_SHOTS or baseline is None or not 0 <= baseline < 100 or ".." in place.parts:
        raise ValueError(f"{label} has an invalid path, number of examples or baseline")
    return _Task(
        plain_line(label, 60),
        kind,
        f"eval_data/{place}",
        shots,
        str(entry.get("continuation_delimiter", " ")),
        baseline,
    )


def _read_questions(files: zipfile.ZipFile, task: _Task, most: int) -> list[dict[str, Any]]:
    """Return at most `most` questions of a task, shuffled as in nanochat, with the same seed."""
    try:
        found = [parse_object(line) for line in _read_member_text(files, task.place).splitlines() if line.strip()]
    except ValueError as error:
        raise _bad_bundle_error(task.place, error) from None
    random.Random(SHUFFLE_SEED).shuffle(found)
    if len(found[:most]) <= task.shots:
        what = f"{task.label} has {len(found[:most])} questions, but each needs {task.shots} others as examples."
        raise UsageError("core.too_few", what, hint="Use more of each task: --set eval.core=500.")
    return found[:most]


def _build_items(
    task: _Task, questions: Sequence[Mapping[str, Any]], tokenizer: tokenizers.TextTokenizer
) -> Iterator[dict[str, Any]]:
    """Yield each question as rows of token ids; the last ids of a row are scored."""
    begin = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    make = _ROWS[task.kind]
    try:
        for index, question in enumerate(questions):
            others = [*range(index), *range(index + 1, len(questions))]
            drawn = random.Random(SHOT_SEED + index).sample(others, task.shots)
            texts, label = make(question, [questions[i] for i in drawn], task.delimiter)
            rows = [[*begin, *ids.tolist()] for ids in tokenizer.encode(texts)]
            yield _build_item(task.kind, rows, label)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _bad_bundle_error(task.place, error) from None


def _build_item(kind: str, rows: list[list[int]], label: int | None) -> dict[str, Any]:
    """Return an item: its rows, the length of their common beginning, and how many ids at each row's end are scored."""
    if kind == "language_modeling":
        same = len(_find_common_prefix(rows))  # The whole context, unless tokens merge where the continuation begins.
        rows, counts = rows[1:], [len(rows[1]) - same]
    elif kind == "schema":
        same = len(_find_common_prefix([row[::-1] for row in rows]))
        counts = [same] * len(rows)
    else:
        same = len(_find_common_prefix(rows))
        counts = [len(row) - same for row in rows]
    if any(len(row) < 2 for row in rows):
        raise ValueError("a text is empty")
    # At least one id is scored, and at least one stands before it.
    counts = [min(max(1, count), len(row) - 1) for count, row in zip(counts, rows, strict=True)]
    prefix = _find_common_prefix(rows) if len(rows) > 1 else []
    return {"prefix": prefix, "rows": [row[len(prefix) :] for row in rows], "asked": counts, "label": label}


def _find_common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """Return the common beginning of all rows."""
    same = list(takewhile(lambda ids: len({*ids}) == 1, zip(*rows, strict=False)))
    return [ids[0] for ids in same]


def _format_choices_question(
    question: Mapping[str, Any], shots: Sequence[Mapping[str, Any]], delimiter: str
) -> tuple[list[str], int | None]:
    head = "".join(f"{shot['query']}{delimiter}{shot['choices'][shot['gold']]}\n\n" for shot in shots)
    texts = [f"{head}{question['query']}{delimiter}{choice}" for choice in question["choices"]]
    return texts, _check_label(question["gold"], texts)


def _format_schema_question(
    question: Mapping[str, Any], shots: Sequence[Mapping[str, Any]], delimiter: str
) -> tuple[list[str], int | None]:
    head = "".join(f"{shot['context_options'][shot['gold']]}{delimiter}{shot['continuation']}\n\n" for shot in shots)
    texts = [f"{head}{context}{delimiter}{question['continuation']}" for context in question["context_options"]]
    return texts, _check_label(question["gold"], texts)


def _format_text_question(
    question: Mapping[str, Any], shots: Sequence[Mapping[str, Any]], delimiter: str
) -> tuple[list[str], int | None]:
    head = "".join(f"{shot['context'].strip()}{delimiter}{shot['continuation']}\n\n" for shot in shots)
    before = f"{head}{question['context'].strip()}{delimiter}"
    return [before.strip(), f"{before}{question['continuation']}"], None


_ROWS = {
    "multiple_choice": _format_choices_question,
    "schema": _format_schema_question,
    "language_modeling": _format_text_question,
}
"""The function for each kind of task. It returns a question's texts, and the index of the correct text.

For a continuation, the texts are the context alone, and the context with its continuation.
"""


def _check_label(gold: Any, texts: Sequence[str]) -> int:
    if type(gold) is not int or gold not in range(len(texts)):
        raise ValueError("gold is not the number of an answer")
    return gold


def _bad_bundle_error(place: str, error: Exception) -> UsageError:
    what = f"{plain_line(place)} of the bundle is not in nanochat's form: {error_words(error)}."
    return UsageError("core.bad_bundle", what, hint=_HINT)

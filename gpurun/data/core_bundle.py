"""CORE's bundle (DCLM, in nanochat's layout) as items of token ids beside the shards: `core.jsonl` (docs/FORMATS.md).

The bundle is a zip: `core.yaml` lists the tasks, `eval_meta_data.csv` has what guessing gets, and `eval_data/` the
questions, a JSON object a line. Prompts are written, questions drawn and examples chosen as nanochat does it, with the
same seeds, so that scores compare. A text begins with the tokeniser's end-of-text token, where it has one.
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
    """What guessing gets, in percent."""


def bundle_file(named: str, cache: Path, say: Say) -> Path:
    """Return the bundle's file; one that has a URL is downloaded, and kept in `cache`. UsageError or SetupError."""
    if "://" not in named:
        return local_file(named)
    if not named.startswith("https://"):
        raise UsageError("core.not_https", f"{plain_line(named)} is no https:// address.", hint=_HINT)
    kept = cache / f"{hashlib.sha256(named.encode()).hexdigest()}.zip"
    if not kept.exists():
        say(f"CORE's bundle is downloaded from {urlsplit(named).netloc}")
        try:
            asked = urllib.request.Request(named, headers={"User-Agent": "gpurun"})
            with urllib.request.urlopen(asked, timeout=_TALK_S) as answer:
                content = answer.read(MOST_BUNDLE_BYTES + 1)
        except (OSError, ValueError) as error:
            what = f"CORE's bundle cannot be downloaded: {error_words(error)}."
            raise SetupError("core.unreachable", what, hint="Download it yourself, and give its file.") from None
        if len(content) > MOST_BUNDLE_BYTES:
            raise UsageError("core.too_large", f"{plain_line(named)} has more than 1 GiB.", hint=_HINT)
        make_private(cache)
        write_atomic(kept, content)
    return kept


def local_file(named: str) -> Path:
    """Return the file that was named; UsageError where there is none."""
    path = Path(named).expanduser()
    if not path.is_file():
        raise UsageError("core.no_bundle", f"There is no file {path}.", hint=_HINT)
    return path


def write_core(bundle: Path, most: int, shards: Path, into: Path, say: Say) -> tuple[str, int]:
    """Write at most so many items of each task into `into`; return the bundle's sha256 and the tokens of all rows.

    `shards` is the folder whose tokeniser reads them. Raises UsageError where the bundle is none, and names the place.
    """
    with bundle.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    tokens, heads, lines = 0, list[dict[str, Any]](), list[str]()
    with translate_refusals("Nothing was left behind."), _opened(bundle) as files:
        tokenizer = tokenizer_of_shards(shards, say)
        for task in _tasks(files):
            items = list(_items(task, _questions(files, task, most), tokenizer))
            say(f"{task.label}: {len(items):,} items of CORE")
            heads.append({"label": task.label, "random_baseline": task.baseline, "items": len(items)})
            tokens += sum(len(item["prefix"]) + len(row) for item in items for row in item["rows"])
            lines += [json.dumps(item, separators=(",", ":")) for item in items]
        head = json.dumps({"v": 1, "bundle_sha256": digest, "tasks": heads})
        write_atomic(into / FILE, "\n".join([head, *lines, ""]).encode())
    return digest, tokens


def _opened(bundle: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(bundle)
    except (zipfile.BadZipFile, OSError):
        raise UsageError("core.no_bundle", f"{bundle} is no zip.", hint=_HINT) from None


def _text(files: zipfile.ZipFile, name: str) -> str:
    """The text of a member, by the end of its name: the layout may lie in a folder."""
    found = [one for one in files.infolist() if f"/{one.filename}".endswith(f"/{name}")]
    if not found:
        raise UsageError("core.no_bundle", f"The bundle has no {plain_line(name)}.", hint=_HINT)
    if found[0].file_size > MOST_MEMBER_BYTES:
        raise UsageError("core.too_large", f"{plain_line(name)} of the bundle has more than 1 GiB.", hint=_HINT)
    try:
        return files.read(found[0]).decode("utf-8-sig")
    except (ValueError, OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise _bad(name, error) from None


def _tasks(files: zipfile.ZipFile) -> Iterator[_Task]:
    """The tasks that core.yaml lists, each with its baseline."""
    import yaml  # Only for a bundle.

    try:
        told = yaml.safe_load(_text(files, "core.yaml"))["icl_tasks"]
        rows = csv.DictReader(io.StringIO(_text(files, "eval_meta_data.csv")))
        baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in rows}
        if not 0 < len(told) <= MOST_TASKS:
            raise ValueError(f"{len(told)} tasks")
        tasks = [_task(one, baselines) for one in told]
    except (yaml.YAMLError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise _bad("core.yaml or eval_meta_data.csv", error) from None
    yield from tasks


def _task(told: Mapping[str, Any], baselines: Mapping[str, float]) -> _Task:
    label, place, kind = str(told["label"]), PurePosixPath(str(told["dataset_uri"])), told["icl_task_type"]
    shots, baseline = whole(told["num_fewshot"][0]), number(baselines[label])
    if kind not in _ROWS:
        raise ValueError(f"{label} is of the kind {kind!r}")
    if shots is None or shots > MOST_SHOTS or baseline is None or not 0 <= baseline < 100 or ".." in place.parts:
        raise ValueError(f"{label} has a place, a number of examples or a baseline that cannot be")
    return _Task(
        plain_line(label, 60), kind, f"eval_data/{place}", shots, str(told.get("continuation_delimiter", " ")), baseline
    )


def _questions(files: zipfile.ZipFile, task: _Task, most: int) -> list[dict[str, Any]]:
    """A task's questions, in nanochat's order: shuffled by its seed, and of these the first ones."""
    try:
        found = [parse_object(line) for line in _text(files, task.place).splitlines() if line.strip()]
    except ValueError as error:
        raise _bad(task.place, error) from None
    random.Random(SHUFFLE_SEED).shuffle(found)
    if len(found[:most]) <= task.shots:
        what = f"{task.label} has {len(found[:most])} questions, and each needs {task.shots} others as examples."
        raise UsageError("core.too_few", what, hint="Take more of each task: --set eval.core=500.")
    return found[:most]


def _items(
    task: _Task, questions: Sequence[Mapping[str, Any]], tokenizer: tokenizers.TextTokenizer
) -> Iterator[dict[str, Any]]:
    """Each question as rows of ids, of which the last ones are asked for."""
    begin = [] if tokenizer.eot_id is None else [tokenizer.eot_id]
    make = _ROWS[task.kind]
    try:
        for index, question in enumerate(questions):
            others = [*range(index), *range(index + 1, len(questions))]
            drawn = random.Random(SHOT_SEED + index).sample(others, task.shots)
            texts, label = make(question, [questions[i] for i in drawn], task.delimiter)
            rows = [[*begin, *ids.tolist()] for ids in tokenizer.encode(texts)]
            yield _item(task.kind, rows, label)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _bad(task.place, error) from None


def _item(kind: str, rows: list[list[int]], label: int | None) -> dict[str, Any]:
    """The rows with what they begin with in common, and how many of each one's last ids are asked for."""
    if kind == "language_modeling":
        same = len(_common(rows))  # All of the text without it, unless tokens grow together at the seam.
        rows, asked = rows[1:], [len(rows[1]) - same]
    elif kind == "schema":
        same = len(_common([row[::-1] for row in rows]))
        asked = [same] * len(rows)
    else:
        same = len(_common(rows))
        asked = [len(row) - same for row in rows]
    if any(len(row) < 2 for row in rows):
        raise ValueError("a text is empty")
    # At least one id is asked for, and one stands before it.
    asked = [min(max(1, count), len(row) - 1) for count, row in zip(asked, rows, strict=True)]
    prefix = _common(rows) if len(rows) > 1 else []
    return {"prefix": prefix, "rows": [row[len(prefix) :] for row in rows], "asked": asked, "label": label}


def _common(rows: Sequence[list[int]]) -> list[int]:
    """What all rows begin with."""
    same = list(takewhile(lambda ids: len({*ids}) == 1, zip(*rows, strict=False)))
    return [ids[0] for ids in same]


def _of_choices(
    question: Mapping[str, Any], shots: Sequence[Mapping[str, Any]], delimiter: str
) -> tuple[list[str], int | None]:
    head = "".join(f"{one['query']}{delimiter}{one['choices'][one['gold']]}\n\n" for one in shots)
    texts = [f"{head}{question['query']}{delimiter}{choice}" for choice in question["choices"]]
    return texts, _label(question["gold"], texts)


def _of_schema(
    question: Mapping[str, Any], shots: Sequence[Mapping[str, Any]], delimiter: str
) -> tuple[list[str], int | None]:
    head = "".join(f"{one['context_options'][one['gold']]}{delimiter}{one['continuation']}\n\n" for one in shots)
    texts = [f"{head}{context}{delimiter}{question['continuation']}" for context in question["context_options"]]
    return texts, _label(question["gold"], texts)


def _of_text(
    question: Mapping[str, Any], shots: Sequence[Mapping[str, Any]], delimiter: str
) -> tuple[list[str], int | None]:
    head = "".join(f"{one['context'].strip()}{delimiter}{one['continuation']}\n\n" for one in shots)
    before = f"{head}{question['context'].strip()}{delimiter}"
    return [before.strip(), f"{before}{question['continuation']}"], None


_ROWS = {"multiple_choice": _of_choices, "schema": _of_schema, "language_modeling": _of_text}
"""The texts of a question, and which is right; of one to be continued the text without and the one with its end."""


def _label(gold: Any, texts: Sequence[str]) -> int:
    if type(gold) is not int or gold not in range(len(texts)):
        raise ValueError("gold is not the number of an answer")
    return gold


def _bad(place: str, error: Exception) -> UsageError:
    what = f"{plain_line(place)} of the bundle is not as nanochat has it: {error_words(error)}."
    return UsageError("core.bad_bundle", what, hint=_HINT)

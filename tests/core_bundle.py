"""A bundle of the CORE evaluation in nanochat's layout: one task of each kind, with made-up questions."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

YAML = """
icl_tasks:
- label: animals
  dataset_uri: knowledge/animals.jsonl
  num_fewshot: [2]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
- label: who_is_it
  dataset_uri: reading/who.jsonl
  num_fewshot: [0]
  icl_task_type: schema
- label: go_on
  dataset_uri: reading/go_on.jsonl
  num_fewshot: [1]
  icl_task_type: language_modeling
"""
META = "Eval Task,Task Category,Random baseline\nanimals,knowledge,25\nwho_is_it,reading,50\ngo_on,reading,0.0\n"
NAMES = ("cat", "dog", "horse", "cow", "sheep", "goat", "hen")
ANIMALS: list[dict[str, Any]] = [
    {"query": f"Question: which is number {i}?", "choices": [name, f"a {name}", "none", name[::-1]], "gold": i % 4}
    for i, name in enumerate(NAMES)
]
WHO: list[dict[str, Any]] = [
    {"context_options": [f"The {name} saw the cup, and the {name}", f"The {name} saw the cup, and the cup"],
     "continuation": "was full.", "gold": i % 2}
    for i, name in enumerate(NAMES)
]  # fmt: skip
GO_ON: list[dict[str, Any]] = [{"context": f"one two three {name} ", "continuation": "one"} for name in NAMES]


def write_bundle(path: Path, *, folder: str = "eval_bundle/", **other: str | None) -> Path:
    """Write the bundle and return its path; `other` replaces the member with this stem, or omits it if None."""
    members: dict[str, str | None] = {
        "core.yaml": YAML,
        "eval_meta_data.csv": META,
        "eval_data/knowledge/animals.jsonl": "\n".join(map(json.dumps, ANIMALS)),
        "eval_data/reading/who.jsonl": "\n".join(map(json.dumps, WHO)),
        "eval_data/reading/go_on.jsonl": "\n".join(map(json.dumps, GO_ON)) + "\n",
    }
    with zipfile.ZipFile(path, "w") as bundle:
        for name, text in members.items():
            content = other.get(Path(name).stem, text)
            if content is not None:
                bundle.writestr(f"{folder}{name}", content)
    return path

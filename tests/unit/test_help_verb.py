"""Tests of `gpurun help`, and of a verb group that is typed without a verb."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpurun.cli.app import OTHER_WORDS, VERBS


def test_help_shows_each_verb_and_each_page_that_it_lists(gpurun: Any) -> None:
    listed = json.loads(gpurun("help", "--json")[1])["data"]
    assert listed["verbs"] == list(VERBS)
    for verb in ("train", "recipes"):
        code, out, _ = gpurun("help", verb)
        assert (code, out.splitlines()[1:]) == (0, gpurun(verb, "--help")[1].splitlines()[1:])
    for page, title in listed["pages"].items():
        code, out, _ = gpurun("help", page)
        assert (code, out.splitlines()[0]) == (0, f"# {title}")


def test_help_of_what_there_is_not_names_what_was_meant(gpurun: Any) -> None:
    code, _, err = gpurun("help", "recipts")
    assert (code, "receipts?" in err or "receipt?" in err) == (2, True)
    assert gpurun("help", "recipes", "zzz")[0] == 2


@pytest.mark.parametrize(
    ("group", "listed"),
    [
        ("recipes", "mini-gpt"),
        ("config", "max_cost"),
        ("auth", "runpod"),
        ("data", "prepare"),
        ("aws", "setup"),
        ("roster", "new"),
    ],
)
def test_a_group_alone_lists_what_there_is(gpurun: Any, group: str, listed: str) -> None:
    code, out, _ = gpurun(group)
    assert (code, listed in out) == (0, True)


def test_a_word_of_another_tool_is_answered_with_the_verb(gpurun: Any) -> None:
    """A new user may type another tool's verb, such as `status`: the error must name gpurun's verb for it."""
    code, _, err = gpurun("status")
    assert (code, "gpurun ps --all" in err) == (2, True)
    assert "gpurun auth set" in gpurun("login")[2]
    assert not set(OTHER_WORDS) & set(VERBS)
    assert not [verb for verb in OTHER_WORDS.values() if f"gpurun {verb}" in gpurun("zzz")[2]]

"""Tests of challenges: challenge and signing key decide a run's seed, so no older run and no other user's run fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpurun.core.errors import UsageError
from gpurun.core.paths import Home
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.ledger.signing import load_signer
from gpurun.readers.evidence.roster import read_roster
from tests.command_line import gpurun

WORD = "ml-2026-k7h3m9q2x4ab"


def seed_with(challenge: str) -> int:
    return resolve(load_recipe("course-lab"), "full", (f'train.challenge="{challenge}"',)).tables.train.seed


def test_word_and_key_give_the_seed() -> None:
    seeds = [seed_with(f"{word}:{key * 64}") for word, key in ((WORD, "a"), (WORD, "b"), ("another-word", "a"))]
    assert len({42, *seeds}) == 4
    assert seed_with(f"{WORD}:{'a' * 64}") == seeds[0]


@pytest.mark.parametrize(
    "challenge", ["abc", WORD, f"{WORD}:{'g' * 64}", f"{'x' * 65}:{'a' * 64}", f"a b c:{'a' * 64}"]
)
def test_an_invalid_challenge_is_refused_before_any_spending(challenge: str) -> None:
    with pytest.raises(UsageError, match=r"train\.challenge"):
        seed_with(challenge)


def test_a_plan_with_a_challenge_is_bound_to_this_homes_key(own_home: Path) -> None:
    asked = ("plan", "course-lab", "--gpu", "1xA100", "--max-cost", "5", "--challenge", WORD, "--json")
    done = gpurun(*asked)
    signer = load_signer(Home(own_home).keys)
    train = json.loads(done.stdout.splitlines()[-1])["data"]["resolved"]["train"]
    assert signer is not None
    assert (done.returncode, train["challenge"]) == (0, f"{WORD}:{signer.keyid}")
    assert train["seed"] == seed_with(train["challenge"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--challenge", WORD, "--set", "train.seed=7"), "recipe.does_not_add_up"),
        (("--challenge", "no word at all"), "usage.challenge"),
        (("--challenge", "x" * 65), "usage.challenge"),
    ],
)
def test_a_seed_beside_it_or_half_a_word_is_refused(own_home: Path, words: tuple[str, ...], code: str) -> None:
    done = gpurun("plan", "course-lab", "--gpu", "1xA100", "--max-cost", "5", *words, "--json")
    assert (done.returncode, json.loads(done.stdout.splitlines()[-1])["errors"][0]["code"]) == (2, code)


# The class -----------------------------------------------------------------------------------------------------------


def test_each_learner_of_a_class_gets_a_challenge_of_their_own(own_home: Path, tmp_path: Path) -> None:
    (tmp_path / "students.txt").write_text("Ada Lovelace\n\nAlan Turing\n李雷\n", encoding="utf-8")
    where = tmp_path / "ml.roster.json"
    asked = ("roster", "new", "ml-2026", "--students", str(tmp_path / "students.txt"), "-o", str(where))
    assert gpurun(*asked).returncode == 0
    roster = read_roster(where)
    assert [one.name for one in roster.students] == ["Ada Lovelace", "Alan Turing", "李雷"]
    assert len({one.challenge for one in roster.students}) == 3
    for one in roster.students:
        assert one.challenge.startswith("ml-2026-")
        assert 0 <= seed_with(f"{one.challenge}:{'a' * 64}") < 2**63
    kept = where.read_bytes()
    assert gpurun(*asked).returncode == 2, "drawn again, every challenge that was handed out would be void"
    assert where.read_bytes() == kept


@pytest.mark.parametrize("text", ["", "Ada\nAda\n", "\n \n"])
def test_a_list_of_nobody_or_of_one_twice_is_refused(own_home: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "students.txt").write_text(text)
    assert gpurun("roster", "new", "ml", "--students", str(tmp_path / "students.txt")).returncode == 2

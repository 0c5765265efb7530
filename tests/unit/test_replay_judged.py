"""Tests of how a replay is judged: a difference is a problem where bits or losses must agree, else "not checked"."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.paths import RunFolder
from gpurun.readers import replay as room
from gpurun.readers.replay import Replayed, replay_run
from tests.refusals import lacking

HERE = "Xeon AVX512 | 2 threads | torch 2.13.0+cpu"
STATE = {"step": 20, "val_loss": 2.0, "kind": HERE, "processes": 1}
START = {"device": "cpu", "precision": "fp32"}
EQUAL = {"from": 0, "to": 20, "equal": True, "most": 0.0, "losses": {"10": 3.0, "20": 2.5}}
ANSWER = {"step": 20, "device": "cpu", "kind": HERE, "val_loss": 2.0, "again": [EQUAL]}


class Kept:
    """A run with one checkpoint and its shards, and a trainer that returns a prepared answer."""

    harm = b""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = RunFolder(root / "runs" / "fox-41"), patch
        self.asked, self.said = list[tuple[str, ...]](), list[str]()
        self.folder.data.mkdir(parents=True)
        listed = {"name": "t.bin", "sha256": hashlib.sha256(b"tokens").hexdigest()}
        (self.folder.data / "data.json").write_text(json.dumps({"train": [listed], "val": []}))
        (self.folder.data / "t.bin").write_bytes(b"tokens")
        events = [{"kind": "step", "step": 10, "loss": 3.0}, {"kind": "step", "step": 20, "loss": 2.5}]
        self.folder.events.write_text("".join(json.dumps(one) + "\n" for one in events))

    def judged(
        self,
        answer: Any = ANSWER,
        *,
        state: dict[str, Any] = STATE,
        start: dict[str, Any] = START,
        batch: int = 64,
        **terms: Any,
    ) -> Replayed:
        contents = {"weights": b"weights " * 8, "optimizer": b"o", "state": json.dumps(state).encode()}
        files = []
        for kind, content in contents.items():
            path = self.folder.artifacts / "checkpoints" / f"000020.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            sha256 = hashlib.sha256(content).hexdigest()
            files.append({"name": f"checkpoints/000020.{kind}", "kind": kind, "step": 20, "sha256": sha256})
        if self.harm:
            (self.folder.artifacts / "checkpoints" / "000020.weights").write_bytes(self.harm)

        def ask(module: str, found: Any, *words: str, limit_s: float) -> str:
            self.asked.append(words)
            if isinstance(answer, Exception):
                raise answer
            return json.dumps(answer)

        self.patch.setattr(room, "ask_trainer", ask)
        predicate = {"checkpoint": {"files": files}, "asked": terms, "training": {"start": {"event": start}}}
        return replay_run(
            self.folder,
            predicate,
            {"train": {"init_from": "", "batch_tokens": batch, "log_every": 10}},
            self.folder.data,
            self.said.append,
        )


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(tmp_path, monkeypatch)


def test_the_same_bits_and_the_same_loss_are_told_as_checked(kept: Kept) -> None:
    found = kept.judged()
    assert found.problems == ()
    assert [lacking(text, figure) for text, figure in zip(found.checked, ("step 20 ", "0 to 20 "), strict=True)] == [
        [],
        [],
    ]
    assert (found.unchecked, found.extent) == ((), "all")
    assert kept.asked == [("--again=0:20",)]
    assert [lacking(text, "20 steps", "5 s") for text in kept.said] == [[]]


ANOTHER = {**EQUAL, "equal": False, "most": 0.2}


@pytest.mark.parametrize(
    ("answer", "start", "problem"),
    [
        ({"val_loss": 2.001}, {}, "2.001"),
        ({"val_loss": None}, {}, "None"),
        ({"again": [ANOTHER]}, {}, "0 to 20 "),
        (
            {"kind": "EPYC AVX2 | 2 threads", "again": [{**ANOTHER, "losses": {"10": 3.1}}]},
            {},
            "3.1",
        ),
        ({}, {"device": "cuda", "precision": "bf16"}, "cuda"),
    ],
)
def test_what_must_agree_and_does_not_is_a_problem(
    kept: Kept, answer: dict[str, Any], start: dict[str, Any], problem: str
) -> None:
    (said,) = kept.judged({**ANSWER, **answer}, start={**START, **start}).problems
    assert problem in said


def test_between_processor_kinds_differing_bits_accuse_nobody(kept: Kept) -> None:
    """On another instruction set a weight differed by 0.16 after 300 steps and the loss by 1e-5: that is no problem."""
    found = kept.judged(
        {**ANSWER, "kind": "EPYC AVX2 | 2 threads", "again": [{**ANOTHER, "losses": {"10": 3.00001, "20": 2.50001}}]}
    )
    assert found.problems == ()
    (said,) = found.unchecked
    assert lacking(said, "2 of", "20 steps", HERE, "EPYC AVX2") == []


def test_a_16_bit_card_is_held_to_the_measured_precision_gap(kept: Kept) -> None:
    card = {**START, "device": "cuda", "precision": "bf16"}
    near = {**ANSWER, "val_loss": 2.004, "again": [{**ANOTHER, "losses": {"10": 3.02}}]}
    there = {**STATE, "kind": "NVIDIA H100 80GB HBM3 | torch 2.13.0"}
    assert kept.judged(near, start=card, state=there).problems == ()
    assert len(kept.judged({**near, "val_loss": 2.02}, start=card, state=there).problems) == 1


def test_what_could_not_be_computed_is_said_and_is_no_accusation(kept: Kept) -> None:
    absent = SetupError("torch.missing", "This needs PyTorch, which is not installed here.", hint="Install it.")
    assert kept.judged(absent) == Replayed.nothing(absent.what)
    assert len(kept.judged(state={**STATE, "val_loss": None}).unchecked) == 1
    long = kept.judged({**ANSWER, "again": []}, batch=10**15)
    assert (len(long.unchecked), long.extent) == (1, "nothing")
    (kept.folder.data / "t.bin").write_bytes(b"others")
    without_shards = kept.judged()
    assert (without_shards.extent, len(without_shards.unchecked)) == ("nothing", 1)
    assert "shards" in without_shards.unchecked[0]


def test_a_checkpoint_other_than_the_one_at_home_is_not_opened(kept: Kept) -> None:
    kept.harm = b"other weights"
    found = kept.judged()
    assert (found.extent, found.problems, len(found.unchecked)) == ("nothing", (), 1)
    assert kept.asked == []


def test_what_the_trainer_refuses_does_not_hold(kept: Kept) -> None:
    refusal = UsageError("trainer.refused", "000020.model.safetensors is not a sound checkpoint.", hint="See.")
    assert "000020.model.safetensors" in kept.judged(refusal).problems[0]


def test_a_long_runs_end_and_unpredictable_spans_are_replayed() -> None:
    parameters, recipe = 1000, {"train": {"init_from": "", "batch_tokens": 10**6}}  # 3,333 steps are affordable.
    files = [{"kind": kind, "step": step} for kind in room._KINDS for step in (10_000, 11_000, 20_000, 20_500, 22_000)]
    drawn = set[tuple[int, int]]()
    for _ in range(200):
        spans = room._spans_to_repeat(files, {"asked": {}}, recipe, parameters)
        assert spans[-1] == (20_500, 22_000), "the whole of what led to the last checkpoint"
        assert len(spans) == 1 + room.DRAWN
        assert sum(until - first for first, until in spans) <= 3_333
        drawn |= {*spans[:-1]}
    assert {(0, 20), (10_000, 11_000), (20_000, 20_500)} <= drawn
    assert all(until - first == 20 for first, until in drawn if first in (0, 11_000)), "a long span is begun only"


def test_a_run_that_changed_machines_is_not_held_to_the_bit(kept: Kept) -> None:
    with kept.folder.events.open("a") as file:
        file.write(json.dumps({"kind": "start", "step": 10, "resumed_from": 10}) + "\n")
    found = kept.judged({**ANSWER, "again": [ANOTHER]})
    assert found.problems == ()
    assert "resumed" in found.unchecked[0]


def test_a_span_that_no_checkpoint_ends_is_held_to_its_losses(kept: Kept) -> None:
    begun = {**EQUAL, "to": 15, "equal": None, "most": None, "losses": {"10": 3.0}}
    assert [lacking(text, "0 to 15 ") for text in kept.judged({**ANSWER, "again": [begun]}).checked[1:]] == [[]]
    (said,) = kept.judged({**ANSWER, "again": [{**begun, "losses": {"10": 3.0000001}}]}).problems
    assert "0 to 15 " in said


def test_deleted_losses_are_a_problem_and_not_an_agreement(kept: Kept) -> None:
    """Without losses to compare, a replay once said that "the first 20 agree"."""
    kept.folder.events.write_text('{"kind": "step", "step": 30, "loss": 2.0}\n')
    found = kept.judged({**ANSWER, "again": [ANOTHER]}, state={**STATE, "processes": 2})
    assert len(found.problems) == 1
    assert not any("agree" in said for said in (*found.problems, *found.checked, *found.unchecked))


@pytest.mark.parametrize("edit", [{"kind": "NVIDIA A100-SXM4-80GB | torch 2.13.0"}, {"processes": 2}])
def test_no_word_of_the_run_excuses_weights_that_went_elsewhere(kept: Kept, edit: dict[str, Any]) -> None:
    """A classmate's training was handed in under another challenge, with one field edited to excuse the differences."""
    found = kept.judged({**ANSWER, "again": [{**ANOTHER, "alike": 0.07}]}, state={**STATE, **edit})
    assert "0.070" in found.problems[0]
    honest = kept.judged({**ANSWER, "again": [{**ANOTHER, "alike": 0.93}]}, state={**STATE, **edit})
    assert honest.problems == ()
    assert len(honest.unchecked) == 1


def test_a_cosine_below_all_measured_is_unchecked_not_accused(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SAMPLED_PARAMETERS", 10)
    apart = {**ANOTHER, "alike": 0.07}
    found = kept.judged({**ANSWER, "again": [apart]}, state={**STATE, "processes": 2})
    assert found.problems == ()
    assert any("cosine" in said for said in found.unchecked)


def test_a_continued_run_is_not_replayed_from_the_beginning(kept: Kept) -> None:
    kept.judged({**ANSWER, "again": []}, continues={"run": "owl-07"})
    assert kept.asked == [()]

"""What a run claims, computed again by its trainer in a child process, and held against what its files say.

Where the same kind of processor computes, the bits must be the same. Elsewhere sums come in another order, or in other
digits, and only what was measured to agree all the same is compared: docs/RECEIPTS.md has the figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.cli.weights import HomeCheckpoint, ask_trainer
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.paths import RunFolder, read_regular
from gpurun.core.trainer_events import Step, events_of
from gpurun.core.untrusted import number, plain_line
from gpurun.ledger.audit.audit_run import sha256_of
from gpurun.planning.continue_from import newest_whole

LIMIT_S = 900.0
MOST_FLOPS = 2e13
"""What is trained again at most: minutes on two cores."""
FIRST_STEPS = 20
"""So many steps two kinds of processor stay together before chance parts them."""
LOSS_APART = {"same": 1e-5, "other": 5e-3}
STEPS_APART = {"same": 1e-3, "other": 1e-2}
"""How far a loss may be from the one that was told, as a share of it: both in fp32 on a CPU, or not."""
_KINDS = ("weights", "optimizer", "state")


@dataclass(frozen=True)
class Replayed:
    """What a replay says: what does not hold, and what was checked or was not."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def replay_run(folder: RunFolder, told: Mapping[str, Any], recipe: Mapping[str, Any], data: Path) -> Replayed:
    """Compute the last checkpoint's loss again, and the steps that led to it where that takes minutes.

    `told` is what the receipt states, `recipe` the plan's, `data` where the shards are.
    """
    if "command" in told["asked"]:
        return Replayed(notes=("not checked: it ran a command of its user's own",))
    listed = [one for one in told["checkpoint"]["files"] if one["kind"] in _KINDS]
    files = [one for one in listed if sha256_of(folder.artifacts / one["name"]) == one["sha256"]]
    last = newest_whole(files)
    if last is None or last != newest_whole(listed):
        return Replayed(notes=("not checked: the last checkpoint is not here whole, as it came home",))
    own = [one for one in files if one["step"] == last]
    if not _has_shards(data):
        return Replayed(notes=("not checked: the shards that it was trained on are not here",))
    weights = folder.artifacts / next(one["name"] for one in own if one["kind"] == "weights")
    state = json.loads(read_regular(folder.artifacts / next(one["name"] for one in own if one["kind"] == "state")))
    before = _before(files, told, recipe, weights.stat().st_size // 4)
    words = [] if before is None else [f"--before={before}"]
    found = HomeCheckpoint(last, weights, data, dict(recipe))
    try:
        answer = json.loads(ask_trainer("trainer.replay", found, *words, limit_s=LIMIT_S))
    except SetupError as error:
        return Replayed(notes=(f"not checked: {error.what}",))
    except UsageError as error:
        return Replayed(problems=(f"step {last} cannot be computed again: {error.what}",))
    start = told["training"]["start"]["event"] or {}
    is_alike = (answer["device"], start.get("device"), start.get("precision")) == ("cpu", "cpu", "fp32")
    judged = [*_loss(answer, state, last, "same" if is_alike else "other")]
    if before is None:
        judged.append(("the steps to it were not checked: that would take long", False))
    else:
        judged += _steps(answer, state, folder, start, "same" if is_alike else "other")
    return Replayed(*(tuple(plain_line(said) for said, bad in judged if bad is wanted) for wanted in (True, False)))


def _loss(answer: Mapping[str, Any], state: Mapping[str, Any], last: int, kind: str) -> Iterator[tuple[str, bool]]:
    """The validation loss of the weights, in evaluation mode, beside the one that the checkpoint has."""
    said, found = number(state.get("val_loss")), number(answer["val_loss"])
    if said is None:
        yield f"the validation loss of step {last} was not checked: none was taken there", False
    elif found is None or abs(found - said) > LOSS_APART[kind] * abs(said):
        yield f"the weights of step {last} have the validation loss {found}, and the run says {said}", True
    else:
        yield f"the validation loss of step {last} is {found:.6g} again", False


def _steps(
    answer: Mapping[str, Any], state: Mapping[str, Any], folder: RunFolder, start: Mapping[str, Any], kind: str
) -> Iterator[tuple[str, bool]]:
    """The steps that were taken again: to the bit on the same kind of processor, else as long as losses agree."""
    again, here = answer["again"], answer["kind"]
    span = f"steps {again['from']} to {answer['step']}"
    taken = {int(step): float(loss) for step, loss in again["losses"].items()}
    near = range(again["from"] + 1, again["from"] + FIRST_STEPS + 1)
    for step, losses in sorted(_told(folder, near).items()):
        if step in taken and all(abs(taken[step] - loss) > STEPS_APART[kind] * abs(loss) for loss in losses):
            yield f"step {step}, taken again, has loss {taken[step]:.6g}, and the run says {min(losses):.6g}", True
            return
    if again["equal"] and start.get("device") == "cuda" and answer["device"] == "cpu":
        yield f"the log says cuda, and a CPU gives the weights of {span} to the bit", True
    elif again["equal"]:
        yield f"{span} are the same to the bit", False
    elif state.get("kind") == here and state.get("processes") == 1 and answer["device"] == "cpu":
        yield f"{span} are not the same to the bit, on the same kind of processor ({here})", True
    else:
        first = f"the first {FIRST_STEPS} agree, " if taken else ""
        yield f"{span}: {first}the bits were not checked, since that was another kind of processor", False


def _told(folder: RunFolder, steps: range) -> dict[int, list[float]]:
    """The losses that the events have of these steps; one that was taken twice has two."""
    told: dict[int, list[float]] = {}
    for event in events_of(folder.events):
        if isinstance(event, Step) and event.step is not None and event.step in steps and event.loss is not None:
            told.setdefault(event.step, []).append(event.loss)
    return told


def _before(
    files: list[dict[str, Any]], told: Mapping[str, Any], recipe: Mapping[str, Any], parameters: int
) -> int | None:
    """From where the steps are taken again: the earliest that takes minutes, the seed's own weights if possible."""
    is_fresh = not told["asked"].get("continues") and not recipe["train"].get("init_from")
    kept = sorted({one["step"] for one in files if newest_whole([f for f in files if f["step"] == one["step"]])})
    last, each = kept[-1], 6 * parameters * int(recipe["train"]["batch_tokens"])
    possible = [0] * is_fresh + [step for step in kept if step < last]
    return next((step for step in possible if (last - step) * each <= MOST_FLOPS), None)


def _has_shards(data: Path) -> bool:
    """Whether all that data.json lists lies there as it says; a public shard was the machine's alone."""
    try:
        listed = json.loads(read_regular(data / "data.json"))
        shards = [one for part in ("train", "val") for one in listed[part]]
        return all(sha256_of(data / Path(str(one["name"])).name) == one["sha256"] for one in shards)
    except (OSError, ValueError, KeyError, TypeError):
        return False

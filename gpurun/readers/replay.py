"""Repeats parts of a run's training, with its trainer in a child process, and compares the results with its files.

On the same kind of processor the results must be identical bit by bit. Other processors compute sums in a different
order or precision, so only quantities are compared that were measured to agree anyway. docs/RECEIPTS.md has the
figures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.job_terms import terms_in
from gpurun.core.paths import RunFolder
from gpurun.core.trainer_events import StartEvent, StepEvent, events_of
from gpurun.core.untrusted import number, parse_object, plain_line, read_object
from gpurun.jobs.trainer import CHANGED
from gpurun.jobs.training.continued_training import newest_whole
from gpurun.ledger.audit import AuditRow
from gpurun.ledger.audit.findings import NO
from gpurun.ledger.log_facts import digest_file
from gpurun.readers.evidence.card import MOST_STATE_BYTES
from gpurun.readers.weights import HomeCheckpoint, ask_trainer
from gpurun.view.number_format import format_duration

LIMIT_S = 900.0
MOST_FLOPS = 2e13
"""The most seconds, and the most FLOPs, of repeated training: some minutes on two cores."""
START_S, STEP_S, CPU_FLOPS = 5.0, 0.01, 4e10
"""The expected time of a replay on two cores: seconds to start, seconds per step of the smallest model, FLOP/s."""
FIRST_STEPS = 20
"""The number of steps over which two kinds of processor agree before their results diverge."""
DRAWN = 3
"""The number of randomly chosen spans of a run that is too long to be repeated completely."""
LOSS_APART = {"same": 1e-5, "other": 5e-3}
STEPS_APART = {"same": 1e-3, "other": 1e-2}
"""The relative tolerance between a recomputed and a reported loss: if both are in fp32 on a CPU, and otherwise."""
_KINDS = ("weights", "optimizer", "state")


NOT_REPLAYED = "nothing"
LEAST_ALIKE = 0.5
"""The lowest plausible cosine between the changes of honest and of replayed weights (see docs/RECEIPTS.md)."""
SAMPLED_STEPS, SAMPLED_PARAMETERS = 300, 30_000
"""The longest training and the largest model for which that cosine was sampled. Above, a low cosine proves nothing."""


class Sort(StrEnum):
    """The kind of one line in a replay's result."""

    PROBLEM = "problem"
    CHECKED = "checked"
    UNCHECKED = "unchecked"


Said = tuple[Sort, str]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Replayed:
    """The result of a replay: the problems, what was checked, and what could not be checked, with the reason.

    Under --strict, what could not be checked counts as a problem. `extent` states how much of the training was
    repeated: "all", "3 spans" or "nothing".
    """

    problems: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    extent: str = NOT_REPLAYED

    @property
    def was_replayed(self) -> bool:
        """Return whether any step was repeated."""
        return self.extent != NOT_REPLAYED

    @classmethod
    def from_lines(cls, lines: Iterable[Said], extent: str) -> Replayed:
        """Return the result with these lines, grouped by kind."""
        said = [(sort, plain_line(text)) for sort, text in lines]
        by_sort = {sort: tuple(text for kind, text in said if kind is sort) for sort in Sort}
        return cls(by_sort[Sort.PROBLEM], by_sort[Sort.CHECKED], by_sort[Sort.UNCHECKED], extent)

    @classmethod
    def nothing(cls, why: str) -> Replayed:
        """Return the result of a replay that was not possible, with the reason."""
        return cls(unchecked=(plain_line(f"not checked: {why}"),))


def with_replay(row: AuditRow, replayed: Replayed | None, *, is_required: bool = False) -> AuditRow:
    """Return the row with a replay's problems added, and with a warning for each thing that could not be checked.

    If a replay `is_required`, it is a problem if nothing was recomputed. If `replayed` is None, return the row
    unchanged.
    """
    if replayed is None:
        return row
    none = ("nothing of its training was recomputed",) if is_required and not replayed.was_replayed else ()
    problems = (*replayed.problems, *none)
    verdict = NO if problems and not row.may_be_billing else row.verdict
    warnings = (*row.warnings, *replayed.unchecked)
    return replace(row, problems=(*row.problems, *problems), warnings=warnings, verdict=verdict)


def replay_run(
    folder: RunFolder,
    predicate: Mapping[str, Any],
    recipe: Mapping[str, Any],
    data: Path,
    say: Say,
    *,
    limit_s: float = LIMIT_S,
) -> Replayed:
    """Recompute the last checkpoint's loss, and repeat steps between downloaded checkpoints, within `limit_s` seconds.

    `predicate` is the receipt's, `recipe` is the plan's, and `data` is the folder of the shards. Before the
    computation, `say` is called with the number of steps and the estimated time.
    """
    if not terms_in(predicate).has_model:
        return Replayed.nothing("it ran a user's command")
    if predicate["asked"].get("trainer") == CHANGED:
        return Replayed.nothing("it was trained by a changed trainer, whose code is not run for this")
    listed = [file for file in predicate["checkpoint"]["files"] if file["kind"] in _KINDS]
    files = [file for file in listed if digest_file(folder.artifacts / file["name"])["sha256"] == file["sha256"]]
    last = newest_whole(files)
    if last is None or last != newest_whole(listed):
        return Replayed.nothing("the last checkpoint is not complete here")
    own = [file for file in files if file["step"] == last]
    if not _has_shards(data):
        return Replayed.nothing("the shards that it was trained on are not here")
    weights = folder.artifacts / next(file["name"] for file in own if file["kind"] == "weights")
    state = _read_state(folder, files, last)
    parameters = weights.stat().st_size // 4
    spans = _spans_to_repeat(files, predicate, recipe, parameters)
    words = [f"--again={first}:{until}" for first, until in spans]
    steps = sum(until - first for first, until in spans)
    expected_s = START_S + steps * (STEP_S + 6 * parameters * int(recipe["train"]["batch_tokens"]) / CPU_FLOPS)
    say(f"{steps:,} steps, about {format_duration(min(expected_s, limit_s))}")
    found = HomeCheckpoint(last, weights, data, dict(recipe))
    try:
        answer = parse_object(ask_trainer("trainer.replay", found, *words, limit_s=limit_s))
    except SetupError as error:
        return Replayed.nothing(error.what)
    except UsageError as error:
        return Replayed(problems=(f"step {last} cannot be recomputed: {error.what}",))
    start = predicate["training"]["start"]["event"] or {}
    lines = [*_compare_loss(answer, state, last, "same" if _is_alike(answer, start) else "other")]
    if last not in (until for _, until in spans):
        lines.append((Sort.UNCHECKED, "the steps to it were not checked, because that would take too long"))
    for again in answer["again"]:
        every = int(recipe["train"].get("log_every", 0))
        end_state = _read_state(folder, files, again["to"]) or state
        lines += _compare_steps(again, answer, folder, start, end_state, every, parameters)
    extent = "1 span" if len(spans) == 1 else f"{len(spans)} spans"
    if spans == [(0, last)]:
        extent = "all"
    return Replayed.from_lines(lines, extent if spans else NOT_REPLAYED)


def _compare_loss(answer: Mapping[str, Any], state: Mapping[str, Any], last: int, kind: str) -> Iterator[Said]:
    """Yield the result of comparing the recomputed validation loss of the weights with the checkpoint's."""
    stated, found = number(state.get("val_loss")), number(answer["val_loss"])
    if stated is None:
        yield Sort.UNCHECKED, f"the validation loss of step {last} was not checked: none was computed there"
    elif found is None or abs(found - stated) > LOSS_APART[kind] * abs(stated):
        yield Sort.PROBLEM, f"the weights of step {last} have the validation loss {found}, but the run says {stated}"
    else:
        yield Sort.CHECKED, f"the validation loss of step {last} was recomputed: {found:.6g}"


def _compare_steps(
    again: Mapping[str, Any],
    answer: Mapping[str, Any],
    folder: RunFolder,
    start: Mapping[str, Any],
    state: Mapping[str, Any],
    every: int,
    parameters: int,
) -> Iterator[Said]:
    """Yield the results of comparing a repeated span: bit by bit on the same kind of processor, else only its losses.

    `state` belongs to the checkpoint at the end of the span, or to the last checkpoint. Losses are reported every
    `every` steps. A run's own claims never turn a problem into a pass: if a claim prevents a check, that part counts as
    unchecked.
    """
    first, until, here = again["from"], again["to"], answer["kind"]
    span = f"steps {first} to {until}"
    taken = {int(step): float(loss) for step, loss in again["losses"].items()}
    events = _reported_losses(folder, range(first + 1, until + 1))
    reported = {step: losses for step, losses in events.items() if step in taken}
    apart = STEPS_APART["same" if _is_alike(answer, start) else "other"]
    early = {step: losses for step, losses in sorted(reported.items()) if step <= first + FIRST_STEPS}
    for step, losses in early.items():
        if all(abs(taken[step] - loss) > apart * abs(loss) for loss in losses):
            reported_loss = min(losses)
            yield (
                Sort.PROBLEM,
                f"step {step}, repeated, has loss {taken[step]:.6g}, but the run says {reported_loss:.6g}",
            )
            return
    agreed = f"{len(early)} of the losses of its first {FIRST_STEPS} steps were compared and agree"
    if not early:
        agreed = "no loss of its first steps was reported, so none was compared"
        due = range(first + 1, min(until, first + FIRST_STEPS) + 1)
        if any(step == 1 or (every and step % every == 0) for step in due):
            yield Sort.PROBLEM, f"{span}: {agreed}, although the trainer reports some"
    yield from _compare_movement(again, span, parameters)
    is_equal = again["equal"]
    if is_equal is None:  # If the span does not end at a checkpoint, only its losses can be compared.
        is_equal = bool(reported) and all(taken[step] in losses for step, losses in reported.items())
    is_same_kind = state.get("kind") == here and state.get("processes") == 1 and answer["device"] == "cpu"
    if is_equal and start.get("device") == "cuda" and answer["device"] == "cpu":
        yield Sort.PROBLEM, f"the log says cuda, but a CPU gives the same bits for {span}"
    elif is_equal:
        yield Sort.CHECKED, f"{span} are bit-identical"
    elif _resumed_in(folder, first, until):
        yield (
            Sort.UNCHECKED,
            f"{span}: {agreed}; the bits were not compared, because the run says that it was resumed there",
        )
    elif is_same_kind and (reported or again["equal"] is not None):
        yield Sort.PROBLEM, f"{span} are not bit-identical, on the same kind of processor ({here})"
    else:
        theirs = plain_line(str(state.get("kind") or "unknown"))[:80]
        yield (
            Sort.UNCHECKED,
            f"{span}: {agreed}; the bits were not compared: the run says that it ran on {theirs}, but this is {here}",
        )


def _compare_movement(again: Mapping[str, Any], span: str, parameters: int) -> Iterator[Said]:
    """Yield the cosine between the changes that the run and the replay made to the weights in a span.

    Below LEAST_ALIKE it is a problem, or unchecked if the run is larger or longer than the sample.
    """
    alike = number(again.get("alike"))
    if alike is None or again["equal"]:
        return
    words = f"over {span} its weights moved like the replayed ones with a cosine of {alike:.3f}"
    is_sampled = again["from"] == 0 and again["to"] <= SAMPLED_STEPS and parameters <= SAMPLED_PARAMETERS
    if alike >= LEAST_ALIKE:
        yield Sort.CHECKED, words
    elif is_sampled:
        yield Sort.PROBLEM, f"{words}; honest runs on other processors have at least {LEAST_ALIKE}"
    else:
        yield Sort.UNCHECKED, f"{words}; how low an honest run of this size and length can be was not measured"


def _is_alike(answer: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Return whether both computations used fp32 on a CPU."""
    return (answer["device"], start.get("device"), start.get("precision")) == ("cpu", "cpu", "fp32")


def _reported_losses(folder: RunFolder, steps: range) -> dict[int, list[float]]:
    """Return the reported losses by step. A step that was trained twice has two losses."""
    reported: dict[int, list[float]] = {}
    for event in events_of(folder.events):
        if isinstance(event, StepEvent) and event.step is not None and event.step in steps and event.loss is not None:
            reported.setdefault(event.step, []).append(event.loss)
    return reported


def _resumed_in(folder: RunFolder, first: int, until: int) -> bool:
    """Return whether a new process, on the same or another machine, resumed training between these two steps."""
    starts = (event.resumed_from for event in events_of(folder.events) if isinstance(event, StartEvent))
    return any(step is not None and first < step < until for step in starts)


def _read_state(folder: RunFolder, files: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return a checkpoint's state; {} if the file is missing or is not a JSON object."""
    for entry in files:
        if (entry["kind"], entry["step"]) == ("state", step):
            return read_object(folder.artifacts / entry["name"], MOST_STATE_BYTES)
    return {}


def _spans_to_repeat(
    files: list[dict[str, Any]], predicate: Mapping[str, Any], recipe: Mapping[str, Any], parameters: int
) -> list[tuple[int, int]]:
    """Return the spans of steps to repeat, which take minutes in total. They begin at the seed's weights if possible.

    For a short run these are all steps. For a longer run they are the steps that led to the last checkpoint, and
    randomly chosen spans between the kept checkpoints. Of a long span only the first few steps are repeated.
    """
    is_fresh = not predicate["asked"].get("continues") and not recipe["train"].get("init_from")
    steps = {file["step"] for file in files}
    kept = sorted(step for step in steps if newest_whole([file for file in files if file["step"] == step]))
    most = int(MOST_FLOPS / (6 * parameters * int(recipe["train"]["batch_tokens"])))
    ends = [*[0] * is_fresh, *kept]
    last = ends[-1]
    if last - ends[0] <= most:
        return [(ends[0], last)] if len(ends) > 1 else []
    begin = next((step for step in ends if 0 < last - step <= most // 2), last)
    spans = [(begin, last)] if begin < last else []
    left = most - (last - begin)
    between = [pair for pair in pairwise(ends) if pair[1] <= begin]
    for first, end in random.SystemRandom().sample(between, min(DRAWN, len(between))):
        until = end if end - first <= left else first + min(FIRST_STEPS, left)
        if until > first:
            spans.append((first, until))
        left -= until - first
    return sorted(spans)


def _has_shards(data: Path) -> bool:
    """Return whether all shards in data.json are present and intact. Public shards were only on the machine."""
    try:
        listed = read_object(data / "data.json")
        shards = [shard for part in ("train", "val") for shard in listed[part]]
        return all(digest_file(data / Path(str(shard["name"])).name)["sha256"] == shard["sha256"] for shard in shards)
    except (OSError, ValueError, KeyError, TypeError):
        return False

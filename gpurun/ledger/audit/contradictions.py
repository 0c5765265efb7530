"""Finds contradictions between the parts of a run's evidence: log, events, machine, plan, clocks and checkpoints.

Each contradiction is a problem in words. An honest run has none: differences that can have a good reason (a resumed
trainer, a set-up that changed torch, a file that lost its last lines) are not compared.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any

from gpurun.core.installed_files import cards, recipe_file
from gpurun.core.installed_files import recipe as schema
from gpurun.core.job_terms import terms_in
from gpurun.core.journal_events import Incident, LegPlanned, ReadyObserved, TrainIntended, TrainObserved
from gpurun.core.journal_records import Record, all_typed
from gpurun.core.paths import RunFolder
from gpurun.core.receipt_rules import stated_trainer
from gpurun.core.trainer_events import EvaluationEvent, StartEvent, StepEvent, events_of
from gpurun.core.untrusted import lines_of, plain_line, read_object, whole
from gpurun.ledger.audit.rentals import Passed, lines_with
from gpurun.ledger.audit.strict_lines import Json

MOST_STATE_BYTES = 16 << 20
CLOCK_SLACK_S, CLOCK_DRIFT = 60.0, 1.01
"""How much longer a training may take by the trainer's clock than by this computer's: seconds, and a factor.

Records are written a little later than the events, and clocks run at different speeds.
"""
_STEP_LINE = re.compile(r"step 0*(\d{1,9}) \| loss (\S+) \|.*")
_MAKERS = re.compile(r"(nvidia|geforce|quadro|tesla|rtx|gtx|amd|gpu|cuda|device|\s)*", re.IGNORECASE)
"""Matches names that consist only of makers, brands and general words, and so name no particular GPU."""
_BYTES = 4
"""The bytes of a parameter in a checkpoint: weights are saved in fp32 at every training precision."""
_FREE = {"micro_batch", "parallel"}
"""Keys in the table `train` of a recipe that the machine may have changed."""


MOST_STEPS = 1_000_000
"""The most steps that are kept in memory. No trainer takes more, because a checkpoint's name has six digits."""
MOST_RATES, MOST_STARTS = 1 << 16, 1000


class _Losses:
    """The losses that were reported for each step, in at most 17 bytes a step.

    Up to two different losses of a step are kept; if there are more, or one cannot be read, they count as unknown.
    """

    def __init__(self) -> None:
        self._one, self._other, self._is_open = array("d"), array("d"), bytearray()

    def add(self, step: int, loss: float | None) -> None:
        """Add a reported loss of a step; None is a loss that could not be read."""
        if not 0 <= step < MOST_STEPS:
            return
        if (missing := step + 1 - len(self._one)) > 0:
            self._one.extend([nan] * missing)
            self._other.extend([nan] * missing)
            self._is_open.extend(bytes(missing))
        if loss is None:
            self._is_open[step] = 1
        elif isnan(self._one[step]):
            self._one[step] = loss
        elif loss != self._one[step]:
            self._is_open[step] |= not isnan(self._other[step]) and loss != self._other[step]
            self._other[step] = loss

    @property
    def last(self) -> int:
        """Return the last step with a reported loss; 0 if there is none."""
        return max(0, len(self._one) - 1)

    def has(self, step: int) -> bool:
        """Return whether a loss of the step was reported, also one that counts as unknown."""
        return step < len(self._one) and (bool(self._is_open[step]) or not isnan(self._one[step]))

    def at_step(self, step: Any) -> set[float]:
        """Return the losses that were reported for a step; an empty set if there are none, or they count as unknown."""
        if type(step) is not int or not 0 <= step < len(self._one) or self._is_open[step]:
            return set()
        return {loss for loss in (self._one[step], self._other[step]) if not isnan(loss)}


class _Rates:
    """The reported speeds in tokens per second or, if there are too many, an even selection of them."""

    def __init__(self) -> None:
        self._kept, self._each, self._seen = array("d"), 1, 0

    def add(self, rate: float) -> None:
        """Add a reported speed."""
        if self._seen % self._each == 0:
            self._kept.append(rate)
        self._seen += 1
        if len(self._kept) == MOST_RATES:
            self._kept, self._each = self._kept[::2], 2 * self._each

    def median(self) -> float:
        """Return the median speed; 0 if none was reported."""
        return statistics.median(self._kept) if self._kept else 0.0


@dataclass
class _Events:
    """The content of a run's events that the checks need. Its size is limited, however many events there are."""

    starts: list[StartEvent] = field(default_factory=list)
    """The start events with different reports about GPU, torch, processes and parameters; at most MOST_STARTS."""
    losses: _Losses = field(default_factory=_Losses)
    val_losses: _Losses = field(default_factory=_Losses)
    rates: _Rates = field(default_factory=_Rates)
    run_s: float = 0.0
    """The seconds that all processes of the trainer together report to have run."""
    turned_back: bool = False
    quickest: float = 0.0
    """The highest tokens per second of any process, between its first and its last step."""

    def begin(self, start: StartEvent) -> None:
        """Add the start of a process of the trainer, unless an earlier one reported the same."""

        def known(process: StartEvent) -> tuple[object, ...]:
            return process.device, process.cuda_name, process.torch, process.world_size, process.parameters

        if len(self.starts) < MOST_STARTS and known(start) not in map(known, self.starts):
            self.starts.append(start)

    def span(self, tokens: int, seconds: float) -> None:
        """Add the tokens and seconds of a process between its first and its last step."""
        if tokens > 0:
            self.quickest = max(self.quickest, tokens / seconds if seconds > 0 else float("inf"))


def contradictions(
    folder: RunFolder, records: Sequence[Record], plan: Json, predicate: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the contradictions in a run's evidence, in words.

    `records` are those on which the receipt is based, `predicate` is the statement that they give today.
    """
    events = _read_events(folder)
    yield from _challenge_problems(predicate, plan)
    if not terms_in(predicate).has_model:  # A command may print anything, and no verdict rests on it.
        yield from _time_problems(events, records)
        return
    if predicate["training"]["device"] == "cuda":
        yield from _card_problems(events, predicate, records)
        yield from _speed_problems(events, plan, has_moved=bool(predicate.get("legs")))
    yield from _step_problems(events, records, predicate, plan)
    yield from _size_problems(events, predicate, plan)
    yield from _log_problems(folder, events)
    yield from _time_problems(events, records)
    for file in predicate["checkpoint"]["files"]:
        if file["kind"] == "state" and (state := _read_state(folder, file)):
            yield from _state_problems(state, events, plan, str(file["name"]))


def _read_events(folder: RunFolder) -> _Events:
    events = _Events()
    first: StepEvent | None = None
    last: StepEvent | None = None

    def end() -> None:
        if first and last and first.elapsed_s is not None and last.elapsed_s is not None:
            events.run_s += last.elapsed_s
            events.span((last.tokens or 0) - (first.tokens or 0), last.elapsed_s - first.elapsed_s)

    for event in events_of(folder.events):
        match event:
            case StartEvent():
                end()
                first = last = None
                events.begin(event)
            case StepEvent():
                before = last.elapsed_s if last else None
                events.turned_back |= before is not None and event.elapsed_s is not None and event.elapsed_s < before
                first, last = first or event, event
                if event.tokens_per_s:
                    events.rates.add(event.tokens_per_s)
                if event.step is not None:
                    events.losses.add(event.step, event.loss)
            case EvaluationEvent() if event.step is not None:
                events.val_losses.add(event.step, event.val_loss)
    end()
    return events


def _card_problems(events: _Events, predicate: Mapping[str, Any], records: Sequence[Record]) -> Iterator[str]:
    """Check the evidence for the GPU of a run that reports cuda; if it had several machines, any of their GPUs fits."""
    asked, machine = predicate["asked"], predicate["instance"]
    hello = ((machine or {}).get("facts") or {}).get("hello") or {}
    torch, gpus = hello.get("torch") or {}, hello.get("gpus") or ()
    versions = {version for version in (torch.get("version"), *(start.torch for start in events.starts)) if version}
    if built := sorted(version for version in versions if str(version).endswith("+cpu")):
        yield f"the log says cuda, but torch {plain_line(str(built[0]))} is built without it"
    if not all(start.cuda_name for start in events.starts):
        yield "the log says cuda, but names no card"
    if asked["form"] == "rehearsal" and asked["mode"] != "rehearsal":
        yield "the log says cuda, but the trained form is the one for machines without it"
    if "devices" in torch and not torch["devices"] and not gpus:
        yield "the log says cuda, but before the start the machine reported no GPU"
    known = {str(device.get("name")) for device in torch.get("devices") or ()}
    rented = [str(machine["gpu"])] if machine else []
    if legs := predicate.get("legs"):
        facts = [ready.facts.get("torch") or {} for ready in all_typed(records, ReadyObserved)]
        known = {str(device.get("name")) for card_facts in facts for device in card_facts.get("devices") or ()}
        rented += [str(leg["gpu"]) for leg in legs]
    for name in sorted({start.cuda_name for start in events.starts if start.cuda_name}):
        if _MAKERS.fullmatch(name):
            yield f"the log names {plain_line(name)!r} as its card, but no card has that name"
        if known and name not in known:
            yield f"the log names a {name}, but the machine reported {plain_line(', '.join(sorted(known)))}"
        is_reported = machine and "gpu" not in machine.get("as_ordered", ())
        if machine and is_reported and not any(_is_of_family(gpu, name) for gpu in rented):
            yield f"the log names a {name}, but the provider reported a {plain_line(str(machine['gpu']))}"


def _is_of_family(gpu: str, cuda_name: str) -> bool:
    """Return whether the model in a provider's name of a GPU (A100, 4090) is also in the name by CUDA."""
    words = [word for word in gpu.upper().replace("RTX", "RTX ").split() if re.search(r"\d", word)]
    spaced = cuda_name.upper().replace("RTX", "RTX ")
    return not words or bool(re.search(rf"(?<![0-9A-Z]){re.escape(words[0])}(?![0-9A-Z])", spaced))


def _speed_problems(events: _Events, plan: Json, *, has_moved: bool) -> Iterator[str]:
    """Check that the reported speed is not more than the GPUs can do by their data sheet.

    Only the multiplications by weights are counted. For a run on several machines, the fastest GPUs count.
    """
    peaks = [
        (start, cards.peak_tflops(start.cuda_name) if start.cuda_name else None)
        for start in (events.starts if has_moved else events.starts[:1])
    ]
    if not peaks or any(peak is None for _, peak in peaks) or (model := _parse_model(plan)) is None:
        return
    start, peak = max(peaks, key=lambda pair: (pair[1] or 0) * (pair[0].world_size or 1))
    assert peak is not None
    # Attention is not counted, because a kernel may skip half of its operations.
    flops = schema.flops_per_token(dataclasses.replace(model, context=1), int(plan["data"]["vocab_size"]))
    most = peak * 1e12 * (start.world_size or 1) / flops
    quickest = max(events.quickest, events.rates.median())
    if quickest > most:
        speed = "no time" if quickest == float("inf") else f"{quickest:,.0f} tokens a second"
        yield f"it reports {speed}, but {start.world_size or 1} x {start.cuda_name} can do {most:,.0f} of this model"


def has_own_keys(plan: Json) -> bool:
    """Return whether the model has keys that only its changed trainer knows; size and speed can then not be checked."""
    known = {key.name for key in dataclasses.fields(schema.ModelConfig)}
    return str(plan.get("trainer")).startswith("changed") and not plan["resolved"]["model"].keys() <= known


def _parse_model(plan: Json) -> schema.ModelConfig | None:
    """Return the plan's model; None if there is none, or if only a changed trainer knows its keys."""
    if "model" not in plan.get("resolved", ()) or has_own_keys(plan):
        return None
    model: schema.ModelConfig = schema.read_table(
        schema.ModelConfig, plan["resolved"]["model"], "model", is_whole=False
    )
    return model


def _challenge_problems(predicate: Mapping[str, Any], plan: Json) -> Iterator[str]:
    """Check that the seed follows from the challenge, and that the challenge names the signing key.

    The seed of a command is not checked: no evidence shows whether the command used it.
    """
    train, command = plan.get("resolved", {}).get("train", {}), plan.get("command")
    challenge = (command or train).get("challenge", "")
    if predicate["asked"].get("challenge", "") != challenge:
        yield "the run was not opened with the plan's challenge"
    seeds = (recipe_file.seed_of(challenge), recipe_file.seed_of(challenge, 32))
    if challenge and not command and train.get("seed") not in seeds:
        yield "its seed is not the one that its challenge gives"
    if challenge and challenge.rpartition(":")[2] != predicate["signing"]["keyid"]:
        yield "its challenge was given to another key than its receipt names"


def weaknesses(folder: RunFolder, plan: Json, predicate: Mapping[str, Any]) -> Iterator[str]:
    """Yield what cannot be checked in a run, although it may be honest, as warnings, which fail under `--strict`."""
    if has_own_keys(plan):
        yield "not checked: the size and speed of a model that only its changed trainer knows"
    train = plan.get("resolved", {}).get("train", {})
    if (challenge := train.get("challenge")) and train.get("seed") == recipe_file.seed_of(challenge, 32):
        yield "not checked: an older gpurun's seed has 32 bits, so a key that gives another run's seed can be found"
    first = next((event for event in events_of(folder.events) if isinstance(event, StartEvent)), None)
    if first is not None and first.resumed_from and not predicate["asked"].get("continues"):
        yield f"not checked: its events begin at the resumed step {first.resumed_from}; what came before is not shown"


def _step_problems(
    events: _Events, records: Sequence[Record], predicate: Mapping[str, Any], plan: Json
) -> Iterator[str]:
    """Check that the events have each step that the trainer always reports: the first, and every `log_every` steps.

    Steps after the last reported one count only for a run that is done, up to its last checkpoint, because lines may be
    lost with a machine. For the same reason, steps are left out that a lost machine trained after its last line at home
    and up to the checkpoint from which the run continued.
    """
    every = whole(plan.get("resolved", {}).get("train", {}).get("log_every"))
    if not every or not events.starts or not events.losses.last or stated_trainer(predicate).startswith("changed"):
        return  # Without any loss there is nothing to check here; a replay finds that the losses are missing.
    begun = events.starts[0].resumed_from or 0
    is_whole = predicate["training"]["outcome"] == "done" and not any(
        incident.code == "log.left" for incident in all_typed(records, Incident)
    )
    saved = [whole(file.get("step")) or 0 for file in predicate["checkpoint"]["files"] if is_whole]
    last = min(max([events.losses.last, *saved]), MOST_STEPS - 1)
    due = [1] * (begun == 0 and last > 0) + [
        step for step in range(begun + 1, last + 1) if step > 1 and step % every == 0
    ]
    legs = list(all_typed(records, LegPlanned))
    due = [step for step in due if not any(leg.reached < step <= leg.step for leg in legs)]
    if missing := [step for step in due if not events.losses.has(step)]:
        more = f", nor of {len(missing) - 1:,} others" if len(missing) > 1 else ""
        yield f"the events have no loss of step {missing[0]}{more}, which the trainer reports"


def _size_problems(events: _Events, predicate: Mapping[str, Any], plan: Json) -> Iterator[str]:
    """Check that the reported parameters and the downloaded weights have the size that follows from the recipe."""
    counts = {start.parameters for start in events.starts if start.parameters is not None}
    if not counts or (model := _parse_model(plan)) is None:
        return
    expected = schema.parameters_of(model, int(plan["data"]["vocab_size"]))
    for count in sorted(counts - {expected}):
        yield f"the events report {count:,} parameters, but the recipe's model has {expected:,}"
    for file in predicate["checkpoint"]["files"]:
        if file["kind"] == "weights" and file["bytes"] < _BYTES * expected:
            yield f"{file['name']} has {file['bytes']:,} bytes, but {expected:,} parameters take {_BYTES * expected:,}"


def _log_problems(folder: RunFolder, events: _Events) -> Iterator[str]:
    """Check that the losses in the log are those in the events."""
    for text in lines_of(folder.log):
        found = _STEP_LINE.fullmatch(text)
        known = events.losses.at_step(int(found[1])) if found else set()
        if found and known and found[2] not in {f"{loss:.4f}" for loss in known}:
            yield f"the log's loss of step {found[1]} ({plain_line(found[2])}) is not the one in the events"
            return


def _time_problems(events: _Events, records: Sequence[Record]) -> Iterator[str]:
    """Check that the trainer's seconds do not exceed those that passed on this computer."""
    if events.turned_back:
        yield "the events' own time runs backwards"
    begun, ended = lines_with(records, TrainIntended), lines_with(records, TrainObserved)
    if len(begun) == len(ended) == 1:
        passed_s = float(Passed(records).between(begun[0][0], ended[0][0]))
        if events.run_s > CLOCK_DRIFT * passed_s + CLOCK_SLACK_S:
            yield f"the trainer reports {events.run_s:.0f} s, but {passed_s:.0f} s passed here"


def _read_state(folder: RunFolder, file: Mapping[str, Any]) -> Json:
    """Return the content of a checkpoint's state file; {} if the file is missing or not a JSON object."""
    try:
        return read_object(folder.artifacts / str(file["name"]), MOST_STATE_BYTES)
    except (OSError, ValueError):
        return {}


def _state_problems(state: Json, events: _Events, plan: Json, name: str) -> Iterator[str]:
    """Check that the state of a checkpoint fits this run: its losses, its torch version and its recipe."""
    step = state.get("step")
    for key, losses in (("loss", events.losses), ("val_loss", events.val_losses)):
        known, own = losses.at_step(step), state.get(key)
        if known and own is not None and own not in known:
            shown = ", ".join(sorted(f"{loss:.6g}" for loss in known))
            yield f"{name} has {key} {plain_line(str(own))} of step {step}, but the events have {shown}"
    torches = {start.torch for start in events.starts}
    if "torch" in state and torches and None not in torches and plain_line(str(state["torch"])) not in torches:
        yield f"{name} was written by another torch than the log's"
    before, planned = state.get("recipe"), plan.get("resolved")
    if isinstance(before, dict) and isinstance(planned, dict):
        unlike = list(_find_unlike_keys(recipe_file.completed(planned), recipe_file.completed(before)))
        if unlike:
            yield f"{name} was trained by another recipe: {', '.join(unlike[:4])}"


def _find_unlike_keys(planned: Json, trained: Json) -> Iterator[str]:
    """Yield the keys with different values that influence the weights and that the machine must not change."""
    for table in ("model", "data", "optim", "schedule", "train"):
        for key, value in planned.get(table, {}).items():
            if key not in _FREE and trained.get(table, {}).get(key) != value:
                yield f"{table}.{key}"

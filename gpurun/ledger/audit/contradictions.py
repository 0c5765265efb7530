"""What a run's own evidence cannot say at once: its log, events, machine, plan, clocks and checkpoints, side by side.

Each yield is a problem in a sentence. An honest run gives none: what may differ for a good reason (a resumed trainer,
a set-up that changed torch, a file of which the last lines were lost) is not compared.
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
from gpurun.core.journal_events import Incident, ReadyObserved, TrainIntended, TrainObserved
from gpurun.core.journal_records import Record, all_typed
from gpurun.core.paths import RunFolder
from gpurun.core.receipt_rules import trainer_told
from gpurun.core.trainer_events import EvaluationEvent, StartEvent, StepEvent, events_of
from gpurun.core.untrusted import lines_of, plain_line, read_object, whole
from gpurun.ledger.audit.rentals import Passed, lines_with
from gpurun.ledger.audit.strict_lines import Json

MOST_STATE_BYTES = 16 << 20
CLOCK_SLACK_S, CLOCK_DRIFT = 60.0, 1.01
"""What a trainer may count more than this computer did: records are written a little later, and no two clocks agree."""
_STEP_LINE = re.compile(r"step 0*(\d{1,9}) \| loss (\S+) \|.*")
_MAKERS = re.compile(r"(nvidia|geforce|quadro|tesla|rtx|gtx|amd|gpu|cuda|device|\s)*", re.IGNORECASE)
"""What stands around the name of a card, and is none by itself."""
_BYTES = 4
"""Of a parameter in a checkpoint: weights are kept in fp32 at every precision."""
_FREE = {"micro_batch", "parallel"}
"""Keys of `train` that the machine may have chosen for itself."""


MOST_STEPS = 1_000_000
"""A checkpoint's name has six digits: no trainer takes more steps, and what is kept of them has an end."""
MOST_RATES, MOST_STARTS = 1 << 16, 1000


class _Losses:
    """What was said of each step, 17 bytes a step at most: one loss or two. Of a step with more nothing is known."""

    def __init__(self) -> None:
        self._one, self._other, self._is_open = array("d"), array("d"), bytearray()

    def add(self, step: int, loss: float | None) -> None:
        """Note a loss of a step; None is one that could not be read."""
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
        """The last step of which something was said; 0 where nothing was."""
        return max(0, len(self._one) - 1)

    def has(self, step: int) -> bool:
        """Whether something was said of a step."""
        return step < len(self._one) and (bool(self._is_open[step]) or not isnan(self._one[step]))

    def of(self, step: Any) -> set[float]:
        """Return the losses of a step, all of them; none where they are not known."""
        if type(step) is not int or not 0 <= step < len(self._one) or self._is_open[step]:
            return set()
        return {loss for loss in (self._one[step], self._other[step]) if not isnan(loss)}


class _Rates:
    """The speeds that were told, or so many of them, evenly spread."""

    def __init__(self) -> None:
        self._kept, self._each, self._seen = array("d"), 1, 0

    def add(self, rate: float) -> None:
        """Note a speed."""
        if self._seen % self._each == 0:
            self._kept.append(rate)
        self._seen += 1
        if len(self._kept) == MOST_RATES:
            self._kept, self._each = self._kept[::2], 2 * self._each

    def median(self) -> float:
        """Return the speed in the middle; 0 where none was told."""
        return statistics.median(self._kept) if self._kept else 0.0


@dataclass
class _Said:
    """One pass over the events; what it keeps has an end, however many they are."""

    starts: list[StartEvent] = field(default_factory=list)
    """The processes that say something new of what they run on, the first ones."""
    losses: _Losses = field(default_factory=_Losses)
    val_losses: _Losses = field(default_factory=_Losses)
    rates: _Rates = field(default_factory=_Rates)
    run_s: float = 0.0
    """What its processes say that they have run, all together."""
    turned_back: bool = False
    quickest: float = 0.0
    """Tokens a second between the first and the last step of a process, the most of any."""

    def begin(self, start: StartEvent) -> None:
        """Note a process."""

        def known(one: StartEvent) -> tuple[object, ...]:
            return one.device, one.cuda_name, one.torch, one.world_size, one.parameters

        if len(self.starts) < MOST_STARTS and known(start) not in map(known, self.starts):
            self.starts.append(start)

    def span(self, tokens: int, seconds: float) -> None:
        """Note how long a process took from its first step to its last."""
        if tokens > 0:
            self.quickest = max(self.quickest, tokens / seconds if seconds > 0 else float("inf"))


def contradictions(folder: RunFolder, records: Sequence[Record], plan: Json, told: Mapping[str, Any]) -> Iterator[str]:
    """What contradicts itself in a run whose receipt states `told`, by the records that it rests on."""
    said = _listen(folder)
    yield from _challenge_problems(told, plan)
    if not terms_in(told).has_model:  # What a command prints is its own affair, and no verdict rests on it.
        yield from _time_problems(said, records)
        return
    if told["training"]["device"] == "cuda":
        yield from _card_problems(said, told, records)
        yield from _speed_problems(said, plan, has_moved=bool(told.get("legs")))
    yield from _step_problems(said, records, told, plan)
    yield from _size_problems(said, told, plan)
    yield from _log_problems(folder, said)
    yield from _time_problems(said, records)
    for file in told["checkpoint"]["files"]:
        if file["kind"] == "state" and (state := _state(folder, file)):
            yield from _state_problems(state, said, plan, str(file["name"]))


def _listen(folder: RunFolder) -> _Said:
    said = _Said()
    first: StepEvent | None = None
    last: StepEvent | None = None

    def end() -> None:
        if first and last and first.elapsed_s is not None and last.elapsed_s is not None:
            said.run_s += last.elapsed_s
            said.span((last.tokens or 0) - (first.tokens or 0), last.elapsed_s - first.elapsed_s)

    for event in events_of(folder.events):
        match event:
            case StartEvent():
                end()
                first = last = None
                said.begin(event)
            case StepEvent():
                before = last.elapsed_s if last else None
                said.turned_back |= before is not None and event.elapsed_s is not None and event.elapsed_s < before
                first, last = first or event, event
                if event.tokens_per_s:
                    said.rates.add(event.tokens_per_s)
                if event.step is not None:
                    said.losses.add(event.step, event.loss)
            case EvaluationEvent() if event.step is not None:
                said.val_losses.add(event.step, event.val_loss)
    end()
    return said


def _card_problems(said: _Said, told: Mapping[str, Any], records: Sequence[Record]) -> Iterator[str]:
    """Whether a run that says cuda can have had a card: one of its machines', where it was on several."""
    asked, machine = told["asked"], told["instance"]
    hello = ((machine or {}).get("facts") or {}).get("hello") or {}
    torch, gpus = hello.get("torch") or {}, hello.get("gpus") or ()
    versions = {version for version in (torch.get("version"), *(one.torch for one in said.starts)) if version}
    if built := sorted(version for version in versions if str(version).endswith("+cpu")):
        yield f"the log says cuda, and torch {plain_line(str(built[0]))} is built without it"
    if not all(one.cuda_name for one in said.starts):
        yield "the log says cuda, and names no card"
    if asked["form"] == "rehearsal" and asked["mode"] != "rehearsal":
        yield "the log says cuda, and the form that was trained is the one for machines without it"
    if "devices" in torch and not torch["devices"] and not gpus:
        yield "the log says cuda, and before it began the machine told of no GPU"
    known = {str(one.get("name")) for one in torch.get("devices") or ()}
    rented = [str(machine["gpu"])] if machine else []
    if legs := told.get("legs"):
        facts = [one.facts.get("torch") or {} for one in all_typed(records, ReadyObserved)]
        known = {str(one.get("name")) for told_torch in facts for one in told_torch.get("devices") or ()}
        rented += [str(leg["gpu"]) for leg in legs]
    for name in sorted({one.cuda_name for one in said.starts if one.cuda_name}):
        if _MAKERS.fullmatch(name):
            yield f"the log names {plain_line(name)!r} as its card, and that is the name of none"
        if known and name not in known:
            yield f"the log names a {name}, and the machine told of {plain_line(', '.join(sorted(known)))}"
        is_told = machine and "gpu" not in machine.get("as_ordered", ())
        if machine and is_told and not any(_is_of_family(gpu, name) for gpu in rented):
            yield f"the log names a {name}, and the provider told of a {plain_line(str(machine['gpu']))}"


def _is_of_family(gpu: str, cuda_name: str) -> bool:
    """Whether the word that names a provider's card (A100, 4090) is in the name that CUDA gives it."""
    words = [word for word in gpu.upper().replace("RTX", "RTX ").split() if re.search(r"\d", word)]
    spaced = cuda_name.upper().replace("RTX", "RTX ")
    return not words or bool(re.search(rf"(?<![0-9A-Z]){re.escape(words[0])}(?![0-9A-Z])", spaced))


def _speed_problems(said: _Said, plan: Json, *, has_moved: bool) -> Iterator[str]:
    """Whether the cards can have been so quick: the multiplications of the weights alone, against their data sheet.

    Of a run that was on several machines the quickest of their cards counts.
    """
    peaks = [
        (one, cards.peak_tflops(one.cuda_name) if one.cuda_name else None)
        for one in (said.starts if has_moved else said.starts[:1])
    ]
    if not peaks or any(peak is None for _, peak in peaks) or (model := _model_of(plan)) is None:
        return
    start, peak = max(peaks, key=lambda one: (one[1] or 0) * (one[0].world_size or 1))
    assert peak is not None
    # Without what attention costs: a kernel may leave half of that out.
    flops = schema.flops_per_token(dataclasses.replace(model, context=1), int(plan["data"]["vocab_size"]))
    most = peak * 1e12 * (start.world_size or 1) / flops
    quickest = max(said.quickest, said.rates.median())
    if quickest > most:
        speed = "no time" if quickest == float("inf") else f"{quickest:,.0f} tokens a second"
        yield f"it says {speed}, and {start.world_size or 1} x {start.cuda_name} can do {most:,.0f} of this model"


def has_own_keys(plan: Json) -> bool:
    """Whether the model has keys that only its changed trainer knows: then its size and speed are not checked."""
    known = {key.name for key in dataclasses.fields(schema.ModelConfig)}
    return str(plan.get("trainer")).startswith("changed") and not plan["resolved"]["model"].keys() <= known


def _model_of(plan: Json) -> schema.ModelConfig | None:
    """The plan's model; None where there is none whose weights anybody here can count."""
    if "model" not in plan.get("resolved", ()) or has_own_keys(plan):
        return None
    model: schema.ModelConfig = schema.read_table(
        schema.ModelConfig, plan["resolved"]["model"], "model", is_whole=False
    )
    return model


def _challenge_problems(told: Mapping[str, Any], plan: Json) -> Iterator[str]:
    """Whether the seed follows from the challenge, and the challenge was for the key that signed.

    A command is handed its seed, and no evidence says what it does with it.
    """
    train, command = plan.get("resolved", {}).get("train", {}), plan.get("command")
    challenge = (command or train).get("challenge", "")
    if told["asked"].get("challenge", "") != challenge:
        yield "the run was not opened with the plan's challenge"
    seeds = (recipe_file.seed_of(challenge), recipe_file.seed_of(challenge, 32))
    if challenge and not command and train.get("seed") not in seeds:
        yield "its seed is not the one that its challenge gives"
    if challenge and challenge.rpartition(":")[2] != told["signing"]["keyid"]:
        yield "its challenge was given to another key than the one that its receipt names"


def weaknesses(folder: RunFolder, plan: Json, told: Mapping[str, Any]) -> Iterator[str]:
    """What makes a run that contradicts nothing say less than others: each is a warning, which `--strict` counts."""
    if has_own_keys(plan):
        yield "not checked: the size and speed of a model that only its changed trainer knows"
    train = plan.get("resolved", {}).get("train", {})
    if (challenge := train.get("challenge")) and train.get("seed") == recipe_file.seed_of(challenge, 32):
        yield "not checked: the seed of an older gpurun has 32 bits, and a key can be searched that gives another's"
    first = next((event for event in events_of(folder.events) if isinstance(event, StartEvent)), None)
    if first is not None and first.resumed_from and not told["asked"].get("continues"):
        yield f"not checked: its events begin at step {first.resumed_from}, resumed, and nothing shows what came before"


def _step_problems(said: _Said, records: Sequence[Record], told: Mapping[str, Any], plan: Json) -> Iterator[str]:
    """Whether the events have each step that the trainer tells: the first, every `log_every` and the last one.

    After the last step that is told, lines may be lost with a machine; of a run that ended well none is.
    """
    every = whole(plan.get("resolved", {}).get("train", {}).get("log_every"))
    if not every or not said.starts or not said.losses.last or trainer_told(told).startswith("changed"):
        return  # Of a run that tells no loss at all nothing is claimed that steps would show; a replay finds that.
    begun = said.starts[0].resumed_from or 0
    is_whole = told["training"]["outcome"] == "done" and not any(
        one.code == "log.left" for one in all_typed(records, Incident)
    )
    saved = [whole(one.get("step")) or 0 for one in told["checkpoint"]["files"] if is_whole]
    last = min(max([said.losses.last, *saved]), MOST_STEPS - 1)
    due = [1] * (begun == 0 and last > 0) + [
        step for step in range(begun + 1, last + 1) if step > 1 and step % every == 0
    ]
    if missing := [step for step in due if not said.losses.has(step)]:
        more = f", nor of {len(missing) - 1:,} others" if len(missing) > 1 else ""
        yield f"the events have no loss of step {missing[0]}{more}, and the trainer tells it"


def _size_problems(said: _Said, told: Mapping[str, Any], plan: Json) -> Iterator[str]:
    """Whether the model that was trained, and the weights that came home, are as large as the recipe makes them."""
    counts = {one.parameters for one in said.starts if one.parameters is not None}
    if not counts or (model := _model_of(plan)) is None:
        return
    wanted = schema.parameters_of(model, int(plan["data"]["vocab_size"]))
    for count in sorted(counts - {wanted}):
        yield f"the events tell of {count:,} parameters, and the recipe's model has {wanted:,}"
    for file in told["checkpoint"]["files"]:
        if file["kind"] == "weights" and file["bytes"] < _BYTES * wanted:
            yield f"{file['name']} has {file['bytes']:,} bytes, and {wanted:,} parameters take {_BYTES * wanted:,}"


def _log_problems(folder: RunFolder, said: _Said) -> Iterator[str]:
    """Whether the log tells the losses that the events tell."""
    for text in lines_of(folder.log):
        found = _STEP_LINE.fullmatch(text)
        known = said.losses.of(int(found[1])) if found else set()
        if found and known and found[2] not in {f"{loss:.4f}" for loss in known}:
            yield f"the log's loss of step {found[1]} ({plain_line(found[2])}) is not the one of the events"
            return


def _time_problems(said: _Said, records: Sequence[Record]) -> Iterator[str]:
    """Whether the trainer's own seconds go into those that passed here."""
    if said.turned_back:
        yield "the events' own time runs back"
    begun, ended = lines_with(records, TrainIntended), lines_with(records, TrainObserved)
    if len(begun) == len(ended) == 1:
        passed_s = float(Passed(records).between(begun[0][0], ended[0][0]))
        if said.run_s > CLOCK_DRIFT * passed_s + CLOCK_SLACK_S:
            yield f"the trainer says that it ran {said.run_s:.0f} s, and {passed_s:.0f} s passed here"


def _state(folder: RunFolder, file: Mapping[str, Any]) -> Json:
    """A checkpoint's own word about itself; empty where it is not here, or no object."""
    try:
        return read_object(folder.artifacts / str(file["name"]), MOST_STATE_BYTES)
    except (OSError, ValueError):
        return {}


def _state_problems(state: Json, said: _Said, plan: Json, name: str) -> Iterator[str]:
    """Whether a checkpoint is of this run: its losses, its torch, and the recipe that it was trained by."""
    step = state.get("step")
    for key, losses in (("loss", said.losses), ("val_loss", said.val_losses)):
        known, own = losses.of(step), state.get(key)
        if known and own is not None and own not in known:
            shown = ", ".join(sorted(f"{loss:.6g}" for loss in known))
            yield f"{name} says {key} {plain_line(str(own))} of step {step}, and the events say {shown}"
    torches = {one.torch for one in said.starts}
    if "torch" in state and torches and None not in torches and plain_line(str(state["torch"])) not in torches:
        yield f"{name} was written by another torch than the log's"
    before, planned = state.get("recipe"), plan.get("resolved")
    if isinstance(before, dict) and isinstance(planned, dict):
        unlike = list(_unlike(recipe_file.completed(planned), recipe_file.completed(before)))
        if unlike:
            yield f"{name} was trained by another recipe: {', '.join(unlike[:4])}"


def _unlike(planned: Json, trained: Json) -> Iterator[str]:
    """The keys by which weights come out otherwise, and which the machine does not choose."""
    for table in ("model", "data", "optim", "schedule", "train"):
        for key, value in planned.get(table, {}).items():
            if key not in _FREE and trained.get(table, {}).get(key) != value:
                yield f"{table}.{key}"

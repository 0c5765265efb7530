"""Wait until the instance is ready for training: running, the only one, set up, and what was agreed to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from math import ceil, inf
from typing import TypeVar

from gpurun.core.clock import ticks
from gpurun.core.errors import GpurunError, NoOffer, SetupError
from gpurun.core.installed_files import bundle_root
from gpurun.core.journal_events import CreateObserved, Incident, Json, ReadyObserved, SeenMachine
from gpurun.core.journal_records import RunState
from gpurun.core.places import place_facts
from gpurun.core.records import Instance, InstanceState
from gpurun.core.run_plan import Mode
from gpurun.core.transfer_progress import Tell, moving
from gpurun.lifecycle.context import PASSING, Context, Note, by_our_clock, get_instance
from gpurun.lifecycle.instance.absence import Absence, next_offer
from gpurun.lifecycle.instance.early_upload import EarlyUpload, queue_words
from gpurun.lifecycle.instance.readings import GoneRow, living
from gpurun.lifecycle.instance.setup_script import set_up
from gpurun.lifecycle.machine_owner import refuse_beside_copy
from gpurun.planning.verify_machine import (
    check_box,
    check_imports,
    check_made,
    check_nodes,
    is_reported_otherwise,
    login_warnings,
    not_passed,
    on_record,
)
from gpurun.providers.base import ExplainsJobs, Rejected, Unknown, clock_warning
from gpurun.providers.catalog import terms_of
from gpurun.remote.client import LOOK_S, NODES_SILENT, FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.machine_facts import LinkSpeed, MachineFacts, Missing
from gpurun.remote.ssh import HostKeyMismatch

T = TypeVar("T")
LEAST_TRAINING = 0.1
"""The least share of the training limit that must be left when a machine comes up; less is not worth its rental."""
NEVER_WALL = 1e11
READ_BACK_S, READ_AGAIN_S = 20.0, 2.0
# Between CPUs the measurement only proves that all nodes can reach one another.
MEASURE_S, MEASURE_CPU_S = 20.0, 1.0
_OTHER_IMAGE = "Choose an image with Python 3.8 or newer: --image."
_OTHER_PYTHON = "Install Python 3.8 or newer there, or name it: --python PATH."


def await_ready(state: RunState, context: Context) -> Iterator[Note]:
    """Wait until the instance runs, is the only one, is set up and has reported its facts; else it is given up.

    The user's script starts once the agent is installed, outside of everything that is retried.
    """
    born = get_instance(state)
    early = EarlyUpload(state, context) if context.plan.lease.queue_s else None
    check_made(born, context.plan)
    clock, to_set_up_s, took_s = context.clock, _planned_s(context), 0.0
    started = clock.monotonic()

    def install(far: FarSide, instance: Instance) -> tuple[FarSide, int | None, MachineFacts | None]:
        far.install_agent()
        armed = _timer_read_back(far, instance, context)
        return far, armed, None if to_set_up_s else _looked(far, state, context)

    up = yield from _answered(install, state, context, to_set_up_s, early)
    if up is None:
        return
    instance, up_mono, (far, armed, facts) = up
    if isinstance(context.provider, ExplainsJobs):
        _keep_setup_log(context.provider, instance, context)
    if facts is None:
        took_s = set_up(far, state, context, to_set_up_s)
        again = yield from _answered(lambda far, _: _looked(far, state, context), state, context, 0.0)
        if again is None:
            return
        instance, _, facts = again
    missing = yield from _answered(partial(_missing, context), state, context, 0.0)
    if missing is None:
        return
    network: LinkSpeed | None = None
    if context.plan.offer.nodes > 1 and facts.torch.found:  # A command may need no torch; then nothing is measured.
        joined = yield from _answered(partial(_joined, facts, context), state, context, 0.0)
        if joined is None:
            return
        instance, _, network = joined
    if context.plan.offer.rate_micros_per_hour:
        # A list may lag, so that the look before the create did not show the machine of a copy of this home yet.
        with suppress(Unknown, Rejected, SetupError):
            refuse_beside_copy(context.provider, state, context, "This machine was ended.")
    now_mono, choices = clock.monotonic(), context.plan.choices
    more: Json = {"setup_s": round(took_s, 3)} if took_s else {}
    more |= {"sent_bytes": early.sent_bytes} if early is not None and early.sent_bytes else {}
    more |= {"network": network.model_dump(mode="json")} if network else {}
    more |= {"not_passed": others} if (others := not_passed(facts.exported, choices.pass_env)) else {}
    yield ReadyObserved(
        id=born.id,
        instance=SeenMachine.of(instance),
        facts=on_record(facts),
        seconds=round(now_mono - started, 3),
        connect_s=round(now_mono - up_mono - took_s, 3),
        armed=armed,
        **more,
    )
    yield from _judged(facts, missing[2], context)
    if network is not None:
        check_nodes(network, facts, context.plan.offer, context.plan.choices)


def _keep_setup_log(provider: ExplainsJobs, instance: Instance, context: Context) -> None:
    """Keep the output of the job's own set-up; a failure to fetch it must not end a machine that is paid for."""
    with suppress(Unknown, OSError, GpurunError):
        if words := provider.setup_log(instance):
            context.folder.table_setup_log.write_bytes(words)


def _looked(far: FarSide, state: RunState, context: Context) -> MachineFacts:
    """Return the machine's facts. Meanwhile the view shows which Pythons it waits for, and a stop ends the wait."""
    with moving(context.folder, context.clock, "look", LOOK_S) as tell:

        def on_wait(seconds: int, words: str) -> None:
            context.raise_if_stopped(state)
            tell(seconds, words)

        return far.hello(on_wait=on_wait)


def _missing(context: Context, far: FarSide, _: Instance) -> Missing:
    """Return which modules of the command the Python there lacks; a run on this computer shows that itself."""
    job = context.plan.job
    if not job.imports or context.plan.mode is not Mode.PAID:
        return Missing(python="", missing=())
    return far.missing_imports(job.imports, job.env.get("PYTHONPATH", ""))


def _joined(facts: MachineFacts, context: Context, far: FarSide, _: Instance) -> LinkSpeed:
    """Return what each node of a job reports, and the speed between them; NoOffer if not all of them answered."""
    seconds = MEASURE_S if facts.torch.devices else MEASURE_CPU_S
    program = (bundle_root() / "trainer" / "network.py").read_bytes()
    python = facts.torch.python or "python3"
    try:
        return far.measure(program, context.plan.offer.processes_per_node, seconds, python)
    except FarRefusal as refusal:
        if refusal.reason != NODES_SILENT:
            raise
        hint = "Try again; if the nodes have several networks, name one in the cluster's `setup`: docs/SLURM.md."
        raise NoOffer("nodes.silent", f"{refusal.what.rstrip('.')}.", hint=hint) from refusal


def _answered(
    ask: Callable[[FarSide, Instance], T],
    state: RunState,
    context: Context,
    to_set_up_s: float,
    early: EarlyUpload | None = None,
) -> Generator[Note, None, tuple[Instance, float, T] | None]:
    """Return the instance once it answers, since when it was seen running, and the reply; NoOffer after the patience.

    None if it turns out to be other than agreed, or is gone and the next offer is taken: that is on record then. The
    provider's words are shown during the wait.
    """
    patience_s = _patience_s(state, context, to_set_up_s)
    with moving(context.folder, context.clock, "boot", ceil(max(1.0, patience_s))) as tell:
        return (yield from _once_it_answers(ask, state, context, patience_s, early, tell))


def _once_it_answers(
    ask: Callable[[FarSide, Instance], T],
    state: RunState,
    context: Context,
    patience_s: float,
    early: EarlyUpload | None,
    tell: Tell,
) -> Generator[Note, None, tuple[Instance, float, T] | None]:
    """See `_answered`."""
    born, absence = get_instance(state), Absence()
    instance, up_mono, last, started = born, None, "it never answered", context.clock.monotonic()
    row, stopped_mono = GoneRow(context.clock), inf
    boot_s = _boot_patience_s(context) if context.plan.lease.queue_s else inf  # Once it runs, it has left the queue.
    traits = context.provider.traits
    for waited_s in ticks(context.clock, traits.poll_s, max(0.0, patience_s) + traits.settle_s):
        up_s = context.clock.monotonic() - up_mono if up_mono is not None else 0.0
        is_doubted = absence.since_mono is not None  # Shown as gone: until that is believed, or it shows up again.
        is_late = waited_s > max(0.0, patience_s) or not _is_worth_waiting(instance, waited_s, context)
        is_stopped = context.clock.monotonic() - stopped_mono >= traits.settle_s  # Taken back, or never started.
        if (is_late and not is_doubted) or up_s > boot_s or is_stopped:
            break
        context.raise_if_stopped(state)
        try:
            instance = row.read(context.provider, born.id)
            is_down = instance.state is InstanceState.STOPPED and not context.plan.lease.queue_s
            stopped_mono = min(stopped_mono, context.clock.monotonic()) if is_down else inf
            if is_reported_otherwise(instance, born, context.plan):
                # Record it first: the receipt counts what was reported, and the next look at the journal refuses it.
                yield CreateObserved(token=state.token, instance=SeenMachine.of(instance), adopted=False)
                return None
            if isinstance(context.provider, ExplainsJobs) and (why := context.provider.never_runs(instance)):
                _keep_setup_log(context.provider, instance, context)
                raise why
            if early is not None:
                yield from early.send(instance)
            is_up = _is_up(instance, state.token)
            # Nothing is sent until a current list shows no second machine of the same create.
            listed = living(context.provider.find(state.token), state.token) if is_up else []
            extras = [machine for machine in listed if machine.id != born.id]
            if is_up and not extras:
                up_mono = up_mono or context.clock.monotonic()
                return instance, up_mono, ask(context.reach(by_our_clock(instance, state)), instance)
            said = queue_words(context.provider, instance)
            said = said or f"{context.provider.name} says {instance.said or instance.state}"
            if instance.state is InstanceState.RUNNING and instance.address is None:
                said += ", and gives it no public address to log in to"
            last = f"{len(extras)} more machines carry its token" if extras else said
            if not context.plan.lease.queue_s and absence.is_believed(instance, state, context):
                yield from row.notes(context.provider, born.id)
                yield from next_offer(born, absence, state, context)
                return None
        except FarRefusal as refusal:
            last = _passing(refusal, is_own=context.plan.box is not None)
        except HostKeyMismatch:  # It was never reached, so there is nothing to wait for or to save.
            raise
        except Rejected as error:  # A final refusal: waiting will not change it.
            raise NoOffer("boot.rejected", f"{str(error).rstrip('.')}.", hint="Try again.") from error
        except (Unknown, MachineLost) as error:
            last = str(error)
        tell(int(waited_s), last)
    yield from row.notes(context.provider, born.id)
    with suppress(Unknown):  # It may have been over before its first reading.
        if isinstance(context.provider, ExplainsJobs) and (why := context.provider.never_runs(instance)):
            raise why
    raise _given_up(born, context.clock.monotonic() - started, last)


def _passing(refusal: FarRefusal, *, is_own: bool) -> str:
    """Return the words of a refusal by the far side that may pass; raise any other."""
    if refusal.reason == "no_python":
        raise SetupError("box.no_python", refusal.what, hint=_OTHER_PYTHON if is_own else _OTHER_IMAGE) from refusal
    if refusal.reason not in PASSING:
        raise refusal
    return refusal.what


def _given_up(born: Instance, waited_s: float, last: str) -> NoOffer:
    what = f"The instance {born.id} was not ready within {waited_s:.0f} s: {last.rstrip('.')}."
    return NoOffer("boot.timeout", what, hint=place_facts(born.provider).boot_hint)


def _judged(facts: MachineFacts, missing: Missing, context: Context) -> Iterator[Note]:
    """Yield what the user should know about the machine; raise if it will not do, before anything is sent there."""
    for warning in clock_warning(context.provider):
        yield Incident(code="clock.wrong", message=warning)
    plan = context.plan
    for warning in login_warnings(facts.exported, plan.choices.pass_env):
        yield Incident(code="box.warning", message=warning)
    for warning in check_box(facts, plan.offer, accept_cpu=plan.choices.accept_cpu, needs_torch=plan.job.needs_torch):
        yield Incident(code="box.warning", message=warning)
    for warning in check_imports(missing, plan):
        yield Incident(code="box.warning", message=warning)


def _is_up(instance: Instance, token: str) -> bool:
    """Return whether it runs, can be reached, and is the one that was requested."""
    return instance.state is InstanceState.RUNNING and instance.address is not None and instance.token == token


def _patience_s(state: RunState, context: Context, to_set_up_s: float) -> float:
    """Return how long from now a machine may take to answer, given its set-up time; 0 or less means one look."""
    lease = context.plan.lease
    longest_s = lease.queue_s + _boot_patience_s(context)
    least_s = lease.ship_s + LEAST_TRAINING * lease.train_s + context.plan.job.save_s + lease.collect_s
    return min(longest_s, context.seconds_left(state) - to_set_up_s - least_s)


def _boot_patience_s(context: Context) -> float:
    """Return how long a machine may take to answer once it has left the queue."""
    offer = context.plan.offer
    return max(context.plan.lease.boot_s, terms_of(offer.provider).patience_s(offer.gpu_count))


def _is_worth_waiting(seen: Instance, waited_s: float, context: Context) -> bool:
    """Return whether to look again: always within the planned time, later only while the machine still comes up.

    A finished job never runs again; `Absence` decides about a machine that is shown as gone.
    """
    if seen.state is InstanceState.GONE:
        return not context.plan.lease.queue_s
    is_coming = seen.state in (InstanceState.PENDING, InstanceState.RUNNING)
    return is_coming or waited_s < context.plan.lease.boot_s


def _timer_read_back(far: FarSide, instance: Instance, context: Context) -> int | None:
    """Return the deadline of the machine's own timer, read back from it; None if it has no timer.

    NoOffer if the plan says that it ends itself and no timer answers: nothing is sent to a machine that only this
    laptop would end, unless the user accepted that.
    """
    folder = context.guard_folder(instance)
    if not folder:
        return None
    for _ in ticks(context.clock, READ_AGAIN_S, READ_BACK_S):
        status = far.end(folder, NEVER_WALL)  # Later than its own time, so this changes nothing.
        if status.taken:
            return status.deadline
    if context.plan.choices.weak_lease:
        return None
    raise NoOffer(
        "timer.not_armed",
        f"{instance.id} does not end itself as planned: {status.message}.",
        hint="Try again, another --image, or --accept-weak-lease.",
    )


def _planned_s(context: Context) -> float:
    """Return how long the script may take: as planned, or the planned boot time if the plan does not say."""
    lease = context.plan.lease
    return float(lease.setup_s or lease.boot_s) if context.plan.choices.setup else 0.0

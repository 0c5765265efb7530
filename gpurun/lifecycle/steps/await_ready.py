"""Wait until the instance is ready for training: running, without a duplicate, set up, and as agreed."""

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
from gpurun.lifecycle.instance.readings import GoneRow, living_instances
from gpurun.lifecycle.instance.setup_script import set_up
from gpurun.lifecycle.machine_owner import refuse_beside_copy
from gpurun.planning.verify_machine import (
    check_box,
    check_imports,
    check_made,
    check_nodes,
    differs_since_created,
    login_warnings,
    on_record,
    unpassed_variables,
)
from gpurun.providers.base import ExplainsJobs, Rejected, Unknown, clock_warning
from gpurun.providers.catalog import terms_of
from gpurun.remote.client import LOOK_S, NODES_SILENT, FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.machine_facts import LinkSpeed, MachineFacts, Missing
from gpurun.remote.ssh import HostKeyMismatch

T = TypeVar("T")
LEAST_TRAINING = 0.1
"""The share of the planned training time that must remain once a machine is ready; with less, it is given up."""
NEVER_WALL = 1e11
READ_BACK_S, READ_AGAIN_S = 20.0, 2.0
# Without GPUs, the measurement only proves that all nodes reach one another.
MEASURE_S, MEASURE_CPU_S = 20.0, 1.0
_OTHER_IMAGE = "Choose an image with Python 3.8 or newer: --image."
_OTHER_PYTHON = "Install Python 3.8 or newer there, or name it: --python PATH."


def await_ready(state: RunState, context: Context) -> Iterator[Note]:
    """Wait until the instance runs, has no duplicate, is set up and has reported its facts; raise if it does not.

    The user's script runs after the agent is installed, outside of the calls that are retried.
    """
    born = get_instance(state)
    early = EarlyUpload(state, context) if context.plan.lease.queue_s else None
    check_made(born, context.plan)
    clock, to_set_up_s, took_s = context.clock, _planned_setup_s(context), 0.0
    started = clock.monotonic()

    def install(far: FarSide, instance: Instance) -> tuple[FarSide, int | None, MachineFacts | None]:
        far.install_agent()
        armed = _read_back_timer(far, instance, context)
        return far, armed, None if to_set_up_s else _read_facts(far, state, context)

    up = yield from _wait_for_answer(install, state, context, to_set_up_s, early)
    if up is None:
        return
    instance, up_mono, (far, armed, facts) = up
    if isinstance(context.provider, ExplainsJobs):
        _keep_setup_log(context.provider, instance, context)
    if facts is None:
        took_s = set_up(far, state, context, to_set_up_s)
        answer = yield from _wait_for_answer(lambda far, _: _read_facts(far, state, context), state, context, 0.0)
        if answer is None:
            return
        instance, _, facts = answer
    missing = yield from _wait_for_answer(partial(_find_missing_modules, context), state, context, 0.0)
    if missing is None:
        return
    network: LinkSpeed | None = None
    if context.plan.offer.nodes > 1 and facts.torch.found:  # A command without torch measures nothing.
        joined = yield from _wait_for_answer(partial(_measure_network, facts, context), state, context, 0.0)
        if joined is None:
            return
        instance, _, network = joined
    if context.plan.offer.rate_micros_per_hour:
        # The provider's list may be late, so the check before the create request may have missed a machine of a copied
        # home.
        with suppress(Unknown, Rejected, SetupError):
            refuse_beside_copy(context.provider, state, context, "This machine was ended.")
    now_mono, choices = clock.monotonic(), context.plan.choices
    more: Json = {"setup_s": round(took_s, 3)} if took_s else {}
    more |= {"sent_bytes": early.sent_bytes} if early is not None and early.sent_bytes else {}
    more |= {"network": network.model_dump(mode="json")} if network else {}
    more |= {"not_passed": others} if (others := unpassed_variables(facts.exported, choices.pass_env)) else {}
    yield ReadyObserved(
        id=born.id,
        instance=SeenMachine.from_instance(instance),
        facts=on_record(facts),
        seconds=round(now_mono - started, 3),
        connect_s=round(now_mono - up_mono - took_s, 3),
        armed=armed,
        **more,
    )
    yield from _check_machine(facts, missing[2], context)
    if network is not None:
        check_nodes(network, facts, context.plan.offer, context.plan.choices)


def _keep_setup_log(provider: ExplainsJobs, instance: Instance, context: Context) -> None:
    """Keep the output of the set-up in the cluster's table. A failed fetch must not end a machine that is paid for."""
    with suppress(Unknown, OSError, GpurunError):
        if words := provider.setup_log(instance):
            context.folder.table_setup_log.write_bytes(words)


def _read_facts(far: FarSide, state: RunState, context: Context) -> MachineFacts:
    """Return the machine's facts. During the wait, show which Pythons are examined, and raise after a stop."""
    with moving(context.folder, context.clock, "look", LOOK_S) as tell:

        def on_wait(seconds: int, words: str) -> None:
            context.raise_if_stopped(state)
            tell(seconds, words)

        return far.hello(on_wait=on_wait)


def _find_missing_modules(context: Context, far: FarSide, _: Instance) -> Missing:
    """Return the command's modules that the machine's Python lacks; none if the run is on this computer."""
    job = context.plan.job
    if not job.imports or context.plan.mode is not Mode.PAID:
        return Missing(python="", missing=())
    return far.missing_imports(job.imports, job.env.get("PYTHONPATH", ""))


def _measure_network(facts: MachineFacts, context: Context, far: FarSide, _: Instance) -> LinkSpeed:
    """Measure the network between a job's nodes; return the measured speed. Raise NoOffer if a node does not answer."""
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


def _wait_for_answer(
    ask: Callable[[FarSide, Instance], T],
    state: RunState,
    context: Context,
    to_set_up_s: float,
    early: EarlyUpload | None = None,
) -> Generator[Note, None, tuple[Instance, float, T] | None]:
    """Wait until the instance answers; return (instance, monotonic time when first seen running, reply).

    Return None after recording that the instance is not as agreed, or that it is gone and the next offer will be tried.
    Raise NoOffer if it does not answer in time. Show the provider's status during the wait.
    """
    patience_s = _patience_s(state, context, to_set_up_s)
    with moving(context.folder, context.clock, "boot", ceil(max(1.0, patience_s))) as tell:
        return (yield from _poll_until_answer(ask, state, context, patience_s, early, tell))


def _poll_until_answer(
    ask: Callable[[FarSide, Instance], T],
    state: RunState,
    context: Context,
    patience_s: float,
    early: EarlyUpload | None,
    tell: Tell,
) -> Generator[Note, None, tuple[Instance, float, T] | None]:
    """Poll for `_wait_for_answer`, which has the contract."""
    born, absence = get_instance(state), Absence()
    instance, up_mono, last, started = born, None, "it never answered", context.clock.monotonic()
    row, stopped_mono = GoneRow(context.clock), inf
    boot_s = _boot_patience_s(context) if context.plan.lease.queue_s else inf  # The time in the queue is not included.
    traits = context.provider.traits
    for waited_s in ticks(context.clock, traits.poll_s, max(0.0, patience_s) + traits.settle_s):
        up_s = context.clock.monotonic() - up_mono if up_mono is not None else 0.0
        is_doubted = absence.since_mono is not None  # The provider shows it as gone, but that is not believed yet.
        is_late = waited_s > max(0.0, patience_s) or not _is_worth_waiting(instance, waited_s, context)
        is_stopped = context.clock.monotonic() - stopped_mono >= traits.settle_s  # It was preempted, or never started.
        if (is_late and not is_doubted) or up_s > boot_s or is_stopped:
            break
        context.raise_if_stopped(state)
        try:
            instance = row.read(context.provider, born.id)
            is_down = instance.state is InstanceState.STOPPED and not context.plan.lease.queue_s
            stopped_mono = min(stopped_mono, context.clock.monotonic()) if is_down else inf
            if differs_since_created(instance, born, context.plan):
                # Record it for the receipt. `check_made` then refuses the machine.
                yield CreateObserved(token=state.token, instance=SeenMachine.from_instance(instance), adopted=False)
                return None
            if isinstance(context.provider, ExplainsJobs) and (why := context.provider.never_runs(instance)):
                _keep_setup_log(context.provider, instance, context)
                raise why
            if early is not None:
                yield from early.send(instance)
            is_up = _is_up(instance, state.token)
            # Send nothing until a current list shows that there is no second machine for this request.
            listed = living_instances(context.provider.find(state.token), state.token) if is_up else []
            extras = [machine for machine in listed if machine.id != born.id]
            if is_up and not extras:
                up_mono = up_mono or context.clock.monotonic()
                return instance, up_mono, ask(context.reach(by_our_clock(instance, state)), instance)
            said = queue_words(context.provider, instance)
            said = said or f"{context.provider.name} says {instance.said or instance.state}"
            if instance.state is InstanceState.RUNNING and instance.address is None:
                said += ", but has given it no public address to log in to"
            last = f"{len(extras)} more machines carry its token" if extras else said
            if not context.plan.lease.queue_s and absence.is_believed(instance, state, context):
                yield from row.notes(context.provider, born.id)
                yield from next_offer(born, absence, state, context)
                return None
        except FarRefusal as refusal:
            last = _temporary_refusal(refusal, is_own=context.plan.box is not None)
        except HostKeyMismatch:  # Nothing was sent to the machine, so nothing can be lost.
            raise
        except Rejected as error:  # A final refusal: waiting will not change it.
            raise NoOffer("boot.rejected", f"{str(error).rstrip('.')}.", hint="Try again.") from error
        except (Unknown, MachineLost) as error:
            last = str(error)
        tell(int(waited_s), last)
    yield from row.notes(context.provider, born.id)
    with suppress(Unknown):  # The job may have ended before its first reading.
        if isinstance(context.provider, ExplainsJobs) and (why := context.provider.never_runs(instance)):
            raise why
    raise _make_timeout_error(born, context.clock.monotonic() - started, last)


def _temporary_refusal(refusal: FarRefusal, *, is_own: bool) -> str:
    """Return the message of the agent's refusal if the refusal is temporary; otherwise raise."""
    if refusal.reason == "no_python":
        raise SetupError("box.no_python", refusal.what, hint=_OTHER_PYTHON if is_own else _OTHER_IMAGE) from refusal
    if refusal.reason not in PASSING:
        raise refusal
    return refusal.what


def _make_timeout_error(born: Instance, waited_s: float, last: str) -> NoOffer:
    what = f"The instance {born.id} was not ready within {waited_s:.0f} s: {last.rstrip('.')}."
    return NoOffer("boot.timeout", what, hint=place_facts(born.provider).boot_hint)


def _check_machine(facts: MachineFacts, missing: Missing, context: Context) -> Iterator[Note]:
    """Check the machine before any of the run's files are sent. Yield warnings; raise if it cannot be used."""
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
    """Return whether the instance runs, has an address, and has the requested token."""
    return instance.state is InstanceState.RUNNING and instance.address is not None and instance.token == token


def _patience_s(state: RunState, context: Context, to_set_up_s: float) -> float:
    """Return the seconds that a machine has to answer, without its set-up time. Zero or less means a single attempt."""
    lease = context.plan.lease
    longest_s = lease.queue_s + _boot_patience_s(context)
    least_s = lease.ship_s + LEAST_TRAINING * lease.train_s + context.plan.job.save_s + lease.collect_s
    return min(longest_s, context.seconds_left(state) - to_set_up_s - least_s)


def _boot_patience_s(context: Context) -> float:
    """Return the seconds that a machine has to answer after it has left the queue."""
    offer = context.plan.offer
    return max(context.plan.lease.boot_s, terms_of(offer.provider).patience_s(offer.gpu_count))


def _is_worth_waiting(seen: Instance, waited_s: float, context: Context) -> bool:
    """Return whether to keep waiting: always during the planned boot time, later only while the machine boots.

    A running machine that does not answer yet counts as booting. A cluster job that is gone never runs again. For other
    machines that are shown as gone, `Absence` decides.
    """
    if seen.state is InstanceState.GONE:
        return not context.plan.lease.queue_s
    is_coming = seen.state in (InstanceState.PENDING, InstanceState.RUNNING)
    return is_coming or waited_s < context.plan.lease.boot_s


def _read_back_timer(far: FarSide, instance: Instance, context: Context) -> int | None:
    """Read back the deadline of the machine's guard and return it; None if the provider has no guard.

    Raise NoOffer if no guard answers although the plan promises one, because then only this computer would end the
    machine. If the user has accepted that (--accept-weak-lease), return None.
    """
    folder = context.guard_folder(instance)
    if not folder:
        return None
    for _ in ticks(context.clock, READ_AGAIN_S, READ_BACK_S):
        status = far.end(folder, NEVER_WALL)  # A time after the deadline changes nothing.
        if status.taken:
            return status.deadline
    if context.plan.choices.weak_lease:
        return None
    raise NoOffer(
        "timer.not_armed",
        f"{instance.id} does not end itself as planned: {status.message}.",
        hint="Try again, another --image, or --accept-weak-lease.",
    )


def _planned_setup_s(context: Context) -> float:
    """Return the time limit of the --setup script in seconds: as planned, else the boot time; 0 without a script."""
    lease = context.plan.lease
    return float(lease.setup_s or lease.boot_s) if context.plan.choices.setup else 0.0

"""Upload the files of a job that waits in a queue, to the folder that the login node shares with the nodes.

Nothing is billed during the wait. The upload step later sends only the files that have not arrived.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.core.errors import SetupError
from gpurun.core.journal_events import Incident
from gpurun.core.journal_records import RunState
from gpurun.core.records import Instance, InstanceState
from gpurun.core.transfer_progress import moving
from gpurun.jobs.survey import survey_run_files
from gpurun.lifecycle.context import Context, Note
from gpurun.providers.base import Provider, ShowsQueue, Unknown
from gpurun.remote.archive import Pack
from gpurun.remote.interface import FarRefusal, MachineLost

LONGEST_S = 30 * 86_400.0


class _LeftQueue(Exception):
    """Raised when the job has left the queue. The upload step then sends the remaining files."""


class EarlyUpload:
    """Uploads to a queued job's folder, until the upload is complete or refused."""

    def __init__(self, state: RunState, context: Context) -> None:
        plan = context.plan
        self._state, self._context = state, context
        # A job that downloads its files itself does so once it runs.
        self.is_over = bool(plan.choices.stage or plan.data.public)
        self.sent_bytes = 0

    def send(self, queued: Instance) -> Iterator[Note]:
        """Upload while the job waits. Raise SetupError if the cluster's disk is full: the job could not run anyway."""
        if self.is_over or queued.state is not InstanceState.PENDING or queued.address is None:
            return
        context, pack = self._context, Pack(survey_run_files(self._context.plan, self._context.trainer))
        far, watch = context.reach(queued), _QueueWatch(queued, context)
        try:
            far.install_agent()
            with moving(context.folder, context.clock, "ship", pack.survey.total_bytes) as tell:

                def on_progress(there_bytes: int) -> None:
                    tell(there_bytes, watch.words)
                    context.raise_if_stopped(self._state)
                    watch.require_queued()

                far.unpack(pack, on_progress=on_progress, timeout_s=LONGEST_S)
            self.is_over = True
        except _LeftQueue:
            self.is_over = True
        except MachineLost:  # The next call tries again.
            return
        except FarRefusal as refusal:
            if refusal.reason == "disk_full":
                hint = "Free some space in its workdir, or name another workdir in config.toml."
                raise SetupError("slurm.disk_full", refusal.what, hint=hint) from refusal
            self.is_over = True
            message = f"nothing is uploaded while the job queues: {refusal.what.rstrip('.')}"
            yield Incident(code="upload.later", message=message)
        finally:
            self.sent_bytes += pack.sent_bytes
            far.close()


def queue_words(provider: Provider, instance: Instance) -> str:
    """Return a phrase about the instance's position in its queue; "" if it is not queued. Unknown may be raised."""
    if not isinstance(provider, ShowsQueue) or instance.state is not InstanceState.PENDING:
        return ""
    return f"queued: {provider.queue_words(instance)}"


class _QueueWatch:
    """Reads the job's state at the provider's poll interval; `words` is its last known position in the queue."""

    words = ""

    def __init__(self, queued: Instance, context: Context) -> None:
        self._queued, self._provider, self._clock = queued, context.provider, context.clock
        self._due_mono = self._clock.monotonic()

    def require_queued(self) -> None:
        """Raise `_LeftQueue` once the job has left the queue."""
        if self._clock.monotonic() < self._due_mono:
            return
        try:
            queued = self._provider.read(self._queued.id)
            if queued.state is not InstanceState.PENDING:
                raise _LeftQueue
            self.words = queue_words(self._provider, queued)
        except Unknown:
            pass  # The controller did not answer: the job may still wait.
        self._due_mono = self._clock.monotonic() + self._provider.traits.poll_s

"""Runs programs in a job of a cluster: each call is a folder in a folder that the login node and the job share.

The job's own first program (`providers/slurm/pilot.sh`) picks the call up. So the call's processes belong to the job
and end with it, and they see the job's GPUs.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Iterable, Sequence
from math import ceil

from gpurun.remote.interface import Machine, MachineLost, Reply, Take

NOT_TAKEN = 75
KILL_S = 5
TAKEN_S = 60
"""How many seconds a call may wait until the job picks it up. That happens at once, unless the file system lags."""
# $1 the call's name, $2 the command line, $3 the tenths of a second to wait for the call's end, $4 how many of these
# are left when the job must have picked the call up. The folder is listed each time, because a shared file system may
# cache for a minute that a name is missing.
_CALL = f"""
call="calls/$1"
mkdir -p calls "$call.new" && printf '%s\n' "$2" >"$call.new/call" && cat >"$call.new/in" &&
    mv "$call.new" "$call.go" || exit {NOT_TAKEN}
left=$3
until ls calls | grep -qxF "$1.done"; do
    left=$((left - 1))
    [ "$left" -gt 0 ] || exit {NOT_TAKEN}
    [ "$left" -gt "$4" ] || ! ls calls | grep -qxF "$1.go" || exit {NOT_TAKEN}
    sleep 0.1
done
cat "$call.done/out"
cat "$call.done/err" >&2
code=$(cat "$call.done/code")
rm -rf "$call.done"
exit "$code"
"""

# As in the pilot: `module` and conda are functions of a login shell, and nothing runs before the set-up.
_LOGIN_SHELL = '[ ! -x /bin/bash ] || exec /bin/bash -lc "$0" "$@"; exec sh -c "$0" "$@"'
_SET_UP = 'eval "$0" </dev/null >&2 || exit; exec "$@"'
# srun does not accept N_K as a job: each of several jobs of one sbatch also has a number of its own.
_OF_SEVERAL = 'job=$(squeue -h -j "$0" -o %A) && exec srun --overlap --jobid="$job" "$@"'


class JobMachine:
    """Runs programs in a job, through a machine whose folder is the job's folder on the login node.

    `find` returns that machine at the first call, and may raise MachineLost.
    """

    def __init__(self, find: Callable[[], Machine]) -> None:
        self._find = find
        self._found: Machine | None = None

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        """See `Machine.call`. The program's output arrives once the program has ended."""
        limit_s = max(1, ceil(timeout_s))
        command = f"exec timeout -k {KILL_S} {limit_s} {shlex.join(argv)}"
        tenths = (10 * limit_s, 10 * max(0, limit_s - TAKEN_S))
        relay = ["sh", "-c", _CALL, "gpurun", secrets.token_hex(8), command, *map(str, tenths)]
        reply = self._login.call(relay, stdin=stdin or [], sink=sink, timeout_s=timeout_s)
        if reply.exit_code == NOT_TAKEN:
            raise MachineLost("The job did not pick up the call: its node or the shared folder does not answer.")
        return reply

    def put(self, path: str, content: bytes) -> None:
        """See `Machine.put`: the folder is shared."""
        self._login.put(path, content)

    def lane(self) -> JobMachine:
        """See `Machine.lane`."""
        return JobMachine(lambda: self._login.lane())

    def close(self) -> None:
        """See `Machine.close`."""
        if self._found is not None:
            self._found.close()

    @property
    def round_trip_s(self) -> float:
        """See `Machine.round_trip_s`."""
        return self._found.round_trip_s if self._found is not None else 0.0

    @property
    def _login(self) -> Machine:
        self._found = self._found or self._find()
        return self._found


def step_argv(number: str, folder: str, setup: str, *more: str) -> list[str]:
    """Return the beginning of a command line that runs the rest as a step of a job. `more` are options of srun."""
    start = ["sh", "-c", _OF_SEVERAL, number] if "_" in number else ["srun", "--overlap", f"--jobid={number}"]
    step = [*start, "--nodes=1", "--ntasks=1", "--quiet", *more]
    # Without a setup `true` is used, not a colon: srun takes a single colon for the end of a component.
    return [*step, f"--chdir={folder}", "sh", "-c", _LOGIN_SHELL, _SET_UP, setup or "true"]


class JobStep(JobMachine):
    """Runs programs in a job as separate steps: slower, but their standard input is not written to a shared disk.

    `number` is the job's number, `folder` is where programs run, `setup` is a shell line that runs first.
    """

    def __init__(self, find: Callable[[], Machine], number: str, folder: str, setup: str) -> None:
        super().__init__(find)
        self._step = step_argv(number, folder, setup)

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        """See `Machine.call`."""
        return self._login.call([*self._step, *argv], stdin=stdin or [], sink=sink, timeout_s=timeout_s)

    def lane(self) -> JobStep:
        """See `Machine.lane`: each call is a separate step."""
        return self

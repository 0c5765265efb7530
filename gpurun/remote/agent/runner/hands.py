"""The other jobs of a sweep on a cluster. A trial is started in one of them by srun, as a step of that job.

Each job writes its number to hands/K once it runs (providers/slurm/pilot.sh). Only srun transports a step's environment
and its output, so the value of a secret is never on a shared disk.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LOOK_S, ANSWERS_S = 1.0, 60.0
"""The seconds between looks for other jobs, and the seconds that a job has to show that it still runs a step."""
SIGNALLED, ENDING_S = 128, 2.0
# The agent does not pass on variables of Slurm. SLURM_CONF tells srun where its controller is.
_SRUN = """
[ ! -e "$0/job.env" ] || conf=$(. "$0/job.env" && echo "${SLURM_CONF:-}")
[ -z "${conf:-}" ] || export SLURM_CONF="$conf"
exec srun --overlap --nodes=1 --ntasks=1 --quiet --mpi=none --cpu-bind=none --export=ALL "$@"
"""
_LOGIN_SHELL = '[ ! -x /bin/bash ] || exec /bin/bash -l "$0"; exec sh "$0"'
_SIGNAL = 'kill -s "$0" -- "-$(cat "$1")"'
# The command of a trial is in a file, because srun would treat a lone colon among its arguments as a separator.
_TRIAL = """\
exec 2>&1
echo "$$" >{process} || exit
eval "$(cat {setup} 2>/dev/null)" </dev/null || exit
[ -z "${{CUDA_VISIBLE_DEVICES:-}}" ] || export CUDA_VISIBLE_DEVICES="$(echo "$CUDA_VISIBLE_DEVICES" | cut -d, -f{card})"
{exports}
exec {words}
"""


class Hands:
    """The other jobs of a sweep, as recorded in the folder of its run; none if the sweep has only one job."""

    def __init__(self, root: str, count: int) -> None:
        self.root, self.folder, self.count = root, os.path.join(root, "hands"), count
        self.lost: set[str] = set()
        self.found: list[str] = []
        self.looked_s = -LOOK_S

    def jobs(self) -> list[str]:
        """Return the numbers of the other jobs that run and still accept trials."""
        if self.count and time.monotonic() - self.looked_s >= LOOK_S:
            self.found, self.looked_s = self.look(), time.monotonic()
        return [number for number in self.found if number not in self.lost]

    def look(self) -> list[str]:
        """Read from the folder which other jobs run, and return their numbers."""
        found = []
        try:
            names = sorted(filter(str.isdigit, os.listdir(self.folder)), key=int)
        except OSError:
            return []
        for name in names:
            try:
                with open(os.path.join(self.folder, name)) as file:
                    number = file.read().strip()
            except OSError:
                continue
            if re.fullmatch("[0-9]{1,10}", number):
                found.append(number)
        return found

    def start(
        self, job: str, card: int, argv: list[str], cwd: str, folder: str, env: dict[str, str], names: list[str]
    ) -> Any:
        """Start a trial in a job. The variables in `names` keep their values even if a login shell sets others."""
        own = ["export %s=%s" % (name, shlex.quote(env[name])) for name in names if name in env]
        script = os.path.join(folder, "start")
        with open(script, "w") as file:
            places = {"process": process_file(folder), "setup": os.path.join(self.folder, "setup")}
            quoted = {name: shlex.quote(path) for name, path in places.items()}
            words = " ".join(map(shlex.quote, argv))
            file.write(_TRIAL.format(card=card + 1, exports="\n".join(own), words=words, **quoted))
        with open(os.path.join(folder, "srun"), "wb") as said:
            return subprocess.Popen(
                self.step(job, cwd, "sh", "-c", _LOGIN_SHELL, script), cwd=cwd, env=other_environment(env),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=True,
            )  # fmt: skip

    def step(self, job: str, cwd: str, *argv: str) -> list[str]:
        """Return the command line that runs `argv` as a step of a job."""
        return ["sh", "-c", _SRUN, self.root, "--jobid=" + job, "--chdir=" + cwd, *argv]

    def signal(self, job: str, folder: str, name: str) -> None:
        """Send a signal to the processes of the trial in `folder`, without waiting for its delivery."""
        words = self.step(job, folder, "sh", "-c", _SIGNAL, name, process_file(folder))
        quiet = subprocess.DEVNULL
        subprocess.Popen(
            words, env=srun_environment(), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )  # fmt: skip

    def why_lost(self, job: str, folder: str, code: int) -> str:
        """Return why a trial failed because of its job, which then gets no more trials; "" if the job still works.

        The reason contains srun's last line. A job has failed if no process of the trial began, or if it no longer runs
        a step.
        """
        quiet, words = subprocess.DEVNULL, self.step(job, self.root, "true")
        if code > SIGNALLED:  # When a job ends, its processes are killed before its end is reported.
            time.sleep(ENDING_S)
        try:
            done = subprocess.run(
                words, env=srun_environment(), stdin=quiet, stdout=quiet, stderr=quiet, timeout=ANSWERS_S, check=False
            )  # fmt: skip
            is_up = done.returncode == 0 and os.path.exists(process_file(folder))
        except subprocess.TimeoutExpired:
            is_up = False
        if is_up:
            return ""
        self.lost.add(job)
        try:
            with open(os.path.join(folder, "srun"), errors="replace") as file:
                said = [line.strip() for line in file if line.strip()]
        except OSError:
            said = []
        return "job %s can no longer run a trial%s" % (job, ": " + said[-1] if said else "")


def other_environment(env: dict[str, str]) -> dict[str, str]:
    """Return the environment of a trial in another job, which sets its own list of GPUs."""
    return {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}


def srun_environment() -> dict[str, str]:
    """Return the environment that srun itself needs, for a step that does not start a trial."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "USER", "LOGNAME", "LANG") if name in os.environ}


def process_file(folder: str) -> str:
    """Return the path of the file with the process id of the trial."""
    return os.path.join(folder, "process")

"""The scripted Slurm's programs: `programs.py STATE sbatch|srun|squeue|scancel|sinfo|scontrol|sacct|job ...`.

A test sets files in STATE. `away`: no controller answers. `hold`: no job starts, and the text is the reason; with the
text DEADLINE a waiting job ends in this state. `requeue`: a running job is put back into the queue, once. `lose`:
sbatch creates the job, but its answer is lost. `refuse`: sbatch refuses for this reason. `sinfo`: the output of sinfo.
`start`: when a job is expected to start. `over`: the OverTimeLimit. `name`: the cluster's name. `books`: the cluster
has accounting.
"""

from __future__ import annotations

import ctypes
import getopt
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

LONG = [
    "parsable",
    "test-only",
    "job-name=",
    "comment=",
    "nodes=",
    "mpi=",
    "kill-on-bad-exit=",
    "wait=",
    "ntasks=",
    "ntasks-per-node=",
    "time=",
    "deadline=",
    "dependency=",
    "no-requeue",
    "export=",
    "chdir=",
    "output=",
    "gres=",
    "partition=",
    "account=",
    "qos=",
    "constraint=",
    "mem=",
    "me",
    "overlap",
    "jobid=",
    "quiet",
    "pty",
    "name=",
    "signal=",
    "jobs=",
    "array=",
    "cpu-bind=",
]
COMPLETING_S = 0.2
OWNER = "1000"
"""The number of the user who owns the jobs."""
SAYS: dict[str, str] = json.loads(Path(__file__).with_name("sentences.json").read_text())
"""The sentences of the real programs; `make full` checks them (tests/lifecycle/test_slurm_says.py)."""


def sbatch(state: Path, words: list[str]) -> int:
    pairs, rest = getopt.getopt(words, "", LONG)
    options = dict(pairs)
    is_test = "--test-only" in options
    if (refuse := state / "refuse").exists():
        print(SAYS["sbatch --test-only" if is_test else "sbatch"].format(refuse.read_text()), file=sys.stderr)
        return 1
    if is_test:
        (state / "asked").write_text("\n".join(words))
        assert os.environ["SLURM_TIME_FORMAT"] == "%s"
        start = text(state, "start") or int(time.time())
        print(SAYS["starts"].format(1, start, 1, "n1", options.get("--partition", "main")), file=sys.stderr)
        return 0
    number = 1 + len(os.listdir(state / "jobs"))
    wait_s = int(re.fullmatch(r"now\+(\d+)seconds", options["--deadline"])[1])  # type: ignore[index]
    facts = {
        "argv": "\n".join(words), "name": options["--job-name"], "comment": options["--comment"],
        "minutes": options["--time"], "submitted": str(int(time.time())), "deadline": str(int(time.time()) + wait_s),
        "nodes": options["--nodes"], "command": "\n".join(rest),
        "chdir": options["--chdir"], "output": options["--output"],
    }  # fmt: skip
    assert (options["--dependency"], options["--export"]) == ("singleton", "NONE")
    last = int(options["--array"].removeprefix("0-")) if "--array" in options else 0
    for place in range(last + 1):
        folder = state / "jobs" / str(number + place)
        folder.mkdir()
        for name, fact in facts.items():
            (folder / name).write_text(fact)
        if last:
            (folder / "array").write_text(f"{number}_{place}")
    for place in range(last + 1):
        subprocess.Popen(
            [sys.executable, "-S", __file__, str(state), "job", str(number + place)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    if (state / "lose").exists():
        print(SAYS["sbatch"].format(SAYS["timed out"]), file=sys.stderr)
        return 1
    print(number)
    return 0


def job(state: Path, number: str) -> int:
    """Wait for the job's turn, run it, and end every process that it started."""
    folder = state / "jobs" / number
    (folder / "keeper").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: (folder / "cancelled").write_text(OWNER))
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    before = [state / "jobs" / str(other) for other in range(1, int(number))]
    whole = shown(folder).partition("_")[0]
    rivals = [other for other in before if text(other, "name") == text(folder, "name")]
    rivals = [other for other in rivals if shown(other).partition("_")[0] != whole]
    while True:
        word = waited(state, folder, rivals) or run(state, folder)
        if word != "REQUEUED":
            return ended(folder, word)


def waited(state: Path, folder: Path, rivals: list[Path]) -> str:
    """Wait for the job's turn; return "", or the job's last state if it ends before its turn."""
    while (state / "hold").exists() or any(not (other / "ended").exists() for other in rivals):
        if (folder / "cancelled").exists():
            return "CANCELLED"
        if text(state, "hold") == "DEADLINE":
            return "DEADLINE"
        time.sleep(0.02)
    return "CANCELLED" if (folder / "cancelled").exists() else ""


def run(state: Path, folder: Path) -> str:
    """Run the job to its end, and return its last state."""
    (folder / "started").write_text(str(time.time()))
    with open(text(folder, "output"), "ab") as log:
        child = subprocess.Popen(
            [*shebang(text(folder, "command").splitlines()[0]), *text(folder, "command").splitlines()],
            env={
                **os.environ, "SLURM_JOB_ID": folder.name, "SLURM_JOB_NUM_NODES": text(folder, "nodes"),
                "HOME": str(state / "home"), **of_array(folder),
            },
            cwd=text(folder, "chdir"), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    word, end = "", time.time() + 60 * int(text(folder, "minutes"))
    while child.poll() is None:
        if (state / "requeue").exists():
            (state / "requeue").unlink()
            word = "REQUEUED"
            break
        if (folder / "cancelled").exists() or time.time() > end:
            word = "CANCELLED" if (folder / "cancelled").exists() else "TIMEOUT"
            break
        if word := text(folder, "over"):
            break
        time.sleep(0.02)
    (folder / "completing").touch()
    time.sleep(COMPLETING_S)
    while below := descendants(os.getpid()):
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap()
    if word == "REQUEUED":
        (folder / "started").unlink()
        (folder / "completing").unlink()
    return word or ("FAILED" if child.returncode else "COMPLETED")


def shown(folder: Path) -> str:
    """Return a job's number as squeue shows it: `N_K` for a job of an array."""
    return text(folder, "array") or folder.name


def of_array(folder: Path) -> dict[str, str]:
    """Return the variables with which a job of an array knows its place; empty for other jobs."""
    whole, _, place = text(folder, "array").partition("_")
    return {"SLURM_ARRAY_JOB_ID": whole, "SLURM_ARRAY_TASK_ID": place} if place else {}


def meant(state: Path, number: str) -> list[Path]:
    """Return the jobs that a number names: all jobs of that array, or the job with that number."""
    all_of = sorted((state / "jobs").iterdir(), key=lambda folder: int(folder.name))
    found = [folder for folder in all_of if number in (shown(folder), text(folder, "array").partition("_")[0])]
    return found or [folder for folder in all_of if folder.name == number]


def shebang(script: str) -> list[str]:
    """Return the interpreter in a script's first line, with which slurmd starts the script."""
    try:
        with open(script) as file:
            return file.readline().removeprefix("#!").split()
    except FileNotFoundError:
        return ["sh"]


def srun(state: Path, words: list[str]) -> int:
    """Run a command once for each node of a job, and end all of them if one fails.

    With --jobid, run one step in a running job.
    """
    pairs, command = getopt.getopt(words, "", LONG)
    options = dict(pairs)
    if "--jobid" in options:
        return run_step(state, options, command)
    nodes, tasks = int(options["--nodes"]), list[subprocess.Popen[bytes]]()
    assert str(nodes) == os.environ["SLURM_JOB_NUM_NODES"]
    signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])  # As srun does, kill them all.
    for node in range(nodes):
        more = {"SLURM_NODEID": str(node), "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURMD_NODENAME": f"n{node + 1}"}
        tasks.append(subprocess.Popen(command, env={**os.environ, **more}, stdin=subprocess.DEVNULL))
    running = state / "jobs" / os.environ["SLURM_JOB_ID"] / "tasks"
    running.write_text("\n".join(str(task.pid) for task in tasks))
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            for task in tasks:
                task.kill()
        time.sleep(0.02)
    return max(128 - code if code < 0 else code for task in tasks if (code := task.wait()) is not None)


def run_step(state: Path, options: dict[str, str], command: list[str]) -> int:
    """Run a command on the node of a running job."""
    assert ":" not in command, "srun takes a lone colon for the end of a component"
    folder = state / "jobs" / options["--jobid"]
    is_over = any((folder / name).exists() for name in ("completing", "ended"))
    if is_over or not (folder / "started").exists():
        print(SAYS["expired" if is_over else "no step"].format(folder.name), file=sys.stderr)
        return 1
    with open(state / "steps", "a") as steps:
        steps.write(" ".join(command) + "\n")
    own = {"SLURM_JOB_ID": folder.name, **of_array(folder)}
    task = subprocess.Popen(command, cwd=options["--chdir"], env={**os.environ, **own}, start_new_session=True)
    while task.poll() is None:  # A step ends with its job.
        if (folder / "completing").exists():
            os.killpg(task.pid, signal.SIGKILL)
        time.sleep(0.02)
    return 128 - task.returncode if task.returncode < 0 else task.returncode


def descendants(root: int) -> set[int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1])
    found, size = {root}, 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {root}


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def ended(folder: Path, word: str) -> int:
    (folder / "word").write_text(word)
    (folder / "ended").write_text(str(int(time.time())))
    return 0


def squeue(state: Path, words: list[str]) -> int:
    pairs, _ = getopt.getopt(words, "hrt:o:j:p:", [*LONG, "sort="])
    options, known = dict(pairs), os.listdir(state / "jobs")
    if "-j" in options and not meant(state, options["-j"]):
        print(SAYS["squeue"].format(SAYS["no_job"]), file=sys.stderr)
        return 1
    if options["-o"] == "%A":
        print("\n".join(folder.name for folder in meant(state, options["-j"])))
        return 0
    if options["-o"] == "%P":
        print("main")
        return 0
    if "-p" in options:  # Two jobs of other users wait before the user's own.
        waits = [name for name in known if not (state / "jobs" / name / "started").exists()]
        waiting = [shown(state / "jobs" / name) for name in sorted(waits, key=int)]
        start = text(state, "start") or "N/A"
        print("\n".join(["4001|N/A|main", "4002|N/A|main", *(f"{name}|{start}|main" for name in waiting)]))
        return 0
    assert ("--me" in options, os.environ["SLURM_TIME_FORMAT"]) == (True, "%s")
    print("77|RUNNING|1700000000|1:00|1700000000|None|my own|it|has\n1|RUNNING|0|0:00|0|None|gpurun-forged|")
    assert "-r" in options
    listed = (
        meant(state, options["-j"]) if "-j" in options else [state / "jobs" / name for name in sorted(known, key=int)]
    )
    for folder in listed:
        if options.get("--name", text(folder, "name")) == text(folder, "name"):
            started = text(folder, "started")
            word = text(folder, "word") or ("COMPLETING" if (folder / "completing").exists() else "")
            over = float(text(folder, "ended") or time.time())
            used = int(over - float(started)) if started else 0
            word = word or ("RUNNING" if started else "PENDING")
            reason = text(state, "hold") or "Resources" if word == "PENDING" else "None"
            planned = str(int(float(started) + 60 * int(text(folder, "minutes")))) if started else "N/A"
            ends = text(folder, "ended") or planned
            clock = f"{used // 3600}:{used % 3600 // 60:02}" if used >= 3600 else f"{used // 60}"
            clock += f":{used % 60:02}"
            fields = [shown(folder), word, text(folder, "submitted"), clock, ends, reason, text(folder, "name")]
            print("|".join([*fields, text(folder, "comment")]))
    return 0


def scancel(state: Path, words: list[str]) -> int:
    pairs, numbers = getopt.getopt(words, "", LONG)
    options = dict(pairs)
    for number in numbers:
        jobs = meant(state, number)
        if name := options.get("--signal"):  # To every process that its steps started, but not to the batch script.
            tasks = [int(pid) for job in jobs for pid in text(job, "tasks").splitlines()]
            for pid in {process for task in tasks for process in (task, *descendants(task))}:
                with suppress(ProcessLookupError):
                    os.kill(pid, getattr(signal, f"SIG{name}"))
            continue
        left = [job for job in jobs if not (job / "ended").exists() and options["--name"] == text(job, "name")]
        if not left:
            print(SAYS["not cancelled"].format(number), file=sys.stderr)
            return 1
        for job in left:
            (job / "cancelled").write_text(OWNER)
    return 0


def sacct(state: Path, words: list[str]) -> int:
    """Print the states of jobs from accounting, and which user cancelled a job."""
    pairs, _ = getopt.getopt(words, "XnPo:j:", LONG)
    options = dict(pairs)
    if not (state / "books").exists():
        print(SAYS["no books"], file=sys.stderr)
        return 1
    assert options["-o"] == "State,UID,JobName"
    for folder in meant(state, options["-j"]):
        word = text(folder, "word") or ("RUNNING" if text(folder, "started") else "PENDING")
        by = f" by {text(folder, 'cancelled')}" if word == "CANCELLED" else ""
        print(f"{word}{by}|{OWNER}|{text(folder, 'name')}")
    return 0


def text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text()
    except FileNotFoundError:
        return ""


def main(state: Path, name: str, words: list[str]) -> int:
    if name == "job":
        return job(state, words[0])
    if (state / "away").exists():
        print(SAYS[f"{name} --test-only" if "--test-only" in words else name].format(SAYS["away"]), file=sys.stderr)
        return 1
    if name == "sinfo":
        print(text(state, "sinfo") or "debug|up|10:00|idle|1|gpu:a100:2\nmain*|up|2-00:00:00|mix|2|gpu:a100:8(S:0-1)")
        return 0
    if name == "scontrol":
        facts = {"cluster": text(state, "name") or "scripted", "tracker": "proctrack/cgroup"}
        facts["over"] = text(state, "over") or "0 min"
        print("\n".join([SAYS["config"], *(SAYS[name].format(fact) for name, fact in facts.items())]))
        return 0
    own = {"sbatch": sbatch, "srun": srun, "squeue": squeue, "scancel": scancel, "sacct": sacct}
    return own[name](state, words)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))

"""Finds the machine's Python that has torch, and tests a small kernel of torch on every GPU.

All Pythons start in parallel, because a first import may take minutes over a network. Then they use the GPUs one after
another, because a GPU may be restricted to one process. Their standard error is reported.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from gpurun.remote.agent.login_environment import remembered_variables
from gpurun.remote.agent.processes import environment
from gpurun.remote.agent.system import path_in, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional

    from gpurun.remote.agent.system import Json

LIMIT_S = 180.0
"""The time limit in seconds for all checks together."""
TELL_S, TICK_S = 2.0, 0.05
MOST_PYTHONS = 16
NOTHING: Json = {
    "version": None, "numpy": None, "cuda": None, "built_for": None, "packages": None, "archs": [], "devices": [],
}  # fmt: skip
MOST_WORDS, LAST_LINES, MOST_OUTPUT_BYTES = 500, 4, 1 << 20
PLACES = (
    # A conda distribution, and its environments.
    *(
        f"{root}/{name}{env}/bin/python"
        for root in ("/opt", "~")
        for name in ("*conda*", "*forge*", "*mamba*", ".*mamba*")
        for env in ("", "/envs/*")
    ),
    *("/venv/*/bin/python", "/opt/venv/bin/python", "/workspace/*venv*/bin/python", "~/*venv*/bin/python"),
    *("~/*/.venv/bin/python", "/workspace/*/.venv/bin/python"),
    *("~/.venv/bin/python", "~/.pyenv/versions/*/bin/python", "/usr/local/bin/python3", "/usr/bin/python3"),
)
# The process ends without cleanup: unloading torch's modules takes a quarter of their import time.
PROBE = """
import hashlib, json, os, sys, torch
try:
    from numpy import __version__ as numpy
except ImportError:
    numpy = None
def packages():
    try:
        from importlib.metadata import distributions
        lines = sorted({"%s==%s" % (found.metadata["Name"], found.version) for found in distributions()})
        return {"count": len(lines), "sha256": hashlib.sha256("\\n".join(lines).encode()).hexdigest()}
    except Exception:
        return None
def tell(**facts):
    print(json.dumps(facts), flush=True)
def free_bytes(place):
    try:
        return torch.cuda.mem_get_info(place)[0]
    except Exception:
        return None
def worked(place):
    facts = {"name": "GPU %d" % place, "memory_bytes": 0, "error": None}
    try:
        card = torch.cuda.get_device_properties(place)
        facts.update(name=card.name, memory_bytes=card.total_memory, capability="%d.%d" % (card.major, card.minor))
        facts.update(uuid=str(getattr(card, "uuid", "")), free_bytes=free_bytes(place))
        for kind in [torch.float32] + [torch.bfloat16] * (card.major >= 8):
            ones = torch.ones(64, 64, device="cuda:%d" % place, dtype=kind)
            product = (ones @ ones).cpu().float()
            if not bool((product == 64).all()):
                wrong = [value for value in product.flatten().tolist() if value != 64]
                facts["error"] = "a product in %s has %s where it is 64" % (kind, wrong[0])
        torch.cuda.synchronize(place)
    except Exception as error:
        facts["error"] = "%s: %s" % (type(error).__name__, error)
    return facts
built_for = torch.version.cuda or getattr(torch.version, "hip", None)
tell(version=torch.__version__, numpy=numpy, built_for=built_for, packages=packages())
sys.stdin.readline()
try:
    torch.cuda.init()
    devices = [worked(place) for place in range(torch.cuda.device_count())]
    archs = torch.cuda.get_arch_list()
    tell(cuda=torch.version.cuda if devices else None, devices=devices, archs=archs)
except Exception as error:
    tell(error="%s: %s" % (type(error).__name__, error))
os._exit(0)
"""


def find_torch(root: str, python: Optional[str] = None) -> Json:
    """Return the result of `Looks.best`."""
    return Looks(root, python).best(lambda _: None)


def pythons() -> List[str]:
    """Return the usual Pythons of rented machines, without duplicates."""
    usual = [sys.executable, shutil.which("python3") or "", "/opt/pytorch/bin/python"]
    for place in PLACES:
        usual += sorted(glob.glob(os.path.expanduser(place)))
    return list(dict.fromkeys(filter(os.path.exists, usual)))[:MOST_PYTHONS]


def rank(answer: Json) -> int:
    """Return how suitable a Python is: 0 without torch, 1 without a GPU, 2 if a kernel failed, 3 if all ran."""
    devices = answer["devices"]
    if not answer["found"] or not (answer["cuda"] or devices):
        return int(answer["found"])
    return 2 if any(device.get("error") for device in devices) else 3


class Looks:
    """The checks of all Pythons, or of the named one: started together, with one time limit."""

    def __init__(self, root: str, python: Optional[str]) -> None:
        exported = remembered_variables(root)
        self.root, self.begun_mono, self.next_s = root, time.monotonic(), TELL_S
        self.looks = [TorchProbe(program, exported) for program in ([python] if python else pythons())]

    def best(self, tell: Callable[[Json], None]) -> Json:
        """Return the first Python whose torch works on all GPUs, else the best one; record it for `start`.

        `looks` are the other Pythons that were waited for. `tell` is called every two seconds with those that still
        run.
        """
        best: Json = dict(NOTHING, found=False, python=None)
        seen: List[TorchProbe] = []
        has_cards = os.path.exists("/dev/nvidiactl")
        try:
            for look in self.looks:
                seen.append(look)
                self.wait(look, tell)
                if look.has_imported():
                    look.go()
                    self.wait(look, tell)
                answer = look.answer()
                if rank(answer) > rank(best):
                    best = answer
                if rank(best) == 3 or (best["found"] and not has_cards):
                    break
            others = [look.as_record() for look in seen if look.python != best["python"]]
        finally:
            for look in self.looks:
                look.end()
        write(path_in(self.root, "agent", "python.json"), best)
        return dict(best, looks=others)

    def wait(self, look: TorchProbe, tell: Callable[[Json], None]) -> None:
        """Wait until a probe has imported torch or, if it already has, until it ends; at most until the time limit."""
        while not (look.has_ended() or (look.has_imported() and not look.is_on_cards)):
            spent_s = time.monotonic() - self.begun_mono
            if spent_s >= LIMIT_S:
                return
            if spent_s >= self.next_s:
                self.next_s = spent_s + TELL_S
                tell({"seconds": int(spent_s), "waits_for": self.words()})
            time.sleep(TICK_S)

    def words(self) -> str:
        """Return which Pythons have not reported yet, and what each does."""
        importing = [look.python for look in self.looks if not (look.has_imported() or look.has_ended())]
        at_work = [look.python for look in self.looks if look.is_on_cards and not look.has_ended()]
        parts = [first_and_count(importing) + " to import torch"] if importing else []
        parts += [first_and_count(at_work) + " to test the GPUs"] if at_work else []
        return "waiting for " + "; ".join(parts)


class TorchProbe:
    """One Python that runs the probe; its output goes to unnamed files."""

    def __init__(self, python: str, exported: Dict[str, str]) -> None:
        self.python, self.is_on_cards, self.failure = python, False, ""
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.child: Any = None
        try:
            self.child = subprocess.Popen(
                [python, "-c", PROBE], env=environment(**exported), stdin=subprocess.PIPE,
                stdout=self.out, stderr=self.err, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.failure = str(error.strerror)

    def has_imported(self) -> bool:
        """Return whether the probe has reported its torch."""
        return self.child is not None and b"\n" in content_of(self.out)

    def has_ended(self) -> bool:
        """Return whether the probe has ended."""
        return self.child is None or self.child.poll() is not None

    def go(self) -> None:
        """Let the probe use the GPUs."""
        self.is_on_cards = True
        try:
            self.child.stdin.close()
        except OSError:
            return

    def answer(self) -> Json:
        """Return the probe's report. A torch that was imported counts as found, whatever happened with the GPUs."""
        facts: Json = {}
        for line in content_of(self.out).splitlines():
            try:
                facts.update(json.loads(line))
            except (TypeError, ValueError):
                continue  # An image's own sitecustomize printed this line.
        answer: Json = {name: facts.get(name, usual) for name, usual in NOTHING.items()}
        answer.update(found=bool(facts.get("version")), python=self.python if facts.get("version") else None)
        error, words = facts.get("error") or "", self.words()
        words = error if error and error.partition(": ")[2] in words else "; ".join(filter(None, (error, words)))
        if not self.has_ended():
            words = "it did not answer within %.0f s; %s" % (LIMIT_S, words)
        for device in answer["devices"]:
            device.update({"error": keep_end(device["error"])} if device.get("error") else {})
        return dict(answer, error=keep_end(words) or None)

    def as_record(self) -> Json:
        """Return whether the probe ended in time, and its last error output."""
        return {"python": keep_end(self.python), "answered": self.has_ended(), "words": self.words()}

    def words(self) -> str:
        """Return the last lines of the probe's standard error, or why it did not start."""
        lines = [line.strip() for line in content_of(self.err).decode("utf-8", "replace").splitlines()]
        last = [line for line in lines if line and not line.startswith(("Traceback", 'File "<string>"'))]
        return keep_end(self.failure or " / ".join(last[-LAST_LINES:]))

    def end(self) -> None:
        """End the probe and all its children. A process that hangs in the kernel (a lost GPU) is not waited for."""
        if self.child is not None and self.child.poll() is None:
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait(1.0)
            except (OSError, subprocess.TimeoutExpired):
                pass
        for file in (self.out, self.err):
            file.close()


def content_of(file: Any) -> bytes:
    """Return a child's output so far, or only the end of a long one. The child's own file position is unchanged."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), MOST_OUTPUT_BYTES, max(0, size - MOST_OUTPUT_BYTES))


def first_and_count(pythons: List[str]) -> str:
    """Return the first Python, and the number of the others."""
    more = " and %d more" % (len(pythons) - 1) if pythons[1:] else ""
    return keep_end(pythons[0], 200) + more


def keep_end(words: str, most: int = MOST_WORDS) -> str:
    """Return the end of a text, because that names the error."""
    return words if len(words) <= most else "… " + words[2 - most :]

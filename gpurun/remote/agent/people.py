"""Observes whether a user works on a dev box: key presses, traffic through forwarded ports, and their processes.

An idle connection does not count as work, and neither do gpurun's own processes. What users type or send is never read.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterator, List, Optional, Set, Tuple

    from gpurun.remote.agent.system import Json

    Tcp = Dict[Tuple[int, int], Tuple[int, int]]  # (local port, other port) -> (inode, bytes so far)

TRAFFIC_S, KEEP_ALIVE_BYTES = 60.0, 1000
"""A connection that carries fewer bytes than this in a minute is unused. An editor then sends only keep-alives."""
SHELL_OF = b"GPURUN_SHELL_OF="
"""The variable by which a shell that `gpurun ssh` has opened names the run's folder."""
SERVERS = (b"sshd", b"sshd-session", b"nvidia-smi", b"dropbear")
"""Programs that only host a user's work, or that read the GPUs. They do not count as work themselves."""
OWN = (b"agent.pyz", b"/slurm_script\0")
"""What gpurun's own command lines contain: the agent's file, or Slurm's name for the job's script (pilot.sh)."""
ESTABLISHED, INET_DIAG_INFO, DUMP, SOCK_DIAG_BY_FAMILY, DONE = 1 << 1, 2, 0x301, 20, 3
MESSAGE_BYTES, ACKED_AT, RECEIVED_AT = 72, 120, 128


class People:
    """What users did on a machine since the last check.

    If the machine `is_whole`, that is, rented for this run alone, every process counts. On a shared machine, a process
    counts if it works below the run's folder, or was started from a shell of the run. `tally` counts the terminals that
    were opened, the terminals that are open now, the seconds in which at least one was open, and the seconds in which
    users worked.
    """

    def __init__(self, root: str, is_whole: bool, idle_s: float) -> None:
        self.root, self.is_whole = root, is_whole
        self.window_s = min(TRAFFIC_S, idle_s / 4) if idle_s else TRAFFIC_S
        self.tally: Json = {"terminals": 0, "open": 0, "open_s": 0.0, "used_s": 0.0}
        self.seen: Dict[str, Tuple[int, int]] = {}
        self.cpu: Optional[Dict[int, int]] = None
        self.traffic: Optional[Dict[Tuple[int, int], int]] = None
        self.traffic_s = self.looked_s = time.monotonic()

    def look(self, job: Set[int], runner: int = 0) -> Tuple[bool, Optional[float]]:
        """Return whether users used the machine since the last check, and their CPU seconds (None at the first check).

        `job` are the processes of the job; `runner` is the one among them that is gpurun's own.
        """
        now_s = time.monotonic()
        found = dict(self.processes(job))
        used_s = self.cpu_seconds(found, runner)
        is_used = self.is_typed(set(found))
        is_used = self.is_forwarded(set(found)) or is_used
        passed_s, self.looked_s = now_s - self.looked_s, now_s
        self.tally = {  # The tally is replaced as a whole, because another thread reads it.
            "terminals": self.tally["terminals"],
            "open": len(self.seen),
            "open_s": self.tally["open_s"] + (passed_s if self.seen else 0.0),
            "used_s": self.tally["used_s"] + (passed_s if is_used else 0.0),
        }
        return is_used, used_s

    def processes(self, job: Set[int]) -> Iterator[Tuple[int, Tuple[int, int]]]:
        """Yield the processes that count, each with its own CPU ticks and those of its ended children."""
        below: Set[int] = set()
        parents: Dict[int, int] = {}
        rows: List[Tuple[int, bool, Tuple[int, int]]] = []
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            try:
                uid = os.stat("/proc/%d" % pid).st_uid
                with open("/proc/%d/stat" % pid, "rb") as file:
                    name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
                with open("/proc/%d/cmdline" % pid, "rb") as file:
                    words = file.read()
            except OSError:
                continue
            fields = rest.split()
            is_ours = pid == os.getpid() or any(own in words for own in OWN)
            if fields[0] in b"ZX" or is_ours or name in SERVERS:
                continue
            parents[pid] = int(fields[1])
            ticks = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
            # The terminal test also finds processes that were started with `sudo`.
            is_theirs = uid == os.getuid() or fields[4] != b"0"
            if pid in job or (not self.is_whole and self.is_of_run(pid)):
                below.add(pid)
            rows.append((pid, is_theirs, ticks))
        for pid, is_theirs, ticks in rows:
            if self.is_whole and is_theirs:
                yield pid, ticks
            elif pid in below or parents[pid] in below:
                below.add(pid)
                yield pid, ticks

    def is_of_run(self, pid: int) -> bool:
        """Return whether a process works below the run's folder, or was started from a shell of the run."""
        with suppress(OSError):
            place = os.readlink("/proc/%d/cwd" % pid)
            if place == self.root or place.startswith(self.root + "/"):
                return True
            with open("/proc/%d/environ" % pid, "rb") as file:
                return SHELL_OF + os.fsencode(self.root) in file.read().split(b"\0")
        return False

    def cpu_seconds(self, found: Dict[int, Tuple[int, int]], runner: int) -> Optional[float]:
        """Return the processes' CPU seconds since the last check; None at first. The runner's own do not count."""
        now = {pid: ended if pid == runner else own + ended for pid, (own, ended) in found.items()}
        before, self.cpu = self.cpu, now
        if before is None:
            return None
        return sum(max(0, ticks - before.get(pid, 0)) for pid, ticks in now.items()) / os.sysconf("SC_CLK_TCK")

    def is_typed(self, pids: Set[int]) -> bool:
        """Return whether a key was pressed in a terminal of these processes, or a terminal was opened."""
        seen, is_typed = {}, False
        for path in {terminal for terminal in map(terminal_of, pids) if terminal}:
            with suppress(OSError):
                facts = os.stat(path)
                seen[path] = (facts.st_ctime_ns, facts.st_atime_ns)
                before = self.seen.get(path)
                if before is None:
                    self.tally["terminals"] += 1
                is_typed = is_typed or before is None or before[1] != facts.st_atime_ns
        self.seen = seen
        return is_typed

    def is_forwarded(self, pids: Set[int]) -> bool:
        """Return whether a connection from elsewhere carried more than keep-alives in the last minute."""
        now_s, now = time.monotonic(), dict(forwarded_bytes(pids))
        before, passed_s = self.traffic, now_s - self.traffic_s
        if before is None or passed_s >= self.window_s:
            self.traffic, self.traffic_s = now, now_s
        if before is None:
            return False
        most = KEEP_ALIVE_BYTES * max(self.window_s, passed_s) / TRAFFIC_S
        return any(size - before.get(ports, 0) > most for ports, size in now.items())

    def say(self, words: str) -> None:
        """Write a line to each open terminal."""
        for path in self.seen:
            with suppress(OSError):
                terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
                try:
                    os.write(terminal, b"\r\n\a" + words.encode() + b"\r\n")
                finally:
                    os.close(terminal)


def terminal_of(pid: int) -> str:
    """Return the terminal from which a process reads; "" if it reads from something else."""
    with suppress(OSError):
        place = os.readlink("/proc/%d/fd/0" % pid)
        return place if place.startswith("/dev/pts/") else ""
    return ""


def forwarded_bytes(pids: Set[int]) -> Iterator[Tuple[Tuple[int, int], int]]:
    """Yield the bytes of each loopback connection between one of these processes and another process.

    sshd forwards ports in that way. Yield nothing if the kernel does not report such connections.
    """
    try:
        known = tcp_of_loopback()
    except (OSError, struct.error, AttributeError):
        return
    inodes = {inode for pid in pids for inode in sockets_of(pid)} if known else set()
    for (port, other), (inode, size) in known.items():
        if inode in inodes and known.get((other, port), (0, 0))[0] not in inodes:
            yield (port, other), size


def sockets_of(pid: int) -> Iterator[int]:
    """Yield the inodes of a process's sockets."""
    with suppress(OSError):
        for name in os.listdir("/proc/%d/fd" % pid):
            with suppress(OSError, ValueError):
                place = os.readlink("/proc/%d/fd/%s" % (pid, name))
                if place.startswith("socket:["):
                    yield int(place[8:-1])


def tcp_of_loopback() -> Tcp:
    """Return each established loopback connection, as the kernel reports it to any user (sock_diag)."""
    found: Tcp = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:
            kernel.settimeout(2.0)
            order = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0, ESTABLISHED)
            kernel.send(struct.pack("=IHHII", 16 + len(order), SOCK_DIAG_BY_FAMILY, DUMP, 1, 0) + order)
            is_more = True
            while is_more:
                is_more = take_messages(kernel.recv(1 << 16), family, found)
    return found


def take_messages(content: bytes, family: int, found: Tcp) -> bool:
    """Parse one reply of the kernel into `found`. Return whether more replies follow."""
    at = 0
    while at + 16 <= len(content):
        length, kind = struct.unpack_from("=IH", content, at)
        if kind != SOCK_DIAG_BY_FAMILY or length < 16 + MESSAGE_BYTES:
            return False
        message = content[at + 16 : at + length]
        port, other = struct.unpack_from(">HH", message, 4)
        source, target = message[8:24], message[24:40]
        (inode,) = struct.unpack_from("=I", message, MESSAGE_BYTES - 4)
        if is_loopback(source, family) and is_loopback(target, family):
            found[port, other] = (inode, bytes_of(message[MESSAGE_BYTES:]))
        at += (length + 3) & ~3
    return True


def is_loopback(address: bytes, family: int) -> bool:
    """Return whether an address belongs to this machine's loopback."""
    if family == socket.AF_INET:
        return address[0] == 127
    return address == b"\0" * 15 + b"\1" or (address[:12] == b"\0" * 10 + b"\xff\xff" and address[12] == 127)


def bytes_of(attributes: bytes) -> int:
    """Return a connection's bytes in both directions, from its attributes; 0 if an old kernel does not report them."""
    at = 0
    while at + 4 <= len(attributes):
        length, kind = struct.unpack_from("=HH", attributes, at)
        if kind == INET_DIAG_INFO and length >= 4 + RECEIVED_AT + 8:
            return sum(struct.unpack_from("=Q", attributes, at + 4 + place)[0] for place in (ACKED_AT, RECEIVED_AT))
        if length < 4:
            return 0
        at += (length + 3) & ~3
    return 0

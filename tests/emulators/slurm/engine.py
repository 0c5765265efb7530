"""The real Slurm on loopback: a slurmctld and two slurmd, on request with accounting; the tests start and end them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.cluster import Cluster
from gpurun.core.records import InstanceState
from gpurun.planning.own_box import LoginHere
from gpurun.providers.base import Unknown
from gpurun.providers.slurm.provider import Site, SlurmProvider

CLOCK = SystemClock()
CONF = """
ClusterName=probe
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
FirstJobId={first_job}
ReturnToService=2
SlurmdTimeout=30
KillWait=5
MinJobAge=60
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 Feature=fast \
 Gres=gpu:a100:2,gpu:v100:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=01:00:00 State=UP
PartitionName=shut Nodes=n1 AllowAccounts=lab State=UP
PartitionName=small Nodes=n1,n2 MaxNodes=1 State=UP
PartitionName=debug Nodes=n1,n2 MaxTime=00:05:00 State=UP
PartitionName=closed Nodes=n1,n2 State=DOWN
PartitionName=leaving Nodes=n1 State=DRAIN
PartitionName=tier Nodes=n1 AllowQos=low State=UP
"""
# Files that always exist stand for GPUs: Slurm counts them, and no job opens them.
GRES = """NodeName=n1 Name=gpu Type=a100 File=/dev/null Cores=0
NodeName=n1 Name=gpu Type=a100 File=/dev/zero Cores=1
NodeName=n1 Name=gpu Type=v100 File=/dev/full
"""
NO_BOOKS = "AccountingStorageType=accounting_storage/none\n"
BOOKS = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={root}/munge.sock
AccountingStorageEnforce=limits,qos
AccountingStorageTRES=gres/gpu
"""
DBD = """
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql}
StorageUser=root
StorageLoc=slurm_acct_db
LogFile={root}/slurmdbd.log
PidFile={root}/slurmdbd.pid
"""


class Engine:
    """A cluster of two nodes on this computer. Its daemons are children of this process and die when `stack` closes."""

    def __init__(self, root: Path, stack: ExitStack, *, has_books: bool = False) -> None:
        self.root, self._stack = root, stack
        self.work = root / "shared"
        for name in ("state", "spool-n1", "spool-n2"):
            (root / name).mkdir()
        with ExitStack() as held:
            ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(5)]
        self.conf = root / "slurm.conf"
        (root / "cgroup.conf").write_text(
            "CgroupAutomount=no\nCgroupMountpoint=/sys/fs/cgroup\nCgroupPlugin=cgroup/v1\nConstrainCores=no\n"
            "ConstrainRAMSpace=no\nConstrainDevices=no\n"
        )
        (root / "gres.conf").write_text(GRES)
        books = BOOKS.format(root=root, port=ports[3]) if has_books else NO_BOOKS
        # A node kills everything in a job's cgroup, and the cgroup's path has the job's number but not its cluster:
        # two engines at the same time would end each other's jobs if they did not count from different numbers.
        first_job = 10_000 + secrets.randbelow(60_000_000)
        conf = CONF.format(root=root, host=socket.gethostname(), ports=ports, first_job=first_job)
        self.conf.write_text(conf + books)
        key = root / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        names = {"key-file": key, "socket": root / "munge.sock", "pid-file": root / "munge.pid"}
        names |= {"log-file": root / "munge.log", "seed-file": root / "munge.seed"}
        self.start("munged", "-F", "--force", *(f"--{name}={path}" for name, path in names.items()))
        if has_books:
            self._open_books(ports[3], ports[4])
        self.controller = self.start("slurmctld", "-D", "-f", str(self.conf))
        self.nodes = [self.start("slurmd", "-D", "-N", name, "-f", str(self.conf)) for name in ("n1", "n2")]

    def _open_books(self, port: int, sql: int) -> None:
        """Start MariaDB and slurmdbd, and register root as a user with two QOS, one of which has limits."""
        data, conf = self.root / "mariadb", self.root / "slurmdbd.conf"
        made = ["mariadb-install-db", f"--datadir={data}", "--user=root", "--auth-root-authentication-method=normal"]
        subprocess.run([*made, "--skip-test-db"], check=True, capture_output=True)
        where = [f"--socket={self.root}/mariadb.sock", f"--port={sql}", "--bind-address=127.0.0.1"]
        self.start("mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", *where)
        conf.touch(0o600)
        conf.write_text(DBD.format(root=self.root, host=socket.gethostname(), port=port, sql=sql))
        for _ in ticks(CLOCK, 0.2, 30):
            if socket.socket().connect_ex(("127.0.0.1", sql)) == 0:
                break
        self.start("slurmdbd", "-D")
        for _ in ticks(CLOCK, 0.2, 30):
            if self.ask("sacctmgr", "-n", "show", "cluster", is_checked=False).returncode == 0:
                break
        for words in (
            ("add", "cluster", "probe"),
            ("add", "account", "lab"),
            ("add", "qos", "low"),
            ("modify", "qos", "low", "set", "MaxWall=00:10:00", "MaxTRESPerJob=cpu=1", "Flags=DenyOnLimit"),
            ("add", "user", "root", "account=lab", "qos=normal,low", "defaultqos=normal"),
            ("modify", "user", "root", "set", "defaultaccount=lab"),
        ):
            self.ask("sacctmgr", "-i", *words)

    def ask(self, *argv: str, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs against this cluster."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        reply = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        assert not (is_checked and reply.returncode), f"{argv}: {reply.stdout}{reply.stderr}"
        return reply

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a daemon as a child of this process."""
        environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(self.conf)}
        with open(self.root / f"{argv[0]}.out", "ab") as log:
            child = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._stack.callback(child.wait)
        self._stack.callback(child.send_signal, signal.SIGKILL)
        return child

    def stop_controller(self, seconds: float) -> None:
        """Stop the controller and start it again after `seconds`."""
        self.controller.send_signal(signal.SIGTERM)
        self.controller.wait()
        CLOCK.sleep(seconds)
        self.controller = self.start("slurmctld", "-D", "-f", str(self.conf))

    def break_node(self) -> None:
        """Kill the first node's daemon and every process in the shared folder, with its slurmstepd: a power cut."""
        self.nodes[0].send_signal(signal.SIGKILL)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if not Path(f"/proc/{pid}/cwd").resolve().is_relative_to(self.work):
                    continue
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd"):
                    os.kill(int(parent), signal.SIGKILL)
                os.kill(int(pid), signal.SIGKILL)

    def mend_node(self) -> None:
        """Restart the daemon of the first node, and wait until the node is idle."""
        self.nodes[0].wait()
        self.nodes[0] = self.start("slurmd", "-D", "-N", "n1", "-f", str(self.conf))
        for _ in ticks(CLOCK, 0.5, 60):
            if set(self.ask("sinfo", "-h", "-n", "n1", "-o", "%t").stdout.split()) == {"idle"}:
                return

    def break_second_node(self) -> None:
        """Kill the daemon and the job's processes of the second node, which has neither the pilot nor the agent."""
        self.nodes[1].send_signal(signal.SIGKILL)
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if b"SLURMD_NODENAME=n2" in (folder / "environ").read_bytes().split(b"\0"):
                    keeper = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                    is_keeper = b"slurmstepd" in Path(f"/proc/{keeper}/cmdline").read_bytes()
                    for pid in (keeper, folder.name) if is_keeper else (folder.name,):
                        os.kill(int(pid), signal.SIGKILL)

    @property
    def cluster(self) -> Cluster:
        return Cluster(name="lab", host="local", workdir=str(self.work))


@contextmanager
def running(root: Path, *, has_books: bool = False) -> Iterator[Engine]:
    """Yield a cluster once its nodes are idle; its programs come first in PATH. `has_books` adds accounting."""
    root.mkdir()
    with ExitStack() as stack:
        engine = Engine(root, stack, has_books=has_books)
        # gpurun does not pass Slurm's variables to its children, so these programs in PATH set SLURM_CONF.
        programs = root / "bin"
        programs.mkdir()
        for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "srun", "sacct", "sacctmgr"):
            (programs / name).write_text(f'#!/bin/sh\nSLURM_CONF={engine.conf} exec /usr/bin/{name} "$@"\n')
            (programs / name).chmod(0o755)
        before = os.environ["PATH"]
        stack.callback(os.environ.__setitem__, "PATH", before)
        os.environ["PATH"] = f"{programs}:{before}"
        provider = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK)
        for _ in ticks(CLOCK, 0.2, 30):
            try:
                idle = subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True, check=False).stdout
                if set(idle.split()) == {"idle"} and provider.partition().name == "main":
                    break
            except Unknown:
                continue
        else:
            raise AssertionError((root / "slurmctld.log").read_text()[-3000:])
        yield engine
        for instance in provider.find(None):
            provider.destroy(instance.id)
        for _ in ticks(CLOCK, 0.5, 30):
            if all(instance.state is InstanceState.GONE for instance in provider.find(None)):
                break


def booked(engine: Engine, job: str) -> tuple[str, int]:
    """Return a job's state and seconds from accounting, once its end is recorded there."""
    for _ in ticks(CLOCK, 0.5, 30):
        words = engine.ask("sacct", "-X", "-n", "-P", "-o", "State,ElapsedRaw,End", "-j", job).stdout.strip().split("|")
        if len(words) == 3 and words[2] != "Unknown":
            return words[0].split()[0], int(words[1])
    raise AssertionError(f"accounting has no end of {job}: {words}")

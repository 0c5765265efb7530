"""Tests that Linux-only calls are listed here with a Mac's substitute; the agent is exempt: it runs on Linux."""

from __future__ import annotations

import ast
import re

from house_sources import ROOT, Source, sources

FAR_SIDE = "gpurun/remote/agent/"
MODULES = ("os", "select", "signal", "resource", "time", "socket", "fcntl", "mmap", "multiprocessing", "threading")
CALLS = re.compile(
    r"""(os\.)?(sched_\w+|pidfd_\w+|eventfd\w*|memfd_create|posix_fadvise|posix_fallocate|fdatasync|copy_file_range
    |splice|getrandom|setns|unshare|timerfd_\w+|process_cpu_count|O_(PATH|TMPFILE|DIRECT|NOATIME|LARGEFILE)|[gs]etxattr
    |listxattr|removexattr|setresuid|setresgid|getresuid|getresgid|syncfs|preadv2?|pwritev2?|RTLD_DEEPBIND)
    |select\.(epoll|poll)|signal\.(sigtimedwait|sigwaitinfo|SIGPWR|SIGSTKFLT|SIGPOLL|SIGRTMIN|pidfd_send_signal)
    |resource\.(prlimit|RUSAGE_THREAD|RLIMIT_(NICE|RTPRIO|RTTIME|SIGPENDING|MSGQUEUE))|time\.CLOCK_(BOOTTIME|TAI)
    |socket\.(AF_(NETLINK|PACKET|VSOCK|ALG)|SO_(PEERCRED|BINDTODEVICE|MARK)|TCP_(USER_TIMEOUT|QUICKACK|CORK))
    |fcntl\.(F_(SETPIPE_SZ|GETPIPE_SZ|OFD_\w+|ADD_SEALS|NOTIFY|SETLEASE))|mmap\.MAP_POPULATE""",
    re.VERBOSE,
)
WORDS = re.compile(r"/proc\b|/dev/shm|/sys/|/etc/(?!ssh)|\bprctl\b|\bCLOCK_BOOTTIME\b|\bfdatasync\b|\bprlimit\b")
FORK = re.compile(r"""get_context\(['"]fork['"]\)|set_start_method\(['"]fork['"]""")
ON_A_MAC = {
    "gpurun/cli/waiting.py": "a container's first process: where there is none to read, nothing is said",
    "gpurun/core/bounded_program.py": "prlimit, where there is one: docs/THREATS.md says that Linux alone bounds it",
    "gpurun/core/clock.py": "sysctl names the boot of a Mac, the network card the machine; its clock counts sleep",
    "gpurun/providers/processes.py": "ps",
    "gpurun/remote/resumable_file.py": "fsync and F_FULLFSYNC",
    "trainer/distributed.py": "the count of all cores",
    "trainer/run.py": "the processor's name: its architecture",
    "trainer/shards.py": "the memory that is free: half of what there is",
}
"""The substitute on a Mac in each file that uses something of Linux."""
OF_A_MACHINE = {
    "gpurun/cli/failure_hints.py": "words of a machine's log, and a hint",
    "gpurun/planning/verify_machine.py": "a sentence on what a machine has",
    "gpurun/readers/notebook_file.py": "a cell that runs on Colab or Kaggle",
    "gpurun/remote/ssh/program.py": "a line of shell for the machine",
}
"""Files that have Linux words only in text for a machine, or about one; they do not call this computer."""


def docstrings(source: Source) -> set[int]:
    holders = (node for node in ast.walk(source.tree) if isinstance(node, ast.Expr))
    return {id(node.value) for node in holders if isinstance(node.value, ast.Constant)}


def of_linux(source: Source) -> list[str]:
    """Return the places where a module uses something of this computer that macOS does not have."""
    documented, found = docstrings(source), list[str]()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and CALLS.fullmatch(ast.unparse(node)):
            found.append(f"{source.at(node)} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            whole = [f"{node.module}.{name.name}" for name in node.names]
            found += [f"{source.at(node)} {name}" for name in whole if CALLS.fullmatch(name)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            found += [f"{source.at(node)} {word}" for word in WORDS.findall(node.value)]
        elif isinstance(node, ast.Call) and FORK.search(ast.unparse(node)):
            found.append(f"{source.at(node)} a process that is forked: macOS breaks its libraries")
    return found


def test_linux_calls_are_made_only_where_a_mac_has_a_substitute() -> None:
    named = {**ON_A_MAC, **OF_A_MACHINE}
    here = [source for source in sources("gpurun", "trainer") if not source.path.startswith(FAR_SIDE)]
    calls = {source.path: found for source in here if (found := of_linux(source))}
    assert not {path: found for path, found in calls.items() if path not in named}


def test_no_file_is_listed_that_no_longer_needs_linux() -> None:
    assert [
        path for path in {**ON_A_MAC, **OF_A_MACHINE} if not of_linux(Source(path, (ROOT / path).read_text()))
    ] == []


def test_what_make_runs_here_is_read_by_the_bash_of_a_mac() -> None:
    """The bash of a Mac is version 3.2, of 2007."""
    newer = re.compile(
        r"mapfile|readarray|declare -[Agn]|local -n|\$\{\w+(,,|\^\^|@Q)|&>>|\|&|coproc|\[\[ -v |;;&|printf -v \w+\["
    )
    scripts = [ROOT / ".ci" / "run", ROOT / "Makefile"]
    assert {path.name: found for path in scripts if (found := newer.findall(path.read_text()))} == {}

"""Makes this Python resemble a Mac's: removes what a Mac lacks, adds what it has. Loaded before every other module.

`F_FULLFSYNC` does an fsync here and adds a line to a file.
"""

import fcntl
import os
import select
import signal
import time

F_FULLFSYNC = 51
NOTES = "HIDDEN_FOLDER/full_syncs"
GONE = {
    os: (
        "sched_getaffinity sched_setaffinity sched_getcpu pidfd_open eventfd memfd_create process_cpu_count "
        "posix_fadvise posix_fallocate fdatasync copy_file_range splice getrandom setns unshare getxattr setxattr "
        "listxattr removexattr setresuid getresuid preadv2 pwritev2 O_PATH O_TMPFILE O_DIRECT O_NOATIME"
    ),
    select: "epoll",
    signal: "sigtimedwait sigwaitinfo SIGPWR SIGSTKFLT SIGPOLL SIGRTMIN SIGRTMAX",
    time: "CLOCK_BOOTTIME CLOCK_TAI",
}
_fcntl, _poll = fcntl.fcntl, select.poll


def fcntl_of_a_mac(descriptor, command, *rest):
    if command == F_FULLFSYNC:
        os.fsync(descriptor)
        with open(NOTES, "a") as notes:
            notes.write(f"{os.getpid()}\n")
        return 0
    return _fcntl(descriptor, command, *rest)


class PollOfAMac:
    """A poll object that cannot watch a terminal: it reports POLLNVAL for one immediately, like a Mac's."""

    def __init__(self):
        self._poll, self._terminals = _poll(), set()

    def register(self, file, events=select.POLLIN | select.POLLPRI | select.POLLOUT):
        number = file if isinstance(file, int) else file.fileno()
        self._terminals |= {number} if os.isatty(number) else set()
        self._poll.register(number, events)

    def unregister(self, file):
        number = file if isinstance(file, int) else file.fileno()
        self._terminals.discard(number)
        self._poll.unregister(number)

    def modify(self, file, events):
        self._poll.modify(file, events)

    def poll(self, timeout=None):
        if self._terminals:
            return [(number, select.POLLNVAL) for number in self._terminals]
        return self._poll.poll(timeout)


for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
fcntl.F_FULLFSYNC, fcntl.fcntl, select.poll = F_FULLFSYNC, fcntl_of_a_mac, PollOfAMac

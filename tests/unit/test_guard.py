"""Tests of the guard's scripts in real shells with a real server: they end the machine in time, whatever fails."""

from __future__ import annotations

import base64
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gpurun.core.records import RunKeys
from gpurun.core.secrets import Secret
from gpurun.providers import guard

KEY = "rpa_canary7Hq2.0f"
NOW, DEADLINE = 1_899_999_999, 1_900_000_000
FAR = DEADLINE + 365 * 86_400
TOOLS = ["base64", "cat", "date", "dirname", "env", "mkdir", "mv", "rm", "sh", "sleep", "ssh-keygen", "timeout"]
SHELLS = {
    "sh": ["sh"], "bash": ["bash"], "busybox": ["busybox", "sh"],
    "busybox-static": ["busybox-static", "sh"],  # Debian's: it runs its own applets, whatever is in PATH.
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request that the server got, its time, and the command lines of all processes at that time."""

    wall: float
    what: str
    authorization: str
    body: str
    seen: str


class Api(ThreadingHTTPServer):
    """The cloud's API: a server that records each request and answers with the status that the test chooses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.server_bind()  # Not listening yet: until `open` a connection is refused.
        self.requests: list[Request] = []
        self.changed = threading.Condition()
        self.answer: Callable[[str], int] = lambda what: 204
        self.reply: Any = None  # The response to a GET.

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def open(self) -> None:
        self.server_activate()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def wait_for(self, count: int, limit_s: float = 60.0) -> list[Request]:
        with self.changed:
            enough = self.changed.wait_for(lambda: len(self.requests) >= count, limit_s)
        assert enough, f"only {[one.what for one in self.requests]} came"
        return self.requests[:count]


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        what = f"{self.command} {self.path}"
        seen = command_lines()
        request = Request(time.time(), what, self.headers.get("Authorization", ""), body, seen)
        with self.server.changed:
            self.server.requests.append(request)
            self.server.changed.notify_all()
        status = self.server.answer(what)
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        content = json.dumps(self.server.reply).encode() if self.command == "GET" else b""
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_DELETE = do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


def command_lines() -> str:
    """Return the command line of every process on this machine, one per line."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(lines)


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    server.open()
    yield server
    server.shutdown()
    server.server_close()


class Shell:
    """An isolated machine: a PATH with few tools, a folder that survives restarts, and the started programs."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words = folder, words
        self.bin, self.disk, self.ssh = folder / "bin", folder / "disk", folder / "ssh"
        self.clock, self.looks = folder / "clock", folder / "looks"
        self.by_clock = f'echo look >>"{self.looks}"\ncat "{self.clock}"'
        self.uptime = folder / "uptime"
        self.booted(10**9)  # So long ago that no clock counts as too far ahead.
        self.bin.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []
        self.how: dict[str, Any] = {}  # More options for starting each program.
        self.provide(*TOOLS, words[0], "curl")

    def provide(self, *tools: str) -> None:
        for tool in tools:
            found = shutil.which(tool, path="/usr/bin:/bin:" + os.environ["PATH"])
            assert found, f"{tool} is not on this machine"
            (self.bin / tool).unlink(missing_ok=True)
            (self.bin / tool).symlink_to(found)

    def take_away(self, *tools: str) -> None:
        for tool in tools:
            (self.bin / tool).unlink()

    def pretend(self, tool: str, script: str) -> None:
        """Provide a tool whose program is this shell script."""
        (self.bin / tool).unlink(missing_ok=True)
        (self.bin / tool).write_text(f"#!{shutil.which('sh')}\n{script}\n")
        (self.bin / tool).chmod(0o755)

    def booted(self, seconds_ago: int) -> None:
        """Set how many seconds ago the machine was booted."""
        self.uptime.write_text(f"{seconds_ago}.07 0.00\n")

    def set_clock(self, wall: int) -> None:
        """Give the machine a clock that stands still until it is set again."""
        clock, looks = self.clock, self.looks
        clock.with_suffix(".new").write_text(f"{wall}\n")
        clock.with_suffix(".new").replace(clock)
        if not looks.exists():
            looks.touch()
            self.pretend("date", self.by_clock)

    def is_left_waiting(self) -> None:
        """Wait until the guard has looked at the clock twice more, and is still waiting."""
        looks = self.looks
        seen = looks.stat().st_size
        until(lambda: looks.stat().st_size >= seen + 2 * len("look\n"))

    def run(self, *argv: str, **env: str) -> subprocess.Popen[bytes]:
        known = {
            "PATH": str(self.bin), "GPURUN_GUARD_TICK_S": "0.1", "GPURUN_GUARD_PAUSE_S": "0.1",
            "GPURUN_GUARD_FOLDER": str(self.disk), "GPURUN_GUARD_SSH_FOLDER": str(self.ssh),
            "GPURUN_GUARD_UPTIME": str(self.uptime),
        }  # fmt: skip
        if argv[0] == "-c" and self.words[0] == "busybox-static":  # It does not use the `date` in PATH.
            prelude = f'date() {{ if [ -f "{self.looks}" ]; then {self.by_clock}\nelse command date "$@"; fi; }}\n'
            argv = ("-c", prelude + argv[1], *argv[2:])
        with open(self.folder / "console", "ab") as console:
            child = subprocess.Popen(
                [str(self.bin / self.words[0]), *self.words[1:], *argv],
                env=known | env, start_new_session=True, stdin=subprocess.DEVNULL,
                **{"stdout": console, "stderr": console, **self.how},
            )  # fmt: skip
        self.started.append(child)
        return child

    def kill(self) -> None:
        """Kill every started program, as a restart of the machine does."""
        while self.started:
            child = self.started.pop()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    @property
    def console(self) -> str:
        return (self.folder / "console").read_text()


@pytest.fixture(
    params=["sh", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bash", "busybox", "busybox-static"))]
)
def shell(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shell]:
    words = SHELLS[request.param]
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed here; sh is tested")
    machine = Shell(tmp_path, words)
    yield machine
    machine.kill()


@pytest.fixture
def sh(tmp_path: Path) -> Iterator[Shell]:
    machine = Shell(tmp_path, ["sh"])
    yield machine
    machine.kill()


def until(true: Callable[[], Any], limit_s: float = 60.0) -> Any:
    end = time.monotonic() + limit_s
    while not (value := true()):
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.02)
    return value


def keys() -> RunKeys:
    pairs = [Ed25519PrivateKey.generate() for _ in range(2)]
    public = [one.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() for one in pairs]
    private = pairs[1].private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
    return RunKeys(client_public=f"{public[0]} gpurun", host_public=f"{public[1]} gpurun", host_private=private)


class Pod:
    """A container whose first program is the guard's wrapper, which then starts `start.sh`."""

    def __init__(self, shell: Shell, api: Api) -> None:
        self.shell, self.api = shell, api
        self.start = shell.folder / "start.sh"
        self.start.write_text(
            f'#!{shutil.which("sh")}\necho "$@" >>"{shell.folder}/started"\nenv >"{shell.folder}/env"\nexec sleep 60\n'
        )
        self.start.chmod(0o755)

    def boot(self, deadline: object, lease_s: object = 0, **env: str) -> subprocess.Popen[bytes]:
        variables = {
            "GPURUN_DEADLINE": str(deadline), "GPURUN_LEASE_S": str(lease_s), "GPURUN_API_URL": self.api.url,
            "RUNPOD_POD_ID": "pod7x", "RUNPOD_API_KEY": KEY,
        }  # fmt: skip
        return self.shell.run("-c", guard.runpod_wrapper(), str(self.start), "one", "two words", **variables | env)

    @property
    def has_started(self) -> bool:
        return (self.shell.folder / "started").exists()

    def is_armed(self) -> None:
        """Wait until start.sh has started and the guard has recorded the time spent."""
        until(lambda: self.has_started and (self.shell.disk / "spent").exists())


@pytest.fixture
def pod(sh: Shell, api: Api) -> Pod:
    return Pod(sh, api)


# A pod


def test_a_pod_deletes_itself_at_its_deadline_and_not_before(shell: Shell, api: Api) -> None:
    deadline = int(time.time()) + 4  # Enough time to start, even on a busy machine.
    pod = Pod(shell, api)
    pod.boot(deadline)
    (request,) = api.wait_for(1)
    assert (request.what, request.authorization) == ("DELETE /v2/pods/pod7x", f"Bearer {KEY}")
    assert deadline <= request.wall < deadline + 30
    assert pod.has_started


def test_a_pod_waits_for_its_deadline(pod: Pod) -> None:
    pod.shell.set_clock(NOW)
    pod.boot(DEADLINE)
    pod.is_armed()
    pod.shell.is_left_waiting()
    assert pod.api.requests == []
    pod.shell.set_clock(DEADLINE)
    pod.api.wait_for(1)


def test_a_pod_whose_clock_stands_still_ends_after_its_lease(pod: Pod) -> None:
    pod.shell.set_clock(1000)
    pod.boot(DEADLINE, lease_s=1)
    pod.api.wait_for(1)


def test_a_lease_that_is_not_over_ends_no_pod(pod: Pod) -> None:
    pod.shell.set_clock(NOW)
    pod.boot(DEADLINE, lease_s=3600)
    pod.is_armed()
    pod.shell.is_left_waiting()
    assert pod.api.requests == []


def test_every_way_is_tried_in_order_and_for_ever(shell: Shell, api: Api) -> None:
    shell.pretend("runpodctl", f'echo "$@" >>"{shell.folder}/runpodctl"; exit 1')
    api.answer = lambda what: 500
    Pod(shell, api).boot(0)
    ways = ["DELETE /v2/pods/pod7x", *["POST /v2/pods/pod7x/action"], "POST /graphql", "POST /v2/pods/pod7x/action"]
    requests = api.wait_for(9)
    assert [request.what for request in requests] == [*ways, *ways, ways[0]]
    bodies = [json.loads(request.body) for request in requests[1:4]]
    assert bodies[0] == {"action": "terminate"}
    assert bodies[1] == {"query": 'mutation { podTerminate(input: {podId: "pod7x"}) }'}
    assert bodies[2] == {"action": "stop"}
    calls = (shell.folder / "runpodctl").read_text().splitlines()
    assert calls[:2] == ["pod delete pod7x", "remove pod pod7x"]


def test_a_pod_called_deleted_that_still_lives_tries_another_way(pod: Pod) -> None:
    pod.boot(0)
    requests = pod.api.wait_for(4)
    assert len({one.what + one.body for one in requests}) == 4


def test_a_cloud_out_of_reach_is_asked_until_it_answers(sh: Shell) -> None:
    closed = Api()
    Pod(sh, closed).boot(0)
    until(lambda: sh.console.count("DELETE") > 1)
    closed.open()
    assert closed.wait_for(1)
    closed.shutdown()
    closed.server_close()


@pytest.mark.parametrize("tool", ["curl", "python3", "wget"])
def test_the_key_stands_in_no_command_line_whatever_carries_it(sh: Shell, api: Api, tool: str) -> None:
    sh.take_away("curl")
    if tool == "python3":
        (sh.bin / tool).symlink_to(sys.executable)
    else:
        sh.provide(tool)
    api.answer = lambda what: 503
    Pod(sh, api).boot(0)
    requests = api.wait_for(4)
    assert [one.what.split()[0] for one in requests] == ["DELETE", "POST", "POST", "POST"]
    assert {one.authorization for one in requests} == {f"Bearer {KEY}"}
    assert all(json.loads(one.body) for one in requests[1:])
    assert all(tool in one.seen for one in requests)
    assert not any(KEY in one.seen for one in requests)
    assert KEY not in sh.console


def test_a_tool_that_gets_no_answer_is_followed_by_the_next(sh: Shell, api: Api) -> None:
    sh.pretend("curl", "echo 000; exit 60")
    (sh.bin / "python3").symlink_to(sys.executable)
    Pod(sh, api).boot(0)
    assert api.wait_for(1)[0].what == "DELETE /v2/pods/pod7x"


@pytest.mark.parametrize("tool", ["curl", "python3", "wget"])
def test_an_answer_that_redirects_does_not_take_the_key_along(sh: Shell, api: Api, tool: str) -> None:
    """A redirect must count as a failure, like any status other than 2xx, so that the key goes to no other server."""
    sh.take_away("curl")
    if tool == "python3":
        (sh.bin / tool).symlink_to(sys.executable)
    else:
        sh.provide(tool)
    api.answer = lambda what: 302
    Pod(sh, api).boot(0)
    ways = ["DELETE /v2/pods/pod7x", "POST /v2/pods/pod7x/action", "POST /graphql", "POST /v2/pods/pod7x/action"]
    assert [one.what for one in api.wait_for(4)] == ways


def test_an_earlier_deadline_is_taken_and_survives_a_restart(pod: Pod) -> None:
    pod.shell.set_clock(NOW)
    pod.boot(FAR)
    pod.is_armed()
    (pod.shell.disk / "deadline").write_text(str(DEADLINE))
    pod.shell.is_left_waiting()
    assert pod.api.requests == []
    pod.shell.kill()
    (pod.shell.disk / "deadline").write_text(str(FAR))
    pod.boot(FAR)
    pod.shell.is_left_waiting()
    assert pod.api.requests == []
    pod.shell.set_clock(DEADLINE)
    pod.api.wait_for(1)


@pytest.mark.parametrize("deadline", [str(FAR), "never", "", "99999999999999999999", "-5", "0x1"])
def test_a_deadline_cannot_be_put_off(pod: Pod, deadline: str) -> None:
    pod.shell.set_clock(NOW)
    pod.shell.disk.mkdir()
    (pod.shell.disk / "deadline").write_text(deadline)
    pod.boot(DEADLINE)
    pod.shell.is_left_waiting()
    assert pod.api.requests == []
    pod.shell.set_clock(DEADLINE)
    pod.api.wait_for(1)


def test_a_restart_does_not_begin_the_lease_anew(pod: Pod) -> None:
    """Each guard must count on from the time that the guard before it recorded, even after several restarts."""
    spent = pod.shell.disk / "spent"
    spent.parent.mkdir()
    spent.write_text(f"3000 987654321 another-boot {FAR}\n")
    for _ in range(2):
        left_s = int(spent.read_text().split()[0])
        pod.boot(FAR, lease_s=3600)
        until(lambda left_s=left_s: int(spent.read_text().split()[0]) > left_s)
        pod.shell.kill()
    assert pod.api.requests == []
    spent.write_text(spent.read_text().replace("30", "36", 1))
    pod.boot(FAR, lease_s=3600)
    pod.api.wait_for(1)


def test_a_host_that_was_rebooted_does_not_give_the_time_back(pod: Pod) -> None:
    """After a reboot the host's uptime starts at zero, but the time that the guard recorded must still count."""
    pod.shell.disk.mkdir()
    (pod.shell.disk / "spent").write_text(f"3600 987654321 another-boot {FAR}\n")
    pod.boot(FAR, lease_s=3600)
    pod.api.wait_for(1)


def test_the_time_between_two_starts_counts_too(pod: Pod) -> None:
    """A pod may be down for a while on a running host: the host's uptime shows for how long, and that time counts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    uptime_s = int(float(Path("/proc/uptime").read_text().split()[0]))
    assert uptime_s > 20, "this machine was started just now"
    pod.shell.disk.mkdir()
    (pod.shell.disk / "spent").write_text(f"80 {uptime_s - 20} {boot} {FAR}\n")
    pod.boot(FAR, lease_s=100)
    pod.api.wait_for(1)


@pytest.mark.parametrize("left", ["", "nonsense\n", "1 2\n", "a b c d\n"])
def test_a_damaged_record_of_the_past_leaves_the_deadline_alone(pod: Pod, left: str) -> None:
    pod.shell.set_clock(NOW)
    pod.shell.disk.mkdir()
    (pod.shell.disk / "spent").write_text(left)
    pod.boot(DEADLINE, lease_s=3600)
    pod.is_armed()
    pod.shell.is_left_waiting()
    assert pod.api.requests == []
    pod.shell.set_clock(DEADLINE)
    pod.api.wait_for(1)


def test_a_guard_that_can_write_nothing_still_ends_its_pod(sh: Shell, api: Api) -> None:
    sh.disk.write_text("a file where its folder should be")
    pod = Pod(sh, api)
    pod.boot(FAR, lease_s=1)
    api.wait_for(1)
    until(lambda: pod.has_started)  # start.sh runs in parallel with the guard, whose one second may be over first.


@pytest.mark.parametrize(("deadline", "lease_s"), [("", ""), ("soon", "0"), ("1e9", "-1"), ("", "99999999999999")])
def test_a_pod_that_was_told_no_time_has_none(pod: Pod, deadline: str, lease_s: str) -> None:
    pod.boot(deadline, lease_s)
    pod.api.wait_for(1)
    assert not pod.has_started


def test_a_pod_started_after_its_time_starts_only_its_end(pod: Pod) -> None:
    pod.boot(int(time.time()) - 5)
    pod.api.wait_for(1)
    assert not pod.has_started


def test_the_guard_is_not_ended_by_what_ends_other_programs(pod: Pod) -> None:
    pod.shell.set_clock(NOW)
    first = pod.boot(DEADLINE)
    pod.is_armed()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.killpg(first.pid, number)
    assert first.wait(5) != 0, "start.sh itself is ended"
    pod.shell.set_clock(DEADLINE)
    pod.api.wait_for(1)


def running(shell: Shell, words: bytes) -> list[Path]:
    """Return the /proc folders of the shell's processes whose command lines contain these words."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            is_it = entry.name.isdigit() and words in (entry / "cmdline").read_bytes()
            if is_it and str(shell.disk).encode() in (entry / "environ").read_bytes():
                found.append(entry)
    return found


def who_waits(shell: Shell) -> int:
    """Return the id of the guard's shell that waits for a `sleep` between two looks at the clock, or 0."""
    with suppress(OSError):
        for entry in running(shell, b"sleep\x000.1\0"):
            return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def test_a_guard_that_was_killed_is_followed_by_another(shell: Shell, api: Api) -> None:
    shell.set_clock(NOW)
    pod = Pod(shell, api)
    pod.boot(DEADLINE)
    pod.is_armed()
    os.kill(until(lambda: who_waits(shell)), signal.SIGKILL)
    shell.is_left_waiting()
    assert api.requests == []
    shell.set_clock(DEADLINE)
    api.wait_for(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a user with a limit of its own")
@pytest.mark.parametrize(
    "words", [["sh"], *(pytest.param(SHELLS[one], marks=pytest.mark.slow) for one in ("busybox", "busybox-static"))]
)
def test_a_pod_briefly_short_of_processes_ends_all_the_same(api: Api, words: list[str]) -> None:
    """A shell that cannot start a process ends.

    Another shell must start the guard again, so that the pod still ends.
    """
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed here; sh is tested")
    # The limit counts all of a user's processes, so this user must run no other test.
    user, most = 60_000 + os.getpid() % 5_000, 40

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, resource.getrlimit(resource.RLIMIT_NPROC)[1]))

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        shell = Shell(Path(folder), words)
        stack.callback(shell.kill)
        shell.set_clock(NOW)
        shell.how = {"user": user, "group": user, "extra_groups": [], "preexec_fn": limit}
        pod = Pod(shell, api)
        for path in [shell.folder, *shell.folder.iterdir()]:
            os.chown(path, user, user)
        pod.boot(DEADLINE)
        pod.is_armed()
        others = [subprocess.Popen(["sleep", "60"], user=user, group=user, extra_groups=[]) for _ in range(most)]
        try:
            until(lambda: len(running(shell, b"wait_for_it")) < 2)
        finally:
            for other in others:
                other.kill()
                other.wait()
        shell.set_clock(DEADLINE)
        api.wait_for(1)


def test_a_pod_whose_log_nobody_reads_any_more_ends_all_the_same(pod: Pod) -> None:
    pod.shell.set_clock(NOW)
    reader, writer = os.pipe()
    pod.shell.how = {"stdout": writer, "stderr": writer}
    pod.boot(DEADLINE)
    pod.is_armed()
    os.close(reader)
    os.close(writer)
    pod.shell.set_clock(DEADLINE)
    pod.api.wait_for(1)


def test_a_pod_becomes_its_images_command_and_hides_the_secrets(shell: Shell, api: Api) -> None:
    pod, run = Pod(shell, api), keys()
    private = run.host_private.get_secret_value()
    first = pod.boot(FAR, GPURUN_HOST_KEY_B64=base64.b64encode(private.encode()).decode(), PUBLIC_KEY="ssh-ed25519 A")
    until(lambda: (shell.folder / "env").exists() and "PUBLIC_KEY" in (shell.folder / "env").read_text())
    assert (shell.folder / "started").read_text() == "one two words\n"
    until(lambda: b"\0sleep\x0060\0" in b"\0" + Path(f"/proc/{first.pid}/cmdline").read_bytes())
    known = (shell.folder / "env").read_text()
    assert "PUBLIC_KEY=ssh-ed25519 A" in known
    assert "RUNPOD_POD_ID=pod7x" in known
    assert "GPURUN_HOST_KEY_B64" not in known
    assert KEY not in known
    file = shell.ssh / "ssh_host_ed25519_key"
    assert file.read_text() == private
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.with_suffix(".pub").read_text().split()[:2] == run.host_public.split()[:2]


def test_a_restarted_pod_shows_the_same_host_key(pod: Pod) -> None:
    private = keys().host_private.get_secret_value()
    encoded = base64.b64encode(private.encode()).decode()
    for _ in range(2):
        pod.boot(FAR, GPURUN_HOST_KEY_B64=encoded)
        pod.is_armed()
        assert (pod.shell.ssh / "ssh_host_ed25519_key").read_text() == private
        pod.shell.kill()
        (pod.shell.folder / "started").unlink()


def test_an_image_without_a_start_keeps_its_guard(sh: Shell, api: Api) -> None:
    pod = Pod(sh, api)
    pod.start.unlink()
    sh.set_clock(NOW)
    first = pod.boot(DEADLINE)
    until(lambda: "no " + str(pod.start) in sh.console)
    assert first.poll() is None
    sh.set_clock(DEADLINE)
    api.wait_for(1)


# AWS


class Vm:
    """A machine that runs its bootcmd. Its `systemctl`, `systemd-run` and `shutdown` only record their calls."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        for tool in ("systemctl", "shutdown", "systemd-run"):
            shell.pretend(tool, f'echo {tool} "$@" >>"{shell.folder}/asked"; exit 0')

    def boot(self, user_data: str) -> int:
        """Run bootcmd and wait until it ends, as cloud-init does; return its exit code."""
        (command,) = yaml.safe_load(user_data)["bootcmd"]
        assert command[0] == "sh"
        return self.shell.run(*command[1:]).wait(5)

    @property
    def asked(self) -> list[str]:
        path = self.shell.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def ends(self) -> list[str]:
        return [line for line in self.asked if not line.startswith("systemd-run")]


@pytest.fixture
def vm(sh: Shell) -> Vm:
    return Vm(sh)


def aws(deadline: float, lease_s: int = 3600) -> str:
    return guard.aws_user_data(deadline_wall=deadline, lease_s=lease_s, keys=keys())


def test_aws_is_given_cloud_config_with_just_these_settings() -> None:
    run = keys()
    text = guard.aws_user_data(deadline_wall=1_900_000_000.9, lease_s=60, keys=run)
    assert text.startswith("#cloud-config\n")
    config = yaml.safe_load(text)
    (command,) = config.pop("bootcmd")
    assert config == {
        "ssh_deletekeys": True,
        "ssh_genkeytypes": ["ed25519"],
        "ssh_keys": {"ed25519_private": run.host_private.get_secret_value(), "ed25519_public": run.host_public},
        "ssh_authorized_keys": [run.client_public],
        "ssh_pwauth": False,
    }
    assert command[:2] == ["sh", "-c"]
    assert "DEADLINE=1900000000\nLEASE_S=60\n" in command[2]
    assert len(text.encode()) < 16_384, "EC2 takes no more"


def test_an_aws_machine_powers_off_at_its_deadline_not_before(shell: Shell) -> None:
    vm, deadline = Vm(shell), int(time.time()) + 1
    assert vm.boot(aws(deadline + 0.9)) == 0
    until(lambda: vm.ends)
    assert deadline <= time.time() < deadline + 5
    assert vm.ends[0] == "systemctl poweroff"


def test_an_aws_machine_waits_for_its_deadline(vm: Vm) -> None:
    vm.shell.set_clock(NOW)
    vm.boot(aws(DEADLINE))
    vm.shell.is_left_waiting()
    assert vm.ends == []
    vm.shell.set_clock(DEADLINE)
    until(lambda: vm.ends)


def test_a_power_off_that_does_not_come_is_repeated_with_force(vm: Vm) -> None:
    vm.boot(aws(0))
    until(lambda: len(vm.ends) > 4)
    force = ["systemctl poweroff", "shutdown -P now", "systemctl --force poweroff"]
    assert vm.ends[:5] == [*force, "systemctl --force --force poweroff", force[0]]


def test_a_frozen_aws_clock_still_powers_off_after_its_lease(vm: Vm) -> None:
    vm.shell.set_clock(1000)
    vm.boot(aws(FAR, lease_s=1))
    until(lambda: vm.ends)


def test_a_second_timer_is_armed_for_the_date_and_the_time_left(vm: Vm) -> None:
    vm.boot(aws(1_900_000_000, lease_s=500))
    until(lambda: len(vm.asked) == 2)
    end = "--timer-property=AccuracySec=1s systemctl poweroff"
    assert sorted(vm.asked) == [
        f"systemd-run --on-active=500 {end}",
        f"systemd-run --on-calendar=2030-03-17 17:46:40 UTC {end}",
    ]


def test_a_reboot_arms_it_again_for_less(vm: Vm) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spent = vm.shell.disk / str(FAR) / "spent"
    spent.parent.mkdir(parents=True)
    spent.write_text(f"400 999999999 not-{boot} {FAR}\n")
    vm.boot(aws(FAR, lease_s=500))
    until(lambda: len(vm.asked) == 2)
    assert "systemd-run --on-active=100 --timer-property=AccuracySec=1s systemctl poweroff" in vm.asked
    vm.shell.kill()
    spent.write_text(f"500 999999999 not-{boot} {FAR}\n")
    vm.boot(aws(FAR, lease_s=500))
    until(lambda: vm.ends)


@pytest.mark.parametrize("ahead_s", [2 * 3600, 5 * 3600])
def test_a_clock_hours_ahead_ends_no_machine_that_just_booted(vm: Vm, ahead_s: int) -> None:
    ordered, lease_s = NOW, 4 * 3600
    vm.shell.booted(40)
    vm.shell.set_clock(ordered + 60 + ahead_s)
    vm.boot(aws(ordered + lease_s, lease_s=lease_s))
    vm.shell.is_left_waiting()
    assert vm.ends == []
    assert [line for line in vm.asked if "on-calendar" in line] == []
    vm.shell.kill()
    vm.boot(aws(ordered + lease_s, lease_s=lease_s))  # After a restart, too, the guard does not believe the clock.
    vm.shell.is_left_waiting()
    vm.shell.set_clock(ordered + 60 + ahead_s + lease_s - 41)
    vm.shell.is_left_waiting()
    assert vm.ends == []
    vm.shell.set_clock(ordered + 60 + ahead_s + lease_s - 40)
    until(lambda: vm.ends)


def test_a_right_clock_is_believed_though_the_boot_took_long(vm: Vm) -> None:
    vm.shell.booted(40)
    vm.shell.set_clock(NOW + 1500)
    vm.boot(aws(NOW + 3600, lease_s=3600))
    vm.shell.is_left_waiting()
    vm.shell.set_clock(NOW + 3600)
    until(lambda: vm.ends)


def test_an_image_of_an_earlier_machine_brings_none_of_its_time(vm: Vm) -> None:
    """A user's image may contain the guard's record of an earlier machine: that time must not count again."""
    vm.shell.set_clock(NOW)
    vm.boot(aws(DEADLINE))
    vm.shell.is_left_waiting()
    vm.shell.kill()
    vm.shell.set_clock(DEADLINE + 60)
    vm.boot(aws(FAR))
    vm.shell.is_left_waiting()
    assert vm.ends == []
    vm.shell.set_clock(FAR)
    until(lambda: vm.ends)


def test_a_systemd_that_waits_for_the_boot_does_not_delay_it(vm: Vm) -> None:
    """systemd starts its timers after the boot, which waits for bootcmd: bootcmd must not wait for systemd."""
    vm.shell.pretend("systemd-run", "exec sleep 60")
    vm.boot(aws(0))  # Fails unless it returns within seconds.
    until(lambda: vm.ends)


# Lambda


TOKEN, ID = "gr-0011aabb-fox-41", "0920582c7ff041399e34823a0be62549"


class Launched:
    """A Lambda machine that boots with its guard, in an account that has other machines too."""

    def __init__(self, shell: Shell, api: Api) -> None:
        self.shell, self.api = shell, api
        (shell.bin / "python3").symlink_to(sys.executable)
        api.answer = lambda what: 200
        key = {"key": "gpurun-token", "value": TOKEN}
        others = [{"id": "x1", "name": None, "tags": []}, {"id": "x2", "ssh_key_names": [TOKEN], "tags": None}]
        api.reply = {"data": [*others, {"id": ID, "name": TOKEN}, {"id": "renamed", "name": "mine", "tags": [key]}]}

    def boot(self, deadline: float, lease_s: int = 3600) -> int:
        terms = {"key": Secret(KEY), "base_url": f"{self.api.url}/api/v1", "token": TOKEN, "lease_s": lease_s}
        text = guard.lambda_user_data(keys=keys(), guard=guard.lambda_guard(**terms, deadline_wall=deadline))
        (command,) = yaml.safe_load(text)["bootcmd"]
        script = self.shell.folder / "bootcmd"
        script.write_text(f"#!/bin/sh\n{command}\n")
        code = self.shell.run(str(script)).wait(5)
        script.unlink()
        return code

    @property
    def spent(self) -> Path:
        return self.shell.disk / "spent"


@pytest.fixture
def launched(sh: Shell, api: Api) -> Launched:
    return Launched(sh, api)


@pytest.mark.parametrize("text", ["", "DEADLINE=1\n"])
def test_lambda_gets_the_host_key_before_boot_and_any_guard(text: str) -> None:
    """The bootcmd is a text, which cloud-init writes to a root-only file.

    A list would show the guard's key as an argument.
    """
    run = keys()
    user_data = guard.lambda_user_data(keys=run, guard=text)
    assert user_data.startswith("#cloud-config\n")
    config = yaml.safe_load(user_data)
    assert config.pop("bootcmd", []) == ([text] if text else [])
    assert config == {
        "ssh_deletekeys": True,
        "ssh_genkeytypes": ["ed25519"],
        "ssh_keys": {"ed25519_private": run.host_private.get_secret_value(), "ed25519_public": run.host_public},
    }


def test_a_lambda_machine_terminates_at_its_deadline_not_before(shell: Shell, api: Api) -> None:
    launched, deadline = Launched(shell, api), int(time.time()) + 1
    assert launched.boot(deadline + 0.9) == 0
    looked, *ends = api.wait_for(3)
    assert deadline <= looked.wall < deadline + 5
    assert looked.what == "GET /api/v1/instances"
    assert {request.what for request in ends} == {"POST /api/v1/instance-operations/terminate"}
    assert [json.loads(request.body) for request in ends] == [{"instance_ids": [ID]}, {"instance_ids": ["renamed"]}]
    for request in (looked, *ends):
        assert request.authorization == f"Bearer {KEY}"
        assert KEY not in request.seen
        assert base64.b64encode(KEY.encode()).decode() not in request.seen


def test_a_lambda_machine_is_left_alone_until_its_deadline(launched: Launched) -> None:
    launched.shell.set_clock(NOW)
    launched.boot(DEADLINE)
    launched.shell.is_left_waiting()
    assert launched.api.requests == []
    launched.shell.set_clock(DEADLINE)
    launched.api.wait_for(1)


def test_a_terminate_that_fails_or_changes_nothing_is_repeated(launched: Launched) -> None:
    answers = iter([429, 200, 500, 200])
    launched.api.answer = lambda what: next(answers, 200)
    launched.boot(0)
    launched.api.wait_for(8)


def test_a_list_that_lags_or_cannot_be_read_is_asked_for_again(launched: Launched) -> None:
    machines, launched.api.reply = launched.api.reply, {"data": []}
    launched.boot(0)
    launched.api.wait_for(2)
    launched.api.reply = {"error": {"code": "global/internal-error"}}
    launched.api.wait_for(4)
    launched.api.reply = machines
    until(lambda: any(request.what.startswith("POST") for request in launched.api.requests))


def test_a_lambda_list_that_redirects_does_not_take_the_key(launched: Launched) -> None:
    launched.api.answer = lambda what: 302
    launched.boot(0)
    assert {one.what for one in launched.api.wait_for(3)} == {"GET /api/v1/instances"}


def test_a_frozen_lambda_clock_still_ends_after_its_lease(launched: Launched) -> None:
    launched.shell.set_clock(1000)
    launched.boot(FAR, lease_s=1)
    launched.api.wait_for(1)


def test_a_reboot_does_not_restart_a_lambda_machines_lease(launched: Launched) -> None:
    launched.boot(FAR, lease_s=100)
    until(launched.spent.exists)
    launched.shell.kill()
    launched.spent.write_text(f"100 987654321 another-boot {FAR}\n")
    assert launched.api.requests == []
    launched.boot(FAR, lease_s=100)
    launched.api.wait_for(1)


def test_a_lambda_deadline_can_be_brought_forward(launched: Launched) -> None:
    launched.boot(FAR)
    until(launched.spent.exists)
    (launched.shell.disk / "deadline").write_text("1")
    launched.api.wait_for(1)


def test_no_file_of_a_lambda_machine_keeps_its_key_or_guard(launched: Launched) -> None:
    launched.boot(FAR)
    until(launched.spent.exists)
    assert sorted(path.name for path in launched.shell.disk.iterdir()) == ["spent"]


# All of them


def test_guard_texts_are_plain_ascii_and_need_no_bash() -> None:
    terms = {"key": Secret(KEY), "base_url": "https://x", "token": TOKEN, "deadline_wall": 1, "lease_s": 1}
    texts = [guard.runpod_wrapper(), aws(FAR), guard.lambda_user_data(keys=keys(), guard=guard.lambda_guard(**terms))]
    for text in texts:
        assert text.isascii()
        assert "\0" not in text
        assert "bash" not in text

"""Tests of the emulated machines: they look real to a user who logs in, and leave no process or file when they end."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.emulators.guests import FakeGpu, Faults, Guest, GuestFailed, Meter, ability, cloud_config, processes

pytestmark = pytest.mark.skipif(bool(ability.missing()), reason=ability.missing() or "guests boot here")
needs_whole = pytest.mark.skipif(bool(ability.whole()), reason=ability.whole() or "guests are whole here")
Boot = Callable[..., Guest]
REPOSITORY = Path(__file__).parents[2]


class Keys:
    """The key pairs of one test: those of users who log in, and the host key of the guest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def public(self, name: str) -> str:
        return (self.folder / f"{name}.pub").read_text().strip()

    def user_data(self, **more: Any) -> str:
        private = (self.folder / "host").read_text()
        pair = {"ed25519_private": private, "ed25519_public": self.public("host")}
        settings = {"ssh_deletekeys": True, "ssh_genkeytypes": ["ed25519"], "ssh_keys": pair, **more}
        return "#cloud-config\n" + json.dumps(settings)

    def ssh(
        self, guest: Guest, command: str, *, user: str | None = None, key: str = "client", timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Log in as a careful user does: with this key only, and only to a host with the known host key."""
        known = self.folder / f"known-{guest.host}"
        known.write_text(f"[{guest.host}]:{guest.port},{guest.host} {self.public('host')}\n")
        options = [
            "IdentitiesOnly=yes", "IdentityAgent=none", "StrictHostKeyChecking=yes", "BatchMode=yes",
            f"UserKnownHostsFile={known}", "GlobalKnownHostsFile=/dev/null", "HostKeyAlgorithms=ssh-ed25519",
        ]  # fmt: skip
        argv = ["ssh", "-F", "/dev/null", "-i", str(self.folder / key), "-p", str(guest.port)]
        argv += [word for option in options for word in ("-o", option)]
        argv += [f"{user or guest.user}@{guest.host}", command]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)

    def says(self, guest: Guest, command: str, **more: Any) -> str:
        done = self.ssh(guest, command, **more)
        assert done.returncode == 0, done.stderr + guest.log
        return done.stdout.strip()


@pytest.fixture(scope="session")
def key_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("client", "stranger", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name], check=True)
    return folder


@pytest.fixture
def keys(tmp_path: Path, key_pairs: Path) -> Keys:
    """Return the key pairs that all tests share, in this test's own folder."""
    return Keys(shutil.copytree(key_pairs, tmp_path / "keys"))


@pytest.fixture(params=["machine", pytest.param("processes", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "processes":
        monkeypatch.setattr(ability, "whole", lambda: "asked for")
    elif ability.whole():
        pytest.skip(ability.whole())
    return str(request.param)


@pytest.fixture
def boot(tmp_path: Path, keys: Keys) -> Iterator[Boot]:
    guests: list[Guest] = []

    def start(ready: bool = True, **more: Any) -> Guest:
        chosen = {"user": "ubuntu", "folder": tmp_path / f"guest-{len(guests)}", **more}
        if "entrypoint" not in chosen:
            chosen = {"authorized_keys": [keys.public("client")], "user_data": keys.user_data(), **chosen}
        guests.append(Guest.boot(**chosen))
        if ready:
            guests[-1].wait_ready()
        return guests[-1]

    yield start
    for guest in guests:
        guest.kill()


def pod(keys: Keys, *entrypoint: str, **env: str) -> dict[str, Any]:
    """Return the boot arguments of a pod. Its default entrypoint installs the host key, as gpurun's wrapper does."""
    wrapper = """D=${GPURUN_GUARD_SSH_FOLDER:-/etc/ssh}; umask 077
        printf %s "$HOST_KEY_B64" | base64 -d >"$D/ssh_host_ed25519_key"; exec "$0" """
    return {
        "user": "root",
        "entrypoint": list(entrypoint) or ["/bin/sh", "-c", wrapper, "/start.sh"],
        "env": {"PUBLIC_KEY": keys.public("client"), "HOST_KEY_B64": b64(keys.folder / "host"), **env},
    }


def b64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def until(over: Callable[[], Any], limit_s: float = 15.0) -> None:
    end = time.monotonic() + limit_s
    while not over():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def calendar(seconds: float) -> str:
    return datetime.fromtimestamp(time.time() + seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class TestLoggingIn:
    def test_the_given_key_logs_in_to_the_pinned_host_key(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot(gpus=[FakeGpu(name="NVIDIA H100 80GB HBM3", memory_mib=81559)] * 2)
        home = keys.says(guest, "pwd; echo hello >file; cat ~/file; test -f .ssh/authorized_keys")
        assert home.splitlines()[1] == "hello"
        assert (kind == "machine") == (home.splitlines()[0] == "/home/ubuntu")
        query = "--query-gpu=name,memory.total,driver_version,ecc.errors.uncorrected.volatile.total"
        printed = keys.says(guest, f"nvidia-smi {query} --format=csv,noheader,nounits; nvidia-smi -L")
        assert printed.splitlines()[:2] == ["NVIDIA H100 80GB HBM3, 81559, 570.195.03, 0"] * 2
        assert printed.splitlines()[2].startswith("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-")

    def test_nobody_else_does(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot()
        stranger = keys.ssh(guest, "true", key="stranger")
        assert stranger.returncode == 255
        assert "Permission denied (publickey)" in stranger.stderr
        (keys.folder / "host.pub").write_text(keys.public("stranger") + "\n")
        assert "Host key verification failed" in keys.ssh(guest, "true").stderr

    @needs_whole
    def test_the_user_may_become_root_who_may_not_log_in(self, boot: Boot, keys: Keys) -> None:
        guest = boot()
        assert keys.says(guest, "sudo -n id -un") == "root"
        refused = keys.ssh(guest, "true", user="root")
        assert (refused.returncode, "Please login as the user" in refused.stdout) == (142, True)

    def test_the_python_of_clouds_images_is_the_one_of_these_tests(
        self, kind: str, boot: Boot, keys: Keys, tmp_path: Path
    ) -> None:
        (tmp_path / "front").mkdir()
        (tmp_path / "front" / "torch.py").write_text("__version__ = 'tiny'\n")
        guest = boot(python_path=[tmp_path / "front"])
        place = "" if kind == "machine" else '"$GUEST_ROOT"'
        printed = keys.says(
            guest, f"{place}/opt/pytorch/bin/python -c 'import sys, torch; print(sys.prefix, torch.__version__)'"
        )
        assert printed.split() == [sys.prefix, "tiny"]

    @pytest.mark.slow
    @needs_whole
    def test_torch_is_there(self, boot: Boot, keys: Keys) -> None:
        pytest.importorskip("torch", reason="torch is not installed here")
        guest = boot()
        printed = keys.says(guest, "/opt/pytorch/bin/python -c 'import torch; print(torch.ones(2).sum().item())'")
        assert printed == "2.0"

    @pytest.mark.slow
    @needs_whole
    def test_somebody_who_is_not_root_can_boot_guests_too(self, boot: Boot, keys: Keys) -> None:
        """An ordinary user inside a guest runs two of these tests there."""
        guest = boot(python_path=[REPOSITORY])
        tests = (
            f"{REPOSITORY}/tests/unit/test_guests.py -p no:cacheprovider -k 'processes and (logs_in_to or kill_leaves)'"
        )
        done = keys.ssh(guest, f"cd {REPOSITORY} && /opt/pytorch/bin/python -B -m pytest {tests}")
        assert "2 passed" in done.stdout, done.stdout + done.stderr

    def test_paramiko_puts_a_file_there(self, kind: str, boot: Boot, keys: Keys) -> None:
        import paramiko

        guest = boot()
        with paramiko.SSHClient() as client:
            client.get_host_keys().add(
                guest.host if guest.port == 22 else f"[{guest.host}]:{guest.port}",
                "ssh-ed25519", paramiko.PKey.from_path(keys.folder / "host"),
            )  # fmt: skip
            client.connect(guest.host, guest.port, guest.user, key_filename=str(keys.folder / "client"),
                           allow_agent=False, look_for_keys=False)  # fmt: skip
            with client.open_sftp() as files:
                files.putfo(io.BytesIO(b"\0shard"), "shard.bin")
        assert keys.says(guest, "od -An -c shard.bin | tr -d ' '") == r"\0shard"


class TestWhatAMachineHasOfItsOwn:
    @needs_whole
    def test_files_processes_and_names_are_the_guests_own(self, boot: Boot, keys: Keys) -> None:
        one, two = boot(), boot()
        assert one.host != two.host
        keys.says(one, "echo one | sudo tee /etc/mine /tmp/mine /usr/bin/mine >/dev/null")
        assert keys.ssh(two, "ls /etc/mine /tmp/mine /usr/bin/mine").stdout == ""
        assert not any(Path(place).exists() for place in ("/etc/mine", "/tmp/mine", "/usr/bin/mine"))
        keys.says(one, "setsid sleep 4242 </dev/null >/dev/null 2>&1 & ps ax | grep -q [s]leep.4242")
        assert "4242" not in keys.says(two, "ps ax")
        assert len({keys.says(guest, "hostname") for guest in (one, two)} | {socket.gethostname()}) == 3

    @needs_whole
    def test_nothing_of_this_machines_users_is_seen(self, boot: Boot, keys: Keys) -> None:
        seen = keys.says(boot(), "sudo ls -A /root /home /tmp; sudo ls /etc/ssh; cat /etc/resolv.conf").split()
        assert {".config", ".bashrc", ".aws"}.isdisjoint(seen)
        assert [name for name in seen if name.startswith("ssh_host")] == [
            "ssh_host_ed25519_key",
            "ssh_host_ed25519_key.pub",
        ]
        assert "nameserver" not in seen

    def test_two_may_ask_for_one_address_and_only_one_gets_it(self, kind: str, boot: Boot) -> None:
        first = boot(ready=False)
        with pytest.raises(OSError, match="in use"):
            boot(ready=False, address=first.host)
        first.kill()
        assert boot(address=first.host).host == first.host


class TestTheEnd:
    def test_kill_leaves_no_process_and_no_mount(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot()
        keys.says(guest, "for n in 1 2 3; do (trap '' TERM HUP; setsid sleep 4243) </dev/null >/dev/null 2>&1 & done")
        seen = guest.pids
        assert len(seen) >= 4
        guest.kill()
        guest.kill()
        assert (guest.alive, guest.ready, guest.pids) == (False, False, [])
        assert not set(seen) & processes.living()
        assert guest.host not in Path("/proc/self/mountinfo").read_text()
        guest.wait_dead()
        assert [path.name for path in (guest._console.parent).iterdir()] == ["console.log"]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((guest.host, guest.port), 1)

    def test_a_guest_that_is_killed_while_it_boots_is_gone_too(self, kind: str, boot: Boot) -> None:
        for delay_s in (0.0, 0.02, 0.1, 0.2):
            guest = boot(ready=False)
            time.sleep(delay_s)
            guest.kill()
            assert (guest.alive, guest.pids) == (False, [])

    def test_a_process_orphaned_before_it_is_bound_ends(self) -> None:
        late = """if True:
            import os, time
            from tests.emulators.guests import kernel
            call = kernel._call
            kernel._call = lambda *arguments: (time.sleep(0.3), call(*arguments))
            if kernel.fork_bound() == 0:
                print("it lives", flush=True)
            os._exit(0)
        """
        done = subprocess.run([sys.executable, "-c", late], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", "")

    def test_poweroff_ends_it_and_is_told_once(self, kind: str, boot: Boot, keys: Keys) -> None:
        heard: list[str] = []
        guest = boot(on_poweroff=lambda: heard.append("off"), on_halt=lambda: heard.append("halt"))
        keys.ssh(guest, f"{'sudo ' if kind == 'machine' else ''}systemctl poweroff")
        guest.wait_dead()
        guest.kill()
        assert (heard, guest.alive, guest.pids) == (["off"], False, [])

    def test_halt_is_another_end_and_kill_is_none_that_is_told(self, kind: str, boot: Boot, keys: Keys) -> None:
        heard: list[str] = []
        ends = {"on_poweroff": lambda: heard.append("off"), "on_halt": lambda: heard.append("halt")}
        killed, halted = boot(**ends), boot(**ends)
        killed.kill()
        killed.wait_dead()
        keys.ssh(halted, f"{'sudo ' if kind == 'machine' else ''}halt")
        halted.wait_dead()
        assert heard == ["halt"]

    @needs_whole
    def test_who_is_not_root_cannot_power_it_off(self, boot: Boot, keys: Keys) -> None:
        guest = boot()
        refused = keys.ssh(guest, "systemctl poweroff")
        assert (refused.returncode, "authentication required" in refused.stderr) == (1, True)
        assert keys.ssh(guest, "systemd-run --on-active=1 true").returncode == 1
        assert guest.alive

    def test_a_timer_at_an_absolute_time_powers_it_off_then(self, kind: str, boot: Boot, keys: Keys) -> None:
        died: list[float] = []
        at = calendar(2)
        timer = f"systemd-run --on-calendar='{at}' --timer-property=AccuracySec=1s systemctl poweroff"
        armed = keys.user_data(bootcmd=[["sh", "-c", timer]])
        guest = boot(ready=False, user_data=armed, on_poweroff=lambda: died.append(time.time()))
        guest.wait_dead()
        due = datetime.strptime(at, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC).timestamp()
        assert due <= died[0] < due + 10

    def test_a_time_that_has_passed_powers_it_off_at_once(self, kind: str, boot: Boot, keys: Keys) -> None:
        timer = f"systemd-run --on-calendar='{calendar(-600)}' --timer-property=AccuracySec=1s systemctl poweroff"
        boot(ready=False, user_data=keys.user_data(bootcmd=[["sh", "-c", timer]])).wait_dead()

    def test_a_timer_whose_accuracy_is_left_open_is_late(self, boot: Boot, keys: Keys) -> None:
        """systemd may run a timer without AccuracySec a minute late: the emulated machine must show that delay too."""
        soon = "systemd-run --on-active=1 {} touch ${{GUEST_ROOT}}/var/{}".format
        armed = [soon("--timer-property=AccuracySec=1s", "exact"), soon("", "lax")]
        guest = boot(user_data=keys.user_data(bootcmd=armed))
        until((guest.root / "var/exact").exists)
        assert not (guest.root / "var/lax").exists()

    def test_shutdown_takes_minutes_or_now_and_can_be_taken_back(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot()
        root = "sudo " if kind == "machine" else ""
        assert "Shutdown scheduled" in keys.says(guest, f"{root}shutdown -P +1; {root}shutdown -c")
        assert keys.ssh(guest, f"{root}shutdown soon").returncode == 1
        keys.ssh(guest, f"{root}shutdown -P now")
        guest.wait_dead()

    def test_it_dies_with_the_process_that_booted_it(self, kind: str, tmp_path: Path) -> None:
        program = (
            "import sys, time; from pathlib import Path; from tests.emulators.guests import Guest, ability\n"
            f"if {kind == 'processes'}: ability.whole = lambda: 'asked for'\n"
            "guests = [Guest.boot(user='ubuntu', folder=Path(sys.argv[1], str(n))) for n in range(2)]\n"
            "[guest.wait_ready() for guest in guests]\n"
            "print([pid for guest in guests for pid in [guest._room.pid, *guest.pids]], flush=True)\n"
            "time.sleep(600)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "guests")]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            pids = set(json.loads(owner.stdout.readline()))
            assert pids <= processes.living()
            owner.send_signal(signal.SIGKILL)
        until(lambda: not pids & processes.living())

    def test_it_outlives_the_thread_that_booted_it(self, kind: str, boot: Boot, keys: Keys) -> None:
        booted: list[Guest] = []
        thread = threading.Thread(target=lambda: booted.append(boot()))
        thread.start()
        thread.join()
        assert keys.says(booted[0], "echo here") == "here"


class TestUserData:
    def test_it_is_applied_in_cloud_inits_order(self, kind: str, boot: Boot, keys: Keys) -> None:
        note = "echo {} >>${{GUEST_ROOT}}/tmp/order".format
        guest = boot(
            authorized_keys=[],
            user_data=keys.user_data(
                bootcmd=[note("boot"), ["sh", "-c", note("'it''s quoted'")], "false"],
                write_files=[{"path": "/etc/greeting", "content": "aGk=", "encoding": "b64", "permissions": "0640"}],
                runcmd=[note("run")],
                ssh_authorized_keys=[keys.public("client")],
                ssh_pwauth=False,
            ),
            strict=True,
        )
        until(lambda: "run" in keys.says(guest, "cat ${GUEST_ROOT}/tmp/order"))
        assert keys.says(guest, "cat ${GUEST_ROOT}/tmp/order").splitlines() == ["boot", "its quoted", "run"]
        assert "bootcmd ended with 1" in guest.log
        assert ((guest.root / "etc/greeting").read_text(), (guest.root / "etc/greeting").stat().st_mode & 0o777) == (
            "hi",
            0o640,
        )

    def test_a_reboot_runs_bootcmd_alone_and_keeps_the_disk(self, kind: str, boot: Boot, keys: Keys) -> None:
        count = "echo {} >>${{GUEST_ROOT}}/var/count".format
        guest = boot(user_data=keys.user_data(bootcmd=[count("boot")], runcmd=[count("run")]))
        until(lambda: (guest.root / "var/count").read_text().split() == ["boot", "run"])
        keys.says(guest, "echo kept >file")
        guest.reboot()
        guest.wait_ready()
        assert keys.says(guest, "cat file") == "kept"
        assert (guest.root / "var/count").read_text().split() == ["boot", "run", "boot"]

    def test_a_script_is_run_by_root_once(self, boot: Boot) -> None:
        guest = boot(user_data="#!/bin/sh\nid -u >${GUEST_ROOT}/var/by\n")
        until(lambda: (guest.root / "var/by").exists() and (guest.root / "var/by").read_text())
        assert (guest.root / "var/by").read_text().strip() == str(os.geteuid())

    def test_what_is_not_emulated_is_told_aloud(self, boot: Boot, tmp_path: Path) -> None:
        unknown = '#cloud-config\n{"swap": {"filename": "/swap"}, "ssh_pwauth": "maybe"}'
        with pytest.raises(ValueError, match=r"'swap' is not emulated.*; .*ssh_pwauth is not understood"):
            cloud_config.read(unknown, strict=True)
        with pytest.raises(ValueError, match="no YAML"):
            cloud_config.read("#cloud-config\n{", strict=True)
        assert "user-data: 'swap' is not emulated" in boot(user_data=unknown).log

    def test_host_keys_are_made_when_none_are_given(self, boot: Boot) -> None:
        guest = boot(user_data="")
        assert sorted(file.name for file in (guest.root / "etc/ssh").glob("*.pub")) == [
            "ssh_host_ecdsa_key.pub", "ssh_host_ed25519_key.pub",
        ]  # fmt: skip


class TestPods:
    def test_the_entrypoint_is_the_first_process_with_the_env_alone(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot(**pod(keys, RUNPOD_POD_ID="pod1", SECRET="x"))
        assert keys.says(guest, "echo ${SECRET-none} ${RUNPOD_POD_ID-none}") == "none none"
        assert 'RUNPOD_POD_ID="pod1"' in (guest.root / "etc/rp_environment").read_text()
        assert "SHA256:" in guest.log.split("SSH host keys:")[1]
        if kind == "machine":
            assert keys.says(guest, "tr '\\0' ' ' </proc/1/cmdline") == "sleep infinity"
            refused = keys.ssh(guest, "systemctl poweroff")
            assert (refused.returncode, "not been booted with systemd" in refused.stderr) == (1, True)
            assert keys.ssh(guest, "nvidia-smi").returncode == 127

    def test_without_a_public_key_there_is_no_sshd(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot(ready=False, **pod(keys, PUBLIC_KEY=""))
        until(lambda: "Pod is ready" in guest.log)
        assert not guest.ready

    def test_a_first_process_that_ends_restarts_on_the_same_disk(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot(**pod(keys))
        keys.says(guest, "echo kept >~/file; setsid sleep 4244 </dev/null >/dev/null 2>&1 &")
        old = set(guest.pids)
        first = next(pid for pid in old if processes.command(pid) == "sleep" and "infinity" in cmdline(pid))
        os.kill(first, signal.SIGKILL)
        until(lambda: not old & processes.living() and guest.ready)
        assert keys.says(guest, "cat ~/file") == "kept"
        assert "it is started again" in guest.log

    def test_a_program_that_is_not_there_is_tried_again_and_again(self, kind: str, boot: Boot) -> None:
        guest = boot(ready=False, user="root", entrypoint=["/no/such"], env={})
        until(lambda: guest.log.count("started again") > 1)
        assert guest.alive


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


class TestFaults:
    def test_a_boot_and_an_sshd_may_take_their_time(self, kind: str, boot: Boot) -> None:
        began = time.monotonic()
        guest = boot(boot_delay_s=0.3, faults=Faults(sshd_delay_s=0.3))
        assert time.monotonic() - began > 0.6
        assert guest.ready

    def test_it_may_show_another_host_key_than_it_was_given(self, kind: str, boot: Boot, keys: Keys) -> None:
        for more in ({}, pod(keys)):
            guest = boot(faults=Faults(wrong_host_key=True), **more)
            assert "Host key verification failed" in keys.ssh(guest, "true").stderr

    @needs_whole
    def test_programs_may_be_missing(self, boot: Boot, keys: Keys) -> None:
        guest = boot(faults=Faults(python3_missing=True, zstd_missing=True))
        assert keys.ssh(guest, "command -v python3 zstd; ls /opt/pytorch/bin/python").stdout == ""
        assert subprocess.run(["python3", "-V"], capture_output=True).returncode == 0

    @needs_whole
    def test_its_disk_may_be_full(self, boot: Boot, keys: Keys) -> None:
        guest = boot(faults=Faults(disk_mb=4))
        full = keys.ssh(guest, "head -c 8000000 /dev/zero >file")
        assert "No space left on device" in full.stderr

    def test_a_frozen_guest_answers_nobody_until_it_thaws(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot()
        guest.freeze()
        with socket.create_connection((guest.host, guest.port), 1) as connection:
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(100)
            guest.thaw()
            connection.settimeout(5)
            assert connection.recv(100).startswith(b"SSH-2.0-")
        guest.freeze()
        guest.kill()
        assert guest.pids == []

    def test_a_deaf_guest_cuts_connections_and_works_on(self, kind: str, boot: Boot, keys: Keys) -> None:
        guest = boot()
        keys.says(
            guest,
            "setsid sh -c 'echo $$ >job; exec sleep 4245' </dev/null >/dev/null 2>&1 & until [ -s job ]; do :; done",
        )
        inside = int(keys.says(guest, "cat job"))
        cut: list[int] = []
        session = threading.Thread(target=lambda: cut.append(keys.ssh(guest, "echo in >session; sleep 60").returncode))
        session.start()
        until(lambda: keys.says(guest, "cat session 2>/dev/null || true") == "in")
        guest.deaf()
        session.join(10)
        assert cut == [255]
        assert not guest.ready
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((guest.host, guest.port), 1)
        guest.hear()
        guest.wait_ready()
        assert keys.ssh(guest, f"kill -0 {inside}").returncode == 0
        guest.kill()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((guest.host, guest.port), 1)

    def test_a_guest_that_does_not_get_ready_shows_its_console(self, boot: Boot, keys: Keys) -> None:
        guest = boot(ready=False, user_data=keys.user_data(bootcmd=["echo stuck", "sleep 60"]))
        with pytest.raises(GuestFailed, match="stuck"):
            guest.wait_ready(1.0)


class TestMeter:
    """Tests of the meter, which decides what each machine is billed."""

    def test_time_rounds_up_to_the_unit_and_money_to_micro_dollars(self) -> None:
        now = [1000.0]
        meter = Meter(lambda: now[0])
        meter.start("a", micros_per_hour=3_600_000)
        meter.start("b", micros_per_hour=1, unit_s=60, least_s=120)
        assert meter.total_micros("a") == 0
        now[0] += 0.25
        assert (meter.total_micros("a"), meter.total_micros("b"), meter.total_micros()) == (1000, 1, 1001)
        now[0] += 120
        assert meter.total_micros("a") == 121_000
        meter.set_rate("b", 3_600_000)
        assert meter.total_micros("b") == 60_000 - 250 + 1  # 120.25 s at the old rate, the rounding at the new one.

    def test_what_is_stopped_costs_no_more_and_starts_a_new_bill(self) -> None:
        now = [0.0]
        meter = Meter(lambda: now[0])
        meter.start("a", 3_600_000, unit_s=60)
        assert meter.running == ["a"]
        with pytest.raises(ValueError, match="billed already"):
            meter.start("a", 1)
        now[0] = 61
        meter.stop("a")
        meter.stop("a")
        now[0] = 10_000
        assert (meter.running, meter.total_micros()) == ([], 120_000)
        meter.start("a", 3_600_000, unit_s=60)
        now[0] += 1
        assert meter.total_micros("a") == 180_000
        with pytest.raises(KeyError):
            meter.set_rate("unknown", 1)
        assert meter.total_micros("unknown") == 0

"""Tests of the ways into a run's machine: which runs have one, what the SSH entry contains, and what is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.commands import forward, ssh_config
from gpurun.core.clock import SystemClock
from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.core.journal_records import Phase
from gpurun.core.known_hosts import remember_host
from gpurun.core.paths import Home
from gpurun.core.records import Address, Instance, InstanceState
from gpurun.core.run_plan import Box
from gpurun.core.secrets import child_environment
from gpurun.ledger.runs import Sight, look_at_run
from gpurun.lifecycle import ways_in
from gpurun.lifecycle.ways_in import WayIn, config_of, way_into, write_entries
from gpurun.remote.key_pairs import fingerprint, make_keys
from gpurun.remote.ssh.entry import HostEntry, include_line
from tests.command_line import gpurun
from tests.emulators import sshd
from tests.lifecycle.tiny_runs import make_run
from tests.refusals import lacking, refusal

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJTv0mIZ4YmVZyQAtWZJf3kUoS8P4tQxq3B5N6m0Y1c"
AT = Address(kind="ssh", host="203.0.113.7", port=22022, user="root")
TOKEN = "gr-fox-41"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "a home").prepare()


def sight_of(home: Home, phase: Phase, *, provider: str = "runpod", address: Address | None = AT, **more: Any) -> Sight:
    """Return the view of a run in this phase, with a machine of this provider if the phase has one."""
    folder = home.run("fox-41")
    if not folder.path.exists():
        make_run(home)
        make_keys(folder.ssh)
    instance = Instance(
        id="lab/12", provider=provider, token=TOKEN, run="fox-41", state=InstanceState.RUNNING, address=address, **more
    )
    sight = look_at_run(home, "fox-41")
    has_one = phase not in (Phase.OPENED, Phase.CREATING)
    changes = {"phase": phase, "provider": provider, "instance": instance if has_one else None}
    return replace(sight, state=sight.state.model_copy(update=changes))


def way(sight: Sight, home: Home) -> WayIn:
    return way_into(sight, home, lambda alias, box: KEY)


def resolved(config: Path, alias: str) -> dict[str, str]:
    """Return the settings that OpenSSH itself reads from this entry."""
    shown = subprocess.run(["ssh", "-G", "-F", str(config), alias], capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)


@pytest.mark.parametrize(
    ("phase", "more", "code", "hint"),
    [
        (Phase.OPENED, {}, "way.not_ready", "gpurun attach fox-41"),
        (Phase.CREATING, {}, "way.not_ready", "gpurun attach fox-41"),
        (Phase.CREATED, {}, "way.not_ready", "again"),
        (Phase.TRAINING, {"provider": "local"}, "way.here", "cd "),
        (Phase.DESTROYING, {}, "way.over", "gpurun receipt fox-41"),
        (Phase.CLOSED, {}, "way.over", "artifacts"),
        (Phase.CLOSED, {"provider": "local"}, "way.over", "artifacts"),
    ],
)
def test_a_run_without_a_way_in_says_which_it_is_and_what_to_do(
    home: Home, phase: Phase, more: dict[str, Any], code: str, hint: str
) -> None:
    address = Address(kind="folder", folder="instances/x") if more.get("provider") == "local" else AT
    with pytest.raises(UsageError) as raised:
        way(sight_of(home, phase, address=address, **more), home)
    assert raised.value.code == code
    assert hint in raised.value.hint


def test_a_key_that_is_in_another_home_is_asked_for_there(home: Home) -> None:
    sight = sight_of(home, Phase.TRAINING)
    (sight.folder.ssh / "client").unlink()
    with refusal(SetupError, "way.no_key") as raised:
        way(sight, home)
    assert "--home" in raised.value.hint


def test_an_entry_is_strict_and_takes_nothing_of_host_star(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    sight = sight_of(home, Phase.TRAINING)
    monkeypatch.setattr(ways_in, "look_at_all", lambda *_: iter([(sight, None)]))
    write_entries(home)
    users = home.root / "users"
    users.write_text(
        f'Include "{config_of(home)}"\nHost *\n  ForwardAgent yes\n  StrictHostKeyChecking no\n  User me\n'
        "  ProxyCommand nc %h %p\n  LocalCommand touch x\n  PermitLocalCommand yes\n  UserKnownHostsFile /dev/null\n"
        "  ControlMaster auto\n  ControlPath ~/.ssh/%C\n"
    )
    for config in (users, config_of(home)):
        found = resolved(config, "gpurun-fox-41")
        assert (found["hostname"], found["port"], found["user"]) == ("203.0.113.7", "22022", "root")
        assert found["identityfile"] == str(sight.folder.ssh / "client")
        assert found["userknownhostsfile"] == str(home.ssh / "known_hosts")
        assert (found["stricthostkeychecking"], found["hostkeyalias"]) == ("true", "gpurun-fox-41")
        assert (found["forwardagent"], found["permitlocalcommand"], found["controlmaster"]) == ("no", "no", "false")
        assert {"proxycommand", "controlpath"}.isdisjoint(found)
    known = (home.ssh / "known_hosts").read_text().split()
    assert known == ["gpurun-fox-41", *(sight.folder.ssh / "host.pub").read_text().split()[:2]]


def test_a_machine_that_moved_is_found_at_its_new_port(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for port in (22022, 10_022):
        sight = sight_of(home, Phase.TRAINING, address=AT.model_copy(update={"port": port}))
        monkeypatch.setattr(ways_in, "look_at_all", lambda *_, sight=sight: iter([(sight, None)]))
        write_entries(home)
        assert resolved(config_of(home), "gpurun-fox-41")["port"] == str(port)


@pytest.mark.parametrize(
    "changes",
    [
        {"address": AT.model_copy(update={"host": "-oProxyCommand=touch x"})},
        {"address": AT.model_copy(update={"host": "203.0.113.7\n  ProxyCommand touch x"})},
        {"address": AT.model_copy(update={"host": "%h"})},
        {"address": AT.model_copy(update={"host": ""})},
        {"address": AT.model_copy(update={"user": "-oProxyCommand=touch x"})},
        {"address": AT.model_copy(update={"user": "root\n  ProxyCommand touch x"})},
        {"address": AT.model_copy(update={"user": "a b"})},
        {"host_key": f"{KEY}\n* {KEY}"},
        {"host_key": "@cert-authority AAAA"},
        {"identity": '/home/"\n  ProxyCommand touch x'},
        {"identity": "/home/${HOME}/key"},
    ],
    ids=str,
)
def test_what_ssh_could_read_as_more_than_a_value_makes_no_entry(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"alias": "gpurun-x", "address": AT, "identity": "/k", "host_key": KEY}
    with refusal(SetupError, "ssh.unwritable"):
        HostEntry(**{**values, **changes})


def test_a_box_behind_a_bastion_has_two_entries(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(
        target="me@gpu3.lab:22", identity="agent", host_key=KEY, trusted="given", jump="me@gate.lab:2222",
        jump_host_key=KEY,
    )  # fmt: skip
    sight = sight_of(home, Phase.TRAINING, provider="ssh")
    sight = replace(sight, plan=sight.plan.model_copy(update={"box": box}))
    monkeypatch.setattr(ways_in, "look_at_all", lambda *_: iter([(sight, None)]))
    write_entries(home)
    found, gate = (resolved(config_of(home), f"gpurun-fox-41{name}") for name in ("", ".jump"))
    assert (found["hostname"], found["proxycommand"].split()[-1]) == ("gpu3.lab", "gpurun-fox-41.jump")
    assert (gate["hostname"], gate["port"], gate["stricthostkeychecking"]) == ("gate.lab", "2222", "true")
    assert found["identitiesonly"] == "no"
    assert (home.ssh / "known_hosts").read_text() == f"gpurun-fox-41 {KEY}\ngpurun-fox-41.jump {KEY}\n"


@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())
def test_a_box_is_reached_by_its_bastion_from_any_home_name(tmp_path: Path) -> None:
    (folder := tmp_path / "100% a `home'").mkdir()
    keys = make_keys(tmp_path / "keys")
    servers = [
        sshd.Sshd(tmp_path / name, host_keys=[tmp_path / "keys" / "host"], authorized_keys=[keys.client_public])
        for name in ("gate", "box")
    ]
    config, known = folder / "config", folder / "known_hosts"
    line = " ".join(keys.host_public.split()[:2])
    identity = str(tmp_path / "keys" / "client")
    try:
        gate, box = (
            HostEntry(alias, AT.model_copy(update={"host": "127.0.0.1", "port": one.port, "user": one.user}),
                      identity, line)
            for alias, one in zip(("x.jump", "x"), servers, strict=True)
        )  # fmt: skip
        box = replace(box, jump=gate)
        config.write_text(box.config(known, config))
        known.write_text(box.known())
        done = subprocess.run(
            ["ssh", "-F", str(config), "x", 'echo "$SSH_CONNECTION"'], env=child_environment(), capture_output=True,
            text=True, timeout=30, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.stdout.split()[-1:] == [str(servers[1].port)], done.stderr
    finally:
        for server in servers:
            server.close()


def test_a_box_given_by_a_fingerprint_is_asked_for_its_key_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(target="me@lab:22", identity="/k", host_key=fingerprint(KEY), trusted="given")
    sight = sight_of(home, Phase.TRAINING, provider="ssh")
    sight = replace(sight, plan=sight.plan.model_copy(update={"box": box}))
    monkeypatch.setattr(ways_in, "look_at_all", lambda *_: iter([(sight, None)]))
    asked: list[str] = []
    monkeypatch.setattr(ways_in, "shown_host_key", lambda box, clock: asked.append(box.target) or KEY)
    assert write_entries(home) == [], "a supervisor asks nobody"
    for clock in (SystemClock(), SystemClock(), None):
        assert len(write_entries(home, clock)) == 1
    assert asked == ["me@lab:22"]
    (home.ssh / "known_hosts").write_text((home.ssh / "known_hosts").read_text().replace("Y1c", "Y1d"))
    assert write_entries(home) == []


def test_a_cluster_is_entered_by_its_login_node_into_the_job(home: Home) -> None:
    home.config.write_text(
        '[slurm.lab]\nhost = "login.lab"\nuser = "me"\nworkdir = "/shared"\nsetup = "module load cuda"\n'
    )
    at = AT.model_copy(update={"folder": "/shared/gr-fox-41"})
    sight = sight_of(home, Phase.TRAINING, provider="slurm", address=at, region="lab")
    with refusal(GpurunError, "way.no_host_key"):
        way_into(sight, home, ways_in._host_key_lookup({}, None))
    remember_host(home, "login.lab", 22, KEY)
    found = way_into(sight, home, ways_in._host_key_lookup({}, None))
    assert found.entry is not None
    assert (found.entry.address.host, found.entry.identity) == ("login.lab", str(home.keys / "ssh" / "client"))
    line = found.command([], at_terminal=True)
    assert line.startswith("srun --overlap --jobid=12 --nodes=1 --ntasks=1 --quiet --pty --chdir=/shared/gr-fox-41 sh")
    assert "'module load cuda'" in line
    assert "--pty" not in found.command(["true"], at_terminal=False)


@pytest.mark.parametrize(
    "word", ["0", "65536", "8888:", ":8888", "eight", "-1", "8888:80:80", "127.0.0.1:8888", "８８８８"]
)
def test_what_is_no_port_is_refused(word: str) -> None:
    with refusal(UsageError, "forward.port"):
        forward._parse_port_pairs([word])


def test_the_next_free_port_is_none_of_the_others() -> None:
    with refusal(UsageError, "forward.port_twice"):
        forward._parse_port_pairs(["8888", "8888:80"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as raised:
            forward._require_free_ports("fox-41", [(port, 8888), (port + 1, 6006)])
    offered = raised.value.hint.partition("gpurun forward fox-41 ")[2].split()
    assert offered[0].endswith(":8888")
    assert int(offered[0].partition(":")[0]) > port + 1
    assert offered[1] == f"{port + 1}:6006"


def test_the_line_comes_first_in_the_users_file(tmp_path: Path) -> None:
    kept, line = b"Host old\n  Port 22 \xff\r\n", 'Include "/h/ssh/config"'
    dotfile, users = tmp_path / "dotfile", tmp_path / ".ssh" / "config"
    dotfile.write_bytes(kept)
    users.parent.mkdir()
    users.symlink_to(dotfile)
    assert not ssh_config._has_line(users, line)
    ssh_config.put_first(users, line)
    assert (dotfile.read_bytes(), users.is_symlink()) == (line.encode() + b"\n" + kept, True)
    assert ssh_config._has_line(users, line)
    dotfile.write_bytes(kept + line.encode())
    assert not ssh_config._has_line(users, line), "behind a Host it holds for that one alone"
    ssh_config.put_first(tmp_path / "new" / "config", line)
    assert (tmp_path / "new" / "config").read_text() == f"{line}\n"


def test_nothing_is_written_into_the_users_file_without_a_yes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    users = home.root / "their own" / "config"
    monkeypatch.setattr(ssh_config, "_users_config", lambda: users)
    for words, is_written in (((), False), (("--json",), False), (("--yes",), True)):
        done = gpurun("ssh-config", *words, "--home", str(home.root))
        assert (done.returncode, users.exists()) == (0, is_written), done.stderr


def test_a_percent_in_a_path_is_quoted_or_refused(tmp_path: Path) -> None:
    key, known, config = (tmp_path / name for name in ("100% h", "known 100%h", "config"))
    config.write_text(HostEntry("gpurun-x", AT, str(key), KEY).config(known, config))
    assert resolved(config, "gpurun-x")["userknownhostsfile"] == str(known)
    with refusal(SetupError, "ssh.unwritable"):
        include_line(tmp_path / "100%" / "config")


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["ssh", "fox-41", "--json"], "ssh.flag", "--json"),
        (["ssh", "--json", "fox-41"], "ssh.json", "gpurun ssh-config --json"),
        (["ssh", "fox-41", "-L", "1:b:2"], "ssh.flag", "-L"),
        (["ssh", "-oProxyCommand=x"], "usage", "No such option"),
        (["ssh", "--", "-oProxyCommand=x"], "run.unknown", "-oProxyCommand=x"),
        (["ssh", ""], "run.blank", "@last"),
        (["ssh", "fox-41"], "way.here", "fox-41"),
        (["forward", "fox-41"], "forward.no_lab", "gpurun forward fox-41 8888"),
        (["forward", "fox-41", "x"], "forward.port", "'x'"),
        (["forward", "fox-41", "8888"], "way.here", "fox-41"),
    ],
)
def test_each_wrong_line_is_refused_by_its_code(home: Home, words: list[str], code: str, named: str) -> None:
    make_run(home)
    done = subprocess.run(
        [sys.executable, "-m", "gpurun", words[0], *words[1:]],
        env={**os.environ, "GPURUN_HOME": str(home.root)}, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    shown = done.stderr + done.stdout
    assert (done.returncode, lacking(shown, code, named)) == (2, []), shown

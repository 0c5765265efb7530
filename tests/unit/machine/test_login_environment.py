"""Tests of variables that a box's login or container exports: known families reach the job, other names are shown.

The box is behind a real sshd. A call over SSH is not a login, so its own environment has none of these variables.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import pytest
from conftest import PYTHON, Place, alter_agent

from gpurun.planning.verify_machine import login_warnings
from gpurun.remote.client import FarSide
from gpurun.remote.machine_facts import Exported
from tests.emulators import sshd

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "there is an sshd")

PROFILE = {
    "https_proxy": "http://proxy.lab:3128",
    "no_proxy": "localhost,.lab",
    "NCCL_SOCKET_IFNAME": "ib0",
    "HF_HOME": "/scratch/ann/hf",
    "PIP_INDEX_URL": "https://mirror.lab/simple",
    "SSL_CERT_FILE": "/etc/lab/ca.pem",
    "REQUESTS_CA_BUNDLE": "/etc/lab/ca.pem",
}
CONTAINER = {
    "HF_ENDPOINT": "https://hf-mirror.lab",
    "UV_CACHE_DIR": "/workspace/uv",
    "TORCH_HOME": "/workspace/torch",
    "OMP_NUM_THREADS": "7",
}
KEYS = {"RUNPOD_API_KEY": "rpa_123", "HF_TOKEN": "hf_123", "HF_HUB_TOKEN": "hf_456"}
WITH_PASSWORD = {"HTTP_PROXY": "http://ann:hunter2@proxy.lab:3128", "PIP_EXTRA_INDEX_URL": "https://tok3n@pypi.lab/a"}
OTHERS = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_API_KEY": "sk-1"}


class Login:
    """A box whose account has a profile, in a container that was started with variables."""

    def __init__(self, place: Place, profile: str, given: dict[str, str]) -> None:
        home, self.folder = place.home / "there", place.folder
        home.mkdir()
        (home / ".profile").write_text(profile)
        server = place.serve("PermitUserEnvironment yes", login=f'environment="HOME={home}"')
        self.machine = place.machine(server.port)
        self.far = FarSide(self.machine, python=sys.executable)
        self.far.install_agent()
        first = place.home / "environ"
        first.write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in given.items()))
        alter_agent(self.folder, '"/proc/1/environ"', f'"{first}"')
        alter_agent(self.folder, '"/run/systemd/system"', '"/no/systemd"')

    def look(self) -> Exported:
        return self.far.hello(python="/no/python").exported

    def job_has(self, *pass_env: str, **env: str) -> dict[str, str]:
        """Start a job on the box, and return its environment."""
        self.machine.put("agent/shipped.json", b'{"manifest_sha256": "by hand"}')
        (self.folder / "bundle").mkdir(exist_ok=True)
        now, out = time.time(), self.folder / "bundle" / "environment"
        script = "import os; open('environment', 'wb').write(open('/proc/self/environ', 'rb').read())"
        stops: dict[str, Any] = {"soft_stop_wall": now + 60, "hard_stop_wall": now + 60, "save_s": 5}
        stops |= {"soft_stop_s": 60, "hard_stop_s": 60}
        job = {"v": 1, "run": "r", "argv": [*PYTHON, script], "cwd": "bundle", "env": env, **stops}
        self.far.start({**job, **({"pass_env": list(pass_env)} if pass_env else {})})
        end = time.monotonic() + 30
        while self.far.poll({}).status.state != "exited":
            assert time.monotonic() < end
            time.sleep(0.05)
        pairs = [pair.partition("=") for pair in out.read_text().split("\0") if pair]
        return {name: value for name, _, value in pairs}


def exporting(values: dict[str, str]) -> str:
    return "echo a profile that talks\n" + "".join(f"export {name}='{value}'\n" for name, value in values.items())


@pytest.fixture
def login(place: Place) -> Login:
    return Login(place, exporting({**PROFILE, **WITH_PASSWORD, **OTHERS}), {**CONTAINER, **KEYS})


def test_profile_and_container_exports_reach_the_job_and_no_key(login: Login) -> None:
    exported = login.look()
    job = login.job_has()
    wanted = {**PROFILE, **CONTAINER}
    assert {name: job.get(name) for name in wanted} == wanted
    assert set(wanted) <= set(exported.passed)
    kept_back = {**KEYS, **WITH_PASSWORD, **OTHERS}
    assert not set(kept_back) & set(job)
    assert set(exported.withheld) >= {"RUNPOD_API_KEY", "HF_TOKEN", *OTHERS}
    assert set(exported.keys) == {"HF_HUB_TOKEN", *WITH_PASSWORD}
    assert not any(value in str(exported) for value in kept_back.values())


def test_nothing_that_looks_like_a_key_is_on_the_machines_disk(login: Login) -> None:
    login.look()
    login.job_has("*")
    written = b"".join(path.read_bytes() for path in login.folder.rglob("*.json"))
    assert b"mirror.lab" in written
    assert not any(value.encode() in written for value in {**KEYS, **WITH_PASSWORD}.values())


def test_pass_env_adds_by_pattern_but_a_key_only_by_whole_name(login: Login) -> None:
    login.look()
    job = login.job_has("VLLM_*", "HF_TOKEN", "HTTP_*")
    assert job["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert job["HF_TOKEN"] == "hf_123"
    assert not {"VLLM_API_KEY", "HTTP_PROXY", "RUNPOD_API_KEY"} & set(job)


def test_what_the_job_names_itself_counts_more(login: Login) -> None:
    login.look()
    job = login.job_has("HF_TOKEN", NCCL_SOCKET_IFNAME="eth1", HF_TOKEN="mine")
    assert (job["NCCL_SOCKET_IFNAME"], job["HF_TOKEN"]) == ("eth1", "mine")


def test_user_home_and_path_stay_those_of_the_call(place: Place) -> None:
    there = Login(
        place, exporting({"PATH": "/nowhere", "HOME": "/nowhere", "NCCL_DEBUG": "INFO"}) + "PATH=/usr/bin:/bin", {}
    )
    there.look()
    job = there.job_has()
    assert "/nowhere" not in job["PATH"] + job["HOME"] + job.get("TMPDIR", "")
    assert job["USER"] != "nobody"
    assert job["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize(("profile", "limit"), [("sleep 600", [" 1 s"]), ("exit 3", [])], ids=["it hangs", "it exits"])
def test_a_hanging_or_exiting_profile_is_reported_without_delay(place: Place, profile: str, limit: list[str]) -> None:
    there = Login(place, profile, CONTAINER)
    alter_agent(there.folder, "LOGIN_S = 10.0", "LOGIN_S = 1.0")
    exported = there.look()
    assert re.findall(" 1 s", exported.note) == limit
    assert set(CONTAINER) <= set(exported.passed)
    (warning,) = login_warnings(exported, ())
    assert exported.note in warning


def test_what_a_profile_leaves_running_is_not_waited_for(place: Place) -> None:
    there = Login(place, "sleep 8 &\nexport NCCL_DEBUG=INFO", {})
    began = time.monotonic()
    exported = there.look()
    assert (exported.note, "NCCL_DEBUG" in exported.passed) == ("", True)
    assert time.monotonic() - began < 8


def test_a_key_among_the_families_warns_until_its_name_is_given() -> None:
    exported = Exported(keys=("HTTP_PROXY", "HF_HUB_TOKEN"))
    (warning,) = login_warnings(exported, ())
    assert "HTTP_PROXY, HF_HUB_TOKEN" in warning
    assert "--pass-env HTTP_PROXY" in warning
    assert login_warnings(exported, ("HTTP_PROXY", "HF_HUB_TOKEN")) == []

"""Tests that no verb prints a key, writes it to a file or passes it to a child, wherever the key is stored.

Two clouds are emulated, so that the keys are really used. Verbs run in this process; all that they start is watched.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core import credentials
from gpurun.core.paths import Home
from tests.clouds.rented import kill_supervisors
from tests.emulators.lambda_cloud import KEY, LambdaEmulator
from tests.emulators.runpod import FULL_KEY, RunPodEmulator
from tests.later import LATER
from tests.lifecycle.tiny_runs import make_run

GUARD_KEY = "secret_CANARY_guard_0000000000000000003"
AWS = {"AWS_ACCESS_KEY_ID": "AKIACANARY0000000004", "AWS_SECRET_ACCESS_KEY": "CANARYaws/0000000000000000000000000005"}
KEYS = {"runpod": FULL_KEY, "lambda": KEY, "lambda-guard": GUARD_KEY}
SECRETS = (*KEYS.values(), AWS["AWS_SECRET_ACCESS_KEY"])
RENTS = ("--max-cost", "5", "--yes", "-v", "--no-input", "--data", "text.txt")
VERBS = (
    ("version",), ("version", "--json"), ("config", "show"), ("config", "path"), ("doctor",),
    ("doctor", "--online", "-v", "--provider", "runpod"), ("doctor", "--online", "--json", "--provider", "lambda"),
    ("auth", "status"), ("auth", "status", "--json"), ("auth", "set", "runpod", FULL_KEY), ("auth", "set", "nowhere"),
    ("offers", "--gpu", "1xA100", "-v"), ("offers", "--gpu", "1xA10", "--json"), ("recipes", "list"),
    ("recipes", "show"),
    ("plan", "mini-gpt", "--provider", "lambda", "--gpu", "1xA10", "--lambda-guard", "--data", "text.txt", "-v"),
    ("plan", "mini-gpt", "--provider", "runpod", "--gpu", "1xA100", "--data", "text.txt", "--json"),
    ("train", "mini-gpt", "--provider", "runpod", "--gpu", "1xA100", "--dry-run", *RENTS),
    ("train", "mini-gpt", "--provider", "lambda", "--gpu", "1xA10", "--max-cost", "0.0001", "--json", *RENTS[2:]),
    ("pack", "."), ("ps",), ("ps", "--all", "--json"), ("logs", "fox-41"), ("attach", "owl-07"), ("stop", "owl-07"),
    ("resume", "owl-07"), ("destroy", "owl-07", "--yes"), ("receipt", "fox-41"), ("confirm-shutdown", "fox-41"),
    ("audit",), ("audit", "--json"), ("reap", "-v"), ("reap", "--look", "--json"), ("aws", "setup", "--policy"),
    ("nonsense",), ("train", "--set", "x"), ("auth", "rm", "runpod"), ("auth", "rm", "lambda"),
    ("auth", "rm", "lambda-guard"),
)  # fmt: skip
# The verbs that look for a key; the others do not depend on where it is stored.
LOOKING = tuple(words for words in VERBS if words[0] in ("auth", "doctor", "offers"))


def forms(secret: str) -> tuple[bytes, ...]:
    """Return a key in plain form, as it looks in a URL, in base64 and in hexadecimal."""
    plain = secret.encode()
    return plain, quote(secret, safe="").encode(), base64.b64encode(plain), plain.hex().encode()


def tainted(content: bytes) -> list[str]:
    return [secret for secret in SECRETS for form in forms(secret) if form in content]


class Watch:
    """A watch of all descendants of this process, for keys in their command lines and environments.

    The environment of a supervisor is not read, because it gets the keys.
    """

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    handed = (
                        b"" if b"gpurun.lifecycle.supervisor" in words else Path(f"/proc/{pid}/environ").read_bytes()
                    )
                    if pid != os.getpid() and words and words != Path("/proc/self/cmdline").read_bytes():
                        self.seen.setdefault(
                            words.replace(b"\0", b" ").decode("utf-8", "replace"), tainted(words + handed)
                        )


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [root]
    for ancestor in found:
        found += [pid for pid, parent in parents.items() if parent == ancestor]
    return found[1:]


class Ring(SimpleNamespace):
    """A keyring in memory, which no other program can read."""

    def __init__(self) -> None:
        super().__init__(kept={})

    def get_password(self, service: str, name: str) -> str | None:
        found: str | None = self.kept.get((service, name))
        return found

    def set_password(self, service: str, name: str, password: str) -> None:
        self.kept[service, name] = password

    def delete_password(self, service: str, name: str) -> None:
        self.kept.pop((service, name), None)


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch, own_home: Path, tmp_path: Path) -> Iterator[Home]:
    """Start two emulated clouds and enter a folder with a text to train on; yield a home with a run in it."""
    monkeypatch.setattr("gpurun.providers.runpod.graphql.is_installed", lambda: False)
    (tmp_path / "cwd").mkdir()
    lines = (f"{number} times to be or not to be.\n" for number in range(4000))
    (tmp_path / "cwd" / "text.txt").write_text("".join(lines))
    monkeypatch.chdir(tmp_path / "cwd")
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    with LambdaEmulator() as instances, RunPodEmulator() as pods:
        monkeypatch.setenv("RUNPOD_API_BASE_URL", pods.base_url)
        monkeypatch.setenv("LAMBDA_API_BASE_URL", instances.base_url)
        instances.api_keys.add(GUARD_KEY)
        home = Home(own_home)
        make_run(home, "fox-41")
        yield home


@pytest.mark.slow
@pytest.mark.parametrize("source", ["environment", "file", "keyring"])
def test_no_verb_shows_or_keeps_a_key_wherever_it_came_from(
    clouds: Home, source: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    ring, verbs = Ring() if source == "keyring" else None, VERBS if source == "environment" else LOOKING
    monkeypatch.setattr(credentials, "keyring", lambda: ring)
    for name, key in KEYS.items():
        if source == "environment":
            monkeypatch.setenv(credentials.VARIABLES.get(name, "GPURUN_NO_SUCH"), key)
        else:
            credentials.store_credential(name, credentials.clean_key(key), clouds)
    monkeypatch.setenv("GPURUN_NO_SUCH", "")
    said: dict[tuple[str, ...], bytes] = {}
    with Watch() as watch:
        for words in verbs:
            monkeypatch.setattr(sys, "argv", ["gpurun", *words])
            with contextlib.suppress(SystemExit):
                run_app(build_app())
            printed = capfdbinary.readouterr()
            said[words] = printed.out + printed.err
    assert {words: found for words, output in said.items() if (found := tainted(output))} == {}
    assert {words: found for words, found in watch.seen.items() if found} == {}
    assert all(said[words] for words in verbs if words[0] not in ("logs", "attach")), "each of them said something"
    assert b"refuses the key" not in b"".join(said.values()), "the keys were really used"
    kept = [path for path in clouds.root.rglob("*") if path.is_file() and path.suffix != ".key"]
    assert {str(path): found for path in kept if (found := tainted(path.read_bytes()))} == {}
    assert [path for path in clouds.keys.glob("*.key") if path.stem in KEYS] == [], "auth rm has taken them away"


@pytest.mark.slow
@pytest.mark.parametrize("crash_at", [9, *(pytest.param(point, marks=LATER) for point in (2, 6, 14))])
def test_a_supervisor_that_dies_midway_leaves_no_key_behind(
    clouds: Home, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor dies around the create or after it; then `reap` runs. The machine never answers SSH."""
    variables = {"LAMBDA_API_KEY": KEY, "RUNPOD_API_KEY": FULL_KEY, "LAMBDA_GUARD_API_KEY": GUARD_KEY}
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, **variables, "PYTHONPATH": root, "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring"}
    command = [sys.executable, "-m", "gpurun.cli.app"]
    train = [*command, "train", "mini-gpt", "--provider", "lambda", "--gpu", "1xA10", "--accept-weak-lease",
             "--accept-cpu", *RENTS, "--detach", "--name", "elk-3"]  # fmt: skip
    said = b""
    with Watch() as watch:
        child = subprocess.Popen(
            train, env={**environ, "GPURUN_CRASH_AT": str(crash_at)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            said += child.communicate(timeout=25)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            said += child.communicate()[0]
        kill_supervisors(clouds.root)
        journal = clouds.run("elk-3").journal
        assert journal.exists() or crash_at <= 2, said
        reaped = subprocess.run([*command, "reap", "--destroy", "-v"], env=environ, capture_output=True, timeout=120)
        said += reaped.stdout + reaped.stderr
        time.sleep(0.1)
    assert tainted(said) == []
    assert {words: found for words, found in watch.seen.items() if found and "gpurun.cli.app" not in words} == {}
    kept = [path for path in clouds.root.rglob("*") if path.is_file()]
    assert {str(path): found for path in kept if (found := tainted(path.read_bytes()))} == {}

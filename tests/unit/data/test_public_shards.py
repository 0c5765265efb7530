"""Tests of public shards: checked before the rental, downloaded by the machine, and trusted only by their digests."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib import request as web

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.errors import UsageError
from gpurun.core.paths import Home
from gpurun.core.run_plan import DataSummary, PublicFile, Request
from gpurun.data.public_shards import files_of_the_hub
from gpurun.data.run_shards import prepare_run_shards
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.planning.transfer import public_shards
from gpurun.remote.agent.presigned import UrlRefused
from gpurun.remote.agent.public_files import Redirects, is_public, opened_public
from gpurun.remote.archive import Elsewhere, Pack, PackedFile, Survey
from gpurun.remote.client import FarSide
from gpurun.remote.local_machine import LocalMachine
from gpurun.remote.s3.pull_request import PullResult, have_downloaded
from tests.emulators.hub import COMMIT, HubEmulator, shard
from tests.plan_makers import make_plan
from tests.refusals import refusal

TOKENS = bytes(range(200)) * 20
SHARDS = {f"tokens_train_{number:06d}.bin": shard(TOKENS[number:]) for number in range(1, 6)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubEmulator]:
    with HubEmulator({"tokens_val_000000.bin": shard(TOKENS), **SHARDS}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.origin)
        yield hub


def found(tmp_path: Path, data: str = "hf:me/tokens", *overrides: str) -> DataSummary:
    """Return the data that a run of 8,000 tokens finds in a public data set."""
    wanted = ("data.tokenizer=gpt2", "train.steps=10", "train.batch_tokens=800", "train.micro_batch=1", *overrides)
    record = resolve(load_recipe("mini-gpt"), "full", ["model.context=8", *wanted]).record
    return prepare_run_shards(record, data, into=tmp_path / "data", cache=tmp_path / "cache", say=lambda _: None)


def test_only_the_shards_read_are_bound_by_digest_and_commit(hub: HubEmulator, tmp_path: Path) -> None:
    data = found(tmp_path)
    assert data.source == f"hf:me/tokens@{COMMIT}"
    assert [one.name for one in data.public] == [f"train_{n:06d}.bin" for n in (1, 2, 3)] + ["val_000000.bin"]
    assert all(f"/resolve/{COMMIT}/tokens_" in one.url for one in data.public)
    manifest = json.loads((tmp_path / "data" / "data.json").read_text())
    assert [one["sha256"] for one in manifest["train"] + manifest["val"]] == [one.sha256 for one in data.public]
    assert (data.val_tokens, data.bytes) == (len(TOKENS), sum(one.bytes for one in data.public))
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["data.json", "prompts.json", "vocab.json"]
    assert found(tmp_path, f"hf:me/tokens@{COMMIT}").sha256 == data.sha256
    assert len(found(tmp_path, "hf:me/tokens", "train.steps=1000").public) == 6, (
        "all, where they are read more than once"
    )


def _without_val(hub: HubEmulator) -> None:
    del hub.files["tokens_val_000000.bin"]


def _other_kind(hub: HubEmulator) -> None:
    hub.files["tokens_val_000000.bin"] = b"PAR1" * 1000


def _held_out_too(hub: HubEmulator) -> None:
    hub.files["tokens_val_000000.bin"] = hub.files["tokens_train_000001.bin"]


def test_the_plan_alone_counts_what_the_hub_has_of_a_data_set(hub: HubEmulator, tmp_path: Path) -> None:
    def planned(data: str) -> DataSummary:
        wanted = ("model.context=8", "data.tokenizer=gpt2", "train.steps=10", "train.batch_tokens=800")
        request = Request(recipe="mini-gpt", data=data, overrides=(*wanted, "train.micro_batch=1"))
        home = Home(tmp_path / "home").prepare()
        return make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=False).data

    seen = planned("hf:me/tokens")
    assert (seen.source, seen.public) == (f"hf:me/tokens@{COMMIT}", found(tmp_path).public)
    with refusal(UsageError, "data.hub_missing", "hf:me/other"):
        planned("hf:me/other")


REFUSED: dict[str, tuple[str, Callable[[HubEmulator], None], str, str]] = {
    "not there": ("hf:me/other", lambda hub: None, "data.hub_missing", "--stage"),
    "no such revision": ("hf:me/tokens@v2", lambda hub: None, "data.hub_missing", "hf:me/tokens@v2"),
    "gated": ("hf:me/tokens", lambda hub: setattr(hub, "gated", "auto"), "data.gated", "HF_TOKEN"),
    "no val": ("hf:me/tokens", _without_val, "data.no_public_shards", "gpurun data prepare"),
    "held out too": ("hf:me/tokens", _held_out_too, "data.same_shard", "same tokens"),
    "no shards": ("hf:me/tokens", _other_kind, "data.no_public_shards", "tokens_val_000000.bin"),
    "away": ("hf:me/tokens", lambda hub: hub.__exit__(), "data.hub_unreachable", "network"),
}


@pytest.mark.parametrize("data", ["hf:", "hf:tokens", "hf:me/", "hf:me/my tokens", "hf:me/tokens@", "hf:me/tokens@v 1"])
def test_what_names_no_set_is_refused_by_the_plan_too(data: str) -> None:
    with refusal(UsageError, "usage.hub_name", "hf:"):
        public_shards(Request(recipe="gpt2-124m", data=data), "fineweb-edu-10b")


@pytest.mark.parametrize("case", REFUSED)
def test_an_untrainable_set_is_refused_before_renting(case: str, hub: HubEmulator, tmp_path: Path) -> None:
    data, spoil, code, word = REFUSED[case]
    spoil(hub)
    with pytest.raises(UsageError) as refused:
        found(tmp_path, data)
    assert refused.value.code == code
    assert word in f"{refused.value.what} {refused.value.hint}"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "wrong", ["", "train = 3", '[[train]]\nurl = "http://a.org/train.bin"\nbytes = 9\nsha256 = "0"\n']
)
def test_a_list_that_is_none_is_refused(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "shards.toml").write_text(wrong)
    with refusal(UsageError, "data.bad_list"):
        found(tmp_path, str(tmp_path / "shards.toml"))


# On the machine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def far(tmp_path: Path) -> FarSide:
    (tmp_path / "box").mkdir()
    far = FarSide(LocalMachine(tmp_path / "box", "gr-test"), python=sys.executable)
    far.install_agent()
    return far


def download(far: FarSide, files: tuple[PublicFile, ...], origin: str) -> PullResult:
    came = PullResult()
    have_downloaded(far, files, origin, came, on_progress=lambda: None, timeout_s=60)
    return came


def test_a_cut_download_continues_and_ends_with_every_file(hub: HubEmulator, far: FarSide, tmp_path: Path) -> None:
    data = found(tmp_path)
    hub.asked.clear()
    hub.refusals = [503] * 3
    assert download(far, data.public, hub.origin).failed == {}
    download(far, data.public, hub.origin)
    assert len([path for path in hub.asked if "/resolve/" in path]) == len(data.public) + 3, (
        "what is here is not asked for"
    )
    files = [PackedFile(f"data/{one.name}", one.bytes, Elsewhere(one.sha256)) for one in data.public]
    assert far.unpack(Pack(Survey(tuple(files), ()))).files == len(files)
    for name in ("train_000001.bin", "val_000000.bin"):
        assert (tmp_path / "box" / "data" / name).read_bytes() == hub.files[f"tokens_{name}"]


def test_a_file_that_changed_under_its_revision_is_not_taken(hub: HubEmulator, far: FarSide, tmp_path: Path) -> None:
    data = found(tmp_path)
    hub.altered["tokens_train_000001.bin"] = hub.files["tokens_train_000001.bin"][:-2] + b"\1\0"
    came = download(far, data.public, hub.origin)
    (failed,) = came.failed.values()
    assert (failed.sha256, failed.code) == (data.public[0].sha256, "altered")
    assert not list((tmp_path / "box" / ".pulled").glob(f"{failed.sha256}*"))


def test_no_private_address_is_asked_except_the_users_named_hub(hub: HubEmulator, far: FarSide, tmp_path: Path) -> None:
    data = found(tmp_path)
    for origin, redirect, code in (("", "", "not_public"), (hub.origin, f"{hub.origin}/elsewhere", "denied")):
        hub.redirect = redirect
        assert {one.code for one in download(far, data.public, origin).failed.values()} == {code}


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00::1", "fe80::1%eth0", "::ffff:10.0.0.1", "0.0.0.0"],
)
def test_an_address_of_a_private_network_is_not_public(address: str) -> None:
    assert not is_public(address)
    assert is_public("151.101.1.1")


def test_a_name_is_asked_at_the_address_found_to_be_public() -> None:
    for url in ("https://localhost:1/x", "http://huggingface.co/x", "file:///etc/passwd"):
        with pytest.raises(UrlRefused) as refused:
            opened_public(web.Request(url))
        assert refused.value.code == "not_public"
    with pytest.raises(UrlRefused, match="https"):
        Redirects().redirect_request(web.Request("https://huggingface.co/x"), None, 302, "", {}, "http://cdn.org/x")


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a proxy that refuses every connection, and the list of addresses requested from it."""
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_the_logins_proxy_is_used_and_opens_no_private_network(
    far: FarSide, tmp_path: Path, proxy: tuple[str, list[str]]
) -> None:
    origin, asked = proxy
    (tmp_path / "box" / "agent").mkdir(exist_ok=True)
    (tmp_path / "box" / "agent" / "environment.json").write_text(json.dumps({"https_proxy": origin}))
    for host, code in (("huggingface.co", "unreachable"), ("169.254.169.254", "not_public")):
        file = PublicFile(name="train_000001.bin", url=f"https://{host}/x", bytes=100, sha256="7" * 64)
        (failed,) = download(far, (file,), "").failed.values()
        assert failed.code == code
    assert set(asked) == {"huggingface.co:443"}


def test_a_commands_files_without_a_digest_are_downloaded_here(hub: HubEmulator, tmp_path: Path) -> None:
    data = files_of_the_hub("hf:me/tokens", tmp_path / "data", lambda _: None)
    assert {file.name: file.sha256 for file in data.public} == {
        name: hashlib.sha256(content).hexdigest() for name, content in hub.files.items()
    }
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["README.md"]
    assert data.source == f"hf:me/tokens@{COMMIT}"
    assert data.bytes == 3 + sum(map(len, hub.files.values()))
    hub.files["../../outside"] = b"x"
    again = files_of_the_hub("hf:me/tokens", tmp_path / "again", lambda _: None)
    assert not [file for file in again.public if ".." in file.name]

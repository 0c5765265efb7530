"""Tests of the user's own box: its name has one form, the box serves one run at a time, and gpurun cannot end it."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.known_hosts import find_host_key, remember_host
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, InstanceState, Offer, Order, Teardown
from gpurun.providers.base import Rejected, Unknown
from gpurun.providers.ssh import Login, SshBox, SshProvider, parse_host
from tests.refusals import refusal

A100 = GpuNeed(count=1, name="A100")
BOX = SshBox("connect.example.com", 40123, "root", usd("0.80"), A100)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def provider(home: Home, box: SshBox = BOX) -> SshProvider:
    return SshProvider(home, VirtualClock(), box)


def order(token: str = "gr-fox-41-00000001", *, box: SshBox = BOX, home: Home) -> Order:
    offer = provider(home, box).offers(box.need, ())[0]
    return Order(run=token[3:9], token=token, attempt=1, offer=offer, deadline_wall=1_800_003_600.0)


# How a box is named --------------------------------------------------------------------------------------------------

RIGHT = {
    "root@203.0.113.7": Login("root", "203.0.113.7", 22),
    "root@203.0.113.7:22022": Login("root", "203.0.113.7", 22022),
    " ubuntu@Box.Example.COM. ": Login("ubuntu", "box.example.com", 22),
    "s_01jabc@ssh.lightning.ai": Login("s_01jabc", "ssh.lightning.ai", 22),
    "k3x9-64411d3f@ssh.runpod.io": Login("k3x9-64411d3f", "ssh.runpod.io", 22),
    "root@[2001:DB8:0::7]:2222": Login("root", "2001:db8::7", 2222),
    "root@[::1]": Login("root", "::1", 22),
    "ssh://root@box:8022": Login("root", "box", 8022),
    "LAB\\you@box": Login("LAB\\you", "box", 22),
    "you@lab.example@box:2222": Login("you@lab.example", "box", 2222),
}
WRONG = {
    "": "''",
    "lab": "ssh -G",
    "ssh -p 40123 root@connect.example.com": "--host root@connect.example.com:40123",
    "ssh root@box -p 7": "--host root@box:7",
    "root:hunter2@box": "password",
    "ssh root:hunter2@box": "password",
    "root@": "no host",
    "@box": "user name",
    "-oProxyCommand=x@box": "user name",
    "root@-oProxyCommand=x": "'-oProxyCommand=x'",
    "root@2001:db8::7": "brackets",
    "root@[2001:db8::g]": "IPv6",
    "root@300.1.1.1": "'300.1.1.1'",
    "root@box:": "65535",
    "root@box:0": "65535",
    "root@box:65536": "65535",
    "root@box:22x": "65535",
    "root@box:٢٢": "65535",
    "root@b x": "'b x'",
    "root@box/path": "'box/path'",
}


@pytest.mark.parametrize("text", RIGHT)
def test_a_box_is_named_by_user_host_and_port(text: str) -> None:
    assert parse_host(text) == RIGHT[text]
    assert parse_host(str(RIGHT[text])) == RIGHT[text], "its own spelling names the same box"


@pytest.mark.parametrize("text", WRONG)
def test_another_spelling_is_told_how_to_be_right(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_host(text)
    assert WRONG[text] in f"{refused.value.what} {refused.value.hint}"
    assert "hunter2" not in f"{refused.value.what} {refused.value.hint}"


# One run at a time ---------------------------------------------------------------------------------------------------


def test_a_box_is_reserved_by_a_private_record_of_everything(home: Home) -> None:
    made = provider(home).create(order(home=home))
    again = SshProvider(home, VirtualClock()).find("gr-fox-41-00000001")
    assert again == [made]
    assert (made.state, made.run, made.token) == (InstanceState.RUNNING, "fox-41", "gr-fox-41-00000001")
    assert made.address is not None
    assert (made.address.kind, made.address.host, made.address.port, made.address.user) == (
        "ssh", "connect.example.com", 40123, "root",
    )  # fmt: skip
    assert made.deadline_wall == 1_800_003_600.0
    assert made.type_id == order(home=home).offer.type_id, "what is read back is what was offered"
    (record,) = (home.instances / "ssh").glob("*.json")
    assert stat.S_IMODE(record.stat().st_mode) == 0o600


def test_nobody_reports_a_price_so_the_receipt_calls_it_quoted(home: Home) -> None:
    assert provider(home).create(order(home=home)).rate_micros_per_hour is None


def test_a_second_run_on_a_box_is_refused_and_makes_nothing(home: Home) -> None:
    provider(home).create(order(home=home))
    same = SshBox("CONNECT.example.com", 40123, "other-user", usd(0), A100)
    with pytest.raises(Rejected, match=r"fox-41.*gpurun destroy fox-41"):
        provider(home, same).create(order("gr-owl-07-00000002", box=same, home=home))
    assert [one.run for one in provider(home).find(None)] == ["fox-41"]


def test_another_port_of_the_same_address_is_another_box(home: Home) -> None:
    """Rented containers share the address of one gateway and differ by their port."""
    other = SshBox("connect.example.com", 40124, "root", usd(0), A100)
    provider(home).create(order(home=home))
    provider(home, other).create(order("gr-owl-07-00000002", box=other, home=home))
    assert len(provider(home).find(None)) == 2


def test_of_many_at_the_same_moment_one_gets_the_box(home: Home) -> None:
    def attempt(number: int) -> bool:
        try:
            provider(home).create(order(f"gr-fox-41-{number:08d}", home=home))
        except Rejected:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(16))) == 1


def test_the_same_token_twice_is_one_use(home: Home) -> None:
    first, second = (provider(home).create(order(home=home)) for _ in range(2))
    assert first == second


def test_a_box_that_was_given_back_can_be_used_again(home: Home) -> None:
    one = provider(home)
    one.create(order(home=home))
    one.destroy("gr-fox-41-00000001")
    one.destroy("gr-fox-41-00000001")
    assert one.read("gr-fox-41-00000001").state is InstanceState.GONE
    one.create(order("gr-fox-41-00000002", home=home))


def test_a_record_that_somebody_broke_is_seen_and_can_be_removed(home: Home) -> None:
    one = provider(home)
    one.create(order(home=home))
    (home.instances / "ssh" / "gr-fox-41-00000001.json").write_text("{")
    (seen,) = one.find(None)
    assert seen.state is InstanceState.UNKNOWN, "it proves nothing, least of all an end"
    one.destroy(seen.id)
    assert one.find(None) == []


def test_a_disk_that_refuses_leaves_the_outcome_open(home: Home) -> None:
    home.instances.mkdir()
    (home.instances / "ssh").write_text("a file where the folder should be")
    with pytest.raises(Unknown):
        provider(home).create(order(home=home))


def test_a_strange_id_never_becomes_a_path(home: Home) -> None:
    for strange in ("../../etc", "gr-../x", "", "gr-a/b"):
        with pytest.raises(Rejected):
            provider(home).destroy(strange)


# What the provider claims ---------------------------------------------------------------------------------------------


def test_it_claims_no_more_than_it_can_do(home: Home) -> None:
    (offer,) = provider(home).offers(A100, ())
    assert offer.dies_by_itself.startswith("NO")
    assert provider(home).traits.teardown is Teardown.USER_OPERATED
    assert SshProvider(home, VirtualClock()).offers(A100, ()) == [], "without a box there is nothing to offer"


def test_the_card_is_the_smallest_that_the_words_allow(home: Home) -> None:
    def row(gpu: str, vram_gb: int) -> Offer:
        return provider(home).offers(A100, ())[0].model_copy(update={"gpu": gpu, "vram_gb": vram_gb})

    known = [row("A100 SXM", 80), row("A100 PCIe", 40)]
    (loose,) = provider(home).offers(A100, known)
    (strict,) = provider(home).offers(GpuNeed(count=8, name="A100", memory_gb=80), known)
    assert (loose.gpu, loose.vram_gb) == ("A100 PCIe", 40)
    assert (strict.gpu, strict.vram_gb, strict.gpu_count) == ("A100 SXM", 80, 8)


# Known host keys ------------------------------------------------------------------------------------------------------


def test_a_host_key_is_kept_by_host_and_port(home: Home) -> None:
    remember_host(home, "Box.example.com", 22, "ssh-ed25519 AAAA root@box\n")
    remember_host(home, "box.example.com", 2222, "ssh-ed25519 BBBB")
    assert find_host_key(home, "box.example.com", 22) == "ssh-ed25519 AAAA"
    assert find_host_key(home, "box.example.com", 2222) == "ssh-ed25519 BBBB"
    assert find_host_key(home, "box.example.com", 23) is None
    assert stat.S_IMODE((home.root / "known_hosts.json").stat().st_mode) == 0o600


def test_many_boxes_at_the_same_moment_are_all_remembered(home: Home) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda port: remember_host(home, "box", port, f"ssh-ed25519 K{port}"), range(1, 33)))
    assert [find_host_key(home, "box", port) for port in range(1, 33)] == [
        f"ssh-ed25519 K{port}" for port in range(1, 33)
    ]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"[box]:22": 5}'])
def test_a_broken_list_never_wins_a_new_first_use(home: Home, content: str) -> None:
    (home.root / "known_hosts.json").write_text(content)
    (home.root / "known_hosts.json").chmod(0o600)
    with refusal(SetupError, "known_hosts.damaged"):
        find_host_key(home, "box", 22)


def test_a_list_that_others_may_write_is_refused(home: Home) -> None:
    remember_host(home, "box", 22, "ssh-ed25519 AAAA")
    (home.root / "known_hosts.json").chmod(0o666)
    with refusal(SetupError, "known_hosts.open_file"):
        find_host_key(home, "box", 22)

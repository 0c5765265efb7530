"""Tests that `gpurun reap` names the providers that it asked, and gives no all-clear if a provider did not answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import SetupError
from gpurun.core.paths import Home
from gpurun.core.secrets import Secret
from gpurun.providers.aws import AwsProvider
from gpurun.providers.base import endpoint_of
from gpurun.providers.lambdalabs import LambdaProvider
from gpurun.providers.local import LocalProvider
from gpurun.providers.runpod import RunPodProvider
from tests.refusals import lacking


def reap(patch: pytest.MonkeyPatch, *words: str) -> int:
    patch.setattr(sys, "argv", ["gpurun", "reap", *words])
    return run_app(build_app())


def test_a_cron_job_without_its_keys_does_not_look_well(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch, "--exit-code") == 4
    assert "No cloud" in capsys.readouterr().err
    assert reap(monkeypatch, "--exit-code", "--json") == 4
    answer = json.loads(capsys.readouterr().out)
    assert (answer["errors"][0]["code"], answer["data"]["asked"]) == ("reap.no_key", ["local"])


def test_a_person_without_keys_is_told_who_was_asked(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch) == 0
    said = capsys.readouterr()
    assert "local." in said.out
    assert "No cloud" in said.err


def test_who_asks_for_this_machine_alone_gets_it(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch, "--provider", "local", "--exit-code") == 0
    assert capsys.readouterr().err == ""


def test_nothing_is_called_clear_where_nobody_could_be_asked(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch, "--provider", "runpod") == 9
    assert "Nothing" not in capsys.readouterr().out


def test_nothing_is_called_clear_where_a_key_is_refused(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(provider: LocalProvider, token: str | None) -> NoReturn:
        raise SetupError("auth.refused", "The key is refused.", hint="Give another.")

    monkeypatch.setattr(LocalProvider, "find", refuses)
    assert reap(monkeypatch) == 9
    said = capsys.readouterr()
    assert " local" in said.err
    assert "Nothing" not in said.out


def test_every_cloud_that_could_not_be_checked_is_named(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch, "--provider", "runpod", "--provider", "lambda", "--json") == 9
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "reap.cannot_look"
    assert lacking(error["message"], "runpod", "lambda") == []


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("runpod", {"RUNPOD_API_KEY": "rpa_x", "RUNPOD_API_BASE_URL": "https://proxy.example/rp/"}),
        ("lambda", {"LAMBDA_API_KEY": "secret_x", "LAMBDA_API_BASE_URL": "https://proxy.example/l"}),
        ("aws", {"AWS_PROFILE": "", "AWS_ENDPOINT_URL_EC2": "https://proxy.example/ec2"}),
        ("aws", {"AWS_PROFILE": "", "AWS_ENDPOINT_URL": "https://proxy.example/all"}),
    ],
)
def test_an_all_clear_not_from_the_provider_says_where_from(
    own_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    environment: dict[str, str],
) -> None:
    for variable, value in (environment | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}).items():
        monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(variable, raising=False)
    for provider in (RunPodProvider, LambdaProvider, AwsProvider):
        monkeypatch.setattr(provider, "find", lambda self, token: [])
        monkeypatch.setattr(provider, "leftovers", lambda self, token: [], raising=False)
    assert reap(monkeypatch, "--provider", name) == 0
    assert f"{name} at https://proxy.example/" in " ".join(capsys.readouterr().out.split())
    assert reap(monkeypatch, "--provider", name, "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"]["endpoints"][name].startswith("https://proxy.example/")


def test_an_all_clear_of_the_providers_own_names_no_address(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = VirtualClock()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    for one in (RunPodProvider(Secret("k"), clock), LambdaProvider(Secret("k"), clock), AwsProvider(clock)):
        assert endpoint_of(one) == ""
    assert endpoint_of(AwsProvider(clock, region="cn-north-1")) == ""
    assert endpoint_of(LocalProvider(Home(own_home), clock)) == ""

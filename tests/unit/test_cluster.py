"""Tests of a cluster's table in config.toml: a value that could carry an option, a line or a command is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.cluster import cluster_of
from gpurun.core.errors import UsageError
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.settings import load_clusters, load_settings
from gpurun.planning.own_box import known_login
from tests.refusals import refusal

GOOD = 'host = "login.example.org"\nuser = "me"\nworkdir = "/scratch/me"\n'


def home_with(folder: Path, text: str) -> Home:
    (folder / "config.toml").write_text(text)
    return Home(folder)


def test_a_table_is_a_cluster_and_leaves_the_settings_alone(tmp_path: Path) -> None:
    home = home_with(
        tmp_path, f'recipe = "mini-gpt"\n[slurm.lab]\n{GOOD}extra = ["--constraint=a100", "-x", "--mem=0"]\n'
    )
    assert load_settings(home, project=tmp_path / "p", environment={})["recipe"].value == "mini-gpt"
    lab = cluster_of(load_clusters(home), None)
    assert (lab.name, lab.user, lab.port, lab.extra[0]) == ("lab", "me", 22, "--constraint=a100")
    assert not lab.is_here
    priced = home_with(tmp_path, f"[slurm.lab]\n{GOOD}price_per_gpu_hour = 1.10\n")
    assert (lab.price_per_gpu_hour, cluster_of(load_clusters(priced), None).price_per_gpu_hour) == (0, usd("1.1"))


@pytest.mark.parametrize(
    "line",
    [
        'partition = "a\\nb"',
        'partition = "x\'; rm -rf ~"',
        'partition = "--wrap=x"',
        'account = "a b"',
        'gres = "gpu:a100 --time=1"',
        'setup = "module load cuda\\nscancel -u me"',
        'python = "/opt/my python"',
        'workdir = "scratch"',
        'workdir = "/scratch/../etc"',
        'container = "image.sif"',
        'container = "/scratch/my image.sif"',
        'container = "docker://example.org/lab:1 --no-home"',
        "port = 0",
        "port = true",
        'extra = "--mem=0"',
        "extra = [1]",
        'extra = ["--time=99:00:00"]',
        'extra = ["--tim=99:00:00"]',
        'extra = ["--time-min=1"]',
        'extra = ["-t99"]',
        'extra = ["--export=ALL"]',
        'extra = ["--wrap=id"]',
        'extra = ["--job-name=x"]',
        'extra = ["-Jx"]',
        'extra = ["--array=1-100"]',
        'extra = ["pilot.sh"]',
        'color = "red"',
        "price_per_gpu_hour = -2",
        "price_per_gpu_hour = nan",
        'price_per_gpu_hour = "2"',
    ],
)
def test_what_could_be_more_than_a_value_is_refused(tmp_path: Path, line: str) -> None:
    key = line.partition(" =")[0]
    kept = "".join(one for one in GOOD.splitlines(keepends=True) if not one.startswith(f"{key} "))
    home = home_with(tmp_path, f"[slurm.lab]\n{kept}{line}\n")
    with pytest.raises(UsageError) as refused:
        load_settings(home, project=tmp_path / "p", environment={})
    assert refused.value.code == "config.slurm"
    assert "slurm.lab" in refused.value.what


def test_a_cluster_is_chosen_by_its_name_where_there_are_several(tmp_path: Path) -> None:
    two = load_clusters(home_with(tmp_path, f"[slurm.lab]\n{GOOD}[slurm.uni]\n{GOOD}"))
    assert cluster_of(two, "uni").name == "uni"
    for name, code in ((None, "slurm.which"), ("lap", "slurm.unknown")):
        with pytest.raises(UsageError) as refused:
            cluster_of(two, name)
        assert refused.value.code == code
    with refusal(UsageError, "slurm.none"):
        cluster_of({}, None)


def test_a_folder_of_a_stranger_describes_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "gpurun.toml").write_text(f"[slurm.lab]\n{GOOD}")
    with pytest.raises(UsageError):
        load_settings(Home(tmp_path), project=tmp_path, environment={})


def test_a_login_node_may_be_an_ssh_config_entry_with_its_user(tmp_path: Path) -> None:
    table = '[slurm.lab]\nhost = "centre"\nworkdir = "/scratch/me"\ntransport = '
    assert cluster_of(load_clusters(home_with(tmp_path, f'{table}"openssh"\n')), None).transport == "openssh"
    with refusal(UsageError, "config.slurm"):
        load_clusters(home_with(tmp_path, f'{table}"telnet"\n'))


def test_a_login_of_active_directory_has_its_backslash(tmp_path: Path) -> None:
    home = home_with(tmp_path, "[slurm.lab]\n" + GOOD.replace('"me"', "'LAB\\me'"))
    assert cluster_of(load_clusters(home), None).user == "LAB\\me"
    assert known_login(cluster_of(load_clusters(home), None), home).target == "LAB\\me@login.example.org:22"
    with pytest.raises(UsageError, match="backslash"):
        load_clusters(home_with(tmp_path, f"[slurm.lab]\n{GOOD}python = 'a\\b'\n"))

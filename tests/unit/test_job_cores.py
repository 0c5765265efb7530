"""Tests of a job's number of cores: those that the cluster gave to the job, not all cores of its node."""

from __future__ import annotations

import os

import pytest

from gpurun.remote.agent.system import cores


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 3),
        ({"SLURM_CPUS_PER_TASK": "2"}, 2),
        ({"SLURM_CPUS_ON_NODE": "1"}, 1),
        ({"SLURM_CPUS_PER_TASK": "2", "SLURM_CPUS_ON_NODE": "1"}, 2),
        ({"SLURM_CPUS_PER_TASK": "64"}, 3),
        ({"SLURM_CPUS_ON_NODE": "2(x2)"}, 3),
    ],
)
def test_a_job_has_its_clusters_cores_but_only_those_it_may_use(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cores() == expected

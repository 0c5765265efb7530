"""Tests of what only the `slurm` provider promises: one running job per name, and an end by the scheduler.

A controller or cluster that does not answer proves nothing about a job.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.clock import ticks
from gpurun.core.cluster import LoginNodeResult, NoAnswer
from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.records import GpuNeed, InstanceState
from gpurun.planning.own_box import LoginHere
from gpurun.providers.base import NoCapacity, Rejected, Unknown
from gpurun.providers.catalog import rows_for
from gpurun.providers.errors import RejectedFor
from gpurun.providers.slurm import provider as provider_module
from gpurun.providers.slurm.jobs import jobs_in, sbatch_refusal
from gpurun.providers.slurm.provider import Site, SlurmProvider
from tests.contract.orders import CLOCK, TOKEN, order, wait_for
from tests.emulators.slurm import ScriptedSlurm, scripted_slurm

HOPELESS = (
    "PartitionConfig", "PartitionTimeLimit", "BadConstraints", "QOSMaxWallDurationPerJobLimit", "AssocGrpGRES",
    "InvalidAccount", "InvalidQOS", "ReqNodeNotAvail", "ReqNodeNotAvail, UnavailableNodes:n1", "JobHeldAdmin",
)  # fmt: skip
NOT_ADMITTED = {
    # Reasons as Slurm 22.05 writes them and as newer versions do, each with the setting that the hint must name.
    "Job's account not known, so it can't use this partition (acct allows lab)": "account = ",
    "Job's_account_not_permitted_to_use_this_partition_(gpu_allows_lab_not_me)": "account = ",
    "Job's QOS not permitted to use this partition (gpu allows high not low)": "qos = ",
    "AccountNotAllowed": "account = ",
    "InvalidAccount": "account = ",
    "QOSNotAllowed": "qos = ",
    "InvalidQOS": "qos = ",
    "PartitionTimeLimit": "--hours",
    "QOSMaxWallDurationPerJobLimit": "--hours",
    "PartitionNodeLimit": "--gpu",
    "QOSMaxGRESPerJob": "--gpu",
}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[ScriptedSlurm]:
    with scripted_slurm(tmp_path) as made:
        yield made


@pytest.fixture
def provider(slurm: ScriptedSlurm) -> SlurmProvider:
    return SlurmProvider([Site(slurm.cluster, LoginHere())], CLOCK)


def test_a_lost_create_is_found_and_a_second_never_runs_with_it(slurm: ScriptedSlurm, provider: SlurmProvider) -> None:
    slurm.set("lose")
    with pytest.raises(Unknown, match="timed out"):
        provider.create(order(provider))
    slurm.clear("lose")
    (first,) = provider.find(TOKEN)
    wait_for(provider, first, InstanceState.RUNNING)
    second = provider.create(order(provider))
    assert [job.state for job in provider.find(TOKEN)] == [InstanceState.RUNNING, InstanceState.PENDING]
    provider.destroy(first.id)
    assert wait_for(provider, second, InstanceState.GONE).said == "FAILED", "nothing runs twice in a run's folder"
    assert provider.read(first.id).state is InstanceState.GONE


def test_a_controller_that_is_away_says_nothing_about_any_job(slurm: ScriptedSlurm, provider: SlurmProvider) -> None:
    made, second = provider.create(order(provider)), order(provider, "gr-fox-41-11111111")
    slurm.set("away")
    verbs = (
        provider.verify,
        lambda: provider.read(made.id),
        lambda: provider.find(TOKEN),
        lambda: provider.destroy(made.id),
        lambda: provider.create(second),
    )
    for verb in verbs:
        with pytest.raises(Unknown, match="Unable to contact"):
            verb()
    slurm.clear("away")
    wait_for(provider, made, InstanceState.RUNNING)
    assert slurm.jobs == ["1"]


def test_an_ended_job_is_not_gone_before_it_releases_its_node(provider: SlurmProvider) -> None:
    made = wait_for(provider, provider.create(order(provider)), InstanceState.RUNNING)
    provider.destroy(made.id)
    wait_for(provider, made, InstanceState.STOPPING)
    gone = wait_for(provider, made, InstanceState.GONE)
    assert gone.said == "CANCELLED"
    assert gone.ended_wall == pytest.approx(CLOCK.wall(), abs=5)


def test_the_time_limit_rounds_down_and_keeps_to_the_partitions(slurm: ScriptedSlurm, provider: SlurmProvider) -> None:
    provider.create(order(provider, lease_s=179))
    assert {"--time=2", "--dependency=singleton", "--no-requeue"} <= set(slurm.options_of("1"))
    slurm.set("sinfo", "main*|up|1:00:00|idle|1|(null)")
    with pytest.raises(Rejected, match=r"main .* 60 min"):
        provider.create(order(provider, "gr-fox-41-22222222", lease_s=2 * 3600))
    with pytest.raises(Rejected):
        provider.create(order(provider, "gr-fox-41-33333333", lease_s=59))
    assert slurm.jobs == ["1"]


def test_an_uncalled_job_frees_its_node_unless_it_trains(
    slurm: ScriptedSlurm, provider: SlurmProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "IDLE_S", 1)
    idle, trains = provider.create(order(provider)), provider.create(order(provider, "gr-fox-41-44444444"))
    (slurm.work / trains.token / "agent").mkdir()
    (slurm.work / trains.token / "agent" / "job.json").touch()
    assert wait_for(provider, idle, InstanceState.GONE).said == "COMPLETED"
    assert provider.read(trains.id).state is InstanceState.RUNNING


REFUSED = {
    "Invalid account or account/partition combination specified": "account = ",
    "Invalid qos specification": "qos = ",
    "Requested time limit is invalid (missing or exceeds some limit)": "--hours",
    "Requested node configuration is not available": "--gpu",
    "Required partition not available (inactive or drain)": "partition = ",
    "Invalid feature specification": "extra",
    "Invalid node name specified": "extra",
}


@pytest.mark.parametrize(("words", "cure"), REFUSED.items())
def test_a_slurm_refusal_leaves_nothing_and_says_its_own_cure(
    slurm: ScriptedSlurm, provider: SlurmProvider, words: str, cure: str
) -> None:
    slurm.set("refuse", words)
    with pytest.raises(RejectedFor, match=re.escape(words)) as refused:
        provider.create(order(provider))
    assert refused.value.of_offer
    assert {other for other in REFUSED.values() if other in refused.value.error.hint} == {cure}
    slurm.set("refuse", "Unspecified error")
    with pytest.raises(Rejected, match="Unspecified error"):
        provider.create(order(provider))
    assert (provider.find(None), provider.leftovers(None)) == ([], [])


POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("code", "cure"), [("QOSMaxWallDurationPerJobLimit", "--hours"), ("QOSMaxCpuPerJobLimit", "--gpu")]
)
def test_a_limit_is_known_by_its_code_as_all_share_one_sentence(code: str, cure: str) -> None:
    words, hint = sbatch_refusal(f"sbatch: error: {code}\nsbatch: error: Batch job submission failed: {POLICY}\n")
    assert (words, cure in hint) == (f"{POLICY}: {code}", True)


def test_a_queued_job_is_waited_for_unless_it_can_never_start(slurm: ScriptedSlurm, provider: SlurmProvider) -> None:
    slurm.set("hold", "Priority")
    queued = provider.create(order(provider))
    assert (queued.state, queued.said, queued.started_wall) == (InstanceState.PENDING, "PENDING: Priority", None)
    for reason in HOPELESS:
        slurm.set("hold", reason)
        assert provider.read(queued.id).state is InstanceState.STOPPED, reason
    slurm.clear("hold")
    running = wait_for(provider, queued, InstanceState.RUNNING)
    assert running.started_wall == pytest.approx(CLOCK.wall(), abs=3)


def test_a_jobs_place_in_the_queue_is_shown_and_kept_current(slurm: ScriptedSlurm, provider: SlurmProvider) -> None:
    slurm.set("hold", "Priority")
    queued = provider.create(order(provider))
    assert provider.queue_words(queued) == "Priority · place 3 of 3 in main"
    slurm.set("hold", "Resources")
    slurm.set("start", str(int(CLOCK.wall() + 7200)))
    words = provider.queue_words(provider.read(queued.id))
    assert words.startswith("Resources · place 3 of 3 in main · start expected ")
    slurm.set("away")
    with pytest.raises(Unknown, match="Unable to contact"):
        provider.queue_words(queued)


@pytest.mark.parametrize(("reason", "cure"), NOT_ADMITTED.items())
def test_a_job_not_admitted_gets_slurms_reason_and_its_own_cure(
    slurm: ScriptedSlurm, provider: SlurmProvider, reason: str, cure: str
) -> None:
    slurm.set("hold", reason)
    held = provider.create(order(provider))
    assert held.state is InstanceState.STOPPED
    error = provider.never_runs(held)
    assert isinstance(error, NoOffer)
    assert reason.replace("_", " ") in error.what
    assert cure in error.hint
    others = {other for other in NOT_ADMITTED.values() if other != cure}
    assert not [other for other in others if other in error.hint], "another person's cure"


@pytest.mark.parametrize(
    "reason", ["Priority", "Resources", "QOSMaxJobsPerUserLimit", "AssocGrpGRES", "JobHeldUser", "PartitionDown"]
)
def test_a_job_that_others_keep_waiting_is_not_called_refused(
    slurm: ScriptedSlurm, provider: SlurmProvider, reason: str
) -> None:
    slurm.set("hold", reason)
    assert provider.never_runs(provider.create(order(provider))) is None


SETUPS = [
    ("no-such-module load cuda/12.8", "127", "no-such-module: "),
    ("echo one; echo two >&2; exit 3", "3", "one\ntwo"),
    ("if", "", "syntax error"),
    ("cd /nowhere", "1", "/nowhere"),
]


@pytest.mark.parametrize(("setup", "code", "words"), SETUPS)
def test_a_set_up_that_fails_ends_the_job_and_its_words_are_told(
    slurm: ScriptedSlurm, setup: str, code: str, words: str
) -> None:
    provider = SlurmProvider([Site(replace(slurm.cluster, setup=setup), LoginHere())], CLOCK)
    ended = wait_for(provider, provider.create(order(provider)), InstanceState.GONE)
    error = provider.never_runs(ended)
    assert isinstance(error, SetupError)
    assert (error.code, setup in error.what, words in error.what) == ("setup.failed", True, True), error.what
    assert f"ended with {code}" in error.what
    assert "[slurm.lab]" in error.hint


def test_a_set_up_uses_a_login_shell_and_exports_reach_the_job(slurm: ScriptedSlurm) -> None:
    with slurm.profile.open("a") as profile:
        profile.write("module() { export NCCL_SOCKET_IFNAME=$2; }\n")
    provider = SlurmProvider([Site(replace(slurm.cluster, setup="module load 'ib \"0\"'"), LoginHere())], CLOCK)
    made = wait_for(provider, provider.create(order(provider)), InstanceState.RUNNING)
    for _ in ticks(CLOCK, 0.05, 10):
        if (passed_on := slurm.work / made.token / "job.env").exists() and (slurm.work / made.token / "calls").exists():
            break
    done = subprocess.run(["sh", "-c", '. "$0"; echo "$NCCL_SOCKET_IFNAME"', str(passed_on)], capture_output=True)
    assert done.stdout == b'ib "0"\n'
    assert provider.never_runs(provider.read(made.id)) is None


class Refusing:
    """A login node whose every call raises one error: its host key has changed, or it does not answer."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float = 60.0) -> LoginNodeResult:
        raise self._error


@pytest.mark.parametrize("error", [SetupError("ssh.changed", "Another host key", hint="Look"), NoAnswer("Silent")])
def test_an_unreachable_cluster_hides_nothing_of_another(slurm: ScriptedSlurm, error: Exception) -> None:
    dark = Site(replace(slurm.cluster, name="dark"), Refusing(error))
    provider = SlurmProvider([Site(slurm.cluster, LoginHere()), dark], CLOCK, faults=["slurm.third has no host"])
    made = provider.create(order(provider))
    with pytest.raises(Unknown) as unclear:
        provider.find(None)
    assert [job.id for job in unclear.value.found] == [made.id]
    assert ("dark" in unclear.value.regions, "slurm.third" in str(unclear.value)) == (True, True)
    with pytest.raises(Unknown) as unseen:
        provider.leftovers(None)
    assert [(left.region, left.token) for left in unseen.value.left] == [("lab", made.token)]


def test_cards_are_counted_on_one_node_that_works(slurm: ScriptedSlurm, provider: SlurmProvider) -> None:
    slurm.set("sinfo", "main*|up|infinite|down*|1|gpu:a100:8\nmain*|up|infinite|mix|2|gpu:a100:4(S:0-1),gpu:v100:2")
    known = rows_for(GpuNeed(count=4, name="A100"))
    assert provider.offers(GpuNeed(count=6, name="A100"), known)[0].gpu_count == 6
    assert provider.offers(GpuNeed(count=8, name="A100"), known) == []
    slurm.set("sinfo", "main|up|infinite|idle|1|gpu:8")
    with pytest.raises(NoCapacity, match="default partition"):
        provider.partition()


def test_several_nodes_are_one_job_that_asks_for_each_ones_cards(slurm: ScriptedSlurm, provider: SlurmProvider) -> None:
    need = GpuNeed(count=8, name="A100", nodes=2)
    (offer,) = provider.offers(need, rows_for(need))
    wanted = order(provider).model_copy(update={"offer": offer})
    made = provider.create(wanted)
    assert {"--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8"} <= set(slurm.options_of("1"))
    assert (made.gpu_count, offer.gpu_count) == (16, 16)
    slurm.set("sinfo", "main*|up|infinite|idle|1|gpu:8\nmain*|up|infinite|drain|4|gpu:8\nmain*|up|infinite|mix|3|gpu:4")
    assert provider.offers(need, rows_for(need)) == []
    assert provider.offers(GpuNeed(count=4, name="A100", nodes=4), rows_for(need))[0].label == "4×4×A100 SXM 40G"


def test_other_jobs_are_never_taken_for_a_run_and_never_ended(slurm: ScriptedSlurm, provider: SlurmProvider) -> None:
    made = wait_for(provider, provider.create(order(provider)), InstanceState.RUNNING)
    (slurm.state / "jobs" / "1" / "name").write_text("my own")
    assert provider.read(made.id).state is InstanceState.GONE
    provider.destroy(made.id)
    assert not (slurm.state / "jobs" / "1" / "cancelled").exists()
    for strange in ("lab/1;id", "lab/", "1", "lab/../1"):
        with pytest.raises(Rejected):
            provider.read(strange)


def test_a_hostile_line_of_squeue_is_no_job() -> None:
    lines = [
        "9|RUNNING|1|1:00|1|None|my|own|job",
        f"9|RUNNING|1|1:00|1|None|x{TOKEN}|",
        f"|RUNNING|1|1:00|1|None|{TOKEN}|",
        f"9_[0-1]|PENDING|1|0:00|1|None|{TOKEN}|",
        f"9_x|RUNNING|1|1:00|1|None|{TOKEN}|",
        f"9|RUNNING|{TOKEN}|",
        "\x1b[31m|" * 9,
    ]
    assert [jobs_in(line) for line in lines] == [[]] * len(lines)
    assert len(jobs_in("\n".join((*lines, f"9|RUNNING|1|1:00|1|None|{TOKEN}|")))) == 1


def test_a_foreign_state_is_unknown_and_any_comment_is_harmless() -> None:
    (job,) = jobs_in(f"9|TELEPORTED|N/A|INVALID|N/A|None|{TOKEN}|a|b ../x 99999999 -1\r")
    assert (job.state, job.run, job.deadline_wall, job.gpu_count) == (InstanceState.UNKNOWN, "fox-41", None, 0)


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (("PENDING", "PENDING"), InstanceState.PENDING),
        (("RUNNING", "PENDING"), InstanceState.RUNNING),
        (("PENDING", "RUNNING"), InstanceState.PENDING),
        (("RUNNING", "COMPLETED"), InstanceState.RUNNING),
        (("COMPLETED", "RUNNING"), InstanceState.STOPPED),
        (("COMPLETED", "COMPLETING"), InstanceState.STOPPED),
        (("COMPLETED", "WHATEVER"), InstanceState.UNKNOWN),
        (("COMPLETED", "FAILED"), InstanceState.GONE),
        ((None, "RUNNING"), InstanceState.STOPPED),
        ((None, "COMPLETED"), InstanceState.GONE),
    ],
)
def test_an_array_is_one_job_that_is_gone_once_all_its_jobs_are(
    words: tuple[str | None, str], state: InstanceState
) -> None:
    lines = [
        f"9_{place}|{word}|1700000000|{place + 1}:00|1700000100|None|{TOKEN}|fox-41 1700000200 2"
        for place, word in enumerate(words)
        if word is not None
    ]
    (job,) = jobs_in("\n".join(lines))
    assert (job.number, job.state) == (9, state)
    if words == ("RUNNING", "COMPLETED"):
        assert job.used_s == 120.0, "what the longest of them has counts for all"

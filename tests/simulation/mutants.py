"""Remove one safeguard at a time, in a copy of the tree, and run the tests that could notice until one fails.

    python -m tests.simulation.mutants                    every safeguard of tests/simulation/safeguards.py
    python -m tests.simulation.mutants -j 2 sync far.py    those whose name contains one of these words

This prints a line for each safeguard: the test that failed without it, and the seconds that this took. A safeguard
without such a test SURVIVES, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.safeguards import ROOT, Safeguard, safeguards

LIMIT_S = 240
MOST_TRIES = 4
TOO_SLOW = "too slow"
_COPIED = ("gpurun", "trainer", "recipes", "tests", "docs", "pyproject.toml", "README.md")
_UNIT, _FAR = "tests/unit/", "tests/unit/machine/"
_SIM, _LIFE, _SAFE = "tests/simulation/", "tests/lifecycle/", "tests/security/"
_SYNCS = (f"{_SIM}test_syncs.py", f"{_SAFE}test_syncs_far_and_near.py")
_CLOUD = (
    f"{_LIFE}test_faults.py", f"{_LIFE}test_matrix_provision.py", f"{_LIFE}test_matrix_run.py",
    f"{_LIFE}test_matrix_destroy.py", f"{_LIFE}test_offers_in_turn.py",
    f"{_LIFE}test_money_review.py", f"{_LIFE}test_other_account.py", f"{_LIFE}test_monitor.py",
    f"{_LIFE}test_moves.py",
    f"{_LIFE}test_hanging_calls.py", f"{_LIFE}test_late.py", f"{_LIFE}test_rate.py", f"{_LIFE}test_left_billed.py",
    f"{_SIM}test_found.py", f"{_SIM}test_crash_sweep.py", f"{_SIM}test_scenarios.py",
)  # fmt: skip
_UNWRITTEN = (f"{_LIFE}test_full_disk.py", f"{_LIFE}test_never_gives_up.py")
_AGENT = (f"{_FAR}test_agent_answers.py", f"{_FAR}test_agent_parts.py", f"{_FAR}test_agent_keeper.py",
          f"{_FAR}test_agent_end.py", f"{_FAR}test_agent_farewell.py")  # fmt: skip
_STORIES = "tests/golden/test_audit_findings.py"
# The tests that could notice a missing safeguard, the likeliest and quickest first, by the longest prefix of its path.
TESTS: dict[str, tuple[str, ...]] = {
    "gpurun/core/": (*_SYNCS, f"{_UNIT}test_journal_lock.py", f"{_SAFE}test_locks.py", f"{_UNIT}test_ssh_provider.py",
                     f"{_LIFE}test_many_runs.py"),
    "gpurun/planning/": (f"{_UNIT}test_box.py", f"{_LIFE}test_offers_in_turn.py", f"{_FAR}test_look_around.py"),
    "gpurun/planning/verify_machine.py": (
        f"{_FAR}test_look_around.py", f"{_UNIT}test_box.py", f"{_LIFE}test_offers_in_turn.py", f"{_LIFE}test_faults.py",
    ),
    "gpurun/core/known_hosts.py": (f"{_UNIT}test_ssh_provider.py", f"{_FAR}test_openssh.py", *_SYNCS),
    "gpurun/core/collected_record.py": (f"{_LIFE}test_many_outputs.py",),
    "gpurun/": _SYNCS,
    "gpurun/cli/": (*_SYNCS, f"{_UNIT}test_cli.py"),
    "gpurun/ledger/": (
        *_SYNCS, f"{_UNIT}test_journal.py", f"{_UNIT}test_journal_lock.py", f"{_UNIT}test_signing.py",
        f"{_UNIT}test_receipt.py", f"{_SAFE}test_ledger_tamper.py", f"{_UNIT}test_audit.py",
    ),
    "gpurun/ledger/audit/": (
        f"{_UNIT}test_audit.py", f"{_SAFE}test_ledger_other_books.py", f"{_SAFE}test_ledger_tamper.py",
        f"{_LIFE}test_continuing.py", _STORIES,
    ),
    "gpurun/ledger/audit/audit_run.py": (
        f"{_UNIT}test_class_check.py", f"{_UNIT}test_audit.py", f"{_SAFE}test_ledger_other_books.py",
        f"{_SAFE}test_ledger_tamper.py", f"{_LIFE}test_continuing.py",
    ),
    "gpurun/readers/": (f"{_UNIT}test_imported_run.py", f"{_UNIT}test_weights.py", f"{_UNIT}test_replay_judged.py"),
    "gpurun/readers/evidence/": (f"{_UNIT}test_class_check.py",),
    "gpurun/ledger/shutdown_statement.py": (f"{_UNIT}test_confirm.py", f"{_SAFE}test_ledger_other_books.py"),
    "gpurun/ledger/billed_time.py": (
        f"{_UNIT}test_cost.py", f"{_UNIT}test_queued_cost.py", f"{_UNIT}test_spending.py", f"{_LIFE}test_rate.py",
    ),
    "gpurun/ledger/plan_from_journal.py": (f"{_LIFE}test_newer_homes.py",),
    "gpurun/ledger/rental.py": (
        f"{_UNIT}test_receipt.py", f"{_UNIT}test_audit.py", f"{_UNIT}test_queued_cost.py", *_CLOUD,
    ),
    "gpurun/providers/slurm/": ("tests/contract/test_slurm.py", f"{_LIFE}test_slurm_run.py"),
    "gpurun/lifecycle/": _CLOUD,
    "gpurun/lifecycle/ways_in.py": (f"{_UNIT}test_ways_in.py", f"{_FAR}test_forward.py", f"{_SAFE}test_locks.py"),
    "gpurun/lifecycle/steps/await_ready.py": (
        *_CLOUD, f"{_LIFE}test_boot.py", f"{_LIFE}test_ends_itself.py", f"{_LIFE}test_slurm_run.py",
    ),
    "gpurun/lifecycle/steps/move_run.py": (f"{_LIFE}test_moves.py", f"{_SIM}test_crash_sweep.py"),
    "gpurun/planning/legs.py": (f"{_UNIT}test_legs.py", f"{_LIFE}test_moves.py"),
    "gpurun/core/run_plan.py": (f"{_LIFE}test_moves.py",),
    "gpurun/ledger/run_state.py": (f"{_LIFE}test_moves.py", f"{_LIFE}test_state.py", *_CLOUD),
    "gpurun/ledger/audit/event_sequence.py": (f"{_UNIT}test_audit.py", _STORIES, f"{_LIFE}test_moves.py"),
    "gpurun/lifecycle/instance/absence.py": (f"{_LIFE}test_absent_at_boot.py", *_CLOUD),
    "gpurun/lifecycle/machine_owner.py": (
        f"{_LIFE}test_moves.py", f"{_LIFE}test_outlived.py", f"{_LIFE}test_shared_account.py",
    ),
    "gpurun/ledger/runs.py": _SYNCS,
    "gpurun/ledger/budget.py": (f"{_UNIT}test_month_budget.py", f"{_UNIT}test_mandate.py", f"{_LIFE}test_month.py"),
    "gpurun/ledger/mandate.py": (f"{_UNIT}test_mandate.py", f"{_LIFE}test_mandate_held.py"),
    "gpurun/planning/mandate_bounds.py": (f"{_UNIT}test_mandate.py",),
    "gpurun/lifecycle/instance/monitor.py": (f"{_LIFE}test_monitor.py", *_CLOUD),
    "gpurun/lifecycle/steps/close_run.py": (f"{_LIFE}test_late.py", f"{_LIFE}test_slurm_run.py", *_CLOUD),
    "gpurun/lifecycle/instance/terminate.py": (*_CLOUD, f"{_LIFE}test_never_gives_up.py"),
    "gpurun/lifecycle/steps/destroy_machine.py": (f"{_LIFE}test_ends_itself.py", *_CLOUD),
    "gpurun/core/stop_request.py": (f"{_SAFE}test_locks.py", f"{_LIFE}test_money_review.py", *_UNWRITTEN),
    "gpurun/lifecycle/context.py": (*_CLOUD, *_UNWRITTEN, f"{_LIFE}test_slurm_run.py"),
    "gpurun/lifecycle/driver.py": (*_UNWRITTEN, *_CLOUD),
    "gpurun/lifecycle/supervisor.py": (*_UNWRITTEN, f"{_SAFE}test_locks.py", f"{_LIFE}test_train_here.py"),
    "gpurun/lifecycle/connect.py": (f"{_LIFE}test_patience.py", f"{_LIFE}test_bringing.py"),
    "gpurun/lifecycle/steps/upload_files.py": (
        f"{_LIFE}test_bucket_pull.py", *_CLOUD, f"{_LIFE}test_bucket_plan.py", f"{_LIFE}test_stage.py",
    ),
    "gpurun/lifecycle/steps/collect_files.py": (f"{_LIFE}test_bringing.py", *_CLOUD),
    "gpurun/lifecycle/artifacts/downloader.py": (
        f"{_LIFE}test_bringing.py", f"{_LIFE}test_early.py", f"{_LIFE}test_collect_now.py", f"{_LIFE}test_patience.py",
        *_CLOUD,
    ),
    "gpurun/lifecycle/artifacts/inventory.py": (
        f"{_LIFE}test_bringing.py", f"{_LIFE}test_collect_now.py", f"{_LIFE}test_early.py",
    ),
    "gpurun/lifecycle/artifacts/on_demand.py": (*_SYNCS, f"{_LIFE}test_collect_now.py", f"{_LIFE}test_salvage.py"),
    "gpurun/jobs/": (f"{_LIFE}test_changed_trainer.py",),
    "gpurun/jobs/command.py": (f"{_UNIT}test_command_plan.py", f"{_LIFE}test_commands_here.py"),
    "gpurun/jobs/commands/": (f"{_LIFE}test_continuing.py", f"{_SAFE}test_locks.py", f"{_LIFE}test_looked_at.py"),
    "gpurun/jobs/training/history.py": (f"{_UNIT}test_priors.py", f"{_UNIT}test_recipe.py"),
    "gpurun/jobs/training/initial_weights.py": (f"{_UNIT}test_starting_weights.py",),
    "gpurun/jobs/training/compile_cache.py": (f"{_LIFE}test_warm.py",),
    "gpurun/jobs/earlier_run.py": (f"{_LIFE}test_warm.py", f"{_LIFE}test_continuing.py"),
    "gpurun/jobs/earlier_sweep.py": (f"{_LIFE}test_continuing.py",),
    "gpurun/jobs/training/continued_training.py": (f"{_LIFE}test_continuing.py",),
    "gpurun/data/": (
        f"{_UNIT}data", f"{_UNIT}test_prepare_hub.py", f"{_UNIT}test_shards.py", f"{_UNIT}test_data_verbs.py",
        f"{_UNIT}test_executors.py",
    ),
    "gpurun/data/adopt.py": (f"{_UNIT}test_adopt.py",),
    "gpurun/data/foreign_shards.py": (f"{_UNIT}test_adopt.py",),
    "gpurun/data/dedupe/": (f"{_UNIT}test_dedupe.py", f"{_UNIT}test_dedupe_prepare.py"),
    "gpurun/data/hellaswag.py": (f"{_UNIT}test_hellaswag_items.py",),
    "gpurun/data/run_shards.py": (f"{_UNIT}test_shards.py", f"{_UNIT}data/test_prepare.py"),
    "gpurun/lifecycle/reaper.py": (
        f"{_LIFE}test_outlived.py",
        f"{_LIFE}test_shared_account.py", f"{_LIFE}test_matrix_destroy.py", f"{_LIFE}test_slurm_run.py", *_CLOUD,
    ),
    **dict.fromkeys(
        (
            "gpurun/planning/staging.py",
            "gpurun/lifecycle/steps/collect_bucket.py",
        ),
        (f"{_LIFE}test_bucket_plan.py", f"{_LIFE}test_stage.py", f"{_LIFE}test_salvage.py"),
    ),
    **dict.fromkeys(
        ("gpurun/remote/s3/", "gpurun/remote/agent/s3_push.py"),
        (f"{_SAFE}test_locks.py", f"{_UNIT}bucket", f"{_LIFE}test_stage.py", f"{_LIFE}test_salvage.py"),
    ),
    **dict.fromkeys(
        ("gpurun/remote/agent/s3_pull.py", "gpurun/remote/agent/public_files.py"),
        (f"{_UNIT}data/test_public_shards.py", f"{_SAFE}test_locks.py", f"{_UNIT}bucket"),
    ),
    "gpurun/remote/client.py": (
        f"{_FAR}test_machine_far.py", f"{_SAFE}test_far_hostile.py", f"{_FAR}test_agent_setup.py",
        f"{_FAR}test_agent_parts.py",
    ),
    "gpurun/remote/": (f"{_FAR}test_machine_far.py", f"{_SAFE}test_far_hostile.py", f"{_FAR}test_agent_parts.py"),
    "gpurun/remote/resumable_file.py": (
        f"{_FAR}test_partial.py", *_SYNCS, f"{_FAR}test_machine_far.py", f"{_SAFE}test_far_hostile.py",
    ),
    "gpurun/remote/download.py": (*_SYNCS, f"{_FAR}test_machine_far.py", f"{_SAFE}test_far_hostile.py"),
    "gpurun/remote/archive.py": (f"{_FAR}test_pack.py", f"{_FAR}test_agent_parts.py"),
    "gpurun/remote/upload.py": (
        f"{_FAR}test_send_hostile.py", f"{_FAR}test_cut_at_the_end.py", f"{_FAR}test_agent_parts.py",
        f"{_FAR}test_pack.py",
    ),
    "gpurun/remote/key_pairs.py": (*_SYNCS, f"{_FAR}test_ssh_keys.py", f"{_SAFE}test_locks.py"),
    "gpurun/remote/ssh/openssh.py": (f"{_SAFE}test_locks.py", f"{_FAR}test_openssh.py"),
    "gpurun/remote/ssh/ssh_machine.py": (f"{_FAR}test_sign_of_life.py", f"{_FAR}test_remote.py"),
    "gpurun/remote/ssh/": (*_SYNCS, f"{_FAR}test_remote.py", f"{_SAFE}test_ssh_hostile.py"),
    "gpurun/remote/ssh/transport.py": (
        f"{_FAR}test_remote.py", f"{_FAR}test_transfer.py", f"{_SAFE}test_ssh_hostile.py",
    ),
    "gpurun/remote/agent/": (*_SYNCS, f"{_SAFE}test_locks.py", *_AGENT),
    "gpurun/remote/agent/probe.py": (f"{_FAR}test_look_around.py",),
    "gpurun/remote/agent/runner/": (
        *_SYNCS, f"{_UNIT}test_published.py", f"{_UNIT}test_elsewhere.py", f"{_UNIT}test_sweep_trials.py",
    ),
    "gpurun/remote/agent/watchdog.py": (f"{_UNIT}bucket/test_linger.py", *_AGENT),
    "gpurun/remote/agent/setup_process.py": (f"{_FAR}test_agent_setup.py",),
    "gpurun/providers/_http.py": (f"{_UNIT}test_http.py", f"{_UNIT}test_lambda.py"),
    "gpurun/providers/aws/": (f"{_SAFE}test_locks.py", f"{_UNIT}test_aws.py"),
    "gpurun/providers/local": ("tests/contract/test_local.py", "tests/contract/test_provider.py"),
    "gpurun/providers/ssh.py": (*_SYNCS, f"{_UNIT}test_ssh_provider.py"),
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What a missing safeguard caused. `by` is the test that failed, or "" if all tests passed."""

    name: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{f'killed by {self.by}' if self.by else 'SURVIVES':90} {self.seconds:6.1f} s  {self.name}"


def missed_by(path: str) -> tuple[str, ...]:
    """Return the existing tests that could notice a missing safeguard of this file; LookupError if none is named."""
    fitting = [beginning for beginning in TESTS if path.startswith(beginning)]
    named = TESTS[max(fitting, key=len)] if fitting else ()
    there = tuple(dict.fromkeys(name for name in named if (ROOT / name).exists()))
    if not there:
        raise LookupError(f"{path} has a safeguard, and no test is named for it in TESTS")
    return there


def find_first_failure(copy: Path, *tests: str) -> str:
    """Return the first test that fails in a copy, TOO_SLOW if the tests exceed LIMIT_S, or "" if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # Children of a test hold its output open too.
        child.communicate()
        return TOO_SLOW  # A program that hangs would be noticed.
    if child.returncode in (0, 5):
        return ""
    named = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - |$)", out, re.MULTILINE)
    return named[1] if named else f"exit code {child.returncode}"


def judge(safeguard: Safeguard, copies: queue.Queue[Path]) -> Verdict:
    """Remove a safeguard in a free copy, run its tests, and restore the file.

    A test that also fails with the safeguard proves nothing: it is deselected, and the others run again.
    """
    copy, began, tests, by = copies.get(), time.monotonic(), missed_by(safeguard.path), ""
    target = copy / safeguard.path
    original = target.read_bytes()
    try:
        for _ in range(MOST_TRIES):
            target.write_text(safeguard.mutant, encoding="utf-8")
            by = find_first_failure(copy, *tests)
            target.write_bytes(original)
            if by in ("", TOO_SLOW) or not find_first_failure(copy, f"tests/{by}"):
                break
            tests, by = (*tests, "--deselect", f"tests/{by}"), ""  # It fails with the safeguard too.
    finally:
        target.write_bytes(original)
        copies.put(copy)
    return Verdict(safeguard.name, by, time.monotonic() - began)


def copied(folder: Path) -> Path:
    """Copy the parts of the tree that tests need into a folder, and return the folder."""
    for name in _COPIED:
        source, skip = ROOT / name, shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / name, ignore=skip) if source.is_dir() else shutil.copy(source, folder / name)
    return folder


def main() -> int:
    """Judge the chosen safeguards; return 1 if one survives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    options = parser.parse_args()
    chosen = [guard for guard in safeguards() if not options.words or any(word in guard.name for word in options.words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            (Path(folder) / str(number)).mkdir()
            copies.put(copied(Path(folder) / str(number)))
        survivors = 0
        for verdict in pool.map(lambda guard: judge(guard, copies), chosen):
            survivors += not verdict.by
            print(verdict, flush=True)
    print(f"{len(chosen)} safeguards removed in turn; no test failed for {survivors} of them")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Add a run's measurements to the history file when the run is closed. A failure to write the file is only logged."""

from __future__ import annotations

import json
import logging
import os

from pydantic import ValidationError

from gpurun.core.filelock import exclusive
from gpurun.core.journal_events import ShipObserved
from gpurun.core.journal_records import RunState, last_typed
from gpurun.core.paths import Home, RunFolder, write_atomic
from gpurun.core.run_plan import Plan
from gpurun.core.trainer_events import StartEvent, events_of
from gpurun.jobs.trainer import CHANGED
from gpurun.jobs.training.history import MOST_LOSSES, Prior, Priors, describe_machine, load_priors
from gpurun.jobs.training.memory import GIB
from gpurun.jobs.training.recipe import flops_per_token, read_model
from gpurun.jobs.training.throughput import Meter, Seen
from gpurun.ledger.journal import read_journal
from gpurun.providers.catalog import card_of
from gpurun.providers.registry import CLOUDS

__all__ = ["add_prior"]


def add_prior(state: RunState, plan: Plan, folder: RunFolder, home: Home, wall: float) -> None:
    """Add this run's measurements if it trained. Repeating the call changes nothing."""
    try:
        prior = _measure_run(state, plan, folder, wall)
        if prior is None:
            return
        prior = _add_upload_speed(prior, plan, folder)
        with exclusive(home.root / "priors.lock"):
            known, damage = load_priors(home)
            if damage:
                os.replace(home.priors, home.priors.with_suffix(".damaged"))
            # One line per run, so that a person can read the file.
            write_atomic(home.priors, _encode_priors(known.with_run(prior)))
    except OSError as error:
        logging.warning("this run's measurements were not kept for later plans: %s", error)


def _encode_priors(priors: Priors) -> bytes:
    runs = ",\n".join(json.dumps(run.model_dump(mode="json"), sort_keys=True) for run in priors.runs)
    return f'{{"v": 1, "runs": [\n{runs}\n]}}\n'.encode()


def _measure_run(state: RunState, plan: Plan, folder: RunFolder, wall: float) -> Prior | None:
    """Return the run's measurements; None if it did not train, or measured too little.

    A run with a changed trainer has no information about gpurun's trainer, and a run on several machines none about a
    single machine; for both, return None.
    """
    if state.outcome not in ("done", "stopped") or plan.job.trainer == CHANGED or state.leg > 1:
        return None
    start: StartEvent | None = None
    meter = Meter(plan.job.resolved)
    for event in events_of(folder.events):
        meter.take(event)
        start = event if isinstance(event, StartEvent) else start
    seen, offer = meter.seen(), plan.offer
    # A trainer that used a GPU tells nothing about an offer without a GPU, and vice versa.
    if seen is None or start is None or start.device != ("cuda" if offer.gpu_count else "cpu"):
        return None
    try:
        return _make_prior(seen, start, plan, wall)
    except (ValidationError, KeyError, TypeError, ValueError):
        logging.info("the speed that this run reports is not plausible, so it is not kept")
        return None


def _add_upload_speed(prior: Prior, plan: Plan, folder: RunFolder) -> Prior:
    """Return the record with the upload's size and time, which show the speed of this computer's connection.

    Uploads to a user's own machine or a bucket are not counted, because those may be nearby.
    """
    if plan.offer.provider not in CLOUDS or plan.choices.stage:
        return prior
    shipped = last_typed(read_journal(folder.journal).records, ShipObserved)
    if shipped is None or shipped.sent_bytes is None or shipped.seconds is None:
        return prior
    try:
        return Prior.model_validate({**dict(prior), "sent_bytes": shipped.sent_bytes, "sent_s": shipped.seconds})
    except ValidationError:
        return prior


def _make_prior(seen: Seen, start: StartEvent, plan: Plan, wall: float) -> Prior:
    """Return a run's record for the history. Raise ValueError if the machine's figures are incomplete or impossible."""
    if start.micro_batch is None or start.precision is None or start.torch is None:
        raise ValueError("it does not say how it trained")
    offer = plan.offer
    model = read_model(plan.job.resolved["model"])
    train = plan.job.resolved["train"]
    flops, card = flops_per_token(model, plan.data.vocab_size), card_of(offer.gpu)
    if card is not None and flops * seen.tokens_per_s > card.tflops * 1e12 * max(1, offer.gpu_count):
        raise ValueError("more than the card can do")
    has_room = not offer.gpu_count or (seen.memory_peak_bytes or 0) <= offer.vram_gb * GIB
    every = -(-len(seen.val_losses) // (MOST_LOSSES - 1)) or 1
    thinned = seen.val_losses[::-1][::every][::-1]  # The last loss is always included.
    return Prior(
        run=plan.run,
        wall=wall,
        card=offer.gpu,
        gpu_count=offer.gpu_count,
        nodes=offer.nodes,
        processes=plan.processes,
        machine="" if offer.gpu_count else describe_machine(offer, os.cpu_count() or 1),
        recipe_sha256=plan.job.recipe_sha256,
        data_sha256=plan.data.sha256,
        model=model,
        vocab_size=plan.data.vocab_size,
        flops_per_token=flops,
        micro_batch=start.micro_batch,
        batch_tokens=train["batch_tokens"],
        precision=start.precision,
        compile=train["compile"],
        loop=train["loop"],
        torch=start.torch,
        steps=seen.step,
        step_s=seen.step_s,
        tokens_per_s=seen.tokens_per_s,
        start_s=seen.start_s,
        memory_peak_bytes=seen.memory_peak_bytes if has_room else None,
        val_losses=thinned,
    )

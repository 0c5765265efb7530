"""Test that the machine downloads public shards from the hub, without a bucket or an upload, as the receipt shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.money import usd
from tests.clouds.rented import runpod, somebody
from tests.emulators import guests
from tests.emulators.hub import COMMIT, HubEmulator, shard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot"),
]
TINY = ("--set", "model.layers=1", "--set", "model.heads=1", "--set", "model.width=16", "--set", "model.context=16",
        "--set", "train.steps=20", "--set", "train.batch_tokens=128", "--set", "train.micro_batch=1",
        "--set", "train.compile=false", "--set", "train.checkpoint_every=10", "--set", "eval.tokens=64",
        "--set", "schedule.warmup_steps=2")  # fmt: skip


def test_public_shards_need_neither_a_bucket_nor_an_upload(tmp_path: Path) -> None:
    tokens = bytes(range(250)) * 20
    shards = {"finewebedu_train_000001.bin": shard(tokens), "finewebedu_val_000000.bin": shard(tokens[1:])}
    with HubEmulator(shards) as hub, runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        done = user.types(
            "train", "gpt2-124m", "--gpu", "1xA100", "--max-cost", "25", "--provider", "runpod", "--accept-cpu",
            "--data", "hf:me/tokens", "--yes", "--name", "fox-41", *TINY, HF_ENDPOINT=hub.origin,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + user.said()
        receipt = user.envelope("receipt", "fox-41")[1]["data"]["statement"]["predicate"]
        assert receipt["shipping"]["public"] == f"hf:me/tokens@{COMMIT}"
        assert receipt["shipping"]["public_bytes"] == sum(map(len, shards.values()))
        assert receipt["cost"]["upper_bound_micros"] <= usd(25)
        assert user.envelope("audit")[1]["ok"]
        assert cloud.alive() == []
        assert f"hf:me/tokens@{COMMIT}" in user.types("receipt", "fox-41").stdout

"""Tests that the token stream depends only on seed and position, and that bad data is refused before training."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.tiny_training import ROOT, TEXT, Train, events, recipe_record, shard_entry, write_data, write_shard
from trainer import data as data_module
from trainer import shards as shards_module
from trainer.data import Samples, TokenRow, ahead, micro_batch_starts, position_seed
from trainer.distributed import Processes
from trainer.errors import Refused
from trainer.evaluate import TextTask
from trainer.recipe_file import read_recipe
from trainer.shards import Shard, TokenData, open_data


def row(tmp_path: Path, lengths: tuple[int, ...] = (50, 7, 60)) -> TokenRow:
    """Return a row of tokens 0, 1, 2, … in several shards of these lengths."""
    shards, first = [], 0
    for number, length in enumerate(lengths):
        path = tmp_path / f"train_{number}.bin"
        write_shard(path, np.arange(first, first + length))
        shards.append(Shard(path, length, 1024, ""))
        first += length
    return TokenRow(shards)


@pytest.mark.parametrize("memory", [0, 1 << 40])
def test_a_read_crosses_the_ends_of_shards(tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "spare_memory_bytes", lambda: memory)
    tokens = row(tmp_path)
    assert tokens.tokens == 117
    for start, count in ((0, 117), (49, 2), (50, 7), (45, 30), (57, 60), (116, 1)):
        assert tokens.read(start, count).tolist() == list(range(start, start + count))


@pytest.mark.parametrize("limits", [("4096", None), (None, "4096"), ("max", "4096")])
def test_a_containers_limit_counts_whichever_kind_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[str | None, ...]
) -> None:
    paths = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    for path, text in zip(paths, limits, strict=True):
        if text is not None:
            path.write_text(text + "\n")
    monkeypatch.setattr(shards_module, "_CONTAINER_LIMITS", tuple(paths))
    assert shards_module.spare_memory_bytes() == 4096


def test_every_epoch_shows_every_window_once_in_another_order(tmp_path: Path) -> None:
    samples = Samples(row(tmp_path), 4, 42, "train")
    assert samples.windows == 29
    ids, targets = samples.read(0, 58)
    assert torch.equal(ids + 1, targets)
    first, second = ids[:29, 0].tolist(), ids[29:, 0].tolist()
    assert sorted(first) == sorted(second) == list(range(0, 116, 4))
    assert first != second
    # The order is frozen: RandomState(seed + epoch), whose stream numpy never changes.
    assert [start // 4 for start in first] == np.random.RandomState(42).permutation(29).tolist()
    assert [start // 4 for start in second] == np.random.RandomState(43).permutation(29).tolist()
    again = Samples(row(tmp_path), 4, 42, "train").read(40, 5)[0]
    assert torch.equal(again, ids[40:45])


def test_the_published_recipe_reads_both_splits_in_a_row(tmp_path: Path) -> None:
    recipe = read_recipe(ROOT / "recipes/modern-124m.toml", rehearse=True)
    folder = write_data(tmp_path / "data", TEXT * 3)
    data = open_data(folder, "char", ("the ",))
    task = TextTask.open(recipe, folder, data, Processes())
    context = recipe.model.context
    for samples, shards in ((task.train_samples, data.train), (task.val_samples, data.val)):
        tokens = np.concatenate([shard.loaded() for shard in shards]).astype(np.int64)
        ids, targets = samples.read(0, 3)
        assert ids.flatten().tolist() == tokens[: 3 * context].tolist()
        assert targets.flatten().tolist() == tokens[1 : 3 * context + 1].tolist()
        assert torch.equal(samples.read(samples.windows, 3)[0], ids)  # The next epoch starts at the first token again.


def test_any_number_of_processes_shares_out_the_same_samples() -> None:
    def all_samples(processes: int, micro_batch: int) -> list[list[int]]:
        steps: list[list[int]] = [[], []]
        for rank in range(processes):
            for start in micro_batch_starts(range(3, 5), 8, micro_batch, rank, processes):
                steps[start // 8 - 3] += range(start, start + micro_batch)
        return [sorted(step) for step in steps]

    wanted = [list(range(24, 32)), list(range(32, 40))]
    assert all(all_samples(*cut) == wanted for cut in ((1, 8), (1, 2), (2, 2), (2, 4), (4, 1), (8, 1)))


def test_dropout_seeds_differ_by_position_and_by_nothing_else() -> None:
    seeds = {position_seed(seed, step, micro) for seed in (1, 2) for step in range(20) for micro in range(20)}
    assert len(seeds) == 800
    assert position_seed(42, 0, 0) == int.from_bytes(hashlib.sha256(b"42/0/0").digest()[:8], "little") >> 1


def test_the_prefetch_thread_keeps_order_and_raises_its_errors() -> None:
    def make(start: int) -> tuple[torch.Tensor, torch.Tensor]:
        if start == 7:
            raise ValueError("at seven")
        return torch.tensor(start), torch.tensor(-start)

    assert [int(a) for a, _ in ahead(make, range(7), lambda: None)] == list(range(7))
    with pytest.raises(ValueError, match="at seven"):
        list(ahead(make, range(9), lambda: None))
    early = ahead(make, range(6), lambda: None)
    next(early)
    early.close()  # must end the thread, although it waits at a full queue


Damage = Callable[[Path, dict[str, Any]], None]


def _truncate(folder: Path, _: dict[str, Any]) -> None:
    shard = folder / "train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-100])


def _announce_truncated(folder: Path, manifest: dict[str, Any]) -> None:
    _truncate(folder, manifest)
    manifest["train"][0]["bytes"] -= 100


def _header(index: int, value: int) -> Damage:
    def damage(folder: Path, _: dict[str, Any]) -> None:
        shard = np.fromfile(folder / "train_000001.bin", dtype="<u2")
        shard[:1024].view("<i4")[index] = value
        shard.tofile(folder / "train_000001.bin")

    return damage


def _rewrite(tokens: list[int]) -> Damage:
    def damage(folder: Path, manifest: dict[str, Any]) -> None:
        manifest["train"] = [write_shard(folder / "train_000001.bin", tokens)]

    return damage


def _hold_out_what_is_trained_on(folder: Path, manifest: Any) -> None:
    """Make the held-out shard a copy, under another name, of a train shard."""
    held = manifest["val"][0] = {**manifest["train"][1], "name": "val_000000.bin"}
    (folder / held["name"]).write_bytes((folder / "train_000002.bin").read_bytes())


def _set(*path: Any, value: Any) -> Damage:
    def damage(_: Path, manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return damage


def _edit(name: str, edit: Callable[[Any], Any]) -> Damage:
    def damage(folder: Path, _: dict[str, Any]) -> None:
        (folder / name).write_text(json.dumps(edit(json.loads((folder / name).read_text()))))

    return damage


BAD_DATA: dict[str, tuple[Damage, str]] = {
    "missing shard": (lambda f, _: (f / "val_000000.bin").unlink(), "val_000000.bin .*missing"),
    "truncated": (_truncate, r"train_000001.bin .*truncated: \d+ bytes.* data.json .*\d+"),
    "truncated, and announced so": (_announce_truncated, "train_000001.bin .*truncated"),
    "wrong magic": (_header(0, 123), r"\b123\b.* 20240520"),
    "wrong version": (_header(1, 7), r"version 7\b"),
    "wrong length in header": (_header(2, 5), r"\b5 tokens.* data.json"),
    "empty": (_rewrite([]), "train_000001.bin .*empty"),
    "too short": (_rewrite(list(range(16))), "16 tokens.* model.context 16"),
    "token id": (_rewrite([1] * 40 + [999] + [1] * 40), "token id 999 at 40.* 28"),
    "other tokeniser": (_set("tokenizer", "name", value="gpt2"), 'tokeniser "gpt2"'),
    "other vocabulary": (_set("tokenizer", "sha256", value="0" * 64), "sha256"),
    "changed vocabulary": (_edit("vocab.json", lambda v: v | {"tokens_b64": v["tokens_b64"][::-1]}), "sha256"),
    "vocabulary size": (_set("tokenizer", "vocab_size", value=27), "27 tokens.* vocab.json .*28"),
    "end of text": (_set("tokenizer", "eot_id", value=28), "end-of-text id 28"),
    "not base64": (_edit("vocab.json", lambda v: v | {"tokens_b64": ["?"]}), "base64"),
    "dtype": (_set("dtype", value="uint32"), "uint32"),
    "version": (_set("v", value=2), "version 1"),
    "no train shard": (_set("train", value=[]), '"train"'),
    "no val": (_set("val", value=None), '"val" .*null'),
    "held out and trained on": (_hold_out_what_is_trained_on, "val_000000.bin is both"),
    "path out of the folder": (_set("train", 0, "name", value="../x.bin"), r"\.\./x\.bin"),
    "a shard without tokens": (_set("train", 0, value={"name": "x.bin", "sha256": ""}), '"tokens"'),
    "no vocabulary": (lambda f, _: (f / "vocab.json").unlink(), "vocab.json .*No such file"),
    "unknown prompt": (lambda f, _: (f / "prompts.json").write_text("[]"), 'prompt.* "the "'),
    "prompt ids": (lambda f, _: (f / "prompts.json").write_text('[{"text": "the ", "ids": [99]}]'), "prompts.json"),
    "broken prompts": (lambda f, _: (f / "prompts.json").write_text("[{"), "prompts.json .*JSON"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_exit_2_and_named(name: str, tmp_path: Path, train: Train) -> None:
    damage, facts = BAD_DATA[name]
    folder = write_data(tmp_path / "data")
    manifest = json.loads((folder / "data.json").read_text())
    damage(folder, manifest)
    (folder / "data.json").write_text(json.dumps(manifest))
    assert train(recipe_record(), tmp_path / "out", folder) == 2
    (stop,) = events(tmp_path / "out")
    assert (stop["kind"], stop["reason"]) == ("stop", "error")
    assert re.search(facts, stop["message"])


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "data")
    for text in ("", "[]", "{"):
        (folder / "data.json").write_text(text)
        with pytest.raises(Refused, match=r"data\.json"):
            open_data(folder, "char", ())
    with pytest.raises(Refused, match=r"data\.json .*No such file"):
        open_data(tmp_path / "nowhere", "char", ())


def test_nanogpt_and_numpy_shards_are_read_too(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "data")
    tokens = np.arange(28, dtype="<u2").repeat(3)
    tokens.tofile(folder / "train.bin")
    np.save(folder / "edu_000001.npy", tokens)
    manifest = json.loads((folder / "data.json").read_text())
    manifest["train"] = [shard_entry(folder / name, 84) for name in ("train.bin", "edu_000001.npy")]
    (folder / "data.json").write_text(json.dumps(manifest))
    data: TokenData = open_data(folder, "char", ("the ",))
    assert TokenRow(data.train).read(0, 168).tolist() == [*tokens.tolist(), *tokens.tolist()]
    assert data.tokenizer.decode(list(data.prompts[0].ids)) == "the "
    np.save(folder / "edu_000001.npy", tokens.astype("<u4"))
    manifest["train"] = [shard_entry(folder / "edu_000001.npy", 84)]
    (folder / "data.json").write_text(json.dumps(manifest))
    with pytest.raises(Refused, match="uint32 with 1"):
        open_data(folder, "char", ())

"""Tests of shards that nanoGPT, llm.c and build-nanogpt made: each verb recognises them, and runs use adopted ones.

The tests write each layout as its own program writes it, and check the tokens with numpy.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gpurun.cli.app import build_app
from gpurun.core.errors import UsageError
from gpurun.data.adopt import adopt
from gpurun.data.layout import AS_FOUND
from gpurun.data.run_shards import prepare_run_shards
from gpurun.data.shard_folder import inspect_data
from gpurun.data.sources import TextSource, open_source
from gpurun.jobs.training.recipe import load_recipe, resolve
from gpurun.remote.archive import survey
from trainer import tokenizer
from trainer.shards import open_data
from trainer.train import main as train

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 300
EOT = 50256
DRAW = np.random.default_rng(7)
Layout = Callable[[Path], dict[str, np.ndarray]]
"""Writes a folder as one program does, and returns each split's tokens in the order of its files."""


def documents(count: int, *, eot: str) -> np.ndarray:
    """Return the GPT-2 ids of `count` documents.

    `eot` puts the end-of-text token before or after each, or leaves it out.
    """
    parts = [DRAW.integers(0, EOT, int(DRAW.integers(20, 90))) for _ in range(count)]
    ended = [[EOT, *part] if eot == "before" else [*part, EOT] if eot == "after" else [*part] for part in parts]
    return np.concatenate(ended).astype(np.uint16)


def char_level(folder: Path) -> dict[str, np.ndarray]:
    """Write nanoGPT's data/shakespeare_char, with ids that do not follow the order of code points; return the ids."""
    folder.mkdir(parents=True)
    characters = sorted(set(TEXT), reverse=True)
    stoi = {character: number for number, character in enumerate(characters)}
    ids = np.array([stoi[character] for character in TEXT], dtype=np.uint16)
    parts = {"train": ids[: len(ids) * 9 // 10], "val": ids[len(ids) * 9 // 10 :]}
    for split, part in parts.items():
        part.tofile(folder / f"{split}.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    (folder / "input.txt").write_text(TEXT)
    (folder / "readme.md").write_text("# tiny shakespeare, character-level\n")
    return parts


def open_web_text(folder: Path) -> dict[str, np.ndarray]:
    """Write nanoGPT's data/openwebtext: one memory-mapped file per split, and prepare.py; return the ids."""
    folder.mkdir(parents=True)
    parts = {"train": documents(60, eot="after"), "val": documents(20, eot="after")}
    for split, part in parts.items():
        row = np.memmap(folder / f"{split}.bin", dtype=np.uint16, mode="w+", shape=part.shape)
        row[:] = part
        row.flush()
    (folder / "prepare.py").write_text("# saves the openwebtext dataset to a binary file for training\n" * 50)
    (folder / "readme.md").write_text("## openwebtext dataset\n")
    return parts


def write_llm_c(path: Path, tokens: np.ndarray, magic: int = 20240520) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[0], header[1], header[2] = magic, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def fine_web(folder: Path) -> dict[str, np.ndarray]:
    """Write llm.c's dev/data/fineweb10B, whose first shard is for validation; return the ids by split."""
    folder.mkdir(parents=True)
    shards = np.array_split(documents(90, eot="before"), 3)
    for number, tokens in enumerate(shards):
        write_llm_c(folder / f"fineweb_{'val' if number == 0 else 'train'}_{number:06d}.bin", tokens)
    return {"train": np.concatenate(shards[1:]), "val": shards[0]}


def edu_fine_web(folder: Path) -> dict[str, np.ndarray]:
    """Write build-nanogpt's edu_fineweb10B; return the ids by split."""
    folder.mkdir(parents=True)
    shards = np.array_split(documents(90, eot="before"), 3)
    for number, tokens in enumerate(shards):
        np.save(folder / f"edufineweb_{'val' if number == 0 else 'train'}_{number:06d}", tokens)
    return {"train": np.concatenate(shards[1:]), "val": shards[0]}


LAYOUTS = {
    "nanoGPT char": (char_level, "char", "none"),
    "nanoGPT": (open_web_text, "gpt2", "after"),
    "llm.c": (fine_web, "gpt2", "before"),
    "npy": (edu_fine_web, "gpt2", "before"),
}
EVERY = pytest.mark.parametrize(("layout", "made_by", "eot"), LAYOUTS.values(), ids=LAYOUTS)


@functools.cache
def gpt2() -> tokenizer.TextTokenizer:
    return tokenizer.Gpt2Tokenizer(tokenizer.shipped_gpt2_tokens())


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "load_gpt2", lambda _: gpt2())


def ask(*words: str) -> dict[str, Any]:
    """Run a verb with --json and return its answer."""
    answer: dict[str, Any] = json.loads(CliRunner().invoke(build_app(), [*words, "--json"]).stdout.splitlines()[-1])
    return answer


def refusal(call: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as raised:
        call()
    return raised.value


def content(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@EVERY
def test_adopted_shards_are_the_same_tokens_where_they_lie(
    layout: Layout, made_by: str, eot: str, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    parts = layout(theirs)
    before = content(theirs)
    adopt(theirs, made_by, ours, print)
    assert content(theirs) == before, "nothing is changed or written beside them"
    assert sum(path.lstat().st_size for path in ours.glob("*_0*")) < 4096, "nothing is copied"
    summary, manifest = inspect_data(ours)
    assert (summary.train_tokens, summary.val_tokens) == (len(parts["train"]), len(parts["val"]))
    assert manifest["eot"] == eot
    data = open_data(ours, made_by, ())
    for shards, tokens in ((data.train, parts["train"]), (data.val, parts["val"])):
        assert np.array_equal(np.concatenate([shard.mapped() for shard in shards]), tokens)


def test_characters_keep_their_ids_and_prompts_use_them(tmp_path: Path) -> None:
    parts = char_level(tmp_path / "theirs")
    adopt(tmp_path / "theirs", "char", tmp_path / "ours", print)
    said = ["sample.prompts=['Sylter Deich']", "model.context=32", "train.batch_tokens=256", "train.micro_batch=1"]
    resolved = resolve(load_recipe("mini-gpt"), "full", said).record
    found = prepare_run_shards(
        resolved, str(tmp_path / "ours"), into=tmp_path / "run", cache=tmp_path / "cache", say=print
    )
    data = open_data(tmp_path / "run", "char", ("Sylter Deich",), shards_in=Path(found.folder))
    assert data.tokenizer.decode(list(data.prompts[0].ids)) == "Sylter Deich"
    assert data.tokenizer.decode(parts["train"].tolist()) == TEXT[: len(parts["train"])]


@EVERY
def test_every_verb_names_what_to_do_with_a_raw_folder(layout: Layout, made_by: str, eot: str, tmp_path: Path) -> None:
    """Otherwise `plan` prices data that cannot be trained on, or the run trains on prepare.py and readme.md as text."""
    layout(tmp_path / "data" / "theirs")
    theirs = str(tmp_path / "data" / "theirs")
    above, shard = str(tmp_path / "data"), str(next((tmp_path / "data").glob("*/*train*.*")))
    bundled = "mini-gpt" if made_by == "char" else "gpt2-124m"
    verbs = [["data", "inspect", place] for place in (theirs, above, shard)]
    verbs += [["data", "prepare", bundled, "--source", place, "--out", f"{tmp_path}/o"] for place in (theirs, above)]
    verbs += [["plan", bundled, "--max-cost", "25", "--data", place] for place in (theirs, above, shard)]
    verbs += [[verb, bundled, "--dry-run", "--data", theirs] for verb in ("plan", "train")]
    for words in verbs:
        answer = ask(*words)
        (error,) = answer["errors"]
        assert (error["code"], answer["exit_code"]) == ("data.foreign_shards", 2), words
        assert f"gpurun data adopt {theirs} --tokenizer {made_by} --out NEW" in error["hint"]
    assert not (tmp_path / "o" / "data.json").exists()


@EVERY
def test_every_verb_takes_what_was_adopted(layout: Layout, made_by: str, eot: str, tmp_path: Path) -> None:
    layout(tmp_path / "theirs")
    made = ask("data", "adopt", str(tmp_path / "theirs"), "--tokenizer", made_by, "--out", str(tmp_path / "ours"))
    assert made["errors"] == []
    assert made["data"]["eot"] == eot
    assert ask("data", "inspect", str(tmp_path / "ours"))["data"] == made["data"]
    chosen = ["context=16", "batch_tokens=1024", "micro_batch=1", "eval.hellaswag_items=0", "sample.prompts=['S']"]
    words = ["mini-gpt" if made_by == "char" else "gpt2-124m", "--data", str(tmp_path / "ours"), "--max-cost", "25"]
    planned = ask("plan", *words, *(f"--set={one}" for one in chosen))
    assert planned["errors"] == []
    assert planned["data"]["data"]["train_tokens"] == made["data"]["train_tokens"]


def test_one_shard_of_an_adopted_folder_points_to_the_folder(tmp_path: Path) -> None:
    fine_web(tmp_path / "theirs")
    adopt(tmp_path / "theirs", "gpt2", tmp_path / "ours", print)
    error = refusal(lambda: opened(tmp_path / "ours" / "val_000000.bin"))
    assert error.code == "data.foreign_shards"
    assert error.hint.endswith(f"--data {tmp_path / 'ours'}")
    assert refusal(lambda: opened(tmp_path)).code == "data.shards_below"


def test_sentence_pairs_are_not_made_of_shards_either(tmp_path: Path) -> None:
    open_web_text(tmp_path / "theirs")
    resolved = resolve(load_recipe("annotated-transformer"), "rehearsal").record
    said: list[str] = []
    places = {"into": tmp_path / "run", "cache": tmp_path / "cache"}
    error = refusal(lambda: prepare_run_shards(resolved, str(tmp_path / "theirs"), say=said.append, **places))
    assert error.code == "data.foreign_shards"


def test_what_is_uploaded_are_the_bytes_that_the_links_name(tmp_path: Path) -> None:
    fine_web(tmp_path / "theirs")
    _, manifest = adopt(tmp_path / "theirs", "gpt2", tmp_path / "ours", print)
    names = [entry["name"] for split in ("train", "val") for entry in manifest[split]]
    seen = survey({f"data/{name}": tmp_path / "ours" / name for name in names})
    assert seen.refusals == ()
    assert {Path(str(file.source)).parent for file in seen.files} == {tmp_path / "theirs"}
    assert {file.name: file.bytes for file in seen.files} == {
        f"data/{entry['name']}": entry["bytes"] for split in ("train", "val") for entry in manifest[split]
    }


@EVERY
@pytest.mark.parametrize("fault", ["vanished", "grown", "another token", "replaced by a folder"])
def test_a_shard_changed_since_it_was_adopted_is_refused_by_name(
    layout: Layout, made_by: str, eot: str, fault: str, tmp_path: Path
) -> None:
    layout(tmp_path / "theirs")
    adopt(tmp_path / "theirs", made_by, tmp_path / "ours", print)
    shard = sorted(path for path in (tmp_path / "theirs").iterdir() if path.suffix in (".bin", ".npy"))[0]
    raw = shard.read_bytes()
    if fault == "grown":
        shard.write_bytes(raw + b"\0\0")
    elif fault == "another token":
        shard.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1, raw[-1]]))
    else:
        shard.unlink()
        if fault == "replaced by a folder":
            shard.mkdir()
    error = refusal(lambda: inspect_data(tmp_path / "ours"))
    assert str(shard) in error.what
    assert "Adopt" in error.hint


class Hostile:
    """An object whose pickle runs a command when Python loads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_meta_is_refused_and_nothing_of_it_runs(protocol: int, tmp_path: Path) -> None:
    char_level(tmp_path / "theirs")
    mark = tmp_path / "it-ran"
    (tmp_path / "theirs" / "meta.pkl").write_bytes(pickle.dumps({"itos": Hostile(mark)}, protocol))
    error = refusal(lambda: adopt(tmp_path / "theirs", "char", tmp_path / "ours", print))
    assert error.code == "data.bad_meta"
    assert not mark.exists()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_meta_is_read_in_every_protocol_that_python_3_writes(protocol: int, tmp_path: Path) -> None:
    char_level(tmp_path / "theirs")
    path = tmp_path / "theirs" / "meta.pkl"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), protocol))
    summary, _ = adopt(tmp_path / "theirs", "char", tmp_path / "ours", print)
    assert summary.vocab_size == len(set(TEXT))


BAD_METAS = {
    "nothing": b"",
    "text": b"itos = {0: 'a'}",
    "cut short": pickle.dumps({"itos": {0: "a", 1: "b"}})[:-1],
    "no itos": pickle.dumps({"stoi": {"a": 0}}),
    "a hole": pickle.dumps({"itos": {0: "a", 2: "b"}}),
    "two ids of one character": pickle.dumps({"itos": {0: "a", 1: "a"}}),
    "words": pickle.dumps({"itos": {0: "the", 1: "cat"}}),
    "half a character": pickle.dumps({"itos": {0: "\ud800"}}),
    "numbers": pickle.dumps({"itos": {0: 1, 1: 2}}),
    "a number": pickle.dumps(7),
    "larger than any": pickle.dumps({"itos": {0: "a"}, "more": "x" * (1 << 20)}),
    "a memo that is not there": b"\x80\x04h\x09.",
    "a key that is none": b"\x80\x04}(}}u.",
    "items without a mark": b"\x80\x04}u.",
}


@pytest.mark.parametrize("raw", BAD_METAS.values(), ids=BAD_METAS)
def test_a_meta_that_is_none_is_a_sentence(raw: bytes, tmp_path: Path) -> None:
    char_level(tmp_path / "theirs")
    (tmp_path / "theirs" / "meta.pkl").write_bytes(raw)
    error = refusal(lambda: adopt(tmp_path / "theirs", "char", tmp_path / "ours", print))
    assert error.code == "data.bad_meta"


def make_llama(folder: Path) -> None:
    for split in ("train", "val"):
        write_llm_c(folder / f"fineweb_{split}_000000.bin", np.arange(50, dtype=np.uint32), 20240801)


def make_other_dtype(folder: Path) -> None:
    for split in ("train", "val"):
        np.save(folder / f"edufineweb_{split}_000000", np.arange(50, dtype=np.int32))


def make_two_rows(folder: Path) -> None:
    for split in ("train", "val"):
        np.save(folder / f"edufineweb_{split}_000000", np.zeros((2, 50), dtype=np.uint16))


def make_no_val(folder: Path) -> None:
    write_llm_c(folder / "fineweb_train_000001.bin", documents(9, eot="before"))


def make_no_split(folder: Path) -> None:
    write_llm_c(folder / "fineweb_000001.bin", documents(9, eot="before"))


def make_cut(folder: Path) -> None:
    fine_web(folder / "whole")
    for path in (folder / "whole").iterdir():
        (folder / path.name).write_bytes(path.read_bytes()[:-2])


def make_too_high(folder: Path) -> None:
    for split in ("train", "val"):
        np.array([len(split), EOT + 1], dtype=np.uint16).tofile(folder / f"{split}.bin")


def make_same(folder: Path) -> None:
    for split in ("train", "val"):
        write_llm_c(folder / f"tiny_{split}.bin", np.arange(50, dtype=np.uint16))


def make_two_makers(folder: Path) -> None:
    for layout in (fine_web, edu_fine_web):
        layout(folder / layout.__name__)
        for path in (folder / layout.__name__).iterdir():
            path.rename(folder / path.name)


def make_odd(folder: Path) -> None:
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(b"\x01\x00\x02")


def make_empty(folder: Path) -> None:
    write_llm_c(folder / "t_train.bin", np.zeros(0, dtype=np.uint16))
    write_llm_c(folder / "t_val.bin", np.arange(9, dtype=np.uint16))


def make_text(folder: Path) -> None:
    for name in ("notes.txt", "notes_train.npy"):
        (folder / name).write_text(TEXT)


UNUSABLE = {
    make_llama: ("data.foreign_shards", "uint32"),
    make_other_dtype: ("data.npy", "int32"),
    make_two_rows: ("data.npy", "(2, 50)"),
    make_no_val: ("data.no_held_out", "val"),
    make_no_split: ("data.no_split", "fineweb_000001.bin"),
    make_cut: ("data.truncated", "fineweb_train_000001.bin"),
    make_too_high: ("data.token_too_high", str(EOT + 1)),
    make_same: ("data.same_shard", "tiny_val.bin"),
    make_two_makers: ("data.no_foreign_shards", "llm.c and of npy"),
    make_odd: ("data.truncated", "train.bin"),
    make_empty: ("data.empty", "t_train.bin"),
    make_text: ("data.no_foreign_shards", "no known shards"),
}


@pytest.mark.parametrize(("make", "expected"), UNUSABLE.items(), ids=[make.__name__ for make in UNUSABLE])
def test_what_could_not_be_trained_on_is_not_adopted(
    make: Callable[[Path], None], expected: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    make(tmp_path / "theirs")
    error = refusal(lambda: adopt(tmp_path / "theirs", "gpt2", tmp_path / "ours", print))
    assert error.code == expected[0]
    assert expected[1] in error.what
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(("layout", "named"), [(char_level, "gpt2"), (open_web_text, "char"), (fine_web, "char")])
def test_ids_of_another_tokeniser_are_refused(layout: Layout, named: str, tmp_path: Path) -> None:
    """Character ids are also valid GPT-2 ids, so training on them would fail without an error."""
    layout(tmp_path / "theirs")
    error = refusal(lambda: adopt(tmp_path / "theirs", named, tmp_path / "ours", print))
    assert error.code == "data.other_tokenizer"


def test_nothing_is_written_over_or_among_what_is_there(tmp_path: Path) -> None:
    fine_web(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "kept").write_text("mine")
    for out, code in ((tmp_path / "ours", "data.out_in_use"), (tmp_path / "theirs" / "new", "data.out_in_source")):
        assert refusal(lambda out=out: adopt(tmp_path / "theirs", "gpt2", out, print)).code == code
    assert content(tmp_path / "ours") == {"kept": b"mine"}
    assert not (tmp_path / "theirs" / "new").exists()


def opened(folder: Path) -> tuple[TextSource, list[str]]:
    said: list[str] = []
    return open_source(str(folder), AS_FOUND, said.append, val_fraction=0.1), said


@pytest.mark.parametrize("below", ["", "data"])
def test_a_hub_snapshot_is_read_through_its_links_without_cards(below: str, tmp_path: Path) -> None:
    """A snapshot is a folder of links: if gpurun did not follow them, it would train on the data set's cards only."""
    cache = tmp_path / "hub" / "datasets--somebody--texts"
    snapshot = cache / "snapshots" / "0f3c"
    (cache / "blobs").mkdir(parents=True)
    (snapshot / "data").mkdir(parents=True)
    (tmp_path / "elsewhere.txt").write_text("nobody's\n" * 50)
    files = {"README.md": "# A card\n", "data/notes.md": "# A card\n", ".gitattributes": "*.parquet lfs\n"}
    files |= {"data/train.jsonl": '{"text": "a document"}\n' * 50, "data/more.txt": TEXT}
    for number, (name, text) in enumerate(files.items()):
        (cache / "blobs" / str(number)).write_text(text)
        (snapshot / name).symlink_to(os.path.relpath(cache / "blobs" / str(number), (snapshot / name).parent))
    (snapshot / "data" / "out.txt").symlink_to(tmp_path / "elsewhere.txt")
    source, said = opened(snapshot / below)
    assert sorted(Path(file.name).name for file in source.files) == ["more.txt", "train.jsonl"]
    assert source.passed_over["cards"] == (1 if below else 2)
    assert source.passed_over["links"] == 1
    assert "cards" in " ".join(said)


def test_markdown_elsewhere_and_other_arrays_do_not_hinder_text(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "notes.md").write_text(TEXT)
    np.save(tmp_path / "texts" / "figures", np.arange(9))
    source, _ = opened(tmp_path / "texts")
    assert [file.name for file in source.files] == ["notes.md"]


def test_a_run_on_adopted_shards_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first loss must be that of a uniform guess among the characters; the last must be much lower."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    char_level(tmp_path / "theirs")
    adopt(tmp_path / "theirs", "char", tmp_path / "ours", print)
    said = ["sample.prompts=['Sylt']", "model.context=32", "model.layers=1", "model.width=32", "model.heads=2"]
    said += ["train.batch_tokens=512", "train.micro_batch=16", "train.steps=20", "train.log_every=1", "optim.lr=0.01"]
    said += ["eval.every=20", "eval.tokens=512", "train.checkpoint_every=20", "hardware.on_cpu=as_written"]
    resolved = resolve(load_recipe("mini-gpt"), "full", said).record
    found = prepare_run_shards(
        resolved, str(tmp_path / "ours"), into=tmp_path / "run", cache=tmp_path / "cache", say=print
    )
    for shard in Path(found.folder).glob("*_0*.bin"):
        (tmp_path / "run" / shard.name).symlink_to(shard)
    (tmp_path / "recipe.json").write_text(json.dumps(resolved))
    folders = ["--data", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert train(["--recipe", str(tmp_path / "recipe.json"), *folders]) == 0
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert losses[0] == pytest.approx(np.log(found.vocab_size), abs=0.2)
    assert len(losses) == 20
    assert losses[-1] < 2.0, "what the frequencies of characters alone would give is 3.2"

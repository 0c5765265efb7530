"""Tests that the user's own shards are checked to the last token before a machine is rented."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurun.core.errors import UsageError
from gpurun.data.run_shards import prepare_run_shards
from gpurun.data.shard_folder import inspect
from gpurun.jobs.training.recipe import load_recipe, resolve
from tests.refusals import refusal

TOKENS = np.arange(300, dtype="<u2") % 97
LINES = "".join(f"the quick brown fox number {number} jumps over the lazy dog\n" for number in range(200))


def shard(folder: Path, name: str, tokens: np.ndarray = TOKENS, magic: int = 20240520) -> dict[str, Any]:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(tokens)
    content = header.tobytes() + tokens.tobytes()
    (folder / name).write_bytes(content)
    return {"name": name, "tokens": len(tokens), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def folder_of_shards(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = {"name": "char", "sha256": "0" * 64, "vocab_size": 97, "eot_id": None}
    manifest = {
        "v": 1, "dtype": "uint16", "eot": "none", "tokenizer": tokenizer, "source": {"kind": "file"},
        "train": [shard(folder, "train_000001.bin")], "val": [shard(folder, "val_000000.bin")],
    }  # fmt: skip
    (folder / "data.json").write_text(json.dumps({**manifest, **changed}))
    return folder


def refused(folder: Path, *, tokenizer: str = "char", vocab_size: int = 0) -> str:
    with pytest.raises(UsageError) as raised:
        inspect(folder, tokenizer=tokenizer, vocab_size=vocab_size)
    assert raised.value.hint
    return raised.value.code


def test_sound_shards_are_summed_up(tmp_path: Path) -> None:
    found = inspect(folder_of_shards(tmp_path / "s"), tokenizer="char", vocab_size=0)
    assert (found.train_tokens, found.val_tokens, found.vocab_size) == (300, 300, 97)


def test_made_by_another_tokeniser(tmp_path: Path) -> None:
    assert refused(folder_of_shards(tmp_path / "s"), tokenizer="gpt2") == "data.other_tokenizer"


def test_another_gpt2_tokenisers_shards_get_no_gpt2_words(tmp_path: Path) -> None:
    other = {"name": "gpt2", "sha256": "0" * 64, "vocab_size": 97, "eot_id": None}
    folder = folder_of_shards(tmp_path / "s", tokenizer=other)
    record = resolve(load_recipe("mini-gpt"), "full", ["data.tokenizer=gpt2", "model.context=8"]).record
    places = {"into": tmp_path / "out", "cache": tmp_path / "cache"}
    with pytest.raises(UsageError) as raised:
        prepare_run_shards(record, str(folder), **places, say=lambda _: None)
    assert raised.value.code == "data.other_tokenizer"


@pytest.mark.parametrize("is_text", [True, False])
def test_less_than_a_batch_is_refused_at_home_as_prepare_does(tmp_path: Path, is_text: bool) -> None:
    """Data smaller than a batch was once trained on, several times within each step, on paid time."""
    text = tmp_path / "text"
    text.write_text(LINES[:1000])
    places = {"cache": tmp_path / "cache", "say": lambda _: None}

    def made(data: Path, name: str, batch: int) -> None:
        record = resolve(load_recipe("mini-gpt"), "full", ["model.context=8", f"train.batch_tokens={batch}"]).record
        prepare_run_shards(record, str(data), into=tmp_path / name, **places)

    made(text, "shards", 64)
    with refusal(UsageError, "data.too_small", "4,096"):
        made(text if is_text else tmp_path / "shards", "out", 4096)


def test_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = folder_of_shards(tmp_path / "s")
    high = shard(folder, "train_000002.bin", TOKENS + 1)
    assert refused(folder_of_shards(folder, train=[high])) == "data.token_too_high"


def test_a_model_with_fewer_tokens_than_its_tokeniser_is_refused(tmp_path: Path) -> None:
    """The trainer refuses such a model whichever tokens occur. gpurun must refuse it before it costs paid time."""
    folder = folder_of_shards(tmp_path / "s")
    assert refused(folder, vocab_size=96) == "data.vocabulary_larger"
    inspect(folder, tokenizer="char", vocab_size=97)
    record = resolve(load_recipe("mini-gpt"), "full", ["model.vocab_size=64"]).record
    (tmp_path / "text").write_text(LINES + "".join(map(chr, range(32, 127))) * 20)
    places = {"into": tmp_path / "out", "cache": tmp_path / "cache"}
    with refusal(UsageError, "data.vocabulary_larger", "97 tokens"):
        prepare_run_shards(record, str(tmp_path / "text"), **places, say=lambda _: None)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.unlink(), "data.missing"),
        (lambda path: path.write_bytes(b""), "data.empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:1024]), "data.empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "data.truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0\0"), "data.truncated"),
        (lambda path: path.write_bytes(struct.pack("<i", 7) + path.read_bytes()[4:]), "data.magic"),
        (lambda path: path.write_bytes(path.read_bytes()[:-2] + b"\1\0"), "data.digest"),
    ],
    ids=["gone", "no bytes", "only a header", "cut short", "too long", "another magic", "one token changed"],
)
def test_a_damaged_shard_is_named_with_what_is_wrong(tmp_path: Path, damage: Any, code: str) -> None:
    folder = folder_of_shards(tmp_path / "s")
    damage(folder / "train_000001.bin")
    assert refused(folder) == code


def of_another_kind(folder: Path, name: str, tokens: np.ndarray) -> dict[str, Any]:
    """Write a shard as nanoGPT (.bin without a header) or build-nanogpt (.npy) does; return its manifest entry."""
    np.save(folder / name, tokens) if name.endswith(".npy") else tokens.tofile(folder / name)
    content = (folder / name).read_bytes()
    return {"name": name, "tokens": len(tokens), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("name", ["train.bin", "train.npy"])
def test_nanogpt_and_build_nanogpt_shards_are_checked_throughout(tmp_path: Path, name: str) -> None:
    """The trainer reads both kinds of shards; gpurun must accept both and check all their tokens."""
    folder = folder_of_shards(tmp_path / "s")
    folder_of_shards(folder, train=[of_another_kind(folder, name, TOKENS)])
    assert inspect(folder, tokenizer="char", vocab_size=0).train_tokens == 300
    folder_of_shards(folder, train=[of_another_kind(folder, name, TOKENS + 1)])
    assert refused(folder) == "data.token_too_high"


@pytest.mark.parametrize("tokens", [TOKENS.astype("<i8"), TOKENS.reshape(2, 150), TOKENS[:200]])
def test_a_npy_shard_that_is_no_row_of_so_many_uint16_is_refused(tmp_path: Path, tokens: np.ndarray) -> None:
    folder = folder_of_shards(tmp_path / "s")
    entry = of_another_kind(folder, "train.npy", tokens)
    assert refused(folder_of_shards(folder, train=[{**entry, "tokens": 300}])) == "data.npy"
    (folder / "train.npy").write_bytes(b"no header")
    assert refused(folder) == "data.npy"


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"train": [], "val": []}', '{"train": [{"name": 1}]}'])
def test_a_manifest_that_is_none(tmp_path: Path, manifest: str) -> None:
    folder = folder_of_shards(tmp_path / "s")
    (folder / "data.json").write_text(manifest)
    assert refused(folder) == "data.bad_manifest"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda manifest: manifest["train"][0].update(tokens="300"), 'tokens is "300"'),
        (lambda manifest: manifest["val"][0].update(sha256=None), "sha256 is null"),
        (lambda manifest: manifest["tokenizer"].update(vocab_size="97"), 'vocab_size is "97"'),
        (lambda manifest: manifest.update(source="mine"), 'source is "mine"'),
        (lambda manifest: manifest.update(note="\ud800"), "surrogates not allowed"),
    ],
)
def test_a_value_of_another_type_in_a_manifest_is_named(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], says: str
) -> None:
    folder = folder_of_shards(tmp_path / "s")
    manifest = json.loads((folder / "data.json").read_text())
    damage(manifest)
    (folder / "data.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError) as raised:
        inspect(folder, tokenizer="char", vocab_size=0)
    assert raised.value.code == "data.bad_manifest"
    assert says in raised.value.what


def test_a_name_in_a_manifest_never_leaves_its_folder(tmp_path: Path) -> None:
    outside = {**shard(tmp_path, "outside.bin"), "name": "../outside.bin"}
    assert refused(folder_of_shards(tmp_path / "s", train=[outside])) == "data.missing"


def test_brought_shards_get_prompts_alongside_and_are_not_copied(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(LINES)
    recipe = resolve(load_recipe("mini-gpt"), "rehearsal")
    places = {"cache": tmp_path / "cache", "say": lambda line: None}
    made = prepare_run_shards(recipe.record, str(text), into=tmp_path / "own", **places)
    again = prepare_run_shards(recipe.record, str(tmp_path / "own"), into=tmp_path / "beside", **places)
    assert again.folder == made.folder
    assert again.sha256 == made.sha256
    beside = {path.name for path in (tmp_path / "beside").iterdir()}
    assert beside == {"data.json", "vocab.json", "prompts.json"}
    prompts = json.loads((tmp_path / "beside" / "prompts.json").read_text())
    assert [prompt["text"] for prompt in prompts] == list(recipe.tables.sample.prompts)


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: [entry.pop(key) for entry in manifest["train"]]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda manifest: manifest.update(v=2), "version 1"),
        (lambda manifest: manifest.update(dtype="uint32"), "uint32"),
        (lambda manifest: manifest.pop("dtype"), "None"),
        (lambda manifest: manifest.update(val=[]), '"val"'),
        (_without("bytes"), 'no "bytes"'),
        (lambda manifest: manifest["tokenizer"].update(eot_id=60_000), "60000"),
        (lambda manifest: None, "model.context 300"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_at_home(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], says: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(LINES[:2700])
    recipe = resolve(load_recipe("mini-gpt"), "rehearsal").record
    places = {"cache": tmp_path / "cache", "say": lambda line: None}
    made = Path(prepare_run_shards(recipe, str(text), into=tmp_path / "own", **places).folder)
    manifest = json.loads((made / "data.json").read_text())
    damage(manifest)
    (made / "data.json").write_text(json.dumps(manifest))
    longer = recipe | {"model": recipe["model"] | {"context": 300}}
    with pytest.raises(UsageError) as refused:
        prepare_run_shards(longer, str(made), into=tmp_path / "beside", **places)
    assert refused.value.code == "data.untrainable"
    assert says in refused.value.what
    assert not (tmp_path / "beside").exists()


def test_sentence_pairs_are_made_brought_and_refused_at_home(tmp_path: Path) -> None:
    recipe = resolve(load_recipe("annotated-transformer"), "rehearsal").record
    places = {"cache": tmp_path / "cache", "say": lambda line: None}
    made = prepare_run_shards(recipe, None, into=tmp_path / "own", **places)
    assert (made.source, made.tokenizer) == ("english-german", "word-pairs")
    again = prepare_run_shards(recipe, made.folder, into=tmp_path / "beside", **places)
    assert again.sha256 == made.sha256
    prompts = [json.loads((tmp_path / name / "prompts.json").read_text()) for name in ("own", "beside")]
    assert prompts[0] == prompts[1]
    longest = json.loads((tmp_path / "own" / "data.json").read_text())["pairs"]["longest"]
    inspect(tmp_path / "own", tokenizer="word-pairs", vocab_size=0, context=longest)
    with pytest.raises(UsageError, match=f"{longest} positions.* model.context is {longest - 1}"):
        inspect(tmp_path / "own", tokenizer="word-pairs", vocab_size=0, context=longest - 1)


def test_two_files_are_a_parallel_text_wherever_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("a.en", "a dog {}"), ("a.de", "ein Hund {}")):
        (tmp_path / name).write_text("".join(text.format(number) + "\n" for number in range(200)) + name[:-3] + "\n")
    (tmp_path / "a.de").write_text((tmp_path / "a.de").read_text().removesuffix("a\n") + "\n")
    monkeypatch.chdir(tmp_path)
    recipe = resolve(load_recipe("annotated-transformer"), "rehearsal").record
    places = {"cache": tmp_path / "cache", "say": lambda line: None}
    made = prepare_run_shards(recipe, "a.en,a.de", into=tmp_path / "own", **places)
    assert (made.source, made.passed_over.split()[0]) == ("file", "1")
    text = recipe | {"data": recipe["data"] | {"tokenizer": "char"}}
    with refusal(UsageError, "data.parallel", "english-german", "char"):
        prepare_run_shards(text, None, into=tmp_path / "text", **places)


@pytest.mark.parametrize(
    ("recipe", "prompt", "says"),
    [
        ("mini-gpt", "", "char"),
        ("annotated-transformer", "a man sees the dog " * 8, r"40 tokens.* 22\b"),
    ],
)
def test_a_prompt_the_trainer_would_refuse_is_refused_at_home(
    tmp_path: Path, recipe: str, prompt: str, says: str
) -> None:
    """Only GPT-2's tokeniser has a token to begin an empty prompt with.

    The check holds for text and for finished shards.
    """
    text = tmp_path / "text.txt"
    pairs = recipe == "annotated-transformer"
    lines = [f"the dog number {n}\tder Hund Nummer {n}\n" if pairs else f"abc {n}\n" for n in range(400)]
    text.write_text("".join(lines))
    places = {"cache": tmp_path / "cache", "say": lambda line: None}
    good = resolve(load_recipe(recipe), "rehearsal").record
    prepare_run_shards(good, str(text), into=tmp_path / "own", **places)
    record = {**good, "sample": {**good["sample"], "prompts": [prompt]}}
    for number, data in enumerate((text, tmp_path / "own")):
        with pytest.raises(UsageError, match=says):
            prepare_run_shards(record, str(data), into=tmp_path / f"again-{number}", **places)


def test_a_path_in_the_place_of_a_name_is_told_where_paths_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of sentence pairs cannot be prepared as shards, so the hint about a missing name must be --data."""
    monkeypatch.chdir(tmp_path)
    for name in ("own.en", "own.de"):
        (tmp_path / name).write_text("a dog\n")
    places = {"into": tmp_path / "out", "cache": tmp_path / "cache", "say": lambda line: None}
    for source, hint in {"own.en,own.de": "--data own.en,own.de", "corpus-12gb": "data prepare"}.items():
        record = resolve(load_recipe("annotated-transformer"), "rehearsal", [f'data.source="{source}"']).record
        with pytest.raises(UsageError) as refused:
            prepare_run_shards(record, None, **places)
        assert hint in refused.value.hint


def test_shards_that_are_not_whole_are_never_taken_for_text(tmp_path: Path) -> None:
    """The vocabulary beside incomplete shards was once taken for text, and a run was planned to train on it."""
    text = tmp_path / "text.txt"
    text.write_text(LINES)
    recipe = resolve(load_recipe("mini-gpt"), "rehearsal").record
    places = {"cache": tmp_path / "cache", "say": lambda line: None}
    folder = tmp_path / "all" / "own"
    prepare_run_shards(recipe, str(text), into=folder, **places)

    def code(place: Path) -> str:
        with pytest.raises(UsageError) as raised:
            prepare_run_shards(recipe, str(place), into=tmp_path / "out", **places)
        return raised.value.code

    assert code(tmp_path / "all") == "data.shards_below"
    (folder / "data.json").rename(folder / "prepare.json")
    assert (code(tmp_path / "all"), code(folder)) == ("data.shards_below", "data.unfinished")
    (folder / "prepare.json").unlink()
    assert code(folder) == "data.no_manifest"
    for shard_file in folder.glob("*.bin"):
        shard_file.unlink()
    assert code(folder) == "data.mostly_passed_over", "a vocabulary is JSON, and none of documents"
    text.rename(folder / "text.txt")
    made = prepare_run_shards(recipe, str(folder), into=tmp_path / "out", **places)
    assert "JSON without 'text'" in made.passed_over


@pytest.mark.parametrize("damaged", ["{", "[]", '{"tokens_b64": 3}', '{"tokens_b64": ["a"]}', '{"tokens_b64": [{}]}'])
def test_a_vocabulary_that_is_none_is_named(damaged: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(LINES)
    recipe = resolve(load_recipe("mini-gpt"), "rehearsal").record
    places = {"cache": tmp_path / "cache", "say": lambda line: None}
    prepare_run_shards(recipe, str(text), into=tmp_path / "own", **places)
    (tmp_path / "own" / "vocab.json").write_text(damaged)
    with refusal(UsageError, "data.bad_vocabulary", "own/vocab.json"):
        prepare_run_shards(recipe, str(tmp_path / "own"), into=tmp_path / "beside", **places)

"""Tests that transformers loads an export with equal logits and ids, and that an export holds only this run's data."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpurun.data.bpe import train_bpe
from tests.trainer.tiny_training import Train, manifest, recipe_record, write_data
from trainer.checkpoint import write_tensors
from trainer.errors import Refused
from trainer.export import LAB_FILE, export_hf, export_lab, main
from trainer.model import GPT
from trainer.pretrained import load_weights
from trainer.recipe import ModelConfig
from trainer.shards import write_json
from trainer.tokenizer import BpeTokenizer, Gpt2Tokenizer, sha256_of_tokens, shipped_gpt2_tokens, vocabulary_json

pytestmark = pytest.mark.slow

TEXT = "Hello, I'm a language model, naïve café 🦉\n\n  two  spaces 123\t'll <|endoftext|"


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the reference GPT-2 is a test dependency only")


def gpt2_checkpoint(
    out: Path, tokens: list[bytes] | None = None, tokenizer: str = "gpt2", **keys: Any
) -> tuple[Path, GPT]:
    """Write a checkpoint of a small model with random weights; return the weights' path and the model.

    Its vocabulary is GPT-2's unless `tokens` are given, padded to a multiple of 64.
    """
    tokens = tokens or shipped_gpt2_tokens()
    rows = -(-len(tokens) // 64) * 64
    record = recipe_record(
        model={"layers": 2, "heads": 4, "context": 32, "vocab_size": rows, **keys}, data={"tokenizer": tokenizer}
    )
    torch.manual_seed(0)
    model = GPT(ModelConfig(**record["model"])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    weights = out / "checkpoints" / "000007.model.safetensors"
    weights.parent.mkdir(parents=True)
    with weights.open("wb") as file:
        write_tensors(file.write, model.state_dict())
    del record["model"]["dropout"]  # as in a checkpoint that is older than this key
    state = {"v": 1, "step": 7, "tokens": 896, "loss": 3.5, "recipe": record}
    state["data"] = {"tokenizer": sha256_of_tokens(tokens)}
    weights.with_name("000007.state.json").write_text(json.dumps(state))
    return weights, model


@pytest.mark.parametrize("keys", [{}, {"bias": False}, {"tied": False}], ids=["gpt2", "no biases", "untied"])
def test_transformers_gives_the_trainers_logits(tmp_path: Path, transformers: Any, keys: dict[str, Any]) -> None:
    _, ours = gpt2_checkpoint(tmp_path / "out", **keys)
    written = export_hf(tmp_path / "out", tmp_path / "hf", figures={})
    theirs, loading = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading.values())
    ids = torch.randint(50257, (2, 32))
    with torch.no_grad():
        logits = theirs.eval()(ids).logits
        wanted = F.linear(ours.hidden(ids), ours.head_weight)[..., :50257]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert logits.shape[-1] == theirs.config.vocab_size == 50257
    assert written == sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert theirs.generation_config.temperature == pytest.approx(0.8)
    again = GPT(ours.config).eval()
    load_weights(again, tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(F.linear(again.hidden(ids), again.head_weight)[..., :50257], wanted)


def test_the_exported_gpt2_tokeniser_gives_the_ids_of_training(tmp_path: Path, transformers: Any) -> None:
    gpt2_checkpoint(tmp_path / "out")
    export_hf(tmp_path / "out", tmp_path / "hf", figures={})
    wanted = Gpt2Tokenizer(shipped_gpt2_tokens()).encode([TEXT])[0].tolist()
    for kind in (transformers.AutoTokenizer, transformers.GPT2Tokenizer):
        tokenizer = kind.from_pretrained(tmp_path / "hf")
        assert tokenizer(TEXT).input_ids == wanted
        assert tokenizer.decode(wanted) == TEXT
        assert tokenizer("a<|endoftext|>").input_ids[-1] == tokenizer.eos_token_id == 50256


def test_a_trained_tokeniser_keeps_its_ids_in_an_export(tmp_path: Path, transformers: Any) -> None:
    text = Path(torch.__file__).read_text(encoding="utf-8")
    tokens = train_bpe([text], 1000)
    weights, _ = gpt2_checkpoint(tmp_path / "out", tokens, "bpe")
    (tmp_path / "data").mkdir()
    write_json(tmp_path / "data" / "vocab.json", vocabulary_json("bpe", tokens))
    export_hf(weights, tmp_path / "hf", data=tmp_path / "data", figures={})
    for kind in (transformers.AutoTokenizer, transformers.GPT2Tokenizer):
        tokenizer = kind.from_pretrained(tmp_path / "hf")
        for sample in (TEXT, text):
            wanted = BpeTokenizer(tokens).encode([sample])[0].tolist()
            assert tokenizer(sample).input_ids == wanted
            assert tokenizer.decode(wanted) == sample
        assert tokenizer.eos_token_id == len(tokenizer) - 1 == 999
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").config.vocab_size == 1000


def test_a_character_run_is_exported_with_its_own_alphabet(
    tmp_path: Path, data: Path, train: Train, transformers: Any
) -> None:
    assert train(recipe_record(train={"steps": 2, "checkpoint_every": 2}), tmp_path / "out") == 0
    with pytest.raises(Refused, match="data folder"):
        export_hf(tmp_path / "out", tmp_path / "hf", figures={})
    assert main([str(tmp_path / "out"), str(tmp_path / "hf"), "--data", str(data)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = json.loads((data / "prompts.json").read_text())[0]["ids"]
    assert tokenizer("the ").input_ids == ids
    assert tokenizer.decode(ids) == "the "
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert model.config.vocab_size == len(tokenizer) == 28
    assert "| step | 2 of 2 |" in (tmp_path / "hf" / "README.md").read_text()
    sha256 = json.loads((data / "data.json").read_text())["tokenizer"]["sha256"]
    again = GPT(ModelConfig(**recipe_record(model={"vocab_size": 64})["model"]))
    load_weights(again, tmp_path / "hf", tokenizer_sha256=sha256)
    with pytest.raises(Refused, match="another tokeniser"):
        load_weights(again, tmp_path / "hf", tokenizer_sha256="0" * 64)


class CourseBlock(nn.Module):
    """A block of `CourseGPT`, with the names of the course's page."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn.register_buffer("mask", torch.zeros(1, 1, context, context))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.attn.qkv(self.ln1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(self.attn.mask[:, :, :time, :time] == 0, -math.inf)
        x = x + self.attn.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.ln2(x))


class CourseGPT(nn.Module):
    """A model with the names of the course's page, written without the trainer's code."""

    def __init__(self, vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(CourseBlock(n_embd, n_head, block_size) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_emb(ids) + self.pos_emb(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@pytest.mark.parametrize("keys", [{}, {"bias": False}, {"tied": False}], ids=["gpt2", "no biases", "untied"])
def test_the_courses_class_loads_its_file_and_gives_our_logits(
    tmp_path: Path, data: Path, keys: dict[str, bool]
) -> None:
    tokens = [base64.b64decode(token) for token in json.loads((data / "vocab.json").read_text())["tokens_b64"]]
    weights, model = gpt2_checkpoint(tmp_path / "out", tokens, "char", **keys)
    assert export_lab(weights, tmp_path / "lab", data=data) == [LAB_FILE]
    made = torch.load(tmp_path / "lab" / LAB_FILE, weights_only=True)
    assert list(made) == ["model_state", "config", "stoi", "itos"]
    assert [made["itos"][made["stoi"][letter]] for letter in "the "] == list("the ")
    again = CourseGPT(**{key: value for key, value in made["config"].items() if key != "dropout"})
    assert set(made["model_state"]) == set(again.state_dict())
    again.load_state_dict(made["model_state"], strict=True)
    rows = len(tokens)
    ids, last = torch.arange(rows)[None] % 32, torch.tensor([rows - 1])
    with torch.no_grad():
        wanted = model.next_token_logits(ids, last)[:, :rows]
        assert torch.allclose(again(ids)[:, -1], wanted, atol=1e-5)
    again.token_emb.weight.data.zero_()
    assert again.lm_head.weight.any(), "the head is one of its own, not the embedding by another name"


def test_a_model_of_words_has_no_course_file(tmp_path: Path) -> None:
    weights, _ = gpt2_checkpoint(tmp_path / "words")
    with pytest.raises(Refused, match="each character"):
        export_lab(weights, tmp_path / "none")


@pytest.mark.parametrize(
    ("kind", "same", "sources"),
    [
        ("stdlib", True, ["stdlib"]),
        ("file", True, ["file", "stdlib"]),
        ("file", False, ["unknown", "stdlib"]),
    ],
    ids=["the recipe's own", "brought", "other shards"],
)
def test_the_model_card_says_what_was_learned_from(
    tmp_path: Path, train: Train, kind: str, same: bool, sources: list[str]
) -> None:
    data = write_data(tmp_path / "data")
    assert train(recipe_record(train={"steps": 2, "checkpoint_every": 2}), tmp_path / "out", data) == 0
    made = json.loads((data / "data.json").read_text())
    made["source"]["kind"] = kind
    made["train"] = made["train"] if same else made["train"][:1]
    (data / "data.json").write_text(json.dumps(made))
    export_hf(tmp_path / "out", tmp_path / "hf", data=data, figures={})
    (row,) = re.findall(r"\| data \| (.*) \|", (tmp_path / "hf" / "README.md").read_text())
    assert re.findall("file|stdlib|unknown", row) == sources


NOTE = "a|b\n<script> ![x](http://x) *_` &amp; \u202e"


def test_the_model_card_has_figures_and_no_markup_of_callers(tmp_path: Path) -> None:
    gpt2_checkpoint(tmp_path / "out")
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"cost (USD)": 19.87, "verdict": "gpu", "note": NOTE, "billed": None}))
    assert main([str(tmp_path / "out"), str(tmp_path / "hf"), "--figures", str(figures)]) == 0
    card = (tmp_path / "hf" / "README.md").read_text()
    for line in (
        "| cost (USD) | 19.87 |",
        "| note | a\\|b \\<script\\> \\!\\[x\\](http://x) \\*\\_\\` \\&amp; \ufffd |",
        "| billed | unknown |",
        "| step | 7 of 20 |",
    ):
        assert line in card.splitlines()


@pytest.mark.parametrize("named", ["by its path", "by a link", "as the one where somebody stands"])
def test_an_empty_folder_is_filled_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    gpt2_checkpoint(tmp_path / "out")
    (tmp_path / "hf").mkdir()
    (tmp_path / "link").symlink_to("hf")
    monkeypatch.chdir(tmp_path / "hf")
    place = {"by its path": tmp_path / "hf", "by a link": tmp_path / "link"}.get(named, Path("."))
    written = export_hf(tmp_path / "out", place, figures={})
    assert sorted(os.listdir(".")) == written
    assert "config.json" in written


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, _ = gpt2_checkpoint(tmp_path / "out")
    gpt2_checkpoint(tmp_path / "modern", preset="modern", bias=False, tied=False)
    with pytest.raises(Refused, match=r'"modern" .*GPT-2'):
        export_hf(tmp_path / "modern", tmp_path / "hf", figures={})
    with pytest.raises(Refused, match="not empty"):
        export_hf(tmp_path / "out", tmp_path / "out", figures={})
    with pytest.raises(Refused, match="no checkpoint"):
        export_hf(tmp_path, tmp_path / "hf", figures={})
    assert main([str(tmp_path / "out"), str(tmp_path / "hf"), "--figures", str(weights)]) == 2
    assert "figures" in capsys.readouterr().err
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(Refused, match="valid checkpoint"):
        export_hf(weights, tmp_path / "hf", figures={})
    state = weights.with_name("000007.state.json")
    state.write_text(state.read_text().replace(sha256_of_tokens(shipped_gpt2_tokens()), "0" * 64))
    with pytest.raises(Refused, match="tokeniser"):
        export_hf(weights, tmp_path / "hf", figures={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["modern", "out"]


def test_weights_that_the_manifest_does_not_name_are_refused(tmp_path: Path, data: Path, train: Train) -> None:
    assert train(recipe_record(train={"steps": 2, "checkpoint_every": 2}), tmp_path) == 0
    name = next(entry["name"] for entry in manifest(tmp_path)["files"] if entry["kind"] == "weights")
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=r"MANIFEST\.json"):
        export_hf(tmp_path, tmp_path / "hf", data=data, figures={})

"""Tests of recipes: each bundled recipe works, and an error names the nearest correct word."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import gpurun
from gpurun.cli.commands.recipes import list_all
from gpurun.cli.session import Session
from gpurun.core import installed_files
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.paths import Home
from gpurun.core.records import digest_json
from gpurun.jobs.training.recipe import (
    Form,
    bundle_root,
    list_recipes,
    load_recipe,
    new_recipe,
    parameters_of,
    parse_set_option,
    resolve,
)
from gpurun.view.styled_text import cells
from trainer.recipe import TABLES, parse_recipe


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def changed(tmp_path: Path, old: str, new: str) -> str:
    text = new_recipe("mine")
    assert old in text
    return written(tmp_path, text.replace(old, new))


def refusal(action) -> UsageError:
    with pytest.raises(UsageError) as refused:
        action()
    assert refused.value.hint
    return refused.value


@pytest.mark.parametrize("name", list_recipes())
def test_every_bundled_recipe_resolves_in_both_forms(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.about
    lines = Path(recipe.path).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    for form in ("full", "rehearsal"):
        resolved = resolve(recipe, form)
        assert list(resolved.record) == ["about", *TABLES]
        assert all(set(resolved.record[table]) == {key.name for key in fields(kind)} for table, kind in TABLES.items())
        assert resolved.sha256 == digest_json(json.loads(json.dumps(resolved.record)))
        assert parse_recipe(resolved.record).as_record() | {"rehearsal": {}} == resolved.record | {"rehearsal": {}}


def test_the_two_first_recipes_are_the_ones_that_were_promised() -> None:
    lab = resolve(load_recipe("mini-gpt"), "rehearsal")
    assert parameters_of(lab.tables.model, vocab_size=97) == 112_384
    assert (lab.tables.train.steps, lab.tables.train.batch_tokens // lab.tables.model.context) == (120, 16)
    full = resolve(load_recipe("mini-gpt"), "full").tables
    assert (full.train.steps, full.train.batch_tokens // full.model.context, full.train.seed) == (500, 64, 42)
    gpt2 = resolve(load_recipe("gpt2-124m"), "full")
    assert parameters_of(gpt2.tables.model) == 124_475_904  # 124,439,808 with the 50,257 rows of the paper
    assert gpt2.processes == 8
    assert gpt2.tables.train.batch_tokens == 2**19
    assert resolve(load_recipe("gpt2-124m"), "rehearsal").processes == 2


TINY = (
    "layers=6 heads=6 width=192 context=256 dropout=0.1 tied=true batch_tokens=4096 steps=1170 source=wikitext-2 "
    "optim.kind=adamw lr=3e-4 weight_decay=0.01 grad_clip=1.0 schedule.kind=constant temperature=0.8"
)
ADAMW = "optim.kind=adamw beta1=0.9 weight_decay=0.1 grad_clip=1.0 schedule.kind=cosine"
SHAKESPEARE = f"{ADAMW} context=256 dropout=0.2 batch_tokens=16384 lr=1e-3 beta2=0.99 warmup_steps=100 min_lr=1e-4"
GPT2 = f"{ADAMW} preset=faithful context=1024 dropout=0.0 tokenizer=gpt2 beta2=0.95 compile=true gpu=8xA100"
LLM_C = f"{GPT2} bias=true batch_tokens=524288 warmup_steps=700 min_lr=0.0 eval.every=250"
REPRODUCED = {
    "tiny-wikitext": f"{TINY} loop=own",
    "tiny-hf": f"{TINY} loop=huggingface",
    "annotated-transformer": "preset=encoder-decoder layers=6 heads=8 width=512 dropout=0.1 label_smoothing=0.1 "
    "schedule.kind=noam lr=1.0 warmup_steps=3000 beta2=0.98 eps=1e-9 weight_decay=0.0",
    "shakespeare-char": f"{SHAKESPEARE} layers=6 heads=6 width=384 bias=false tokenizer=char steps=5000",
    "shakespeare-bpe": f"{SHAKESPEARE} tokenizer=gpt2",
    "gpt2-124m": f"{LLM_C} layers=12 heads=12 width=768 source=fineweb-edu-10b lr=6e-4 steps=18865",
    "gpt2-124m-owt": f"{GPT2} layers=12 heads=12 width=768 bias=false source=openwebtext val_fraction=0.005 lr=6e-4 "
    "batch_tokens=491520 micro_batch=12 warmup_steps=2000 min_lr=6e-5 steps=600000",
    "gpt2-124m-epochs": f"{GPT2} source=corpus-12gb batch_tokens=524288 steps=62920 checkpoint_every=1430",
    "gpt2-355m": f"{LLM_C} layers=24 heads=16 width=1024 lr=3e-4 steps=60000",
    "gpt2-124m-climbmix": f"{LLM_C} layers=12 heads=12 width=768 source=climbmix-12b lr=6e-4 steps=18865",
    "modern-124m": "preset=modern layers=12 heads=6 width=768 context=1024 source=fineweb-10b eval.tokens=10485760 "
    "softcap=15 rotary=0.5 attention_scale=0.12 gains=true model.bias=true optim.kind=muon muon_lr=2.5e-2 lr=4e-3 "
    "orthogonal=newton-schulz-12 muon_scale=aspect grad_clip=0.0 beta1=0.8 schedule.kind=trapezoid "
    "cooldown_fraction=0.7 batch_tokens=524288 steps=3250 data.order=in_order eval.order=in_order",
}


@pytest.mark.parametrize("name", REPRODUCED)
def test_a_recipe_has_the_settings_of_what_it_reproduces(name: str) -> None:
    record = resolve(load_recipe(name), "full").record
    wanted = dict(map(parse_set_option, REPRODUCED[name].split()))
    assert {(table, key): record[table][key] for table, key in wanted} == wanted


@pytest.mark.parametrize("form", ["full", "rehearsal"])
def test_the_course_lab_trains_on_a_text_of_230_characters(form: Form) -> None:
    """230 characters must hold a batch plus a token to train on, and a held-out window. (mini-gpt needs far more.)"""
    lab = resolve(load_recipe("course-lab"), form).tables
    held_out = int(230 * lab.data.val_fraction)
    assert (lab.data.tokenizer, lab.data.limit_mb) == ("char", 0 if form == "full" else 1)
    assert lab.model.context + 1 <= held_out <= 40
    assert lab.train.batch_tokens + 1 <= 230 - held_out
    assert lab.eval.every % lab.train.checkpoint_every == 0, "the best loss is of a checkpoint"
    assert (lab.train.steps, parameters_of(lab.model, vocab_size=30)) == ({"full": 300, "rehearsal": 120}[form], 28_032)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("shakespeare-char", 10.6), ("gpt2-124m", 124), ("gpt2-124m-epochs", 135), ("gpt2-355m", 355)],
)
def test_a_recipe_has_as_many_parameters_as_it_says(name: str, millions: float) -> None:
    model = resolve(load_recipe(name), "full").tables.model
    assert parameters_of(model, vocab_size=65) / 1e6 == pytest.approx(millions, rel=0.02)


def test_a_rehearsal_replaces_keys_and_leaves_the_others() -> None:
    recipe = load_recipe("gpt2-124m")
    full, rehearsal = resolve(recipe, "full").record, resolve(recipe, "rehearsal").record
    assert rehearsal["data"]["source"] == "stdlib"
    assert rehearsal["data"]["tokenizer"] == full["data"]["tokenizer"] == "gpt2"
    assert rehearsal["optim"]["weight_decay"] == full["optim"]["weight_decay"]
    assert full["hardware"]["on_cpu"] == "refuse"
    assert rehearsal["hardware"]["on_cpu"] == "as_written", "it is already what a CPU can do"


def test_set_wins_over_the_rehearsal_and_can_change_it() -> None:
    recipe = load_recipe("gpt2-124m")
    assert resolve(recipe, "rehearsal", ["steps=7", "warmup_steps=1"]).tables.train.steps == 7
    inner = ["rehearsal.train.steps=9", "rehearsal.processes=1"]
    rehearsal = resolve(recipe, "rehearsal", inner)
    assert (rehearsal.tables.train.steps, rehearsal.processes) == (9, 1)
    assert resolve(recipe, "full", inner).sha256 == resolve(recipe, "full").sha256


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.steps=500", ("train", "steps"), 500),
        ("steps=500", ("train", "steps"), 500),
        ("optim.lr = 3e-4", ("optim", "lr"), 3e-4),
        ("compile=true", ("train", "compile"), True),
        ("source=fineweb-edu-10b", ("data", "source"), "fineweb-edu-10b"),
        ("source=/data/my_texts", ("data", "source"), "/data/my_texts"),
        ('source="my texts"', ("data", "source"), "my texts"),
        ("gpu=8xA100-80GB", ("hardware", "gpu"), "8xA100-80GB"),
        ('prompts=["a=b", "c"]', ("sample", "prompts"), ["a=b", "c"]),
        ("rehearsal.optim.lr=1", ("rehearsal", "optim", "lr"), 1),
        pytest.param(f"steps={'9' * 5000}", ("train", "steps"), "9" * 5000, id="more digits than Python reads"),
    ],
)
def test_set_reads_toml_and_bare_words(text: str, path: tuple[str, ...], value: object) -> None:
    assert parse_set_option(text) == (path, value)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("steps", "set.malformed", "key=value"),
        ("steps=", "set.malformed", "key=value"),
        ("=5", "set.malformed", "key=value"),
        ("source=two words", "set.malformed", "TOML"),
        ("steps=5\ncompile=true", "set.malformed", "TOML"),
        ("tokens=5", "set.ambiguous", "eval.tokens or sample.tokens"),
        ("train.stpes=5", "set.unknown_key", "train.steps"),
        ("stepps=5", "set.unknown_key", "steps"),
        ("rehearsal.hardware.gpu=cpu", "set.unknown_key", "hardware.gpu"),
    ],
)
def test_set_that_cannot_be_meant_is_refused(text: str, code: str, says: str) -> None:
    error = refusal(lambda: parse_set_option(text))
    assert error.code == code
    assert says in error.what + error.hint


def test_an_unknown_recipe_names_the_nearest() -> None:
    assert "gpt2-124m" in refusal(lambda: load_recipe("gpt2-142m")).hint
    assert "mini-gpt" in refusal(lambda: load_recipe("zzz")).hint


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("layers = 4", "layres = 4", ("model.layres", "model.layers")),
        ("[model]", "[modle]", ("modle", "model")),
        ("train = { steps", "train = { stpes", ("rehearsal.train.stpes", "rehearsal.train.steps")),
        ("[rehearsal]", "[rehearsal]\nhardware = { gpu = 'cpu' }", ("rehearsal.hardware",)),
        ("layers = 4\n", "", ("model.layers",)),
        ("layers = 4", "layers = '4'", ('model.layers is "4"', "integer")),
        ("layers = 4", "layers = true", ("model.layers is true",)),
        ("layers = 4", "layers = 0", ("model.layers is 0", "at least 1")),
        ("layers = 4", "layers = 99999999", ("model.layers is 99999999", "10000")),
        ("tokens = 200", f"tokens = {10**310}", ("sample.tokens", str(2**53))),
        ("every = 100", f"every = 100\nhellaswag_items = {10**310}", ("eval.hellaswag_items", str(2**53))),
        ("lr = 1e-3", "lr = inf", ("optim.lr is inf", "finite")),
        ("lr = 1e-3", "lr = -1", ("optim.lr is -1",)),
        ('kind = "cosine"', 'kind = "linear"', ('schedule.kind is "linear"', '"trapezoid" or "noam"')),
        ("heads = 4", "heads = 3", ("model.width 128", "model.heads 3")),
        ("warmup_steps = 50", "warmup_steps = 5000", ("warmup_steps 5000", "train.steps 1000")),
        ("[train]", "[train]\nmicro = 1\n", ("train.micro", "micro_batch")),
        ('gpu = "any"', 'gpu = "1xA1000"', ("hardware.gpu", "A100")),
        ('[data]\nsource = "stdlib" ', '[[data]]\nsource = "stdlib" ', ("data",)),
    ],
)
def test_a_wrong_recipe_is_refused_by_key(tmp_path: Path, old: str, new: str, says: tuple[str, ...]) -> None:
    path = changed(tmp_path, old, new)
    error = refusal(lambda: load_recipe(path))
    assert "mine.toml" in error.what or error.code.startswith("gpu.")
    for words in says:
        assert words in f"{error.what} {error.hint}"


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    error = refusal(lambda: load_recipe(changed(tmp_path, "heads = 4", "heads = = 4")))
    assert error.code == "recipe.malformed"
    assert "mine.toml" in error.what
    assert "line 5" in error.what


@pytest.mark.parametrize("line", ["heads = " + "4" * 5000, "heads = " + "[" * 5000, "heads" + ".a" * 5000 + " = 4"])
def test_what_is_too_long_or_deep_for_python_is_refused(tmp_path: Path, line: str) -> None:
    assert refusal(lambda: load_recipe(changed(tmp_path, "heads = 4", line))).code == "recipe.malformed"


def test_a_recipe_saved_by_notepad_is_the_same_recipe(tmp_path: Path) -> None:
    text = new_recipe("mine")
    plain = load_recipe(written(tmp_path, text))
    assert load_recipe(written(tmp_path, "\ufeff" + text.replace("\n", "\r\n"))) == plain


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    assert refusal(lambda: load_recipe(str(tmp_path / "none.toml"))).code == "recipe.unreadable"
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert refusal(lambda: load_recipe(str(tmp_path / "bytes.toml"))).code == "recipe.malformed"


def test_a_batch_that_cannot_be_shared_names_both_numbers() -> None:
    error = refusal(lambda: resolve(load_recipe("mini-gpt"), "full", processes=3))
    assert "4096" in error.what
    assert "64 x 3 = 192" in error.what


def test_a_new_recipe_is_whole_and_right(tmp_path: Path) -> None:
    text = new_recipe("owl")
    assert len(text.splitlines()) <= 40
    assert tomllib.loads(text)["about"].startswith("owl")
    recipe = load_recipe(written(tmp_path, text))
    assert resolve(recipe, "rehearsal").tables.train.steps == 60
    assert resolve(recipe, "full").tables.train.steps == 1000


def test_a_wheel_without_its_bundle_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (bundle_root() / "trainer" / "gpt2").is_dir()
    package = tmp_path / "gpurun"
    monkeypatch.setattr(gpurun, "__file__", str(package / "__init__.py"))
    with pytest.raises(SetupError, match="trainer"):
        installed_files.bundle_root()
    inside = package / "_bundle"
    (inside / "trainer").mkdir(parents=True)
    (inside / "trainer" / "__init__.py").touch()
    (inside / "recipes").mkdir()
    assert installed_files.bundle_root() == inside


def test_the_schema_is_this_installations_despite_other_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, bundle = bundle_root() / "trainer", tmp_path / "gpurun" / "_bundle"
    (bundle / "trainer").mkdir(parents=True)
    (bundle / "recipes").mkdir()
    for name in ("__init__.py", "recipe.py", "recipe_rules.py"):
        shutil.copyfile(package / name, bundle / "trainer" / name)
    (tmp_path / "trainer.py").write_text("raise SystemExit('another')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpurun, "__file__", str(tmp_path / "gpurun" / "__init__.py"))
    for name in [name for name in sys.modules if name.split(".")[0] == "trainer"]:
        monkeypatch.delitem(sys.modules, name)
    assert installed_files.recipe.__file__ == str(bundle / "trainer" / "recipe.py")
    with pytest.raises(ImportError, match="train"):
        from gpurun.core.installed_files import train  # noqa: F401


def test_what_a_hint_names_can_be_opened_without_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        load_recipe(written(tmp_path, 'about = "owl"\n[model]\nlayers = 0\nheads = 1\nwidth = 8\ncontext = 8\n'))
    assert Path(raised.value.hint.split()[0]).read_text().startswith("# ")
    build = tomllib.loads((bundle_root() / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["sources"]["docs"] == "gpurun/_bundle/docs"
    assert "/docs" in build["sdist"]["include"], "a wheel is built from it"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_list_tells_of_every_recipe_what_it_is_about_uncut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    listed = list_all(Session(home=Home(Path("nowhere"))))
    words = " ".join(listed.text.split())
    assert all(" ".join(load_recipe(name).about.split()) in words for name in list_recipes())
    assert all(cells(line) <= width for line in listed.text.splitlines())

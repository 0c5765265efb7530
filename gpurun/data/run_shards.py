"""Makes the data of a run, or of a shared folder: checks the user's own shards, or turns text into shards.

All of this happens on the user's computer, before anything is rented.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.filelock import exclusive
from gpurun.core.installed_files import errors as trainer_errors
from gpurun.core.installed_files import items as question_items
from gpurun.core.installed_files import pair_tokenizer as pair_tokenizers
from gpurun.core.installed_files import recipe as schema
from gpurun.core.installed_files import shards as shard_files
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.core.run_plan import DataSummary
from gpurun.core.untrusted import plain_line, read_object
from gpurun.data.pairs.build import PairOrder, prepare_pairs
from gpurun.data.prepare import PrepareOrder, prepare
from gpurun.data.prepare_state import is_begun
from gpurun.data.public_shards import downloaded_by_the_machine
from gpurun.data.refusals import Say, tally, translate_refusals
from gpurun.data.shard_folder import inspect, refuse_undescribed_shards
from gpurun.data.source_names import (
    BUILT_IN,
    BUILT_IN_PAIRS,
    HUB,
    ON_THE_HUB,
    PUBLIC,
    STDLIB,
    missing_shards,
)
from gpurun.data.sources import open_source


def order_for(resolved: Mapping[str, Any], source: str, out: Path, **choices: Any) -> PrepareOrder:
    """Return the order to prepare a text for a resolved recipe; an empty `source` means the recipe's own source.

    `choices` are fields of PrepareOrder. UsageError if the recipe's source is unknown.
    """
    data = resolved["data"]
    named = source or _choose_own_source(data["source"])
    place = named if named == STDLIB or named.startswith(HUB) else str(Path(named).expanduser().absolute())
    fields = {
        "val_fraction": data["val_fraction"],
        "vocab_size": data["vocab_size"],
        "limit_bytes": data["limit_mb"] << 20,
        # An optimiser step needs all its tokens, an evaluation one window; one more token is the last target.
        "least_train_tokens": resolved["train"]["batch_tokens"] + 1,
        "least_val_tokens": resolved["model"]["context"] + 1,
    }
    return PrepareOrder(source=place, tokenizer=data["tokenizer"], out=out, **{**fields, **choices})


def _choose_own_source(name: str) -> str:
    """Return the source to read for a recipe's source name: the standard library's text, or a data set of the hub."""
    if name in BUILT_IN or name in ON_THE_HUB:
        return ON_THE_HUB.get(name, name)
    raise UsageError(
        "data.no_source",
        f"The recipe trains on {name}, which gpurun does not know.",
        hint="Give the text itself: --source FILE, FOLDER or hf:OWNER/NAME.",
    )


def prepare_run_shards(
    resolved: Mapping[str, Any], data: str | None, *, into: Path, cache: Path, say: Say, accept_skipped: bool = False
) -> DataSummary:
    """Return shards for a resolved recipe: the shards in the folder `data`, or new shards from a text.

    The text is `data`, or the recipe's own. It is tokenised into the folder `into`, whose content is replaced. Text
    that was tokenised before is copied from the cache.
    """
    shutil.rmtree(into, ignore_errors=True)
    data_table, prompts = resolved["data"], tuple(resolved["sample"]["prompts"])
    try:
        with translate_refusals("Nothing was left behind."):
            if data is not None and (Path(data).expanduser() / "data.json").exists():
                return _check_shards(resolved, Path(data).expanduser().absolute(), data, into, say)
            if data is not None and PUBLIC.fullmatch(data):
                return _choose_public_shards(resolved, data, into, say)
            if data is None and data_table["source"] not in BUILT_IN:
                raise missing_shards(data_table["source"])
            if data is not None:
                refuse_undescribed_shards(Path(data).expanduser())
            if data_table["tokenizer"] in schema.PAIR_TOKENIZERS:
                passed_over, source = _prepare_pairs(resolved, data, into, prompts, say)
            else:
                if data_table["source"] in BUILT_IN_PAIRS and data is None:
                    raise _no_pairs_error(data_table["source"], data_table["tokenizer"])
                order = order_for(resolved, data or data_table["source"], into, accept_skipped=accept_skipped)
                passed_over, source = _prepare_in_cache(order, cache, prompts, say), order.source
            _require_hellaswag_items(resolved, into, "DIR")
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise
    found = inspect(into, tokenizer=data_table["tokenizer"], vocab_size=resolved["model"]["vocab_size"])
    _require_enough_tokens(found, resolved, source)
    passed = "" if source in BUILT_IN else tally(passed_over)
    return found.model_copy(update={"passed_over": passed, "divided": _read_division_sentence(into)})


def _read_division_sentence(folder: Path) -> str:
    """Return data.json's sentence about files that are held out because of their names; "" if there is none."""
    return plain_line(str(read_object(folder / "data.json")["source"].get("divided", "")), 300)


def _choose_public_shards(resolved: Mapping[str, Any], data: str, into: Path, say: Say) -> DataSummary:
    """Return the shards that the machine will download; write the files that accompany them to `into`."""
    found = downloaded_by_the_machine(data, resolved, into, say)
    tokenizer = tokenizers.tokenizer_of(found.tokenizer, tokenizers.read_vocabulary(into))
    write_prompts(into, tokenizer, tuple(resolved["sample"]["prompts"]), say)
    _require_hellaswag_items(resolved, into, data)
    _require_enough_tokens(found, resolved, data)
    return found


def _prepare_in_cache(order: PrepareOrder, cache: Path, prompts: Sequence[str], say: Say) -> dict[str, int]:
    """Prepare a text in the cache, unless it is there already, and copy it to `order.out`.

    Return the numbers of skipped files by reason.
    """
    source = open_source(
        order.source,
        order.layout,
        lambda _: None,
        val_fraction=order.val_fraction,
        limit_bytes=order.limit_bytes,
        accept_skipped=order.accept_skipped,
    )
    key = hashlib.sha256(json.dumps(order.request(source), sort_keys=True).encode()).hexdigest()[:32]
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with exclusive(cache / ".lock"):
        entry = replace(order, out=cache / key)
        if _is_sound(entry.out):
            say("the shards of this text are in the cache")
        else:
            if entry.out.exists() and not is_begun(entry.out):
                say(f"the cache entry {key} is damaged; making it again")
                shutil.rmtree(entry.out)
            prepare(entry, say)
        order.out.mkdir(parents=True)
        for file in sorted(entry.out.iterdir()):
            shutil.copyfile(file, order.out / file.name)
    tokenizer = tokenizers.tokenizer_of(order.tokenizer, tokenizers.read_vocabulary(order.out))
    write_prompts(order.out, tokenizer, prompts, say)
    return dict(source.passed_over)


def _is_sound(entry: Path) -> bool:
    """Return whether every file of a cache entry matches its manifest."""
    with suppress(OSError, ValueError, KeyError, TypeError, trainer_errors.Refused):
        manifest = read_object(entry / "data.json")
        files = [*manifest["train"], *manifest["val"]]
        same = all(shard_files.sha256_of_file(entry / file["name"]) == file["sha256"] for file in files)
        tokens = tokenizers.read_vocabulary(entry)
        return same and bool(tokenizers.sha256_of_tokens(tokens) == manifest["tokenizer"]["sha256"])
    return False


def _prepare_pairs(
    resolved: Mapping[str, Any], data: str | None, into: Path, prompts: tuple[str, ...], say: Say
) -> tuple[dict[str, int], str]:
    """Prepare sentence pairs; return the numbers of skipped pairs by reason, and the pairs' source."""
    data_table = resolved["data"]
    source = data_table["source"]
    if data is not None:  # A parallel text may be two files joined by a comma.
        source = ",".join(str(Path(file).expanduser().absolute()) for file in data.split(","))
    context = resolved["model"]["context"]
    order = PairOrder(
        source,
        data_table["tokenizer"],
        data_table["val_fraction"],
        into,
        context=context,
        limit_bytes=data_table["limit_mb"] << 20,
        vocab_limit=data_table["vocab_size"],
    )
    tokenizer, skipped = prepare_pairs(order, say)
    write_prompts(into, tokenizer, prompts, say, most=context - pair_tokenizers.ENDS)
    return ({"without text on one side": skipped} if skipped else {}), source


def _no_pairs_error(source: str, tokenizer: str) -> UsageError:
    what = f"{source} contains sentence pairs, but the tokeniser {tokenizer} cannot encode pairs."
    return UsageError("data.parallel", what, hint=f"Use one of: {', '.join(schema.PAIR_TOKENIZERS)}.")


def _check_shards(resolved: Mapping[str, Any], place: Path, data: str, into: Path, say: Say) -> DataSummary:
    """Check existing shards as the trainer would, and write the files that accompany them to `into`."""
    data_table, model = resolved["data"], resolved["model"]
    found = inspect(place, tokenizer=data_table["tokenizer"], vocab_size=model["vocab_size"], context=model["context"])
    _write_accompanying_files(place, into, resolved, say)
    _require_hellaswag_items(resolved, into, data)
    _require_enough_tokens(found, resolved, data)
    return found.model_copy(update={"beside": str(into), "divided": _read_division_sentence(into)})


def _write_accompanying_files(place: Path, into: Path, resolved: Mapping[str, Any], say: Say) -> None:
    """Make a folder with the files that accompany shards: data.json, vocab.json, prompts.json, HellaSwag's items."""
    manifest = read_object(place / "data.json")
    made_by, context = manifest["tokenizer"], resolved["model"]["context"]
    into.mkdir(parents=True)
    shutil.copyfile(place / "data.json", into / "data.json")
    tokens: Sequence[bytes]
    if (place / "vocab.json").exists():
        tokens = tokenizers.read_vocabulary(place)
        shutil.copyfile(place / "vocab.json", into / "vocab.json")
    elif made_by["name"] == "gpt2":
        tokens = tokenizers.load_gpt2(say).tokens
        shard_files.write_json(into / "vocab.json", tokenizers.vocabulary_json("gpt2", tokens))
    else:
        raise UsageError(
            "data.no_vocabulary",
            f"{place} has no vocab.json; only GPT-2's vocabulary is known without it.",
            hint="Copy vocab.json from the folder where the shards were made.",
        )
    if tokenizers.sha256_of_tokens(tokens) != made_by["sha256"]:
        raise UsageError(
            "data.other_tokenizer",
            f"The vocabulary in {place} is not the one that its data.json names.",
            hint="Prepare the text again, or copy vocab.json from the folder where the shards were made.",
        )
    if (place / question_items.FILE).exists():
        shutil.copyfile(place / question_items.FILE, into / question_items.FILE)
    prompts = tuple(resolved["sample"]["prompts"])
    most = context - pair_tokenizers.ENDS if "pairs" in manifest else None
    write_prompts(into, _load_tokenizer(made_by["name"], tokens), prompts, say, most=most)
    _require_trainable(into, place, manifest, resolved)


def _load_tokenizer(name: str, tokens: Sequence[bytes]) -> tokenizers.TextTokenizer:
    """Return the tokeniser with a vocabulary, for text or for sentence pairs."""
    if name in schema.PAIR_TOKENIZERS:
        return pair_tokenizers.PairTokenizer.from_tokens(name, tokens)
    return tokenizers.tokenizer_of(name, tokens)


def _require_trainable(into: Path, place: Path, manifest: Mapping[str, Any], resolved: Mapping[str, Any]) -> None:
    """Open the data as the trainer will, because a refusal on this computer costs nothing; UsageError if it refuses."""
    try:
        name, context = manifest["tokenizer"]["name"], resolved["model"]["context"]
        data = shard_files.open_data(into, name, tuple(resolved["sample"]["prompts"]), shards_in=place)
        if "pairs" not in manifest:
            for part, split in ((data.train, "train"), (data.val, "val")):
                shard_files.windows_in(sum(shard.tokens for shard in part), context, split)
        if (into / question_items.FILE).exists():
            items = resolved["eval"]["hellaswag_items"]
            question_items.read_items(into, items, manifest["tokenizer"]["vocab_size"])
    except trainer_errors.Refused as refused:
        hint = "Make it again for this recipe: gpurun data prepare, gpurun data hellaswag (docs/FORMATS.md)."
        raise UsageError("data.untrainable", f"The trainer would refuse {place}: {refused}.", hint=hint) from None


def write_prompts(
    folder: Path,
    tokenizer: tokenizers.TextTokenizer,
    prompts: Sequence[str],
    say: Callable[[str], None],
    *,
    most: int | None = None,
) -> None:
    """Write prompts.json; UsageError for a prompt that the trainer would refuse on paid time.

    `most` is the maximum number of tokens, which is set for sentence pairs; other prompts lose their beginning if they
    are too long. For characters that the vocabulary lacks, `say` reports that they are read as U+FFFD.
    """
    rows = [ids.tolist() for ids in tokenizer.encode(prompts)]
    for text, ids in zip(prompts, rows, strict=True):
        if not ids and tokenizer.eot_id is None:
            what = f"The prompt {json.dumps(text)} has no tokens, and {tokenizer.name} has no end-of-text token."
            hint = "Write a prompt with text: in the recipe's sample.prompts, or --set 'sample.prompts=[\"The \"]'."
            raise UsageError("prompt.empty", what, hint=hint)
        if most is not None and len(ids) > most:
            what = f"The prompt {json.dumps(text[:40])} has {len(ids)} tokens; model.context leaves room for {most}."
            raise UsageError("prompt.too_long", what, hint="Shorten it in sample.prompts, or choose a longer context.")
        if lacking := _find_unknown_characters(tokenizer, text):
            shown = [json.dumps(part, ensure_ascii=False) for part in (text[:40], lacking[:40])]
            say(f"the vocabulary lacks characters of the prompt {shown[0]}: {shown[1]}; they are read as U+FFFD")
    entries = [{"text": text, "ids": ids} for text, ids in zip(prompts, rows, strict=True)]
    shard_files.write_json(folder / "prompts.json", entries)


def _find_unknown_characters(tokenizer: tokenizers.TextTokenizer, text: str) -> str:
    """Return the characters of a text that the tokeniser reads as U+FFFD."""
    characters = sorted({*text} - {tokenizers.REPLACEMENT})
    unknown = [tokenizers.REPLACEMENT.encode()]
    found = zip(characters, tokenizer.encode(characters), strict=True)
    return "".join(character for character, ids in found if [tokenizer.tokens[i] for i in ids] == unknown)


def _require_enough_tokens(found: DataSummary, resolved: Mapping[str, Any], source: str) -> None:
    """Raise UsageError if the data has fewer tokens than one step reads, or no complete held-out window.

    This can happen with data that was prepared for another recipe. Sentence pairs are not checked here.
    """
    batch, context = resolved["train"]["batch_tokens"], resolved["model"]["context"]
    if found.tokenizer.endswith("-pairs") or (found.train_tokens > batch and found.val_tokens > context):
        return
    few = f"only {found.train_tokens:,} tokens for training; one step of the recipe needs {batch:,} plus one"
    if found.train_tokens > batch:
        few = f"only {found.val_tokens:,} held-out tokens; one window of the recipe has {context:,} plus one"
    raise UsageError(
        "data.too_small",
        f"{source} has {few}.",
        hint="Use more text, or a smaller batch or context: --set train.batch_tokens=N, --set model.context=N.",
    )


def _require_hellaswag_items(resolved: Mapping[str, Any], folder: Path, data: str) -> None:
    """Raise UsageError if HellaSwag items are missing, because the trainer would refuse that on paid time."""
    items = resolved["eval"]["hellaswag_items"]
    if items and not (folder / "hellaswag.jsonl").is_file():
        raise UsageError(
            "data.no_hellaswag",
            f"eval.hellaswag_items is {items}, but there is no hellaswag.jsonl beside the shards.",
            hint=f"gpurun data hellaswag hellaswag_val.jsonl {shlex.quote(data)} makes it; "
            "or use --set eval.hellaswag_items=0.",
        )

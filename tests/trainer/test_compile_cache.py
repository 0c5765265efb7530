"""Tests that compiled code is downloaded and reused: each process keeps its own part, and a stale cache is replaced."""

from __future__ import annotations

import collections
import dataclasses
import io
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from tests.later import LATER
from tests.trainer.tiny_training import ROOT, Train, command, environment, events, manifest, recipe_record, write_data
from trainer.checkpoint import read_checkpoint
from trainer.compile_cache import CompileCache, cache_name
from trainer.distributed import Device, Processes
from trainer.events import Reporter
from trainer.recipe import ModelConfig

CONFIG = ModelConfig(layers=1, heads=2, width=16, context=8, vocab_size=64)
CPU = Device(torch.device("cpu"), "fp32", None)
NAME = "compile-cache/0123456789abcdef.bin"


class Compiler:
    """A stand-in for torch's compiler that counts cache hits and misses and keeps what was loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.loaded: list[bytes] = []
        from torch._dynamo import utils  # Imported here because it takes seconds and every worker imports this module.

        monkeypatch.setitem(utils.counters, "inductor", self.counts)
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"made of %d" % self.made, None))
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda part: self.loaded.append(part) or "info")

    @property
    def made(self) -> int:
        return self.counts["fxgraph_cache_miss"]

    def compile(self, *, found: int = 0, made: int = 0) -> None:
        self.counts["fxgraph_cache_hit"] += found
        self.counts["fxgraph_cache_miss"] += made


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def write_if_new(cache: CompileCache, folder: Path) -> bool:
    """Write the cache file if the cache has new content; return whether it was written."""
    made = cache.renewed(CPU.torch)
    if made is not None:
        (folder / made[0]).parent.mkdir(exist_ok=True)
        (folder / made[0]).write_bytes(made[1])
    return made is not None


def test_the_name_changes_with_whatever_is_compiled_otherwise() -> None:
    wider, card = dataclasses.replace(CONFIG, width=32), dataclasses.replace(CPU, cuda_name="NVIDIA A100")
    names = [cache_name(model, device, 4, None, 1) for model in (CONFIG, wider) for device in (CPU, card)]
    names += [cache_name(CONFIG, CPU, *rest) for rest in ((2, None, 1), (4, "ddp", 2), (4, "fsdp", 2), (4, "ddp", 4))]
    names += [cache_name(CONFIG, CPU, 4, None, 1, "max-autotune-no-cudagraphs")]
    assert len(set(names)) == len(names)
    assert names[0] == cache_name(CONFIG, CPU, 4, None, 1)
    assert all(re.fullmatch(r"compile-cache/[0-9a-f]{16}\.bin", name) for name in names)


def test_only_a_file_that_lacks_something_is_written_again(tmp_path: Path, compiler: Compiler) -> None:
    first = CompileCache(NAME, Processes())
    assert not first.load([tmp_path])
    compiler.compile(made=2)
    assert write_if_new(first, tmp_path)
    assert not write_if_new(first, tmp_path), "it has been written"
    compiler.compile(made=1)  # the micro-batch shrank
    assert write_if_new(first, tmp_path)
    compiler.counts.clear()
    second = CompileCache(NAME, Processes())
    assert second.load([tmp_path / "nowhere", tmp_path])
    assert compiler.loaded == [b"made of 3"]
    compiler.compile(found=2)
    assert not write_if_new(second, tmp_path)
    compiler.compile(made=1)
    assert write_if_new(second, tmp_path), "what came along is stale"


def test_a_hit_is_said_only_where_nothing_was_compiled_anew(tmp_path: Path, compiler: Compiler) -> None:
    cache, reporter = CompileCache(NAME, Processes()), Reporter(tmp_path, is_first=True)
    for step, found, made in ((1, 2, 0), (2, 0, 0), (5, 0, 2)):
        compiler.compile(found=found, made=made)
        cache.report(reporter, step)
    compiler.counts.clear()
    compiler.compile(made=2)
    cache.report(reporter, 9)
    reported = [(event["step"], event["cache"], event["found"], event["made"]) for event in events(tmp_path, "compile")]
    assert reported == [(1, "hit", 2, 0), (5, "partial", 2, 2), (9, "miss", 0, 2)]


def test_an_unreadable_compile_cache_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).write_bytes(b"no zip at all")
    assert CompileCache(NAME, Processes()).load([tmp_path / "nowhere", tmp_path]) is False
    for part in ("0", "1"):  # this process's part, which torch did not write; another process's part
        with zipfile.ZipFile(tmp_path / NAME, "w") as file:
            file.writestr(part, b"not what torch wrote")
        assert CompileCache(NAME, Processes()).load([tmp_path]) is False


def test_a_compile_cache_that_fails_costs_no_checkpoint(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise AssertionError("an artifact of a kind that torch forgot to register")

    cache = CompileCache(NAME, Processes())
    compiler.compile(made=1)
    with monkeypatch.context() as once:
        once.setattr(torch.compiler, "save_cache_artifacts", broken)
        assert cache.renewed(CPU.torch) is None
    compiler.compile(made=1)
    assert cache.renewed(CPU.torch) is not None


# Four processes on two machines. Only the process with local rank 1 on the first machine compiles anything.
ONE_OF_FOUR = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from torch._dynamo.utils import counters
from trainer.compile_cache import CompileCache
from trainer.distributed import Processes
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=4)
torch.compiler.save_cache_artifacts = lambda: (b"of rank %d" % rank, None)
cache = CompileCache(sys.argv[3], Processes(rank, rank % 2, 4, 2, several=True))
loaded = []
torch.compiler.load_cache_artifacts = lambda part: loaded.append(part) or "info"
assert cache.load([Path(sys.argv[4])])
assert cache.renewed(torch.device("cpu")) is None
counters["inductor"]["fxgraph_cache_miss"] = int(rank == 1)
made = cache.renewed(torch.device("cpu"))
assert (made is None) == (rank > 0)
if made:
    Path(sys.argv[4], made[0]).write_bytes(made[1])
print(loaded[0].decode(), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_each_process_loads_its_part_and_all_parts_go_home(tmp_path: Path) -> None:
    (tmp_path / NAME).parent.mkdir()
    with zipfile.ZipFile(tmp_path / NAME, "w") as file:
        for part in ("0", "1"):
            file.writestr(part, zlib.compress(f"earlier, {part}".encode()))
    given = [f"file://{tmp_path}/meeting", NAME, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment()}
    four = [subprocess.Popen([sys.executable, "-c", ONE_OF_FOUR, str(r), *given], **pipes) for r in range(4)]
    # Only the last line counts, because gloo of torch 2.8 prints lines before it.
    lines = [process.communicate(timeout=120)[0].splitlines()[-1] for process in four]
    assert [process.returncode for process in four] == [0] * 4
    assert lines == ["earlier, 0", "earlier, 1", "earlier, 0", "earlier, 1"]
    with zipfile.ZipFile(io.BytesIO((tmp_path / NAME).read_bytes())) as file:
        parts = {name: zlib.decompress(file.read(name)) for name in file.namelist()}
    assert parts == {"0": b"of rank 0", "1": b"of rank 1"}


# Prints, as its last line, how many graphs torch found in its cache and how many it had to compile.
COUNTING = """
import sys
from torch._dynamo.utils import counters
from trainer import train
code = train.main()
print(*(counters["inductor"]["fxgraph_cache_" + what] for what in ("hit", "miss")))
sys.exit(code)
"""


@LATER
def test_what_was_compiled_goes_home_and_is_found_the_next_time(tmp_path: Path, train: Train) -> None:
    """Each run starts with an empty torch cache, as on a newly rented machine. The third run gets a stale file."""
    folder, lines, losses = write_data(tmp_path / "data"), {}, {}
    tables = {"model": {"layers": 1, "dropout": 0.0}, "sample": {"prompts": []}}
    assert train(recipe_record(**tables, train={"steps": 3}), tmp_path / "eager", folder) == 0
    for name, micro_batch in (("first", 2), ("second", 2), ("third", 1)):
        keys = {"steps": 3, "compile": True, "micro_batch": micro_batch}
        argv = command(recipe_record(**tables, train=keys), folder, tmp_path / name)
        own = {**environment(), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"{name}-inductor")}
        own["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        script = [argv[0], "-c", COUNTING, *argv[argv.index("--recipe") :]]
        done = subprocess.run(script, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300, check=True)
        lines[name] = done.stdout.splitlines()[-1]
        made = [e["name"] for e in manifest(tmp_path / name)["files"] if e["kind"] == "compile_cache"]
        assert len(made) == (name != "second")
        if name == "first":
            config = ModelConfig(**recipe_record(**tables)["model"] | {"vocab_size": 64})
            for size in (1, 2):  # For size 1, the third run's, the file is stale: it holds graphs of size 2.
                brought = folder / cache_name(config, CPU, size, None, 1)
                brought.parent.mkdir(exist_ok=True)
                shutil.copy(tmp_path / name / made[0], brought)
            assert (folder / made[0]).is_file(), "the name is that of its micro-batch"
    for name in ("eager", "first", "second", "third"):
        losses[name] = [event["loss"] for event in events(tmp_path / name, "step")]
    starts = [events(tmp_path / name, "start")[0]["compile_cache"] for name in losses]
    assert starts == [None, "none", "loaded", "loaded"]
    graphs = int(lines["first"].split()[1])
    assert lines == {"first": f"0 {graphs}", "second": f"{graphs} 0", "third": f"0 {graphs}"}
    assert graphs > 0
    reported = [events(tmp_path / name, "compile")[-1] for name in ("first", "second", "third")]
    assert [event["cache"] for event in reported] == ["miss", "hit", "miss"]
    assert losses["first"] == losses["second"] == pytest.approx(losses["eager"], rel=1e-5)
    assert not any("_orig_mod" in name for name in read_checkpoint(tmp_path / "first", 3).model)

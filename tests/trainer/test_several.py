"""Tests of several processes, on one machine or two: same tokens and losses, whichever process holds which part."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.tiny_training import (
    ROOT,
    Train,
    command,
    environment,
    events,
    losses,
    manifest,
    recipe_record,
    run_command,
    torchrun,
    write_data,
    write_items,
)
from trainer.checkpoint import Checkpoint, read_checkpoint
from trainer.distributed import Device, Processes, fits_replicated
from trainer.evaluate import accuracy
from trainer.events import Reporter
from trainer.items import Item
from trainer.model import GPT
from trainer.recipe import ModelConfig

NO_DROPOUT = {"dropout": 0.0}

# The first process is killed right after it reported step 13.
KILLED_AT_13 = """
import os, signal, time
from trainer import events, train
report = events.Reporter.step
def step(self, number, values):
    report(self, number, values)
    while self._is_first and number == 13 and '"latest": 10' not in (self._path.parent / "MANIFEST.json").read_text():
        time.sleep(0.01)  # a thread writes that checkpoint
    if self._is_first and number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
events.Reporter.step = step
train.leave(train.main())
"""

# Prints, as each process's last line, the most whole tensors it had at the same time, the most bytes of them at the
# same time, and the bytes of the largest one.
COUNTING = """
import os, weakref
from torch.distributed.tensor import DTensor
from trainer import train
gather, alive, most = DTensor.full_tensor, {}, [0, 0, 0]
def counted(self, **given):
    tensor = gather(self, **given)
    alive[id(tensor)] = tensor.nbytes
    weakref.finalize(tensor, alive.pop, id(tensor))
    most[:] = map(max, most, (len(alive), sum(alive.values()), tensor.nbytes))
    return tensor
DTensor.full_tensor = counted
code = train.main()
os.write(1, b"\\nMOST %d %d %d\\n" % tuple(most))
train.leave(code)
"""

# Draws a token in half a second, and lets the other process wait for one second at most.
SLOW_TO_SAY = """
import time
from trainer import evaluate, train
pick, train.LONGEST_SAMPLES_S = evaluate.pick, 1.0
def slow(*given):
    time.sleep(0.5)
    return pick(*given)
evaluate.pick = slow
train.leave(train.main())
"""

# The loss of step 6 is BAD while the checkpoint of step 5 is being written. At its end the second process prints
# whether the manifest exists, with a single write, because the first process writes to the same pipe.
BAD_WHILE_SAVING = """
import os, sys, time
from trainer import checkpoint, optim, train
optim.SPIKE_WINDOW, save, gradient = 4, checkpoint.CheckpointStore.save, train.gradient
def slow(*given):
    time.sleep(0.3)
    return save(*given)
def bad(setup, state, io):
    figures = gradient(setup, state, io)
    return (float("BAD"), *figures[1:]) if state.step == 5 else figures
checkpoint.CheckpointStore.save, train.gradient = slow, bad
code = train.main()
out = sys.argv[sys.argv.index("--out") + 1]
if os.environ["RANK"] == "1":
    os.write(1, b"SAVED %d\\n" % os.path.exists(out + "/MANIFEST.json"))
train.leave(code)
"""

# Trains twelve compiled blocks with one gradient bucket each. Prints, as each process's last line, how many buckets
# are being reduced when backward reaches the first block (its second norm is the 24th of 25 in backward), and how many
# graphs were compiled. The backend "aot_eager" saves the time of code generation, which does not matter here.
TRAVELLING = """
import functools, os, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import parallel
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from trainer import distributed
from trainer.model import GPT
from trainer.recipe import ModelConfig
class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_layer_norm_backward.default:
            travelling.append(len(begun))
        return func(*args, **(kwargs or {}))
torch.set_num_threads(1)
torch.compile = functools.partial(torch.compile, backend="aot_eager")
dist.init_process_group("gloo")
model = GPT(ModelConfig(layers=12, heads=2, width=32, context=16, vocab_size=64))
block_mb = sum(4 * p.numel() for p in model.h[0].parameters()) / 2**20
parallel.DistributedDataParallel = functools.partial(parallel.DistributedDataParallel, bucket_cap_mb=block_mb)
replicas = distributed.DataParallel(model)
def travel(state, bucket):
    begun.append(bucket.index())
    return allreduce_hook(state, bucket)
replicas.model.register_comm_hook(None, travel)
model.compile_blocks()
for _ in range(2):
    begun, travelling, ids = [], [], torch.randint(64, (2, 17))
    cpu = distributed.Device(torch.device("cpu"), "fp32", None)
    loss = replicas.loss((ids[:, :-1], ids[:, 1:]), cpu, is_last=True)
    with Watched():
        loss.backward()
    replicas.clear()
os.write(1, b"TRAVEL %d COMPILED %d\\n" % (travelling[23], counters["stats"]["unique_graphs"]))
os._exit(0)
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Return the out folder of one process without dropout, whose masks depend on the batch's division."""
    out = tmp_path_factory.mktemp("straight") / "out"
    argv = command(recipe_record(model=NO_DROPOUT), data, out)
    assert subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, timeout=120).returncode == 0
    return out


@pytest.mark.slow
def test_replicas_that_stopped_half_way_go_on_to_the_last_bit(tmp_path: Path, data: Path) -> None:
    """Uses several buckets and three processes, because the sum of two gradients is the same in either order."""
    model = {**NO_DROPOUT, "layers": 4, "width": 256}
    for out, stops in (("straight", (6,)), ("stopped", (3, 6))):
        for steps in stops:
            train = {"steps": steps, "checkpoint_every": 3, "batch_tokens": 96, "micro_batch": 2}
            recipe = recipe_record(model=model, train=train, schedule={"kind": "constant", "min_lr": 0.0})
            done = run_command(recipe, data, tmp_path / out, processes=3)
            assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")
    for kind in ("model", "optim"):
        name = f"checkpoints/000006.{kind}.safetensors"
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def answered_alone(checkpoint: Checkpoint, items: list[Item]) -> float | None:
    """Return the share of items that a checkpoint's model answers correctly, computed in this process."""
    model = GPT(ModelConfig(layers=2, heads=2, width=16, context=16, vocab_size=64))
    model.load_state_dict(checkpoint.model)
    cpu = Device(torch.device("cpu"), "fp32", None)
    return accuracy(model, items, device=cpu, processes=Processes(), stopping=lambda: False)


@pytest.mark.slow
def test_a_process_group_is_left_standing(tmp_path: Path) -> None:
    """Destroying the group waits for gloo's threads, one of which may wait for the interpreter: a process once hung."""
    script = """
import gc, weakref, torch, torch.distributed as dist
from trainer import distributed
with distributed.joined(distributed.Processes.from_environment(), torch.device("cpu")):
    group = weakref.ref(dist.group.WORLD)
gc.collect()
assert group() is not None
distributed.leave(0)
"""
    done = torchrun(script, ["--recipe"], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_gradients_travel_while_a_compiled_backward_goes_on(tmp_path: Path) -> None:
    done = torchrun(TRAVELLING, ["--recipe"], tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [line.split() for line in done.stdout.splitlines() if line.startswith("TRAVEL")]
    assert len(printed) == 2
    for _, travelling, _, graphs in printed:
        assert int(travelling) >= 10, "of twelve blocks"
        assert int(graphs) in (1, 2), "one graph serves all blocks; the loss is another"


@pytest.mark.slow
def test_one_process_then_two_with_a_part_each_then_one_again(
    tmp_path: Path, straight: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, keys = write_data(tmp_path / "data"), tmp_path / "out", {"checkpoint_every": 5}
    items = write_items(folder)
    tables = {"model": NO_DROPOUT, "eval": {"hellaswag_items": len(items)}}
    report = Reporter.step

    def dying(self: Reporter, number: int, values: dict[str, Any]) -> None:
        report(self, number, values)
        assert number < 7

    with monkeypatch.context() as once:
        once.setattr(Reporter, "step", dying)
        assert train(recipe_record(**tables, train=keys), out, folder) == 1
    argv = command(recipe_record(**tables, train={**keys, "parallel": "auto"}), folder, out)
    killed = torchrun(KILLED_AT_13, [*argv, "--parallel=fsdp"], tmp_path)
    assert killed.returncode != 0
    assert max(losses(out)) == 13, killed.stderr
    assert events(out, "eval")[-1]["hellaswag"] == answered_alone(read_checkpoint(out, 10), items)
    assert train(recipe_record(**tables, train=keys), out, folder) == 0
    starts = [(event["parallel"], event["resumed_from"]) for event in events(out, "start")]
    assert starts == [(None, None), ("fsdp", 5), (None, 10)]
    assert losses(out) == pytest.approx(losses(straight), rel=1e-5)
    both = read_checkpoint(out, 20), read_checkpoint(straight, 20)
    for kind in ("model", "optimizer"):
        shapes = [{name: tensor.shape for name, tensor in getattr(checkpoint, kind).items()} for checkpoint in both]
        assert shapes[0] == shapes[1]
    assert len(events(out, "sample")) == 4


@pytest.mark.slow
def test_saving_a_sharded_model_never_holds_two_whole_tensors(tmp_path: Path, data: Path) -> None:
    """A GPU with room only for its part of the model must survive every save, in the first process too."""
    keys = {"parallel": "fsdp", "steps": 4, "checkpoint_every": 2}
    argv = command(recipe_record(train=keys, sample={"prompts": []}), data, tmp_path / "out")
    done = torchrun(COUNTING, argv, tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("MOST")]
    largest = str(64 * 16 * 4)  # the embedding, in fp32
    assert printed == [["1", largest, largest]] * 2
    assert [event["step"] for event in events(tmp_path / "out", "checkpoint")] == [2, 4]


@pytest.mark.slow
def test_others_wait_only_so_long_for_the_first_ones_samples(tmp_path: Path, data: Path) -> None:
    """The other process waits in the next step's collective, whose time limit would end the run."""
    folder = shutil.copytree(data, tmp_path / "data")
    (prompt,) = json.loads((folder / "prompts.json").read_text())
    (folder / "prompts.json").write_text(json.dumps([prompt] * 3))
    recipe = recipe_record(train={"steps": 4, "checkpoint_every": 2}, sample={"prompts": [prompt["text"]] * 3})
    done = torchrun(SLOW_TO_SAY, command(recipe, folder, tmp_path / "out"), tmp_path)
    assert done.returncode == 0, done.stderr
    warnings = [(event["step"], event["code"]) for event in events(tmp_path / "out", "warning")]
    assert warnings == [(2, "sample.time"), (4, "sample.time")]
    assert "2 of 3" in events(tmp_path / "out", "warning")[0]["message"]
    for event in events(tmp_path / "out", "sample"):
        assert len(prompt["text"]) < len(event["text"]) < len(prompt["text"]) + 8


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "reason"), [("nan", "nonfinite"), ("1e9", "spike")])
def test_no_process_leaves_before_the_first_has_saved(tmp_path: Path, data: Path, loss: str, reason: str) -> None:
    """torchrun kills the other processes 30 s after one has failed; a large checkpoint may take longer to write."""
    argv = command(recipe_record(train={"checkpoint_every": 5, "spike": "stop"}), data, tmp_path / "out")
    done = torchrun(BAD_WHILE_SAVING.replace("BAD", loss), argv, tmp_path)
    assert "SAVED 1" in done.stdout, done.stderr
    assert (manifest(tmp_path / "out")["latest"], events(tmp_path / "out")[-1]["reason"]) == (5, reason)


def free_port() -> int:
    """Return a free port outside the range that the system assigns, so that it stays free until torchrun starts."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def two_machines(folder: Path, data: Path, recipe: dict[str, Any]) -> list[tuple[int, str]]:
    """Train on two emulated machines, each with its own out folder; return each one's exit code and stderr."""
    nodes, ends = [], []
    where = f"--nnodes=2 --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={free_port()}"
    for rank in range(2):
        python, *module = command(recipe, data, folder / f"out{rank}")
        launch = [python, "-m", "torch.distributed.run", f"--node-rank={rank}", *where.split(), *module]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen(launch, cwd=ROOT, env=environment(), start_new_session=True, **pipes))
    try:
        for node in nodes:
            node.wait(timeout=90)
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
            ends.append((node.returncode, node.communicate()[1]))
    return ends


@pytest.mark.slow
def test_two_machines_train_as_one(tmp_path: Path, data: Path, straight: Path) -> None:
    """Each machine has its own out folder; the checkpoint is only on the first."""
    ends = two_machines(tmp_path, data, recipe_record(model=NO_DROPOUT))
    assert [code for code, _ in ends] == [0, 0], ends
    assert events(tmp_path / "out0", "start")[0]["world_size"] == 2
    assert losses(tmp_path / "out0") == pytest.approx(losses(straight), rel=1e-5)
    assert manifest(tmp_path / "out0")["latest"] == 20
    assert not (tmp_path / "out1").exists()


@pytest.mark.slow
def test_a_checkpoint_on_the_other_machine_is_not_trained_again(tmp_path: Path, data: Path, straight: Path) -> None:
    """A rendezvous that assigns the ranks may make a machine with an empty folder the first one."""
    shutil.copytree(straight, tmp_path / "out1")
    two_machines(tmp_path, data, recipe_record(model=NO_DROPOUT))
    (stop,) = events(tmp_path / "out0")
    assert "step 20" in stop["message"]
    assert manifest(tmp_path / "out1") == manifest(straight)


def test_a_model_is_sharded_only_where_a_card_cannot_hold_it() -> None:
    gib = 1 << 30
    assert fits_replicated(124_000_000, 16 * gib)
    assert fits_replicated(355_000_000, 16 * gib)
    assert not fits_replicated(1_558_000_000, 24 * gib)
    assert fits_replicated(1_558_000_000, 80 * gib)

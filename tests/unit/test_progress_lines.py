"""Tests that gpurun reads steps and losses from the lines that common training scripts print."""

from __future__ import annotations

from typing import Any

import pytest

from gpurun.remote.agent.runner.progress_lines import Progress

LINES = [
    ("iter 10: loss 2.3100, time 12.00ms, mfu 3.10%", {"step": 10, "loss": 2.31}),  # nanoGPT
    ("step 250: train loss 1.9, val loss 2.1", {"step": 250, "loss": 1.9, "val_loss": 2.1}),  # nanoGPT's evaluation
    (
        "step   10/100 | loss 4.123 (+nanz)| norm 1.2 (0.1z)| lr 3.00e-04 | 53.21 ms | 61.2% bf16 MFU | 98,520 tok/s",
        {"step": 10, "loss": 4.123, "lr": 3e-4, "tokens_per_s": 98520.0},
    ),  # llm.c
    (
        "step 00010/21400 (0.05%) | loss: 9.123456 | lrm: 1.00 | dt: 12.34ms | tok/sec: 1,234,567 | mfu: 40.1",
        {"step": 10, "loss": 9.123456, "tokens_per_s": 1234567.0},
    ),  # nanochat
    ("step:100/1000 train_loss:4.2 train_time:1000ms", {"step": 100, "loss": 4.2}),  # modded-nanogpt
    ("Step 00250 | Validation bpb: 0.812345", {"step": 250, "bits_per_byte": 0.812345}),  # nanochat
    ("Step 02000 | CORE metric: 0.2034", {"step": 2000, "core": 0.2034}),
    ("CORE metric: 0.2612", {"step": None, "core": 0.2612}),  # nanochat's evaluation at the end
    ("step:125/3600 val_loss:4.52310 train_time:12.000s", {"step": 125, "val_loss": 4.5231}),  # its track 3
    ("Epoch 3 Step 40 Loss 0.5000", {"step": 40, "loss": 0.5}),
    ('{"step": 7, "loss": 1.5, "lr": 0.001, "note": "x"}', {"step": 7, "loss": 1.5, "lr": 0.001}),
    ("step 30 | loss nan | lr 1e-3", {"step": 30, "loss": "nan", "lr": 1e-3}),
]


@pytest.mark.parametrize(("line", "wanted"), LINES, ids=[line[:30] for line, _ in LINES])
def test_the_usual_lines_are_understood(line: str, wanted: dict[str, Any]) -> None:
    found = Progress().take(line)
    assert found is not None
    assert {key: str(one) if one != one else one for key, one in found.items()} == wanted


@pytest.mark.parametrize(
    "line",
    [
        "Loss of precision is expected here",
        "number of parameters: 10.65M",
        "loading checkpoint from step 40",
        "{'train_runtime': 12.3, 'train_loss': 1.2}",
        "{" * 5000,
        "{'loss': " + "[" * 200,
        "the closing loss: 3",
        "Minimum validation bpb: 0.7",
        "train bpb: 0.71",
        "Evaluating the CORE metric",
        "",
    ],
    ids=lambda line: line[:25],
)
def test_a_line_without_a_step_and_its_loss_is_no_point(line: str) -> None:
    assert Progress().take(line) is None


def test_the_trainer_of_hugging_face_tells_its_step_in_a_bar() -> None:
    reader = Progress()
    assert reader.take("  4%|▍         | 20/500 [00:01<00:30, 15.8it/s]") is None
    assert reader.take("{'loss': 2.5, 'grad_norm': 1.0, 'learning_rate': 5e-05, 'epoch': 0.04}") == {
        "step": 20, "loss": 2.5, "lr": 5e-05,
    }  # fmt: skip
    for line in ("  0%|          | 0/8 [00:00<?, ?it/s]", "100%|██████████| 8/8 [00:01<00:00, 7.1it/s]"):
        assert reader.take(line) is None  # The progress bar of the evaluation.
    assert reader.take("{'eval_loss': '2.4', 'eval_runtime': '1.0', 'epoch': '0.04'}") == {"step": 20, "val_loss": 2.4}
    assert reader.total == 500


def points(lines: list[str], total: int = 0) -> tuple[list[tuple[int | None, float | None, float | None]], int]:
    """Return step, loss and validation loss of each line that reports them, and the total number of steps."""
    reader = Progress(total)
    found = [point for line in lines if (point := reader.take(line)) is not None]
    return [(point["step"], point.get("loss"), point.get("val_loss")) for point in found], reader.total


def test_a_bar_of_each_epoch_adds_up() -> None:
    bar = "\x1b[1mEpoch {}: {:3d}%|███▍      | {}/40 [00:01<00:10, 3.50it/s, loss={}]"
    lines = [bar.format(e, 50 * i, 20 * i, 3 - e) for e in range(3) for i in (1, 2)]
    found, total = points(lines)
    assert ([step for step, _, _ in found], total) == ([20, 40, 60, 80, 100, 120], 0)
    named = [line.replace("Epoch 0", "Epoch 1/3").replace("Epoch 1:", "Epoch 2/3:") for line in lines[:2]]
    assert points(named)[1] == 120
    bare = [line.partition(": ")[2] for line in lines]
    assert points(bare)[0][-1] == (120, 1, None)
    assert points(bare, total=120)[1] == 120, "what its user says is not overruled"


def test_keras_counts_across_epochs_without_its_final_evaluation() -> None:
    bar = "\x1b[1m{}/938\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m━━\x1b[0m \x1b[1m1s\x1b[0m 3ms/step - acc: 0.9 - loss: {}"
    lines = ["Epoch 1/2", bar.format(100, 0.5), bar.format(938, 0.4) + " - val_accuracy: 0.9 - val_loss: 0.6"]
    lines += ["Epoch 2/2", bar.format(50, 0.3), bar.format(938, 0.2) + " - val_accuracy: 0.9 - val_loss: 0.5"]
    lines += [bar.format(1, 9.9), bar.format(313, 9.9).replace("938", "313"), "Test loss: 9.9"]
    assert points(lines) == ([(100, 0.5, None), (938, 0.4, 0.6), (988, 0.3, None), (1876, 0.2, 0.5)], 1876)
    older = ["Epoch 1/2", "100/938 [==>...........] - ETA: 2s - loss: 0.5"]
    assert points(older) == ([(100, 0.5, None)], 1876)
    brief = ["Epoch 2/2", "938/938 - 3s - 3ms/step - accuracy: 0.9 - loss: 0.4 - val_loss: 0.6"]
    assert points(brief) == ([(1876, 0.4, 0.6)], 1876)


def test_lightnings_repeated_validation_loss_is_recorded_once() -> None:
    bar = "Epoch {}: {:3d}%|█████     | {}/20 [00:01<00:01,  9.5it/s, v_num=0, train_loss={}{}]"
    lines = ["Sanity Checking DataLoader 0: 100%|██████████| 2/2 [00:00<00:00, 9it/s]"]
    lines += [bar.format(0, 50, 10, 2.3, ""), "Validation DataLoader 0: 100%|██████████| 5/5 [00:00<00:00, 9it/s]"]
    lines += [bar.format(0, 100, 20, 2.2, ", val_loss=2.1"), bar.format(1, 50, 10, 2.0, ", val_loss=2.1")]
    assert points(lines) == ([(10, 2.3, None), (20, 2.2, 2.1), (30, 2.0, None)], 0)
    rich = ["Epoch 0/9 ━━━━━━╸━━━━━━ 10/20 0:00:01 • 0:00:01 9.50it/s v_num: 0 train_loss: 2.3"]
    assert points(rich) == ([(10, 2.3, None)], 0)


IMAGENET = [
    "Epoch: [0][   1/1251]\tTime  9.1 ( 9.1)\tData  4.0 ( 4.0)\tLoss 7.0e+00 (7.0e+00)\tAcc@1   0.00 (  0.00)",
    "Epoch: [1][  11/1251]\tTime  0.3 ( 1.1)\tData  0.0 ( 0.4)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.00 (  0.12)",
    "Test: [  1/391]\tTime  2.1 ( 2.1)\tLoss 6.8e+00 (6.8e+00)\tAcc@1   1.00 (  1.00)",
]
MNIST = [
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.290000",
    "Train Epoch: 2 [0/60000 (0%)]\tLoss: 0.200000",
    "Test set: Average loss: 0.0543, Accuracy: 9823/10000 (98%)",
]
BASICS = ["Epoch 1", "-------", "loss: 2.303494  [   64/60000]", "Test Error: ", " Accuracy: 65.6%, Avg loss: 1.083"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        pytest.param(IMAGENET, [(1, 7.0, None), (1262, 6.9, None)], id="PyTorch's ImageNet example"),
        pytest.param(MNIST, [(640, 2.29, None), (60000, 0.2, None)], id="PyTorch's MNIST example, in samples"),
        pytest.param(BASICS, [(64, 2.303494, None)], id="PyTorch's first tutorial"),
        pytest.param(["[1,  2000] loss: 2.182", "[2,  2000] loss: 1.2"], [(2000, 2.182, None), (4000, 1.2, None)],
                     id="PyTorch's classifier"),
        pytest.param(["Epoch [1/2], Step [100/600], Loss: 0.5", "Epoch [2/2], Step [100/600], Loss: 0.4"],
                     [(100, 0.5, None), (700, 0.4, None)], id="a step within its epoch"),
        pytest.param(["Epoch 1 | step 590/1200 | loss 0.5", "Epoch 2 | step 610/1200 | loss 0.4"],
                     [(590, 0.5, None), (610, 0.4, None)], id="a step over all epochs"),
        pytest.param(["Epoch 1/9 | train loss 2 | val loss 2.2 | test loss 9.9", "Epoch 2/9 | loss 1 | val loss 1.2"],
                     [(1, 2.0, 2.2), (2, 1.0, 1.2)], id="a line an epoch"),
        pytest.param(['{"epoch": 4, "train_loss": 2.0, "val_loss": 2.2, "test_loss": 9.9}'], [(4, 2.0, 2.2)],
                     id="a record an epoch"),
        pytest.param(["step 10 | loss 2.0", "eval at step 10: loss 2.2", "step 20 | loss 1.9 | nll_loss 7"],
                     [(10, 2.0, None), (10, None, 2.2), (20, 1.9, None)], id="an evaluation says so"),
        pytest.param(["Map: 100%|████| 1000/1000 [00:01<00:00, 900.00 examples/s]", "epoch 1 loss 2.0"],
                     [(1, 2.0, None)], id="a bar of something else"),
        pytest.param(["step 10 | loss 2.0", "Test loss: 9.9", "test | step 10 | loss 9.9", "testing: loss=9.9"],
                     [(10, 2.0, None)], id="a test set is no validation"),
        pytest.param(["val loss 2.0"], [(None, None, 2.0)], id="no step is told"),
    ],
)  # fmt: skip
def test_counters_are_all_one_step_and_losses_keep_their_names(
    lines: list[str], found: list[tuple[int | None, float | None, float | None]]
) -> None:
    assert points(lines)[0] == found


def test_an_epoch_named_after_the_first_step_restarts_nothing() -> None:
    reader = Progress()
    lines = [f"step {step:05d}/05000 ({step / 50:.2f}%) | loss: 3.5 | dt: 1.00ms | epoch: 1 pq: 0" for step in range(3)]
    assert [found["step"] for found in map(reader.take, lines) if found] == [0, 1, 2]

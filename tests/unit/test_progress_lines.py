"""Steps and losses in the lines that the field's scripts print."""

from __future__ import annotations

from typing import Any

import pytest

from gpurun.remote.agent.runner.progress_lines import Progress

LINES = [
    ("iter 10: loss 2.3100, time 12.00ms, mfu 3.10%", {"step": 10, "loss": 2.31}),  # nanoGPT
    ("step 250: train loss 1.9, val loss 2.1", {"step": 250, "loss": 1.9, "val_loss": 2.1}),  # its evaluation
    (
        "step   10/100 | loss 4.123 (+nanz)| norm 1.2 (0.1z)| lr 3.00e-04 | 53.21 ms | 61.2% bf16 MFU | 98,520 tok/s",
        {"step": 10, "loss": 4.123, "lr": 3e-4, "tokens_per_s": 98520.0},
    ),  # llm.c
    (
        "step 00010/21400 (0.05%) | loss: 9.123456 | lrm: 1.00 | dt: 12.34ms | tok/sec: 1,234,567 | mfu: 40.1",
        {"step": 10, "loss": 9.123456, "tokens_per_s": 1234567.0},
    ),  # nanochat
    ("step:100/1000 train_loss:4.2 train_time:1000ms", {"step": 100, "loss": 4.2}),  # modded-nanogpt
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
        "",
    ],
    ids=lambda line: line[:25],
)
def test_a_line_without_a_step_and_its_loss_is_no_point(line: str) -> None:
    assert Progress().take(line) is None


def test_the_trainer_of_hugging_face_tells_its_step_in_a_bar() -> None:
    told = Progress()
    assert told.take("  4%|▍         | 20/500 [00:01<00:30, 15.8it/s]") is None
    assert told.take("{'loss': 2.5, 'grad_norm': 1.0, 'learning_rate': 5e-05, 'epoch': 0.04}") == {
        "step": 20, "loss": 2.5, "lr": 5e-05,
    }  # fmt: skip
    assert told.take("{'eval_loss': '2.4', 'eval_runtime': '1.0', 'epoch': '0.04'}") == {"step": 20, "val_loss": 2.4}
    assert told.total == 500

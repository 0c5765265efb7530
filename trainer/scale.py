"""The loss scale of fp16: gradients too small for fp16 are computed many times as large, and divided again.

The rule is torch.amp.GradScaler's. It stands here because a step that ran out of memory is taken again, which
GradScaler does not allow once it has unscaled, and because its state is two numbers of a JSON file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["LossScale"]

GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale is doubled."""
SMALLEST = 1.0
"""Below this fp16 has no use for a scale: what overflows then has diverged."""


@dataclass
class LossScale:
    """By how much the loss is multiplied before backward: 1 unless the precision is fp16."""

    in_use: bool
    value: float = 65536.0
    good_steps: int = 0
    """Steps since the last change."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss * self.value if self.in_use else loss

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale."""
        if self.in_use:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.value)

    def update(self, overflowed: bool) -> bool:
        """Learn whether a step overflowed; return False where the scale cannot become smaller any more."""
        if not self.in_use:
            return not overflowed
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value /= 2
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
        return self.value >= SMALLEST

    def as_record(self) -> dict[str, float] | None:
        """Return the state for a checkpoint; None where it is not in use."""
        return {"value": self.value, "good_steps": self.good_steps} if self.in_use else None

    def restore(self, record: dict[str, float] | None) -> None:
        """Take the state of a checkpoint; one that was not made in fp16 has none."""
        if self.in_use and record is not None:
            self.value, self.good_steps = float(record["value"]), int(record["good_steps"])

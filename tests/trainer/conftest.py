"""The fixtures of the trainer's tests; tiny_training.py has them, and what tests call themselves."""

from tests.trainer.tiny_training import data, train

__all__ = ["data", "train"]

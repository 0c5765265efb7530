"""Provides the fixtures that all trainer tests share; tests/trainer/tiny_training.py defines them."""

from tests.trainer.tiny_training import data, train

__all__ = ["data", "train"]

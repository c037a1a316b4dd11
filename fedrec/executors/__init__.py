"""Executors: how the updates of a round's clients are computed."""

from fedrec.executors.base import Executor
from fedrec.executors.sequential import SequentialExecutor
from fedrec.executors.vectorized import VectorizedExecutor

__all__ = ["Executor", "SequentialExecutor", "VectorizedExecutor"]

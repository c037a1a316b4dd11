"""Generators of random numbers that a data set holds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec.clients.state import GENERATORS, LEAVES
from fedrec.random import key

__all__ = ["held_generators", "held_restored", "seed_held"]

# Longer lists hold samples.
_MOST_ENTRIES = 100
_LEAVES = (*LEAVES, Tensor, np.ndarray)


def held_generators(*values: Any) -> list[Any]:
    """Return the generators that these objects hold, and the objects in them, in a fixed order.

    Those are `torch.Generator`, `numpy.random.Generator`, `numpy.random.RandomState` and
    `random.Random`, as attributes (of a transform, say), in short lists and dicts, or in variables
    that a function shares with the one it was made in.

    Args:
        *values: Data sets, functions.

    Examples:
        >>> transforms = [str, random.Random(0)]
        >>> [type(g).__name__ for g in held_generators({"transforms": transforms})]
        ['Random']
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = deque(values)
    while waiting:
        value = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in GENERATORS:
            found.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values() if len(value) <= _MOST_ENTRIES else ())
        elif isinstance(value, (list, tuple, deque)):
            waiting.extend(value if len(value) <= _MOST_ENTRIES else ())
        elif isinstance(value, FunctionType):
            waiting.extend(c.cell_contents for c in value.__closure__ or () if _is_filled(c))
            waiting.extend(value.__defaults__ or ())
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif isinstance(value, partial):
            waiting.extend((value.func, value.args, value.keywords))
        elif hasattr(value, "__dict__"):
            waiting.extend(vars(value).values())
    return found


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises
    except ValueError:
        return False
    return True


@contextmanager
def held_restored(held: Sequence[Any]) -> Iterator[None]:
    """Leave these generators as they were found."""
    states = [GENERATORS[type(generator)][0](generator) for generator in held]
    try:
        yield
    finally:
        for generator, state in zip(held, states, strict=True):
            GENERATORS[type(generator)][1](generator, state)


def seed_held(
    held: Sequence[Any], seed: int, purpose: str, round: int = 0, client_id: str = ""
) -> None:
    """Make what these generators give a function of the other arguments, see `fedrec.random`."""
    for i, generator in enumerate(held):
        whole = key(seed, f"{purpose}-{i}", round, client_id)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(whole & (2**63 - 1))
        elif isinstance(generator, random.Random):
            generator.seed(whole)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(np.frombuffer(whole.to_bytes(16, "little"), dtype="<u4"))
        else:
            bits = generator.bit_generator
            bits.state = type(bits)(whole).state

"""The generators of random numbers that training may draw from: saved, seeded, put back.

Global generators are torch's, NumPy's and Python's `random`. Held generators are those that a data
set, its transforms or its `collate_fn` holds.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec.clients.state import GENERATORS, LEAVES
from fedrec.exceptions import ConfigurationError
from fedrec.random import key
from fedrec.types import RoundContext

__all__ = [
    "GlobalState",
    "generators_restored",
    "global_state",
    "held_generators",
    "held_restored",
    "put_global_state",
    "random_numbers",
    "seed_generators",
    "seed_held",
]

# The memory of NumPy's Mersenne Twister in bytes: its 624 words, then the position in them.
_WORDS, _BYTES = 4 * 624, 4 * 625
# A longer list or dict of a data set holds samples, not generators.
_MOST_ENTRIES = 100
_LEAVES = (*LEAVES, Tensor, np.ndarray)


@contextmanager
def random_numbers(ctx: RoundContext, client_id: str, held: Sequence[Any] = ()) -> Iterator[None]:
    """Make what local training draws (dropout, augmentation) a function of (seed, round, client).

    All generators are seeded on entry, and put back into their states on exit.

    Args:
        ctx: The round.
        client_id: The client that trains.
        held: The generators that its data set holds, see `held_generators`.
    """
    with generators_restored(ctx.device, held):
        seed_generators(ctx, client_id, held)
        yield


@contextmanager
def generators_restored(device: torch.device, held: Sequence[Any] = ()) -> Iterator[None]:
    """Put the global generators and the held ones back into their states on exit.

    Args:
        device: The device whose generator of torch is put back, besides that of the CPU.
        held: Generators that data sets hold, see `held_generators`.
    """
    devices = [] if device.type == "cpu" else [device]
    state = global_state()
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        try:
            with held_restored(held):
                yield
        finally:
            put_global_state(state)


def seed_generators(ctx: RoundContext, client_id: str, held: Sequence[Any] = ()) -> None:
    """Seed the global generators and the held ones for a client's training in a round.

    Args:
        ctx: The round.
        client_id: The client that trains.
        held: The generators that its data set holds, see `held_generators`.
    """
    purpose = "training" if ctx.batch_policy == "replay" else "training-fresh"
    number = key(ctx.seed, purpose, ctx.round, client_id)
    seed = number & (2**63 - 1)
    # `torch.manual_seed` would seed every device there could be, in half a millisecond.
    torch.default_generator.manual_seed(seed)
    if ctx.device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(number)
    np.random.seed(_seed_words(number))  # noqa: NPY002 - what the user's code may draw from
    seed_held(held, ctx.seed, f"{purpose}-held", ctx.round, client_id)


def _seed_words(number: int) -> np.ndarray:
    """Return a 128-bit number as four words, which NumPy's Mersenne Twister is seeded with."""
    return np.frombuffer(number.to_bytes(16, "little"), dtype="<u4")


def held_generators(*values: Any) -> list[Any]:
    """Return the random generators that objects hold, directly or by way of others, in fixed order.

    A generator is a `torch.Generator`, `numpy.random.Generator`, `numpy.random.RandomState` or
    `random.Random`. It is looked for in attributes (of a transform, say), in short lists and dicts,
    in default arguments of functions, and in variables that a function shares with the function it
    was made in.

    Args:
        *values: Data sets and functions.

    Examples:
        >>> transforms = [str, random.Random(0)]
        >>> [type(g).__name__ for g in held_generators({"transforms": transforms})]
        ['Random']
    """
    generators: list[Any] = []
    seen: set[int] = set()
    waiting = deque(values)
    while waiting:
        value = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in GENERATORS:
            generators.append(value)
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
    return generators


def _is_filled(cell: Any) -> bool:
    """Whether a variable that functions share has a value yet."""
    try:
        cell.cell_contents  # noqa: B018 - it raises
    except ValueError:
        return False
    return True


@contextmanager
def held_restored(held: Sequence[Any]) -> Iterator[None]:
    """Put generators back into their states on exit."""
    states = [GENERATORS[type(generator)][0](generator) for generator in held]
    try:
        yield
    finally:
        for generator, state in zip(held, states, strict=True):
            GENERATORS[type(generator)][1](generator, state)


def seed_held(
    held: Sequence[Any], seed: int, purpose: str, round: int = 0, client_id: str = ""
) -> None:
    """Seed each of the generators by its place and the other arguments, see `fedrec.random`."""
    for i, generator in enumerate(held):
        number = key(seed, f"{purpose}-{i}", round, client_id)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number & (2**63 - 1))
        elif isinstance(generator, random.Random):
            generator.seed(number)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(_seed_words(number))
        else:
            bits = generator.bit_generator
            bits.state = type(bits)(number).state


@dataclass(frozen=True)
class GlobalState:
    """The state of Python's `random` and of NumPy's global generator.

    Args:
        python: What `random.getstate` returns.
        words: The memory of NumPy's Mersenne Twister.
        waiting: A normal number that NumPy has drawn already and gives out next; `None` if there is
            none. NumPy draws normal numbers in pairs.
    """

    python: tuple[Any, ...]
    words: bytes
    waiting: float | None


def global_state() -> GlobalState:
    """Return the states of NumPy's and Python's global generators, without changing them.

    Examples:
        >>> state = global_state()
        >>> first = random.random(), np.random.standard_normal()
        >>> put_global_state(state)
        >>> (random.random(), np.random.standard_normal()) == first
        True
        >>> put_global_state(state)
        >>> global_state() == state
        True
    """
    # `np.random.get_state` and `set_state` each take as long as a layer of a small model.
    words = _words()
    state = GlobalState(random.getstate(), words, _take_waiting(words))
    if state.waiting is None:
        _put_words(words)
    else:
        _put_numpy(state)
    return state


def put_global_state(state: GlobalState) -> None:
    """Put NumPy's and Python's global generators into a state."""
    random.setstate(state.python)
    _put_numpy(state)


def _put_numpy(state: GlobalState) -> None:
    if state.waiting is None:
        _take_waiting(_words())
        _put_words(state.words)
        return
    key = np.frombuffer(state.words[:_WORDS], dtype=np.uint32)
    position = int(np.frombuffer(state.words[_WORDS:], dtype=np.int32)[0])
    np.random.set_state(("MT19937", key, position, 1, state.waiting))  # noqa: NPY002


def _take_waiting(words: bytes) -> float | None:
    """Return the normal number that NumPy has drawn already, or `None`; then none is waiting.

    The words of NumPy's generator, which are given, may change.
    """
    number = np.random.standard_normal()  # noqa: NPY002
    if _words() == words:  # nothing was drawn now: the number was waiting
        return number
    np.random.standard_normal()  # noqa: NPY002 - the second of the pair
    return None


def _put_words(words: bytes) -> None:
    """Write to the memory of NumPy's global generator."""
    ctypes.memmove(_address_of(_generator()), words, _BYTES)


def _words() -> bytes:
    """Copy the memory of NumPy's global generator."""
    return ctypes.string_at(_address_of(_generator()), _BYTES)


def _generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _address_of(generator: Any) -> int:
    if type(generator) is not np.random.MT19937:
        raise ConfigurationError(
            f"Expected NumPy's global generator to be an MT19937, but got {generator!r}. "
            "HINT: hand another one to what draws from it; leave `np.random.set_bit_generator`."
        )
    address: int = generator.ctypes.state_address
    return address

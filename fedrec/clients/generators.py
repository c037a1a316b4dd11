"""The random generators that a user's code may draw from without being given one."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedrec.exceptions import ConfigurationError

__all__ = ["GlobalState", "global_state", "put_global_state"]

# Of NumPy's Mersenne Twister: its 624 words, and the position in them.
_WORDS, _BYTES = 4 * 624, 4 * 625


@dataclass(frozen=True)
class GlobalState:
    """The state of Python's `random` and of NumPy's global generator.

    Args:
        python: What `random.getstate` returns.
        words: The memory of NumPy's Mersenne Twister.
        waiting: The normal number that NumPy has drawn and not given out: it draws them in pairs.
    """

    python: tuple[Any, ...]
    words: bytes
    waiting: float | None


def global_state() -> GlobalState:
    """Return the state of both generators, which stay as they are.

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
    # `np.random.get_state` takes as long as a whole layer of a small model, and setting it, too.
    words = _words()
    state = GlobalState(random.getstate(), words, _take_waiting())
    _put_numpy(state)
    return state


def put_global_state(state: GlobalState) -> None:
    """Put both generators into a state."""
    random.setstate(state.python)
    _put_numpy(state)


def _put_numpy(state: GlobalState) -> None:
    if state.waiting is None:
        _take_waiting()
        ctypes.memmove(_address_of(_generator()), state.words, _BYTES)
        return
    key = np.frombuffer(state.words[:_WORDS], dtype=np.uint32)
    position = int(np.frombuffer(state.words[_WORDS:], dtype=np.int32)[0])
    np.random.set_state(("MT19937", key, position, 1, state.waiting))  # noqa: NPY002


def _take_waiting() -> float | None:
    """Leave no number waiting; return the one that was. The words may change."""
    words = _words()
    number = np.random.standard_normal()  # noqa: NPY002
    if _words() == words:  # it had been drawn before
        return number
    np.random.standard_normal()  # noqa: NPY002 - the other one of the pair
    return None


def _words() -> bytes:
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

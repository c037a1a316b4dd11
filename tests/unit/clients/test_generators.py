from __future__ import annotations

import random

import numpy as np
import pytest

from fedrec.clients.generators import global_state, put_global_state
from fedrec.exceptions import ConfigurationError

# ruff: noqa: NPY002 - NumPy's global generator is what is tested


def numpy_state() -> tuple[object, ...]:
    kind, words, position, is_waiting, number = np.random.get_state()
    return kind, words.tolist(), position, is_waiting, number


@pytest.mark.parametrize("drawn", [0, 1, 2, 3], ids="{} drawn".format)
def test_reading_the_state_changes_nothing_and_all_of_it_is_put_back(drawn: int) -> None:
    random.seed(4)
    np.random.seed(3)
    for _ in range(drawn):
        random.gauss(0, 1)
        np.random.randn()
    before = numpy_state(), random.getstate()
    assert before[0][3] == drawn % 2  # they are drawn in pairs
    state = global_state()
    assert (numpy_state(), random.getstate()) == before
    assert state == global_state()
    for after in range(4):
        random.seed(5)
        np.random.seed(5)
        for _ in range(after):
            np.random.randn()
        put_global_state(state)
        assert (numpy_state(), random.getstate()) == before


def test_taking_the_waiting_number_changes_the_state_though_no_word_does() -> None:
    np.random.seed(3)
    np.random.randn()
    before = global_state()
    np.random.randn()
    assert global_state() != before
    assert global_state().words == before.words


def test_another_generator_of_numpy_is_refused_by_name() -> None:
    own = np.random.get_bit_generator()
    state = np.random.get_state()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(ConfigurationError, match="to be an MT19937, but got"):
            global_state()
    finally:
        np.random.set_bit_generator(own)
        np.random.set_state(state)

"""Keyed generators: which numbers they give is part of the format of a recording."""

import copy
import pickle

import numpy as np
import pytest

from fedrec.random import key, numpy_generator, reused_generator


@pytest.mark.parametrize("round", [0, 7])
@pytest.mark.parametrize("client_id", ["", "client-3", "ä"])
def test_numpy_generators_are_philox_with_the_key(round: int, client_id: str) -> None:
    four = (5, "batch", round, client_id)
    found = numpy_generator(*four)
    expected = np.random.Generator(np.random.Philox(key=key(*four)))
    np.testing.assert_array_equal(found.permutation(100), expected.permutation(100))
    np.testing.assert_array_equal(found.standard_normal(7), expected.standard_normal(7))


def test_a_reused_generator_keeps_nothing_of_what_was_drawn_before() -> None:
    for t in range(20):
        found = reused_generator(1, "batch", t, "a")
        expected = numpy_generator(1, "batch", t, "a")
        np.testing.assert_array_equal(found.permutation(68), expected.permutation(68))
        # It leaves half of a 64-bit number, and three numbers of a block of four, behind.
        assert found.integers(7, dtype=np.uint32) == expected.integers(7, dtype=np.uint32)
        assert found.random() == expected.random()


def test_draws_of_a_recording_do_not_change_between_versions() -> None:
    draw = numpy_generator(0, "batch", round=3, client_id="client-1").permutation(10)
    assert draw.tolist() == [1, 2, 3, 7, 0, 5, 6, 9, 4, 8]


def test_generators_can_be_copied_and_pickled() -> None:
    generator = numpy_generator(1, "partition")
    generator.random()
    for other in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
        assert other.bit_generator.state["state"]["key"].tolist() == (
            generator.bit_generator.state["state"]["key"].tolist()
        )
        assert other.random() == copy.deepcopy(generator).random()
